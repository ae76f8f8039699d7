"""The switch port of one host has no link for some 300 ms, again and again. Plain data parallelism over all hosts."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from evals import hybrid, jobs, namespaces

HOSTS = ("rack7-n1", "rack7-n2", "rack7-n3")


def main() -> None:
    """Train."""
    if not namespaces.is_rank():
        namespaces.launch([HOSTS])
    job = jobs.begin(__doc__)
    culprit = job.draw.choice(HOSTS)
    down_s = job.draw.uniform(0.25, 0.35)
    model = DistributedDataParallel(hybrid.model_of(job.shape), bucket_cap_mb=0.5)
    optimizer = job.optimizer(model)
    for step, batch in job.batches(job.loader(job.dataset())):
        if step == hybrid.AFTER:
            if job.rank == 0:
                # What is lost is sent again after the outage, a moment later.
                every_s = max((down_s + 0.1) / job.effect, 0.8)
                namespaces.ask(namespaces.Outage(host=culprit, seconds=down_s, every_s=every_s))
            job.planted([rank for rank, host in enumerate(job.hosts) if host == culprit], hosts=[culprit])
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
