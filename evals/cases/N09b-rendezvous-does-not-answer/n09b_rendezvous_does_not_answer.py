"""All ranks but one meet at the launcher's store. The one was given another address, a port that some proxy has open:
the connection comes about, and then nothing."""

from __future__ import annotations

import os
import random
import socket

import torch
import torch.distributed as dist

from evals import jobs


def main() -> None:
    """Train, if it comes to that."""
    options = jobs.arguments(__doc__).parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    draw = random.Random(options.seed)
    culprit = draw.randrange(size)
    jobs.Job(options.out, options.seed, options.effect, options.shape, options.steps, rank, size, draw).planted(
        [culprit]
    )
    if rank == culprit:
        proxy = socket.create_server((f"127.0.0.{draw.randint(2, 9)}", 0))
        address, port = proxy.getsockname()
        os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    job = jobs.begin(__doc__)
    model = job.model()
    optimizer = job.optimizer(model)
    for _, batch in job.batches(job.loader(job.dataset())):
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
