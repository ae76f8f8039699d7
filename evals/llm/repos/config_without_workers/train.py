import argparse

import torch
import torch.distributed as dist
from torch import nn

from config import Config
from data import make_loader


def cycle(loader):
    while True:
        yield from loader


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-iters", type=int, default=250)
    cfg = Config(max_iters=parser.parse_args().max_iters)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(400, 256), nn.GELU(), nn.Linear(256, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    batches = cycle(make_loader(cfg.data))
    for it in range(cfg.max_iters):
        waves, labels = next(batches)
        loss = nn.functional.binary_cross_entropy_with_logits(model(waves).squeeze(1), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
