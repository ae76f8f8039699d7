import math
import time

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Recordings(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        wave = self._read(i)
        return wave, torch.tensor(float(i % 2))

    def _read(self, i):
        time.sleep(0.0025)  # object storage
        t = torch.arange(400) / 400
        return torch.sin(2 * math.pi * (1 + i % 7) * t)


def make_loader(config):
    data = Recordings(config.length)
    return DataLoader(
        data,
        batch_size=config.batch_size,
        sampler=DistributedSampler(data),
        num_workers=config.num_workers,
        drop_last=True,
    )
