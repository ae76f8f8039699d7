"""L-BFGS, whose step evaluates the model as often as is drawn for it, the same on each rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from evals import jobs

jobs.DEVICE_S = 0.004


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    job.steps = 220
    most = job.draw.choice((8, 14, 20))
    model = job.model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, history_size=3, tolerance_grad=0.0, tolerance_change=0.0)
    job.planted()
    for _, batch in job.batches(job.loader(job.dataset())):

        def closure(batch: list[Tensor] = batch) -> float:
            optimizer.zero_grad()
            loss = job.loss(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            return float(loss)

        # L-BFGS on so small a problem would take the same number each time.
        optimizer.param_groups[0]["max_iter"] = job.draw.randint(1, most)
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
