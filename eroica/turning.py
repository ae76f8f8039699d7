"""Where in a window the job became slow, if it did so within it.

A window may be asked for just before a fault sets in, for a lesser reason or none. Over its steps the median is then
that of the healthy part, and nothing seems to have grown. What is told by step can be cut: iterations and the joined
communications. Patterns are sums over the window and stay whole. Pure; used by `network`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from eroica.collectives import Joined
from eroica.intervals import Int64s
from eroica.pattern import Stacked

FEW = 4
"""Fewer steps on either side of a turn are hiccups, or the rest of them."""
LONGER = 1.25
"""Later steps are so much longer at the median; what noise does to half a window is less."""
CLEAN = 0.9
"""Share of the steps on either side that lie on their side of the middle between both levels."""


def turn_of(stacked: Stacked, usual_s: float) -> int | None:
    """The step from which on all are slow; None if the window is of one level, or did not begin at the usual one."""
    told = np.flatnonzero(~np.isnan(stacked.length_s).all(axis=0))
    lengths = np.nanmedian(stacked.length_s[:, told], axis=0)
    if len(lengths) < 2 * FEW:
        return None

    def left(at: int) -> float:
        return sum(float(np.abs(part - np.median(part)).sum()) for part in (lengths[:at], lengths[at:]))

    at = min(range(FEW, len(lengths) - FEW + 1), key=left)
    before, after = float(np.median(lengths[:at])), float(np.median(lengths[at:]))
    middle = (before + after) / 2
    is_clean = (lengths[:at] < middle).mean() >= CLEAN and (lengths[at:] > middle).mean() >= CLEAN
    if after < LONGER * before or not is_clean or before > (usual_s + after) / 2:
        return None
    return int(stacked.steps[told[at]])


def since(stacked: Stacked, step: int) -> Stacked:
    """The part from a step on, of all that is told by step."""
    kept = stacked.steps >= step
    return replace(
        stacked,
        steps=stacked.steps[kept],
        length_s=stacked.length_s[:, kept],
        own_s=stacked.own_s[:, kept],
        exposed_s=stacked.exposed_s[:, kept],
        waiting_s=stacked.waiting_s[:, kept],
        top_function=stacked.top_function[:, kept],
        top_excess_s=stacked.top_excess_s[:, kept],
        top_by_work=stacked.top_by_work[:, kept],
        joined=_since(stacked.joined, np.int64(step)),
    )


def _since(joined: Joined, step: np.int64) -> Joined:
    kept: Int64s = np.flatnonzero(joined.step >= step)
    number = np.full(len(joined.step), -1, np.int32)
    number[kept] = np.arange(len(kept), dtype=np.int32)
    rows = number[joined.which] >= 0
    return replace(
        joined,
        rank=joined.rank[rows],
        sample=joined.sample[rows],
        member=joined.member[rows],
        which=number[joined.which[rows]],
        exposed_s=joined.exposed_s[rows],
        wait_s=joined.wait_s[rows],
        exposed_wait_s=joined.exposed_wait_s[rows],
        transfer_s=joined.transfer_s[kept],
        members=joined.members[kept],
        channel=joined.channel[kept],
        step=joined.step[kept],
        position=joined.position[kept],
        kind=joined.kind[kept],
        check=joined.check[kept],
    )
