"""A real trace cut into pieces that a synthetic iteration is built from.

A piece is a stretch of the driving thread between two instants at which no operator is open, with the device work
launched in it: operators, runtime calls, Python frames and kernels keep their names, order, nesting and relative
durations. Used by `evals.layouts`, which strings pieces together. It is not a simulator: when a kernel starts is
decided by `evals.program.simulate`, from the launch and from what the stream does.

Single-GPU inference traces are mostly launch-bound (the device idles 90 % of the time), training is not; kernels are
therefore stretched by `kernel_scale`, as a larger batch would, until the device takes a little longer than the host.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from eroica.trace import Category, Float64s, Int32s, Int64s, Trace, UInt8s, read_trace

MAIN, AUTOGRAD = 0, 1
"""Host threads of a synthetic rank."""

_DATA = Path(__file__).parent / "data"
BASES = {"bert": _DATA / "h100_bert_small.json.gz", "mi300": _DATA / "mi300_qwen1.5.json.gz"}
"""Bases that come with the repository; any other Kineto trace is given by its path."""

_COMMUNICATION = re.compile(
    r"nccl|rccl|dpsk::ep|c10d|record_param_comms|symm_mem|all_?reduce|all_?gather|reduce_?scatter", re.IGNORECASE
)
"""The base's own communication is left out: the layouts bring theirs."""
_HOST = (Category.CPU_OP, Category.PYTHON, Category.RUNTIME)
_DEVICE = (Category.KERNEL, Category.COPY, Category.MEMSET)


class Names:
    """String table that grows; one for all ranks of a cluster."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def __getitem__(self, text: str) -> int:
        return self._ids.setdefault(text, len(self._ids))

    def table(self) -> tuple[str, ...]:
        """All names so far, by id."""
        return tuple(self._ids)


@dataclass(frozen=True, slots=True)
class Piece:
    """Template of E host events and K device operations. Instants are shares (0..1) of the piece's host time."""

    host_ns: float
    """Host time of the piece before jitter and faults."""
    name: Int32s
    """(E,)"""
    category: UInt8s
    """(E,)"""
    thread: UInt8s
    """(E,) MAIN or AUTOGRAD."""
    start: Float64s
    """(E,)"""
    end: Float64s
    """(E,)"""
    work: Int64s
    """(E,)"""
    launch: Int32s
    """(E,) Device operation that this event launches; -1 = none."""
    op_name: Int32s
    """(K,)"""
    op_category: UInt8s
    """(K,)"""
    op_ns: Float64s
    """(K,) Duration before jitter and faults."""
    op_at: Float64s
    """(K,) Instant of the launch."""
    op_work: Int64s
    """(K,)"""
    op_occupancy: Float64s
    """(K,)"""


@dataclass(frozen=True, slots=True)
class Frame:
    """A Python frame that spans several pieces: from (piece, share) to (piece, share)."""

    name: int
    start: tuple[int, float]
    end: tuple[int, float]


@dataclass(frozen=True, slots=True)
class Base:
    """What a cluster takes over from one real trace."""

    device_model: str
    amd: bool
    stacks: bool
    names: Names
    forward: tuple[Piece, ...]
    backward: tuple[Piece, ...]
    """Forward pieces without Python frames, on the autograd thread, kernels twice as long."""
    frames: tuple[Frame, ...]
    """Frames over several forward pieces."""

    @property
    def forward_ns(self) -> float:
        """Device time of one forward pass."""
        return float(sum(piece.op_ns.sum() for piece in self.forward))


def piece_of(
    names: Names,
    host_ns: float,
    events: Sequence[tuple[str, Category, float, float]],
    *,
    thread: int = MAIN,
    ops: Sequence[tuple[str, Category, float, float, int]] = (),
    launches: Sequence[int] = (),
) -> Piece:
    """A hand-made piece.

    events: (name, category, start, end); ops: (name, category, ns, at, work); launches: event of each op.
    """
    launch = np.full(len(events), -1, np.int32)
    for op, event in enumerate(launches):
        launch[event] = op
    return Piece(
        host_ns=host_ns,
        name=np.array([names[e[0]] for e in events], np.int32),
        category=np.array([e[1] for e in events], np.uint8),
        thread=np.full(len(events), thread, np.uint8),
        start=np.array([e[2] for e in events], np.float64),
        end=np.array([e[3] for e in events], np.float64),
        work=np.full(len(events), -1, np.int64),
        launch=launch,
        op_name=np.array([names[o[0]] for o in ops], np.int32),
        op_category=np.array([o[1] for o in ops], np.uint8),
        op_ns=np.array([o[2] for o in ops], np.float64),
        op_at=np.array([o[3] for o in ops], np.float64),
        op_work=np.array([o[4] for o in ops], np.int64),
        op_occupancy=np.full(len(ops), np.nan),
    )


LAUNCH_CALL_NS = 6_000.0
"""What a launch call that waits adds to its kernel: the latency of the launch and of noticing the end."""


def blocked(piece: Piece) -> Piece:
    """The piece where each launch call lasts until its kernel is done. Communication, whose kernel is not in the piece,
    is one call."""
    if (piece.launch >= 0).any() and not len(piece.op_ns):
        call = piece.launch >= 0
        return replace(piece, start=np.where(call, 0.0005, piece.start * 0.0004),
                       end=np.where(call, 0.9995, 1.0 - (1.0 - piece.end) * 0.0004))  # fmt: skip
    kernel = piece.op_category == Category.KERNEL
    longer = np.where(kernel, piece.op_ns + LAUNCH_CALL_NS, 0.0)
    order = np.argsort(piece.op_at, kind="stable")
    at, total = piece.op_at[order], np.append(0.0, np.cumsum(longer[order]))
    host_ns = piece.host_ns + float(total[-1])

    def later(share: Float64s) -> Float64s:
        # A launch pushes back all that comes after its own beginning.
        moved: Float64s = (share * piece.host_ns + total[np.searchsorted(at, share, "left")]) / host_ns
        return moved

    return replace(piece, host_ns=host_ns, start=later(piece.start), end=later(piece.end), op_at=later(piece.op_at))


def base_path(name: str) -> Path:
    """File of a base named in BASES, or the path itself."""
    return BASES.get(name, Path(name))


def load_base(name: str, num_pieces: int, max_events: int = 1600) -> Base:
    """A base by its name in BASES or by path, cut into `num_pieces` of about equal device time."""
    return cut(read_trace(base_path(name)), num_pieces, max_events)


def cut(trace: Trace, num_pieces: int, max_events: int) -> Base:
    """Cut a trace. At most about `max_events` host events are taken, from the middle of the trace.

    Raises ValueError if the trace holds no kernels with their launches.
    """
    names = Names()
    category, correlation = trace.category, trace.correlation
    end_ns = trace.ts_ns + trace.dur_ns
    runtime = np.flatnonzero((category == Category.RUNTIME) & (correlation > 0))
    ops = np.flatnonzero(np.isin(category, _DEVICE) & (correlation > 0))
    launch_of = dict(zip(correlation[runtime].tolist(), runtime.tolist(), strict=True))
    ops = np.array([op for op in ops.tolist() if int(correlation[op]) in launch_of], np.int64)
    if not len(ops):
        raise ValueError(f"{trace.path}: no kernel with its launch; a base needs both")
    launches = np.array([launch_of[int(c)] for c in correlation[ops]], np.int64)
    main = int(np.bincount(trace.track[launches]).argmax())
    ours = (trace.track[launches] == main) & np.array(
        [not _COMMUNICATION.search(trace.strings[n]) for n in trace.name[ops]], bool
    )
    # A copy to the host and its synchronise call are the base's own `.item()`; the simulated waits take their place.
    ours &= np.array(["DtoH" not in trace.strings[n] for n in trace.name[ops]], bool)
    ops, launches = ops[ours], launches[ours]
    order = np.argsort(trace.ts_ns[launches], kind="stable")
    ops, launches = ops[order], launches[order]

    host = np.flatnonzero((trace.track == main) & np.isin(category, _HOST))
    host = host[
        ["Synchronize" not in trace.strings[n] and "cuda_synchronize" not in trace.strings[n] for n in trace.name[host]]
    ]
    own = [not _COMMUNICATION.search(trace.strings[n]) for n in trace.name[host]]
    host = host[np.array(own) | (category[host] == Category.PYTHON)]
    busy = host[category[host] != Category.PYTHON]
    cover = np.maximum.accumulate(end_ns[busy])
    gaps = np.flatnonzero(trace.ts_ns[busy][1:] > cover[:-1])
    # The middle of each gap between operators, so that frames that end or start there keep their side.
    quiet = (cover[gaps] + trace.ts_ns[busy][1:][gaps]) // 2
    quiet = quiet[(quiet >= trace.ts_ns[launches[0]] - 1_000_000) & (quiet <= trace.ts_ns[launches[-1]] + 1_000_000)]
    quiet = np.concatenate([[trace.ts_ns[launches[0]] - 50_000], quiet[quiet > trace.ts_ns[launches[0]]]])

    counts = np.searchsorted(trace.ts_ns[host], quiet)
    total = int(counts[-1] - counts[0])
    first = int(np.searchsorted(counts, counts[0] + max(0, (total - max_events) // 3)))
    last = min(int(np.searchsorted(counts, counts[first] + max_events)), len(quiet) - 1)
    launch_ns = trace.ts_ns[launches]
    device = np.concatenate([[0], np.cumsum(trace.dur_ns[ops])])
    at_quiet = device[np.searchsorted(launch_ns, quiet)]
    targets = np.linspace(at_quiet[first], at_quiet[last], num_pieces + 1)[1:-1]
    inner = np.unique(np.clip(np.searchsorted(at_quiet, targets), first + 1, last - 1))
    bounds = quiet[np.concatenate([[first], inner, [last]])]
    inside = (launch_ns >= bounds[0]) & (launch_ns < bounds[-1])
    scale = max(1.0, 1.15 * float(bounds[-1] - bounds[0]) / float(trace.dur_ns[ops][inside].sum()))

    pieces = []
    for low, high in itertools.pairwise(bounds):
        within = host[(trace.ts_ns[host] >= low) & (end_ns[host] <= high)]
        mine = np.flatnonzero((launch_ns >= low) & (launch_ns < high))
        op_of = {int(event): k for k, event in enumerate(launches[mine].tolist())}
        span = float(high - low)
        # A host that polls for the end of a communication (cudaEventQuery) would make the piece launch-bound for good.
        host_ns = min(span, 1.3 * float(trace.dur_ns[ops[mine]].sum()) * scale)
        pieces.append(
            Piece(
                host_ns=host_ns,
                name=np.array([names[trace.strings[n]] for n in trace.name[within]], np.int32),
                category=category[within],
                thread=np.full(len(within), MAIN, np.uint8),
                start=(trace.ts_ns[within] - low) / span,
                end=(end_ns[within] - low) / span,
                work=trace.work[within],
                launch=np.array([op_of.get(int(event), -1) for event in within], np.int32),
                op_name=np.array([names[trace.strings[n]] for n in trace.name[ops[mine]]], np.int32),
                op_category=category[ops[mine]],
                op_ns=trace.dur_ns[ops[mine]] * scale,
                op_at=(launch_ns[mine] - low) / span,
                op_work=np.where(
                    trace.work[ops[mine]] > 0, np.maximum(1, (trace.work[ops[mine]] * scale).astype(np.int64)), -1
                ),
                op_occupancy=trace.occupancy[ops[mine]].astype(np.float64),
            )
        )
    frames = []
    python = host[category[host] == Category.PYTHON]
    python = python[(trace.ts_ns[python] >= bounds[0]) & (end_ns[python] <= bounds[-1])]
    first_piece = np.searchsorted(bounds, trace.ts_ns[python], "right") - 1
    last_piece = np.searchsorted(bounds, end_ns[python], "left") - 1
    for event, a, b in zip(python.tolist(), first_piece.tolist(), last_piece.tolist(), strict=True):
        if a != b:
            spans = np.diff(bounds)
            frames.append(
                Frame(
                    names[trace.strings[trace.name[event]]],
                    (a, float(trace.ts_ns[event] - bounds[a]) / float(spans[a])),
                    (b, float(end_ns[event] - bounds[b]) / float(spans[b])),
                )
            )
    amd = "amd" in trace.device_model.lower() or any(
        trace.strings[n].startswith("hip") for n in trace.name[launches[:5]]
    )
    return Base(
        device_model=trace.device_model,
        amd=amd,
        stacks=bool(len(python)),
        names=names,
        forward=tuple(pieces),
        backward=tuple(_backward(names, piece) for piece in reversed(pieces)),
        frames=tuple(frames),
    )


def _backward(names: Names, piece: Piece) -> Piece:
    """The same operators as autograd runs them: under evaluate_function, on its own thread, without Python frames."""
    keep = piece.category != Category.PYTHON
    start, end = piece.start[keep], piece.end[keep]
    table = names.table()
    top = np.flatnonzero(start >= np.concatenate([[-1.0], np.maximum.accumulate(end)[:-1]]))
    top = top[piece.category[keep][top] == Category.CPU_OP]
    titles = [table[piece.name[keep][i]].split("::")[-1].strip("_").title().replace("_", "") for i in top]
    wrappers = [names[f"autograd::engine::evaluate_function: {title}Backward0"] for title in titles]
    count = len(top)
    return Piece(
        host_ns=piece.host_ns * float(0.6 if (piece.category == Category.PYTHON).any() else 1.0),
        name=np.concatenate([np.array(wrappers, np.int32), piece.name[keep]]).astype(np.int32),
        category=np.concatenate([np.full(count, Category.CPU_OP, np.uint8), piece.category[keep]]),
        thread=np.full(count + int(keep.sum()), AUTOGRAD, np.uint8),
        start=np.concatenate([start[top], start]),
        end=np.concatenate([end[top], end]),
        work=np.concatenate([np.full(count, -1, np.int64), piece.work[keep]]),
        launch=np.concatenate([np.full(count, -1, np.int32), piece.launch[keep]]),
        op_name=piece.op_name,
        op_category=piece.op_category,
        op_ns=piece.op_ns * 2.0,
        op_at=piece.op_at,
        op_work=np.where(piece.op_work > 0, piece.op_work * 2, -1),
        op_occupancy=piece.op_occupancy,
    )
