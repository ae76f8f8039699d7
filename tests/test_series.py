"""Jobs that are made up step by step: what the product says of them, and how a trouble that is over is scored."""

from __future__ import annotations

import pytest

from eroica.context import Context, Turn
from eroica.diagnosis import diagnose
from eroica.pattern import stack
from evals import series
from evals.score import score
from evals.series import Part, Plan
from evals.truth import Answer, Expected, Truth
from tests import handmade as h


@pytest.mark.parametrize("has_device", [True, False])
def test_a_rank_that_becomes_slow_is_noticed_captured_and_named(has_device: bool) -> None:
    def parts(step: int, rank: int) -> list[Part]:
        slow = step >= 80 and rank == 2
        if has_device:
            return series.device_step("convnet", 0.3, factor=1.4 if slow else 1.0)
        read = [Part("train.py(12): read", 0.1, "python")] if slow else []
        return [*read, *series.host_step(0.3)]

    told = series.watched(Plan(num_steps=130, parts=parts, has_device=has_device), 1)
    assert [(d.kind, d.window.trigger) for d in told.diagnoses] == [("healthy", "baseline"), ("slow", "slowdown")]
    assert told.diagnoses[1].verdict.ranks == "2" and told.captures[1].start < 110


def test_an_even_job_is_captured_once_and_nothing_is_noticed() -> None:
    told = series.watched(Plan(num_steps=100, parts=lambda step, rank: series.host_step(0.3), has_device=False), 2)
    assert [d.kind for d in told.diagnoses] == ["healthy"] and not told.triggers


def test_a_baseline_of_the_warm_up_is_taken_again_and_not_measured_by_the_first() -> None:
    def parts(step: int, rank: int) -> list[Part]:
        tunes = [Part("aten::tune", 1.0)] if step < 60 else []
        return [*tunes, *series.host_step(0.3)]

    told = series.watched(Plan(num_steps=130, parts=parts, has_device=False), 3)
    assert [(d.kind, d.window.trigger, d.iteration.baseline_s) for d in told.diagnoses] == [
        ("healthy", "baseline", None),
        ("healthy", "baseline", None),
    ]


def test_a_trouble_that_is_over_answers_by_its_verdict() -> None:
    job = stack(h.job([h.Rank()] * 4))
    made = diagnose(job, Context(trigger="slowdown", noticed=Turn(80, "slow", 1.0, 1.5), baseline=job))
    answer = Answer(
        causes=frozenset({"none"}), scopes=frozenset({"none"}), who="nobody", kinds=frozenset({"recovered"})
    )
    truth = Truth(hosts=("a",) * 4, faults=(Expected(answer, frozenset(), frozenset()),))
    assert score([made], truth).right
    assert not score([diagnose(job, Context(baseline=job))], truth).right
    assert not score([made], Truth(hosts=("a",) * 4)).right, "a control was looked at without a reason"
