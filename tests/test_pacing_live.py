"""Pacing in real jobs: it holds ranks, changes no number, blames nobody for it, and ends when its watcher is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eroica import ring
from eroica.holds import MOST_DELAY_NS
from eroica.ring import HOLDS, PACED, Flight, read_flight
from tests.test_live import TIMEOUT_S, diagnoses, environment, run, wait_for, watched

JOB = Path(__file__).with_name("paced_job.py")
TTL_S = 10.0
"""What `eroica run` asks for."""


def job(steps: int, weights: Path) -> list[str]:
    weights.mkdir()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    return [*launcher, str(JOB), str(steps), str(weights)]


def rings(folder: Path) -> list[Flight]:
    found = [read_flight(path) for path in folder.rglob(f"*{ring.SUFFIX}")]
    return sorted(found, key=lambda flight: flight.words[ring.RANK])


@pytest.mark.full
def test_a_paced_job_holds_ranks_that_wait_and_ends_with_the_same_weights_bit_for_bit(tmp_path: Path) -> None:
    paced, alone = tmp_path / "paced", tmp_path / "alone"
    ended = run(job(400, paced), tmp_path, "--pace", "enable", "--keep-rings", "--no-baseline")
    assert ended.returncode == 0, ended.stderr
    plain = subprocess.run(
        job(400, alone), env=environment(tmp_path) | {"EROICA": "0"}, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert plain.returncode == 0, plain.stderr
    digests = [[(folder / f"rank{rank}").read_text() for rank in range(4)] for folder in (paced, alone)]
    assert digests[0] == digests[1] and len(set(digests[0])) == 1
    kept = rings(tmp_path / "out")
    held = [[record for record in flight.records if record.kind == PACED] for flight in kept]
    assert [len(flight.records) > 0 for flight in kept] == [True] * 4
    assert all(len(records) > 10 for records in held[:3]), "the three that wait for rank 3"
    assert not held[3], "the late one is never held"
    history = [json.loads(line) for line in (tmp_path / "out" / "pacing.jsonl").read_text().splitlines()]
    assert [change["phase"] for change in history[:2]] == ["", "trial"]
    assert all(one["verdict"]["ranks"] in ("", "3") for one in diagnoses(tmp_path)), "nobody is blamed for being held"


@pytest.mark.full
def test_a_dry_run_says_what_it_would_do_and_holds_nobody(tmp_path: Path) -> None:
    ended = run(job(150, tmp_path / "weights"), tmp_path, "--pace", "dry-run", "--keep-rings", "--no-baseline")
    assert ended.returncode == 0 and "pacing: trial" in ended.stderr, ended.stderr
    assert all(flight.words[ring.PACED_NS] == 0 for flight in rings(tmp_path / "out"))


@pytest.mark.full
def test_when_the_watcher_is_killed_delays_are_over_within_their_time_to_live(tmp_path: Path) -> None:
    command = watched(job(1500, tmp_path / "weights"), tmp_path, "--pace", "enable", "--no-baseline")
    runtime = tmp_path / "runtime"
    watcher = subprocess.Popen(
        command, env=environment(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path
    )
    try:
        wait_for(lambda: any(flight.words[ring.PACED_NS] for flight in rings(runtime)), "a rank is held", TIMEOUT_S)
        watcher.kill()
        watcher.wait()
        killed_ns, steps = time.monotonic_ns(), rings(runtime)[0].words[ring.NUM_STEPS]
        over_ns = killed_ns + round(TTL_S * 1e9) + MOST_DELAY_NS

        def is_well_over() -> bool:
            return time.monotonic_ns() > over_ns and rings(runtime)[0].words[ring.NUM_STEPS] > steps + 300

        wait_for(is_well_over, "three hundred more steps", TIMEOUT_S)
        for path in runtime.rglob(f"*{ring.SUFFIX}"):
            seen = read_flight(path)
            assert all(record.begin_ns < over_ns for record in seen.records if record.kind == PACED)
            assert int.from_bytes(path.read_bytes()[8 * HOLDS :][:8], "little") == 0, (
                "and nothing is looked at any more"
            )
            assert any(record.begin_ns > over_ns for record in seen.records), "while training goes on"
    finally:
        watcher.kill()
        for flight in rings(runtime):
            if ring.is_alive(flight.identity):
                os.kill(flight.identity.pid, signal.SIGTERM)
