"""Every rank keeps many containers alive and collects now and then, each rank at steps of its own.

By the seed the ranks collect every few steps, staggered, or whenever they have read so many samples that it is time,
which comes at other steps on each rank since their batches differ in length.
"""

from __future__ import annotations

import gc
import random
import time
from typing import Any

import torch.distributed as dist

from evals import jobs

USUAL = 100
"""Tokens in a batch."""


class Keeper:
    """What a tokenizer or a replay buffer keeps: small containers that refer to each other."""

    def __init__(self) -> None:
        self.kept: list[dict[str, Any]] = []

    def grow(self, seconds: float) -> None:
        """Until a full collection takes so long."""
        taken = self.collection_s()
        while taken < seconds:
            self.kept += [{"tokens": [n], "next": None} for n in range(20_000)]
            taken = self.collection_s()

    def collection_s(self) -> float:
        """The better of two tries: other programs run, too."""
        tries = []
        for _ in range(2):
            begin = time.perf_counter()
            gc.collect()
            tries.append(time.perf_counter() - begin)
        return min(tries)


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    period = job.draw.choice((6, 8, 12))
    by_step = job.draw.random() < 0.5
    offsets = job.draw.sample(range(period), job.world_size)
    lengths, num_read = random.Random(job.seed + job.rank), offsets[job.rank] * USUAL
    keeper = Keeper()
    model = job.model()
    optimizer = job.optimizer(model)
    for step, batch in job.batches(job.loader(job.dataset())):
        if step == jobs.AFTER:
            # Each rank makes the others wait once per period.
            gc.freeze()
            gc.disable()
            keeper.grow(job.cost_s * period / job.world_size)
            job.planted()
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        num_read += lengths.randint(USUAL // 2, 3 * USUAL // 2)
        if by_step:
            is_time = step % period == offsets[job.rank]
        else:
            is_time = num_read >= USUAL * period
            num_read -= USUAL * period * is_time
        if step >= jobs.AFTER and is_time:
            gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
