"""A healthy training whose parameters are sharded over the ranks: each layer is gathered before it computes."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from evals import jobs


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    job.steps = 600
    mesh = init_device_mesh("cpu", (job.world_size,))
    model = jobs.Transformer()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = job.optimizer(model)
    job.planted()
    for _, batch in job.batches(job.loader(job.dataset())):
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
