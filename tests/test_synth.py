"""Synthetic clusters are causal, honest about effects, and equal in memory and in a file; scores follow the rules."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from eroica.findings import (
    CAUSES,
    SCOPES,
    Coverage,
    Diagnosis,
    Finding,
    FunctionName,
    Impact,
    Iteration,
    PatternValues,
    Verdict,
    Window,
)
from eroica.trace import Category, Trace, read_trace
from evals import synthetic
from evals.cases_synth import BY_ID, CASES, Case
from evals.faults import mean_iteration_ns
from evals.kineto_file import write_json
from evals.program import simulate
from evals.score import score
from evals.synth import Cluster, cluster

DEVICE = (Category.KERNEL, Category.COPY, Category.MEMSET)


def named(trace: Trace, ids: npt.NDArray[np.int32]) -> list[str]:
    return [trace.strings[i] if i >= 0 else "" for i in ids]


def finding(cause: str, scope: str, ranks: str, function: FunctionName | None, hosts: tuple[str, ...] = ()) -> Finding:
    empty = PatternValues()
    impact = Impact(0.001, 0.1, "ledger")
    return Finding(
        id="F1", cause=cause, scope=scope, ranks=ranks, hosts=hosts, steps="stable", function=function, pattern=empty,
        peers=empty, expected=empty, distance=None, delta=None, impact=impact, confidence="supported", evidence=(),
        ruled_out=(), advice="",
    )  # fmt: skip


def diagnosis(*findings: Finding) -> Diagnosis:
    return Diagnosis(
        job="", created="", kind="slow" if findings else "healthy", window=Window(), iteration=Iteration(),
        coverage=Coverage(8, 8, "", "", 1.0), roles=(), hosts={}, findings=findings, consequences=(), evidence={},
        verdict=Verdict("none", "none", "", (), "unknown", ""),
    )  # fmt: skip


KERNEL = FunctionName("kernel", "cutlass::Kernel2")
GETITEM = FunctionName("input", "__getitem__", "/workspace/train/data.py:41", "/workspace/train/data.py:41")


def test_answers_use_the_words_of_the_contract_only() -> None:
    for case in CASES:
        for answer in [fault.answer for fault in case.faults] + list(case.tolerated):
            assert answer.causes <= set(CAUSES) and answer.scopes <= set(SCOPES)
            re.compile(answer.function or "")


@pytest.mark.parametrize("effect", [0.02, 0.20])
@pytest.mark.parametrize("case", [case for case in CASES if case.faults], ids=lambda case: case.id)
def test_each_fault_makes_the_iteration_longer_by_the_wanted_share(case: Case, effect: float) -> None:
    made = cluster(case, effect=effect, seed=3)
    assert made.growth == pytest.approx(effect * len(case.faults), rel=0.04)
    injected = sum(expected.cost_s or 0.0 for expected in made.expected)
    assert injected == pytest.approx(made.iteration_s - made.healthy_iteration_s, rel=0.05)


@pytest.mark.parametrize("case", ["gpu_throttle", "nic_slow", "last_stage_heavier", "gpu_slow_expert_parallel"])
@pytest.mark.parametrize("base", ["bert", "mi300"])
def test_a_rank_in_memory_equals_the_rank_read_from_its_file(case: str, base: str, tmp_path: Path) -> None:
    written = cluster(case, base=base).written(5)
    write_json(written, tmp_path / "rank5.json.gz")
    made, read = written.trace, read_trace(tmp_path / "rank5.json.gz")
    assert not read.damage.any
    assert (read.rank, read.world_size, read.host, read.device_model) == (5, 8, made.host, made.device_model)
    assert read.groups == made.groups and read.epoch
    for column in ("ts_ns", "dur_ns", "category", "correlation", "stream", "device", "work"):
        np.testing.assert_array_equal(getattr(read, column), getattr(made, column), err_msg=column)
    for column in ("bandwidth_gbs", "occupancy"):
        np.testing.assert_array_equal(getattr(read, column), getattr(made, column), err_msg=column)
    assert named(read, read.name) == named(made, made.name)
    assert [read.tracks[t] for t in read.track] == [made.tracks[t] for t in made.track]
    for item in fields(made.collectives):
        ours, theirs = getattr(made.collectives, item.name), getattr(read.collectives, item.name)
        if item.name == "dtype":
            assert named(made, ours) == named(read, theirs)
        else:
            np.testing.assert_array_equal(ours, theirs, err_msg=item.name)


def test_the_same_arguments_give_the_same_cluster() -> None:
    first, second = cluster("slow_input", seed=4).trace(2), cluster("slow_input", seed=4).trace(2)
    np.testing.assert_array_equal(first.ts_ns, second.ts_ns)
    assert not np.array_equal(first.ts_ns, cluster("slow_input", seed=5).trace(2).ts_ns)


@pytest.mark.parametrize("case", [case.id for case in CASES])
def test_kernels_follow_their_launch_and_never_overlap_on_a_stream(case: str) -> None:
    trace = cluster(case, seed=2).trace(1)
    end = trace.ts_ns + trace.dur_ns
    device = np.isin(trace.category, DEVICE)
    calls = np.flatnonzero((trace.category == Category.RUNTIME) & (trace.correlation > 0))
    launch = dict(zip(trace.correlation[calls].tolist(), trace.ts_ns[calls].tolist(), strict=True))
    for row in np.flatnonzero(device):
        assert trace.ts_ns[row] > launch[int(trace.correlation[row])]
    for track in np.unique(trace.track[device]):
        rows = np.flatnonzero(device & (trace.track == track))
        assert (trace.ts_ns[rows[1:]] >= end[rows[:-1]]).all()


@pytest.mark.parametrize("case", ["gpu_throttle", "gc_rotating", "allocator", "device_sync", "last_stage_heavier"])
def test_host_events_of_a_thread_nest(case: str) -> None:
    trace = cluster(case, seed=2).trace(1)
    host = np.isin(trace.category, (Category.CPU_OP, Category.PYTHON, Category.ANNOTATION, Category.RUNTIME))
    for track in np.unique(trace.track[host]):
        open_until: list[int] = []
        for row in np.flatnonzero(host & (trace.track == track)):
            start, end = int(trace.ts_ns[row]), int(trace.ts_ns[row] + trace.dur_ns[row])
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1], trace.strings[trace.name[row]]
            open_until.append(end)


def test_a_collective_ends_for_all_when_the_last_has_arrived() -> None:
    made = cluster("gpu_slow_no_counters", seed=1)
    culprit = next(iter(made.truth.culprits))
    spans = []
    for rank in range(made.world_size):
        trace = made.trace(rank)
        table = trace.collectives
        rows = table.event[table.transfers]
        begin = trace.ts_ns[rows] - made.clock_ns(rank)
        spans.append((begin, begin + trace.dur_ns[rows]))
    begins, ends = np.array([s[0] for s in spans]), np.array([s[1] for s in spans])
    assert np.ptp(ends, axis=0).max() <= 2
    assert (ends.min(axis=0) > begins.max(axis=0)).all()
    durations = np.median(ends - begins, axis=1)
    assert durations.argmin() == culprit


def test_the_truth_about_the_iteration_can_be_read_off_the_trace() -> None:
    made = cluster("slow_input", effect=0.2)
    trace = made.trace(0)
    steps = [row for row in range(len(trace)) if trace.strings[trace.name[row]].startswith("ProfilerStep#")]
    measured = np.diff(trace.ts_ns[steps]).mean() / 1e9
    assert measured == pytest.approx(made.iteration_s, rel=0.03)


@pytest.mark.parametrize("base", ["bert", "mi300"])
def test_the_harmless_sync_waits_long_and_costs_nothing(base: str) -> None:
    made = cluster("device_sync_harmless", base=base)
    (item,) = made.program.find("harmless_sync")
    (rank,) = np.flatnonzero(made.plan.active[item, :, 1])
    without = made.plan.copy()
    without.active[item] = False
    assert made.times.host_len[item, rank, 1:].min() > 500_000
    assert mean_iteration_ns(made.program, without) == pytest.approx(1e9 * made.iteration_s, rel=0.003)


def test_clocks_of_hosts_are_apart_and_nothing_else_depends_on_it() -> None:
    made = cluster("two_ranks_one_fault")
    assert abs(made.clock_ns(0) - made.clock_ns(7)) > 1_000_000
    assert (simulate(made.program, made.plan).iteration_ns == made.times.iteration_ns).all()


def test_imbalanced_ranks_do_more_work_and_throttled_ones_the_same() -> None:
    for case, more in (("load_imbalance", True), ("gpu_throttle", False)):
        made = cluster(case, effect=0.2)
        culprit = min(made.truth.culprits)
        other = next(r for r in range(8) if r not in made.truth.culprits)
        blocks = [
            int(t.work[(t.category == Category.KERNEL) & (t.work > 0)].sum())
            for t in (made.trace(culprit), made.trace(other))
        ]
        assert (blocks[0] > 1.1 * blocks[1]) == more


def test_counters_come_only_where_the_case_has_them_and_show_the_throttled_device() -> None:
    made = cluster("gpu_throttle", effect=0.2)
    culprit = next(iter(made.truth.culprits))
    samples = made.samples(culprit)
    assert np.median(samples.values["sm_clock_ratio"]) < 0.9 and samples.values["throttle"].all()
    assert np.isfinite(list(samples.values.values())).all()
    assert next(cluster("slow_input").traces())[1] is None


def test_512_ranks_come_one_at_a_time() -> None:
    made = cluster("nic_slow", world_size=512)
    rank, (trace, _) = 0, next(made.traces())
    assert trace.rank == rank and trace.world_size == 512 and len(trace) > 10_000
    assert made.trace(511).host == "node063"


def test_a_size_that_the_layout_cannot_split_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        cluster("last_stage_heavier", world_size=6)


# --- scoring -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow_gpu() -> Cluster:
    return cluster("gpu_slow_no_counters", seed=1)


def test_rank_function_and_cause_must_all_be_right(slow_gpu: Cluster) -> None:
    culprit = str(next(iter(slow_gpu.truth.culprits)))
    right = finding("gpu_compute", "rank", culprit, KERNEL)
    assert score([diagnosis(right)], slow_gpu.truth).right
    assert not score([diagnosis(replace(right, cause="host_python"))], slow_gpu.truth).found[0]
    assert not score([diagnosis(replace(right, function=GETITEM))], slow_gpu.truth).found[0]
    assert not score([diagnosis()], slow_gpu.truth).found[0]


def test_naming_a_victim_is_a_false_blame_and_a_miss_even_beside_the_culprit(slow_gpu: Cluster) -> None:
    culprit = next(iter(slow_gpu.truth.culprits))
    both = ",".join(str(r) for r in sorted((culprit, (culprit + 1) % 8)))
    judged = score([diagnosis(finding("gpu_compute", "rank", both, KERNEL))], slow_gpu.truth)
    assert not judged.found[0] and judged.false_blames


def test_any_finding_in_a_control_is_a_false_blame_unless_it_is_tolerated() -> None:
    healthy, pipeline = cluster("healthy", seed=1), cluster("last_stage_heavier")
    assert score([diagnosis()], healthy.truth).right
    assert score([diagnosis(finding("unknown", "group", "", None))], healthy.truth).false_blames
    assert score([diagnosis(finding("load_imbalance", "group", "6-7", KERNEL))], pipeline.truth).right
    assert score([diagnosis(finding("load_imbalance", "rank", "6", KERNEL))], pipeline.truth).false_blames


def test_two_faults_score_each_for_itself() -> None:
    made = cluster("two_faults")
    (input_rank,), (gpu_rank,) = (sorted(expected.ranks) for expected in made.expected)
    one = finding("input_pipeline", "rank", str(input_rank), GETITEM)
    other = finding("gpu_compute", "rank", str(gpu_rank), KERNEL)
    assert score([diagnosis(one)], made.truth).found == (True, False)
    assert score([diagnosis(one, other)], made.truth).right


def test_a_host_is_right_by_name_and_a_link_by_both_ends() -> None:
    nic, link = cluster("nic_slow"), cluster("link_slow")
    (host,) = nic.expected[0].hosts
    assert score([diagnosis(finding("nic_or_host_network", "host", "", None, (host,)))], nic.truth).right
    ends = tuple(sorted(link.expected[0].hosts))
    found = finding("fabric_contention", "link", "", None, ends)
    assert score([diagnosis(found)], link.truth).right
    assert not score([diagnosis(replace(found, hosts=ends[:1]))], link.truth).found[0]


def test_the_plan_draws_controls_once_and_faults_at_each_effect() -> None:
    drawn = list(
        synthetic.plan([BY_ID["healthy"], BY_ID["slow_input"], BY_ID["everything_slower"]], [8], [0.05, 0.1], 1, 3)
    )
    assert [(case.id, effect) for case, _, effect, _ in drawn] == [
        *[("healthy", 0.0)] * 3, ("slow_input", 0.05), ("slow_input", 0.1), ("everything_slower", 0.15)
    ]  # fmt: skip
