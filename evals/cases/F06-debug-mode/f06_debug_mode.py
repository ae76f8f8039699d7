"""The environment of the job still asks for details. `effect` sets how many collectives a step has.

Gradients are averaged by hand, as scripts without DistributedDataParallel do: that one crashes in this mode on gloo,
with the torch that the recipe was tried with.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from evals import jobs


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    model = jobs.SHAPES[job.shape]()
    optimizer = job.optimizer(model)
    for step, batch in job.batches(job.loader(job.dataset())):
        if step == 0:
            job.planted(range(job.world_size))
        loss = job.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient /= job.world_size
        for _ in range(round(job.effect * 6)):
            dist.all_reduce(torch.ones(8))
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
