"""One rank's profiler trace as numpy columns, and `read_trace`, the only function that opens trace files.

Not an analysis: nothing here knows of critical paths or faults. Used by `critical_path`, `pattern` and `collectives`.
Columns and string tables instead of objects or data frames, because a trace holds millions of events and memory must
stay below half of the file's size. Times are integer nanoseconds throughout: a double cannot hold the microseconds
since 1970 with three decimals (pytorch/kineto#890).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from eroica.job import ProcessGroup

Int64s: TypeAlias = npt.NDArray[np.int64]
Int32s: TypeAlias = npt.NDArray[np.int32]
UInt8s: TypeAlias = npt.NDArray[np.uint8]
Float32s: TypeAlias = npt.NDArray[np.float32]
Float64s: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]


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


class CollectiveKind(IntEnum):
    """What a communication does; decides whether all members wait for all others in it."""

    UNKNOWN = 0
    ALL_REDUCE = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    ALL_TO_ALL = 4
    BROADCAST = 5
    REDUCE = 6
    GATHER = 7
    SCATTER = 8
    BARRIER = 9
    SEND = 10
    RECV = 11
    SEND_RECV = 12
    """Point to point, direction not told (ncclDevKernel_SendRecv without metadata)."""
    WAIT = 13
    """A wait for an earlier communication; moves nothing."""
    DISPATCH = 14
    """Expert-parallel all-to-all of uneven sizes (DeepEP dispatch)."""
    COMBINE = 15
    """The way back (DeepEP combine)."""


@dataclass(frozen=True, slots=True)
class CollectiveTable:
    """Communication metadata, one row per communicating event (operator, annotation or kernel). Shape of each: (rows,)."""

    event: Int32s
    """Row in the trace's event columns."""
    kind: UInt8s
    """CollectiveKind."""
    group: Int32s
    """Index into `Trace.groups`; -1 = not told."""
    sequence: Int64s
    """Sequence number within the group as the trace tells it; -1 = not told."""
    peer: Int32s
    """Global rank on the other side of a send or recv; -1 = not told or not point to point."""
    in_elements: Int64s
    """-1 = not told."""
    out_elements: Int64s
    """-1 = not told."""
    dtype: Int32s
    """String id of the c10 name (Float, BFloat16, Long, ...); -1 = not told."""
    uneven: Bools
    """True where split sizes are given and differ: members do not all wait for the same amount of data."""
    transfers: Bools
    """True on the event whose span covers the transfer (kernel; gloo worker annotation), False on mere enqueues."""


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
        return bool(self.skipped_events or self.repaired_names or self.bad_times or self.truncated or self.notes)


@dataclass(frozen=True, slots=True)
class Samples:
    """Counters of one rank's host and device over the window, on the trace's own clock."""

    ts_ns: Int64s
    """(samples,) When each sample was read, ascending."""
    values: Mapping[str, Float64s]
    """Counter name -> (samples,); NaN = not read at that instant. Known names: `sm_clock_ratio` (0..1 of the top clock),
    `throttle` (1 while a throttle reason is active), `nic_gbps`, `pcie_gbps`, `cpu_ratio` (CPU share of the driving thread)."""


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
