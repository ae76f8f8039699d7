"""Ranks work in pairs besides the data-parallel whole; from some step on one rank names the other pair's group in its
broadcast, to which it does not belong. Current versions of torch raise a ValueError there."""

from __future__ import annotations

import torch
import torch.distributed as dist

from evals import jobs


def share_scale(scale: torch.Tensor, source: int, group: dist.ProcessGroup) -> None:
    """The first of a group tells its scale."""
    dist.broadcast(scale, source, group=group)


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    culprit, onset = job.someone(), job.draw.randint(20, 80)
    pairs = [dist.new_group([first, first + 1]) for first in range(0, job.world_size, 2)]
    own = job.rank // 2
    model = job.model()
    optimizer = job.optimizer(model)
    for step, batch in job.batches(job.loader(job.dataset())):
        if step == onset:
            job.planted([culprit], where=[share_scale])
        pair = 1 - own if step >= onset and job.rank == culprit else own
        share_scale(torch.ones(16), 2 * own, pairs[pair])
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
