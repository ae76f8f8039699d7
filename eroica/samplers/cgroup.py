"""Limits that a control group puts on a process: CPU throttling and memory, version 1 and 2.

A limit may sit on any group from the process's own up to the root that this file system shows, so all of them are
read. Formats and file names: the kernel's admin-guide/cgroup-v1 and admin-guide/cgroup-v2. Used by `host`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eroica.samplers.proc import numbers_of, read_number, read_text

NO_LIMIT = float(1 << 60)
"""A version 1 memory limit above this is none: the kernel writes the largest multiple of a page."""
MOST_LEVELS = 16


@dataclass(frozen=True, slots=True)
class Mount:
    """One mounted hierarchy."""

    at: str
    """Mount point as the reading process sees it."""
    root: str
    """Which group is mounted there."""
    version: int
    options: frozenset[str]
    """Version 1: its controllers, among others."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Folders of a process's groups, its own first; () = no such controller."""

    cpu: tuple[Path, ...]
    memory: tuple[Path, ...]


def parse_mounts(text: str) -> tuple[Mount, ...]:
    """The control group file systems of /proc/self/mountinfo."""
    found: list[Mount] = []
    for line in text.splitlines():
        before, dash, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if dash and len(fields) >= 6 and len(tail) >= 3 and tail[0] in ("cgroup", "cgroup2"):
            found.append(Mount(fields[4], fields[3], 1 if tail[0] == "cgroup" else 2, frozenset(tail[2].split(","))))
    return tuple(found)


def _folders(root: Path, mount: Mount, path: str) -> tuple[Path, ...]:
    # In a container without a namespace of its own, the path starts with the group that is mounted.
    inner = path[len(mount.root) :] if mount.root != "/" and path.startswith(mount.root) else path
    # "/.." means that the process lies outside of what is mounted here: its groups cannot be seen.
    parts = [part for part in inner.split("/") if part]
    if ".." in parts:
        return ()
    top = root / mount.at.lstrip("/")
    return tuple(top.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))[:MOST_LEVELS]


def groups_of(root: Path, membership: str, mounts: tuple[Mount, ...]) -> Groups:
    """`membership`: /proc/PID/cgroup. A hybrid host has its CPU controller in version 1 and a bare version 2 beside."""
    first: dict[str, str] = {}
    second = None
    for line in membership.splitlines():
        fields = line.split(":", 2)
        if len(fields) < 3:
            continue
        if fields[0] == "0" and not fields[1]:
            second = fields[2]
        for controller in fields[1].split(","):
            first[controller] = fields[2]
    found: dict[str, tuple[Path, ...]] = {}
    for controller in ("cpu", "memory"):
        found[controller] = ()
        if controller in first:
            for mount in mounts:
                if mount.version == 1 and controller in mount.options:
                    found[controller] = _folders(root, mount, first[controller])
                    break
        elif second is not None:
            for mount in mounts:
                if mount.version == 2:
                    found[controller] = _folders(root, mount, second)
                    break
    return Groups(found["cpu"], found["memory"])


def _quota(folder: Path) -> float | None:
    """Cores that this group may use; None = no limit."""
    limit = read_text(folder / "cpu.max").split()
    if len(limit) == 2 and limit[0].isdigit() and limit[1].isdigit() and int(limit[1]):
        return int(limit[0]) / int(limit[1])
    quota, period = read_number(folder / "cpu.cfs_quota_us"), read_number(folder / "cpu.cfs_period_us")
    return quota / period if quota is not None and period and quota > 0 else None


def cpu_counts(folders: tuple[Path, ...]) -> dict[str, float]:
    """`num_throttled`, `throttled_ns` summed over all limits above a process, and `quota_cores`, the tightest one."""
    found: dict[str, float] = {}
    quotas: list[float] = []
    for folder in folders:
        stat = numbers_of(read_text(folder / "cpu.stat"), "nr_throttled", "throttled_time", "throttled_usec")
        if "nr_throttled" in stat:
            ns = stat["throttled_time"] if "throttled_time" in stat else stat.get("throttled_usec", 0.0) * 1000
            found["num_throttled"] = found.get("num_throttled", 0.0) + stat["nr_throttled"]
            found["throttled_ns"] = found.get("throttled_ns", 0.0) + ns
        quota = _quota(folder)
        if quota is not None:
            quotas.append(quota)
    if quotas:
        found["quota_cores"] = min(quotas)
    return found


def memory_counts(folders: tuple[Path, ...]) -> dict[str, float]:
    """`num_at_limit`, `num_oom_kills` of all groups above, and `memory_ratio`: use over limit where it is tightest.

    Use counts without the page cache that the kernel would drop: a job that reads much data fills any limit with it.
    """
    found: dict[str, float] = {}
    for folder in folders:
        events = numbers_of(read_text(folder / "memory.events"), "max", "high", "oom_kill")
        stat = numbers_of(read_text(folder / "memory.stat"), "inactive_file", "total_inactive_file")
        if events:
            at_limit, kills = events.get("max", 0.0) + events.get("high", 0.0), events.get("oom_kill", 0.0)
            use, limit = read_number(folder / "memory.current"), read_number(folder / "memory.max")
            cache = stat.get("inactive_file", 0.0)
        else:
            failed = read_number(folder / "memory.failcnt")
            if failed is None:
                continue
            at_limit = failed
            kills = numbers_of(read_text(folder / "memory.oom_control"), "oom_kill").get("oom_kill", 0.0)
            use, limit = read_number(folder / "memory.usage_in_bytes"), read_number(folder / "memory.limit_in_bytes")
            cache = stat.get("total_inactive_file", stat.get("inactive_file", 0.0))
        found["num_at_limit"] = found.get("num_at_limit", 0.0) + at_limit
        found["num_oom_kills"] = found.get("num_oom_kills", 0.0) + kills
        if use is not None and limit is not None and 0 < limit < NO_LIMIT:
            found["memory_ratio"] = max(found.get("memory_ratio", 0.0), max(use - cache, 0.0) / limit)
    return found
