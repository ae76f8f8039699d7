"""What `eroica fix --verify` measures: paces from rings, and runs of the user's command under `eroica run`."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eroica import cli
from eroica.assist.measuring import LEAST, Measured, durations, is_faster, pace_of
from eroica.ring import CAPTURE, read_flight, what
from tests.test_fix import diagnosis_file, git, repository, state
from tests.test_marks import Rank

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parent.parent

JOB = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from eroica import ring
from tests.test_marks import Rank

rank = Rank(Path(os.environ["EROICA_RING_DIR"]) / "rank0.ring")
rank.ring.set(ring.WORLD_SIZE, 1)
slow = "anomaly" in open("src/train.py").read()
for n in range(200):
    rank.train((SLOW if slow else FAST) + n % 3 * 0.0001)
rank.ring.set(ring.STATE, ring.ENDED)
rank.ring.close()
sys.exit(0 if slow else STATUS)
"""
"""A job of one rank whose iterations are as long as its training code makes them, told by its ring in no time."""


def measured(iteration_s: float | None, error_s: float | None = 0.0001, kinds: tuple[str, ...] = ()) -> Measured:
    return Measured(0, kinds, (), 4, 200, iteration_s, error_s)


def test_captures_and_the_first_iterations_are_not_counted(tmp_path: Path) -> None:
    rank = Rank(tmp_path / "rank0.ring")
    for number in range(100):
        rank.train(0.5 if number < 10 else 0.02)
        if number == 50:
            rank._end(rank.ring.begin(what(CAPTURE), rank.now_ns, -1, 0, 0, 0, rank.steps), 3.0)
    seconds = durations(read_flight(tmp_path / "rank0.ring"))
    assert 70 < len(seconds) < 90
    assert max(seconds) < 0.03


def test_the_mean_tells_what_comes_now_and_then_and_the_median_does_not() -> None:
    seconds = [0.11 if n % 10 == 0 else 0.01 for n in range(200)]
    usual, mean = pace_of(seconds, True), pace_of(seconds, False)
    assert usual is not None and mean is not None
    assert usual[0] == pytest.approx(0.01)
    assert mean[0] == pytest.approx(0.02)
    assert pace_of(seconds[: LEAST - 1], True) is None


@given(st.lists(st.floats(0.001, 10), min_size=LEAST, max_size=200), st.booleans())
def test_a_pace_lies_among_its_iterations_and_its_error_is_finite(seconds: list[float], is_stable: bool) -> None:
    told = pace_of(seconds, is_stable)
    assert told is not None
    assert min(seconds) - 1e-9 <= told[0] <= max(seconds) + 1e-9
    assert math.isfinite(told[1]) and told[1] >= 0


def test_faster_is_what_goes_beyond_the_noise() -> None:
    assert is_faster(measured(0.02), measured(0.015)) is True
    assert is_faster(measured(0.02), measured(0.025)) is False
    assert is_faster(measured(0.02), measured(0.0199)) is None
    assert is_faster(measured(0.02, 0.004), measured(0.015, 0.004)) is None
    assert is_faster(measured(None), measured(0.015)) is None


def job(folder: Path, slow: float, fast: float, status: int = 0) -> str:
    """The command of such a job."""
    text = JOB.replace("SLOW", str(slow)).replace("FAST", str(fast)).replace("STATUS", str(status))
    file = folder / f"job-{slow}-{fast}-{status}.py"
    file.write_text(text)
    return f"{sys.executable} {file}"


@pytest.mark.slow
def test_a_patch_is_measured_without_and_with_it(tmp_path: Path, capsys: Capture) -> None:
    checkout, file = repository(tmp_path), diagnosis_file(tmp_path)
    words = ["fix", str(file), "--repo", str(checkout), "--format", "json", "--verify"]
    assert cli.main([*words, job(tmp_path, 0.04, 0.02)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert re.match(r"4\d(\.\d)? % faster: 4\d(\.\d)? ms -> 2\d(\.\d)? ms per iteration \(median of", told["measured"])
    assert told["before"]["ranks"] == told["after"]["ranks"] == 1
    assert told["branch"] in git(checkout, "branch", "--list", "eroica/*")


@pytest.mark.full
def test_a_patch_that_is_slower_gains_nothing_or_breaks_the_job_is_dropped(tmp_path: Path, capsys: Capture) -> None:
    checkout, file = repository(tmp_path), diagnosis_file(tmp_path)
    before = state(checkout)
    for command, said in [
        (job(tmp_path, 0.02, 0.04), r"is no fix: [\d.]+ % slower"),
        (job(tmp_path, 0.02, 0.02), "does not show the gain that the diagnosis promises: no difference"),
        (
            job(tmp_path, 0.04, 0.02, status=3),
            r"is no fix: before the job runs to its end, now it broke off \(status 3\)",
        ),
    ]:
        assert cli.main(["fix", str(file), "--repo", str(checkout), "--verify", command]) == 1
        assert re.search(said, capsys.readouterr().err), said
        assert state(checkout) == before


TRAINING = """
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(steps):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.autograd.set_detect_anomaly(True)
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for _ in range(steps):
        out = model(torch.ones(4, 32))
        for _ in range(40):
            out = out * 1.0 + 0.0
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.003)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
"""


@pytest.mark.e2e
@pytest.mark.full
def test_a_real_training_is_diagnosed_patched_and_measured(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = repository(tmp_path)
    (checkout / "src" / "train.py").write_text(TRAINING)
    git(checkout, "commit", "--quiet", "--all", "--message", "Train in earnest")
    out = tmp_path / "out"
    command = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 src/train.py"
    monkeypatch.chdir(checkout)
    assert cli.main(["run", "--out", str(out), "--", *command.split(), "3000"]) == 0
    capsys.readouterr()
    for file in sorted(out.glob("diagnosis-*.json")):
        if json.loads(file.read_text())["verdict"]["cause"] == "configuration":
            break
    else:
        pytest.fail("anomaly detection was not found")
    words = ["fix", str(file), "--repo", str(checkout), "--verify", f"{command} 900", "--format", "json"]
    assert cli.main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert "% faster" in told["measured"]
    assert told["before"]["iterations"] > 500
