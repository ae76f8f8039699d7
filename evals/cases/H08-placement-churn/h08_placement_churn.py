"""Eight ranks prepare their input in Python; nobody binds them to cores, and they are moved about.

Healthy, they are spread over two cores. Then, every two seconds, others of them meet on one core, whose share of the
work is the larger the larger the effect.
"""

from __future__ import annotations

import os
import time

import torch.distributed as dist
from torch import Tensor

from evals import jobs

PREPARE_S = 0.01
"""So much that the cores have little time to spare: else a crowded one would only use up what is spare."""
MOVE_S = 2.0
LOOPS_PER_S = 2e7
"""Of `prepare`, about; healthy and faulty steps do the same."""


class Prepared(jobs.Numbers):
    """Samples that are worked on by the host before they are used."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        prepare(PREPARE_S / jobs.BATCH)
        return super().__getitem__(index)


def prepare(seconds: float) -> int:
    """As much pure Python as takes so long on a free core."""
    state = 1
    for _ in range(int(seconds * LOOPS_PER_S)):
        state = state * 31 % 1_000_003
    return state


def move_to(core: int) -> None:
    """All threads of this process."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), {core})
        except OSError:
            continue


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    cores = sorted(os.sched_getaffinity(0))[:2]
    move_to(cores[job.rank % len(cores)])
    samples = Prepared(job.shape, jobs.EPOCH_STEPS * jobs.BATCH * job.world_size)
    model = job.model()
    optimizer = job.optimizer(model)
    # Of eight ranks so many on one core: the step takes about as many times four as it has ranks.
    crowd = min(round(job.world_size / 2 * (1 + job.effect)), job.world_size)
    began, turn = 0.0, 0
    for step, batch in job.batches(job.loader(samples)):
        if step == jobs.AFTER:
            began = time.monotonic()
            job.planted(range(job.world_size), where=[Prepared.__getitem__, prepare])
        if began and time.monotonic() - began >= turn * MOVE_S:
            turn += 1
            draw = job.draw.sample(range(job.world_size), job.world_size)
            move_to(cores[draw.index(job.rank) >= crowd])
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
