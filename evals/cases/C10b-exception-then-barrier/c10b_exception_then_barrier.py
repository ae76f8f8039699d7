"""One rank's reader fails; the clean-up, a `finally` or a context manager, saves what there is and meets the others in
a barrier to which they never come."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from evals import jobs


def read(index: dict[int, int], step: int) -> int:
    """Where the samples of a step lie."""
    if step not in index:
        raise FileNotFoundError(f"no shard for step {step}")
    return index[step]


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Leaves only when all ranks do."""
    try:
        yield
    finally:
        dist.barrier()


def train(job: jobs.Job, index: dict[int, int], culprit: int, onset: int) -> None:
    """All steps."""
    model = job.model()
    optimizer = job.optimizer(model)
    for step, batch in job.batches(job.loader(job.dataset())):
        if step == onset:
            job.planted([culprit], where=[read])
        read(index, step)
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    culprit, onset = job.someone(), job.draw.randint(20, 80)
    index = {step: step for step in range(job.steps)}
    if job.rank == culprit:
        del index[onset]
    if job.draw.random() < 0.5:
        with together():
            train(job, index, culprit, onset)
    else:
        try:
            train(job, index, culprit, onset)
        finally:
            dist.barrier()
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
