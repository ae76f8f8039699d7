"""Collectives, as they pass torch's dispatcher.

A kernel under the key BackendSelect of every `c10d::` operator sees them all, whoever calls: Python, the reducer of
DDP in C++, FSDP2, DTensor, functional and compiled code, ZeroRedundancyOptimizer, sends and receives. It hands on what
it was given, so results stay the same bit for bit. It does not see replays of a CUDA graph, nor backends called
directly.

Each call leaves its position in the ring. In steps that are recorded (`thrift`: all of them, unless that costs too
much) it leaves a record too, and the end of it. Where pacing is on, the `gate` may hold the rank before it; the call
begins after that.

The end of a collective is told by the future of its work, on gloo; on NCCL asking would cost a synchronisation, so its
records are `UNTIMED`. On gloo, sends, receives and reduce_scatter_base have no future either. Whoever tells it is one
of the threads that run nothing but the collectives of one group, and the first time its number is noted: a trace shows
what such a thread did and not for whom.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import sys
import weakref
from _thread import get_ident, get_native_id
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from eroica.holds import MOST_DELAY_NS, TIMEOUT_SHARE
from eroica.job import format_ranks
from eroica.probe.gate import GATE
from eroica.probe.recorder import RECORDER
from eroica.ring import (
    BEGIN,
    COLLECTIVE,
    DONE,
    DTYPES,
    ENTERED,
    HOLDS,
    LOST_NOTES,
    NUM_BYTES,
    OPS,
    P2P,
    RANK,
    UNSEEN,
    UNTIMED,
    WORLD_SIZE,
    Ring,
    what,
)

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


class _Line:
    """Calls that are counted together: the collectives of a group, or its sends (or receives) to one peer."""

    def __init__(self, position: int) -> None:
        self.take = itertools.count(1).__next__
        """The sequence number of the next call."""
        self.position = position
        """Place of the last call in the ring; 0 if the ring had none left."""


class _Group:
    """A process group as this rank knows it."""

    def __init__(
        self,
        group: Any,
        key: int,
        is_timed: bool,
        line: _Line,
        messages: dict[tuple[str, int], _Line],
    ) -> None:
        self.is_same = weakref.ref(group)
        """Calls for the group: names, and addresses, are used again after `destroy_process_group`."""
        self.key = key
        self.is_timed = is_timed
        """Its works have futures that tell the end: gloo."""
        self.line = line
        self.threads: set[int] = set()
        """By Python's number; those that have told an end."""
        self.messages = messages
        """Sends and receives are counted by direction and peer: no other rank takes part."""
        self.most_held_ns = min(MOST_DELAY_NS, _timeout_ns(group) // TIMEOUT_SHARE)
        """Pacing may hold a call for so long."""


_groups: dict[str, _Group] = {}
_by_address: dict[int, _Group] = {}
"""The same, by what is cheapest to ask of a group that a call hands us."""


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
    recorder, thrift, gate, exception = RECORDER, RECORDER.thrift, GATE, sys.exception

    def follow(ring: Ring, number: int, begin_ns: int, group: _Group, sequence: int, result: Any) -> None:
        """Have the future of the work tell when the collective is over."""
        nonlocal has_future
        work = unbox_work(result[-1] if isinstance(result, (tuple, list)) else result)
        try:
            future = work.get_future()
        except RuntimeError:  # how torch says that these works have no future, as gloo's of reduce_scatter_base
            has_future = False
            ring.end(number, UNSEEN, False)
            return
        pending, line, threads = recorder.pending, group.line, group.threads

        def done(future: Any) -> None:
            # Runs before whoever waits for the work is woken: what it takes is time of the job.
            try:
                now_ns = monotonic_ns()
                raised = False
                try:
                    future.value()
                except Exception:
                    raised = True
                ring.end(number, now_ns - begin_ns, raised)
                if line.position:
                    ring.words[line.position + DONE] = sequence
                if get_ident() not in threads:
                    recorder.tellers.add(get_native_id())
                    noted = ring.note(thread=get_native_id(), works_for=f"{group.key:016x}")
                    if noted or ring.get(LOST_NOTES):  # else somebody else was noting something
                        threads.add(get_ident())
                thrift.recorded_ns += monotonic_ns() - now_ns
            except Exception as error:
                recorder.fail(error)
            finally:
                pending.discard(number)

        pending.add(number)
        try:
            future.add_done_callback(done)
        except BaseException:
            pending.discard(number)
            raise

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        # In one piece up to the hand-over: in steps without records this and the hand-over are all there is.
        ring = recorder.ring or recorder.arm()
        if ring is None:
            return redispatch(keys & after, *args, **kwargs)
        number = begin_ns = sequence = 0
        is_timed = False
        try:
            begin_ns = monotonic_ns()
            payload = args[payload_at]
            while isinstance(payload, list) and payload and (len(payload) == 1 or isinstance(payload[0], list)):
                payload = payload[0]
            is_list = isinstance(payload, list)
            tensor = (payload[0] if payload else None) if is_list else payload
            try:
                num_bytes = sum(part.nbytes for part in payload) if is_list else payload.nbytes
            except RuntimeError:  # a sparse one: what it holds differs over ranks, and its size does not
                num_bytes = sum(part.numel() * part.element_size() for part in (payload if is_list else [payload]))
            if tensor is None or not tensor.is_meta:  # else somebody works out shapes, and nothing is sent
                handle = unbox_group(args[group_at])
                group = _by_address.get(id(handle))
                if group is None or group.is_same() is not handle:
                    group = _met(ring, distributed, handle)
                line, peer = group.line, -1
                if ring.words[HOLDS] and not is_message and op != _MONITORED:
                    step = recorder.num_steps or recorder.num_nexts
                    begin_ns = gate.hold(ring, group.key, step, group.most_held_ns, recorder.stepped_ns) or begin_ns
                if is_message:
                    peer = args[2] if name != "recv_any_source_" else -1
                    line = group.messages.get((name, peer)) or _first(ring, group, name, peer)
                sequence = line.take()
                position = line.position
                if position:
                    words = ring.words
                    words[position + NUM_BYTES] = num_bytes
                    words[position + BEGIN] = begin_ns
                    words[position + ENTERED] = sequence << 8 | op
                error = exception()
                if error is not None:
                    recorder.handles(ring, error)
                placed_ns = monotonic_ns()
                thrift.placed_ns += placed_ns - begin_ns
                if not position or not (recorder.num_steps or recorder.num_nexts) & thrift.mask:
                    is_timed = has_future and group.is_timed and tensor is not None and tensor.is_cpu
                    kinds = timed_kinds if is_timed or op == _MONITORED else untimed_kinds
                    if tensor is not None:
                        kinds |= dtypes.get(tensor.dtype, 0) << 16
                    number = ring.begin(kinds, begin_ns, peer, group.key, sequence, num_bytes, recorder.num_steps)
                    thrift.recorded_ns += monotonic_ns() - placed_ns
        except Exception as error:
            number, is_timed = 0, False
            recorder.fail(error)
        if not number:
            return redispatch(keys & after, *args, **kwargs)
        try:
            result = redispatch(keys & after, *args, **kwargs)
        except BaseException:
            _ended(ring, number, begin_ns, True)
            raise
        if is_timed and group is not None:
            try:
                handed_ns = monotonic_ns()
                follow(ring, number, begin_ns, group, sequence, result)
                thrift.recorded_ns += monotonic_ns() - handed_ns
            except Exception as error:
                recorder.fail(error)
        elif op == _MONITORED:
            _ended(ring, number, begin_ns, False)
        return result

    return kernel


def _first(ring: Ring, group: _Group, name: str, peer: int) -> _Line:
    """Nothing was sent to (or received from) this peer before."""
    return group.messages.setdefault((name, peer), _Line(ring.position(group.key, peer)))


def _ended(ring: Ring, number: int, begin_ns: int, raised: bool) -> None:
    if number:
        try:
            ring.end(number, monotonic_ns() - begin_ns, raised)
        except Exception as error:
            RECORDER.fail(error)


def _timeout_ns(group: Any) -> int:
    """Of the calls of a process group; where no backend tells, as if there were none, since the cap is far below any
    that is in use."""
    shortest_ns = MOST_DELAY_NS * TIMEOUT_SHARE
    for device in group._device_types:
        with contextlib.suppress(AttributeError, RuntimeError):  # another package's backend; none for this device
            timeout = group._get_backend(device).options._timeout
            shortest_ns = min(shortest_ns, round(timeout.total_seconds() * 1e9))
    return shortest_ns


def _met(ring: Ring, distributed: Any, handle: Any) -> _Group:
    """A group that is new, or another one under a known name: note who it is."""
    name = handle.group_name
    # Ranks that form several groups in one call give all of them one name; with its members each is told apart.
    members = distributed._world.pg_group_ranks.get(handle)
    ranks = format_ranks(members) if members else ""
    key = int.from_bytes(hashlib.blake2b(f"{name} {ranks}".encode(), digest_size=8).digest(), "little") or 1
    known = _groups.get(name)
    backend = str(distributed._world.pg_backend_config.get(handle, ""))
    if known is not None and known.key == key:
        line, messages = known.line, known.messages
    else:
        line, messages = _Line(ring.position(key)), {}
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
    group = _groups[name] = _by_address[id(handle)] = _Group(handle, key, "gloo" in backend, line, messages)
    return group
