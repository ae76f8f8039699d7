"""How long an iteration takes: the user's command under `eroica run`, and what its flight rings say afterwards.

The same for before and after a patch: a process of its own runs `eroica run --keep-rings`, the rings of all ranks give
every iteration, and those in which we captured or the job compiled are left out. The first ones are left out, too.
Where the fault costs in each step the median tells it, where it comes now and then only the mean does; how sure either
is comes from blocks of the run. A run that stands still is ended once eroica has said so. Used by `fixing`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eroica.assist.repository import TO_END_S, end_group, environment_of
from eroica.errors import EroicaError, UserError
from eroica.flights import newest_start, read_rings
from eroica.marks import watched
from eroica.ring import Flight
from eroica.steps import Pause
from eroica.untrusted import escape

WARM_UP = 10
"""Iterations at the beginning that are left out, and a tenth of a longer run: caches fill, and libraries choose."""
LEAST = 20
"""Iterations that must be left to speak of a pace."""
BLOCKS = 8
"""Parts of a run whose values are compared, to say how sure the whole is: iterations that follow each other are alike,
so that their own scatter would promise too much."""
SURE = 2.0
"""Standard errors by which two paces must differ."""
WORTH = 0.02
"""Share of the iteration by which a patch must make it shorter to be called faster: runs of one program differ by 1
%."""
_NOT_TRAINING = (Pause.CAPTURE, Pause.COMPILE, Pause.RENDEZVOUS, Pause.EVALUATION)
_LOOK_S = 0.25
_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from eroica.cli import main; sys.exit(main(sys.argv[1:]))"


@dataclass(frozen=True, slots=True)
class Measured:
    """One run."""

    status: int
    """Of the command; 124 if it was ended because time was up."""
    kinds: tuple[str, ...]
    """Kinds of the diagnoses that were made, in order."""
    summaries: tuple[str, ...]
    """What they said."""
    num_ranks: int
    num_iterations: int
    """That count."""
    iteration_s: float | None
    """Median over ranks of the median or mean iteration; None if there were too few."""
    error_s: float | None
    """Its standard error."""

    @property
    def is_broken(self) -> bool:
        """It stood still, or broke off."""
        return any(kind in ("hang", "crash") for kind in self.kinds) or self.status not in (0, 124)


def measure(words: Sequence[str], folder: Path, out: Path, *, limit_s: float, is_stable: bool) -> Measured:
    """Run `words` in `folder` under eroica. `out`: an empty folder for what it keeps; `is_stable`: the fault costs in
    each step."""
    out.mkdir(parents=True, exist_ok=True)
    root = Path(__file__).resolve().parent.parent.parent
    command = [sys.executable, "-P", "-c", _START, str(root), "run", "--keep-rings", "--out", str(out), "--", *words]
    with open(out / "output.txt", "wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment_of(folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = _until_end(process, out, time.monotonic() + limit_s)
        finally:
            end_group(process)
    told = incidents(out)
    pace, error, num, ranks = _pace(out, is_stable)
    return Measured(
        status=status if status >= 0 else 128 - status,
        kinds=tuple(kind for kind, _ in told),
        summaries=tuple(summary for _, summary in told),
        num_ranks=ranks,
        num_iterations=num,
        iteration_s=pace,
        error_s=error,
    )


def is_faster(before: Measured, after: Measured) -> bool | None:
    """True if the patch made iterations shorter, False if longer, None if neither can be said."""
    if before.iteration_s is None or after.iteration_s is None:
        return None
    gain = before.iteration_s - after.iteration_s
    error = math.hypot(before.error_s or 0.0, after.error_s or 0.0)
    if abs(gain) <= max(SURE * error, WORTH * before.iteration_s):
        return None
    return gain > 0


def _until_end(process: subprocess.Popen[bytes], out: Path, until: float) -> int:
    """The exit status. A job that stands still, or has no time left, is told to end."""
    why = 0
    while (status := process.poll()) is None:
        if not why and (time.monotonic() > until or any(kind == "hang" for kind, _ in incidents(out))):
            why = 124
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
            until = time.monotonic() + TO_END_S
        elif why and time.monotonic() > until:
            return why
        time.sleep(_LOOK_S)
    return why or status


def incidents(out: Path) -> list[tuple[str, str]]:
    """Kind and summary of what eroica has told of so far."""
    found = []
    with contextlib.suppress(OSError), open(out / "incidents.jsonl", encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError):  # the last line may be half written
                told = json.loads(line)
                if isinstance(told, dict):
                    found.append((str(told.get("kind")), str(told.get("summary"))))
    return found


def _pace(out: Path, is_stable: bool) -> tuple[float | None, float | None, int, int]:
    """Seconds per iteration, its error, iterations that count, ranks."""
    folders = sorted(out.glob("rings-*"))
    if not folders:
        return None, None, 0, 0
    try:
        flights, _ = read_rings(folders[-1])
    except EroicaError:
        return None, None, 0, 0
    latest, _ = newest_start(flights, [False] * len(flights))
    own = [found for flight, _ in latest.values() if (found := pace_of(durations(flight), is_stable)) is not None]
    num = min((len(durations(flight)) for flight, _ in latest.values()), default=0)
    if not own:
        return None, None, num, len(latest)
    return statistics.median(p for p, _ in own), statistics.median(e for _, e in own), num, len(latest)


def durations(flight: Flight) -> list[float]:
    """Seconds of the iterations of a rank that count."""
    every = list(watched(flight).iterations)
    every = every[max(WARM_UP, len(every) // 10) :]
    return [one.duration_ns / 1e9 for one in every if one.pause not in _NOT_TRAINING and not one.skipped]


def pace_of(seconds: Sequence[float], is_stable: bool) -> tuple[float, float] | None:
    """The median or mean, and its standard error by blocks; None if there are too few."""
    if len(seconds) < LEAST:
        return None
    middle = statistics.median if is_stable else statistics.fmean
    edges = [round(n * len(seconds) / BLOCKS) for n in range(BLOCKS + 1)]
    parts = [middle(seconds[a:b]) for a, b in itertools.pairwise(edges)]
    return middle(seconds), statistics.stdev(parts) / math.sqrt(len(parts))


def refuse_fixed_paths(words: Sequence[str], root: Path) -> None:
    """Raises UserError if a command names files of the checkout by full path: it would run them, and not the patch."""
    for word in words:
        if str(root) + os.sep in word or word == str(root):
            raise UserError(
                f"{escape(word, 200)} names the checkout itself, so that the patch would not be run; write paths "
                "relative to the repository's top"
            )
