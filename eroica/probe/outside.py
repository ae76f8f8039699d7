"""The end of a process while Kineto records it on demand: torch would die of SIGSEGV there, whatever was to be told.

Kineto's window ends when it has counted the steps that it was asked for, or by the clock. So at the end of the process
the missing steps are counted for it, and it is given a moment to write. Nothing runs before: that there is such a
window is a word in the mailbox, which nobody but `let_go` acts upon. Helps no process that is not armed, or that does
not come to its end in the ordinary way. Used by the recorder.
"""

from __future__ import annotations

import os
import sys
import time

from eroica import ring as flight
from eroica.commands import Verb, parse
from eroica.ring import Ring

AFTER_STEPS_S = 2.0
"""Wait for the trace, by steps: the profiler has stopped, and only the file is missing."""
BY_TIME_S = 10.0
"""Wait for the end of a window by the clock; one that lasts longer is not waited for, and the crash not prevented."""
_MOST_AHEAD = 1 << 16
_LOOK_S = 0.02


def let_go(ring: Ring, num_steps: int) -> None:
    """Have Kineto end its window, if there is one. `num_steps`: outermost steps completed."""
    command = parse(ring.mailbox)
    if command is None or command.verb != Verb.OUTSIDE:
        return
    count = getattr(sys.modules.get("torch.autograd"), "_kineto_step", None)
    if count is None:
        return
    if command.num_steps:
        # Kineto has counted as many steps as the ring or more; what is too much does nothing.
        for _ in range(min(max(command.start - num_steps, 0), _MOST_AHEAD) + command.num_steps + 2):
            count()
    name = f"rank{ring.get(flight.RANK)}_{os.getpid()}.json"
    trace = os.path.join(ring.path.parent, "captures", str(command.window), name)
    until = time.monotonic() + (AFTER_STEPS_S if command.num_steps else BY_TIME_S)
    while not os.path.exists(trace) and time.monotonic() < until:
        time.sleep(_LOOK_S)
