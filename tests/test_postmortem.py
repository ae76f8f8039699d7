"""The post-mortem: positions of ranks from rings, of real writers in this process and of a real job that dies."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from eroica import cli, flights, postmortem
from eroica import ring as flight
from eroica.errors import DataError, UserError
from eroica.flights import read_rings
from eroica.ring import COLLECTIVE, GC, NEXT, STEP, UNTIMED, Ring, what
from eroica.views import Process, view_of

SECOND = 10**9
GROUP = 7


def _ring(folder: Path, rank: int, world_size: int = 4, **more: int) -> Ring:
    ring = Ring.create(folder / f"rank{rank}.ring", rank=rank, world_size=world_size, **more)
    ring.note(host="a", job="j")
    ring.note(group=f"{GROUP:016x}", name="0", description="default_pg", ranks="0-3", size=4, backend="gloo")
    return ring


def _call(ring: Ring, sequence: int, *, op: int = 1, flags: int = 0, done: bool = True, step: int = 0) -> None:
    number = ring.begin(what(COLLECTIVE, op, 1, flags), sequence * SECOND, -1, GROUP, sequence, 400, step)
    if done:
        ring.end(number, SECOND // 10, False)


def _report(folder: Path, alive: dict[int, bool | None]) -> postmortem.PostMortem:
    seen, notes = flights.read_rings(folder)
    lives = [alive.get(ring.words[flight.RANK], True) for ring in seen]
    return postmortem.post_mortem(seen, notes, host="a", clock_ns=50 * SECOND, alive=lives)


def test_the_rank_that_has_not_entered_is_told_from_those_that_wait_for_it(tmp_path: Path) -> None:
    for rank in range(4):
        ring = _ring(tmp_path, rank)
        _call(ring, 40)
        if rank == 2:
            ring.begin(NEXT, 41 * SECOND, -1, 0, 9, 0, 8)
        else:
            _call(ring, 41, done=False)
        ring.set(flight.NUM_STEPS, 8)
        ring.close()
    report = _report(tmp_path, {})
    (group,) = report.groups
    assert (group.sequence, group.ops, group.waiting, group.behind) == (
        *(41, {"allreduce": "0-1,3"}, "0-1,3", {"2": "allreduce 40"}),
    )
    (inside,) = report.ranks[2].open
    assert (inside.what, inside.for_s) == ("dataloader next 9", 9.0)
    text = postmortem.render_text(report)
    assert text.splitlines()[0] == "post-mortem of j: 4 ranks; running: 0-3"
    assert "2     running  8      0      -          0.000 s  dataloader next 9, 9.0 s" in text
    assert "3     running  8      0      -          0.000 s  allreduce 41 of default_pg, 9.0 s" in text
    assert "default_pg (0-3), call 41: allreduce; in it: 0-1,3; not yet: 2 (last: allreduce 40)" in text


def test_a_collective_that_ended_by_an_error_is_not_done(tmp_path: Path) -> None:
    for rank in range(2):
        ring = _ring(tmp_path, rank, world_size=2)
        number = ring.begin(what(COLLECTIVE, 1, 1), SECOND, -1, GROUP, 1, 400, 0)
        ring.end(number, SECOND, rank == 1)
        ring.close()
    (group,) = _report(tmp_path, {}).groups
    assert (group.done, group.failed) == ("0", "1")
    assert "allreduce; done: 0; failed: 1;" in postmortem.render_text(_report(tmp_path, {}))


def test_the_pace_of_each_rank_is_told(tmp_path: Path) -> None:
    for rank in range(2):
        ring = _ring(tmp_path, rank, world_size=2)
        for step in range(20):
            begin_ns = (step + 1) * SECOND // 10 + (SECOND if step == 19 and rank else 0)
            ring.end(ring.begin(NEXT, begin_ns, -1, 1, step + 1, 0, step), SECOND // 100, False)
            ring.end(ring.begin(STEP, begin_ns + SECOND // 50, -1, 2, step + 1, 0, step), SECOND // 100, False)
        ring.close()
    report = _report(tmp_path, {})
    assert [(rank.iteration_s, rank.last_iteration_s) for rank in report.ranks] == [(0.1, 0.1), (0.1, 1.1)]
    assert "0.100 s, last 1.100 s" in postmortem.render_text(report)


def test_a_mismatch_names_both_operations(tmp_path: Path) -> None:
    for rank in range(4):
        ring = _ring(tmp_path, rank)
        _call(ring, 1, op=14 if rank == 1 else 1, done=False)
        ring.close()
    (group,) = _report(tmp_path, {}).groups
    assert group.ops == {"allreduce": "0,2-3", "broadcast": "1"}
    assert "allreduce by 0,2-3 but broadcast by 1" in postmortem.render_text(_report(tmp_path, {}))


def test_where_ends_cannot_be_seen_a_rank_has_entered_and_no_more_is_said(tmp_path: Path) -> None:
    for rank in range(2):
        ring = _ring(tmp_path, rank, world_size=2)
        _call(ring, 5, flags=UNTIMED, done=False)
        ring.close()
    report = _report(tmp_path, {})
    (group,) = report.groups
    assert (group.entered, group.waiting, group.done) == ("0-1", "", "")
    assert group.unknown == "2-3"  # its note says four members, and two have no ring
    assert report.ranks[0].open == []
    assert report.ranks[0].silent_s == 45.0


def test_dead_ended_faulty_and_foreign_ranks_are_told_apart(tmp_path: Path) -> None:
    rings = [_ring(tmp_path, rank) for rank in range(4)]
    step = rings[0].begin(STEP, 10 * SECOND, -1, 0, 1, 0, 0)
    _call(rings[0], 12, done=False)
    assert step == 1
    rings[1].note(exception="ValueError: password=hunter2 \x1b[31m", at="train.py:7")
    rings[1].set(flight.STATE, flight.ENDED)
    rings[2].note(fault="error: x", at="ring.py:1")
    rings[2].set(flight.STATE, flight.OFF)
    for ring in rings:
        ring.close()
    report = _report(tmp_path, {0: False, 1: False, 2: True, 3: None})
    assert [rank.state for rank in report.ranks] == ["died", "ended", "off", "unknown"]
    assert [span.for_s for span in report.ranks[0].open] == [2.0, 0.0]  # until its last sign of life
    text = postmortem.render_text(report)
    assert text.startswith("post-mortem of j: 4 ranks; died: 0; off: 2; ended: 1; unknown: 3\n")
    assert "rank 1 left by ValueError: password=[redacted] \\x1b[31m at train.py:7" in text
    assert "rank 2: the probe gave up: error: x at ring.py:1" in text


def test_rings_of_an_earlier_start_and_of_helpers_are_left_out(tmp_path: Path) -> None:
    for index, (rank, generation, size) in enumerate([(0, 0, 8), (7, 0, 8), (0, 1, 2), (1, 1, 2), (5, 1, 2)]):
        folder = tmp_path / str(index)
        folder.mkdir()
        _ring(folder, rank, size, generation=generation).close()
        os.rename(folder / f"rank{rank}.ring", tmp_path / f"rank{rank}-{index}.ring")
    helper = Ring.create(tmp_path / "rank1-99.ring", rank=1, world_size=2, generation=1)
    helper.note(host="a", job="j")
    helper.close()
    report = _report(tmp_path, {})
    assert [rank.rank for rank in report.ranks] == [0, 1]
    assert report.notes == ["4 rings of earlier starts or of helper processes were left out"]
    assert report.ranks[1].pid and report.missing == ""
    assert "start 2" in postmortem.render_text(report).splitlines()[0]


def test_missing_ranks_unreadable_files_and_big_jobs_stay_readable(tmp_path: Path) -> None:
    for rank in range(60):
        ring = Ring.create(tmp_path / f"rank{rank}.ring", rank=rank, world_size=100_000, capacity=4)
        ring.note(host="a", job="j")
        ring.end(ring.begin(GC, SECOND, -1, 0, 2, 0, 0), SECOND, False)
        ring.close()
    (tmp_path / "broken.ring").write_bytes(b"no")
    report = _report(tmp_path, {})
    assert report.missing == "60-99999"
    text = postmortem.render_text(report)
    assert "and 20 more ranks" in text and "broken.ring is not a flight ring" in text
    assert len(text.splitlines()) < 60


def test_show_takes_a_ring_a_folder_of_them_and_the_folder_of_all_jobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for index, job in enumerate(("old", "new")):
        (tmp_path / job).mkdir()
        _ring(tmp_path / job, index).close()
        os.utime(tmp_path / job / f"rank{index}.ring", (index, index))
    assert cli.main(["show", str(tmp_path)]) == 0
    assert "the newest of 2 jobs: new" in capsys.readouterr().out
    (tmp_path / "old" / "gone.ring").symlink_to(tmp_path / "nowhere")  # as a job leaves it that ends right now
    assert cli.main(["show", str(tmp_path)]) == 0
    assert "the newest of 2 jobs: new" in capsys.readouterr().out
    assert cli.main(["show", str(tmp_path / "old" / "rank0.ring"), "--format", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["schema"], said["ranks"][0]["rank"], said["missing"]) == ("eroica.postmortem/1", 0, "1-3")
    with pytest.raises(SystemExit, match="2"):
        cli.main(["show", str(tmp_path), "--format", "html"])
    assert "comes as text or json, not html" in capsys.readouterr().err
    (tmp_path / "x.ring").write_bytes(b"no")
    assert cli.main(["show", str(tmp_path / "x.ring")]) == 1
    assert "is not a flight ring" in capsys.readouterr().err
    assert cli.main(["show", str(tmp_path / "absent.ring")]) == 1


def test_a_folder_without_rings_is_a_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no flight rings"):
        flights.read_rings(tmp_path)
    (tmp_path / "a.ring").write_bytes(b"x")
    with pytest.raises(DataError, match="not a flight ring"):
        flights.read_rings(tmp_path)


def test_a_process_killed_in_a_step_is_found_dead_there(tmp_path: Path) -> None:
    code = """
import os, signal, time
from eroica.probe.recorder import RECORDER
from eroica.ring import STEP
ring = RECORDER.arm()
ring.begin(STEP, time.monotonic_ns(), -1, 0, 6, 0, 5)
os.kill(os.getpid(), signal.SIGKILL)
"""
    environ = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "EROICA_RING_DIR": str(tmp_path)}
    environ["PYTHONPATH"] = str(Path(__file__).parent.parent)
    assert subprocess.run([sys.executable, "-c", code], env=environ).returncode == -9
    report = postmortem.look(tmp_path, 0)
    (rank,) = report.ranks
    assert (rank.rank, rank.state, rank.host, rank.open[0].what) == (
        1,
        "died",
        socket.gethostname(),
        "optimizer step 6",
    )
    assert report.missing == "0"


def test_ranks_are_placed_by_positions_where_the_last_calls_were_not_recorded(tmp_path: Path) -> None:
    for rank in range(4):
        ring = _ring(tmp_path, rank)
        _call(ring, 32)
        sequence = 40 if rank == 1 else 41
        place = ring.position(GROUP)
        ring.words[place + flight.BEGIN] = sequence * SECOND
        ring.words[place + flight.ENTERED] = sequence << 8 | (14 if rank == 3 else 1)
        ring.words[place + flight.DONE] = sequence if rank == 2 else 32
        stray = ring.position(99)  # damage: no note says that there is such a group
        ring.words[stray + flight.ENTERED] = 7 << 8
        ring.close()
    (group,) = _report(tmp_path, {}).groups
    assert (group.sequence, group.ops) == (41, {"allreduce": "0,2", "broadcast": "3"})
    assert (group.entered, group.done, group.waiting, group.behind) == ("0,3", "2", "", {"1": "allreduce 40"})
    flights, _ = read_rings(tmp_path)
    views = [view_of(seen, Process(), 50 * SECOND) for seen in flights]
    calls = [[(call.op, call.sequence, call.status) for call in view.calls] for view in views]
    assert calls[1] == [("allreduce", 32, "done"), ("allreduce", 40, "unseen")]
    assert [call[-1][2] for call in calls] == ["unseen", "unseen", "done", "unseen"]
