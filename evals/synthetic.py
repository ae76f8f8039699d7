"""Runs the synthetic cases through the product and counts right answers and false blames.

    python -m evals.synthetic --ranks 8,64 --effects 2,5,10,20 --seeds 3 --json OUT
    python -m evals.synthetic --healthy 100 --case healthy

Each cluster takes the way of real input, less the file: `summarize` of every rank's columns, `stack`, `diagnose`. The
table is by effect size. Exit status is 1 if a fault of 10 % or more was missed or an innocent was blamed, so that CI
can lean on it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from eroica.context import Context
from eroica.diagnosis import diagnose
from eroica.findings import Diagnosis
from eroica.pattern import stack, summarize
from evals.cases_synth import BY_ID, CASES, EFFECTS, Case
from evals.score import Score, score
from evals.synth import Cluster, cluster


@dataclass(frozen=True, slots=True)
class Result:
    """One cluster's outcome."""

    case: str
    base: str
    ranks: int
    effect: float
    """0 in a control."""
    seed: int
    growth: float
    score: Score
    diagnosis: Diagnosis
    seconds: float


def diagnose_cluster(made: Cluster) -> Diagnosis:
    """The product's answer for a cluster."""
    stacked = stack([summarize(trace, samples) for trace, samples in made.traces()])
    if not made.case.baseline:
        return diagnose(stacked, Context())
    past = stack([summarize(trace, samples) for trace, samples in made.baseline()])
    return diagnose(stacked, Context(baseline=past))


def run_one(case: Case, *, ranks: int, effect: float, seed: int, base: str) -> Result:
    """Make, diagnose and judge one cluster."""
    began = time.perf_counter()
    made = cluster(case, world_size=ranks, effect=effect, seed=seed, base=base)
    diagnosis = diagnose_cluster(made)
    seconds = time.perf_counter() - began
    return Result(
        case.id, base, ranks, made.effect, seed, made.growth, score([diagnosis], made.truth), diagnosis, seconds
    )


def plan(
    cases: list[Case], ranks: list[int], effects: list[float], seeds: int, healthy: int
) -> Iterator[tuple[Case, int, float, int]]:
    """All clusters to be run: (case, ranks, effect, seed). Controls have no effect; `healthy` cases get more seeds."""
    for size in ranks:
        for case in cases:
            drawn = [0.0] if case.control else [e for e in case.effects if e in effects or case.effects != EFFECTS]
            count = max(seeds, healthy) if case.id == "healthy" else seeds
            for effect in drawn:
                for seed in range(count):
                    yield case, size, effect, seed


def table(results: list[Result]) -> str:
    """Detection and false blame by effect and by case."""
    lines = [f"{'effect':>8} {'ranks':>6} {'clusters':>9} {'found':>12} {'false blame':>12} {'cost ratio':>11}"]
    cells: dict[tuple[float, int], list[Result]] = defaultdict(list)
    for result in results:
        cells[result.effect, result.ranks].append(result)
    for (effect, ranks), group in sorted(cells.items()):
        found = [hit for result in group for hit in result.score.found]
        blamed = sum(bool(result.score.false_blames) for result in group)
        ratios = sorted(r for result in group for r in result.score.cost_ratio if r is not None)
        ratio = f"{ratios[len(ratios) // 2]:.2f}" if ratios else "-"
        name = f"{effect:.0%}" if effect else "control"
        share = f"{sum(found)}/{len(found)}" if found else "-"
        lines.append(f"{name:>8} {ranks:>6} {len(group):>9} {share:>12} {blamed:>8}/{len(group):<4}{ratio:>10}")
    for result in results:
        for near in result.score.near:
            lines.append(
                f"missed  {result.case} {result.base} ranks={result.ranks} effect={result.effect:.0%} "
                f"seed={result.seed}: {near}"
            )
        for blame in result.score.false_blames:
            lines.append(
                f"blamed  {result.case} {result.base} ranks={result.ranks} effect={result.effect:.0%} "
                f"seed={result.seed}: {blame}"
            )
    return "\n".join(lines)


def as_json(results: list[Result]) -> list[dict[str, object]]:
    """Results for machines; figures as measured."""
    return [
        {
            "case": r.case,
            "base": r.base,
            "ranks": r.ranks,
            "effect": r.effect,
            "seed": r.seed,
            "growth": r.growth,
            "found": r.score.found,
            "near": r.score.near,
            "false_blames": r.score.false_blames,
            "cost_ratio": r.score.cost_ratio,
            "verdict_right": r.score.verdict_right,
            "verdict": r.diagnosis.verdict.summary,
            "seconds": r.seconds,
        }
        for r in results
    ]


def passed(results: list[Result]) -> bool:
    """Every fault of at least 10 % found, nobody innocent blamed."""
    large = all(all(r.score.found) for r in results if r.effect >= 0.10)
    return large and not any(r.score.false_blames for r in results)


def main(arguments: list[str] | None = None) -> int:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m evals.synthetic", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", default="8", help="world sizes, comma separated")
    parser.add_argument("--effects", default="2,5,10,20", help="percent of the iteration, comma separated")
    parser.add_argument("--seeds", type=int, default=1, help="clusters per case, size and effect")
    parser.add_argument("--healthy", type=int, default=0, help="at least so many seeds of the case `healthy`")
    parser.add_argument("--base", action="append", help="bert, mi300 or the path of a Kineto trace; repeatable")
    parser.add_argument("--case", action="append", choices=sorted(BY_ID), help="this case only; repeatable")
    parser.add_argument("--json", help="write all results here")
    options = parser.parse_args(arguments)
    cases = [BY_ID[name] for name in options.case] if options.case else list(CASES)
    sizes = [int(part) for part in options.ranks.split(",")]
    effects = [float(part) / 100.0 for part in options.effects.split(",")]
    results = []
    for base in options.base or ["bert"]:
        for case, ranks, effect, seed in plan(cases, sizes, effects, options.seeds, options.healthy):
            result = run_one(case, ranks=ranks, effect=effect, seed=seed, base=base)
            results.append(result)
            sign = "." if result.score.right else "x"
            print(sign, end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    print(table(results))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(as_json(results), file, indent=1)
    return 0 if passed(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
