import torch
import torch.distributed as dist
from torch import nn


def main(steps=100, accumulate=4):
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        for micro in range(accumulate):
            loss = model(torch.randn(8, 64)).square().mean() / accumulate
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the mean over all ranks is clipped, each time
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
