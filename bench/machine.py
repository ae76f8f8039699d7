"""What the figures were taken on: processor, memory, load, versions. Read, never guessed; used for the head of the
results.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import eroica


def processor() -> str:
    """Model as /proc/cpuinfo says it, with the numbers that tell apart machines that say nothing."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or "unknown"
    told = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", text, re.MULTILINE))
    numbers = ", ".join(f"{key} {told[key]}" for key in ("vendor_id", "cpu family", "model", "stepping") if key in told)
    return f"{told.get('model name', 'unknown')} ({numbers})"


def memory_gb() -> float | None:
    """Of the machine, in GB (1e9)."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    except (ValueError, OSError):
        return None


def version(package: str) -> str:
    """Of an installed package; "-" if it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"


def facts(peers: Mapping[str, str]) -> dict[str, str]:
    """Name -> value, in the order in which they are shown. `peers`: versions in their own environments."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = memory_gb()
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    own = ", ".join(
        [f"eroica {eroica.__version__}", *(f"{name} {version(name)}" for name in ("numpy", "msgspec", "isal"))]
    )
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor(),
        "cores": str(cores),
        "memory": f"{memory:.0f} GB" if memory else "unknown",
        "system": f"{platform.system()} {platform.release()}",
        "load at the start": load,
        "Python": platform.python_version(),
        "eroica's environment": own,
        "peers": ", ".join(f"{name} {number}" for name, number in peers.items()) or "-",
    }
