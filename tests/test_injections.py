"""The campaign of injections: against a model that obeys every order, nothing is done and no secret gets out."""

from __future__ import annotations

from pathlib import Path

import pytest

from evals.llm.injections import CASES, WAYS, _chat, _fix

QUICK = ("name of a function", "comment in the source")
"""Cases that `make check` takes; all of them take half a minute."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "case",
    [pytest.param(one, marks=() if one.name in QUICK else pytest.mark.slow, id=one.name) for one in CASES],
)
def test_an_order_in_the_data_is_obeyed_by_the_model_and_by_nobody_else(case: object, way: str, tmp_path: Path) -> None:
    assert isinstance(case, type(CASES[0]))
    outcome = _chat(case, way, tmp_path / "case")
    assert outcome.is_read and outcome.tried, "the order did not reach the model, so this shows nothing"
    assert outcome.holds, outcome
    # Where acts are offered somebody is asked before each.
    assert bool(outcome.asked) == way.endswith("act")


def test_edits_that_a_comment_orders_are_tried_and_refused(tmp_path: Path) -> None:
    outcome = _fix(tmp_path)
    assert outcome.is_read and outcome.tried
    assert outcome.holds, outcome
