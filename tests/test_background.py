"""What a series tells beside its window: our own capture at its onset, a slowdown that is over, other phases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from eroica.background import History, Lap, context_of
from eroica.context import Context, Turn
from eroica.critical_path import Activity
from eroica.degradation import Change, Trigger
from eroica.diagnosis import diagnose
from eroica.pattern import Function, Stacked, stack
from tests import handmade as h

MS = 1_000_000
TRAIN = Function(Activity.COMPUTE, "gemm", None, None)
GENERATE = Function(Activity.COMPUTE, "paged_attention", None, None)


def history(length: Callable[[int], float], captured: range, num: int = 100) -> History:
    """Laps of 100 ms times a factor."""
    return History(
        laps=tuple(
            Lap(step, 100 * MS * step, round(100 * MS * length(step)), "capture" if step in captured else "")
            for step in range(num)
        )
    )


def slow(step: int, observed_ms: int, num: int = 4) -> Trigger:
    return Trigger(Change.SLOW, 0, 0, step, step, 100 * MS, observed_ms * MS, 0.1)


def context(length: Callable[[int], float], captured: range, observed_ms: int) -> Context:
    histories = {rank: history(length, captured) for rank in range(4)}
    return replace(context_of(histories, {}, {}, slow(80, observed_ms), range(90, 100)), trigger="slowdown")


def job(slow_rank: int | None = None, factor: float = 1.0) -> Stacked:
    ranks = [
        h.Rank(
            own=0.09 * (factor if rank == slow_rank else 1.0),
            length=0.1 * factor,
            samples=[h.Sample(0.01 + (0.0 if rank == slow_rank else 0.09 * (factor - 1)), 0.09)],
        )
        for rank in range(4)
    ]
    return stack(h.job(ranks))


def test_a_slowdown_that_begins_with_the_end_of_our_capture_is_ours() -> None:
    told = context(lambda step: 1.15 if step >= 60 else 1.0, range(50, 60), 115)
    assert told.earlier_capture == (50, 59)
    made = diagnose(job(), told)
    assert (made.kind, made.verdict.cause, made.verdict.scope) == ("slow", "profiler_overhead", "all")
    assert any("since step 60" in item.text and "50-59" in item.text for item in made.evidence.values())


@pytest.mark.parametrize(("before_s", "is_ours"), [(0.085, True), (0.1, False)])
def test_it_is_not_where_the_healthy_window_was_as_slow(before_s: float, is_ours: bool) -> None:
    told = context(lambda step: 1.15 if step >= 60 else 1.0, range(50, 60), 115)
    first = stack(h.job([h.Rank(own=before_s - 0.01, length=before_s, samples=[h.Sample(0.01, before_s - 0.01)])] * 4))
    made = diagnose(job(), replace(told, baseline=first))
    assert ("profiler_overhead" in {finding.cause for finding in made.findings}) is is_ours


def test_a_slowdown_some_steps_after_our_capture_is_not_ours() -> None:
    told = context(lambda step: 1.15 if step >= 66 else 1.0, range(50, 60), 115)
    assert told.earlier_capture is None


def test_a_trend_that_a_capture_interrupts_is_not_ours() -> None:
    told = context(lambda step: 1 + 0.01 * max(step - 40, 0), range(50, 60), 135)
    assert told.earlier_capture is None


def test_a_rank_that_becomes_slow_at_the_end_of_our_capture_is_blamed_itself() -> None:
    told = context(lambda step: 1.3 if step >= 60 else 1.0, range(50, 60), 130)
    assert told.earlier_capture is not None
    made = diagnose(job(2, 1.3), told)
    assert [(f.scope, f.ranks) for f in made.findings] == [("rank", "2")]


def noticed(observed_s: float, change: str = "slow") -> Context:
    return Context(trigger="slowdown", noticed=Turn(80, change, 0.1, observed_s), baseline=job())


def test_a_slowdown_that_is_gone_in_the_window_is_recovered_and_blames_nobody() -> None:
    made = diagnose(job(), noticed(0.15))
    assert (made.kind, made.findings, made.verdict.ranks) == ("recovered", (), "")
    assert "gone in the window" in made.verdict.summary and "step 80" in made.verdict.summary


def test_slow_iterations_that_recur_are_not_over_because_one_window_shows_none() -> None:
    assert diagnose(job(), noticed(0.15, "recurring")).kind == "healthy"


def test_a_window_of_much_shorter_iterations_says_nothing_about_those_that_were_slow() -> None:
    told = replace(noticed(0.15), noticed=Turn(80, "slow", 0.3, 0.36))
    assert diagnose(job(), told).kind == "healthy"


def test_all_ranks_slower_without_a_healthy_window_are_told_with_nothing_ruled_in() -> None:
    told = Context(trigger="slowdown", noticed=Turn(80, "slow", 0.1, 0.15), onset=70)
    made = diagnose(stack(h.job([h.Rank(own=0.14, length=0.15, samples=[h.Sample(0.01, 0.14)])] * 4)), told)
    assert [(f.cause, f.scope) for f in made.findings] == [("unknown", "all")]


def phases(train: float, generate: float) -> Stacked:
    """Iterations of 20 s of training or 60 s of generation, in these shares."""
    own = 20 * train + 60 * generate
    seconds = {TRAIN: 20 * train, GENERATE: 60 * generate}
    rank = h.Rank(own=own, length=own + 1, samples=[h.Sample(1.0, own)], functions=seconds)
    made = []
    for summary in h.job([rank] * 4):
        counts = {TRAIN: train, GENERATE: generate}
        count = np.array([counts[f] for f in summary.patterns.functions], np.float32)
        made.append(replace(summary, patterns=replace(summary.patterns, count=count)))
    return stack(made)


@pytest.mark.parametrize(
    ("now", "then"), [((0.0, 1.0), (1.0, 0.0)), ((0.4, 0.6), (0.6, 0.4)), ((0.6, 0.4), (0.7, 0.3))]
)
def test_more_of_the_longer_phase_is_not_compared_with_less_of_it(
    now: tuple[float, float], then: tuple[float, float]
) -> None:
    made = diagnose(phases(*now), Context(trigger="manual", baseline=phases(*then)))
    assert made.kind == "healthy" and any("other work" in note for note in made.coverage.notes)


def test_a_slower_pace_that_other_work_explains_is_no_slowdown_and_one_within_that_work_is() -> None:
    told = Context(trigger="slowdown", noticed=Turn(80, "slow", 21.0, 61.0), baseline=phases(1.0, 0.0))
    made = diagnose(phases(0.0, 1.0), told)
    assert (made.kind, made.iteration.baseline_s) == ("healthy", None)
    made = diagnose(phases(0.0, 1.2), replace(told, noticed=Turn(80, "slow", 61.0, 73.0)))
    assert [(f.cause, f.scope) for f in made.findings] == [("unknown", "all")]


def test_iterations_with_more_of_everything_are_not_compared_and_those_with_more_of_one_thing_are() -> None:
    made = diagnose(phases(1.4, 1.4), Context(trigger="manual", baseline=phases(1.0, 1.0)))
    assert made.kind == "healthy" and any("other work" in note for note in made.coverage.notes)
    grown = diagnose(phases(1.0, 1.5), Context(trigger="manual", baseline=phases(1.0, 1.0)))
    assert [(f.scope, f.function and f.function.name) for f in grown.findings] == [("all", "paged_attention")]


def test_one_long_step_in_a_window_is_no_level_of_all_ranks() -> None:
    length = [0.1] * 7 + [0.9]
    once = h.Rank(own=[0.09] * 7 + [0.89], length=length, samples=[h.Sample(0.01, 0.09)])
    made = diagnose(stack(h.job([once] * 4)), Context(trigger="manual", baseline=job()))
    assert made.kind == "healthy"
