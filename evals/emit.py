"""One synthetic rank's events and counters, from what the simulation says happened when.

Host events are templates tied to items of the program by shares of their host time; kernels are placed by the same
arithmetic as in the simulation (`program.kernel_times`). Everything is vectorised over the iterations, so that a rank
costs milliseconds and only one rank is in memory. Used by `evals.synth` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from eroica import communication
from eroica.groups import Groups
from eroica.trace import Bools, Category, CollectiveKind, Float64s, Int64s, Samples, Trace
from evals.base import AUTOGRAD, MAIN, Base, Names
from evals.layouts import annotation_name, collective_name, kernel_name
from evals.program import Plan, Program, Times, kernel_times

Column: TypeAlias = npt.NDArray[Any]

_COMM_BLOCKS = 24
"""Launch grid of a communication kernel."""
_PEER_TO_PEER = (CollectiveKind.SEND_RECV, CollectiveKind.SEND, CollectiveKind.RECV)
_DEEP_EP = (CollectiveKind.DISPATCH, CollectiveKind.COMBINE)


@dataclass(frozen=True, slots=True)
class Rank:
    """Who a trace is of: what `emit` writes beside the events."""

    rank: int
    world_size: int
    host: str
    device_model: str
    num_devices: int
    groups: tuple[int, ...]
    """Indices into Program.groups of the groups that this rank's trace lists."""
    clock_ns: int
    """What the rank's clock shows at the job's start."""


@dataclass(frozen=True, slots=True)
class Written:
    """A trace with what only its file tells."""

    trace: Trace
    args: Mapping[int, Mapping[str, Any]]
    """Row -> communication arguments."""
    groups: Sequence[Mapping[str, Any]]
    """distributedInfo.pg_config."""


@dataclass(frozen=True, slots=True)
class Template:
    """Host events of one iteration of the whole program, with the items that their ends are tied to."""

    item: Int64s
    end_item: Int64s
    start: Float64s
    end: Float64s
    name: Int64s
    category: Int64s
    thread: Int64s
    work: Int64s
    op: Int64s
    """Index of the device operation launched, over the whole program; -1 = none."""
    metadata: Bools
    """Carries communication metadata."""
    op_first: tuple[int, ...]
    """Index of each item's first operation."""
    num_ops: int
    step_row: int

    @classmethod
    def of(cls, base: Base, program: Program, blocking: bool = False) -> Template:
        """Concatenate the templates of all items and the frames that span them, outermost first. `blocking`: of a rank
        whose launch calls wait for their kernels."""
        names: Names = base.names
        rows: list[tuple[int, int, float, float, int, int, int]] = []
        last = len(program.items) - 1
        rows.append((0, last, 0.0, 1.0, names["ProfilerStep"], Category.ANNOTATION, MAIN))
        if base.stacks:
            step = names["/workspace/train/train.py(61): train_step"]
            rows.append((0, last, 0.0, 1.0, step, Category.PYTHON, MAIN))
            for a, b in _backward_calls(program):
                for text in (
                    "torch/_tensor.py(625): backward",
                    "torch/autograd/__init__.py(354): backward",
                    "torch/autograd/graph.py(849): _engine_run_backward",
                    "<built-in method run_backward of torch._C._EngineBase object at 0x7f4be0b3c4d0>",
                ):
                    rows.append((a, b, 0.0, 1.0, names[text], Category.PYTHON, MAIN))
            where = {item.base_piece: n for n, item in enumerate(program.items) if item.base_piece >= 0}
            for frame in base.frames:
                first, final = frame.start, frame.end
                rows.append((where[first[0]], where[final[0]], first[1], final[1], frame.name, Category.PYTHON, MAIN))
        columns = [np.array(column) for column in zip(*rows, strict=True)]
        spans = len(rows)
        parts: dict[str, list[Column]] = {
            key: [] for key in ("item", "start", "end", "name", "category", "thread", "work", "op", "metadata")
        }
        op_first, num_ops = [], 0
        communication = names["record_param_comms"]
        for n, item in enumerate(program.items):
            piece = item.blocked if blocking and item.blocked is not None else item.piece
            op_first.append(num_ops)
            parts["item"].append(np.full(len(piece.name), n))
            for key in ("start", "end", "name", "category", "thread", "work"):
                parts[key].append(getattr(piece, key))
            parts["op"].append(np.where(piece.launch >= 0, piece.launch.astype(np.int64) + num_ops, -1))
            parts["metadata"].append((piece.name == communication) & (item.comm is not None))
            num_ops += 1 if item.comm is not None else len(piece.op_ns)
        joined = {key: np.concatenate(part) for key, part in parts.items()}
        return cls(
            item=np.concatenate([columns[0], joined["item"]]).astype(np.int64),
            end_item=np.concatenate([columns[1], joined["item"]]).astype(np.int64),
            start=np.concatenate([columns[2], joined["start"]]).astype(np.float64),
            end=np.concatenate([columns[3], joined["end"]]).astype(np.float64),
            name=np.concatenate([columns[4], joined["name"]]).astype(np.int64),
            category=np.concatenate([columns[5], joined["category"]]).astype(np.int64),
            thread=np.concatenate([columns[6], joined["thread"]]).astype(np.int64),
            work=np.concatenate([np.full(spans, -1), joined["work"]]).astype(np.int64),
            op=np.concatenate([np.full(spans, -1), joined["op"]]).astype(np.int64),
            metadata=np.concatenate([np.zeros(spans, bool), joined["metadata"]]).astype(bool),
            op_first=tuple(op_first),
            num_ops=num_ops,
            step_row=0,
        )


def _backward_calls(program: Program) -> list[tuple[int, int]]:
    """First and last item of each stretch that the autograd thread works through without the main thread."""
    calls: list[tuple[int, int]] = []
    for n, item in enumerate(program.items):
        if not (item.piece.thread == AUTOGRAD).any():
            continue
        if calls and all((program.items[k].piece.thread != MAIN).all() for k in range(calls[-1][1] + 1, n)):
            calls[-1] = (calls[-1][0], n)
        else:
            calls.append((n, n))
    return calls


class _Rows:
    """Columns in the making: blocks of events of one kind."""

    def __init__(self) -> None:
        self.blocks: list[tuple[Column, ...]] = []
        self.count = 0

    def add(
        self,
        start: Float64s,
        end: Float64s,
        name: object,
        category: object,
        track: object,
        correlation: object,
        stream: int = -1,
        work: object = -1,
        bandwidth: object = np.nan,
        occupancy: object = np.nan,
    ) -> Int64s:
        """Add a block; returns its row numbers (before sorting)."""
        shape = start.shape
        first = np.rint(start).astype(np.int64).ravel()
        last = np.rint(end).astype(np.int64).ravel()

        def column(value: object, dtype: npt.DTypeLike) -> Column:
            return np.broadcast_to(np.asarray(value, dtype), shape).ravel()

        device = 0 if stream >= 0 else -1
        self.blocks.append(
            (
                first,
                last - first,
                column(name, np.int32),
                column(category, np.uint8),
                column(track, np.int32),
                column(correlation, np.int64),
                column(stream, np.int32),
                column(device, np.int32),
                column(work, np.int64),
                column(bandwidth, np.float32),
                column(occupancy, np.float32),
            )
        )
        rows = np.arange(self.count, self.count + len(first))
        self.count += len(first)
        return rows


def emit(base: Base, program: Program, plan: Plan, times: Times, template: Template, who: Rank) -> Written:
    """One rank's columns and what a file holds beside them."""
    names, rank = base.names, who.rank
    host, length = times.host[:, rank, 1:], times.host_len[:, rank, 1:]
    active = plan.active[:, rank, 1:]
    iterations = host.shape[1]
    tracks = [(str(1000 + rank), str(1000 + rank)), (str(1000 + rank), str(5000 + rank))]
    track_names = [f"thread {1000 + rank} (python3)", f"thread {5000 + rank} (pt_autograd_0)"]
    stream_track: dict[int, int] = {}

    def track_of(stream: int) -> int:
        if stream not in stream_track:
            stream_track[stream] = len(tracks)
            tracks.append(("0", str(stream)))
            track_names.append(f"stream {stream}")
        return stream_track[stream]

    rows = _Rows()
    # Host events, (E, I): instants are shares of the host time of the items that they start and end in.
    start = host[template.item] + template.start[:, None] * length[template.item]
    end = host[template.end_item] + template.end[:, None] * length[template.end_item]
    name = np.broadcast_to(template.name[:, None], start.shape).copy()
    name[template.step_row] = [names[f"ProfilerStep#{10 + i}"] for i in range(iterations)]
    correlation = np.where(
        template.op[:, None] >= 0, 1 + template.op[:, None] + template.num_ops * np.arange(iterations), 0
    )
    shown = active[template.item] | (template.item != template.end_item)[:, None]
    meta = np.broadcast_to(template.metadata[:, None], start.shape)[shown]
    meta_item = np.broadcast_to(template.item[:, None], start.shape)[shown][meta]
    meta_step = np.broadcast_to(np.arange(iterations), start.shape)[shown][meta]
    if base.stacks:
        window = (np.array([host[0, 0] - 20_000.0]), np.array([host[-1, -1] + length[-1, -1] + 20_000.0]))
        rows.add(*window, names["/workspace/train/train.py(88): main"], Category.PYTHON, 0, 0)
    host_rows = rows.add(
        start[shown],
        end[shown],
        name[shown],
        np.broadcast_to(template.category[:, None], start.shape)[shown],
        np.broadcast_to(template.thread[:, None], start.shape)[shown],
        correlation[shown],
        work=np.broadcast_to(template.work[:, None], start.shape)[shown],
    )
    told = [(host_rows[meta], meta_item, meta_step)]
    for n, item in enumerate(program.items):
        on = np.flatnonzero(active[n])
        if not len(on):
            continue
        first = 1 + template.op_first[n] + template.num_ops * on
        if item.comm is not None:
            comm = item.comm
            begin, until = times.begin[n, rank, 1:][on], times.end[n, rank, 1:][on]
            stream = comm.stream
            if comm.kind not in (*_DEEP_EP, *_PEER_TO_PEER):
                rows.add(
                    begin,
                    until,
                    names[annotation_name(comm.kind)],
                    Category.DEVICE_ANNOTATION,
                    track_of(stream),
                    0,
                    stream,
                )
            kind = CollectiveKind.SEND if comm.kind == CollectiveKind.SEND_RECV else comm.kind
            text = kernel_name(base, kind)
            kernels = rows.add(
                begin,
                until,
                names[text],
                Category.KERNEL,
                track_of(stream),
                first,
                stream,
                -1 if base.amd else _COMM_BLOCKS,
            )
            if comm.kind not in _DEEP_EP:
                told.append((kernels, np.full(len(on), n), on))
        elif len(item.piece.op_ns):
            piece = item.blocked if plan.blocking[rank] and item.blocked is not None else item.piece
            began, ended = kernel_times(
                piece, plan.factor[n, rank, 1:][on], host[n, on], length[n, on], times.free[n, rank, 1:][on]
            )
            work = np.where(
                (piece.op_work > 0) & (piece.op_category == Category.KERNEL),
                np.rint(piece.op_work * plan.work[n, rank, 1:][on][:, None]).astype(np.int64),
                piece.op_work,
            )
            copies = piece.op_category == Category.COPY
            bandwidth = np.where(copies, piece.op_work / np.maximum(ended - began, 1.0), np.nan)
            rows.add(
                began,
                ended,
                piece.op_name,
                piece.op_category,
                track_of(7),
                first[:, None] + np.arange(len(piece.op_ns)),
                7,
                work,
                bandwidth,
                piece.op_occupancy,
            )
    return _trace(base, program, who, rows, told, tracks, track_names)


def _trace(
    base: Base,
    program: Program,
    who: Rank,
    rows: _Rows,
    told: list[tuple[Int64s, Int64s, Int64s]],
    tracks: list[tuple[str, str]],
    track_names: list[str],
) -> Written:
    """Sorted columns. told: (rows, items, iterations) of the events that carry communication arguments."""
    joined = [np.concatenate(column) for column in zip(*rows.blocks, strict=True)]
    order = np.lexsort((-joined[1], joined[0]))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    columns = [column[order] for column in joined]
    columns[0] = columns[0] + who.clock_ns
    arguments = _Arguments(base, program, who)
    args = {
        int(place[row]): arguments.of(int(n), int(step))
        for block in told
        for row, n, step in zip(*(part.tolist() for part in block), strict=True)
    }
    config = [
        {
            "pg_name": g.name,
            "pg_desc": g.description,
            "backend_config": "cuda:nccl",
            "pg_size": g.size,
            "ranks": list(g.ranks),
        }
        for g in (program.groups[index] for index in who.groups)
    ]
    # The product's own recognition, so that columns in memory are those that it reads from a file.
    groups = Groups(config)
    strings = list(base.names.table())
    events = communication.Events(
        ts_ns=columns[0],
        dur_ns=columns[1],
        name=columns[2],
        category=columns[3],
        track=columns[4],
        correlation=columns[5],
        external=np.zeros(len(columns[0]), np.int64),
        work=columns[8],
    )
    table = communication.table(events, strings, args, groups)
    trace = Trace(
        path="",
        rank=who.rank,
        world_size=who.world_size,
        host=who.host,
        device_model=who.device_model,
        num_devices=who.num_devices,
        epoch=True,
        strings=tuple(strings),
        tracks=tuple(tracks),
        track_names=tuple(track_names),
        groups=tuple(groups.table),
        ts_ns=columns[0],
        dur_ns=columns[1],
        name=columns[2],
        category=columns[3],
        track=columns[4],
        correlation=columns[5],
        stream=columns[6],
        device=columns[7],
        work=columns[8],
        bandwidth_gbs=columns[9],
        occupancy=columns[10],
        collectives=table,
    )
    return Written(trace, args, config)


class _Arguments:
    """The arguments that torch's record_param_comms writes, for this rank's communication."""

    def __init__(self, base: Base, program: Program, who: Rank) -> None:
        self._program, self._rank = program, who.rank
        # Kineto tells sequence numbers only lately; the AMD base stands for older traces.
        self._tells_sequence = not base.amd
        self._position: dict[int, tuple[int, int]] = {}
        count: dict[int, int] = {}
        for n, item in enumerate(program.items):
            if item.comm is not None and item.comm.group[who.rank] >= 0:
                group = int(item.comm.group[who.rank])
                self._position[n] = (group, count.get(group, 0))
                count[group] = count.get(group, 0) + 1
        self._count = count
        self._fixed: dict[int, dict[str, Any]] = {}

    def of(self, n: int, step: int) -> dict[str, Any]:
        """Arguments of item n in an iteration."""
        if n not in self._fixed:
            self._fixed[n] = self._make(n)
        fixed = self._fixed[n]
        group, position = self._position[n]
        if not self._tells_sequence or fixed["Collective name"] in ("send", "recv"):
            return fixed
        return {**fixed, "Seq": 1 + self._count[group] * (10 + step) + position}

    def _make(self, n: int) -> dict[str, Any]:
        comm = self._program.items[n].comm
        assert comm is not None
        group = self._program.groups[int((comm.group if comm.shown is None else comm.shown)[self._rank])]
        kind = comm.kind
        if kind == CollectiveKind.SEND_RECV:
            kind = CollectiveKind.SEND if comm.sends[self._rank] else CollectiveKind.RECV
        shard = comm.elements // group.size
        made: dict[str, Any] = {
            "Collective name": collective_name(kind),
            "In msg nelems": shard if kind == CollectiveKind.ALL_GATHER else shard * group.size,
            "Out msg nelems": shard if kind == CollectiveKind.REDUCE_SCATTER else shard * group.size,
            "Group size": group.size,
            "dtype": comm.dtype,
            "Process Group Name": group.name,
            "Process Group Description": group.description,
            "Process Group Ranks": str(list(group.ranks)),
        }
        if kind in (CollectiveKind.SEND, CollectiveKind.RECV):
            made["Dst Rank" if kind == CollectiveKind.SEND else "Src Rank"] = int(comm.peer[self._rank])
        return made


def counters(
    program: Program, plan: Plan, times: Times, who: Rank, clock_ratio: float, throttled: bool, seed: int
) -> Samples:
    """One rank's counters on a grid of 10 ms, or a tenth of the iteration if that is shorter."""
    rank = who.rank
    step = min(10_000_000.0, float(times.iteration_ns[1:].mean()) / 10.0)
    begin, end = times.host[0, rank, 1], times.host[-1, rank, -1] + times.host_len[-1, rank, -1]
    grid = np.arange(begin, end + step, step)
    rng = np.random.default_rng([seed, 79, rank])
    network, copied = np.zeros(len(grid)), np.zeros(len(grid))
    edges = np.append(grid, grid[-1] + step)
    for n, item in enumerate(program.items):
        on = plan.active[n, rank]
        if item.comm is not None and on.any():
            group = program.groups[int(item.comm.group[rank])]
            if len({int(program.hosts[r]) for r in group.ranks}) > 1:
                until, transfer = times.end[n, rank][on], plan.transfer_ns[n, rank][on]
                network += _share(edges, until - transfer, until) * item.comm.elements * 2.0
        elif item.label == "copy":
            until = times.end[n, rank][on]
            spent = item.piece.op_ns.sum() * plan.factor[n, rank][on]
            copied += _share(edges, until - spent, until) * float(item.piece.op_work.sum())
    clock = clock_ratio * (1.0 - np.abs(rng.normal(0.0, 0.004, len(grid))))
    values = {
        "sm_clock_ratio": clock,
        "throttle": np.full(len(grid), float(throttled)),
        "nic_gbps": network * 8.0 / step,
        "pcie_gbps": copied * 8.0 / step,
        "cpu_ratio": np.clip(rng.normal(0.97, 0.02, len(grid)), 0.0, 1.0),
    }
    return Samples(ts_ns=np.rint(grid).astype(np.int64) + who.clock_ns, values=values)


def _share(edges: Float64s, begin: Float64s, end: Float64s) -> Float64s:
    """How many of the spans (of equal content) fall in each cell of the grid, parts counted."""
    total = np.zeros(len(edges))
    for a, b in zip(begin.tolist(), end.tolist(), strict=True):
        total += np.clip((edges - a) / max(b - a, 1.0), 0.0, 1.0)
    return np.diff(total)
