"""Two launchers of one elastic job: the second comes when the ranks of the first have trained for a while."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch.distributed as dist
import torch.distributed.run

from evals import jobs

ALONE = 130
"""Steps after which the other launcher is called."""
TOGETHER = 350
JOINS = "join"


def train() -> None:
    """Train, with whatever ranks there are."""
    job = jobs.begin(__doc__)
    is_alone = job.world_size == 2
    job.steps = 10_000 if is_alone else TOGETHER
    model = job.model()
    optimizer = job.optimizer(model)
    if not is_alone:
        job.planted()
    for step, batch in job.batches(job.loader(job.dataset())):
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if is_alone and step == ALONE and job.rank == 0:
            (job.out / JOINS).touch()
    dist.destroy_process_group()


def launch() -> int:
    """Start both launchers, one after the other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--nnodes=1:2", "--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    words += ["--rdzv-id=elastic", "--rdzv-conf=last_call_timeout=1", *sys.argv]
    called = Path(jobs.arguments(__doc__).parse_args().out) / JOINS
    first = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *words])
    while first.poll() is None and not called.exists():
        time.sleep(0.1)
    try:
        torch.distributed.run.main(words)
    except BaseException:  # told to end: the other launcher is not to outlive us
        first.terminate()
        raise
    return first.wait()


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        raise SystemExit(launch())
