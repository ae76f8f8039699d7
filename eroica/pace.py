"""How long iterations of one kind take: their best level, their healthy scatter, and what departs from both.

Pure, standard library only. It knows neither why an iteration is long nor what else the rank does: `degradation`, its
only user, decides which iterations count and what to make of a departure.

Scatter is measured three ways and the widest counts, since each misses something: from single iterations and how much
neighbours are alike (early, any shape of noise), from medians as they wandered so far (slow changes that single
iterations do not show), and as plain quantiles (two modes, closures with varying work).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median

EFFECT = 0.05
"""A slowdown below this is not worth a window (the design's 5 %; a daily 1-2 % of clock and cooling is normal)."""
WINDOWS = (10, 40, 160)
"""Iterations whose medians are looked at."""
GUARDS = (0.95, 0.80, 0.67)
"""And the quantile of healthy iterations that such a median must exceed too. A median of n independent iterations does
so by chance once in 1e5, whatever their distribution: this is what keeps two-mode jobs and L-BFGS silent."""
FEW = 5
"""One of so many iterations of a window is not to be usual any more where only noise tells its median from a guard."""
LOW_GUARD = 0.05
"""The quantile that the median of the last 10 must fall below for the level to have fallen."""
FALLEN = 1.25
"""And so many times it must fit into the level: no pace is taken to wander by as much (FARTHEST), and what a pace that
wanders has shown is not to be forgotten for a quick spell."""
MARGIN = 1.5
"""Standard errors by which a median must exceed EFFECT, so that 3 % of daily swing and 1 % of noise do not add up."""
STANDARD_ERRORS = 5.0
"""And by which it must exceed the level: a run has thousands of medians."""
EARLY = 8
"""Iterations that serve as a level where one of our own windows begins before there are more."""
BLOCK = 100
"""Iterations whose median is a level. The best of a hundred such medians lies below the truth by 0.3 standard
deviations of one iteration."""
GROWING = (20, 35, 50, 70)
"""The first block serves before it is full."""
SPAN = 300
"""Iterations over which recurring ones are looked for."""
SLOW_ITERATION = 1.5
"""Times the median: a slow iteration."""
OUTSIDE = 5.0
"""And by so many standard deviations outside: iterations whose length varies anyway have none."""
COMMON = 0.2
"""Above this share of slow ones it is a second mode (train and rollout), not an exception."""
TREND = 12
"""Medians, one after the other, that a trend needs, all rising but for INVERSIONS pairs of the 66: by chance 3e-6."""
INVERSIONS = 4
LAGS = (6, 12, 24, 48)
"""Medians of 10 iterations that lie so far apart tell how far the pace of a healthy job wanders."""
GROWTH = 1.3
"""Times what half the distance shows: it has not been seen whole yet, and counts twice. A random walk has 1.4."""
DISTINCT = 1.5
"""Times what independent iterations make of a median: wandering. Few medians tell less than all iterations do."""
FARTHEST = 0.05
"""Of the level: no pace is taken to wander by more, so that what is a quarter slower (STANDARD_ERRORS of it) is slow. A
small slowdown that nobody noticed looks like wandering, and is not to hide a large one."""


class _Rolling:
    """The last `size` values, in order and sorted."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.values: deque[int] = deque()
        self.ranked: list[int] = []

    def add(self, value: int) -> None:
        if len(self.values) == self.size:
            del self.ranked[bisect_left(self.ranked, self.values.popleft())]
        self.values.append(value)
        insort(self.ranked, value)

    @property
    def full(self) -> bool:
        return len(self.values) == self.size

    def median(self) -> float:
        n = len(self.ranked)
        return (self.ranked[(n - 1) // 2] + self.ranked[n // 2]) / 2


@dataclass(frozen=True, slots=True)
class _Level:
    """Healthy iterations of one kind."""

    median_ns: float
    num: int
    sigma: float
    """Robust standard deviation of one iteration, as a share of the median."""
    likeness: float
    """So many iterations tell as much as one independent one would: 1 without correlation of neighbours."""
    guards_ns: tuple[int, ...]
    """Quantiles GUARDS."""
    low_guard_ns: int
    """Quantile LOW_GUARD."""

    @property
    def error(self) -> float:
        """Standard error of the median, as a share of it. 1.2533: against that of a mean."""
        return 1.2533 * self.sigma * sqrt(min(self.likeness / self.num, 1.0))

    @classmethod
    def of(cls, durations: Sequence[int]) -> _Level:
        ranked = sorted(durations)
        n = len(ranked)
        middle = max(median(ranked), 1.0)
        # Of a first-order process, whose differences scatter less than its values by 1 - rho.
        alike = 1 - (_step(durations) / max(_spread(ranked), 1.0)) ** 2
        rho = min(max(alike, 0.0), 0.98)
        guards_ns, low_guard_ns = tuple(ranked[int(q * n)] for q in GUARDS), ranked[int(LOW_GUARD * n)]
        return cls(middle, n, _spread(ranked) / middle, (1 + rho) / (1 - rho), guards_ns, low_guard_ns)


def _spread(ranked: Sequence[int]) -> float:
    """Robust standard deviation, from the median of the absolute deviations."""
    middle = median(ranked)
    return 1.4826 * median(abs(x - middle) for x in ranked)


def _step(values: Sequence[float], lag: int = 1) -> float:
    """Robust standard deviation from differences, blind to a trend or a step."""
    differences = [b - a for a, b in zip(values, values[lag:], strict=False)]
    trend = median(differences)
    return 1.4826 * median(abs(d - trend) for d in differences) / sqrt(2)


def _apart(values: Sequence[float], lag: int) -> float:
    """Standard deviation from differences of values so far apart, by those that four of five do not exceed."""
    differences = sorted(abs(b - a) for a, b in zip(values, values[lag:], strict=False))
    return differences[int(0.8 * len(differences))] / (1.2816 * sqrt(2))


class Pace:
    """Iterations of one kind: their best level, what scatter is healthy, and what departs from it. Bounded memory."""

    def __init__(self, num_collectives: int) -> None:
        self.num_collectives = num_collectives
        self.last_number = 0
        self.slow: int | None = None
        """Index of the window that showed that it is slow."""
        self.slowest_ns = 0.0
        """And the median of that window when it was full of slow ones."""
        self.settled = 0
        """Iterations of this kind until it is, and until the next longer one is too."""
        self.drifting = False
        self._begin()

    def _begin(self) -> None:
        """Nothing is known of how long iterations take."""
        self.windows: tuple[_Rolling, ...] = tuple(_Rolling(n) for n in WINDOWS)
        self.span = _Rolling(SPAN)
        self.level: _Level | None = None
        self.limits: tuple[float, ...] = (EFFECT,) * len(WINDOWS)
        """How far above the level, as a share, the median of each window may lie."""
        self._guards_ns: tuple[float, ...] = (0.0,) * len(WINDOWS)
        """Of the windows whose limit is a quantile of what was healthy."""
        self._block: list[int] = []
        self._is_first = True
        self._healthy: deque[_Level] = deque(maxlen=9)
        self._calm: deque[float] = deque(maxlen=100)
        """Medians of 10 iterations, one after the other, while nothing was slow."""
        self._wanders_ns: tuple[tuple[float, float], ...] = ((0.0, 0.0),) * len(WINDOWS)
        self._ten: list[int] = []
        self._tens: deque[float] = deque(maxlen=TREND)
        self._hundred: list[float] = []
        self._hundreds: deque[float] = deque(maxlen=TREND)

    def add(self, duration_ns: int) -> None:
        """The next iteration."""
        for window in (*self.windows, self.span):
            window.add(duration_ns)
        self._block.append(duration_ns)
        self._begin_anew_if_fallen()
        num = len(self._block)
        if num in GROWING and self.slow is None and (self.level is None or self.level.num < BLOCK):
            self._learn(_Level.of(self._block))
        elif num == BLOCK:
            # What began in the first block is not to widen the scatter before it could be noticed.
            self._learn(_Level.of(self._block[: -WINDOWS[1]] if self._is_first else self._block))
            self._is_first = False
            self._block.clear()

    def _begin_anew_if_fallen(self) -> None:
        """A warm-up is over, or a slowdown that was there from the first step on: what it took is no scatter of the new
        level, and windows that are still half full of it tell of no slowdown."""
        level, latest = self.level, self.windows[0]
        if level is None or self.slow is not None or not latest.full:
            return
        most_ns = min(level.median_ns / max(FALLEN, 1 + self.limits[0]), float(level.low_guard_ns))
        if latest.median() >= most_ns:
            return
        kept = [duration_ns for duration_ns in latest.values if duration_ns < most_ns]
        self._begin()
        for window in (*self.windows, self.span):
            for duration_ns in kept:
                window.add(duration_ns)
        self._block = kept

    def learn_early(self) -> None:
        """A window of ours begins. What it may leave behind is to be told from what was before it, however few."""
        if self.level is None and len(self._block) >= EARLY:
            self._learn(_Level.of(self._block))

    def _learn(self, new: _Level) -> None:
        """The best level of the run, and how much healthy iterations scatter."""
        old = self.level
        grows = old is not None and old.num < min(new.num, BLOCK)
        if (
            old is None
            or new.median_ns < old.median_ns
            # What so few scattered iterations said was no better known than that.
            or (grows and new.median_ns <= old.median_ns * (1 + max(EFFECT, old.error)))
        ):
            self.level = new
        assert self.level is not None
        if new.num == BLOCK and self.slow is None and new.median_ns <= self.level.median_ns * (1 + self.limits[2]):
            self._healthy.append(new)
        self._set_limits(self.level)

    def _set_limits(self, level: _Level) -> None:
        both = [self._limit(i, level) for i in range(len(WINDOWS))]
        self.limits = tuple(max(limit, guard_ns / level.median_ns - 1) for limit, guard_ns in both)
        self._guards_ns = tuple(g if g / level.median_ns - 1 > limit else 0.0 for limit, g in both)

    def _limit(self, window: int, level: _Level) -> tuple[float, float]:
        """What noise makes of a median, as a share of the level, and the guard."""
        sigma, likeness, guard_ns = level.sigma, level.likeness, float(level.guards_ns[window])
        if self._healthy:  # The best block may be a quiet one by chance.
            sigma = max(sigma, median(h.sigma for h in self._healthy))
            likeness = max(likeness, median(h.likeness for h in self._healthy))
            guard_ns = max(guard_ns, median(h.guards_ns[window] for h in self._healthy))
        # 1.2533: standard error of a median, against that of a mean. Few iterations tell their own spread badly.
        error = 1.2533 * sigma * sqrt(min(likeness / WINDOWS[window], 1.0) + min(likeness / level.num, 1.0))
        near, far = (wander_ns / level.median_ns for wander_ns in self._wanders_ns[window])
        alone = 1.2533 * sigma * sqrt(likeness / (10 if window == 0 else 40))
        error = max(error, near, min(far, FARTHEST) if far > DISTINCT * alone else 0.0) * (1 + GROWING[0] / level.num)
        return max(EFFECT + MARGIN * error, STANDARD_ERRORS * error), guard_ns

    def _wander(self, window: int, last: int | None = None) -> tuple[float, float]:
        """Standard deviations in ns of a median over a window, near and far, as they were seen; 0 while too few were.

        Where neighbours are alike (a shared filesystem, other jobs' traffic, other virtual machines) medians scatter
        more than the scatter of iterations says, and the more the further apart they are. Near ones are compared less
        their trend, so that a fault that grows does not count as noise; distant ones as they are, since a trend and a
        wave look alike in so few. The `last` medians may be those in question: the far ones leave them out.
        """
        group = 1 if window == 0 else 4
        calm = list(self._calm)
        levels = [sum(calm[i : i + group]) / group for i in range(len(calm) - group + 1)]
        near = _step(levels[::group], lag=3) if len(levels) > 12 * group else 0.0
        levels = levels[: -(group if last is None else last)]
        far = [_apart(levels, lag) for lag in LAGS if group <= lag <= len(levels) - lag]
        if len(far) > 1 and far[-1] > GROWTH * far[-2]:
            far.append(2 * far[-1])
        return near, max(far, default=0.0)

    def slowed(self) -> tuple[int, float] | None:
        """The first window whose median is too high, and that median."""
        if self.level is None:
            return None
        for i, window in enumerate(self.windows):
            if window.full:
                now = window.median()
                if now > self.level.median_ns * (1 + self.limits[i]) and not self._is_chance(i, now):
                    return i, now
        return None

    def _is_chance(self, window: int, now_ns: float) -> bool:
        """Of iterations of two lengths in about equal parts, median and guard may both be the longer one, and noise
        decides. Not where the shorter one is hardly seen any more, and of ten iterations in none."""
        assert self.level is not None
        if now_ns > self._guards_ns[window] * (1 + EFFECT):
            return False
        rolling = self.windows[window]
        return rolling.ranked[rolling.size // FEW if window else 0] <= self.level.median_ns * (1 + EFFECT)

    def recovered(self) -> float | None:
        """The median, if the slowdown is over: less than half of what a trigger needs, on the next longer window.

        The same window would tell of recoveries that are noise.
        """
        if self.slow is None or self.level is None:
            return None
        if self.settled:
            self.settled -= 1
            self.slowest_ns = max(self.slowest_ns, self.windows[self.slow].median())
            return None
        longer = _longer(self.slow)
        now = self.windows[longer].median()
        # Where pace wanders, a longer window may be allowed more than the one that told.
        limit = min(self.limits[self.slow], self.limits[longer])
        return now if now < self.level.median_ns * (1 + limit / 2) else None

    def mark_slow(self, window: int, now_ns: float) -> None:
        """A trigger told that the median of a window is too high."""
        self.slow, self.slowest_ns, self.settled = window, now_ns, WINDOWS[_longer(window)]
        assert self.level is not None
        # What led up to it was no wandering either, and is not to hide the next one.
        while self._calm and self._calm[-1] > self.level.median_ns * (1 + self.limits[window] / 2):
            self._calm.pop()

    def forget_slowness(self) -> None:
        """It is over; long windows, still half full of it, would tell of it again."""
        self.slow = None
        self.windows = (self.windows[0], *(_Rolling(n) for n in WINDOWS[1:]))

    def pace_ns(self, window: int) -> float:
        """What slow iterations take: the median of those of a window that are clearly above the level."""
        assert self.level is not None
        ranked = self.windows[window].ranked
        return median(ranked[bisect_left(ranked, self.level.median_ns * (1 + self.limits[window] / 2)) :])

    def drifts(self, duration_ns: int) -> tuple[float, float] | None:
        """First and last level of a rising trend, on medians of 10 and of 100 iterations."""
        self._ten.append(duration_ns)
        if len(self._ten) < 10:
            return None
        self._tens.append(median(self._ten))
        if self.slow is None:
            self._calm.append(self._tens[-1])
            # What may be a slowdown of its own is not to be learnt as usual before it could be noticed.
            # After a recovery the window begins anew, and is empty at first.
            now = self.windows[1].median() if self.windows[1].ranked else 0.0
            if self.level is not None and now <= self.level.median_ns * (1 + self.limits[1] / 2):
                longer = self._wander(1)
                self._wanders_ns = (self._wander(0), *(longer for _ in WINDOWS[1:]))
                self._set_limits(self.level)
        self._hundred.append(self._tens[-1])
        self._ten.clear()
        near_ns, far_ns = self._wander(0, TREND)
        found = _rises(self._tens, STANDARD_ERRORS * max(near_ns, far_ns))
        if len(self._hundred) == 10:
            self._hundreds.append(median(self._hundred))
            self._hundred.clear()
            found = found or _rises(self._hundreds, STANDARD_ERRORS * near_ns)
        return found

    def outlier_ns(self, duration_ns: int) -> float:
        """What an iteration took beyond the median, if it is a slow one; else 0."""
        ranked = self.span.ranked
        if len(ranked) < BLOCK:
            return 0.0
        usual = self.span.median()
        if duration_ns <= SLOW_ITERATION * usual or duration_ns <= usual + OUTSIDE * _spread(ranked):
            return 0.0
        common = len(ranked) - bisect_left(ranked, SLOW_ITERATION * usual)
        return duration_ns - usual if common <= COMMON * len(ranked) else 0.0


def _longer(window: int) -> int:
    return min(window + 1, len(WINDOWS) - 1)


def _rises(levels: Sequence[float], floor_ns: float) -> tuple[float, float] | None:
    if len(levels) < TREND:
        return None
    values = list(levels)
    first, last = median(values[:3]), median(values[-3:])
    if last <= first + max(EFFECT * first, floor_ns):
        return None
    inversions = sum(a >= b for i, a in enumerate(values) for b in values[i + 1 :])
    return (first, last) if inversions <= INVERSIONS else None
