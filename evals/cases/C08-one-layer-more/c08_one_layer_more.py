"""One rank builds a layer more than the others and wraps the model like them: on gloo, all leave by an error."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evals import jobs


def build(depth: int, width: int) -> nn.Module:
    """A tower of layers."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def wrap(model: nn.Module) -> DistributedDataParallel:
    """Ready to train with others."""
    return DistributedDataParallel(model)


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    culprit, depth, width = job.someone(), job.draw.randint(2, 6), job.draw.choice((16, 64))
    more = job.draw.choice((1, 2))
    job.planted([culprit], where=[build, wrap])
    model = wrap(build(depth + (more if job.rank == culprit else 0), width))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(job.steps):
        optimizer.zero_grad()
        model(torch.randn(4, width)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
