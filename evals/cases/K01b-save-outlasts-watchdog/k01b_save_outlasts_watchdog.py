"""Rank 0 writes a checkpoint with plain file writes to slow storage; the group's time-out is short."""

from __future__ import annotations

import datetime
import os
import pickle

import torch.distributed as dist
from torch import nn

from evals import jobs
from evals.storage import Bucket, SharedFile

BYTES = 1 << 22


def write_checkpoint(job: jobs.Job, model: nn.Module, bytes_per_s: float) -> None:
    """Leave a checkpoint."""
    with SharedFile(job.out / "last.pkl", Bucket(job.out / "bucket"), bytes_per_s) as file:
        pickle.dump({name: value.numpy() for name, value in model.state_dict().items()}, file)
        file.write(os.urandom(BYTES))


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    # Far below what jobs have, and longer than the 10 s after which a job counts as standing still.
    group = dist.new_group(timeout=datetime.timedelta(seconds=job.draw.randrange(14, 20)))
    model = job.model(process_group=group)
    optimizer = job.optimizer(model)
    at = job.draw.randrange(160, 220)
    for step, batch in job.batches(job.loader(job.dataset())):
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step == at:
            job.planted([0], where=[write_checkpoint, SharedFile, Bucket])
            if job.rank == 0:
                write_checkpoint(job, model, BYTES / job.cost_s)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
