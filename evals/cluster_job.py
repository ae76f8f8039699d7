"""The training of `evals.cluster`: four gloo ranks on two hosts, of which one reads slowly from some step on.

    python cluster_job.py HOSTS OUT STEPS ONSET RANK

HOSTS is JSON: for each host the process that holds it, its address, its number of ranks and more of their
environment. One import of
torch serves all ranks, which are forked from here, each into its host. Every rank leaves OUT/rank-N.json with a digest
of its weights and the seconds that its steps took; the launcher exits as the first rank that fails does, and ends the
others then. Plain torch, nothing of eroica: the job must not know of it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from evals.namespaces import enter

READ_S = 0.02
"""More for each of the two samples of a batch, where reading is slow."""


class Waves(Dataset[Tensor]):
    """Reading one takes `delay_s`."""

    delay_s = 0.0

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Tensor:
        if self.delay_s:
            time.sleep(self.delay_s)
        return torch.full((32,), float(index % 7))


class Device(torch.autograd.Function):
    """Stands in for an accelerator, so that more ranks than cores do not take turns."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        """The same tensor, later."""
        time.sleep(0.008)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The same gradient, later."""
        time.sleep(0.012)
        return grad


class Net(nn.Module):
    """Two layers around the device."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, inputs: Tensor) -> Tensor:
        """For DistributedDataParallel."""
        hidden: Tensor = Device.apply(self.first(inputs))  # type: ignore[no-untyped-call]
        return self.second(hidden)  # type: ignore[no-any-return]


def train(out: Path, steps: int, onset: int, culprit: int) -> None:
    """One rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    waves = Waves()
    batches = iter(DataLoader(waves, batch_size=2, sampler=DistributedSampler(waves)))
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    began = time.monotonic()
    for step in range(steps):
        if step == onset and rank == culprit:
            waves.delay_s = READ_S
        batch = next(batches)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    took_s = time.monotonic() - began
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    (out / f"rank-{rank}.json").write_text(json.dumps({"weights": digest.hexdigest(), "seconds": took_s}))
    dist.destroy_process_group()


def main() -> int:
    """Fork the ranks, and wait for them."""
    hosts, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    steps, onset, culprit = (int(word) for word in sys.argv[3:])
    ranks: dict[int, int] = {}
    places = [(host, local) for host in hosts for local in range(host["ranks"])]
    for rank, (host, local) in enumerate(places):
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(local), WORLD_SIZE=str(len(places)))
            os.environ.update(LOCAL_WORLD_SIZE=str(host["ranks"]), MASTER_ADDR=hosts[0]["address"])
            os.environ.update(host["environment"])
            if "EVALS_SKEW" in os.environ:  # the clock of another host than the launcher's
                ctypes.CDLL(os.environ["LD_PRELOAD"]).evals_skew(os.environ["EVALS_SKEW"].encode())
            enter(host["holder"])
            train(out, steps, onset, culprit)
            return 0
        ranks[pid] = rank
    (out / "ranks.json").write_text(json.dumps({rank: pid for pid, rank in ranks.items()}))
    while ranks:
        # As torchrun does: it looks ten times a second, so that a rank that has died is there for a moment.
        time.sleep(0.1)
        for rank in list(ranks):
            pid, ended = os.waitpid(rank, os.WNOHANG)
            if pid:
                del ranks[pid]
                if ended:
                    for other in ranks:
                        os.kill(other, signal.SIGTERM)
                        os.waitpid(other, 0)
                    return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
