"""All ranks save their shards at the same steps through one server, which from some step on is slow."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from evals import jobs
from evals.storage import Bucket, SharedFile

BYTES = 1 << 21
FAST = 1e10


def save_shard(job: jobs.Job, model: nn.Module, bytes_per_s: float) -> None:
    """Leave this rank's part of a checkpoint."""
    shard = {"model": model.state_dict(), "moments": torch.zeros(BYTES // 4)}
    with SharedFile(job.out / f"shard{job.rank}.pt", Bucket(job.out / "bucket"), bytes_per_s) as file:
        torch.save(shard, file)


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    model = job.model()
    optimizer = job.optimizer(model)
    every, rate = job.draw.randrange(20, 41), FAST
    for step, batch in job.batches(job.loader(job.dataset())):
        if step == jobs.AFTER:
            rate = BYTES * job.world_size / (job.cost_s * every)
            job.planted(range(job.world_size), where=[save_shard, SharedFile, Bucket])
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % every == every - 1:
            save_shard(job, model, rate)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
