"""A capture window inside of a training process: torch's own profiler for some steps, agreed on through the mailbox.

`Capture` is called at each boundary (the end of an outermost optimizer step, or of a dataloader's next). As a rule it
compares the mailbox with the word it last acted upon, and that is all. On a command it answers, begins and ends the
profiler at the boundaries that were agreed on, and leaves `captures/WINDOW/rank<R>.json` beside its ring, complete when
it has that name. No window, no thread, no profiler, no cost.

The profiler belongs to the thread that began it, so all but the file is done at hooks, on the training thread. Its stop
and its export hold the GIL, about 3 and 1.5 us per event; the stop must be paid where it is, the export is left to a
thread, so that training goes on in between. To fork and let a child export was measured and left: it adds a fork to the
stop to save the export, and is not safe where CUDA is initialised (`bench/capture.py`).

A capture that fails, fails alone: its own guard ends it, the rest of the probe goes on. The user's profiler comes
first: while one is prepared or active no window begins, and one that begins inside of ours ends ours before.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import json
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any

from eroica import ring as flight
from eroica.commands import Command, Frames, State, Unit, Verb, answer, parse
from eroica.probe import weave
from eroica.probe.fitting import fitted
from eroica.probe.frames import TURNS, Sampler
from eroica.probe.thrift import Thrift
from eroica.ring import CAPTURE, Ring, what

FOLDER = "captures"
"""Beside the rings; in it a folder per window."""
MOST_WINDOW_S = 60.0
"""A window is over by then, with the steps that it has: op-dense training makes 400,000 events a second, of 0.4 kB
until the stop and 1.5 kB at it."""
GRACE_S = 1.0
"""If no boundary comes so long after, whatever the training thread runs is interrupted to stop the profiler."""
LEAST_FREE_BYTES = 200 << 20
"""Room for the traces of several ranks of ~40,000 events, 12 MB each."""
WRITE_S = 10.0
"""How long the end of the process waits for a trace that is being written."""
_MOST_COLLECTIONS = 10_000
_FIRST_FRAME_ID = 1 << 40
"""Ids of sampled frames; torch's own count from 1."""


class Capture:
    """What one process knows of windows. All methods but `_write` and what it calls run on the training thread."""

    def __init__(self, is_foreign: Callable[[TracebackType | None], bool], thrift: Thrift) -> None:
        """`is_foreign`: whether an exception is one that a signal handler of the user raised in the midst of us.
        `thrift`: is told when windows begin and end."""
        self._is_foreign = is_foreign
        self._thrift = thrift
        self.heard = 0
        """The mailbox word last acted upon."""
        self.has_begun = False
        """A window has begun, and nobody has looked at the settings since: what it shows may come from a change."""
        self.is_open = False
        """A window is agreed on, or under way, or being written: look closer at each boundary."""
        self._has_refused = False
        """Another window was proposed while this one is under way: by a coordinator that has taken another's place."""
        self._command: Command | None = None
        self._state = State.ABORTED
        self._window: _Window | None = None
        self._pending: object = None
        self._writer: threading.Thread | None = None
        self._foreign: weakref.WeakSet[Any] = weakref.WeakSet()
        """The user's profilers that are prepared or active."""

    # --- hooks -------------------------------------------------------------------------------------------------------

    def stepped(self, ring: Ring, num_steps: int, num_nexts: int) -> None:
        """An outermost optimizer step has ended."""
        if self.is_open or ring.mailbox != self.heard:
            self._guarded(ring, Unit.STEPS, num_steps, num_nexts)

    def fetched(self, ring: Ring, num_steps: int, num_nexts: int) -> None:
        """A dataloader's next has ended."""
        if self.is_open or ring.mailbox != self.heard:
            self._guarded(ring, Unit.NEXTS, num_steps, num_nexts)

    def interrupted(self, ring: Ring) -> None:
        """An exception has left a step or a next: what is captured now is no ordinary iteration."""
        if self._window is not None:
            try:
                self._discard(ring, State.DISCARDED)
            except Exception as error:
                self._fail(ring, error)

    def finish(self, ring: Ring | None) -> None:
        """The process ends: leave torch without an active profiler, which would crash it, and no half-written file."""
        window = self._window
        if window is not None and ring is not None:
            self.interrupted(ring)
        if self._state == State.WRITING and self._writer is not None:
            self._writer.join(WRITE_S)

    def forked(self) -> None:
        """In a forked child: a loader's worker must not go on recording what its parent began."""
        window, self._window = self._window, None
        self._thrift.end_window()
        self.is_open = False
        self._command = None
        TURNS.as_usual()  # the thread that would do so is the parent's
        if window is not None:
            with contextlib.suppress(Exception):
                sys.modules["torch"]._C._autograd._clear_callbacks()
                if window.command.frames == Frames.TRACED:
                    sys.setprofile(None)
                window.detach()

    # --- the user's profilers ----------------------------------------------------------------------------------------

    def prepares(self, profiler: object, ring: Ring | None) -> None:
        """Somebody prepares a profiler: end ours first, since torch has one at a time."""
        if self._window is not None and self._window.profiler is profiler:
            return
        if profiler is not None:
            self._foreign.add(profiler)
        if self._window is not None and ring is not None:
            try:
                self._discard(ring, State.BUSY)
            except Exception as error:
                self._fail(ring, error)

    def starts(self, ring: Ring | None) -> None:
        """Some kind of profiler starts, perhaps the one that was prepared."""
        window = self._window
        if window is not None and window.profiler is not None and not window.is_starting:
            self.prepares(None, ring)

    def released(self, profiler: object) -> None:
        """Somebody's profiler has stopped."""
        self._foreign.discard(profiler)

    # --- the protocol ------------------------------------------------------------------------------------------------

    def _guarded(self, ring: Ring, unit: Unit, num_steps: int, num_nexts: int) -> None:
        try:
            word = ring.mailbox
            if word != self.heard:
                self.heard = word
                ring.set(flight.HEARD, word - (1 << 64) if word >> 63 else word)
                command = parse(word)
                if command is not None:
                    self._obey(ring, command, num_steps, num_nexts)
            if self.is_open:
                self._at_boundary(ring, unit, num_steps, num_nexts)
        except Exception as error:
            self._fail(ring, error)

    def _obey(self, ring: Ring, command: Command, num_steps: int, num_nexts: int) -> None:
        known = self._command
        if command.verb == Verb.OUTSIDE:
            self._thrift.begin_window(time.monotonic_ns())
            return
        if self._window is None:
            self._thrift.end_window()
        if command.verb == Verb.PREPARE:
            if self.is_open and known is not None and known.window != command.window and self._state != State.PREPARED:
                # There is room for one answer, and what becomes of this window may be in its place before it is read.
                self._has_refused = True
                ring.set(flight.ANSWER, answer(command.window, State.BUSY))
                return
            self._command = command
            self._enter(ring, self._prepared(ring, command, num_steps, num_nexts))
        elif known is None or known.window != command.window:
            # A word about a window that we were never asked to prepare: a commit that came over a prepare unseen.
            if command.verb == Verb.COMMIT and not self.is_open:
                self._command = command
                state = self._prepared(ring, command, num_steps, num_nexts)
                self._enter(ring, State.COMMITTED if state == State.PREPARED else state)
        elif command.verb == Verb.COMMIT:
            if self._state == State.PREPARED:
                self._command = command
                self._enter(ring, State.COMMITTED)
        elif self._window is not None:
            self._discard(ring, State.ABORTED)
        elif self._state in (State.PREPARED, State.COMMITTED):
            self._enter(ring, State.ABORTED)

    def _enter(self, ring: Ring, state: State) -> None:
        self._state = state
        self.is_open = state in (State.PREPARED, State.COMMITTED, State.RUNNING, State.WRITING)
        if self._command is not None:
            ring.set(flight.ANSWER, answer(self._command.window, state))
        if self._has_refused and not self.is_open:
            self._has_refused, self.heard = False, 0  # what lies in the mailbox is answered anew

    def _prepared(self, ring: Ring, command: Command, num_steps: int, num_nexts: int) -> State:
        """PREPARED, or why not."""
        if (num_steps if command.unit == Unit.STEPS else num_nexts) > command.start or not command.num_steps:
            return State.LATE
        if self._is_busy(command):
            return State.BUSY
        why = _why_unable(ring, command.window)
        if why:
            ring.note(capture=command.window, fault=why[:300])
            return State.UNABLE
        return State.PREPARED

    def _is_busy(self, command: Command) -> bool:
        profiler = sys.modules.get("torch.autograd.profiler")
        return bool(
            self._foreign
            or sys.modules["torch"].autograd._profiler_enabled()
            or getattr(profiler, "_is_profiler_enabled", False)
            or (command.frames == Frames.TRACED and sys.getprofile() is not None)
        )

    def _at_boundary(self, ring: Ring, unit: Unit, num_steps: int, num_nexts: int) -> None:
        command, window = self._command, self._window
        assert command is not None
        if window is not None:
            if threading.get_ident() != window.thread:
                return
            if unit == command.unit:
                window.marks.append((num_steps if unit == Unit.STEPS else num_nexts, num_nexts, time.time_ns()))
            if len(window.marks) > command.num_steps and window.doom is None:
                self._end(ring, window)
            elif time.monotonic() >= window.deadline:
                self._cut_short(ring, window)
            return
        if unit != command.unit or self._state not in (State.PREPARED, State.COMMITTED):
            return
        count = num_steps if unit == Unit.STEPS else num_nexts
        if count < command.start:
            return
        if self._state == State.PREPARED or count > command.start:
            self._enter(ring, State.LATE)
        elif self._is_busy(command):
            self._enter(ring, State.BUSY)
        elif _is_graph_capturing() or not _is_python_thread():
            # A thread of the autograd engine, where optimizers step inside of backward, would see itself alone.
            self._enter(ring, State.UNABLE)
        else:
            window = self._window = _Window(ring, command, num_steps)
            self._thrift.begin_window(time.monotonic_ns())
            window.begin(lambda: self._overdue(ring, window))
            window.marks.append((count, num_nexts, time.time_ns()))
            self.has_begun = True
            self._enter(ring, State.RUNNING)

    def _cut_short(self, ring: Ring, window: _Window) -> None:
        """The time is over: what is complete is kept."""
        if self._window is not window:
            return
        if window.doom is not None:
            self._discard(ring, window.doom)
        elif len(window.marks) > 1:
            self._end(ring, window)
        else:
            self._discard(ring, State.DISCARDED)

    def _overdue(self, ring: Ring, window: _Window) -> None:
        """On the sampler's thread: the time is over and no boundary comes, as when training has ended and something
        else goes on. The profiler can be stopped by its own thread only, and the main one can be called in."""
        if window.thread != threading.main_thread().ident:
            return

        def stop(_: object) -> int:
            try:
                self._cut_short(ring, window)
            except Exception as error:
                with contextlib.suppress(Exception):
                    self._fail(ring, error)
            return 0

        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
        self._pending = kind(stop)  # the call has to outlive this function
        ctypes.pythonapi.Py_AddPendingCall(self._pending, None)

    def _end(self, ring: Ring, window: _Window) -> None:
        """The steps are done: stop, and leave the file to the sampler's thread."""
        self._window = None
        self._thrift.end_window()
        window.stop(ring, False)
        self._enter(ring, State.WRITING)
        self._writer = threading.Thread(target=self._write, args=(ring, window), name="eroica export", daemon=True)
        self._writer.start()

    def _write(self, ring: Ring, window: _Window) -> None:
        try:
            window.write(ring.path.parent, ring.get(flight.RANK))
            state = State.DONE
        except Exception as error:
            with contextlib.suppress(Exception):
                ring.note(capture=window.command.window, fault=f"{type(error).__name__}: {error}"[:300])
            state = State.FAILED
        with contextlib.suppress(Exception):
            self._enter(ring, state)

    def _discard(self, ring: Ring, state: State) -> None:
        window = self._window
        if window is None:
            return
        if threading.get_ident() != window.thread:
            # Its own thread does it, at the next boundary or when the time is over.
            window.doom, window.deadline = state, 0.0
            return
        self._window = None
        self._thrift.end_window()
        window.stop(ring, True)
        self._enter(ring, state)

    def _fail(self, ring: Ring, error: Exception) -> None:
        """The guard of captures. What a signal handler of the user raised while a line of ours ran is raised again."""
        window = self._window
        is_mine = window is not None and threading.get_ident() == window.thread
        with contextlib.suppress(Exception):
            ring.note(
                capture=self._command.window if self._command else 0, fault=f"{type(error).__name__}: {error}"[:300]
            )
            self._discard(ring, State.FAILED)
        if is_mine or window is None:
            self._window = None
            self._thrift.end_window()
            with contextlib.suppress(Exception):
                self._enter(ring, State.FAILED)
        if self._is_foreign(error.__traceback__):
            raise error


class _Window:
    """One window under way."""

    def __init__(self, ring: Ring, command: Command, num_steps: int) -> None:
        self.command = command
        self.thread = threading.get_ident()
        self.tid = threading.get_native_id()
        self.deadline = time.monotonic() + MOST_WINDOW_S
        self.marks: list[tuple[int, int, int]] = []
        """Boundaries so far: raw count, nexts, wall clock."""
        self.profiler: Any = None
        self.is_starting = False
        self.doom: State | None = None
        """Why it is to be discarded, as another thread found."""
        self._sampler: Sampler | None = None
        """It holds the window, too: let go of as the window ends, for jobs that run without the garbage collector."""
        self._collections: list[tuple[int, int, int]] = []
        """Garbage collections: thread, begin and end by the wall clock."""
        self._collecting: dict[int, int] = {}
        self._begin_ns = time.monotonic_ns()
        self._record = ring.begin(what(CAPTURE), self._begin_ns, -1, 0, command.window, 0, num_steps)

    def begin(self, overdue: Callable[[], None]) -> None:
        """Start the profiler, here and now."""
        torch = sys.modules["torch"]
        module = sys.modules["torch.autograd.profiler"]
        has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        # Not torch.profiler.profile: that imports the compiler's settings, which takes a second.
        self.profiler = module.profile(
            use_kineto=True,
            use_device="cuda" if has_cuda else None,
            with_stack=self.command.frames == Frames.TRACED,
            record_shapes=self.command.frames == Frames.SIZED,
        )
        # Older versions of torch read all events into Python objects when a window ends, where training waits for it.
        self.profiler._parse_kineto_results = lambda *_, **__: []
        self.is_starting = True
        self.profiler._prepare_trace()
        self.profiler._start_trace()
        self.is_starting = False
        _add_metadata(torch)
        gc.callbacks.append(self._collect)
        is_looking = self.command.frames in (Frames.SAMPLED, Frames.SIZED)
        self._sampler = Sampler(self.thread, is_looking, MOST_WINDOW_S + GRACE_S, overdue)
        self._sampler.start()

    def stop(self, ring: Ring, is_lost: bool) -> None:
        """Stop the profiler; nothing of ours runs in training afterwards. On the thread that began it."""
        self.detach()
        try:
            if self.profiler is not None:
                self.profiler.__exit__(None, None, None)
        finally:
            if is_lost:
                self.profiler = self._sampler = None
            ring.end(self._record, time.monotonic_ns() - self._begin_ns, is_lost)

    def detach(self) -> None:
        """All but the profiler itself."""
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._collect)
        if self._sampler is not None:
            self._sampler.stop()

    def _collect(self, phase: str, info: dict[str, int]) -> None:
        """For `gc.callbacks`."""
        ident = threading.get_native_id()
        if phase == "start":
            self._collecting[ident] = time.time_ns()
        elif ident in self._collecting and len(self._collections) < _MOST_COLLECTIONS:
            self._collections.append((ident, self._collecting.pop(ident), time.time_ns()))

    def write(self, folder: os.PathLike[str], rank: int) -> None:
        """Export, add frames, collections and step marks, and give the file its name."""
        target = os.path.join(_made_folder(folder, self.command.window), f"rank{rank}.json")
        draft = os.path.join(os.path.dirname(target), f".rank{rank}.{os.getpid()}.json")
        try:
            profiler, self.profiler = self.profiler, None
            profiler.export_chrome_trace(draft)
            del profiler
            if not os.path.exists(draft):  # Kineto says so to nobody
                raise OSError("torch wrote no trace; the folder of the rings may be full")
            os.chmod(draft, 0o600)
            weave.weave(draft, self._events(draft))
            os.replace(draft, target)
        finally:
            self._sampler = None
            for path in (draft, f"{draft}.tmp"):  # Kineto's own draft, if the disk was full
                with contextlib.suppress(OSError):
                    os.unlink(path)

    def _events(self, draft: str) -> list[str]:
        pid, base = os.getpid(), weave.base_ns(draft)
        marks = _iteration_marks(self.marks)
        events = [
            weave.event("user_annotation", f"ProfilerStep#{count}", pid, self.tid, begin, end, base)
            for (count, begin), (_, end) in itertools.pairwise(marks)
        ]
        events += [weave.event("python_function", "Python GC", pid, *span, base) for span in self._collections]
        if self._sampler is not None and self.command.frames in (Frames.SAMPLED, Frames.SIZED):
            self._sampler.thread.join()
            seen = self._sampler.seen()
            spans = fitted(seen, weave.host_events(draft), self.marks[0][2], self.marks[-1][2])
            events += weave.frames(spans, pid, base, _FIRST_FRAME_ID)
        return events


def _iteration_marks(boundaries: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Count and instant of the boundaries between iterations.

    Steps that follow each other with no batch fetched in between (two optimizers, one per parameter) are one burst, and
    its end is the boundary. Without nexts each step is one. Wrong where one iteration fetches batches between steps of
    several optimizers: that gives an iteration per batch.
    """
    if boundaries[0][1] == boundaries[-1][1]:
        return [(count, at) for count, _, at in boundaries]
    kept = [one for one, following in itertools.pairwise(boundaries) if following[1] > one[1]]
    sizes = Counter(after[0] - before[0] for before, after in itertools.pairwise(kept))
    last = boundaries[-1]
    if not kept or not sizes or last[0] - kept[-1][0] == sizes.most_common(1)[0][0]:
        kept.append(last)
    return [(count, at) for count, _, at in kept]


def _add_metadata(torch: Any) -> None:
    """Who this is, as torch.profiler writes it."""
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    told: dict[str, object] = {}
    if distributed is not None and distributed.is_initialized():
        told = {
            "backend": distributed.get_backend(),
            "rank": distributed.get_rank(),
            "world_size": distributed.get_world_size(),
            "pg_count": distributed.get_pg_count(),
            "pg_config": distributed._get_all_pg_configs(),
        }
    elif os.environ.get("RANK", "").isdecimal():
        told = {"rank": int(os.environ["RANK"])}
        if os.environ.get("WORLD_SIZE", "").isdecimal():
            told["world_size"] = int(os.environ["WORLD_SIZE"])
    if told:
        torch.autograd._add_metadata_json("distributedInfo", json.dumps(told, default=int))


def _is_python_thread() -> bool:
    ident = threading.get_ident()
    return any(thread.ident == ident for thread in threading.enumerate())


def _is_graph_capturing() -> bool:
    cuda = sys.modules["torch"].cuda
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())


def _why_unable(ring: Ring, window: int) -> str:
    """Why this process cannot capture; "" if it can."""
    torch = sys.modules.get("torch")
    profiler = sys.modules.get("torch.autograd.profiler")
    if torch is None or not hasattr(getattr(profiler, "profile", None), "_prepare_trace"):
        return "no torch whose profiler we know"
    if not torch.autograd.kineto_available():
        return "a torch built without Kineto"
    if _is_graph_capturing():
        return "a CUDA graph is being captured"
    try:
        folder = _made_folder(ring.path.parent, window)
        room = os.statvfs(folder)
        if not os.access(folder, os.W_OK | os.X_OK) or room.f_bavail * room.f_frsize < LEAST_FREE_BYTES:
            return f"no room in {folder}"
    except OSError as error:
        return str(error)
    return ""


def _made_folder(rings: os.PathLike[str], window: int) -> str:
    """The folder of a window. The folder of the rings is not made anew: if it has gone, somebody has cleaned up."""
    above = os.path.join(rings, FOLDER)
    folder = os.path.join(above, str(window))
    for path in (above, folder):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
    return folder
