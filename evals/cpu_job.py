"""A data-parallel training on CPUs, made up: operators in each step of each rank, and an all-reduce that all wait in.

Series of iterations and, for any part of the job, the trace files that torch would write there, with the counters of
the training thread. For synthetic cases whose fault changes what operators take, over hundreds of steps. Transfers are
durations, ranks have clocks that agree, and nothing but the given operators runs.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from eroica.background import History, Lap, context_of
from eroica.degradation import Degradation, Trigger
from eroica.diagnosis import diagnose
from eroica.findings import Diagnosis
from eroica.pattern import Stacked, stack, summarize
from eroica.steps import Iteration
from eroica.trace import Samples, Trace, read_trace
from evals.baselines import Window

MS = 1_000_000
TRANSFER_NS = 4 * MS
WINDOW_STEPS = 20
AHEAD = 15
"""Steps from a trigger to the window that it asks for."""
BASELINE_AT = 30


@dataclass(frozen=True)
class CpuJob:
    """W ranks that run the same operators."""

    world_size: int
    operators: tuple[tuple[str, float], ...]
    """Name and milliseconds, in the order of a step; the all-reduce comes before the last one."""
    factor: Callable[[int, int, str], float]
    """(rank, step, operator) -> how many times as long as usual it takes there."""
    seed: int
    jitter: float = 0.01

    def _durations(self, rank: int, step: int) -> list[int]:
        draw = random.Random(f"{self.seed} {rank} {step}")
        return [
            round(ms * MS * self.factor(rank, step, name) * (1 + draw.gauss(0, self.jitter)))
            for name, ms in self.operators
        ]

    def iteration_ns(self, step: int) -> int:
        """Of all ranks, since each waits for the last."""
        each = [self._durations(rank, step) for rank in range(self.world_size)]
        return TRANSFER_NS + max(sum(lasts[:-1]) for lasts in each) + max(lasts[-1] for lasts in each)

    def traces(self, first: int, folder: Path) -> list[tuple[Trace, Samples]]:
        """A window of WINDOW_STEPS steps from `first` on."""
        events: list[list[dict[str, object]]] = [[] for _ in range(self.world_size)]
        clock = [1000 * MS] * self.world_size
        for step in range(first, first + WINDOW_STEPS):
            began, ends = list(clock), []
            durations = [self._durations(rank, step) for rank in range(self.world_size)]
            for rank in range(self.world_size):
                for (name, _), lasts in list(zip(self.operators, durations[rank], strict=True))[:-1]:
                    events[rank].append(_event("cpu_op", name, 1, clock[rank], lasts))
                    clock[rank] += lasts
            met = max(clock) + TRANSFER_NS
            for rank in range(self.world_size):
                begins = clock[rank]
                events[rank].append(_event("cpu_op", "c10d::allreduce_", 1, begins, met - begins))
                events[rank].append(_event("user_annotation", "gloo:all_reduce", 2, begins, met - begins))
                events[rank].append(_event("cpu_op", self.operators[-1][0], 1, met, durations[rank][-1]))
                ends.append(met + durations[rank][-1])
                events[rank].append(
                    _event("user_annotation", f"ProfilerStep#{step}", 1, began[rank], ends[rank] - began[rank])
                )
            clock = ends
        return [(self._read(folder, rank, events[rank]), _counters(clock[rank])) for rank in range(self.world_size)]

    def _read(self, folder: Path, rank: int, events: list[dict[str, object]]) -> Trace:
        ranks = list(range(self.world_size))
        group = {
            "pg_name": "0",
            "pg_desc": "default_pg",
            "backend_config": "gloo",
            "pg_size": len(ranks),
            "ranks": ranks,
        }
        told = {"backend": "gloo", "rank": rank, "world_size": len(ranks), "pg_count": 1, "pg_config": [group]}
        file = folder / f"rank{rank}.json"
        file.write_text(
            json.dumps(
                {
                    "schemaVersion": 1,
                    "distributedInfo": told,
                    "host_name": "host0",
                    "baseTimeNanoseconds": 0,
                    "traceEvents": events,
                }
            )
        )
        return read_trace(file)


def _event(category: str, name: str, thread: int, start_ns: int, lasts_ns: int) -> dict[str, object]:
    return {
        "ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread,
        "ts": start_ns / 1000, "dur": lasts_ns / 1000, "args": {},
    }  # fmt: skip


def _counters(end_ns: int) -> Samples:
    """The training thread has a core whenever it wants one."""
    grid = np.arange(1000 * MS, end_ns, 10 * MS, dtype=np.int64)
    return Samples(grid, {"cpu_ratio": np.full(len(grid), 0.97), "runqueue_ratio": np.full(len(grid), 0.005)})


def watched(job: CpuJob, num_steps: int) -> tuple[tuple[Diagnosis, ...], tuple[Window, ...]]:
    """What would be said of so many steps: each change of pace has a window, which is diagnosed."""
    said: list[Diagnosis] = []
    windows: list[Window] = []
    laps: list[Lap] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        baseline, _ = _stacked(job, BASELINE_AT, folder)
        for trigger in _noticed(job, num_steps, laps):
            first = trigger.step + AHEAD
            seen = [
                *laps,
                *_laps(job, trigger.step + 1, first + WINDOW_STEPS, laps[-1].start_ns + laps[-1].duration_ns),
            ]
            stacked, window = _stacked(job, first, folder)
            histories = {rank: History(tuple(seen[-300:])) for rank in range(job.world_size)}
            context = context_of(histories, {}, {}, trigger, range(first, first + WINDOW_STEPS))
            said.append(diagnose(stacked, replace(context, trigger="slowdown", baseline=baseline)))
            windows.append(window)
    return tuple(said), tuple(windows)


def _stacked(job: CpuJob, first: int, folder: Path) -> tuple[Stacked, Window]:
    pairs = job.traces(first, folder)
    return stack([summarize(trace, samples) for trace, samples in pairs]), Window(tuple(trace for trace, _ in pairs))


def _laps(job: CpuJob, first: int, end: int, start_ns: int) -> Iterator[Lap]:
    for step in range(first, end):
        lasts = job.iteration_ns(step)
        yield Lap(step, start_ns, lasts, "")
        start_ns += lasts


def _noticed(job: CpuJob, num_steps: int, laps: list[Lap]) -> Iterator[Trigger]:
    """Changes of pace as rank 0 shows them; `laps` grows with what has gone by."""
    degradation = Degradation()
    for lap in _laps(job, 0, num_steps, 0):
        laps.append(lap)
        found = degradation.add(
            Iteration(
                number=lap.step,
                unit=0,
                start_ns=lap.start_ns,
                end_ns=lap.start_ns + lap.duration_ns,
                generation=0,
                step=lap.step,
                num_batches=1,
                num_steps=1,
                num_collectives=1,
                loader=0,
                skipped=False,
                pause=None,
            )
        )
        yield from (trigger for trigger in found if trigger.cost > 0)
