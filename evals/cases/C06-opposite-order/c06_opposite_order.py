"""Two process groups, each with a reduction per step; from some step on one rank makes the two in the other order."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from evals import jobs


def average_router(load: Tensor, group: dist.ProcessGroup) -> None:
    """Balance of the router over its group."""
    dist.all_reduce(load, group=group)


def average_experts(grads: Tensor, group: dist.ProcessGroup) -> None:
    """Gradients of the experts over theirs."""
    dist.all_reduce(grads, group=group)


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    culprit, size, onset = job.someone(), job.draw.choice((64, 5000)), job.draw.randint(30, 80)
    everybody = list(range(job.world_size))
    router, experts = dist.new_group(everybody), dist.new_group(everybody)
    model = job.model()
    optimizer = job.optimizer(model)
    load, grads = torch.ones(8), torch.ones(size)
    for step, batch in job.batches(job.loader(job.dataset())):
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        if step == onset:
            job.planted([culprit], where=[average_router, average_experts])
        both = [(average_router, load, router), (average_experts, grads, experts)]
        for average, values, group in reversed(both) if step >= onset and job.rank == culprit else both:
            average(values, group)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
