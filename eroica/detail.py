"""The numbers behind a diagnosis that a page draws: who spent how much of an iteration on what.

Medians per rank and per group from stacked summaries, as `findings.Detail`. Used by `diagnosis` (waiting of each rank)
and through it by `report`. Nothing is decided here.
"""

from __future__ import annotations

import numpy as np

from eroica.collectives import Float64s
from eroica.draft import name_of
from eroica.findings import Detail
from eroica.job import format_ranks
from eroica.localization import Roles, nan_median
from eroica.pattern import Stacked

DETAIL_FUNCTIONS = 60
"""Functions that a page draws."""


def waits_of(stacked: Stacked) -> tuple[Float64s, Float64s]:
    """Waiting (joined collectives, receives, waits) and exposed transfer of each rank: medians, seconds per
    iteration."""
    joined = stacked.joined
    num = len(stacked)
    waited: Float64s = np.zeros(num)
    sampled: Float64s = np.zeros(num)
    if len(joined.rank):
        waited = np.bincount(joined.rank, weights=joined.exposed_wait_s, minlength=num).astype(np.float64)
        sampled = np.bincount(joined.rank, weights=joined.exposed_s, minlength=num).astype(np.float64)
    share = np.where(sampled > 0, waited / np.maximum(sampled, 1e-12), 0.0)
    total = nan_median(stacked.exposed_s, axis=1) if stacked.exposed_s.size else np.zeros(num)
    waiting = nan_median(stacked.waiting_s, axis=1) if stacked.waiting_s.size else np.zeros(num)
    return total * share + waiting, total * (1 - share)


def detail_of(stacked: Stacked, roles: Roles, waits: Float64s, transfer: Float64s) -> Detail:
    """What a page draws. `waits`, `transfer`: (W,) as `waits_of` gives them."""
    own = nan_median(stacked.own_s, axis=1) if stacked.own_s.size else np.zeros(len(stacked))
    length = nan_median(stacked.length_s, axis=1) if stacked.length_s.size else np.zeros(len(stacked))
    order = np.arange(min(len(stacked.functions), DETAIL_FUNCTIONS))
    joined = stacked.joined
    channels, first = np.unique(joined.channel, return_index=True)
    steps = np.zeros(len(channels), np.intp)
    transfers, waited = np.zeros(len(channels)), np.zeros(len(channels))
    members: list[str] = []
    if len(channels):
        # Both stand by channel and step.
        is_new = np.diff(joined.step, prepend=joined.step[0] - 1) != 0
        is_new[first] = True
        steps = np.add.reduceat(is_new, first, dtype=np.intp)
        transfers = np.add.reduceat(joined.transfer_s, first) / steps
        begin = np.searchsorted(joined.member_channel, channels)
        sizes = np.append(begin[1:], len(joined.member_channel)) - begin
        first_row = np.searchsorted(joined.which, first)
        waited = np.add.reduceat(joined.wait_s, first_row) / steps / np.maximum(sizes, 1)
        ranks = stacked.ranks[joined.member_rank]
        members = [format_ranks(ranks[at : at + size].tolist()) for at, size in zip(begin, sizes, strict=True)]
    labels = tuple(
        (
            f"{joined.channels[c].description}: {joined.channels[c].key}"
            if joined.channels[c].description
            else joined.channels[c].key
        )
        for c in channels
    )
    marked = len(stacked) > 0 and stacked.summaries[0].steps_by != "window"
    absent = stacked.beta[:, order]
    return Detail(
        ranks=stacked.ranks,
        hosts=stacked.hosts,
        roles=tuple(roles.names[r] for r in roles.of.tolist()),
        functions=tuple(name_of(stacked.functions[k]) for k in order),
        beta=np.where(absent > 0, absent, np.nan).astype(np.float32),
        mu=stacked.mu[:, order],
        own_s=own,
        wait_s=waits,
        transfer_s=transfer,
        idle_s=np.maximum(length - own - waits - transfer, 0.0),
        own_by_step_s=stacked.own_s.astype(np.float32),
        first_step=int(stacked.steps[0]) if marked and len(stacked.steps) else None,
        groups=labels,
        group_transfer_s=transfers,
        group_wait_s=waited,
        group_ranks=tuple(members),
    )
