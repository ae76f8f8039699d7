"""Several batches to an update, all but the last under no_sync; epochs end within a group, which is then shorter."""

from __future__ import annotations

from contextlib import nullcontext

import torch.distributed as dist

from evals import jobs

jobs.DEVICE_S = 0.008


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    job.steps = 1500  # batches
    accumulate = job.draw.choice((3, 4, 5))
    # The recipe has 18 batches for groups of 4.
    batches = 4 * accumulate + job.draw.randrange(1, accumulate)
    samples = jobs.Numbers(job.shape, batches * jobs.BATCH * job.world_size)
    model = job.model()
    optimizer = job.optimizer(model)
    job.planted()
    for step, batch in job.batches(job.loader(samples)):
        place = step % batches
        is_last = place % accumulate == accumulate - 1 or place == batches - 1
        with nullcontext() if is_last else model.no_sync():
            (job.loss(model, batch) / accumulate).backward()  # type: ignore[no-untyped-call]
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
