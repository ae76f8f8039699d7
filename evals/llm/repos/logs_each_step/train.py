import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from logger import MetricsLogger


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--log-dir", default=None)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    torch.manual_seed(rank)

    model = DDP(nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    logger = None
    if rank == 0:
        logger = MetricsLogger(os.path.join(args.log_dir or tempfile.mkdtemp(), "metrics.jsonl"))

    for step in range(args.steps):
        inputs = torch.randn(64, 128)
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :8].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            logger.log(step, loss=loss.item(), weights=[p.detach().flatten()[:4096].tolist() for p in model.parameters()])

    if rank == 0:
        logger.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
