"""From one step on, all hosts reach each other only as fast as a slower transport would: every card is limited.

Hybrid sharding: gradients are scattered inside of each host, reduced across hosts, gathered inside again.
"""

from __future__ import annotations

import torch.distributed as dist

from evals import hybrid, jobs, namespaces

HOSTS = ("ash", "beech", "cedar")


def main() -> None:
    """Train."""
    if not namespaces.is_rank():
        namespaces.launch([HOSTS])
    job = jobs.begin(__doc__)
    model = hybrid.model_of(job.shape)
    optimizer = job.optimizer(model)
    shards = hybrid.Shards(model, hybrid.mesh(), num_buckets=1 + job.draw.randrange(2))
    for step, batch in job.batches(job.loader(job.dataset())):
        if step == hybrid.AFTER:
            if job.rank == 0:
                rate = hybrid.rate_for(shards.bytes_per_card, job.cost_s)
                for host in HOSTS:
                    namespaces.ask(namespaces.Limit(at="host", host=host, bytes_per_s=rate))
            job.planted(range(job.world_size), hosts=HOSTS)
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        shards.reduce()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
