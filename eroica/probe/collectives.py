"""Collectives, as they pass torch's dispatcher.

A kernel under the key BackendSelect of every `c10d::` operator sees them all, whoever calls: Python, the reducer of
DDP in C++, FSDP2, DTensor, functional and compiled code, ZeroRedundancyOptimizer, sends and receives. It hands on what
it was given, so results stay the same bit for bit. It does not see replays of a CUDA graph, nor backends called
directly.

The end of a collective is told by the future of its work, on gloo; on NCCL asking would cost a synchronisation, so its
records are `UNTIMED`. On gloo, sends, receives and reduce_scatter_base have no future either.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
import weakref
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from eroica.job import format_ranks
from eroica.probe.recorder import RECORDER
from eroica.ring import COLLECTIVE, DTYPES, OPS, P2P, RANK, UNSEEN, UNTIMED, WORLD_SIZE, Ring, what

_SIGNATURES = {
    # name of the operator: place of the payload of this rank, place of the process group
    "allreduce_": (0, 1),
    "allreduce_coalesced_": (0, 1),
    "allgather_": (1, 2),
    "_allgather_base_": (1, 2),
    "allgather_coalesced_": (1, 2),
    "allgather_into_tensor_coalesced_": (1, 2),
    "reduce_scatter_": (1, 2),
    "_reduce_scatter_base_": (1, 2),
    "reduce_scatter_tensor_coalesced_": (1, 2),
    "alltoall_": (1, 2),
    "alltoall_base_": (1, 2),
    "barrier": (0, 1),
    "monitored_barrier_": (0, 1),
    "broadcast_": (0, 1),
    "gather_": (1, 2),
    "scatter_": (0, 2),
    "reduce_": (0, 1),
    "send": (0, 1),
    "recv_": (0, 1),
    "recv_any_source_": (0, 1),
}
_MONITORED = OPS.index("monitored_barrier")
"""Has no work to wait for: it returns when it is over."""
_MOST_RANKS = 2_000
"""Characters of the list of a group's ranks in its note; "0-99999" is short, and odd groups are small."""


class _Group:
    """A process group as this rank knows it."""

    def __init__(self, group: Any, key: int, is_timed: bool) -> None:
        self.is_same = weakref.ref(group)
        """Calls for the group: names are used again after `destroy_process_group`."""
        self.key = key
        self.is_timed = is_timed
        """Its works have futures that tell the end: gloo."""
        self.sequence = itertools.count(1)
        self.messages: dict[tuple[str, int], itertools.count[int]] = {}
        """Sends and receives are counted by direction and peer: no other rank takes part."""


_groups: dict[str, _Group] = {}


def place(module: Any) -> None:
    """Register the kernels. `module` is `torch.distributed.distributed_c10d`."""
    torch = sys.modules["torch"]
    library = torch.library.Library("c10d", "IMPL")
    names = [name.removeprefix("c10d::") for name in torch._C._dispatch_get_all_op_names()]
    for name in sorted(_SIGNATURES.keys() & set(names)):
        library.impl(name, _kernel(torch, module, name), "BackendSelect", with_keyset=True)
    place.library = library  # type: ignore[attr-defined]  # kernels live as long as their library


def _kernel(torch: Any, distributed: Any, name: str) -> Callable[..., Any]:
    handle = getattr(torch.ops.c10d, name).default._handle
    redispatch = handle.redispatch_boxed
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    unbox_group, unbox_work = distributed.ProcessGroup.unbox, distributed.Work.unbox
    payload_at, group_at = _SIGNATURES[name]
    op = OPS.index(name.strip("_"))
    is_message = name in ("send", "recv_", "recv_any_source_")
    dtypes = {getattr(torch, dtype): index for index, dtype in enumerate(DTYPES) if hasattr(torch, dtype)}
    has_future = not is_message and op != _MONITORED
    timed_kinds = what(P2P if is_message else COLLECTIVE, op)
    untimed_kinds = what(P2P if is_message else COLLECTIVE, op, flags=UNTIMED)

    def begin(ring: Ring, args: tuple[Any, ...]) -> tuple[int, int, bool]:
        """Record the call; returns its number, its begin and whether its end will be told. Number 0: not recorded."""
        begin_ns = monotonic_ns()
        payload = args[payload_at]
        while isinstance(payload, list) and payload and (len(payload) == 1 or isinstance(payload[0], list)):
            payload = payload[0]
        if isinstance(payload, list):
            tensor = payload[0] if payload else None
            num_bytes = sum(part.numel() * part.element_size() for part in payload)
        else:
            tensor = payload
            num_bytes = tensor.numel() * tensor.element_size()
        if tensor is not None and tensor.is_meta:
            return 0, 0, False  # somebody works out shapes; nothing is sent
        handle = unbox_group(args[group_at])
        group = _groups.get(handle.group_name)
        if group is None or group.is_same() is not handle:
            group = _met(ring, distributed, handle)
        is_timed = has_future and group.is_timed and tensor is not None and tensor.is_cpu
        dtype = dtypes.get(tensor.dtype, 0) if tensor is not None else 0
        kinds = timed_kinds if is_timed or op == _MONITORED else untimed_kinds
        if is_message:
            peer = args[2] if name != "recv_any_source_" else -1
            counter = group.messages.get((name, peer))
            if counter is None:
                counter = group.messages.setdefault((name, peer), itertools.count(1))
        else:
            peer, counter = -1, group.sequence
        number = ring.begin(
            kinds | dtype << 16, begin_ns, peer, group.key, next(counter), num_bytes, RECORDER.num_steps
        )
        return number, begin_ns, is_timed

    def follow(ring: Ring, number: int, begin_ns: int, result: Any) -> None:
        """Have the future of the work tell when the collective is over."""
        nonlocal has_future
        work = unbox_work(result[-1] if isinstance(result, (tuple, list)) else result)
        try:
            future = work.get_future()
        except RuntimeError:  # "not implemented": some operations of gloo, such as reduce_scatter_base
            has_future = False
            ring.end(number, UNSEEN, False)
            return
        pending = RECORDER.pending

        def done(future: Any) -> None:
            try:
                raised = False
                try:
                    future.value()
                except Exception:
                    raised = True
                ring.end(number, monotonic_ns() - begin_ns, raised)
            except Exception as error:
                RECORDER.fail(error)
            finally:
                pending.discard(number)

        pending.add(number)
        try:
            future.then(done)
        except BaseException:
            pending.discard(number)
            raise

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        ring = RECORDER.ring or RECORDER.arm()
        if ring is None:
            return redispatch(keys & after, *args, **kwargs)
        try:
            number, begin_ns, is_timed = begin(ring, args)
        except Exception as error:
            RECORDER.fail(error)
            number, begin_ns, is_timed = 0, 0, False
        try:
            result = redispatch(keys & after, *args, **kwargs)
        except BaseException:
            _ended(ring, number, begin_ns, True)
            raise
        if is_timed:
            try:
                follow(ring, number, begin_ns, result)
            except Exception as error:
                RECORDER.fail(error)
        elif op == _MONITORED:
            _ended(ring, number, begin_ns, False)
        return result

    return kernel


def _ended(ring: Ring, number: int, begin_ns: int, raised: bool) -> None:
    if number:
        try:
            ring.end(number, monotonic_ns() - begin_ns, raised)
        except Exception as error:
            RECORDER.fail(error)


def _met(ring: Ring, distributed: Any, handle: Any) -> _Group:
    """A group that is new, or another one under a known name: note who it is."""
    name = handle.group_name
    # Ranks that form several groups in one call give all of them one name; with its members each is told apart.
    members = distributed._world.pg_group_ranks.get(handle)
    ranks = format_ranks(members) if members else ""
    key = int.from_bytes(hashlib.blake2b(f"{name} {ranks}".encode(), digest_size=8).digest(), "little") or 1
    known = _groups.get(name)
    backend = str(distributed._world.pg_backend_config.get(handle, ""))
    group = _Group(handle, key, "gloo" in backend)
    if known is not None and known.key == key:
        group.sequence, group.messages = known.sequence, known.messages
    else:
        ring.note(
            group=f"{key:016x}",
            name=name,
            description=handle.group_desc,
            ranks=ranks if len(ranks) <= _MOST_RANKS else "",
            size=handle.size(),
            backend=backend,
        )
    if handle is distributed.GroupMember.WORLD:
        # RANK may have been left over from a launcher; the process group is right.
        ring.note(placed="group")
        ring.set(RANK, handle.rank())
        ring.set(WORLD_SIZE, handle.size())
    _groups[name] = group
    return group
