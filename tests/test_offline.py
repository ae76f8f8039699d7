"""A folder of traces in, a diagnosis out: what happens to files that cannot be used (design section 11)."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest

from eroica.errors import DataError, UnavailableError, UserError
from eroica.findings import Diagnosis, to_json
from eroica.offline import diagnose_paths, stack_paths
from evals.kineto_file import write_json
from evals.synth import Cluster, cluster


@pytest.fixture(scope="module")
def slow_input() -> Cluster:
    return cluster("slow_input", world_size=4, effect=0.2, seed=1, num_iterations=5, max_events=400)


@pytest.fixture(scope="module")
def written(slow_input: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    for rank in range(4):
        write_json(slow_input.written(rank), folder / f"rank{rank}.json.gz")
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "job"))


def diagnosed(*paths: Path, **more: Any) -> Diagnosis:
    return diagnose_paths(list(paths), **more)[0]


def test_a_folder_is_diagnosed_by_the_ranks_in_it(folder: Path, slow_input: Cluster) -> None:
    made = diagnosed(folder, job="night run")
    assert made.verdict.cause == "input_pipeline" and made.verdict.ranks == str(*slow_input.truth.culprits)
    assert made.job == "night run" and made.coverage.missing_ranks == "" and made.created


@pytest.mark.parametrize(
    "broken", [b"", b"{", b"\x1f\x8b\x08\0garbage", b"[" * 100_000, b'{"traceEvents": [{"ph": "X"}]}']
)
def test_a_broken_file_among_good_ones_is_a_missing_rank_with_the_reason(folder: Path, broken: bytes) -> None:
    (folder / "rank2.json.gz").unlink()
    (folder / "rank2.json").write_bytes(broken)
    made = diagnosed(folder)
    assert made.coverage.ranks_reported == 3 and made.coverage.missing_ranks == "2"
    assert any("rank2.json" in note or "rank 2" in note for note in made.coverage.notes), made.coverage.notes


def test_a_cut_file_is_loaded_and_called_partial(folder: Path) -> None:
    whole = (folder / "rank2.json.gz").read_bytes()
    (folder / "rank2.json.gz").write_bytes(whole[: len(whole) * 2 // 3])
    made = diagnosed(folder)
    assert made.coverage.ranks_reported == 4 and made.coverage.partial_ranks == "2"
    assert any(note.startswith("rank 2: ") for note in made.coverage.notes)


def test_when_no_file_can_be_used_the_reason_is_an_error(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"rank{rank}.json").write_text('{"traceEvents": [{"ph": "X", "name": "a", "ts": "x"}]}')
    with pytest.raises((DataError, UserError)) as caught:
        diagnosed(tmp_path)
    assert "\n" not in str(caught.value)


def test_two_files_of_one_rank_stop_the_run_and_are_named(folder: Path) -> None:
    shutil.copy(folder / "rank1.json.gz", folder / "again1.json.gz")
    with pytest.raises(UserError, match="rank 1") as caught:
        diagnosed(folder)
    assert "again1" in str(caught.value)


def test_a_place_without_traces_is_the_users_error(tmp_path: Path) -> None:
    for nowhere in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError):
            diagnosed(nowhere)


def test_processes_and_executors_give_the_same_bytes_as_one_process(folder: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        made = [diagnosed(folder), diagnosed(folder, jobs=2), diagnosed(folder, executor=threads)]
    texts = {json.dumps(to_json(replace(one, created=""))) for one in made}
    assert len(texts) == 1


def test_a_killed_worker_process_is_one_sentence(folder: Path) -> None:
    with (
        ProcessPoolExecutor(1, initializer=os._exit, initargs=(9,)) as dying,
        pytest.raises(UnavailableError, match="was killed"),
    ):
        diagnosed(folder, executor=dying)


def test_an_interrupt_leaves_no_process_and_no_waiting_file_behind(folder: Path) -> None:
    def interrupt(done: int, total: int, what: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stack_paths([folder], jobs=2, progress=interrupt)
    assert not active_children()


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), signal.SIGKILL)", "os.killpg(0, signal.SIGINT)"])
def test_workers_end_in_silence_with_the_process_that_started_them(how: str, folder: Path) -> None:
    script = f"""
import os, signal, sys
from eroica.offline import stack_paths
try:
    stack_paths([sys.argv[1]], jobs=2, progress=lambda done, total, what: {how})
except KeyboardInterrupt:
    pass
"""
    # The workers hold the pipes too, so this returns when the last of them is gone.
    command = [sys.executable, "-c", script, str(folder)]
    done = subprocess.run(command, capture_output=True, timeout=60, start_new_session=True, check=False)
    assert done.returncode in (0, -9)
    assert "Traceback" not in done.stderr.decode()


@pytest.mark.parametrize("num_ranks", [10**8, 2**31 - 1])
def test_a_claim_of_countless_ranks_costs_nothing(num_ranks: int, folder: Path) -> None:
    for rank in range(4):
        path = folder / f"rank{rank}.json.gz"
        told = json.loads(gzip.decompress(path.read_bytes()))
        told["distributedInfo"]["world_size"] = num_ranks
        path.write_bytes(gzip.compress(json.dumps(told).encode()))
    coverage = diagnosed(folder).coverage
    assert coverage.ranks_expected == num_ranks and coverage.missing_ranks == f"4-{num_ranks - 1}"


def test_progress_is_told_for_each_file(folder: Path) -> None:
    told: list[tuple[int, int]] = []
    stack_paths([folder], progress=lambda done, total, what: told.append((done, total)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_past_that_cannot_be_read_is_named_as_such(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^baseline: "):
        diagnosed(folder, baseline_paths=[tmp_path / "nowhere"])


def test_a_healthy_past_gives_the_slowdown(folder: Path) -> None:
    made = diagnosed(folder, baseline_paths=[folder])
    assert made.iteration.slowdown == pytest.approx(1.0) and made.iteration.baseline_s == made.iteration.observed_s


def test_other_files_in_the_folder_are_left_out_and_named(folder: Path) -> None:
    (folder / "config.json").write_text('{"lr": 0.1}')
    (folder / "readme.txt").write_text("hello")
    made = diagnosed(folder)
    assert made.coverage.ranks_reported == 4
    assert any("config.json" in note for note in made.coverage.notes)
