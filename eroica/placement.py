"""Whose contention for cores it is: that of the ranks which show it, or that of a host which lets its ranks meet.

Where ranks share fewer cores than they are, the slow ones are those that happen to run beside each other, and in the
next window others do. To name the ranks of one window would be wrong then: the finding is the host's. What only comes
with the cores of some ranks leaves it with these: a program that is not of the job, or that others are as crowded and
none of them is slow. Used by `diagnosis`.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

import numpy as np

from eroica.context import Context
from eroica.draft import Draft
from eroica.findings import Evidence
from eroica.job import format_ranks
from eroica.pattern import Stacked
from eroica.samplers.standout import HOG_CORES, SharedCores

RUNNABLE = "runnable_per_core"


def placed(stacked: Stacked, drafts: Sequence[Draft], context: Context) -> list[Draft]:
    """The drafts, those of contention given to the hosts whose it is; of several for one host the dearest stays."""
    kept: list[Draft] = []
    told: set[tuple[str, ...]] = set()
    # Together: the excess of one rank may stand in several drafts, and who is slow is asked of a host's cores once.
    slow = {rank for draft in drafts if _is_contention(draft) for rank in stacked.ranks[draft.ranks].tolist()}
    for draft in sorted(drafts, key=lambda d: -(d.impact.seconds_per_iteration or 0.0)):
        if _is_contention(draft):
            ranks = set(stacked.ranks[draft.ranks].tolist())
            groups = [group for group in context.shared_cores if ranks & set(group.ranks)]
            if groups and all(_is_of_host(group, slow, stacked, context) for group in groups):
                made = _of_hosts(stacked, draft, groups)
                if made.hosts in told:
                    continue
                told.add(made.hosts)
                draft = made
        kept.append(draft)
    return kept


def _is_contention(draft: Draft) -> bool:
    """Ranks that want for a core, be they called by their numbers or by their host."""
    return draft.cause.cause == "cpu_contention" and draft.scope in ("rank", "host") and len(draft.ranks) > 0


def _is_of_host(group: SharedCores, slow: Set[int], stacked: Stacked, context: Context) -> bool:
    """Who of the group is slow is chance: it does not come with the cores of this group, as where all of its ranks are
    slow and no rank of another one that is as crowded."""
    crowded = len(group.ranks) / group.num_cores
    if set(group.ranks) <= slow and any(
        other.host == group.host and len(other.ranks) / other.num_cores >= crowded and not slow & set(other.ranks)
        for other in context.shared_cores
    ):
        return False
    everyone = {
        rank for rank, host in zip(stacked.ranks.tolist(), stacked.hosts, strict=True) if host in (group.host, "")
    }
    is_whole = everyone <= set(group.ranks)
    if len(group.ranks) < 2 or (group.strangers >= HOG_CORES and not is_whole):
        return False
    busy = any(o.name == RUNNABLE and o.host == group.host for o in context.counters)
    return len(group.ranks) > group.num_cores or (busy and is_whole)


def _of_hosts(stacked: Stacked, draft: Draft, groups: Sequence[SharedCores]) -> Draft:
    hosts = tuple(sorted({stacked.hosts[row] for row in draft.ranks} - {""}))
    rows = [row for row, host in enumerate(stacked.hosts) if host in hosts] or draft.ranks.tolist()
    seen = format_ranks(stacked.ranks[draft.ranks].tolist())
    shared = "; ".join(
        f"ranks {format_ranks(group.ranks)} share {group.num_cores} core{'s' if group.num_cores > 1 else ''}"
        + (f" of {group.host}" if group.host else "")
        for group in groups
    )
    text = (
        f"{shared}: who runs beside whom is chance, so that the ranks slowed in this window ({seen}) are not the cause"
    )
    return replace(
        draft,
        scope="host",
        ranks=np.array(rows, np.intp),
        hosts=hosts,
        evidence=(*draft.evidence, Evidence(text, "counters", {"ranks": seen})),
    )
