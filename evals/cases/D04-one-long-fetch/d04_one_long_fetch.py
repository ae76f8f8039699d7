"""One rank waits for one sample far longer than a step takes, once."""

from __future__ import annotations

import time

import torch.distributed as dist
from torch import Tensor

from evals import jobs


class Samples(jobs.Numbers):
    """Samples of which one cannot be drawn at the first try."""

    retry_s = 0.0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.retry_s:
            time.sleep(self.retry_s)
            self.retry_s = 0.0
        return super().__getitem__(index)


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    unlucky = job.someone()
    spikes = {job.draw.randrange(160, 200): job.draw.uniform(20, 80)}
    samples = Samples(job.shape, jobs.EPOCH_STEPS * jobs.BATCH * job.world_size)
    model = job.model()
    optimizer = job.optimizer(model)
    job.steps = 480
    for step, batch in job.batches(job.loader(samples)):
        if step in spikes and job.rank == unlucky:
            samples.retry_s = spikes[step] * job.healthy_s
        if step == jobs.AFTER:
            job.planted([unlucky], where=[Samples.__getitem__])
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
