"""python -m bench.taxonomy_live: are the modes of lost scaling told right in jobs that run?

Six gloo ranks on three hosts of network namespaces (`taxonomy_job`), with one mode planted or none, profiled by torch
alone. Right is where `eroica.scaling.account` finds 3 % of the iteration for that mode beyond what it finds in the
same job without it, and for no other: six ranks on two cores lose some time by themselves, and that is told as well.
Work is a sleep in place of a device. Needs root, iproute2 and torch; some 25 s for each job, of which each seed has
seven.
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
from eroica.scaling import MODE_FLOOR, MODES, Account, Part, account

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


def extra(told: Account, usual: Account) -> dict[Part, float]:
    """Modes, with what they cost beyond what they cost in the job without a planted one; shares of the iteration."""
    whole_s = told.iteration_s.seconds
    costs = {mode: (told.parts[mode].seconds - usual.parts[mode].seconds) / whole_s for mode in MODES}
    return {mode: cost for mode, cost in costs.items() if cost >= MODE_FLOOR}


def main() -> int:
    """Run and print; exit status 1 where fewer than 95 % are right."""
    parser = argparse.ArgumentParser(prog="python -m bench.taxonomy_live", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    options = parser.parse_args()
    right = total = 0
    print("| planted | seed | iteration | modes beyond the job without | as told | right |", flush=True)
    print("| --- | ---: | ---: | --- | --- | --- |", flush=True)
    for seed in range(options.first, options.first + options.seeds):
        usual = tell("nothing", seed)
        for mode in PLANTED:
            told = tell(mode, seed)
            more = extra(told, usual)
            wanted = {Part(mode)} if mode != "nothing" else set()
            is_right = set(more) == wanted and (mode != "straggler" or told.stragglers == (seed % told.num_ranks,))
            right, total = right + is_right, total + 1
            shown = ", ".join(f"{part.value} {share:.0%}" for part, share in more.items()) or "none"
            whole_s = told.iteration_s.seconds
            named = ", ".join(f"{part.value} {told.parts[part].seconds / whole_s:.0%}" for part in told.modes) or "none"
            yes = "yes" if is_right else "no"
            print(f"| {mode} | {seed} | {whole_s * 1e3:.1f} ms | {shown} | {named} | {yes} |", flush=True)
    print(f"\nright: {right} of {total} ({right / total:.1%})")
    print("\n".join(f"- {key}: {value}" for key, value in machine.facts({}).items()))
    return 0 if right >= WANTED * total else 1


if __name__ == "__main__":
    raise SystemExit(main())
