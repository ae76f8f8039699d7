"""`eroica run` on real jobs, from an unmodified script: what it finds, and that it never harms the job."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from eroica import ring
from eroica.captures import Readers
from eroica.findings import from_json

JOB = Path(__file__).with_name("live_job.py")
TIMEOUT_S = 180


def environment(home: Path) -> dict[str, str]:
    """A place for rings of this test's own."""
    runtime = home / "runtime"
    runtime.mkdir(exist_ok=True)
    return os.environ | {"OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(runtime)}


def job(*words: str, ranks: int = 2) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*launcher, str(JOB), *words]


def watched(command: Sequence[str], home: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "eroica", "run", "--out", str(home / "out"), *options, "--", *command]


def run(command: Sequence[str], home: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        watched(command, home, *options),
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=home,
    )


def diagnoses(home: Path) -> list[dict[str, Any]]:
    files = sorted((home / "out").glob("diagnosis-*.json"), key=lambda path: path.stat().st_mtime_ns)
    found = [json.loads(file.read_text()) for file in files]
    for one in found:
        from_json(one)
    return found


def leftovers(home: Path) -> list[str]:
    return [str(path) for path in (home / "runtime").glob("eroica/*")]


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"{what} within {seconds} s"
        time.sleep(0.05)


@pytest.mark.e2e
def test_a_rank_that_becomes_slow_is_told_while_the_job_runs(tmp_path: Path) -> None:
    ended = run(job("420", "slow", "150", "2", ranks=4), tmp_path, "--job", "waves")
    assert ended.returncode == 0 and "trained 420" in ended.stdout, ended.stderr
    found = [one for one in diagnoses(tmp_path) if one["kind"] == "slow"]
    assert [(one["verdict"]["ranks"], one["verdict"]["cause"]) for one in found] == [("2", "input_pipeline")]
    told = found[0]
    assert told["job"] == "waves" and told["window"]["trigger"] == "slowdown" and told["iteration"]["slowdown"] > 1.3
    assert "live_job.py" in told["findings"][0]["function"]["user_location"]
    assert "input pipeline" in ended.stderr and "eroica" not in ended.stdout
    history = [json.loads(line) for line in (tmp_path / "out" / "incidents.jsonl").read_text().splitlines()]
    assert [line["id"] for line in history] == [one["id"] for one in diagnoses(tmp_path)]
    assert all((tmp_path / "out" / file).exists() for line in history for file in line["files"])
    assert leftovers(tmp_path) == []


@pytest.mark.full
@pytest.mark.e2e
def test_a_slow_rank_is_told_from_windows_that_kineto_records_on_demand(tmp_path: Path) -> None:
    ended = run(job("600", "slow", "250", "1"), tmp_path, "--capture", "on-demand", "--keep-captures", "--job", "waves")
    assert ended.returncode == 0 and "trained 600" in ended.stdout, ended.stderr
    (told,) = [one for one in diagnoses(tmp_path) if one["kind"] == "slow"]
    assert (told["verdict"]["ranks"], told["verdict"]["cause"]) == ("1", "input_pipeline"), ended.stderr
    assert "live_job.py" in told["findings"][0]["function"]["user_location"]
    assert told["window"]["trigger"] == "slowdown" and told["window"]["first_step"] > 250
    assert told["coverage"]["ranks_reported"] == 2 and told["iteration"]["slowdown"] > 1.3
    kept = tmp_path / "out" / f"captures-{told['id']}"
    assert sorted(path.name for path in kept.iterdir()) == ["rank0.json", "rank1.json"]
    assert "Optimizer.step#" in (kept / "rank1.json").read_text()
    assert leftovers(tmp_path) == []


@pytest.mark.e2e
def test_a_rank_that_does_not_come_is_named_with_its_line_while_the_others_wait(tmp_path: Path) -> None:
    process = subprocess.Popen(
        watched(job("300", "stuck", "90", "1"), tmp_path),
        env=environment(tmp_path),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        cwd=tmp_path,
    )
    try:
        wait_for(lambda: bool(diagnoses(tmp_path)), "a diagnosis")
    finally:
        process.terminate()
        _, told = process.communicate(timeout=TIMEOUT_S)
    (found,) = diagnoses(tmp_path)
    assert (found["kind"], found["verdict"]["cause"], found["verdict"]["ranks"]) == ("hang", "missing_rank", "1")
    assert "live_job.py" in found["findings"][0]["function"]["location"]
    assert "HANG" in told and "CRASH" not in told
    assert leftovers(tmp_path) == []


@pytest.mark.e2e
def test_a_rank_that_is_killed_is_a_crash_and_the_status_is_the_launchers(tmp_path: Path) -> None:
    ended = run(job("300", "dead", "60", "1"), tmp_path)
    assert ended.returncode == 1, ended.stderr
    (found,) = diagnoses(tmp_path)
    assert found["kind"] == "crash" and found["verdict"]["ranks"] == "1"
    assert leftovers(tmp_path) == []


@pytest.mark.full
@pytest.mark.e2e
def test_an_exception_on_one_rank_is_told_as_such(tmp_path: Path) -> None:
    ended = run(job("300", "raises", "60", "0"), tmp_path)
    assert ended.returncode == 1 and "the shard is gone" in ended.stderr
    (found,) = diagnoses(tmp_path)
    assert (found["verdict"]["cause"], found["verdict"]["ranks"]) == ("exception", "0")
    assert "the shard is gone" in json.dumps(found)


@pytest.mark.full
@pytest.mark.e2e
def test_a_rank_that_exits_early_is_named_and_not_the_one_it_left_alone(tmp_path: Path) -> None:
    ended = run(job("300", "exits", "60", "1"), tmp_path)
    assert ended.returncode == 1
    (found,) = diagnoses(tmp_path)
    assert (found["kind"], found["verdict"]["ranks"]) == ("crash", "1") and "after step 60" in ended.stderr


@pytest.mark.full
@pytest.mark.e2e
def test_ranks_that_leave_by_an_immediate_exit_have_not_crashed(tmp_path: Path) -> None:
    ended = run(job("300", "quits", "60", "0"), tmp_path)
    assert (ended.returncode, diagnoses(tmp_path), "CRASH" in ended.stderr) == (0, [], False), ended.stderr


def started(command: Sequence[str], home: Path) -> subprocess.Popen[str]:
    """In a process group of its own."""
    return subprocess.Popen(
        watched(command, home),
        env=environment(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=home,
        start_new_session=True,
    )


@pytest.mark.e2e
@pytest.mark.parametrize(
    "whom", ["launcher", *(pytest.param(whom, marks=pytest.mark.full) for whom in ("ranks", "group"))]
)
def test_a_job_that_is_told_to_end_by_anybody_is_no_crash(tmp_path: Path, whom: str) -> None:
    process = started(job("3000"), tmp_path)
    wait_for(lambda: bool(readers_of(process.pid)), "a reader of the baseline")
    if whom == "launcher":
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (launcher,) = (pid for pid in children if b"torch.distributed.run" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(int(launcher), signal.SIGTERM)
    elif whom == "ranks":
        for path in (tmp_path / "runtime").glob("eroica/*/*.ring"):
            os.kill(ring.peek(path).identity.pid, signal.SIGTERM)
    else:
        os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode and "CRASH" not in told
    assert [made["verdict"]["summary"] for made in diagnoses(tmp_path)] == []
    assert "_process_worker" not in told and "eroica: " not in told, told
    assert leftovers(tmp_path) == []


@pytest.mark.full
@pytest.mark.e2e
def test_readers_of_captures_end_with_a_watcher_that_is_killed(tmp_path: Path) -> None:
    process = started(job("400"), tmp_path)
    wait_for(lambda: bool(readers_of(process.pid)), "a reader of the baseline")
    readers = readers_of(process.pid)
    process.send_signal(signal.SIGKILL)
    out, told = process.communicate(timeout=TIMEOUT_S)
    assert "trained 400" in out and "resource_tracker" not in told
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in readers), "the readers to end")
    wait_for(lambda: not leftovers(tmp_path), "the folder of rings to go")


@pytest.mark.full
@pytest.mark.e2e
def test_of_two_trainings_in_one_command_the_first_is_watched_and_the_other_left_out(tmp_path: Path) -> None:
    two = f"{shlex.join(job('200'))} & {shlex.join(job('150', ranks=1))}; wait"
    ended = run(["/bin/sh", "-c", two], tmp_path)
    assert "trained 200" in ended.stdout and "trained 150" in ended.stdout
    assert "a second training runs beside" in ended.stderr and diagnoses(tmp_path) == []
    assert leftovers(tmp_path) == []


@pytest.mark.full
@pytest.mark.e2e
def test_trainings_one_after_the_other_are_told_apart(tmp_path: Path) -> None:
    script = f"{shlex.join(job('120', ranks=3))}; {shlex.join(job('400', 'slow', '200', '1'))}"
    ended = run(["/bin/sh", "-c", script], tmp_path)
    assert ended.returncode == 0
    assert [(one["kind"], one["verdict"]["ranks"]) for one in diagnoses(tmp_path)] == [("slow", "1")], ended.stderr
    (found,) = diagnoses(tmp_path)
    assert found["coverage"]["ranks_expected"] == 2


@pytest.mark.e2e
def test_training_outlives_a_watcher_that_is_killed_and_leaves_nothing(tmp_path: Path) -> None:
    with subprocess.Popen(
        watched(job("260"), tmp_path), env=environment(tmp_path), stdout=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        rings = tmp_path / "runtime" / "eroica"
        wait_for(lambda: len(list(rings.glob("*/*.ring"))) == 2, "two rings")
        process.send_signal(signal.SIGKILL)
        assert process.stdout is not None and "trained 260" in process.stdout.read()
    wait_for(lambda: not leftovers(tmp_path), "the folder of rings to go")


def readers_of(pid: int) -> list[int]:
    """The processes with which `eroica run` reads captures."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.slow
def test_a_reader_of_captures_that_is_killed_is_replaced() -> None:
    readers = Readers()
    try:
        first = readers.submit(os.getpid).result(TIMEOUT_S)
        idle = readers.submit(signal.pause)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(BrokenProcessPool):
            idle.result(TIMEOUT_S)
        assert readers.submit(os.getpid).result(TIMEOUT_S) != first
    finally:
        readers.close()


@pytest.mark.full
@pytest.mark.e2e
def test_a_window_after_its_readers_were_killed_is_diagnosed_like_any_other(tmp_path: Path) -> None:
    process = subprocess.Popen(
        watched(job("420", "slow", "200", "1"), tmp_path), env=environment(tmp_path), stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: bool(readers_of(process.pid)), "a reader of the baseline")
    for pid in readers_of(process.pid):
        os.kill(pid, signal.SIGKILL)
    _, told = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0 and "stopped watching" not in told, told
    assert [(one["kind"], one["verdict"]["ranks"]) for one in diagnoses(tmp_path)] == [("slow", "1")]


@pytest.mark.e2e
@pytest.mark.full
def test_two_jobs_at_once_and_a_world_of_one_do_not_meet(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    processes = []
    for home, ranks in ((first, 2), (second, 1)):
        home.mkdir()
        processes.append(
            subprocess.Popen(
                watched(job("200", ranks=ranks), home),
                env=environment(home) | {"XDG_RUNTIME_DIR": str(tmp_path)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=home,
            )
        )
    told = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], told
    assert all("trained 200" in out for out, _ in told)
    assert not list((tmp_path / "eroica").glob("*"))


@pytest.mark.slow
def test_a_program_without_torch_runs_as_if_nobody_watched(tmp_path: Path) -> None:
    ended = run([sys.executable, "-c", "import sys; print('hello'); sys.exit(7)"], tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "hello\n", "")
    assert leftovers(tmp_path) == [] and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_signal_that_ends_the_command_gives_the_status_of_a_shell(tmp_path: Path) -> None:
    ended = run(["/bin/sh", "-c", "kill -9 $$"], tmp_path)
    assert ended.returncode == 128 + signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize(("command", "status"), [(["no-such-program"], 127), (["."], 126)])
def test_a_command_that_cannot_be_started_is_said_in_one_sentence(
    tmp_path: Path, command: list[str], status: int
) -> None:
    ended = run(command, tmp_path)
    assert ended.returncode == status and ended.stderr.count("\n") == 1 and ended.stderr.startswith("eroica run: ")


@pytest.mark.e2e
def test_an_output_folder_that_cannot_be_written_costs_neither_job_nor_answer(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    ended = run(job("300", "dead", "60", "1"), tmp_path)
    assert ended.returncode == 1 and "CRASH" in ended.stderr
    assert f"{tmp_path / 'out'}: the reports cannot be written there" in ended.stderr
    own = f"{Path(__file__).parent.parent}/eroica/"
    assert own not in ended.stderr, "the launcher has a traceback of its own"


_COUNTS = """
import signal, sys, time
num, until = 0, time.monotonic() + 60
def told(number, frame):
    global num, until
    num, until = num + 1, min(until, time.monotonic() + 1)
signal.signal(signal.SIGTERM, told)
open(sys.argv[1], "w").close()
while time.monotonic() < until:
    time.sleep(0.05)
sys.exit(num)
"""
_ENDS_IT = """
import os, sys
from eroica.live import Run, run
command = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
sys.exit(run(Run(command=command, enough=lambda num: os.path.exists(sys.argv[2])), print, print))
"""


def test_a_job_that_has_shown_enough_is_told_to_end_once_however_long_that_takes(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _ENDS_IT, _COUNTS, str(tmp_path / "ready")],
        env=environment(tmp_path) | {"PYTHONPATH": str(Path(__file__).parent.parent)},
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 1  # its launcher would lose its ranks at the second


_LEAVES_A_RING = """
import os, pathlib
from eroica.ring import Ring
path = pathlib.Path(os.environ["EROICA_RING_DIR"], "rank0-1.ring")
Ring.create(path, rank=0, world_size=1).close()
path.with_suffix(".stacks").write_text("of rank 0")
"""
_STOPS_WATCHING = """
import os, pathlib, sys
from eroica.live import Run, run
kept = pathlib.Path(sys.argv[2])
pipe = kept.with_name("pipe")
os.mkfifo(pipe)

def fail(num):
    pipe.write_text("now")
    raise ValueError("of ours")

command = [sys.executable, "-c", f"open({str(pipe)!r}).read()" + sys.argv[1]]
sys.exit(run(Run(command=command, keep_rings=kept, enough=fail), print, print))
"""


@pytest.mark.slow
def test_what_a_rank_wrote_of_its_stacks_is_kept_with_its_ring(tmp_path: Path) -> None:
    ended = run([sys.executable, "-c", _LEAVES_A_RING], tmp_path, "--keep-rings")
    assert ended.returncode == 0, ended.stderr
    (kept,) = tmp_path.glob("out/rings-*/*.ring")
    assert kept.with_suffix(".stacks").read_text() == "of rank 0"


@pytest.mark.slow
def test_rings_are_kept_also_where_watching_has_stopped(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _STOPS_WATCHING, _LEAVES_A_RING, str(tmp_path / "kept")],
        env=environment(tmp_path) | {"PYTHONPATH": str(Path(__file__).parent.parent)},
        timeout=TIMEOUT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0 and "stopped watching: ValueError" in ended.stdout, ended
    assert (tmp_path / "kept" / "rank0-1.ring").exists()
