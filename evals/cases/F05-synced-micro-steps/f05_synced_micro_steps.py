"""Gradient accumulation without `no_sync`: every micro-step reduces all gradients, and only the last one needs to."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from evals import jobs


class Wide(nn.Module):
    """Few operators and many parameters."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Linear(64, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, 64) to (B, 10)."""
        hidden = self.stem(inputs)
        for layer in self.layers:
            hidden = jobs.on_device(functional.relu(layer(hidden)), 0.012 / len(self.layers))
        return self.head(hidden)  # type: ignore[no-any-return]


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    depth = 2 if job.shape == "perceptron" else 4
    width = round(700 * (job.effect * 2 / depth) ** 0.5)
    model = DistributedDataParallel(Wide(width, depth), gradient_as_bucket_view=True)
    optimizer = jobs.optimizer_for(job.shape, model.parameters())
    accumulated = job.draw.randrange(3, 7)
    samples = jobs.Numbers("perceptron", jobs.EPOCH_STEPS * jobs.BATCH * job.world_size)
    torch.set_num_threads(1)
    for step, batch in job.batches(job.loader(samples)):
        if step == 0:
            job.planted(range(job.world_size))
        loss = functional.cross_entropy(model(batch[0]), batch[1]) / accumulated
        loss.backward()  # type: ignore[no-untyped-call]
        if step % accumulated == accumulated - 1:
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
