"""Two hosts in one rack, a third in another; the link between the racks becomes slow, with little to buffer.

Experts are shared by the two hosts of the first rack, whose group is as quick as ever; the rest of the gradients goes
around all three hosts.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from evals import hybrid, jobs, namespaces

RACKS = (("u1", "u2"), ("w1",))
BURST_BYTES = 16_384


def main() -> None:
    """Train."""
    if not namespaces.is_rank():
        namespaces.launch(RACKS)
    job = jobs.begin(__doc__)
    model = hybrid.model_of(job.shape)
    optimizer = job.optimizer(model)
    shards = hybrid.Shards(model, hybrid.mesh())
    first = [rank for rank, host in enumerate(job.hosts) if host in RACKS[0]]
    rack = dist.new_group(first, group_desc="experts")
    experts = torch.ones(60_000)
    for step, batch in job.batches(job.loader(job.dataset())):
        if step == hybrid.AFTER:
            if job.rank == 0:
                rate = shards.bytes_per_card / job.cost_s
                namespaces.ask(namespaces.Limit(at="trunk", bytes_per_s=rate, burst_bytes=BURST_BYTES))
            both = [host for rack in RACKS for host in rack]
            job.planted(range(job.world_size), hosts=both, links=namespaces.links(*RACKS))
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        if job.rank in first:
            dist.all_reduce(experts, op=dist.ReduceOp.MAX, group=rack)
        shards.reduce()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
