"""python -m bench.samplers: what one read of this host's counters costs for eight ranks of forty threads each.

The ranks are processes that sleep; reading them costs the same as if they worked. CPU time is what the agent takes from
the host, wall time what its loop is held up; both by the median of all reads and of the dearest tenth, in which what
changes slowly is looked at.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from bench import machine
from eroica.samplers import Rank, Reading, open_samplers

RANKS, THREADS, READS, PAUSE_S = 8, 40, 100, 0.1
TARGET_MS = 5.0
SLEEPER = """
import sys, threading
for _ in range(int(sys.argv[1]) - 1): threading.Thread(target=threading.Event().wait, daemon=True).start()
print(flush=True)
sys.stdin.read()
"""


def main(arguments: Sequence[str]) -> int:
    """Print the table. Exit status 1 if a rank is not read."""
    command = [sys.executable, "-c", SLEEPER, str(THREADS)]
    ranks = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(RANKS)]
    try:
        for process in ranks:
            assert process.stdout is not None
            process.stdout.readline()
        watched = [Rank(k, process.pid) for k, process in enumerate(ranks)]
        samplers, missing = open_samplers()
        print(f"{RANKS} ranks of {THREADS} threads, {READS} reads {PAUSE_S:g} s apart; ms per read")
        print(f"{'sampler':<10}{'targets':>9}{'cpu':>9}{'dearest':>9}{'wall':>9}{'dearest':>9}{'target':>9}")
        for name, sampler in samplers.items():
            cpu_ms, wall_ms, last = [], [], Reading({})
            for _ in range(READS):
                cpu_ns, wall_ns = time.process_time_ns(), time.perf_counter_ns()
                last = sampler.read(time.monotonic_ns(), watched)
                wall_ms.append((time.perf_counter_ns() - wall_ns) / 1e6)
                cpu_ms.append((time.process_time_ns() - cpu_ns) / 1e6)
                time.sleep(PAUSE_S)
            if name == "host" and sum(target.kind == "rank" for target in last.values) != RANKS:
                print("bench.samplers: not all ranks were read", file=sys.stderr)
                return 1
            figures = [f(values) for values in (cpu_ms, wall_ms) for f in (statistics.median, _dearest)]
            print(f"{name:<10}{len(last.values):>9}" + "".join(f"{figure:>9.2f}" for figure in (*figures, TARGET_MS)))
        for one in missing:
            print(f"{one.name:<10}not measured: {one.reason}")
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    print(machine.processor())
    return 0


def _dearest(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return statistics.median(ordered[len(ordered) * 9 // 10 :])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
