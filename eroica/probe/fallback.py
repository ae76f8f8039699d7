"""What a rank leaves about itself where nobody outside may look: its stacks, by `faulthandler`.

At a step, at most every five seconds, the timer of `faulthandler` is set anew. If then no step comes for ten seconds,
its C thread writes the stacks of all threads to a file beside the ring, whatever Python does: it needs no GIL. That is
the one thread that the probe has, it sleeps, and it is not made where the user has set that timer, of which a process
has one. It is set from the first step on; a hang before it leaves no stacks here.

Wrong where the user sets the timer before torch is imported, by a name that is not in the main script: theirs is lost.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from eroica.ring import Ring

EVERY_NS = 5 * 10**9
"""Setting the timer costs 45 us and a thread; once in five seconds that is 0.001 %."""
AFTER_S = 10.0
"""From the last setting: a job that stands still is written down 5 to 10 s after its last step. Steps that take longer
are written down, too, for nothing: a millisecond of another thread, and the file is emptied at the next setting."""


class Fallback:
    """The timer and its file."""

    def __init__(self) -> None:
        self.set_ns = 0
        """CLOCK_MONOTONIC of the last setting."""
        self._file = -1
        self._path = ""
        self._is_off = False
        self._is_watching = False
        self._set: Callable[..., object] | None = None
        self._is_last_word = False
        """A signal that ends the process from within (abort, segmentation fault) leaves its stacks in the file, too."""

    def watch(self) -> None:
        """Hear of it if the user sets the timer."""
        import faulthandler

        if self._is_watching:
            return
        self._is_watching = True
        main = sys.modules.get("__main__")
        self._is_off = any(value is faulthandler for value in vars(main).values()) if main is not None else False
        self._set = original = faulthandler.dump_traceback_later

        @functools.wraps(original)
        def dump_traceback_later(*args: Any, **kwargs: Any) -> Any:
            self._is_off = True
            return original(*args, **kwargs)

        faulthandler.dump_traceback_later = dump_traceback_later

    def step(self, ring: Ring, now_ns: int) -> None:
        """Set the timer anew, if its time has come."""
        if now_ns - self.set_ns < EVERY_NS:
            return
        self.set_ns = now_ns
        if self._is_off or self._set is None:
            return
        try:
            if self._file < 0:
                self._path = str(ring.path.with_suffix(".stacks"))
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
                self._file = os.open(self._path, flags, 0o600)
                self._enable()
            elif os.fstat(self._file).st_size:
                os.ftruncate(self._file, 0)
            self._set(AFTER_S, file=self._file)
        except (OSError, RuntimeError, ValueError):
            self._is_off = True  # no room or no thread: rings do without

    def _enable(self) -> None:
        import faulthandler

        if not faulthandler.is_enabled():  # else it is the user's, and says all this elsewhere
            faulthandler.enable(file=self._file)
            self._is_last_word = True

    def _disable(self) -> None:
        if self._is_last_word:
            self._is_last_word = False
            import faulthandler

            faulthandler.disable()

    def cancel(self) -> None:
        """Stop the timer; what has been written stays, an empty file does not. Raises nothing."""
        self._is_off, is_set = True, self._file >= 0
        if not is_set:
            return
        with contextlib.suppress(Exception):
            import faulthandler

            self._disable()
            faulthandler.cancel_dump_traceback_later()
            is_empty = not os.fstat(self._file).st_size
            os.close(self._file)
            if is_empty:
                os.unlink(self._path)
        self._file = -1

    def forked(self) -> None:
        """In a forked child: its parent's timer and file are not its own."""
        self._is_off = True
        self._file = -1
        with contextlib.suppress(Exception):
            self._disable()


FALLBACK = Fallback()
