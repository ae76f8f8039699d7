"""The training of `eroica demo` without a profiler of its own, for torchrun: ondemand_job.py FOLDER FAULT CULPRIT.

Each rank leaves its pid in FOLDER/rank<R>.pid once it trains, and trains until FOLDER/stop is there.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

SCRIPT = Path(__file__).parents[1] / "eroica" / "demos" / "train.py"
DELAY_S = 0.06


def main(folder: Path, fault: str, culprit: int) -> None:
    """Train with the fault from the start."""
    spec = importlib.util.spec_from_file_location("train", SCRIPT)
    assert spec is not None and spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = demo  # its data classes look for their module
    spec.loader.exec_module(demo)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = demo.Job(argparse.Namespace(out=folder, fault=fault, culprit=culprit), dist.get_rank(), dist.get_world_size())
    job.turn_faulty(DELAY_S)
    is_over = torch.zeros(1)
    for step, batch in enumerate(batch for _ in itertools.count() for batch in job.loader):
        job.train(batch, step)
        if step == 2:
            (folder / f"rank{job.rank}.pid").write_text(str(os.getpid()))
        if step % 10 == 9:
            is_over.fill_((folder / "stop").exists())
            dist.all_reduce(is_over)
            if is_over:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
