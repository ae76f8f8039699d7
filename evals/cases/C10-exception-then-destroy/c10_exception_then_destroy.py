"""One rank meets a bad sample; on its way out a `finally` destroys the process group while the others are inside a
collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from evals import jobs


def check(batch: Sequence[Tensor], is_bad: bool) -> None:
    """Labels must be within range."""
    if is_bad:
        raise ValueError(f"label {int(batch[-1].max()) + 1000} is out of range")


def train(job: jobs.Job, culprit: int, onset: int) -> None:
    """All steps."""
    model = job.model()
    optimizer = job.optimizer(model)
    for step, batch in job.batches(job.loader(job.dataset())):
        if step == onset:
            job.planted([culprit], where=[check])
        check(batch, step == onset and job.rank == culprit)
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    try:
        train(job, job.someone(), job.draw.randint(20, 80))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
