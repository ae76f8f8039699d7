"""A sampler that stopped one rank by a signal was killed before it let the rank go on."""

from __future__ import annotations

import os
import signal

import torch.distributed as dist

from evals import jobs


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    culprit = job.someone()
    when = job.draw.randrange(60, 160)
    pids: list[int] = [0] * job.world_size
    dist.all_gather_object(pids, os.getpid())
    model = job.model()
    optimizer = job.optimizer(model)
    for step, batch in job.batches(job.loader(job.dataset())):
        if step == when:
            job.planted([culprit])
            dist.barrier()
            if job.rank == (culprit + 1) % job.world_size:
                os.kill(pids[culprit], signal.SIGSTOP)
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
