"""The same with an all-reduce: a rank that is no member only gets a warning, and goes on to the next call of all ranks,
where it waits for the partner that it has left behind in the pair."""

from __future__ import annotations

import torch
import torch.distributed as dist

from evals import jobs


def average_in_pair(values: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Mean over a pair."""
    dist.all_reduce(values, group=group)
    values /= 2


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    culprit, onset = job.someone(), job.draw.randint(20, 80)
    pairs = [dist.new_group([first, first + 1]) for first in range(0, job.world_size, 2)]
    own = job.rank // 2
    model = job.model()
    optimizer = job.optimizer(model)
    for step, batch in job.batches(job.loader(job.dataset())):
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        if step == onset:
            job.planted([culprit], where=[average_in_pair, main])
        average_in_pair(torch.ones(16), pairs[1 - own if step >= onset and job.rank == culprit else own])
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
