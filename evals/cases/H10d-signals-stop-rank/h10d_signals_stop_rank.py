"""A program outside stops one rank by signals while it looks at it, many times a second."""

from __future__ import annotations

import os
import subprocess
import sys

import torch.distributed as dist

from evals import jobs

STOPPER = """
import os, signal, sys, time
pid, held_s, period_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
if os.fork():
    os._exit(0)
try:
    while True:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(held_s)
        os.kill(pid, signal.SIGCONT)
        time.sleep(period_s - held_s)
except ProcessLookupError:
    pass
"""


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    culprit = job.someone()
    period_s = job.draw.choice((0.03, 0.05, 0.1))
    model = job.model()
    optimizer = job.optimizer(model)
    for step, batch in job.batches(job.loader(job.dataset())):
        if step == jobs.AFTER:
            if job.rank == culprit:
                # Of each period it is held for the part that makes the rest of it last that much longer.
                held_s = period_s * job.effect / (1 + job.effect)
                subprocess.run(
                    [sys.executable, "-c", STOPPER, str(os.getpid()), str(held_s), str(period_s)],
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
