"""Adds to a trace that Kineto wrote on demand what only the rank's own code would have told: who it is, and its steps.

Such a trace has operators, collectives, Python's frames and the annotations of optimizer and loader, but no
`distributedInfo` and no ProfilerStep. Without them a diagnosis still finds rank and function (the rank by the file's
name), but numbers iterations from 0 and loses the first. Works on the end of the file's text, in place, and reads no
events. Used by whoever runs `ondemand`, with what the flight rings or the launcher know.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eroica.errors import DataError
from eroica.probe import weave

_TAIL_BYTES = 1 << 20
"""Names of threads stand behind the events, some hundred bytes each."""
_SCAN_BYTES = 1 << 26
"""How far an optimizer step is looked for; more than one step of any model."""
_CLOSING = re.compile(rb"\]\s*,\s*(?=" + weave.NAME_LAST + rb")")
_AMENDED = re.compile(rb'\]\s*,\s*"distributedInfo"')
_WINDOW = re.compile(rb'"name": "(Iteration Start: PyTorch Profiler|Record Window End)"[^}]*?"ts": (\d+)\.?(\d{0,3})')
_STEP = re.compile(rb'"name": "Optimizer\.step#[^"]*",\s*"pid": (\d+),\s*"tid": (\d+)')


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What is to be added."""

    rank: int
    world_size: int
    backend: str = ""
    groups: Sequence[Mapping[str, object]] = ()
    """As torch writes them: pg_name, pg_desc, backend_config, pg_size, ranks."""
    step_ends: Sequence[tuple[int, int]] = ()
    """Steps completed and when, ns since 1970 (not CLOCK_MONOTONIC), of outermost optimizer steps, ascending; those
    outside of the window are left out. `ProfilerStep#n` lasts from n steps completed to the end of the iteration, as in
    process."""
    per_iteration: int = 1
    """Steps from one of `step_ends` to the next; where some are missing, no iteration is marked."""


def amend(path: Path, told: Told) -> int:
    """Add it; returns how many iterations were marked. The file is complete at every moment but the one of the write.

    Raises DataError if the file is no complete trace of Kineto's or tells a rank already, OSError.
    """
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        tail = file.read()
        file.seek(0)
        head = file.read(1 << 16).partition(b'"traceEvents"')[0]
    if b'"distributedInfo"' in head or _AMENDED.search(tail):
        raise DataError(f"{path}: tells its rank already; it was written in the process, or amended before")
    closing = _CLOSING.search(tail)
    if closing is None:
        raise DataError(f"{path}: does not end as a trace of Kineto's does ({size} bytes); was the disk full?")
    events = list(_iterations(path, tail, told)) if told.step_ends else []
    if events:
        weave.weave(str(path), events)
    info = {"backend": told.backend, "rank": told.rank, "world_size": told.world_size, "pg_count": len(told.groups)}
    text = json.dumps(info | {"pg_config": [dict(group) for group in told.groups]})
    behind = tail[closing.end() :]
    with open(path, "r+b") as file:
        file.seek(-len(behind), os.SEEK_END)
        file.write(b'"distributedInfo": ' + text.encode() + b", " + behind)
    return len(events)


def _iterations(path: Path, tail: bytes, told: Told) -> Iterable[str]:
    times = [(found[1], int(found[2]) * 1000 + int(found[3].ljust(3, b"0"))) for found in _WINDOW.finditer(tail)]
    begins = [at for name, at in times if name.startswith(b"Iteration")]
    ends = [at for name, at in times if name.startswith(b"Record")]
    thread = _thread(path)
    if not begins or not ends or thread is None:
        return
    base = weave.base_ns(str(path))
    begin_ns, end_ns = base + min(begins), base + max(ends)
    for (count, start_ns), (next_count, stop_ns) in itertools.pairwise(told.step_ends):
        # Kineto begins and ends in its hook on the optimizer, ours runs some microseconds after it.
        is_inside = begin_ns <= start_ns < stop_ns and stop_ns - end_ns <= (stop_ns - start_ns) // 100
        if next_count == count + told.per_iteration and is_inside:
            yield weave.event("user_annotation", f"ProfilerStep#{count}", *thread, start_ns, stop_ns, base)


def _thread(path: Path) -> tuple[int, int] | None:
    """Pid and thread of the first optimizer step."""
    with open(path, "rb") as file:
        text = b""
        for _ in range(0, _SCAN_BYTES, 1 << 20):
            part = file.read(1 << 20)
            found = _STEP.search(text[-4096:] + part)
            if found:
                return int(found[1]), int(found[2])
            if not part:
                break
            text = part
    return None
