"""What of a step's length the load of its operators explains."""

from __future__ import annotations

import random

import numpy as np
import pytest

from eroica.context import Context
from eroica.diagnosis import diagnose
from eroica.load import explained_by_load
from eroica.pattern import stack, summarize
from eroica.trace import Trace
from tests import handmade as h

STEPS = 24


def steps_of(rank: int, pieces: list[int], more: list[int], sizes: bool = False) -> Trace:
    """A rank whose step k works `pieces[k]` pieces of 10 ms off, spends `more[k]` ms besides and waits for the rest.

    sizes: one operator does all pieces, and tells how many they are.
    """
    events, now = [], 0
    for step in range(STEPS):
        begin = now
        for piece in range(1 if sizes else pieces[step]):
            lasts = (10 * pieces[step] if sizes else 10) * h.MS
            events.append(h.op("aten::mm", now, lasts, work=1000 * pieces[step] if sizes else -1))
            events.append(h.frame("train.py(7): forward", now + h.MS, lasts - 2 * h.MS))
            now += lasts
            del piece
        if more[step]:
            events.append(h.frame("train.py(9): log", now, more[step] * h.MS))
            now += more[step] * h.MS
        events.append(h.op("aten::add_", now, h.MS, work=10**6 if sizes else -1))  # the same in each step
        now += h.MS
        end = begin + 130 * h.MS
        events.append(h.op("c10d::allreduce_", now, end - now, comm=h.Comm(transfers=False)))
        events.append(h.mark("gloo:all_reduce", now, end - now, thread="2", comm=h.Comm()))
        events.append(h.mark(f"ProfilerStep#{step}", begin, end - begin))
        now = end
    return h.trace(events, rank=rank)


def said(pieces: list[list[int]], more: list[list[int]], sizes: bool = False) -> tuple[str, str, str]:
    ranks = [summarize(steps_of(rank, pieces[rank], more[rank], sizes)) for rank in range(4)]
    assert all(trace_has_no_device(rank) for rank in ranks)
    verdict = diagnose(stack(ranks), Context()).verdict
    return verdict.cause, verdict.scope, verdict.ranks


def trace_has_no_device(summary: object) -> bool:
    return not summary.coverage.has_device  # type: ignore[attr-defined]


USUAL, NOTHING = [6] * STEPS, [0] * STEPS


def in_turn(usual: int, high: int, every: int = 1) -> list[list[int]]:
    """Each rank has the high value in its own steps."""
    return [[high if step // every % 4 == rank else usual for step in range(STEPS)] for rank in range(4)]


@pytest.mark.parametrize("sizes", [False, True], ids=["number", "sizes"])
@pytest.mark.parametrize("every", [1, 3])
def test_work_that_is_uneven_in_turn_is_load_imbalance_of_no_rank(every: int, sizes: bool) -> None:
    assert said(in_turn(6, 10, every), [NOTHING] * 4, sizes) == ("load_imbalance", "rotating", "")


@pytest.mark.parametrize("seed", range(4))
def test_work_that_is_high_in_half_of_the_steps_of_each_rank_is_load_imbalance_of_no_rank(seed: int) -> None:
    """Then no median is anybody's usual step."""
    draw = random.Random(seed)
    pieces = [[draw.choice((6, 6, 10, 10, 10)) for _ in range(STEPS)] for _ in range(4)]
    assert said(pieces, [NOTHING] * 4) == ("load_imbalance", "rotating", "")


def test_a_delay_in_turn_beside_even_work_is_no_load_imbalance() -> None:
    cause, scope, _ = said([USUAL] * 4, in_turn(0, 40))
    assert scope == "rotating" and cause != "load_imbalance"


def test_a_step_with_an_operator_more_does_not_explain_that_it_takes_twice_as_long() -> None:
    cause, scope, _ = said(in_turn(5, 6), in_turn(0, 60))
    assert scope == "rotating" and cause != "load_imbalance"


def test_a_load_that_varies_without_the_time_explains_nothing_and_an_even_one_tells_nothing() -> None:
    load = np.array([5.0, 9.0] * 8)
    assert explained_by_load(np.array([1.0, 1.0, 2.0, 2.0] * 4), load, True).max() == 0.0
    assert np.isnan(explained_by_load(np.array([1.0, 1.0, 2.0, 2.0] * 4), load, False)).all()
    assert np.isnan(explained_by_load(np.array([1.0, 2.0] * 8), np.full(16, 5.0), True)).all()
    assert np.isnan(explained_by_load(np.ones(4), np.ones(4), True)).all()


def test_time_that_follows_the_load_is_explained_by_it() -> None:
    load = np.array([4.0, 4.0, 4.0, 8.0] * 4)
    found = explained_by_load(load / 4, load, False)
    assert found[3] == pytest.approx(1.0) and np.isnan(found[0])
