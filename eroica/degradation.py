"""Notices that one rank's iterations became slow, keep being slow now and then, drift, or stopped.

Pure: iterations and the time in, triggers out; standard library only. It compares a job with itself over time and
names nobody: ranks of a job slow down together, and which one is at the root is what the window that it triggers is
for. A job that is slow from its first step has no slowdown to notice; its baseline window is diagnosed instead. Used by
the agent, on what `steps` yields.

Only iterations of the same kind are compared: same learnt unit, number of batches, loader, and about the same number of
collectives. Medians over the last 10, 40 and 160 iterations look for large, small and very small effects: what 10 noisy
iterations cannot show, 160 may. Each must lie 5 % above the best level of the run and beyond what the noise of that
kind, measured on healthy iterations, makes of a median of so many.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from statistics import median

from eroica.pace import BLOCK, EFFECT, SPAN, Pace
from eroica.steps import Iteration, Pause


class Change(Enum):
    """What was noticed."""

    SLOW = "slow"
    RECURRING = "recurring"
    """Single slow iterations that keep coming back."""
    DRIFT = "drift"
    """Longer and longer."""
    STALLED = "stalled"
    """No mark for too long."""
    QUIET = "quiet"
    """No mark for a while, in what may last: the start, an evaluation, a save. Worth a look, since some things do not
    pass by waiting; no fault by itself."""
    RECOVERED = "recovered"


@dataclass(frozen=True, slots=True)
class Trigger:
    """One change of a rank's pace."""

    change: Change
    time_ns: int
    generation: int
    step: int
    """Raw count at the iteration that showed it."""
    number: int
    """That iteration; -1 before the first."""
    baseline_ns: int
    """What an iteration of this kind takes at its best; STALLED: the longest silence that is usual."""
    observed_ns: int
    """What it takes now: the median that showed it, a typical slow iteration, or the silence."""
    cost: float
    """Share of the time that is lost to it."""
    every: int | None = None
    """RECURRING: iterations from one to the next, if they are regular: the window should meet the next one."""
    ended: Change | None = None
    """RECOVERED: from what."""
    pause: Pause | None = None
    """STALLED: what the rank was doing, beyond its limit."""
    is_opening: bool = False
    """STALLED: before the first iteration of this start, where a long silence is usual."""
    num_batches: int = 0
    num_collectives: int = 0
    """Of that iteration: with the batches what tells kinds apart."""

    def is_like(self, num_batches: int, num_collectives: int) -> bool:
        """Whether an iteration is of the kind that showed it."""
        return num_batches == self.num_batches and are_alike(num_collectives, self.num_collectives)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a rank may be silent."""

    silence_ns: int = 10_000_000_000
    """At least this, however short iterations are: below it, hosts swap, filesystems stutter, and people cannot act."""
    silence_factor: float = 5.0
    """Times the usual iteration."""
    quiet_ns: int = 30_000_000_000
    """At least this, before a silence that may last is looked at: looking pauses the ranks for some milliseconds."""
    gap_factor: float = 2.0
    """Times the second longest silence that ended by itself: what came twice will come again (evaluation that no mark
    shows)."""
    start_ns: int = 1_800_000_000_000
    """In the first iterations after a rendezvous: compilation of a large model takes tens of minutes."""
    opening_ns: int = 30_000_000_000
    """Before the first iteration: from then on it is worth a look whether a rank waits for a server outside, which time
    does not mend. A person who starts a job looks about as long."""
    pause_ns: int = 600_000_000_000
    """Within an evaluation, a checkpoint, a compilation or a rendezvous."""
    capture_ns: int = 20_000_000_000
    """Within a window of our own, which must not hide a hang: torch takes seconds to end a large one."""
    pause_factor: float = 3.0
    """Times the longest such pause seen, if that is more: an upper bound that fits all jobs does not exist."""

    def __post_init__(self) -> None:
        for name in (
            "silence_ns",
            "silence_factor",
            "gap_factor",
            "start_ns",
            "opening_ns",
            "quiet_ns",
            "pause_ns",
            "capture_ns",
            "pause_factor",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"Limits.{name} is {getattr(self, name)}; it must be above 0")


WARM_UP = 10
"""Iterations after a rendezvous that are no baseline: allocators, autotuning and caches settle in them."""
SLOWER = 1.25
"""Times the slow level: slower still, and news again."""
KINDS = 16
"""Kinds of iterations told apart; while all of them keep coming, those beyond are not judged."""
IRREGULAR = 12
"""Times in SPAN that make irregular ones recurring. Unrelated hiccups come in one of a hundred iterations: 12 of them
in 300 have a chance of 1e-4. Three or four suffice at equal distances (`_spacing`)."""


def are_alike(num: int, usual: int) -> bool:
    """Numbers of collectives of iterations of one kind. Other operations, other phase: a rollout calls other
    collectives than training. A few more or fewer (a log line, a check) make no other kind, twice as many do."""
    return num == usual or usual < 2 * num < 4 * usual


@dataclass(slots=True)
class _Slow:
    """One slow iteration."""

    number: int
    """Position among the judged iterations, so that an evaluation between two does not change their distance."""
    excess_ns: float
    duration_ns: int


class Degradation:
    """Judges the iterations of one rank as they come. Bounded memory, O(1) amortised per iteration."""

    def __init__(self, limits: Limits | None = None, generation: int = 0) -> None:
        self.generation = generation
        """Of the last iteration, or of a later start of the job that has made none yet."""
        self.history: deque[Iteration] = deque(maxlen=SPAN)
        """The last iterations, also over a rendezvous."""
        self.triggers: deque[Trigger] = deque(maxlen=64)
        """The last triggers, also over a rendezvous."""
        self._limits = limits or Limits()
        self._pauses_ns: dict[Pause, int] = {}
        self.restart()

    def restart(self) -> None:
        """A new rendezvous: baselines are learnt anew (world size and hosts may differ); history stays."""
        self._seen = 0
        self._tracks: dict[tuple[int, int, int], list[Pace]] = {}
        self._num_tracks = 0
        self._judged = 0
        self._span: deque[int] = deque(maxlen=SPAN)
        self._span_ns = 0
        self._slow: deque[_Slow] = deque()
        self._recurring = False
        self._stalled_at_ns: int | None = None
        self._quiet_at_ns: int | None = None

    def add(self, iteration: Iteration) -> list[Trigger]:
        """What this iteration shows, mostly nothing."""
        if self.history and iteration.generation != self.history[-1].generation:
            self.restart()
        self.generation = iteration.generation
        self.history.append(iteration)
        self._seen += 1
        duration_ns = iteration.duration_ns
        if iteration.pause is not None:
            self._pauses_ns[iteration.pause] = max(self._pauses_ns.get(iteration.pause, 0), duration_ns)
        is_resumed = False
        if iteration.pause is Pause.EVALUATION and iteration.resumed_ns is not None:
            # What came after the evaluation is a whole update, and often the first of an epoch.
            is_resumed, duration_ns = True, iteration.end_ns - iteration.resumed_ns
        if iteration.pause is Pause.CAPTURE:
            for tracks in self._tracks.values():
                for known in tracks:
                    known.learn_early()
        # Evaluations and our own windows are long for a reason that needs no diagnosis. Saves and compilations count
        # below, where only their repetition is a fault. A skipped step is shorter than a real one.
        if (
            self._seen <= WARM_UP
            or iteration.skipped
            or duration_ns <= 0
            or (iteration.pause in (Pause.EVALUATION, Pause.RENDEZVOUS, Pause.CAPTURE) and not is_resumed)
        ):
            return []
        track = self._track(iteration)
        if track is None:
            return []
        track.last_number = iteration.number
        found: list[Trigger] = []
        excess_ns = self._yardstick(iteration, track).outlier_ns(duration_ns)
        if iteration.pause is None:
            track.add(duration_ns)
            found += self._level(iteration, track)
            found += self._trend(duration_ns, track)
        found += self._recur(duration_ns, excess_ns)
        return found

    def check(self, now_ns: int, last_ns: int | None, pause: Pause | None, gap_ns: int = 0) -> Trigger | None:
        """Whether the rank stands still at `now_ns`; once per silence, and once more when it is over. Where it may, it
        is QUIET first.

        Before the first iteration it is told early, as `is_opening`: whoever looks must find more than a silence then.

        `last_ns`: its last mark. `pause`: what it is doing, as far as known. `gap_ns`: its second longest silence that
        ended by itself (`Iterations.gaps_ns[1]`). To be called now and then, a few times per limit.
        """
        if last_ns is None:
            return None
        if self._stalled_at_ns is not None:
            if last_ns <= self._stalled_at_ns:
                return None
            silent_ns, self._stalled_at_ns = last_ns - self._stalled_at_ns, None
            if pause is not None:
                self._pauses_ns[pause] = max(self._pauses_ns.get(pause, 0), silent_ns)
            return self._told(Change.RECOVERED, 0, silent_ns, time_ns=now_ns, ended=Change.STALLED)
        if self._quiet_at_ns is not None and last_ns > self._quiet_at_ns:
            silent_ns, self._quiet_at_ns = last_ns - self._quiet_at_ns, None
            return self._told(Change.RECOVERED, 0, silent_ns, time_ns=now_ns, ended=Change.QUIET)
        is_opening = self._seen == 0
        limit_ns = self._limits.opening_ns if is_opening else self.silence_limit_ns(pause, gap_ns)
        if now_ns - last_ns <= limit_ns:
            quiet_ns = max(self._limits.quiet_ns, self._usual_limit_ns(gap_ns))
            if pause is Pause.CAPTURE or self._quiet_at_ns is not None or now_ns - last_ns <= quiet_ns:
                return None
            self._quiet_at_ns = last_ns
            return self._told(Change.QUIET, limit_ns, now_ns - last_ns, time_ns=now_ns, pause=pause)
        self._stalled_at_ns, self._quiet_at_ns = last_ns, None
        return self._told(
            Change.STALLED, limit_ns, now_ns - last_ns, 1.0, time_ns=now_ns, pause=pause, is_opening=is_opening
        )

    def silence_limit_ns(self, pause: Pause | None, gap_ns: int = 0) -> int:
        """How long this rank may be silent now."""
        limits = self._limits
        limit = self._usual_limit_ns(gap_ns)
        if pause is Pause.CAPTURE:
            limit = max(limit, limits.capture_ns)
        elif pause is not None:
            limit = max(limit, limits.pause_ns, limits.pause_factor * self._pauses_ns.get(pause, 0))
        if self._seen <= WARM_UP:
            limit = max(limit, limits.start_ns)
        return int(limit)

    def _usual_limit_ns(self, gap_ns: int) -> float:
        """The same, of one that trains."""
        limits = self._limits
        # Of a kind that was only seen with a pause in it there is no window yet.
        paces = [t.windows[0] for tracks in self._tracks.values() for t in tracks if t.windows[0].ranked]
        usual = max((window.median() for window in paces), default=0.0)
        return max(limits.silence_factor * usual, limits.silence_ns, limits.gap_factor * gap_ns)

    def _track(self, iteration: Iteration) -> Pace | None:
        """The iterations that this one may be compared with; None beyond KINDS of them."""
        kind = (iteration.unit, iteration.num_batches, iteration.loader)
        tracks = self._tracks.get(kind)
        num = iteration.num_collectives
        for track in tracks or ():
            if are_alike(num, track.num_collectives):
                return track
        for old in [k for k in self._tracks if k[0] < iteration.unit]:  # The unit was learnt anew.
            self._num_tracks -= len(self._tracks.pop(old))
        if self._num_tracks >= KINDS and not self._forget_oldest(iteration.number):
            return None
        new = Pace(num)
        self._tracks.setdefault(kind, []).append(new)
        self._num_tracks += 1
        return new

    def _forget_oldest(self, number: int) -> bool:
        """Drop the kinds of the batches that did not come for longest, if that is long ago: of a data set that was made
        for one epoch, say."""
        seen = {kind: max(track.last_number for track in tracks) for kind, tracks in self._tracks.items()}
        oldest = min(seen, key=lambda kind: seen[kind])
        if number - seen[oldest] <= SPAN:
            return False
        self._num_tracks -= len(self._tracks.pop(oldest))
        return True

    def _yardstick(self, iteration: Iteration, track: Pace) -> Pace:
        """The iterations that say whether this one is long: its own kind or, while these are few, those with a batch
        more or less. A loader that fetches ahead gives one too many to the first iteration of each epoch."""
        if len(track.span.ranked) >= BLOCK:
            return track
        unit, num_batches, loader = iteration.unit, iteration.num_batches, iteration.loader
        near = [*self._tracks.get((unit, num_batches - 1, loader), ())]
        near += self._tracks.get((unit, num_batches + 1, loader), ())
        return max(near, key=lambda other: len(other.span.ranked), default=track)

    def _level(self, iteration: Iteration, track: Pace) -> list[Trigger]:
        """Slow, slower still, or recovered."""
        level = track.level
        if level is None:
            return []
        back = track.recovered()
        if back is not None:
            track.forget_slowness()
            return [self._told(Change.RECOVERED, level.median_ns, back, ended=Change.SLOW)]
        found = track.slowed()
        if found is None:
            return []
        # A fault slows all kinds; the first one that shows it speaks for them.
        if track.slow is None and any(
            other.slow is not None and iteration.number - other.last_number <= SPAN
            for tracks in self._tracks.values()
            for other in tracks
        ):
            return []
        window, now = found
        if track.slow is not None and (track.settled or now <= SLOWER * track.slowest_ns):
            return []
        track.mark_slow(window, now)
        pace_ns = track.pace_ns(window)
        return [self._told(Change.SLOW, level.median_ns, pace_ns, 1 - level.median_ns / pace_ns)]

    def _trend(self, duration_ns: int, track: Pace) -> list[Trigger]:
        rise = track.drifts(duration_ns)
        if rise is None:
            # Told once; a level that has come back arms it again.
            if track.drifting and track.slow is None and track.slowed() is None:
                track.drifting = False
            return []
        if track.drifting:
            return []
        track.drifting = True
        return [self._told(Change.DRIFT, rise[0], rise[1], 1 - rise[0] / rise[1])]

    def _recur(self, duration_ns: int, excess_ns: float) -> list[Trigger]:
        """Slow iterations that keep coming back and cost more than EFFECT of the time."""
        if len(self._span) == SPAN:
            self._span_ns -= self._span[0]
        self._span.append(duration_ns)
        self._span_ns += duration_ns
        self._judged += 1
        while self._slow and self._slow[0].number <= self._judged - SPAN:
            self._slow.popleft()
        if not excess_ns:
            if self._recurring and len(self._slow) < 3:
                self._recurring = False
                usual = median(self._span)
                return [self._told(Change.RECOVERED, usual, usual, ended=Change.RECURRING)]
            return []
        self._slow.append(_Slow(self._judged, excess_ns, duration_ns))
        if self._recurring or any(t.slow is not None for tracks in self._tracks.values() for t in tracks):
            return []
        if len(self._slow) < 3:
            return []
        every = self._spacing()
        if every == 0:
            return []
        # A hiccup of minutes among two of seconds is still one hiccup: none counts for more than three usual ones.
        typical_ns = median(s.excess_ns for s in self._slow)
        lost_ns = sum(min(s.excess_ns, 3 * typical_ns) for s in self._slow)
        if lost_ns <= EFFECT * self._span_ns:
            return []
        self._recurring = True
        observed = median(s.duration_ns for s in self._slow)
        return [self._told(Change.RECURRING, observed - typical_ns, observed, lost_ns / self._span_ns, every=every)]

    def _spacing(self) -> int | None:
        """Iterations from one slow one to the next if that is regular; None if it is not but they are many; else 0.

        Neighbours are one occurrence: a recompilation or a network's hiccup lasts for several iterations. Regular are
        four at equal distances up to the latest one that cost about the same, whatever else there is between, or the
        last three if they cost the same.
        """
        starts: dict[int, _Slow] = {}
        previous = -9
        for slow in self._slow:
            if slow.number - previous > 2:
                starts[slow.number] = slow
            previous = slow.number
        numbers = list(starts)
        last = numbers[-1]
        for before, start in enumerate(numbers[-2::-1]):
            every = last - start
            line = [last, start]
            while len(line) < 4:
                expected = line[-1] - every
                at = next((n for n in (expected, expected - 1, expected + 1) if n in starts), None)
                if at is None:
                    break
                line.append(at)
            costs = [starts[n].excess_ns for n in line]
            if len(line) == 4 and max(costs) <= 2 * min(costs):
                return every
            if before == 0 and len(numbers) > 2 and line == numbers[-3:][::-1] and max(costs) <= 1.25 * min(costs):
                return every
        return None if len(starts) >= IRREGULAR else 0

    def _told(
        self,
        change: Change,
        baseline_ns: float,
        observed_ns: float,
        cost: float = 0.0,
        *,
        time_ns: int | None = None,
        every: int | None = None,
        ended: Change | None = None,
        pause: Pause | None = None,
        is_opening: bool = False,
    ) -> Trigger:
        """A trigger at the latest iteration."""
        last = self.history[-1] if self.history else None
        made = Trigger(
            change=change,
            time_ns=time_ns if time_ns is not None else last.end_ns if last else 0,
            generation=self.generation,
            step=last.step if last else 0,
            number=last.number if last else -1,
            baseline_ns=round(baseline_ns),
            observed_ns=round(observed_ns),
            cost=cost,
            every=every,
            ended=ended,
            pause=pause,
            is_opening=is_opening,
            num_batches=last.num_batches if last else 0,
            num_collectives=last.num_collectives if last else 0,
        )
        self.triggers.append(made)
        return made
