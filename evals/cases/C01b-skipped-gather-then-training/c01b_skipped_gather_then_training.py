"""Every step, ranks that have hard samples in their batch gather how many; from some step on one rank has none.

It goes on to the next batch and its backward pass, with gradient accumulation between the updates.
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from evals import jobs


def gather_counts(hard: Tensor, world_size: int) -> int:
    """How many hard samples there are in all."""
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(counts, hard.sum().reshape(1))
    return int(sum(count.item() for count in counts))


def train(job: jobs.Job, culprit: int, accumulate: int, onset: int) -> int:
    """All steps."""
    model = job.model()
    optimizer = job.optimizer(model)
    total = 0
    for step, batch in job.batches(job.loader(job.dataset())):
        is_update = step % accumulate == accumulate - 1
        with contextlib.nullcontext() if is_update else model.no_sync():
            loss = functional.cross_entropy(model(batch[0]), batch[1])
            loss.backward()  # type: ignore[no-untyped-call]
        if not is_update:
            continue
        optimizer.step()
        optimizer.zero_grad()
        hard = torch.ones(4, dtype=torch.int64)
        if step >= onset:
            job.planted([culprit], where=[train, gather_counts])
            if job.rank == culprit:
                hard.zero_()
        if hard.any():
            total += gather_counts(hard, job.world_size)
    return total


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    train(job, job.someone(), job.draw.choice((2, 3)), job.draw.randint(40, 80))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
