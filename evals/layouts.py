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

LAYOUTS = {"dp": 4, "tp_dp": 4, "hsdp": 4, "pp_dp": 1, "ep_dp": 4}
"""Layout -> pieces that the base is cut into."""
STAGES = 4
MICROBATCHES = 4


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
    return {
        "gc_frame": [Item("gc", gc)],
        "gc": [Item("gc", hole)],
        "sync_gap": [
            Item("gap_sync", _sync(base, frame[0]), drains=True),
            Item("gap", piece_of(names, 0.0, [frame] if base.stacks else [])),
        ],
        "allocator": [Item("malloc", first, drains=True), Item("malloc", piece_of(names, 0.0, pairs))],
    }


def build(base: Base, layout: str, world_size: int, ranks_per_host: int, planted: str | None) -> Program:
    """The program of a layout. `planted`: key of `fault_pieces` whose items are put (inactive) into the forward pass,
    or harmless_sync, which sits behind the backward pass.

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
            items.append(comm(CollectiveKind.ALL_REDUCE, world, 0.04, AUTOGRAD, 20, False))
    elif layout == "tp_dp":
        width = min(8, ranks_per_host)
        tensor = split(ranks // width, "TENSOR_MODEL_PARALLEL_GROUP")
        data = split(ranks % width, "DATA_PARALLEL_GROUP")
        for k, piece in enumerate(base.forward):
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
            items.append(comm(CollectiveKind.ALL_GATHER, shard, 0.012, MAIN, 20, True))
            items.append(Item("forward", piece, base_piece=k))
        for piece in base.backward:
            items.append(comm(CollectiveKind.ALL_GATHER, shard, 0.012, AUTOGRAD, 20, True))
            items.append(Item("backward", piece))
            items.append(comm(CollectiveKind.REDUCE_SCATTER, shard, 0.02, AUTOGRAD, 24, False))
            items.append(comm(CollectiveKind.ALL_REDUCE, replicate, 0.02, AUTOGRAD, 28, False))
        # The gradient norm: without it ranks of different local index would never wait for each other.
        items.append(replace(comm(CollectiveKind.ALL_REDUCE, world, 0.001, MAIN, 20, True), joins=True))
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
    elif layout == "pp_dp":
        if world_size % STAGES:
            raise ValueError(f"pp_dp needs a multiple of {STAGES} ranks, not {world_size}")
        replicas = world_size // STAGES
        stage = (ranks // replicas).astype(np.int32)
        pipeline = split(ranks % replicas, "PIPELINE_MODEL_PARALLEL_GROUP")
        data = split(stage, "DATA_PARALLEL_GROUP")
        pairs = {}
        for boundary in range(STAGES - 1):
            first = np.where((stage == boundary) | (stage == boundary + 1), ranks % replicas, -1)
            pairs[boundary] = first
        _pipeline(base, items, inactive, stage, replicas, pairs, pipeline, groups)
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
        if item.label in ("gc", "gap_sync", "gap", "malloc", "harmless_sync"):
            off[n] = True
    return Program(tuple(items), tuple(groups), hosts, stage, off, np.ones((len(items), world_size)))


def _pipeline(
    base: Base,
    items: list[Item],
    inactive: dict[int, Bools],
    stage: Int32s,
    replicas: int,
    pairs: dict[int, npt.NDArray[np.integer]],
    pipeline: Int32s,
    groups: list[ProcessGroup],
) -> None:
    """Forward and backward of all microbatches, slot by slot (GPipe), with send/recv between neighbouring stages."""
    world_size = len(stage)
    ranks = np.arange(world_size)
    # A pair's meeting is within its pipeline group, but two pairs of one group meet apart: index them by a pair id.
    pair_groups: dict[int, Int32s] = {}
    for boundary, key in pairs.items():
        index = np.full(world_size, -1, np.int32)
        for replica in range(replicas):
            a, b = boundary * replicas + replica, (boundary + 1) * replicas + replica
            index[[a, b]] = len(groups)
            groups.append(ProcessGroup(str(len(groups)), f"pp_pair_{boundary}", (a, b), 2))
        pair_groups[boundary] = np.where(key >= 0, index, -1).astype(np.int32)
    for backward in (False, True):
        piece = base.backward[0] if backward else base.forward[0]
        for slot in range(MICROBATCHES + STAGES - 1):
            depth = (STAGES - 1 - stage) if backward else stage
            microbatch = slot - depth
            runs = (microbatch >= 0) & (microbatch < MICROBATCHES)
            inactive[len(items)] = ~runs
            items.append(Item("backward" if backward else "forward", piece, base_piece=-1 if backward else 0))
            for parity in (0, 1):
                for boundary in range(parity, STAGES - 1, 2):
                    sender = boundary + 1 if backward else boundary
                    receiver = boundary if backward else boundary + 1
                    sends, receives = runs & (stage == sender), stage == receiver
                    # The receiver takes what the sender made in this slot; it computes on it in the next one.
                    if not sends.any():
                        continue
                    group = pair_groups[boundary]
                    peer = np.where(stage == sender, ranks + (receiver - sender) * replicas, -1)
                    peer = np.where(stage == receiver, ranks - (receiver - sender) * replicas, peer).astype(np.int32)
                    thread = AUTOGRAD if backward else MAIN
                    kind = CollectiveKind.SEND_RECV
                    inactive[len(items)] = group < 0
                    items.append(
                        Item(
                            "comm",
                            _p2p_piece(base, thread),
                            comm=Comm(
                                kind,
                                40 + 2 * boundary + int(backward),
                                group,
                                receives,
                                peer,
                                sends,
                                0.01 * base.forward_ns,
                                4096 * 1024,
                                "BFloat16",
                                shown=pipeline,
                            ),
                        )
                    )


def _p2p_piece(base: Base, thread: int) -> Piece:
    events = [
        ("record_param_comms", Category.CPU_OP, 0.0, 1.0),
        (_runtime(base, "ExtLaunchKernel" if base.amd else "LaunchKernelExC"), Category.RUNTIME, 0.45, 0.6),
    ]
    piece = piece_of(base.names, 40_000.0, events, thread=thread)
    return replace(piece, launch=np.array([-1, 0], np.int32))
