"""The end point of Kineto on demand: who gets an answer, what is asked of whom, and that training comes to no harm."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eroica.amend import Told, amend
from eroica.errors import DataError, UnavailableError, UserError
from eroica.offline import diagnose_paths
from eroica.ondemand import BySteps, ByTime, OnDemand
from eroica.probe import weave

ROOT = Path(__file__).parents[1]
HEADER = struct.Struct("<Q32s")
QUESTION = struct.pack("<iiq2i", 3, 2, 77, 4711, 1)
PATIENCE_S = 120


@contextmanager
def asking(point: OnDemand) -> Iterator[socket.socket]:
    """A socket where Kineto's client would have its own."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
        client.bind(f"{point.address}/dynoconfigclient-{time.monotonic_ns()}")
        client.settimeout(10)
        yield client


def ask(point: OnDemand, client: socket.socket, body: bytes = QUESTION, kind: bytes = b"req") -> bytes:
    """Text of the answer."""
    client.sendto(HEADER.pack(len(body), kind) + body, f"{point.address}/dynolog")
    assert point.poll(10) == 1
    answer = client.recv(1 << 16)
    size, told = HEADER.unpack_from(answer)
    assert told.rstrip(b"\0") == kind and size == len(answer) - HEADER.size
    return answer[HEADER.size :]


@pytest.fixture
def point(tmp_path: Path) -> Iterator[OnDemand]:
    made = OnDemand(tmp_path / "job")
    yield made
    made.close()


def test_a_request_is_handed_out_once_and_otherwise_the_answer_is_empty(point: OnDemand) -> None:
    with asking(point) as client:
        assert ask(point, client) == b""
        process = point.known()[os.getpid()]
        assert (process.own_pid, process.job, process.device, process.is_free) == (4711, 77, None, True)
        path = point.request(os.getpid(), point.folder / "rank3.json", BySteps(start=120, num_steps=6, round_up=50))
        assert path == point.folder / "rank3_4711.json" and point.waiting() == {os.getpid()}
        lines = ask(point, client).decode().splitlines()
        assert f"ACTIVITIES_LOG_FILE={point.folder}/rank3.json" in lines and "ACTIVITIES_ITERATIONS=6" in lines
        assert "PROFILE_START_ITERATION=119" in lines and "PROFILE_START_ITERATION_ROUNDUP=50" in lines
        assert "PROFILE_WITH_STACK=true" in lines
        assert not point.waiting() and not point.cancel(os.getpid())
        assert ask(point, client) == b""


def test_a_process_that_records_already_gets_its_request_when_it_is_done(point: OnDemand) -> None:
    with asking(point) as client:
        ask(point, client)
        point.request(os.getpid(), point.folder / "a.json", ByTime(duration_s=0.5), stacks=False)
        assert ask(point, client, struct.pack("<iiq2i", 1, 2, 77, 4711, 1)) == b""
        assert not point.known()[os.getpid()].is_free
        assert b"ACTIVITIES_DURATION_MSECS=500" in ask(point, client)


def test_a_process_that_registers_for_a_device_is_told_how_many_have(point: OnDemand) -> None:
    with asking(point) as client:
        assert ask(point, client, struct.pack("<iiq", 5, 4711, 9), b"ctxt") == struct.pack("<i", 1)
    assert point.known()[os.getpid()].device == 5


def test_nothing_can_be_asked_of_a_process_that_never_asked_or_at_a_path_that_kineto_misreads(point: OnDemand) -> None:
    with pytest.raises(UnavailableError, match="process 1 asks for no requests"):
        point.request(1, Path("rank0.json"), ByTime(duration_s=1))
    with asking(point) as client:
        ask(point, client)
        for name in ("rank0.json.gz", "a\nACTIVITIES_ENABLED=false.json", "a#b.json"):
            with pytest.raises(UserError, match=r"ends in \.json"):
                point.request(os.getpid(), point.folder / name, ByTime(duration_s=1))
    for start, num_steps in ((0, 1), (1, 0), (1, 2000)):
        with pytest.raises(UserError, match="a window has 1 to 1023 steps"):
            BySteps(start=start, num_steps=num_steps)
    with pytest.raises(UserError, match="lasts up to 60 s"):
        ByTime(duration_s=61)


def test_strangers_and_odd_datagrams_get_no_answer(point: OnDemand, tmp_path: Path) -> None:
    good = HEADER.pack(len(QUESTION), b"req") + QUESTION
    with asking(point) as client:
        odd = (b"", b"x", good[:-1], good + b"x", HEADER.pack(0, b"req"), HEADER.pack(24, b"nonsense") + QUESTION)
        many = HEADER.pack(24, b"req") + struct.pack("<iiq2i", 3, 1 << 30, 0, 1, 1)
        none = HEADER.pack(16, b"req") + struct.pack("<iiq", 3, 0, 0)
        for text in (*odd, many, none):
            client.sendto(text, f"{point.address}/dynolog")
            assert point.poll(10) == 0
        assert point.num_strange == len(odd) + 2
        client.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.recv(1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:  # without an address, then from outside
        stranger.sendto(good, f"{point.address}/dynolog")
        stranger.bind(str(tmp_path / "dynoconfigclient-x"))
        stranger.sendto(good, f"{point.address}/dynolog")
        assert point.poll(10) == 0 and point.num_strange == len(odd) + 4
    assert not point.known()


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.sampled_from([b"req", b"ctxt", b""]), st.booleans())
def test_no_datagram_makes_a_poll_fail(body: bytes, kind: bytes, honest: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        point = OnDemand(Path(folder) / "job")
        with asking(point) as client:
            client.sendto(HEADER.pack(len(body) if honest else 1 << 60, kind) + body, f"{point.address}/dynolog")
            assert point.poll(10) in (0, 1)
        point.close()


def test_the_folder_is_private_short_to_name_and_gone_after_close(tmp_path: Path) -> None:
    folder = tmp_path / ("a very long name " * 10)
    point = OnDemand(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and len(point.address) < 40
    assert Path(point.address).resolve() == folder
    with asking(point) as client:
        ask(point, client)
    point.close()
    point.close()
    assert not folder.exists() and not os.path.exists(f"{point.address}/dynolog")


def test_a_folder_that_is_open_to_others_or_has_an_agent_already_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(UserError, match="open to others"):
        OnDemand(tmp_path)
    point = OnDemand(tmp_path / "job")
    with pytest.raises(UserError, match="another agent"):
        OnDemand(tmp_path / "job")
    point.close()


def test_what_a_killed_agent_left_is_taken_over(tmp_path: Path) -> None:
    code = "import sys, os; from pathlib import Path; from eroica.ondemand import OnDemand\n"
    code += "OnDemand(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "job")], cwd=ROOT, check=False)
    assert (tmp_path / "job" / "dynolog").exists()
    point = OnDemand(tmp_path / "job")
    with asking(point) as client:
        assert ask(point, client) == b""
    point.close()


def test_the_settings_of_the_user_stay_and_their_own_daemon_is_not_replaced(point: OnDemand) -> None:
    added = point.environment({"KINETO_CONFIG": "/mine", "KINETO_LOG_LEVEL": "1"})
    assert added == {"KINETO_USE_DAEMON": "1", "KINETO_IPC_SOCKET_DIR": point.address}
    assert Path(point.environment({})["KINETO_CONFIG"]).read_text() == "ON_DEMAND_CONFIG_UPDATE_INTERVAL_SECS=1\n"
    with pytest.raises(UserError, match="KINETO_USE_DAEMON is set"):
        point.environment({"KINETO_USE_DAEMON": "1"})


TRAINING = """
import os, sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader

torch.set_num_threads(1)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = list(range(10)) * 1000
loader = iter(DataLoader(batches, batch_size=2, num_workers=int(sys.argv[2])))
stop, done = Path(sys.argv[1]) / "stop", 0
while not stop.exists():
    next(loader)
    model(torch.zeros(2, 8)).sum().backward()
    optimizer.step()
    done += 1
    (Path(sys.argv[1]) / "steps").write_text(str(done))
    time.sleep(0.01)
del loader
print("trained to the end", done)
"""


class Job:
    """A training process that goes on until it is told to stop."""

    def __init__(self, folder: Path, point: OnDemand, workers: int = 0) -> None:
        folder.mkdir()
        self.folder = folder
        (folder / "train.py").write_text(TRAINING)
        environ = {name: value for name, value in os.environ.items() if not name.startswith("KINETO_")}
        environ |= point.environment(environ) | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(folder / "train.py"), str(folder), str(workers)]
        self.process = subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def steps(self) -> int:
        try:
            return int((self.folder / "steps").read_text() or 0)
        except FileNotFoundError:
            return 0

    def end(self) -> str:
        """Stop it; what it has printed. It must have come to its ordinary end."""
        (self.folder / "stop").touch()
        try:
            said, _ = self.process.communicate(timeout=PATIENCE_S)
        finally:
            self.process.kill()
        assert self.process.returncode == 0, said
        return said


def until(condition: Callable[[], object], *points: OnDemand) -> None:
    """Serve until the condition holds."""
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit, "the training did not get there"
        for point in points:
            point.poll(0.01)


def traced(path: Path) -> list[str]:
    """Names of the optimizer steps in a trace."""
    events = json.loads(path.read_text())["traceEvents"]
    wanted = (event["name"] for event in events if event.get("cat") == "user_annotation")
    return [name for name in wanted if name.startswith("Optimizer.step#")]


def step_ends(path: Path) -> list[tuple[int, int]]:
    """When the optimizer steps of a trace ended, as a flight ring would have it; counted from 500."""
    told = json.loads(path.read_text())
    steps = (event for event in told["traceEvents"] if str(event.get("name")).startswith("Optimizer.step#"))
    ends = sorted(told["baseTimeNanoseconds"] + round((step["ts"] + step["dur"]) * 1000) for step in steps)
    return [(500 + number, end) for number, end in enumerate(ends)]


@pytest.mark.parametrize("name", ["/a.json", "/run/[3]/rank0.json", "/a], {b}.json"])
def test_events_are_woven_into_a_trace_before_and_after_it_is_amended_whatever_its_name_p07(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / "t.json"
    path.write_text('{"baseTimeNanoseconds": 0, "traceEvents": [\n{"ph": "X"}\n  ],"traceName": "' + name + '" }')
    weave.weave(str(path), [weave.event("user_annotation", "before", 1, 1, 10, 20, 0)])
    groups = [{"pg_name": "0", "ranks": [0, 1]}]
    amend(path, Told(rank=3, world_size=4, groups=groups))
    weave.weave(str(path), [weave.event("user_annotation", "after", 1, 1, 30, 40, 0)])
    told = json.loads(path.read_text())
    assert [event.get("name") for event in told["traceEvents"]] == [None, "before", "after"]
    assert told["distributedInfo"]["pg_config"] == groups and told["traceName"] == name


def test_a_trace_that_is_cut_or_tells_its_rank_is_not_amended(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    text = '{"baseTimeNanoseconds": 0, "traceEvents": [\n{"ph": "X"}\n  ],"traceName": "/a.json" }'
    for bad, why in ((text[:-12], "does not end"), (text.replace("{", '{"distributedInfo": {}, ', 1), "already")):
        path.write_text(bad)
        with pytest.raises(DataError, match=why):
            amend(path, Told(rank=1, world_size=2))
        assert path.read_text() == bad
    path.write_text(text)
    assert amend(path, Told(rank=1, world_size=2, step_ends=[(1, 5), (2, 6)])) == 0
    told = json.loads(path.read_text())
    assert told["distributedInfo"]["rank"] == 1 and len(told["traceEvents"]) == 1
    with pytest.raises(DataError, match="already"):
        amend(path, Told(rank=1, world_size=2))


@pytest.mark.full
@pytest.mark.e2e
def test_a_training_with_forked_loader_workers_records_exactly_the_steps_that_were_asked_for(
    tmp_path: Path, point: OnDemand
) -> None:
    job = Job(tmp_path / "a", point, workers=2)
    until(lambda: job.steps() > 5 and job.process.pid in point.known(), point)
    assert set(point.known()) == {job.process.pid}  # the workers were forked, so Kineto's thread is not in them
    path = point.request(job.process.pid, tmp_path / "rank0.json", BySteps(start=1, num_steps=7, round_up=100))
    until(path.exists, point)
    assert len(traced(path)) == 7
    until(lambda: point.known()[job.process.pid].is_free, point)
    again = point.request(job.process.pid, tmp_path / "again.json", BySteps(start=1, num_steps=3), stacks=False)
    until(again.exists, point)
    assert len(traced(again)) == 3 and "python_function" not in again.read_text()
    assert "trained to the end" in job.end()


@pytest.mark.e2e
@pytest.mark.full
def test_two_jobs_at_once_have_an_end_point_each(tmp_path: Path, point: OnDemand) -> None:
    other = OnDemand(tmp_path / "other")
    jobs = [Job(tmp_path / "a", point), Job(tmp_path / "b", other)]
    until(lambda: all(job.steps() > 5 for job in jobs) and point.known() and other.known(), point, other)
    assert [set(each.known()) for each in (point, other)] == [{job.process.pid} for job in jobs]
    path = other.request(jobs[1].process.pid, tmp_path / "b.json", BySteps(start=1, num_steps=3))
    until(path.exists, point, other)
    for job in jobs:
        job.end()
    other.close()


@pytest.mark.e2e
@pytest.mark.full
def test_a_training_goes_on_in_silence_when_its_agent_is_killed_or_closed_or_its_folder_is_deleted(
    tmp_path: Path, point: OnDemand
) -> None:
    closed, emptied = OnDemand(tmp_path / "closed"), OnDemand(tmp_path / "emptied")
    jobs = [Job(tmp_path / "b", closed), Job(tmp_path / "c", emptied)]
    until(lambda: all(job.steps() > 5 for job in jobs) and closed.known() and emptied.known(), closed, emptied)
    closed.close()
    for path in (tmp_path / "emptied").iterdir():
        path.unlink()
    (tmp_path / "emptied").rmdir()
    # The agent that is killed is a process of its own; the job is started by it, and outlives it.
    code = "import sys; sys.path.insert(0, sys.argv[2])\nfrom tests.test_ondemand import *\n"
    code += "folder = Path(sys.argv[1]); p = OnDemand(folder / 'end'); job = Job(folder / 'a', p)\n"
    code += "until(lambda: job.steps() > 5 and p.known(), p); print(job.process.pid, flush=True)\n"
    code += "while True: p.poll(1)"
    (tmp_path / "killed").mkdir(mode=0o700)
    command = [sys.executable, "-c", code, str(tmp_path / "killed"), str(ROOT)]
    agent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert agent.stdout is not None
    pid = int(agent.stdout.readline())
    os.kill(agent.pid, signal.SIGKILL)
    agent.communicate()
    steps = tmp_path / "killed" / "a" / "steps"
    before = [int(steps.read_text() or 0), *(job.steps() for job in jobs)]
    until(lambda: int(steps.read_text() or 0) > before[0] + 200, emptied)
    until(lambda: all(job.steps() > then + 200 for job, then in zip(jobs, before[1:], strict=True)), emptied)
    for job in jobs:
        said = job.end()
        assert said.startswith("trained to the end"), said
    (tmp_path / "killed" / "a" / "stop").touch()
    until(lambda: not os.path.exists(f"/proc/{pid}"), emptied)
    emptied.close()


@pytest.mark.e2e
@pytest.mark.full
@pytest.mark.skipif(os.getuid() != 0, reason="only root can play another user")
def test_another_user_cannot_reach_the_training(tmp_path: Path, point: OnDemand) -> None:
    job = Job(tmp_path / "a", point)
    until(lambda: job.steps() > 5 and point.known(), point)
    (name,) = (path.name for path in point.folder.iterdir() if path.name.startswith("dynoconfigclient"))
    play = "import os, socket, sys\nos.setgid(65534); os.setuid(65534)\n"
    send = "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x' * 60, sys.argv[1])"
    for code, what in ((send, f"{point.address}/{name}"), ("os.listdir(sys.argv[1])", str(point.folder))):
        done = subprocess.run([sys.executable, "-c", play + code, what], capture_output=True, text=True, check=False)
        assert "PermissionError" in done.stderr
    then = job.steps()
    until(lambda: job.steps() > then + 200, point)
    job.end()


@pytest.mark.e2e
@pytest.mark.full
@pytest.mark.parametrize(("fault", "culprit"), [("slow_input", 2), ("backward_delay", 1)])
def test_the_traces_of_a_job_that_runs_none_of_our_code_name_rank_function_and_line(
    tmp_path: Path, point: OnDemand, fault: str, culprit: int
) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KINETO_")}
    environ |= point.environment(environ) | {"OMP_NUM_THREADS": "1", "EROICA": "0"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    command += [str(ROOT / "tests" / "ondemand_job.py"), str(tmp_path), fault, str(culprit)]
    with (tmp_path / "log").open("wb") as log:
        job = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
    places = [tmp_path / f"rank{rank}.pid" for rank in range(4)]
    try:
        until(lambda: all(place.exists() and place.read_text() for place in places), point)
        pids = [int(place.read_text()) for place in places]
        until(lambda: set(pids) <= set(point.known()), point)  # and the launcher: it imports torch, too
        written = []
        for rank, pid in enumerate(pids):
            window = BySteps(start=1, num_steps=10, round_up=100)
            written.append(point.request(pid, tmp_path / f"rank{rank}.json", window))
        until(lambda: all(path.exists() for path in written), point)
        (tmp_path / "stop").touch()
        until(lambda: job.poll() is not None, point)
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 0, (tmp_path / "log").read_text()
    assert len({len(traced(path)) for path in written}) == 1
    group = {"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cpu:gloo", "pg_size": 4, "ranks": [0, 1, 2, 3]}
    (tmp_path / "traces").mkdir()
    for rank, path in enumerate(written):
        ends = step_ends(path)
        assert len(ends) == 10
        assert amend(path, Told(rank=rank, world_size=4, groups=[group], step_ends=ends)) == 9
        path.rename(tmp_path / "traces" / f"{'abcd'[rank]}.json")  # the name tells no rank, so the file must
    diagnosis, _ = diagnose_paths([tmp_path / "traces"])
    assert diagnosis.window.first_step == 500 and diagnosis.window.num_steps == 9
    assert diagnosis.coverage.ranks_expected == diagnosis.coverage.ranks_reported == 4
    (finding,) = diagnosis.findings
    assert diagnosis.kind == "slow" and finding.ranks == str(culprit)
    assert finding.cause == {"slow_input": "input_pipeline", "backward_delay": "host_python"}[fault]
    assert finding.function is not None
    script, _, line = (finding.function.location or "").rpartition(":")
    near = (ROOT / "eroica" / "demos" / "train.py").read_text().splitlines()[int(line) - 2 : int(line) + 3]
    assert script.endswith("train.py") and "time.sleep(self.delay_s)" in " ".join(near)
