"""What broke other hang recorders, straggler detectors and stack samplers, as regression tests of ours; P-numbers are
those of the project's list of such reports. What other files test already:

P58  test_demo: every_demo_is_diagnosed (backward_delay); test_diagnosis: the_rank_with_more_own_work_is_blamed
P60  test_degradation: evaluations_skipped_steps_and_our_own_windows, a_pause_explains_silence, the_limit_of_a_pause,
     the_first_iterations_after_a_rendezvous, silence_that_came_twice, limits_can_be_raised, a_new_rendezvous_learns
P61  test_capture: the_profilers_of_the_user_come_first; test_ring: files_that_are_no_sound_ring (unknown versions)
P62  test_stacks: torchs_flight_recorder_tells_positions; test_hang: another_operation_is_blamed, without_a_stack
P64  test_stacks: a_process_that_..._holds_the_gil_in_c, the_timer_writes_while_c_code_holds_the_gil;
     test_hang_live: a_real_hang_is_explained (gil), where_nobody_may_look
P65  test_probe: an_exception_that_ends_the_process; test_ring: a_writer_that_is_killed; test_hang_live: raises, killed
P67  test_stacks: one_who_may_not_trace; test_doctor: ptrace_is_allowed_by, py_spy_is_tried
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np

from eroica import ring, stacks
from eroica.context import Context
from eroica.degradation import Change, Degradation
from eroica.diagnosis import diagnose
from eroica.flights import read_rings
from eroica.hang import explain
from eroica.pattern import Summary, stack, summarize
from eroica.probe.environment import _torch
from eroica.ring import COLLECTIVE, OPS, STEP, Ring, what
from eroica.standing import Call, Frame, Group, RankView, Thread, user_frame
from eroica.steps import Pause
from eroica.trace import Trace
from eroica.views import Process, views_of, with_recorder
from tests import handmade as h
from tests.test_degradation import iteration

GROUP = 0xABCDEF0123456789
LATEST = 12_900
TORCH = "/v/lib/python3.11/site-packages/torch"


def _backward(rank: int, slow: int) -> Trace:
    """Four steps. Backward takes 100 ms on every rank: on `slow` in a hook, on the others in the all-reduce."""
    events = []
    for step in range(4):
        at = step * 110 * h.MS
        own = 90 if rank == slow else 2
        events += [
            h.mark(f"ProfilerStep#{step}", at, 110 * h.MS),
            h.op("aten::linear", at + h.MS, 8 * h.MS),
            h.frame("train.py(30): scale_grads", at + 10 * h.MS, own * h.MS),
            h.op("gloo:all_reduce", at + (10 + own) * h.MS, (98 - own) * h.MS, comm=h.Comm(sequence=step), thread="1"),
        ]
    return h.trace(events, rank=rank)


def test_a_delay_inside_backward_is_found_though_the_phases_of_all_ranks_take_equally_long() -> None:
    """P58: phase times of 293.0, 292.2, 293.0 and 293.1 ms name nobody."""
    made = diagnose(stack([summarize(_backward(rank, slow=1)) for rank in range(4)]), Context())
    assert (made.kind, made.verdict.scope, made.verdict.ranks) == ("slow", "rank", "1")
    function = made.findings[0].function
    assert function is not None and "scale_grads" in function.name
    assert all("1" not in item.ranks.split("-") for item in made.consequences)


def _turns(rank: int, size: int, num_steps: int) -> Summary:
    """A job in which another rank works 0.3 s longer every ten steps, each equally often."""
    own = np.array([[0.8 + 0.3 * (step // 10 % size == r) for step in range(num_steps)] for r in range(size)])
    waits = own.max(0) - own[rank]
    made = h.summary(
        rank,
        h.Rank(
            own=own[rank].tolist(),
            length=(own.max(0) + 0.05).tolist(),
            samples=[h.Sample(0.05, work_before=0.8, channel=h.everyone(size))],
            tops={step: (0, 0.3, float("nan")) for step in range(num_steps) if own[rank, step] > 1},
        ),
        world_size=size,
        num_steps=num_steps,
    )
    durations = (0.05 + waits).astype(np.float32)
    return h.less(made, duration_s=durations, sample_exposed_s=durations, work_before_s=own[rank].astype(np.float32))


def test_a_culprit_that_changes_every_ten_steps_is_no_rank_and_not_lost_in_the_means() -> None:
    """P59: averages over a window are equal on all ranks, and hide that each of them was the last one in turn."""
    made = diagnose(stack([_turns(rank, 4, 40) for rank in range(4)]), Context())
    assert made.kind == "slow" and made.verdict.scope == "rotating" and made.verdict.ranks == ""


def test_inspections_restarts_and_steps_longer_than_any_fixed_limit_are_no_hang() -> None:
    """P60: an inspection step and a restart were called hangs, and a bound of ten minutes could not be raised."""
    second = 10**9
    judge = Degradation()
    now = 0
    for number in range(30):  # steps of twenty minutes, behind the first ones that may take half an hour
        judge.add(iteration(number, now, 1200))
        now += 1200 * second
    found = judge.check(now + 3600 * second, now, None)
    assert found is None or found.change is not Change.STALLED
    judge.restart()
    assert judge.silence_limit_ns(Pause.RENDEZVOUS) >= 1800 * second


def _flight(path: Path, rank: int, first: int, last: int, capacity: int = 2_000) -> None:
    """A ring that still holds the calls from `first` to `last`, of which `LATEST` is not over."""
    made = Ring.create(path, rank=rank, world_size=4, capacity=capacity)
    made.note(host="elsewhere", job="j")
    made.note(group=f"{GROUP:016x}", name="0", description="default_pg", ranks="0-3", size=4, backend="gloo")
    for sequence in range(first, last + 1):
        number = made.begin(what(COLLECTIVE, OPS.index("allreduce"), 1), sequence * 1000, -1, GROUP, sequence, 400, 0)
        if sequence < LATEST:
            made.end(number, 500, False)
    made.close()


def test_rings_that_begin_at_other_calls_are_laid_over_one_another_by_number_whatever_their_files_are_called(
    tmp_path: Path,
) -> None:
    """P62: each rank's buffer of 2,000 entries began elsewhere, one was empty, names held a host and a rank."""
    for rank, (first, last) in enumerate(((11_000, 12_900), (11_400, 12_900), (10_950, 12_880), (12_500, 12_900))):
        _flight(tmp_path / f"x_host{'BADC'[rank]}_{7 - rank}.ring", rank, first, last)
    flights, notes = read_rings(tmp_path)
    running = {rank: Process(is_here=True, lives=True) for rank in range(4)}
    views = views_of({flight.words[ring.RANK]: flight for flight in flights}, running, 90 * 10**9)
    found = explain(views, world_size=4)
    assert found is not None and notes == []
    assert (found.verdict.cause, found.verdict.ranks) == ("missing_rank", "2")
    assert found.consequences[0].function == "allreduce 12900 of default_pg"


def test_a_rank_whose_recorder_is_empty_is_named_as_such_and_not_blamed_for_a_call(tmp_path: Path) -> None:
    """P62: ranks with empty or missing dumps; operations in coalesced calls when the buffer does not begin at zero."""
    views = []
    for rank in range(4):
        entries = [
            {
                "process_group": ["0", "default_pg"], "collective_seq_id": sequence, "is_p2p": False,
                "profiling_name": "nccl:all_reduce", "input_sizes": [[8]], "input_dtypes": ["Float"],
                "state": "completed" if sequence < 7000 else "started", "retired": sequence < 7000,
            }
            for sequence in range(5001 + 13 * rank, 7001)
        ]  # fmt: skip
        config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
        path = tmp_path / f"rank{rank}-1.fr.json"
        path.write_text(json.dumps({"entries": entries if rank != 3 else [], "pg_config": config}))
        bare = RankView(rank=rank, state="running", is_recording=False, silent_s=60.0, no_stack="no stacks: x")
        views.append(with_recorder(bare, path))
    assert [len(view.calls) for view in views] == [2000, 1987, 1974, 0]
    found = explain(views, world_size=4)
    assert found is not None and (found.verdict.cause, found.verdict.ranks) == ("unknown", "3")
    assert "left no data" in found.verdict.summary


def test_a_rank_that_holds_the_gil_is_told_before_its_stack_and_with_it() -> None:
    """P64: a dump that needs the interpreter never comes from the rank that matters. So first the positions alone, by
    the ring, which no lock guards; then the stack, from outside."""
    world = Group("a" * 16, "default_pg", (0, 1))
    stuck = RankView(
        rank=1, state="running", groups=(world,), calls=(Call(world.key, 1, "allreduce", "done"),), silent_s=60.0,
        knows_all_groups=True, no_stack="no stacks: x",
    )  # fmt: skip
    waits = replace(stuck, rank=0, calls=(*stuck.calls, Call(world.key, 2, "allreduce", "in")))
    first = explain([waits, stuck], world_size=2)
    assert first is not None and (first.verdict.ranks, first.verdict.confidence) == ("1", "supported")
    held = Thread("MainThread", (Frame("parse", "/home/u/data.py", 7, "library.parse(x)"),), is_main=True, has_gil=True)
    second = explain([waits, replace(stuck, threads=(held,), no_stack="")], world_size=2)
    assert second is not None and second.verdict.ranks == "1" and "holding the GIL" in second.verdict.summary
    other = replace(held, name="reader", is_main=False)
    behind = replace(held, has_gil=False, frames=(Frame("step", "/home/u/train.py", 3, "x = f(x)"),))
    third = explain([waits, replace(stuck, threads=(behind, other), no_stack="")], world_size=2)
    assert third is not None and third.verdict.cause == "gil_contention" and "thread reader" in third.verdict.summary


def test_a_million_steps_leave_a_ring_and_a_watcher_of_the_same_size(tmp_path: Path) -> None:
    """P65: a detector's history grew without bound."""
    path = tmp_path / "rank0.ring"
    made = Ring.create(path, rank=0, world_size=1, capacity=1024)
    size = path.stat().st_size
    first = 10**6 - 20_000
    for step in range(first, 10**6):
        made.end(made.begin(what(STEP), step * 1000, -1, 1, step + 1, 0, step), 500, False)
    made.set(ring.NUM_STEPS, 10**6)
    made.close()
    assert path.stat().st_size == size
    flight = ring.read_flight(path)
    assert len(flight.records) <= 1024 and flight.words[ring.NUM_STEPS] == 10**6
    judge = Degradation()
    for number in range(2_000):
        judge.add(iteration(number, number * 10**8, 0.1))
    assert len(judge.history) <= 300 and len(judge.triggers) <= 64


def test_asking_for_the_environment_opens_no_device() -> None:
    """P65: where a device is in exclusive mode, a context of our own would take it from the training."""

    def refuses(*_: object) -> int:
        raise RuntimeError("all CUDA-capable devices are busy or unavailable")

    cuda = SimpleNamespace(is_initialized=lambda: False, current_device=refuses, get_device_name=refuses)
    torch = ModuleType("torch")
    torch.__dict__.update(__version__="2.13", cuda=cuda, version=SimpleNamespace(cuda="12.9", hip=None))
    assert _torch(torch)["torch.cuda"] == "12.9"


def test_a_stack_that_is_cut_says_so_and_its_end_is_nobodys_line() -> None:
    """P67: recursion of a thousand frames; what is left out must not look as if the stack ended there."""
    deep = [{"name": "walk", "filename": "/v/site-packages/x/tree.py", "line": 9} for _ in range(1000)]
    (seen,) = stacks._parsed([{"frames": deep, "os_thread_id": 5, "thread_name": "MainThread"}], 5)
    last = seen.thread.frames[-1]
    assert len(seen.thread.frames) < 300 and "more frames" in last.function and not last.is_users
    assert user_frame(seen.thread) is None
    text = (
        "Current thread 0x1 (most recent call first):\n" + '  File "/v/site-packages/x/tree.py", line 9 in walk\n' * 999
    )
    assert "more frames" in stacks.parse_faulthandler(text)[0].frames[-1].function


def test_an_interpreter_that_the_sampler_does_not_know_is_told_in_its_words() -> None:
    """P67: Python one minor version newer; the interpreter not found from the host."""
    said = stacks._reason(1, "Error: Failed to find python version from target process\nReason: x\n")
    assert said == "no stacks: py-spy said 'Error: Failed to find python version from target process'"
