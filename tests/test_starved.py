"""Loaders whose workers fill the cores: all ranks want for batches, whichever of them waits in a step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from eroica.context import Context
from eroica.critical_path import Activity
from eroica.diagnosis import diagnose
from eroica.findings import Diagnosis
from eroica.pattern import Function, stack
from eroica.samplers.evidence import Counted
from eroica.samplers.standout import stand_out
from tests import handmade as h

PYTHON = Function(Activity.PYTHON, "forward", "train.py:30", "train.py:30")
QUEUE = Function(Activity.INPUT, "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", None, "train.py:20")
STEPS = 16


def host(children: float, busy: float = 1.9) -> list[Counted]:
    """Two cores; workers of four ranks use so much of them."""
    labels = {"children": "pt_data_worker (pid 7) 0.2 cores"}
    of_ranks = [
        Counted(kind="rank", name=str(rank), rank=rank, values={"children_cpu": children / 4}, labels=labels)
        for rank in range(4)
    ]
    values = {"num_cores": 2.0, "busy_cores": busy}
    return [*of_ranks, Counted(kind="host", name="", rank=None, values=values, labels={})]


def said(late: Sequence[Sequence[int]], counted: list[Counted], wait_s: float = 0.4) -> Diagnosis:
    """Four ranks compute for 0.5 s; `late`: whose batch comes late in a step, by turns."""
    slow = [[wait_s if rank in late[step % len(late)] else 0.0 for step in range(STEPS)] for rank in range(4)]
    longest = [max(of_step) for of_step in zip(*slow, strict=True)]
    ranks = [
        h.Rank(
            own=[0.5 + waits for waits in mine],
            length=[0.6 + most for most in longest],
            samples=[h.Sample(0.1, work_before=0.5)],
            functions={PYTHON: 0.5, QUEUE: sum(mine) / STEPS},
            tops={step: (1, waits, float("nan")) for step, waits in enumerate(mine) if waits},
            has_device=False,
            host="a",
        )
        for mine in slow
    ]
    return diagnose(stack(h.job(ranks, STEPS)), Context(counters=stand_out({"a": counted})))


BY_TURNS = [[0, 2], [1], [3, 0], [2, 1], [3]]


def test_batches_that_are_late_by_turns_are_all_ranks_where_workers_fill_the_cores() -> None:
    found = said(BY_TURNS, host(1.5))
    (finding,) = found.findings
    assert (finding.scope, finding.cause, finding.ranks, finding.steps) == ("all", "input_pipeline", "0-3", "stable")
    assert finding.impact.seconds_per_iteration == pytest.approx(0.4, rel=0.1)
    told = " ".join(found.evidence[one].text for one in finding.evidence)
    assert "processes that 4 ranks have started use 1.5 of 2 CPU cores" in told and "pt_data_worker" in told
    assert "CPU cores per rank" in finding.advice


@pytest.mark.parametrize("counted", [host(0.6), host(1.5, busy=1.6)])
def test_they_move_over_the_ranks_where_cores_are_left(counted: list[Counted]) -> None:
    (finding,) = said(BY_TURNS, counted).findings
    assert (finding.scope, finding.cause) == ("rotating", "input_pipeline")


def test_the_same_rank_each_time_is_this_rank_also_where_workers_fill_the_cores() -> None:
    (finding,) = said([[1]], host(1.5)).findings
    assert (finding.scope, finding.ranks, finding.cause) == ("rank", "1", "input_pipeline")


def test_workers_that_fill_the_cores_and_are_in_time_are_no_finding() -> None:
    assert said([[]], host(1.9)).findings == ()
