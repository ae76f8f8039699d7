"""A loss that was once not a number makes the script run each later step with anomaly detection. Plain loop, SGD."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evals import jobs


def smoothed(loss: Tensor, num: int) -> Tensor:
    """The same loss, by many small operators."""
    for _ in range(num):
        loss = loss * 1.0 + 0.0
    return loss


def careful_step(loss: Tensor, model: nn.Module, optimizer: torch.optim.Optimizer, num: int) -> None:
    """Backward under guard."""
    with torch.autograd.detect_anomaly(check_nan=True):
        smoothed(loss * 1.0, num).backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    model = job.model()
    optimizer = job.optimizer(model)
    num = round(150 * job.effect)
    for step, batch in job.batches(job.loader(job.dataset())):
        optimizer.zero_grad()
        if step < jobs.AFTER:
            smoothed(job.loss(model, batch), num).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            continue
        if step == jobs.AFTER:
            job.planted(range(job.world_size), where=[careful_step])
        careful_step(job.loss(model, batch), model, optimizer, num)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
