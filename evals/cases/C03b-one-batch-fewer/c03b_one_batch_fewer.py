"""Loaders with worker processes over shards of each rank's own; in a later epoch one rank's shard is shorter.

It goes on to the evaluation, which begins by agreeing on a loss, while the others are in a backward pass.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from evals import jobs


def train_epoch(job: jobs.Job, model: nn.Module, optimizer: torch.optim.Optimizer, num_batches: int) -> float:
    """One pass over this rank's shard; its mean loss."""
    shard = jobs.Numbers(job.shape, num_batches * jobs.BATCH)
    losses = []
    for batch in DataLoader(shard, batch_size=jobs.BATCH, num_workers=1):
        optimizer.zero_grad()
        loss = job.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def agree(loss: float) -> float:
    """The mean over all ranks."""
    whole = torch.tensor([loss, 1.0], dtype=torch.float64)
    dist.all_reduce(whole)
    return float(whole[0] / whole[1])


def run(job: jobs.Job, culprit: int, usual: int, fewer: int) -> None:
    """All epochs."""
    model = job.model()
    optimizer = job.optimizer(model)
    for epoch in range(20):
        is_odd = epoch * usual >= 40
        if is_odd:
            job.planted([culprit], where=[run, agree])
        loss = train_epoch(job, model, optimizer, usual - (fewer if is_odd and job.rank == culprit else 0))
        agree(loss)


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    run(job, job.someone(), job.draw.randint(20, 30), job.draw.choice((1, 2, 5)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
