import argparse

import torch
import torch.distributed as dist
from torch import nn


def log_mean_loss(step, loss):
    """Mean over all ranks."""
    if dist.get_rank() == 0:
        value = loss.detach().clone()
        dist.all_reduce(value)
        print(f"step {step}: {value.item() / dist.get_world_size():.4f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(args.steps):
        x = torch.randn(32, 64)
        loss = (model(x) - x[:, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            log_mean_loss(step, loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
