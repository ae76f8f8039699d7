"""The training of `eroica demo` without a profiler of its own, for torchrun: ondemand_job.py FOLDER FAULT CULPRIT.

Each rank leaves its pid in FOLDER/rank<R>.pid once it trains, and trains until FOLDER/stop is there.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

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
    rank = dist.get_rank()
    gradients = demo.GradientLog()
    network = demo.Autoencoder()
    network.blocks[1].register_full_backward_hook(gradients.log_gradient)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, fused=True)
    dataset = demo.Signals(100_000)
    if rank == culprit:
        dataset.delay_s = DELAY_S / demo.BATCH if fault == "slow_input" else 0.0
        gradients.delay_s = DELAY_S if fault == "backward_delay" else 0.0
    batches = iter(DataLoader(dataset, batch_size=demo.BATCH, sampler=DistributedSampler(dataset)))
    demo.train(model, optimizer, batches, 3)
    (folder / f"rank{rank}.pid").write_text(str(os.getpid()))
    is_over = torch.zeros(1)
    while not is_over:
        demo.train(model, optimizer, batches, 10)
        is_over.fill_((folder / "stop").exists())
        dist.all_reduce(is_over)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
