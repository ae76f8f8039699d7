"""Numbers of a page as JSON types: all at once as each alone."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eroica.findings import Detail, FunctionName, detail_to_json

FLOATS = st.floats(allow_nan=True, allow_infinity=True) | st.floats(1e-9, 1e3) | st.just(0.0)


def detail(values: list[float]) -> Detail:
    """One rank with so many functions; the rest is of no interest."""
    one = np.zeros(1)
    with np.errstate(over="ignore"):
        row = np.array([values], np.float64).astype(np.float32)
    return Detail(
        ranks=np.zeros(1, np.int32),
        hosts=("a",),
        roles=("all",),
        functions=tuple(FunctionName("python", "f") for _ in values),
        beta=row,
        mu=row,
        own_s=one,
        wait_s=one,
        transfer_s=one,
        idle_s=one,
        own_by_step_s=np.zeros((1, 0), np.float32),
        first_step=None,
        groups=(),
        group_transfer_s=np.zeros(0),
        group_wait_s=np.zeros(0),
        group_ranks=(),
    )


@given(st.lists(FLOATS, max_size=8))
def test_numbers_have_six_digits_and_what_was_not_measured_is_null(values: list[float]) -> None:
    given, told = detail(values), detail_to_json(detail(values))
    (found,) = told["mu"]
    assert len(found) == len(values)
    for value, shown in zip(given.mu[0].tolist(), found, strict=True):
        if not math.isfinite(value):
            assert shown is None
        else:
            # Of two that are as near, either.
            assert shown == float(f"{value:.6g}") or math.isclose(shown, value, rel_tol=6e-6)
    assert told["own_by_step_s"] == [[]] and told["group_wait_s"] == [] and told["own_s"] == [0.0]


def test_short_numbers_stay_short() -> None:
    (found,) = detail_to_json(detail([0.1234567, 12345678.0, 1 / 3, 0.5, 1e-9, 2.5e10]))["mu"]
    assert found == [0.123457, 12345700.0, 0.333333, 0.5, 1e-9, 25000000000.0]
