"""The agent of one host, on rings that real processes have left."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from eroica import bus
from eroica.agent import KEPT_STARTS, Agent
from eroica.captures import Readers, summarize_capture
from eroica.ring import NUM_STEPS, Ring

_LEAVE = """
import sys
from pathlib import Path
from eroica.ring import Ring
for start in range(int(sys.argv[2])):
    Ring.create(Path(sys.argv[1], f"{start}.ring"), rank=0, world_size=1, generation=start, capacity=64).note(job="j")
"""


def open_rings(folder: Path) -> set[str]:
    """Names of the rings that this process has open."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {Path(target).name for target in found if target.startswith(str(folder))}


def test_starts_of_a_job_that_are_over_cost_no_open_files(tmp_path: Path) -> None:
    root = str(Path(__file__).parent.parent)
    subprocess.run(
        [sys.executable, "-c", _LEAVE, str(tmp_path), "5"], check=True, env={**os.environ, "PYTHONPATH": root}
    )
    link, told = bus.Bus(), list[bus.Message]()
    link.subscribe((bus.Standing,), told.append)
    agent = Agent(tmp_path, link, host="a", readers=Readers())
    with closing(agent), closing(Ring.create(tmp_path / "now.ring", rank=0, world_size=1, generation=5)) as own:
        own.note(job="j")
        for _ in range(3):
            agent.poll(time.monotonic_ns())
            link.deliver()
        assert open_rings(tmp_path) == {"now.ring"}
        assert [standing.generation for standing in told if isinstance(standing, bus.Standing)] == [5]
    assert open_rings(tmp_path) == set()


@pytest.mark.parametrize("clears", [True, False])
def test_rings_of_starts_that_are_long_over_are_removed_where_the_folder_is_ours(tmp_path: Path, clears: bool) -> None:
    root = str(Path(__file__).parent.parent)
    command = [sys.executable, "-c", _LEAVE, str(tmp_path), str(KEPT_STARTS + 4)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": root})
    agent = Agent(tmp_path, bus.Bus(), host="a", readers=Readers(), clears=clears)
    with closing(agent):
        agent.poll(time.monotonic_ns())
        for number in range(100, 103):
            path = tmp_path / f"{number}.ring"
            with closing(Ring.create(path, rank=0, world_size=1, generation=number)) as own:
                own.note(job="j")
                agent.poll(time.monotonic_ns())
    left = {path.stem for path in tmp_path.glob("*.ring")}
    assert {"100", "101", "102"} <= left
    assert len(left) == (KEPT_STARTS if clears else KEPT_STARTS + 7)


def test_a_look_sees_ranks_that_began_to_record_long_before_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, told = bus.Bus(), list[bus.Message]()
    link.subscribe((bus.Looked,), told.append)
    agent = Agent(tmp_path, link, host="a", readers=Readers())
    with closing(agent), ExitStack() as opened:
        for rank, at_s in ((1, 0), (2, 0), (0, 900)):  # rank 0 prepared the data, and the others waited for it
            monkeypatch.setattr("eroica.ring.time_ns", lambda at_s=at_s: (1_000_000 + at_s) * 10**9)
            own = opened.enter_context(closing(Ring.create(tmp_path / f"{rank}.ring", rank=rank, world_size=3)))
            own.note(job="j")
            own.set(NUM_STEPS, 1)
        agent.poll(time.monotonic_ns())
        link.publish(bus.LookCloser(look=1))
        link.deliver()
        (looked,) = told
        assert isinstance(looked, bus.Looked) and sorted(view.rank for view in looked.views) == [0, 1, 2]


def test_a_trace_that_is_longer_than_it_took_to_record_is_no_capture(tmp_path: Path) -> None:
    def event(name: str, category: str, ts_us: float, dur_us: float) -> dict[str, object]:
        return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": ts_us, "dur": dur_us}

    file = tmp_path / "rank0.json"
    steps = [event(f"ProfilerStep#{k}", "user_annotation", k * 1e6, 1e6) for k in (1, 2)]
    work = [event("aten::mm", "cpu_op", k * 1e6 + 1e3, 9e5) for k in (1, 2)]
    file.write_text(json.dumps({"traceEvents": [*steps, *work]}))
    assert isinstance(summarize_capture(str(file), 0, 1, "a", None, None, 2.0), bytes)
    steps[1]["dur"] = 3600e6
    file.write_text(json.dumps({"traceEvents": [*steps, *work]}))
    told = summarize_capture(str(file), 0, 1, "a", None, None, 2.0)
    assert told == "has a trace of 3601 s, recorded in 2.0 s: its clock was set meanwhile"
    assert isinstance(summarize_capture(str(file), 0, 1, "a", None), bytes)
