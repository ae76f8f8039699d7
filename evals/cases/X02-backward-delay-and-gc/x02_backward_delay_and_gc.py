"""A hook in the backward pass of one rank sleeps in every step, and every rank collects garbage at steps of its own."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch.distributed as dist
from torch import nn

from evals import jobs


class Inspector:
    """Looks at the gradient of a block."""

    def __init__(self) -> None:
        self.delay_s = 0.0

    def look(self, module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        """For `register_full_backward_hook`."""
        if self.delay_s:
            time.sleep(self.delay_s)


def fill(seconds: float) -> list[dict[str, Any]]:
    """Containers that a full collection needs so long for."""
    kept: list[dict[str, Any]] = []
    taken = 0.0
    while taken < seconds:
        kept += [{"n": [n]} for n in range(20_000)]
        taken = float("inf")
        for _ in range(2):
            begin = time.perf_counter()
            gc.collect()
            taken = min(taken, time.perf_counter() - begin)
    return kept


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    culprit = job.someone()
    period = job.draw.choice((6, 8, 10))
    offsets = job.draw.sample(range(period), job.world_size)
    inspector = Inspector()
    model = job.model()
    next(iter(model.module.blocks)).register_full_backward_hook(inspector.look)
    optimizer = job.optimizer(model)
    kept: list[dict[str, Any]] = []
    for step, batch in job.batches(job.loader(job.dataset())):
        if step == jobs.AFTER:
            inspector.delay_s = job.cost_s if job.rank == culprit else 0.0
            gc.freeze()
            gc.disable()
            # In its own steps each rank must be late by more than the other fault makes one of them.
            longest_s = job.cost_s * period / job.world_size + job.cost_s
            kept += fill(longest_s)
            job.planted([culprit], where=[Inspector.look], fault=0)
            job.planted(fault=1)
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step >= jobs.AFTER and step % period == offsets[job.rank]:
            gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
