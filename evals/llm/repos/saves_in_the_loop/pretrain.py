import argparse
import tempfile

import torch
import torch.distributed as dist
from torch import nn

from checkpoint import save_checkpoint


def pretrain(args):
    rank = dist.get_rank()
    net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 64))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters())
    folder = args.out or tempfile.mkdtemp()
    for step in range(1, args.steps + 1):
        tokens = torch.randn(16, 256)
        loss = nn.functional.mse_loss(model(tokens), tokens[:, :64])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.save_every == 0 and rank == 0:
            save_checkpoint(folder, step, model.module, optimizer)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    pretrain(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
