"""The flight ring: one memory-mapped file per rank that holds the last some 16,000 things the rank did.

The probe writes it from inside of the training process; an agent or `eroica show` reads it from outside, at any time:
while the process runs, while it hangs with the GIL held, after SIGKILL. No lock is shared, no thread serves it, and a
write costs under a microsecond. It is not a log (old records are overwritten) and not a trace (no kernels, no stacks).
Standard library only, since it lives in other people's training processes.

Layout, little-endian, every word on a multiple of its size:

    0       identity (`_IDENTITY`): magic, version, sizes, process, clocks, generation; closed by a CRC; written once
    256     counters (`_WORDS`), 8 bytes each, rewritten in place: rank, world size, state, nexts, steps, skipped, gc
    512     mailbox: one 8-byte word that others write and the probe reads; a cache line of its own
    576     holds: for how long this rank is to be held back, written by others (`holds`); its first word is 0 for "not"
    1024    notes: JSON objects of no fixed size, appended once each (groups, host, fault): length, CRC, text
    63488   positions: 32 slots of 64 bytes: the last call entered on each process group, also of calls without a record
    65536   records, 64 bytes each; record `number` lies at place `number % capacity`

    record  0 number u64 | 8 begin_ns i64 | 16 kind, op, dtype, flags u8 | 20 peer i32 | 24 group u64 | 32 sequence i64
            40 bytes i64 | 48 step u32 | 52 crc32 of the 52 bytes before u32 | 56 end word u64

    position 0 key u64 | 8 sequence << 8 | op | 16 last sequence seen done | 24 bytes | 32 begin_ns | 40 peer

A record is a span. Its body is written when it begins; when it ends, one aligned word is set: `duration_ns << 17 |
raised << 16 | number & 0xffff`. A span whose end word does not carry its number is still open.

Worked example. Rank 3 enters all_reduce 41 of group 0 as its record 90,001 and is killed in it, capacity 16,384. Place
90001 % 16384 = 8081 holds number 90001, a CRC that fits and end word 0: "in allreduce 41 since begin_ns". Had the kill
come in the middle of the write, the CRC would not fit, the place counts as torn, and record 90,000 is the last one.
Had the record ended 5 ms later, the word would be 5,000,000 << 17 | 90001 & 0xffff (24465). A callback that is late by
a whole lap sets the word with an old number, which no longer fits the record in its place, and changes nothing.

A position is a place that is overwritten: plain stores, the word with the sequence last, so that a reader who comes in
between sees the sequence of the call before with bytes and begin of the new one. It is what remains of a call when the
probe records collectives in some steps only.

Blocks are reserved when the file is made (`posix_fallocate`): with a sparse file, a full disk would kill the training
process by SIGBUS at a store. Readers use `pread`, never a mapping, so a file cut short cannot kill them either.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import stat
import struct
import zlib
from _thread import allocate_lock
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic_ns, time_ns
from typing import NamedTuple

from eroica.errors import DataError, UserError

VERSION = 1
SUFFIX = ".ring"

NEXT, STEP, COLLECTIVE, P2P, GC, PHASE, CAPTURE, PACED = range(1, 9)
KINDS = (
    "",
    "dataloader next",
    "optimizer step",
    "collective",
    "send or receive",
    "garbage collection",
    "phase",
    "capture",
    "held back by pacing",
)
"""Names of the kinds, by number. A reader shows a number that it does not know as it is."""

OPS = (
    *("other", "allreduce", "allreduce_coalesced", "allgather", "allgather_base", "allgather_coalesced"),
    *("allgather_into_tensor_coalesced", "reduce_scatter", "reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("alltoall", "alltoall_base", "barrier", "monitored_barrier", "broadcast", "gather", "scatter", "reduce"),
    *("send", "recv", "recv_any_source"),
)
"""Names of the collectives, by number; only ever appended to."""

_MESSAGES = ("send", "recv", "recv_any_source")

DTYPES = (
    *("other", "float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "int8", "bool", "int16"),
    *("float8_e4m3fn", "float8_e5m2", "complex64", "complex128"),
)
"""Names of the element types, by number; only ever appended to."""

PHASES = ("other", "save", "evaluation", "compile", "rendezvous", "load", "teardown", "workers", "profile")
"""Names of the phases, by number; only ever appended to."""

UNTIMED = 1
"""Flag: the end of this span cannot be seen (NCCL, send and receive); an open end says nothing."""
SKIPPED = 2
"""Flag of an optimizer step that a gradient scaler left out."""

UNSEEN = (1 << 47) - 1
"""Duration of a span of which it turned out that its end cannot be seen; a reader makes it `UNTIMED`."""

ARMED, ENDED, OFF = 1, 2, 3
"""States: recording; the process has come to its end; the probe has switched itself off after a fault."""

RANK, WORLD_SIZE, STATE, NUM_NEXTS, NUM_STEPS, NUM_SKIPPED, GC_NS, NUM_GC, LOST_NOTES = range(9)
"""Places of the counters."""
HEARD, ANSWER, HOOK_NS, ONE_STEP_IN, PACED_NS = range(9, 14)
"""Further ones: the mailbox word last acted upon; `commands.answer` to it; what the probe's own hooks have cost;
collectives are recorded in one step of so many (0 = in all); for how long pacing has held this rank back in all."""

_MAGIC = b"EROICA\x00R"
_IDENTITY = struct.Struct("<8sIIIIIIQQqqQ")
_WORDS_AT, _NUM_WORDS, _MAILBOX_AT, _NOTES_AT, _POSITIONS_AT, _RECORDS_AT = 256, 14, 512, 1024, 63488, 65536
_HOLDS_AT = 576
HOLDS = _HOLDS_AT >> 3
"""Place in `Ring.words` of what is 0 where this rank is not to be held back: all that a hook looks at then."""
HOLDS_BYTES = _NOTES_AT - _HOLDS_AT
MOST_POSITIONS = 32
"""Groups, and partners of sends and receives, whose last call a ring can hold."""
ENTERED, DONE, NUM_BYTES, BEGIN = range(1, 5)
"""Words of a position, counted from the place that `Ring.position` gives."""
_NOTE = struct.Struct("<II")
_CRC = struct.Struct("<I")
_BODY = struct.Struct("<QqBBBBiQqqI")
_PACKED = struct.Struct("<QqIiQqqI")
"""The same, with kind, op, dtype and flags as one number."""
_RECORD = struct.Struct("<52sIQ")
_WHOLE = struct.Struct("<QqBBBBiQqqIIQ")
_POSITION = struct.Struct("<QqqqqqQQ")
_SIZE = 64
_PAGE = 4096
_MOST_RECORDS = 1 << 15  # so that a late end word is told from the next lap's by 16 bits of the number
_NO_END = 0
_FIRST_LOOK, _READ_AT_ONCE = 8, 256


@dataclass(frozen=True, slots=True)
class Identity:
    """Who writes a ring; does not change."""

    pid: int
    start_ticks: int
    """Start of the process since boot in clock ticks (/proc/PID/stat); with `pid` it names a process; 0 if unknown."""
    pid_namespace: int
    """Inode of the pid namespace in which `pid` counts; 0 if unknown."""
    generation: int
    """Which start of the job this is: 0, then one more after each elastic restart."""
    wall_ns: int
    """Wall clock when the ring was made, nanoseconds since 1970."""
    monotonic_ns: int
    """CLOCK_MONOTONIC at the same moment; records use this clock."""
    capacity: int
    """Number of records that the ring holds."""


@dataclass(frozen=True, slots=True)
class Record:
    """One span."""

    number: int
    """Counts all records of this ring from 1."""
    begin_ns: int
    """CLOCK_MONOTONIC."""
    duration_ns: int | None
    """None while it lasts, and for ever where the end cannot be seen (`UNTIMED`)."""
    raised: bool
    """It ended by an exception: StopIteration at the end of an epoch, too."""
    kind: int
    """Index into `KINDS`."""
    op: int
    """Index into `OPS`; of a phase into `PHASES`."""
    dtype: int
    """Index into `DTYPES`."""
    flags: int
    peer: int
    """Other rank of a send or receive, in its group; -1 otherwise."""
    group: int
    """Hash of the process group's name, which is the same on all of its ranks; 0 if none. Notes hold the name.
    Of a next the number of its data set, of a step that of its optimizer: 1, 2, ... as this process met them, for as
    long as the object lives; 0 unknown."""
    sequence: int
    """Position among the calls on this group, among the nexts, the steps or the phases of this name, from 1; of a gc
    its generation."""
    num_bytes: int
    """Payload of this rank."""
    step: int
    """Outermost optimizer steps completed before it began."""


@dataclass(frozen=True, slots=True)
class Position:
    """The last call that this rank entered on one group, or to one partner."""

    group: int
    """As in `Record`."""
    peer: int
    """Other rank of sends or receives, in the group; -1 for collectives."""
    op: int
    """Index into `OPS`."""
    sequence: int
    done: int
    """Sequence of the last call whose end was seen; in steps without records, and on NCCL, ends are not seen."""
    num_bytes: int
    begin_ns: int

    def as_record(self) -> Record:
        """The same as a record of number 0 and step 0. Its duration is 0 if it is over, else its end cannot be seen."""
        kind = P2P if self.op < len(OPS) and OPS[self.op] in _MESSAGES else COLLECTIVE
        is_over = self.done >= self.sequence
        return Record(
            *(0, self.begin_ns, 0 if is_over else None, False, kind, self.op, 0, 0 if is_over else UNTIMED),
            *(self.peer, self.group, self.sequence, self.num_bytes, 0),
        )


@dataclass(frozen=True, slots=True)
class Flight:
    """What a ring held at one moment."""

    identity: Identity
    words: tuple[int, ...]
    """Counters; index with `RANK`, `STATE`, `NUM_STEPS`, ..."""
    notes: list[dict[str, object]]
    records: list[Record] = field(repr=False)
    """Ascending by number."""
    num_torn: int
    """Places whose record was half written: at most one per thread of the writer, unless the file is damaged."""
    positions: list[Position] = field(default_factory=list)
    """Of groups on which a call was entered; more up to date than `records` where only some steps are recorded."""

    def unrecorded(self) -> list[Record]:
        """Last calls on groups that have no record, or none any more, by `Position.as_record`; oldest first.

        Only of groups that a note names: a position has no checksum of its own.
        """
        named = {note["group"] for note in self.notes if isinstance(note.get("group"), str)}
        newest: dict[tuple[int, int, int], int] = {}
        for record in self.records:
            if record.kind in (COLLECTIVE, P2P):
                line = record.group, record.peer, record.op if record.kind == P2P else 0
                newest[line] = max(record.sequence, newest.get(line, 0))
        found = []
        for record in (position.as_record() for position in self.positions if f"{position.group:016x}" in named):
            line = record.group, record.peer, record.op if record.kind == P2P else 0
            if record.sequence > newest.get(line, 0):
                found.append(record)
        return sorted(found, key=lambda record: record.begin_ns)


@dataclass(frozen=True, slots=True)
class News:
    """What came to a ring since the last look."""

    words: tuple[int, ...]
    """Counters, as in `Flight`."""
    notes: list[dict[str, object]]
    begun: list[Record]
    """New records, ascending by number; some have ended already."""
    ended: list[Record]
    """Records that have ended since the last look; those of `begun` among them."""
    num_lost: int
    """Records that were overwritten before they were read."""


class Peek(NamedTuple):
    """The first page of a ring: who and where, without what it did."""

    identity: Identity
    words: tuple[int, ...]
    """Counters, as in `Flight`."""
    note: dict[str, object]
    """The first note: job, host, program. Empty if it is not there yet, or long."""


class Ring:
    """The writer's end. Made by `create`, written by any thread that holds the GIL, closed by `close`.

    `begin` and `end` take no lock: the number comes from a counter that is atomic under the GIL, and no two numbers
    share a place until a whole lap later. They are functions, not methods, since looking up attributes would be a third
    of what they cost.
    """

    begin: Callable[[int, int, int, int, int, int, int], int]
    """begin(what, begin_ns, peer, group, sequence, num_bytes, step): write the record of a span that begins; returns
    its number. `what` comes from the function of this name. Raises struct.error if a value does not fit its field."""
    end: Callable[[int, int, bool], None]
    """end(number, duration_ns, raised): say that a span is over, or `UNSEEN`; any thread may."""

    def __init__(self, path: Path, file: mmap.mmap, capacity: int) -> None:
        self.path = path
        self._map = file
        self.words = memoryview(file).cast("q")
        """The whole file as words, for the stores that must cost next to nothing."""
        self._ends = memoryview(file).cast("Q")
        self.begin, self.end = _writers(file, self._ends, capacity)
        self._free_positions = MOST_POSITIONS
        self._note_at = _NOTES_AT
        self._noting = allocate_lock()

    @classmethod
    def create(cls, path: Path, *, rank: int, world_size: int, generation: int = 0, capacity: int = 16_384) -> Ring:
        """A new ring at `path`, where it appears complete and replaces an older one. OSError: no room, no right."""
        if not 0 < capacity <= _MOST_RECORDS:
            raise UserError(f"a ring holds 1 to {_MOST_RECORDS} records, not {capacity}")
        draft = path.with_name(f".{path.name}.{time_ns()}")
        handle = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                size = _RECORDS_AT + capacity * _SIZE
                os.posix_fallocate(handle, 0, size)
                file = mmap.mmap(handle, size)
            finally:
                os.close(handle)
            ring = cls(path, file, capacity)
            pid = os.getpid()
            identity = _IDENTITY.pack(
                *(_MAGIC, VERSION, _NOTES_AT, _RECORDS_AT, _SIZE, capacity, pid),
                *(start_ticks(pid), pid_namespace(), time_ns(), monotonic_ns(), generation),
            )
            file[: len(identity) + 4] = identity + _CRC.pack(zlib.crc32(identity))
            ring.set(RANK, rank)
            ring.set(WORLD_SIZE, world_size)
            ring.set(STATE, ARMED)
            os.replace(draft, path)
        except BaseException:
            os.unlink(draft)
            raise
        return ring

    def set(self, word: int, value: int) -> None:
        """Set a counter."""
        self.words[(_WORDS_AT >> 3) + word] = value

    def add(self, word: int, value: int) -> None:
        """Raise a counter that only one thread at a time raises."""
        self.words[(_WORDS_AT >> 3) + word] += value

    def position(self, group: int, peer: int = -1) -> int:
        """Place in `words` of a new position; 0 if all are taken. Store at this place + ENTERED, DONE, ..."""
        if not self._free_positions:
            return 0
        self._free_positions -= 1
        place = (_POSITIONS_AT + (MOST_POSITIONS - 1 - self._free_positions) * _POSITION.size) >> 3
        self.words[place + 5] = peer
        self._ends[place] = group
        return place

    def get(self, word: int) -> int:
        """A counter, as last set."""
        return self.words[(_WORDS_AT >> 3) + word]

    @property
    def mailbox(self) -> int:
        """The word that somebody else left with `post`; 0 = nothing yet."""
        return self._ends[_MAILBOX_AT >> 3]

    @property
    def holds(self) -> bytes:
        """What somebody else left with `post_holds`."""
        return self._map[_HOLDS_AT : _HOLDS_AT + HOLDS_BYTES]

    def note(self, **entry: object) -> bool:
        """Append a JSON object, for good. False if it found no room, or another thread in the middle of it."""
        # Never waits: a garbage collection inside of this very function may want to note its fault.
        if not self._noting.acquire(blocking=False):
            return False
        try:
            text = json.dumps(entry).encode()
            begin = self._note_at
            if begin + _NOTE.size + len(text) > _POSITIONS_AT:
                self.add(LOST_NOTES, 1)
                return False
            self._map[begin + _NOTE.size : begin + _NOTE.size + len(text)] = text
            _NOTE.pack_into(self._map, begin, len(text), zlib.crc32(text))
            self._note_at = begin + _NOTE.size + (len(text) + 7) // 8 * 8
            return True
        finally:
            self._noting.release()

    def close(self) -> None:
        """Unmap the file, which stays. Nothing may be written afterwards."""
        self.words.release()
        self._ends.release()
        self._map.close()


def what(kind: int, op: int = 0, dtype: int = 0, flags: int = 0) -> int:
    """Kind, operation, element type and flags of a span in one number, as `Ring.begin` takes them."""
    return kind | op << 8 | dtype << 16 | flags << 24


def _writers(
    file: mmap.mmap, ends: memoryview, capacity: int
) -> tuple[Callable[[int, int, int, int, int, int, int], int], Callable[[int, int, bool], None]]:
    take_number = itertools.count(1).__next__
    pack, pack_into, crc32 = _PACKED.pack, _RECORD.pack_into, zlib.crc32
    first_end = (_RECORDS_AT + 56) >> 3

    def begin(what: int, begin_ns: int, peer: int, group: int, sequence: int, num_bytes: int, step: int) -> int:
        number = take_number()
        body = pack(number, begin_ns, what, peer, group, sequence, num_bytes, step & 0xFFFFFFFF)
        pack_into(file, _RECORDS_AT + number % capacity * _SIZE, body, crc32(body), _NO_END)
        return number

    def end(number: int, duration_ns: int, raised: bool) -> None:
        if not 0 < duration_ns <= UNSEEN:
            duration_ns = 1 if duration_ns <= 0 else UNSEEN
        ends[first_end + number % capacity * 8] = duration_ns << 17 | raised << 16 | number & 0xFFFF

    return begin, end


def read_flight(path: Path) -> Flight:
    """All that the ring at `path` holds now. Raises OSError, and DataError if it is no ring or from a newer eroica."""
    data = _read(path, _RECORDS_AT + _MOST_RECORDS * _SIZE)
    magic, version, *_ = _IDENTITY.unpack_from(data.ljust(_IDENTITY.size, b"\0"))
    if magic != _MAGIC:
        raise DataError(f"{path} is not a flight ring: it begins with {data[:8]!r}")
    if version > VERSION:
        raise DataError(f"{path} is a flight ring of version {version} and this eroica reads {VERSION}; update eroica")
    identity = _identity(data)
    if identity is None or len(data) < _RECORDS_AT + identity.capacity * _SIZE:
        raise DataError(f"{path} is a damaged flight ring: its header or its end is missing ({len(data)} bytes)")
    records, num_torn = _records(data, identity.capacity)
    words = struct.unpack_from(f"<{_NUM_WORDS}q", data, _WORDS_AT)
    return Flight(identity, words, list(_notes(data)), records, num_torn, list(_positions(data, _POSITIONS_AT)))


def peek(path: Path) -> Peek:
    """The first page of the ring at `path`, at a hundredth of the cost of `read_flight`. Raises OSError, DataError."""
    data = _read(path, _PAGE).ljust(_RECORDS_AT, b"\0")
    identity = _identity(data)
    if identity is None:
        raise DataError(f"{path} is not a flight ring, or a damaged one: it begins with {data[:8]!r}")
    words = struct.unpack_from(f"<{_NUM_WORDS}q", data, _WORDS_AT)
    return Peek(identity, words, next(_notes(data), {}))


def post(path: Path, word: int) -> None:
    """Leave `word` (1 to 2^64-1) in the mailbox of the ring at `path`, over what lay there. Raises OSError."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), _NOTES_AT) as mapped:
        view = memoryview(mapped).cast("Q")
        view[_MAILBOX_AT >> 3] = word
        view.release()


def group_key(told: object) -> int:
    """Key of a process group, from the hexadecimal digits by which notes and messages tell it; 0 = it is none."""
    is_one = isinstance(told, str) and len(told) == 16 and set(told) <= set("0123456789abcdef")
    return int(str(told), 16) if is_one else 0


def post_holds(path: Path, data: bytes) -> None:
    """Leave `data`, of which the first word is not 0, for the writer of the ring at `path`; b"" takes back what lies
    there. The first word is 0 while the rest is written, and stored last. Raises OSError."""
    assert len(data) <= HOLDS_BYTES and len(data) % 8 == 0
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), _NOTES_AT) as mapped:
        view = memoryview(mapped).cast("Q")
        view[HOLDS] = 0
        if data:
            mapped[_HOLDS_AT + 8 : _HOLDS_AT + len(data)] = data[8:]
            view[HOLDS] = int.from_bytes(data[:8], "little")
        view.release()


def start_ticks(pid: int) -> int:
    """When process `pid` started, in clock ticks since boot; 0 if there is none. A zombie counts as none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return 0 if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, ValueError, IndexError):
        return 0


def is_alive(identity: Identity) -> bool | None:
    """Whether the writer still runs; None if that cannot be told from here (another container). Same host assumed."""
    if not identity.start_ticks or identity.pid_namespace != pid_namespace():
        return None
    return start_ticks(identity.pid) == identity.start_ticks


def pid_namespace() -> int:
    """Inode of the pid namespace of this process; 0 if unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _read(path: Path, most: int) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO of this name must not block us
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise DataError(f"{path} is not a flight ring: it is not a plain file")
        parts = []
        while most > 0 and (part := os.read(handle, min(most, 1 << 20))):
            parts.append(part)
            most -= len(part)
        return b"".join(parts)
    finally:
        os.close(handle)


def _identity(data: bytes) -> Identity | None:
    size = _IDENTITY.size
    if len(data) < _RECORDS_AT or _CRC.unpack_from(data, size)[0] != zlib.crc32(data[:size]):
        return None
    _, _, notes_at, records_at, record_size, capacity, pid, *rest = _IDENTITY.unpack_from(data)
    if (notes_at, records_at, record_size) != (_NOTES_AT, _RECORDS_AT, _SIZE) or not 0 < capacity <= _MOST_RECORDS:
        return None
    ticks, namespace, wall_ns, clock_ns, generation = rest
    return Identity(pid, ticks, namespace, generation, wall_ns, clock_ns, capacity)


def _records(data: bytes, capacity: int) -> tuple[list[Record], int]:
    records = []
    num_torn = 0
    for place in range(capacity):
        at = _RECORDS_AT + place * _SIZE
        record = decode(data, at)
        if record is not None and record.number % capacity == place:
            records.append(record)
        else:
            num_torn += any(data[at : at + _SIZE])
    records.sort(key=lambda record: record.number)
    return records, num_torn


def decode(data: bytes, at: int) -> Record | None:
    """The record that lies at offset `at`; None if there is none or if it is half written."""
    number, begin_ns, kind, op, dtype, flags, peer, group, sequence, num_bytes, step, crc, end = _WHOLE.unpack_from(
        data, at
    )
    if not number or crc != zlib.crc32(data[at : at + _BODY.size]):
        return None
    ended = end != _NO_END and end & 0xFFFF == number & 0xFFFF
    if ended and end >> 17 == UNSEEN:
        ended, flags = False, flags | UNTIMED
    return Record(
        *(number, begin_ns, end >> 17 if ended else None, ended and bool(end >> 16 & 1)),
        *(kind, op, dtype, flags, peer, group, sequence, num_bytes, step),
    )


def _positions(data: bytes, begin: int) -> Iterator[Position]:
    for index in range(MOST_POSITIONS):
        group, entered, done, num_bytes, begin_ns, peer, *_ = _POSITION.unpack_from(
            data, begin + index * _POSITION.size
        )
        if group and entered > 0:
            yield Position(group, peer, entered & 0xFF, entered >> 8, done, num_bytes, begin_ns)


def _notes(data: bytes) -> Iterator[dict[str, object]]:
    at = _NOTES_AT
    while (found := decode_note(data, at)) is not None:
        entry, at = found
        if entry is not None:
            yield entry


def decode_note(data: bytes, at: int) -> tuple[dict[str, object] | None, int] | None:
    """The note at offset `at` of the file's head, and the offset of the next one; None if there is none (yet)."""
    if at + _NOTE.size > min(_POSITIONS_AT, len(data)):
        return None
    length, crc = _NOTE.unpack_from(data, at)
    text = data[at + _NOTE.size : at + _NOTE.size + length]
    if not length or at + _NOTE.size + length > _POSITIONS_AT or zlib.crc32(text) != crc:
        return None
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        entry = None
    return entry if isinstance(entry, dict) else None, at + _NOTE.size + (length + 7) // 8 * 8


class Tail:
    """A reader that comes again and again, and takes only what is new: some 100 microseconds instead of a megabyte.

    Not shared between threads. What was overwritten before it came is counted, never guessed.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError, and DataError if the file is no ring (or not yet complete)."""
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise DataError(f"{path} is not a flight ring: it is not a plain file")
            identity = _identity(os.pread(self._file, _RECORDS_AT, 0))
            if identity is None:
                raise DataError(f"{path} is not a flight ring of a version that this eroica reads")
        except BaseException:
            os.close(self._file)
            raise
        self.identity = identity
        self._note_at = _NOTES_AT
        self._last = 0
        self._open: dict[int, Record] = {}
        self._gap_at = 0

    def poll(self) -> News:
        """What has come since the last call. Raises OSError, DataError if the file was cut short."""
        words = self.poll_words()
        ended = self._ended()
        begun, num_lost = self._begun()
        for record in begun:
            if record.duration_ns is not None:
                ended.append(record)
            elif not record.flags & UNTIMED:
                self._open[record.number] = record
        return News(words, self._new_notes(), begun, ended, num_lost)

    def poll_words(self) -> tuple[int, ...]:
        """The counters alone. Raises as `poll`."""
        head = os.pread(self._file, _NOTES_AT, 0)
        if len(head) < _NOTES_AT:
            raise DataError(f"{self.path} is a damaged flight ring: it was cut to {len(head)} bytes")
        return struct.unpack_from(f"<{_NUM_WORDS}q", head, _WORDS_AT)

    def positions(self) -> list[Position]:
        """The last call on each group, as `Flight.positions`; does not move the reader."""
        size = MOST_POSITIONS * _POSITION.size
        return list(_positions(os.pread(self._file, size, _POSITIONS_AT).ljust(size, b"\0"), 0))

    def close(self) -> None:
        """The file stays."""
        os.close(self._file)

    def _new_notes(self) -> list[dict[str, object]]:
        data = os.pread(self._file, _NOTE.size, self._note_at)
        if len(data) < _NOTE.size or not _NOTE.unpack(data)[0]:
            return []
        data = os.pread(self._file, _RECORDS_AT, 0)
        notes = []
        while (found := decode_note(data, self._note_at)) is not None:
            entry, self._note_at = found
            if entry is not None:
                notes.append(entry)
        return notes

    def _ended(self) -> list[Record]:
        """Records that were open and have ended, or turned out to have no end that can be seen (these just go)."""
        ended = []
        for number in list(self._open):
            record = self._at_place_of(number)
            if record is None or record.number != number:
                del self._open[number]  # overwritten: how it ended is not known
            elif record.duration_ns is not None:
                ended.append(record)
                del self._open[number]
            elif record.flags & UNTIMED:
                del self._open[number]
        return ended

    def _at_place_of(self, number: int) -> Record | None:
        data = os.pread(self._file, _SIZE, _RECORDS_AT + number % self.identity.capacity * _SIZE)
        return decode(data, 0) if len(data) == _SIZE else None

    def _begun(self) -> tuple[list[Record], int]:
        capacity = self.identity.capacity
        begun: list[Record] = []
        num_lost = 0
        at_once = _FIRST_LOOK
        while True:
            place = (self._last + 1) % capacity
            count = min(at_once, capacity - place)
            at_once = _READ_AT_ONCE
            data = os.pread(self._file, count * _SIZE, _RECORDS_AT + place * _SIZE)
            came = [decode(data, at) for at in range(0, len(data) - _SIZE + 1, _SIZE)]
            newest = max((record.number for record in came if record is not None), default=0)
            if newest > self._last + capacity:
                # The writer has lapped us: go on at the oldest record that is still whole.
                oldest = newest - capacity + _READ_AT_ONCE
                num_lost += oldest - self._last - 1
                self._last = oldest - 1
                continue
            taken = 0
            for index, record in enumerate(came):
                expected = self._last + 1
                if record is not None and record.number == expected:
                    begun.append(record)
                elif self._is_torn(came, index, expected):
                    num_lost += 1
                else:
                    return begun, num_lost
                self._last = expected
                taken += 1
            if taken < count:
                return begun, num_lost

    def _is_torn(self, came: list[Record | None], index: int, expected: int) -> bool:
        """Whether this place will not be filled any more: seen unfilled at the last call too, and there are later ones.

        Threads take their numbers in order and write them in any order, so a gap is mostly filled a moment later.
        """
        # The place behind the last one of the file is its first.
        behind = came[index + 1 :] or [self._at_place_of(expected + 1)]
        if not any(
            record is not None and record.number == expected + offset for offset, record in enumerate(behind, start=1)
        ):
            return False
        if self._gap_at != expected:
            self._gap_at = expected
            return False
        return True
