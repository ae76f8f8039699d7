"""The checks of `eroica doctor`: each looks at one thing of this machine and returns one line.

`Machine` says where they look, so that a test gives them another /proc, /sys or environment. They may raise; `doctor`
makes that an "unknown". Nothing is changed on the machine, and what is tried is gone afterwards.
"""

from __future__ import annotations

import importlib
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from eroica import launch, ring
from eroica.errors import EroicaError
from eroica.probe.place import user_folder

Answer = Literal["yes", "limited", "no", "unknown"]
Line = tuple[Answer, str, str]
"""Answer, what was seen, what would mend it ("" if nothing is to do)."""

OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 4)
PY_SPY_LIMIT_S = 20.0
MOST_SOCKET_FOLDER = 54
"""Bytes of the name of a folder in which Kineto can have its sockets: 108, less 53 for a name of its own, less 1."""
ENOUGH_SPACE_BYTES = 2 << 30
"""A window of 8 ranks has some 0.1 to 1 GB, and two lie there at a time."""
ENOUGH_SHM_BYTES = 1 << 30
"""Containers get 64 MB unless asked; workers of dataloaders and NCCL then die by SIGBUS."""
SLOW_RING_S = 0.2
SLOW_CLOCK_NS = 400
"""A reading of the clock takes 20 to 60 ns from the TSC, and a microsecond or more where the kernel must be asked."""
FEW_FILES = 4096
_PTRACE_CAPABILITY = 19

HURTFUL: Mapping[str, tuple[tuple[str, ...], str]] = {
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL",), "checks every collective by further ones"),
    "CUDA_LAUNCH_BLOCKING": (("1",), "waits for each kernel"),
    "TORCH_NCCL_BLOCKING_WAIT": (("1",), "blocks the host in each collective"),
    "NCCL_BLOCKING_WAIT": (("1",), "blocks the host in each collective"),
    "NCCL_DEBUG": (("TRACE",), "writes a line for each call"),
    "NCCL_P2P_DISABLE": (("1",), "keeps GPUs of a host from talking directly"),
    "NCCL_SHM_DISABLE": (("1",), "sends between GPUs of a host over the network"),
    "NCCL_IB_DISABLE": (("1",), "leaves RDMA unused"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (("1",), "asks the driver for each tensor"),
    "TORCH_NCCL_DESYNC_DEBUG": (("1",), "writes to the store at each collective"),
    "PYTHONTRACEMALLOC": ((), "records a stack for each allocation"),
    "PYTHONDEVMODE": (("1",), "checks every allocation"),
    "PYTHONMALLOC": (("debug", "malloc_debug", "pymalloc_debug"), "checks every allocation"),
    "MALLOC_CHECK_": (("1", "2", "3"), "checks every allocation"),
}
"""Settings that make training slow: their values (none = any) and what they do."""
BLINDING: Mapping[str, tuple[tuple[str, ...], str]] = {
    "EROICA": (("0",), "switches the probe off"),
    "TORCH_FR_BUFFER_SIZE": (("0",), "switches torch's flight recorder off, a witness of hangs"),
    "TORCH_NCCL_TRACE_BUFFER_SIZE": (("0",), "switches torch's flight recorder off, a witness of hangs"),
    "KINETO_USE_DAEMON": ((), "has the profiler listen to another daemon, so that windows may collide"),
}
"""Settings that hide something from us."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What the small training said and what the probe saw of it."""

    said: Mapping[str, object]
    """Of `eroica/demos/trial.py`; empty if it did not come to its end."""
    failure: str
    """Why not; "" if it did."""
    num_steps: int
    """As the ring has them; -1 if there was no ring."""
    num_collectives: int


def _count_gpus() -> int:
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        return int(nvml.nvmlDeviceGetCount())
    finally:
        nvml.nvmlShutdown()


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where the checks look."""

    python: str = sys.executable
    """The Python that trains."""
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    proc: Path = Path("/proc")
    sysfs: Path = Path("/sys")
    dev: Path = Path("/dev")
    out: Path = Path("eroica-out")
    """Where windows and reports would go."""
    scripts: tuple[str, ...] = (sysconfig.get_path("scripts"), os.path.dirname(sys.executable))
    """Where py-spy is looked for before PATH."""
    num_gpus: Callable[[], int] = _count_gpus
    """By NVML. ImportError: the library is not installed; any other exception: it does not work."""
    limit: Callable[[int], tuple[int, int]] = resource.getrlimit


def short(error: BaseException) -> str:
    """An exception in a few words."""
    return f"{type(error).__name__}: {error}"[:200]


def _python(machine: Machine, trial: Trial) -> Line:
    if trial.failure:
        return "unknown", trial.failure, "name the Python that trains by --python"
    version = str(trial.said.get("python"))
    text = f"{version}, {trial.said.get('executable')}"
    if _version(version) < OLDEST_PYTHON:
        return "no", text, f"ranks are armed under Python {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} and later"
    return "yes", text, ""


def _torch(machine: Machine, trial: Trial) -> Line:
    if trial.failure:
        return "unknown", "the trial did not come to its end", ""
    if "torch_error" in trial.said:
        return "no", f"cannot be imported ({trial.said['torch_error']})", "name the Python that trains by --python"
    version = str(trial.said.get("torch"))
    if _version(version) < OLDEST_TORCH:
        return "no", version, f"eroica supports torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} and later"
    return "yes", version, ""


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdecimal())


def _steps(machine: Machine, trial: Trial) -> Line:
    expected = trial.said.get("num_steps")
    if expected is None:
        return "unknown", "no step was taken", ""
    if trial.num_steps == expected:
        return "yes", "an unmodified script was armed, and its steps were seen", ""
    if trial.num_steps < 0:
        return "no", "the script was not armed", "put `import eroica` at the head of the training script"
    return "no", f"{trial.num_steps} of {expected} steps were seen", "tell us the version of torch"


def _collectives(machine: Machine, trial: Trial) -> Line:
    error = trial.said.get("collective_error")
    if error is None or trial.num_steps < 0:
        return "unknown", "none was tried", ""
    if error:
        return "unknown", f"gloo does not work here ({error})", ""
    if trial.num_collectives:
        return "yes", "an all_reduce was seen at torch's dispatcher", ""
    return "no", "an all_reduce was not seen at torch's dispatcher", "waits will be known from windows only"


def _sitecustomize(machine: Machine, trial: Trial) -> Line:
    if trial.failure:
        return "unknown", "the trial did not come to its end", ""
    origin = trial.said.get("sitecustomize")
    return "yes", f"yours runs after ours ({origin})" if origin else "there is no other", ""


def _off(machine: Machine, trial: Trial) -> Line:
    seen = _settings(machine, BLINDING)
    if seen:
        return "limited", "; ".join(seen), "unset it"
    return "yes", "nothing in the environment; out of reach are python -I, -E, -S, env -i and other containers", ""


def _settings(machine: Machine, table: Mapping[str, tuple[tuple[str, ...], str]]) -> list[str]:
    found = []
    for name, (values, effect) in table.items():
        value = machine.environ.get(name, "")
        if value and (not values or value.upper() in {known.upper() for known in values}):
            found.append(f"{name}={value[:40]} {effect}")
    return found


def _kineto(machine: Machine, trial: Trial) -> Line:
    error = trial.said.get("profiler_error")
    if error is None:
        return "unknown", "torch.profiler was not tried", ""
    if error or not trial.said.get("kineto"):
        return "no", f"torch.profiler does not work ({error or 'built without Kineto'})", "use a torch with Kineto"
    activities = trial.said.get("activities")
    names = ", ".join(map(str, activities)) if isinstance(activities, list) else ""
    if trial.said.get("num_gpus") and "CUDA" not in names and "XPU" not in names:
        return "limited", f"it records {names} and no GPU", "let CUPTI be found: pip install nvidia-cuda-cupti-cu12"
    return "yes", f"a window was recorded ({names})", ""


def _socket_folder(machine: Machine, trial: Trial) -> Line:
    folder = os.path.realpath(user_folder(machine.environ))
    length = len(os.fsencode(folder)) + len("/run-1234567-1234567-123456")
    if length > MOST_SOCKET_FOLDER:
        text = f"sockets under {folder} have names too long for Kineto ({length} bytes of {MOST_SOCKET_FOLDER})"
        return "no", text, "set XDG_RUNTIME_DIR or TMPDIR to a short path"
    return "yes", f"sockets fit under {folder}", ""


def _py_spy(machine: Machine, trial: Trial) -> Line:
    program = _find(machine, "py-spy")
    if program is None:
        return "no", "py-spy is not installed: no stacks of a rank that hangs with the GIL held", "pip install py-spy"
    code = "import sys; print(flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [machine.python, "-I", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        done = subprocess.run(
            [program, "dump", "--json", "--pid", str(child.pid)], capture_output=True, timeout=PY_SPY_LIMIT_S
        )
    finally:
        child.kill()
        child.communicate()
    if done.returncode == 0 and b"frames" in done.stdout:
        return "yes", f"{program} read the stack of a process of ours", ""
    said = (done.stderr.decode(errors="replace").splitlines() or ["it said nothing"])[0]
    return "no", f"{program} cannot read the stack of a process of ours ({said[:120]})", _ptrace(machine, trial)[2]


def _find(machine: Machine, program: str) -> str | None:
    for folder in machine.scripts:
        path = os.path.join(folder, program)
        if os.access(path, os.X_OK):
            return path
    return shutil.which(program, path=machine.environ.get("PATH"))


def _ptrace(machine: Machine, trial: Trial) -> Line:
    in_container = " in a container: --cap-add SYS_PTRACE" if _in_container(machine) else ""
    capabilities = 0
    for line in (machine.proc / "self" / "status").read_text().splitlines():
        if line.startswith("CapEff:"):
            capabilities = int(line.split()[1], 16)
    if capabilities >> _PTRACE_CAPABILITY & 1:
        return "yes", "CAP_SYS_PTRACE", ""
    try:
        scope = int((machine.proc / "sys/kernel/yama/ptrace_scope").read_text())
    except FileNotFoundError:
        return "yes", "no yama: processes of one user may look at each other", ""
    if scope == 0:
        return "yes", "ptrace_scope 0: processes of one user may look at each other", ""
    mend = f"sysctl kernel.yama.ptrace_scope=0, or run as root{in_container}" if scope < 3 else "a reboot without it"
    return "no", f"ptrace_scope {scope}: stacks cannot be read from outside", mend


def _in_container(machine: Machine) -> bool:
    root = machine.proc.parent
    return (root / ".dockerenv").exists() or (root / "run/.containerenv").exists() or "container" in machine.environ


def _nvml(machine: Machine, trial: Trial) -> Line:
    has_device = (machine.proc / "driver/nvidia").exists() or any(machine.dev.glob("nvidia[0-9]*"))
    try:
        count = machine.num_gpus()
    except ImportError:
        if not has_device:
            return "no", "no NVIDIA GPU here", ""
        return "no", "nvidia-ml-py is not installed", "pip install nvidia-ml-py"
    except Exception as error:  # NVMLError, of a module that need not be there, or what loading the library gives
        if not has_device:
            return "no", "no NVIDIA GPU here", ""
        return "no", f"there is a GPU and NVML does not work ({short(error)})", "check the driver by nvidia-smi"
    return "yes", f"{count} GPU{'s' * (count != 1)}", ""


def _rdma(machine: Machine, trial: Trial) -> Line:
    devices = sorted((machine.sysfs / "class/infiniband").glob("*"))
    if not devices:
        return "no", "no RDMA device here; TCP counters only", ""
    readable = [
        d.name for d in devices if any(os.access(c, os.R_OK) for c in d.glob("ports/*/counters/port_xmit_data"))
    ]
    if len(readable) < len(devices):
        dark = ", ".join(device.name for device in devices if device.name not in readable)
        return "limited", f"no port counters of {dark}", "mount /sys/class/infiniband of the host into the container"
    return "yes", ", ".join(readable), ""


def _network(machine: Machine, trial: Trial) -> Line:
    names = sorted(path.parent.parent.name for path in (machine.sysfs / "class/net").glob("*/statistics/tx_bytes"))
    names = [name for name in names if name != "lo"]
    if not names:
        return "no", "no counters of network interfaces", "mount /sys into the container"
    return "yes", ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else ""), ""


def _scheduler(machine: Machine, trial: Trial) -> Line:
    fields = (machine.proc / "self/schedstat").read_text().split()
    if len(fields) < 2:
        return "no", "this kernel keeps no run-queue delay", ""
    if not (machine.proc / "pressure/cpu").exists():
        return "limited", "run-queue delay, but no pressure (PSI)", "boot with psi=1"
    return "yes", "run-queue delay and pressure", ""


def _cgroup(machine: Machine, trial: Trial) -> Line:
    root = machine.sysfs / "fs/cgroup"
    if not (root / "cgroup.controllers").exists():
        if not any((root / name).exists() for name in ("cpu", "cpu,cpuacct", "memory")):
            return "no", "no cgroup file system", "mount /sys/fs/cgroup into the container"
        mend = "boot with systemd.unified_cgroup_hierarchy=1"
        return "limited", "version 1: limits and throttling are read, pressure of the group is not", mend
    limit, memory = _cpu_limit(machine), _own_cgroup(machine, "memory.max")
    cores = f"{limit:g} cores" if limit is not None else "no limit of cores"
    size = f"{int(memory) >> 20} MB" if memory.isdecimal() else "no limit of memory"
    if not _own_cgroup(machine, "cpu.stat"):
        return "limited", f"version 2, {cores}, {size}; no count of throttling", ""
    return "yes", f"version 2, {cores}, {size}", ""


def _own_cgroup(machine: Machine, name: str) -> str:
    """A file of this process's cgroup; "" if there is none. In a container it may lie outside: then the root's."""
    own = ""
    for line in (machine.proc / "self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            own = line[3:].strip("/")
    for folder in (machine.sysfs / "fs/cgroup" / own, machine.sysfs / "fs/cgroup"):
        try:
            return (folder / name).read_text().strip()
        except OSError:
            continue
    return ""


def _cpu_limit(machine: Machine) -> float | None:
    quota = _own_cgroup(machine, "cpu.max").split()
    return int(quota[0]) / int(quota[1]) if len(quota) == 2 and quota[0].isdecimal() else None


def _ring_folder(machine: Machine, trial: Trial) -> Line:
    try:
        workspace = launch.Workspace.create(machine.environ)
    except EroicaError as error:
        return "no", str(error), ""
    with workspace:
        begin_s = time.monotonic()
        made = ring.Ring.create(workspace.path / f"doctor{ring.SUFFIX}", rank=0, world_size=1)
        took_s = time.monotonic() - begin_s
        made.set(ring.STATE, ring.ENDED)
        made.close()
        kind = _file_system(machine, workspace.path)
        text = f"{workspace.path.parent}, private, {kind}, {took_s * 1e3:.1f} ms for a ring"
    if kind not in ("tmpfs", "ramfs") or took_s > SLOW_RING_S:
        return "limited", text, "set XDG_RUNTIME_DIR to a folder in memory: a busy disk can hold up what is mapped"
    return "yes", text, ""


def _file_system(machine: Machine, path: Path) -> str:
    best, kind = "", "unknown file system"
    for line in (machine.proc / "self/mounts").read_text().splitlines():
        _, mount, its_kind, *_ = line.split()
        mount = mount.replace("\\040", " ")
        is_above = mount == "/" or str(path) == mount or str(path).startswith(mount + "/")
        if is_above and len(mount) >= len(best):
            best, kind = mount, its_kind
    return kind


def _shared_memory(machine: Machine, trial: Trial) -> Line:
    usage = shutil.disk_usage(machine.dev / "shm")
    text = f"{usage.free >> 20} of {usage.total >> 20} MB free in {machine.dev / 'shm'}"
    if usage.total < ENOUGH_SHM_BYTES:
        return "limited", text, "give the container more (--shm-size, or --ipc=host): workers and NCCL need it"
    return "yes", text, ""


def _space(machine: Machine, trial: Trial) -> Line:
    answers: list[str] = []
    is_enough = True
    for what, path in (("windows", user_folder(machine.environ)), ("reports", machine.out)):
        while not path.exists() and path != path.parent:
            path = path.parent
        free = shutil.disk_usage(path).free
        is_enough = is_enough and free >= ENOUGH_SPACE_BYTES
        answers.append(f"{free >> 20} MB for {what} ({path.resolve()})")
    mend = "" if is_enough else f"free {ENOUGH_SPACE_BYTES >> 20} MB, or set XDG_RUNTIME_DIR, TMPDIR or --out"
    return "yes" if is_enough else "limited", ", ".join(answers), mend


def _hurtful(machine: Machine, trial: Trial) -> Line:
    seen = _settings(machine, HURTFUL)
    if seen:
        return "limited", "; ".join(seen), "unset what is not meant"
    return "yes", "nothing known to slow training down", ""


def _interfaces(machine: Machine, trial: Trial) -> Line:
    names = [name for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if machine.environ.get(name, "") == "lo"]
    if names:
        return "limited", f"{', '.join(names)}=lo reaches no other host", "name the interface that does"
    return "yes", "none is bound to the loopback", ""


def _threads(machine: Machine, trial: Trial) -> Line:
    cores = len(os.sched_getaffinity(0))
    limit = _cpu_limit(machine)
    usable = min(cores, limit) if limit is not None else cores
    given = machine.environ.get("OMP_NUM_THREADS", "")
    text = f"{usable:g} cores usable, OMP_NUM_THREADS={given or 'unset'}"
    if given.isdecimal() and int(given) > usable:
        return (
            "limited",
            text,
            f"set OMP_NUM_THREADS to {max(1, int(usable))} or less, divided by the ranks of the host",
        )
    if not given and limit is not None and limit < cores:
        return "limited", f"{text}; torch sees {cores} cores and may use {limit:g}", "set OMP_NUM_THREADS"
    return "yes", text + ("" if given else " (torchrun sets 1; without it every rank takes all cores)"), ""


def _clock(machine: Machine, trial: Trial) -> Line:
    # Of many tries the quickest: everything else that runs here can only add.
    costs = []
    for _ in range(50):
        begin_ns = time.monotonic_ns()
        for _ in range(100):
            time.monotonic_ns()
        costs.append((time.monotonic_ns() - begin_ns) / 100)
    file = machine.sysfs / "devices/system/clocksource/clocksource0/current_clocksource"
    name = file.read_text().strip() if file.exists() else "unknown source"
    text = f"{name}, {min(costs):.0f} ns a reading"
    if min(costs) > SLOW_CLOCK_NS or name in ("hpet", "acpi_pm", "jiffies", "refined-jiffies"):
        return "limited", text, "hooks cost more here; let the kernel use tsc (clocksource=tsc)"
    return "yes", text, ""


def _files(machine: Machine, trial: Trial) -> Line:
    soft, hard = machine.limit(resource.RLIMIT_NOFILE)
    if 0 <= soft < FEW_FILES:
        most = "any number" if hard < 0 else str(hard)
        return (
            "limited",
            f"{soft} open files (up to {most})",
            f"ulimit -n {FEW_FILES}: workers need them",
        )
    return "yes", "any number of open files" if soft < 0 else f"{soft} open files", ""


def _locked(machine: Machine, trial: Trial) -> Line:
    soft, _ = machine.limit(resource.RLIMIT_MEMLOCK)
    text = "any amount of locked memory" if soft < 0 else f"{soft >> 10} KB of locked memory"
    if 0 <= soft < 1 << 30 and any((machine.sysfs / "class/infiniband").glob("*")):
        return "limited", text, "ulimit -l unlimited: RDMA needs it"
    return "yes", text, ""


CHECKS: Mapping[str, Mapping[str, Callable[[Machine, Trial], Line]]] = {
    "arming": {
        "python": _python,
        "torch": _torch,
        "steps": _steps,
        "collectives": _collectives,
        "sitecustomize": _sitecustomize,
        "environment": _off,
    },
    "windows": {"torch.profiler": _kineto, "on demand": _socket_folder, "space": _space},
    "hangs": {"py-spy": _py_spy, "ptrace": _ptrace},
    "counters": {
        "NVML": _nvml,
        "RDMA": _rdma,
        "network": _network,
        "scheduler": _scheduler,
        "cgroup": _cgroup,
    },
    "machine": {
        "ring folder": _ring_folder,
        "shared memory": _shared_memory,
        "clock": _clock,
        "threads": _threads,
        "open files": _files,
        "locked memory": _locked,
    },
    "settings": {"slow": _hurtful, "interfaces": _interfaces},
}
"""By the name of their group and their own, in the order of a reader's questions."""
