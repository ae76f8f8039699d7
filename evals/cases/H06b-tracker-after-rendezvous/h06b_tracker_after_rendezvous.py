"""The process group is there, and before the first step one rank registers with a service that never answers."""

from __future__ import annotations

import socket

import torch.distributed as dist

from evals import jobs


class Registry:
    """A client of a service by its own small protocol."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.connection = socket.create_connection(address)

    def register(self, name: str) -> str:
        """The number of the run, as the service gives it."""
        self.connection.sendall(f"register {name}\n".encode())
        answer = b""
        while not answer.endswith(b"\n"):
            answer += self.connection.recv(4096)
        return answer.decode()


def main() -> None:
    """Begin to train."""
    job = jobs.begin(__doc__)
    culprit = job.draw.choice((0, 0, job.world_size - 1))
    job.planted([culprit], where=[Registry.register])
    if job.rank == culprit:
        server = socket.create_server(("127.0.0.1", 0))
        Registry(server.getsockname()[:2]).register("run")
    model = job.model()  # its parameters are checked and sent to all
    optimizer = job.optimizer(model)
    for _, batch in job.batches(job.loader(job.dataset())):
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
