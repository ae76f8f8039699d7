"""L-BFGS evaluates its closure, a forward and a backward pass, some times per step; from some step on one rank does it
once more. After each step the loss is averaged over the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from evals import jobs


class Trainer:
    """A model and its L-BFGS."""

    def __init__(self, job: jobs.Job, evaluations: int) -> None:
        self.job = job
        self.model = job.model()
        self.optimizer = torch.optim.LBFGS(
            self.model.parameters(), lr=1e-2, max_iter=evaluations, history_size=4, tolerance_grad=0, tolerance_change=0
        )
        self.batch: list[Tensor] = []

    def closure(self) -> Tensor:
        """Loss and gradients at the current parameters."""
        self.optimizer.zero_grad()
        loss = self.job.loss(self.model, self.batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def step(self, batch: list[Tensor]) -> float:
        """One update; the loss over all ranks."""
        self.batch = batch
        loss = torch.as_tensor(self.optimizer.step(self.closure)).detach()  # type: ignore[no-untyped-call]
        dist.all_reduce(loss)
        return loss.item() / self.job.world_size


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    culprit, evaluations, onset = job.someone(), job.draw.choice((2, 3, 4)), job.draw.randint(15, 40)
    trainer = Trainer(job, evaluations)
    for step, batch in job.batches(job.loader(job.dataset())):
        if step == onset:
            job.planted([culprit], where=[Trainer.closure, Trainer.step])
            if job.rank == culprit:
                for limit in ("max_iter", "max_eval"):  # whichever comes first ends a step
                    trainer.optimizer.param_groups[0][limit] += 1
        trainer.step(batch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
