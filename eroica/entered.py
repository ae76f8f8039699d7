"""A call that all of its members have entered and nobody gets through: what lies beneath the ranks is to be looked at.

Never a missing rank. On a device several calls may be under way at once; where every one of them was entered by
everybody, they may hold one another up (each waits for room that the other takes, in another order on another device).
Where there is but one, it is its transport. Used by `hang`.
"""

from __future__ import annotations

from eroica import joining
from eroica.findings import Evidence
from eroica.job import format_ranks
from eroica.looking import Look, function_of, places
from eroica.standing import Call, Group, last_calls
from eroica.suspect import Suspect, some
from eroica.waiting import Gathering, groups_of

_RULED_OUT = ("a missing rank: all have entered", "different calls: operation, size and type agree")
_TRANSPORT = "look at the transport between these ranks: links, firewalls, peer-to-peer access"
_PEERS = (
    "look at the peer-to-peer path between these GPUs: PCI access control services (ACS) and the IOMMU send it through "
    "the root complex, where it may get lost; NCCL_P2P_DISABLE=1 tells whether it is that; then at the links themselves"
)
_AT_ONCE = (
    "let no two communicators be in flight at the same time on these devices: order them by an event or one stream, on "
    "all ranks alike (NCCL_LAUNCH_ORDER_IMPLICIT=1, CUDA_DEVICE_MAX_CONNECTIONS); a debug mode that serialises hides it"
)


def transport(look: Look, gathering: Gathering) -> Suspect:
    """What may hold it up."""
    ranks = frozenset(gathering.calls)
    if not gathering.group.key and gathering.meeting == ("", 0):
        found = joining.misdirected(look.views)
        return found[0] if found else joining.nobody_through(look.views, ranks)
    hosts = {look.views[rank].host for rank in ranks} - {""}
    text = f"all members of {gathering.group.name} ({some(gathering.group.members or ranks)}) have entered "
    text += f"{gathering.what} and nobody gets through"
    cause, scope, level, advice = "unknown", "group", "unknown", _TRANSPORT
    through = _through(look, gathering)
    if through:
        text = f"{some(ranks)} do not get through {gathering.what}, which {some(through)} have behind them"
    at_once = [] if through else _at_once(look, gathering)
    values: dict[str, object] = {"inside": format_ranks(ranks)}
    if at_once and gathering.group.is_on_device:
        cause, advice = "deadlock", _AT_ONCE
        level = "supported" if all(call.status == "in" for _, call in at_once) else "hypothesis"
        shown = ", ".join(f"{call.op} {call.sequence} of {group.name}" for group, call in at_once[:6])
        text += f"; {len(at_once) + 1} communicators are in flight at the same time, entered by all: {shown}"
        values["communicators"] = len(at_once) + 1
    elif len(hosts) > 1:
        cause, level = "nic_or_host_network", "hypothesis"
    elif gathering.group.is_on_device and len(hosts) == 1 and not through:
        cause, level, advice = "intra_node_link", "hypothesis", _PEERS
    others = [other for other in look.graph.gatherings.values() if other is not gathering and other.group.key]
    if others and cause != "deadlock":
        text += f"; {len(others)} more communications are in flight"
    return Suspect(
        *(cause, scope, ranks, level, text),
        (Evidence(text, "ring", values), *places(look, ranks)),
        function=function_of(look, min(ranks)),
        advice=advice,
        ruled_out=_RULED_OUT,
    )


def _through(look: Look, gathering: Gathering) -> set[int]:
    """Ranks that have the call behind them."""
    key, sequence = gathering.meeting
    return {
        view.rank
        for view in look.views.values()
        for call in view.calls
        if (call.group, call.sequence, call.status) == (key, sequence, "done") and not call.is_message
    }


def _at_once(look: Look, gathering: Gathering) -> list[tuple[Group, Call]]:
    """The other groups of these ranks whose last call was entered by all of its members, too, and may not be over.

    Where ends cannot be seen, only calls since the last optimizer step count: it comes after all calls of its own step.
    """
    ranks = frozenset(gathering.calls)
    last = {rank: last_calls(view) for rank, view in look.views.items() if view.is_recording}
    found = []
    for key, group in sorted(groups_of(look.views).items()):
        if key == gathering.group.key or not group.is_on_device:
            continue
        calls = {rank: own[key, "", -1] for rank, own in last.items() if (key, "", -1) in own}
        members = frozenset(group.members) or frozenset(calls)
        if len(members) < 2 or members != calls.keys() or not ranks & members:
            continue
        is_level = len({call.sequence for call in calls.values()}) == 1
        is_open = all(
            call.status == "in" or (call.status == "unseen" and call.step == look.views[rank].num_steps)
            for rank, call in calls.items()
        )
        if is_level and is_open:
            found.append((group, calls[min(members)]))
    return found
