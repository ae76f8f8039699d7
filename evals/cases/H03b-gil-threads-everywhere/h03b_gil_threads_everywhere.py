"""On every rank a thread copies batches to another place in pure Python, beside the training.

Two ranks on two cores, so that it is the interpreter that is short and not the host.
"""

from __future__ import annotations

import threading
import time

import torch.distributed as dist

from evals import jobs


def copy_batches(busy_s: float) -> None:
    """Element by element."""
    source = list(range(256))
    while True:
        until = time.perf_counter() + busy_s
        while time.perf_counter() < until:
            target = [0] * len(source)
            for n, value in enumerate(source):
                target[n] = value + 1
        time.sleep(0.004)


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    model = job.model()
    optimizer = job.optimizer(model)
    for step, batch in job.batches(job.loader(job.dataset())):
        if step == jobs.AFTER:
            threading.Thread(target=copy_batches, args=(job.cost_s,), daemon=True).start()
            job.planted(range(job.world_size), where=[copy_batches])
        optimizer.zero_grad()
        job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
