"""python -m bench.taxonomy: are the modes of lost scaling told right where the truth is known?

Simulated trainings of 16 or 32 hosts with one mode planted, or two, or none, on a fabric that is otherwise ample and
quiet; each is reduced to the summaries that its ranks would send, and `eroica.scaling.account` has to name the modes.
What a planted mode costs is found by simulating the same job without it: two modes hide each other (who is late while
all wait for the network costs nothing), and a burst may miss a short window. Right is an answer that names all modes
that cost 5 % of the iteration or more, and none that was not planted or costs less than 1 %.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from itertools import combinations

import numpy as np

from eroica.fabric.parameters import Background, Fabric, Host, Noise, Setting, Stalls
from eroica.fabric.simulator import simulate
from eroica.pattern import stack
from eroica.scaling import MODES, Account, Part, account
from eroica.simulation import summaries

WANTED = 0.95
MATTERS, IS_THERE = 0.05, 0.01
"""Shares of the iteration: to be named; may be named."""


def planted(modes: frozenset[Part], hosts: int, rng: np.random.Generator) -> Setting:
    """A job with these modes and no other."""
    ranks = hosts * Host().gpus
    has_contention = Part.CONTENTION in modes
    return Setting(
        hosts=hosts,
        host=Host(far_slots=(4, 5, 6, 7) if Part.LOCALITY in modes else (), far_slowdown=0.15),
        fabric=Fabric() if has_contention else Fabric(oversubscription=1.0, packed=True, spread=True),
        noise=Noise(
            scatter=0.005,
            stalls=Stalls(rate=0.5 / ranks) if Part.SYNCHRONISATION in modes else None,
            background=Background(neighbours=2.0) if has_contention else None,
            imbalance=0.12 if Part.IMBALANCE in modes else 0.0,
            straggler=int(rng.integers(ranks)) if Part.STRAGGLER in modes else None,
            straggler_slowdown=0.25,
        ),
    )


def tell(modes: frozenset[Part], seed: int, iterations: int = 64) -> tuple[Account, dict[Part, float]]:
    """Simulate, reduce, account; and what each planted mode costs, as a share of the iteration."""
    key = (seed, *sorted(MODES.index(m) for m in modes))
    hosts = int(np.random.default_rng(key).choice([16, 32]))
    run = simulate(planted(modes, hosts, np.random.default_rng(key)), iterations, seed)
    told = account(stack(summaries(run)))
    assert told is not None
    mean = float(run.length_s.mean())
    costs = {}
    for mode in modes:
        without = simulate(planted(modes - {mode}, hosts, np.random.default_rng(key)), iterations, seed, detail=1)
        costs[mode] = 1 - float(without.length_s.mean()) / mean
    return told, costs


def is_right(said: frozenset[Part], costs: dict[Part, float]) -> bool:
    """All that matter, and nothing that does not."""
    return all(m in said for m, cost in costs.items() if cost >= MATTERS) and all(
        costs.get(m, 0.0) >= IS_THERE for m in said
    )


def cases() -> Iterator[frozenset[Part]]:
    """None, each alone, each pair."""
    for size in (0, 1, 2):
        for some in combinations(MODES, size):
            yield frozenset(some)


def main() -> int:
    """Run and print; exit status 1 where fewer than 95 % are right."""
    parser = argparse.ArgumentParser(prog="python -m bench.taxonomy", description=__doc__)
    parser.add_argument("--seeds", type=int, default=50, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--only", default="", metavar="MODE", help="cases with this mode alone")
    options = parser.parse_args()
    right = total = 0
    worst = 1.0
    print("| planted | cost, mean | right | said instead |\n| --- | ---: | ---: | --- |")
    for modes in cases():
        if options.only and modes != frozenset({Part(options.only)}):
            continue
        wrong: Counter[str] = Counter()
        cost: Counter[Part] = Counter()
        for seed in range(options.first, options.first + options.seeds):
            told, costs = tell(modes, seed)
            said = frozenset(told.modes)
            for mode, share in costs.items():
                cost[mode] += share / options.seeds
            if not is_right(said, costs):
                wrong[_named(said)] += 1
        good = options.seeds - wrong.total()
        right, total, worst = right + good, total + options.seeds, min(worst, good / options.seeds)
        instead = "; ".join(f"{name} ({n})" for name, n in wrong.most_common())
        each = ", ".join(f"{cost[m]:.0%}" for m in MODES if m in modes)
        print(f"| {_named(modes)} | {each} | {good}/{options.seeds} | {instead} |", flush=True)
    print(f"\nright: {right} of {total} ({right / total:.1%}), worst case {worst:.0%}")
    return 0 if right >= WANTED * total else 1


def _named(modes: frozenset[Part]) -> str:
    return " + ".join(m.value for m in MODES if m in modes) or "nothing"


if __name__ == "__main__":
    raise SystemExit(main())
