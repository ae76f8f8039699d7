"""A healthy training that accumulates gradients without synchronising them, clips them and changes its rate."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist

from evals import jobs

jobs.DEVICE_S = 0.008


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    job.steps = 1400  # batches
    accumulate = job.draw.choice((2, 4))
    model = job.model(static_graph=False, gradient_as_bucket_view=True)
    optimizer = job.optimizer(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, job.steps // accumulate)
    job.planted()
    for step, batch in job.batches(job.loader(job.dataset())):
        is_last = step % accumulate == accumulate - 1
        with nullcontext() if is_last else model.no_sync():
            (job.loss(model, batch) / accumulate).backward()  # type: ignore[no-untyped-call]
        if is_last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
