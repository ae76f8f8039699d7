"""Runs the trainings of `eroica demo` in real processes, and compares a diagnosis with what was planted.

Not an analysis and not a training: `demos/train.py` trains, the live path watches it as it would watch any other, and
neither knows of this module. The record of what was planted lies beside what the watcher writes, never among it.
Used by `cli` alone.

The ranks are started by torchrun, as users start theirs, on a port that it picks itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from eroica.errors import UnavailableError, UserError
from eroica.findings import Diagnosis, Finding
from eroica.job import parse_ranks

FAULTS = {
    "slow_input": "one rank reads its samples slowly: time.sleep in the dataset's __getitem__",
    "backward_delay": "one rank is slow in the middle of its backward pass: time.sleep in a module's backward hook",
    "gc_rotating": "long garbage collections, now on this rank, now on that: much data that refers to itself",
    "gil_thread": "a background thread of one rank computes in Python and hardly lets go of the interpreter",
    "cpu_hog_host": "other processes compete for the CPU on which half of the ranks run",
    "checkpoint_rank0": "rank 0 saves a checkpoint to slow storage every few steps, and all others wait",
    "blocking_log": "one rank logs each step to a slow share and waits until the line is there",
    "load_imbalance": "one rank gets longer signals than the others",
    "missing_rank": "one rank waits for a file that never comes, the others for it: a hang",
    "group_order_deadlock": "one rank uses two process groups in the opposite order: a hang",
    "dead_worker": "the loader process of one rank is killed, and its loop goes on without: a hang",
    "lock_deadlock": "two threads of one rank take two locks in opposite orders: a hang",
    "healthy": "nothing is wrong, and nothing must be found",
}
HANGS = frozenset({"missing_rank", "group_order_deadlock", "dead_worker", "lock_deadlock"})
"""Faults that stop the training for good."""
_SCRIPT = Path(__file__).parent / "demos" / "train.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A training to run."""

    fault: str
    """One of FAULTS."""
    num_ranks: int = 4
    after: int = 150
    """First faulty step: what lies before is the healthy level that a watcher learns."""
    num_steps: int = 1000
    """Steps in all."""
    delay_s: float = 0.06
    """What a slow fault costs per step; unless `effect` is given."""
    effect: float | None = None
    """The same as a share of the healthy step, which the training measures first."""
    culprit: int | None = None
    """Rank with the fault; None draws one. checkpoint_rank0 has it on rank 0, gc_rotating on all in turn."""
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
class Place:
    """A function with the fault in it."""

    function: str
    file: str
    lines: tuple[int, int]
    """First and last source line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planted:
    """What a training did on purpose."""

    fault: str
    kind: str
    """Right kind of diagnosis: slow, hang or healthy."""
    cause: str
    scope: str
    ranks: tuple[int, ...] = ()
    """Culprits; () where no rank is to blame."""
    places: tuple[Place, ...] = ()
    """Functions, one of which an answer must name; () where none is to be named."""
    delay_s: float = 0.0
    """Per step."""
    healthy_step_s: float = 0.0
    """Median step before the onset."""
    step: int = 0
    """First faulty step."""
    monotonic_ns: int = 0
    """Onset, CLOCK_MONOTONIC."""
    wall_ns: int = 0
    """Onset since 1970."""

    def __str__(self) -> str:
        step = f"healthy step {self.healthy_step_s * 1e3:.1f} ms"
        if self.kind == "healthy":
            return f"nothing; {step}"
        what = FAULTS.get(self.fault, self.fault)
        where = " and ".join(f"{p.function} ({p.file}:{p.lines[0]})" for p in self.places)
        who = f", rank {', '.join(map(str, self.ranks))}" if self.ranks else ""
        return f"{what}{f'; {where}' if where else ''}{who}; from step {self.step} on; {step}"


def command(plan: Plan, out: Path) -> list[str]:
    """The command line of the training, which leaves out/planted.json from the onset on, and out/training.log. `out`
    must exist.

    Raises UnavailableError if torch is missing.
    """
    if importlib.util.find_spec("torch") is None:
        raise UnavailableError("the demo trains with torch, which is not installed; try: pip install 'eroica[live]'")
    culprit = random.Random(plan.seed).randrange(plan.num_ranks) if plan.culprit is None else plan.culprit
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={plan.num_ranks}"]
    words += [str(_SCRIPT), f"--out={out}", f"--fault={plan.fault}", f"--culprit={culprit}", f"--after={plan.after}"]
    words += [f"--steps={plan.num_steps}", f"--delay-ms={plan.delay_s * 1e3}"]
    words += [] if plan.effect is None else [f"--effect={plan.effect}"]
    # The answer shall not drown in what torchrun says about a training that hangs or is ended.
    return ["/bin/sh", "-c", 'OMP_NUM_THREADS=1 exec "$@" > "$0" 2>&1', str(out / "training.log"), *words]


def read_planted(out: Path) -> Planted | None:
    """What the training in `out` has planted; None as long as it has not."""
    try:
        record: Mapping[str, Any] = json.loads((out / "planted.json").read_text())
    except FileNotFoundError:
        return None
    onset = record["onset"]
    return Planted(
        fault=record["fault"],
        kind=record["kind"],
        cause=record["cause"],
        scope=record["scope"],
        ranks=tuple(record["ranks"]),
        places=tuple(
            Place(function=p["function"], file=p["file"], lines=(p["lines"][0], p["lines"][1]))
            for p in record["places"]
        ),
        delay_s=record["delay_s"],
        healthy_step_s=record["healthy_step_s"],
        step=onset["step"],
        monotonic_ns=onset["monotonic_ns"],
        wall_ns=onset["wall_ns"],
    )


def names(diagnosis: Diagnosis, planted: Planted | None) -> bool:
    """True if the diagnosis says what was planted, and blames nobody else; or nothing where nothing was.

    Right are the kind, the cause, the scope, the set of ranks, and a function inside of the planted lines wherever one
    was planted to be found. A deadlock is a cycle: it may name more ranks than the one that broke the order.
    """
    if planted is None or planted.kind == "healthy":
        return diagnosis.kind == "healthy" and not diagnosis.findings
    if diagnosis.kind != planted.kind or not diagnosis.findings:
        return False
    first, *others = diagnosis.findings
    ranks = set(parse_ranks(first.ranks))
    culprits = set(planted.ranks)
    # A cause of a whole host is the host's where hosts are told apart, and its ranks' where they are not.
    scopes = {planted.scope, "host"} if len(culprits) > 1 else {planted.scope}
    who = culprits <= ranks if planted.cause == "deadlock" else ranks == culprits and first.scope in scopes
    return (
        first.cause == planted.cause
        and who
        and (not planted.places or planted.scope == "rotating" or planted.cause == "gil_contention"
             or any(_inside(place, planted) for place in _places_of(first)))
        and all(set(parse_ranks(other.ranks)) <= ranks for other in others)
    )  # fmt: skip


def seconds_to(diagnosis: Diagnosis, planted: Planted) -> float | None:
    """Seconds from the onset to the diagnosis; None if the diagnosis does not tell when it was made."""
    try:
        return datetime.fromisoformat(diagnosis.created).timestamp() - planted.wall_ns / 1e9
    except ValueError:
        return None


def _places_of(finding: Finding) -> tuple[str | None, ...]:
    return (finding.function.location, finding.function.user_location) if finding.function else ()


def _inside(place: str | None, planted: Planted) -> bool:
    path, _, line = (place or "").rpartition(":")
    return line.isdecimal() and any(
        os.path.basename(path) == p.file and p.lines[0] <= int(line) <= p.lines[1] for p in planted.places
    )


_LEFT_BEHIND = ("planted.json", "training.log", "checkpoint.pt", "rank*.log")


def prepare(out: Path) -> None:
    """Make `out`, and delete what an earlier demo left there, and nothing else."""
    out.mkdir(parents=True, exist_ok=True)
    for pattern in _LEFT_BEHIND:
        for file in out.glob(pattern):
            file.unlink()
