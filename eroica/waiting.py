"""Who waits for whom when a job stops: the graph of ranks and the calls that they stand in, its ends and its circles.

Pure. A rank points to the call that it waits in; a call points to the members that have not entered it. All of a call's
members must come, so every circle is a deadlock; where the walk ends is whoever keeps the rest waiting: a rank that
does something else, or a call that everybody has entered and nobody finishes. Used by `hang`.

Rings are read one after the other; that a rank "has not entered" is certain only for ranks that have been silent since.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from eroica.doing import Doing
from eroica.standing import Call, Group, RankView, last_calls

Meeting = tuple[str, int]
"""A call as all members share it: key of the group, sequence. Messages and the rendezvous have ones of their own."""
Node = int | Meeting

_EQUAL_SIZES = frozenset(
    "allreduce allreduce_coalesced allgather_base reduce_scatter_base broadcast reduce barrier "
    "allgather_into_tensor_coalesced reduce_scatter_tensor_coalesced".split()
)
"""Operations whose payload has one size on all ranks; of the others a difference says nothing."""


@dataclass(frozen=True, slots=True)
class Gathering:
    """One call that ranks wait in."""

    meeting: Meeting
    group: Group
    calls: Mapping[int, Call]
    """Rank -> its call, of those that wait here."""
    behind: frozenset[int]
    """Members that have not entered it."""
    unknown: frozenset[int]
    """Members of whom that cannot be told."""

    @property
    def what(self) -> str:
        """ "allreduce 41 of default_pg"."""
        call = next(iter(self.calls.values()))
        return f"{call.op} {call.sequence} of {self.group.name}" if call.op != "rendezvous" else "the rendezvous"


@dataclass(frozen=True, slots=True)
class Graph:
    """The wait-for graph of one look."""

    gatherings: Mapping[Meeting, Gathering]
    edges: Mapping[Node, Sequence[Node]] = field(repr=False)
    circles: tuple[frozenset[Node], ...]
    """Each a set of nodes that wait for one another."""
    ends: frozenset[Node]
    """Where walks from waiting ranks end."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Members of one group that differ in the same call."""

    group: Group
    sequence: int
    variants: tuple[tuple[str, frozenset[int]], ...]
    """What they call ("allreduce of 400 bytes of float32") and who, most ranks first."""

    @property
    def odd(self) -> frozenset[int]:
        """Those that differ from more than half of all; empty if no variant has so many."""
        total = sum(len(ranks) for _, ranks in self.variants)
        if len(self.variants[0][1]) * 2 <= total:
            return frozenset()
        return frozenset[int]().union(*(ranks for _, ranks in self.variants[1:]))


def groups_of(views: Mapping[int, RankView]) -> dict[str, Group]:
    """The groups that any rank knows; the one with members where ranks differ."""
    known: dict[str, Group] = {}
    for view in views.values():
        for group in view.groups:
            if group.key not in known or not known[group.key].members:
                known[group.key] = group
    return known


def graph_of(views: Mapping[int, RankView], doings: Mapping[int, Doing], world_size: int) -> Graph:
    """See the module. `doings`: what each of `views` does."""
    groups = groups_of(views)
    last = {rank: last_calls(view) for rank, view in views.items()}
    inside: dict[Meeting, dict[int, Call]] = defaultdict(dict)
    where: dict[Meeting, Group] = {}
    for rank, done in doings.items():
        call = done.call
        if done.what == "rendezvous":
            meeting, group = ("", 0), Group("", "", tuple(range(min(world_size, 1 << 20))))
            call = Call("", 0, "rendezvous", "in", for_s=views[rank].silent_s or 0.0)
        elif call is None:
            continue
        elif call.is_message:
            meeting = f"{call.group} {rank} {call.op} {call.peer}", call.sequence
            group = groups.get(call.group) or Group(call.group, f"group {call.group[:8]}", ())
        else:
            meeting = call.group, call.sequence
            group = groups.get(call.group) or Group(call.group, f"group {call.group[:8]}", ())
        inside[meeting][rank] = call
        where[meeting] = group
    gatherings = {}
    edges: dict[Node, list[Node]] = {}
    for meeting, calls in inside.items():
        behind, unknown = _missing(meeting, where[meeting], calls, views, doings, last)
        if not behind and not unknown and all(call.status == "failed" for call in calls.values()):
            continue  # everybody has come: who failed here waits for nobody
        gatherings[meeting] = Gathering(meeting, where[meeting], calls, behind, unknown)
        edges[meeting] = sorted(behind)
        for rank in calls:
            edges.setdefault(rank, []).append(meeting)
    circles = _circles(edges)
    in_circles = {node for circle in circles for node in circle}
    seen: set[Node] = set()
    todo: list[Node] = [rank for calls in inside.values() for rank in calls]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo.extend(edges.get(node, ()))
    ends = frozenset(node for node in seen if not edges.get(node) and node not in in_circles)
    return Graph(gatherings, edges, circles, ends)


def mismatches(views: Mapping[int, RankView]) -> list[Mismatch]:
    """Of each group the first call, as far as rings go back, in which members differ in operation, size or type.

    Looks only at groups with a call that is not over well: ranks that got through agree, or differ harmlessly.
    """
    groups = groups_of(views)
    of: dict[str, dict[int, dict[int, Call]]] = defaultdict(lambda: defaultdict(dict))
    stuck: set[str] = set()
    for rank, view in views.items():
        for call in view.calls if view.is_recording else ():
            if not call.is_message:
                of[call.group][call.sequence][rank] = call
                if call.status != "done":
                    stuck.add(call.group)
    found = []
    for key in sorted(stuck):
        for sequence, calls in sorted(of[key].items()):
            if all(call.status == "done" for call in calls.values()):
                continue
            variants: dict[str, set[int]] = defaultdict(set)
            # Of calls in steps that are not recorded the type is not known; it then tells nobody apart.
            knows_types = all(call.dtype for call in calls.values())
            for rank, call in calls.items():
                variants[signature(call if knows_types else replace(call, dtype=""))].add(rank)
            if len(variants) > 1:
                ordered = sorted(variants.items(), key=lambda item: (-len(item[1]), min(item[1])))
                group = groups.get(key) or Group(key, f"group {key[:8]}", ())
                found.append(Mismatch(group, sequence, tuple((text, frozenset(ranks)) for text, ranks in ordered)))
                break
    return found


def signature(call: Call) -> str:
    """What must agree over the ranks of a call, in words."""
    if call.op == "barrier" or call.op not in _EQUAL_SIZES:
        return call.op
    return f"{call.op} of {call.num_bytes:,} bytes" + (f" of {call.dtype}" if call.dtype else "")


@dataclass(frozen=True, slots=True)
class Skew:
    """A rank that makes the calls of a group in other steps than most ranks do: it has left some out, or made more."""

    rank: int
    sequence: int
    """First such call."""
    step: int
    """Optimizer steps that it had done then."""
    usual: int
    """Those that most had done at the same call."""


def skews(views: Mapping[int, RankView], group: str) -> dict[int, Skew]:
    """By rank. Only with a majority to compare with, and only where it lasts until the last call that is known."""
    of: dict[int, dict[int, int]] = defaultdict(dict)
    for rank, view in views.items():
        for call in view.calls if view.is_recording else ():
            if call.group == group and not call.is_message and call.step >= 0:
                of[call.sequence][rank] = call.step
    found: dict[int, Skew] = {}
    for sequence, steps in sorted(of.items()):
        values = sorted(steps.values())
        usual = values[len(values) // 2]
        if len(values) < 3 or values.count(usual) * 2 <= len(values):
            continue
        for rank, step in steps.items():
            if step == usual:
                found.pop(rank, None)
            else:
                found.setdefault(rank, Skew(rank, sequence, step, usual))
    return found


def _missing(
    meeting: Meeting,
    group: Group,
    calls: Mapping[int, Call],
    views: Mapping[int, RankView],
    doings: Mapping[int, Doing],
    last: Mapping[int, Mapping[tuple[str, str, int], Call]],
) -> tuple[frozenset[int], frozenset[int]]:
    """Members that have not entered the call, and those of whom that is not known."""
    if meeting == ("", 0):
        others = set(group.members) - set(calls)
        return frozenset(others & set(views)), frozenset(others - set(views))
    rank, call = next(iter(calls.items()))
    if call.is_message:
        return _missing_peer(rank, call, group, views, last)
    key = (call.group, "", -1)
    members = set(group.members) or {other for other in last if key in last[other]}
    behind, unknown = set(), set()
    for member in members - set(calls):
        if member not in views or not views[member].is_recording:
            unknown.add(member)
        elif key in last[member]:
            if last[member][key].sequence < call.sequence:
                behind.add(member)
        elif views[member].knows_all_groups:
            behind.add(member)
        else:
            unknown.add(member)
    return frozenset(behind), frozenset(unknown)


def _missing_peer(
    rank: int,
    call: Call,
    group: Group,
    views: Mapping[int, RankView],
    last: Mapping[int, Mapping[tuple[str, str, int], Call]],
) -> tuple[frozenset[int], frozenset[int]]:
    none: frozenset[int] = frozenset()
    if call.peer < 0 or not group.members or call.peer >= len(group.members) or rank not in group.members:
        return none, none  # from anybody: nobody in particular is late
    peer, own = group.members[call.peer], group.members.index(rank)
    if peer not in views or not views[peer].is_recording:
        return none, frozenset({peer})
    counterparts = ("recv", "recv_any_source") if call.op == "send" else ("send",)
    made = [
        other.sequence
        for (key, op, at), other in last[peer].items()
        if key == call.group and op in counterparts and at in (own, -1)
    ]
    if made and max(made) >= call.sequence:
        return none, none
    return (frozenset({peer}), none) if made or views[peer].knows_all_groups else (none, frozenset({peer}))


def _circles(edges: Mapping[Node, Sequence[Node]]) -> tuple[frozenset[Node], ...]:
    """Strongly connected sets of more than one node (Tarjan's, without recursion)."""
    index: dict[Node, int] = {}
    low: dict[Node, int] = {}
    stack: list[Node] = []
    on_stack: set[Node] = set()
    found = []
    for start in edges:
        if start in index:
            continue
        work: list[tuple[Node, int]] = [(start, 0)]
        while work:
            node, at = work.pop()
            if not at:
                index[node] = low[node] = len(index)
                stack.append(node)
                on_stack.add(node)
            out = edges.get(node, ())
            if at:
                low[node] = min(low[node], low[out[at - 1]])
            while at < len(out):
                to = out[at]
                at += 1
                if to not in index:
                    work += [(node, at), (to, 0)]
                    break
                if to in on_stack:
                    low[node] = min(low[node], index[to])
            else:
                if low[node] == index[node]:
                    members = []
                    while True:
                        member = stack.pop()
                        on_stack.discard(member)
                        members.append(member)
                        if member == node:
                            break
                    if len(members) > 1:
                        found.append(frozenset(members))
    return tuple(found)
