"""The job profiles a step now and then, as its own code asks, and every rank writes the trace to one slow server."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.profiler

from evals import jobs
from evals.storage import Bucket, SharedFile

STEP_S = 0.03
"""What a step takes, about."""


def main() -> None:
    """Train."""
    job = jobs.begin(__doc__)
    model = job.model()
    optimizer = job.optimizer(model)
    every = job.draw.randrange(25, 41)
    bucket = Bucket(job.out / "bucket")

    def dump(profiler: Any) -> None:
        local = job.out / f"trace{job.rank}.json"
        profiler.export_chrome_trace(str(local))
        data = local.read_bytes()
        rate = len(data) * job.world_size / (job.effect * STEP_S * every)
        with SharedFile(job.out / f"shared{job.rank}.json", bucket, rate) as file:
            file.write(data)

    schedule = torch.profiler.schedule(wait=every - 2, warmup=1, active=1)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=dump) as profiler:
        for step, batch in job.batches(job.loader(job.dataset())):
            if step == 0:
                job.planted(range(job.world_size), where=[dump])
            optimizer.zero_grad()
            job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            profiler.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
