"""Captures of live ranks: where they lie, and what becomes of one on its host.

A rank writes its trace beside its ring; a worker process reads it here and keeps a summary of some kilobytes. Used by
`agent`; the code that diagnoses is the offline path's own.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context, parent_process, resource_tracker
from pathlib import Path
from typing import ParamSpec, TypeVar

from eroica.calls import read_told
from eroica.codec import write_summary
from eroica.errors import DataError, UserError
from eroica.offline import keep_freed_memory
from eroica.pattern import summarize
from eroica.trace import Samples, read_trace

NICENESS = 10
"""Of a process that reads captures: it shares the host with the training."""
MOST_READERS = 4
"""Processes that read captures at once, if the host has twice as many cores."""
_NOT_FOR_READERS = (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGHUP, signal.SIGTERM)
_P = ParamSpec("_P")
_T = TypeVar("_T")


class Readers:
    """The processes that read captures: started when the first one comes, so that a job that stays well never pays for
    them, and started anew when one was killed, as the kernel may do where memory is short."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def submit(self, work: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Have `work` done by one of them. Its result raises BrokenProcessPool if one of them was killed meanwhile."""
        _start_tracker()
        # A process is started here, if at all; what Ctrl-C sends to all of the terminal's job is not for it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_READERS)
        try:
            if self._pool is not None:
                try:
                    return self._pool.submit(work, *args, **kwargs)
                except BrokenProcessPool:
                    self._pool.shutdown(wait=True)
            num = max(1, min(MOST_READERS, (os.cpu_count() or 2) // 2))
            self._pool = ProcessPoolExecutor(num, get_context("spawn"), initializer=_settle)
            return self._pool.submit(work, *args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        """End them; what they had not begun is dropped."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


def _start_tracker() -> None:
    """Start the process of Python's own that clears up after us, unless it runs: it warns of what it finds if we are
    killed, on the stderr of the job. Where this is left to others they unblock signals by it."""
    quiet = "ignore:resource_tracker:UserWarning"
    sys.warnoptions.append(quiet)
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove(quiet)


def capture_path(folder: Path, window: int, rank: int) -> Path:
    """The capture of `rank` whose ring lies in `folder`."""
    return folder / "captures" / str(window) / f"rank{rank}.json"


def close_captures(folder: Path, window: int, keep: Path | None) -> None:
    """Delete the captures of a window, of ranks whose rings lie in `folder`, and leave a copy in `keep` if that is
    named. Raises OSError if they cannot be kept; they are deleted all the same."""
    source = folder / "captures" / str(window)
    try:
        if keep is not None and source.is_dir():
            shutil.copytree(source, keep, dirs_exist_ok=True)
    finally:
        shutil.rmtree(source, ignore_errors=True)


def forget_captures(folder: Path) -> None:
    """Delete all captures of ranks whose rings lie in `folder`: also those of windows that nobody has closed, since
    their coordinator is gone."""
    shutil.rmtree(folder / "captures", ignore_errors=True)


def _settle() -> None:
    """For the start of a worker process: after the training, and not longer than who started it."""
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@dataclass(frozen=True, slots=True)
class OwnRing:
    """Where a rank has recorded its calls."""

    path: str
    shift_ns: int
    """From CLOCK_MONOTONIC, its clock, to the wall clock."""


CLOCK_SET_S = 5.0
"""By so much a trace may be longer than it took to record: beyond, the clock that it is told by was set meanwhile."""


def summarize_capture(
    path: str,
    rank: int,
    world_size: int,
    host: str,
    samples: Samples | None,
    own: OwnRing | None = None,
    lasted_s: float = math.inf,
) -> bytes | str:
    """The summary of one capture, encoded, or why there is none; for a worker process. What the ring knows of the
    rank's communication is written into the file before. `lasted_s`: how long it was recorded, by a clock that nobody
    sets.

    The ring knows rank, world size and host better than the trace: a profiler that runs before the process group is
    there, or without one, notes none.
    """
    keep_freed_memory()
    if not os.path.exists(path):
        return "wrote a capture that somebody has deleted"
    try:
        trace = read_trace(path, rank=rank) if own is None else read_told(path, rank, own.path, own.shift_ns)
        summary = summarize(trace, samples)
        if summary.window_s > lasted_s + CLOCK_SET_S:
            return f"has a trace of {summary.window_s:.0f} s, recorded in {lasted_s:.1f} s: its clock was set meanwhile"
    except (DataError, UserError, OSError) as error:
        return str(error)
    except MemoryError:
        return f"{path}: there is not enough memory to read it"
    return write_summary(replace(summary, rank=rank, world_size=world_size or summary.world_size, host=host))
