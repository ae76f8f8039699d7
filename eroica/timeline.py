"""Op timelines of pipeline-parallel jobs in parquet: a few rows per rank and step instead of a profiler trace.

Not Kineto: an operation of these files is a whole forward of one micro-batch. Used by `trace` (`read_timeline`) and,
for the list of ranks, by `tracefiles`. Steps of such files are samples of a long run, each timed from its own start, so
they are laid one after another on a clock of our own; durations compare, instants across steps mean nothing.

    *-compute, optimizer, gc                     work on the compute stream
    forward-send / -recv, backward-send / -recv  point to point with the next or the previous stage of the same dp_rank
    params-all-gather, grads-reduce-scatter      over the ranks of one stage
    embedding-grads-all-reduce                   over the first and the last stage of one dp_rank
    layernorm-grads-all-reduce                   over tensor-parallel ranks, of which the file holds one
    optimizer-clip-main-grad                     holds the norm's all-reduce over all ranks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eroica import communication
from eroica.communication import CollectiveKind
from eroica.errors import DataError, UnavailableError, UserError
from eroica.job import ProcessGroup
from eroica.records import Category, Losses, integer

_NEEDED = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id")
_COLLECTIVES = {
    "params-all-gather": CollectiveKind.ALL_GATHER,
    "grads-reduce-scatter": CollectiveKind.REDUCE_SCATTER,
    "embedding-grads-all-reduce": CollectiveKind.ALL_REDUCE,
    "layernorm-grads-all-reduce": CollectiveKind.ALL_REDUCE,
    "optimizer-clip-main-grad": CollectiveKind.ALL_REDUCE,
}
_POINT_TO_POINT = {
    "forward-send": (CollectiveKind.SEND, 1),
    "forward-recv": (CollectiveKind.RECV, -1),
    "backward-send": (CollectiveKind.SEND, -1),
    "backward-recv": (CollectiveKind.RECV, 1),
}
"""Kind, and the step in stages to the other side."""
MAX_S = 1e6
"""A start or a duration beyond has no usable time: a step lasts seconds."""
_STREAMS = ("steps", "compute", "collective", *_POINT_TO_POINT)
"""Tracks of each rank: a send and a receive of one rank overlap, so each direction has its own."""


def _open(path: str | Path, columns: Sequence[str] | None) -> dict[str, npt.NDArray[Any]]:
    try:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.parquet as parquet  # type: ignore[import-untyped]
    except ImportError:
        raise UnavailableError(f'{path}: reading parquet needs pyarrow; run: pip install "eroica[parquet]"') from None
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file; give a parquet op timeline")
    try:
        file = parquet.ParquetFile(path)
        missing = [name for name in _NEEDED if name not in file.schema_arrow.names]
        if missing:
            raise DataError(f"{path}: has no column {', '.join(missing)}, so it is no op timeline")
        wanted = [name for name in columns or (*_NEEDED, "mc") if name in file.schema_arrow.names]
        table = file.read(columns=wanted)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as parquet ({str(error).splitlines()[0]})") from None
    return {name: _column(path, name, table[name].to_pylist()) for name in table.column_names}


def _column(path: str | Path, name: str, values: list[Any]) -> npt.NDArray[Any]:
    """One column as numbers: seconds, where a missing one is NaN, else whole numbers, of which none may be missing."""
    if name == "optype":
        return np.asarray(values, object)
    try:
        numbers = np.asarray(values, np.float64)
        if name in ("start_ts", "duration"):
            return numbers
        whole = np.asarray(values, np.int64)
        if (whole == numbers).all() and (name != "rank" or ((whole >= 0) & (whole < 1 << 31)).all()):
            return whole
    except (TypeError, ValueError, OverflowError):
        pass
    raise DataError(f"{path}: its column {name} does not hold what an op timeline has there, so it is none")


def ranks(path: str | Path) -> list[int]:
    """Ranks in the file, ascending. Raises as `load`."""
    return sorted({int(rank) for rank in _open(path, ["rank"])["rank"]})


def world_size(paths: Sequence[str]) -> int | None:
    """`world_size` of the meta-NAME.yaml beside trace-NAME.parquet; None if there is none."""
    for path in paths:
        size = integer(_meta(Path(path)).get("world_size"), 0, 32)
        if size > 0:
            return size
    return None


def _meta(path: Path) -> dict[str, str]:
    """The two-column YAML beside a timeline."""
    own = path.with_name(path.stem.replace("trace", "meta", 1) + ".yaml")
    if own == path or not own.is_file():
        return {}
    pairs = (line.partition(":") for line in own.read_text("utf-8", "replace").splitlines())
    return {key.strip(): value.strip() for key, colon, value in pairs if colon}


@dataclass(frozen=True, slots=True)
class _Job:
    """The file as a whole."""

    table: dict[str, npt.NDArray[Any]]
    ts_ns: npt.NDArray[np.int64]
    dur_ns: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]
    """Numbers of the steps, ascending."""
    step_start: npt.NDArray[np.int64]
    step_end: npt.NDArray[np.int64]
    step_index: npt.NDArray[np.int64]
    """(rows,) Index into `steps`."""
    num_stages: int
    virtual: bool
    """Several model chunks per stage: the last stage sends forward to the first."""
    rank_at: dict[tuple[int, int], int]
    """(dp_rank, stage) -> rank."""
    bad: npt.NDArray[np.bool_]
    """(rows,) Without usable time."""


def load(path: str | Path) -> list[dict[str, Any]]:
    """Arguments of `trace.Trace` (without `path`) for each rank of the file, in rank order.

    Raises UserError if there is no such file, DataError if it is no op timeline, UnavailableError without pyarrow.
    """
    table = _open(path, None)
    if not len(table["rank"]):
        raise DataError(f"{path}: holds no rows")
    job = _job(table)
    meta = _meta(Path(path))
    size = integer(meta.get("world_size"), 0, 32)
    owners = np.asarray(table["rank"], np.int64)
    return [_rank(job, int(rank), np.flatnonzero(owners == rank), meta, size) for rank in np.unique(owners)]


def _job(table: dict[str, npt.NDArray[Any]]) -> _Job:
    seconds = np.asarray(table["start_ts"], np.float64), np.asarray(table["duration"], np.float64)
    bad = ~((np.abs(seconds[0]) < MAX_S) & (seconds[1] >= 0) & (seconds[1] < MAX_S))
    start = np.rint(np.where(bad, 0, seconds[0]) * 1e9).astype(np.int64)
    dur = np.rint(np.where(bad, 0, seconds[1]) * 1e9).astype(np.int64)
    steps, index = np.unique(np.asarray(table["step"], np.int64), return_inverse=True)
    first, last = np.full(len(steps), 2**62), np.zeros(len(steps), np.int64)
    np.minimum.at(first, index[~bad], start[~bad])
    np.maximum.at(last, index[~bad], (start + dur)[~bad])
    length = np.maximum(last - first, 0)
    step_start = np.concatenate([[0], np.cumsum(length)[:-1]])
    dp_rank, stage = np.asarray(table["dp_rank"], np.int64), np.asarray(table["stage"], np.int64)
    places = {(int(d), int(s)): int(r) for d, s, r in zip(dp_rank, stage, table["rank"], strict=True)}
    virtual = "mc" in table and int(np.max(table["mc"])) > 0
    return _Job(
        table,
        step_start[index] + start - first[index],
        dur,
        steps,
        step_start,
        step_start + length,
        index,
        int(stage.max()) + 1,
        virtual,
        places,
        bad,
    )


def _groups(job: _Job, dp_rank: int, stage: int, meta: dict[str, str]) -> tuple[ProcessGroup, ...]:
    def group(description: str, members: Sequence[int], size: int = 0) -> ProcessGroup:
        ordered = tuple(sorted(set(members)))
        return ProcessGroup(description, description, ordered, size or len(ordered))

    pipeline = [rank for (d, _), rank in job.rank_at.items() if d == dp_rank]
    ends = [job.rank_at[key] for key in ((dp_rank, 0), (dp_rank, job.num_stages - 1)) if key in job.rank_at]
    return (
        group("world", list(job.rank_at.values())),
        group("data_parallel", [rank for (_, s), rank in job.rank_at.items() if s == stage]),
        group("pipeline_parallel", pipeline),
        group("embedding", ends),
        group("tensor_parallel", (), max(integer(meta.get("tp_size"), 0, 32), 0)),
    )


_GROUP_OF = {
    "params-all-gather": 1,
    "grads-reduce-scatter": 1,
    "embedding-grads-all-reduce": 3,
    "layernorm-grads-all-reduce": 4,
    "optimizer-clip-main-grad": 0,
    **dict.fromkeys(_POINT_TO_POINT, 2),
}


def _rank(job: _Job, rank: int, rows: npt.NDArray[np.int64], meta: dict[str, str], size: int) -> dict[str, Any]:
    dp_rank, stage = int(job.table["dp_rank"][rows[0]]), int(job.table["stage"][rows[0]])
    num_bad = int(job.bad[rows].sum())
    rows = rows[~job.bad[rows]]
    ops = [str(op) for op in job.table["optype"][rows]]
    names = sorted(set(ops))
    strings = [*names, *(f"ProfilerStep#{step}" for step in job.steps.tolist())]
    string_id = {name: index for index, name in enumerate(names)}
    track_of = {op: 2 for op in _COLLECTIVES} | {op: 3 + i for i, op in enumerate(_POINT_TO_POINT)}

    num_steps = len(job.steps)
    ts = np.concatenate([job.step_start, job.ts_ns[rows]])
    dur = np.concatenate([job.step_end - job.step_start, job.dur_ns[rows]])
    name = np.concatenate([len(names) + np.arange(num_steps), [string_id[op] for op in ops]]).astype(np.int32)
    track = np.concatenate([np.zeros(num_steps), [track_of.get(op, 1) for op in ops]]).astype(np.int32)
    category = np.full(len(ts), Category.KERNEL, np.uint8)
    category[:num_steps] = Category.ANNOTATION
    order = np.lexsort((np.arange(len(ts)), -dur, ts))
    new_row = np.argsort(order)

    communicating = [index for index, op in enumerate(ops) if op in _GROUP_OF]
    events = new_row[num_steps + np.asarray(communicating, np.int64)]
    by_event = [communicating[index] for index in np.argsort(events)]
    sequences = job.step_index * (int(np.max(job.table["seq_id"])) + 1) + np.asarray(job.table["seq_id"], np.int64)
    table = communication.empty(len(by_event))
    table.event[:] = np.sort(events)
    table.transfers[:] = True
    for index, row in enumerate(by_event):
        op = ops[row]
        table.group[index] = _GROUP_OF[op]
        table.sequence[index] = sequences[rows[row]]
        if op in _COLLECTIVES:
            table.kind[index] = _COLLECTIVES[op]
            continue
        table.kind[index], direction = _POINT_TO_POINT[op]
        other = stage + direction
        if job.virtual:
            other %= job.num_stages
        table.peer[index] = job.rank_at.get((dp_rank, other), -1)

    count = len(ts)
    device = np.where(category == Category.KERNEL, 0, -1).astype(np.int32)
    damage = Losses(bad_times=num_bad).damage()
    return {
        "rank": rank,
        "world_size": size if size > 0 else None,
        "host": "",
        "device_model": "",
        "num_devices": 0,
        "epoch": False,
        "strings": tuple(strings),
        "tracks": tuple((f"rank {rank}", stream) for stream in _STREAMS),
        "track_names": _STREAMS,
        "groups": _groups(job, dp_rank, stage, meta),
        "ts_ns": ts[order],
        "dur_ns": dur[order],
        "name": name[order],
        "category": category[order],
        "track": track[order],
        "correlation": np.zeros(count, np.int64),
        "stream": np.where(category == Category.KERNEL, track, -1).astype(np.int32)[order],
        "device": device[order],
        "work": np.full(count, -1, np.int64),
        "bandwidth_gbs": np.full(count, np.nan, np.float32),
        "occupancy": np.full(count, np.nan, np.float32),
        "collectives": table,
        "damage": damage,
    }
