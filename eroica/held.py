"""Ranks that somebody outside stops again and again: a sampler of stacks, a debugger, signals.

A stopped process does nothing, whatever line it stands in, so its traces show other functions that take longer each
time: none of them is the cause. What proves it is the state of the process, read beside the window; its own share of
the time is what it costs. Not here: ranks that stay stopped (`hang`). Used by `diagnosis`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eroica.blame import Excess
from eroica.causes import Cause
from eroica.context import Context, Observation
from eroica.draft import Draft, readable_s
from eroica.findings import Evidence, Impact
from eroica.pattern import Stacked

STOPPED = "stopped_ratio"
TRACER = "tracer_pid"
HELD_SHARE = 0.12
"""A rank is held if it was found stopped in this share of the readings. A window has some twenty; one stop, as by a
person who takes one stack, shows in one of them."""
SAME_EXCESS = 2.0
"""Excesses of a held rank up to this many times the stopped time are its shadow: it is known by a few readings, and a
stop delays beyond its own end what waits for a turn."""


def held_drafts(stacked: Stacked, context: Context, iteration_s: float) -> list[Draft]:
    """One finding for each rank that is held."""
    told = {o.rank for o in context.counters if o.name == STOPPED and o.value >= HELD_SHARE}
    return [
        _draft(stacked, row, observed, context, iteration_s)
        for row, rank in enumerate(stacked.ranks.tolist())
        if rank in told and (observed := _of(context, rank, STOPPED)) is not None and observed.value >= HELD_SHARE
    ]


def beside(excesses: Sequence[Excess], held: Sequence[Draft]) -> list[Excess]:
    """The excesses that the stops do not explain."""
    lost_s = {int(draft.ranks[0]): draft.impact.seconds_per_iteration or 0.0 for draft in held}
    return [
        excess
        for excess in excesses
        if not len(excess.ranks)
        or not all(int(row) in lost_s and excess.seconds <= SAME_EXCESS * lost_s[int(row)] for row in excess.ranks)
    ]


def _of(context: Context, rank: int, name: str) -> Observation | None:
    return next((o for o in context.counters if o.rank == rank and o.name == name), None)


def _draft(stacked: Stacked, row: int, observed: Observation, context: Context, iteration_s: float) -> Draft:
    share = min(observed.value, 1.0)
    rank, lost_s = int(stacked.ranks[row]), share * iteration_s
    tracer = _of(context, rank, TRACER)
    by = f"process {tracer.value:.0f}, which traces it" if tracer is not None else "signals of another program"
    because = f"rank {rank} was found stopped {share:.0%} of the time, by {by}"
    told = [observed, *([tracer] if tracer is not None else [])]
    evidence = [
        Evidence(f"a stopped process loses {readable_s(lost_s)} per iteration, in whatever it stands", "ledger", {}),
        Evidence(because, "pattern", {}),
        *(Evidence(o.text, "counters", {"name": o.name, "value": o.value, "peers": o.peers}) for o in told),
    ]
    return Draft(
        Cause("profiler_overhead", True, because, ("the functions that it stands in: they vary with the stops",)),
        "rank",
        np.array([row], np.intp),
        tuple({stacked.hosts[row]} - {""}),
        "stable",
        None,
        Impact(lost_s, share, "ledger"),
        1.0,
        tuple(evidence),
    )
