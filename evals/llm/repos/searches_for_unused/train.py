import sys

import torch

import distributed
from network import Network


def main(steps):
    rank, world = distributed.start()
    torch.manual_seed(rank)
    model = distributed.wrap(Network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        x = torch.randn(32, 32)
        loss = (model(x) - x.mean(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 100 == 0:
            print(step, float(loss.detach()), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
