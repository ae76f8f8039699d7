"""What comes out of looking for a fix: a change of one file, or the reason why there is none.

Records only. Codemods and `edits` make them, `fixing` applies and shows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Change:
    """A new text for one file."""

    path: str
    """Relative to the repository, with slashes."""
    after: str
    """The whole file."""
    title: str
    """What it does, as the subject of a commit: imperative, no full stop."""
    because: tuple[str, ...]
    """What was seen in the code that makes it safe, a sentence each."""
    caution: tuple[str, ...] = ()
    """What is not as it was, and the reviewer should know."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a codemod does not apply. One clause, no full stop: "the loader has 4 workers already"."""

    reason: str


@dataclass(frozen=True, slots=True)
class Place:
    """A line that a finding names, in a file of the repository."""

    path: str
    line: int
    function: str
    """Name of the function there, as the finding has it; "" if it has none."""


@dataclass(frozen=True, slots=True)
class Lead:
    """What a finding tells of where to look and what to do."""

    cause: str
    scope: str
    name: str
    """Of its function or setting."""
    places: tuple[Place, ...] = ()
    """What the finding itself names first, then the lines of the stacks in its evidence."""
    values: Mapping[str, object] = field(default_factory=dict)
    """All values of its evidence."""
    share: float | None = None
    """Of the iteration that it costs; None if that is not known."""
    cores_per_rank: float | None = None
    """Of the host; None if that is not known."""
