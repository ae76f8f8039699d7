"""A small data-parallel training of four ranks or more on CPUs, with one fault to order.

What `eroica demo` runs, and a plain program that can be run by hand:

    torchrun --standalone --nproc-per-node 4 train.py --traces DIR --fault slow_input --culprit 2 --delay-ms 60

It knows nothing of eroica: an ordinary dataset, loader, model and optimizer under DistributedDataParallel, profiled on
every rank with torch.profiler. One thing is unusual: `Accelerator` stands in for the accelerator that the machine may
lack. The host waits while it "computes", as it would for a real one. Without it, more ranks than cores would take
turns on the cores, and a rank that is late by a few milliseconds would delay nobody.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FAULTS = ("healthy", "slow_input", "backward_delay")
BATCH = 4
WIDTH = 64
NUM_BLOCKS = 3
DEVICE_SECONDS = 0.02
"""What the accelerator takes per step, a third of it in the forward pass."""
WARMUP_STEPS = 4
CALIBRATION_STEPS = 10


class Signals(Dataset[Tensor]):
    """Signals to compress; reading one takes `delay_s` longer on a rank with slow storage."""

    def __init__(self, length: int) -> None:
        self.waves = torch.linspace(0, 50, length * WIDTH).sin().reshape(length, WIDTH)
        self.delay_s = 0.0

    def __len__(self) -> int:
        return len(self.waves)

    def __getitem__(self, index: int) -> Tensor:
        if self.delay_s:
            time.sleep(self.delay_s)
        return self.waves[index]


class GradientLog:
    """A backward hook that notes the size of a block's gradient; writing it down takes `delay_s` on a bad rank."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.sizes: list[int] = []

    def log_gradient(self, module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        self.sizes.append(grad_output[0].numel())
        if self.delay_s:
            time.sleep(self.delay_s)


class Accelerator(torch.autograd.Function):
    """Stands in for an accelerator: the host waits for it in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        time.sleep(DEVICE_SECONDS / 3)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(DEVICE_SECONDS * 2 / 3)
        return grad


class Autoencoder(nn.Module):
    """A few residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(NUM_BLOCKS))

    def forward(self, signals: Tensor) -> Tensor:
        hidden = signals
        for index, block in enumerate(self.blocks):
            hidden = hidden + block(hidden)
            if index == NUM_BLOCKS // 2:
                hidden = Accelerator.apply(hidden)  # type: ignore[no-untyped-call]
        return hidden


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Any],
    num_steps: int,
    profiler: profile | None = None,
) -> list[float]:
    """Train for `num_steps` steps; returns the seconds that each took."""
    seconds = []
    for _ in range(num_steps):
        start = time.perf_counter()
        signals = next(batches)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(signals), signals)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if profiler is not None:
            profiler.step()
        seconds.append(time.perf_counter() - start)
    return seconds


def profiled(num_steps: int, export_to: Path | None) -> profile:
    """A profiler for `num_steps` steps after a warm-up; exports a Chrome trace unless `export_to` is None."""

    def export(profiler: profile) -> None:
        dist.barrier()  # no rank writes its trace while another still trains
        if export_to is not None:
            profiler.export_chrome_trace(str(export_to))

    return profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=WARMUP_STEPS, active=num_steps, repeat=1),
        with_stack=True,
        on_trace_ready=export,
    )


def main() -> None:
    """Train, plant the fault, and leave DIR/rank<R>.json on every rank and DIR/../planted.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR", help="where each rank writes its trace")
    parser.add_argument("--fault", choices=FAULTS, default="healthy")
    parser.add_argument("--culprit", type=int, default=0, metavar="RANK")
    parser.add_argument("--delay-ms", type=float, default=60.0, help="what the fault costs per step")
    parser.add_argument("--effect", type=float, metavar="SHARE", help="instead: as a share of the healthy step")
    parser.add_argument("--steps", type=int, default=20, help="profiled steps")
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)

    gradients = GradientLog()
    network = Autoencoder()
    network.blocks[1].register_full_backward_hook(gradients.log_gradient)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, fused=True)

    num_steps = 2 * WARMUP_STEPS + CALIBRATION_STEPS + options.steps
    dataset = Signals(num_steps * BATCH * dist.get_world_size())
    batches = iter(DataLoader(dataset, batch_size=BATCH, sampler=DistributedSampler(dataset)))

    # The healthy step is measured under a profiler too, since the profiler is part of the step that gets diagnosed.
    with profiled(CALIBRATION_STEPS, None) as profiler:
        seconds = train(model, optimizer, batches, WARMUP_STEPS + CALIBRATION_STEPS, profiler)
    step_s = torch.tensor(statistics.median(seconds[WARMUP_STEPS:-1]))
    dist.broadcast(step_s, src=0)
    delay_s = options.delay_ms / 1e3 if options.effect is None else options.effect * step_s.item()

    planted: Any = None
    if options.fault == "slow_input":
        planted = Signals.__getitem__
        dataset.delay_s = delay_s / BATCH if rank == options.culprit else 0.0
    elif options.fault == "backward_delay":
        planted = GradientLog.log_gradient
        gradients.delay_s = delay_s if rank == options.culprit else 0.0

    with profiled(options.steps, options.traces / f"rank{rank}.json") as profiler:
        train(model, optimizer, batches, WARMUP_STEPS + options.steps, profiler)

    if rank == 0:
        record: dict[str, Any] = {"fault": options.fault, "healthy_step_s": step_s.item()}
        if planted is not None:
            lines, first = inspect.getsourcelines(planted)
            record |= {"culprit": options.culprit, "delay_s": delay_s, "function": planted.__name__}
            record |= {"file": os.path.basename(__file__), "lines": [first, first + len(lines) - 1]}
        (options.traces.parent / "planted.json").write_text(json.dumps(record) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
