"""Two pairs of hosts in different racks are put on one uplink, and the two other pairs have uplinks of their own.

Each rank has a mirror in the other rack, with which it reduces its half of the gradients; the first rank of a host has
another far host for it than the second.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from evals import hybrid, jobs, namespaces

NEAR, FAR = ("left1", "left2"), ("right1", "right2")
HOSTS = (*NEAR, *FAR)
MIRRORS = ((0, 4), (1, 7), (2, 6), (3, 5))
"""left1-right1, left1-right2, left2-right2, left2-right1."""


def main() -> None:
    """Train."""
    if not namespaces.is_rank():
        namespaces.launch([NEAR, FAR])
    job = jobs.begin(__doc__)
    straight = [(NEAR[0], FAR[0]), (NEAR[1], FAR[1])]
    crossed = [(NEAR[0], FAR[1]), (NEAR[1], FAR[0])]
    colliding = job.draw.choice([straight, crossed])
    model = hybrid.model_of(job.shape)
    optimizer = job.optimizer(model)
    mesh = hybrid.mesh()
    groups = [dist.new_group(pair, group_desc="mirror") for pair in MIRRORS]
    mirror = next(group for group, pair in zip(groups, MIRRORS, strict=True) if job.rank in pair)
    for step, batch in job.batches(job.loader(job.dataset())):
        if step == hybrid.AFTER:
            if job.rank == 0:
                # Two pairs send the whole gradient each, one way and the other.
                rate = hybrid.rate_for(2 * hybrid.num_bytes(model), job.cost_s)
                for one, other in colliding:
                    namespaces.ask(namespaces.Limit(at="way", host=one, to=other, bytes_per_s=rate))
            for fault, pair in enumerate(colliding):
                ends = [rank for rank, host in enumerate(job.hosts) if host in pair]
                job.planted(ends, hosts=pair, fault=fault)
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        flat = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        dist.all_reduce(flat, group=mirror)
        dist.all_reduce(flat[: len(flat) // 8], group=mesh.inside)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
