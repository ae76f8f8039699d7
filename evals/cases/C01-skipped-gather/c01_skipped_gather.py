"""An evaluation every some steps gathers scores, but only where there are any: one rank's share has none that time.

It goes on to the barrier behind the evaluation, while the others sit in the gather.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from evals import jobs


def collect(scores: Tensor, world_size: int) -> Tensor:
    """The scores of all ranks."""
    if not len(scores):
        return scores
    gathered = [torch.zeros_like(scores) for _ in range(world_size)]
    dist.all_gather(gathered, scores)
    return torch.cat(gathered)


def evaluate(share: list[float], world_size: int) -> float:
    """Mean score over all ranks."""
    scores = collect(torch.tensor(share), world_size)
    dist.barrier()
    return float(scores.mean()) if len(scores) else 0.0


def main() -> None:
    """Train, and evaluate now and then."""
    job = jobs.begin(__doc__)
    culprit, every, onset = job.someone(), job.draw.randint(10, 30), job.draw.randint(40, 80)
    model = job.model()
    optimizer = job.optimizer(model)
    for step, batch in job.batches(job.loader(job.dataset())):
        optimizer.zero_grad()
        loss = job.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % every == every - 1:
            is_empty = step >= onset and job.rank == culprit
            if step >= onset:
                job.planted([culprit], where=[collect, evaluate])
            evaluate([] if is_empty else [loss.item()] * 8, job.world_size)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
