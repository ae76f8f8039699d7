"""What rings tell of gloo's communication: the group of a collective by its thread, the call by its turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eroica.calls import calls_of, read_told
from eroica.communication import CollectiveKind
from eroica.job import ProcessGroup, format_ranks
from eroica.ring import COLLECTIVE, DTYPES, OPS, P2P, UNTIMED, Flight, Identity, Record, Ring, read_flight, what
from eroica.trace import Trace, read_trace
from tests import handmade as h
from tests.test_probe import _run
from tests.traces import document, event, write

US = 1_000
TP, DP = ProcessGroup("3", "tp", (0, 1), 2), ProcessGroup("2", "dp", (0, 2), 2)
KEYS = {TP.name: 11, DP.name: 22}
THREADS = {"51": TP, "52": TP, "61": DP, "62": DP}
K = CollectiveKind


def called(
    group: ProcessGroup, op: str, at: int, lasts: int | None = None, *, peer: int = -1, num_bytes: int = 64
) -> Record:
    """A call as the ring has it; times in microseconds."""
    kind = P2P if op in ("send", "recv") else COLLECTIVE
    flags = UNTIMED if lasts is None else 0
    return Record(
        *(
            1,
            at * US,
            None if lasts is None else lasts * US,
            False,
            kind,
            OPS.index(op),
            DTYPES.index("float32"),
            flags,
        ),
        *(peer, KEYS[group.name], 7, num_bytes, 3),
    )


def flight(records: Sequence[Record], groups: Sequence[ProcessGroup] = (TP, DP)) -> Flight:
    """What is left of a rank of these groups."""
    notes: list[dict[str, object]] = [
        {"group": f"{KEYS[g.name]:016x}", "name": g.name, "description": g.description, "ranks": format_ranks(g.ranks)}
        for g in groups
    ]
    notes += [{"thread": int(t), "works_for": f"{KEYS[g.name]:016x}"} for t, g in THREADS.items()]
    return Flight(Identity(1, 0, 0, 0, 0, 0, 64), (), notes, list(records), 0)


def done(name: str, at: int, lasts: int, thread: str, kind: CollectiveKind = K.ALL_REDUCE) -> h.Event:
    """An event of gloo's, in microseconds."""
    return h.mark(f"gloo:{name}", at * US, lasts * US, thread=thread, comm=h.Comm(kind, group=-1))


def operator(name: str, at: int, lasts: int, kind: CollectiveKind) -> h.Event:
    return h.op(f"c10d::{name}", at * US, lasts * US, comm=h.Comm(kind, group=-1, transfers=False))


def told_of(trace: Trace, seen: Flight) -> list[tuple[int, str, str]]:
    """Begin in microseconds, group and call of each communication that is known."""
    return [
        (
            int(trace.ts_ns[call.event]) // US,
            call.group.description,
            "?" if call.record is None else f"{OPS[call.record.op]} of {call.record.begin_ns // US}",
        )
        for call in calls_of(trace, seen, 0)
    ]


def test_a_thread_tells_the_group_where_the_order_of_all_calls_would_tell_another() -> None:
    # Two calls of tp wait for each other's end; that of dp comes last and is taken up at once.
    trace = h.trace(
        [done("all_reduce", 100, 900, "51"), done("all_reduce", 150, 30, "61"), done("all_reduce", 1010, 50, "51")],
        groups=(TP, DP),
    )
    calls = [called(TP, "allreduce", 90, 900), called(TP, "allreduce", 95, 960), called(DP, "allreduce", 140, 35)]
    assert told_of(trace, flight(calls)) == [
        (100, "tp", "allreduce of 90"), (150, "dp", "allreduce of 140"), (1010, "tp", "allreduce of 95")
    ]  # fmt: skip


def test_a_reduce_scatter_that_gloo_carries_out_as_an_all_reduce_is_told_as_what_was_called() -> None:
    trace = h.trace(
        [
            done("all_reduce", 100, 50, "51"),
            done("all_reduce", 300, 50, "52"),
            done("all_gather", 500, 50, "51", K.ALL_GATHER),
        ]
    )
    calls = [
        called(TP, "allreduce", 90, 55), called(TP, "reduce_scatter_base", 290), called(TP, "allgather_base", 490, 60)
    ]  # fmt: skip
    assert [call for _, _, call in told_of(trace, flight(calls))] == [
        "allreduce of 90", "reduce_scatter_base of 290", "allgather_base of 490"
    ]  # fmt: skip


def test_a_thread_that_never_told_an_end_works_for_the_group_that_has_so_many_calls_left_over() -> None:
    events, calls = [], []
    for at in range(1_000, 9_000, 1_000):
        events += [done("all_reduce", at, 50, "99"), done("all_gather", at + 100, 50, "51", K.ALL_GATHER)]
        calls += [called(TP, "reduce_scatter_base", at - 9), called(TP, "allgather_base", at + 90, 55)]
        events.append(done("all_reduce", at + 300, 50, "61"))
        calls.append(called(DP, "allreduce", at + 290, 55))
    seen = told_of(h.trace(events), flight(calls))
    assert [group for _, group, _ in seen] == ["tp", "tp", "dp"] * 8
    assert seen[3] == (2_000, "tp", "reduce_scatter_base of 1991")


def test_where_not_all_calls_were_recorded_no_thread_is_anybodys_for_what_is_left_over() -> None:
    events = [done("all_reduce", at, 50, thread) for at in range(1_000, 9_000, 1_000) for thread in ("99", "61")]
    calls = [called(TP, "allreduce", at - 9, 60) for at in range(1_000, 8_000, 1_000)]
    assert {group for _, group, _ in told_of(h.trace(events), flight(calls))} == {"dp"}


def _scatters(both_at_once: bool) -> list[tuple[int, str, str]]:
    """Two groups that do nothing but reduce-scatters, each on a thread that nobody knows."""
    events, calls = [], []
    for at in range(1_000, 9_000, 1_000):
        later = 5 if both_at_once else 500
        events += [done("all_reduce", at, 50, "98"), done("all_reduce", at + later + 1, 50, "99")]
        calls += [called(TP, "reduce_scatter_base", at - 9), called(DP, "reduce_scatter_base", at - 8 + later)]
    return told_of(h.trace(events), flight(calls))


def test_of_two_such_groups_the_calls_just_before_tell_or_nothing_does() -> None:
    assert [group for _, group, _ in _scatters(both_at_once=False)] == ["tp", "dp"] * 8
    assert _scatters(both_at_once=True) == []


def test_nothing_is_told_of_a_thread_that_nobody_knows_nor_of_a_group_whose_name_another_has_now() -> None:
    calls = [called(TP, "allreduce", 90, 55)]
    strange = h.trace([done("all_reduce", 100, 50, "99")])
    assert told_of(strange, flight(calls)) == []
    known = h.trace([done("all_reduce", 100, 50, "51")], groups=(ProcessGroup(TP.name, "later", (0, 3), 2),))
    assert told_of(known, flight(calls)) == []
    assert told_of(replace(known, groups=()), flight(calls)) == [(100, "tp", "allreduce of 90")]


def test_what_was_called_before_the_window_is_known_by_its_group_alone_and_moves_no_other() -> None:
    trace = h.trace([done("all_reduce", 100, 50, "51"), done("all_reduce", 300, 50, "52")])
    assert told_of(trace, flight([called(TP, "allreduce", 290, 55)])) == [
        (100, "tp", "?"), (300, "tp", "allreduce of 290")
    ]  # fmt: skip


def test_a_call_that_was_over_before_an_event_began_is_not_that_events_call() -> None:
    trace = h.trace([h.op("aten::mm", 0, 10), done("all_reduce", 300, 50, "51")])
    calls = [called(TP, "allreduce", 100, 50), called(TP, "allreduce", 290, 55)]
    assert told_of(trace, flight(calls)) == [(300, "tp", "allreduce of 290")]


def test_calls_of_a_device_are_not_taken_for_those_of_gloo() -> None:
    trace = h.trace([h.kernel("gemm", 0, 10), done("all_reduce", 300, 50, "51")])
    calls = [called(TP, "allreduce", 200), called(TP, "allreduce", 290, 55)]
    assert told_of(trace, flight(calls)) == [(300, "tp", "allreduce of 290")]


def test_a_message_is_the_call_within_the_same_operator() -> None:
    trace = h.trace(
        [
            operator("send", 100, 60, K.SEND),
            done("send", 150, 500, "1", K.SEND),
            operator("recv_", 200, 60, K.RECV),
            done("recv", 250, 900, "1", K.RECV),
            done("recv", 400, 900, "1", K.RECV),
        ]
    )
    calls = [called(TP, "send", 105, peer=1), called(DP, "recv", 205, peer=1)]
    assert told_of(trace, flight(calls)) == [(150, "tp", "send of 105"), (250, "dp", "recv of 205")]


def test_two_messages_at_one_moment_that_differ_are_told_as_neither() -> None:
    other = h.op("c10d::send", 101 * US, 60 * US, thread="2", comm=h.Comm(K.SEND, group=-1, transfers=False))
    trace = h.trace([operator("send", 100, 60, K.SEND), other, done("send", 150, 50, "1", K.SEND)])
    calls = [called(TP, "send", 105, peer=1), called(DP, "send", 106, peer=1)]
    assert told_of(trace, flight(calls)) == []
    assert told_of(trace, flight(calls[:1] * 2)) == [(150, "tp", "send of 105")]


@given(
    st.lists(st.tuples(st.sampled_from([TP, DP]), st.integers(1, 400), st.integers(1, 400)), min_size=1, max_size=40)
)
def test_whatever_is_asked_at_once_every_event_is_told_as_the_call_that_it_carries_out(
    asked: list[tuple[ProcessGroup, int, int]],
) -> None:
    """Each group has two threads, which take up its calls in turn; the caller goes on at once."""
    now, calls, events, truth = 1_000, [], [], {}
    free = {thread: 0 for thread in THREADS}
    for k, (group, pause, lasts) in enumerate(asked):
        now += pause
        thread = min((t for t, of in THREADS.items() if of is group), key=lambda t: free[t])
        begin = max(now + 3, free[thread] + k + 1)
        free[thread] = begin + lasts
        calls.append(called(group, "allreduce", now, begin + lasts - now, num_bytes=4 * k))
        events.append(done("all_reduce", begin, lasts, thread))
        truth[group.name, begin] = k
    trace = h.trace(events)
    found = {(c.group.name, int(trace.ts_ns[c.event]) // US): c for c in calls_of(trace, flight(calls), 0)}
    assert found.keys() == truth.keys()
    assert {key: call.record.num_bytes // 4 for key, call in found.items() if call.record} == truth


def _job(folder: Path) -> tuple[Path, Ring]:
    """A file of gloo's, and the ring of its rank."""
    base = 1_700_000_000_000_000_000
    made = [
        event("c10d::allreduce_", 100, 20),
        {**event("gloo:all_reduce", 150, 50, "user_annotation"), "tid": 51},
        {**event("gloo:all_reduce", 160, 30, "user_annotation"), "tid": 61},
        event("c10d::send", 300, 40),
        event("gloo:send", 330, 90, "user_annotation"),
    ]
    path = write(folder / "rank0.json", document(made, head={"baseTimeNanoseconds": base}, traceName="t.json"))
    left = Ring.create(folder / "rank0.ring", rank=0, world_size=4)
    for note in flight([]).notes:
        left.note(**note)
    for call in (called(TP, "allreduce", 105, 80), called(DP, "allreduce", 140, 55), called(TP, "send", 310, peer=1)):
        flags = UNTIMED if call.kind == P2P else 0
        number = left.begin(
            what(call.kind, call.op, call.dtype, flags), call.begin_ns, call.peer, call.group, 7, call.num_bytes, 3
        )
        if call.duration_ns is not None:
            left.end(number, call.duration_ns, False)
    return path, left


def test_a_file_tells_whoever_reads_it_later_what_the_ring_told(tmp_path: Path) -> None:
    path, left = _job(tmp_path)
    first = read_told(str(path), 0, str(left.path), 1_700_000_000_000_000_000)
    left.path.unlink()
    for trace in (first, read_trace(path), read_told(str(path), 0, str(left.path), 0)):
        table = trace.collectives
        rows = np.flatnonzero(table.transfers)
        names = [trace.groups[g].description for g in table.group[rows]]
        assert list(zip(names, table.peer[rows].tolist(), table.in_elements[rows].tolist(), strict=True)) == [
            ("tp", -1, 16), ("dp", -1, 16), ("tp", 1, 16)
        ]  # fmt: skip
        assert trace.groups[table.group[rows[0]]].ranks == TP.ranks


@pytest.mark.parametrize("lost", ["ring", "end of the file"])
def test_without_a_ring_or_in_a_file_that_is_cut_a_trace_stays_as_it_is(tmp_path: Path, lost: str) -> None:
    path, left = _job(tmp_path)
    if lost == "ring":
        left.path.write_bytes(b"no ring at all")
    else:
        path.write_bytes(path.read_bytes()[:-8])
    before = path.read_bytes()
    trace = read_told(str(path), 0, str(left.path), 1_700_000_000_000_000_000)
    assert path.read_bytes() == before and (trace.collectives.group < 0).all() and len(trace.collectives) == 5


TRAINING = """
import sys, time, torch
import torch.distributed as dist
import eroica
from eroica.commands import Command, Frames, State, Verb, parse_answer
from eroica.probe.recorder import RECORDER
from eroica.ring import ANSWER, post
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
small, large, parts = (dist.new_group([0], group_desc=name) for name in ("small", "large", "parts"))
RECORDER.thrift.one_step_in, RECORDER.thrift.mask = 1024, 1023
for step in range(1, 24):
    work = [dist.all_reduce(torch.zeros(10_000), group=large, async_op=True) for _ in range(4)]
    work.append(dist.all_reduce(torch.zeros(10), group=small, async_op=True))
    for each in work:
        each.wait()
    dist.reduce_scatter_tensor(torch.zeros(100), torch.zeros(100), group=parts)
    if step in (3, 5):
        verb = Verb.PREPARE if step == 3 else Verb.COMMIT
        command = Command(window=1, verb=verb, start=8, num_steps=10, frames=Frames.SAMPLED)
        post(RECORDER.ring.path, command.word())
    optimizer.step()
while parse_answer(RECORDER.ring.get(ANSWER)) == (1, State.WRITING):
    time.sleep(0.01)
print(RECORDER.ring.path)
dist.destroy_process_group()
"""


@pytest.mark.full
def test_a_window_of_a_job_that_records_few_steps_tells_the_group_of_all_its_collectives(tmp_path: Path) -> None:
    path = Path(
        _run("-W", "ignore", "-c", TRAINING, str(tmp_path / "rendezvous"), EROICA_RING_DIR=str(tmp_path)).strip()
    )
    left = read_flight(path)
    assert {record.step for record in left.records if record.kind == COLLECTIVE} - {0} == set(range(8, 18))
    file = path.parent / "captures" / "1" / "rank0.json"
    shift_ns = left.identity.wall_ns - left.identity.monotonic_ns
    trace = read_told(str(file), 0, str(path), shift_ns)
    table = trace.collectives
    rows = np.flatnonzero(table.transfers)
    told = Counter(
        (trace.groups[group].description if group >= 0 else "", int(num))
        for group, num in zip(table.group[rows], table.in_elements[rows], strict=True)
    )
    sizes = {"large": 10_000, "small": 10, "parts": 100}
    assert sum(told.values()) == 60 and {group for group, _ in told} == sizes.keys()
    assert {group: sum(n for (name, _), n in told.items() if name == group) for group in sizes} == {
        "large": 40, "small": 10, "parts": 10,
    }  # fmt: skip
    # A size is told where one call alone can be the one, which two threads of a group now and then leave open.
    untold = sum(n for (_, size), n in told.items() if size == -1)
    assert untold <= 3 and {(name, size) for name, size in told if size != -1} == set(sizes.items())


def test_records_of_no_known_operation_or_group_do_no_harm() -> None:
    trace = h.trace([done("all_reduce", 100, 50, "51")])
    odd = [replace(called(TP, "allreduce", 90, 55), op=200), replace(called(TP, "allreduce", 90, 55), group=5)]
    broken = flight(odd)
    broken.notes.extend(
        [
            {"group": "x"},
            {"group": f"{33:016x}", "ranks": "1-x"},
            {"thread": 7, "works_for": 9},
            {"thread": 7, "works_for": "z" * 16},
        ]
    )
    assert told_of(trace, broken) == [(100, "tp", "?")]
