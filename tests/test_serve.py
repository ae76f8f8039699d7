"""A job over two hosts: a coordinator, two runs and a bus, each a process of its own."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from eroica.chronicle import Chronicle
from eroica.coordinators import Coordinators
from eroica.findings import from_json
from eroica.investigation import Incident
from eroica.serve import HostAgent
from eroica.windows import Policy
from tests.buses import Network

JOB = Path(__file__).with_name("live_job.py")
TIMEOUT_S = 240


def environment(home: Path, host: str) -> dict[str, str]:
    """Of one host: a name and a place for rings of its own."""
    runtime = home / host
    runtime.mkdir(exist_ok=True)
    return os.environ | {"OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(runtime), "EROICA_HOST": host}


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"{what} within {seconds} s"
        time.sleep(0.05)


@contextmanager
def coordinator(home: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Runs until the end of the block, and must leave in peace then, unless the test has killed it."""
    log = (home / "serve.log").open("w")
    process = subprocess.Popen(
        [sys.executable, "-m", "eroica", "serve", "--out", str(home / "out"), "--state", str(home / "state"), *options],
        stderr=log,
        text=True,
        cwd=home,
    )
    try:
        wait_for(lambda: "the bus is at" in (home / "serve.log").read_text(), "a bus")
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(30)
        log.close()
    assert status in (0, -signal.SIGKILL), (home / "serve.log").read_text()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(
    home: Path, host: str, node: int, port: int, *words: str, way: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """`eroica run` on one of two hosts, with two ranks each. `way`: to the coordinator; None: by its pass."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"]
    launcher += ["--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}", str(JOB), *words]
    return subprocess.Popen(
        [sys.executable, "-m", "eroica", "run", "--out", str(home / f"out-{host}"), "--", *launcher],
        env=environment(home, host) | dict(way or {"EROICA_COORDINATOR": str(home / "state" / "waves.pass")}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=home,
    )


def diagnoses(home: Path, out: str = "out") -> list[dict[str, Any]]:
    files = sorted((home / out / "waves").glob("diagnosis-*.json"), key=lambda path: path.stat().st_mtime_ns)
    found = [json.loads(file.read_text()) for file in files]
    for one in found:
        from_json(one)
    return found


@pytest.mark.full
@pytest.mark.e2e
def test_a_slow_rank_of_a_job_over_two_hosts_is_told_with_its_host(tmp_path: Path) -> None:
    with coordinator(tmp_path, "--job", "waves"):
        port = free_port()
        runs = [start(tmp_path, host, node, port, "420", "slow", "150", "2") for node, host in enumerate(("a", "b"))]
        ended = [run.communicate(timeout=TIMEOUT_S) for run in runs]
        assert [run.returncode for run in runs] == [0, 0], ended
    told = "\n".join([*(text for pair in ended for text in pair), (tmp_path / "serve.log").read_text()])
    found = [one for one in diagnoses(tmp_path) if one["kind"] == "slow"]
    assert [(one["verdict"]["ranks"], one["verdict"]["cause"]) for one in found] == [("2", "input_pipeline")], told
    assert found[0]["verdict"]["hosts"] == ["b"] and found[0]["placement"]["hosts"] == {"a": "0-1", "b": "2-3"}, told
    assert found[0]["coverage"]["ranks_reported"] == 4 and found[0]["job"] == "waves"
    assert "live_job.py" in found[0]["findings"][0]["function"]["user_location"]
    assert all("input pipeline" in stderr for _, stderr in ended), told
    assert not list(tmp_path.glob("[ab]/eroica/*")), "captures and rings are cleared away"


@pytest.mark.full
@pytest.mark.e2e
def test_the_runs_of_a_job_meet_in_its_own_store_without_having_been_told_where(tmp_path: Path) -> None:
    port, way = free_port(), {"EROICA_COORDINATOR": "store", "EROICA_JOB": "waves"}
    hosts = enumerate(("a", "b"))
    runs = [start(tmp_path, host, node, port, "600", "slow", "300", "2", way=way) for node, host in hosts]
    ended = [run.communicate(timeout=TIMEOUT_S) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], ended
    found = [one for one in diagnoses(tmp_path, "out-a") if one["kind"] == "slow"]
    assert [(one["verdict"]["ranks"], one["verdict"]["cause"]) for one in found] == [("2", "input_pipeline")], ended
    assert found[0]["placement"]["hosts"] == {"a": "0-1", "b": "2-3"}
    assert "it brings the coordinator along" in ended[0][1] and "along" not in ended[1][1]
    assert all("input pipeline" in stderr for _, stderr in ended)
    assert not list(tmp_path.glob("[ab]/eroica/*")), "rings, passes and certificates are cleared away"


@pytest.mark.full
@pytest.mark.e2e
def test_a_rank_that_is_killed_on_another_host_is_a_crash_of_that_rank(tmp_path: Path) -> None:
    with coordinator(tmp_path, "--job", "waves", "--no-baseline"):
        port = free_port()
        runs = [start(tmp_path, host, node, port, "300", "dead", "60", "3") for node, host in enumerate(("a", "b"))]
        ended = [run.communicate(timeout=TIMEOUT_S) for run in runs]
        assert all(run.returncode == 1 for run in runs), ended
    told = "\n".join([*(text for pair in ended for text in pair), (tmp_path / "serve.log").read_text()])
    (found,) = diagnoses(tmp_path)
    assert (found["kind"], found["verdict"]["ranks"], found["verdict"]["hosts"]) == ("crash", "3", ["b"]), told


def words(home: Path, host: str, coordinator: str, *command: str) -> subprocess.CompletedProcess[str]:
    """`eroica run` on a command that trains nothing."""
    return subprocess.run(
        [sys.executable, "-m", "eroica", "run", "--out", str(home / "out"), "--", *command],
        env=environment(home, host) | {"EROICA_COORDINATOR": coordinator, "EROICA_JOB": "waves"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=home,
    )


@pytest.mark.slow
def test_a_job_keeps_its_status_and_gets_no_secret_from_the_run_that_reports_elsewhere(tmp_path: Path) -> None:
    with coordinator(tmp_path, "--job", "waves"):
        ended = words(tmp_path, "a", str(tmp_path / "state" / "waves.pass"), "sh", "-c", "env; exit 3")
        wait_for(lambda: "job waves has an agent" in (tmp_path / "serve.log").read_text(), "an agent")
    secret = json.loads((tmp_path / "state" / "waves.pass").read_text())["password"]
    assert ended.returncode == 3 and "EROICA_RING_DIR" in ended.stdout, ended.stderr
    assert "EROICA_COORDINATOR" not in ended.stdout and secret not in ended.stdout + ended.stderr
    assert secret not in (tmp_path / "serve.log").read_text() and "not heard" not in ended.stderr


@pytest.mark.slow
def test_a_job_runs_to_its_end_without_the_coordinator_that_it_was_to_have(tmp_path: Path) -> None:
    ended = words(tmp_path, "a", f"nats://me:secret@127.0.0.1:{free_port()}", "sh", "-c", "exit 4")
    assert ended.returncode == 4 and "the coordinator is not heard" in ended.stderr and "secret" not in ended.stderr


@pytest.mark.slow
def test_the_bus_ends_with_a_coordinator_that_is_killed_and_comes_back_if_it_is_killed_itself(tmp_path: Path) -> None:
    def bus_of(process: subprocess.Popen[str]) -> list[int]:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return [int(child) for child in children]

    with coordinator(tmp_path) as first:
        (killed,) = bus_of(first)
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: "is started again" in (tmp_path / "serve.log").read_text(), "another server")
        (server,) = bus_of(first)
        assert server != killed
        first.kill()
        wait_for(lambda: not Path(f"/proc/{server}/exe").exists(), "the end of the server")


@contextmanager
def two_hosts() -> Iterator[tuple[list[str], list[str]]]:
    """Network namespaces, joined by a wire, as 10.77.0.1 and .2: what to put before a command to be run there."""
    names = [f"eroica-{os.getpid()}-{end}" for end in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "wire", "netns", names[0], "type", "veth", "peer", "name", "wire", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "wire")
            ip("-n", name, "link", "set", "wire", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield ["ip", "netns", "exec", names[0]], ["ip", "netns", "exec", names[1]]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.mark.full
@pytest.mark.skipif(os.getuid() != 0, reason="network namespaces need root")
def test_from_another_network_namespace_a_token_gets_in_by_its_certificate_and_nothing_else_does(
    tmp_path: Path,
) -> None:
    from eroica.meetup import certify

    certify("10.77.0.1", tmp_path / "bus.pem", tmp_path / "bus.key")
    open_to_all = ["--listen", "10.77.0.1", "--http", "10.77.0.1:8443", "--tls-cert", "bus.pem", "--tls-key", "bus.key"]
    python = [sys.executable, "-m", "eroica"]

    def call(there: list[str], *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        command = [*there, *python, *words]
        return subprocess.run(
            command, env=os.environ | environ, capture_output=True, text=True, timeout=60, cwd=tmp_path
        )

    with two_hosts() as (here, there), (tmp_path / "serve.log").open("w") as log:
        unsafe = call(here, "serve", "--state", "other", "--http", "10.77.0.1:8443")
        assert unsafe.returncode == 1 and "tokens would cross the network in the clear" in unsafe.stderr
        served = subprocess.Popen([*here, *python, "serve", "--state", "state", *open_to_all], stderr=log, cwd=tmp_path)
        try:
            wait_for(lambda: "the HTTP API is at https://10.77.0.1:8443" in (tmp_path / "serve.log").read_text(), "API")
            token = json.loads((tmp_path / "state" / "read.token").read_text())["token"]
            asked = call(there, "status", "--api", "state/read.token")
            assert (asked.returncode, asked.stdout) == (0, "no job has reported to this coordinator yet\n"), asked
            for api, environ, why in [
                ("https://10.77.0.1:8443", {"EROICA_TOKEN": token}, "certificate"),
                ("https://10.77.0.1:8443", {"EROICA_TOKEN": "x", "EROICA_CA": "bus.pem"}, "does not know this token"),
                ("http://10.77.0.1:8443", {"EROICA_TOKEN": token}, "not encrypted"),
            ]:
                refused = call(there, "status", "--api", api, **environ)
                assert refused.returncode == 1 and why in refused.stderr, refused
            local = json.loads((tmp_path / "state" / "read.token").read_text()) | {"url": "https://127.0.0.1:8443"}
            (tmp_path / "local.token").touch(0o600)
            (tmp_path / "local.token").write_text(json.dumps(local))
            assert "nobody answers" in call(there, "status", "--api", "local.token").stderr
            from_outside = call([], "status", "--api", "state/read.token")
            assert from_outside.returncode == 1 and "nobody answers" in from_outside.stderr, "a third network"
            log_now = call(there, "status", "--api", "state/admin.token")
            assert log_now.returncode == 0
            wait_for(lambda: "from 10.77.0.2: 401" in (tmp_path / "serve.log").read_text(), "a word of it")
        finally:
            served.terminate()
            served.wait(30)
    assert token not in (tmp_path / "serve.log").read_text()


def ask(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command that talks to the coordinator."""
    command = [sys.executable, "-m", "eroica", *arguments, "--api", str(home / "state" / "act.token")]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=home)


@pytest.mark.slow
def test_a_coordinator_answers_over_http_and_goes_on_where_a_killed_one_left_off(tmp_path: Path) -> None:
    with coordinator(tmp_path, "--token", "alice:read") as first:
        wait_for(lambda: "the HTTP API is at http://127.0.0.1:" in (tmp_path / "serve.log").read_text(), "an API")
        ended = words(tmp_path, "a", str(tmp_path / "state" / "all-jobs.pass"), "sh", "-c", "exit 0")
        assert ended.returncode == 0
        wait_for(lambda: "waves  ended" in ask(tmp_path, "status").stdout, "the end of the job")
        wait_for(lambda: "waves" in ask(tmp_path, "status", "--format", "json").stdout, "a job in the store")
        first.kill()
        first.wait(30)
    asked = ask(tmp_path, "status")
    assert asked.returncode == 1 and asked.stderr.startswith("eroica status: nobody answers at http://127.0.0.1:")
    with coordinator(tmp_path, "--http", "off"):
        pass
    assert "HTTP" not in (tmp_path / "serve.log").read_text()
    with coordinator(tmp_path):
        wait_for(lambda: ask(tmp_path, "status").returncode == 0, "an API")
        row = ask(tmp_path, "status").stdout.splitlines()[1]
        assert row.split() == ["waves", "over", "0"], row
        database = tmp_path / "state" / "eroica.db"
        assert database.stat().st_mode & 0o777 == 0o600
        log = (tmp_path / "serve.log").read_text()
    secrets = [json.loads(path.read_text())["token"] for path in (tmp_path / "state").glob("*.token")]
    assert len(secrets) == 4 and not any(secret in log for secret in secrets)


@pytest.mark.full
@pytest.mark.e2e
def test_a_person_profiles_a_job_over_two_hosts_and_is_told_that_it_was_seen_before(tmp_path: Path) -> None:
    with coordinator(tmp_path, "--job", "waves"):
        port = free_port()
        runs = [start(tmp_path, host, node, port, "900", "slow", "150", "2") for node, host in enumerate(("a", "b"))]
        wait_for(lambda: "slow: rank 2" in ask(tmp_path, "incidents").stdout, "an incident", 120.0)
        status = ask(tmp_path, "status", "waves").stdout
        profiled = ask(tmp_path, "profile", "waves")
        again = ask(tmp_path, "incidents").stdout.splitlines()
        for run in runs:
            run.send_signal(signal.SIGTERM)
            run.communicate(timeout=TIMEOUT_S)
    assert "4 of 4 ranks on 2 hosts" in status, status
    assert profiled.returncode == 0 and "rank 2" in profiled.stdout.splitlines()[0], profiled
    assert "input pipeline" in profiled.stdout.splitlines()[0] and "seen before: 1 time" in profiled.stdout, profiled
    assert len([line for line in again if "slow: rank 2" in line]) == 2, again


_RANK = """
import socket, sys
from pathlib import Path
from eroica.ring import Ring
ring = Ring.create(Path(sys.argv[1], "0.ring"), rank=0, world_size=1, capacity=64)
ring.note(host=socket.gethostname(), job="waves")
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_rank_that_dies_while_the_coordinator_is_away_is_told_of_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eroica.relay.SILENT_NS", 1_500_000_000)
    monkeypatch.setattr("eroica.serve.SCAN_S", 0.01)
    folder = tmp_path / "eroica" / "job-1"
    folder.mkdir(parents=True)
    network, told, said = Network(random.Random(1)), list[Incident](), list[str]()
    coordinators = Coordinators(
        network.carrier(),
        Policy(baseline=False, look_again_s=0.01),
        lambda job, incident: told.append(incident),
        said.append,
        Chronicle(None),
    )
    agent = HostAgent(network.carrier(), {"XDG_RUNTIME_DIR": str(tmp_path), "EROICA_HOST": "a"}, said.append)

    def rounds(until: Callable[[], bool], what: str) -> None:
        def turn() -> bool:
            agent.look()
            coordinators.look()
            return until()

        wait_for(turn, what)

    rank = subprocess.Popen(
        [sys.executable, "-c", _RANK, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with closing(agent), rank:
        assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
        rounds(lambda: "waves" in coordinators.jobs and 0 in coordinators.snapshot("waves").standings, "a rank")
        network.is_cut = True
        rank.kill()
        rank.wait()
        rounds(lambda: not any(coordinators.snapshot("waves").hosts.values()), "silence")
        assert not told
        network.is_cut = False
        rounds(lambda: bool(told), "an incident")
        rounds(lambda: "job waves is over here" in said, "an end")
        assert coordinators.snapshot("waves").has_ended
    assert [one.diagnosis.kind for one in told] == ["crash"]


def _captured(folder: Path) -> Path:
    """Of a window that nobody closes, since the coordinator that began it is gone."""
    capture = folder / "captures" / "7" / "rank0.json"
    capture.parent.mkdir(parents=True)
    capture.write_text("{}")
    return capture


def test_an_agent_that_is_ended_right_after_a_job_leaves_no_captures_of_it_and_those_of_living_ranks(
    tmp_path: Path,
) -> None:
    network, said = Network(random.Random(1)), list[str]()
    agent = HostAgent(network.carrier(), {"XDG_RUNTIME_DIR": str(tmp_path), "EROICA_HOST": "a"}, said.append)
    folders = [tmp_path / "eroica" / name for name in ("job-1", "job-2")]
    ranks = []
    for folder in folders:
        folder.mkdir(parents=True)
        rank = subprocess.Popen(
            [sys.executable, "-c", _RANK, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
        ranks.append(rank)
    with ranks[0], ranks[1]:
        agent.look()
        assert sum("has ranks here" in text for text in said) == 2
        gone, stays = map(_captured, folders)
        ranks[0].kill()
        ranks[0].wait()
        agent.close()
        assert not gone.exists() and stays.exists()
        ranks[1].kill()
    for hours_ago, is_left in ((0, True), (1, False)):  # it ended while no agent was there
        os.utime(folders[1] / "captures", (time.time() - 3600 * hours_ago,) * 2)
        later = HostAgent(network.carrier(), {"XDG_RUNTIME_DIR": str(tmp_path), "EROICA_HOST": "a"}, said.append)
        with closing(later):
            later.look()
            assert stays.exists() == is_left


def test_a_secret_on_the_command_line_is_wrong_usage() -> None:
    from eroica.cli import main

    with pytest.raises(SystemExit) as wrong:
        main(["run", "--bus", "nats://me:secret@127.0.0.1:4222", "--", "true"])
    assert wrong.value.code == 2


def test_a_pass_for_all_jobs_needs_to_be_told_which_one_this_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from eroica.cli import main

    for name in ("EROICA_JOB", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as wrong:
        main(["run", "--bus", "nats://127.0.0.1:4222", "--", "true"])
    assert wrong.value.code == 2 and "--job" in capsys.readouterr().err
