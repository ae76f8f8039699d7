"""FSDP with gradient accumulation that never turns the gradients' synchronisation off."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from evals import jobs


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    width = round(600 * job.effect**0.5)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(2 if job.shape == "perceptron" else 3)]
    model = nn.Sequential(nn.Linear(64, width), *blocks, nn.Linear(width, 10))
    mesh = init_device_mesh("cpu", (job.world_size,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    accumulated = job.draw.randrange(3, 6)
    samples = jobs.Numbers("perceptron", jobs.EPOCH_STEPS * jobs.BATCH * job.world_size)
    torch.set_num_threads(1)
    for step, batch in job.batches(job.loader(samples)):
        if step == 0:
            job.planted(range(job.world_size))
        hidden = jobs.on_device(batch[0].requires_grad_(), 0.012)
        (functional.cross_entropy(model(hidden), batch[1]) / accumulated).backward()  # type: ignore[no-untyped-call]
        if step % accumulated == accumulated - 1:
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
