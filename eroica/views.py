"""From flight rings and stacks to one `RankView` per rank: the look from outside that `hang` reasons over.

`look_closer` is the whole of it, for a folder of rings on this host: it reads the rings, asks /proc about each process
and takes its stacks, or what `faulthandler` left where they cannot be taken. `views_of` is its pure part, for an agent
that has flights and stacks already. Used by `postmortem` (`eroica show RINGDIR`) and by agents.

The state of a process is read before its stacks are: py-spy pauses it, and would show as its tracer.
"""

from __future__ import annotations

import math
import socket
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from eroica import processes, ring, stacks
from eroica.flights import (
    SAME_START_NS,
    backends_of,
    groups_of,
    last_sign_ns,
    newest_of,
    newest_start,
    noted,
    read_rings,
    what_of,
)
from eroica.hang import LIMIT_S
from eroica.job import told_ranks
from eroica.ring import Flight, Record
from eroica.standing import Call, Child, Group, Open, RankView, Thread, is_users
from eroica.torchflight import read_flight_recorder

STACKS_SUFFIX = ".stacks"
"""Of the file in which `faulthandler` leaves a rank's stacks, beside its ring."""
RECORDER_SUFFIX = ".fr.json"
"""Of a file beside a ring with what torch's flight recorder held, as `_dump_fr_trace_json` gives it."""
MOST_CALLS = 512
"""Latest calls of a rank that are looked at; a step of a large model has some hundred."""
_KINDS = {ring.NEXT: "next", ring.STEP: "step", ring.GC: "gc", ring.PHASE: "phase", ring.CAPTURE: "capture"}
STILL_S = 3.0
"""A thread that does not run for so long gets nothing bit by bit. Paid before the first step alone."""
_AT_ONCE = 4
"""Processes whose stacks are taken at the same time: each look is a process of its own, and the host may be busy."""


@dataclass(frozen=True, slots=True)
class Process:
    """What was seen of a rank's process, beside its ring."""

    is_here: bool = False
    """It is one of this host, so that its clock is ours."""
    lives: bool | None = None
    letter: str = ""
    """State in /proc: R, S, D, T, t, Z."""
    exit_status: int | None = None
    tracer: int = 0
    threads: tuple[Thread, ...] = ()
    no_stack: str = ""
    stack_source: str = ""
    children: tuple[Child, ...] = ()


@dataclass(frozen=True, slots=True)
class Closer:
    """What `look_closer` saw."""

    views: list[RankView]
    world_size: int
    job: str
    limit_s: float
    """Silence that counts as standing still in this job: max(5 x its median step, 10 s)."""
    notes: list[str]


def look_closer(
    path: Path, *, only: Collection[Path] | None = None, with_stacks: bool = True, may_trace: bool = True
) -> Closer:
    """Rings, processes and stacks of the job whose rings lie at `path`, on this host, now. Raises as `read_rings`.

    `only`: the rings to look at, of those in `path`, all of one start of the job; None: those of the newest.
    `may_trace`: whether py-spy may pause the processes; without it stacks are those that `faulthandler` left.
    """
    flights, notes = read_rings(path, only)
    host = socket.gethostname()
    alive = [_lives(flight, host) for flight in flights]
    # Whoever names rings knows that they are of one start: ranks may record from their first wait for one that has not.
    most_ns = SAME_START_NS if only is None else math.inf
    latest, _ = newest_start(flights, alive, most_ns)
    folder = path.parent if path.is_file() else path
    is_opening = with_stacks and may_trace and not any(flight.words[ring.NUM_STEPS] for flight, _ in latest.values())
    beside = _beside_those(latest) if is_opening else {}
    watched = [flight.identity.pid for flight, lives in latest.values() if lives] if is_opening else []
    still = _still([*watched, *beside.values()])
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        seen = list(
            pool.map(lambda pair: observe(pair[0], pair[1], folder, host, with_stacks, may_trace), latest.values())
        )
    clock_ns = time.monotonic_ns()
    # Rings once more: in the meantime somebody may have moved on, and positions must not be older than stacks.
    again, _ = read_rings(path, only)
    newer, _ = newest_start(again, [None] * len(again), most_ns)
    views = []
    for (rank, (flight, _)), process in zip(latest.items(), seen, strict=True):
        current = newer[rank][0] if rank in newer and newer[rank][0].identity == flight.identity else flight
        view = view_of(current, process, clock_ns)
        view = replace(view, is_still=flight.identity.pid in still)
        views.append(with_recorder(view, _beside(folder, flight, RECORDER_SUFFIX)))
    views += [_without_ring(rank, pid, host, pid in still) for rank, pid in sorted(beside.items())]
    newest = newest_of(flights)
    world_size = max(newest.words[ring.WORLD_SIZE], 0)
    return Closer(views, world_size, noted(newest, "job"), limit_s_of([flight for flight, _ in latest.values()]), notes)


def _beside_those(latest: Mapping[int, tuple[Flight, bool | None]]) -> dict[int, int]:
    """Rank -> process, of ranks that have left no ring yet: they have not come to what makes one."""
    size = max((flight.words[ring.WORLD_SIZE] for flight, _ in latest.values()), default=0)
    missing = set(range(min(size, 1 << 16))) - set(latest)
    known = next((flight.identity.pid for flight, lives in latest.values() if lives), None)
    return processes.ranks_beside(known, missing) if missing and known is not None else {}


def _still(pids: Sequence[int]) -> frozenset[int]:
    """Those whose driving thread does not run for STILL_S."""
    before = {pid: processes.num_switches(pid) for pid in pids}
    if before:
        time.sleep(STILL_S)
    return frozenset(pid for pid, num in before.items() if num is not None and processes.num_switches(pid) == num)


def _without_ring(rank: int, pid: int, host: str, is_still: bool) -> RankView:
    """What can be seen of a rank whose probe has not begun to record."""
    seen = processes.process(pid)
    taken = stacks.dump(pid)
    return RankView(
        rank=rank,
        host=host,
        pid=pid,
        state=_state(0, Process(is_here=True, lives=seen is not None, letter=seen.letter if seen is not None else "")),
        tracer=processes.tracer(pid) if seen is not None and seen.letter == "t" else 0,
        is_recording=False,
        is_still=is_still,
        threads=taken.threads,
        no_stack=taken.reason,
        stack_source="py-spy" if taken.threads else "",
        children=processes.children(pid),
    )


def _lives(flight: Flight, host: str) -> bool | None:
    """Whether its process lives; None where that cannot be seen.

    A rank in a container has a host name of its own and may be seen from here all the same. That its process is here
    shows by number and start together; that it is not says nothing about another host's.
    """
    lives = ring.is_alive(flight.identity)
    return lives if lives or noted(flight, "host") == host else None


def observe(
    flight: Flight,
    lives: bool | None,
    folder: Path,
    host: str,
    with_stacks: bool = True,
    may_trace: bool = True,
) -> Process:
    """The process of a ring, its children and its stacks."""
    if noted(flight, "host") != host and not lives:
        return Process(no_stack=f"no stacks: its host is {noted(flight, 'host') or 'unknown'}, and this is {host}")
    pid = flight.identity.pid
    if lives is None:
        return Process(is_here=True, no_stack=f"no stacks: process {pid} is not visible from here; another container?")
    seen = processes.process(pid)
    if not lives:
        is_same = seen is not None and seen.start_ticks == flight.identity.start_ticks
        status = seen.exit_status if seen is not None and is_same else None
        threads = _left_behind(flight, folder)
        return Process(True, False, exit_status=status, threads=threads, stack_source="faulthandler" if threads else "")
    letter = seen.letter if seen is not None else ""
    tracer = processes.tracer(pid)
    children = processes.children(pid)
    if not with_stacks:
        return Process(True, True, letter, None, tracer, no_stack="stacks were not asked for", children=children)
    taken = stacks.dump(pid) if may_trace else stacks.Dump(reason="no stacks: tracing was not asked for")
    threads, source = taken.threads, "py-spy"
    if not threads:
        threads, source = _left_behind(flight, folder), "faulthandler"
    return Process(
        *(
            True,
            True,
            letter,
            None,
            tracer,
            threads,
            "" if threads else taken.reason,
            source if threads else "",
            children,
        )
    )


def limit_s_of(flights: Sequence[Flight]) -> float:
    """max(5 x the median time between steps, 10 s), over all ranks."""
    gaps = []
    for flight in flights:
        begins = [record.begin_ns for record in flight.records if record.kind == ring.STEP]
        begins = begins or [record.begin_ns for record in flight.records if record.kind == ring.NEXT]
        gaps += [later - earlier for earlier, later in pairwise(begins)]
    return max(5 * statistics.median(gaps) / 1e9, LIMIT_S) if gaps else LIMIT_S


def view_of(flight: Flight, process: Process, clock_ns: int) -> RankView:
    """One rank. `clock_ns`: CLOCK_MONOTONIC of this host, now."""
    words = flight.words
    no_batch = _no_batch(flight)
    last_ns = last_sign_ns(flight, without_batches=bool(no_batch))
    is_here = process.is_here and process.lives is True
    until_ns = clock_ns if is_here else last_ns
    phase, phase_ns = _phase(flight)
    left = _noted_last(flight, "exception")
    handled = _noted_last(flight, "handles", (ring.NEXT, ring.STEP))
    batches = [record for record in flight.records if record.kind == ring.NEXT and record.duration_ns is not None]
    return RankView(
        rank=words[ring.RANK],
        host=noted(flight, "host"),
        pid=flight.identity.pid,
        generation=flight.identity.generation,
        state=_state(words[ring.STATE], process),
        exit_status=process.exit_status,
        tracer=process.tracer,
        groups=_groups(flight),
        calls=_calls(flight, until_ns),
        is_recording=words[ring.STATE] != ring.OFF,
        knows_all_groups=not flight.records or flight.records[0].number == 1,
        open=tuple(
            Open(what_of(record), _KINDS.get(record.kind, "other"), max(0, until_ns - record.begin_ns) / 1e9)
            for record in flight.records
            if record.duration_ns is None
            and not record.flags & ring.UNTIMED
            and record.kind not in (ring.COLLECTIVE, ring.P2P)
        ),
        phase=phase,
        phase_s=max(0, until_ns - phase_ns) / 1e9 if phase else 0.0,
        num_steps=words[ring.NUM_STEPS],
        silent_s=max(0, clock_ns - last_ns) / 1e9 if is_here else None,
        no_batch=no_batch,
        threads=process.threads,
        no_stack=process.no_stack,
        stack_source=process.stack_source,
        last_batch=("none" if batches[-1].raised else "came") if batches and not no_batch else "",
        num_nexts=words[ring.NUM_NEXTS],
        exception=_text_of(left, "exception"),
        exception_at=_text_of(left, "at"),
        exception_from=_users_line(left),
        handles=_text_of(handled, "handles"),
        handles_at=_text_of(handled, "at"),
        handles_from=_users_line(handled),
        rendezvous=_rendezvous(flight),
        model=noted(flight, "model"),
        is_leaving=_is_last(flight, "leaving"),
        children=process.children,
    )


def with_recorder(view: RankView, file: Path | None) -> RankView:
    """`view`, with the calls of torch's flight recorder in place of a ring that holds none."""
    if file is None or (view.is_recording and view.calls):
        return view
    groups, calls = read_flight_recorder(file)
    return replace(view, groups=groups, calls=calls, is_recording=True) if calls else view


def _state(word: int, process: Process) -> str:
    if word == ring.ENDED and process.lives is not True:
        return "ended"
    if process.lives is None:
        return "unknown"
    if not process.lives:
        return "died"
    if process.letter == "T":
        return "stopped"
    if process.letter == "t" or (process.tracer and process.letter == "t"):
        return "traced"
    return "ended" if word == ring.ENDED else "running"


def _groups(flight: Flight) -> tuple[Group, ...]:
    found = []
    backends = backends_of(flight)
    for key, (name, members) in groups_of(flight).items():
        found.append(Group(f"{key:016x}", name, told_ranks(members), backends.get(key, "")))
    return tuple(found)


def _calls(flight: Flight, until_ns: int) -> tuple[Call, ...]:
    """The latest calls, and of each group and peer the last one, however long ago."""
    records = [record for record in flight.records if record.kind in (ring.COLLECTIVE, ring.P2P)]
    last: dict[tuple[int, int, int, int], Record] = {}
    for record in records:
        is_message = record.kind == ring.P2P
        last[record.group, record.kind, record.op if is_message else 0, record.peer] = record
    inside = [r for r in records[:-MOST_CALLS] if r.duration_ns is None and not r.flags & ring.UNTIMED]
    kept = {record.number: record for record in [*last.values(), *inside, *records[-MOST_CALLS:]]}
    # What was called in a step whose collectives are not recorded comes last: it is newer than its group's records.
    records = [*(kept[number] for number in sorted(kept)), *flight.unrecorded()]
    return tuple(_call(record, until_ns) for record in records)


def _call(record: Record, until_ns: int) -> Call:
    status = "in"
    if record.duration_ns is not None:
        status = "failed" if record.raised else "done"
    elif record.flags & ring.UNTIMED:
        status = "unseen"
    return Call(
        group=f"{record.group:016x}",
        sequence=record.sequence,
        op=ring.OPS[record.op] if record.op < len(ring.OPS) else f"operation {record.op}",
        status=status,
        num_bytes=record.num_bytes,
        dtype=ring.DTYPES[record.dtype] if 0 < record.dtype < len(ring.DTYPES) else "",
        for_s=max(0, until_ns - record.begin_ns) / 1e9,
        step=record.step if record.number else -1,
        peer=record.peer,
    )


def _phase(flight: Flight) -> tuple[str, int]:
    """The innermost phase under way: what, since when."""
    for record in reversed(flight.records):
        if record.kind == ring.PHASE and record.duration_ns is None:
            return ring.PHASES[record.op] if record.op < len(ring.PHASES) else "", record.begin_ns
    return "", 0


def _is_last(flight: Flight, key: str) -> bool:
    return bool(_noted_last(flight, key))


def _noted_last(flight: Flight, key: str, kinds: Collection[int] = ()) -> Mapping[str, object]:
    """The last note with `key`, if it still holds: nothing (of `kinds`, if any are given) began after it.

    A note without a time is one of the process's end.
    """
    for note in reversed(flight.notes):
        if key in note:
            at_ns = note.get("clock_ns")
            begins = (r.begin_ns for r in flight.records if (r.kind in kinds if kinds else r.kind != ring.GC))
            return note if not isinstance(at_ns, int) or max(begins, default=0) <= at_ns else {}
    return {}


def _text_of(note: Mapping[str, object], key: str) -> str:
    return str(note.get(key, ""))[:700]


def _users_line(note: Mapping[str, object]) -> str:
    """The innermost line of the user's own code that the exception of a note has passed, "path:line"; "" if unknown."""
    trail = note.get("trail")
    lines = [str(line) for line in trail] if isinstance(trail, list) else []
    return next((line for line in [_text_of(note, "at"), *lines] if line and is_users(line.rpartition(":")[0])), "")


def _rendezvous(flight: Flight) -> dict[str, str]:
    """What the last note on joining the others says."""
    note = next((note["joins"] for note in reversed(flight.notes) if isinstance(note.get("joins"), dict)), {})
    assert isinstance(note, dict)
    return {str(key)[:40]: str(value)[:200] for key, value in list(note.items())[:16]}


def _no_batch(flight: Flight) -> str:
    """The error of the last call for a batch, if none has come since and no step was taken."""
    note = next((note for note in reversed(flight.notes) if "no_batch" in note), None)
    if note is None or not isinstance(at_ns := note.get("clock_ns"), int):
        return ""
    came = (
        record.begin_ns + (record.duration_ns or 0)
        for record in flight.records
        if record.duration_ns is not None and not record.raised and record.kind in (ring.NEXT, ring.STEP)
    )
    return str(note["no_batch"])[:500] if max(came, default=0) <= at_ns else ""


def _beside(folder: Path, flight: Flight, suffix: str) -> Path | None:
    """A file that belongs to the rank, beside its ring."""
    path = folder / f"rank{flight.words[ring.RANK]}-{flight.identity.pid}{suffix}"
    return path if path.is_file() else next(iter(folder.glob(f"*/{path.name}")), None)


def _left_behind(flight: Flight, folder: Path) -> tuple[Thread, ...]:
    """What `faulthandler` wrote, if that was after the last thing that the ring tells: else it is of another wait."""
    path = _beside(folder, flight, STACKS_SUFFIX)
    if path is None:
        return ()
    last_ns = max((r.begin_ns + (r.duration_ns or 0) for r in flight.records), default=flight.identity.monotonic_ns)
    wall_ns = flight.identity.wall_ns + last_ns - flight.identity.monotonic_ns
    try:
        if path.stat().st_mtime_ns < wall_ns or path.stat().st_size > 4 << 20:
            return ()
        return stacks.parse_faulthandler(path.read_text("utf-8", "replace"))
    except OSError:
        return ()


def views_of(flights: Mapping[int, Flight], seen: Mapping[int, Process], clock_ns: int) -> list[RankView]:
    """One view per rank. `seen`: what an agent observed of its processes; ranks without an entry have none."""
    return [view_of(flight, seen.get(rank, Process()), clock_ns) for rank, flight in flights.items()]
