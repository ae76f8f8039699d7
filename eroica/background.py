"""What a host knows of a window beyond the traces: how its ranks went on before it, what they did besides, counters.

Records only. An agent fills them from flight rings and samplers, the coordinator hands them to the diagnosis as its
`Context`. All times are of the wall clock, so that they fit the traces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from eroica.samplers.evidence import Counted


@dataclass(frozen=True, slots=True)
class Lap:
    """One iteration that is over."""

    step: int
    """Raw count at its end."""
    start_ns: int
    duration_ns: int
    pause: str
    """What else happened in it: "evaluation", "checkpoint", ...; "" if nothing is known."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something else that a rank did: a garbage collection, a phase."""

    name: str
    """"gc", or one of `ring.PHASES`: "save", "evaluation", "compile", ..."""
    step: int
    """Steps completed before it began."""
    start_ns: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class History:
    """Of one rank, up to the end of a window."""

    laps: tuple[Lap, ...] = ()
    """The last ones, those of the window among them."""
    spans: tuple[Span, ...] = ()
    """In the time of the laps."""
    environment: Mapping[str, object] = field(default_factory=dict)
    """The last snapshot; empty if the probe took none."""


@dataclass(frozen=True, slots=True)
class Background:
    """Of a window, over all ranks and hosts; a part that is missing was not seen."""

    histories: Mapping[int, History] = field(default_factory=dict)
    counters: Mapping[str, tuple[Counted, ...]] = field(default_factory=dict)
    """By host: every target's counters over the window."""
    noticed_ns: int | None = None
    """When the change of pace was seen that the window is for."""
