"""python -m bench.capture: what a capture window costs training, by route and by how Python frames come in.

A process of one rank trains a small transformer on one thread, dense in operators, so that a window of ten steps holds
some 40,000 events. Each route takes one window in a fresh process, in turn over the rounds; a thread that wants the GIL
every millisecond tells the longest time that it could not have it. Steps are timed before, in and after the window: the
worst one from the window's begin until its file is there, the median of those after it for what is left behind. On a
busy machine wall time says little, so CPU time is told beside it: `stop` is what the training thread pays at the end of
the window, `write` what all other threads of the process pay until the file is there.

Routes: the export by a thread (what `eroica.probe.capture` does, for each kind of frames), the export at the hook that
ends the window, the export by a forked child. A route from outside, such as Kineto on demand, joins as one more
`Route`: `environ` is what its process starts with, `ask` gets a window from whoever takes it.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bench import machine
from bench.measure import ROOT

ROUNDS = 3
WARM_UP, BEFORE, WINDOW, AFTER = 10, 40, 10, 60
"""Steps."""
MOST_GAP_S = 0.1
MOST_WORST_STEP = 3.0
"""Targets of the design: longest GIL gap, worst step over the median before."""


@dataclass(frozen=True)
class Route:
    """A way to take a window."""

    frames: int
    """`eroica.commands.Frames`"""
    end: Callable[[Any, Any, Any], None] | None = None
    """Takes the place of `Capture._end`: how the file is written."""
    ask: Callable[[Path, int, int], None] | None = None
    """ask(folder of the ring, first step, number of steps), in the training process; None = by the mailbox."""
    environ: Mapping[str, str] = field(default_factory=dict)


def _at_the_hook(capture: Any, ring: Any, window: Any) -> None:
    from eroica.commands import State

    capture._window = None
    window.stop(ring, False)
    capture._enter(ring, State.WRITING)
    capture._write(ring, window)


def _by_a_child(capture: Any, ring: Any, window: Any) -> None:
    from eroica.commands import State

    capture._window = None
    window.stop(ring, False)
    capture._enter(ring, State.WRITING)
    folder, rank = ring.path.parent, ring.get(0)
    child = os.fork()
    if not child:
        status = 1
        try:
            window.write(folder, rank)
            status = 0
        finally:
            os._exit(status)
    window.profiler = None

    def reap() -> None:
        os.waitpid(child, 0)
        capture._enter(ring, State.DONE)

    threading.Thread(target=reap, daemon=True).start()


ROUTES: dict[str, Route] = {
    "thread, no frames": Route(0),
    "thread, sampled": Route(1),
    "thread, traced": Route(2),
    "at the hook, sampled": Route(1, _at_the_hook),
    "forked child, sampled": Route(1, _by_a_child),
}


class _Ticks:
    """Wants the GIL every millisecond, and knows how long it did not get it."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        before = time.perf_counter()
        while True:
            time.sleep(0.001)
            now = time.perf_counter()
            self.longest_s = max(self.longest_s, now - before - 0.001)
            before = now

    def take(self) -> float:
        """The longest since the last call."""
        longest, self.longest_s = self.longest_s, 0.0
        return longest


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def measured(route: Route) -> dict[str, float]:
    """One window in this process."""
    import torch

    import eroica  # noqa: F401
    from eroica.commands import Command, Frames, State, Verb, parse_answer
    from eroica.probe.capture import Capture
    from eroica.probe.recorder import RECORDER
    from eroica.ring import ANSWER, post

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 5)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    data = torch.randn(4, 32, 64)
    if route.end is not None:
        Capture._end = route.end  # type: ignore[method-assign, assignment]

    def step() -> float:
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - begin

    for _ in range(WARM_UP):
        step()
    ring = RECORDER.ring
    assert ring is not None
    ticks = _Ticks()
    before_cpu = time.thread_time()
    before = [step() for _ in range(BEFORE)]
    before_cpu = (time.thread_time() - before_cpu) / BEFORE
    found = {"gap before": ticks.take(), "step before": median(before)}
    resident = _resident()
    if route.ask is None:
        for verb in (Verb.PREPARE, Verb.COMMIT):
            start = RECORDER.num_steps + (2 if verb == Verb.PREPARE else 1)
            post(
                ring.path,
                Command(window=1, verb=verb, start=start, num_steps=WINDOW, frames=Frames(route.frames)).word(),
            )
            step()
    else:
        route.ask(ring.path.parent, RECORDER.num_steps + 1, WINDOW)
        step()
    ticks.take()
    during = [step() for _ in range(WINDOW - 1)]
    cpu = time.thread_time()
    during.append(step())
    cpu = time.thread_time() - cpu
    begin, begin_cpu = time.perf_counter(), time.process_time() - time.thread_time()
    writing = []
    while parse_answer(ring.get(ANSWER)) != (1, State.DONE) and time.perf_counter() - begin < 60:
        writing.append(step())
    found["write cpu"] = time.process_time() - time.thread_time() - begin_cpu
    found["stop cpu"] = cpu - before_cpu
    found |= {"file after": time.perf_counter() - begin, "gap": ticks.take()}
    found |= {"step in": median(during[:-1]), "stop": during[-1] - median(during[:-1])}
    found["worst step"] = max([*during, *writing])
    found["step while writing"] = median(writing) if writing else float("nan")
    found["grown MB"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - resident) / 1e6
    for _ in range(10):
        step()
    found["step after"] = median([step() for _ in range(AFTER)])
    (file,) = (ring.path.parent / "captures" / "1").glob("*.json")
    text = file.read_bytes()
    return found | {"events": text.count(b'"ph": "X"'), "file MB": len(text) / 1e6}


def main(arguments: Sequence[str]) -> int:
    """Print the table; with `--in ROUTE`, be the measured process; with `--rounds N`, of so many rounds."""
    if arguments[:1] == ["--in"]:
        print(json.dumps(measured(ROUTES[arguments[1]])))
        return 0
    rounds = int(arguments[1]) if arguments[:1] == ["--rounds"] else ROUNDS
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ROUTES}
    for _ in range(rounds):
        for name, route in ROUTES.items():
            with tempfile.TemporaryDirectory() as folder:
                place = {"RANK": "0", "WORLD_SIZE": "1", "EROICA_RING_DIR": folder, "OMP_NUM_THREADS": "1"}
                done = subprocess.run(
                    [sys.executable, "-m", "bench.capture", "--in", name],
                    cwd=ROOT,
                    env=os.environ | {"PYTHONPATH": str(ROOT)} | place | dict(route.environ),
                    capture_output=True,
                    text=True,
                )
            if done.returncode:
                sys.stderr.write(done.stderr)
                return 1
            found[name].append(json.loads(done.stdout))
    print(", ".join(f"{key}: {value}" for key, value in machine.facts({}).items()))
    print(f"\nmedian of {rounds} rounds; ms; x = times the median step before the window\n")
    head = (
        "route",
        "events",
        "step",
        "in window",
        "worst step",
        "after",
        "GIL gap (before)",
        "CPU of stop",
        "CPU of write",
        "file after",
        "grown MB",
    )
    print("| " + " | ".join(head) + " |\n|" + " --- |" * len(head))
    for name, results in found.items():
        print("| " + " | ".join((name, *_row(results))) + " |")
    print(f"\nTargets: GIL gap {MOST_GAP_S * 1e3:.0f} ms, worst step {MOST_WORST_STEP:g} x")
    return 0


def _row(results: list[dict[str, float]]) -> list[str]:
    def of(name: str, over: str = "") -> float:
        return median(result[name] / (result[over] if over else 1) for result in results)

    return [
        f"{of('events'):,.0f}",
        f"{of('step before') * 1e3:.1f}",
        f"{of('step in', 'step before'):.2f} x",
        f"{of('worst step') * 1e3:.0f} = {of('worst step', 'step before'):.1f} x",
        f"{of('step after', 'step before'):.3f} x",
        f"{of('gap') * 1e3:.0f} ({of('gap before') * 1e3:.0f})",
        f"{of('stop cpu') * 1e3:.0f}",
        f"{of('write cpu') * 1e3:.0f}",
        f"{of('file after') * 1e3:.0f}",
        f"{of('grown MB'):.0f}",
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
