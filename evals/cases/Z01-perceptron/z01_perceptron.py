"""A healthy training: DistributedDataParallel and SGD, samples made in the training process."""

from __future__ import annotations

import torch.distributed as dist

from evals import jobs


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    job.steps = 900
    model = job.model(bucket_cap_mb=job.draw.choice((1, 25)))
    optimizer = job.optimizer(model)
    job.planted()
    for _, batch in job.batches(job.loader(job.dataset())):
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
