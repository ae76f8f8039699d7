"""Each rank reads a shard of its own, as streams do; in a later epoch one rank's shard holds some batches more.

It stands in the backward pass of the first of them, while the others are in the barrier at the end of the epoch.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from evals import jobs


def train_epoch(job: jobs.Job, model: nn.Module, optimizer: torch.optim.Optimizer, num_batches: int) -> None:
    """One pass over this rank's shard."""
    shard = jobs.Numbers(job.shape, num_batches * jobs.BATCH)
    for batch in DataLoader(shard, batch_size=jobs.BATCH):
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    culprit, usual, more = job.someone(), job.draw.randint(15, 30), job.draw.choice((1, 1, 2, 7))
    model = job.model()
    optimizer = job.optimizer(model)
    for epoch in range(20):
        is_odd = epoch * usual >= 40
        if is_odd:
            job.planted([culprit], where=[train_epoch])
        train_epoch(job, model, optimizer, usual + (more if is_odd and job.rank == culprit else 0))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
