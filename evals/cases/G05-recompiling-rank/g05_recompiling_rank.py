"""A part of the model is compiled for fixed sizes; from some step on one rank gets a new length every few steps.

The compiler works in the interpreter, for as long as the fault is to cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from evals import jobs

WIDTH = 32
LENGTH = 16


class Compiler:
    """A backend that takes its time for each graph."""

    def __init__(self) -> None:
        self.seconds = 0.05

    def lower(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Code for a graph."""
        until = time.perf_counter() + self.seconds
        while time.perf_counter() < until:
            time.sleep(0.002)
        return graph.forward


class Encoder(nn.Module):
    """The compiled part."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.layers = (
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
            if shape == "perceptron"
            else nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, T, WIDTH) to the same."""
        return self.layers(hidden) + hidden  # type: ignore[no-any-return]


class Model(nn.Module):
    """A tagger of sequences of any length."""

    def __init__(self, shape: str, compiler: Compiler) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.encoder = torch.compile(Encoder(shape), backend=compiler.lower, dynamic=False)
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) to (B, 64, T)."""
        hidden = self.encode(self.embedding(tokens))
        return self.head(jobs.on_device(hidden, jobs.DEVICE_S)).transpose(1, 2)  # type: ignore[no-any-return]

    def encode(self, hidden: Tensor) -> Tensor:
        """Through the compiled part."""
        return self.encoder(hidden)  # type: ignore[no-any-return]


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    culprit = job.someone()
    period = job.draw.choice((8, 10, 12))
    # As people do who see the compiler give up; each new length then costs a compilation.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 4096
    compiler = Compiler()
    model = DistributedDataParallel(Model(job.shape, compiler))
    optimizer = job.optimizer(model)
    new = LENGTH
    for step, _ in job.batches(job.loader(job.dataset())):
        length = LENGTH
        if step == jobs.AFTER:
            compiler.seconds = job.cost_s * period
            job.planted([culprit], where=[Model.encode, Compiler.lower])
        if step >= jobs.AFTER and job.rank == culprit and step % period == 0:
            new += 1
            length = new
        tokens = torch.randint(0, 64, (jobs.BATCH, length))
        optimizer.zero_grad()
        functional.cross_entropy(model(tokens), tokens).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
