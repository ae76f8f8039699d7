"""The demos: what they plant, what counts as a right answer, and that they leave nothing behind."""

from __future__ import annotations

import ast
import contextlib
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from eroica import demo
from eroica.errors import UserError
from eroica.findings import CAUSES, KINDS, SCOPES, Finding, FunctionName
from tests import samples

SCRIPT = Path(demo.__file__).parent / "demos" / "train.py"
ALWAYS = ("gc_rotating",)
"""Run by `make test`, where others are covered by cases of the catalogue and by tests of `eroica run`."""
PLANTED = demo.Planted(
    fault="slow_input",
    kind="slow",
    cause="input_pipeline",
    scope="rank",
    ranks=(3,),
    places=(demo.Place(function="__getitem__", file="data.py", lines=(38, 44)),),
    wall_ns=1_738_324_780_000_000_000,
)


def _processes(out: Path) -> list[str]:
    """Command lines of the trainings that write to `out`, those that end at this moment left out."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = file.read_text(errors="replace").split("\0")
            if f"--out={out}" in words and not _is_dying(file.parent):
                found.append(" ".join(words))
    return found


def train(plan: demo.Plan, out: Path) -> demo.Planted | None:
    """Run a training to its end, unwatched."""
    demo.prepare(out)
    subprocess.run(demo.command(plan, out), check=True, timeout=180)
    return demo.read_planted(out)


def _is_dying(process: Path) -> bool:
    """Whether SIGKILL (bit 8) is pending for the process: the kernel takes it down, however long that takes."""
    pending = re.findall(r"^(?:Shd|Sig)Pnd:\s+(\w+)$", (process / "status").read_text(), re.M)
    return any(int(mask, 16) & 1 << signal.SIGKILL - 1 for mask in pending)


@pytest.mark.e2e
@pytest.mark.full
@pytest.mark.parametrize("fault", sorted(demo.FAULTS.keys() - demo.HANGS - {"healthy"}))
def test_a_slow_fault_is_planted_at_its_step_and_written_down_with_lines_of_the_script(
    fault: str, tmp_path: Path
) -> None:
    planted = train(demo.Plan(fault=fault, num_ranks=2, after=6, num_steps=9, culprit=1), tmp_path)
    assert planted is not None
    assert (planted.fault, planted.kind, planted.step) == (fault, "slow", 6)
    assert planted.cause in CAUSES and planted.scope in SCOPES and planted.kind in KINDS
    assert planted.ranks == {"gc_rotating": (), "checkpoint_rank0": (0,)}.get(fault, (1,))
    assert planted.healthy_step_s > 0
    lines = SCRIPT.read_text().splitlines()
    for place in planted.places:
        assert f"def {place.function}(" in lines[place.lines[0] - 1] and place.lines[1] <= len(lines)
    assert not _processes(tmp_path)


@pytest.mark.e2e
@pytest.mark.full
def test_a_healthy_training_plants_nothing(tmp_path: Path) -> None:
    planted = train(demo.Plan(fault="healthy", num_ranks=2, after=4, num_steps=6), tmp_path)
    assert planted is not None and planted.kind == "healthy" and "nothing" in str(planted)
    assert train(demo.Plan(fault="healthy", num_ranks=2, after=4, num_steps=3), tmp_path) is None


@pytest.mark.e2e
@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.full]) for name in sorted(demo.FAULTS)]
)
def test_every_demo_is_diagnosed_as_planted_and_ends_with_all_its_processes(fault: str, tmp_path: Path) -> None:
    steps = ["--steps=400"] if fault == "healthy" else []
    ended = subprocess.run(
        [sys.executable, "-m", "eroica", "demo", fault, f"--out={tmp_path}", *steps], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ", right; see" in ended.stdout and "planted: " in ended.stdout
    assert ("after the onset" in ended.stdout) == (fault != "healthy")
    assert not _processes(tmp_path)


def test_the_script_knows_nothing_of_eroica_and_of_profilers() -> None:
    tree = ast.parse(SCRIPT.read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in imported if "eroica" in name or "profiler" in name]


def test_the_script_and_the_list_of_faults_agree() -> None:
    tree = ast.parse(SCRIPT.read_text())
    (table,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "FAULTS"
    ]
    assert isinstance(table, ast.Dict)
    kinds = {
        key.value: value.args[0].value
        for key, value in zip(table.keys, table.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(value, ast.Call) and isinstance(value.args[0], ast.Constant)
    }
    assert kinds.keys() == demo.FAULTS.keys()
    assert {fault for fault, kind in kinds.items() if kind == "hang"} == demo.HANGS


def test_what_an_earlier_demo_left_is_replaced_and_other_files_are_left_alone(tmp_path: Path) -> None:
    for name in ("planted.json", "rank0.log", "mine.txt", "rank0.json"):
        (tmp_path / name).write_text("{}")
    demo.prepare(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt", "rank0.json"]
    assert demo.read_planted(tmp_path) is None


def test_a_plan_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(UserError, match="slow_input"):
        demo.Plan(fault="rust")
    with pytest.raises(UserError, match="rank 4"):
        demo.Plan(fault="healthy", culprit=4)


def test_the_same_seed_draws_the_same_culprit(tmp_path: Path) -> None:
    plan = demo.Plan(fault="slow_input", seed=7)
    assert demo.command(plan, tmp_path) == demo.command(plan, tmp_path)
    assert "--culprit=2" in demo.command(replace(plan, culprit=2), tmp_path)


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
    assert not judged(replace(first, scope="host"))
    assert not judged(replace(first, cause="unknown"))
    assert not judged(first, replace(first, ranks="1"))
    assert not judged(replace(first, function=None))
    elsewhere = FunctionName("host", "sleep", "train/data.py:99", "train/loop.py:41")
    assert not judged(replace(first, function=elsewhere))
    assert not demo.names(replace(diagnosis, kind="healthy"), PLANTED)


def test_ranks_of_a_crowded_host_may_be_named_as_the_host() -> None:
    diagnosis, _ = samples.slow_input()
    crowded = replace(PLANTED, cause="cpu_contention", ranks=(2, 3), places=())
    finding = replace(diagnosis.findings[0], cause="cpu_contention", ranks="2-3")
    for scope, right in (("rank", True), ("host", True), ("all", False)):
        assert demo.names(replace(diagnosis, findings=(replace(finding, scope=scope),)), crowded) is right


def test_a_deadlock_may_name_the_whole_cycle_but_must_name_a_planted_line() -> None:
    diagnosis, _ = samples.slow_input()
    planted = replace(PLANTED, kind="hang", cause="deadlock", scope="group")
    cycle = replace(diagnosis.findings[0], cause="deadlock", scope="group", ranks="0-3")
    hang = replace(diagnosis, kind="hang", findings=(cycle,))
    assert demo.names(hang, planted)
    assert not demo.names(replace(hang, findings=(replace(cycle, ranks="0-2"),)), planted)
    assert not demo.names(replace(hang, findings=(replace(cycle, function=None),)), planted)
    assert not demo.names(replace(hang, kind="slow"), planted)


def test_a_healthy_run_must_have_no_findings() -> None:
    nothing = demo.Planted(fault="healthy", kind="healthy", cause="none", scope="none")
    assert demo.names(samples.healthy()[0], nothing)
    assert demo.names(samples.healthy()[0], None)
    assert not demo.names(samples.slow_input()[0], nothing)


def test_the_time_to_a_diagnosis_counts_from_the_onset() -> None:
    diagnosis = replace(samples.slow_input()[0], created="2025-01-31T12:00:00+00:00")
    assert demo.seconds_to(diagnosis, PLANTED) == pytest.approx(20.0)
    assert demo.seconds_to(replace(diagnosis, created=""), PLANTED) is None
    assert "__getitem__ (data.py:38)" in str(PLANTED)
