"""Readings of a while: often in windows, seldom outside of them, in bounded memory, and counters as rates.

`Recorder` owns no thread and no clock: whoever has a loop calls `tick`, which reads what is due and says when to come
back. A late call leaves a gap, and no rate is made across it. Used by the agent; `evidence` reads what it holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eroica.samplers import Metric, Missing, Rank, Sampler, Target
from eroica.trace import Bools, Float64s, Int64s

KEEP = 1024
"""Readings kept per target: half an hour outside of windows, 100 s inside."""
MAX_TARGETS = 512
"""Targets kept; beyond, those that were not read for longest go. A host has some 100; hogs come and go."""
GAP = 3.0
"""A reading that comes after so many periods leaves a gap."""


def rates(mono_ns: Int64s, counts: Float64s, gap: Bools, per: float = 1.0) -> Float64s:
    """(n,) Increase per second over `per`, each since the count before it. NaN for the first, after a gap, where a
    count is missing, and where it fell: whatever counts was then started anew."""
    found = np.full(len(counts), np.nan)
    known = np.flatnonzero(np.isfinite(counts))
    if len(known) > 1:
        rise, seconds = np.diff(counts[known]), np.diff(mono_ns[known]) / 1e9
        sound = (rise >= 0) & (seconds > 0) & (np.diff(np.cumsum(gap)[known]) == 0)
        found[known[1:][sound]] = rise[sound] / seconds[sound] / per
    return found


@dataclass(frozen=True, slots=True)
class Series:
    """One target's values over time."""

    target: Target
    wall_ns: Int64s
    """(n,) When each was read, since 1970."""
    mono_ns: Int64s
    """(n,) The same instants on the monotonic clock."""
    gap: Bools
    """(n,) The reading before was too long ago to say what happened in between."""
    values: Mapping[str, Float64s]
    """By metric, (n,); NaN = not read."""
    labels: Mapping[str, str]
    """The latest ones."""


class _Column:
    """The last KEEP readings of a target, in a buffer that grows with them."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.labels: dict[str, str] = {}
        self.count = 0
        self.times = np.zeros((16, 3), np.int64)
        self.values = np.full((16, 4), np.nan)

    def add(self, wall_ns: int, mono_ns: int, gap: bool, values: Mapping[str, float], keep: int) -> None:
        rows, columns = self.values.shape
        for name in values:
            self.names.setdefault(name, len(self.names))
        new_rows = min(2 * rows, keep) if self.count == rows else rows
        new_columns = max(columns, len(self.names))
        if (new_rows, new_columns) != (rows, columns):
            # Only ever grown before the first lap, so the rows lie in order.
            grown = np.full((new_rows, new_columns), np.nan)
            grown[:rows, :columns] = self.values
            times = np.zeros((new_rows, 3), np.int64)
            times[:rows] = self.times
            self.values, self.times = grown, times
        place = self.count % len(self.values)
        self.times[place] = wall_ns, mono_ns, gap
        self.values[place] = np.nan
        for name, value in values.items():
            self.values[place, self.names[name]] = value
        self.count += 1

    def between(self, target: Target, start_ns: int, end_ns: int) -> Series:
        rows = len(self.values)
        order = np.arange(self.count) if self.count <= rows else (np.arange(rows) + self.count) % rows
        times = self.times[order]
        inside = np.flatnonzero((times[:, 0] >= start_ns) & (times[:, 0] <= end_ns))
        if len(inside):
            # The readings around the interval too: a rate needs the one before, the last instants the one after.
            inside = np.arange(max(inside[0] - 1, 0), min(inside[-1] + 2, len(order)))
        else:
            after = int(np.searchsorted(times[:, 0], start_ns))
            inside = np.arange(after - 1, after + 1) if 0 < after < len(order) else inside
        chosen: npt.NDArray[np.float64] = self.values[order[inside]]
        return Series(
            target,
            times[inside, 0].copy(),
            times[inside, 1].copy(),
            times[inside, 2].astype(bool),
            {name: chosen[:, k].copy() for name, k in self.names.items()},
            dict(self.labels),
        )


class Recorder:
    """Reads samplers when they are due and keeps what they said."""

    def __init__(
        self,
        samplers: Mapping[str, Sampler],
        *,
        fast_s: float = 0.1,
        slow_s: float = 2.0,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        keep: int = KEEP,
    ) -> None:
        if not 0 < fast_s <= slow_s:
            raise ValueError(f"Recorder: fast_s={fast_s} must be above 0 and at most slow_s={slow_s}")
        self._samplers = dict(samplers)
        self._fast_ns, self._slow_ns = int(fast_s * 1e9), int(slow_s * 1e9)
        self._wall_ns, self._monotonic_ns = wall_ns, monotonic_ns
        self._keep = max(keep, 16)
        self._columns: dict[tuple[str, Target], _Column] = {}
        self._metrics: dict[str, Metric] = {n: m for s in samplers.values() for n, m in s.metrics.items()}
        self._fast_until_ns = 0
        self._last_ns: int | None = None
        self._period_ns = self._slow_ns
        self.lost: list[Missing] = []
        """Samplers that failed while reading; they are not asked again."""
        self.cost_ns = 0
        """What all reads took together, by the monotonic clock."""

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """Of all samplers."""
        return self._metrics

    def hurry(self, seconds: float) -> None:
        """Read often for so long, from the next tick on. Asked for anew by each window, so that it ends by itself."""
        self._fast_until_ns = self._monotonic_ns() + int(seconds * 1e9)

    def tick(self, ranks: Sequence[Rank]) -> float:
        """Read if it is due. Returns the seconds until it is due again."""
        mono_ns = self._monotonic_ns()
        period_ns = self._fast_ns if mono_ns < self._fast_until_ns else self._slow_ns
        if self._last_ns is not None and mono_ns - self._last_ns < period_ns:
            return (self._last_ns + period_ns - mono_ns) / 1e9
        # The period in which the last reading was made: the first one of a window comes up to `slow_s` after it.
        gap = self._last_ns is not None and mono_ns - self._last_ns > GAP * max(self._period_ns, period_ns)
        self._last_ns, self._period_ns = mono_ns, period_ns
        for name, sampler in list(self._samplers.items()):
            at_ns = self._monotonic_ns()
            wall_ns = self._wall_ns()
            try:
                reading = sampler.read(at_ns, ranks)
            except Exception as error:  # an extension's, or a driver's: the other counters go on
                self.lost.append(Missing(name, f"reading failed with {type(error).__name__}: {error}"))
                del self._samplers[name]
                continue
            for target, values in reading.values.items():
                column = self._columns.pop((name, target), None) or _Column()
                column.add(wall_ns, at_ns, gap, values, self._keep)
                column.labels.update(reading.labels.get(target, {}))
                # Put in again at the end: the order is that of the last reading.
                self._columns[name, target] = column
        while len(self._columns) > MAX_TARGETS:
            del self._columns[next(iter(self._columns))]
        ended_ns = self._monotonic_ns()
        self.cost_ns += ended_ns - mono_ns
        return max(period_ns - (ended_ns - mono_ns), 0) / 1e9

    def between(self, start_ns: int, end_ns: int) -> Iterator[Series]:
        """Each target's readings of an interval of the wall clock, with one before and one after it."""
        for (_, target), column in self._columns.items():
            series = column.between(target, start_ns, end_ns)
            if len(series.wall_ns):
                yield series
