"""A start script has set OMP_NUM_THREADS for one process per host; four share it. The model computes on the CPU."""

from __future__ import annotations

import os
import random
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from evals import jobs

RANKS = 4


def start() -> None:
    """Become the launcher of this script, with so many threads as the arguments ask for."""
    options = jobs.arguments(__doc__).parse_args()
    num_threads = round(8 * options.effect) + random.Random(options.seed).randrange(3)
    environment = os.environ | {"OMP_NUM_THREADS": str(num_threads)}
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", *sys.argv]
    os.execve(sys.executable, words, environment)


class Mixer(nn.Module):
    """Many operators of a size that torch cuts into threads."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(B, width) to (B, 10)."""
        for layer in self.layers:
            inputs = inputs + functional.gelu(layer(inputs))
        return self.head(inputs)  # type: ignore[no-any-return]


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    width, depth = (256, 6) if job.shape == "perceptron" else (384, 3)
    model = DistributedDataParallel(Mixer(width, depth))
    optimizer = jobs.optimizer_for(job.shape, model.parameters())
    loader = job.loader(jobs.Numbers("perceptron", jobs.EPOCH_STEPS * jobs.BATCH * job.world_size))
    for step, batch in job.batches(loader):
        if step == 0:
            job.planted(range(job.world_size))
        inputs = batch[0].repeat(32, width // 64)
        loss = functional.cross_entropy(model(inputs), batch[1].repeat(32))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        start()
