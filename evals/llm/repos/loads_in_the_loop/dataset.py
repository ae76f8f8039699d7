import time

import torch
from torch.utils.data import Dataset


class Scans(Dataset):
    """Slices of a scan, kept on a file server."""

    def __init__(self, length, latency=0.002):
        self.length = length
        self.latency = latency

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(self.latency)  # the way to the server and back
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(1, 24, 24, generator=generator)
        return image, int(image.mean() > 0)
