"""A trace's events as flat columns in file order, and how one decoded record becomes a row.

Not a reader of files (that is `kineto`) and not the job's view (that is `trace`). Used by all engines: `scanner`
decodes common records in C, `chunks` many at a time by msgspec, and all others go to `Rows` here, so that the rules for
odd records exist once. Records are split in one way by all: a record ends where strict JSON ends; where it does not, it
ends before the next `{"ph":`, and `salvage` decides whether anything of it can be used.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from eroica import salvage


class Category(IntEnum):
    """What an event is, over all vendors' category strings."""

    OTHER = 0
    CPU_OP = 1
    """Operator on a host thread (`cpu_op`)."""
    PYTHON = 2
    """Python frame (`python_function`); the name is "path(line): function" or "<built-in ...>"."""
    ANNOTATION = 3
    """record_function on a host thread (`user_annotation`): ProfilerStep#N, DataLoader next, gloo:all_reduce, ..."""
    DEVICE_ANNOTATION = 4
    """The same range as seen on a device stream (`gpu_user_annotation`)."""
    RUNTIME = 5
    """Call of the device runtime or driver on a host thread (cuda_runtime, cuda_driver, hip, mtia_runtime)."""
    KERNEL = 6
    """Kernel on a device stream, communication kernels included (kernel, mtia_ccp_events, op timelines' compute)."""
    COPY = 7
    """Memory copy on a device stream (gpu_memcpy)."""
    MEMSET = 8
    SYNC = 9
    """Synchronisation record of the device (cuda_sync); a view of a RUNTIME call, never own work."""
    OVERHEAD = 10
    """The profiler's own work (overhead, "Activity Buffer Request")."""


DROPPED = 255
"""Code of category strings that are no events: spans of the profiler itself."""

CATEGORY_OF: Mapping[str, int] = {
    **dict.fromkeys(("cpu_op", "Operator", "operator"), Category.CPU_OP),
    **dict.fromkeys(("python_function", "Python", "python"), Category.PYTHON),
    **dict.fromkeys(("user_annotation", "User Annotation"), Category.ANNOTATION),
    **dict.fromkeys(("gpu_user_annotation", "GPU User Annotation"), Category.DEVICE_ANNOTATION),
    **dict.fromkeys(
        ("cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "hip_api", "mtia_runtime", "xpu_runtime"),
        Category.RUNTIME,
    ),
    **dict.fromkeys(
        ("xpu_driver", "glow_runtime", "privateuse1_runtime", "privateuse1_driver", "Runtime", "runtime"),
        Category.RUNTIME,
    ),
    **dict.fromkeys(
        ("kernel", "Kernel", "mtia_ccp_events", "concurrent_kernel", "privateuse1_kernel", "xpu_kernel"),
        Category.KERNEL,
    ),
    **dict.fromkeys(("gpu_memcpy", "Memcpy", "memcpy", "privateuse1_memcpy"), Category.COPY),
    **dict.fromkeys(("gpu_memset", "Memset", "memset", "privateuse1_memset"), Category.MEMSET),
    **dict.fromkeys(("cuda_sync", "Sync", "mtia_sync"), Category.SYNC),
    **dict.fromkeys(("overhead", "Overhead"), Category.OVERHEAD),
    "Trace": DROPPED,
}
"""Category strings of torch 1.9 (capitalised) to 2.13, of CUDA, ROCm, XPU and MTIA; all others are OTHER."""

ON_DEVICE = frozenset((Category.KERNEL, Category.COPY, Category.MEMSET, Category.SYNC, Category.DEVICE_ANNOTATION))
"""Where `stream` and `device` mean what they say; inductor's operators carry raw pointers under the same key."""


@dataclass(frozen=True, slots=True)
class Damage:
    """What could not be used of a file. All zero and empty = sound."""

    skipped_events: int = 0
    """Events dropped since their text was broken."""
    repaired_names: int = 0
    """Strings with invalid UTF-8, control characters or bad escapes, kept in repaired form."""
    bad_times: int = 0
    """Events without usable time: missing, negative or absurd ts or dur (open ends, device records at 0)."""
    truncated: bool = False
    """The file ends early (cut JSON or gzip)."""
    first_offset: int = -1
    """Byte offset (of the uncompressed text) of the first damage; -1 = none."""
    notes: tuple[str, ...] = ()
    """Sentences for people, each naming what was lost."""

    @property
    def any(self) -> bool:
        """Whether anything was lost, repaired or noted."""
        return bool(self.skipped_events or self.repaired_names or self.bad_times or self.truncated or self.notes)


COLUMNS: Mapping[str, Any] = {
    "ts_ns": np.int64,
    "dur_ns": np.int64,
    "correlation": np.int64,
    "external": np.int64,
    "work": np.int64,
    "name": np.int32,
    "track": np.int32,
    "stream": np.int32,
    "device": np.int32,
    "bandwidth_gbs": np.float32,
    "occupancy": np.float32,
    "category": np.uint8,
}
"""Columns of `Records` in the order of the C scanner, with their types. `external`: id of the operator around it."""


@dataclass(slots=True)
class Losses:
    """Damage while it is being counted."""

    skipped: int = 0
    repaired: int = 0
    bad_times: int = 0
    lost_args: int = 0
    unread: int = 0
    truncated: bool = False
    first_offset: int = -1
    notes: list[str] = field(default_factory=list)

    def at(self, offset: int) -> None:
        """Remember the first place of damage."""
        if self.first_offset < 0 or offset < self.first_offset:
            self.first_offset = offset

    def damage(self) -> Damage:
        """The counts, with a sentence for each that is not zero."""
        notes = list(self.notes)
        if self.skipped:
            notes.append(f"{self.skipped} events were unreadable and left out, the first at byte {self.first_offset}")
        if self.repaired:
            notes.append(
                f"{self.repaired} events had broken bytes or escapes in their text and were kept in repaired form"
            )
        if self.lost_args:
            notes.append(f"the arguments of {self.lost_args} events were unreadable; their times were kept")
        if self.bad_times:
            notes.append(f"{self.bad_times} events without usable start or duration were left out")
        if self.unread:
            notes.append(
                f"{self.unread} events of begin/end or async kind were left out; only complete events are read"
            )
        if self.truncated:
            notes.append("the file ends early; events after its end are missing, so its totals are not comparable")
        return Damage(self.skipped, self.repaired, self.bad_times, self.truncated, self.first_offset, tuple(notes))


@dataclass(slots=True)
class Records:
    """Events in file order, times as written (no base added)."""

    columns: dict[str, npt.NDArray[Any]]
    """Each (events,), see COLUMNS. Popped by the reader to keep one copy in memory."""
    strings: list[str]
    tracks: list[tuple[str, str]]
    track_names: dict[tuple[str, str], str]
    communication: list[tuple[int, Mapping[str, Any]]]
    """(row, args) of events whose args have a "Collective name"."""
    metadata: dict[str, Any]
    """File-level keys, of the head and of the tail."""
    losses: Losses


def nanoseconds(value: Any) -> int | None:
    """Microseconds as JSON gave them, as exact integer nanoseconds (half to even); None if it is no finite time."""
    if isinstance(value, int) and not isinstance(value, bool):
        result = value * 1000
    elif isinstance(value, (Decimal, str, float)):
        try:
            exact = Decimal(value)
        except InvalidOperation:
            return None
        if not exact.is_finite() or exact.adjusted() > 18:
            return None
        result = int((exact * 1000).to_integral_value(ROUND_HALF_EVEN))
    else:
        return None
    return result if -(2**63) <= result < 2**63 else None


def integer(value: Any, default: int, bits: int = 64) -> int:
    """A JSON number or its text as an integer that fits; `default` for all else."""
    if isinstance(value, bool) or value is None:
        return default
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            return default
    elif isinstance(value, Decimal):
        if not value.is_finite() or value.adjusted() > 20 or value != value.to_integral_value():
            return default
        value = int(value)
    if not isinstance(value, int):
        return default
    return value if -(1 << (bits - 1)) <= value < 1 << (bits - 1) else default


def real(value: Any) -> float:
    """A JSON number as a double; NaN for all else."""
    if isinstance(value, (int, Decimal, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return float("nan")
    return float("nan")


DECODER = json.JSONDecoder(parse_float=Decimal)
"""Strict JSON; numbers with a fraction keep their decimals."""
_MAX = 2**63 - 1
_MAX_NESTING = 64


def product(sizes: Any) -> int:
    """Product of a list of whole numbers, at most 2^63 - 1; -1 if it is none."""
    if not isinstance(sizes, list) or not sizes:
        return -1
    result = 1
    for size in sizes:
        if type(size) is not int or size < 0:
            return -1
        result = min(result * size, _MAX)
    return result


def elements(dims: Any, depth: int = 0) -> int:
    """Elements over all inputs of "Input Dims", nested for lists of tensors, at most 2^63 - 1; -1 if it is no list."""
    if not isinstance(dims, list) or depth > _MAX_NESTING:
        return -1
    own = product(dims)
    if own >= 0:
        return own
    return min(sum(max(elements(item, depth + 1), 0) for item in dims if isinstance(item, list)), _MAX)


def text_of(value: Any) -> str:
    """A process or thread id, or a name, as text."""
    if isinstance(value, str):
        return salvage.clean(value)
    return "" if value is None else str(value)


IGNORED_PHASES = frozenset("sftiIC")
"""Flows, instants and counters: nothing is lost without them."""
UNREAD_PHASES = frozenset("BEbenSTpF")
"""Events of begin/end and async kind: counted as a loss."""

MEASURES: Mapping[int, tuple[str, ...]] = {
    Category.CPU_OP: ("Input Dims",),
    Category.ANNOTATION: ("Input Dims",),
    Category.KERNEL: ("grid", "est. achieved occupancy %"),
    Category.COPY: ("bytes", "memory bandwidth (GB/s)"),
    Category.MEMSET: ("bytes",),
}
"""Arguments that `measures` looks at."""


def measures(category: int, args: Mapping[str, Any]) -> tuple[int, float, float]:
    """(work, bandwidth_gbs, occupancy) of an event, see `trace.Trace`; -1 and NaN where not told."""
    work, bandwidth, occupancy = -1, float("nan"), float("nan")
    if category in (Category.CPU_OP, Category.ANNOTATION):
        work = elements(args.get("Input Dims"))
    elif category == Category.KERNEL:
        work = product(args.get("grid"))
        occupancy = real(args.get("est. achieved occupancy %")) / 100
    elif category in (Category.COPY, Category.MEMSET):
        work = integer(args.get("bytes"), -1)
        if category == Category.COPY:
            bandwidth = real(args.get("memory bandwidth (GB/s)"))
    return work, bandwidth, occupancy


class Rows:
    """Grows columns one decoded event at a time; the tolerant engine, and what the scanner left to it."""

    def __init__(self) -> None:
        self.values: dict[str, array[Any]] = {
            name: array({"int64": "q", "int32": "i", "float32": "f", "uint8": "B"}[np.dtype(kind).name])
            for name, kind in COLUMNS.items()
        }
        self.strings: dict[str, int] = {}
        self.tracks: dict[tuple[str, str], int] = {}
        self.track_names: dict[tuple[str, str], str] = {}
        self.communication: list[tuple[int, Mapping[str, Any]]] = []
        self.losses = Losses()

    def __len__(self) -> int:
        return len(self.values["ts_ns"])

    def name_id(self, name: Any) -> int:
        """Where the string table has this name; it grows."""
        return self.strings.setdefault(text_of(name), len(self.strings))

    def track_id(self, pid: Any, tid: Any) -> int:
        """Where the track table has this process and thread; it grows."""
        return self.tracks.setdefault((text_of(pid), text_of(tid)), len(self.tracks))

    def add(self, event: Any, offset: int) -> None:
        """One decoded item of traceEvents."""
        phase = event.get("ph")
        if phase == "M":
            self._name_track(event)
            return
        if phase != "X":
            if isinstance(phase, str) and phase in UNREAD_PHASES:
                self.losses.unread += 1
            elif not isinstance(phase, str) or phase not in IGNORED_PHASES:
                self.losses.skipped += 1
                self.losses.at(offset)
            return
        label = event.get("cat")
        category = CATEGORY_OF.get(label, Category.OTHER) if isinstance(label, str) else Category.OTHER
        if category == DROPPED:
            return
        ts, dur = nanoseconds(event.get("ts")), nanoseconds(event.get("dur"))
        if ts is None or dur is None or dur < 0:
            self.losses.bad_times += 1
            self.losses.at(offset)
            return
        args = event.get("args")
        if not isinstance(args, dict):
            args = {}
        on_device = category in ON_DEVICE
        work, bandwidth, occupancy = measures(category, args)
        if "Collective name" in args:
            self.communication.append((len(self), args))
        values = self.values
        values["ts_ns"].append(ts)
        values["dur_ns"].append(dur)
        values["correlation"].append(integer(args.get("correlation"), 0))
        values["external"].append(integer(args.get("External id"), 0))
        values["work"].append(work)
        values["name"].append(self.name_id(event.get("name")))
        values["track"].append(self.track_id(event.get("pid"), event.get("tid")))
        values["stream"].append(integer(args.get("stream"), -1, 32) if on_device else -1)
        values["device"].append(integer(args.get("device"), -1, 32) if on_device else -1)
        values["bandwidth_gbs"].append(bandwidth)
        values["occupancy"].append(occupancy)
        values["category"].append(category)

    def _name_track(self, event: Mapping[str, Any]) -> None:
        args = event.get("args")
        if event.get("name") == "thread_name" and isinstance(args, dict) and args.get("name"):
            track = (text_of(event.get("pid")), text_of(event.get("tid")))
            # The first name wins: torch writes "pt_gloo_runloop" first and "python3" for the same thread later.
            self.track_names.setdefault(track, text_of(args["name"]))

    def add_text(self, record: bytes, offset: int) -> int:
        """One record's text, sound or not. Returns how much of it belongs to the record."""
        try:
            text = record.decode()
            event, end = DECODER.raw_decode(text)
        except (ValueError, ArithmeticError, RecursionError):
            event = None
        # The scanner's limits are narrower than JSON's, so what it calls broken may be sound, with more behind it.
        if isinstance(event, dict) and salvage.ends_record(text[end:]):
            self.add(event, offset)
            return len(text[:end].encode())
        mended, lost_args, length = salvage.mend(record)
        self.losses.at(offset)
        if mended is None:
            self.losses.skipped += 1
        else:
            self.losses.lost_args += lost_args
            self.losses.repaired += not lost_args
            self.add(mended, offset)
        return length


BLANK = r"[ \t\r\n]*"
RECORD_START = re.compile(
    rf'(\{{)(?={BLANK}"ph"{BLANK}:)|,{BLANK}(\{{)(?={BLANK}"(?:name|cat|pid|tid|ts|dur|args)"{BLANK}:)'
)
"""Where reading goes on after damage; the group that matched starts at the brace."""
ARRAY_END = re.compile(rf'\]{BLANK}(?:\}}|,{BLANK}"|$)')
_LAST_RECORD_END = re.compile(rf'\}}{BLANK}(\]){BLANK}(?:,(?={BLANK}"[^"]*"{BLANK}:)|(?=\}}|\Z))'.encode())


MAX_BROKEN = 20_000
"""Lost records, each of which takes longer than a thousand sound ones: beyond this the file is no trace any more."""


class TooBroken(Exception):
    """MAX_BROKEN records were lost; for the reader, never for its callers."""


def take_broken(rows: Rows, record: bytes, offset: int, last: bool) -> int:
    """A slice up to the next record (up to the end of the file if `last`) that strict JSON refuses. Returns its length
    without the end of the array and what follows it."""
    if rows.losses.skipped >= MAX_BROKEN:
        raise TooBroken
    if last:
        for match in _LAST_RECORD_END.finditer(record):
            rest = record[match.end() :].strip()
            if members(rest[:-1] if rest.endswith(b"}") else rest) is not None:
                record = record[: match.start(1)]
                break
    if record.startswith(b"{"):
        return rows.add_text(record, offset)
    rows.losses.at(offset)
    rows.losses.skipped += b'"ph"' in record
    return len(record)


def members(text: bytes) -> dict[str, Any] | None:
    """The members of a JSON object, without its braces."""
    try:
        result = json.loads(b"{" + text + b"}")
    except (ValueError, RecursionError):
        return None
    return result if isinstance(result, dict) else None
