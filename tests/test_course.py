"""How the pace of a job went to what it is, in a sentence: a trend, two levels by turns, or nothing worth one."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from eroica.context import Context, Series, Turn
from eroica.course import course_of


def series(factor: Callable[[int], float], num: int = 200, seed: int = 1) -> Context:
    """Iterations of 0.1 s times a factor, under 1 % of noise."""
    draw = random.Random(seed)
    return Context(
        series=[Series(0, tuple(range(num)), tuple(0.1 * factor(i) * (1 + draw.gauss(0.0, 0.01)) for i in range(num)))]
    )


@pytest.mark.parametrize("each", [0.001, 0.005, 0.02])
def test_iterations_that_grow_step_by_step_are_a_trend(each: float) -> None:
    told = course_of(series(lambda i: 1 + each * max(i - 120, 0)), None)
    assert told is not None and "longer and longer" in told[0]
    assert told[1]["per_step"] == pytest.approx(each, rel=0.3)


@pytest.mark.parametrize("factor", [1.0, 1.1, 1.5, 4.0])
def test_iterations_that_are_longer_at_once_are_no_trend(factor: float) -> None:
    for seed in range(5):
        assert course_of(series(lambda i: factor if i >= 150 else 1.0, seed=seed), None) is None


def test_single_long_iterations_are_no_trend() -> None:
    assert course_of(series(lambda i: 30.0 if i in (40, 150, 190) else 1.0), None) is None


def test_iterations_of_the_window_itself_do_not_make_a_trend() -> None:
    assert course_of(series(lambda i: 1 + 0.05 * max(i - 180, 0)), 180) is None


def test_slow_and_fast_by_turns_are_two_levels() -> None:
    slow, fast = Turn(300, "slow", 0.063, 0.094), Turn(520, "recovered", 0.063, 0.064)
    told = course_of(Context(turns=[slow, fast, Turn(700, "slow", 0.063, 0.095)]), None)
    assert told is not None and "two levels" in told[0] and "slow by step 300, fast by step 520" in told[0]


def test_slowdowns_of_different_sizes_are_no_two_levels() -> None:
    slow, fast = Turn(300, "slow", 0.063, 0.094), Turn(520, "recovered", 0.063, 0.064)
    assert course_of(Context(turns=[slow, fast, Turn(700, "slow", 0.063, 0.2)]), None) is None
    assert course_of(Context(turns=[slow]), None) is None
