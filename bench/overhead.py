"""python -m bench.overhead: what eroica costs a training, at rest and in a window, by both routes, the peers beside it.

    python -m bench.overhead            the hooks (`bench.probe`), 3 rounds of 1 rank and of 2 (gloo, DDP): 20 minutes
    python -m bench.overhead --quick    1 round, 1 rank, no hooks

Each kind is a training of its own (`overhead_job`), one after the other, in turn over the rounds; what is compared was
measured in the same round. Not a test: it needs a machine that does nothing else, and says what load it met. Columns
of CPU time count what all threads of the process computed; a busy machine disturbs them least.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bench import machine, probe, tables
from bench.measure import ROOT, Failure, Spread, progress
from bench.overhead_job import DONE, PROFILE_FROM, PROGRESS, STOP_AT, WINDOW
from bench.peers import Environment, environment
from bench.tables import Table, Target, figure
from eroica.commands import Command, Frames, State, Verb, parse_answer
from eroica.ondemand import BySteps, OnDemand
from eroica.ring import ANSWER, post, read_flight

WARM_STEPS = 50
CALM_STEPS = 100
"""Measured before the window, and after it."""
AHEAD_S = 3.0
"""How far ahead a window is asked for: Kineto asks once a second."""
_PATIENCE_S = 300.0
_JOB = ROOT / "bench" / "overhead_job.py"


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to train."""

    name: str
    job: str
    """Told to the job: who it imports."""
    frames: Frames | None = None
    """A window in process, asked for through the ring."""
    stacks: bool | None = None
    """A window on demand, with Python's stacks or without."""
    has_end_point: bool = False


KINDS = (
    Kind("bare", "bare"),
    Kind("eroica, at rest", "eroica"),
    Kind("eroica in process, sampled frames", "eroica", frames=Frames.SAMPLED),
    Kind("eroica in process, traced frames", "eroica", frames=Frames.TRACED),
    Kind("on demand, at rest", "bare", has_end_point=True),
    Kind("on demand, traced frames", "bare", stacks=True, has_end_point=True),
    Kind("on demand, no frames", "bare", stacks=False, has_end_point=True),
    Kind("torch.profiler, with_stack", "profiler"),
    Kind("TraceML, summary mode", "traceml"),
)


@dataclass(slots=True)
class Run:
    """One training, measured."""

    calm_ms: float
    """Median step before the window."""
    calm_cpu_ms: float
    """What the process computes per step, all of its threads."""
    exit_s: float
    import_s: float
    peak_mb: float
    calm_gap_ms: float
    """Longest time without the GIL for a second thread, before the window; 0 = below 5 ms."""
    window: dict[str, float] = field(default_factory=dict)
    """Empty without a window."""


class Board:
    """Where the ranks say how far they are; see `overhead_job`."""

    def __init__(self, path: Path, size: int) -> None:
        path.write_bytes(bytes(256))
        with path.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 256)).cast("q")
        self._size = size

    def progress(self) -> int:
        """Steps that all ranks have done."""
        return min(self._words[PROGRESS : PROGRESS + self._size])

    def done(self) -> bool:
        """All have said that their trace is written."""
        return all(self._words[DONE : DONE + self._size])

    def stop(self, steps: int) -> None:
        """Let the training end so many steps from now."""
        self._words[STOP_AT] = self.progress() + steps


def train(kind: Kind, size: int, python: str, calm_steps: int = CALM_STEPS) -> Run:
    """One training. Raises Failure."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name, _end_point(kind, Path(name)) as point:
        folder = Path(name)
        board = Board(folder / "board", size)
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WORLD_SIZE": str(size)}
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "EROICA_RING_DIR": str(folder)}
        environ |= {"EROICA": "1" if kind.job == "eroica" else "0"} | (point.environment(environ) if point else {})
        log = folder / "log"
        with log.open("wb") as sink:
            jobs = [
                subprocess.Popen(command, env=environ | {"RANK": str(rank)}, cwd=folder, stdout=sink, stderr=sink)
                for rank, command in enumerate(_commands(kind, size, python, folder))
            ]
            try:
                wait = _waiter(jobs, point, log)
                wait(lambda: board.progress() >= WARM_STEPS + calm_steps)
                began, is_written = _begin_window(kind, size, folder, board, point, wait)
                wait(is_written)
                written_ns = time.monotonic_ns()
                board.stop(calm_steps)
                wait(lambda: all(job.poll() is not None for job in jobs))
                ended_ns = time.monotonic_ns()
            finally:
                for job in jobs:
                    job.kill()
                    job.wait()
        if any(job.returncode for job in jobs):
            raise Failure(f"{kind.name}: {_last_words(log)}")
        told = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(size)]
    return _measured(told, began, written_ns, ended_ns, calm_steps)


def _commands(kind: Kind, size: int, python: str, folder: Path) -> list[list[str]]:
    if kind.job != "traceml":
        return [[python, str(_JOB), str(folder), kind.job]] * size
    launcher = [python, "-m", "traceml_ai.launcher.cli", "run", str(_JOB), "--mode", "summary", "--run-name", "bench"]
    launcher += ["--nproc-per-node", str(size), "--master-port", str(_free_port()), "--aggregator-port"]
    return [[*launcher, str(_free_port()), "--logs-dir", str(folder / "logs"), "--args", str(folder), kind.job]]


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        assert isinstance(port, int)
        return port


@contextmanager
def _end_point(kind: Kind, folder: Path) -> Iterator[OnDemand | None]:
    point = OnDemand(folder / "kineto") if kind.has_end_point else None
    try:
        yield point
    finally:
        if point:
            point.close()


def _waiter(
    jobs: Sequence[subprocess.Popen[bytes]], point: OnDemand | None, log: Path
) -> Callable[[Callable[[], bool]], None]:
    def wait(condition: Callable[[], bool]) -> None:
        """Until it holds, answering Kineto meanwhile. Raises Failure."""
        limit = time.monotonic() + _PATIENCE_S
        while not condition():
            if any(job.poll() for job in jobs) or time.monotonic() > limit:
                raise Failure(_last_words(log))
            if point:
                point.poll(0.01)
            else:
                time.sleep(0.01)

    return wait


def _last_words(log: Path) -> str:
    return " ".join(log.read_text(errors="replace").strip().splitlines()[-3:])[-300:] or "no end in sight"


def _begin_window(
    kind: Kind,
    size: int,
    folder: Path,
    board: Board,
    point: OnDemand | None,
    wait: Callable[[Callable[[], bool]], None],
) -> tuple[int | None, Callable[[], bool]]:
    """First step of the window, and how to see that its traces are written."""
    if kind.job == "profiler":
        return PROFILE_FROM, board.done
    at, since = board.progress(), time.monotonic()
    wait(lambda: board.progress() >= at + 10)
    start = board.progress() + max(20, int(AHEAD_S * 10 / (time.monotonic() - since)))
    if point and kind.stacks is not None:
        pids = [int((folder / f"rank{rank}.pid").read_text()) for rank in range(size)]
        wait(lambda: set(pids) <= set(point.known()))
        window = BySteps(start=start, num_steps=WINDOW, round_up=1)
        paths = [
            point.request(pid, folder / f"trace{rank}.json", window, stacks=kind.stacks)
            for rank, pid in enumerate(pids)
        ]
        return start, lambda: all(path.exists() for path in paths)
    if kind.frames is not None:
        command = Command(window=1, verb=Verb.PREPARE, start=start, num_steps=WINDOW, frames=kind.frames)
        rings = sorted(folder.glob("rank*.ring"))
        for ring in rings:
            post(ring, command.word())
        wait(lambda: all(_state(ring) == State.PREPARED for ring in rings))
        commit = Command(window=1, verb=Verb.COMMIT, start=start, num_steps=WINDOW, frames=kind.frames)
        for ring in rings:
            post(ring, commit.word())
        paths = [folder / "captures" / "1" / f"rank{rank}.json" for rank in range(size)]
        return start, lambda: _all_done(rings, paths)
    return None, lambda: True


def _state(ring: Path) -> State | None:
    answer = parse_answer(read_flight(ring).words[ANSWER])
    return answer[1] if answer and answer[0] == 1 else None


def _all_done(rings: Sequence[Path], paths: Sequence[Path]) -> bool:
    for ring in rings:
        state = _state(ring)
        if state is not None and state > State.DONE:
            raise Failure(f"the window ended as {state.name.lower()}")
    return all(path.exists() for path in paths)


def _measured(
    told: Sequence[Mapping[str, Any]], began: int | None, written_ns: int, ended_ns: int, calm_steps: int
) -> Run:
    """Of several ranks the worst; the steps of all are the same, since each waits for the others."""
    ends = [each["ends"] for each in told]
    last = began if began is not None else WARM_STEPS + calm_steps
    calm = median(_lengths(ends[0], WARM_STEPS, last - 2))
    cpu = told[0]["cpu"]
    calm_cpu = (cpu[last - 2] - cpu[WARM_STEPS]) / (last - 2 - WARM_STEPS)
    first_ns = ends[0][WARM_STEPS]
    window_ns = ends[0][last - 2]
    run = Run(
        calm_ms=calm,
        calm_cpu_ms=calm_cpu / 1e6,
        exit_s=(ended_ns - max(each["over_ns"] for each in told)) / 1e9,
        import_s=max(each["import_s"] for each in told),
        peak_mb=max(each["peak_mb"] for each in told),
        calm_gap_ms=_longest(told, first_ns, window_ns),
    )
    if began is not None:
        written = next(i for i, end in enumerate(ends[0]) if end > written_ns)
        over = began + WINDOW
        writing = _lengths(ends[0], over + 1, written)
        run.window = {
            "window": median(_lengths(ends[0], began, over)) / calm,
            "writing": median(writing) / calm if writing else float("nan"),
            "worst": max(max(_lengths(each, began - 1, written + 1)) for each in ends) / calm,
            "after": median(_lengths(ends[0], written + 1, len(ends[0]))) / calm,
            "gap_ms": _longest(told, window_ns, ends[0][min(written + 1, len(ends[0]) - 1)]),
            "cpu_s": (cpu[written] - cpu[began - 2] - (written - began + 2) * calm_cpu) / 1e9,
            "written_s": (written_ns - ends[0][over - 1]) / 1e9,
        }
    return run


def _lengths(ends: Sequence[int], first: int, last: int) -> list[float]:
    """Milliseconds of the steps of these numbers, from 0, `last` left out."""
    return [(ends[i] - ends[i - 1]) / 1e6 for i in range(max(first, 1), min(last, len(ends)))]


def _longest(told: Sequence[Mapping[str, Any]], begin_ns: int, end_ns: int) -> float:
    return max(
        (length / 1e6 for each in told for at, length in each["late"] if begin_ns - 1e7 <= at < end_ns), default=0.0
    )


def _tables(size: int, runs: Mapping[str, Sequence[Run]], left_out: Mapping[str, str]) -> Iterator[Table]:
    bare = runs["bare"]
    rows: list[tuple[str, ...]] = []
    window_rows: list[tuple[str, ...]] = []
    targets: list[Target] = []
    for name, found in runs.items():
        if not found:
            continue
        ratio = Spread.of([run.calm_ms / other.calm_ms for run, other in zip(found, bare, strict=False)])
        cells = [
            Spread.of([getattr(run, key) for run in found]) for key in ("calm_ms", "import_s", "exit_s", "peak_mb")
        ]
        gap = Spread.of([run.calm_gap_ms for run in found])
        cpu = Spread.of([run.calm_cpu_ms / other.calm_cpu_ms for run, other in zip(found, bare, strict=False)])
        rows.append((name, figure(cells[0]), figure(ratio), figure(cpu), figure(gap), *map(figure, cells[1:])))
        if found[0].window:
            spreads = {key: Spread.of([run.window[key] for run in found]) for key in found[0].window}
            window_rows.append((name, *map(figure, spreads.values())))
            if name.startswith(("eroica", "on demand")):
                targets += [
                    Target(f"{name}: longest gap at most 100 ms", spreads["gap_ms"].middle <= 100),
                    Target(f"{name}: worst step at most 3 x the median", spreads["worst"].middle <= 3),
                ]
    ranks = f"{size} rank{'s' if size > 1 else ''}"
    notes = tuple(f"{name} is left out: {why}" for name, why in left_out.items())
    at_rest = ("kind", "step, ms", "x bare", "its CPU, x bare", "longest gap, ms", "imports, s", "exit, s", "peak MB")
    yield Table(f"Training on {ranks}, outside of a window", at_rest, tuple(rows), notes=notes)
    columns: tuple[str, ...] = ("kind", "step in it, x", "while written, x", "worst step, x", "100 steps after, x")
    columns += ("longest gap, ms", "CPU beyond the steps, s", "trace after, s")
    title = f"A window of {WINDOW} steps on {ranks}; x = times the median step before it"
    yield Table(title, columns, tuple(window_rows), tuple(targets))


def main(given: Sequence[str] | None = None) -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 round, 1 rank")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--ranks", type=int, action="append", metavar="N", help="may be repeated (1, 2)")
    parser.add_argument("--only", action="append", metavar="WORD", help="kinds with this word in their name, and bare")
    parser.add_argument("--no-peers", action="store_true", help="leave TraceML out")
    arguments = parser.parse_args(given)
    absent = Environment("traceml", Path(), {}, "not asked for")
    peer = absent if arguments.no_peers else environment("traceml")
    tables.show_facts(machine.facts({"torch": machine.version("torch"), **peer.versions}))
    if not arguments.quick:
        probe.main([])
    wanted = [kind for kind in KINDS if not arguments.only or any(w in kind.name for w in ("bare", *arguments.only))]
    for size in arguments.ranks or ((1,) if arguments.quick else (1, 2)):
        runs: dict[str, list[Run]] = {kind.name: [] for kind in wanted}
        left_out: dict[str, str] = {}
        for turn in range(1 if arguments.quick else arguments.rounds):
            for kind in wanted:
                if kind.job == "traceml" and peer.problem:
                    left_out[kind.name] = peer.problem
                if kind.name in left_out:
                    continue
                progress(f"{size} ranks, round {turn + 1}: {kind.name}")
                try:
                    runs[kind.name].append(
                        train(kind, size, str(peer.python) if kind.job == "traceml" else sys.executable)
                    )
                except Failure as failure:
                    left_out[kind.name] = str(failure)
        progress("")
        if not runs["bare"]:
            print(f"bench: {left_out['bare']}", file=sys.stderr)
            return 1
        for table in _tables(size, runs, left_out):
            tables.show(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
