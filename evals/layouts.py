"""What an iteration of each kind of job consists of: data, tensor, expert, pipeline and sharded parallelism.

A layout strings the pieces of a base together with an input fetch, a batch copy, an optimizer, a scalar read-back and
the communication of that kind of parallelism, with process groups as frameworks name them. Used by `evals.synth`; the
running is in `evals.program`. The shares of the parts (copy 3 %, optimizer 4 %, exposed communication 0-10 %) are
ordinary ones, not measurements.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from eroica.job import ProcessGroup
from eroica.trace import Bools, Category, CollectiveKind, Int32s
from evals.base import AUTOGRAD, MAIN, Base, Names, Piece, piece_of
from evals.program import Comm, Item, Program

LAYOUTS = {"dp": 4, "tp_dp": 4, "hsdp": 4, "mesh": 4, "pp_dp": 1, "pp_1f1b": 1, "ep_dp": 4}
"""Layout -> pieces that the base is cut into."""
STAGES = 4
MICROBATCHES = {"pp_dp": 4, "pp_1f1b": 8}
BUCKET_SHARE = 0.04
"""Transfer of one gradient bucket of plain data parallelism, as a share of the iteration's compute."""
MAY_BE_PLANTED = frozenset({"gc", "gap_sync", "gap", "malloc", "harmless_sync", "tune_wait", "tune", "compile"})
"""Labels of items that only a fault (or a harmless peculiarity) switches on."""


def _input(base: Base, forward_ns: float) -> Piece:
    events = [("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", Category.ANNOTATION, 0.03, 0.99)]
    if base.stacks:
        events = [
            ("torch/utils/data/dataloader.py(733): __next__", Category.PYTHON, 0.0, 1.0),
            *events,
            ("torch/utils/data/dataloader.py(788): _next_data", Category.PYTHON, 0.04, 0.985),
            ("torch/utils/data/_utils/fetch.py(50): fetch", Category.PYTHON, 0.05, 0.98),
            ("/workspace/train/data.py(41): __getitem__", Category.PYTHON, 0.06, 0.90),
            ("torch/utils/data/_utils/collate.py(347): default_collate", Category.PYTHON, 0.91, 0.97),
        ]
    return piece_of(base.names, 0.02 * forward_ns, events)


def _runtime(base: Base, what: str) -> str:
    return ("hip" if base.amd else "cuda") + what


def _copy(base: Base, forward_ns: float) -> Piece:
    events = [
        ("aten::to", Category.CPU_OP, 0.0, 1.0),
        ("aten::_to_copy", Category.CPU_OP, 0.05, 0.97),
        ("aten::copy_", Category.CPU_OP, 0.3, 0.95),
        (_runtime(base, "MemcpyAsync"), Category.RUNTIME, 0.4, 0.9),
    ]
    nanoseconds = 0.09 * forward_ns
    copy = ("Memcpy HtoD (Pinned -> Device)", Category.COPY, nanoseconds, 0.5, int(nanoseconds * 25.0))
    return piece_of(base.names, 60_000.0, events, ops=[copy], launches=[3])


def _sync(base: Base, line: str) -> Piece:
    events = [
        (line, Category.PYTHON, 0.0, 1.0),
        ("<built-in method item of Tensor object at 0x7f53c1a2b9f0>", Category.PYTHON, 0.0003, 0.9998),
        ("aten::item", Category.CPU_OP, 0.0005, 0.9997),
        ("aten::_local_scalar_dense", Category.CPU_OP, 0.0007, 0.9996),
        (_runtime(base, "MemcpyAsync"), Category.RUNTIME, 0.0008, 0.0015),
        (_runtime(base, "StreamSynchronize"), Category.RUNTIME, 0.0016, 0.9995),
    ]
    events = events if base.stacks else events[2:]
    copy = ("Memcpy DtoH (Device -> Pinned)", Category.COPY, 2_000.0, 0.001, 4)
    return piece_of(base.names, 20_000.0, events, ops=[copy], launches=[len(events) - 2])


def _optimizer(base: Base, forward_ns: float) -> Piece:
    kernel = (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
        "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4, "
        "(at::native::ADAM_MODE)1, false>, float const*, double, double, double, double, double, bool, bool>"
    )
    count = 6
    events = [("Optimizer.step#AdamW.step", Category.ANNOTATION, 0.02, 0.98)]
    if base.stacks:
        events.insert(0, ("torch/optim/optimizer.py(506): wrapper", Category.PYTHON, 0.0, 1.0))
        events.append(("torch/optim/adamw.py(57): step", Category.PYTHON, 0.05, 0.96))
    events.append(("aten::_fused_adamw_", Category.CPU_OP, 0.1, 0.95))
    launches = list(range(len(events), len(events) + count))
    at = np.linspace(0.15, 0.85, count)
    events += [(_runtime(base, "LaunchKernel"), Category.RUNTIME, float(a), float(a) + 0.03) for a in at]
    ops = [(kernel, Category.KERNEL, 0.12 * forward_ns / count, float(a) + 0.01, 320) for a in at]
    return piece_of(base.names, 0.04 * forward_ns, events, ops=ops, launches=launches)


_C10D = {
    CollectiveKind.ALL_REDUCE: ("c10d::allreduce_", "all_reduce", "AllReduce_Sum_bf16_RING_LL"),
    CollectiveKind.ALL_GATHER: ("c10d::_allgather_base_", "_allgather_base", "AllGather_RING_LL"),
    CollectiveKind.REDUCE_SCATTER: (
        "c10d::_reduce_scatter_base_",
        "_reduce_scatter_base",
        "ReduceScatter_Sum_bf16_RING_LL",
    ),
    CollectiveKind.SEND: ("c10d::send", "send", "SendRecv"),
    CollectiveKind.RECV: ("c10d::recv_", "recv", "SendRecv"),
    CollectiveKind.DISPATCH: ("deep_ep::dispatch", "dispatch", ""),
    CollectiveKind.COMBINE: ("deep_ep::combine", "combine", ""),
}
"""Operator, annotation and NCCL kernel of each kind."""


def annotation_name(kind: CollectiveKind) -> str:
    """The range that torch records around the enqueue, on the host and on the device."""
    return f"nccl:{_C10D[kind][1]}"


def collective_name(kind: CollectiveKind) -> str:
    """The argument "Collective name" as NCCL's process group writes it."""
    return _C10D[kind][1].replace("all_reduce", "allreduce")


def kernel_name(base: Base, kind: CollectiveKind) -> str:
    """The communication kernel as the vendor's library names it."""
    if kind in (CollectiveKind.DISPATCH, CollectiveKind.COMBINE):
        way = "dispatch" if kind == CollectiveKind.DISPATCH else "combine"
        return (
            f"void dpsk::ep::internode::{way}<false, 8, false, 7168>(int4*, float*, long*, dpsk::ep::SourceMeta*, int)"
        )
    if base.amd:
        return "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)"
    return f"ncclDevKernel_{_C10D[kind][2]}(ncclDevKernelArgsStorage<4096ul>)"


def comm_piece(base: Base, kind: CollectiveKind, thread: int) -> Piece:
    """Host side of a communication; record_param_comms carries the metadata."""
    op, _, _ = _C10D[kind]
    events = [(op, Category.CPU_OP, 0.0, 1.0)]
    # DeepEP tells nothing of groups and sizes: its kernels are known by name alone, as in DeepSeek's public trace.
    if kind not in (CollectiveKind.DISPATCH, CollectiveKind.COMBINE):
        events.append(("record_param_comms", Category.CPU_OP, 0.1, 0.95))
        events.append((annotation_name(kind), Category.ANNOTATION, 0.15, 0.9))
    events.append((_runtime(base, "ExtLaunchKernel" if base.amd else "LaunchKernelExC"), Category.RUNTIME, 0.45, 0.6))
    piece = piece_of(base.names, 60_000.0, events, thread=thread)
    launch = piece.launch.copy()
    launch[-1] = 0
    return replace(piece, launch=launch)


def _convolution(base: Base, *, searches: bool) -> tuple[Piece, Piece]:
    """A convolution of the model, and the same where the vendor's library first tries all its kernels on a new shape:
    what waits for the device before it, and the trials."""
    library = "aten::miopen_convolution" if base.amd else "aten::cudnn_convolution"
    frames = [("/workspace/train/model.py(57): forward", Category.PYTHON, 0.0, 1.0)] if base.stacks else []
    outer = [*frames, *((op, Category.CPU_OP, 0.0002 * k, 1 - 0.0002 * k) for k, op in enumerate(_CONVOLUTION, 1))]
    outer.append((library, Category.CPU_OP, 0.001, 0.999))
    usual = "sm90_xmma_fprop_implicit_gemm_bf16f32_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_cudnn"
    launch = _runtime(base, "LaunchKernel")
    if not searches:
        kernel = (usual, Category.KERNEL, 0.01 * base.forward_ns, 0.51, 264)
        events = [*outer, (launch, Category.RUNTIME, 0.5, 0.7)]
        return piece_of(base.names, 40_000.0, events, ops=[kernel], launches=[len(outer)]), _nothing(base)
    wait = [*outer, (_runtime(base, "DeviceSynchronize"), Category.RUNTIME, 0.002, 0.998)]
    trials, ops, launches = list(outer), [], []
    for k in range(TRIALS):
        a, width = 0.002 + 0.996 * k / TRIALS, 0.996 / TRIALS
        if k % 4 == 0:
            # Each plan asks for a workspace of its own; what the allocator has no block for goes to the device.
            trials.append((_runtime(base, "Malloc"), Category.RUNTIME, a + 0.01 * width, a + 0.24 * width))
        launches.append(len(trials))
        trials.append((launch, Category.RUNTIME, a + 0.25 * width, a + 0.27 * width))
        trials.append((_runtime(base, "EventRecord"), Category.RUNTIME, a + 0.28 * width, a + 0.29 * width))
        trials.append((_runtime(base, "EventSynchronize"), Category.RUNTIME, a + 0.30 * width, a + 0.98 * width))
        name = f"sm90_xmma_fprop_implicit_gemm_bf16f32_nhwc_tilesize{64 << k % 3}x{32 << k % 4}x{16 << k // 12}_cudnn"
        ops.append((name, Category.KERNEL, 0.68 * width * TRIALS_NS, a + 0.26 * width, 100 + 10 * k))
    ends = [(_runtime(base, "Free"), Category.RUNTIME, 0.9985, 0.9988)]
    return piece_of(base.names, 20_000.0, wait), piece_of(
        base.names, TRIALS_NS, [*trials, *ends], ops=ops, launches=launches
    )


_CONVOLUTION = ("aten::conv2d", "aten::convolution", "aten::_convolution")
TRIALS = 20
"""Kernels that a search tries."""
TRIALS_NS = 1e6
"""Host time of a search before a fault sets it."""


def _nothing(base: Base) -> Piece:
    return piece_of(base.names, 0.0, [])


def _compile(base: Base) -> Piece:
    """A stage's first step: the compiler's frames, no device work."""
    events = [
        ("torch/_dynamo/convert_frame.py(1213): __call__", Category.PYTHON, 0.0, 1.0),
        ("torch/_dynamo/convert_frame.py(688): compile_inner", Category.PYTHON, 0.001, 0.999),
        ("torch/_inductor/compile_fx.py(1850): compile_fx", Category.PYTHON, 0.1, 0.98),
        ("torch/_inductor/codecache.py(3080): load", Category.PYTHON, 0.5, 0.97),
    ]
    return piece_of(base.names, 0.0, events if base.stacks else [("torchdynamo", *events[0][1:])])


def fault_pieces(base: Base) -> dict[str, list[Item]]:
    """Items that only faults switch on, by label; they sit between two pieces of the forward pass."""
    names: Names = base.names
    frame = ("/workspace/train/train.py(132): log_loss", Category.PYTHON, 0.0, 1.0)
    gc = piece_of(names, 0.0, [("Python GC", Category.PYTHON, 0.0, 1.0)])
    hole = piece_of(names, 0.0, [])
    free, malloc = _runtime(base, "Free"), _runtime(base, "Malloc")
    first = piece_of(names, 15_000.0, [("aten::empty", Category.CPU_OP, 0, 1), (free, Category.RUNTIME, 0.001, 0.999)])
    pairs: list[tuple[str, Category, float, float]] = []
    for k in range(4):
        a = k / 4
        pairs.append(("aten::empty", Category.CPU_OP, a + 0.001, a + 0.248))
        pairs.append((malloc, Category.RUNTIME, a + 0.002, a + 0.15))
        pairs.append((free, Category.RUNTIME, a + 0.152, a + 0.247))
    usual, _ = _convolution(base, searches=False)
    wait, trials = _convolution(base, searches=True)
    return {
        "autotune": [Item("conv", usual), Item("tune_wait", wait, drains=True), Item("tune", trials)],
        "compile": [
            Item("compile", _sync(base, "/workspace/train/pipeline.py(77): receive_shape"), drains=True),
            Item("compile", _compile(base)),
        ],
        "gc_frame": [Item("gc", gc)],
        "gc": [Item("gc", hole)],
        "sync_gap": [
            Item("gap_sync", _sync(base, frame[0]), drains=True),
            Item("gap", piece_of(names, 0.0, [frame] if base.stacks else [])),
        ],
        "allocator": [Item("malloc", first, drains=True), Item("malloc", piece_of(names, 0.0, pairs))],
    }


def build(
    base: Base,
    layout: str,
    world_size: int,
    ranks_per_host: int,
    planted: str | None,
    bucket_share: float = BUCKET_SHARE,
) -> Program:
    """The program of a layout. `planted`: key of `fault_pieces` whose items are put (inactive) into the forward pass,
    or harmless_sync, which sits behind the backward pass. `bucket_share`: of plain data parallelism.

    Raises ValueError for a world size that the layout cannot split.
    """
    ranks = np.arange(world_size, dtype=np.int32)
    hosts = ranks // ranks_per_host
    local = ranks % ranks_per_host
    groups: list[ProcessGroup] = [ProcessGroup("0", "default_pg", tuple(range(world_size)), world_size)]
    none = np.full(world_size, -1, np.int32)
    nobody, everybody = np.zeros(world_size, bool), np.ones(world_size, bool)

    def split(key: npt.NDArray[np.integer], description: str) -> Int32s:
        """Groups of the ranks with equal keys, added to the table; index of each rank's group."""
        index = none.copy()
        for value in np.unique(key[key >= 0]):
            members = tuple(int(r) for r in ranks[key == value])
            if len(members) > 1:
                index[key == value] = len(groups)
                groups.append(ProcessGroup(str(len(groups)), description, members, len(members)))
        return index

    num_hosts = int(hosts[-1]) + 1
    stage = np.zeros(world_size, np.int32)
    world = np.zeros(world_size, np.int32)
    forward_ns = base.forward_ns
    compute_ns = 3.0 * forward_ns

    def comm(
        kind: CollectiveKind, group: Int32s, share: float, thread: int, stream: int, blocks: bool, uneven: bool = False
    ) -> Item:
        """A collective whose transfer takes `share` of the iteration's compute."""
        transfer = share * compute_ns
        return Item(
            "comm",
            comm_piece(base, kind, thread),
            comm=Comm(
                kind,
                stream,
                group,
                everybody if blocks else nobody,
                none,
                nobody,
                transfer,
                max(1024, int(transfer * 50)),
                "BFloat16",
                uneven,
            ),
        )

    faults = fault_pieces(base).get(planted or "", [])
    items: list[Item] = [Item("input", _input(base, forward_ns)), Item("copy", _copy(base, forward_ns))]
    inactive: dict[int, Bools] = {}
    half = len(base.forward) // 2
    if layout == "dp":
        for k, piece in enumerate(base.forward):
            items += faults if k == max(half, 1) else []
            items.append(Item("forward", piece, base_piece=k))
        for piece in base.backward:
            items.append(Item("backward", piece))
            items.append(comm(CollectiveKind.ALL_REDUCE, world, bucket_share, AUTOGRAD, 20, False))
    elif layout == "tp_dp":
        width = min(8, ranks_per_host)
        tensor = split(ranks // width, "TENSOR_MODEL_PARALLEL_GROUP")
        data = split(ranks % width, "DATA_PARALLEL_GROUP")
        for k, piece in enumerate(base.forward):
            items += faults if k == max(half, 1) else []
            items.append(Item("forward", piece, base_piece=k))
            items.append(comm(CollectiveKind.ALL_REDUCE, tensor, 0.01, MAIN, 20, True))
        for piece in base.backward:
            items.append(Item("backward", piece))
            items.append(comm(CollectiveKind.ALL_REDUCE, tensor, 0.01, AUTOGRAD, 20, True))
            items.append(comm(CollectiveKind.ALL_REDUCE, data, 0.03, AUTOGRAD, 24, False))
    elif layout == "hsdp":
        if num_hosts < 4 or num_hosts % 2:
            raise ValueError(f"hsdp needs an even number of hosts, at least 4; {world_size} ranks fill {num_hosts}")
        block, place = hosts // 2, hosts % 2
        shard = split(block * ranks_per_host + local, "mesh_dp_shard")
        replicate = split(place * ranks_per_host + local, "mesh_dp_replicate")
        # Tokens in the global batch, as trainers count them after the fetch: all ranks meet between input and forward.
        items.append(comm(CollectiveKind.ALL_REDUCE, world, 0.001, MAIN, 20, True))
        for k, piece in enumerate(base.forward):
            items += faults if k == max(half, 1) else []
            items.append(comm(CollectiveKind.ALL_GATHER, shard, 0.012, MAIN, 20, True))
            items.append(Item("forward", piece, base_piece=k))
        for piece in base.backward:
            items.append(comm(CollectiveKind.ALL_GATHER, shard, 0.012, AUTOGRAD, 20, True))
            items.append(Item("backward", piece))
            items.append(comm(CollectiveKind.REDUCE_SCATTER, shard, 0.02, AUTOGRAD, 24, False))
            items.append(comm(CollectiveKind.ALL_REDUCE, replicate, 0.02, AUTOGRAD, 28, False))
        # The gradient norm: without it ranks of different local index would never wait for each other.
        items.append(replace(comm(CollectiveKind.ALL_REDUCE, world, 0.001, MAIN, 20, True), joins=True))
    elif layout == "mesh":
        # Two dimensions within a host, each of pairs of devices, so that a pair of a group is one link.
        tensor = split(ranks // 2, "mesh_tp")
        context = split(ranks // 4 * 2 + ranks % 2, "mesh_cp")
        data = split(ranks % 4, "mesh_dp")
        for k, piece in enumerate(base.forward):
            items.append(Item("forward", piece, base_piece=k))
            items.append(comm(CollectiveKind.ALL_GATHER, context, 0.008, MAIN, 20, True))
            items.append(comm(CollectiveKind.ALL_REDUCE, tensor, 0.01, MAIN, 22, True))
        for piece in base.backward:
            items.append(Item("backward", piece))
            items.append(comm(CollectiveKind.ALL_REDUCE, tensor, 0.01, AUTOGRAD, 22, True))
            items.append(comm(CollectiveKind.REDUCE_SCATTER, context, 0.008, AUTOGRAD, 20, True))
            items.append(comm(CollectiveKind.ALL_REDUCE, data, 0.03, AUTOGRAD, 24, False))
    elif layout == "ep_dp":
        width = min(8, world_size)
        expert = split(ranks // width, "EXPERT_MODEL_PARALLEL_GROUP")
        for k, piece in enumerate(base.forward):
            items.append(Item("forward", piece, base_piece=k))
            kind = CollectiveKind.DISPATCH if k % 2 == 0 else CollectiveKind.COMBINE
            items.append(comm(kind, expert, 0.015, MAIN, 27, True, True))
        for k, piece in enumerate(base.backward):
            items.append(Item("backward", piece))
            kind = CollectiveKind.DISPATCH if k % 2 == 0 else CollectiveKind.COMBINE
            items.append(comm(kind, expert, 0.015, AUTOGRAD, 27, True, True))
            items.append(comm(CollectiveKind.ALL_REDUCE, world, 0.03, AUTOGRAD, 24, False))
    elif layout in MICROBATCHES:
        if world_size % STAGES:
            raise ValueError(f"{layout} needs a multiple of {STAGES} ranks, not {world_size}")
        replicas = world_size // STAGES
        stage = (ranks // replicas).astype(np.int32)
        pipeline = split(ranks % replicas, "PIPELINE_MODEL_PARALLEL_GROUP")
        data = split(stage, "DATA_PARALLEL_GROUP")
        lines = _Lines(stage, replicas, pipeline, groups)
        if layout == "pp_dp":
            _gpipe(base, items, inactive, lines)
        else:
            _one_forward_one_backward(base, items, inactive, lines, faults)
        items.append(comm(CollectiveKind.ALL_REDUCE, data, 0.08, AUTOGRAD, 20, False))
        inactive[0] = inactive[1] = stage > 0
    else:
        raise ValueError(f"layout {layout!r} is unknown; known: {', '.join(LAYOUTS)}")
    if planted == "harmless_sync":
        # Where the host would wait anyhow: without it the same wait shows in the next blocking call.
        items.append(Item("harmless_sync", _sync(base, "/workspace/train/train.py(104): train_step"), drains=True))
    items.append(Item("sync", _sync(base, "/workspace/train/train.py(118): clip_gradients"), drains=True, joins=True))
    items.append(Item("optimizer", _optimizer(base, forward_ns)))
    items.append(Item("log", piece_of(base.names, 15_000.0, [])))
    off = np.zeros((len(items), world_size), bool)
    for n, who in inactive.items():
        off[n] = who
    for n, item in enumerate(items):
        if item.comm is not None:
            off[n] |= item.comm.group < 0
        if item.label in MAY_BE_PLANTED:
            off[n] = True
    return Program(tuple(items), tuple(groups), hosts, stage, off, np.ones((len(items), world_size)))


class _Lines:
    """The pipelines of a job, and the meetings of neighbouring stages in them."""

    def __init__(self, stage: Int32s, replicas: int, pipeline: Int32s, groups: list[ProcessGroup]) -> None:
        self.stage, self.replicas, self.pipeline = stage, replicas, pipeline
        self._ranks = np.arange(len(stage))
        self._pairs: list[Int32s] = []
        # A pair's meeting is within its pipeline group, but two pairs of one group meet apart: each has an id.
        for boundary in range(STAGES - 1):
            index = np.full(len(stage), -1, np.int32)
            for replica in range(replicas):
                a, b = boundary * replicas + replica, (boundary + 1) * replicas + replica
                index[[a, b]] = len(groups)
                groups.append(ProcessGroup(str(len(groups)), f"pp_pair_{boundary}", (a, b), 2))
            self._pairs.append(index)

    def meeting(self, base: Base, boundary: int, backward: bool, sends: Bools, thread: int) -> tuple[Item, Bools]:
        """What crosses a boundary, and who takes no part. The receivers go on when they have it."""
        sender, receiver = (boundary + 1, boundary) if backward else (boundary, boundary + 1)
        group, away = self._pairs[boundary], (receiver - sender) * self.replicas
        peer = np.where(self.stage == sender, self._ranks + away, -1)
        peer = np.where(self.stage == receiver, self._ranks - away, peer).astype(np.int32)
        made = Comm(
            CollectiveKind.SEND_RECV,
            40 + 2 * boundary + int(backward),
            group,
            self.stage == receiver,
            peer,
            sends & (self.stage == sender),
            0.01 * base.forward_ns,
            4096 * 1024,
            "BFloat16",
            shown=self.pipeline,
        )
        return Item("comm", _p2p_piece(base, thread), comm=made), group < 0


def _gpipe(base: Base, items: list[Item], inactive: dict[int, Bools], lines: _Lines) -> None:
    """Forward and backward of all microbatches, slot by slot, with send/recv between neighbouring stages."""
    stage, count = lines.stage, MICROBATCHES["pp_dp"]
    for backward in (False, True):
        piece = base.backward[0] if backward else base.forward[0]
        for slot in range(count + STAGES - 1):
            depth = (STAGES - 1 - stage) if backward else stage
            microbatch = slot - depth
            runs = (microbatch >= 0) & (microbatch < count)
            inactive[len(items)] = ~runs
            items.append(Item("backward" if backward else "forward", piece, base_piece=-1 if backward else 0))
            for parity in (0, 1):
                for boundary in range(parity, STAGES - 1, 2):
                    # The receiver takes what the sender made in this slot; it computes on it in the next one.
                    if (runs & (stage == boundary + int(backward))).any():
                        item, off = lines.meeting(base, boundary, backward, runs, AUTOGRAD if backward else MAIN)
                        inactive[len(items)] = off
                        items.append(item)


def _schedule(count: int) -> list[dict[int, tuple[bool, int]]]:
    """One forward, one backward: slot by slot, stage -> (is it a backward, microbatch), each as early as its input."""
    orders: list[list[tuple[bool, int]]] = []
    for stage in range(STAGES):
        ahead = min(count, STAGES - 1 - stage)
        order = [(False, m) for m in range(ahead)]
        for m in range(count - ahead):
            order += [(False, ahead + m), (True, m)]
        orders.append(order + [(True, m) for m in range(count - ahead, count)])
    slots: list[dict[int, tuple[bool, int]]] = []
    done: set[tuple[int, bool, int]] = set()
    while any(orders):
        slot: dict[int, tuple[bool, int]] = {}
        for stage, order in enumerate(orders):
            if not order:
                continue
            backward, m = order[0]
            ready = stage == 0 or (stage - 1, False, m) in done
            if backward:
                ready = (stage, False, m) in done and (stage == STAGES - 1 or (stage + 1, True, m) in done)
            if ready:
                slot[stage] = order.pop(0)
        done |= {(stage, *what) for stage, what in slot.items()}
        slots.append(slot)
    return slots


def _one_forward_one_backward(
    base: Base, items: list[Item], inactive: dict[int, Bools], lines: _Lines, planted: list[Item]
) -> None:
    """Few forwards ahead, then forward and backward in turn, then the backwards that are left (PipeDream flush).
    `planted` comes before the first forward of each stage in turn."""
    stage = lines.stage
    slots = _schedule(MICROBATCHES["pp_1f1b"])
    for k, slot in enumerate(slots):
        items += planted if k < STAGES else []
        for backward in (False, True):
            runs = np.isin(stage, [s for s, (is_backward, _) in slot.items() if is_backward == backward])
            if not runs.any():
                continue
            inactive[len(items)] = ~runs
            piece = base.backward[0] if backward else base.forward[0]
            items.append(Item("backward" if backward else "forward", piece, base_piece=-1 if backward else 0))
        # What is needed in the next slot crosses its boundary now.
        for s, (backward, _) in sorted(slots[k + 1].items() if k + 1 < len(slots) else ()):
            boundary = s if backward else s - 1
            if 0 <= boundary < STAGES - 1:
                item, off = lines.meeting(base, boundary, backward, np.ones(len(stage), bool), MAIN)
                inactive[len(items)] = off
                items.append(item)


def _p2p_piece(base: Base, thread: int) -> Piece:
    events = [
        ("record_param_comms", Category.CPU_OP, 0.0, 1.0),
        (_runtime(base, "ExtLaunchKernel" if base.amd else "LaunchKernelExC"), Category.RUNTIME, 0.45, 0.6),
    ]
    piece = piece_of(base.names, 40_000.0, events, thread=thread)
    return replace(piece, launch=np.array([-1, 0], np.int32))
