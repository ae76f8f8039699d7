"""A small stable part of the fault catalogue by the way that `make evals` runs all of it: real trainings under
`eroica run`, and jobs made up from traces, rings and iterations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evals import catalogue, suites
from evals.catalogue import Case
from evals.made import Draw

LIVE = ("D01", "C06")
"""A rank that becomes slow, and groups in opposite order."""
MORE = ("C01", "Z05")
"""For `make test-full`: a rank that does not come, and a job in which nothing is wrong."""
MADE_UP = ("G01", "G04", "H04b", "I04", "L04", "L04b", "L06c", "M01", "C08b", "T08")
CASES = {case.id: case for case in catalogue.load()}
SETTLE_S = 3.0
"""Shorter than `make evals` gives wrong answers to come, since this is run before each commit."""


def outcome(case: Case, seed: int) -> tuple[float, str]:
    """Points, and what was wrong."""
    recipe = replace(case.recipe, settle_s=SETTLE_S)
    draw = Draw(seed=seed, effect=recipe.nominal, shape=recipe.shapes[seed % len(recipe.shapes)])
    result = suites.run(replace(case, recipe=recipe), draw)
    said = [
        f"{finding.cause} of {finding.scope} {finding.ranks}" for made in result.diagnoses for finding in made.findings
    ]
    return result.points, "; ".join([result.problem, *result.score.near, *result.score.false_blames, *said])


@pytest.mark.e2e
@pytest.mark.parametrize("case", [*LIVE, *(pytest.param(case, marks=pytest.mark.full) for case in MORE)])
def test_a_live_case_of_the_catalogue_is_answered_right(case: str) -> None:
    points, why = outcome(CASES[case], seed=2)
    assert points == 1, why


@pytest.mark.parametrize("case", MADE_UP)
def test_a_made_up_case_of_the_catalogue_is_answered_right(case: str) -> None:
    points, why = outcome(CASES[case], seed=1)
    assert points == 1, why
