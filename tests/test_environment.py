"""The environment snapshot: what it reads, on recorded trees, and how ranks are compared."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eroica.probe import environment, options
from eroica.probe.environment import (
    TRACEBACK,
    Difference,
    Environment,
    cgroup_limits,
    commit_of,
    differences,
    merged,
    snapshot,
)
from eroica.probe.recorder import RECORDER
from eroica.ring import Ring, read_flight


def _write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def _limits(folder: Path) -> dict[str, object]:
    return dict(cgroup_limits(str(folder / "proc"), str(folder / "fs")))


def test_the_tightest_limit_of_all_control_groups_above_a_process_counts(tmp_path: Path) -> None:
    _write(
        tmp_path,
        {
            "proc": "0::/job/rank\n",
            "fs/cpu.max": "max 100000\n",
            "fs/job/cpu.max": "250000 100000\n",
            "fs/job/memory.max": "8589934592\n",
            "fs/job/rank/cpu.max": "400000 100000\n",
            "fs/job/rank/memory.max": "max\n",
        },
    )
    assert _limits(tmp_path) == {"cgroup.cpus": 2.5, "cgroup.memory_bytes": 1 << 33}


def test_in_a_container_and_under_version_1_the_limits_are_found_too(tmp_path: Path) -> None:
    one = _write(
        tmp_path / "1",
        {
            "proc": "9:name=systemd:/\n4:memory:/docker/ab\n1:cpu,cpuacct:/docker/ab\n0::/\n",
            "fs/memory/docker/ab/memory.limit_in_bytes": "1073741824",
            "fs/memory/memory.limit_in_bytes": "9223372036854771712",
            "fs/cpu,cpuacct/cpu.cfs_quota_us": "50000",
            "fs/cpu,cpuacct/cpu.cfs_period_us": "100000",
        },
    )
    assert _limits(one) == {"cgroup.cpus": 0.5, "cgroup.memory_bytes": 1 << 30}
    two = _write(tmp_path / "2", {"proc": "0::/../../kubepods/x\n", "fs/cpu.max": "100000 100000"})
    assert _limits(two) == {"cgroup.cpus": 1.0, "cgroup.memory_bytes": None}
    assert _limits(tmp_path / "absent") == {"cgroup.cpus": None, "cgroup.memory_bytes": None}
    odd = _write(tmp_path / "3", {"proc": "no\n0::\n:::\n", "fs/cpu.max": "-5 0", "fs/memory.max": "many"})
    assert _limits(odd) == {"cgroup.cpus": None, "cgroup.memory_bytes": None}


def test_the_commit_is_read_from_loose_and_from_packed_references(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        named = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", *named, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "x")
    commit = git("rev-parse", "HEAD")
    (tmp_path / "src" / "deep").mkdir(parents=True)
    assert commit_of(str(tmp_path / "src" / "deep")) == commit
    git("pack-refs", "--all")
    assert commit_of(str(tmp_path)) == commit
    git("checkout", "-q", "--detach")
    assert commit_of(str(tmp_path)) == commit
    (tmp_path / ".git" / "HEAD").write_text("ref: ../../../../etc/passwd")
    assert commit_of(str(tmp_path)) == ""
    assert commit_of("/") == ""


def test_variables_come_by_an_allow_list_and_never_with_secrets() -> None:
    found = snapshot(
        {
            "NCCL_DEBUG": "INFO",
            "OMP_NUM_THREADS": "4",
            "HOME": "/root",
            "AWS_SECRET_ACCESS_KEY": "hunter2",
            "TORCH_API_KEY": "hunter2",
            "NCCL_PROXY": "http://me:hunter2@proxy",
            "TOKENIZERS_PARALLELISM": "false",
            "CUDA_LONG": "x" * 500,
        },
        "",
    )
    variables = {name: value for name, value in found.items() if name.startswith("env.")}
    assert variables == {
        "env.NCCL_DEBUG": "INFO",
        "env.OMP_NUM_THREADS": "4",
        "env.NCCL_PROXY": "[left out]",
        "env.TOKENIZERS_PARALLELISM": "false",
        "env.CUDA_LONG": "x" * 160,
    }
    assert found["affinity.cpus"] == len(os.sched_getaffinity(0))


def test_notes_of_changes_are_bounded_and_hold_changes_alone(tmp_path: Path) -> None:
    ring = Ring.create(tmp_path / "a.ring", rank=0, world_size=1)
    seen = Environment()
    seen.option(None, "loader", {"num_workers": 2, "object": object()})
    seen.look(ring, 1)
    for number in range(40):
        seen.option(ring, "loader", {"num_workers": number % 9})
    notes = [note for note in read_flight(ring.path).notes if "environment" in note]
    assert len(notes) == environment.MOST_OPTIONS
    assert notes[-1] == {"environment": {"loader.6.num_workers": 5}}
    assert merged(notes)["loader.1.num_workers"] == 2 and "loader.1.object" not in merged(notes)
    assert merged([{"host": "a"}, {"environment": "no"}]) == {}


def test_what_a_script_changes_is_noted_as_soon_as_a_window_begins(tmp_path: Path) -> None:
    ring = Ring.create(tmp_path / "a.ring", rank=0, world_size=1)
    seen, before = Environment(), gc.get_threshold()
    seen.look(ring, 1)
    try:
        gc.set_threshold(before[0] + 1, *before[1:])
        seen.look(ring, 2)
        assert len(read_flight(ring.path).notes) == 1
        seen.look(ring, 3, is_due=True)
    finally:
        gc.set_threshold(*before)
    changed = read_flight(ring.path).notes[-1]["environment"]
    assert isinstance(changed, dict) and str(changed["gc.thresholds"]).startswith(str(before[0] + 1))


def test_a_data_set_is_looked_at_without_running_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy:
        """Opens its file when it is first asked for it, which is to be in a worker."""

        @property
        def dataset(self) -> list[int]:
            raise FileNotFoundError("opened in the wrong process")

        def __getitem__(self, index: int) -> int:
            return self.dataset[index]

    class Part:
        def __init__(self, dataset: object) -> None:
            self.dataset = dataset

    seen = Environment()
    monkeypatch.setattr(RECORDER, "environment", seen)
    ring = Ring.create(tmp_path / "a.ring", rank=0, world_size=1)
    seen.look(ring, 1)
    options.of_loader(ring, SimpleNamespace(_dataset=Part(Lazy()), _num_workers=2))
    told = merged(read_flight(ring.path).notes)
    assert str(told["loader.1.data"]).endswith("Lazy") and told["loader.1.num_workers"] == 2


def test_a_precision_that_torch_cannot_tell_leaves_only_itself_out() -> None:
    code = """
import torch
from eroica.probe.environment import changeable
had = changeable()
torch.backends.mkldnn.matmul.fp32_precision = "bf16"
print(sorted(had.keys() - changeable().keys()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(environment.__file__).parents[2]
    )
    assert done.stdout == "['torch.matmul_precision']\n", done.stderr


def test_who_asks_for_anomaly_detection_is_noted_with_what_a_traceback_takes_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class set_detect_anomaly:  # torch's name
        def __init__(self, mode: bool) -> None:
            self.mode = mode

    seen = Environment()
    monkeypatch.setattr(RECORDER, "environment", seen)
    options.anomaly(SimpleNamespace(set_detect_anomaly=set_detect_anomaly))
    set_detect_anomaly(False)
    assert not seen.has(TRACEBACK)
    set_detect_anomaly(True)
    ring = Ring.create(tmp_path / "a.ring", rank=0, world_size=1)
    seen.look(ring, 1)
    first = merged(read_flight(ring.path).notes)
    assert str(first["anomaly.1.at"]).startswith(__file__[-100:])
    assert first["anomaly.1.in"] == "test_who_asks_for_anomaly_detection_is_noted_with_what_a_traceback_takes_once"
    took_s = first[TRACEBACK]
    assert isinstance(took_s, float) and 0 < took_s < 1
    set_detect_anomaly(True)
    seen.look(ring, 2, is_due=True)
    assert merged(read_flight(ring.path).notes)[TRACEBACK] == took_s
    assert differences({0: {TRACEBACK: 1e-5}, 1: {TRACEBACK: 2e-5}}) == []


def test_the_rank_that_is_set_up_otherwise_is_named() -> None:
    usual: dict[str, object] = {"torch": "2.13", "torch.threads": 8, "host": "a", "affinity": "0-7"}
    ranks = {rank: {**usual, "affinity": str(rank), "env.MASTER": f"10.0.0.{rank}"} for rank in range(8)}
    ranks[3] |= {"torch.threads": 1, "env.OMP_NUM_THREADS": "1"}
    ranks[5] |= {"torch": "2.12"}
    ranks[6] |= {"torch": "2.12"}
    ranks[7] = {}
    assert differences(ranks) == [
        Difference("env.OMP_NUM_THREADS", "null", (('"1"', "3"),)),
        Difference("torch.threads", "8", (("1", "3"),)),
        Difference("torch", '"2.13"', (('"2.12"', "5-6"),)),
    ]


def test_without_a_majority_both_sides_are_shown() -> None:
    ranks = {rank: {"torch.threads": 1 if rank < 2 else 8} for rank in range(4)}
    assert differences(ranks) == [Difference("torch.threads", None, (("1", "0-1"), ("8", "2-3")))]
    assert differences({0: {"a": 1}, 1: {"a": 2}}) == [Difference("a", None, (("1", "0"), ("2", "1")))]
    assert differences({}) == differences({0: {"a": 1}}) == []


_SNAPSHOT = st.dictionaries(st.sampled_from("abc"), st.one_of(st.integers(0, 2), st.text(max_size=1), st.none()))


@given(st.dictionaries(st.integers(0, 9), _SNAPSHOT), st.permutations(range(10)))
def test_renaming_ranks_renames_differences(ranks: dict[int, dict[str, object]], names: list[int]) -> None:
    def names_and_values(found: list[Difference]) -> list[tuple[str, str | None, set[str]]]:
        return [(each.name, each.usual, {value for value, _ in each.odd}) for each in found]

    renamed = {names[rank]: values for rank, values in ranks.items()}
    assert names_and_values(differences(ranks)) == names_and_values(differences(renamed))
    assert json.dumps([each.usual for each in differences(ranks)])
