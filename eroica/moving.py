"""A rank that is slow in a window and was not before: the slow one changes, more slowly than a window lasts.

Hot experts and places on a host move every few dozen steps; a window of some seconds then holds one slow rank, which
is no cause. What the flight rings tell of all steps since the onset shows it: in each step the others wait for the
slow rank, so it is the one that waits least. Where other ranks were that in many of the slow steps before the window,
and the rank of the window seldom, nobody is named. Needs collectives whose end can be seen from the host; without them
the window alone counts. Used by `diagnosis`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from eroica.collectives import Float64s
from eroica.context import Context, Series
from eroica.draft import Draft
from eroica.findings import Evidence
from eroica.intervals import Int64s
from eroica.job import format_ranks
from eroica.pattern import Stacked

FEW_STEPS = 12
"""Fewer slow steps outside of the window tell nothing."""
LEADS = 0.5
"""Part of an excess by which a rank must wait less than the rank that waits longest, to be the one waited for."""
SELDOM = 0.5
"""A rank at fault is waited for in more than this share of the slow steps."""
OTHERS = 0.25
"""And others are so, without it, in less than this share."""


def settled(stacked: Stacked, drafts: Sequence[Draft], context: Context) -> list[Draft]:
    """The drafts; those of single ranks that were not slow before the window name nobody."""
    steps, waited, ranks = _waits(context.series)
    slow = ~np.isin(steps, stacked.steps) & (steps >= (context.onset if context.onset is not None else 1 << 62))
    slow &= np.isfinite(waited).all(axis=0)
    if slow.sum() < FEW_STEPS or len(ranks) < 3:
        return list(drafts)
    return [_settled(stacked, draft, ranks, waited[:, slow]) for draft in drafts]


def _waits(series: Sequence[Series]) -> tuple[Int64s, Float64s, Int64s]:
    """Steps, (ranks, steps) seconds that each rank spent in collectives, ranks; NaN where that is not known."""
    told = [one for one in series if len(one.waited_s) == len(one.steps)]
    steps = (
        np.unique(np.concatenate([np.array(one.steps, np.int64) for one in told])) if told else np.empty(0, np.int64)
    )
    waited = np.full((len(told), len(steps)), np.nan)
    for row, one in enumerate(told):
        waited[row, np.searchsorted(steps, np.array(one.steps, np.int64))] = one.waited_s
    return steps, waited, np.array([one.rank for one in told], np.int64)


def _settled(stacked: Stacked, draft: Draft, ranks: Int64s, waited: Float64s) -> Draft:
    seconds = draft.impact.seconds_per_iteration
    if draft.scope != "rank" or draft.steps != "stable" or draft.function is None or not seconds:
        return draft
    mine = np.isin(ranks, stacked.ranks[draft.ranks])
    if not mine.any() or mine.all():
        return draft
    leads = waited.max(axis=0) - waited >= LEADS * seconds
    by_mine = leads[mine].any(axis=0)
    by_others = leads[~mine].any(axis=0) & ~by_mine
    if by_mine.mean() > SELDOM or by_others.mean() < OTHERS:
        return draft
    others = ranks[~mine][leads[~mine].any(axis=1)].tolist()
    window = format_ranks(stacked.ranks[draft.ranks].tolist())
    text = (
        f"before the window the others waited for rank {window} in {by_mine.mean():.0%} of {waited.shape[1]} slow "
        f"steps, and for ranks {format_ranks(others)} instead in {by_others.mean():.0%}: the slow rank changes, and "
        "the one of this window is not the cause"
    )
    return replace(
        draft,
        scope="rotating",
        ranks=draft.ranks[:0],
        hosts=(),
        steps="rotating",
        evidence=(*draft.evidence, Evidence(text, "ring", {"ranks_in_window": window, "steps": waited.shape[1]})),
    )
