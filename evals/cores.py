"""How evenly the cores of this machine did their work while a case ran.

Where they are shared with other machines, a control may become slower with nothing planted in it, and a fault may
drown. What a run says is to be read beside this; nothing is left out for it. Used by `evals.__main__`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType

import numpy as np

from eroica.samplers.work import work_ns

FEWEST = 8
"""Pieces of work; with fewer, the run was too short to tell."""
LOW, HIGH = 0.1, 0.9


class Cores:
    """`with Cores() as cores: ...; cores.spread()`. A thread of its own does a fixed piece of work now and then."""

    def __init__(self, every_s: float = 0.5) -> None:
        self._every_s = every_s
        self._taken_ns: list[float] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cores", daemon=True)

    def __enter__(self) -> Cores:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ending.wait(self._every_s):
            self._taken_ns.append(work_ns())

    def spread(self) -> float | None:
        """See `spread_of`."""
        return spread_of(self._taken_ns)


def spread_of(taken_ns: Sequence[float]) -> float | None:
    """How many times the CPU time of the quickest tenth of the pieces the slowest tenth took; None: too few."""
    if len(taken_ns) < FEWEST:
        return None
    low, high = np.quantile(taken_ns, [LOW, HIGH])
    return float(high / low)
