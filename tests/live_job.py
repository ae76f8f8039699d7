"""A small data-parallel training for tests of `eroica run`; plain torch, nothing of eroica.

live_job.py STEPS [FAULT ONSET RANK]      FAULT: slow, stuck, dead, raises, exits, quits
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Waves(Dataset[Tensor]):
    """Reading one takes `delay_s`."""

    delay_s = 0.0

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Tensor:
        if self.delay_s:
            time.sleep(self.delay_s)
        return torch.full((32,), float(index % 7))


class Accelerator(torch.autograd.Function):
    """Stands in for a device, so that more ranks than cores do not take turns."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        time.sleep(0.008)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(0.012)
        return grad


class Net(nn.Module):
    """Two layers around the device."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = Accelerator.apply(self.first(inputs))  # type: ignore[no-untyped-call]
        return self.second(hidden)  # type: ignore[no-any-return]


def main() -> None:
    steps = int(sys.argv[1])
    fault, onset, culprit = (sys.argv[2], int(sys.argv[3]), int(sys.argv[4])) if len(sys.argv) > 2 else ("", -1, -1)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    waves = Waves()
    batches = iter(DataLoader(waves, batch_size=2, sampler=DistributedSampler(waves)))
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(steps):
        if step == onset and dist.get_rank() == culprit:
            if fault == "slow":
                waves.delay_s = 0.02
            elif fault == "stuck":
                time.sleep(600)
            elif fault == "dead":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault == "raises":
                raise RuntimeError("the shard is gone")
            elif fault == "exits":
                sys.exit(3)
        if step == onset and fault == "quits":  # all of them
            os._exit(0)
        batch = next(batches)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"trained {steps}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
