"""The switch throws away what comes faster than it can pass on, at each port: small messages pass, large ones lose
packets and back off. No host counts a drop.

Hybrid sharding with many small reductions beside the gradients: the norm of each of them, the loss, a count of tokens.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from evals import hybrid, jobs, namespaces

HOSTS = ("hx-01", "hx-02", "hx-03")
QUEUE_BYTES = 12_000


def main() -> None:
    """Train."""
    if not namespaces.is_rank():
        namespaces.launch([HOSTS])
    job = jobs.begin(__doc__)
    model = hybrid.model_of(job.shape)
    optimizer = job.optimizer(model)
    mesh = hybrid.mesh()
    shards = hybrid.Shards(model, mesh)
    tokens = torch.ones(8)
    for step, batch in job.batches(job.loader(job.dataset())):
        if step == hybrid.AFTER:
            if job.rank == 0:
                rate = hybrid.rate_for(shards.bytes_per_card, job.cost_s)
                for host in HOSTS:
                    namespaces.ask(namespaces.Limit(at="port", host=host, bytes_per_s=rate, queue_bytes=QUEUE_BYTES))
            job.planted(range(job.world_size), hosts=HOSTS, links=[""])  # all of them are alike
        optimizer.zero_grad()
        dist.all_reduce(tokens, op=dist.ReduceOp.MAX, group=mesh.across)
        loss = job.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        shards.reduce()
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
        dist.all_reduce(norm, group=mesh.across)
        optimizer.step()
        dist.all_reduce(loss.detach(), group=mesh.across)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
