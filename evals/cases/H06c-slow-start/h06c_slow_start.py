"""One rank makes ready what all need, for half a minute, while the others wait in the rendezvous: then all is well.

By the seed it computes, or it downloads from a server that gives little at a time.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
import zlib

import torch.distributed as dist

from evals import jobs

SECONDS = 35.0
STEPS = 200


def trickle(server: socket.socket) -> None:
    """Serve one client, slowly."""
    client, _ = server.accept()
    until = time.monotonic() + SECONDS
    with client:
        while time.monotonic() < until:
            client.sendall(b"sample")
            time.sleep(0.2)


def download() -> int:
    """Read from a slow server to its end."""
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=trickle, args=(server,), daemon=True).start()
    total = 0
    with socket.create_connection(server.getsockname()[:2]) as connection:
        while part := connection.recv(4096):
            total += len(part)
    return total


def prepare() -> int:
    """Compute a checksum for long, with pauses."""
    until, sum_ = time.monotonic() + SECONDS, 0
    while time.monotonic() < until:
        sum_ = zlib.crc32(bytes(100_000), sum_)
        time.sleep(0.005)
    return sum_


def main() -> None:
    """Train."""
    options = jobs.arguments(__doc__).parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    draw = random.Random(options.seed)
    job = jobs.Job(
        options.out, options.seed, options.effect, options.shape, STEPS, rank, world_size, draw
    )  # fmt: skip
    work = draw.choice((prepare, download))
    job.planted()
    if rank == 0:
        work()
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
