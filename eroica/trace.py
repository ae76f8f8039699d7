"""One rank's profiler trace as numpy columns, and `read_trace`, the only function that opens trace files.

Not an analysis: nothing here knows of critical paths or faults. Used by `critical_path`, `pattern` and `collectives`.
Columns and string tables instead of objects or data frames, because a trace holds millions of events and memory must
stay below half of the file's size. Times are integer nanoseconds throughout: a double cannot hold the microseconds
since 1970 with three decimals (pytorch/kineto#890).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from eroica import communication, kineto, timeline, tracefiles
from eroica.communication import CollectiveKind, CollectiveTable, Rule
from eroica.errors import DataError
from eroica.groups import Groups
from eroica.job import ProcessGroup
from eroica.records import Category, Damage, Losses, integer, text_of
from eroica.tracefiles import TraceFile, TraceSet, find_traces

__all__ = [
    "Category",
    "CollectiveKind",
    "CollectiveTable",
    "Damage",
    "ProcessGroup",
    "Rule",
    "Samples",
    "Trace",
    "TraceFile",
    "TraceSet",
    "find_traces",
    "read_all",
    "read_timeline",
    "read_trace",
]

Int64s: TypeAlias = npt.NDArray[np.int64]
Int32s: TypeAlias = npt.NDArray[np.int32]
UInt8s: TypeAlias = npt.NDArray[np.uint8]
Float32s: TypeAlias = npt.NDArray[np.float32]
Float64s: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Samples:
    """Counters of one rank's host and device over the window, on the trace's own clock."""

    ts_ns: Int64s
    """(samples,) When each sample was read, ascending."""
    values: Mapping[str, Float64s]
    """Counter name -> (samples,); NaN = not read at that instant. Known names: `sm_clock_ratio` (0..1 of the top
    clock), `throttle` (1 while a throttle reason is active), `nic_gbps`, `pcie_gbps`, `cpu_ratio` (CPU share of the
    driving thread), `runqueue_ratio` (share of the time in which it was ready to run and had no core)."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One rank's events. Rows are sorted by (ts_ns, -dur_ns, order in the file); each column has shape (events,)."""

    path: str
    """Where it came from, for messages; "" if made in memory."""
    rank: int | None
    """Global rank: manifest, then metadata, then file name; None = unknown."""
    world_size: int | None
    host: str
    """Host name as the trace tells it; "" = unknown."""
    device_model: str
    """"NVIDIA H100 80GB HBM3", "AMD Instinct MI300X"; "" = none listed."""
    num_devices: int
    """Devices listed in the file's deviceProperties."""
    epoch: bool
    """True if ts_ns counts from 1970; False if the base is unknown (durations still compare, instants do not)."""
    strings: tuple[str, ...]
    """String table."""
    tracks: tuple[tuple[str, str], ...]
    """Track table: (pid, tid) as written in the file, made text."""
    track_names: tuple[str, ...]
    """Thread or stream name of each track; "" = not told."""
    groups: tuple[ProcessGroup, ...]
    """Group table: distributedInfo.pg_config, and groups that only events name."""

    ts_ns: Int64s
    dur_ns: Int64s
    name: Int32s
    """String id."""
    category: UInt8s
    """Category."""
    track: Int32s
    """Index into `tracks`."""
    correlation: Int64s
    """Links a RUNTIME call with the device event it launched; 0 = unknown. Graph replays share one id."""
    stream: Int32s
    """Device stream of device events; -1 = not told."""
    device: Int32s
    """Device index of device events; -1 = not told."""
    work: Int64s
    """Size of what was asked for: blocks of the launch grid, bytes of a copy, elements of an operator's inputs
    (record_shapes); -1 = not told."""
    bandwidth_gbs: Float32s
    """Copies: GB/s as told; NaN otherwise."""
    occupancy: Float32s
    """Kernels: estimated achieved occupancy, 0..1; NaN = not told."""
    collectives: CollectiveTable
    damage: Damage = field(default_factory=Damage)

    def __len__(self) -> int:
        return len(self.ts_ns)


MAX_SPREAD_NS = 30 * 86_400 * 10**9
"""An event this far from the trace's median time, or this long, has no usable time: profiler windows last minutes."""
_ABSOLUTE_NS = 10**18
"""Times beyond 2001 are since 1970; smaller ones count from a base."""


def read_trace(path: str | Path, *, rank: int | None = None, engine: str = "auto", rules: Sequence[Rule] = ()) -> Trace:
    """One rank's Kineto or Chrome JSON trace, plain or gzip (several members and cut files too).

    `rank` overrides what metadata and file name say. `rules` come before `communication.RULES` and those of
    EROICA_COLLECTIVES. `engine` is for tests (see `kineto.load`). What could not be used is in `Trace.damage`. Raises
    UserError if the file cannot be opened and DataError if nothing in it can be used.
    """
    records = kineto.load(path, engine)
    losses, told = records.losses, records.metadata
    if not len(records.columns["ts_ns"]) and (losses.skipped or losses.bad_times or losses.truncated):
        raise DataError(f"{path}: no event could be read ({'; '.join(losses.damage().notes)}); capture this rank again")
    columns, new_row = _ordered(records.columns, losses)
    distributed = told.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    groups = Groups(distributed.get("pg_config"))
    strings = records.strings
    args = {int(new_row[row]): told for row, told in records.communication if new_row[row] >= 0}
    events = communication.Events(**{field.name: columns[field.name] for field in fields(communication.Events)})
    table = communication.table(
        events, strings, args, groups, (*rules, *communication.user_rules(), *communication.RULES)
    )
    del events, columns["external"]
    epoch = _apply_base(columns["ts_ns"], told.get("baseTimeNanoseconds"))
    damage = _with_device_note(losses.damage(), columns, strings)
    model, num_devices = _device(told.get("deviceProperties"), columns["device"])
    world_size = integer(distributed.get("world_size"), -1, 32)
    return Trace(
        path=str(path),
        rank=tracefiles.rank_of(told, path) if rank is None else rank,
        world_size=world_size if world_size > 0 else None,
        host=text_of(told.get("host_name", told.get("hostname"))),
        device_model=model,
        num_devices=num_devices,
        epoch=epoch,
        strings=tuple(strings),
        tracks=tuple(records.tracks),
        track_names=tuple(records.track_names.get(track, "") for track in records.tracks),
        groups=tuple(groups.table),
        collectives=table,
        damage=damage,
        **columns,
    )


def read_timeline(path: str | Path) -> list[Trace]:
    """Op timelines of a whole job in one parquet file (columns dp_rank, stage, rank, step, optype, start_ts, duration,
    seq_id, mc, mb_id; seconds from the step's start), one Trace per rank; see `timeline` for the mapping.

    Raises UserError if the file cannot be opened, DataError if it is no such table, UnavailableError without pyarrow.
    """
    return [Trace(path=str(path), **part) for part in timeline.load(path)]


def read_all(traces: TraceSet) -> Iterator[Trace]:
    """Each file of the set in rank order, one at a time: memory does not grow with the number of ranks."""
    timelines: dict[str, dict[int | None, Trace]] = {}
    for file in traces.files:
        if file.timeline:
            if file.path not in timelines:
                timelines = {file.path: {trace.rank: trace for trace in read_timeline(file.path)}}
            trace = timelines[file.path].pop(file.rank)
        else:
            trace = read_trace(file.path, rank=file.rank)
        yield trace if trace.world_size else replace(trace, world_size=traces.world_size)


def _ordered(columns: dict[str, npt.NDArray[Any]], losses: Losses) -> tuple[dict[str, npt.NDArray[Any]], Int32s]:
    """Columns sorted by (ts, -dur, order in the file) without events of absurd times; old row -> new row (-1 = none).

    Takes `columns` apart while it goes, so that only one column is held twice.
    """
    ts, dur = columns["ts_ns"], columns["dur_ns"]
    count = len(ts)
    order = np.argsort(ts, kind="stable")
    sorted_ts = ts[order]
    tied = sorted_ts[1:] == sorted_ts[:-1]
    wrong = tied & (dur[order[1:]] > dur[order[:-1]])
    if wrong.any():
        # Only runs of equal starts need the second key, and they are few.
        inside = np.zeros(count, np.bool_)
        inside[1:] |= tied
        inside[:-1] |= tied
        rows = order[inside]
        order[inside] = rows[np.lexsort((rows, -dur[rows], ts[rows]))]
    if count:
        middle = int(sorted_ts[count // 2])
        low, high = middle - MAX_SPREAD_NS, middle + MAX_SPREAD_NS
        if sorted_ts[0] < low or sorted_ts[-1] > high or int(dur.max()) > MAX_SPREAD_NS:
            usable = (sorted_ts >= low) & (sorted_ts <= high) & (dur[order] <= MAX_SPREAD_NS)
            losses.bad_times += int(count - usable.sum())
            order = order[usable]
    del ts, dur, sorted_ts
    new_row = np.full(count, -1, np.int32)
    new_row[order] = np.arange(len(order), dtype=np.int32)
    result = {}
    for name in list(columns):
        result[name] = columns.pop(name)[order]
    return result, new_row


def _apply_base(ts: Int64s, base: Any) -> bool:
    """Make times absolute in place where the base is told. Returns Trace.epoch."""
    if not len(ts):
        return False
    if int(ts[0]) >= _ABSOLUTE_NS:
        return True
    offset = integer(base, 0)
    if offset < _ABSOLUTE_NS:
        return False
    ts += offset
    return True


def _device(properties: Any, device: Int32s) -> tuple[str, int]:
    """(model of the device that this rank used, number of devices listed)."""
    listed = [item for item in properties if isinstance(item, dict)] if isinstance(properties, list) else []
    names = {integer(item.get("id"), -1, 32): text_of(item.get("name")).strip() for item in listed}
    used = device[device >= 0]
    most = int(np.bincount(used[used < 65536]).argmax()) if len(used) and int(used.min()) < 65536 else -1
    return names.get(most) or next((name for name in names.values() if name), ""), len(listed)


def _with_device_note(damage: Damage, columns: Mapping[str, npt.NDArray[Any]], strings: Sequence[str]) -> Damage:
    """Kernel launches without a single device record are a failed capture, not an idle device (pytorch/kineto#996)."""
    category = columns["category"]
    if np.isin(category, (Category.KERNEL, Category.COPY, Category.MEMSET)).any():
        return damage
    calls = Counter(columns["name"][category == Category.RUNTIME].tolist())
    launches = sum(count for name, count in calls.items() if "launch" in strings[name].lower())
    if not launches:
        return damage
    note = (
        f"no device records although {launches} kernel launches were traced; the device's part of this rank is unknown"
    )
    return replace(damage, notes=(*damage.notes, note))
