"""A slow rank of one window that is another one in the next."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from eroica.background import History, Lap, context_of
from eroica.critical_path import Activity
from eroica.degradation import Change, Trigger
from eroica.diagnosis import diagnose
from eroica.findings import Diagnosis
from eroica.pattern import Function, stack
from tests import handmade as h

LOAD = Function(Activity.INPUT, "__getitem__", "data.py:7", "data.py:7")
FIRST, ONSET, END = 100, 140, 200
"""Steps that the rings tell; the window is 192 to 199."""


def said(slow_in: Callable[[int], int], seen: bool = True) -> Diagnosis:
    """Rank 1 is slow in the window; before it, the rank that `slow_in` gives for each step since the onset."""
    ranks = []
    for rank in range(4):
        own = 0.9 if rank == 1 else 0.6
        meet = h.Sample(1.0 - own, work_before=own, channel=h.everyone(4))
        ranks.append(h.Rank(own=own, length=1.0, samples=[meet], functions={h.GEMM: 0.5, LOAD: own - 0.5}))
    made = h.job(ranks)
    made = [h.less(summary, steps=summary.ledger.steps + 192) for summary in made]
    histories = {}
    for rank in range(4):
        laps, now = [], 0
        for step in range(FIRST, END):
            slow = slow_in(step) if ONSET <= step < 192 else 1 if step >= 192 else -1
            lasts = 700 if slow < 0 else 1000
            waited = 100 if slow in (-1, rank) else 400
            laps.append(Lap(step, now, lasts * h.MS, "", waited_ns=waited * h.MS if seen else -1))
            now += lasts * h.MS
        histories[rank] = History(tuple(laps))
    cause = Trigger(
        change=Change.SLOW, time_ns=0, generation=0, step=150, number=150, baseline_ns=700 * h.MS,
        observed_ns=1000 * h.MS, cost=0.3,
    )  # fmt: skip
    return diagnose(stack(made), context_of(histories, {}, {}, cause, range(192, 200)))


def test_a_rank_that_was_slow_all_the_time_is_named() -> None:
    found = said(lambda step: 1)
    assert (found.verdict.scope, found.verdict.ranks, found.verdict.cause) == ("rank", "1", "input_pipeline")


@pytest.mark.parametrize("every", [1, 10])
def test_where_the_slow_rank_changes_nobody_is_named_and_the_cause_stays(every: int) -> None:
    found = said(lambda step: step // every % 4)
    (finding,) = found.findings
    assert (finding.scope, finding.ranks, finding.cause, finding.hosts) == ("rotating", "", "input_pipeline", ())
    assert any("the slow rank changes" in evidence.text for evidence in found.evidence.values())


def test_without_ends_of_collectives_the_window_alone_counts() -> None:
    assert said(lambda step: step % 4, seen=False).verdict.ranks == "1"


def test_a_rank_beside_a_rotating_delay_stays_named() -> None:
    assert said(lambda step: 2 if step % 3 == 0 else 1).verdict.ranks == "1"
