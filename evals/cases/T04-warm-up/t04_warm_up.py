"""Part of the model is compiled for each length of its input: in each of the first steps, and once more much later."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from evals import jobs

COMPILES_S = 0.4
WIDTH = 32


def slow_compiler(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
    """Takes its time, as a real one does, and runs the graph as it is."""
    time.sleep(COMPILES_S)
    return graph.forward


class Encoder(nn.Module):
    """A model of sequences, with convolutions or without; what it does with each position is compiled."""

    def __init__(self, convolves: bool) -> None:
        super().__init__()
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1) if convolves else nn.Identity()
        body = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.body = torch.compile(body, backend=slow_compiler, dynamic=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, T, WIDTH) to (B, 10)."""
        hidden = self.mix(inputs.transpose(1, 2)).transpose(1, 2)
        hidden = jobs.on_device(self.body(hidden), jobs.DEVICE_S)
        return self.head(hidden.mean(1))  # type: ignore[no-any-return]


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    job.steps = 620
    torch._dynamo.config.recompile_limit = 256
    lengths = list(range(8, 8 + job.draw.randint(18, 28)))
    late = job.draw.randint(350, 450)
    model = DistributedDataParallel(Encoder(job.shape == "convnet"))
    optimizer = jobs.optimizer_for(job.shape, model.parameters())
    job.planted()
    for step in range(job.steps):
        length = lengths[step] if step < len(lengths) else job.draw.choice(lengths)
        inputs = torch.randn(jobs.BATCH, 200 if step == late else length, WIDTH)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
