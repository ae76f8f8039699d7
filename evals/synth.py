"""Synthetic clusters: every rank's trace of a job with planted faults, made from one real single-GPU trace.

`cluster(case, ...)` draws jitter and culprits from a seed, searches the fault's size for the wanted effect, simulates
the job (`evals.program`) and then writes one rank's events at a time, so that 512 ranks need no more memory than one.
The record says what is true: who the culprits are and how many seconds per iteration each fault costs, by the same
simulation with and without it. Used by `evals.synthetic` (which scores eroica on it) and by tests.

What it is not: a fabric or a GPU model. `evals/README.md` lists what is less rich than reality.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from eroica.trace import Bools, Category, CollectiveKind, CollectiveTable, Float64s, Int64s, Samples, Trace
from evals.base import AUTOGRAD, MAIN, Base, Names, load_base
from evals.cases_synth import BY_ID, Answer, Case
from evals.faults import apply, calibrate, draw_culprits, mean_iteration_ns
from evals.program import (
    LAYOUTS,
    Item,
    Plan,
    Program,
    Times,
    annotation_name,
    build,
    draw_plan,
    kernel_name,
    kernel_times,
    simulate,
)

_PLANTED = {"gc": "gc", "sync_gap": "sync_gap", "allocator": "allocator"}
"""Transform -> items that it needs in the program."""
_COMM_BLOCKS = 24
"""Launch grid of a communication kernel."""
_PEER_TO_PEER = (CollectiveKind.SEND_RECV, CollectiveKind.SEND, CollectiveKind.RECV)
_DEEP_EP = (CollectiveKind.DISPATCH, CollectiveKind.COMBINE)


@dataclass(frozen=True, slots=True)
class Expected:
    """One planted fault: what a diagnosis must say, and what it truly costs."""

    answer: Answer
    ranks: frozenset[int]
    hosts: frozenset[str]
    cost_s: float
    """Seconds per iteration that come back without this fault (others stay)."""
    magnitude: float
    """The transform's own number, for people."""


@dataclass(frozen=True)
class Cluster:
    """A job whose every rank's trace can be had, with the truth about it."""

    case: Case
    base: Base
    program: Program
    plan: Plan
    times: Times
    seed: int
    expected: tuple[Expected, ...]
    effect: float
    """Wanted growth of the iteration (of each fault alone)."""
    growth: float
    """Growth of the iteration with all faults over the same job without, by the simulation."""
    iteration_s: float
    healthy_iteration_s: float
    host_names: tuple[str, ...]
    throttle: Float64s
    """(W,) Clock relative to maximum."""
    throttle_flag: Bools
    """(W,)"""
    device_models: tuple[str, ...]
    """(W,)"""
    healthy_plan: Plan

    @property
    def world_size(self) -> int:
        return self.program.world_size

    @cached_property
    def culprits(self) -> frozenset[int]:
        return frozenset().union(*(e.ranks for e in self.expected))

    def traces(self) -> Iterator[tuple[Trace, Samples | None]]:
        """Each rank's trace and counters, in the order of ranks; made when asked for."""
        for rank in range(self.world_size):
            yield self.trace(rank), self.samples(rank) if self.case.counters else None

    def baseline(self) -> Iterator[tuple[Trace, Samples | None]]:
        """The same job when healthy, with other jitter."""
        plan = _healthy(self.program, self.seed + 1_000_003)
        other = replace(self, plan=plan, times=simulate(self.program, plan), seed=self.seed + 1_000_003)
        yield from other.traces()

    @cached_property
    def _template(self) -> _Template:
        return _Template.of(self.base, self.program)

    @cached_property
    def _groups_of(self) -> list[list[int]]:
        of: list[list[int]] = [[] for _ in range(self.world_size)]
        for index, group in enumerate(self.program.groups):
            if not group.description.startswith("pp_pair"):
                for rank in group.ranks:
                    of[rank].append(index)
        return of

    def clock_ns(self, rank: int) -> int:
        """What the rank's clock shows at the job's start: clocks of different ranks are seconds apart."""
        offset = np.random.default_rng([self.seed, 77, int(self.program.hosts[rank])]).integers(
            -3_000_000_000, 3_000_000_000
        )
        own = np.random.default_rng([self.seed, 78, rank]).integers(-200_000, 200_000)
        return 1_764_000_000_000_000_000 + int(offset) + int(own)

    def trace(self, rank: int) -> Trace:
        """One rank's columns, as `read_trace` gives them for the same file."""
        return _emit(self, rank)

    def samples(self, rank: int) -> Samples:
        """One rank's counters on a grid of 10 ms (a tenth of the iteration if that is shorter)."""
        return _counters(self, rank)


@dataclass(frozen=True, slots=True)
class _Template:
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
    def of(cls, base: Base, program: Program) -> _Template:
        names: Names = base.names
        rows: list[tuple[int, int, float, float, int, int, int]] = []
        last = len(program.items) - 1
        rows.append((0, last, 0.0, 1.0, names["ProfilerStep"], Category.ANNOTATION, MAIN))
        if base.stacks:
            step = names["/workspace/train/train.py(61): train_step"]
            rows.append((0, last, 0.0, 1.0, step, Category.PYTHON, MAIN))
            threads = [bool((item.piece.thread == AUTOGRAD).any()) for item in program.items]
            autograd = np.flatnonzero(threads)
            a, b = int(autograd[0]), int(autograd[-1])
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
        parts: dict[str, list[np.ndarray]] = {
            key: [] for key in ("item", "start", "end", "name", "category", "thread", "work", "op", "metadata")
        }  # type: ignore[type-arg]
        op_first, num_ops = [], 0
        communication = names["record_param_comms"]
        for n, item in enumerate(program.items):
            piece = item.piece
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


class _Rows:
    """Columns in the making: blocks of events of one kind."""

    def __init__(self) -> None:
        self.blocks: list[tuple[np.ndarray, ...]] = []  # type: ignore[type-arg]
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

        def column(value: object, dtype: type) -> np.ndarray:  # type: ignore[type-arg]
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


def _emit(cluster: Cluster, rank: int) -> Trace:
    program, plan, times, base = cluster.program, cluster.plan, cluster.times, cluster.base
    template, names = cluster._template, base.names
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
    link_event = [host_rows[meta]]
    link_item = [meta_item]
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
            link_event.append(
                rows.add(
                    begin,
                    until,
                    names[text],
                    Category.KERNEL,
                    track_of(stream),
                    first,
                    stream,
                    -1 if base.amd else _COMM_BLOCKS,
                )
            )
            link_item.append(np.full(len(on), n))
        elif len(item.piece.op_ns):
            piece = item.piece
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
    return _trace(cluster, rank, rows, np.concatenate(link_event), np.concatenate(link_item), tracks, track_names)


def _trace(
    cluster: Cluster,
    rank: int,
    rows: _Rows,
    link_event: Int64s,
    link_item: Int64s,
    tracks: list[tuple[str, str]],
    track_names: list[str],
) -> Trace:
    program = cluster.program
    joined = [np.concatenate(column) for column in zip(*rows.blocks, strict=True)]
    order = np.lexsort((-joined[1], joined[0]))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    columns = [column[order] for column in joined]
    columns[0] = columns[0] + cluster.clock_ns(rank)
    own = cluster._groups_of[rank]
    own_index = {group: k for k, group in enumerate(own)}
    event = place[link_event]
    by_event = np.argsort(event, kind="stable")
    event, link_item = event[by_event], link_item[by_event]
    details = {n: _communication(program, program.items[int(n)], rank, own_index) for n in np.unique(link_item)}
    listed = [details[n] for n in link_item.tolist()]
    bfloat = cluster.base.names["BFloat16"]
    table = CollectiveTable(
        event=event.astype(np.int32),
        kind=np.array([d[0] for d in listed], np.uint8),
        group=np.array([d[1] for d in listed], np.int32),
        sequence=np.full(len(event), -1, np.int64),
        peer=np.array([d[2] for d in listed], np.int32),
        in_elements=np.array([d[3] for d in listed], np.int64),
        out_elements=np.array([d[4] for d in listed], np.int64),
        dtype=np.where([d[3] >= 0 for d in listed], bfloat, -1).astype(np.int32),
        uneven=np.array([d[5] for d in listed], bool),
        transfers=columns[3][event] == Category.KERNEL,
    )
    return Trace(
        path="",
        rank=rank,
        world_size=program.world_size,
        host=cluster.host_names[int(program.hosts[rank])],
        device_model=cluster.device_models[rank],
        num_devices=int((program.hosts == 0).sum()),
        epoch=True,
        strings=cluster.base.names.table(),
        tracks=tuple(tracks),
        track_names=tuple(track_names),
        groups=tuple(program.groups[g] for g in own),
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


def _communication(
    program: Program, item: Item, rank: int, own: dict[int, int]
) -> tuple[CollectiveKind, int, int, int, int, bool]:
    """Kind, group, peer, elements in and out, uneven, as the trace of this rank tells it."""
    comm = item.comm
    assert comm is not None
    if comm.kind in _DEEP_EP:
        return comm.kind, -1, -1, -1, -1, False
    group = int((comm.group if comm.shown is None else comm.shown)[rank])
    kind = comm.kind
    if kind == CollectiveKind.SEND_RECV:
        kind = CollectiveKind.SEND if comm.sends[rank] else CollectiveKind.RECV
    size = max(1, program.groups[group].size)
    shard = comm.elements // size
    in_elements = shard if kind == CollectiveKind.ALL_GATHER else comm.elements
    out_elements = shard if kind == CollectiveKind.REDUCE_SCATTER else comm.elements
    if kind == CollectiveKind.ALL_GATHER:
        out_elements = shard * size
    return kind, own[group], int(comm.peer[rank]), in_elements, out_elements, False


def _counters(cluster: Cluster, rank: int) -> Samples:
    program, times = cluster.program, cluster.times
    step = min(10_000_000.0, 1e9 * cluster.iteration_s / 10.0)
    begin, end = times.host[0, rank, 1], times.host[-1, rank, -1] + times.host_len[-1, rank, -1]
    grid = np.arange(begin, end + step, step)
    rng = np.random.default_rng([cluster.seed, 79, rank])
    network, copied = np.zeros(len(grid)), np.zeros(len(grid))
    edges = np.append(grid, grid[-1] + step)
    for n, item in enumerate(program.items):
        on = cluster.plan.active[n, rank]
        if item.comm is not None and on.any():
            group = program.groups[int(item.comm.group[rank])]
            if len({int(program.hosts[r]) for r in group.ranks}) > 1:
                until, transfer = times.end[n, rank][on], cluster.plan.transfer_ns[n, rank][on]
                network += _share(edges, until - transfer, until) * item.comm.elements * 2.0
        elif item.label == "copy":
            until = times.end[n, rank][on]
            spent = item.piece.op_ns.sum() * cluster.plan.factor[n, rank][on]
            copied += _share(edges, until - spent, until) * float(item.piece.op_work.sum())
    clock = cluster.throttle[rank] * (1.0 - np.abs(rng.normal(0.0, 0.004, len(grid))))
    values = {
        "sm_clock_ratio": clock,
        "throttle": np.full(len(grid), float(cluster.throttle_flag[rank])),
        "nic_gbps": network * 8.0 / step,
        "pcie_gbps": copied * 8.0 / step,
        "cpu_ratio": np.clip(rng.normal(0.97, 0.02, len(grid)), 0.0, 1.0),
    }
    return Samples(ts_ns=np.rint(grid).astype(np.int64) + cluster.clock_ns(rank), values=values)


def _share(edges: Float64s, begin: Float64s, end: Float64s) -> Float64s:
    """How many of the spans (of equal content) fall in each cell of the grid, parts counted."""
    total = np.zeros(len(edges))
    for a, b in zip(begin.tolist(), end.tolist(), strict=True):
        total += np.clip((edges - a) / max(b - a, 1.0), 0.0, 1.0)
    return np.diff(total)


@lru_cache(maxsize=8)
def _base(name: str, num_pieces: int, max_events: int) -> Base:
    return load_base(name, num_pieces, max_events)


def _healthy(program: Program, seed: int, num_iterations: int = 7) -> Plan:
    return draw_plan(program, num_iterations, np.random.default_rng([seed, 1]))


def cluster(
    case: str | Case,
    *,
    world_size: int = 8,
    effect: float = 0.10,
    seed: int = 0,
    base: str = "bert",
    num_iterations: int = 6,
    max_events: int = 1600,
) -> Cluster:
    """Draw a cluster.

    case: id of a case in `cases_synth`; effect: share by which each fault alone makes the iteration longer; base: name
    in `evals.base.BASES` or the path of a Kineto trace. The same arguments give the same cluster. Raises ValueError for
    a size that the case's layout cannot split.
    """
    chosen = BY_ID[case] if isinstance(case, str) else case
    ranks_per_host = (
        8 if world_size >= 32 else max(1, world_size // 4) if chosen.layout == "hsdp" else min(8, world_size)
    )
    if any(f.culprits in ("host", "two") for f in chosen.faults) and world_size < 32:
        ranks_per_host = max(1, world_size // 4)
    if "models" in chosen.extras and world_size < 32:
        ranks_per_host = max(1, world_size // 2)
    if chosen.layout == "tp_dp" and world_size < 32:
        ranks_per_host = max(1, world_size // 2)
    source = _base(base, LAYOUTS[chosen.layout], max_events)
    planted = next((_PLANTED[f.transform] for f in chosen.faults if f.transform in _PLANTED), None)
    planted = "gc_frame" if "gc_frame" in chosen.extras else planted
    planted = "sync_gap" if "harmless_sync" in chosen.extras else planted
    program = build(source, chosen.layout, world_size, ranks_per_host, planted)
    rng = np.random.default_rng([seed, 0])
    models = [source.device_model] * world_size
    num_hosts = int(program.hosts[-1]) + 1
    compute = program.find("forward", "backward", "optimizer")
    if "models" in chosen.extras:
        older = program.hosts >= num_hosts // 2
        program.stretch[np.ix_(compute, np.flatnonzero(older))] = 1.25
        models = [("NVIDIA A100-SXM4-80GB" if old else source.device_model) for old in older.tolist()]
    if "heavy_last_stage" in chosen.extras:
        last = np.flatnonzero(program.stage == program.stage.max())
        program.stretch[np.ix_(program.find("forward", "backward"), last)] = 1.24
    plan = draw_plan(program, num_iterations + 1, np.random.default_rng([seed, 1]))
    throttle, flag = np.ones(world_size), np.zeros(world_size, bool)
    _extras(chosen, program, plan, flag, rng, seed)
    healthy_ns = mean_iteration_ns(program, plan)
    taken = np.zeros(world_size, bool)
    drawn: list[tuple[int, Int64s, float]] = []
    for index, fault in enumerate(chosen.faults):
        culprits = draw_culprits(fault.culprits, program, taken, rng)
        taken[culprits] = True
        magnitude = calibrate(fault.transform, program, plan, culprits, effect, seed * 31 + index)
        drawn.append((index, culprits, magnitude))
        if chosen.counters and fault.transform == "gpu_slow":
            throttle[culprits], flag[culprits] = 1.0 / (1.0 + magnitude), True

    def with_faults(skip: int) -> Plan:
        changed = plan
        for index, culprits, magnitude in drawn:
            if index != skip:
                fault = chosen.faults[index]
                changed = apply(fault.transform, program, changed, culprits, magnitude, seed * 31 + index)
        return changed

    faulty = with_faults(-1)
    times = simulate(program, faulty)
    iteration_ns = float(times.iteration_ns[1:].mean())
    names = tuple(f"node{h:03d}" for h in range(num_hosts))
    expected = []
    for index, culprits, magnitude in drawn:
        answer = chosen.faults[index].answer
        without = mean_iteration_ns(program, with_faults(index)) if len(drawn) > 1 else healthy_ns
        blamed = culprits if answer.who in ("ranks", "hosts", "link") else np.zeros(0, np.int64)
        expected.append(
            Expected(
                answer,
                frozenset(int(r) for r in blamed),
                frozenset(names[int(program.hosts[r])] for r in blamed),
                (iteration_ns - without) / 1e9,
                magnitude,
            )
        )
    return Cluster(
        case=chosen,
        base=source,
        program=program,
        plan=faulty,
        times=times,
        seed=seed,
        expected=tuple(expected),
        effect=effect if chosen.faults else 0.0,
        growth=iteration_ns / healthy_ns - 1.0,
        iteration_s=iteration_ns / 1e9,
        healthy_iteration_s=healthy_ns / 1e9,
        host_names=names,
        throttle=throttle,
        throttle_flag=flag,
        device_models=tuple(models),
        healthy_plan=plan,
    )


def _extras(case: Case, program: Program, plan: Plan, flag: Bools, rng: np.random.Generator, seed: int) -> None:
    """Harmless peculiarities of a case."""
    everything = np.arange(program.world_size)
    if "everything" in case.extras:
        changed = apply("everything", program, plan, everything, 0.15, seed)
        plan.host_ns[:], plan.factor[:], plan.transfer_ns[:] = changed.host_ns, changed.factor, changed.transfer_ns
    if "power_cap" in case.extras:
        flag[rng.choice(program.world_size, 3, replace=False)] = True
    if "harmless_sync" in case.extras:
        rank = int(rng.integers(program.world_size))
        for n in program.find("gap_sync"):
            plan.active[n, rank] = True
    if "hiccup" in case.extras and seed % 4 == 0:
        rank, step = int(rng.integers(program.world_size)), int(rng.integers(1, plan.factor.shape[2]))
        for n in program.find("forward", "backward"):
            plan.factor[n, rank, step] *= 1.0 + rng.uniform(0.1, 0.3)
