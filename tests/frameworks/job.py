"""One training under several frameworks, long enough to be watched: `job.py FRAMEWORK UPDATES [ONSET RANKS]`.

FRAMEWORK: ddp, compiled, fsdp2, accelerate, trainer and lightning, to be started by torchrun; spawn and slurm, which
start two ranks by multiprocessing and as srun does; plain, gan, lbfgs, accumulated and stateful, which are one process
without a process group. From the batch of update ONSET on, reading one is slow on RANKS ("1", "all"). Rank 0 prints a
line of JSON: updates, and a hash of the weights.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BATCH = 2
EVERY = 60
"""Updates between evaluations, where the framework has them."""
UPDATES = int(sys.argv[2])
ONSET = int(sys.argv[3]) if len(sys.argv) > 3 else 10**9
WHO = sys.argv[4] if len(sys.argv) > 4 else ""


class Waves(Dataset[dict[str, Tensor]]):
    """Items that take a while to read from the ONSET on."""

    def __init__(self, num: int, rank: int, onset: int = 10**9) -> None:
        self.num = num
        self.slow_from = onset * BATCH if WHO in ("all", str(rank)) else 10**9
        self.read = 0

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.read += 1
        if self.read > self.slow_from:
            self.fetch()
        x = torch.sin(torch.arange(16.0) * (index % 11))
        return {"x": x, "labels": x.sum().view(1)}

    def fetch(self) -> None:
        time.sleep(0.018)


class Device(torch.autograd.Function):
    """Stands in for a device, so that ranks do not take turns on few cores."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        time.sleep(0.012)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(0.016)
        return grad


class Net(nn.Module):
    """Two layers around the device; answers as the Trainer of transformers wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden: Tensor = Device.apply(torch.tanh(self.first(x)))
        out: Tensor = self.last(hidden)
        return {"loss": (out - labels).pow(2).mean(), "logits": out}


def loaders(rank: int, size: int, accumulate: int = 1, *, own_sampler: bool = True) -> tuple[Any, Any]:
    training = Waves(UPDATES * accumulate * BATCH * size, rank, ONSET * accumulate)
    validation = Waves(10 * BATCH * size, -1)
    made = []
    for data in (training, validation):
        sampler: Any = DistributedSampler(data, size, rank, shuffle=False) if own_sampler and size > 1 else None
        made.append(DataLoader(data, batch_size=BATCH, sampler=sampler))
    return made[0], made[1]


def loop(net: Any, optimizer: Any, training: Any, validation: Any) -> int:
    updates = 0
    for batch in training:
        optimizer.zero_grad()
        net(**batch)["loss"].backward()
        optimizer.step()
        updates += 1
        if updates % EVERY == 0:
            net.eval()
            with torch.no_grad():
                for other in validation:
                    net(**other)
            net.train()
    return updates


def alone(kind: str) -> tuple[int, Any]:
    """Other shapes of an update: two optimizers, closures, several batches, a loader that resumes."""
    training, validation = loaders(0, 1, 2 if kind == "accumulated" else 1)
    net: Any = Net()
    if kind == "plain":
        return loop(net, torch.optim.AdamW(net.parameters(), lr=0.01), training, validation), list(net.parameters())
    if kind == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        training = StatefulDataLoader(training.dataset, batch_size=BATCH)
    critic: Any = Net()
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.001)
    other = torch.optim.Adam(critic.parameters())
    if kind == "lbfgs":
        optimizer = torch.optim.LBFGS(net.parameters(), lr=0.01, max_iter=2, max_eval=2)
    updates = 0
    for number, batch in enumerate(training, start=1):

        def closure(batch: Any = batch) -> Any:
            optimizer.zero_grad()
            value = net(**batch)["loss"]
            value.backward()
            return value

        if kind == "lbfgs":
            optimizer.step(closure)
        elif kind == "accumulated":
            net(**batch)["loss"].backward()
            if number % 2:
                continue
            optimizer.step()
            optimizer.zero_grad()
        else:
            if kind == "gan":
                other.zero_grad()
                critic(**batch)["loss"].backward()
                other.step()
            closure()
            optimizer.step()
        updates += 1
        if updates % EVERY == 0:
            with torch.no_grad():
                for held in validation:
                    net(**held)
    return updates, [*net.parameters(), *critic.parameters()]


def by_torch(kind: str, rank: int, size: int) -> tuple[int, Any]:
    training, validation = loaders(rank, size)
    net: Any = Net()
    if size > 1:
        dist.init_process_group("gloo", rank=rank, world_size=size)
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (size,))
        for part in (net.first, net.last, net):
            fully_shard(part, mesh=mesh)
    elif size > 1:
        net = nn.parallel.DistributedDataParallel(net)
    if kind == "compiled":
        net = torch.compile(net, backend="aot_eager")
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    updates = loop(net, optimizer, training, validation)
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in net.parameters()]
    if size > 1:
        # Gloo's threads must end before Python does, or now and then one aborts the process (pytorch#190489); the
        # model's wrapper would keep them.
        del net, optimizer
        gc.collect()
        dist.destroy_process_group()
    return updates, weights


def by_accelerate() -> tuple[int, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    training, validation = loaders(accelerator.process_index, accelerator.num_processes, 2, own_sampler=False)
    net: Any = Net()
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.01)
    net, optimizer, training, validation = accelerator.prepare(net, optimizer, training, validation)
    updates = 0
    for batch in training:
        with accelerator.accumulate(net):
            accelerator.backward(net(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            updates += accelerator.sync_gradients
        if accelerator.sync_gradients and updates % EVERY == 0:
            net.eval()
            with torch.no_grad():
                for other in validation:
                    accelerator.gather_for_metrics(net(**other)["logits"])
            net.train()
    weights = list(net.parameters())
    accelerator.end_training()
    return updates, weights


def by_trainer(rank: int, size: int) -> tuple[int, Any]:
    from transformers import Trainer, TrainingArguments

    training, validation = loaders(rank, size, 2)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=BATCH,
            gradient_accumulation_steps=2,
            num_train_epochs=1,
            eval_strategy="steps",
            eval_steps=EVERY,
            save_strategy="steps",
            save_steps=EVERY + 15,
            save_total_limit=1,
            logging_steps=50,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=0,
        )
        net = Net()
        trainer = Trainer(net, arguments, train_dataset=training.dataset, eval_dataset=validation.dataset)
        trainer.log = lambda *_, **__: None
        trainer.train()
        return trainer.state.global_step, list(net.parameters())


def by_lightning(size: int) -> tuple[int, Any]:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(**batch)["loss"]

        def validation_step(self, batch: Any, index: int) -> None:
            self.net(**batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    training, validation = loaders(int(os.environ["RANK"]), size, own_sampler=False)
    with tempfile.TemporaryDirectory() as folder:
        module = Module()
        trainer = lightning.Trainer(
            accelerator="cpu",
            strategy="ddp",
            devices=size,
            max_epochs=1,
            val_check_interval=EVERY,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, training, validation)
        return trainer.global_step, list(module.parameters())


def spawned(rank: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    train("ddp", rank, 2)


def as_srun(port: int) -> None:
    """Two tasks of a step; they know each other by Slurm's variables alone."""
    step = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    tasks = [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env=os.environ | step | place | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(2)
    ]
    sys.exit(max(task.wait() for task in tasks))


def train(kind: str, rank: int, size: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if kind == "accelerate":
        updates, weights = by_accelerate()
    elif kind == "trainer":
        updates, weights = by_trainer(rank, size)
    elif kind == "lightning":
        updates, weights = by_lightning(size)
    elif kind in ("plain", "gan", "lbfgs", "accumulated", "stateful"):
        updates, weights = alone(kind)
    else:
        updates, weights = by_torch(kind, rank, size)
    if rank == 0:
        digest = hashlib.sha256(b"".join(w.detach().numpy().tobytes() for w in weights)).hexdigest()
        print(json.dumps({"updates": updates, "weights": digest}), flush=True)


def main() -> None:
    kind = sys.argv[1]
    if kind in ("spawn", "slurm") and "SLURM_PROCID" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        if kind == "spawn":
            spawn(spawned, (port,), nprocs=2)
        else:
            as_srun(port)
    elif kind == "slurm":
        train("ddp", int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"]))
    else:
        train(kind, int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


if __name__ == "__main__":
    main()
