"""One rank is slow for just so many steps as it takes to notice, and as fast as ever when the window begins."""

from __future__ import annotations

import time

import torch.distributed as dist

from evals import jobs

BEGINS = 300
"""When nothing else goes on: the first window is captured and read."""
LASTS = 13
"""Steps. Ten in a row are noticed, and no window of whole iterations can begin at once."""


def passing_trouble(seconds: float) -> None:
    """Is not there any more when one looks."""
    time.sleep(seconds)


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    job.steps = 750
    culprit = job.someone()
    model = job.model()
    optimizer = job.optimizer(model)
    delay_s = 0.0
    for step, batch in job.batches(job.loader(job.dataset())):
        if step == BEGINS:
            delay_s = job.cost_s
            job.planted([culprit], where=[passing_trouble])
        optimizer.zero_grad()
        loss = job.loss(model, batch)
        if BEGINS <= step < BEGINS + LASTS and job.rank == culprit:
            passing_trouble(delay_s)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
