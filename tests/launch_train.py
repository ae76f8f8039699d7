"""An unmodified little training for `test_launch.py`: knows nothing of eroica.

    launch_train.py [--spawn FILE] [--fail-once FILE] [--wait FILE]

With RANK it joins the group of its launcher, with --spawn torch.multiprocessing starts two ranks, else it is alone. The
job that fails at its first start has no group: restarts of gloo fail now and then by themselves.
"""

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.utils.data import DataLoader, TensorDataset


def train(rank: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if options.spawn:
        dist.init_process_group("gloo", init_method=f"file://{options.spawn}", rank=rank, world_size=2)
    elif "RANK" in os.environ and not options.fail_once:
        dist.init_process_group("gloo")
    model: torch.nn.Module = torch.nn.Linear(4, 1)
    if dist.is_initialized():
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for (x,) in DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2, num_workers=options.workers):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    if options.fail_once and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        # Both are known by now; then one fails, and the launcher ends the other.
        open(options.fail_once + os.environ["RANK"], "w").close()
        while not os.path.exists(options.fail_once + "1"):
            time.sleep(0.05)
        if os.environ["RANK"] == "0":
            raise RuntimeError("the first start fails")
        time.sleep(1000)
    while options.wait and not os.path.exists(options.wait):
        time.sleep(0.05)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--spawn")
    parser.add_argument("--fail-once")
    parser.add_argument("--wait")
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    if options.spawn:
        spawn(train, args=(options,), nprocs=2)  # type: ignore[no-untyped-call]
    else:
        train(0, options)
    print("trained", flush=True)
    sys.exit(0 if "RANK" in os.environ else 3)


if __name__ == "__main__":
    main()
