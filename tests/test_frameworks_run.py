"""Frameworks that people train with, under `eroica run`: counted right, diagnosed right, and left as they are."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eroica.findings import from_json
from eroica.marks import Watch, watched
from eroica.ring import read_flight
from eroica.steps import Pause
from eroica.trace import read_trace

PROGRAM = Path(__file__).parent / "frameworks" / "job.py"
TIMEOUT_S = 300
UPDATES, ONSET, EVERY = 340, 160, 60
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
SINGLE = ("plain", "gan", "lbfgs", "accumulated", "stateful")
ALONE = ("spawn", "slurm", *SINGLE)
"""Started by no launcher."""
LAUNCHER = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


def train(home: Path, framework: str, *words: str, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    runtime = home / "runtime"
    runtime.mkdir(exist_ok=True)
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER and name[:6] not in ("EROICA", "SLURM_")
    }
    launcher = [sys.executable] if framework in ALONE else TORCHRUN
    return subprocess.run(
        [*prefix, *launcher, str(PROGRAM), framework, str(UPDATES), *words],
        env=clean | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1", "XDG_RUNTIME_DIR": str(runtime)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=home,
    )


def train_bare(home: Path, framework: str) -> subprocess.CompletedProcess[str]:
    """Not watched; once more where torch itself ended it: gloo's threads may abort at the exit (pytorch#190489)."""
    ended = train(home, framework)
    if ended.returncode and "terminate called without an active exception" in ended.stderr:
        ended = train(home, framework)
    return ended


def run(home: Path, framework: str, *words: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """The same, watched."""
    eroica = (sys.executable, "-m", "eroica", "run", "--out", str(home / "out"), "--keep-rings", *options, "--")
    return train(home, framework, *words, prefix=eroica)


def told(home: Path) -> list[dict[str, Any]]:
    """What was found after the baseline window, oldest first."""
    files = sorted((home / "out").glob("diagnosis-*.json"), key=lambda path: path.stat().st_mtime_ns)
    found = [json.loads(file.read_text()) for file in files]
    for one in found:
        from_json(one)
    return [one for one in found if one["window"]["trigger"] != "baseline"]


def watches(home: Path) -> list[Watch]:
    """What the kept rings tell."""
    (folder,) = (home / "out").glob("rings-*")
    return [watched(read_flight(path)) for path in sorted(folder.iterdir())]


def said(stdout: str) -> dict[str, Any]:
    """What the program says of itself: its only line on stdout."""
    (line,) = [line for line in stdout.splitlines() if line]
    made: dict[str, Any] = json.loads(line)
    return made


def is_slow_and_right(home: Path, framework: str, ranks: str) -> None:
    """Trains with data that become slow to read on `ranks`, watched and not, and checks all that is promised."""
    bare = train_bare(home, framework)
    ended = run(home, framework, str(ONSET), ranks, options=("--keep-captures",))
    assert (bare.returncode, ended.returncode) == (0, 0), bare.stderr + ended.stderr
    assert said(ended.stdout) == said(bare.stdout), "updates and weights, bit for bit"
    assert said(ended.stdout)["updates"] == UPDATES

    num_ranks = 1 if framework in SINGLE else 2
    seen = watches(home)
    assert [watch.num_iterations for watch in seen] == [UPDATES] * num_ranks
    for watch in seen:
        around = {i.number for i in watch.iterations if i.pause is Pause.EVALUATION}
        assert around <= set(range(0, UPDATES, EVERY)) | {UPDATES - 1}, "evaluations, and nothing else"

    found = told(home)
    assert all(one["kind"] in ("slow", "healthy") for one in found), "no evaluation is a hang"
    right = [one for one in found if one["verdict"]["cause"] == "input_pipeline"]
    assert right, ended.stderr
    last = right[-1]
    everyone = "0" if num_ranks == 1 else "0-1"
    scope, who = ("all", everyone) if ranks == "all" or num_ranks == 1 else ("rank", ranks)
    assert (last["verdict"]["scope"], last["verdict"]["ranks"]) == (scope, who)
    assert last["verdict"]["confidence"] in ("supported", "established")
    line = next(n for n, text in enumerate(PROGRAM.read_text().splitlines(), 1) if "def fetch" in text)
    assert last["findings"][0]["function"]["user_location"] in (f"job.py:{line}", f"job.py:{line + 1}")
    window, per = last["window"], seen[0].steps_per_iteration
    assert per == (2 if framework == "gan" else 1)
    assert window["last_step"] - window["first_step"] == (window["num_steps"] - 1) * per
    # The baseline window of the compiled model holds its first evaluation, for which it is compiled anew.
    assert window["first_step"] > ONSET * per and last["iteration"]["slowdown"] > 1.3 - 0.3 * (framework == "compiled")

    for trace in (home / "out" / f"captures-{last['id']}").iterdir():
        names = read_trace(trace).strings
        assert sum(name.startswith("ProfilerStep#") for name in names) == last["window"]["num_steps"]
    assert not list((home / "runtime").glob("eroica/*"))


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "ranks"),
    [
        ("ddp", "all"),
        pytest.param("plain", "all", marks=pytest.mark.full),
        *(pytest.param(kind, "1", marks=pytest.mark.full) for kind in ("fsdp2", "compiled", "spawn", "slurm")),
        *(pytest.param(kind, "all", marks=pytest.mark.full) for kind in ("gan", "lbfgs", "accumulated")),
    ],
)
def test_torch_alone_is_counted_and_diagnosed_right_and_its_weights_are_the_same(
    tmp_path: Path, framework: str, ranks: str
) -> None:
    is_slow_and_right(tmp_path, framework, ranks)


@pytest.mark.full
@pytest.mark.parametrize(
    ("framework", "ranks"), [("accelerate", "1"), ("trainer", "1"), ("lightning", "1"), ("stateful", "all")]
)
def test_frameworks_are_counted_and_diagnosed_right_and_their_weights_are_the_same(
    tmp_path: Path, framework: str, ranks: str
) -> None:
    is_slow_and_right(tmp_path, framework, ranks)


@pytest.mark.e2e
@pytest.mark.slow
def test_rings_that_cannot_be_kept_are_said_and_cost_nothing(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    ended = run(tmp_path, "plain")
    assert ended.returncode == 0 and said(ended.stdout)["updates"] == UPDATES
    assert "flight rings could not be kept in" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_job_that_does_not_train_keeps_no_rings_and_says_so(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "eroica",
        "run",
        "--out",
        "out",
        "--keep-rings",
        "--",
        shutil.which("true") or "true",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=TIMEOUT_S)
    assert (ended.returncode, ended.stdout) == (0, "") and "no flight rings are kept" in ended.stderr
    assert not (tmp_path / "out").exists()
