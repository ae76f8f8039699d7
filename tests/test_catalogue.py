"""A small stable part of the fault catalogue: real jobs of known cause, synthetic faults of 10 % (design 10)."""

from __future__ import annotations

from pathlib import Path

import pytest

from eroica.offline import diagnose_paths
from evals.cases_synth import CASES, Case
from evals.score import score
from evals.synth import cluster
from evals.synthetic import diagnose_cluster
from tests.traces import TRACES

TIMELINES = Path(__file__).parent / "data" / "timelines"


def test_one_slow_worker_of_a_real_job_is_named_with_its_cost() -> None:
    made, _ = diagnose_paths([TIMELINES / "trace-AR.parquet"])
    assert (made.kind, made.verdict.scope, made.verdict.ranks, made.verdict.cause) == (
        "slow",
        "rank",
        "0",
        "gpu_compute",
    )
    # The published what-if analysis: 46.34 s observed, 23.45 s without this worker.
    assert made.findings[0].impact.seconds_per_iteration == pytest.approx(22.9, rel=0.2)
    assert made.iteration.observed_s == pytest.approx(46.3, rel=0.05)


def test_unequal_pipeline_stages_of_a_real_job_blame_no_rank() -> None:
    made, _ = diagnose_paths([TIMELINES / "trace-ST.parquet"])
    assert all(finding.scope not in ("rank", "host") for finding in made.findings)
    if made.kind == "slow":
        assert (made.verdict.scope, made.verdict.ranks, made.verdict.cause) == ("group", "6-7", "load_imbalance")
        assert len(made.findings) == 1
    else:
        assert made.kind == "healthy"


def test_two_ranks_of_128_say_that_126_are_missing() -> None:
    made, _ = diagnose_paths([TRACES / "two_ranks_of_128"])
    assert (made.coverage.ranks_expected, made.coverage.ranks_reported) == (128, 2)
    assert made.coverage.missing_ranks == "2-127"
    assert made.verdict.confidence != "established"


@pytest.mark.parametrize("path", sorted(TRACES.glob("*.json.gz")), ids=lambda path: str(path.name))
def test_a_single_real_trace_is_never_a_verdict(path: Path) -> None:
    made, _ = diagnose_paths([path])
    assert made.kind == "no_data" and made.findings == ()


@pytest.mark.parametrize("case", [case for case in CASES if 0.10 in case.effects], ids=lambda case: case.id)
def test_a_fault_of_ten_percent_on_eight_ranks_is_found_and_nobody_else_blamed(case: Case) -> None:
    made = cluster(case, effect=0.10, seed=11)
    judged = score([diagnose_cluster(made)], made.truth)
    assert judged.right, (judged.near, judged.false_blames)
    # Findings are ordered by cost: where advice on structure is tolerated, it may come first.
    assert judged.verdict_right or case.tolerated
    for ratio in judged.cost_ratio:
        assert ratio is not None and 0.7 < ratio < 1.3
