"""Runs one measurement in a fresh process and gathers many of them fairly.

A process of its own for each: no warm allocator, no leftover modules, and a peak of memory that belongs to this work
alone. Round-robin over the contenders: a busy neighbour or a slower clock meets all of them, and ratios are taken
within a round. Used by every part of `bench`; knows nothing of traces.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_ONE_THREAD = {
    name: "1"
    for name in (
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "ARROW_NUM_THREADS",
    )
}


class Failure(Exception):
    """A measurement that gave no answer or a wrong one."""


@dataclass(frozen=True, slots=True)
class Contender:
    """Something that can be measured: a command that prints one JSON object."""

    name: str
    command: tuple[str, ...]
    one_core: bool = True
    timeout_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class Spread:
    """Median of several rounds, with the extremes."""

    middle: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """At least one value."""
        return Spread(median(values), min(values), max(values))


@dataclass(slots=True)
class Series:
    """One contender's rounds: what its process printed each time."""

    name: str
    rounds: list[Mapping[str, Any]] = field(default_factory=list)
    problem: str = ""
    """Why there are no rounds."""

    def spread(self, key: str) -> Spread:
        """Of a number that each round printed."""
        return Spread.of([float(told[key]) for told in self.rounds])

    def ratio(self, other: Series, key: str) -> Spread:
        """`other` over this series in `key`, taken within each round: how many times less this one needs."""
        pairs = zip(other.rounds, self.rounds, strict=False)
        return Spread.of([float(theirs[key]) / float(ours[key]) for theirs, ours in pairs])


def run(contender: Contender) -> Mapping[str, Any]:
    """One measurement. Raises Failure with the last lines of stderr if the process fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "EROICA": "0", **(_ONE_THREAD if contender.one_core else {})}
    core = max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") and contender.one_core else None
    # The child pins itself, before it imports anything that starts threads; see `pinned`.
    if core is not None:
        environment["BENCH_CORE"] = str(core)
    try:
        done = subprocess.run(
            contender.command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=contender.timeout_s
        )
    except subprocess.TimeoutExpired:
        raise Failure(f"{contender.name}: not done after {contender.timeout_s:.0f} s") from None
    if done.returncode:
        raise Failure(
            f"{contender.name}: {' '.join(done.stderr.strip().splitlines()[-2:]) or f'exit {done.returncode}'}"
        )
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert isinstance(told, dict)
    return told


def interleave(contenders: Sequence[Contender], rounds: int, *, note: str = "") -> dict[str, Series]:
    """Each contender `rounds` times, in turn. One that fails drops out; the reason stays."""
    series = {contender.name: Series(contender.name) for contender in contenders}
    if len(series) < len(contenders):
        raise ValueError("interleave: two contenders have one name")
    for number in range(rounds):
        for contender in contenders:
            mine = series[contender.name]
            if mine.problem:
                continue
            progress(f"{note} round {number + 1}/{rounds}: {contender.name}")
            try:
                mine.rounds.append(run(contender))
            except Failure as failure:
                mine.problem = str(failure)
    progress("")
    return series


def progress(text: str) -> None:
    """What is being measured, on a terminal only."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text[:110]}")
        sys.stderr.flush()
