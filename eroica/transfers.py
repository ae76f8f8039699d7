"""Slow transfers as findings in the making: which card, way, link or setting it is, as far as the evidence goes.

Durations say which groups are slow (`network`), connections and cards which way between hosts it is (`wires`), link
counters and settings what sets the ranks of these groups apart. What none of them tells stays open. Used by
`diagnosis`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from eroica.blame import Indices
from eroica.causes import Cause
from eroica.collectives import Float64s
from eroica.context import Context
from eroica.critical_path import Activity
from eroica.draft import Draft, device_of
from eroica.findings import Evidence, Impact
from eroica.impact import longer_s
from eroica.network import SlowTransfer
from eroica.pattern import Stacked
from eroica.settings import OF_THE_NETWORK, explaining, ranks_apart
from eroica.wires import Place, locate


def network_draft(
    stacked: Stacked, slow: SlowTransfer, iteration_s: float, waits: Float64s, context: Context | None = None
) -> Draft:
    """A slow transfer, priced. `waits`: (W,) seconds that each rank waits per iteration."""
    names = [stacked.joined.channels[c] for c in slow.channels]
    shown = ", ".join(f"{n.key} ({n.description})" if n.description else n.key for n in names[:4]) + (
        f" and {len(names) - 4} more" if len(names) > 4 else ""
    )
    groups = f"group{'s' if len(names) > 1 else ''} {shown}"
    if slow.steps == "stable":
        reference = "those of groups of the same shape" if slow.reference == "siblings" else "in the healthy window"
        when = "" if slow.since is None else f"from step {slow.since} of the window on "
        text = f"{when}transfers of {groups} take {slow.ratio:.2f} times as long as {reference}"
    else:
        text = (
            f"in {slow.share_of_steps:.0%} of the steps all ranks stand in communication at once, {slow.ratio:.1f} "
            f"times as long as in the others, and none works: {groups} stalled"
        )
    evidence = [Evidence(text, "ledger", {"ratio": slow.ratio, "exposed_excess_s": slow.seconds})]
    if slow.steps == "stable":
        text = "a transfer is the shortest duration among the members, so that no member's lateness is in it"
        evidence.append(Evidence(text, "ledger", {}))
    seconds = slow.seconds
    slowed = np.unique(np.concatenate([_members(stacked, c) for c in slow.channels]))
    rest = np.setdiff1d(np.arange(len(stacked)), slowed)
    if len(rest):
        # Part of a slow transfer may hide behind slack; what it costs is what the other ranks wait for these.
        seconds = min(seconds, max(float(np.median(waits[rest]) - np.median(waits[slowed])), 0.0))
    if slow.reference == "baseline" and context is not None:
        # What transfers take longer may fill time in which ranks waited for each other before.
        since_s = longer_s(context.baseline, iteration_s)
        if since_s is not None and since_s > 0:
            seconds = min(seconds, since_s)
    draft = Draft(
        _ledgers_cause(slow),
        slow.scope,
        slow.ranks,
        slow.hosts,
        slow.steps,
        _collective_function(stacked, slow),
        Impact(seconds, seconds / iteration_s if iteration_s else None, "ledger"),
        0.9 if not slow.undecided else 0.4,
        tuple(evidence),
        _link(stacked, slow),
        slow,
    )
    if context is not None:
        configured = _by_setting_of_the_network(stacked, draft, slow, context)
        if configured is not None:
            return configured
    if context is not None and slow.on_one_host:
        counted = _by_link_counters(stacked, draft, slow, context)
        if counted is not None:
            return counted
    elif context is not None:
        place = _place_of(stacked, slow, context)
        if place is not None:
            return _placed(stacked, draft, place)
    if slow.undecided:
        draft = replace(draft, evidence=(*draft.evidence, Evidence(slow.undecided, "ledger", {})))
    return draft


def _by_setting_of_the_network(stacked: Stacked, draft: Draft, slow: SlowTransfer, context: Context) -> Draft | None:
    """The draft of ranks whose own setting chooses another card or transport, where each slow group has one of them
    and no quick one does."""
    joined = stacked.joined
    alike = {(joined.channels[c].description, joined.channels[c].size) for c in slow.channels}
    members = {
        int(c): {int(stacked.ranks[w]) for w in _members(stacked, int(c))}
        for c in np.unique(joined.channel)
        if (joined.channels[c].description, joined.channels[c].size) in alike
    }
    for apart in ranks_apart(context.environment, OF_THE_NETWORK):
        if len(members) == len(slow.channels) or {c for c, ranks in members.items() if ranks & apart} != {
            *slow.channels
        }:
            continue
        found = explaining(context.environment, OF_THE_NETWORK, apart)
        texts = [setting.text for setting in found]
        if context.wires is not None:
            texts += [
                f"rank {rank} sends from {context.wires.addresses[rank]}"
                for rank in sorted(apart)
                if rank in context.wires.addresses
            ]
        rows = np.flatnonzero(np.isin(stacked.ranks, sorted(apart))).astype(np.intp)
        text = "the slow groups are those of the ranks with a setting of their own, and no other group is slow"
        return replace(
            draft,
            cause=Cause(
                "configuration", True, text, ("fabric_contention: other groups over the same hosts are quick",)
            ),
            scope="rank",
            ranks=rows,
            hosts=tuple(sorted({stacked.hosts[w] for w in rows} - {""})),
            link=None,
            coverage=0.9,
            evidence=(*draft.evidence, *(Evidence(t, "environment", {}) for t in texts), Evidence(text, "ledger", {})),
        )
    return None


def _ledgers_cause(slow: SlowTransfer) -> Cause:
    """What durations say alone."""
    if slow.on_one_host and slow.scope == "link":
        because = "these two devices are in all of the slow groups, and in no other group of the host together"
        return Cause("intra_node_link", True, because, ())
    if slow.on_one_host and slow.scope == "rank":
        because = "this device is in all of the slow groups of its host, and in no other"
        return Cause("intra_node_link", True, because, ())
    if slow.on_one_host:
        return Cause("intra_node_link", False, "the slow groups stay within a host", ())
    if slow.scope == "host":
        text = "all groups through this host are slow, and no other"
        return Cause("nic_or_host_network", not slow.undecided, text, ())
    if slow.scope == "link":
        text = "all groups over this pair of hosts are slow, and other groups of these hosts are not"
        return Cause("fabric_contention", not slow.undecided, text, ())
    return Cause("fabric_contention", False, "groups tell no host or link apart", ())


def _place_of(stacked: Stacked, slow: SlowTransfer, context: Context) -> Place | None:
    """Where connections and cards see it."""
    host_of = {int(rank): host for rank, host in zip(stacked.ranks, stacked.hosts, strict=True)}
    members = {int(stacked.ranks[w]) for c in slow.channels for w in _members(stacked, c)}
    before = context.wires_before if slow.reference == "baseline" else None
    return locate(context.wires, before, host_of, members)


def _placed(stacked: Stacked, draft: Draft, place: Place) -> Draft:
    ranks = draft.ranks
    if place.scope == "host":
        ranks = np.array([w for w in range(len(stacked)) if stacked.hosts[w] in place.hosts], np.intp)
    return replace(
        draft,
        cause=Cause(place.cause, place.certain, place.because, place.ruled_out),
        scope=place.scope,
        ranks=ranks,
        hosts=place.hosts,
        link=place.link,
        device=place.card or None,
        coverage=0.9 if place.certain else 0.6,
        evidence=(
            *draft.evidence,
            *(Evidence(text, "counters", {}) for text in place.evidence),
            Evidence(place.because, "counters", {}),
        ),
    )


def _link(stacked: Stacked, slow: SlowTransfer) -> str | None:
    """Between two hosts, or two devices of one."""
    if slow.scope != "link":
        return None
    return _between(stacked, slow.ranks) if slow.on_one_host else "-".join(slow.hosts)


def _between(stacked: Stacked, rows: Indices) -> str | None:
    """The link between two devices."""
    ends = [device_of(stacked, int(w)) for w in rows]
    return "-".join(end for end in ends if end is not None) or None


_LINK_COUNTERS = frozenset({"nvlink_errors", "num_nvlinks"})


def _by_link_counters(stacked: Stacked, draft: Draft, slow: SlowTransfer, context: Context) -> Draft | None:
    """The draft of a slow group within a host whose members' links are slow in one place only, by what the devices
    count: a ring is as slow as its worst edge, and its times cannot tell which that is."""
    if slow.scope not in ("host", "group"):
        return None
    members = np.unique(np.concatenate([_members(stacked, c) for c in slow.channels]))
    told = {o.rank for o in context.counters if o.name in _LINK_COUNTERS}
    ends = np.array([w for w in members if int(stacked.ranks[w]) in told], np.intp)
    if len(ends) not in (1, 2) or len(ends) == len(members):
        return None
    because = "the slow groups stay within a host, and of their devices only the named count errors or miss links"
    return replace(
        draft,
        cause=Cause("intra_node_link", True, because, ()),
        scope="link" if len(ends) == 2 else "rank",
        ranks=ends,
        coverage=0.9,
        link=_between(stacked, ends) if len(ends) == 2 else None,
    )


def _members(stacked: Stacked, channel: int) -> Indices:
    joined = stacked.joined
    return np.unique(joined.rank[joined.channel[joined.which] == channel]).astype(np.intp)


def _collective_function(stacked: Stacked, slow: SlowTransfer) -> int | None:
    descriptions = {stacked.joined.channels[c].description for c in slow.channels}
    columns = [
        k
        for k, f in enumerate(stacked.functions)
        if f.activity == Activity.COLLECTIVE
        and (any(d and f"[{d}]" in f.name for d in descriptions) or descriptions == {""})
    ]
    columns = columns or [k for k, f in enumerate(stacked.functions) if f.activity == Activity.COLLECTIVE]
    return max(columns, key=lambda k: float(np.median(stacked.beta[slow.ranks, k])), default=None)
