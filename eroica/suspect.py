"""A finding in the making, when a job stands still: what `hang` and its parts return to one another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from eroica.findings import Evidence, FunctionName
from eroica.job import format_ranks


@dataclass(frozen=True, slots=True)
class Suspect:
    """One fault. Fields as in `findings.Finding`; `text` is its sentence."""

    cause: str
    scope: str
    ranks: frozenset[int]
    confidence: str
    text: str
    evidence: tuple[Evidence, ...]
    function: FunctionName | None = None
    kind: str = "hang"
    """hang, paused or crash."""
    advice: str = ""
    ruled_out: tuple[str, ...] = ()


def some(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 0,2-3"."""
    listed = sorted(set(ranks))
    return f"rank{'' if len(listed) == 1 else 's'} {format_ranks(listed)}"
