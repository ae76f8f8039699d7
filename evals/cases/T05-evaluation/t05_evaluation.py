"""Every so many steps an evaluation on other data; once an inspection of the model that takes longer than any step."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn

from evals import jobs

INSPECTION_S = 13.0
"""Longer than any silence that a watcher could take for granted."""


def evaluate(job: jobs.Job, model: nn.Module, length: int) -> float:
    """Mean loss over data that are not trained on."""
    samples = jobs.Numbers(job.shape, length * jobs.BATCH * job.world_size)
    model.eval()
    with torch.no_grad():
        losses = [job.loss(model, batch) for batch in job.loader(samples)]
    model.train()
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return float(mean)


def inspect(model: nn.Module) -> float:
    """Looks at all weights for a while."""
    norm = sum(float(parameter.norm()) for parameter in model.parameters())
    time.sleep(INSPECTION_S)
    dist.barrier()
    return norm


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    job.steps = 520
    every, inspected = job.draw.choice((80, 100, 120)), job.draw.randrange(250, 350)
    length = job.draw.randrange(60, 90)
    model = job.model()
    optimizer = job.optimizer(model)
    job.planted()
    for step, batch in job.batches(job.loader(job.dataset())):
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % every == every - 1:
            evaluate(job, model, length)
        if step == inspected:
            inspect(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
