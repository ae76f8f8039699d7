"""Training loops of many shapes that need torch alone: `python loops.py [NAME...]`.

Each prints what it did as one line of JSON: completed update cycles, and batches trained on. Several run one after the
other, in processes of their own.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

Done = tuple[int, int]
"""Updates, batches."""

torch.set_num_threads(1)
torch.manual_seed(0)


def data(num_batches: int = 12, target: float = 1.0) -> Dataset[Any]:
    return TensorDataset(torch.randn(2 * num_batches, 4), torch.full((2 * num_batches, 1), target))


def loader(of: Dataset[Any], num_workers: int = 0) -> Iterable[Any]:
    return DataLoader(of, batch_size=2, num_workers=num_workers)


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def loss(of: Any, batch: Any) -> Any:
    x, y = batch
    return (of(x) - y).pow(2).mean()


def sgd(of: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(of.parameters(), lr=0.01)


def plain() -> Done:
    """Loaders rebuilt for each of three epochs, the data with it; an evaluation after each."""
    net = model()
    optimizer = sgd(net)
    validation = data(7)
    for _ in range(3):
        for batch in loader(data(), num_workers=1):
            optimizer.zero_grad()
            loss(net, batch).backward()
            optimizer.step()
        with torch.no_grad():
            for batch in loader(validation):
                loss(net, batch)
    return 36, 36


def accumulation() -> Done:
    """Four batches for one update; an evaluation on the very data of training every third update."""
    net = model()
    optimizer = sgd(net)
    training = data(40)
    updates = 0
    for index, batch in enumerate(loader(training)):
        loss(net, batch).backward()
        if index % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
            if updates % 3 == 0:
                with torch.no_grad():
                    for again in loader(training):
                        loss(net, again)
    return updates, 40


def closures() -> Done:
    """L-BFGS calls its closure several times in a step."""
    net = model()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4)
    for batch in loader(data(24)):

        def closure(batch: Any = batch) -> float:
            optimizer.zero_grad()
            value = loss(net, batch)
            value.backward()
            return float(value)

        optimizer.step(closure)
    return 24, 24


def two_optimizers(critic_steps: int) -> Done:
    """As a GAN: the critic steps on each batch, the generator after every `critic_steps` of them."""
    critic, generator = model(), model()
    optimizers = sgd(critic), torch.optim.Adam(generator.parameters())
    updates = 0
    for index, batch in enumerate(loader(data(24 * critic_steps))):
        optimizers[0].zero_grad()
        loss(critic, batch).backward()
        optimizers[0].step()
        if index % critic_steps == critic_steps - 1:
            optimizers[1].zero_grad()
            loss(generator, batch).backward()
            optimizers[1].step()
            updates += 1
    return updates, 24 * critic_steps


def two_data_sets() -> Done:
    """Labelled and unlabelled batches for each update."""
    net = model()
    optimizer = sgd(net)
    for labelled, unlabelled in zip(loader(data(24)), loader(data(24)), strict=True):
        optimizer.zero_grad()
        (loss(net, labelled) + loss(net, unlabelled)).backward()
        optimizer.step()
    return 24, 48


def scaler() -> Done:
    """A gradient scaler that leaves out its first steps, and one in the middle."""
    net = model()
    optimizer = sgd(net)
    scale = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=1000)
    for index, batch in enumerate(loader(data(30))):
        optimizer.zero_grad()
        value = loss(net, batch) * (float("inf") if index == 20 else 1.0)
        scale.scale(value).backward()
        scale.step(optimizer)
        scale.update()
    return 30, 30


def in_backward() -> Done:
    """An optimizer per parameter, which steps as soon as its gradient is there."""
    net = model()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.01) for parameter in net.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for batch in loader(data(24)):
        loss(net, batch).backward()
    return 24, 24


class Duck:
    """An optimizer without torch's base, as DeepSpeed's."""

    def __init__(self, parameters: Iterator[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)

    def step(self) -> None:
        for parameter in self.parameters:
            assert parameter.grad is not None
            parameter.data.add_(parameter.grad, alpha=-0.01)
            parameter.grad = None


def duck() -> Done:
    """No optimizer that can be seen: each batch is an iteration, and the 32 that it takes to be sure count too."""
    net = model()
    optimizer = Duck(net.parameters())
    for batch in loader(data(50)):
        loss(net, batch).backward()
        optimizer.step()
    return 50, 50


def compiled() -> Done:
    """Forward and step go through the compiler."""
    net: Any = torch.compile(model(), backend="aot_eager")
    optimizer = torch.optim.Adam(net.parameters(), lr=torch.tensor(0.01))
    step = torch.compile(optimizer.step, backend="eager")
    for batch in loader(data(24)):
        optimizer.zero_grad()
        loss(net, batch).backward()
        step()
    return 24, 24


def fsdp2() -> Done:
    """Sharded over the one rank there is, which is enough for its collectives; evaluated every eight updates."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        net: Any = model()
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(net[0], mesh=mesh)
        fully_shard(net, mesh=mesh)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=True)
        training, validation = data(24), data(5)
        for index, batch in enumerate(loader(training)):
            optimizer.zero_grad()
            loss(net, batch).backward()
            optimizer.step()
            if index % 8 == 7:
                with torch.no_grad():
                    for other in loader(validation):
                        loss(net, other)
        dist.destroy_process_group()
    return 24, 24


class Raises(torch.optim.SGD):
    """Now and then its step fails, and the user goes on."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls % 10 == 0:
            raise FloatingPointError("planted")
        return super().step(closure)


def step_raises() -> Done:
    """The batches of steps that raised are in the next update that was completed."""
    net = model()
    optimizer = Raises(net.parameters(), lr=0.01)
    for batch in loader(data(35)):
        optimizer.zero_grad()
        loss(net, batch).backward()
        try:
            optimizer.step()
        except FloatingPointError:
            continue
    return 32, 35


LOOPS: dict[str, Callable[[], Done]] = {
    "plain": plain,
    "accumulation": accumulation,
    "closures": closures,
    "one_to_one": lambda: two_optimizers(1),
    "five_to_one": lambda: two_optimizers(5),
    "two_data_sets": two_data_sets,
    "scaler": scaler,
    "in_backward": in_backward,
    "duck": duck,
    "compiled": compiled,
    "fsdp2": fsdp2,
    "step_raises": step_raises,
}


def main(names: list[str]) -> None:
    for name in names:
        # A process for each, without loading torch again.
        child = os.fork() if len(names) > 1 else 0
        if child:
            _, status = os.waitpid(child, 0)
            if status:
                sys.exit(f"{name} failed")
            continue
        updates, batches = LOOPS[name]()
        print(json.dumps({"loop": name, "pid": os.getpid(), "updates": updates, "batches": batches}), flush=True)
        if len(names) > 1:
            return


if __name__ == "__main__":
    main(sys.argv[1:] or list(LOOPS))
