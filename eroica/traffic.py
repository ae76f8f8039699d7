"""What the collectives of one rank carry per iteration, by its ring: bytes of gradients, once or again and again.

Pure; records in, a number out. Kept by the agent and told with a window. Only sums and scatters of sums count, and only
outside of optimizer steps: a closure that is evaluated several times in one step has to reduce each time. It does not
know what the bytes are; `costly` compares them with those of the gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from eroica import ring
from eroica.ring import OPS, Record

_REDUCING = frozenset(OPS.index(name) for name in OPS if name.startswith(("allreduce", "reduce_scatter")))
KEPT = 4096
"""Reductions kept: some tens of iterations of a model in a hundred buckets."""
STEPS = 32
"""Iterations of which the median is told."""
FEWEST = 4
"""With fewer nothing is told."""


class Traffic:
    """Reductions of one rank as they come."""

    def __init__(self) -> None:
        self._reductions: deque[tuple[int, int, int]] = deque(maxlen=KEPT)
        """Steps completed before, begin, bytes."""
        self._steps: deque[tuple[int, int]] = deque(maxlen=4 * STEPS)
        """Begin and end of optimizer steps."""

    def feed(self, begun: Sequence[Record], ended: Sequence[Record]) -> None:
        """New records, as `Watch.feed` takes them."""
        for record in begun:
            if record.kind == ring.COLLECTIVE and record.op in _REDUCING:
                self._reductions.append((record.step, record.begin_ns, record.num_bytes))
        for record in ended:
            if record.kind == ring.STEP and record.duration_ns is not None:
                self._steps.append((record.begin_ns, record.begin_ns + record.duration_ns))

    def num_bytes(self) -> int:
        """Bytes that are reduced per step, the median over the last complete ones; 0 where too few are known."""
        within = sorted(self._steps)
        by_step: dict[int, int] = {}
        at = 0
        for step, begin_ns, num_bytes in sorted(self._reductions, key=lambda one: one[1]):
            while at < len(within) and within[at][1] < begin_ns:
                at += 1
            is_inside = at < len(within) and within[at][0] <= begin_ns
            by_step[step] = by_step.get(step, 0) + (0 if is_inside else num_bytes)
        # The first one may have lost its begin, the last one goes on.
        complete = sorted(by_step)[1:-1][-STEPS:]
        return round(median(by_step[step] for step in complete)) if len(complete) >= FEWEST else 0
