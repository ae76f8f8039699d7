"""One rank of a small training job for `test_probe.py`: DDP, FSDP2, ZeRO, messages, a compiled step; prints digests.

Run as a plain script with RANK, WORLD_SIZE and the rendezvous file as its argument. It imports eroica as a user would.
"""

import hashlib
import os
import sys

import eroica  # noqa: F401  # first, before torch; `probe_loops` has it the other way round

# isort: split

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def digest(model: torch.nn.Module) -> str:
    """Of every bit of the parameters."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, torch.distributed.tensor.DTensor) else parameter
        found.update(whole.detach().numpy().tobytes())
    return found.hexdigest()[:16]


def layers() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(3)])


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, num_workers: int = 0) -> str:
    torch.manual_seed(100 + rank)
    data = TensorDataset(torch.randn(12, 16), torch.randn(12, 16))
    for x, y in DataLoader(data, batch_size=4, num_workers=num_workers):
        optimizer.zero_grad()
        (model(x) - y).pow(2).mean().backward()
        optimizer.step()
    return digest(model)


def main(rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    rank = dist.get_rank()
    model = DistributedDataParallel(layers(), bucket_cap_mb=0.001)
    print("ddp sgd", train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, num_workers=2))
    model = DistributedDataParallel(layers())
    print("ddp adam", train(model, torch.optim.Adam(model.parameters(), lr=0.1), rank))
    model = DistributedDataParallel(layers())
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    print("zero", train(model, zero, rank))
    sharded = layers()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    print("fsdp2", train(sharded, torch.optim.AdamW(sharded.parameters(), lr=0.1), rank))
    model = DistributedDataParallel(layers())
    adam = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    adam.step = torch.compile(adam.step, backend="eager")  # type: ignore[method-assign]
    print("compiled step", train(model, adam, rank))
    value = torch.full((3,), float(rank))
    (dist.send if rank == 0 else dist.recv)(value, 1 - rank)
    print("message", value.tolist())
    pair = dist.new_group([0, 1])
    dist.all_reduce(value, group=pair)
    print("pair", value.tolist())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
