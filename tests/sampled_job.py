"""One of two ranks of CPU work for `test_samplers_live.py`, traced by torch.profiler: RANK, then OUT and its core."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

out, core = sys.argv[1:]
os.sched_setaffinity(0, {int(core)})
torch.set_num_threads(1)
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=2)
model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(256, 512)


def step() -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def export(profiler: profile) -> None:
    profiler.export_chrome_trace(f"{out}/rank{rank}.json")


for _ in range(10):
    step()
plan = schedule(wait=0, warmup=1, active=40, repeat=1)
with profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=export) as profiler:
    for _ in range(41):
        step()
        profiler.step()
dist.barrier()
dist.destroy_process_group()
