"""Training loops of all shapes in one process, for `test_probe.py`: prints what the ring says that each did, as JSON.

n is a dataloader next, s an outermost optimizer step, S one that a gradient scaler left out, ! follows what raised.
torch comes first here, and eroica after it; there is no process group, RANK alone makes it a rank.
"""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import eroica  # noqa: F401
from eroica import ring as flight
from eroica.probe.recorder import RECORDER

# Targets far from what an untrained model gives: with the largest scale the first loss is infinite in any case.
DATA = TensorDataset(torch.ones(6, 4), torch.full((6, 1), 100.0))


class Sub(torch.optim.Adam):
    """Its step is wrapped twice by torch."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Duck:
    """An optimizer without torch's base, as DeepSpeed's."""

    def __init__(self, parameters: Iterator[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.param_groups = [{"params": self.parameters}]

    def step(self) -> None:
        for parameter in self.parameters:
            assert parameter.grad is not None
            parameter.data.add_(parameter.grad, alpha=-0.1)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


class Fragile(torch.optim.SGD):
    """Raises in its second step, from inside of the nested step."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        if self.count == 2:
            raise FloatingPointError("planted")
        return super().step(closure)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([DATA[index] for index in range(len(DATA))])


class Broken(Dataset[Any]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        raise KeyError("planted")


def run(
    make: Callable[[Any], Any],
    *,
    data: Any = DATA,
    num_workers: int = 0,
    scale: float | None = None,
    closure: bool = False,
    every: int = 1,
    compiled: bool = False,
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=scale) if scale else None
    step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
    for index, (x, y) in enumerate(DataLoader(data, batch_size=2, num_workers=num_workers)):

        def loss(x: Any = x, y: Any = y) -> Any:
            optimizer.zero_grad()
            value = (model(x) - y).pow(2).mean()
            (scaler.scale(value) if scaler else value).backward()
            return value

        if closure:
            step(loss)
            continue
        loss()
        if (index + 1) % every:
            continue
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            with contextlib.suppress(FloatingPointError):
                step()


def two_optimizers() -> None:
    models = [torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for x, y in DataLoader(DATA, batch_size=2):
        for model, optimizer in zip(models, optimizers, strict=True):
            (model(x) - y).pow(2).mean().backward()
            optimizer.step()


def optimizer_in_backward() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Linear(1, 1))
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
    for parameter in model.parameters():
        hooked: Any = parameter
        hooked.register_post_accumulate_grad_hook(lambda parameter: optimizers[parameter].step())
    for x, y in DataLoader(DATA, batch_size=2):
        (model(x) - y).pow(2).mean().backward()


def broken_data() -> None:
    with contextlib.suppress(KeyError):
        next(iter(DataLoader(Broken())))


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1)


LOOPS: dict[str, Callable[[], None]] = {
    "sgd": lambda: run(sgd),
    "two workers": lambda: run(sgd, num_workers=2),
    "iterable": lambda: run(sgd, data=Stream()),
    "closure": lambda: run(lambda p: torch.optim.LBFGS(p, max_iter=4), closure=True),
    "accumulation": lambda: run(sgd, every=2),
    "nested": lambda: run(lambda p: Sub(p, lr=0.1)),
    "duck": lambda: run(Duck),
    "scaler": lambda: run(sgd, scale=1.0),
    "scaler finds inf": lambda: run(sgd, scale=3e38),
    "scaler and duck": lambda: run(Duck, scale=1.0),
    "in backward": optimizer_in_backward,
    "two optimizers": two_optimizers,
    "step raises": lambda: run(lambda p: Fragile(p, lr=0.1)),
    "data raise": broken_data,
    "compiled": lambda: run(lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)), compiled=True),
    "nested, compiled": lambda: run(lambda p: Sub(p, lr=torch.tensor(0.1)), compiled=True),
}


def events(path: Path, after: int) -> str:
    letters = {flight.NEXT: "n", flight.STEP: "s"}
    text = ""
    for record in flight.read_flight(path).records:
        if record.number > after and record.kind in letters:
            text += "S" if record.flags & flight.SKIPPED else letters[record.kind]
            text += "!" * record.raised + "?" * (record.duration_ns is None)
    return text


def main() -> None:
    torch.set_num_threads(1)
    said: dict[str, object] = {}
    run(sgd)
    said["without a rank"] = RECORDER.ring is None
    os.environ.update(RANK="5", WORLD_SIZE="8")
    run(sgd)
    ring = RECORDER.ring
    assert ring is not None
    said["first"] = events(ring.path, 0)
    for name, loop in LOOPS.items():
        after = max(record.number for record in flight.read_flight(ring.path).records)
        loop()
        said[name] = events(ring.path, after)
    said["steps"] = [RECORDER.num_steps, ring.words[(256 >> 3) + flight.NUM_STEPS]]
    said["recompiled"] = dict(torch._dynamo.utils.counters["recompiles"])
    said["traced"] = [name for name in torch._dynamo.utils.compilation_time_metrics if "eroica" in name]

    # A signal handler's exception that comes while a hook runs is the user's.
    def alarm(number: int, frame: object) -> None:
        raise TimeoutError("theirs")

    signal.signal(signal.SIGUSR1, alarm)
    try:
        try:
            signal.raise_signal(signal.SIGUSR1)
        except Exception as error:
            RECORDER.fail(error)
        said["handler"] = "swallowed"
    except TimeoutError:
        said["handler"] = "raised" if RECORDER.ring is ring else "raised, off"
    # A real fault: the next record does not fit. Training goes on, and the probe is silent from here.
    RECORDER.num_nexts = 1 << 70
    run(sgd)
    seen = flight.read_flight(ring.path)
    said["after a fault"] = [RECORDER.ring is None, RECORDER.is_off, seen.words[flight.STATE], seen.notes[-1]["fault"]]
    print(json.dumps(said))
    sys.stdout.flush()
    if sys.argv[1:] == ["raise"]:
        raise ValueError("the end")


if __name__ == "__main__":
    main()
