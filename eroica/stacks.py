"""Stacks of a running process, taken from outside, and the text that `faulthandler` left inside.

`dump` runs py-spy, which reads the memory of the process: it works while the process hangs, holds the GIL in C code or
is stopped, and needs neither its help nor a word of code in it. It needs the right to trace: the same user and a kernel
that allows it, or root; without it the reason says the way out, and what `faulthandler` wrote (`probe.fallback`) is all
there is. Each process is looked at twice, a moment apart, since holding the GIL or standing on a line says little once.

It pauses the process for some milliseconds. Used by `views`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from eroica.processes import process
from eroica.source import Source
from eroica.standing import CUT, Frame, Held, Thread

TIMEOUT_S = 20.0
"""For one look; it takes 0.01 to 0.1 s, on a host that is out of memory or CPU much longer."""
BETWEEN_S = 0.25
"""Between the two looks: many times what a thread may keep the GIL in Python code (5 ms)."""
_MOST_THREADS = 256
_MOST_FRAMES = 200
_MOST_SOURCE_BYTES = 4 << 20
_IDLE_LOCKS = re.compile(r"/(threading|multiprocessing/synchronize)\.py$")


@dataclass(frozen=True, slots=True)
class Dump:
    """The threads of a process, or why there are none."""

    threads: tuple[Thread, ...] = ()
    reason: str = ""
    """Why not, and the way out; "" if there are threads."""


def dump(pid: int) -> Dump:
    """The Python threads of `pid`, the driving one first. Never raises for what may go wrong on the way."""
    binary = _binary()
    if binary is None:
        return Dump(reason="no stacks: py-spy is not installed; pip install 'eroica[live]' on every host")
    first = _look(binary, pid)
    if isinstance(first, str):
        return Dump(reason=first)
    time.sleep(BETWEEN_S)
    second = _look(binary, pid)
    threads = first if isinstance(second, str) else _steady(first, second)
    return Dump(tuple(sorted(_read_sources(threads), key=lambda thread: not thread.is_main)))


def _binary() -> str | None:
    for folder in (sysconfig.get_path("scripts"), os.path.dirname(sys.executable)):
        path = os.path.join(folder, "py-spy")
        if os.access(path, os.X_OK):
            return path
    return shutil.which("py-spy")


@dataclass(frozen=True, slots=True)
class _Seen:
    """A thread of one look."""

    thread: Thread
    ident: int
    is_idle: bool


def _look(binary: str, pid: int) -> list[_Seen] | str:
    before = process(pid)
    if before is None or before.letter in "ZX":
        return f"no stacks: process {pid} is gone"
    command = [binary, "dump", "--json", "--full-filenames", "--pid", str(pid)]
    if before.letter in "Tt":
        command.append("--nonblocking")  # it cannot be paused: it is already
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL, check=False)
    except subprocess.TimeoutExpired:
        after = process(pid)
        if before.letter not in "Tt" and after is not None and after.letter == "T":
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)  # our own look must not leave it stopped
        return f"no stacks: py-spy did not answer within {TIMEOUT_S:.0f} s; is the host out of CPU or memory?"
    except OSError as error:
        return f"no stacks: py-spy cannot be run ({error.strerror})"
    if done.returncode:
        return _reason(pid, done.stderr.decode("utf-8", "replace"))
    try:
        return _parsed(json.loads(done.stdout), pid)
    except (ValueError, RecursionError):
        return "no stacks: py-spy's answer is not JSON; its version may not know --json"


def _reason(pid: int, said: str) -> str:
    if re.search(r"(?i)permission denied|operation not permitted|EPERM", said):
        scope = ""
        with contextlib.suppress(OSError):
            scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
        yama = f" (kernel.yama.ptrace_scope is {scope})" if scope not in ("", "0") else ""
        return (
            f"no stacks: process {pid} may not be traced{yama}; run eroica as root or with CAP_SYS_PTRACE, in a "
            "container with --cap-add SYS_PTRACE, or set kernel.yama.ptrace_scope to 0"
        )
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return f"no stacks: py-spy said {lines[0][:200]!r}" if lines else "no stacks: py-spy failed without a word"


def _parsed(data: object, pid: int) -> list[_Seen]:
    seen = []
    for entry in data[:_MOST_THREADS] if isinstance(data, list) else []:
        if not isinstance(entry, dict):
            continue
        frames = entry.get("frames")
        whole = [frame for frame in frames if isinstance(frame, dict)] if isinstance(frames, list) else []
        stack = (*(_frame(frame) for frame in whole[:_MOST_FRAMES]), *_cut(len(whole) - _MOST_FRAMES))
        ident = entry.get("os_thread_id")
        name = str(entry.get("thread_name") or f"thread {ident}")
        thread = Thread(
            name, stack, is_main=ident == pid or name == "MainThread", has_gil=entry.get("owns_gil") is True
        )
        seen.append(_Seen(thread, ident if isinstance(ident, int) else 0, entry.get("active") is False))
    return seen


def _frame(entry: Mapping[str, object]) -> Frame:
    line = entry.get("line")
    return Frame(str(entry.get("name")), str(entry.get("filename")), line if isinstance(line, int) else 0)


def _cut(num: int) -> tuple[Frame, ...]:
    """What stands for the `num` outer frames that are left out."""
    return (Frame(f"... and {num} more frames", CUT, 0),) if num > 0 else ()


def _steady(first: list[_Seen], second: list[_Seen]) -> list[_Seen]:
    """The second look; idle, and holding the GIL, only where the first says so, too."""
    before = {seen.ident: seen for seen in first}
    steady = []
    for seen in second:
        old = before.get(seen.ident)
        has_gil = seen.thread.has_gil and old is not None and old.thread.has_gil
        is_idle = seen.is_idle and old is not None and old.is_idle and old.thread.frames == seen.thread.frames
        steady.append(replace(seen, thread=replace(seen.thread, has_gil=has_gil), is_idle=is_idle))
    return steady


def _read_sources(seen: list[_Seen]) -> list[Thread]:
    """Add what the source tells: lines, locks, handlers. The files are those of this host, where the process runs."""
    files: dict[str, Source | None] = {}

    def source(path: str) -> Source | None:
        if path not in files:
            files[path] = None
            with contextlib.suppress(OSError, ValueError):
                if os.path.isfile(path) and os.path.getsize(path) <= _MOST_SOURCE_BYTES:
                    files[path] = Source(Path(path).read_text("utf-8", "replace"))
        return files[path]

    threads = []
    for item in seen:
        frames, held = [], []
        waits_for = ""
        for at, frame in enumerate(item.thread.frames):
            known = source(frame.file) if frame.is_users else None
            if known is None:
                frames.append(frame)
                continue
            line = known.line(frame.line)
            frame = replace(frame, source=line.text, block=line.block)
            frames.append(frame)
            for name, taken in line.holds:
                held.append(Held(name, replace(frame, line=taken, source="")))
            is_inner = at == 0 or (at == 1 and _is_taking(frames[0]))
            if is_inner and item.is_idle:
                waits_for = line.waits_for
        threads.append(replace(item.thread, frames=tuple(frames), holds=tuple(held), waits_for=waits_for))
    return threads


def _is_taking(frame: Frame) -> bool:
    return frame.function.rpartition(".")[2] in ("acquire", "__enter__") and bool(_IDLE_LOCKS.search(frame.file))


_THREAD = re.compile(r"^(Current thread|Thread) (0x[0-9a-f]+)(?: \[([^\]]*)\])? \(most recent call first\):")
_LINE = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


def parse_faulthandler(text: str) -> tuple[Thread, ...]:
    """Threads of a text by `faulthandler`; the one that it lists last is the main one. Empty if it is none.

    It says neither who holds the GIL nor who is idle; a lock that is waited for is read from the line alone.
    """
    found: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        head = _THREAD.match(line)
        if head:
            found.append((head[3] or f"thread {head[2]}", []))
            continue
        entry = _LINE.match(line)
        if entry and found:
            number = int(entry[2]) if entry[2].isdecimal() else 0
            found[-1][1].append(Frame(entry[3], entry[1], number))
    seen = []
    for at, (name, frames) in enumerate(found[:_MOST_THREADS]):
        stack = (*frames[:_MOST_FRAMES], *_cut(len(frames) - _MOST_FRAMES))
        seen.append(_Seen(Thread(name, stack, is_main=at == len(found) - 1), at, True))
    return tuple(sorted(_read_sources(seen), key=lambda thread: not thread.is_main))
