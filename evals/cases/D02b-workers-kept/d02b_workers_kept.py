"""Short epochs; the loader keeps its worker processes from one to the next. Nothing is wrong."""

from __future__ import annotations

import time

import torch.distributed as dist

from evals import jobs


def ready(worker: int) -> None:
    """What a worker does once."""
    time.sleep(0.5)


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    steps_in_epoch = job.draw.randrange(15, 41)
    samples = jobs.Numbers(job.shape, steps_in_epoch * jobs.BATCH * job.world_size)
    loader = job.loader(samples, num_workers=1, worker_init_fn=ready, persistent_workers=True)
    model = job.model()
    optimizer = job.optimizer(model)
    job.steps = 600
    for step, batch in job.batches(loader):
        if step == 0:
            job.planted()
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
