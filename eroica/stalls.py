"""Single steps in which the network stalls: all ranks stand in communication for long, and none works.

Not transfers that are always slow (`network`, whose lanes and records it uses). Used by `diagnosis`.
"""

from __future__ import annotations

import numpy as np

from eroica.context import Recurrence
from eroica.network import SlowTransfer, lanes_of
from eroica.pattern import Stacked

STALL = 1.5
"""A step in which nobody works sticks out if it lasts for so many usual ones, as in `context.SLOW_STEP`."""
FEW_STALLS = 3
"""Fewer are hiccups, unless the series says that they recur."""


def stalls(stacked: Stacked, recurrence: Recurrence | None, iteration_s: float) -> SlowTransfer | None:
    """Single steps in which all ranks stand in communication for long and none works: the network stalled, not a rank.

    For jobs on several hosts: on one host whatever takes its cores does the same. None if there are no such steps, or
    too few to be more than hiccups.
    """
    if len(set(stacked.hosts) - {""}) < 2 or stacked.own_s.shape[1] < 4:
        return None
    # NaN where one of the ranks does not tell of the step: it may be the one that works.
    together = np.min(stacked.exposed_s + stacked.waiting_s, axis=0)
    if np.isnan(together).all():
        return None
    usual = float(np.nanmedian(together))
    excess = np.nan_to_num(together - usual)
    hit = np.flatnonzero(excess > (STALL - 1) * iteration_s)
    if len(hit) < FEW_STALLS:
        known = recurrence.steps if recurrence is not None else np.empty(0, np.int64)
        hit = hit[np.isin(stacked.steps[hit], known)]
    if not len(hit):
        return None
    crossing = [lane for lane in lanes_of(stacked) if len(lane.hosts) > 1]
    if not crossing:
        return None
    mean_s = float(excess[hit].sum()) / len(excess)
    period = recurrence.period if recurrence is not None else None
    return SlowTransfer(
        scope="group",
        hosts=(),
        channels=tuple(lane.channel for lane in crossing),
        ranks=np.unique(np.concatenate([lane.ranks for lane in crossing])),
        seconds=mean_s,
        ratio=float(np.median(together[hit]) / max(usual, 1e-9)),
        reference="other steps",
        on_one_host=False,
        undecided="durations alone do not tell which host or link stalls",
        steps=f"every {period}" if period else "rotating",
        share_of_steps=len(hit) / len(excess),
    )
