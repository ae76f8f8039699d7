"""The inside of a measured process: one core, no waiting garbage collector, the peak of memory.

Standard library only, since peers run it in environments of their own.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def pin() -> None:
    """Stay on the core that the parent names, if it names one. Call before importing anything that starts threads."""
    core = os.environ.get("BENCH_CORE")
    if core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(core)})


def peak_bytes() -> int:
    """Most memory that this process has held so far (resident)."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            # Unlike ru_maxrss it begins at exec: ru_maxrss of a child starts from what the parent held when it forked.
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


class Clock:
    """What the timed block took; zero until it has ended."""

    seconds = 0.0
    cpu_s = 0.0
    """Of this process. Far below `seconds` on one thread: something else held the core, or the disk was slow."""
    before = 0
    """Peak of memory when it began."""
    peak = 0

    def told(self) -> dict[str, float]:
        """As `tell` wants it."""
        return {"seconds": self.seconds, "cpu_s": self.cpu_s, "before": self.before, "peak": self.peak}


@contextmanager
def timed() -> Iterator[Clock]:
    """Times the block."""
    clock = Clock()
    clock.before = peak_bytes()
    cpu, began = time.process_time(), time.perf_counter()
    yield clock
    clock.seconds, clock.cpu_s = time.perf_counter() - began, time.process_time() - cpu
    clock.peak = peak_bytes()


def tell(**told: Any) -> None:
    """The one line that the parent reads."""
    print(json.dumps(told))
