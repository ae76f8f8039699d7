"""Short epochs, and a loader whose worker processes are started anew for each of them and take long to get ready."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from evals import jobs

STEP_S = 0.03
"""What a step of these models takes, about."""


class Ready:
    """What a worker does before its first sample: opens archives, reads indexes."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, worker: int) -> None:
        """In a worker."""
        time.sleep(self.seconds)


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    steps_in_epoch = job.draw.randrange(15, 31)
    ready = Ready(job.effect * STEP_S * steps_in_epoch)
    workers: dict[str, Any] = {"num_workers": job.draw.choice([1, 2]), "worker_init_fn": ready}
    samples = jobs.Numbers(job.shape, steps_in_epoch * jobs.BATCH * job.world_size)
    model = job.model()
    optimizer = job.optimizer(model)
    for step, batch in job.batches(job.loader(samples, **workers)):
        if step == 0:
            job.planted(range(job.world_size), where=[Ready])
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
