"""What no trace holds about a window: the records that a live job adds to its traces, each of them optional.

Records and what follows from them alone; nothing is decided about ranks here. Filled by whoever watches a job (agent,
coordinator) and used by `diagnosis`, `rotation` and `draft`. A record that is absent is "not ruled out", never "fine".
Steps are raw counts, as `ProfilerStep#` marks in the traces of a window carry them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from eroica.collectives import Float64s
from eroica.intervals import Int64s
from eroica.pattern import Stacked
from eroica.samplers.standout import SharedCores
from eroica.wires import Wires

SLOW_STEP = 1.5
"""A step of more than so many medians sticks out (design section 4, "recurring")."""
RECURRENT_STEPS = 3
"""So many steps that stick out recur; fewer are hiccups."""
RECURRENT_SHARE = 0.05
"""And their excess must make up this share of the time."""
LIKE = 0.5
"""Steps that recur are alike: each has at least this share of the others' excess."""
IRREGULAR_STEPS = 12
"""Where nobody noticed that they recur, so many must stick out unless they have one period: hiccups do so three times
in 300, too (`degradation.IRREGULAR`)."""
REGULAR_SHARE = 0.75
"""Share of the spacings between such steps that must be one period, or several, to call them periodic."""
FEW_STEPS = 8
"""Fewer steps than this tell no usual length."""


@dataclass(frozen=True, slots=True)
class Series:
    """How long the iterations of one rank took, before the window and in it; those that a pause explains left out."""

    rank: int
    steps: tuple[int, ...]
    """Ascending."""
    duration_s: tuple[float, ...]
    waited_s: tuple[float, ...] = ()
    """Spent in collectives in each of these steps, NaN where that cannot be seen; () if nowhere."""


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """A stretch in which a rank did something that its probe knows by name."""

    rank: int
    kind: str
    """"gc", "checkpoint", "evaluation", "compile", "workers" (of a loader are started), "fetch" (a batch was long in
    coming), "profile" (the job's own profiler ends) or "capture" (a trace of ours is written)."""
    step: int
    """In which it began."""
    duration_s: float


@dataclass(frozen=True, slots=True)
class CaptureRecord:
    """What a rank answered when it was asked for a window."""

    rank: int
    state: str
    """In words: "done", "late", "busy", "unable", ...; `commands.State` in lower case."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """A change of pace, as the watcher noticed it."""

    step: int
    """Some iterations after it began."""
    change: str
    """`degradation.Change` by its value: "slow", "recurring", "drift", "recovered"."""
    usual_s: float
    """What an iteration takes at its best."""
    observed_s: float
    """What it takes now."""


class Observation(Protocol):
    """A counter that stands out, as samplers tell it. Evidence; it blames nobody."""

    @property
    def host(self) -> str:
        """Where it was read."""

    @property
    def rank(self) -> int | None:
        """Whose counter it is; None: the host's."""

    @property
    def name(self) -> str:
        """Of the counter."""

    @property
    def value(self) -> float:
        """In its own unit, which the text tells."""

    @property
    def peers(self) -> float | None:
        """Usual value."""

    @property
    def text(self) -> str:
        """One sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What no trace holds; each part is optional."""

    job: str = ""
    created: str = ""
    """ISO-8601; the caller's clock."""
    version: str = ""
    trigger: str = "offline"
    baseline: Stacked | None = None
    """The same job when it was healthy."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """"common": what all ranks have; "differences": who differs in what."""
    baseline_environment: Mapping[str, Any] = field(default_factory=dict)
    """The same of the healthy past."""
    settings: Mapping[int, Mapping[str, object]] = field(default_factory=dict)
    """The whole snapshot of each rank."""
    reduced_bytes: int = 0
    """Summed over ranks per step, by the rank that knows most; 0: not known."""
    notes: tuple[str, ...] = ()
    """What happened on the way here: files left out, ranks numbered by hand."""
    partial_ranks: tuple[int, ...] = ()
    series: Sequence[Series] = ()
    onset: int | None = None
    """First slow step, as the watcher saw it; what lies before is the healthy level."""
    phases: Sequence[PhaseRecord] = ()
    counters: Sequence[Observation] = ()
    """The ones that stand out most first."""
    shared_cores: Sequence[SharedCores] = ()
    captures: Sequence[CaptureRecord] = ()
    noticed: Turn | None = None
    """Why the window was taken; None where nobody noticed anything."""
    turns: Sequence[Turn] = ()
    """All that was noticed of slow and usual levels so far, this one included."""
    earlier_capture: tuple[int, int] | None = None
    """First and last step of a window of ours, if the onset lies right behind it."""
    wires: Wires | None = None
    """Connections and cards in the window."""
    wires_before: Wires | None = None
    """The same in the window of `baseline`."""


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Steps that stick out of a series again and again."""

    steps: Int64s
    """Ascending."""
    period: int | None
    """Steps from one to the next; None: no one period."""
    share: float
    """Of all time, that these steps take beyond the usual."""


def durations_of(series: Sequence[Series]) -> tuple[Int64s, Float64s]:
    """Steps, ascending, and the length of each, median over the ranks that tell it. Seconds."""
    if not series:
        return np.empty(0, np.int64), np.empty(0)
    steps = np.concatenate([np.array(one.steps, np.int64) for one in series])
    seconds = np.concatenate([np.array(one.duration_s, np.float64) for one in series])
    unique, back = np.unique(steps, return_inverse=True)
    order = np.argsort(back, kind="stable")
    parts = np.split(seconds[order], np.cumsum(np.bincount(back))[:-1])
    return unique, np.array([float(np.median(part)) for part in parts])


def recurrence_of(series: Sequence[Series], onset: int | None = None, *, is_noticed: bool = True) -> Recurrence | None:
    """Steps that stick out again and again, from `onset` on if that is told; None if there are none. `is_noticed`: the
    watcher says that they do."""
    steps, seconds = durations_of(series)
    if onset is not None:
        steps, seconds = steps[steps >= onset], seconds[steps >= onset]
    if len(steps) < FEW_STEPS:
        return None
    usual = float(np.median(seconds))
    slow = np.flatnonzero(seconds > SLOW_STEP * usual)
    if len(slow) >= RECURRENT_STEPS:
        # The third longest and its like: a hiccup beside them is another thing, and so is what is far shorter.
        third = float(np.sort(seconds[slow])[-RECURRENT_STEPS]) - usual
        slow = slow[seconds[slow] - usual >= LIKE * third]
    share = float((seconds[slow] - usual).sum() / max(float(seconds.sum()), 1e-12))
    if len(slow) < RECURRENT_STEPS or share < RECURRENT_SHARE:
        return None
    spacing = np.diff(steps[slow])
    period = int(np.median(spacing))
    # The step after a slow one may be slow too; a slow one may have been missed.
    regular = period > 1 and float(np.mean((spacing % period == 0) & (spacing > 0))) >= REGULAR_SHARE
    if not regular and not is_noticed and len(slow) < IRREGULAR_STEPS:
        return None
    return Recurrence(steps[slow], period if regular else None, share)


def healthy_s(context: Context) -> float | None:
    """Seconds per iteration before the onset, by the series; None where it does not reach there.

    The mean where single steps are slow, since their median is that of the others; else the median, which hiccups do
    not move.
    """
    steps, seconds = durations_of(context.series)
    if context.onset is None:
        return None
    before = seconds[steps < context.onset]
    if len(before) < FEW_STEPS:
        return None
    return float(np.mean(before)) if context.trigger == "recurring" else float(np.median(before))
