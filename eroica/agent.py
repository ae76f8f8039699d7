"""Watches the ranks of one host through their flight rings, and does for the coordinator what must be done here.

It reads rings (never the processes themselves, but for stacks when a job hangs), turns their records into iterations
and changes of pace (`marks`), leaves commands in mailboxes, and reduces captures to summaries, in worker processes of
low priority, so that only kilobytes travel. Where Kineto records on demand, commands go to `recording` instead, which
answers for the ranks. It decides nothing: that is the coordinator's. One per host; `poll` is called some ten times a
second by whoever owns the loop (`live`). Losing it costs a rank nothing.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from eroica import bus, codec, processes, recording, ring, samplers, views
from eroica.amend import Told
from eroica.background import History, Span
from eroica.bus import Abort, Commit, LookCloser, Message, Prepare, Resume
from eroica.captures import OwnRing, Readers, capture_path, summarize_capture
from eroica.commands import Command, Frames, State, Unit, Verb, parse_answer
from eroica.errors import DataError, EroicaError
from eroica.holding import Holding, met
from eroica.marks import Watch
from eroica.ring import Tail
from eroica.samplers import open_samplers
from eroica.samplers.evidence import counters, samples_for
from eroica.samplers.recorder import Recorder
from eroica.standing import RankView
from eroica.trace import Samples
from eroica.untrusted import clean
from eroica.watched import MOST_HOST, Watched, groups_of

HOST_VARIABLE = "EROICA_HOST"
"""Names this host where hosts call themselves alike."""
LONG_FETCH_NS = 200_000_000
"""A batch that takes longer to come is told by itself: loaders have theirs ready in milliseconds."""
READ_FAST_S = 1.0
"""Counters are read often from the commit of a window until so long after its expected end."""
DISTURBED_S = 3.0
"""For so long at most, what iterations take while captures are being read is laid to the reading and not judged: on a
host without a free core it slows the ranks down, by a fifth where that was seen. Reading takes a second or two; where
it takes longer, it is the readers that get no core, since they are of low priority."""
WRITTEN_S = 60.0
"""The same for the writing of a capture by its rank, which a slow folder may draw out. It is told with later windows as
well, so that they are not laid to the job."""
KEPT_STARTS = 16
"""The latest starts of a job whose rings stay, a megabyte for each rank, in memory as a rule."""
RECENT = 16
"""Iterations whose median is told as the pace."""


def host_name(environ: Mapping[str, str]) -> str:
    """Of this host in all reports: as somebody has named it, else its own name."""
    return clean(environ.get(HOST_VARIABLE, "") or socket.gethostname(), MOST_HOST) or "host"


@dataclass(frozen=True, slots=True)
class _Reading:
    """A capture that is being reduced."""

    window: int
    rank: int
    host: str
    history: History
    path: str
    world_size: int
    samples: Samples | None
    own: OwnRing
    is_second: bool = False
    """The first reader was killed."""
    trace: str = ""
    """What Kineto recorded on demand and what becomes `path`; "": a capture of the rank's own."""
    told: Told | None = None
    """What such a trace lacks."""
    by_time: bool = False
    """It was recorded by the wall clock, not by steps."""
    lasted_s: float = math.inf
    """By CLOCK_MONOTONIC; infinite where that is not known."""


class Agent:
    """See the module."""

    def __init__(
        self,
        folder: Path,
        link: bus.Link,
        *,
        host: str,
        readers: Readers,
        on_demand: recording.Recording | None = None,
        clears: bool = False,
    ) -> None:
        """`folder`: where the ranks of this host leave their rings. `readers`: of captures. `on_demand`: who records
        windows, and is closed by us; None: the ranks themselves. `clears`: the folder is ours, and rings of starts that
        are long over are removed."""
        self.folder = folder
        self._bus = link
        self._host = host
        self._is_named = bool(os.environ.get(HOST_VARIABLE))
        self._readers = readers
        self._on_demand = on_demand
        self._clears = clears
        self._rings: dict[Path, Watched] = {}
        self._refused: set[Path] = set()
        self._pending: dict[Future[bytes | str], _Reading] = {}
        self._reading_since_ns = 0
        self._commands: dict[int, Prepare] = {}
        self._start = 0
        """What is watched; 0 before the first ring."""
        self._training = ""
        self._num_starts = 0
        self._counted: set[int] = set()
        """Windows whose counters were told."""
        found, self.missing_samplers = open_samplers()
        self._recorder = Recorder(found)
        self._holding = Holding()
        link.subscribe(bus.TO_AGENTS, self._take)

    def ranks(self) -> dict[int, Watched]:
        """The rings that count: per rank the senior one of the start that is watched."""
        chosen: dict[int, Watched] = {}
        for entry in self._rings.values():
            if entry.start and entry.start == self._start:
                rank = entry.words[ring.RANK]
                if rank not in chosen or entry.seniority > chosen[rank].seniority:
                    chosen[rank] = entry
        return chosen

    @property
    def events(self) -> list[int]:
        """Handles that can be read when `poll` is due at once: a process that has died is told of by /proc only until
        its launcher asks for it."""
        return [entry.handle for entry in self._rings.values() if entry.handle >= 0]

    @property
    def has_others(self) -> bool:
        """A second training runs beside the one that is watched."""
        return any(
            entry.start and entry.is_alive and not entry.is_single and entry.training != self._training
            for entry in self._rings.values()
        )

    def _place(self, entry: Watched) -> None:
        """Find out which start of which training a new ring belongs to.

        The job's name and the restart count tell most; but jobs that follow one another in one script may share both,
        for port 29500 serves them all. Those have another parent, and begin when the others have gone.
        """
        identity = entry.tail.identity
        seen = processes.process(identity.pid)
        entry.parent = seen.parent if seen is not None and seen.start_ticks == identity.start_ticks else 0
        named = [other for other in self._rings.values() if other.start and other.job == entry.job]
        for other in sorted(named, key=lambda other: -other.start):
            if other.tail.identity.generation != identity.generation:
                continue
            is_over = ring.is_alive(other.tail.identity) is False
            is_sibling = not entry.is_single and entry.parent in (0, other.parent)
            if not is_over or is_sibling or not other.parent:
                entry.start, entry.training = other.start, other.training
                return
        self._num_starts += 1
        entry.start = self._num_starts
        if self._clears:
            self._clear(self._num_starts - KEPT_STARTS)
        latest = max(named, key=lambda other: other.start, default=None)
        if latest is not None and latest.tail.identity.generation < identity.generation:
            entry.training = latest.training
        else:
            # Whoever takes our place finds the same name, as a rule. A number must do where the parent has gone, or
            # has run such a training before.
            ticks = ring.start_ticks(entry.parent) if entry.parent else 0
            name = f"{entry.job}.{entry.parent}-{ticks}"
            is_new = ticks > 0 and all(other.training != name for other in self._rings.values())
            entry.training = name if is_new else f"{entry.job}.{self._num_starts}"

    def _clear(self, last: int) -> None:
        """Remove the rings of starts up to this one; what was read from them is kept."""
        for path, entry in self._rings.items():
            if entry.is_closed and 0 < entry.start <= last:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)

    def _choose(self) -> None:
        """Decide which start is watched: the one that was, as long as a rank of it lives, or its own restart."""
        current = [entry for entry in self._rings.values() if entry.start and entry.start == self._start]
        generation = max((entry.tail.identity.generation for entry in current), default=-1)

        def worth(entry: Watched) -> tuple[bool, bool, int, int]:
            own = entry.tail.identity.generation
            is_ours = entry.start == self._start or (entry.training == self._training and own > generation)
            return not entry.is_single, is_ours, own, entry.start

        living = [
            entry
            for entry in self._rings.values()
            # A parent that looks at a batch before it spawns its ranks leaves a ring of its own.
            if entry.start and entry.is_alive and not (entry.is_single and entry.start < self._start)
        ]
        best = max(living, key=worth, default=None)
        if best is not None:
            self._start, self._training = best.start, best.training

    @property
    def is_busy(self) -> bool:
        """Captures are being read, or taken by somebody else than the ranks."""
        return bool(self._pending) or (self._on_demand is not None and self._on_demand.is_busy)

    @property
    def has_living(self) -> bool:
        """Ranks lived when last looked at: what became of them is not told yet."""
        return any(entry.is_alive for entry in self._rings.values())

    def poll(self, now_ns: int) -> None:
        """Look at all rings and tell what is new. `now_ns`: CLOCK_MONOTONIC."""
        self._discover()
        if not self._pending:
            self._reading_since_ns = now_ns
        is_disturbed = bool(self._pending) and now_ns - self._reading_since_ns < DISTURBED_S * 1e9
        is_written = any(
            entry.writing is not None and now_ns - entry.writing[1] < WRITTEN_S * 1e9 for entry in self._rings.values()
        )
        heard = self._heard()
        self._choose()
        ranks = self.ranks()
        for entry, news in heard:
            for record in news.ended:
                if record.kind in (ring.GC, ring.PHASE):
                    entry.spans.append(record)
                elif record.kind == ring.COLLECTIVE and record.duration_ns is not None:
                    entry.waits.append((record.begin_ns, record.duration_ns))
                elif record.kind == ring.NEXT and (record.duration_ns or 0) >= LONG_FETCH_NS:
                    entry.fetches.append(record)
                elif record.kind == ring.CAPTURE and record.duration_ns is not None:
                    entry.captures[record.sequence] = record.begin_ns, record.begin_ns + record.duration_ns
            entry.traffic.feed(news.begun, news.ended)
            self._follow_writing(entry, now_ns)
            entry.watch.is_disturbed = is_disturbed or is_written
            triggers = entry.watch.feed(news.begun, news.ended, news.words, now_ns)
            if entry.is_alive:
                triggers += entry.watch.check(now_ns)
            rank = entry.words[ring.RANK]
            was_alive, entry.is_alive = entry.is_alive, ring.is_alive(entry.tail.identity) is not False
            if not entry.is_alive:
                entry.let_go()
                if was_alive and (seen := processes.process(entry.tail.identity.pid)) is not None:
                    is_same = seen.start_ticks == entry.tail.identity.start_ticks
                    entry.exit_status = seen.exit_status if is_same else None
            if ranks.get(rank) is not entry:
                continue
            if was_alive and not entry.is_alive:
                self._tell_death(entry, rank)
            for trigger in triggers:
                self._bus.publish(bus.Noticed(rank=rank, trigger=trigger))
            # A rank that ends right after its capture has answered before it is gone.
            self._tell_answer(entry, rank)
            self._tell_standing(entry, rank)
            self._tell_arrivals(entry, rank, news, now_ns)
        if self._on_demand is not None:
            self._answer(self._on_demand.poll(self._places(), now_ns), now_ns)
        self._recorder.tick(self._sampled())
        self._collect()

    @staticmethod
    def _follow_writing(entry: Watched, now_ns: int) -> None:
        """Whether the rank writes a capture, as its answers say."""
        answered = parse_answer(entry.words[ring.ANSWER])
        if answered is not None and answered[1] is State.WRITING and entry.is_alive:
            entry.writing = entry.writing or (entry.words[ring.NUM_STEPS], now_ns)
        elif entry.writing is not None:
            (step, since_ns), entry.writing = entry.writing, None
            entry.written.append(Span("capture", step, since_ns, now_ns - since_ns))

    def rest(self) -> None:
        """The job is being ended: take back what can be."""
        if self._on_demand is not None:
            self._answer(self._on_demand.rest(), time.monotonic_ns())

    def _heard(self) -> list[tuple[Watched, ring.News]]:
        """What is new in each ring; rings that cannot be read any more are left."""
        heard = []
        living = {entry.start for entry in self._rings.values() if entry.is_alive}
        for path, entry in list(self._rings.items()):
            if entry.start and entry.start != self._start and entry.start not in living:
                # One command may run hundreds of trainings, and without handles /proc cannot be read: all seem dead.
                entry.close()
                continue
            try:
                news = entry.tail.poll()
            except (OSError, DataError):
                entry.close()
                del self._rings[path]
                self._refused.add(path)
                continue
            entry.words = news.words
            entry.take_notes(news.notes)
            if not entry.start and entry.job:
                self._place(entry)
            heard.append((entry, news))
        return heard

    def close(self) -> None:
        """Stop reading; files stay."""
        self._holding.close()
        if self._on_demand is not None:
            self._on_demand.close()
        for entry in self._rings.values():
            entry.close()
        self._rings.clear()
        for future in self._pending:
            future.cancel()

    def _discover(self) -> None:
        for path in self.folder.glob(f"*{ring.SUFFIX}"):
            if path in self._rings or path in self._refused:
                continue
            try:
                tail = Tail(path)
                words = tail.poll_words()
            except FileNotFoundError:
                continue
            except (OSError, DataError):
                self._refused.add(path)
                continue
            watch = Watch(words[ring.RANK], tail.identity.generation)
            entry = self._rings[path] = Watched(tail, watch, words, [])
            if ring.is_alive(tail.identity):
                with contextlib.suppress(OSError, AttributeError):
                    entry.handle = os.pidfd_open(tail.identity.pid)

    def _tell_death(self, entry: Watched, rank: int) -> None:
        # Its last words were written before it went; what `poll` saw a moment ago may be older.
        with contextlib.suppress(OSError, DataError):
            last = entry.tail.poll()
            entry.words = last.words
            entry.take_notes(last.notes)
        if entry.words[ring.STATE] == ring.ARMED or any("exception" in note for note in entry.notes):
            self._bus.publish(bus.Died(rank=rank, pid=entry.tail.identity.pid))

    def _tell_standing(self, entry: Watched, rank: int) -> None:
        watch = entry.watch
        recent = [i.duration_ns for i in list(watch.iterations)[-RECENT:]]
        words = entry.words
        standing = bus.Standing(
            host=self._host,
            rank=rank,
            world_size=max(words[ring.WORLD_SIZE], 0),
            training=entry.training,
            generation=entry.tail.identity.generation,
            unit=watch.unit,
            count=words[ring.NUM_NEXTS if watch.unit is Unit.NEXTS else ring.NUM_STEPS],
            per_iteration=watch.steps_per_iteration if watch.unit is not None and watch.iterations else 0,
            aligned=watch.iterations[-1].step if watch.iterations else 0,
            num_iterations=watch.num_iterations,
            iteration_s=median(recent) / 1e9 if recent else None,
            is_alive=entry.is_alive and words[ring.STATE] == ring.ARMED,
        )
        if standing != entry.standing:
            entry.standing = standing
            self._bus.publish(standing)

    def _tell_arrivals(self, entry: Watched, rank: int, news: ring.News, now_ns: int) -> None:
        if entry.watch.unit is not Unit.STEPS:
            return
        arrivals = self._holding.feed(entry.tail.path, news.begun, news.ended, entry.watch.iterations, now_ns)
        if arrivals:
            self._bus.publish(bus.Arrived(rank=rank, groups=met(entry.notes), arrivals=tuple(arrivals)))

    def _tell_answer(self, entry: Watched, rank: int) -> None:
        value = entry.words[ring.ANSWER]
        if value == entry.answer:
            return
        entry.answer = value
        answered = parse_answer(value)
        if answered is None or answered[0] not in self._commands:
            return
        window, state = answered
        if state is State.DONE:
            self._summarize(entry, window, rank)
        why = ""
        if state in (State.UNABLE, State.FAILED):
            told = [note for note in entry.notes if note.get("capture") == window and "fault" in note]
            why = clean(str(told[-1]["fault"]), 200) if told else ""
        if state in (State.BUSY, State.UNABLE, State.FAILED, State.DISCARDED):
            # What its records tell is told without a trace as well; why there is none, the answer says.
            history = entry.history(time.time_ns() - time.monotonic_ns())
            self._bus.publish(bus.Summarized(window=window, rank=rank, summary=None, history=history))
        self._bus.publish(bus.Answered(window=window, rank=rank, state=state, why=why))

    def _summarize(self, entry: Watched, window: int, rank: int) -> None:
        """Have a capture reduced, with the counters of its time."""
        shift_ns = time.time_ns() - time.monotonic_ns()
        lasted = entry.captures.pop(window, None)
        begin_ns, end_ns = (at + shift_ns for at in lasted or (0, 0))
        samples = samples_for(
            self._recorder, self._sampled_rank(entry), begin_ns, end_ns, crosses_hosts=self._crosses_hosts()
        )
        path = capture_path(entry.tail.path.parent, window, rank)
        self._read(
            _Reading(
                window=window,
                rank=rank,
                host=self._host_of(entry),
                history=entry.history(shift_ns),
                path=str(path),
                world_size=entry.words[ring.WORLD_SIZE],
                samples=samples,
                own=OwnRing(str(entry.tail.path), shift_ns),
                lasted_s=(lasted[1] - lasted[0]) / 1e9 if lasted is not None else math.inf,
            )
        )
        self._count(window, begin_ns, end_ns)

    def _count(self, window: int, begin_ns: int, end_ns: int) -> None:
        """Tell the host's counters over a window, once."""
        if window not in self._counted:
            self._counted.add(window)
            counted = tuple(counters(self._recorder, begin_ns, end_ns))
            self._bus.publish(bus.CountersRead(window=window, host=self._host, counters=counted))

    def _places(self) -> dict[int, recording.Place]:
        """Of the ranks that can be asked to record."""
        found = {}
        for rank, entry in self.ranks().items():
            standing, laps = entry.standing, entry.watch.iterations
            if standing is not None:
                found[rank] = recording.Place(
                    pid=entry.tail.identity.pid,
                    count=entry.words[ring.NUM_STEPS],
                    num_skipped=entry.words[ring.NUM_SKIPPED],
                    per_iteration=standing.per_iteration,
                    iteration_s=standing.iteration_s or 0.0,
                    lap=(laps[-1].step, laps[-1].end_ns) if laps else (0, 0),
                    folder=entry.tail.path.parent,
                    is_alive=standing.is_alive,
                )
        return found

    def _answer(self, answers: list[recording.Answer], now_ns: int) -> None:
        """For ranks that others record."""
        ranks = self.ranks()
        for answer in answers:
            entry = ranks.get(answer.rank)
            if entry is None:
                continue
            if answer.begins:
                entry.watch.captured(answer.window, answer.begin_ns, None)
                continue
            if answer.state not in (State.PREPARED, State.COMMITTED):
                entry.watch.captured(answer.window, answer.begin_ns, now_ns)
                self._hint(entry, answer.window, Verb.ABORT)
            if answer.problem:
                self._bus.publish(
                    bus.Summarized(window=answer.window, rank=answer.rank, summary=None, problem=answer.problem)
                )
            if answer.trace is not None:
                self._take_in(entry, answer, answer.trace)
            self._bus.publish(bus.Answered(window=answer.window, rank=answer.rank, state=answer.state))

    def _take_in(self, entry: Watched, answer: recording.Answer, trace: Path) -> None:
        """Have a trace of Kineto's completed and reduced."""
        shift_ns = time.time_ns() - time.monotonic_ns()
        asked, rank = self._commands[answer.window], answer.rank
        laps = list(entry.watch.iterations)
        ends = {lap.step: lap.end_ns for lap in laps}
        begin_ns, end_ns = answer.begin_ns, answer.end_ns
        if not answer.by_time:
            begin_ns = ends.get(asked.start, begin_ns)
            end_ns = ends.get(asked.start + asked.num_steps, end_ns)
        told = Told(
            rank=rank,
            world_size=max(entry.words[ring.WORLD_SIZE], 0),
            groups=groups_of(entry.notes),
            step_ends=[(step, at_ns + shift_ns) for step, at_ns in ends.items()],
            per_iteration=entry.watch.steps_per_iteration,
        )
        samples = samples_for(
            self._recorder,
            self._sampled_rank(entry),
            begin_ns + shift_ns,
            end_ns + shift_ns,
            crosses_hosts=self._crosses_hosts(),
        )
        target = capture_path(entry.tail.path.parent, answer.window, rank)
        self._read(
            _Reading(
                window=answer.window,
                rank=rank,
                host=self._host_of(entry),
                history=entry.history(shift_ns),
                path=str(target),
                world_size=told.world_size,
                samples=samples,
                own=OwnRing(str(entry.tail.path), shift_ns),
                trace=str(trace),
                told=told,
                by_time=answer.by_time,
            )
        )
        self._count(answer.window, begin_ns + shift_ns, end_ns + shift_ns)

    def _host_of(self, entry: Watched) -> str:
        """As the rank says, unless somebody has given this host a name."""
        return self._host if self._is_named or not entry.host else entry.host

    def _crosses_hosts(self) -> bool:
        """The job has ranks elsewhere, as far as ranks know its size."""
        ranks = self.ranks()
        return max((entry.words[ring.WORLD_SIZE] for entry in ranks.values()), default=0) > len(ranks)

    def _sampled(self) -> list[samplers.Rank]:
        return [self._sampled_rank(entry) for entry in self.ranks().values() if entry.is_alive]

    def _sampled_rank(self, entry: Watched) -> samplers.Rank:
        return samplers.Rank(entry.words[ring.RANK], entry.tail.identity.pid)

    def _read(self, reading: _Reading) -> None:
        path, host, samples, own = reading.path, reading.host, reading.samples, reading.own
        if reading.told is None:
            told = path, reading.rank, reading.world_size, host, samples, own, reading.lasted_s
            future = self._readers.submit(summarize_capture, *told)
        else:
            future = self._readers.submit(recording.take_in, reading.trace, path, reading.told, host, samples, own)
        self._pending[future] = reading

    def _collect(self) -> None:
        for future in [future for future in self._pending if future.done()]:
            reading = self._pending.pop(future)
            try:
                result = future.result()
            except BrokenProcessPool:
                # One that was killed takes the others down. Twice is enough: it may be this capture that is too large.
                if not reading.is_second:
                    self._read(replace(reading, is_second=True))
                    continue
                result = "could not be summarized: the process that read its capture was killed"
            except Exception as error:  # a fault of ours in the other process: it costs this capture, not the agent
                result = f"could not be summarized: {type(error).__name__}: {error}"
            window, rank = reading.window, reading.rank
            problem = result if isinstance(result, str) else self._problem(reading, result)
            if isinstance(result, bytes) and not problem:
                told = bus.Summarized(window=window, rank=rank, summary=result, history=reading.history)
            else:
                told = bus.Summarized(window=window, rank=rank, summary=None, problem=problem)
            self._bus.publish(told)

    def _problem(self, reading: _Reading, summary: bytes) -> str:
        """What is wrong with the window that a summary is of."""
        if self._on_demand is None:
            return ""
        steps = codec.read_summary(summary).ledger.steps
        held = range(int(steps[0]), int(steps[-1]) + 1) if len(steps) else None
        return self._on_demand.learn(self._commands[reading.window], held, by_time=reading.by_time)

    def _take(self, message: Message) -> None:
        now_ns = time.monotonic_ns()
        if isinstance(message, Prepare):
            self._commands[message.window] = message
            if self._on_demand is not None:
                self._answer(self._on_demand.prepare(message, self._places(), now_ns), now_ns)
            else:
                self._post(message, Verb.PREPARE)
        elif isinstance(message, (Commit, Abort)) and message.window in self._commands:
            if isinstance(message, Commit):
                self._recorder.hurry(message.expected_s + READ_FAST_S)
            if self._on_demand is not None:
                if isinstance(message, Abort):
                    self._answer(self._on_demand.abort(message.window), now_ns)
                    return
                answers = self._on_demand.commit(message, self._places(), now_ns)
                ranks = self.ranks()
                for rank in self._on_demand.asked:
                    if rank in ranks:
                        self._hint(ranks[rank], message.window, Verb.OUTSIDE)
                self._answer(answers, now_ns)
                return
            verb = Verb.COMMIT if isinstance(message, Commit) else Verb.ABORT
            self._post(self._commands[message.window], verb)
        elif isinstance(message, Resume):
            self._resume(message)
        elif isinstance(message, LookCloser):
            self._look(message.look)
        elif isinstance(message, bus.TellArrivals):
            self._holding.tell(message, now_ns)
        elif isinstance(message, bus.Hold):
            rings = {rank: entry.tail.path for rank, entry in self.ranks().items() if entry.is_alive}
            self._holding.hold(message, rings, now_ns)

    def _resume(self, message: Resume) -> None:
        """Take on a window that was begun before our time: another agent of this host, which is gone, knew of it."""
        if message.host != self._host or message.window in self._commands or self._on_demand is not None:
            return
        window = Prepare(
            window=message.window,
            unit=message.unit,
            start=message.start,
            num_steps=message.num_steps,
            frames=message.frames,
        )
        self._commands[window.window] = window
        if message.expected_s:
            self._recorder.hurry(message.expected_s + READ_FAST_S)
        for entry in self.ranks().values():
            entry.answer = 0  # what its rank has answered meanwhile is told by us
            answered = parse_answer(entry.words[ring.ANSWER])
            is_behind = answered is None or answered[0] != window.window or answered[1] is State.PREPARED
            if is_behind:  # to tell a rank twice that it is to prepare would make it begin anew
                self._post(window, Verb.COMMIT if message.expected_s else Verb.PREPARE, only=entry)

    def _look(self, number: int) -> None:
        try:
            seen = views.look_closer(self.folder, only={entry.tail.path for entry in self.ranks().values()})
        except (EroicaError, OSError) as error:
            looked = bus.Looked(look=number, host=self._host, views=(), notes=(str(error),))
        else:
            looked = bus.Looked(
                look=number,
                host=self._host,
                views=tuple(self._with_status(view) for view in seen.views),
                limit_s=seen.limit_s,
                notes=tuple(seen.notes),
            )
        self._bus.publish(looked)

    def _with_status(self, view: RankView) -> RankView:
        """`view` under the name that we give this host, and with the exit status, if that was seen when the process
        went."""
        for entry in self._rings.values():
            if entry.tail.identity.pid == view.pid and entry.exit_status is not None and view.exit_status is None:
                view = replace(view, exit_status=entry.exit_status)
        return replace(view, host=self._host) if self._is_named or not view.host else view

    def _hint(self, entry: Watched, window: int, verb: Verb) -> None:
        """Tell a rank that Kineto records it, or no more: it must not end meanwhile without care."""
        assert self._on_demand is not None
        asked = self._commands[window]
        steps = 0 if self._on_demand.is_by_time else asked.num_steps
        with contextlib.suppress(OSError):
            ring.post(entry.tail.path, Command(window=window, verb=verb, start=asked.start, num_steps=steps).word())

    def _post(self, window: Prepare, verb: Verb, only: Watched | None = None) -> None:
        word = Command(
            window=window.window,
            verb=verb,
            start=window.start,
            num_steps=window.num_steps,
            unit=window.unit,
            frames=Frames(window.frames),
        ).word()
        for rank, entry in self.ranks().items():
            if not entry.is_alive or only not in (None, entry):
                continue
            try:
                ring.post(entry.tail.path, word)
            except (OSError, ValueError) as error:  # deleted, or cut short
                problem = f"has a mailbox that cannot be written ({error})"
                self._bus.publish(bus.Summarized(window=window.window, rank=rank, summary=None, problem=problem))
