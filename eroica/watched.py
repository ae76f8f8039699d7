"""One rank as the agent of its host follows it: its ring, what was read from it, what is told of that with a capture.

The agent (`agent`) reads and decides; here is what it keeps of each rank, and how that becomes the history that goes to
the coordinator beside a summary. Bounded: a rank that runs for weeks takes no more than one that runs for minutes.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from eroica import bus, ring
from eroica.background import History, Lap, Span
from eroica.job import told_ranks
from eroica.marks import Watch
from eroica.probe.environment import merged
from eroica.ring import Record, Tail
from eroica.traffic import Traffic
from eroica.untrusted import clean

MOST_SPANS = 512
MOST_WAITS = 8192
"""Collectives kept of a rank: those of the laps told, where a lap has up to 27."""
MOST_FETCHES = 64
MOST_LAPS = 300
"""Iterations told with a window: what `degradation` looks back at."""
MOST_HOST = 128
"""Characters of a host's name."""


@dataclass(slots=True)
class Watched:
    """A ring and what was made of it."""

    tail: Tail
    watch: Watch
    words: tuple[int, ...]
    notes: list[dict[str, object]]
    has_group: bool = False
    is_single: bool = False
    """Its process has no rank: it counts only while no other does."""
    job: str = ""
    """What the ring says; "" until it was said."""
    host: str = ""
    """The same. Ranks in containers have host names of their own, though one agent watches them all."""
    start: int = 0
    """Number of the start of a training that it belongs to, from 1 in the order in which they were seen."""
    parent: int = 0
    """The process that started its process; 0 if unknown."""
    training: str = ""
    """What the elastic restarts of one training share, and no two trainings."""
    is_alive: bool = True
    exit_status: int | None = None
    """Minus the signal where one ended it; None while it lives, and where its launcher was faster than we are."""
    handle: int = -1
    """Of its process: can be read once that has gone; -1: none."""
    answer: int = 0
    standing: bus.Standing | None = None
    spans: deque[Record] = field(default_factory=lambda: deque(maxlen=MOST_SPANS))
    """Garbage collections and phases that are over."""
    waits: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=MOST_WAITS))
    """Collectives that are over, as far as their end can be seen: begin, length."""
    fetches: deque[Record] = field(default_factory=lambda: deque(maxlen=MOST_FETCHES))
    """Batches that were long in coming."""
    traffic: Traffic = field(default_factory=Traffic)
    captures: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Window -> its begin and end, CLOCK_MONOTONIC."""
    written: deque[Span] = field(default_factory=lambda: deque(maxlen=MOST_FETCHES))
    """The writing of traces of ours, CLOCK_MONOTONIC."""
    writing: tuple[int, int] | None = None
    """At which step and since when the rank writes one."""
    is_closed: bool = False
    """Nothing more is read of it: it only tells later rings what came before them."""

    @property
    def seniority(self) -> tuple[int, bool, int]:
        """Which of several rings of one rank number is the rank's: a program that a rank starts inherits RANK."""
        identity = self.tail.identity
        return identity.generation, self.has_group, identity.wall_ns

    def take_notes(self, notes: list[dict[str, object]]) -> None:
        """What the rank says of itself."""
        self.notes += notes
        self.has_group = self.has_group or any("group" in note for note in notes)
        for note in notes:
            if "placed" in note:
                self.is_single = note["placed"] == "single"
            if not self.job and note.get("job"):
                self.job = str(note["job"])
            if not self.host and note.get("host"):
                self.host = clean(str(note["host"]), MOST_HOST)

    def history(self, shift_ns: int) -> History:
        """What is told of it with a capture. `shift_ns`: from CLOCK_MONOTONIC to the wall clock."""
        return history_of(
            self.watch,
            [*self.spans, *self.fetches],
            merged(self.notes),
            shift_ns,
            self.waits,
            written=self.written,
            reduced_bytes=self.traffic.num_bytes(),
        )

    def close(self) -> None:
        """Read nothing more, and keep nothing that is large."""
        self.let_go()
        if not self.is_closed:
            self.is_closed = True
            self.tail.close()
            self.watch = Watch(self.words[ring.RANK], self.tail.identity.generation)
            self.traffic = Traffic()
            for kept in (self.spans, self.waits, self.fetches, self.written):
                kept.clear()

    def let_go(self) -> None:
        """Its process is of no interest any more."""
        handle, self.handle = self.handle, -1
        if handle >= 0:
            os.close(handle)


def history_of(
    watch: Watch,
    spans: Sequence[Record],
    environment: Mapping[str, object],
    shift_ns: int,
    collectives: Sequence[tuple[int, int]] = (),
    *,
    written: Sequence[Span] = (),
    reduced_bytes: int = 0,
) -> History:
    """What a rank tells with its capture. `spans`: garbage collections, phases and long fetches that are over;
    `shift_ns`: from CLOCK_MONOTONIC to the wall clock; `collectives`: begin and length of those whose end can be seen;
    `written`: when it wrote captures, CLOCK_MONOTONIC."""
    laps = list(watch.iterations)[-MOST_LAPS - 1 :]
    waits = sorted(collectives)

    def waited(start_ns: int, end_ns: int) -> int:
        inside = waits[bisect_left(waits, (start_ns, 0)) : bisect_left(waits, (end_ns, 0))]
        return sum(lasts for _, lasts in inside) if inside else -1

    since_ns = laps[0].start_ns if laps else 0
    return History(
        laps=tuple(
            Lap(
                *(before.step, lap.start_ns + shift_ns, lap.duration_ns, lap.pause.value if lap.pause else ""),
                *(lap.num_batches, lap.num_collectives, waited(lap.start_ns, lap.end_ns)),
            )
            for before, lap in pairwise(laps)
        ),
        spans=tuple(
            Span(_span_name(record), record.step, record.begin_ns + shift_ns, record.duration_ns or 0)
            for record in spans
            if record.begin_ns >= since_ns
        )
        + tuple(
            Span(span.name, span.step, span.start_ns + shift_ns, span.duration_ns)
            for span in written
            if span.start_ns >= since_ns
        ),
        environment=environment,
        reduced_bytes=reduced_bytes,
        changes=tuple(watch.degradation.triggers),
    )


def groups_of(notes: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """The process groups of a rank, as torch writes them into a trace."""
    return [
        {
            "pg_name": note["name"],
            "pg_desc": note.get("description", ""),
            "backend_config": note.get("backend", ""),
            "pg_size": note.get("size", 0),
            "ranks": list(told_ranks(str(note.get("ranks", "")))),
        }
        for note in notes
        if "group" in note and "name" in note
    ]


def _span_name(record: Record) -> str:
    if record.kind == ring.GC:
        return "gc"
    if record.kind == ring.NEXT:
        return "fetch"
    return ring.PHASES[record.op] if record.op < len(ring.PHASES) else "other"
