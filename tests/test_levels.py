"""Slower than in the healthy window, and no rank differs from another: told of all, with what grew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from eroica.context import Context
from eroica.critical_path import Activity
from eroica.diagnosis import diagnose
from eroica.findings import Diagnosis
from eroica.levels import common_excess
from eroica.pattern import Function, Summary, stack
from eroica.utilisation import MU_SOURCES
from tests import handmade as h

FETCH = Function(Activity.INPUT, "fetch", "train.py:12", "train.py:12")
COLLATE = Function(Activity.INPUT, "collate", "train.py:40", "train.py:40")
LOG = Function(Activity.PYTHON, "log", "train.py:88", "train.py:88")
MATMUL = Function(Activity.OPERATOR, "aten::mm", None, None)
SAVE = Function(Activity.CHECKPOINT, "torch.save", "train.py:70", "train.py:70")
USUAL = {MATMUL: 0.060, FETCH: 0.004, COLLATE: 0.006}
SIZES = pytest.mark.parametrize("size", [1, 2, 8])


def job(
    size: int, functions: Mapping[Function, float], idle: float = 0.0, granted: float | None = None
) -> list[Summary]:
    """Ranks that all do the same; seconds per iteration. `granted`: share of the wanted CPU time that they get."""
    own = sum(functions.values())
    reduce = h.Sample(0.010, own, channel=h.everyone(size))
    rank = h.Rank(
        own=own,
        length=own + idle + (0.010 if size > 1 else 0.0),
        samples=[reduce] if size > 1 else [],
        functions=functions,
        mu={f: granted for f in functions} if granted is not None else {},
        mu_source=MU_SOURCES.index("cpu_granted"),
        has_device=False,
    )
    return h.job([rank] * size)


def compared(now: list[Summary], then: list[Summary]) -> Diagnosis:
    return diagnose(stack(now), Context(trigger="slowdown", baseline=stack(then)))


@SIZES
@pytest.mark.parametrize(
    ("function", "cause"), [(FETCH, "input_pipeline"), (LOG, "host_python"), (SAVE, "checkpoint_io")]
)
def test_what_all_ranks_do_longer_than_when_healthy_is_named_with_its_cause(
    size: int, function: Function, cause: str
) -> None:
    grown = USUAL | {function: USUAL.get(function, 0.0) + 0.030}
    made = compared(job(size, grown), job(size, USUAL))
    found = made.findings[0]
    assert (made.kind, made.verdict.scope, made.verdict.cause) == ("slow", "all", cause)
    assert made.verdict.ranks == ("0" if size == 1 else f"0-{size - 1}")
    assert found.function is not None and found.function.name == function.name
    assert found.impact.seconds_per_iteration == pytest.approx(0.030, abs=1e-4)
    assert made.verdict.confidence == "supported", "there are no peers at the same time"


def kernels(factor: Mapping[str, float], work: Mapping[str, float] | None = None) -> list[Summary]:
    """Four ranks with three kernels each, which take so many times what is usual."""
    usual = {"gemm": 0.040, "softmax": 0.012, "norm": 0.008}
    functions = {Function(Activity.COMPUTE, name, None, None): s * factor.get(name, 1.0) for name, s in usual.items()}
    own = sum(functions.values())
    sizes = {f: (work or {}).get(f.name, 1.0) for f in functions}
    reduce = h.Sample(0.010, own, channel=h.everyone(4))
    return h.job([h.Rank(own=own, length=own + 0.010, samples=[reduce], functions=functions, work=sizes)] * 4)


def test_kernels_that_all_take_longer_alike_are_slower_devices() -> None:
    made = compared(kernels({"gemm": 1.2, "softmax": 1.18, "norm": 1.22}), kernels({}))
    assert (made.verdict.cause, made.verdict.scope) == ("gpu_compute", "all")
    assert any("every kind take 1.20 times" in proof.text for proof in made.evidence.values())
    assert "clocks" in made.findings[0].advice


def test_one_kernel_that_takes_longer_or_more_work_in_all_is_no_slower_device() -> None:
    made = compared(kernels({"gemm": 1.4}), kernels({}))
    assert made.verdict.cause == "unknown"
    assert any("1.40 times as long for a call of gemm" in proof.text for proof in made.evidence.values())
    more = dict.fromkeys(("gemm", "softmax", "norm"), 1.2)
    assert compared(kernels(more, work=more), kernels({})).verdict.cause == "unknown"


def test_one_operator_of_all_ranks_that_takes_longer_may_be_given_other_values() -> None:
    usual = USUAL | {Function(Activity.OPERATOR, "aten::add", None, None): 0.030}
    made = compared(job(4, usual | {MATMUL: 0.090}), job(4, usual))
    assert made.verdict.cause == "unknown" and made.findings[0].function is not None
    assert made.findings[0].function.name == "aten::mm" and "set_flush_denormal" in made.findings[0].advice


def test_two_windows_of_iterations_that_vary_by_nature_do_not_differ_by_chance() -> None:
    """T03: closures with one to twenty evaluations. What the pace of many iterations has shown is told all the same."""
    lengths = [0.4, 1.9, 1.0, 0.2, 1.5, 0.7, 1.2, 0.5]
    usual, longer = (
        [replace(s, ledger=replace(s.ledger, length_s=np.array(lengths, np.float32) + more)) for s in of]
        for more, of in ((0.0, job(4, USUAL)), (0.03, job(4, USUAL | {LOG: 0.030})))
    )
    assert not common_excess(stack(longer), stack(usual), 0.110)
    assert common_excess(stack(longer), stack(usual), 0.110, is_noticed=True)


def test_the_function_that_grew_is_named_and_not_the_longest_of_its_kind() -> None:
    before = {MATMUL: 0.060, FETCH: 0.040, COLLATE: 0.005}
    made = compared(job(4, before | {COLLATE: 0.035}), job(4, before))
    assert made.findings[0].function is not None and made.findings[0].function.name == "collate"


@pytest.mark.parametrize("num_slow", [1, 2, 3])
def test_what_half_of_the_ranks_do_longer_is_not_told_of_all(num_slow: int) -> None:
    slow, usual = job(4, USUAL | {LOG: 0.030}), job(4, USUAL)
    others = job(4, USUAL, idle=0.030)
    found = common_excess(stack(slow[:num_slow] + others[num_slow:]), stack(usual), 0.110)
    assert (Activity.PYTHON in {excess.activity for excess in found}) == (num_slow == 3)


def test_what_half_of_the_ranks_do_longer_is_not_told_of_all_where_a_rank_is_missing() -> None:
    slow, usual = job(8, USUAL | {LOG: 0.030}), job(8, USUAL)
    now = stack((slow[:4] + job(8, USUAL, idle=0.030)[4:])[:7])
    assert Activity.PYTHON not in {excess.activity for excess in common_excess(now, stack(usual), 0.110)}
    assert Activity.PYTHON in {excess.activity for excess in common_excess(stack(slow[:7]), stack(usual), 0.110)}


def test_python_that_takes_longer_in_no_one_function_is_told_only_where_nothing_dearer_is_found() -> None:
    many = [Function(Activity.PYTHON, f"part{n}", f"train.py:{n}", f"train.py:{n}") for n in range(20)]
    usual = USUAL | dict.fromkeys(many, 0.0010)
    longer = usual | dict.fromkeys(many, 0.0022)
    now = job(4, longer, idle=0.040)
    alone = compared(now, job(4, usual))
    assert [(f.scope, f.cause) for f in alone.findings] == [("all", "host_python")]
    now[1] = replace(job(4, longer | {FETCH: 0.034}, idle=0.010)[1])
    beside = compared(now, job(4, usual))
    assert [(f.scope, f.cause, f.ranks) for f in beside.findings] == [("rank", "input_pipeline", "1")]


@SIZES
def test_a_job_as_fast_as_when_it_was_healthy_is_healthy(size: int) -> None:
    made = compared(job(size, USUAL), job(size, USUAL | {MATMUL: 0.0605}))
    assert made.kind == "healthy"
    assert ("no other rank" in made.verdict.summary) == (size == 1)


@SIZES
def test_operators_that_take_longer_on_a_shared_host_by_a_few_percent_are_no_finding(size: int) -> None:
    assert compared(job(size, USUAL | {MATMUL: 0.0625}), job(size, USUAL)).kind == "healthy"


@SIZES
def test_time_that_nothing_explains_is_told_as_such_and_not_as_health(size: int) -> None:
    made = compared(job(size, USUAL, idle=0.030), job(size, USUAL))
    assert (made.kind, made.verdict.scope, made.verdict.cause) == ("slow", "all", "unknown")
    assert made.verdict.confidence in ("hypothesis", "unknown")
    assert made.findings[0].function is None
    assert made.findings[0].impact.seconds_per_iteration == pytest.approx(0.030, abs=1e-4)


def test_time_that_nothing_explains_blames_nobody_where_a_rank_sent_nothing() -> None:
    made = compared(job(4, USUAL, idle=0.030)[:3], job(4, USUAL))
    assert (made.kind, made.verdict.scope, made.verdict.ranks) == ("slow", "all", "")


@SIZES
def test_everything_longer_for_want_of_a_core_is_contention(size: int) -> None:
    doubled = {function: 2 * seconds for function, seconds in USUAL.items()}
    made = compared(job(size, doubled, granted=0.48), job(size, USUAL, granted=0.96))
    assert (made.verdict.scope, made.verdict.cause) == ("all", "cpu_contention")


@pytest.mark.parametrize(("share", "cause"), [(0.9, "gil_contention"), (0.12, "cpu_contention")])
def test_a_thread_of_the_ranks_own_that_takes_their_cores_is_told_and_not_the_host(share: float, cause: str) -> None:
    doubled = {function: 2 * seconds for function, seconds in USUAL.items()}
    slow = [
        replace(summary, patterns=replace(summary.patterns, threads=(("copier", share),)))
        for summary in job(2, doubled, granted=0.48)
    ]
    made = compared(slow, job(2, USUAL, granted=0.96))
    assert (made.verdict.scope, made.verdict.cause) == ("all", cause)


@pytest.mark.parametrize(("crowd", "is_told"), [(6, True), (4, True), (3, False)])
def test_ranks_that_meet_on_one_core_are_contention_of_the_host_though_others_gain_by_it(
    crowd: int, is_told: bool
) -> None:
    share = 2 / crowd  # of what it was on two cores
    work = {MATMUL: 0.050, FETCH: 0.050, LOG: 0.020}
    crowded = job(8, {function: seconds / share for function, seconds in work.items()}, granted=0.5 * share)
    gains = job(8, {function: seconds / 2 for function, seconds in work.items()}, idle=0.180, granted=0.95)
    now = [replace(crowded[0], rank=k) if k < crowd else gains[k] for k in range(8)]
    found = common_excess(stack(now), stack(job(8, work, granted=0.5)), 0.250)
    told = [e for e in found if e.cause.cause == "cpu_contention"]
    assert bool(told) == is_told
    assert not is_told or (told[0].scope, len(told[0].ranks)) == ("all", 8)


def test_what_ranks_that_meet_on_one_core_do_not_explain_is_told_beside_them() -> None:
    work, read = {MATMUL: 0.050, FETCH: 0.050, LOG: 0.020}, 0.080
    slow = {function: seconds * 2 + read * (function == FETCH) for function, seconds in work.items()}
    fast = {function: seconds / 2 + read * (function == FETCH) for function, seconds in work.items()}
    crowded, gains = job(8, slow, granted=0.25), job(8, fast, idle=0.180, granted=0.95)
    found = common_excess(stack(crowded[:4] + gains[4:]), stack(job(8, work, granted=0.5)), 0.320)
    assert {e.cause.cause for e in found} == {"cpu_contention", "input_pipeline"}
    assert sum(e.seconds for e in found) == pytest.approx(0.070 + 0.0925, abs=0.001)


@pytest.mark.parametrize(
    ("loader", "location", "granted", "is_bound"),
    [
        ("fetch", "train.py:12", 0.25, False),
        ("fetch", "train.py:12", 0.9, True),
        ("_MultiProcessingDataLoaderIter.__next__", "train.py:12", 0.25, True),
        ("_StatefulMultiProcessingDataLoaderIter.__next__", "train.py:12", 0.25, True),
        ("select", "/usr/lib/python3.11/selectors.py:415", 0.25, True),
        ("wait", "threading.py:331", 0.25, True),
        ("decode", "data/connection.py:7", 0.25, False),
    ],
)
def test_input_that_only_wants_for_a_core_is_not_what_the_job_waits_for(
    loader: str, location: str, granted: float, is_bound: bool
) -> None:
    read = Function(Activity.INPUT, loader, location, "train.py:12")
    made = diagnose(stack(job(8, {MATMUL: 0.060, read: 0.050}, granted=granted)), Context(trigger="baseline"))
    assert [f.cause for f in made.findings] == (["input_pipeline"] if is_bound else [])


@pytest.mark.parametrize("granted", [0.65, 0.26])
def test_a_slow_read_on_a_busier_host_is_still_a_slow_read(granted: float) -> None:
    made = compared(job(2, USUAL | {FETCH: 0.060}, granted=granted), job(2, USUAL, granted=0.85))
    assert (made.verdict.scope, made.verdict.cause) == ("all", "input_pipeline")


@SIZES
def test_another_thread_that_has_begun_to_run_on_all_ranks_is_told(size: int) -> None:
    # Longer all over the place, in no one function.
    steps = [Function(Activity.PYTHON, f"step{k}", f"train.py:{k}", f"train.py:{k}") for k in range(6)]
    before = USUAL | dict.fromkeys(steps, 0.003)
    now = [
        replace(summary, patterns=replace(summary.patterns, threads=(("metrics", 0.6),)))
        for summary in job(size, before | dict.fromkeys(steps, 0.008))
    ]
    made = compared(now, job(size, before))
    assert (made.verdict.scope, made.verdict.cause) == ("all", "gil_contention")


def reducing(exposed: float, transfer: float = 0.04) -> list[Summary]:
    """Eight ranks whose one reduction is hidden behind compute but for `exposed` seconds."""
    reduce = h.Sample(transfer, 0.2, channel=h.everyone(8), exposed=exposed)
    functions = {h.GEMM: 0.2, Function(Activity.COLLECTIVE, "all_reduce", None, None): exposed}
    return h.job([h.Rank(own=0.2, length=0.2 + exposed, samples=[reduce], functions=functions)] * 8)


def versions(torch: str, algorithm: str = "Ring") -> dict[str, object]:
    return {"common": {"torch": torch, "env.NCCL_ALGO": algorithm}, "differences": []}


@pytest.mark.parametrize(
    ("then", "now", "cause"),
    [
        (versions("2.6.0"), versions("2.7.1"), "version_change"),
        (versions("2.6.0"), versions("2.6.0", "Tree"), "configuration"),
        (versions("2.6.0"), versions("2.6.0"), "unknown"),
        ({}, {}, "unknown"),
    ],
)
def test_reductions_that_are_no_longer_hidden_are_laid_to_what_has_changed_and_not_to_the_network(
    then: dict[str, object], now: dict[str, object], cause: str
) -> None:
    context = Context(baseline=stack(reducing(0.005)), baseline_environment=then, environment=now)
    made = diagnose(stack(reducing(0.038)), context)
    (found,) = made.findings
    assert (found.cause, found.scope) == (cause, "all")
    assert found.function is not None and found.function.name == "all_reduce"
    assert any("network" in reason for reason in found.ruled_out)
    assert ("2.6.0 -> 2.7.1" in " ".join(made.evidence[key].text for key in found.evidence)) == (
        cause == "version_change"
    )


def test_reductions_that_take_longer_are_the_networks_though_versions_differ() -> None:
    context = Context(
        baseline=stack(reducing(0.005)), baseline_environment=versions("2.6.0"), environment=versions("2.7.1")
    )
    made = diagnose(stack(reducing(0.045, transfer=0.08)), context)
    assert [f.cause for f in made.findings] == ["fabric_contention"]


def test_a_debug_mode_since_the_healthy_window_is_told_once_with_what_it_costs() -> None:
    name = "env.TORCH_DISTRIBUTED_DEBUG"
    context = Context(
        baseline=stack(reducing(0.005)),
        baseline_environment={"common": {name: "OFF"}},
        environment={"common": {name: "DETAIL"}},
        settings={rank: {name: "DETAIL"} for rank in range(8)},
    )
    (found,) = diagnose(stack(reducing(0.038)), context).findings
    assert (found.cause, found.scope) == ("configuration", "all")
    assert found.function is not None and found.function.name == "TORCH_DISTRIBUTED_DEBUG=DETAIL"
    assert found.impact.seconds_per_iteration == pytest.approx(0.033, rel=0.05)
