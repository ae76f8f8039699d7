"""The flight rings of a folder, as one start of one job: what the post-mortem and the look at a hang both begin with.

`read_rings` opens the files, `newest_start` leaves out what earlier starts and helper processes left, and the small
functions below say in words what notes and records hold. It judges nothing. Used by `postmortem` and `views`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path

from eroica import ring
from eroica.errors import DataError, UserError
from eroica.ring import Flight, Record

SAME_START_NS = 600 * 10**9
"""Rings of one start of a job are made within ten minutes: at the first step or collective, and in those ranks wait for
each other. Wrong for a job whose ranks do minutes of work of their own first; then older ranks read as missing."""


def holds_rings(folder: Path) -> bool:
    """True if `folder` holds flight rings, or folders of jobs that do."""
    return any(folder.glob(f"*{ring.SUFFIX}")) or any(folder.glob(f"*/*{ring.SUFFIX}"))


def read_rings(path: Path, only: Collection[Path] | None = None) -> tuple[list[Flight], list[str]]:
    """The rings of `path`: a file, a folder of rings, or the folder of a user's jobs, of which the newest is taken.

    `only`: of these, leave out all others. Also says what could not be read.

    Raises UserError if there is no ring, DataError if none can be read.
    """
    files = [path] if path.is_file() else sorted(path.glob(f"*{ring.SUFFIX}"))
    notes: list[str] = []
    if not files:
        jobs: dict[Path, list[Path]] = defaultdict(list)
        for file in sorted(path.glob(f"*/*{ring.SUFFIX}")):
            jobs[file.parent].append(file)
        if not jobs:
            raise UserError(f"{path} holds no flight rings (*{ring.SUFFIX}); ranks leave them in EROICA_RING_DIR")
        newest = max(jobs, key=lambda job: max(_written_ns(file) for file in jobs[job]))
        files = jobs[newest]
        if len(jobs) > 1:
            notes.append(f"the newest of {len(jobs)} jobs: {newest.name}")
    flights = []
    problems = []
    files = [file for file in files if only is None or file in only]
    for file in files:
        try:
            flights.append(ring.read_flight(file))
        except (DataError, OSError) as error:
            problems.append(str(error))
    if not flights:
        raise DataError(problems[0] if problems else f"{path} holds none of the rings that are to be looked at")
    return flights, notes + problems


def _written_ns(file: Path) -> int:
    """When it was last written; 0 if it is gone by now, as the rings of a job that ends are."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def newest_start(
    flights: Sequence[Flight], alive: Sequence[bool | None], most_ns: float = SAME_START_NS
) -> tuple[dict[int, tuple[Flight, bool | None]], int]:
    """The ring of each rank of the newest start with whether its process runs, and how many rings were left out.

    `most_ns`: from the first ring of a start to its last.
    """
    newest = newest_of(flights)
    latest: dict[int, tuple[Flight, bool | None]] = {}
    world_size = max(newest.words[ring.WORLD_SIZE], 0)
    num_older = 0
    for flight, lives in sorted(zip(flights, alive, strict=True), key=lambda pair: _seniority(pair[0])):
        if not _is_same_start(flight, newest, most_ns) or 0 < world_size <= flight.words[ring.RANK]:
            num_older += 1
            continue
        num_older += flight.words[ring.RANK] in latest
        latest[flight.words[ring.RANK]] = flight, lives
    return dict(sorted(latest.items())), num_older


def newest_of(flights: Sequence[Flight]) -> Flight:
    """The ring that was made last."""
    return max(flights, key=lambda flight: (flight.identity.generation, flight.identity.wall_ns))


def _seniority(flight: Flight) -> tuple[bool, int]:
    # A program that a rank starts inherits RANK. It has no process group; the rank, by then, has.
    return any("group" in note for note in flight.notes), flight.identity.wall_ns


def _is_same_start(flight: Flight, newest: Flight, most_ns: float) -> bool:
    return (
        flight.identity.generation == newest.identity.generation
        and noted(flight, "job") == noted(newest, "job")
        and newest.identity.wall_ns - flight.identity.wall_ns <= most_ns
    )


def noted(flight: Flight, key: str) -> str:
    """What the last note with `key` says, as text."""
    return next((str(note[key])[:500] for note in reversed(flight.notes) if key in note), "")


def last_sign_ns(flight: Flight, *, without_batches: bool = False) -> int:
    """When the thread that trains last began or ended something, CLOCK_MONOTONIC; else when the ring was made.

    Other threads collect garbage and sample frames: that is no sign of life of this one. `without_batches`: its calls
    for a batch fail, and however often a loop repeats them, neither they nor the one under way are a sign.
    """
    moments = [
        record.begin_ns + (record.duration_ns or 0)
        for record in flight.records
        if record.kind not in (ring.GC, ring.CAPTURE)
        and not (without_batches and record.kind == ring.NEXT and (record.raised or record.duration_ns is None))
    ]
    moments += [record.begin_ns for record in flight.unrecorded()]
    return max(moments, default=flight.identity.monotonic_ns)


def groups_of(flight: Flight) -> dict[int, tuple[str, str]]:
    """Key of a group -> what people call it, its members."""
    known = {}
    for note in flight.notes:
        key = ring.group_key(note.get("group"))
        if key:
            description = str(note.get("description") or "undefined")  # what torch calls a group without one
            name = description if description != "undefined" else f"group {note.get('name') or note['group']}"
            known[key] = name, str(note.get("ranks", ""))
    return known


def backends_of(flight: Flight) -> dict[int, str]:
    """Key of a group -> what carries it, as torch says."""
    known = {f"{key:016x}": key for key in groups_of(flight)}
    notes = [note for note in flight.notes if note.get("group") in known and note.get("backend")]
    return {known[str(note["group"])]: str(note["backend"])[:80] for note in notes}


def what_of(record: Record) -> str:
    """A span in words: "allreduce 41", "send 3 with rank 1", "dataloader next 7"."""
    if record.kind in (ring.COLLECTIVE, ring.P2P):
        op = ring.OPS[record.op] if record.op < len(ring.OPS) else f"operation {record.op}"
        peer = f" with rank {record.peer}" if record.kind == ring.P2P and record.peer >= 0 else ""
        return f"{op} {record.sequence}{peer}"
    kind = ring.KINDS[record.kind] if record.kind < len(ring.KINDS) else f"kind {record.kind}"
    return kind if record.kind == ring.GC else f"{kind} {record.sequence}"


def with_place(flight: Flight, key: str) -> str:
    """The last note with `key`, and the line that it names: "ValueError: no loss at train.py:7"."""
    for note in reversed(flight.notes):
        if key in note:
            return f"{note[key]} at {note.get('at', '')}"[:700]
    return ""
