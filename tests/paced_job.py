"""A data-parallel training whose ranks take unequally long, for tests of pacing; plain torch, nothing of eroica.

paced_job.py STEPS WEIGHTS      keeps a digest of the weights of each rank in the folder WEIGHTS
"""

from __future__ import annotations

import hashlib
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    steps, weights = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    draw = random.Random(rank)
    for step in range(steps):
        # The last rank is late in most steps, the others wait for it.
        time.sleep(0.005 + 0.01 * draw.random() + (0.03 if rank == dist.get_world_size() - 1 else 0.0))
        batch = torch.full((4, 32), float((step * 7 + rank) % 11))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    data = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    (weights / f"rank{rank}").write_text(hashlib.sha256(data).hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
