"""Settings that slow every step down: found where nothing else differs, priced where that can be known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from eroica.context import Context
from eroica.critical_path import Activity
from eroica.diagnosis import diagnose
from eroica.findings import Diagnosis
from eroica.pattern import Function, Summary, stack
from eroica.samplers.standout import Observation
from eroica.utilisation import MU_SOURCES
from tests import handmade as h

MATMUL = Function(Activity.OPERATOR, "aten::mm", None, None)
LOOK = Function(Activity.OPERATOR, "aten::_is_any_true", None, None)
USUAL = {MATMUL: 0.060}
SIZE = 4


def job(
    functions: Mapping[Function, float] = USUAL, *, granted: float = 0.95, transfer: float = 0.010
) -> list[Summary]:
    """Ranks of one host that all do the same; seconds per iteration."""
    own = sum(functions.values())
    rank = h.Rank(
        own=own,
        length=own + transfer,
        samples=[h.Sample(transfer, own)],
        functions=functions,
        mu=dict.fromkeys(functions, granted),
        mu_source=MU_SOURCES.index("cpu_granted"),
        has_device=False,
        host="node1",
    )
    return h.job([rank] * SIZE)


def told(summaries: list[Summary], *snapshots: Mapping[str, Any], **context: Any) -> Diagnosis:
    """`snapshots`: of the ranks in turn, the last one of all that are left."""
    settings = {rank: snapshots[min(rank, len(snapshots) - 1)] for rank in range(SIZE)}
    return diagnose(stack(summaries), Context(trigger="baseline", settings=settings, **context))


def said(made: Diagnosis) -> str:
    return " ".join(evidence.text for evidence in made.evidence.values())


def test_anomaly_detection_is_named_with_the_line_that_asks_for_it() -> None:
    snapshot = {"torch.anomaly_mode": True, "anomaly.1.at": "/job/train.py:41", "anomaly.1.in": "prepare"}
    (found,) = told(job(), snapshot).findings
    assert (found.cause, found.scope, found.ranks) == ("configuration", "all", "0-3")
    assert found.function is not None and found.function.user_location == "/job/train.py:41"
    assert found.impact.seconds_per_iteration is None and found.confidence == "hypothesis"


def test_its_checks_in_the_traces_tell_of_it_without_any_snapshot_and_give_a_price() -> None:
    looked = job(USUAL | {LOOK: 0.015})
    for summary in looked:
        summary.patterns.count[list(summary.patterns.functions).index(LOOK)] = 30
    (found,) = told(looked, {}).findings
    assert found.cause == "configuration" and found.impact.seconds_per_iteration == pytest.approx(0.015, rel=0.01)


def test_tracebacks_are_priced_by_what_one_takes_and_never_beyond_the_time_that_the_host_held_the_step_up() -> None:
    node, leaf = (
        Function(Activity.PYTHON, f"autograd::engine::evaluate_function: {name}", None, None)
        for name in ("MulBackward0", "torch::autograd::AccumulateGrad")
    )
    for took_s, cost_s in ((50e-6, 0.015 + 0.005), (0.01, 0.015 + 0.062)):
        looked = job(USUAL | {LOOK: 0.015, node: 0.001, leaf: 0.001})
        for summary in looked:
            for function, count in ((LOOK, 30), (node, 100), (leaf, 50)):
                summary.patterns.count[list(summary.patterns.functions).index(function)] = count
        made = told(looked, {"torch.anomaly_mode": True, "anomaly.traceback_s": took_s})
        (found,) = made.findings
        assert found.impact.seconds_per_iteration == pytest.approx(cost_s, rel=0.01)
        assert "100 tracebacks per iteration" in said(made)


def test_a_script_that_asked_for_anomaly_detection_once_need_not_have_it_still() -> None:
    assert told(job(), {"torch.anomaly_mode": False, "anomaly.1.at": "train.py:41"}).findings == ()


CROWDED = Observation("node1", "host", None, "helper_cores", 1.2, None, "threads beside them use 1.2 of 2 cores", 4.0)
THREADS = {"torch.threads": 8, "cpus": 2, "affinity": "0-1", "affinity.cpus": 2, "env.OMP_NUM_THREADS": "8"}


def test_more_threads_than_cores_are_named_by_their_variable_where_they_are_felt() -> None:
    made = told(job(granted=0.25), THREADS, counters=(CROWDED,))
    (found,) = made.findings
    assert (found.cause, found.scope, found.ranks) == ("configuration", "all", "0-3")
    assert found.function is not None and found.function.name == "OMP_NUM_THREADS=8"
    assert "share 2 cores of host node1" in said(made) and "OMP_NUM_THREADS=1" in found.advice
    # With half a core for each of four ranks, what takes 60 ms at a quarter would take 30.
    assert found.impact.seconds_per_iteration == pytest.approx(0.030, rel=0.01)


@pytest.mark.parametrize(
    ("snapshot", "granted", "counters"),
    [
        (THREADS, 0.95, (CROWDED,)),
        (THREADS, 0.25, ()),
        (THREADS | {"torch.threads": 1, "env.OMP_NUM_THREADS": "1"}, 0.25, (CROWDED,)),
        (THREADS | {"cpus": 64, "affinity.cpus": 64}, 0.25, (CROWDED,)),
    ],
)
def test_numbers_of_threads_alone_blame_nobody(
    snapshot: Mapping[str, Any], granted: float, counters: tuple[Observation, ...]
) -> None:
    assert told(job(granted=granted), snapshot, counters=counters).findings == ()


def test_threads_that_were_raised_stand_for_the_operators_that_take_longer() -> None:
    made = told(
        job({MATMUL: 0.100}, granted=0.25),
        THREADS | {"env.OMP_NUM_THREADS": "1"},
        counters=(CROWDED,),
        baseline=stack(job(granted=0.5)),
    )
    (found,) = made.findings
    assert found.cause == "configuration" and "set_num_threads(8)" in said(made)
    assert found.impact.seconds_per_iteration == pytest.approx(0.050, rel=0.25)


GRADIENTS = {"gradients.ddp.num_bytes": 1_000_000}


def test_gradients_that_are_reduced_in_each_micro_step_cost_all_reductions_but_one() -> None:
    made = told(job(transfer=0.040), GRADIENTS, reduced_bytes=4_000_400)
    (found,) = made.findings
    assert (found.cause, found.scope) == ("configuration", "all") and "no_sync" in found.advice
    assert found.impact.seconds_per_iteration == pytest.approx(0.030, rel=0.05)


@pytest.mark.parametrize(("reduced", "transfer"), [(1_000_400, 0.04), (1_500_000, 0.04), (0, 0.04), (4_000_000, 0.002)])
def test_one_reduction_or_none_that_fits_or_one_that_costs_little_is_no_finding(reduced: int, transfer: float) -> None:
    made = told(job(transfer=transfer), GRADIENTS, reduced_bytes=reduced)
    assert made.findings == ()
    assert any("no_sync" in note for note in made.coverage.notes) == (reduced == 4_000_000)


def test_a_debug_mode_is_a_finding_without_a_price_and_a_wanted_option_is_a_note() -> None:
    made = told(job(), {"env.TORCH_DISTRIBUTED_DEBUG": "DETAIL", "ddp.1.find_unused_parameters": True})
    (found,) = made.findings
    assert found.cause == "configuration" and "TORCH_DISTRIBUTED_DEBUG=DETAIL" in said(made)
    assert found.impact.seconds_per_iteration is None
    assert any("find_unused_parameters" in note for note in made.coverage.notes)


def test_a_mode_that_one_rank_has_is_that_ranks() -> None:
    made = told(job(), {}, {"env.PYTHONMALLOC": "debug"}, {})
    assert [(found.scope, found.ranks) for found in made.findings] == [("rank", "1")]


@pytest.mark.parametrize(
    ("setting", "value", "named"),
    [("env.PYTHONMALLOC", "debug", "PYTHONMALLOC=debug"), ("env.MKL_DEBUG_CPU_TYPE", "5", "aten::mm")],
)
def test_a_setting_that_explains_a_slow_rank_is_told_once(setting: str, value: str, named: str) -> None:
    usual = h.Rank(own=0.060, length=0.110, samples=[h.Sample(0.050, 0.060)], functions=USUAL, host="node1")
    slow = h.Rank(own=0.100, length=0.110, samples=[h.Sample(0.010, 0.100)], functions={MATMUL: 0.1}, host="node1")
    odd = {"name": setting, "usual": "null", "odd": [{"value": f'"{value}"', "ranks": "2"}]}
    made = told(h.job([usual, usual, slow, usual]), {}, {}, {setting: value}, {}, environment={"differences": [odd]})
    (found,) = made.findings
    assert (found.cause, found.scope, found.ranks) == ("configuration", "rank", "2")
    assert found.function is not None and found.function.name == named
    assert found.impact.seconds_per_iteration == pytest.approx(0.040, rel=0.1)


def test_blocking_launches_without_a_device_that_waits_for_them_are_a_note() -> None:
    made = told(job(), {"env.CUDA_LAUNCH_BLOCKING": "1"})
    assert made.findings == ()
    assert any("CUDA_LAUNCH_BLOCKING" in note for note in made.coverage.notes)


def test_a_slow_rank_is_found_beside_a_setting_of_all() -> None:
    fetch = Function(Activity.INPUT, "fetch", "data.py:3", "data.py:3")
    slow = h.Rank(own=0.100, length=0.110, samples=[h.Sample(0.010, 0.100)], functions={MATMUL: 0.060, fetch: 0.040})
    usual = h.Rank(own=0.060, length=0.110, samples=[h.Sample(0.050, 0.060)], functions=USUAL)
    made = told(h.job([usual, usual, slow, usual]), {"env.TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    assert [(found.cause, found.ranks) for found in made.findings] == [
        ("input_pipeline", "2"),
        ("configuration", "0-3"),
    ]
    assert np.isfinite(made.findings[0].impact.seconds_per_iteration or np.nan)
