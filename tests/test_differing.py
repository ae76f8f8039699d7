"""Who differs from the rest when a job halts: calls, their order, batches, exceptions dealt with, addresses, models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from eroica.findings import Diagnosis
from eroica.hang import explain
from eroica.joining import misdirected, odd_ones
from eroica.routine import departures
from eroica.standing import Call, Frame, Group, RankView, Thread

WORLD = Group("a" * 16, "default_pg", (0, 1, 2, 3))
LEFT, RIGHT = Group("b" * 16, "pair", (0, 1)), Group("c" * 16, "pair", (2, 3))
ON_DEVICE = replace(WORLD, backend="cuda:nccl")


def _waiting(line: int, call: str = "all_reduce", file: str = "/home/u/train.py") -> Thread:
    inner = Frame(call, "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 3252)
    return Thread("MainThread", (inner, Frame("step", file, line, "dist.all_reduce(x)")), is_main=True)


def _call(group: Group, sequence: int, status: str = "in", op: str = "allreduce", **more: object) -> Call:
    made = Call(group.key, sequence, op, status, 400, "float32", 60.0 if status == "in" else 90.0, sequence - 1)
    return replace(made, **more)  # type: ignore[arg-type]


def _rank(rank: int, *calls: Call, thread: Thread | None = None, **more: object) -> RankView:
    pair = LEFT if rank < 2 else RIGHT
    view = RankView(
        rank=rank, host="a", pid=100 + rank, state="running", groups=(WORLD, pair), calls=calls, knows_all_groups=True,
        silent_s=60.0, threads=(thread or _waiting(40),), num_steps=5,
    )  # fmt: skip
    return replace(view, **more)  # type: ignore[arg-type]


def _explained(*views: RankView) -> Diagnosis:
    found = explain(views, world_size=len(views), job="j")
    assert found is not None
    return found


def _said(found: Diagnosis) -> tuple[str, str, str, str]:
    return found.verdict.scope, found.verdict.cause, found.verdict.ranks, found.verdict.confidence


def _texts(found: Diagnosis) -> str:
    return "\n".join([found.verdict.summary, *(item.text for item in found.evidence.values())])


def _history(rank: int, num: int, last: list[Call]) -> RankView:
    """Steps of a call in the pair and one of all, and what came then."""
    pair = LEFT if rank < 2 else RIGHT
    calls = [call for n in range(1, num + 1) for call in (_call(pair, n, "done"), _call(WORLD, n, "done"))]
    return _rank(rank, *calls, *last, thread=_waiting(40 if last[-1].group == WORLD.key else 50))


def test_of_two_that_wait_for_each_other_the_one_that_left_its_routine_is_named() -> None:
    through = [_call(LEFT, 21, "done"), _call(WORLD, 21)]
    views = [_history(0, 20, through), _history(1, 20, through)]
    views += [_history(2, 20, [_call(WORLD, 21)]), _history(3, 20, [_call(RIGHT, 21)])]
    found = _explained(*views)
    assert _said(found)[:3] == ("rank", "deadlock", "2")
    assert "rank 2 left out a call" in found.verdict.summary and "on pair had come" in found.verdict.summary


def _thrifty(rank: int, num_steps: int, in_pair: int, world: int, last: Call, every: int = 8) -> RankView:
    """Two calls of all and one of the pair per step, recorded in one step of `every`, and the last of each group."""
    pair = LEFT if rank < 2 else RIGHT
    calls: list[Call] = []
    for step in range(0, num_steps + 1, every):
        done = [(WORLD, 2 * step + 1), (WORLD, 2 * step + 2), (pair, step + 1)]
        calls += [_call(group, n, "done", step=step) for group, n in done]
    counted: dict[str, Any] = {"step": -1, "dtype": ""}
    calls += [_call(pair, in_pair, "unseen", **counted), _call(WORLD, world, "unseen", **counted)]
    return _rank(rank, *calls, replace(last, **counted), num_steps=num_steps)


def test_a_call_left_out_in_a_step_that_is_not_recorded_is_told_by_the_number_of_calls() -> None:
    through = [_thrifty(rank, 43, 43, 86, _call(WORLD, 87)) for rank in (0, 1)]
    left_out = _thrifty(2, 43, 42, 86, _call(WORLD, 87))
    waiting = _thrifty(3, 42, 42, 86, _call(RIGHT, 43))
    views = {view.rank: view for view in (*through, left_out, waiting)}
    found = departures(views)
    assert {rank: each.text for rank, each in found.items()} == {
        2: "rank 2 left out a call on pair since step 40: it had made 1 in each step before"
    }
    # Of a group that is not used in every step alike, nothing is due.
    uneven = [
        replace(call, sequence=call.sequence + 1) if call.group == RIGHT.key and call.step > 20 else call
        for call in left_out.calls
    ]
    assert departures({**views, 2: replace(left_out, calls=tuple(uneven))}) == {}
    more = _thrifty(2, 42, 43, 88, _call(WORLD, 88))
    assert "made 2 calls on default_pg too many" in departures({**views, 2: more})[2].text
    # What many do alike is no departure.
    assert departures({rank: replace(left_out, rank=rank) for rank in range(4)}) == {}


def test_a_rank_that_only_waits_and_a_call_that_all_make_are_no_departure() -> None:
    waiting = {rank: _history(rank, 20, [_call(LEFT if rank < 2 else RIGHT, 21)]) for rank in range(4)}
    assert departures(waiting) == {}
    evaluation = [_call(WORLD, 21, "in", "barrier")]
    assert departures({rank: _history(rank, 20, evaluation) for rank in range(4)}) == {}
    # Nor is one of two: who of them is right, their past does not tell.
    pair = {0: _history(0, 20, evaluation), 1: _history(1, 20, [_call(LEFT, 21)])}
    assert departures(pair) == {}


def test_a_rank_with_a_batch_more_or_less_than_the_others_is_told_with_the_calls_of_its_loader() -> None:
    more = _rank(1, _call(WORLD, 41), last_batch="came", num_nexts=52)
    others = [
        _rank(r, _call(WORLD, 41, op="barrier"), thread=_waiting(60), last_batch="none", num_nexts=51)
        for r in (0, 2, 3)
    ]
    found = _explained(more, *others)
    assert _said(found) == ("rank", "collective_mismatch", "1", "established")
    assert "the loader of rank 1 gave another batch (call 52 for one)" in found.verdict.summary
    assert "Join" in found.findings[0].advice
    fewer = replace(others[0], rank=1)
    found = _explained(fewer, *(replace(more, rank=rank) for rank in (0, 2, 3)))
    assert _said(found)[2] == "1" and "that of rank 1 was through" in found.verdict.summary


def test_a_clean_up_that_waits_for_the_others_is_laid_to_the_exception_that_it_deals_with() -> None:
    handling: dict[str, Any] = {
        "handles": "ValueError: no such batch",
        "handles_at": "/v/x.py:9",
        "handles_from": "/home/u/train.py:7",
    }
    cleaning = _rank(2, _call(WORLD, 41, op="barrier"), thread=_waiting(90), **handling)
    others = [_rank(rank, _call(WORLD, 41)) for rank in (0, 1, 3)]
    found = _explained(*others, cleaning)
    assert _said(found) == ("rank", "exception", "2", "established")
    function = found.findings[0].function
    assert function is not None and function.user_location == "/home/u/train.py:7"
    assert "barrier where ranks 0-1,3 have allreduce" in _texts(found)
    # All of them train in an `except` block: that tells nobody apart.
    alike = [replace(view, **handling) for view in others]
    assert _said(_explained(*alike, replace(cleaning, handles="")))[1] == "collective_mismatch"


def test_who_stands_in_a_later_call_than_one_that_nobody_leaves_alone_has_gone_past_it() -> None:
    others = [_rank(rank, _call(WORLD, 41, op="allgather")) for rank in (0, 1, 2)]
    ahead = _rank(3, _call(WORLD, 43, op="broadcast", dtype="", step=-1), thread=_waiting(77))
    found = _explained(*others, ahead)
    assert _said(found) == ("rank", "collective_mismatch", "3", "supported")
    assert "train.py:77" in found.verdict.summary
    # In one line with the others it may merely have begun more without waiting.
    alike = replace(ahead, threads=(_waiting(40),))
    assert _said(_explained(*others, alike))[1] == "unknown"


def test_a_process_that_a_library_ended_in_a_call_in_which_ranks_differ_is_no_dead_worker() -> None:
    lost = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:1"
    over: dict[str, Any] = {"silent_s": None, "threads": ()}
    odd = _rank(1, _call(WORLD, 41, num_bytes=16), state="running", **over)
    aborted = _rank(2, _call(WORLD, 41), state="died", exit_status=-6, **over)
    others = [_rank(rank, _call(WORLD, 41, "failed"), state="ended", exception=lost, **over) for rank in (0, 3)]
    found = _explained(others[0], odd, aborted, others[1])
    assert (found.kind, *_said(found)) == ("crash", "rank", "collective_mismatch", "1", "established")
    assert "rank 2 was ended by it (killed by SIGABRT)" in _texts(found)
    # Killed from outside, or where all make the same call, it is the one that died.
    killed = replace(aborted, exit_status=-9)
    assert _said(_explained(others[0], odd, killed, others[1]))[1:3] == ("dead_worker", "2")
    alike = replace(odd, calls=aborted.calls)
    assert _said(_explained(others[0], alike, aborted, others[1]))[1:3] == ("dead_worker", "2")


def test_calls_on_a_device_that_all_have_entered_are_told_from_several_at_once() -> None:
    sync = Thread(
        "MainThread",
        (Frame("synchronize", "/v/site-packages/torch/cuda/__init__.py", 9), Frame("f", "/home/u/t.py", 3, "f()")),
        is_main=True,
    )
    one = [_rank(r, _call(ON_DEVICE, 6), thread=sync, groups=(ON_DEVICE,)) for r in range(4)]
    found = _explained(*one)
    assert _said(found) == ("group", "intra_node_link", "0-3", "hypothesis")
    assert "IOMMU" in found.findings[0].advice and "a missing rank" in found.findings[0].ruled_out[0]
    apart = [replace(view, host="ab"[view.rank % 2]) for view in one]
    assert _said(_explained(*apart))[1] == "nic_or_host_network"
    other = replace(ON_DEVICE, key="d" * 16, name="experts")
    both = [replace(v, groups=(ON_DEVICE, other), calls=(*v.calls, _call(other, 6, "unseen"))) for v in one]
    found = _explained(*both)
    assert _said(found) == ("group", "deadlock", "0-3", "hypothesis")
    assert "2 communicators are in flight at the same time" in found.verdict.summary
    # One of a step that is over is no longer in flight.
    over = [replace(v, calls=(v.calls[0], _call(other, 5, "unseen"))) for v in both]
    assert _said(_explained(*over))[1] == "intra_node_link"


def test_an_error_that_all_leave_by_blames_no_rank_unless_one_has_another_model() -> None:
    error: dict[str, Any] = {
        "state": "ended",
        "silent_s": None,
        "threads": (),
        "exception": "AssertionError: 48/48",
        "exception_at": "a.py:3",
    }
    views = [_rank(rank, **error) for rank in range(4)]
    found = _explained(*views)
    assert (found.kind, *_said(found)) == ("crash", "all", "exception", "0-3", "established")
    assert _explained(*(replace(view, state="running") for view in views)).kind == "crash"
    models = [replace(view, model="DistributedDataParallel of 6 parameters, 1,000 elements") for view in views]
    models[2] = replace(models[2], model="DistributedDataParallel of 8 parameters, 1,300 elements")
    found = _explained(*models)
    assert _said(found) == ("rank", "collective_mismatch", "2", "supported")
    assert "of 8 parameters" in found.verdict.summary and "AssertionError" in found.verdict.summary
    # Only one of them left: that is its own error.
    assert _said(_explained(views[0], *(_rank(rank) for rank in (1, 2, 3))))[:3] == ("rank", "exception", "0")


def _joining(rank: int, **told: str) -> RankView:
    frames = (
        Frame("init_process_group", "/v/site-packages/torch/distributed/distributed_c10d.py", 5),
        Frame("main", "/home/u/train.py", 9),
    )
    view = _rank(rank, thread=Thread("MainThread", frames, is_main=True), phase="rendezvous", num_steps=0)
    return replace(view, rendezvous=told)


def test_who_was_sent_to_another_rendezvous_is_named_with_both_addresses() -> None:
    views = [_joining(rank, store="10.0.0.1:29500") for rank in range(4)]
    found = _explained(*views[:3], replace(views[3], rendezvous={"store": "10.9.0.1:29500"}))
    assert _said(found) == ("rank", "startup_network", "3", "supported") and "10.9.0.1:29500" in found.verdict.summary
    # The keeper of the store may have another name for itself.
    assert misdirected({0: _joining(0, store="localhost:29500"), **{view.rank: view for view in views[1:]}}) == []
    found = _explained(*views)
    assert _said(found) == ("group", "startup_network", "0-3", "hypothesis")
    sizes = [replace(view, rendezvous=dict(view.rendezvous) | {"size": "54"[view.rank != 2]}) for view in views]
    assert _said(_explained(*sizes))[:3] == ("rank", "configuration", "2")


def test_who_tells_the_others_an_address_that_leads_nowhere_is_named() -> None:
    views = [_joining(rank, store="a:1", address=f"10.0.0.{rank + 1}", interface="eth0", by="X") for rank in range(4)]
    inner = replace(views[1], rendezvous=dict(views[1].rendezvous) | {"address": "127.0.0.1", "interface": "lo"})
    found = _explained(views[0], inner, *views[2:])
    assert _said(found) == ("rank", "startup_network", "1", "supported") and "127.0.0.1 (X=lo)" in found.verdict.summary
    lost = "RuntimeError: Gloo connectFullMesh failed with Connection refused"
    left = [replace(view, state="ended", silent_s=None, exception=lost) for view in (views[0], inner, *views[2:])]
    found = _explained(*left)
    assert (found.kind, *_said(found)[:3]) == ("crash", "rank", "startup_network", "1")
    odd = "RuntimeError: Gloo connectFullMesh failed with [pair.cc:144] no error"
    first = replace(left[1], exception=odd)
    assert _said(_explained(left[0], first, *left[2:]))[:3] == ("rank", "startup_network", "1")
    other = replace(left[2], exception="RuntimeError: Gloo has no such option", rendezvous={"interface": "lo"})
    assert _said(_explained(*views[:2], other, views[3]))[1:3] == ("exception", "2")
    tunnel = replace(inner, rendezvous=dict(inner.rendezvous) | {"address": "100.64.1.2", "interface": "tun0"})
    assert _said(_explained(views[0], tunnel, *views[2:]))[:3] == ("rank", "startup_network", "1")
    # Once the job has trained, addresses are no explanation any more.
    trained = [replace(view, num_steps=9) for view in left]
    assert _said(_explained(*trained))[1] == "unknown"


def test_an_error_about_the_interface_that_a_rank_was_given_is_one_of_the_start() -> None:
    bad = _joining(1, interface="^lo", by="GLOO_SOCKET_IFNAME")
    bad = replace(bad, state="ended", silent_s=None, exception="RuntimeError: Unable to find address for: ^lo")
    assert _said(_explained(_joining(0), bad))[:3] == ("rank", "startup_network", "1")


def test_the_odd_ones_need_a_majority_against_them() -> None:
    assert odd_ones({0: "x", 1: "x", 2: "y"}) == (frozenset({2}), "x")
    assert odd_ones({0: "x", 1: "y"})[0] == frozenset() and odd_ones({}) == (frozenset(), "")
