"""The training of `bench.pacing`: eight hosts of one rank in two racks, with little between the racks, and ranks that
take unequally long from step to step. python bench/pacing_job.py STEPS TIMES MBIT SEED

Plain torch over gloo; nothing of eroica. Rank 0 leaves in TIMES when each of its steps ended, CLOCK_MONOTONIC.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evals import namespaces

RACKS = (("a0", "a1", "a2", "a3"), ("b0", "b1", "b2", "b3"))
COMPUTE_S = 0.04
JITTER_S = 0.004
"""Scatter of every step of every rank."""
STALL_S = 0.04
STALLS = 0.06
"""Chance of a rank to stall in a step, for an exponential time: with eight ranks four steps in ten have one."""


def main() -> None:
    """Train."""
    steps, times, mbit, seed = int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    if not namespaces.is_rank():
        namespaces.launch(RACKS, 1)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if rank == 0:
        namespaces.ask(namespaces.Limit(at="trunk", bytes_per_s=mbit * 1e6 / 8))
    draw = random.Random(1000 * seed + rank)
    batch = torch.randn(2, 256)
    ends = []
    for _ in range(steps):
        # In place of a device: eight ranks that compute would take turns on two cores.
        stall_s = draw.expovariate(1 / STALL_S) if draw.random() < STALLS else 0.0
        time.sleep(COMPUTE_S + abs(draw.gauss(0.0, JITTER_S)) + stall_s)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        ends.append(time.monotonic_ns())
    if rank == 0:
        times.write_text(json.dumps(ends))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
