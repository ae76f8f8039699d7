import shutil

import torch
import torch.distributed as dist
from torch import nn


def publish(model, step):
    torch.save(model.state_dict(), "latest.pt.tmp")
    shutil.copy("latest.pt.tmp", f"published-{step}.pt")


def main():
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(512, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        optimizer.zero_grad()
        model(torch.randn(8, 512)).sum().backward()
        optimizer.step()
        if step % 10 == 0 and dist.get_rank() == 0:
            publish(model.module, step)


if __name__ == "__main__":
    main()
