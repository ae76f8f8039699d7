"""A script was debugged with anomaly detection, and it is still on. The larger the effect, the more small operators."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from evals import jobs


def prepare_debugging() -> None:
    """What somebody forgot to take out."""
    torch.autograd.set_detect_anomaly(True)


def smoothed(loss: Tensor, num: int) -> Tensor:
    """The same loss, by many small operators."""
    for _ in range(num):
        loss = loss * 1.0 + 0.0
    return loss


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    prepare_debugging()
    model = job.model()
    optimizer = job.optimizer(model)
    for step, batch in job.batches(job.loader(job.dataset())):
        if step == 0:
            job.planted(range(job.world_size), where=[prepare_debugging])
        optimizer.zero_grad()
        smoothed(job.loss(model, batch), round(100 * job.effect)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
