"""When one rank came to the first collective of each step on each group, by its ring: what pacing goes by.

Only durations are told, so that clocks of hosts need not agree: who came last has the shortest one. A duration is from
entering the call, after any hold, to its end, where that can be seen (gloo; not NCCL); when a rank entered is told by
the time since its own step began. Pure. Kept by the agent (`holding`), joined over ranks by `conductor`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from eroica import ring
from eroica.ring import OPS, Record
from eroica.steps import Iteration

MOST_STEPS = 256
"""That wait for the end of their iteration; older ones are forgotten."""
_MONITORED = OPS.index("monitored_barrier")


class Arrival(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One iteration of one rank. Fields are only ever added, at the end and with a default."""

    step: int
    """Raw count of steps at its begin."""
    length_ns: int
    held_ns: int
    """For how long pacing has held the rank back in it."""
    firsts: tuple[tuple[int, int, int], ...]
    """Key of a group, sequence and duration of its first collective in the step; a duration of -1 was not seen. Empty
    in steps in which the probe records no collectives (`thrift`)."""
    entered_ns: tuple[int, ...] = ()
    """Of each of `firsts`: from the end of the optimizer step before to entering it; -1 was not seen."""


class Arrivals:
    """Of one rank; owns the steps whose iteration has not ended."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        """Group -> the last step in which it was met."""
        self._firsts: dict[int, dict[int, tuple[int, int, int]]] = {}
        """Step -> group -> sequence, duration and begin of the first collective."""
        self._stepped: dict[int, int] = {}
        """Step -> when the optimizer step before it was done."""
        self._open: dict[int, tuple[int, int]] = {}
        """Number of a record whose end is to come -> its step and group."""
        self._held: dict[int, int] = {}
        self._told = -1

    def feed(self, begun: Sequence[Record], ended: Sequence[Record]) -> None:
        """New records, as `Watch.feed` takes them."""
        for record in begun:
            if record.kind != ring.COLLECTIVE or record.op == _MONITORED:
                continue
            last = self._last.get(record.group)
            if last is None or record.step > last:
                self._last[record.group] = record.step
                # Of the step in which a group is first seen, earlier collectives may have passed.
                if last is not None:
                    self._firsts.setdefault(record.step, {})[record.group] = record.sequence, -1, record.begin_ns
                    self._open[record.number] = record.step, record.group
        for record in ended:
            assert record.duration_ns is not None
            if record.kind == ring.PACED:
                self._held[record.step] = self._held.get(record.step, 0) + record.duration_ns
            elif record.kind == ring.STEP:
                self._stepped[record.step + 1] = record.begin_ns + record.duration_ns
            elif record.number in self._open:
                step, group = self._open.pop(record.number)
                if not record.raised and group in self._firsts.get(step, {}):
                    sequence, _, begin_ns = self._firsts[step][group]
                    self._firsts[step][group] = sequence, record.duration_ns, begin_ns
        self._forget()

    def take(self, laps: Iterable[Iteration]) -> list[Arrival]:
        """Those whose iteration has ended. `laps`: the last ones, the oldest first; each is told once. Iterations in
        which something else happened are left out."""
        told = []
        for lap in laps:
            if lap.step <= self._told:
                continue
            since, self._told = self._told, lap.step
            steps = sorted(step for step in self._firsts if since <= step < lap.step)
            firsts: dict[int, tuple[int, int]] = {}
            entered: dict[int, int] = {}
            for step in steps:
                stepped_ns = self._stepped.get(step)
                for group, (sequence, duration_ns, begin_ns) in self._firsts.pop(step).items():
                    if group not in firsts:
                        firsts[group] = sequence, duration_ns
                        entered[group] = max(begin_ns - stepped_ns, -1) if stepped_ns is not None else -1
            held_ns = sum(self._held.pop(step) for step in list(self._held) if step < lap.step)
            if since >= 0 and lap.pause is None and self._last:
                told.append(
                    Arrival(
                        step=since,
                        length_ns=lap.duration_ns,
                        held_ns=held_ns,
                        firsts=tuple((group, *first) for group, first in sorted(firsts.items())),
                        entered_ns=tuple(entered[group] for group in sorted(firsts)),
                    )
                )
        return told

    def _forget(self) -> None:
        for table in (self._firsts, self._held, self._stepped):
            for step in sorted(table)[:-MOST_STEPS]:
                del table[step]
        if len(self._open) > 4 * MOST_STEPS:
            for number in sorted(self._open)[: -2 * MOST_STEPS]:
                del self._open[number]
