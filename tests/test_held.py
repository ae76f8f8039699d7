"""Ranks that are stopped from outside, as their states beside the window show."""

from __future__ import annotations

from collections.abc import Sequence

from eroica.context import Context
from eroica.critical_path import Activity
from eroica.diagnosis import diagnose
from eroica.findings import Diagnosis
from eroica.pattern import Function, stack
from eroica.samplers.evidence import Counted
from eroica.samplers.standout import stand_out
from tests import handmade as h

OPERATOR = Function(Activity.OPERATOR, "aten::addmm", "train.py:9", "train.py:9")
SLEEP = Function(Activity.PYTHON, "wait", "train.py:31", "train.py:31")


def states(shares: Sequence[float], tracer: int = 0) -> Context:
    """Counters of ranks that were found stopped for these shares of the readings."""
    counted = [
        Counted(
            kind="rank",
            name=str(rank),
            rank=rank,
            values={"stopped_ratio": share, "tracer_pid": float(tracer if share else 0)},
            labels={},
        )
        for rank, share in enumerate(shares)
    ]
    return Context(counters=stand_out({"host0": counted}))


def said(slow: float, context: Context) -> Diagnosis:
    """Four ranks; rank 2 takes longer by `slow`, and the others wait for it."""
    ranks = []
    for rank in range(4):
        extra = slow if rank == 2 else 0.0
        meet = h.Sample(0.05 + slow - extra, work_before=0.9 + extra, channel=h.everyone(4))
        spent = {OPERATOR: 0.5 + extra, SLEEP: 0.4}
        ranks.append(
            h.Rank(own=0.9 + extra, length=0.95 + slow, samples=[meet], functions=spent, has_device=False, host="host0")
        )
    return diagnose(stack(h.job(ranks)), context)


def test_a_rank_that_is_stopped_again_and_again_is_named_with_its_tracer_and_without_a_function() -> None:
    found = said(0.6, states([0, 0, 0.4, 0], tracer=77))
    (finding,) = found.findings
    assert (finding.cause, finding.scope, finding.ranks, finding.function) == ("profiler_overhead", "rank", "2", None)
    assert "process 77" in found.evidence[finding.evidence[1]].text


def test_stops_by_signals_are_told_without_a_tracer() -> None:
    (finding,) = said(0.6, states([0, 0, 0.4, 0])).findings
    assert finding.cause == "profiler_overhead" and finding.confidence == "established"


def test_one_stop_in_a_window_is_no_finding_and_explains_none() -> None:
    found = said(0.6, states([0, 0, 0.05, 0]))
    assert [f.cause for f in found.findings] != ["profiler_overhead"] and found.findings[0].ranks == "2"


def test_an_excess_that_is_much_longer_than_the_stops_stays_a_finding() -> None:
    found = said(4.0, states([0, 0, 0.15, 0]))
    assert {f.cause for f in found.findings} > {"profiler_overhead"}


def test_stops_of_one_rank_leave_the_finding_of_another() -> None:
    found = said(0.6, states([0.4, 0, 0, 0]))
    assert {f.ranks for f in found.findings} == {"0", "2"}
