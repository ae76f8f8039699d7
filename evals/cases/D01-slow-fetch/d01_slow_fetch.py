"""One rank reads its samples slowly, in the training process itself: its dataset sleeps."""

from __future__ import annotations

import time

import torch.distributed as dist
from torch import Tensor

from evals import jobs


class Samples(jobs.Numbers):
    """Samples on storage that may be slow."""

    delay_s = 0.0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.delay_s:
            time.sleep(self.delay_s)
        return super().__getitem__(index)


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    culprit = job.someone()
    samples = Samples(job.shape, jobs.EPOCH_STEPS * jobs.BATCH * job.world_size)
    model = job.model()
    optimizer = job.optimizer(model)
    for step, batch in job.batches(job.loader(samples)):
        if step == jobs.AFTER:
            samples.delay_s = job.cost_s / jobs.BATCH if job.rank == culprit else 0.0
            job.planted([culprit], where=[Samples.__getitem__])
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
