"""From the records of a rank's flight ring to its iterations, and to what they show: one `Watch` per rank.

It puts the records in the order of time, makes marks of them for `steps.Iterations`, gives the raw counts of the ring
to what comes out, and hands it to `degradation.Degradation`. It reads no file and no clock: records and the time are
arguments, so that a ring that is read live and one that is read after the death of its rank go the same way. It judges
nothing itself. Used by the agent, which looks several times a second, and by the post-mortem, which looks once.

    record                          mark, at                        source
    dataloader next                 NEXT, its end                   number of the data set
      that ended by an exception    EXHAUSTED, its end              the same
    optimizer step                  BEGIN and END, its end          number of the optimizer
      left out by a scaler          SKIPPED, its end                the same
      that ended by an exception    none: it is no step
    collective, send, receive       COLLECTIVE, its begin           hash of operation, group, peer and size
    phase, capture                  begin and end of a pause

Worked example of an order that must not be taken from the file: a next begins (record 7), a collective begins in
another thread (record 8), the next ends. The collective comes first, since a batch counts when it is there. A poll that
sees record 8 but not yet the end of 7 must not go ahead, so events younger than `HOLD_NS` wait for the next poll.

What was overwritten before it was read shows in the counts that records carry: the 40th next says that it is the 40th.
If fewer were seen, marks are missing, and the iteration in progress is dropped: it would be too short or too long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import islice
from statistics import median_low

from eroica import ring
from eroica.commands import Unit
from eroica.degradation import Degradation, Limits, Trigger
from eroica.ring import Flight, Record
from eroica.steps import Basis, Counts, Iteration, Iterations, Mark, Pause

HOLD_NS = 20_000_000
"""A thread may be put aside between taking the time and writing its record, and a ring is not read in one instant. The
interpreter passes its lock on after 5 ms; a busy host adds to that."""
KEPT = 2_000
"""Iterations kept."""
RECENT = 33
"""Iterations from which the usual number of raw units in one is taken."""
LAPPED = 1 << 15
"""Records after which an older one has been overwritten in any ring."""
OUTSIDE = 1 << 62
"""Numbers of records that stand in no ring begin here."""
MAX_KINDS = 64
"""Kinds of iterations whose number of collectives is remembered."""

ALWAYS = 3
"""Iterations in a row with an evaluation in them: it is a part of training (a teacher, frozen norms that are switched
to evaluation in each step), and later ones are judged like any other."""

_PAUSES = {
    "save": Pause.CHECKPOINT,
    "load": Pause.CHECKPOINT,
    "evaluation": Pause.EVALUATION,
    "compile": Pause.COMPILE,
    "rendezvous": Pause.RENDEZVOUS,
    "teardown": Pause.RENDEZVOUS,
}
"""By the name of the phase."""
_NEXT, _STEP, _COLLECTIVE, _PAUSE_BEGINS, _PAUSE_ENDS = range(5)
_Event = tuple[int, int, int, Record]
"""Time, number of the record, what, the record."""


class Watch:
    """What one rank does, as its ring tells it, from one rendezvous to the next."""

    def __init__(self, rank: int, generation: int = 0, limits: Limits | None = None) -> None:
        self.rank = rank
        self.iterations: deque[Iteration] = deque(maxlen=KEPT)
        """The last ones. `step` is the ring's own count of `unit` at the iteration's end, also when the first records
        were missed."""
        self.num_iterations = 0
        """All, since this object was made."""
        self.num_losses = 0
        """How often records were overwritten before they were read."""
        self.is_disturbed = False
        """We ourselves take time from the job (captures are being read): what ends meanwhile counts as capturing."""
        self.degradation = Degradation(limits, generation)
        self._learnt = Iterations(generation, skips_are_told=True)
        self._generation = generation
        self._forget()

    def _forget(self) -> None:
        self._events: list[_Event] = []
        self._words: Sequence[int] = ()
        self._last_ns: int | None = None
        self._nexts: int | None = None
        """Nexts that ended, by the counts that records carry; None before the first."""
        self._steps: int | None = None
        self._pauses: dict[int, Pause] = {}
        """Those that last, by the number of the record."""
        self._highest = 0
        self._evaluations = 0
        """Iterations in a row, up to the last one, that had an evaluation in them."""
        self._sampled = False
        self._collectives: dict[tuple[int, int, int], int] = {}
        """Collectives of a kind of iterations, from before they were sampled."""

    def feed(
        self, begun: Sequence[Record], ended: Sequence[Record], words: Sequence[int], now_ns: int
    ) -> list[Trigger]:
        """What new records show. `begun`: records not seen before, of which some have ended; `ended`: all that ended
        since the last call, those of `begun` among them. `words`: the ring's counters. `now_ns`: CLOCK_MONOTONIC of the
        rank's host, taken before the ring was read."""
        self._note_words(words)
        for record in begun:
            self._highest = max(self._highest, record.number)
            if record.kind != ring.GC:
                self._saw(record.begin_ns)
            if record.kind in (ring.COLLECTIVE, ring.P2P):
                self._push(record.begin_ns, _COLLECTIVE, record)
            elif record.kind in (ring.PHASE, ring.CAPTURE):
                self._push(record.begin_ns, _PAUSE_BEGINS, record)
        for record in ended:
            assert record.duration_ns is not None
            end_ns = record.begin_ns + record.duration_ns
            if record.kind != ring.GC:
                self._saw(end_ns)
            if record.kind == ring.NEXT:
                self._push(end_ns, _NEXT, record)
            elif record.kind == ring.STEP:
                self._push(end_ns, _STEP, record)
            elif record.kind in (ring.PHASE, ring.CAPTURE):
                self._push(end_ns, _PAUSE_ENDS, record)
        return self._play(now_ns - HOLD_NS)

    def finish(self) -> list[Trigger]:
        """No more records will come: what waited for later ones."""
        found = self._play(None)
        return found + self._judge(self._learnt.finish())

    def captured(self, window: int, begin_ns: int, end_ns: int | None) -> None:
        """A capture of which the ring holds no record, since others make it: it begins (None), or is over."""
        time_ns, what = (begin_ns, _PAUSE_BEGINS) if end_ns is None else (end_ns, _PAUSE_ENDS)
        # A number beyond those of the ring, so that no lap of it takes this one for overwritten.
        record = Record(
            *(OUTSIDE + window, begin_ns, None, False, ring.CAPTURE, 0, 0, 0),
            *(-1, 0, window, 0, 0),
        )
        self._push(time_ns, what, record)

    def check(self, now_ns: int) -> list[Trigger]:
        """Whether the rank stands still; to be called after `feed`, about once a second."""
        if self._words and self._words[ring.STATE] != ring.ARMED:
            return []  # The process is at its end, or its probe has given up: silence says nothing.
        found = self.degradation.check(now_ns, self._last_ns, self.pause, self._learnt.gaps_ns[1])
        return [found] if found else []

    def restart(self, generation: int, now_ns: int) -> None:
        """A new rendezvous, and with it a new process and a new ring; iterations are numbered on."""
        self._generation = self.degradation.generation = generation
        self._learnt.restart(generation, now_ns)
        self._forget()

    @property
    def counts(self) -> Counts:
        """Raw counts as the ring has them; `batches` are nexts, ends of epochs included. Collectives as seen."""
        words = self._words
        steps, nexts = (words[ring.NUM_STEPS], words[ring.NUM_NEXTS]) if words else (0, 0)
        return Counts(self._generation, steps, nexts, self._learnt.counts.collectives)

    @property
    def pause(self) -> Pause | None:
        """What the rank does now, if it does not train."""
        pause = self._learnt.pause
        return None if pause is Pause.EVALUATION and self._evaluations > ALWAYS else pause

    @property
    def unit(self) -> Unit | None:
        """What windows can be asked in; None while it is learnt, and for jobs that show collectives only."""
        return {Basis.STEPS: Unit.STEPS, Basis.BATCHES: Unit.NEXTS}.get(self._learnt.basis)

    @property
    def steps_per_iteration(self) -> int:
        """Raw counts of `unit` in a usual iteration: 1, or as many as optimizers step in one."""
        if self._learnt.basis is not Basis.STEPS or not self.iterations:
            return 1
        return max(median_low(i.num_steps for i in islice(reversed(self.iterations), RECENT)), 1)

    def boundary(self, after: int) -> int:
        """The first raw count from `after` on at which an iteration ends, if those to come are like the last ones."""
        each = self.steps_per_iteration
        last = self.iterations[-1].step if self.iterations else 0
        return last + -(-(after - last) // each) * each

    def _saw(self, time_ns: int) -> None:
        if self._last_ns is None or time_ns > self._last_ns:
            self._last_ns = time_ns

    def _push(self, time_ns: int, what: int, record: Record) -> None:
        heappush(self._events, (time_ns, record.number, what, record))

    def _note_words(self, words: Sequence[int]) -> None:
        was = self._words[ring.ONE_STEP_IN] if self._words else 0
        self._words = words
        # What came before the change and what came after it are in one batch.
        self._sampled = max(was, words[ring.ONE_STEP_IN]) > 1
        if self._sampled:
            self._learnt.forget_collectives()

    def _play(self, until_ns: int | None) -> list[Trigger]:
        """Feeds the events up to a time, in its order."""
        found: list[Trigger] = []
        events = self._events
        while events and (until_ns is None or events[0][0] <= until_ns):
            time_ns, _, what, record = heappop(events)
            found += self._judge(self._event(time_ns, what, record))
        for number in [n for n in self._pauses if n <= self._highest - LAPPED]:
            self._end_pause(number, self._learnt.last_ns or 0)
        return found

    def _event(self, time_ns: int, what: int, record: Record) -> Sequence[Iteration]:
        learnt = self._learnt
        if what == _COLLECTIVE:
            if self._sampled and (learnt.counts.steps or learnt.counts.batches):
                return ()
            return learnt.feed(Mark.COLLECTIVE, time_ns, hash((record.op, record.group, record.peer, record.num_bytes)))
        if what == _NEXT:
            self._look_for_losses(self._nexts, record.sequence, time_ns)
            self._nexts = max((self._nexts or 0) + 1, record.sequence)
            mark = Mark.EXHAUSTED if record.raised else Mark.NEXT
            return learnt.feed(mark, time_ns, record.group, record.begin_ns)
        if what == _STEP:
            if record.raised:
                return ()  # The hooks count it neither.
            self._look_for_losses(self._steps, record.sequence, time_ns)
            self._steps = max((self._steps or 0) + 1, record.sequence)
            if record.flags & ring.SKIPPED:
                return learnt.feed(Mark.SKIPPED, time_ns, record.group)
            # Steps within steps leave no record, so the two belong together, whatever came in between.
            return (*learnt.feed(Mark.BEGIN, time_ns, record.group), *learnt.feed(Mark.END, time_ns, record.group))
        pause = pause_of(record)
        if pause is not None and what == _PAUSE_BEGINS:
            self._pauses[record.number] = pause
            learnt.begin(pause, time_ns)
        else:
            self._end_pause(record.number, time_ns)
        return ()

    def _end_pause(self, number: int, time_ns: int) -> None:
        pause = self._pauses.pop(number, None)
        if pause is not None:
            self._learnt.end(pause, time_ns)
        for other in self._pauses.values():  # saves in threads, or one within the other
            self._learnt.begin(other, time_ns)

    def _look_for_losses(self, seen: int | None, sequence: int, time_ns: int) -> None:
        """`sequence` says how many had ended when this one began, plus one; all of them ended before it did."""
        if sequence - 1 > (seen or 0):
            self._learnt.lose(time_ns)
            if seen is not None:  # else it is only that we came later
                self.num_losses += 1
                self._nexts = self._steps = None  # the others may be missing too

    def _judge(self, iterations: Sequence[Iteration]) -> list[Trigger]:
        found: list[Trigger] = []
        for i, iteration in enumerate(iterations):
            made = self._corrected(iteration, len(iterations) - 1 - i)
            self.iterations.append(made)
            self.num_iterations += 1
            found += self.degradation.add(made)
        return found

    def _corrected(self, iteration: Iteration, later: int) -> Iteration:
        """With the ring's counts; `later`: iterations that the same mark completed after this one."""
        counts = self._learnt.counts
        step, num_collectives, pause = iteration.step, iteration.num_collectives, iteration.pause
        self._evaluations = self._evaluations + 1 if pause is Pause.EVALUATION else 0
        if self._evaluations > ALWAYS:
            pause = None
        if pause is None and self.is_disturbed:
            pause = Pause.CAPTURE
        if self._learnt.basis is Basis.STEPS:
            step += (self._steps or 0) - counts.steps
        elif self._learnt.basis is Basis.BATCHES:
            step = (self._nexts or 0) - later
        kind = (iteration.unit, iteration.num_batches, iteration.loader)
        if self._sampled:
            num_collectives = self._collectives.get(kind, 0)
        elif pause is None and (kind in self._collectives or len(self._collectives) < MAX_KINDS):
            self._collectives[kind] = num_collectives
        if (step, num_collectives, pause) == (iteration.step, iteration.num_collectives, iteration.pause):
            return iteration
        return replace(iteration, step=step, num_collectives=num_collectives, pause=pause)


def watched(flight: Flight) -> Watch:
    """All that a ring which was read once tells of its iterations."""
    watch = Watch(flight.words[ring.RANK], flight.identity.generation)
    ended = [record for record in flight.records if record.duration_ns is not None]
    watch.feed(flight.records, ended, flight.words, 0)
    watch.finish()
    return watch


def pause_of(record: Record) -> Pause | None:
    """What a phase or a capture says that the rank does instead of training; None if it goes on training."""
    if record.kind == ring.CAPTURE:
        return Pause.CAPTURE
    return _PAUSES.get(ring.PHASES[record.op]) if record.op < len(ring.PHASES) else None
