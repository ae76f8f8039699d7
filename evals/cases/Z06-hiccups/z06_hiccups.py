"""A healthy training in which now and then one step of one rank takes many times as long, each time another one."""

from __future__ import annotations

import time

import torch.distributed as dist

from evals import jobs


def stumble(seconds: float) -> None:
    """Something of the system's that comes once."""
    time.sleep(seconds)


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    job.steps = 900
    # Distances that do not repeat, so that nothing recurs.
    first = job.draw.randrange(260, 300)
    second = first + job.draw.randrange(210, 260)
    third = second + job.draw.randrange(120, 170)
    hiccups = {step: (job.someone(), job.draw.uniform(5.0, 40.0)) for step in (first, second, third)}
    model = job.model()
    optimizer = job.optimizer(model)
    job.planted()
    for step, batch in job.batches(job.loader(job.dataset())):
        optimizer.zero_grad()
        loss = job.loss(model, batch)
        if step in hiccups and hiccups[step][0] == job.rank:
            stumble(hiccups[step][1] * job.healthy_s)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
