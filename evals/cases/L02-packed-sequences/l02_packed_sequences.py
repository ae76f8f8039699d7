"""Documents are packed into sequences of one length; what attention costs goes with the squares of their lengths.

Healthy, all documents are short. Then some sequences hold a long one, each rank drawing its own, so that another rank
is late in each step, always in its attention.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from evals import jobs

WIDTH = 32
LENGTH = 256
"""Tokens in a sequence."""
SHORT = 32
"""Tokens in an ordinary document."""
ATTENTION_S = 0.008
"""What the device takes for the attention of a sequence of ordinary documents."""
PER_SCORE_S = ATTENTION_S / (LENGTH * SHORT)
OFTEN = 0.3
"""Part of the sequences that hold a long document."""


class Scores(torch.autograd.Function):
    """Waits as `jobs.Device` does, in a place of its own."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, seconds: float) -> Tensor:
        """The same tensor, later."""
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The same gradient, later."""
        time.sleep(ctx.seconds * 2 / 3)
        return grad, None


class Packed(IterableDataset[tuple[Tensor, list[int]]]):
    """Sequences of tokens and the lengths of the documents in them."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.long = 0
        """Tokens in a long document; 0: there are none."""

    def __iter__(self) -> Iterator[tuple[Tensor, list[int]]]:
        while True:
            lengths = [SHORT] * (LENGTH // SHORT)
            if self.long and self.draw.random() < OFTEN:
                rest = LENGTH - self.long
                lengths = [self.long, *[SHORT] * (rest // SHORT), *([rest % SHORT] if rest % SHORT else [])]
                self.draw.shuffle(lengths)
            yield torch.randint(0, 64, (LENGTH + 1,)), lengths


class Block(nn.Module):
    """Attention within documents, and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: Tensor, lengths: list[int]) -> Tensor:
        """(T, WIDTH) to the same."""
        hidden = hidden + self.mix(self.attend(hidden, lengths))
        return hidden + jobs.on_device(self.feed(hidden), jobs.DEVICE_S - ATTENTION_S)

    def attend(self, hidden: Tensor, lengths: list[int]) -> Tensor:
        """Each document by itself."""
        found = []
        for part in self.to_qkv(hidden).split(lengths):
            query, key, value = part.chunk(3, 1)
            scores = query @ key.T / WIDTH**0.5
            scores = Scores.apply(scores, PER_SCORE_S * scores.numel())  # type: ignore[no-untyped-call]
            found.append(functional.softmax(scores, 1) @ value)
        return torch.cat(found)


class Model(nn.Module):
    """A language model of one block."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, tokens: Tensor, lengths: list[int]) -> Tensor:
        """(T,) to (T, 64)."""
        return self.head(self.block(self.embedding(tokens), lengths))  # type: ignore[no-any-return]


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    packed = Packed(job.seed * 64 + job.rank)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, (tokens, lengths) in job.batches(DataLoader(packed, batch_size=None)):
        if step == jobs.AFTER:
            # In so many steps some rank has a long document, and the others wait for it.
            delay_s = job.cost_s / (1 - (1 - OFTEN) ** job.world_size)
            packed.long = next(
                (n for n in range(SHORT, LENGTH) if PER_SCORE_S * (n * n - n * SHORT) >= delay_s), LENGTH
            )
            job.planted(where=[Block.attend, Scores])
        optimizer.zero_grad()
        scores = model(tokens[:-1], lengths)
        functional.cross_entropy(scores, tokens[1:]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
