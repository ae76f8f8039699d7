"""Training over several hosts for the catalogue's network cases: models whose gradients are worth a link's while, and
gradients that are summed inside of each host first, then across hosts, as hybrid sharding does. Nothing of eroica.

A script is both: without a rank it is the launcher (`namespaces.launch`), with one it trains.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from evals import jobs, namespaces

DEVICE_S = 0.06
"""What the device computes per step: as long as several ranks need for their turns on few cores."""
AFTER = 120
"""First faulty step."""


class WidePerceptron(nn.Module):
    """(B, 64) to (B, 10) with 0.28 million weights, 1.1 MB of gradients."""

    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(64, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores."""
        hidden = self.stem(inputs)
        for block in self.blocks:
            hidden = jobs.on_device(block(hidden), DEVICE_S / len(self.blocks))
        return self.head(hidden)  # type: ignore[no-any-return]


class DeepConvNet(nn.Module):
    """(B, 3, 16, 16) to (B, 10); most of its 0.37 million weights are in the last blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(i, o, 3, padding=1, stride=2), nn.BatchNorm2d(o), nn.ReLU())
            for i, o in ((3, 32), (32, 128), (128, 256))
        )
        self.head = nn.Linear(256 * 4, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores."""
        for block in self.blocks:
            inputs = jobs.on_device(block(inputs), DEVICE_S / len(self.blocks))
        return self.head(inputs.flatten(1))  # type: ignore[no-any-return]


class WideTransformer(nn.Module):
    """(B, T) tokens to (B, 64, T) scores; 0.34 million weights in many small tensors."""

    def __init__(self, width: int = 96, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, 64)

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores."""
        hidden = self.embedding(inputs)
        for block in self.blocks:
            hidden = jobs.on_device(block(hidden), DEVICE_S / len(self.blocks))
        return self.head(hidden).transpose(1, 2)  # type: ignore[no-any-return]


_MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": WidePerceptron,
    "convnet": DeepConvNet,
    "transformer": WideTransformer,
}


def model_of(shape: str) -> nn.Module:
    """What `--shape` names, large enough for a network; the same weights on all ranks."""
    torch.manual_seed(0)
    return _MODELS[shape]()


def num_bytes(model: nn.Module) -> int:
    """Of all gradients."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


@dataclass(frozen=True)
class Mesh:
    """The two dimensions of the job."""

    per_host: int
    num_hosts: int
    inside: dist.ProcessGroup
    """Ranks of this host."""
    across: dist.ProcessGroup
    """One rank of each host: those with this rank's place in its host."""


def mesh() -> Mesh:
    """By the launcher's numbers."""
    per_host = int(os.environ["LOCAL_WORLD_SIZE"])
    num_hosts = dist.get_world_size() // per_host
    made = init_device_mesh("cpu", (num_hosts, per_host), mesh_dim_names=("across", "inside"))
    return Mesh(per_host, num_hosts, made.get_group("inside"), made.get_group("across"))


class Shards:
    """Gradients of a model, summed in two stages: scattered inside of the host, each shard reduced across hosts,
    gathered again."""

    def __init__(self, model: nn.Module, over: Mesh, num_buckets: int = 1) -> None:
        self._over = over
        self._buckets: list[list[nn.Parameter]] = [[] for _ in range(num_buckets)]
        sizes = [0] * num_buckets
        for parameter in reversed(list(model.parameters())):
            smallest = sizes.index(min(sizes))
            self._buckets[smallest].append(parameter)
            sizes[smallest] += parameter.numel()

    @property
    def bytes_per_card(self) -> float:
        """What a host sends to others, per step: of each of its shards in a ring."""
        elements = sum(parameter.numel() for bucket in self._buckets for parameter in bucket)
        return 2 * (self._over.num_hosts - 1) / self._over.num_hosts * elements * 4

    def reduce(self) -> None:
        """Mean over all ranks, in place."""
        for bucket in self._buckets:
            grads = [parameter.grad for parameter in bucket if parameter.grad is not None]
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            over = self._over
            length = -(-flat.numel() // over.per_host)
            padded = torch.zeros(length * over.per_host)
            padded[: flat.numel()] = flat
            shard = torch.empty(length)
            dist.reduce_scatter_tensor(shard, padded, group=over.inside)
            dist.all_reduce(shard, group=over.across)
            dist.all_gather_into_tensor(padded, shard / dist.get_world_size(), group=over.inside)
            start = 0
            for grad in grads:
                grad.copy_(padded[start : start + grad.numel()].view_as(grad))
                start += grad.numel()


def rate_for(num_bytes_per_step: float, cost_s: float) -> float:
    """Bytes per second of a limit that makes so many bytes per step take so much longer. What a bucket lets pass at
    once, having filled up meanwhile, costs nothing; so does what the network would take anyway, next to nothing."""
    return max(num_bytes_per_step - namespaces.BURST_BYTES, num_bytes_per_step / 2) / cost_s
