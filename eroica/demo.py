"""Runs the training of `eroica demo` in real processes, and compares a diagnosis with what was planted.

Not an analysis and not a training: `demos/train.py` trains, `offline` diagnoses the traces that it leaves, and neither
knows of this module. The record of what was planted lies beside the traces, never among them. Used by `cli` alone.

The ranks are started by torchrun, as users start theirs, on a port that it picks itself. torchrun gives every rank a
session of its own, so a signal to its process group would miss them: a run that must be stopped is stopped as a tree.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from eroica.errors import UnavailableError, UserError
from eroica.findings import Diagnosis

FAULTS = {
    "slow_input": "one rank reads its samples slowly: time.sleep in the dataset's __getitem__",
    "backward_delay": "one rank is slow in the middle of its backward pass: time.sleep in a module's backward hook",
    "healthy": "nothing is wrong, and nothing must be found",
}
_CAUSES = {"slow_input": "input_pipeline", "backward_delay": "host_python"}
_SCRIPT = Path(__file__).parent / "demos" / "train.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A training to run."""

    fault: str
    """One of FAULTS."""
    num_ranks: int = 4
    num_steps: int = 20
    """Profiled steps."""
    delay_s: float = 0.06
    """What the fault costs per step; unless `effect` is given."""
    effect: float | None = None
    """The same as a share of the healthy step, which the training measures first."""
    culprit: int | None = None
    """Rank with the fault; None draws one."""
    seed: int | None = None
    """For the drawing; None = by chance."""
    timeout_s: float = 180.0

    def __post_init__(self) -> None:
        if self.fault not in FAULTS:
            raise UserError(f"no fault {self.fault!r} can be planted; choose one of {', '.join(FAULTS)}")
        if self.culprit is not None and not 0 <= self.culprit < self.num_ranks:
            raise UserError(
                f"rank {self.culprit} does not exist among {self.num_ranks} ranks; they are numbered from 0"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Planted:
    """What a training did on purpose."""

    fault: str
    healthy_step_s: float
    """Median step before the fault, under the profiler."""
    culprit: int | None = None
    delay_s: float = 0.0
    """Per step."""
    function: str = ""
    file: str = ""
    lines: tuple[int, int] = (0, 0)
    """First and last source line of the function."""

    def __str__(self) -> str:
        step = f"healthy step {self.healthy_step_s * 1e3:.1f} ms"
        if self.culprit is None:
            return f"nothing; {step}"
        place = f"{self.function} ({self.file}:{self.lines[0]})"
        return f"{self.delay_s * 1e3:.1f} ms per step in {place} on rank {self.culprit}; {step}"


def train(plan: Plan, out: Path) -> Planted:
    """Run the training; leaves out/traces/rank<R>.json, out/planted.json and out/training.log.

    Raises UnavailableError if torch is missing or the time runs out, UserError if `out` holds something else or the
    training fails. No process of the training outlives the call.
    """
    if importlib.util.find_spec("torch") is None:
        raise UnavailableError("the demo trains with torch, which is not installed; try: pip install 'eroica[live]'")
    traces = _prepare(out)
    culprit = random.Random(plan.seed).randrange(plan.num_ranks) if plan.culprit is None else plan.culprit
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={plan.num_ranks}"]
    command += [str(_SCRIPT), f"--traces={traces}", f"--fault={plan.fault}", f"--culprit={culprit}"]
    command += [f"--steps={plan.num_steps}", f"--delay-ms={plan.delay_s * 1e3}"]
    if plan.effect is not None:
        command.append(f"--effect={plan.effect}")
    log = out / "training.log"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("wb") as sink, _signals_as_exceptions():
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=environment, start_new_session=True
        )
        try:
            status = process.wait(plan.timeout_s)
        except subprocess.TimeoutExpired:
            raise UnavailableError(
                f"the training did not end within {plan.timeout_s:g} s and was stopped; raise --timeout, or see {log}"
            ) from None
        finally:
            if process.poll() is None:
                _kill_tree(process.pid)
                process.wait()
    if status:
        raise UserError(f"the training failed with exit status {status}; {log} says why")
    record = json.loads((out / "planted.json").read_text())
    return Planted(**record | {"lines": tuple(record.get("lines", (0, 0)))})


def names(diagnosis: Diagnosis, planted: Planted) -> bool:
    """True if the diagnosis blames the planted rank, function and cause and nobody else; or nobody if healthy."""
    if planted.culprit is None:
        return diagnosis.kind == "healthy" and not diagnosis.findings
    if diagnosis.kind != "slow" or not diagnosis.findings:
        return False
    first = diagnosis.findings[0]
    places = (first.function.location, first.function.user_location) if first.function else ()
    return (
        first.cause == _CAUSES[planted.fault]
        and any(_inside(place, planted) for place in places)
        and all(finding.ranks == str(planted.culprit) for finding in diagnosis.findings)
    )


def _inside(place: str | None, planted: Planted) -> bool:
    path, _, line = (place or "").rpartition(":")
    first, last = planted.lines
    return os.path.basename(path) == planted.file and line.isdecimal() and first <= int(line) <= last


def _prepare(out: Path) -> Path:
    """An empty out/traces. Deletes what an earlier demo left there, and nothing else."""
    traces = out / "traces"
    traces.mkdir(parents=True, exist_ok=True)
    if (out / "planted.json").exists():
        for file in traces.glob("rank*.json"):
            file.unlink()
        (out / "planted.json").unlink()
    if any(traces.iterdir()):
        raise UserError(f"{traces} holds files that no demo wrote; choose another directory with --out")
    return traces


@contextlib.contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that the processes of the training are ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill_tree(root: int) -> None:
    """Kill a process and all that descend from it: stopped first, so that none starts another meanwhile."""
    family: set[int] = set()
    found = {root}
    while found:  # ends with a look at the children of processes that were all stopped before it
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        family |= found
        found = _children(family) - family
    for pid in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _children(parents: set[int]) -> set[int]:
    found = set()
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # "pid (name) state parent ...", where the name may hold anything.
            if int(file.read_text(errors="replace").rpartition(")")[2].split()[1]) in parents:
                found.add(int(file.parent.name))
    return found
