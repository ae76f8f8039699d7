"""python -m bench.taxonomy_live: are the modes of lost scaling told right in jobs that run?

Eight gloo ranks on four hosts of network namespaces (`taxonomy_job`), with one mode planted or none, profiled by torch
alone; `eroica.scaling.account` has to name that mode and no other. Work is a sleep in place of a device. Needs root,
iproute2 and torch; some 20 s for each job.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile

from bench import machine
from bench.measure import ROOT
from eroica.offline import stack_paths
from eroica.scaling import Account, Part, account

PLANTED = ("nothing", "synchronisation", "contention", "locality", "imbalance", "straggler")
WANTED = 0.95
LIMIT_S = 120


def tell(mode: str, seed: int) -> Account:
    """Train, read the traces, account."""
    with tempfile.TemporaryDirectory(prefix="bench-taxonomy-") as folder:
        words = [sys.executable, "-m", "bench.taxonomy_job", mode, str(seed), folder]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, cwd=ROOT, env=environment, timeout=LIMIT_S, check=False)
        if done.returncode:
            raise SystemExit(f"bench.taxonomy_live: the job ended with status {done.returncode}")
        stacked, _ = stack_paths([folder], jobs=os.cpu_count() or 1)
    told = account(stacked)
    assert told is not None
    return told


def main() -> int:
    """Run and print; exit status 1 where fewer than 95 % are right."""
    parser = argparse.ArgumentParser(prog="python -m bench.taxonomy_live", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--only", default="", choices=("", *PLANTED), metavar="MODE")
    options = parser.parse_args()
    right = total = 0
    print(
        "| planted | seed | iteration | named | parts of 3 % and more |\n| --- | ---: | ---: | --- | --- |", flush=True
    )
    for mode in PLANTED if not options.only else (options.only,):
        for seed in range(options.seeds):
            told = tell(mode, seed)
            is_right = tuple(told.modes) == (() if mode == "nothing" else (Part(mode),))
            if mode == "straggler":
                is_right = is_right and told.stragglers == (seed % told.num_ranks,)
            right, total = right + is_right, total + 1
            whole_s = told.iteration_s.seconds
            parts = ", ".join(
                f"{part.value} {share.seconds / whole_s:.0%}"
                for part, share in told.parts.items()
                if share.seconds >= 0.03 * whole_s
            )
            named = " + ".join(part.value for part in told.modes) or "nothing"
            print(f"| {mode} | {seed} | {whole_s * 1e3:.1f} ms | {named} | {parts} |", flush=True)
    print(f"\nright: {right} of {total} ({right / total:.1%})")
    print("\n".join(f"- {key}: {value}" for key, value in machine.facts({}).items()))
    return 0 if right >= WANTED * total else 1


if __name__ == "__main__":
    raise SystemExit(main())
