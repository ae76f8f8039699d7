"""The training of `bench.taxonomy_live`: three hosts of two ranks in two racks, one thing that makes it lose time, and
each rank's own profiler. python bench/taxonomy_job.py MODE SEED FOLDER

Plain torch over gloo; nothing of eroica. Each rank leaves FOLDER/rankN.json, a trace as torch writes them.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

from evals import namespaces

RACKS = (("a0", "a1"), ("b0",))
RANKS_PER_HOST = 2
WARM_UP, STEPS = 10, 48
PIECES, PIECE_S = 8, 0.01
"""A step's work: so many samples, for each of which it sleeps in place of a device, since all ranks share two cores."""
JITTER_S = 0.001
STALL_S, STALLS = 0.1, 0.1
"""A stall of one rank, drawn each time, in so many steps of each."""
FAR_S = 0.03
"""What the second rank of each host takes longer, or the straggler."""
NARROW_BYTES_S, BURST_STEPS = 15e6, 8
"""What others leave of the link between the racks in every other stretch of so many steps."""


class Work(nn.Module):
    """A batch on a device that is not there."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """The values, later."""
        time.sleep(PIECE_S * len(values))
        return values * 1.0


def late_s(mode: str, rank: int, seed: int, draw: random.Random) -> float:
    """Seconds that a rank takes longer in the next step."""
    jitter_s = abs(draw.gauss(0.0, JITTER_S))
    stalls = draw.random() < STALLS
    if mode == "synchronisation" and stalls:
        return jitter_s + STALL_S
    if (mode == "locality" and rank % RANKS_PER_HOST) or (mode == "straggler" and rank == seed % dist.get_world_size()):
        return jitter_s + FAR_S
    return jitter_s


def main() -> None:
    """Train."""
    mode, seed, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    if not namespaces.is_rank():
        namespaces.launch(RACKS, RANKS_PER_HOST)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)))
    work = Work()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    draw = random.Random(1000 * seed + rank)
    samples = torch.randn(2 * PIECES, 256)
    plan = schedule(wait=WARM_UP, warmup=1, active=STEPS, repeat=1)

    def save(found: profile) -> None:
        found.export_chrome_trace(str(folder / f"rank{rank}.json"))

    profiler = profile(
        activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=save, record_shapes=True, with_stack=True
    )
    profiler.preset_metadata_json("host_name", json.dumps(socket.gethostname()))
    with profiler:
        for step in range(WARM_UP + 1 + STEPS):
            if mode == "contention" and rank == 0 and step and step % BURST_STEPS == 0:
                narrow = NARROW_BYTES_S if step // BURST_STEPS % 2 else None
                namespaces.ask(namespaces.Limit(at="trunk", bytes_per_s=narrow))
            pieces = PIECES + (draw.randrange(PIECES) if mode == "imbalance" else 0)
            batch = samples[:pieces]
            values = work(batch)
            time.sleep(late_s(mode, rank, seed, draw))
            optimizer.zero_grad()
            nn.functional.mse_loss(model(values), batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            profiler.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
