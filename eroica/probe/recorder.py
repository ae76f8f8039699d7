"""The state of the probe in one process: whether it records, where to, and the counts that its hooks share.

One instance, `RECORDER`, since hooks are global to a process. It makes the ring at the first event of a process that
has a rank, switches everything off at the first fault, starts anew in a forked child and says so when the process
ends. The hooks (`hooks`, `collectives`) look at `ring` alone: None means that there is nothing to do.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import socket
import sys
import time
from _thread import allocate_lock
from types import ModuleType, TracebackType

from eroica import ring as flight
from eroica.probe import outside, rank, workspace
from eroica.probe.capture import Capture
from eroica.probe.environment import Environment
from eroica.probe.fallback import FALLBACK
from eroica.probe.place import job_name, ring_folder
from eroica.probe.rank import Place
from eroica.probe.thrift import Thrift
from eroica.ring import Ring

LONG_GC_NS = 200_000
"""Collections of a younger generation are recorded from this length on, 0.2 % of a step of 100 ms. All are summed."""
_PASSING = (StopIteration, StopAsyncIteration, GeneratorExit, SystemExit, KeyboardInterrupt)
"""What leaves a loop without anything being wrong."""
LAST_CALLBACKS_NS = 5_000_000_000
"""For callbacks of operations of a process group that is destroyed: they come within a moment, or never."""
LEAVING_NS = 50_000_000
"""For a thread to leave a callback where nobody can say whether it has; once per process."""
_THREADS = "/proc/self/task"
MOST_HANDLED = 16
"""Notes on exceptions that were being dealt with when a call was made. Training may run in an `except` for good (a
restart after an error): one and the same exception is noted once."""
MOST_MISSED = 16
"""Notes on batches that did not come; a ring has little room."""
_MOST_TRAIL = 3
"""Lines of the user's own code that the note on an exception keeps."""
_MOST_TEXT = 300
"""Characters of an exception's message that a note keeps; a ring has room for some hundred such notes."""


class Recorder:
    """See the module."""

    def __init__(self) -> None:
        self.ring: Ring | None = None
        """Where to record; None before the first event of a rank, and for good after a fault."""
        self.is_off = False
        self.num_nexts = 0
        self.num_steps = 0
        """Outermost optimizer steps completed, those that a gradient scaler left out included."""
        self.stepped_ns = 0
        """When the last of them was done, by CLOCK_MONOTONIC; 0: there was none."""
        self.depth = 0
        """Optimizer steps that are under way, one inside of the other."""
        self.pending: set[int] = set()
        """Records whose end a thread of the process group will tell."""
        self.tellers: set[int] = set()
        """Those threads, as the kernel numbers them."""
        self.thrift = Thrift()
        """What the hooks cost, and in which steps collectives are recorded."""
        self.capture = Capture(_is_from_signal_handler, self.thrift)
        """Windows that an agent asks for."""
        self.environment = Environment()
        self._arming = allocate_lock()
        self._is_watching = False
        self._is_helper = False
        """Another process is the rank that the environment names; only a process group would make this one a rank."""
        self._gc_begin_ns = 0
        self._gc_number = 0
        self._num_missed = 0
        self._num_handled = 0
        self._handled = 0
        """`id` of the exception that was noted last."""

    def arm(self) -> Ring | None:
        """Make the ring, if this is a rank; called at each event until it has one. Raises nothing."""
        if self.is_off or not self._arming.acquire(blocking=False):
            return None
        try:
            placed = rank.whoami(os.environ)
            if self.ring is not None or placed is None or (self._is_helper and placed.by != rank.GROUP):
                return self.ring
            if _is_data_worker():
                self.is_off = True
                return None
            self.ring = self._made(placed)
            return self.ring
        except Exception as error:
            self.fail(error)
            return None
        finally:
            self._arming.release()

    def _made(self, placed: Place) -> Ring | None:
        """The ring, or None if somebody else is this rank."""
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
        ring = Ring.create(
            ring_folder(os.environ, os.getppid()) / f"rank{placed.rank}-{os.getpid()}{flight.SUFFIX}",
            rank=placed.rank,
            world_size=placed.world_size,
            generation=int(restarts) if restarts.isdecimal() else 0,
        )
        ring.note(
            host=socket.gethostname(),
            job=job_name(os.environ),
            program=sys.argv[0] if sys.argv else "",
            python=sys.version.split()[0],
            torch=str(getattr(sys.modules.get("torch"), "__version__", "")),
            placed=placed.by,
        )
        if rank.is_taken(ring.path, placed, job_name(os.environ)):
            self._is_helper = True
            ring.path.unlink()
            ring.close()
            return None
        if not self._is_watching:
            self._is_watching = True
            atexit.register(self.finish)
            parent = sys.modules.get("multiprocessing.process")
            if parent is not None and parent.parent_process() is not None:
                # Children that multiprocessing forks leave by os._exit, past atexit.
                from multiprocessing.util import Finalize

                Finalize(None, self.finish, exitpriority=-100)
            os.register_at_fork(after_in_child=self.forked)
        gc.callbacks.append(self.collect)
        return ring

    def look(self, ring: Ring) -> None:
        """After the first and then each `LOOK_EVERY`th step (next, where there are no steps): costs, environment."""
        thrift = self.thrift
        now_ns = time.monotonic_ns()
        self.environment.look(ring, now_ns)
        if thrift.look(self.num_steps or self.num_nexts, now_ns):
            ring.set(flight.ONE_STEP_IN, thrift.one_step_in if thrift.mask else 0)
        ring.set(flight.HOOK_NS, thrift.spent_ns)

    def look_again(self, ring: Ring) -> None:
        """As a window begins: the settings as they are now."""
        self.capture.has_begun = False
        self.environment.look(ring, time.monotonic_ns(), is_due=True)

    def fail(self, error: BaseException) -> None:
        """Switch the probe off for good and note why. The one guard: every hook's `except Exception` comes here.

        What a signal handler of the user raised while one of our lines happened to run is theirs, and is raised again.
        """
        if _is_from_signal_handler(error.__traceback__):
            raise error
        self.is_off = True
        FALLBACK.cancel()
        ring, self.ring = self.ring, None
        if ring is not None:
            with contextlib.suppress(Exception):
                self.capture.interrupted(ring)
            with contextlib.suppress(Exception):
                ring.set(flight.STATE, flight.OFF)
                ring.note(fault=_text(error), at=_where(error.__traceback__))

    def leave(self, error: BaseException | None) -> None:
        """The process group is about to be taken down, in peace or while the exception `error` is on its way: then its
        clean-up may wait for ever for ranks that know nothing of it."""
        ring = self.ring
        if ring is None:
            return
        try:
            entry: dict[str, object] = {"leaving": "destroy_process_group", "clock_ns": time.monotonic_ns()}
            if error is not None and not isinstance(error, _PASSING):
                entry |= {"exception": _text(error), **_place(error.__traceback__)}
            ring.note(**entry)
        except Exception as fault:
            self.fail(fault)

    def missed(self, error: BaseException) -> None:
        """A loader's next ended by an error: some loops swallow it and go on without batches."""
        ring = self.ring
        if ring is None or self._num_missed == MOST_MISSED:
            return
        try:
            self._num_missed += 1
            ring.note(no_batch=_text(error), at=_where(error.__traceback__), clock_ns=time.monotonic_ns())
        except Exception as fault:
            self.fail(fault)

    def handles(self, ring: Ring, error: BaseException) -> None:
        """A call or a save is made while the exception `error` is dealt with: by a clean-up, say, that the other ranks
        know nothing of. May raise; the hooks are guarded."""
        if id(error) == self._handled or self._num_handled == MOST_HANDLED or isinstance(error, _PASSING):
            return
        self._handled = id(error)
        self._num_handled += 1
        ring.note(handles=_text(error), **_place(error.__traceback__), clock_ns=time.monotonic_ns())

    def finish(self) -> None:
        """At the end of the process, before the interpreter goes: wait for callbacks, say that the end was reached."""
        # A callback that needs the GIL after the interpreter has gone aborts the process. A process group's own end
        # waits for the same operations, so this adds no wait. Where it was destroyed already, what is left are those
        # on their way: whoever waited for the operation may have been woken before them.
        distributed = sys.modules.get("torch.distributed.distributed_c10d")
        until_ns = time.monotonic_ns() + LAST_CALLBACKS_NS
        while self.pending and distributed is not None:
            if not distributed.is_initialized() and time.monotonic_ns() > until_ns:
                break
            time.sleep(0.005)
        # An operation of a group that is there still may have taken longer than that.
        _wait_for_leaving(set(self.tellers), time.monotonic_ns() + LAST_CALLBACKS_NS)
        with contextlib.suppress(Exception):
            self.capture.finish(self.ring)
        if self.ring is not None:
            with contextlib.suppress(Exception):
                outside.let_go(self.ring, self.num_steps)
        FALLBACK.cancel()
        ring, self.ring = self.ring, None
        self.is_off = True
        if ring is not None:
            with contextlib.suppress(Exception):
                error = getattr(sys, "last_value", None)
                if isinstance(error, BaseException):
                    ring.note(exception=_text(error), **_place(error.__traceback__))
                ring.set(flight.STATE, flight.ENDED)
            workspace.leave(ring.path.parent)

    def forked(self) -> None:
        """In a forked child: the ring is the parent's. The child of a rank is a helper; another may become a rank."""
        self.is_off = self.is_off or self.ring is not None
        self.ring = None
        self.capture.forked()
        FALLBACK.forked()
        self.depth = 0
        self.pending = set()
        self.tellers = set()
        self._arming = allocate_lock()
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self.collect)

    def collect(self, phase: str, info: dict[str, int]) -> None:
        """For `gc.callbacks`: count every collection, record the full ones and the long ones."""
        ring = self.ring
        if ring is None:
            return
        try:
            now = time.monotonic_ns()
            generation = info["generation"]
            if phase == "start":
                self._gc_begin_ns = now
                # Only a full collection may last so long that somebody looks while it runs; others come by thousands.
                self._gc_number = self._began_gc(ring, now, generation) if generation == 2 else 0
            elif self._gc_begin_ns:
                duration_ns = now - self._gc_begin_ns
                ring.add(flight.GC_NS, duration_ns)
                ring.add(flight.NUM_GC, 1)
                number = self._gc_number
                if not number and duration_ns >= LONG_GC_NS:
                    number = self._began_gc(ring, self._gc_begin_ns, generation)
                if number:
                    ring.end(number, duration_ns, False)
                self._gc_begin_ns = 0
        except Exception as error:
            self.fail(error)

    def _began_gc(self, ring: Ring, begin_ns: int, generation: int) -> int:
        return ring.begin(flight.GC, begin_ns, -1, 0, generation, 0, self.num_steps)


def _is_data_worker() -> bool:
    data: ModuleType | None = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MOST_TEXT]


def _where(trace: TracebackType | None) -> str:
    """Innermost line that the exception passed."""
    place = ""
    while trace is not None:
        place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place[-_MOST_TEXT:]


def _place(trace: TracebackType | None) -> dict[str, object]:
    """The innermost line, and the innermost ones that look like the user's own: libraries raise for their callers."""
    trail: list[str] = []
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "-packages" not in file and "/lib/python3" not in file:
            trail.insert(0, f"{file}:{trace.tb_lineno}"[-_MOST_TEXT:])
        at, trace = f"{file}:{trace.tb_lineno}"[-_MOST_TEXT:], trace.tb_next
        if trace is None:
            return {"at": at, "trail": trail[:_MOST_TRAIL]}
    return {"at": ""}


def _is_from_signal_handler(trace: TracebackType | None) -> bool:
    codes = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()} - {None}
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


RECORDER = Recorder()


def _wait_for_leaving(threads: set[int], until_ns: int) -> None:
    """Until the threads that ran a callback have left it: they need the GIL once more to drop it, and would abort the
    process if the interpreter had gone by then. On a crowded host that takes as long as it takes."""
    if threads and not os.path.isdir(_THREADS):
        time.sleep(LEAVING_NS / 1e9)
        return
    seen_at_rest = 0
    while seen_at_rest < 2 and time.monotonic_ns() < until_ns:
        seen_at_rest = seen_at_rest + 1 if all(map(_is_at_rest, threads)) else 0
        time.sleep(0.001)


def _is_at_rest(thread: int) -> bool:
    """The thread sleeps, or has ended. It does not sleep for the GIL: reading lets go of that, which wakes it."""
    try:
        with open(f"{_THREADS}/{thread}/stat", "rb", buffering=0) as file:
            state = file.read(4096).rpartition(b")")[2].split()[0]
    except OSError:
        return True
    return state in (b"S", b"Z", b"X")
