"""A script was debugged with anomaly detection, and it is still on. The loss is made by so many small operators
that what the mode adds to them is the effect."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from evals import jobs


def prepare_debugging() -> None:
    """What somebody forgot to take out."""
    torch.autograd.set_detect_anomaly(True)


STEP_S = 0.045
"""What a step of these models takes, about."""
ROUNDS, MANY = 5, 200


def smoothed(loss: Tensor, num: int) -> Tensor:
    """The same loss, by many small operators."""
    for _ in range(num):
        loss = loss * 1.0 + 0.0
    return loss


def cost_s() -> float:
    """What the mode adds to one round of `smoothed` and its gradient, here and now; it stays off."""
    least = []
    for is_on in (False, True):
        torch.set_anomaly_enabled(is_on, True)
        took = []
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            smoothed(torch.ones((), requires_grad=True), MANY).backward()  # type: ignore[no-untyped-call]
            took.append(time.perf_counter() - begin)
        least.append(min(took))
    torch.set_anomaly_enabled(False, True)
    return max(least[1] - least[0], 1e-4) / MANY


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    each = torch.tensor(cost_s())
    dist.all_reduce(each, dist.ReduceOp.MIN)
    rounds = max(round(job.effect * STEP_S / float(each)), 1)
    prepare_debugging()
    model = job.model()
    optimizer = job.optimizer(model)
    for step, batch in job.batches(job.loader(job.dataset())):
        if step == 0:
            job.planted(range(job.world_size), where=[prepare_debugging])
        optimizer.zero_grad()
        smoothed(job.loss(model, batch), rounds).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
