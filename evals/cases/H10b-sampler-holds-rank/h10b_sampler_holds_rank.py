"""Somebody attaches to one rank from outside, and then hangs: the rank stays stopped."""

from __future__ import annotations

import os
import subprocess
import sys

import torch.distributed as dist

from evals import jobs

HOLDER = """
import ctypes, os, sys, time
pid = int(sys.argv[1])
if os.fork():
    os._exit(0)
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
for name in os.listdir(f"/proc/{pid}/task"):
    if ptrace(16, int(name), None, None) == 0:
        os.waitpid(int(name), 0x40000000)
while os.path.exists(f"/proc/{pid}"):
    time.sleep(0.2)
"""


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    culprit = job.someone()
    when = job.draw.randrange(60, 160)
    model = job.model()
    optimizer = job.optimizer(model)
    for step, batch in job.batches(job.loader(job.dataset())):
        if step == when:
            job.planted([culprit])
            dist.barrier()
            if job.rank == culprit:
                subprocess.run([sys.executable, "-c", HOLDER, str(os.getpid())], check=True, start_new_session=True)
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
