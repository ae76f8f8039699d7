"""Python frames of a capture, by looking at the stacks of all threads every few milliseconds while the window lasts.

Not a tracer: no call is hooked and nothing is paid outside of the window. What lasts shorter than a period is seen by
chance or not at all. `Sampler` looks, on a thread of its own, and says when the time limit of the window has passed.
Used by `capture`; what the samples mean beside the operators of the trace is worked out by `fitting`.

Threads that Kineto does not know to run Python (the autograd engine's) show as well. A thread other than the training
one counts only while its CPU clock moves: one that waits for its queue all the time is no busy thread.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, repeat, tee
from operator import attrgetter, call, getitem, truth
from types import CodeType, FrameType
from typing import Any, TypeVar

T = TypeVar("T")
PERIOD_S = 0.005
"""A fault of 10 ms per step is seen in every step; a look takes some 20 to 60 us, so the cost is about 1 %."""
UNEVEN, GOLDEN = 0.6, 0.6180339887
"""Looks come up to so much of a period early or late, by turns that never repeat: at even distances they would meet a
loop of a few milliseconds in one place over and over."""
SOON_S = 0.0001
"""For so long at most the interpreter lets the training thread go on once a look is due (`sys.setswitchinterval`). With
Python's own 5 ms a look comes when that thread next gives way by itself, which it does in the functions that call
native code: what computes in Python for less is hardly seen, and others are seen in its place. A function that had 70 %
of the time, 1.4 ms in each turn of a loop, was seen in none of 177 looks with 5 ms, and in 59 % with 0.1 ms."""
FIRST_LOOKS = 4
"""After so many, if no other thread runs Python beside: those that take turns do so at the pace that they are used to,
which may be what the window is to show."""
MOST_SAMPLES = 200_000
"""At most so many stacks are noted, 24 bytes each: a minute of 16 threads. The stacks themselves are shared."""
MOST_STACKS = 20_000
"""Different stacks that are kept, some 10 MB."""
MOST_DEPTH = 128
"""Innermost frames that are kept of a stack."""
MOST_FRAMES = 4_000
"""Of all threads together that one look goes through: the deepest recursion holds the others up for 0.3 ms."""
_OF_A_THREAD = 6
"""In the number of a clock, below that of the thread: what it has run (Linux: CPUCLOCK_PERTHREAD | CPUCLOCK_SCHED)."""
_BEGIN = threading.Thread._bootstrap.__code__  # type: ignore[attr-defined]
"""Where each thread of Python's own begins and ends, for a moment not known to `threading`."""
_BUSY = 0.2
"""Share of the CPU from which on a thread off the training's path counts as at work between two looks."""


@dataclass(frozen=True, slots=True)
class Thread:
    """What was seen of one thread."""

    tid: int
    """As the operating system and Kineto number it."""
    outer: tuple[CodeType, ...] | None
    """Stack at the begin of the window, outermost first, if it trains; () for a thread of torch's own, which works for
    the one that trains; None for all others."""
    samples: list[tuple[int, tuple[CodeType, ...]]]
    """When, by the wall clock in nanoseconds, and the stack, outermost first; () where it did nothing."""


class _Turns:
    """After how long a thread that holds the interpreter is asked to let another one run."""

    def __init__(self) -> None:
        self._usual_s = 0.0
        """What it was before we shortened it; 0: we have not."""

    def soon(self) -> None:
        """After `SOON_S`, unless it is as short already."""
        now_s = sys.getswitchinterval()
        if now_s > SOON_S:
            self._usual_s = now_s
            sys.setswitchinterval(SOON_S)

    def as_usual(self) -> None:
        """As it was, unless somebody else has set it meanwhile."""
        usual_s, self._usual_s = self._usual_s, 0.0
        if usual_s and abs(sys.getswitchinterval() - SOON_S) < 1e-7:  # kept in whole microseconds
            sys.setswitchinterval(usual_s)


TURNS = _Turns()


class Sampler:
    """Looks at stacks from `start` to `stop`."""

    def __init__(self, training: int, is_looking: bool, limit_s: float, overdue: Callable[[], None]) -> None:
        """`training`: ident of the training thread. After `limit_s` it ends, and calls `overdue` on its own thread;
        with `is_looking` False that is all it does."""
        self._training = training
        self._is_looking = is_looking
        self._limit_s = limit_s
        self._overdue = overdue
        self._outer: tuple[CodeType, ...] = ()
        self._ending = threading.Lock()
        self._ending.acquire()
        self._stacks: dict[tuple[CodeType, ...], int] = {}
        self._samples: dict[int, list[tuple[int, int]]] = {}
        """By thread: when, and which stack (-1: it did nothing)."""
        self._num_samples = 0
        self._tids: dict[int, int] = {}
        """Of each thread's ident."""
        self._clocks: dict[int, tuple[int, int, int]] = {}
        """Of threads off the path: its clock, what it showed last and when."""
        self._num_looks = self._num_alone = 0
        """All looks, and those since another thread was last seen at work."""
        self._ended: list[tuple[int, list[tuple[int, int]]]] = []
        """Of those off the path whose ident another thread has by now: tid and samples."""
        self.thread = threading.Thread(target=self._run, name="eroica capture", daemon=True)

    def start(self) -> None:
        """Begin to look. Called by the training thread, at a boundary."""
        self._outer = _codes(sys._getframe())[::-1]
        self.thread.start()

    def stop(self) -> None:
        """Ask the thread to end; does not wait."""
        if self._ending.locked():
            self._ending.release()

    def _run(self) -> None:
        deadline = time.monotonic() + self._limit_s
        # What was seen until a fault stays; a capture with fewer frames is still one.
        with contextlib.suppress(Exception), contextlib.ExitStack() as ending:
            ending.callback(TURNS.as_usual)
            while not self._ending.acquire(timeout=self._next_s()):
                if time.monotonic() >= deadline:
                    self._overdue()
                    return
                if self._is_looking:
                    self._look()
                    if self._num_alone < FIRST_LOOKS:
                        TURNS.as_usual()
                    else:
                        TURNS.soon()

    def _next_s(self) -> float:
        """Until the next look; until the limit where there are none."""
        if not self._is_looking:
            return self._limit_s
        self._num_looks += 1
        return PERIOD_S * (1 + UNEVEN * (2 * (self._num_looks * GOLDEN % 1) - 1))

    def _look(self) -> None:
        if self._num_samples >= MOST_SAMPLES or len(self._stacks) >= MOST_STACKS:
            return
        now = time.time_ns()
        self._num_alone += 1
        for ident, codes in _stacks().items():
            seen = self._samples.get(ident)
            if seen is None:
                seen = self._met(ident, codes)
            if seen is None:
                continue
            try:
                is_at_work = self._is_at_work(ident, now)
            except OSError:  # its clock has gone with it, and this is another one
                self._ended.append((self._tids[ident], seen))
                seen, is_at_work = self._met(ident, codes), False
            if is_at_work and ident in self._clocks:
                self._num_alone = 0
            if seen is not None:
                seen.append((now, self._number(codes) if is_at_work else -1))
                self._num_samples += 1

    def _number(self, codes: tuple[CodeType, ...]) -> int:
        return self._stacks.setdefault(codes, len(self._stacks))

    def _outer_of(self, ident: int) -> tuple[CodeType, ...] | None:
        return None if ident in self._clocks else self._outer if ident == self._training else ()

    def _met(self, ident: int, codes: tuple[CodeType, ...]) -> list[tuple[int, int]] | None:
        """What will be seen of a thread that is new; None if it has ended or is just about to begin."""
        for found in (self._samples, self._clocks, self._tids):
            found.pop(ident, None)
        known = {thread.ident: thread for thread in threading.enumerate()}
        if ident not in known and codes[-1] is _BEGIN:
            return None
        tid = _tid(ident, known.get(ident))
        if tid is None:
            return None
        if ident != self._training and ident in known:
            clock = ~tid << 3 | _OF_A_THREAD
            try:
                self._clocks[ident] = (clock, time.clock_gettime_ns(clock), time.monotonic_ns())
            except OSError:
                return None
        self._tids[ident] = tid
        seen: list[tuple[int, int]] = []
        self._samples[ident] = seen
        return seen

    def _is_at_work(self, ident: int, now: int) -> bool:
        if ident not in self._clocks:
            return True
        clock, before, then = self._clocks[ident]
        ran, now = time.clock_gettime_ns(clock), time.monotonic_ns()
        self._clocks[ident] = (clock, ran, now)
        return ran - before > _BUSY * (now - then)

    def seen(self) -> list[Thread]:
        """What was seen. Call it when the thread has ended."""
        stacks = [codes[::-1] for codes in self._stacks]
        found = [(self._tids[ident], self._outer_of(ident), samples) for ident, samples in self._samples.items()]
        found += [(tid, None, samples) for tid, samples in self._ended]
        return [
            Thread(tid, outer, [(at, stacks[k] if k >= 0 else ()) for at, k in samples])
            for tid, outer, samples in found
        ]


def _tid(ident: int, known: threading.Thread | None) -> int | None:
    """Its number in the operating system; None of one that has ended."""
    if known is None or isinstance(known, threading._DummyThread):
        return _tids().get(ident)
    if known.native_id is not None and os.path.exists(f"/proc/self/task/{known.native_id}"):
        return known.native_id
    # `threading` knows the thread that forked by its number in the parent; it is the first one here.
    return os.getpid() if known is threading.main_thread() else None


def _tids() -> dict[int, int]:
    """By ident, those of all threads that run Python just now, also of those that Python did not start.

    The clock of a thread carries its number. It is asked of the thread's own memory, which is gone when it has ended,
    and then the process is, too. So no other thread may run between the list of threads and the questions: all of it is
    one call that does not come back to Python in between, and the interpreter is not given up in the midst of it.
    """
    idents, same = tee(chain.from_iterable(map(call, (sys._current_frames,))))
    clocks = _undisturbed(zip(idents, map(time.pthread_getcpuclockid, same), strict=False))
    return {ident: ~(clock >> 3) for ident, clock in clocks}


def _undisturbed(items: Iterable[T]) -> list[T]:
    """`list(items)`, between which no garbage is collected; `items` must be made in C.

    Before Python 3.12 any new object may begin a collection, and with it Python code: callbacks, finalizers. If another
    thread then gets the interpreter, what was just listed may be gone. And `sys._current_frames` makes objects while it
    holds the lock of the list of threads: a thread that begins or ends meanwhile waits for that lock, with the
    interpreter, for ever (python/cpython#106883, mended in 3.11.9). So collections are switched off and on again, as
    they were, in the same call: what somebody else wishes of them is not lost.
    """
    if sys.version_info >= (3, 12):
        return list(items)
    was_on, is_through = gc.isenabled(), False
    try:
        wish, same = tee(map(getitem, repeat((int, gc.enable)), map(call, (gc.isenabled,))))
        made: list[Any] = list(chain(wish, map(call, (gc.disable,)), items, map(call, same)))
        is_through = True
    finally:
        if was_on and not is_through:
            gc.enable()
    return made[2:-1]


def _stacks() -> dict[int, tuple[CodeType, ...]]:
    """Functions on the stack of each other thread that runs Python, innermost first, by ident.

    All of it is asked in one call that does not come back to Python (`_undisturbed`), and no frame is kept beyond it.
    Else other threads go on meanwhile, and where one leaves a function whose frame we hold, Python 3.11 makes a frame
    of the function before, may collect garbage in that, and its stack is not to be walked then: what was a frame may be
    anything. A frame that is kept would keep its locals alive besides.
    """
    now: dict[int, FrameType] = {}
    idents: list[int] = []
    frames: list[FrameType] = []
    codes: list[CodeType] = []
    goes_on: list[bool] = []
    # The list grows by what is made of it: each frame that another one returns to is put behind all that are there.
    first, again = (map(getattr, frames, repeat("f_back"), repeat(None)) for _ in range(2))
    steps: tuple[Callable[[], object], ...] = (
        partial(deque, map(now.update, map(call, (sys._current_frames,))), 0),
        partial(deque, map(now.pop, (threading.get_ident(),)), 0),  # our own would hold what holds it
        partial(idents.extend, now),
        partial(frames.extend, now.values()),
        partial(frames.extend, islice(filter(None, first), MOST_FRAMES)),
        partial(codes.extend, map(attrgetter("f_code"), frames)),
        partial(goes_on.extend, map(truth, again)),
        frames.clear,
        now.clear,
    )
    _undisturbed(map(call, steps))
    found: list[list[CodeType]] = [[] for _ in idents]
    whose = found[:]
    for stack, code, is_left in zip(whose, codes, goes_on, strict=False):  # `whose` grows meanwhile
        stack.append(code)
        if is_left:
            whose.append(stack)
    return {ident: tuple(stack[:MOST_DEPTH]) for ident, stack in zip(idents, found, strict=True)}


def _codes(frame: FrameType | None) -> tuple[CodeType, ...]:
    """Functions on a stack, innermost first."""
    codes: list[CodeType] = []
    while frame is not None and len(codes) < MOST_DEPTH:
        codes.append(frame.f_code)
        frame = frame.f_back
    return tuple(codes)
