"""Other jobs take part of what the switch can send to one host, then to another. Data parallelism over all hosts."""

from __future__ import annotations

from itertools import combinations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from evals import hybrid, jobs, namespaces

HOSTS = ("m101", "m102", "m103")


def main() -> None:
    """Train."""
    if not namespaces.is_rank():
        namespaces.launch([HOSTS])
    job = jobs.begin(__doc__)
    order = job.draw.sample(HOSTS, len(HOSTS))
    every_s = job.draw.uniform(6.0, 12.0)
    model = hybrid.model_of(job.shape)
    around = 2 * (job.world_size - 1) / job.world_size * hybrid.num_bytes(model)
    model = DistributedDataParallel(model, bucket_cap_mb=0.6)
    optimizer = job.optimizer(model)
    for step, batch in job.batches(job.loader(job.dataset())):
        if step == hybrid.AFTER:
            if job.rank == 0:
                rate = hybrid.rate_for(around, job.cost_s)
                namespaces.ask(namespaces.Wandering(hosts=order, bytes_per_s=rate, every_s=every_s))
            # Whose port it is changes while the window lasts, and in a ring one host alone sends to it.
            pairs = [({one}, {other}) for one, other in combinations(HOSTS, 2)]
            sides = [*pairs, *((set(HOSTS) - {host}, {host}) for host in HOSTS)]
            named = [link for one, other in sides for link in namespaces.links(one, other)]
            job.planted(range(job.world_size), hosts=HOSTS, links=["", *named])
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
