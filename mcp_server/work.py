"""Long work that a client starts, asks about and can give up: each once, however often it is asked for.

A call that lasts longer than a minute dies in many clients, and the client then asks again. So nothing long is done
within a call: it runs in a thread of its own under a key, whoever asks for the same key while it runs or after it is
done gets the same work, and every call returns within seconds. What is given up stops at its next step.

Used by `sources` (a folder of traces must be read before it can be asked about) and by `acting`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from enum import StrEnum
from typing import Generic, TypeVar

from eroica.errors import EroicaError, UnavailableError

Result = TypeVar("Result")

MOST_RUNNING = 2
"""At once: each may take all cores."""
MOST_KEPT = 16
"""Works whose end is remembered."""

Progress = Callable[[int, int, str], None]


class State(StrEnum):
    """How far a work is."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class GivenUp(Exception):
    """Raised inside of a work whose caller gave it up; nobody else sees it."""


class Work(Generic[Result]):
    """One piece of it. Its fields are written by its own thread and read by all."""

    def __init__(self, key: str, what: str) -> None:
        self.key = key
        self.what = what
        """For people."""
        self.state = State.RUNNING
        self.done = 0
        self.total = 0
        """Steps; 0 = not known."""
        self.error = ""
        """One sentence, once it has failed."""
        self.result: Result | None = None
        self._ended = threading.Event()
        self._is_given_up = threading.Event()

    def wait(self, seconds: float) -> State:
        """Its state, at its end or after `seconds`."""
        self._ended.wait(seconds)
        return self.state

    def give_up(self) -> None:
        """Stop it at its next step."""
        self._is_given_up.set()

    def progress(self, done: int, total: int, what: str) -> None:
        """A step is done. Raises GivenUp if nobody wants the rest."""
        if self._is_given_up.is_set():
            raise GivenUp
        self.done, self.total = done, total

    def run(self, function: Callable[[Progress], Result]) -> None:
        """Do it, in the thread of the caller."""
        try:
            self.result = function(self.progress)
            self.state = State.DONE
        except GivenUp:
            self.state = State.CANCELLED
        except EroicaError as error:
            self.error, self.state = str(error), State.FAILED
        except OSError as error:
            self.error, self.state = f"{error.filename or self.what}: {error.strerror or error}", State.FAILED
        except MemoryError:
            self.error, self.state = f"{self.what}: there is not enough memory", State.FAILED
        finally:
            if self.state is State.RUNNING:  # a fault of ours, which the thread's hook reports
                self.error, self.state = (
                    f"{self.what}: a fault in eroica; the server's own output tells it",
                    State.FAILED,
                )
            self._ended.set()


class Works(Generic[Result]):
    """The works of one server."""

    def __init__(self, most_running: int = MOST_RUNNING) -> None:
        self._most_running = most_running
        self._works: OrderedDict[str, Work[Result]] = OrderedDict()
        self._lock = threading.Lock()

    def start(self, key: str, what: str, function: Callable[[Progress], Result]) -> Work[Result]:
        """The work of this key: a new one unless it runs or is done. Raises UnavailableError if too many run."""
        with self._lock:
            known = self._works.get(key)
            if known is not None and known.state in (State.RUNNING, State.DONE):
                return known
            running = [work for work in self._works.values() if work.state is State.RUNNING]
            if len(running) >= self._most_running:
                raise UnavailableError(f"{len(running)} others are running; wait until one is done, or cancel one")
            work: Work[Result] = Work(key, what)
            self._works[key] = work
            self._works.move_to_end(key)
            ended = [name for name, other in self._works.items() if other.state is not State.RUNNING]
            for name in ended[: max(0, len(self._works) - MOST_KEPT)]:
                del self._works[name]
        # A daemon: whoever ends the server does not wait for it, and its processes end with their parent.
        threading.Thread(target=work.run, args=(function,), name=f"eroica-{key[:12]}", daemon=True).start()
        return work

    def get(self, key: str) -> Work[Result] | None:
        """The work of this key; None if there is none, or it is forgotten."""
        with self._lock:
            return self._works.get(key)

    def all(self) -> list[Work[Result]]:
        """Those that are running or remembered."""
        with self._lock:
            return list(self._works.values())

    def give_up_all(self) -> None:
        """Stop all of it."""
        with self._lock:
            for work in self._works.values():
                work.give_up()
