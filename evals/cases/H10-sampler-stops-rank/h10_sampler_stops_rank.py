"""Somebody attaches a sampler of stacks to one rank from outside, which stops all of its threads at each sample."""

from __future__ import annotations

import os
import subprocess
import sys

import torch.distributed as dist

from evals import jobs

SAMPLER = """
import ctypes, os, sys, time
pid, held_s, period_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
if os.fork():
    os._exit(0)
libc = ctypes.CDLL(None, use_errno=True)
ptrace = libc.ptrace
ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
ATTACH, DETACH, WALL = 16, 17, 0x40000000
while os.path.exists(f"/proc/{pid}"):
    stopped = []
    for name in os.listdir(f"/proc/{pid}/task"):
        if ptrace(ATTACH, int(name), None, None) == 0:
            os.waitpid(int(name), WALL)
            stopped.append(int(name))
    time.sleep(held_s)
    for thread in stopped:
        ptrace(DETACH, thread, None, None)
    time.sleep(period_s - held_s)
"""
PERIOD_S = 0.04


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    culprit = job.someone()
    model = job.model()
    optimizer = job.optimizer(model)
    for step, batch in job.batches(job.loader(job.dataset())):
        if step == jobs.AFTER:
            if job.rank == culprit:
                # Of each period it is held for the part that makes the rest of it last that much longer.
                held_s = PERIOD_S * job.effect / (1 + job.effect)
                subprocess.run(
                    [sys.executable, "-c", SAMPLER, str(os.getpid()), str(held_s), str(PERIOD_S)],
                    check=True,
                    start_new_session=True,
                )
            job.planted([culprit])
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
