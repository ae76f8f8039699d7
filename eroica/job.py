"""Who takes part in a job: ranks, hosts, process groups, and which ranks may be compared with each other.

Pure: arrays and records in, arrays and records out. Used by `trace` (who wrote this file), `pattern` (which summary is
whose), `localization` and `diagnosis` (peers, hosts). It is not a scheduler's view: a rank is known only by what its
own trace or its environment says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """One communicator as a rank names it."""

    name: str
    """Name that torch gave it, unique within a rank's process ("0", "1", ...)."""
    description: str
    """What the framework calls it ("default_pg", "mesh_dp", "TENSOR_MODEL_PARALLEL_GROUP", ...); "" if unknown."""
    ranks: tuple[int, ...]
    """Global ranks, ascending; () if unknown."""
    size: int
    """Number of members; kept apart because long member lists are cut in traces. 0 if unknown."""


def format_ranks(ranks: Iterable[int]) -> str:
    """Ranks as ranges, the RANKS of the contract: {0, 1, 2, 17} -> "0-2,17"; empty -> ""."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def format_missing(ranks: Iterable[int], world_size: int) -> str:
    """Those of 0..world_size-1 that are not in `ranks`, as ranges; "" if a rank lies outside, since the numbers then
    mean something else. Never lists them one by one: a file may claim any world size."""
    seen = sorted(set(ranks))
    if seen and not 0 <= seen[0] <= seen[-1] < world_size:
        return ""
    gaps = [(a + 1, b - 1) for a, b in zip([-1, *seen], [*seen, world_size], strict=True) if b - a > 1]
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in gaps)


MOST_RANKS = 1 << 22
"""No job has as many; a damaged note that claims so is not to fill the memory."""


def parse_ranks(text: str) -> list[int]:
    """Inverse of `format_ranks`. Raises ValueError on anything else, and for more than MOST_RANKS."""
    ranks: list[int] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        first, _, last = part.partition("-")
        some = range(int(first), int(last or first) + 1)
        if len(ranks) + len(some) > MOST_RANKS:
            raise ValueError(f"more than {MOST_RANKS} ranks")
        ranks.extend(some)
    return ranks


def told_ranks(text: str) -> tuple[int, ...]:
    """The same, of what a ring or a message says; () where that makes no sense."""
    try:
        return tuple(parse_ranks(text))
    except ValueError:
        return ()


def group_key(name: str, description: str, ranks: Sequence[int]) -> str:
    """A group's identity that is equal on all of its members, whatever name each process gave it."""
    if ranks:
        return format_ranks(ranks)
    return description or name or "default"


_PIPELINE = re.compile(r"pipe|(^|[_\W])pp([_\W\d]|$)", re.IGNORECASE)
_REPLICAS = re.compile(
    r"data|(^|[_\W])(dp|ddp|fsdp|hsdp|replicate|shard|zero)([_\W\d]|$)|mesh_(dp|fsdp)", re.IGNORECASE
)


def peer_groups(ranks: Sequence[int], groups: Sequence[Sequence[ProcessGroup]], staged: bool) -> list[str] | None:
    """Role of each rank as its process groups tell it; None where they tell nothing.

    `groups`: per rank the groups that it names. `staged`: sends and receives between ranks were seen. Ranks of one
    pipeline group hold different stages, so its position is the role; else, in a staged job, ranks that share a
    data-parallel group hold the same stage.
    """
    roles: list[str] = []
    # A job has few descriptions and may have millions of groups.
    descriptions = {group.description for own in groups for group in own}
    lined, replicated = ({text for text in descriptions if pattern.search(text)} for pattern in (_PIPELINE, _REPLICAS))
    for rank, own in zip(ranks, groups, strict=True) if lined else ():
        lines = [g for g in own if g.description in lined and rank in g.ranks and len(g.ranks) > 1]
        if lines:
            longest = max(lines, key=lambda g: len(g.ranks))
            roles.append(f"stage {longest.ranks.index(rank)}")
    if len(roles) == len(ranks) and len(set(roles)) > 1:
        return roles
    if not staged:
        return None
    roles = []
    for rank, own in zip(ranks, groups, strict=True):
        shared = [g for g in own if g.description in replicated and rank in g.ranks and 1 < len(g.ranks) < len(ranks)]
        if not shared:
            return None
        roles.append("replicas " + format_ranks(max(shared, key=lambda g: len(g.ranks)).ranks))
    return roles if len(set(roles)) > 1 else None
