"""From some step on torch computes with many threads per rank, four ranks to a host. Operators of middle size."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from evals import jobs


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    width = 256 if job.shape == "perceptron" else 320
    layers = [nn.Linear(width, width), nn.Softplus()] * 4
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(width, 10)))
    optimizer = jobs.optimizer_for(job.shape, model.parameters())
    loader = job.loader(jobs.Numbers("perceptron", jobs.EPOCH_STEPS * jobs.BATCH * job.world_size))
    many = round(8 * job.effect) + job.draw.randrange(0, 3)
    for step, batch in job.batches(loader):
        if step == jobs.AFTER:
            torch.set_num_threads(many)
            job.planted(range(job.world_size))
        inputs = batch[0].repeat(32, width // 64)
        loss = functional.cross_entropy(model(inputs), batch[1].repeat(32))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
