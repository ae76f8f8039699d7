"""A training for the tests of captures: plain, on gloo or alone, with faults by its arguments. Imports eroica first."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import eroica  # noqa: F401  (arms the probe)
from eroica.commands import Command, Frames, Verb
from eroica.probe.recorder import RECORDER
from eroica.ring import post

WIDTH = 64
BATCH = 4
DEVICE_SECONDS = 0.02


class Signals(Dataset[Tensor]):
    """Signals; reading one takes `delay_s` longer."""

    def __init__(self, delay_s: float) -> None:
        self.waves = torch.linspace(0, 50, 400 * WIDTH).sin().reshape(400, WIDTH)
        self.delay_s = delay_s

    def __len__(self) -> int:
        return len(self.waves)

    def __getitem__(self, index: int) -> Tensor:
        if self.delay_s:
            time.sleep(self.delay_s)
        return self.waves[index]


class Accelerator(torch.autograd.Function):
    """Stands in for an accelerator that the host waits for."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        time.sleep(DEVICE_SECONDS / 3)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(DEVICE_SECONDS * 2 / 3)
        return grad


class Autoencoder(nn.Module):
    """A few residual blocks; `delay_s` goes into a backward hook of the second."""

    def __init__(self, delay_s: float) -> None:
        super().__init__()
        self.delay_s = delay_s
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3))
        self.blocks[1].register_full_backward_hook(self.log_gradient)

    def log_gradient(self, module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        if self.delay_s:
            time.sleep(self.delay_s)

    def forward(self, signals: Tensor) -> Tensor:
        hidden = signals
        for index, block in enumerate(self.blocks):
            hidden = hidden + block(hidden)
            if index == 1:
                hidden = Accelerator.apply(hidden)  # type: ignore[no-untyped-call]
        return hidden


def batches(loader: DataLoader[Tensor]) -> Iterator[Tensor]:
    """Batches without an end."""
    while True:
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rendezvous")
    parser.add_argument("--fault", choices=("healthy", "slow_input", "backward_delay"), default="healthy")
    parser.add_argument("--culprit", type=int, default=0)
    parser.add_argument("--delay-ms", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--window", type=int, default=0, help="steps of a window that begins at step 8")
    parser.add_argument("--frames", type=int, default=1)
    parser.add_argument("--end", choices=("return", "raise", "kill", "exit"), default="return", help="how it ends")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    mine = options.delay_ms / 1e3 if rank == options.culprit else 0.0
    network: nn.Module = Autoencoder(mine if options.fault == "backward_delay" else 0.0)
    if options.rendezvous:
        size = int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=f"file://{options.rendezvous}", rank=rank, world_size=size)
        network = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-2, momentum=0.9, fused=True)
    loader = DataLoader(Signals(mine / BATCH if options.fault == "slow_input" else 0.0), batch_size=BATCH)
    source = batches(loader)
    for index in range(options.steps):
        if options.window and index in (5, 6):
            ring = RECORDER.ring
            assert ring is not None
            verb = Verb.PREPARE if index == 5 else Verb.COMMIT
            frames = Frames(options.frames)
            command = Command(window=1, verb=verb, start=8, num_steps=options.window, frames=frames)
            post(ring.path, command.word())
        signals = next(source)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(network(signals), signals)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    parameters = b"".join(value.detach().numpy().tobytes() for value in network.parameters())
    if options.end == "raise":
        raise ValueError("the end")
    if options.end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if options.end == "exit":
        sys.exit(3)
    print(json.dumps({"rank": rank, "digest": hashlib.sha256(parameters).hexdigest()[:16]}))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
