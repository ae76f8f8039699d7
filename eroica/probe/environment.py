"""The environment snapshot: what may differ between ranks or runs and is no event: versions, threads, limits, options.

`snapshot` gives it as flat JSON values; `Environment` notes it in the ring at the first step, and what has changed
later (`{"environment": {...}}`; a reader lays the notes over one another, `merged`). `differences` compares the
snapshots of all ranks and says who has what: a pure function, for the diagnosis. It reads files and asks torch what
torch knows already; it starts no process, initialises no device and takes well under a millisecond.

Environment variables come by an allow-list of prefixes, and never under names that sound like secrets.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import socket
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from eroica.job import format_ranks
from eroica.ring import Ring

LOOK_AGAIN_NS = 10 * 10**9
"""Settings that a script may change as it runs are looked at again this often; a look takes some 20 us."""
MOST_NOTES = 24
"""Notes of changes per process, so that a setting that is switched to and fro does not fill the ring."""
TRACEBACK = "anomaly.traceback_s"
"""What one traceback took when anomaly detection was asked for."""
MOST_VARIABLES, MOST_TEXT, MOST_OPTIONS = 80, 160, 6
"""Environment variables, characters per value, different settings of loaders, of DDP and of FSDP that are kept."""

_ALLOWED = re.compile(
    r"(TORCH|PYTORCH|NCCL|CUDA|OMP|MKL|KMP|GOMP|GLOO|TP|UCX|OPENBLAS|ATEN|DNNL|ONEDNN|NUMEXPR|HIP|ROCR|RCCL|CUBLAS|CUDNN"
    r"|MALLOC)_[A-Z0-9_]+|AMD_SERIALIZE_(KERNEL|COPY)"
    r"|LD_PRELOAD|PYTHON(UNBUFFERED|MALLOC|HASHSEED|OPTIMIZE|FAULTHANDLER)|TOKENIZERS_PARALLELISM"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH")
_NOT_SECRET = re.compile(r"TOKENIZERS_PARALLELISM")
_NUMBER = re.compile(r"\d{1,18}")
_COMMIT = re.compile(r"[0-9a-f]{40,64}")
Value = str | int | float | bool | None


def snapshot(environ: Mapping[str, str], script: str) -> dict[str, Value]:
    """All that is known now, by dotted names. `script`: path of the program, "" if there is none."""
    found: dict[str, Value] = {
        "host": socket.gethostname(),
        "python": sys.version.split()[0],
        "kernel": os.uname().release,
        "cpus": os.cpu_count(),
        "commit": commit_of(os.path.dirname(os.path.abspath(script))) if script else "",
        "tracer": _tracer(),
        **cgroup_limits(),
        **_variables(environ),
        **_torch(sys.modules.get("torch")),
        **changeable(),
    }
    return {name: _bounded(value) for name, value in found.items() if value not in (None, "")}


def changeable() -> dict[str, Value]:
    """The part that a script may change as it runs, cheap enough to look at again and again."""
    found: dict[str, Value] = {"gc.enabled": gc.isenabled(), "gc.frozen": gc.get_freeze_count()}
    found["gc.thresholds"] = " ".join(map(str, gc.get_threshold()))
    if hasattr(os, "sched_getaffinity"):
        own = os.sched_getaffinity(0)
        found["affinity"], found["affinity.cpus"] = format_ranks(own), len(own)
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return found
    asked = {
        "torch.threads": "get_num_threads",
        "torch.anomaly_mode": "is_anomaly_enabled",
        "torch.deterministic": "are_deterministic_algorithms_enabled",
        "torch.matmul_precision": "get_float32_matmul_precision",
    }
    for name, function in asked.items():
        ask = getattr(torch, function, None)
        if ask is not None:
            with contextlib.suppress(RuntimeError):  # no answer where precisions are set by backend, from 2.9 on
                found[name] = ask()
    cudnn = getattr(getattr(torch, "backends", None), "cudnn", None)
    if cudnn is not None:
        found["torch.cudnn.benchmark"] = bool(getattr(cudnn, "benchmark", False))
    return found


def cgroup_limits(proc: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> dict[str, Value]:
    """CPUs' worth of time and bytes of memory that the process may use, by all control groups it is in; v1 and v2."""
    cpus: list[float] = []
    memory: list[int] = []
    for line in _text(proc).splitlines()[:40]:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and not {"cpu", "memory"} & set(controllers.split(",")):
            continue
        for top in (f"{root}/{controllers}",) if controllers else (root, f"{root}/unified"):
            for folder in _upwards(top, path):
                quota, _, period = _text(f"{folder}/cpu.max").partition(" ")
                quota = quota or _text(f"{folder}/cpu.cfs_quota_us")
                period = period or _text(f"{folder}/cpu.cfs_period_us")
                if _NUMBER.fullmatch(quota) and _NUMBER.fullmatch(period) and int(period):
                    cpus.append(int(quota) / int(period))
                limit = _text(f"{folder}/memory.max") or _text(f"{folder}/memory.limit_in_bytes")
                if _NUMBER.fullmatch(limit) and int(limit) < 1 << 60:  # v1 says "none" with a huge number
                    memory.append(int(limit))
    return {"cgroup.cpus": min(cpus, default=None), "cgroup.memory_bytes": min(memory, default=None)}


def _upwards(top: str, path: str) -> list[str]:
    """The folder of a control group and those above it; `top` alone where the path is one of the host, not of here."""
    folders = [top]
    for part in path.strip("/").split("/") if ".." not in path else ():
        folders.append(f"{folders[-1]}/{part}")
    return [folder for folder in folders[:16] if os.path.isdir(folder)]


def commit_of(folder: str) -> str:
    """The commit that is checked out in the git repository of `folder`; "" if there is none that is easily read."""
    for _ in range(12):
        git = f"{folder}/.git"
        if os.path.isdir(git):
            head = _text(f"{git}/HEAD")
            name = head.removeprefix("ref: ")
            if name != head and ".." not in name:
                head = _text(f"{git}/{name}")
                if not head:
                    packed = [line.split(" ") for line in _text(f"{git}/packed-refs", 1 << 20).splitlines()]
                    head = next((parts[0] for parts in packed if parts[1:] == [name]), "")
            return head if _COMMIT.fullmatch(head) else ""
        parent = os.path.dirname(folder)
        if parent == folder:
            break
        folder = parent
    return ""


class Environment:
    """What this process has noted. Its methods may raise: their callers are guarded."""

    def __init__(self) -> None:
        self._noted: dict[str, Value] = {}
        self._options: dict[str, list[str]] = defaultdict(list)
        """Kind of option ("loader", "ddp", "fsdp") -> settings that were met, as JSON."""
        self._values: dict[str, Value] = {}
        """What is told as it becomes known, by its name."""
        self._looked_ns = 0
        self._num_notes = 0

    def look(self, ring: Ring, now_ns: int, *, is_due: bool = False) -> None:
        """Note everything at the first call, and later, every now and then or when `is_due`, what has changed."""
        if not self._looked_ns:
            found = snapshot(os.environ, sys.argv[0] if sys.argv else "")
        elif is_due or now_ns - self._looked_ns >= LOOK_AGAIN_NS:
            found = {name: _bounded(value) for name, value in changeable().items()}
        else:
            return
        self._looked_ns = now_ns
        self._note(ring, found | self._told())

    def option(self, ring: Ring | None, kind: str, values: Mapping[str, object]) -> None:
        """Remember the plain ones of `values`, a setting of `kind`, and note them if that is a new one.

        Without a ring, or before the first look, it is noted at the first look.
        """
        plain = {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str))}
        text = json.dumps({name: _bounded(value) for name, value in plain.items()})
        known = self._options[kind]
        if text not in known and len(known) < MOST_OPTIONS:
            known.append(text)
            if ring is not None and self._looked_ns:
                self._note(ring, self._told())

    def value(self, ring: Ring | None, name: str, value: Value) -> None:
        """Remember one value, the last one of its name; noted like an option."""
        self._values[name] = value
        if ring is not None and self._looked_ns:
            self._note(ring, self._told())

    def has(self, name: str) -> bool:
        """Whether a value of this name is remembered."""
        return name in self._values

    def _told(self) -> dict[str, Value]:
        """Options, by the order in which they were met: `loader.1.workers`, and values."""
        return self._values | {
            f"{kind}.{index}.{name}": value
            for kind, known in self._options.items()
            for index, text in enumerate(known, start=1)
            for name, value in json.loads(text).items()
        }

    def _note(self, ring: Ring, found: Mapping[str, Value]) -> None:
        changed = {name: value for name, value in found.items() if self._noted.get(name, _Never) != value}
        if changed and self._num_notes < MOST_NOTES:
            self._num_notes += 1
            self._noted |= changed
            ring.note(environment=changed)


class _Never:
    """Equal to no value."""


# --- for readers -----------------------------------------------------------------------------------------------------

OWN = ("host", "affinity", TRACEBACK, "env.CUDA_VISIBLE_DEVICES", "env.HIP_VISIBLE_DEVICES", "env.ROCR_VISIBLE_DEVICES")
"""What each rank has of its own as a matter of course; never a difference."""
MOST_ODD = 8


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting that is not the same on all ranks."""

    name: str
    """As in the snapshot: "torch.threads", "env.NCCL_ALGO"."""
    usual: str | None
    """What most ranks have, as JSON, null where the setting is absent; None if no value is that of more than half."""
    odd: tuple[tuple[str, str], ...]
    """The other values and the ranks that have each, the most frequent first: ("1", "3-4")."""


def merged(notes: Iterable[Mapping[str, object]]) -> dict[str, object]:
    """The snapshot that the notes of one ring add up to."""
    found: dict[str, object] = {}
    for note in notes:
        part = note.get("environment")
        if isinstance(part, dict):
            found.update(part)
    return found


def differences(snapshots: Mapping[int, Mapping[str, object]]) -> list[Difference]:
    """Settings that differ over ranks, those with fewest odd ranks first. A rank without any snapshot is left out.

    A setting of which every rank has a value of its own is left out, too, where there are more than two: it says who
    the rank is (an address, a port), not how it is set up.
    """
    known = {rank: values for rank, values in snapshots.items() if values}
    found = []
    for name in sorted({name for values in known.values() for name in values}):
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank in sorted(known):
            ranks[json.dumps(known[rank].get(name), sort_keys=True)].append(rank)
        if name in OWN or len(ranks) < 2 or (len(ranks) == len(known) > 2):
            continue
        order = sorted(ranks, key=lambda value: (-len(ranks[value]), value))
        usual = order[0] if 2 * len(ranks[order[0]]) > len(known) else None
        odd = [value for value in order if value != usual][:MOST_ODD]
        num_odd = sum(len(ranks[value]) for value in odd)
        found.append((num_odd, Difference(name, usual, tuple((value, format_ranks(ranks[value])) for value in odd))))
    return [difference for _, difference in sorted(found, key=lambda pair: (pair[0], pair[1].name))]


# --- parts of a snapshot ---------------------------------------------------------------------------------------------


def _variables(environ: Mapping[str, str]) -> dict[str, Value]:
    names = [name for name in sorted(environ) if _ALLOWED.fullmatch(name)]
    names = [name for name in names if _NOT_SECRET.fullmatch(name) or not _SECRET.search(name)]
    values = {f"env.{name}": environ[name] for name in names[:MOST_VARIABLES]}
    # A password in an address.
    return {name: "[left out]" if "://" in value and "@" in value else value for name, value in values.items()}


def _torch(torch: ModuleType | None) -> dict[str, Value]:
    if torch is None:
        return {}
    version: Any = getattr(torch, "version", None)
    cuda: Any = getattr(torch, "cuda", None)
    found: dict[str, Value] = {
        "torch": str(getattr(torch, "__version__", "")),
        "torch.cuda": getattr(version, "cuda", None),
        "torch.hip": getattr(version, "hip", None),
    }
    interop = getattr(torch, "get_num_interop_threads", None)
    if interop is not None:
        found["torch.interop_threads"] = interop()
    # Asking for a device that was not used would initialise it, which takes seconds and memory.
    if cuda is not None and cuda.is_initialized():
        device = cuda.current_device()
        found["device"] = cuda.get_device_name(device)
        found["device.memory_bytes"] = cuda.get_device_properties(device).total_memory
        nccl = getattr(cuda, "nccl", None)
        if nccl is not None and sys.platform == "linux":
            found["nccl"] = ".".join(str(part) for part in nccl.version() if part != "")
    return found


def _tracer() -> int | None:
    """Process that traces this one: a debugger, strace."""
    for line in _text("/proc/self/status").splitlines():
        if line.startswith("TracerPid:"):
            return int(line.partition(":")[2]) or None
    return None


def _text(path: str, most: int = 1 << 14) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(most).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def _bounded(value: Value) -> Value:
    return value[:MOST_TEXT] if isinstance(value, str) else value
