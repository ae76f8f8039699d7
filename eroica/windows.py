"""A window under way, a look at ranks that stand still, and by which rules both are chosen.

What `coordinator` decides on, and what others read of it (`investigation`, `coordinators`, `chronicle`): data alone,
no clock of its own. Times are CLOCK_MONOTONIC.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

from eroica.background import History
from eroica.commands import MOST_STEPS, Frames, State, Unit
from eroica.degradation import Trigger
from eroica.job import format_ranks
from eroica.pattern import Summary
from eroica.samplers.evidence import Counted
from eroica.standing import RankView

WHY = {
    State.LATE: "saw the command too late",
    State.BUSY: "has another profiler active",
    State.DISCARDED: "left its capture by an exception, its end or the time limit",
    State.FAILED: "could not write a capture",
    State.UNABLE: "cannot capture",
    State.ABORTED: "was told to leave it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How windows are chosen. Times in seconds."""

    baseline: bool = True
    """Capture a window after warm-up, so that later ones have something to be compared with."""
    baseline_after: int = 24
    """Iterations that a rank must have behind it then: twice the warm-up of `degradation`."""
    warmer: float = 1.5
    """So many times as fast as before the baseline window: that one was of the warm-up, and another is due."""
    window_s: float = 2.0
    """Aimed at: noise of the host evens out over some seconds, and the trace stays small."""
    fewest: int = 10
    most: int = 40
    """Iterations in a window; further ones of a periodic fault are added up to this."""
    least: int = 4
    """Iterations, where more would be too much: a median still outvotes one odd iteration."""
    most_events: int = 40_000
    """On one rank, in all windows but the first, which shows how many an iteration has: to stop the profiler holds the
    interpreter for some 3 us per event, a tenth of a second for these."""
    lead_s: float = 0.6
    """From the command to the start: two rounds of messages at 10 looks a second, twice over."""
    answer_s: float = 20.0
    """For all answers to a PREPARE, on top of the time to the start."""
    finish_s: float = 120.0
    """From the commit to the last summary, on top of five times the window's expected length."""
    return_s: float = 12.0
    """From the moment that an agent is found silent, for another one in its place, whose ranks are captured meanwhile:
    service managers start again what has died within seconds."""
    again_s: float = 5.0
    """To the next window after one in which no rank had a capture, for a reason that may pass: a full disk, a profiler
    of the user's, a window that a coordinator that is gone has begun. Doubled each time."""
    rest_s: float = 20.0
    """Between the end of one window and the next of its own accord; a window costs the job a few per cent."""
    tries: int = 3
    """Starts that are moved ahead because a rank was late; windows taken anew since another phase lay in them."""
    look_again_s: float = 1.0
    """A rank that stands still is looked at twice, so far apart; the second look counts."""
    look_later_s: float = 10.0
    """To the next look at a rank that stands still while nothing can be said about it; doubled each time, up to 32
    times."""
    frames: Frames = Frames.SAMPLED

    def __post_init__(self) -> None:
        if not 0 < self.least <= self.fewest <= self.most <= MOST_STEPS:
            raise ValueError(
                f"Policy: 0 < least ({self.least}) <= fewest ({self.fewest}) <= most ({self.most}) <= {MOST_STEPS} "
                "must hold"
            )


@dataclass(slots=True)
class Window:
    """One window under way, or over."""

    number: int
    trigger: str
    """"slowdown", "recurring", "baseline" or "manual"."""
    cause: Trigger | None
    rank: int | None
    """Who noticed it."""
    asked_ns: int
    training: str = ""
    """Whose it is, as its ranks say."""
    frames: Frames = Frames.SAMPLED
    unit: Unit = Unit.STEPS
    start: int = 0
    num_steps: int = 0
    num_iterations: int = 0
    expected_s: float = 0.0
    ranks: tuple[int, ...] = ()
    """Whom it was proposed to, ascending."""
    answers: dict[int, State] = field(default_factory=dict)
    summaries: dict[int, Summary] = field(default_factory=dict)
    undecoded: dict[int, bytes] = field(default_factory=dict)
    """Summaries that have come and were not looked at yet: of many ranks they are decoded together."""
    problems: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    """What ranks say of their failures."""
    histories: dict[int, History] = field(default_factory=dict)
    counters: dict[str, tuple[Counted, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """Why it is not as it would be."""
    asked: str = ""
    """By which request of a person; "": by none."""
    committed: bool = False
    deadline_ns: int = 0
    num_tries: int = 1
    num_misses: int = 0
    """Windows before it that held none of the iterations that were slow."""
    num_failures: int = 0
    """Windows before it in which no rank had a capture."""
    is_second_look: bool = False
    """What the window before it has shown may pass: it is told if this one shows it, too."""
    _next: int = 0
    """Place in `ranks` of one that was waited for when last asked."""

    def has(self, rank: int) -> bool:
        """It was proposed to this rank; they stand in ascending order."""
        at = bisect_left(self.ranks, rank)
        return at < len(self.ranks) and self.ranks[at] == rank

    def is_waited_for(self, waits: Callable[[int], bool]) -> bool:
        """Whether any of its ranks is waited for. Asked with each message, so it begins with who was last time: from
        the first one on, 100,000 ranks would be gone through 100,000 times."""
        for k in range(self._next, self._next + len(self.ranks)):
            if waits(self.ranks[k % len(self.ranks)]):
                self._next = k % len(self.ranks)
                return True
        return False


@dataclass(slots=True)
class Look:
    """A hang or a crash that is being looked at."""

    number: int
    trigger: Trigger | None
    """None: a process has died."""
    rank: int
    """Who gave the reason."""
    views: dict[int, RankView] = field(default_factory=dict)
    """By rank, as they were at the last look."""
    limit_s: float = 0.0
    """Silence that counts as standing still: the longest of what the hosts say."""
    notes: list[str] = field(default_factory=list)
    num_looks: int = 0
    hosts: set[str] = field(default_factory=set)
    """That have answered this time."""
    died: list[int] = field(default_factory=list)
    """Ranks that died while their silence, or another's, was looked at."""
    due_ns: int | None = None
    """When to look again."""
    deadline_ns: int = 0


def why_missing(window: Window, rank: int) -> str:
    """Why the rank, which has answered, gives no capture."""
    why = WHY.get(window.answers[rank], "gave an answer that makes no sense")
    return f"{why} ({window.reasons[rank]})" if rank in window.reasons else why


def missing_note(window: Window) -> str:
    """Who was to capture and did not, and why; "" if all did."""
    by_reason: dict[str, list[int]] = {}
    for rank, reason in window.problems.items():
        by_reason.setdefault(reason, []).append(rank)
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)} {_of_many(reason, len(ranks))}"
        for reason, ranks in by_reason.items()
    )


def _of_many(reason: str, num: int) -> str:
    return f"have {reason[4:]}" if num > 1 and reason.startswith("has ") else reason
