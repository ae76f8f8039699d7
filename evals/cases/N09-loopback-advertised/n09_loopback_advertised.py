"""Four ranks in network namespaces on one bridge; one of them binds its sockets to the loopback interface, so that the
others find nobody, or somebody else, at the address that it tells them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys

import torch
import torch.distributed as dist

from evals import jobs

PORT = 29511
SUBNET = "192.168.79"
"""Above 127: of two ranks that one with the higher address calls the other in gloo, and a call goes through from
anywhere."""


def network(size: int, tag: str) -> None:
    """A bridge, and a namespace per rank with an address on it."""
    bridge = f"br{tag}"
    commands = [f"ip link add {bridge} type bridge", f"ip addr add {SUBNET}.254/24 dev {bridge}"]
    commands.append(f"ip link set {bridge} up")
    for rank in range(size):
        name, outer = f"n{tag}{rank}", f"v{tag}{rank}"
        commands += [
            f"ip netns add {name}",
            f"ip link add {outer} type veth peer name eth0 netns {name}",
            f"ip link set {outer} master {bridge} up",
            f"ip -n {name} addr add {SUBNET}.{rank + 1}/24 dev eth0",
            f"ip -n {name} link set eth0 up",
            f"ip -n {name} link set lo up",
        ]
    for command in commands:
        subprocess.run(command.split(), check=True)


def remove(size: int, tag: str) -> None:
    """Take it down again."""
    for rank in range(size):
        subprocess.run(["ip", "netns", "del", f"n{tag}{rank}"], check=False)
    subprocess.run(["ip", "link", "del", f"br{tag}"], check=False)


def launch(size: int) -> int:
    """All ranks, until the first of them has gone; its exit status."""
    options = jobs.arguments(__doc__).parse_args()
    draw = random.Random(options.seed)
    culprit, tag = draw.randrange(size), f"x{os.getpid() % 10000}"
    job = jobs.Job(
        options.out, options.seed, options.effect, options.shape, options.steps, 0, size, draw
    )  # fmt: skip
    ranks: list[subprocess.Popen[bytes]] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # who ends it leaves no network behind
    try:
        network(size, tag)
        job.planted([culprit])
        for rank in range(size):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": "0",
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": f"{SUBNET}.1",
                "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": "lo" if rank == culprit else "eth0",
            }
            command = ["ip", "netns", "exec", f"n{tag}{rank}", sys.executable, *sys.argv]
            ranks.append(subprocess.Popen(command, env=environment))
        return max(process.wait() for process in ranks)
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.wait()
        remove(size, tag)


def train() -> None:
    """One rank."""
    job = jobs.begin(__doc__)
    model = job.model()
    optimizer = job.optimizer(model)
    for _, batch in job.batches(job.loader(job.dataset())):
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        torch.set_num_threads(1)
        train()
    else:
        raise SystemExit(launch(4))
