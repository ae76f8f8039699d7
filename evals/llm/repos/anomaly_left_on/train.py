"""Train a deep narrow regressor on synthetic waves."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from model import build_model


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args()


def setup(seed):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(seed + dist.get_rank())
    # we had NaNs in run 14, find out where
    torch.autograd.set_detect_anomaly(True)


def train(args):
    model = DDP(build_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    criterion = nn.MSELoss()
    for step in range(args.steps):
        x = torch.randn(args.batch_size, 64)
        y = torch.sin(x.sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        if step % 100 == 0 and dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


def main():
    args = parse_args()
    setup(seed=17)
    train(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
