"""Who takes part in a job: ranks, hosts, process groups, and which ranks may be compared with each other.

Pure: arrays and records in, arrays and records out. Used by `trace` (who wrote this file), `pattern` (which summary is
whose), `localization` and `diagnosis` (peers, hosts). It is not a scheduler's view: a rank is known only by what its own
trace or its environment says.
"""

from __future__ import annotations

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


def parse_ranks(text: str) -> list[int]:
    """Inverse of `format_ranks`. Raises ValueError on anything else."""
    ranks: list[int] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        first, _, last = part.partition("-")
        ranks.extend(range(int(first), int(last or first) + 1))
    return ranks


def group_key(name: str, description: str, ranks: Sequence[int]) -> str:
    """A group's identity that is equal on all of its members, whatever name each process gave it."""
    if ranks:
        return format_ranks(ranks)
    return description or name or "default"
