"""A layer of experts, one per rank: each gets the tokens that are routed to it, by an uneven all-to-all, and works as
long as it has tokens. Healthy, all get as many; then one expert is hot, another one every few steps.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from evals import jobs

WIDTH = 32
NUM_CHUNKS = 8
"""Pieces of work of an expert, if all get as many tokens."""
CHUNK = 16
"""Tokens in one."""
CHUNK_S = jobs.DEVICE_S / NUM_CHUNKS
TOKENS = NUM_CHUNKS * CHUNK
"""On each rank."""


class Products(torch.autograd.Function):
    """Waits as `jobs.Device` does, in a place of its own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, seconds: float) -> Tensor:
        """The same tensor, later."""
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The same gradient, later."""
        time.sleep(ctx.seconds * 2 / 3)
        return grad, None


class Exchange(torch.autograd.Function):
    """Rows to the ranks that want them, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Rows for this rank."""
        ctx.sizes = sent, received
        return exchanged(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Gradients of the rows that this rank sent."""
        sent, received = ctx.sizes
        return exchanged(grad, received, sent), None, None


def exchanged(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    """The rows that the others sent to this rank."""
    found = rows.new_empty((sum(received), rows.shape[1]))
    dist.all_to_all_single(found, rows.contiguous(), received, sent)
    return found


class Experts(nn.Module):
    """The expert of this rank, and the way to the others."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, tokens: Tensor, shares: list[int]) -> Tensor:
        """`shares`: tokens of this rank for each expert, those for the first one first."""
        counts = torch.tensor(shares)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        received = theirs.tolist()
        rows = Exchange.apply(tokens, shares, received)  # type: ignore[no-untyped-call]
        done = self.compute(rows) if len(rows) else rows
        return Exchange.apply(done, received, shares)  # type: ignore[no-untyped-call,no-any-return]

    def compute(self, rows: Tensor) -> Tensor:
        """Piece by piece, as grouped matrix products do."""
        done = []
        for part in torch.split(rows, CHUNK):
            done.append(Products.apply(self.expert(part), CHUNK_S * len(part) / CHUNK))  # type: ignore[no-untyped-call]
        return torch.cat(done)


class Mixture(nn.Module):
    """A small language model with one such layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.experts = Experts()
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, tokens: Tensor, shares: list[int]) -> Tensor:
        """(T,) tokens to (T, 64) scores."""
        hidden = self.embedding(tokens)
        return self.head(hidden + self.experts(hidden, shares))  # type: ignore[no-any-return]


class Texts(torch.utils.data.Dataset[Tensor]):
    """Tokens of one step."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(0, 64, (TOKENS + 1,), generator=torch.Generator().manual_seed(index))


def routed(world_size: int, hot: int, extra: int) -> list[int]:
    """Tokens for each expert, `extra` of them more for the hot one than its share."""
    usual = TOKENS // world_size
    taken = extra // (world_size - 1)
    shares = [usual - taken] * world_size
    shares[hot] = TOKENS - (usual - taken) * (world_size - 1)
    return shares


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    period = job.draw.choice((10, 12, 15))
    order = job.draw.sample(range(job.world_size), job.world_size)
    network = Mixture()
    expert = [f"experts.{name}" for name, _ in network.experts.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(network, expert)  # type: ignore[no-untyped-call]
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    extra = 0
    for step, batch in job.batches(job.loader(Texts(), batch_size=None)):
        if step == jobs.AFTER:
            # All ranks send the hot one so many more that its work takes longer by the cost.
            extra = round(job.cost_s / CHUNK_S * CHUNK / job.world_size)
            extra = min(extra, TOKENS - TOKENS // job.world_size - job.world_size)
            sizes = [extra]
            dist.broadcast_object_list(sizes)  # those that measured else must not differ
            extra = sizes[0]
            job.planted(where=[Experts.compute, Products])
        shares = routed(job.world_size, order[step // period % job.world_size], extra)
        optimizer.zero_grad()
        scores = model(batch[:-1], shares)
        functional.cross_entropy(scores, batch[1:]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
