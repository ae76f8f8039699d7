"""Shards of unequal length, used as they should be: ranks that are done take part in the collectives of the rest."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader

from evals import jobs


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    usual, more = job.draw.randint(60, 80), [job.draw.choice((0, 1, 2, 4)) for _ in range(job.world_size)]
    shard = jobs.Numbers(job.shape, (usual + more[job.rank]) * jobs.BATCH)
    loader = DataLoader(shard, batch_size=jobs.BATCH)
    model = job.model()
    optimizer = job.optimizer(model)
    job.planted()
    for _ in range(7):
        with Join([model]):
            for batch in loader:
                optimizer.zero_grad()
                job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
