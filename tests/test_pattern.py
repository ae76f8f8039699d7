"""Behaviour patterns of one rank, and the stack of many (design section 4, "Pattern")."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eroica.critical_path import Activity
from eroica.job import ProcessGroup
from eroica.names import Phase
from eroica.pattern import MAX_FUNCTIONS, Function, Summary, stack, summarize
from eroica.trace import Samples
from eroica.utilisation import MU_SOURCES, shortest_dense_part
from tests import handmade as h


def summary_of(*events: h.Event, samples: Samples | None = None, rank: int = 0) -> Summary:
    return summarize(h.trace([h.mark("ProfilerStep#0", 0, 100 * h.MS), *events], rank=rank), samples)


def row(summary: Summary, name: str) -> dict[str, float]:
    patterns = summary.patterns
    (k,) = [k for k, f in enumerate(patterns.functions) if f.name == name]
    told = {c: float(getattr(patterns, c)[k]) for c in ("beta", "mu", "sigma", "count", "work")}
    return {**told, "source": int(patterns.mu_source[k])}


def counters(**values: list[float]) -> Samples:
    """Every 10 ms over the step."""
    count = len(next(iter(values.values())))
    return Samples(np.arange(count) * 10 * h.MS, {name: np.array(v) for name, v in values.items()})


@given(st.lists(st.floats(0, 100), max_size=12))
def test_the_dense_part_is_the_shortest_that_holds_four_fifths_as_by_brute_force(values: list[float]) -> None:
    a, b = shortest_dense_part(np.array(values))
    if sum(values) <= 0:
        assert (a, b) == (0, len(values))
        return
    wanted = 0.8 * sum(values) * (1 - 1e-9)
    parts = [
        (j - i, i) for i in range(len(values)) for j in range(i + 1, len(values) + 1) if sum(values[i:j]) >= wanted
    ]
    shortest = min(parts)[0]
    assert sum(values[a:b]) >= 0.8 * sum(values) * (1 - 1e-6)
    assert b - a <= shortest or math.isclose(sum(values[a : a + shortest]), 0.8 * sum(values), rel_tol=1e-6)
    assert b - a >= shortest or math.isclose(sum(values[a:b]), 0.8 * sum(values), rel_tol=1e-6)


def test_waiting_without_traffic_falls_out_of_the_dense_part() -> None:
    assert shortest_dense_part(np.array([0.0, 0.0, 0.0, 5.0, 5.0, 0.0])) == (3, 5)


def test_beta_is_the_share_of_the_window_that_a_function_owns() -> None:
    made = summary_of(
        h.kernel("gemm", 0, 30 * h.MS), h.kernel("gemm", 40 * h.MS, 10 * h.MS), h.op("aten::mm", 0, 60 * h.MS)
    )
    assert row(made, "gemm")["beta"] == pytest.approx(0.4) and row(made, "gemm")["count"] == 2
    assert row(made, "aten::mm")["beta"] == pytest.approx(0.2)
    assert made.coverage.explained == pytest.approx(0.6)


def test_what_is_not_measured_is_nan_and_never_zero() -> None:
    made = row(summary_of(h.kernel("gemm", 0, 30 * h.MS)), "gemm")
    assert math.isnan(made["mu"]) and math.isnan(made["sigma"]) and math.isnan(made["work"]) and made["source"] == 0


def test_without_counters_mu_is_what_the_trace_itself_holds() -> None:
    made = summary_of(
        h.kernel("gemm", 0, 30 * h.MS, occupancy=0.5, work=64),
        h.kernel("gemm", 40 * h.MS, 10 * h.MS, occupancy=0.9, work=16),
        h.copy("Memcpy HtoD (Pinned -> Device)", 60 * h.MS, h.MS, bandwidth=32.0, work=4096),
    )
    gemm, moved = row(made, "gemm"), row(made, "Memcpy HtoD")
    assert gemm["mu"] == pytest.approx(0.6) and gemm["work"] == 80 and MU_SOURCES[int(gemm["source"])] == "occupancy"
    assert gemm["sigma"] == pytest.approx(math.sqrt(0.75 * 0.1**2 + 0.25 * 0.3**2), rel=1e-5)
    assert moved["mu"] == pytest.approx(0.5) and MU_SOURCES[int(moved["source"])] == "copy_bandwidth"


def test_counters_stand_before_what_the_trace_holds() -> None:
    clock = counters(sm_clock_ratio=[1.0, 0.7, 0.7, 0.7, 0.7, 1.0, 1.0, 1.0, 1.0, 1.0])
    made = row(summary_of(h.kernel("gemm", 10 * h.MS, 31 * h.MS, occupancy=0.1), samples=clock), "gemm")
    assert made["mu"] == pytest.approx(0.7) and MU_SOURCES[int(made["source"])] == "sm_clock"


def test_ranks_of_like_groups_that_nobody_has_described_have_one_function() -> None:
    def told(name: str, ranks: tuple[int, ...]) -> str:
        events = [h.mark("ProfilerStep#0", 0, 100 * h.MS), h.kernel("nccl", 0, 90 * h.MS, comm=h.Comm())]
        return summarize(h.trace(events, groups=[ProcessGroup(name, "", ranks, 2)])).patterns.functions[0].name

    assert told("17", (0, 1)) == told("23", (2, 3)) == "all_reduce [group of 2]"


def test_a_collectives_waiting_falls_out_of_its_utilisation() -> None:
    nic = counters(nic_gbps=[0, 0, 0, 0, 0, 0, 200, 200, 200, 0])
    made = summary_of(h.kernel("nccl", 0, 90 * h.MS, comm=h.Comm()), samples=nic)
    assert row(made, "all_reduce [default_pg]")["mu"] == pytest.approx(0.5)


def test_counters_that_were_not_read_leave_nan() -> None:
    clock = counters(sm_clock_ratio=[float("nan")] * 10)
    assert math.isnan(row(summary_of(h.kernel("gemm", 10 * h.MS, 5 * h.MS), samples=clock), "gemm")["mu"])


def test_a_counter_that_was_never_read_leaves_what_the_trace_holds() -> None:
    clock = counters(sm_clock_ratio=[float("nan")] * 10)
    made = row(summary_of(h.kernel("gemm", 10 * h.MS, 5 * h.MS, occupancy=0.4), samples=clock), "gemm")
    assert made["mu"] == pytest.approx(0.4) and MU_SOURCES[int(made["source"])] == "occupancy"


def test_with_run_queue_delay_a_host_functions_mu_is_the_share_of_the_core_that_it_wanted_and_got() -> None:
    half = [0.2] * 10
    shared = counters(cpu_ratio=half, runqueue_ratio=half)
    alone = counters(cpu_ratio=half, runqueue_ratio=[0.0] * 10)
    idle = counters(cpu_ratio=[0.0] * 10, runqueue_ratio=[0.0] * 10)
    told = [row(summary_of(h.op("aten::mm", 0, 60 * h.MS), samples=s), "aten::mm") for s in (shared, alone, idle)]
    assert told[0]["mu"] == pytest.approx(0.5) and MU_SOURCES[int(told[0]["source"])] == "cpu_granted"
    assert told[1]["mu"] == 1, "a thread that sleeps much still gets all that it wants"
    assert math.isnan(told[2]["mu"]), "a thread that wanted nothing says nothing"


def test_the_forty_functions_that_own_most_are_told_and_the_largest_left_out_is_the_cut_off() -> None:
    made = summary_of(
        *(h.kernel(f"gemm{chr(97 + k % 26)}{chr(97 + k // 26)}", k * h.MS, 10_000 * (k + 1)) for k in range(60))
    )
    assert len(made.patterns.functions) == MAX_FUNCTIONS
    assert made.patterns.cutoff == pytest.approx(20 * 10_000 / (100 * h.MS))
    assert (made.patterns.beta > made.patterns.cutoff).all() and (np.diff(made.patterns.beta) <= 0).all()
    assert made.patterns.activity_beta[Activity.COMPUTE] == pytest.approx(sum(range(1, 61)) * 10_000 / (100 * h.MS))


def test_a_host_function_is_known_by_its_place_and_the_users_line() -> None:
    made = summary_of(
        h.frame("train.py(41): step", 0, 90 * h.MS),
        h.frame("torch/nn/functional.py(9): linear", 10 * h.MS, 50 * h.MS),
        h.op("aten::linear", 20 * h.MS, 30 * h.MS),
    )
    function = next(f for f in made.patterns.functions if f.name == "aten::linear")
    assert (function.location, function.user_location) == ("torch/nn/functional.py:9", "train.py:41")
    assert function.kind == "operator" and function.phase == Phase.NONE


def test_a_wrapper_and_the_built_in_of_the_same_name_that_it_calls_are_one_function() -> None:
    made = summary_of(
        h.frame("train.py(41): wait_for", 0, 90 * h.MS),
        h.frame("<built-in method wait_for of Thing object at 0x7f>", 10 * h.MS, 50 * h.MS),
    )
    assert [f.name for f in made.patterns.functions] == ["wait_for"]
    assert row(made, "wait_for")["beta"] == pytest.approx(0.9)


def test_kernels_that_differ_only_in_template_noise_are_one_function() -> None:
    made = summary_of(
        h.kernel("void gemm<float, 128>(float*)", 0, 10 * h.MS),
        h.kernel("void gemm<float, 64>(float*)", 20 * h.MS, h.MS),
    )
    assert [f.name for f in made.patterns.functions] == ["gemm"]


def test_an_empty_trace_gives_an_empty_summary() -> None:
    made = summarize(h.trace([]))
    assert not made.patterns.functions and made.coverage.explained == 0 and not len(made.ledger.kind)


def test_launches_without_device_events_are_reported_as_a_failed_recording() -> None:
    launches = [h.call("cudaLaunchKernel", k * 1000, 500, correlation=k + 1) for k in range(30)]
    made = summary_of(*launches)
    assert made.coverage.partial and any(
        "device side of this rank was not recorded" in note for note in made.coverage.notes
    )


def test_the_function_that_exceeds_its_own_median_most_is_told_for_each_iteration() -> None:
    events = []
    for s in range(6):
        start = s * 10 * h.MS
        longer = 3 if s == 4 else 1
        events += [
            h.mark(f"ProfilerStep#{s}", start, 10 * h.MS),
            h.kernel("gemm", start, longer * h.MS, work=100 * longer),
        ]
        events.append(h.kernel("other", start + 5 * h.MS, 2 * h.MS))
    made = summarize(h.trace(events))
    top = made.ledger.top_function[4]
    assert made.patterns.functions[top].name == "gemm" and made.ledger.top_excess_s[4] == pytest.approx(0.002)
    assert made.ledger.top_by_work[4] == pytest.approx(1.0) and made.ledger.top_excess_s[3] == 0


# --- stack ---------------------------------------------------------------------------------------------------------


def ranks() -> list[Summary]:
    return [
        summary_of(
            h.kernel("gemm", 0, (20 + k) * h.MS, occupancy=0.5),
            *([h.op("aten::mm", 50 * h.MS, 9 * h.MS)] if k else []),
            rank=k,
        )
        for k in range(4)
    ]


@given(st.permutations(range(4)))
def test_the_order_of_summaries_does_not_matter_to_the_stack(order: list[int]) -> None:
    some = ranks()
    ours, theirs = stack(some), stack([some[k] for k in order])
    assert ours.functions == theirs.functions and ours.hosts == theirs.hosts
    for name in ("ranks", "beta", "mu", "sigma", "work", "own_s", "length_s", "cutoff", "iteration_s", "top_function"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
    np.testing.assert_array_equal(np.sort(ours.joined.transfer_s), np.sort(theirs.joined.transfer_s))


def test_a_function_that_a_rank_lacks_has_beta_zero_and_an_unknown_mu() -> None:
    stacked = stack(ranks())
    k = [f.name for f in stacked.functions].index("aten::mm")
    assert stacked.beta[0, k] == 0 and np.isnan(stacked.mu[0, k]) and np.isnan(stacked.count[0, k])
    assert stacked.beta[1, k] > 0


def test_ranks_meet_at_step_numbers_and_not_at_places() -> None:
    one, other = h.job([h.Rank(own=[1, 2, 3, 4]), h.Rank(own=[5, 6, 7, 8])], num_steps=4)
    stacked = stack([one, h.less(other, steps=other.ledger.steps + 2)])
    assert stacked.steps.tolist() == [0, 1, 2, 3, 4, 5]
    np.testing.assert_array_equal(stacked.own_s, [[1, 2, 3, 4, np.nan, np.nan], [np.nan, np.nan, 5, 6, 7, 8]])


def test_two_summaries_of_one_rank_are_the_callers_error() -> None:
    with pytest.raises(ValueError, match="same rank"):
        stack([ranks()[0], ranks()[0]])


def test_nothing_stacks_to_nothing() -> None:
    assert len(stack([])) == 0


def test_the_world_is_what_traces_tell_or_what_was_seen() -> None:
    one = h.summary(5, h.Rank())
    assert stack([replace(one, world_size=128)]).world_size == 128
    assert stack([replace(one, world_size=None, groups=())]).world_size == 6


def test_launched_at_and_phase_are_no_part_of_a_functions_identity() -> None:
    one = Function(Activity.COMPUTE, "gemm", None, None, Phase.BACKWARD, "a.py:3")
    assert one == Function(Activity.COMPUTE, "gemm", None, None)


@pytest.mark.parametrize(("call_us", "blocks"), [(60, True), (5, False)])
def test_launch_calls_that_outlast_their_kernels_block(call_us: int, blocks: bool) -> None:
    events: list[h.Event] = []
    for k in range(30):
        at = k * 100_000
        events.append(h.call("cudaLaunchKernel", at, call_us * 1_000, correlation=k + 1))
        events.append(h.kernel("gemm", at + 4_000, 50_000, correlation=k + 1))
    assert summary_of(*events).coverage.launches_block is blocks


def test_a_kernel_that_only_searches_launch_says_so() -> None:
    inside = [h.call("cudaEventSynchronize", k * 1_000, 900) for k in range(1, 5)]
    launch = h.call("cudaLaunchKernel", 500, 100, correlation=1)
    trial = h.kernel("trial", 2_000, 400, correlation=1)
    usual = [h.call("cudaLaunchKernel", 20_000, 100, correlation=2), h.kernel("usual", 30_000, 400, correlation=2)]
    made = summary_of(h.op("aten::cudnn_convolution", 0, 9_000), launch, *inside, trial, *usual)
    phases = {f.name: f.phase for f in made.patterns.functions}
    assert (phases["trial"], phases["usual"]) == (Phase.TUNING, Phase.NONE)
