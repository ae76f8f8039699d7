"""All ranks of a halted job at one moment, and what may be shown of them: evidence, lines, functions.

Used by `hang`, which asks the questions; nothing is judged here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from eroica.doing import Doing
from eroica.findings import Evidence, FunctionName
from eroica.merged import lines, merge
from eroica.standing import Frame, RankView, call_site, user_frame
from eroica.suspect import some
from eroica.waiting import Graph, skews


@dataclass(frozen=True, slots=True)
class Look:
    """All ranks at one moment."""

    views: Mapping[int, RankView]
    doings: Mapping[int, Doing]
    graph: Graph
    limit_s: float
    phase_limit_s: float
    world_size: int

    def is_silent(self, rank: int) -> bool:
        """Nothing has happened on it for the limit, or will; unknown counts as silent, since nobody saw it move."""
        silent_s = self.views[rank].silent_s
        return silent_s is None or silent_s >= self.limit_s or self.views[rank].state == "died"

    @property
    def is_opening(self) -> bool:
        """No rank has made a step."""
        return not any(view.num_steps for view in self.views.values())


def awaited_by(look: Look, rank: int) -> str:
    """The call in which most ranks wait for this one, in words."""
    awaited = [g for g in look.graph.gatherings.values() if rank in g.behind]
    return max(awaited, key=lambda g: len(g.calls)).what if awaited else "where the others wait"


def late(look: Look, rank: int) -> Evidence:
    """What the ring says of a rank that others wait for."""
    view = look.views[rank]
    awaited = [gathering for gathering in look.graph.gatherings.values() if rank in gathering.behind]
    texts = []
    for gathering in sorted(awaited, key=lambda g: -len(g.calls))[:3]:
        since_s = max(call.for_s for call in gathering.calls.values())
        texts.append(f"{some(gathering.calls)} in {gathering.what} for {since_s:.0f} s; rank {rank} has not entered it")
    if view.silent_s is not None:
        texts.append(f"nothing has happened on rank {rank} for {view.silent_s:.0f} s")
    texts += [f"rank {rank} is in {span.what} for {span.for_s:.0f} s" for span in view.open[:3]]
    return Evidence("; ".join(texts) or f"rank {rank} left nothing", "ring", {"rank": rank, "steps": view.num_steps})


def skews_of(look: Look, rank: int) -> list[Evidence]:
    """What tells that the rank has left calls out, or made more, in the groups that wait for it."""
    groups = {gathering.group.key for gathering in look.graph.gatherings.values() if rank in gathering.behind}
    return [item for key in sorted(groups) for item in skew_evidence(look, key, {rank})]


def skew_evidence(look: Look, group: str, only: set[int] | None = None) -> list[Evidence]:
    """The same of one group, for `only` these ranks or for all."""
    found = []
    for rank, skew in sorted(skews(look.views, group).items()):
        if only is None or rank in only:
            did = "has left a call out before it" if skew.step > skew.usual else "has made a call more before it"
            found.append(
                Evidence(
                    f"rank {rank} made call {skew.sequence} in step {skew.step}, most in step {skew.usual}: it {did}",
                    "ring",
                    {"rank": rank, "sequence": skew.sequence, "step": skew.step, "usual_step": skew.usual},
                )
            )
    return found[:8]


def line_of(look: Look, rank: int) -> str:
    """Where a rank stands in the user's code; "" if unknown."""
    return call_site(look.views[rank].main)


def user_frames(look: Look, rank: int) -> list[Frame]:
    """The user's own frames of its driving thread, innermost first."""
    main = look.views[rank].main
    return [frame for frame in main.frames if frame.is_users] if main is not None else []


def places(look: Look, ranks: Iterable[int]) -> list[Evidence]:
    """The merged stacks of these ranks."""
    stacks = {rank: main for rank in ranks if (main := look.views[rank].main) is not None and main.frames}
    return [Evidence(line, "stack", {}) for line in lines(merge(stacks), 6)]


def function_of(look: Look, rank: int) -> FunctionName | None:
    """The function in which its driving thread stands, else that which its exception came from; None if unknown."""
    view = look.views[rank]
    main = view.main
    if main is None or not main.frames:
        if not view.exception_from:
            return None
        return FunctionName("host", view.exception.partition(":")[0], view.exception_at, view.exception_from)
    return name_of(main.frames[0], look.doings[rank].frame or user_frame(main))


def name_of(inner: Frame, users: Frame | None) -> FunctionName:
    """A frame and the user's frame that it was called from, as a function of the contract."""
    if users is None:
        return FunctionName("host", inner.function, inner.at)
    return FunctionName("host", inner.function, inner.at, users.at, users.function)
