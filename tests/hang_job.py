"""One rank of a small job that comes to a halt in a given way, for `test_hang_live.py`; see FAULTS for the ways.

Run as a plain script with RANK, WORLD_SIZE, the fault and the rendezvous file as its arguments. Each rank prints
"there" once it is about to stand still, then does so until it is killed.
"""

import eroica  # noqa: F401

# isort: split

import atexit
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

RANK = int(os.environ["RANK"])
FOREVER_S = 900.0


class Numbers(Dataset[int]):
    """Items that take `seconds`; from item `die_at` on, the worker that makes it kills itself."""

    def __init__(self, length: int, seconds: float = 0.0, die_at: int = -1) -> None:
        self.length, self.seconds, self.die_at = length, seconds, die_at

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds)
        if index == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def there() -> None:
    print("there", flush=True)


def reduce(size: int = 4, group: dist.ProcessGroup | None = None) -> None:
    dist.all_reduce(torch.ones(size), group=group)


def train(steps: int, parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(steps):
        parameter.grad = torch.ones(1)
        reduce()
        optimizer.step()


def decode() -> None:
    there()
    time.sleep(FOREVER_S)


def missing() -> None:
    if RANK == 1:
        decode()
    there()
    reduce()


def backward() -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    loss = model(torch.ones(2, 4)).sum()
    if RANK == 1:
        decode()
    there()
    loss.backward()


def skipped() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for step in range(6):
        parameter.grad = torch.ones(1)
        if not (RANK == 1 and step == 2):
            reduce()
        optimizer.step()
        if step == 4:
            there()
    dist.barrier()


def order() -> None:
    first, second = dist.new_group(list(range(dist.get_world_size()))), dist.new_group([0, 1, 2])
    there()
    if RANK == 0:
        reduce(group=second)
        reduce(group=first)
    else:
        reduce(group=first)
        if RANK < 3:
            reduce(group=second)


def operation() -> None:
    there()
    if RANK == 2:
        dist.broadcast(torch.ones(4), 0)
    else:
        reduce()
    dist.barrier()


def size() -> None:
    there()
    reduce(8 if RANK == 2 else 4)
    dist.barrier()


def receive() -> None:
    there()
    if RANK < 2:
        dist.recv(torch.ones(2), 1 - RANK)
    reduce()


def loader_worker() -> None:
    dies = RANK == 1
    for _ in DataLoader(Numbers(8, 0.0, 4 if dies else -1), batch_size=1, num_workers=1):
        reduce()
    there()


def queue_worker() -> None:
    if RANK == 1:
        queue: multiprocessing.Queue[int] = multiprocessing.get_context("fork").Queue()
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(FOREVER_S,), daemon=True)
        worker.start()
        os.kill(worker.pid or 0, signal.SIGKILL)
        there()
        queue.get()
    there()
    reduce()


FIRST, SECOND = threading.Lock(), threading.Lock()
both = threading.Barrier(2)


def prefetch() -> None:
    with SECOND:
        both.wait()
        with FIRST:
            pass


def lock() -> None:
    if RANK == 1:
        threading.Thread(target=prefetch, name="prefetch", daemon=True).start()
        FIRST.acquire()
        both.wait()
        there()
        SECOND.acquire()
    there()
    reduce()


def raises() -> None:
    if RANK == 1:
        raise ValueError("no such batch")
    there()
    reduce()


def cleans_up() -> None:
    try:
        if RANK == 1:
            there()
            raise ValueError("no such batch")
        there()
        reduce()
    finally:
        dist.barrier()


def leaves() -> None:
    if RANK == 1:
        there()
        dist.destroy_process_group()
        time.sleep(FOREVER_S)
    there()
    reduce()


def goodbye() -> None:
    if RANK == 1:
        there()
        try:
            raise ValueError("no such batch")
        finally:
            dist.destroy_process_group()
            time.sleep(FOREVER_S)
    there()
    reduce()


def killed() -> None:
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    there()
    reduce()


class Slow:
    """A file on a storage that does not answer."""

    def write(self, data: bytes) -> int:
        there()
        time.sleep(FOREVER_S)
        return len(data)

    def flush(self) -> None:
        pass


def checkpoint() -> None:
    if RANK == 0:
        torch.save({"weights": torch.ones(4)}, Slow())  # type: ignore[arg-type]  # it needs but two methods
    there()
    dist.barrier()


def evaluate() -> None:
    there()
    time.sleep(FOREVER_S)


def evaluation() -> None:
    if RANK == 0:
        evaluate()
    there()
    reduce()


def gil() -> None:
    if RANK == 1:
        library = ctypes.PyDLL(None)
        there()
        library.sleep(int(FOREVER_S))
    there()
    reduce()


def stopped() -> None:
    there()
    while True:
        reduce()
        time.sleep(0.05)


def healthy() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    there()
    while True:
        train(1, parameter, optimizer)
        time.sleep(0.05)


def slow_but_moving() -> None:
    if RANK == 1:
        there()
        for _ in DataLoader(Numbers(10_000, 0.2), batch_size=1):
            pass
    there()
    dist.barrier()


def teardown() -> None:
    dist.barrier()
    dist.destroy_process_group()
    if RANK == 0:
        atexit.register(decode)
    else:
        there()


FAULTS: dict[str, Callable[[], None]] = {
    f.__name__: f
    for f in (
        *(missing, backward, skipped, order, operation, size, receive, loader_worker, queue_worker, lock, raises),
        *(cleans_up, leaves, goodbye, killed, checkpoint, evaluation, gil, stopped, healthy, slow_but_moving, teardown),
    )
}


def main(fault: str, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=RANK, world_size=int(os.environ["WORLD_SIZE"])
    )
    parameter = torch.nn.Parameter(torch.zeros(1))
    train(3, parameter, torch.optim.SGD([parameter], lr=0.1))
    FAULTS[fault]()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
