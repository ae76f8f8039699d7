"""Fine-tune on a few hundred sentences, many epochs."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class FineTuning:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rank = int(os.environ["RANK"])
        torch.manual_seed(3)
        tokens = torch.randint(0, 1000, (options.sentences, 24))
        self.data = TensorDataset(tokens, tokens.sum(dim=1) % 2)
        self.sampler = DistributedSampler(self.data, seed=5)
        self.loader = DataLoader(self.data, batch_size=options.batch, sampler=self.sampler, num_workers=2)
        net = nn.Sequential(nn.EmbeddingBag(1000, 256), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
        self.net = nn.parallel.DistributedDataParallel(net)
        self.opt = optim.Adam(self.net.parameters(), lr=options.lr)

    def epoch(self, number: int) -> float:
        self.sampler.set_epoch(number)
        summed = torch.zeros(())
        for tokens, labels in self.loader:
            loss = nn.functional.cross_entropy(self.net(tokens), labels)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            summed += loss.detach()
        return summed.item() / len(self.loader)

    def run(self) -> None:
        for number in range(self.options.epochs):
            mean = self.epoch(number)
            if self.rank == 0 and number % 10 == 0:
                print(f"epoch {number}: {mean:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sentences", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    FineTuning(options).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
