"""Every rank collects its garbage at the same step, as trainings do that have learnt of rotating collections."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch.distributed as dist

from evals import jobs

STEPS = 900


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    job.steps = STEPS
    period = job.draw.choice((25, 40, 50))
    kept: list[dict[str, Any]] = []
    model = job.model()
    optimizer = job.optimizer(model)
    gc.freeze()  # what the libraries keep would take long to look through
    gc.disable()
    for step, batch in job.batches(job.loader(job.dataset())):
        if step == jobs.AFTER:
            taken = 0.0
            while taken < job.cost_s * period:
                kept += [{"tokens": [n]} for n in range(10_000)]
                begin = time.perf_counter()
                gc.collect()
                taken = time.perf_counter() - begin
            job.planted()
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % period == 0:
            gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
