"""A small data-parallel training on CPUs that starts healthy and turns faulty at a given step.

What `eroica demo` runs, and a plain program that can be run by hand; the hanging faults then wait for Ctrl-C:

    torchrun --standalone --nproc-per-node 4 train.py --fault slow_input --culprit 2 --after 150 --out DIR

It knows nothing of eroica and of profilers: an ordinary dataset, loader, model and optimizer under
DistributedDataParallel. What was planted, where and since when stands in DIR/planted.json from that step on, for
whoever wants to check an answer. Two things stand in for hardware that the machine may lack. `Accelerator`: the host
waits while it "computes", as it would for a real one; without it, more ranks than cores would take turns on the cores,
and a rank that is late by a few milliseconds would delay nobody. `SlowStorage`: a disk or share of a given speed.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import io
import json
import logging
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BATCH = 4
WIDTH = 64
"""Samples of a signal that the model takes at a time."""
USUAL_PIECES = 2
"""Pieces of WIDTH samples in a signal."""
DEVICE_SECONDS = 0.01
"""What the accelerator takes per piece, a third of it in the forward pass."""
EPOCH_STEPS = 500
SAVE_EVERY = 8
"""Steps from one checkpoint to the next."""
NUM_TREES = 5_000
"""Parse trees per step."""
NUM_HOGS = 6
OVERSAMPLING = 2_000
"""Makes reading a batch some 10 ms of work for the CPU, where the CPU is to be short."""
log = logging.getLogger("train")


@dataclass(frozen=True)
class Fault:
    """What is right to say about a fault."""

    kind: str
    cause: str
    scope: str = "rank"


FAULTS = {
    "healthy": Fault("healthy", "none", "none"),
    "slow_input": Fault("slow", "input_pipeline"),
    "backward_delay": Fault("slow", "host_python"),
    "gc_rotating": Fault("slow", "host_gc", "rotating"),
    "gil_thread": Fault("slow", "gil_contention"),
    "cpu_hog_host": Fault("slow", "cpu_contention"),
    "checkpoint_rank0": Fault("slow", "checkpoint_io"),
    "blocking_log": Fault("slow", "host_python"),
    "load_imbalance": Fault("slow", "load_imbalance"),
    "missing_rank": Fault("hang", "missing_rank"),
    "group_order_deadlock": Fault("hang", "deadlock", "group"),
    "dead_worker": Fault("hang", "dead_worker"),
    "lock_deadlock": Fault("hang", "deadlock"),
}


class Signals(Dataset[Tensor]):
    """Signals to compress, made up as they are read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.pieces = USUAL_PIECES
        self.delay_s = 0.0
        """What reading one takes on slow storage."""
        self.oversampling = 1
        """Signals may come in a finer form that must be thinned out: work for the CPU."""
        self.out_of_memory = torch.zeros(1).share_memory_()  # type: ignore[no-untyped-call]
        """Set where the system is about to kill the process that reads; shared with the loader's workers."""

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        if self.delay_s:
            time.sleep(self.delay_s)
        if self.out_of_memory.item():
            os.kill(os.getpid(), signal.SIGKILL)
        wave = torch.linspace(index, index + 50, self.oversampling * self.pieces * WIDTH).sin()
        return wave.reshape(-1, self.oversampling).mean(1)


class Accelerator(torch.autograd.Function):
    """Stands in for an accelerator: the host waits for it in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        time.sleep(DEVICE_SECONDS / 3)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(DEVICE_SECONDS * 2 / 3)
        return grad


class Autoencoder(nn.Module):
    """Works through a signal piece by piece, each beside what the one before left."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.mixer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.cell = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.Tanh())
        self.decoder = nn.Linear(WIDTH, WIDTH)

    def forward(self, signals: Tensor) -> Tensor:
        state, outputs = torch.zeros(len(signals), WIDTH), []
        for piece in torch.split(signals, WIDTH, 1):
            hidden = self.mixer(self.stem(piece))
            state = Accelerator.apply(self.cell(torch.cat([hidden, state], 1)))  # type: ignore[no-untyped-call]
            outputs.append(self.decoder(state))
        return torch.cat(outputs, 1)


class GradientLog:
    """A backward hook that notes the size of a block's gradient; writing it down takes `delay_s` on a bad rank."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.sizes: deque[int] = deque(maxlen=100)

    def log_gradient(self, module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        self.sizes.append(grad_output[0].numel())
        if self.delay_s:
            time.sleep(self.delay_s)


class TreeBank:
    """Keeps the parse trees of the last steps; how many a step has depends on its data.

    Each node holds its children and each child its parent: cycles, which only the garbage collector can take apart.
    """

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.recent: deque[list[dict[str, Any]]] = deque(maxlen=10)

    def parse(self) -> None:
        trees: list[dict[str, Any]] = [{"children": []} for _ in range(int(NUM_TREES * self.draw.uniform(0.6, 1.4)))]
        for tree in trees:
            tree["children"] += [{"parent": tree}, {"parent": tree}]
        self.recent.append(trees)


class SlowStorage(io.RawIOBase):
    """A file, log sink or share that takes `delay_s` for all that is written to it before it is synced."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb", buffering=0)
        self.delay_s = 0.0
        self.is_late = False

    def write(self, data: Any) -> int:
        count = self.file.write(data.encode() if isinstance(data, str) else data)
        if self.delay_s and not self.is_late:
            time.sleep(self.delay_s)
            self.is_late = True
        return count

    def flush(self) -> None:
        self.file.flush()
        self.is_late = False


class Progress:
    """Totals that two threads share, under two locks: the training adds to them, a thread writes them down."""

    def __init__(self) -> None:
        self.totals_lock, self.file_lock = threading.Lock(), threading.Lock()
        self.total = 0.0

    def add(self, loss: float) -> None:
        with self.totals_lock:
            self.total += loss
            with self.file_lock:
                log.debug("total %.3f", self.total)

    def write_down(self) -> None:
        with self.file_lock:
            time.sleep(0.2)  # the training comes by meanwhile and takes the other lock
            with self.totals_lock:
                log.debug("total %.3f", self.total)


class Metrics:
    """Mean loss and mean gradient over ranks, each in a group of its own."""

    def __init__(self) -> None:
        self.losses, self.norms = dist.new_group(), dist.new_group()
        self.norm_first = False

    def average(self, loss: Tensor, norm: Tensor) -> None:
        if self.norm_first:
            dist.all_reduce(norm, group=self.norms)
            dist.all_reduce(loss, group=self.losses)
        else:
            dist.all_reduce(loss, group=self.losses)
            dist.all_reduce(norm, group=self.norms)


def hash_samples() -> None:
    """What a background thread computes in pure Python, with hardly a pause."""
    state = 1
    while True:
        for _ in range(250_000):
            state = state * 31 % 1_000_003
        time.sleep(0.001)


def wait_for_shard(path: Path) -> None:
    """Wait for a file that another program is to deliver."""
    while not path.exists():
        time.sleep(0.05)


def hog(cpu: int) -> None:
    """Start processes that do nothing but use this CPU, for as long as this process lives."""
    loop = f"import os; os.sched_setaffinity(0, [{cpu}])\nwhile os.getppid() == {os.getpid()}: sum(range(100000))"
    for _ in range(NUM_HOGS):
        # In sessions of their own: Linux shares a CPU among sessions first.
        subprocess.Popen([sys.executable, "-c", loop], start_new_session=True)


@dataclass
class Job:
    """One rank's training, and the parts of it that may turn faulty."""

    options: argparse.Namespace
    rank: int
    world_size: int
    dataset: Signals = field(init=False)
    gradients: GradientLog = field(default_factory=GradientLog)
    progress: Progress = field(default_factory=Progress)
    trees: TreeBank | None = None
    metrics: Metrics | None = None
    missing_shard: Path | None = None

    def __post_init__(self) -> None:
        out, fault = self.options.out, self.options.fault
        network = Autoencoder()
        network.mixer.register_full_backward_hook(self.gradients.log_gradient)
        self.model = DistributedDataParallel(network)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9, fused=True)
        self.dataset = Signals(EPOCH_STEPS * BATCH * self.world_size)
        self.loader = DataLoader(
            self.dataset,
            batch_size=BATCH,
            sampler=DistributedSampler(self.dataset),
            num_workers=1 if fault == "dead_worker" else 0,
            persistent_workers=fault == "dead_worker",
        )
        self.metrics = Metrics() if fault == "group_order_deadlock" else None
        self.log_sink = SlowStorage(out / f"rank{self.rank}.log")
        log.addHandler(logging.StreamHandler(self.log_sink))
        log.setLevel(logging.INFO)
        self.checkpoint: SlowStorage | None = None
        self.cpus = sorted(os.sched_getaffinity(0))
        if fault == "cpu_hog_host" and len(self.cpus) > 1:
            # Half of the ranks on each of two CPUs, as if they were two hosts.
            os.sched_setaffinity(0, [self.cpus[self.half(self.rank)]])
            self.dataset.oversampling = OVERSAMPLING

    def half(self, rank: int) -> int:
        return rank * 2 // self.world_size

    def train(self, batch: Tensor, step: int) -> None:
        """One step."""
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(batch), batch)
        if self.missing_shard is not None:
            wait_for_shard(self.missing_shard)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        if self.trees is not None:
            self.trees.parse()
        if self.metrics is not None:
            self.metrics.average(loss.detach(), torch.zeros(1))
        self.progress.add(loss.item())
        log.info("step %d, loss %.4f", step, loss.item())
        if self.checkpoint is not None and step % SAVE_EVERY == 0:
            self.save_checkpoint()

    def save_checkpoint(self) -> None:
        assert self.checkpoint is not None
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, self.checkpoint)  # type: ignore[arg-type]  # it writes
        self.checkpoint.flush()

    def turn_faulty(self, delay_s: float) -> tuple[list[int], tuple[Callable[..., Any], ...]]:
        """Plant the fault in this process, if it is one of the culprits; returns these, and the functions of it."""
        fault, culprit = self.options.fault, self.options.culprit
        here = self.rank == culprit
        match fault:
            case "slow_input":
                self.dataset.delay_s = delay_s / BATCH if here else 0.0
                return [culprit], (Signals.__getitem__,)
            case "backward_delay":
                self.gradients.delay_s = delay_s / USUAL_PIECES if here else 0.0
                return [culprit], (GradientLog.log_gradient,)
            case "gc_rotating":
                gc.freeze()  # as large trainings do: collections then leave alone what was there at the start
                self.trees = TreeBank(self.rank)
                return [], (TreeBank.parse,)
            case "gil_thread":
                if here:
                    threading.Thread(target=hash_samples, daemon=True).start()
                return [culprit], (hash_samples,)
            case "cpu_hog_host":
                if here:
                    hog(self.cpus[self.half(culprit) % len(self.cpus)])
                return [r for r in range(self.world_size) if self.half(r) == self.half(culprit)], ()
            case "checkpoint_rank0":
                if self.rank == 0:
                    self.checkpoint = SlowStorage(self.options.out / "checkpoint.pt")
                    self.checkpoint.delay_s = delay_s * SAVE_EVERY
                return [0], (Job.save_checkpoint, SlowStorage.write)
            case "blocking_log":
                self.log_sink.delay_s = delay_s if here else 0.0
                return [culprit], (SlowStorage.write,)
            case "load_imbalance":
                self.dataset.pieces = USUAL_PIECES + (max(round(delay_s / DEVICE_SECONDS), 1) if here else 0)
                return [culprit], ()
            case "missing_rank":
                self.missing_shard = self.options.out / "shard.bin" if here else None
                return [culprit], (wait_for_shard,)
            case "group_order_deadlock":
                assert self.metrics is not None
                self.metrics.norm_first = here
                return [culprit], (Metrics.average,)
            case "dead_worker":
                self.dataset.out_of_memory.fill_(here)
                return [culprit], ()
            case "lock_deadlock":
                if here:
                    threading.Thread(target=self.progress.write_down, daemon=True).start()
                return [culprit], (Progress.add, Progress.write_down)
            case _:
                return [], ()


def note(
    options: argparse.Namespace, step: int, healthy_s: float, delay_s: float, ranks: list[int], where: Any
) -> None:
    """Write down what is planted, where, and since when."""
    fault = FAULTS[options.fault]
    places = []
    for function in where:
        lines, first = inspect.getsourcelines(function)
        places.append(
            {
                "function": function.__name__,
                "file": os.path.basename(__file__),
                "lines": [first, first + len(lines) - 1],
            }
        )
    record = {
        "fault": options.fault,
        "kind": fault.kind,
        "cause": fault.cause,
        "scope": fault.scope,
        "ranks": ranks,
        "places": places,
        "delay_s": delay_s,
        "healthy_step_s": healthy_s,
        "onset": {"step": step, "monotonic_ns": time.monotonic_ns(), "wall_ns": time.time_ns()},
    }
    unfinished = options.out / "planted.json.part"
    unfinished.write_text(json.dumps(record) + "\n")
    unfinished.replace(options.out / "planted.json")


def run(job: Job) -> None:
    """Train, healthy at first."""
    options = job.options
    seconds: list[float] = []
    batches, begin = iter(job.loader), time.perf_counter()
    for step in range(options.steps):
        if step == options.after:
            healthy_s = statistics.median(seconds[len(seconds) // 2 :] or [0.0])
            delay_s = options.delay_ms / 1e3 if options.effect is None else options.effect * healthy_s
            ranks, where = job.turn_faulty(delay_s)
            if job.rank == (ranks or [0])[0]:
                note(options, step, healthy_s, delay_s, ranks, where)
        try:
            batch = next(batches, None)
            if batch is None:
                batches = iter(job.loader)
                batch = next(batches)
            job.train(batch, step)
        except RuntimeError as error:
            if options.fault != "dead_worker":
                raise
            log.warning("step %d: a batch is lost: %s", step, error)  # a loop that skips what it cannot read
        begin, before = time.perf_counter(), begin
        seconds.append(begin - before)


def main() -> None:
    """Train; leaves DIR/planted.json, and each rank's log in DIR/rank<R>.log."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to leave planted.json and logs")
    parser.add_argument("--fault", choices=FAULTS, default="healthy")
    parser.add_argument("--culprit", type=int, default=0, metavar="RANK")
    parser.add_argument("--after", type=int, default=150, metavar="STEP", help="the first faulty step")
    parser.add_argument("--steps", type=int, default=1000, help="steps in all")
    parser.add_argument("--delay-ms", type=float, default=60.0, help="what a slow fault costs per step")
    parser.add_argument("--effect", type=float, metavar="SHARE", help="instead: as a share of the healthy step")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    run(Job(options, dist.get_rank(), dist.get_world_size()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
