"""One rank asks a tracker for a run before it joins the others, and the tracker never answers.

By the seed the tracker takes the connection and says nothing, or does not even take it.
"""

from __future__ import annotations

import os
import random
import socket
import urllib.request

import torch.distributed as dist

from evals import jobs


def dead_server(is_full: bool) -> tuple[socket.socket, list[socket.socket]]:
    """A server whose program has stopped: what the kernel does for it still works, until its queue is full."""
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen(0 if is_full else 8)
    waiting = []
    if is_full:
        for _ in range(4):
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(server.getsockname())
            waiting.append(client)
    return server, waiting


def start_run(address: tuple[str, int]) -> bytes:
    """Ask the tracker for a run."""
    with urllib.request.urlopen(f"http://{address[0]}:{address[1]}/api/runs") as answer:
        return bytes(answer.read())


def main() -> None:
    """Begin to train."""
    options = jobs.arguments(__doc__).parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    draw = random.Random(options.seed)
    job = jobs.Job(
        options.out, options.seed, options.effect, options.shape, options.steps, rank, world_size, draw
    )  # fmt: skip
    culprit, is_full = draw.choice((0, 0, world_size - 1)), draw.random() < 0.5
    job.planted([culprit], where=[start_run])
    if rank == culprit:
        server, waiting = dead_server(is_full)
        start_run(server.getsockname())
        del waiting
    dist.init_process_group("gloo")
    model = job.model()
    optimizer = job.optimizer(model)
    for _, batch in job.batches(job.loader(job.dataset())):
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
