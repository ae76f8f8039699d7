"""Costs that all ranks pay alike, and that need neither a peer nor a healthy past to be seen: time that a training step
has no use for, whatever the model.

A device that falls idle after a read-back, memory that is asked of the device in each step, launches that wait for
their kernels: what these take can be read off one window. Only that is told here, and only where it costs as much as a
slowdown would have to; what else a job could do faster is advice (`diagnosis`). Blames nobody. Used by `diagnosis`
where no healthy past is known: with one, `levels` tells what has come since.
"""

from __future__ import annotations

import numpy as np

from eroica.blame import Excess
from eroica.causes import BLOCKING, LAUNCHING, Cause, launches_block
from eroica.collectives import Float64s
from eroica.critical_path import Activity
from eroica.pattern import Stacked

STANDING_EFFECT = 0.05
"""Share of the iteration without it that such a cost must reach: as much as makes a level slow (`pace.EFFECT`). Reading
a loss back, once and at the end of a step, costs a well-tuned job 1 % (seen in synthetic ones), which is its choice."""
MEASURED = 0.8
"""Part of the effect that must be seen: launches that fill the queue again begin before the first kernel does. In
synthetic jobs a tenth is not seen."""
ON_MOST_RANKS = 0.25
"""The quantile over ranks that must pay it: three of four do. What fewer pay is a difference between ranks."""
BLOCKING_EFFECT = 0.02
"""The same for launches that block: a setting for debugging, which nobody wants to pay for at all."""
_STANDING = {
    Activity.SYNC: Cause(
        "device_sync",
        True,
        "the device is idle after a host call that waited for it to drain; the wait itself is not counted",
        (),
    ),
    Activity.ALLOCATOR: Cause(
        "memory_allocator",
        True,
        "in each step memory is asked of the device, or given back to it: a caching allocator that has found its size "
        "does neither",
        (),
    ),
}


def standing_costs(stacked: Stacked, iteration_s: float) -> list[Excess]:
    """What all ranks pay in each step, by what it is."""
    if len(stacked) < 2:
        return []
    everyone = np.arange(len(stacked), dtype=np.intp)
    seconds = stacked.activity_beta * stacked.iteration_s[:, None]
    found = []
    if launches_block(stacked, everyone):
        spent = seconds[:, sorted(LAUNCHING)].sum(axis=1)
        if _paid(spent) >= BLOCKING_EFFECT * (iteration_s - _paid(spent)):
            top = _longest(stacked, LAUNCHING)
            cost = float(np.median(spent))
            found.append(
                Excess(everyone, "all", "stable", Activity.LAUNCH, top, cost, 1.0, 1.0, BLOCKING, is_level=True)
            )
    for activity, cause in _STANDING.items():
        paid = _paid(seconds[:, activity])
        if paid >= MEASURED * STANDING_EFFECT * (iteration_s - paid):
            cost = float(np.median(seconds[:, activity]))
            top = _longest(stacked, frozenset({activity}))
            found.append(Excess(everyone, "all", "stable", activity, top, cost, 1.0, 1.0, cause, is_level=True))
    return found


def _paid(seconds: Float64s) -> float:
    """By three ranks of four at least."""
    return float(np.quantile(seconds, ON_MOST_RANKS))


def _longest(stacked: Stacked, activities: frozenset[Activity]) -> int | None:
    columns = [k for k, f in enumerate(stacked.functions) if f.activity in activities]
    middle = np.median(stacked.beta * stacked.iteration_s[:, None], axis=0)
    return max(columns, key=lambda k: float(middle[k]), default=None)
