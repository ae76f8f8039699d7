"""Each sample is unpacked from a compressed clip of many frames, in worker processes that share too few cores.

The clips are long from the first step on, as data sets are.
"""

from __future__ import annotations

import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import Tensor

from evals import jobs

STEP_S = 0.03
"""What a step takes without the decoding, about."""


class Clips(jobs.Numbers):
    """Samples that are one frame each, of a clip that is decoded as a whole."""

    def __init__(self, shape: str, length: int) -> None:
        super().__init__(shape, length)
        self.clip = zlib.compress(os.urandom(1 << 15) * 8, 6)
        self.num_decoded = 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        for _ in range(self.num_decoded):
            zlib.decompress(self.clip)
        return super().__getitem__(index)

    def decode_s(self) -> float:
        """Of a core for one clip."""
        begin_s = time.process_time()
        for _ in range(20):
            zlib.decompress(self.clip)
        return (time.process_time() - begin_s) / 20


def give_way(worker: int) -> None:
    """Else training would wait for cores rather than for batches: twelve processes share two of them."""
    os.nice(10)


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    cores = len(os.sched_getaffinity(0))
    # So much computing that the cores need a step and `effect` of one more for a batch of each rank.
    batch_s = (1 + job.effect) * STEP_S * cores / job.world_size
    samples = Clips(job.shape, jobs.EPOCH_STEPS * jobs.BATCH * job.world_size)
    samples.num_decoded = max(round(batch_s / jobs.BATCH / samples.decode_s()), 1)
    model = job.model()
    optimizer = job.optimizer(model)
    torch.set_num_threads(1)
    for step, batch in job.batches(job.loader(samples, num_workers=2, worker_init_fn=give_way)):
        if step == 0:
            job.planted(range(job.world_size), where=[Clips.__getitem__])
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
