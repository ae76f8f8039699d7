"""Who owns each instant of a rank's window (design section 4, "Critical path"), by hand and against brute force."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eroica.critical_path import OWN_WORK, Activity, CriticalPath, critical_spans, iterations_of
from eroica.trace import Category, Trace, read_trace
from tests.handmade import Comm, Event, call, copy, frame, kernel, mark, op, trace
from tests.test_intervals import Spans, by_start, innermost, trees
from tests.traces import TRACES

WAIT_FOR_WORK = "<built-in method wait of torch._C._distributed_c10d.Work object at 0x7f>"
BACKWARD = "<built-in method run_backward of torch._C._EngineBase object at 0x7f>"
MM_BACKWARD = "autograd::engine::evaluate_function: MmBackward0"
Owned = dict[tuple[str, str], int]


def owned(made: Trace, path: CriticalPath | None = None) -> Owned:
    """(event's name, activity) -> nanoseconds."""
    path = path or critical_spans(made)
    total: Counter[tuple[str, str]] = Counter()
    for event, activity, ns in zip(path.event, path.activity, path.owned_ns, strict=True):
        total[made.strings[made.name[event]], Activity(activity).name] += int(ns)
    return dict(total)


def step(end: int, start: int = 0, number: int = 0) -> Event:
    return mark(f"ProfilerStep#{number}", start, end - start)


# --- against brute force -------------------------------------------------------------------------------------------

HOST_KINDS = ("op", "frame", "wait", "label")
some_spans = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 15)).map(lambda p: (p[0], p[0] + p[1])), max_size=5)


def host_event(kind: str, k: int, span: tuple[int, int]) -> Event:
    start, length = span[0], span[1] - span[0]
    return {
        "op": op(f"aten::op{k}", start, length),
        "frame": frame(f"train.py({k}): f{k}", start, length),
        "wait": frame(WAIT_FOR_WORK, start, length),
        "label": mark(f"range {k}", start, length),
    }[kind]


def brute_force(compute: Spans, memory: Spans, collectives: Spans, host: Spans, kinds: list[str]) -> Owned:
    """Instant by instant: the strongest kind, of that the earliest sibling, or on the host the innermost event."""
    total: Counter[tuple[str, str]] = Counter()

    def first(some: Spans, t: int) -> int | None:
        return next((k for k, (s, e) in enumerate(some) if s <= t < e), None)

    for t in range(60):
        k = innermost(host, t)
        open_now = [j for j in range(k + 1) if host[j][0] <= t < host[j][1]]
        inside_wait = any(kinds[j] == "wait" for j in open_now)
        while k >= 0 and kinds[k] == "label":
            k = max((j for j in range(k) if host[j][0] <= t < host[j][1]), default=-1)
        own, waits = k >= 0 and not inside_wait, k >= 0 and inside_wait
        if (c := first(compute, t)) is not None:
            total[f"gemm{c}", "COMPUTE"] += 1
        elif (c := first(memory, t)) is not None:
            total[f"Memcpy{c}", "MEMORY"] += 1
        elif (c := first(collectives, t)) is not None:
            total[f"nccl{c}", "COLLECTIVE"] += 1
        elif own or waits:
            event = host_event(kinds[k], k, host[k])
            activity = "WAIT" if waits else "OPERATOR" if kinds[k] == "op" else "PYTHON"
            total[event.name, activity] += 1
    return dict(total)


@given(some_spans, some_spans, some_spans, trees(), st.data())
def test_every_instant_belongs_to_the_strongest_kind_the_earliest_sibling_the_innermost_event(
    compute: Spans, memory: Spans, collectives: Spans, host: Spans, data: st.DataObject
) -> None:
    compute, memory, collectives, host = sorted(compute), sorted(memory), sorted(collectives), by_start(host)
    kinds = [data.draw(st.sampled_from(HOST_KINDS)) for _ in host]
    made = trace(
        [
            step(60),
            *(kernel(f"gemm{k}", s, e - s, thread=f"stream {k}") for k, (s, e) in enumerate(compute)),
            *(copy(f"Memcpy{k}", s, e - s, thread=f"stream 2{k}") for k, (s, e) in enumerate(memory)),
            *(kernel(f"nccl{k}", s, e - s, thread=f"stream 3{k}", comm=Comm()) for k, (s, e) in enumerate(collectives)),
            *(host_event(kind, k, span) for k, (kind, span) in enumerate(zip(kinds, host, strict=True))),
        ]
    )
    same_start = len({s for s, _ in compute}) == len(compute) and len({s for s, _ in memory}) == len(memory)
    ours, theirs = owned(made), brute_force(compute, memory, collectives, host, kinds)
    if not same_start or len({s for s, _ in collectives}) < len(collectives):
        # Events that start together are told apart by length; only the kinds' totals are fixed then.
        ours, theirs = by_kind(ours), by_kind(theirs)
    assert ours == theirs


def by_kind(some: Owned) -> Owned:
    total: Counter[tuple[str, str]] = Counter()
    for (name, activity), ns in some.items():
        total["" if activity in ("COMPUTE", "MEMORY", "COLLECTIVE") else name, activity] += ns
    return dict(total)


@given(st.data())
def test_shares_sum_to_at_most_one_whatever_the_events(data: st.DataObject) -> None:
    names = [
        "aten::mm",
        "train.py(3): f",
        WAIT_FOR_WORK,
        BACKWARD,
        MM_BACKWARD,
        "cudaStreamSynchronize",
        "cudaMalloc",
        "gloo:all_reduce",
        "torch/profiler/profiler.py(8): step",
        "nn.Module: Linear_0",
        "Python GC",
        "ProfilerStep#3",
        "Optimizer.step#SGD.step",
    ]
    events = [
        Event(
            data.draw(st.sampled_from(names)),
            data.draw(st.integers(0, 80)),
            data.draw(st.integers(0, 40)),
            data.draw(st.sampled_from(list(Category))),
            thread=data.draw(st.sampled_from("123")),
            correlation=data.draw(st.integers(0, 2)),
            comm=data.draw(st.sampled_from([None, None, None, Comm(), Comm(transfers=False)])),
        )
        for _ in range(data.draw(st.integers(0, 15)))
    ]
    made = trace(events)
    path = critical_spans(made)
    window = path.iterations.window_ns
    assert path.owned_ns.sum() <= window and 0 <= path.explained <= 1
    assert (path.owned_ns > 0).all() and (path.owned_ns <= path.end_ns - path.start_ns).all()
    assert (
        np.bincount(path.iteration, path.owned_ns, path.iterations.count) <= np.diff(path.iterations.bounds_ns)
    ).all()


@pytest.mark.parametrize("path", sorted(TRACES.rglob("*.json.gz")), ids=lambda path: str(path.name))
def test_shares_of_real_traces_sum_to_at_most_one(path: object) -> None:
    spans = critical_spans(read_trace(str(path)))
    owned_ns = np.bincount(spans.iteration, spans.owned_ns, spans.iterations.count)
    assert (owned_ns <= np.diff(spans.iterations.bounds_ns) + 1).all()


@given(trees(), st.permutations(["3", "4", "5"]))
def test_renaming_threads_changes_nothing(host: Spans, threads: list[str]) -> None:
    events = [step(60), *(op(f"aten::op{k}", s, e - s) for k, (s, e) in enumerate(host))]
    events += [kernel("gemm", 20, 10), op(MM_BACKWARD, 5, 20, thread="2"), op("aten::bmm", 6, 3, thread="2")]
    names = {"1": threads[0], "2": threads[1], "stream 7": threads[2]}
    renamed = [replace(e, thread=names[e.thread]) for e in events]
    assert owned(trace(events)) == owned(trace(renamed))


# --- by hand -------------------------------------------------------------------------------------------------------


def test_an_idle_device_after_a_sync_that_drained_it_belongs_to_the_sync() -> None:
    made = trace(
        [
            step(100),
            kernel("gemm", 0, 40),
            kernel("gemm", 70, 30),
            call("cudaStreamSynchronize", 10, 35),
            op("aten::mm", 50, 10),
            call("cudaLaunchKernel", 62, 5, correlation=3),
        ]
    )
    assert owned(made) == {("gemm", "COMPUTE"): 70, ("cudaStreamSynchronize", "SYNC"): 30}


def test_a_sync_after_which_the_device_goes_on_owns_nothing() -> None:
    made = trace([step(100), kernel("gemm", 0, 100), call("cudaStreamSynchronize", 10, 35)])
    assert owned(made) == {("gemm", "COMPUTE"): 100}


def test_an_idle_device_that_no_sync_drained_belongs_to_the_host() -> None:
    made = trace([step(100), kernel("gemm", 0, 40), kernel("gemm", 70, 30), op("aten::mm", 38, 32)])
    assert owned(made) == {("gemm", "COMPUTE"): 70, ("aten::mm", "OPERATOR"): 30}


def test_input_that_follows_a_sync_keeps_its_own_time() -> None:
    made = trace(
        [
            step(100),
            kernel("gemm", 0, 40),
            kernel("gemm", 90, 10),
            call("cudaStreamSynchronize", 10, 35),
            mark("enumerate(DataLoader)#_Iter.__next__", 46, 40),
        ]
    )
    found = owned(made)
    assert found["enumerate(DataLoader)#_Iter.__next__", "INPUT"] == 40 and found["cudaStreamSynchronize", "SYNC"] == 10


def test_the_autograd_thread_drives_while_the_main_thread_waits_in_backward_and_owns_what_it_leaves_no_event_for() -> (
    None
):
    made = trace(
        [step(100), frame(BACKWARD, 10, 80), op(MM_BACKWARD, 20, 40, thread="2"), op("aten::mm", 25, 30, thread="2")]
    )
    assert owned(made) == {
        ("aten::mm", "OPERATOR"): 30,
        (MM_BACKWARD, "PYTHON"): 10,
        (BACKWARD, "PYTHON"): 40,
    }


def test_a_users_hook_inside_of_the_engines_wrapper_owns_its_time() -> None:
    made = trace(
        [
            step(100),
            frame(BACKWARD, 0, 100),
            op(MM_BACKWARD, 0, 100, thread="2"),
            frame("train.py(30): slow_hook", 20, 70, thread="2"),
        ]
    )
    assert owned(made) == {("train.py(30): slow_hook", "PYTHON"): 70, (MM_BACKWARD, "PYTHON"): 30}


def test_steps_that_end_inside_of_the_next_profiler_call_do_not_break_nesting() -> None:
    made = trace(
        [
            step(52, number=7),
            step(100, 50, number=8),
            frame("torch/profiler/profiler.py(800): step", 48, 6),
            frame("train.py(3): main", 0, 100),
            op("aten::mm", 60, 30),
        ]
    )
    path = critical_spans(made)
    assert path.iterations.steps.tolist() == [7, 8] and path.iterations.bounds_ns.tolist() == [0, 50, 100]
    found = owned(made, path)
    assert found == {("train.py(3): main", "PYTHON"): 64, ("aten::mm", "OPERATOR"): 30}


def test_a_span_over_an_iteration_boundary_is_shared_out() -> None:
    made = trace([step(50, number=0), step(100, 50, number=1), op("aten::mm", 30, 60)])
    path = critical_spans(made)
    assert np.bincount(path.iteration, path.owned_ns).tolist() == [20, 40]


def test_a_wait_owns_nothing_while_the_collective_itself_is_there() -> None:
    gloo = mark("gloo:all_reduce", 10, 50, thread="9", comm=Comm())
    made = trace([step(100), frame(WAIT_FOR_WORK, 5, 75), gloo])
    assert owned(made) == {("gloo:all_reduce", "COLLECTIVE"): 50, (WAIT_FOR_WORK, "WAIT"): 25}


def test_communication_behind_own_work_on_a_cpu_job_owns_only_what_work_leaves() -> None:
    gloo = mark("gloo:all_reduce", 10, 50, thread="9", comm=Comm())
    made = trace([step(100), op("aten::mm", 0, 40), gloo])
    assert owned(made) == {("aten::mm", "OPERATOR"): 40, ("gloo:all_reduce", "COLLECTIVE"): 20}


def test_labels_pass_their_time_on_to_the_frame_around_them_and_the_profiler_owns_nothing() -> None:
    made = trace(
        [
            step(100),
            frame("train.py(3): main", 0, 100),
            mark("my range", 10, 20),
            frame("nn.Module: Linear_0", 40, 20),
            frame("torch/profiler/profiler.py(8): step", 70, 20),
            op("aten::zeros", 75, 10),
        ]
    )
    assert owned(made) == {("train.py(3): main", "PYTHON"): 80}


def test_device_events_know_the_users_line_that_launched_them() -> None:
    made = trace(
        [
            step(100),
            frame("train.py(41): step", 0, 40),
            frame("torch/nn/functional.py(9): linear", 5, 30),
            call("cudaLaunchKernel", 10, 5, correlation=9),
            kernel("gemm", 50, 30, correlation=9),
        ]
    )
    path = critical_spans(made)
    (row,) = np.flatnonzero(path.activity == Activity.COMPUTE)
    assert made.strings[made.name[path.user_frame[row]]] == "train.py(41): step"
    assert made.strings[made.name[path.frame[row]]] == "torch/nn/functional.py(9): linear"


def test_threads_off_the_path_are_kept_with_their_share() -> None:
    made = trace([step(100), op("aten::mm", 0, 100), frame("worker.py(3): spin", 10, 60, thread="5")])
    path = critical_spans(made)
    assert owned(made, path) == {("aten::mm", "OPERATOR"): 100}
    assert [(made.tracks[t[0]][1], t[1]) for t in path.threads] == [("5", 0.6)]


def test_allocator_and_gc_and_checkpoint_are_told_from_other_host_time() -> None:
    made = trace(
        [
            step(100),
            op("aten::empty", 0, 20),
            call("cudaMalloc", 5, 10),
            mark("Python GC", 30, 10),
            frame("torch/serialization.py(850): save", 50, 30),
            op("aten::copy_", 55, 20),
        ]
    )
    found = owned(made)
    assert found["cudaMalloc", "ALLOCATOR"] == 10 and found["Python GC", "GC"] == 10
    assert found["aten::copy_", "CHECKPOINT"] == 20 and found["torch/serialization.py(850): save", "CHECKPOINT"] == 10
    assert {Activity.ALLOCATOR, Activity.GC, Activity.CHECKPOINT} <= OWN_WORK


def test_iterations_fall_back_to_optimizer_steps_and_then_to_the_window() -> None:
    steps = [mark("Optimizer.step#SGD.step", 10 + 30 * k, 5) for k in range(4)]
    assert iterations_of(trace([op("aten::mm", 0, 120), *steps])).bounds_ns.tolist() == [15, 45, 75, 105]
    bursts = [mark("Optimizer.step#SGD.step", 10 + 30 * k + j, 1) for k in range(4) for j in range(3)]
    assert iterations_of(trace([op("aten::mm", 0, 120), *bursts])).bounds_ns.tolist() == [13, 43, 73, 103]
    assert iterations_of(trace([op("aten::mm", 3, 120)])).by == "window"


def test_a_step_within_a_step_and_optimizers_that_take_turns_end_one_iteration() -> None:
    outer = [mark("Optimizer.step#Sharded.step", 100 * k, 50) for k in range(4)]
    inner = [mark("Optimizer.step#AdamW.step", 100 * k + 10, 10) for k in range(4)]
    assert iterations_of(trace([*outer, *inner])).bounds_ns.tolist() == [50, 150, 250, 350]
    turns = [mark(f"Optimizer.step#{'AB'[k % 2]}.step", 100 * (k // 2) + 40 * (k % 2), 10) for k in range(8)]
    assert iterations_of(trace(turns)).bounds_ns.tolist() == [50, 150, 250, 350]
    assert iterations_of(trace(turns[:-1])).bounds_ns.tolist() == [50, 150, 250]
    batches = [mark("enumerate(DataLoader)#_Iter.__next__", 50 * k + 20, 5) for k in range(8)]
    assert len(iterations_of(trace([*turns, *batches])).bounds_ns) == 8, "with a batch each, nothing says that they are"


def test_steps_with_a_batch_between_them_are_no_burst_however_short_beside_one_long_step() -> None:
    ends = [15, 45, 75, 575, 605]
    steps = [mark("Optimizer.step#SGD.step", end - 5, 5) for end in ends]
    fetches = [mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", end + 2, 3) for end in ends[:-1]]
    assert iterations_of(trace([op("aten::mm", 0, 700), *steps, *fetches])).bounds_ns.tolist() == ends


def test_a_trace_without_events_has_no_critical_path() -> None:
    assert critical_spans(trace([])).explained == 0.0


@pytest.mark.parametrize("number", ["²", "9" * 40, "", "-3", "1.5"])
def test_steps_with_odd_numbers_are_no_reason_to_fail(number: str) -> None:
    made = trace([mark(f"ProfilerStep#{number}", 0, 50), op("aten::mm", 10, 30)])
    assert critical_spans(made).explained > 0


def convolution(*, waits: int) -> Trace:
    """A convolution that takes 80 us, and waits for the device so many times while it does."""
    calls = [call("cudaEventSynchronize", 12 + 10 * k, 8) for k in range(waits)]
    events = [step(100), frame("model.py(57): forward", 0, 100), op("aten::cudnn_convolution", 10, 80), *calls]
    return trace([*events, kernel("gemm", 95, 5)])


def test_an_operator_that_waits_for_the_device_again_and_again_searches_for_kernels() -> None:
    searching = critical_spans(convolution(waits=6))
    assert {int(a) for a in searching.activity} >= {Activity.COMPILE} and Activity.SYNC not in searching.activity
    assert int(searching.owned_ns[searching.activity == Activity.COMPILE].sum()) == 80


def test_an_operator_that_waits_once_does_not_search() -> None:
    usual = critical_spans(convolution(waits=1))
    assert Activity.COMPILE not in usual.activity
