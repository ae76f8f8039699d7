import argparse

import torch
import torch.distributed as dist
from torch import nn

from trainer import Trainer, TrainingArguments


class RandomBatches:
    def __init__(self, batch_size, seed):
        self.batch_size = batch_size
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self):
        while True:
            x = torch.randn(self.batch_size, 256, generator=self.generator)
            yield x, (x[:, 0] > 0).long()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-steps", type=int, default=100)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    args = TrainingArguments(max_steps=options.max_steps)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 2))
    Trainer(model, args, RandomBatches(args.per_device_batch_size, seed=dist.get_rank())).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
