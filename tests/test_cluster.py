"""A job over two hosts that are network namespaces, with all that a cluster has; and how harm done to it is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from eroica.errors import UnavailableError
from evals.campaign import FAULTS, SLOW, Campaign, Row, Stage, judged, table
from evals.cluster import CULPRIT, ONSET, STEPS, Cluster, Ended
from evals.namespaces import Site

ROOT = Path(__file__).parent.parent
JOB = Path(__file__).with_name("live_job.py")
SOUND = Ended(0, "5eed", 19.0, ({"id": "a1"},), ({"id": "a1"},), ())


def passed(fault: str = "agent", note: str = "host a", told: tuple[str, ...] = (SLOW,)) -> Row:
    return Row(fault, note, "slowdown, capturing", 0, False, 19.0, told, ())


@pytest.mark.full
@pytest.mark.e2e
@pytest.mark.skipif(os.getuid() != 0, reason="network namespaces need root")
def test_a_job_over_two_namespaces_is_diagnosed_as_on_one_host_with_rank_and_host_right(tmp_path: Path) -> None:
    campaign = [sys.executable, "-m", "evals", "faults", "--fault", "none", "--times", "1", "--keep", str(tmp_path)]
    made = subprocess.run(campaign, capture_output=True, text=True, timeout=400, cwd=ROOT)
    assert made.returncode == 0, made.stderr
    (path,) = (tmp_path / "none-1" / "out" / "waves").glob("diagnosis-*.json")
    over_two = json.loads(path.read_text())
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(JOB)]
    words = [str(STEPS), "slow", str(ONSET), str(CULPRIT)]
    run = [sys.executable, "-m", "eroica", "run", "--out", str(tmp_path / "one"), "--", *launcher, *words]
    alone = subprocess.run(run, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    (path,) = (tmp_path / "one").glob("diagnosis-*.json")
    on_one = json.loads(path.read_text())

    def answer(told: dict[str, Any]) -> tuple[object, ...]:
        verdict, first = told["verdict"], told["findings"][0]
        return told["kind"], verdict["scope"], verdict["ranks"], verdict["cause"], first["function"]["name"]

    assert answer(over_two) == answer(on_one), (over_two["verdict"], on_one["verdict"])
    assert over_two["verdict"]["hosts"] == ["b"] and over_two["placement"]["hosts"] == {"a": "0-1", "b": "2-3"}
    assert over_two["coverage"]["ranks_reported"] == 4


def test_a_run_that_ends_as_the_undisturbed_one_and_is_told_of_once_has_passed() -> None:
    row = judged(passed(), SOUND, "5eed", 18.0)
    assert row.problems == () and row.is_equal
    assert list(table([row]))[-1] == f"| {FAULTS['agent'][0]} | 1 | 1 | 0 | 1 | 19.0, 19.0 | 1 |"


@pytest.mark.parametrize(
    ("ended", "told", "problem"),
    [
        (replace(SOUND, status=1), (SLOW,), "ended with status 1"),
        (replace(SOUND, weights="else"), (SLOW,), "weights are others"),
        (replace(SOUND, weights=""), (SLOW,), "no equal weights"),
        (replace(SOUND, seconds=30.0), (SLOW,), "took 30.0 s"),
        (SOUND, (), "incident is lost"),
        (SOUND, (SLOW, SLOW), "incident is doubled"),
        (SOUND, (SLOW, "slow: profiler_overhead, rank 0-1 on a"), "also told"),
        (replace(SOUND, lines=()), (SLOW,), "incidents.jsonl has none"),
        (replace(SOUND, left=("process nats-server",)), (SLOW,), "left behind: process nats-server"),
    ],
)
def test_whatever_is_wrong_with_a_run_is_named(ended: Ended, told: tuple[str, ...], problem: str) -> None:
    (named,) = judged(passed(told=told), ended, "5eed", 18.0).problems
    assert problem in named


class _Broken(Cluster):
    """Ends as a run does in which something of the campaign itself fails."""

    why: Exception

    def start(self) -> None:
        raise self.why


@pytest.mark.parametrize("why", [UnavailableError("nobody answers"), ProcessLookupError(3, "no such process")])
def test_a_run_in_which_the_campaign_itself_fails_is_a_row_and_the_others_are_run(
    why: Exception, tmp_path: Path
) -> None:
    cluster = _Broken(Site.__new__(Site), tmp_path, "")
    cluster.why = why
    row, ended = Campaign.__new__(Campaign)._one(Stage(cluster, Random(1), None), "agent")
    assert ended is None and str(why) in row.problems[0]


def test_the_death_of_a_rank_must_be_told_once_with_that_rank() -> None:
    ended = replace(SOUND, status=1, weights="", seconds=0.0)
    crash = "crash: dead_worker, rank 3 on b"
    assert judged(passed("rank", "rank 3", (crash,)), ended, "5eed", 18.0).problems == ()
    assert judged(passed("rank", "rank 3", (SLOW, crash)), ended, "5eed", 18.0).problems == ()
    for told in ((), (crash, crash), ("crash: dead_worker, rank 1 on a",), (SLOW, SLOW, crash)):
        assert judged(passed("rank", "rank 3", told), ended, "5eed", 18.0).problems


def test_a_harm_that_came_too_late_does_not_count() -> None:
    assert "no window was open" in judged(replace(passed(), at=""), SOUND, "5eed", 18.0).problems[0]
