"""The card of one host sends a few hundred kilobytes per second for some 300 ms, again and again.

Hybrid sharding over two hosts with three ranks each, and a metric that is reduced over all ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from evals import hybrid, jobs, namespaces

HOSTS = ("gpu-17", "gpu-18")


def main() -> None:
    """Train."""
    if not namespaces.is_rank():
        namespaces.launch([HOSTS], ranks_per_host=3)
    job = jobs.begin(__doc__)
    culprit = job.draw.choice(HOSTS)
    stall_s = job.draw.uniform(0.25, 0.35)
    model = hybrid.model_of(job.shape)
    optimizer = job.optimizer(model)
    shards = hybrid.Shards(model, hybrid.mesh())
    for step, batch in job.batches(job.loader(job.dataset())):
        if step == hybrid.AFTER:
            if job.rank == 0:
                every_s = max(stall_s / job.effect, 0.6)
                namespaces.ask(namespaces.Stutter(host=culprit, seconds=stall_s, every_s=every_s, bytes_per_s=200e3))
            job.planted([rank for rank, host in enumerate(job.hosts) if host == culprit], hosts=[culprit])
        optimizer.zero_grad()
        loss = job.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        shards.reduce()
        optimizer.step()
        dist.all_reduce(torch.stack([loss.detach(), torch.ones(())]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
