"""Samples lie in files that no cache holds at first: the first epoch reads them from slow storage, later ones not."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from evals import jobs

STEP_S = 0.03
"""What a step takes without the reading, about."""
FIRST_EPOCH = 320
NUM_FILES = 64
FILE_BYTES = 1 << 17


class Files(jobs.Numbers):
    """Samples in files."""

    def __init__(self, shape: str, length: int, folder: Path) -> None:
        super().__init__(shape, length)
        self.folder = folder
        self.cold_s = 0.0
        """What storage takes for one file that no cache holds."""
        folder.mkdir(parents=True)
        for number in range(NUM_FILES):
            (folder / f"{number}.bin").write_bytes(os.urandom(FILE_BYTES))
        os.sync()

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        file = os.open(self.folder / f"{index % NUM_FILES}.bin", os.O_RDONLY)
        if self.cold_s:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        os.read(file, FILE_BYTES)
        os.close(file)
        time.sleep(max(self.cold_s - (time.perf_counter() - began), 0.0))
        return super().__getitem__(index)


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    folder = job.out / f"samples{job.rank}"
    samples = Files(job.shape, FIRST_EPOCH * jobs.BATCH * job.world_size, folder)
    samples.cold_s = job.effect * STEP_S / jobs.BATCH
    model = job.model()
    optimizer = job.optimizer(model)
    torch.set_num_threads(1)
    for step, batch in job.batches(job.loader(samples)):
        if step == 0:
            job.planted(range(job.world_size), where=[Files.__getitem__])
        if step == FIRST_EPOCH:
            samples.cold_s = 0.0
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
