"""What the training scripts of the catalogue share: models of several shapes, a device to wait for, and the note of
what was planted where. Nothing of eroica, which must find the fault in a job that knows nothing of it.

A script runs once per rank, under torchrun, with --out DIR --seed N --effect E --shape NAME, draws its culprit from the
seed (the same on all ranks), starts healthy, and plants its fault at step `AFTER`, sized as a share of the step that it
has measured until then. What it planted stands in DIR/planted.json from that step on.

The device: `Device` sleeps for as long as an accelerator would compute. Without it four ranks would take turns on two
cores, and a rank that is late by some milliseconds would delay nobody.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import random
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from evals import namespaces

AFTER = 150
"""First faulty step: what lies before is the healthy level that a watcher learns."""
BATCH = 4
EPOCH_STEPS = 500
DEVICE_S = 0.02
"""What the device computes per step, a third of it in the forward pass."""


class Device(torch.autograd.Function):
    """Waits for `seconds`, a third of them in the forward pass, the rest in the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, seconds: float) -> Tensor:
        """The same tensor, later."""
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The same gradient, later."""
        time.sleep(ctx.seconds * 2 / 3)
        return grad, None


def on_device(inputs: Tensor, seconds: float) -> Tensor:
    """Computes nothing for a while, as the host sees it."""
    return Device.apply(inputs, seconds)  # type: ignore[no-any-return,no-untyped-call]


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are made up as they are read."""

    def __init__(self, shape: str, length: int) -> None:
        self.shape = shape
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(index)
        if self.shape == "transformer":
            tokens = torch.randint(0, 64, (17,), generator=draw)
            return tokens[:-1], tokens[1:]
        label = torch.randint(0, 10, (), generator=draw)
        size = (3, 16, 16) if self.shape == "convnet" else (64,)
        return torch.randn(size, generator=draw), label


class Perceptron(nn.Module):
    """A classifier of vectors; its blocks wait for the device in turn."""

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, 64) to (B, 10)."""
        for block in self.blocks:
            inputs = on_device(block(inputs), DEVICE_S / len(self.blocks))
        return self.head(inputs)  # type: ignore[no-any-return]


class ConvNet(nn.Module):
    """A classifier of small pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2))
            for i, o in ((3, 8), (8, 16))
        )
        self.head = nn.Linear(16 * 4 * 4, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, 3, 16, 16) to (B, 10)."""
        for block in self.blocks:
            inputs = on_device(block(inputs), DEVICE_S / len(self.blocks))
        return self.head(inputs.flatten(1))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """A language model of two layers."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, 64)

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, T) tokens to (B, 64, T) scores."""
        hidden = self.embedding(inputs)
        for block in self.blocks:
            hidden = on_device(block(hidden), DEVICE_S / len(self.blocks))
        return self.head(hidden).transpose(1, 2)  # type: ignore[no-any-return]


SHAPES: dict[str, Callable[[], nn.Module]] = {
    "perceptron": Perceptron,
    "convnet": ConvNet,
    "transformer": Transformer,
}


def optimizer_for(shape: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """What people train such a model with."""
    if shape == "perceptron":
        return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=shape == "transformer")


@dataclass
class Job:
    """One rank of a training."""

    out: Path
    seed: int
    effect: float
    shape: str
    steps: int
    rank: int
    world_size: int
    draw: random.Random
    """From the seed, the same on all ranks: the culprit and all else that varies from run to run."""
    seconds: list[float] = field(default_factory=list)
    """Of each step so far."""
    hosts: Sequence[str] = ()
    """Host of each rank; () = all are here."""
    onset: dict[str, int] | None = None
    faults: list[dict[str, Any]] = field(default_factory=list)

    def someone(self) -> int:
        """Draws a rank."""
        return self.draw.randrange(self.world_size)

    def dataset(self) -> Numbers:
        """Samples for EPOCH_STEPS steps."""
        return Numbers(self.shape, EPOCH_STEPS * BATCH * self.world_size)

    def loader(self, dataset: Dataset[Any], **options: Any) -> DataLoader[Any]:
        """Each rank's share of the samples, in batches of BATCH."""
        given: dict[str, Any] = {"batch_size": BATCH, "sampler": DistributedSampler(dataset)}
        given |= options
        return DataLoader(dataset, **given)

    def model(self, **options: Any) -> DistributedDataParallel:
        """The shape's model under DistributedDataParallel."""
        return DistributedDataParallel(SHAPES[self.shape](), **options)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """See `optimizer_for`."""
        return optimizer_for(self.shape, model.parameters())

    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        """Cross entropy of a batch."""
        return functional.cross_entropy(model(batch[0]), batch[1])

    def batches(self, loader: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """(step, batch), epoch after epoch, for `steps` steps; measures each step, from one batch to the next."""
        step, begin = 0, time.perf_counter()
        while step < self.steps:
            for batch in loader:
                yield step, batch
                step += 1
                begin, before = time.perf_counter(), begin
                self.seconds.append(begin - before)
                if step == self.steps:
                    break

    @property
    def healthy_s(self) -> float:
        """The median of the steps so far, the first ones left out; from `AFTER` on of those before it alone."""
        seen = self.seconds[min(len(self.seconds), AFTER) // 3 : AFTER] or [0.0]
        return statistics.median(seen)

    @property
    def cost_s(self) -> float:
        """What the fault is to cost per step."""
        return self.effect * self.healthy_s

    def planted(
        self,
        ranks: Sequence[int] = (),
        *,
        where: Sequence[Any] = (),
        hosts: Sequence[str] = (),
        links: Sequence[str] = (),
        fault: int = 0,
    ) -> None:
        """Say that fault number `fault` is now there: on whom, in which functions (or classes), which of `links` may be
        named ("" for none; () where it is not asked). All ranks may call it; the first one writes."""
        if self.rank != 0:
            return
        self.onset = self.onset or {
            "step": len(self.seconds),
            "monotonic_ns": time.monotonic_ns(),
            "wall_ns": time.time_ns(),
        }
        places = []
        for thing in where:
            lines, first = inspect.getsourcelines(thing)
            file = os.path.basename(inspect.getsourcefile(thing) or "")
            places.append({"file": file, "first": first, "last": first + len(lines) - 1})
        self.faults += [{}] * (fault + 1 - len(self.faults))
        self.faults[fault] = {
            "ranks": sorted(ranks),
            "hosts": sorted(hosts),
            "places": places,
            "links": sorted(links),
        }
        record = {
            "world_size": self.world_size,
            "hosts": [*self.hosts] or [socket.gethostname()] * self.world_size,
            "faults": self.faults,
            "onset": self.onset,
            "healthy_step_s": self.healthy_s,
            "cost_s": self.cost_s,
        }
        unfinished = self.out / "planted.json.part"
        unfinished.write_text(json.dumps(record) + "\n")
        unfinished.replace(self.out / "planted.json")


def arguments(text: str | None) -> argparse.ArgumentParser:
    """The options that every script takes."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to leave planted.json")
    parser.add_argument("--seed", type=int, default=0, help="draws the culprit")
    parser.add_argument("--effect", type=float, default=0.5, help="cost of the fault, as a share of the healthy step")
    parser.add_argument("--shape", choices=SHAPES, default="perceptron", help="what is trained")
    parser.add_argument("--steps", type=int, default=1500, help="steps in all")
    return parser


def begin(text: str | None) -> Job:
    """Reads the command line and joins the process group (gloo)."""
    options = arguments(text).parse_args()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(options.seed)
    return Job(
        options.out, options.seed, options.effect, options.shape, options.steps,
        dist.get_rank(), dist.get_world_size(), random.Random(options.seed),
        hosts=namespaces.hosts(),
    )  # fmt: skip
