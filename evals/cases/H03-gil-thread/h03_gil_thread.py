"""A thread of one rank works in pure Python beside the training, which has to wait for the interpreter.

By the seed it prepares something for each batch, as a thread that pins memory does, or it works all the time.
"""

from __future__ import annotations

import queue
import threading
import time

import torch.distributed as dist

from evals import jobs


def spin(seconds: float) -> int:
    """Pure Python for so long."""
    state, until = 1, time.perf_counter() + seconds
    while time.perf_counter() < until:
        for _ in range(500):
            state = state * 31 % 1_000_003
    return state


def collate(batches: queue.Queue[float]) -> None:
    """Works on what it is given."""
    while True:
        spin(batches.get())


def watch(busy_s: float) -> None:
    """Works, and pauses for a moment now and then."""
    while True:
        spin(busy_s)
        time.sleep(0.002)


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    culprit = job.someone()
    per_batch = job.draw.random() < 0.5
    batches: queue.Queue[float] | None = None
    model = job.model()
    optimizer = job.optimizer(model)
    for step, batch in job.batches(job.loader(job.dataset())):
        if step == jobs.AFTER:
            if job.rank == culprit and per_batch:
                batches = queue.Queue()
                threading.Thread(target=collate, args=(batches,), daemon=True).start()
            elif job.rank == culprit:
                # The training thread gets the interpreter in the pauses, and every 5 ms when it asks for it.
                threading.Thread(target=watch, args=(job.cost_s,), daemon=True).start()
            job.planted([culprit], where=[spin])
        if batches is not None:
            batches.put(1.5 * job.cost_s)  # part of it goes by while the device computes
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
