"""The first steps wait for storage, less and less, as a cache fills; then the job runs at its pace."""

from __future__ import annotations

import time

import torch.distributed as dist
from torch import Tensor

from evals import jobs

COLD_STEPS = 20


class Samples(jobs.Numbers):
    """Samples on storage that is cold at first."""

    wait_s = 0.0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.wait_s:
            time.sleep(self.wait_s)
        return super().__getitem__(index)


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    samples = Samples(job.shape, jobs.EPOCH_STEPS * jobs.BATCH * job.world_size)
    cold_s = job.draw.uniform(0.02, 0.06)
    job.steps = 450
    model = job.model()
    optimizer = job.optimizer(model)
    samples.wait_s = cold_s
    for step, batch in job.batches(job.loader(samples)):
        if step == 0:
            job.planted()
        samples.wait_s = max(cold_s * (1 - step / COLD_STEPS), 0.0)
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
