"""The demos: real training processes with a planted fault, found by the traces alone."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from eroica import cli, demo
from eroica.errors import UnavailableError, UserError
from eroica.findings import Finding, FunctionName, from_json
from eroica.job import parse_ranks
from tests import samples

ROOT = Path(__file__).parent.parent
PLANTED = demo.Planted(
    fault="slow_input",
    healthy_step_s=0.03,
    culprit=3,
    delay_s=0.06,
    function="__getitem__",
    file="data.py",
    lines=(38, 44),
)


def _processes(out: Path) -> list[str]:
    """Command lines of the trainings that write below `out`, those that end at this moment left out."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = file.read_text(errors="replace").split("\0")
            if f"--traces={out / 'traces'}" in words and not _is_dying(file.parent):
                found.append(" ".join(words))
    return found


def _headings(text: str) -> list[str]:
    """What stands at the start of the lines of a report; but for notes, of which a run has more or fewer."""
    headings = re.findall(r"^(?:  )?([A-Za-z]+(?: [a-z]+)*)(?:  |:)", text, re.M)
    return [heading for heading in headings if heading != "note"]


def _is_dying(process: Path) -> bool:
    """Whether SIGKILL (bit 8) is pending for the process: the kernel takes it down, however long that takes."""
    pending = re.findall(r"^(?:Shd|Sig)Pnd:\s+(\w+)$", (process / "status").read_text(), re.M)
    return any(int(mask, 16) & 1 << signal.SIGKILL - 1 for mask in pending)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "arguments",
    [
        ["slow_input"],
        ["slow_input", "--effect", "0.15"],
        ["backward_delay"],
        ["backward_delay", "--effect", "0.15"],
        ["healthy"],
    ],
    ids=" ".join,
)
def test_the_diagnosis_names_what_was_planted(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    status = cli.main(["demo", *arguments, "--out", str(out)])
    output = capsys.readouterr()
    assert status == 0, output.out
    planted = json.loads((out / "planted.json").read_text())
    diagnosis = from_json(json.loads((out / "diagnosis.json").read_text()))
    assert diagnosis.coverage.ranks_reported == 4
    if arguments == ["healthy"]:
        assert diagnosis.kind == "healthy"
        assert not diagnosis.consequences
    else:
        culprit = planted["culprit"]
        assert diagnosis.verdict.ranks == str(culprit)
        assert f"on rank {culprit}" in output.out
        waiting = {rank for item in diagnosis.consequences for rank in parse_ranks(item.ranks)}
        assert culprit not in waiting
        assert "--effect" in arguments or len(waiting) == 3  # 60 ms are seen by every other rank
        cost = diagnosis.findings[0].impact.seconds_per_iteration
        assert cost is not None
        if "--effect" in arguments:
            assert cost > 0  # ranks that share a core make up for a part of a small delay
        else:
            assert cost == pytest.approx(planted["delay_s"], rel=0.25)
    if arguments == ["slow_input"]:
        transcript = re.search(r"^```text\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
        assert transcript is not None
        assert _headings(transcript[1]) == _headings(output.out)
    assert "<html" in (out / "report.html").read_text()
    assert not _processes(out)


@pytest.mark.e2e
def test_a_second_run_replaces_the_first_and_a_slow_one_is_stopped_with_its_processes(tmp_path: Path) -> None:
    demo.train(demo.Plan(fault="healthy", num_ranks=2, num_steps=3), tmp_path)
    demo.train(demo.Plan(fault="slow_input", num_ranks=2, num_steps=3, culprit=1, delay_s=0.001), tmp_path)
    assert len(list((tmp_path / "traces").iterdir())) == 2
    with pytest.raises(UnavailableError, match="did not end within 3 s"):
        demo.train(demo.Plan(fault="healthy", timeout_s=3), tmp_path)
    assert not _processes(tmp_path)


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_training_too(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "eroica", "demo", "healthy", "--out", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while len(_processes(tmp_path)) < 2:  # torchrun, and a rank at least
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.1)
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    assert not _processes(tmp_path)


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "rank0.json").write_text("mine")
    with pytest.raises(UserError, match="--out"):
        demo.train(demo.Plan(fault="healthy"), tmp_path)
    assert (tmp_path / "traces" / "rank0.json").read_text() == "mine"


def test_a_plan_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(UserError, match="slow_input"):
        demo.Plan(fault="rust")
    with pytest.raises(UserError, match="rank 4"):
        demo.Plan(fault="healthy", culprit=4)


def test_only_the_planted_rank_function_and_cause_count_as_right() -> None:
    diagnosis, _ = samples.slow_input()
    (first, *_) = diagnosis.findings
    assert first.function is not None

    def judged(*findings: Finding) -> bool:
        return demo.names(replace(diagnosis, findings=findings), PLANTED)

    assert judged(first)
    assert not judged()
    assert not judged(replace(first, ranks="2"))
    assert not judged(replace(first, ranks="2-3"))
    assert not judged(replace(first, cause="unknown"))
    assert not judged(first, replace(first, ranks="1"))
    assert not judged(replace(first, function=None))
    elsewhere = FunctionName("host", "sleep", "train/data.py:99", "train/loop.py:41")
    assert not judged(replace(first, function=elsewhere))
    assert not demo.names(replace(diagnosis, kind="healthy"), PLANTED)


def test_a_healthy_run_must_have_no_findings() -> None:
    nothing = demo.Planted(fault="healthy", healthy_step_s=0.03)
    assert demo.names(samples.healthy()[0], nothing)
    assert not demo.names(samples.slow_input()[0], nothing)
