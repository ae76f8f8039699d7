"""The gate: where a rank that would only wait is held back for a moment before it enters a collective.

An agent leaves in the ring for how long, by group (`holds`), and mostly until which moment of the rank's own step, so
that who is late is not held; the gate holds the rank at the first collective of each step on that group. It is the one
place where the probe waits, and it only sleeps: without the GIL, on the host, before the call is handed on as it came,
so that results stay the same bit for bit. Its bounds hold whatever lies in the ring: a cap of each step, a share of the
group's timeout, and the end of the order by the rank's own clock, so that nobody is held for longer than the TTL once
agent or coordinator are gone. It does not hold while a graph is captured or compiled, while an exception is on its way,
or while a profiler records: what a trace shows is the job's own.

Where nothing is asked for, the kernel looks at one word of the ring and does not come here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from eroica.holds import MOST_DELAY_NS, Holds, parse
from eroica.ring import HOLDS, PACED, PACED_NS, Ring

_LEAST_NS = 50_000
"""Shorter ones are not worth a timer."""


class Gate:
    """See the module. One of a process; threads may meet here, and at worst one step has the cap of two."""

    def __init__(
        self,
        is_free: Callable[[], bool] | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`is_free`: nothing is captured, compiled or recorded now."""
        self._is_free = is_free or _is_free
        self._clock = clock
        self._sleep = sleep
        self._word = 0
        self._holds: Holds | None = None
        self._step = -1
        self._left_ns = 0
        """What this step may still be held for."""
        self._seen: dict[int, int] = {}
        """Group -> the last step in which it was met here."""
        self._num = 0

    def hold(self, ring: Ring, group: int, step: int, cap_ns: int, stepped_ns: int = 0) -> int:
        """Hold this rank, if it is to be. Returns the moment at which it goes on; 0: it was not held.

        `stepped_ns`: when the optimizer step before was done, by CLOCK_MONOTONIC; 0: there was none."""
        now_ns = self._clock()
        word = ring.words[HOLDS]
        holds = self._holds
        if word != self._word:
            was_held = holds is not None and now_ns < holds.until_ns
            self._word, self._holds = word, parse(ring.holds)
            holds = self._holds
            if not was_held:
                # Collectives of this step may have passed already: the first one is the next step's.
                self._step, self._left_ns = step, 0
        if holds is None:
            return 0
        if now_ns >= holds.until_ns:
            self._word, self._holds = 0, None
            if ring.words[HOLDS] == word:
                ring.words[HOLDS] = 0  # from now on the kernel passes by
            return 0
        if step != self._step:
            self._step, self._left_ns = step, MOST_DELAY_NS
        if self._seen.get(group) == step:
            return 0
        self._seen[group] = step
        delay_ns = holds.of(group, now_ns, min(cap_ns, self._left_ns), now_ns - stepped_ns if stepped_ns else None)
        if delay_ns < _LEAST_NS or sys.exception() is not None or not self._is_free():
            return 0
        self._left_ns -= delay_ns
        self._sleep(delay_ns / 1e9)
        end_ns = self._clock()
        self._num += 1
        ring.end(ring.begin(PACED, now_ns, -1, group, self._num, 0, step), end_ns - now_ns, False)
        ring.add(PACED_NS, end_ns - now_ns)
        return end_ns


def _is_free() -> bool:
    torch: Any = sys.modules["torch"]
    cuda = torch.cuda
    return not (
        torch.autograd._profiler_enabled()
        or torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or (cuda.is_initialized() and cuda.is_current_stream_capturing())
    )


GATE = Gate()
