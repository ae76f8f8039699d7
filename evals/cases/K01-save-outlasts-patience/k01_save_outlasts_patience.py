"""Rank 0 writes a checkpoint to storage that has become very slow. `effect` steps would fit into the time it takes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from evals import jobs
from evals.storage import Bucket, SharedFile

BYTES = 1 << 22


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
    at = job.draw.randrange(160, 220)
    for step, batch in job.batches(job.loader(job.dataset())):
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step == at:
            job.planted([0], where=[save, SharedFile, Bucket])
            if job.rank == 0:
                save(job, model, BYTES / job.cost_s)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
