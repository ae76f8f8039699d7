"""Rank 0 saves every so many steps; from some step on the storage takes it slowly."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from evals import jobs
from evals.storage import Bucket, SharedFile

BYTES = 1 << 21
FAST = 1e10


def save(job: jobs.Job, model: nn.Module, bytes_per_s: float) -> None:
    """Leave a checkpoint."""
    state = {"model": model.state_dict(), "moments": torch.zeros(BYTES // 4)}
    with SharedFile(job.out / "last.pt", Bucket(job.out / "bucket"), bytes_per_s) as file:
        torch.save(state, file)


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    model = job.model()
    optimizer = job.optimizer(model)
    every, rate = job.draw.randrange(20, 41), FAST
    for step, batch in job.batches(job.loader(job.dataset())):
        if step == jobs.AFTER:
            rate = BYTES / (job.cost_s * every)
            job.planted([0], where=[save, SharedFile, Bucket])
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % every == every - 1 and job.rank == 0:
            save(job, model, rate)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
