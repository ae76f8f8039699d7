"""Windows on demand as the coordinator sees them: what is answered for a rank, and that no rank dies of a window."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from eroica import ring
from eroica.bus import Commit, Prepare
from eroica.commands import Command, Frames, State, Unit, Verb
from eroica.launch import environment_for
from eroica.ondemand import BySteps, ByTime, OnDemand
from eroica.recording import MARKS_S, Answer, Place, Recording
from tests.test_ondemand import HEADER, PATIENCE_S, QUESTION, ROOT, asking

SECOND = 1_000_000_000
ASKED = Prepare(window=3, unit=Unit.STEPS, start=160, num_steps=20, frames=Frames.TRACED)
COMMIT = Commit(window=3, expected_s=8.0)


@dataclass
class Rank:
    """This process in the place of rank 0, and of the Kineto in it."""

    folder: Path
    point: OnDemand
    recording: Recording
    client: socket.socket
    now_ns: int = field(default_factory=time.monotonic_ns)

    def at(self, count: int, **changes: object) -> dict[int, Place]:
        place = Place(
            pid=os.getpid(),
            count=count,
            num_skipped=0,
            per_iteration=1,
            iteration_s=0.1,
            lap=(count, self.now_ns),
            folder=self.folder,
            is_alive=True,
        )
        return {0: replace(place, **changes)}  # type: ignore[arg-type]

    def kineto_asks(self, is_free: bool = True) -> str:
        body = QUESTION if is_free else struct.pack("<iiq2i", 1, 2, 77, 4711, 1)
        self.client.sendto(HEADER.pack(len(body), b"req") + body, f"{self.point.address}/dynolog")
        return self.client.recv(1 << 16)[HEADER.size :].decode()

    def states(self, answers: list[Answer]) -> list[State]:
        return [answer.state for answer in answers if not answer.begins]

    @property
    def trace(self) -> Path:
        return self.folder / "captures" / "3" / "rank0_4711.json"


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    point = OnDemand(tmp_path / "job")
    recording = Recording(point)
    with asking(point) as client:
        made = Rank(tmp_path, point, recording, client)
        made.kineto_asks()
        made.now_ns = time.monotonic_ns()
        yield made
    recording.close()
    assert not (tmp_path / "job").exists()


def test_a_rank_is_prepared_asked_committed_when_it_has_heard_and_done_when_its_trace_is_complete(rank: Rank) -> None:
    recording = rank.recording
    assert rank.states(recording.prepare(ASKED, rank.at(100), rank.now_ns)) == [State.PREPARED]
    assert rank.kineto_asks() == "" and not recording.poll(rank.at(101), rank.now_ns)
    assert recording.commit(COMMIT, rank.at(101), rank.now_ns) == [] and recording.asked == (0,)
    assert rank.states(recording.poll(rank.at(110), rank.now_ns)) == []
    told = rank.kineto_asks().splitlines()
    assert {"PROFILE_START_ITERATION=159", "ACTIVITIES_ITERATIONS=20", "PROFILE_WITH_STACK=true"} <= set(told)
    assert rank.states(recording.poll(rank.at(115), rank.now_ns)) == [State.COMMITTED]
    assert [answer.begins for answer in recording.poll(rank.at(158), rank.now_ns)] == [True]
    assert recording.poll(rank.at(170), rank.now_ns) == []
    rank.trace.write_text("{}")
    assert recording.poll(rank.at(185, lap=(178, rank.now_ns)), rank.now_ns) == []  # the ring is behind
    (done,) = recording.poll(rank.at(186, lap=(181, rank.now_ns)), rank.now_ns)
    assert (done.state, done.trace, done.by_time) == (State.DONE, rank.trace, False) and not recording.is_busy


def test_a_trace_does_not_wait_for_ever_for_the_ring(rank: Rank) -> None:
    rank.recording.prepare(ASKED, rank.at(100), rank.now_ns)
    rank.recording.commit(COMMIT, rank.at(101), rank.now_ns)
    rank.kineto_asks()
    rank.trace.write_text("{}")
    behind = rank.at(185, lap=(178, rank.now_ns))
    rank.recording.poll(behind, rank.now_ns)
    (done,) = rank.recording.poll(behind, rank.now_ns + round((MARKS_S + 1) * SECOND))
    assert done.state is State.DONE


def test_a_rank_that_has_not_heard_of_a_window_when_it_begins_is_late_and_never_hears_of_it(rank: Rank) -> None:
    rank.recording.prepare(ASKED, rank.at(100), rank.now_ns)
    rank.recording.commit(COMMIT, rank.at(101), rank.now_ns)
    assert rank.states(rank.recording.poll(rank.at(159), rank.now_ns)) == [State.LATE]
    assert rank.kineto_asks() == ""


@pytest.mark.parametrize(
    ("changes", "state", "why"),
    [
        ({"pid": 1}, State.UNABLE, "does not ask for windows"),
        ({"count": 161}, State.LATE, ""),
        ({"is_alive": False}, State.DISCARDED, ""),
    ],
)
def test_a_rank_that_cannot_record_says_why(rank: Rank, changes: dict[str, object], state: State, why: str) -> None:
    place = replace(rank.at(100)[0], **changes)  # type: ignore[arg-type]
    (answer,) = rank.recording.prepare(ASKED, {0: place}, rank.now_ns)
    assert answer.state is state and why in answer.problem


def test_a_job_without_optimizer_steps_and_a_stopped_process_are_told_as_such(rank: Rank) -> None:
    (answer,) = rank.recording.prepare(replace(ASKED, unit=Unit.NEXTS), rank.at(100), rank.now_ns)
    assert answer.state is State.UNABLE and "no optimizer" in answer.problem
    (answer,) = rank.recording.prepare(ASKED, rank.at(100), rank.now_ns + 10 * SECOND)
    assert answer.state is State.UNABLE and "stopped" in answer.problem


def test_a_profiler_of_the_user_or_an_earlier_window_comes_first(rank: Rank) -> None:
    rank.kineto_asks(is_free=False)
    assert rank.states(rank.recording.prepare(ASKED, rank.at(100), time.monotonic_ns())) == [State.BUSY]


def test_where_a_scaler_has_skipped_steps_the_window_goes_by_the_clock(rank: Rank) -> None:
    rank.recording.prepare(ASKED, rank.at(100), rank.now_ns)
    rank.recording.commit(COMMIT, rank.at(100, num_skipped=2), rank.now_ns)
    told = rank.kineto_asks().splitlines()
    assert rank.recording.is_by_time and "ACTIVITIES_DURATION_MSECS=2100" in told
    (start_ms,) = (int(line.partition("=")[2]) for line in told if line.startswith("PROFILE_START_TIME="))
    assert 2_000 < start_ms - time.time() * 1e3 < 6_100


def test_after_a_trace_of_other_steps_than_were_asked_for_windows_go_by_the_clock(rank: Rank) -> None:
    learn = rank.recording.learn
    assert learn(ASKED, range(160, 180), by_time=False) == ""
    assert learn(ASKED, range(161, 180), by_time=False) == ""  # the first of them was cut
    assert learn(ASKED, range(171, 189), by_time=True) == ""
    assert "no whole iteration" in learn(ASKED, None, by_time=True)
    rank.recording.prepare(ASKED, rank.at(100), rank.now_ns)
    rank.recording.commit(COMMIT, rank.at(100), rank.now_ns)
    assert not rank.recording.is_by_time
    assert "recorded steps 120-139 where steps 160-179" in learn(ASKED, range(120, 140), by_time=False)
    rank.recording.prepare(ASKED, rank.at(100), rank.now_ns)
    rank.recording.commit(COMMIT, rank.at(100), rank.now_ns)
    assert rank.recording.is_by_time


def test_a_window_that_is_given_up_is_taken_back_or_its_trace_deleted(rank: Rank) -> None:
    recording = rank.recording
    recording.prepare(ASKED, rank.at(100), rank.now_ns)
    recording.commit(COMMIT, rank.at(101), rank.now_ns)
    assert rank.states(recording.abort(3)) == [State.ABORTED] and rank.kineto_asks() == ""
    recording.prepare(ASKED, rank.at(100), rank.now_ns)
    recording.commit(COMMIT, rank.at(101), rank.now_ns)
    assert rank.kineto_asks() != ""
    assert rank.states(recording.rest()) == [State.ABORTED]
    rank.trace.write_text("{}")
    assert recording.poll(rank.at(190), rank.now_ns) == [] and not rank.trace.exists()


def test_a_rank_that_ends_or_leaves_no_trace_is_not_waited_for(rank: Rank) -> None:
    recording = rank.recording
    recording.prepare(ASKED, rank.at(100), rank.now_ns)
    recording.commit(COMMIT, rank.at(101), rank.now_ns)
    assert rank.states(recording.poll(rank.at(150, is_alive=False), rank.now_ns)) == [State.DISCARDED]
    assert rank.kineto_asks() == ""
    recording.prepare(ASKED, rank.at(100), rank.now_ns)
    recording.commit(COMMIT, rank.at(101), rank.now_ns)
    rank.kineto_asks()
    recording.poll(rank.at(170), rank.now_ns)
    (answer,) = recording.poll(rank.at(5000), rank.now_ns + 100 * SECOND)
    assert answer.state is State.FAILED and "no trace" in answer.problem


ENDING = """
import sys, time
from pathlib import Path
import torch

torch.set_num_threads(1)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while not Path(sys.argv[1]).exists():
    model(torch.zeros(2, 8)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
print("trained to the end", flush=True)
sys.exit(5)
"""


@pytest.mark.full
@pytest.mark.e2e
@pytest.mark.parametrize("by_time", [False, True])
def test_a_process_that_ends_within_a_window_keeps_its_exit_status(tmp_path: Path, by_time: bool) -> None:
    rings = tmp_path / "rings"
    rings.mkdir(mode=0o700)
    point = OnDemand(tmp_path / "point")
    (tmp_path / "train.py").write_text(ENDING)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KINETO_")}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "stop")],
        env=environment_for(rings, point.environment(environ), base=environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def until(condition: Callable[[], object]) -> None:
        limit = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < limit and process.poll() is None, "the training did not get there"
            point.poll(0.01)

    def count() -> int:
        return ring.peek(path).words[ring.NUM_STEPS]

    try:
        until(lambda: list(rings.glob("*.ring")))
        (path,) = rings.glob("*.ring")
        until(lambda: count() > 5 and process.pid in point.known())
        start = count() + 20
        folder = rings / "captures" / "3"
        folder.mkdir(parents=True)
        window = ByTime(duration_s=6.0) if by_time else BySteps(start=start, num_steps=1000, round_up=50)
        point.request(process.pid, folder / "rank0.json", window)
        num_steps = 0 if by_time else 1000
        ring.post(path, Command(window=3, verb=Verb.OUTSIDE, start=start + 50, num_steps=num_steps).word())
        until(lambda: not point.waiting())
        fetched = time.monotonic()
        heard = count()
        until(lambda: time.monotonic() > fetched + 2.5 and count() > heard + 150)
        (tmp_path / "stop").touch()
        said, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        point.close()
    # Kineto may end the window with a line of its own.
    assert process.returncode == 5 and "trained to the end" in said.splitlines(), said
    assert list(folder.glob("rank0_*.json"))  # so it was under way
