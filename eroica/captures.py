"""Captures of live ranks: where they lie, and what becomes of one on its host.

A rank writes its trace beside its ring; a worker process reads it here and keeps a summary of some kilobytes. Used by
`agent`; the code that diagnoses is the offline path's own.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path

from eroica.codec import write_summary
from eroica.errors import DataError, UserError
from eroica.offline import keep_freed_memory
from eroica.pattern import summarize
from eroica.trace import Samples, read_trace

NICENESS = 10
"""Of a process that reads captures: it shares the host with the training."""


def capture_path(folder: Path, window: int, rank: int) -> Path:
    """The capture of `rank` whose ring lies in `folder`."""
    return folder / "captures" / str(window) / f"rank{rank}.json"


def lower_priority() -> None:
    """For the start of a worker process."""
    with contextlib.suppress(OSError):
        os.nice(NICENESS)


def summarize_capture(path: str, rank: int, world_size: int, host: str, samples: Samples | None) -> bytes | str:
    """The summary of one capture, encoded, or why there is none; for a worker process.

    The ring knows rank, world size and host better than the trace: a profiler that runs before the process group is
    there, or without one, notes none.
    """
    keep_freed_memory()
    try:
        summary = summarize(read_trace(path, rank=rank), samples)
    except (DataError, UserError, OSError) as error:
        return str(error)
    except MemoryError:
        return f"{path}: there is not enough memory to read it"
    return write_summary(replace(summary, rank=rank, world_size=world_size or summary.world_size, host=host))
