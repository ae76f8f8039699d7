"""What simpler rules say about the same windows: what one would do without eroica, and what its peers do.

Each takes the traces that eroica saw and names ranks, or nobody. None tells causes, so they are judged by ranks alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eroica.critical_path import iterations_of
from eroica.trace import Trace, find_traces, read_all

STANDS_OUT = 1.05
"""A rank is slow from so many times the median on; eroica's floor is 5 % as well."""


@dataclass(frozen=True, slots=True)
class Naming:
    """What a rule says."""

    ranks: frozenset[int]
    """Empty = nobody."""


@dataclass(frozen=True, slots=True)
class Window:
    """One capture: a trace per rank."""

    traces: tuple[Trace, ...]


def windows_in(folder: Path) -> Iterator[Window]:
    """The captures that `eroica run --keep-captures` left, in the order of their making."""
    for capture in sorted(folder.glob("captures-*"), key=lambda path: path.stat().st_mtime):
        yield Window(tuple(read_all(find_traces([capture]))))


def slowest_step(window: Window) -> Naming:
    """The ranks whose iterations take longest."""
    medians = {
        trace.rank: float(np.median(lengths))
        for trace in window.traces
        if trace.rank is not None and len(lengths := np.diff(iterations_of(trace).bounds_ns))
    }
    usual = float(np.median(list(medians.values()))) if medians else 0.0
    return Naming(frozenset(rank for rank, length in medians.items() if length > STANDS_OUT * usual))


RULES: Mapping[str, Callable[[Window], Naming]] = {"slowest step": slowest_step}


def all_of(windows: Sequence[Window], world_size: int) -> dict[str, Naming | None]:
    """What each rule says about the last window (the one that the fault triggered); None where there is none."""
    if not windows or len(windows[-1].traces) < world_size:
        return dict.fromkeys(RULES)
    return {name: rule(windows[-1]) for name, rule in RULES.items()}
