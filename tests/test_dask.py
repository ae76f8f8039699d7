"""Traces read by a real Dask cluster of two worker processes: the same diagnosis, and what is lost is lost alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pytest

from eroica import dask
from eroica.dask import dask_executor
from eroica.errors import UnavailableError, UserError
from eroica.findings import Diagnosis, to_json
from eroica.offline import diagnose_paths, engine
from evals.kineto_file import write_json
from evals.synth import cluster as synthetic

P = ParamSpec("P")
T = TypeVar("T")
CLUSTER = """
import sys
from distributed import LocalCluster
if __name__ == "__main__":
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        print(cluster.scheduler_address, flush=True)
        for line in sys.stdin:
            cluster.scale(int(line))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    job = synthetic("slow_input", world_size=6, effect=0.2, seed=1, num_iterations=5, max_events=400)
    for rank in range(6):
        write_json(job.written(rank), folder / f"rank{rank}.json.gz")
    return folder


def start_cluster(folder: Path) -> tuple[subprocess.Popen[str], str]:
    script = folder / "cluster.py"
    script.write_text(CLUSTER)
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def end_cluster(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=30)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    process, address = start_cluster(tmp_path_factory.mktemp("cluster"))
    yield address
    end_cluster(process)


class Spoilt(Executor):
    """A cluster to which something happens when the file of rank 2 is handed out."""

    def __init__(self, pool: Executor, spoil: Callable[[Executor, str], Future[Any] | None]) -> None:
        self._pool = pool
        self._spoil = spoil

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        if "rank2" in str(args[0]):
            spoilt = self._spoil(self._pool, str(args[0]))
            if spoilt is not None:
                return spoilt
        return self._pool.submit(fn, *args, **kwargs)


def text(diagnosis: Diagnosis) -> str:
    return json.dumps(to_json(replace(diagnosis, created="")))


@pytest.mark.full
def test_a_cluster_gives_the_same_bytes_as_this_process_and_tells_its_progress(folder: Path, url: str) -> None:
    told: list[tuple[int, int]] = []
    with engine(f"dask:{url}") as executor:
        there, _ = diagnose_paths(
            [folder], executor=executor, progress=lambda done, total, what: told.append((done, total))
        )
    assert text(there) == text(diagnose_paths([folder])[0])
    assert told == [(done, 6) for done in range(1, 7)]


@pytest.mark.full
def test_the_command_reads_on_a_cluster_also_from_a_folder_named_relative_to_here(folder: Path, url: str) -> None:
    command = [sys.executable, "-m", "eroica", "diagnose", folder.name, "--engine", f"dask:{url}", "--format", "json"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=folder.parent,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["verdict"]["cause"] == "input_pipeline"


@pytest.mark.full
def test_a_file_that_workers_do_not_see_is_a_missing_rank_with_a_sentence(folder: Path, url: str) -> None:
    hidden = folder / "rank2.json.gz"

    def hide(pool: Executor, path: str) -> None:
        hidden.rename(folder / "aside")

    try:
        with dask_executor(url) as pool:
            made, _ = diagnose_paths([folder], executor=Spoilt(pool, hide))
    finally:
        (folder / "aside").rename(hidden)
    assert made.coverage.ranks_reported == 5 and made.coverage.missing_ranks == "2"
    (note,) = [note for note in made.coverage.notes if "rank 2" in note]
    assert "does not see it" in note and "\n" not in note


@pytest.mark.full
def test_a_file_that_kills_each_worker_that_reads_it_is_lost_alone(folder: Path, url: str) -> None:
    with dask_executor(url) as pool:
        made, _ = diagnose_paths([folder], executor=Spoilt(pool, lambda pool, path: pool.submit(os._exit, 9)))
    assert made.coverage.ranks_reported == 5 and made.coverage.missing_ranks == "2"
    (note,) = [note for note in made.coverage.notes if "rank 2" in note]
    assert "workers of the Dask cluster died" in note and "\n" not in note


@pytest.mark.full
def test_a_worker_that_is_killed_midway_costs_no_rank(folder: Path, url: str) -> None:
    with dask_executor(url) as pool:
        victim = pool.submit(os.getpid).result(30)

        def kill(pool: Executor, path: str) -> None:
            os.kill(victim, signal.SIGKILL)

        made, _ = diagnose_paths([folder], executor=Spoilt(pool, kill))
    assert text(made) == text(diagnose_paths([folder])[0])


@pytest.mark.full
def test_when_the_cluster_is_lost_what_was_read_is_diagnosed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dask, "CONNECT_S", 3.0)
    process, address = start_cluster(tmp_path)
    try:
        with dask_executor(address) as pool:

            def end(pool: Executor, path: str) -> Future[Any]:
                # The two before it are read; what comes now is not.
                pool.submit(os.getpid).result(30)
                lost = pool.submit(time.sleep, 600)
                os.killpg(process.pid, signal.SIGKILL)
                return lost

            first_two = [folder / f"rank{rank}.json.gz" for rank in range(3)]
            made, _ = diagnose_paths(first_two, executor=Spoilt(pool, end))
    finally:
        end_cluster(process)
    assert made.coverage.ranks_reported >= 1
    assert any("Dask scheduler" in note and "was lost" in note for note in made.coverage.notes), made.coverage.notes


@pytest.mark.full
def test_a_cluster_without_workers_fails_what_waits_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask, "ALONE_S", dask.LOOK_S)
    process, address = start_cluster(tmp_path)
    try:
        with dask_executor(address) as pool:
            endless = pool.submit(time.sleep, 600)
            assert process.stdin is not None
            process.stdin.write("0\n")
            process.stdin.flush()
            with pytest.raises(UnavailableError, match="has had no worker"):
                endless.result(60)
    finally:
        end_cluster(process)


@pytest.mark.full
def test_an_address_where_no_scheduler_answers_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask, "CONNECT_S", 0.5)
    with pytest.raises(UnavailableError, match="no Dask scheduler answers"), dask_executor("tcp://127.0.0.1:9"):
        pass
    with pytest.raises(UserError, match="no address"), dask_executor("carrier-pigeon://roof"):
        pass
