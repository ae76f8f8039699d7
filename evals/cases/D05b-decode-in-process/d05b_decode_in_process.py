"""All ranks come to samples that take long to decode, in the training process; half by computing, half by waiting."""

from __future__ import annotations

import os
import time
import zlib

import torch.distributed as dist
from torch import Tensor

from evals import jobs

CLIP = zlib.compress(os.urandom(1 << 14) * 4, 6)


class Clips(jobs.Numbers):
    """Samples behind a decoder."""

    decode_s = 0.0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.decode_s:
            time.sleep(self.decode_s / 2)
            until = time.thread_time() + self.decode_s / 2
            while time.thread_time() < until:
                zlib.decompress(CLIP)
        return super().__getitem__(index)


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    samples = Clips(job.shape, jobs.EPOCH_STEPS * jobs.BATCH * job.world_size)
    model = job.model()
    optimizer = job.optimizer(model)
    for step, batch in job.batches(job.loader(samples)):
        if step == jobs.AFTER:
            samples.decode_s = job.cost_s / jobs.BATCH
            job.planted(range(job.world_size), where=[Clips.__getitem__])
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
