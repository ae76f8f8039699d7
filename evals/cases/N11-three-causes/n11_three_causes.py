"""One rank uses its host's slow second card, one has a setting left over that makes its matrices slow, both from the
start; then the card of another host gets slow.

Hybrid sharding over three hosts with three ranks each. There are so many products of matrices in a step that what the
setting adds to it is the effect; what the second card does is half of it.
"""

from __future__ import annotations

import random
import time

import torch
import torch.distributed as dist

from evals import hybrid, jobs, namespaces

HOSTS = ("k1", "k2", "k3")
STEP_S = 0.15
"""What a step takes where nothing is wrong, about."""
MOST_PRODUCTS = 200


def product_s(weights: torch.Tensor, inputs: torch.Tensor) -> float:
    """Seconds of a core that one product takes on this rank."""
    least = float("inf")
    for _ in range(9):
        begin = time.thread_time()
        torch.tanh(weights @ inputs)
        least = min(least, time.thread_time() - begin)
    return least


def main() -> None:
    """Train."""
    options = jobs.arguments(__doc__).parse_args()
    draw = random.Random(options.seed)
    # A host each, and places in it that differ: the rings of the two ranks are not the same.
    hosts = draw.sample(range(3), 3)
    places = draw.sample(range(3), 2)
    astray, leftover = 3 * hosts[0] + places[0], 3 * hosts[2] + places[1]
    if not namespaces.is_rank():
        namespaces.launch(
            [HOSTS],
            ranks_per_host=3,
            cards=("eth0", "eth1"),
            environment={astray: {"GLOO_SOCKET_IFNAME": "eth1"}, leftover: {"MKL_CBWR": "COMPATIBLE"}},
        )
    job = jobs.begin(__doc__)
    model = hybrid.model_of(job.shape)
    optimizer = job.optimizer(model)
    shards = hybrid.Shards(model, hybrid.mesh())
    weights, inputs = torch.randn(256, 256), torch.randn(256, 256)
    quick = torch.tensor(product_s(weights, inputs))
    slow = quick.clone()
    dist.all_reduce(quick, dist.ReduceOp.MIN)
    dist.all_reduce(slow, dist.ReduceOp.MAX)
    num_products = min(max(round(job.effect * STEP_S / max(float(slow - quick), 1e-5)), 1), MOST_PRODUCTS)
    slow_host = HOSTS[hosts[1]]
    for step, batch in job.batches(job.loader(job.dataset())):
        if step == 0 and job.rank == 0:
            # One of the host's three ranks sends over it while the others send: half does not hide the other card.
            rate = hybrid.rate_for(shards.bytes_per_card / 3, job.effect * STEP_S / 2)
            namespaces.ask(namespaces.Limit(at="host", host=HOSTS[hosts[0]], card="eth1", bytes_per_s=rate))
        if step == hybrid.AFTER:
            if job.rank == 0:
                rate = hybrid.rate_for(shards.bytes_per_card, job.cost_s)
                namespaces.ask(namespaces.Limit(at="host", host=slow_host, bytes_per_s=rate))
            job.planted([astray])
            job.planted([r for r, host in enumerate(job.hosts) if host == slow_host], hosts=[slow_host], fault=1)
            job.planted([leftover], fault=2)
        optimizer.zero_grad()
        for _ in range(num_products):
            inputs = torch.tanh(weights @ inputs)
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        shards.reduce()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
