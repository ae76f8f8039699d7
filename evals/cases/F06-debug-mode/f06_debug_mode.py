"""The environment of the job still asks for details. `effect` sets how many collectives a step has."""

from __future__ import annotations

import torch
import torch.distributed as dist

from evals import jobs


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    model = job.model(bucket_cap_mb=0.01)
    optimizer = job.optimizer(model)
    for step, batch in job.batches(job.loader(job.dataset())):
        if step == 0:
            job.planted(range(job.world_size))
        loss = job.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for _ in range(round(job.effect * 6)):
            dist.all_reduce(torch.ones(8))
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
