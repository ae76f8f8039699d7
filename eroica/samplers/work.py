"""How fast the cores are just now: the CPU time of a fixed piece of work.

Cores become slower without a counter that says so: heat and power lower their clock where nobody may read it, and the
other thread of a core is another virtual machine's. Then all that a host does takes longer, and nothing that its job
does is the reason. This tells; a share of the time in which there was no core at all does not count. Used by `host`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

ROUNDS = 2_000
"""Of the loop: some 50 us on a core of today, short against a time slice."""
PIECES = 4
"""The shortest counts: an interrupt, or caches that another thread has filled, lengthen one or two."""


def work_ns(clock_ns: Callable[[], int] = time.thread_time_ns) -> float:
    """Nanoseconds of CPU that the work takes. `clock_ns`: CPU time of the calling thread."""
    return float(min(_piece(clock_ns) for _ in range(PIECES)))


def _piece(clock_ns: Callable[[], int]) -> int:
    began_ns = clock_ns()
    total = 0
    for number in range(ROUNDS):
        total += number
    return clock_ns() - began_ns
