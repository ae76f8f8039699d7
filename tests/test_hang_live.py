"""Real ranks on gloo, halted in real ways, explained from outside, and killed. See `hang_job.py` for the ways."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from eroica import cli
from eroica.findings import Diagnosis
from eroica.hang import explain
from eroica.job import parse_ranks
from eroica.standing import RankView
from eroica.views import look_closer

ROOT = Path(__file__).parent.parent
JOB = ROOT / "tests" / "hang_job.py"
LIMIT_S = 2.0
"""Silence that counts as standing still; the job's steps take a millisecond."""
PATIENCE_S = 240.0

pytestmark = pytest.mark.e2e


@dataclass(frozen=True)
class _Job:
    ranks: list[subprocess.Popen[str]]
    rings: Path

    def look(self, *, with_stacks: bool = True) -> list[RankView]:
        return look_closer(self.rings, with_stacks=with_stacks).views

    def explained(self) -> Diagnosis | None:
        closer = look_closer(self.rings)
        return explain(closer.views, world_size=closer.world_size, job=closer.job, limit_s=LIMIT_S)

    def wait(self, until: Callable[[list[RankView]], bool]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not until(self.look(with_stacks=False)):
            assert time.monotonic() < end, self.look()
            time.sleep(0.2)

    def stand_still(self) -> None:
        self.wait(lambda views: all(v.silent_s is None or v.silent_s > LIMIT_S for v in views))


@contextmanager
def _job(folder: Path, fault: str, size: int = 4) -> Iterator[_Job]:
    """The job, once every rank that comes so far has said that it is about to stand still."""
    clean = {name: value for name, value in os.environ.items() if name[:6] != "EROICA" and "RANK" not in name}
    rings = folder / "rings"
    environ = {**clean, "PYTHONPATH": str(ROOT), "EROICA_RING_DIR": str(rings), "WORLD_SIZE": str(size)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(JOB), fault, str(folder / "rendezvous")],
            env={**environ, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            rank.stdout.readline()  # or the end of the output, from a rank that has gone
        yield _Job(ranks, rings)
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.communicate()


def _halted(folder: Path, fault: str) -> Diagnosis:
    with _job(folder, fault) as job:
        job.stand_still()
        found = job.explained()
        assert found is not None
        return found


def _full(*values: str) -> ParameterSet:
    """For `make test-full` only."""
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("fault", "kind", "cause", "ranks", "confidence", "says"),
    [
        ("missing", "hang", "missing_rank", "1", "established", r"allreduce 4 of default_pg.*in decode.*hang_job.py"),
        _full("backward", "hang", "missing_rank", "1", "established", r"allreduce .* of default_pg.*in decode"),
        _full(
            "skipped", "hang", "collective_mismatch", "1", "established", r"barrier where .*left a call out in step 5"
        ),
        _full("order", "hang", "deadlock", "0", "established", r"rank 0 in allreduce 1 of group 2 .*hang_job.py:\d+"),
        _full(
            "operation", "hang", "collective_mismatch", "2", "established", r"broadcast of 16 bytes.*allreduce of 16"
        ),
        _full(
            "size", "hang", "collective_mismatch", "2", "established", r"allreduce of 32 bytes.*allreduce of 16 bytes"
        ),
        _full("receive", "hang", "deadlock", "0-1", "established", r"recv 1 .*each waits for the other"),
        _full("queue_worker", "hang", "dead_worker", "1", "established", r"queue_worker.*killed by SIGKILL"),
        _full(
            "lock",
            "hang",
            "deadlock",
            "1",
            "supported",
            r"waits for SECOND .*holding FIRST; thread prefetch waits for FI",
        ),
        _full(
            "cleans_up", "hang", "exception", "1", "established", r"ValueError: no such batch at .*hang_job.py:180; its"
        ),
        _full("leaves", "hang", "missing_rank", "1", "established", r"in leaves.*it has taken its process group down"),
        _full("goodbye", "hang", "exception", "1", "established", r"ValueError: no such batch at .*hang_job.py:\d+"),
        (
            "checkpoint",
            "paused",
            "checkpoint_io",
            "0",
            "established",
            r"saves a checkpoint for .*write \(.*hang_job.py",
        ),
        _full("evaluation", "paused", "none", "0", "supported", r"evaluates for .*evaluate \(.*hang_job.py"),
        _full("gil", "hang", "missing_rank", "1", "established", r"in gil at .*holding the GIL"),
    ],
)
def test_a_real_hang_is_explained_from_outside(
    tmp_path: Path, fault: str, kind: str, cause: str, ranks: str, confidence: str, says: str
) -> None:
    found = _halted(tmp_path, fault)
    verdict = found.verdict
    assert (found.kind, verdict.cause, verdict.ranks, verdict.confidence) == (kind, cause, ranks, confidence), verdict
    assert re.search(says, verdict.summary), verdict.summary
    blamed = set(parse_ranks(found.findings[0].ranks))
    assert all(not blamed & set(parse_ranks(item.ranks)) for item in found.consequences)


@pytest.mark.parametrize(
    ("fault", "cause", "says"),
    [
        _full("raises", "exception", r"rank 1: ValueError: no such batch at .*hang_job.py:\d+"),
        ("killed", "dead_worker", r"rank 1: the process died \(killed by SIGKILL\)"),
        _full("loader_worker", "dead_worker", r"rank 1: (RuntimeError: DataLoader worker|ConnectionResetError)"),
    ],
)
def test_a_rank_that_left_is_told_from_those_that_followed(tmp_path: Path, fault: str, cause: str, says: str) -> None:
    with _job(tmp_path, fault) as job:
        job.wait(lambda views: all(v.state in ("ended", "died") for v in views))
        found = job.explained()
    assert found is not None
    assert (found.kind, found.verdict.cause, found.verdict.ranks) == ("crash", cause, "1"), found.verdict
    assert re.search(says, found.verdict.summary), found.verdict.summary


@pytest.mark.full
def test_a_stopped_rank_is_named_as_stopped_and_left_so(tmp_path: Path) -> None:
    with _job(tmp_path, "stopped") as job:
        os.kill(job.ranks[1].pid, signal.SIGSTOP)
        job.stand_still()
        found = job.explained()
        assert [view.state for view in job.look()] == ["running", "stopped", "running", "running"]
        assert all(view.threads for view in job.look())  # a stopped process, too, shows its stack
    assert found is not None
    assert (found.verdict.cause, found.verdict.ranks, found.verdict.confidence) == ("missing_rank", "1", "established")
    assert "stopped by a signal" in found.verdict.summary


@pytest.mark.full
def test_jobs_that_train_or_come_late_but_move_are_not_hung(tmp_path: Path) -> None:
    with _job(tmp_path, "healthy", size=2) as job:
        job.wait(lambda views: all(view.num_steps > 20 for view in views))
        assert job.explained() is None
    late = tmp_path / "late"
    late.mkdir()
    with _job(late, "slow_but_moving", size=2) as job:
        job.wait(lambda views: views[0].silent_s is not None and views[0].silent_s > LIMIT_S)
        assert job.explained() is None


@pytest.mark.full
def test_a_job_that_shuts_down_is_not_hung(tmp_path: Path) -> None:
    with _job(tmp_path, "teardown", size=2) as job:
        job.wait(lambda views: [v.state for v in views][1:] == ["ended"] and (views[0].silent_s or 0) > LIMIT_S)
        assert job.explained() is None


@pytest.mark.full
def test_show_says_on_top_why_a_job_stands_still(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with _job(tmp_path, "missing", size=2) as job:
        job.wait(lambda views: all(view.silent_s is not None and view.silent_s > 11 for view in views))
        assert cli.main(["show", str(job.rings)]) == 0
        first, *rest = capsys.readouterr().out.splitlines()
        assert re.match(r"HANG: rank 1: has not come to allreduce 4 of default_pg; it is in decode", first)
        assert any(line.startswith("post-mortem of") for line in rest)
        assert cli.main(["show", str(job.rings), "--format", "json"]) == 0
        said = json.loads(capsys.readouterr().out)
    assert said["schema"] == "eroica.postmortem/1"
    assert said["explanation"]["schema"] == "eroica.diagnosis/1"
    assert said["explanation"]["verdict"]["cause"] == "missing_rank"


@pytest.mark.full
def test_where_nobody_may_look_the_rank_itself_has_left_its_stacks(tmp_path: Path) -> None:
    with _job(tmp_path, "missing", size=2) as job:
        left = [job.rings / f"rank{view.rank}-{view.pid}.stacks" for view in job.look(with_stacks=False)]
        job.wait(lambda _: all(path.exists() and path.stat().st_size for path in left))
        closer = look_closer(job.rings, may_trace=False)
        assert [view.stack_source for view in closer.views] == ["faulthandler"] * 2
        found = explain(closer.views, world_size=2, limit_s=LIMIT_S)
    assert found is not None and "it is in decode" in found.verdict.summary
    assert (found.verdict.cause, found.verdict.ranks) == ("missing_rank", "1")
