import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        while True:
            time.sleep(0.003)
            yield torch.randn(32)


def main():
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Stream(), batch_size=8)
    for step, batch in enumerate(loader):
        if step == 200:
            break
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
