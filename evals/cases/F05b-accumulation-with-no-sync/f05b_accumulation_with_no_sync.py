"""Gradient accumulation that reduces gradients in the last micro-step only. Nothing is wrong."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from evals import jobs


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    width = 500 if job.shape == "perceptron" else 700
    network = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    model = DistributedDataParallel(network)
    optimizer = jobs.optimizer_for(job.shape, model.parameters())
    accumulated = job.draw.randrange(3, 7)
    samples = jobs.Numbers("perceptron", jobs.EPOCH_STEPS * jobs.BATCH * job.world_size)
    torch.set_num_threads(1)
    job.steps = 200 * accumulated
    for step, batch in job.batches(job.loader(samples)):
        if step == 0:
            job.planted()
        is_last = step % accumulated == accumulated - 1
        with nullcontext() if is_last else model.no_sync():
            hidden = jobs.on_device(batch[0].requires_grad_(), 0.008)
            (functional.cross_entropy(model(hidden), batch[1]) / accumulated).backward()  # type: ignore[no-untyped-call]
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
