"""Doctor on machines of all kinds, by other /proc, /sys and environments, and on the real one."""

from __future__ import annotations

import json
import os
import resource
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eroica import cli, doctor
from eroica.checks import BLINDING, CHECKS, HURTFUL, Line, Machine, Trial

SAID = {
    "python": "3.12.1",
    "executable": "/v/bin/python",
    "sitecustomize": "",
    "torch": "2.13.0+cu130",
    "kineto": True,
    "activities": ["CPU", "CUDA"],
    "num_gpus": 8,
    "num_steps": 3,
    "collective_error": "",
    "profiler_error": "",
}
WELL = Trial(SAID, "", 3, 1)


def _no_library() -> int:
    raise ModuleNotFoundError("No module named 'pynvml'")


def _no_driver() -> int:
    raise RuntimeError("Driver Not Loaded")


def _machine(folder: Path, files: dict[str, str] | None = None, **more: Any) -> Machine:
    """With nothing but `files` under /proc, /sys and /dev."""
    for name, text in (files or {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "run").mkdir(mode=0o700, exist_ok=True)
    options = {"environ": {"XDG_RUNTIME_DIR": str(folder / "run")}, "scripts": (), "num_gpus": _no_library, **more}
    return Machine(proc=folder / "proc", sysfs=folder / "sys", dev=folder / "dev", out=folder / "out", **options)


def _line(machine: Machine, group: str, name: str, trial: Trial = WELL) -> Line:
    return CHECKS[group][name](machine, trial)


def test_on_an_empty_machine_every_check_answers_and_none_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    machine = _machine(tmp_path, python=str(tmp_path / "no-python"))
    found = doctor.examine(machine)
    assert [(check.group, check.name) for check in found] == [
        (group, name) for group, checks in CHECKS.items() for name in checks
    ]
    answers = {check.name: check.answer for check in found}
    assert answers["python"] == answers["torch"] == answers["scheduler"] == answers["shared memory"] == "unknown"
    assert answers["RDMA"] == answers["NVML"] == answers["cgroup"] == answers["py-spy"] == "no"
    text = doctor.render_text(found)
    assert "Traceback" not in text and "cannot be started (No such file or directory)" in text
    assert len(text.splitlines()) == len(found) + 2 * len(CHECKS) - 1
    assert not any((tmp_path / "run").rglob("*"))


def test_what_the_trial_said_is_told(tmp_path: Path) -> None:
    machine = _machine(tmp_path)
    cases: dict[str, list[tuple[dict[str, object], str]]] = {
        "python": [({}, "yes"), ({"python": "3.10.2"}, "no")],
        "torch": [({}, "yes"), ({"torch": "2.3.1"}, "no"), ({"torch_error": "ImportError: x"}, "no")],
        "sitecustomize": [({}, "yes"), ({"sitecustomize": "/etc/s.py"}, "yes")],
        "steps": [({}, "yes"), ({"num_steps": 4}, "no"), ({"num_steps": None}, "unknown")],
        "collectives": [({}, "yes"), ({"collective_error": "RuntimeError: no interface"}, "unknown")],
    }
    for name, variants in cases.items():
        for changed, answer in variants:
            line = _line(machine, "arming", name, replace(WELL, said={**SAID, **changed}))
            assert line[0] == answer, (name, line)
            assert (answer == "no") <= bool(line[2])
    assert _line(machine, "arming", "steps", replace(WELL, num_steps=-1))[0] == "no"
    assert _line(machine, "arming", "collectives", replace(WELL, num_collectives=0))[0] == "no"
    windows: list[tuple[dict[str, object], str]] = [
        ({}, "yes"),
        ({"activities": ["CPU"]}, "limited"),
        ({"activities": ["CPU"], "num_gpus": 0}, "yes"),
        ({"profiler_error": "RuntimeError: x"}, "no"),
        ({"kineto": False}, "no"),
    ]
    for changed, answer in windows:
        assert _line(machine, "windows", "torch.profiler", replace(WELL, said={**SAID, **changed}))[0] == answer


@pytest.mark.parametrize(
    ("capabilities", "scope", "answer"),
    [
        ("0", None, "yes"),
        ("0", "0", "yes"),
        ("0", "1", "no"),
        ("0", "2", "no"),
        ("0", "3", "no"),
        ("80000", "3", "yes"),
    ],
)
def test_ptrace_is_allowed_by_a_capability_or_by_yama(
    tmp_path: Path, capabilities: str, scope: str | None, answer: str
) -> None:
    files = {"proc/self/status": f"Name:\tx\nCapEff:\t{capabilities.zfill(16)}\n"}
    if scope is not None:
        files["proc/sys/kernel/yama/ptrace_scope"] = f"{scope}\n"
    line = _line(_machine(tmp_path, files), "hangs", "ptrace")
    assert line[0] == answer and bool(line[2]) == (answer == "no")
    (tmp_path / ".dockerenv").touch()
    if scope == "1":
        assert "SYS_PTRACE" in _line(_machine(tmp_path), "hangs", "ptrace")[2]


def test_py_spy_is_tried_on_a_process_and_its_refusal_is_told(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "py-spy"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'Error: Permission Denied' >&2\nexit 1\n")
    program.chmod(0o755)
    machine = _machine(tmp_path, {"proc/self/status": "CapEff: 0\n", "proc/sys/kernel/yama/ptrace_scope": "1"})
    answer, text, mend = _line(replace(machine, scripts=(str(program.parent),)), "hangs", "py-spy")
    assert answer == "no" and "Permission Denied" in text and "ptrace_scope" in mend
    program.write_text("#!/bin/sh\ntest -d /proc/$4 && echo '[{\"frames\": []}]'\n")
    assert _line(replace(machine, scripts=(str(program.parent),)), "hangs", "py-spy")[0] == "yes"


def test_gpus_are_counted_and_a_missing_library_is_told_from_a_missing_driver(tmp_path: Path) -> None:
    assert _line(_machine(tmp_path), "counters", "NVML") == ("no", "no NVIDIA GPU here", "")
    with_gpu = _machine(tmp_path, {"dev/nvidia0": ""})
    assert _line(with_gpu, "counters", "NVML")[2] == "pip install nvidia-ml-py"
    answer, text, mend = _line(replace(with_gpu, num_gpus=_no_driver), "counters", "NVML")
    assert answer == "no" and "Driver Not Loaded" in text and mend
    assert _line(replace(with_gpu, num_gpus=lambda: 8), "counters", "NVML") == ("yes", "8 GPUs", "")


def test_network_devices_are_named_and_dark_ones_told(tmp_path: Path) -> None:
    port = "sys/class/infiniband/{}/ports/1/counters/port_xmit_data"
    assert _line(_machine(tmp_path), "counters", "network")[0] == "no"
    machine = _machine(tmp_path, {port.format("mlx5_0"): "1", "sys/class/net/eth0/statistics/tx_bytes": "1"})
    assert _line(machine, "counters", "RDMA") == ("yes", "mlx5_0", "")
    assert _line(machine, "counters", "network") == ("yes", "eth0", "")
    machine = _machine(tmp_path, {"sys/class/infiniband/mlx5_1/node_type": "1"})
    assert _line(machine, "counters", "RDMA")[0] == "limited"
    assert _line(replace(machine, limit=lambda which: (65536, 65536)), "machine", "locked memory")[0] == "limited"
    assert _line(replace(machine, limit=lambda which: (-1, -1)), "machine", "locked memory")[0] == "yes"


def test_limits_of_a_cgroup_are_read_and_threads_held_against_them(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/cgroup.controllers": "cpu memory",
        "sys/fs/cgroup/a/b/cpu.max": "50000 100000",
        "sys/fs/cgroup/a/b/memory.max": str(1 << 30),
        "sys/fs/cgroup/a/b/cpu.stat": "nr_throttled 0",
    }
    machine = _machine(tmp_path, files)
    assert _line(machine, "counters", "cgroup") == ("yes", "version 2, 0.5 cores, 1024 MB", "")
    environ = dict(machine.environ)
    assert _line(replace(machine, environ={**environ, "OMP_NUM_THREADS": "8"}), "machine", "threads")[0] == "limited"
    assert _line(replace(machine, environ={**environ, "OMP_NUM_THREADS": "x"}), "machine", "threads")[0] == "yes"
    assert "may use 0.5" in _line(machine, "machine", "threads")[1]
    outside = _machine(tmp_path / "outside", {**{k: v for k, v in files.items() if "a/b" not in k}})
    (outside.sysfs / "fs/cgroup/cpu.max").write_text("max 100000")
    assert _line(outside, "counters", "cgroup")[1].startswith("version 2, no limit of cores, no limit of memory")
    old = _machine(tmp_path / "old", {"sys/fs/cgroup/memory/x": ""})
    assert _line(old, "counters", "cgroup")[0] == "limited"


def test_settings_that_slow_or_blind_are_named_with_their_effect(tmp_path: Path) -> None:
    machine = _machine(tmp_path)
    assert _line(machine, "settings", "slow")[0] == _line(machine, "arming", "environment")[0] == "yes"
    for table, group, name in ((HURTFUL, "settings", "slow"), (BLINDING, "arming", "environment")):
        for variable, (values, effect) in table.items():
            answer, text, mend = _line(replace(machine, environ={variable: (values or ("1",))[0]}), group, name)
            assert answer == "limited" and effect in text and variable in text and mend
            if values:
                assert _line(replace(machine, environ={variable: "fine"}), group, name)[0] == "yes"
    assert _line(replace(machine, environ={"NCCL_SOCKET_IFNAME": "lo"}), "settings", "interfaces")[0] == "limited"


def test_a_path_too_long_for_sockets_is_told(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 60)
    deep.mkdir()
    assert _line(_machine(tmp_path, environ={"XDG_RUNTIME_DIR": str(deep)}), "windows", "on demand")[0] == "no"
    assert _line(_machine(tmp_path, environ={"XDG_RUNTIME_DIR": "/tmp"}), "windows", "on demand")[0] == "yes"


def test_the_ring_folder_is_best_in_memory(tmp_path: Path) -> None:
    for kind, answer in (("tmpfs", "yes"), ("ext4", "limited")):
        mounts = f"/dev/a / xfs rw 0 0\nx {tmp_path} {kind} rw 0 0\ny {tmp_path}x tmpfs rw 0 0\n"
        line = _line(_machine(tmp_path, {"proc/self/mounts": mounts}), "machine", "ring folder")
        assert kind in line[1] and line[0] == answer


def test_clock_and_files_have_their_limits(tmp_path: Path) -> None:
    clock = "sys/devices/system/clocksource/clocksource0/current_clocksource"
    assert _line(_machine(tmp_path, {clock: "hpet\n"}), "machine", "clock")[0] == "limited"
    machine = _machine(tmp_path, {clock: "tsc\n"}, limit=lambda which: (1024, 4096))
    assert "tsc" in _line(machine, "machine", "clock")[1]
    assert _line(machine, "machine", "open files")[0] == "limited"
    plenty = replace(machine, limit=lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert _line(plenty, "machine", "open files")[0] == "yes"


def test_a_python_without_torch_or_that_fails_is_told(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no licence' >&2\nexit 4\n")
    broken.chmod(0o755)
    trial = doctor.try_training(_machine(tmp_path, python=str(broken)))
    assert trial.failure == f"{broken} ended with status 4: no licence"
    without = tmp_path / "packages"
    without.mkdir()
    (without / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    machine = _machine(tmp_path, environ={"XDG_RUNTIME_DIR": str(tmp_path / "run"), "PYTHONPATH": str(without)})
    trial = doctor.try_training(machine)
    assert "libcudart.so.13" in _line(machine, "arming", "torch", trial)[1]
    assert _line(machine, "arming", "steps", trial)[0] == "unknown"


@pytest.mark.e2e
def test_on_this_machine_a_training_on_trial_is_armed_and_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("EROICA", "0")
    assert cli.main(["doctor", "--python", sys.executable, "--format", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["schema"] == doctor.SCHEMA
    answers = {check["name"]: check["answer"] for check in said["checks"]}
    for name in ("python", "torch", "steps", "collectives", "torch.profiler"):
        assert answers[name] == "yes", said
    assert answers["environment"] == "limited"
    assert os.listdir(tmp_path / "run") == []
