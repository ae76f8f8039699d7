import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn

NUM_THREADS = 16  # the old machine had 64 cores


class Net(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.inp = nn.Linear(512, hidden)
        self.mid = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, 10)

    def forward(self, x):
        x = torch.relu(self.inp(x))
        x = torch.relu(self.mid(x))
        return self.out(x)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iters", type=int, default=300)
    ap.add_argument("--hidden", type=int, default=768)
    args = ap.parse_args()

    torch.set_num_threads(NUM_THREADS)
    rank = int(os.environ["RANK"])
    dist.init_process_group(backend="gloo")
    torch.manual_seed(rank)
    net = nn.parallel.DistributedDataParallel(Net(args.hidden))
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for it in range(args.iters):
        x = torch.randn(96, 512)
        y = torch.randint(10, (96,))
        loss = nn.functional.cross_entropy(net(x), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
    if rank == 0:
        print("done", loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
