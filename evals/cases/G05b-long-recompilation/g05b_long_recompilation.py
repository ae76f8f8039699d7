"""One rank meets a size that it has no code for and compiles for a long time, while the others wait in backward."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from evals import jobs

SECONDS = 60.0


class Autotuner:
    """A backend that tries many variants of a graph out."""

    def __init__(self) -> None:
        self.seconds = 0.05

    def tune(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Code for a graph."""
        until = time.perf_counter() + self.seconds
        while time.perf_counter() < until:
            graph.forward(*inputs)
            time.sleep(0.01)
        return graph.forward


class Step:
    """The loss of a batch, compiled."""

    def __init__(self, tuner: Autotuner) -> None:
        self.criterion = torch.compile(torch.nn.CrossEntropyLoss(), backend=tuner.tune, dynamic=False)

    def loss(self, model: torch.nn.Module, batch: list[Tensor], rows: int) -> Tensor:
        """Of the first rows of a batch."""
        return self.criterion(model(batch[0])[:rows], batch[1][:rows])  # type: ignore[no-any-return]


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    culprit = job.someone()
    when = job.draw.randrange(60, 160)
    tuner = Autotuner()
    step_ = Step(tuner)
    model = DistributedDataParallel(jobs.SHAPES[job.shape]())
    optimizer = job.optimizer(model)
    for step, batch in job.batches(job.loader(job.dataset())):
        rows = jobs.BATCH
        if step == when:
            tuner.seconds = SECONDS
            rows -= job.rank == culprit
            job.planted([culprit], where=[Step.loss, Autotuner.tune])
        optimizer.zero_grad()
        step_.loss(model, batch, rows).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
