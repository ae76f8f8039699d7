"""A healthy training whose samples come from worker processes, which live for an epoch or for the whole run."""

from __future__ import annotations

import torch.distributed as dist

from evals import jobs


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    job.steps = 800
    model = job.model()
    optimizer = job.optimizer(model)
    loader = job.loader(job.dataset(), num_workers=1, persistent_workers=job.draw.random() < 0.5)
    job.planted()
    for _, batch in job.batches(loader):
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
