"""Captures inside of one training process, case after case: prints what became of each. Imports eroica first."""

from __future__ import annotations

import cProfile
import gc
import json
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import eroica  # noqa: F401  (arms the probe)
from eroica.commands import Command, Frames, Unit, Verb, parse_answer
from eroica.probe import capture
from eroica.probe.recorder import RECORDER
from eroica.ring import ANSWER, post

MODEL = torch.nn.Linear(16, 16)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.01)
said: dict[str, Any] = {}
windows = 0


def step(batch: torch.Tensor | None = None) -> None:
    """One step of training."""
    OPTIMIZER.zero_grad()
    MODEL(torch.ones(4, 16) if batch is None else batch).sum().backward()
    OPTIMIZER.step()


def ring() -> Any:
    """The ring of this process."""
    assert RECORDER.ring is not None
    return RECORDER.ring


def ask(verb: Verb, **more: Any) -> None:
    """Leave a word about the current window in the mailbox."""
    post(ring().path, Command(window=windows, verb=verb, **more).word())


def ask_for(num_steps: int, frames: Frames = Frames.SAMPLED, ahead: int = 2, unit: Unit = Unit.STEPS) -> None:
    """A window that begins some boundaries from now."""
    global windows
    windows += 1
    count = RECORDER.num_steps if unit == Unit.STEPS else RECORDER.num_nexts
    for verb in (Verb.PREPARE, Verb.COMMIT):
        ask(verb, start=count + ahead, num_steps=num_steps, frames=frames, unit=unit)
        if verb == Verb.PREPARE:
            if unit == Unit.STEPS:
                step()
            assert unit == Unit.NEXTS or state() != "COMMITTED", "the prepare was passed over"


def state() -> str:
    """What the process answered last, about the current window."""
    told = parse_answer(ring().get(ANSWER))
    return told[1].name if told and told[0] == windows else "none"


def settled() -> str:
    """The same, once nothing is being written."""
    deadline = time.monotonic() + 60
    while state() == "WRITING" and time.monotonic() < deadline:
        time.sleep(0.01)
    return state()


def file() -> Path:
    """Where the current window's trace goes."""
    path: Path = ring().path.parent / "captures" / str(windows) / "rank0.json"
    return path


def left() -> list[object]:
    """What would be left behind."""
    return [
        sorted(thread.name for thread in threading.enumerate()),
        len(gc.callbacks),
        torch._C._autograd._profiler_enabled(),
        sys.getprofile(),
    ]


def main() -> None:
    step()
    kept = ring().path.parent.with_name("kept")
    before = left()
    for frames in Frames:
        ask_for(3, frames)
        for _ in range(5):
            step()
        said[f"window {frames.name}"] = [settled(), str(file())]
    deadline = time.monotonic() + 60
    while left() != before and time.monotonic() < deadline:
        time.sleep(0.01)  # the thread that wrote is about to end
    said["left"] = left() == before
    said["mode"] = [oct(path.stat().st_mode & 0o777) for path in (file(), file().parent, file().parent.parent)]
    said["files"] = sorted(path.name for path in file().parent.iterdir())

    ask_for(2, ahead=-5)
    step()
    said["late"] = state()

    ask_for(2, ahead=3)
    ask(Verb.PREPARE, start=RECORDER.num_steps + 2, num_steps=2)
    step()
    said["prepared"] = state()
    step()
    said["no commit"] = state()

    ask_for(5)
    step()
    step()
    said["running"] = state()
    ask(Verb.ABORT)
    step()
    said["abort"] = [state(), file().exists(), torch._C._autograd._profiler_enabled()]

    with torch.profiler.profile() as profiler:
        ask_for(2)
        for _ in range(4):
            step()
        said["theirs first"] = state()
    said["theirs first, steps"] = sum(event.name.startswith("Optimizer.step") for event in profiler.events() or ())

    schedule = torch.profiler.schedule(wait=0, warmup=3, active=2)
    with torch.profiler.profile(schedule=schedule) as profiler:
        ask_for(2)
        step()
        said["theirs warms up"] = state()

    ask_for(6)
    for _ in range(3):
        step()
    said["ours first"] = state()
    with torch.profiler.profile() as profiler:
        step()
        step()
    said["they come"] = [state(), file().exists(), torch._C._autograd._profiler_enabled()]
    said["they come, steps"] = sum(event.name.startswith("Optimizer.step") for event in profiler.events() or ())

    ask_for(6)
    for _ in range(3):
        step()
    with torch.autograd.profiler.emit_itt():  # type: ignore[no-untyped-call]
        step()
    said["itt comes"] = state()

    profile = cProfile.Profile()
    profile.enable()
    ask_for(2, Frames.TRACED)
    step()
    said["cProfile and tracing"] = state()
    ask_for(2, Frames.SAMPLED)
    for _ in range(4):
        step()
    said["cProfile and sampling"] = settled()
    profile.disable()

    original = OPTIMIZER.__class__.zero_grad
    ask_for(4)
    step()
    step()
    try:
        for batch in DataLoader(Broken(), batch_size=4):
            step(batch)
    except ValueError as error:
        said["their exception"] = str(error)
    said["exception"] = [state(), torch._C._autograd._profiler_enabled()]
    assert OPTIMIZER.__class__.zero_grad is original

    ask_for(4)
    for _ in range(2):
        step()
    for (batch,) in DataLoader(TensorDataset(torch.ones(16, 16)), batch_size=4, num_workers=2):
        step(batch)
    said["loader's workers"] = settled()

    ask_for(3, ahead=2, unit=Unit.NEXTS)
    for (batch,) in DataLoader(TensorDataset(torch.ones(32, 16)), batch_size=4):
        MODEL(batch).sum().backward()
    said["nexts"] = [settled(), str(file())]

    other = torch.optim.SGD(MODEL.parameters(), lr=0.01)
    source = iter(DataLoader(TensorDataset(torch.ones(64, 16)), batch_size=4))
    for _ in range(2):
        step(next(source)[0])
        other.step()
    ask_for(8, ahead=3)
    for _ in range(6):
        step(next(source)[0])
        other.step()
    said["two optimizers"] = [settled(), str(file())]

    capture.MOST_WINDOW_S, capture.GRACE_S = 0.2, 0.1
    for wanted, done in (("time is over", 2), ("time is over at once", 1)):
        ask_for(8)
        for _ in range(done):
            step()
        deadline = time.monotonic() + 60
        while state() == "RUNNING" and time.monotonic() < deadline:
            MODEL(torch.ones(4, 16))
        said[wanted] = [settled(), str(file()), file().exists(), torch._C._autograd._profiler_enabled()]
    capture.MOST_WINDOW_S, capture.GRACE_S = 60.0, 1.0

    ask_for(3)
    for _ in range(3):
        step()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    step()
    step()
    said["disk full"] = [settled(), sorted(path.name for path in file().parent.iterdir())]
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    ask_for(3)
    for _ in range(3):
        step()
    os.rename(ring().path.parent, kept)
    for _ in range(2):
        step()
    said["folder gone"] = settled()
    step()
    said["still recording"] = RECORDER.ring is not None
    print(json.dumps(said).replace(f"{ring().path.parent}/", f"{kept}/"))


class Broken(torch.utils.data.Dataset[torch.Tensor]):
    """Fails at its sixth sample."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 6:
            raise ValueError("no sample 6")
        return torch.ones(16)


if __name__ == "__main__":
    main()
