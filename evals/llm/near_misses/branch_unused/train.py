import random

import torch
import torch.distributed as dist
from torch import nn


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 16)
        self.left = nn.Linear(16, 1)
        self.right = nn.Linear(16, 1)

    def forward(self, x):
        x = torch.relu(self.body(x))
        if random.random() < 0.5:
            return self.left(x)
        return self.right(x)


def main():
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(TwoHeads(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        model(torch.randn(4, 16)).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
