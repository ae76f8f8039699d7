"""Where other threads ask the coordinator's loop for something: a bounded queue, and nothing shared.

A coordinator belongs to the one thread of its loop and has no locks. Whoever is in another thread (the HTTP API) hands
a call over here and waits for its result; the loop attends to the calls between its rounds. A queue that is full and a
loop that does not come to it are an error at once, or soon: the loop never waits for the ones who ask. Used by `api`,
which asks, and `serve`, which attends.
"""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import TypeVar

from eroica.errors import UnavailableError

T = TypeVar("T")
MOST_WAITING = 64
PATIENCE_S = 5.0
"""A round takes milliseconds; a diagnosis of very many ranks, within which nobody is attended to, some seconds."""


class Desk:
    """See the module."""

    def __init__(self) -> None:
        self.handle = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Can be read when somebody waits."""
        self._calls: queue.Queue[tuple[Future[object], Callable[[], object]]] = queue.Queue(MOST_WAITING)
        self._is_closed = False

    def call(self, function: Callable[[], T]) -> T:
        """Have the loop call `function`; its result, or what it raises. Raises UnavailableError. For other threads."""
        future: Future[object] = Future()
        result: list[T] = []
        if self._is_closed:
            raise UnavailableError("the coordinator is ending")
        try:
            self._calls.put_nowait((future, lambda: result.append(function())))
        except queue.Full:
            raise UnavailableError("the coordinator has too much to do; try again in a moment") from None
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self.handle, 1)
        try:
            future.result(PATIENCE_S)
        except TimeoutError:
            if future.cancel():
                raise UnavailableError("the coordinator is busy; try again in a moment") from None
            try:
                future.result(PATIENCE_S)  # it has begun
            except TimeoutError:
                if future.done():
                    raise  # its own
                raise UnavailableError("the coordinator is busy with what was asked; look again later") from None
        except CancelledError:
            raise UnavailableError("the coordinator is ending") from None
        return result[0]

    def attend(self) -> None:
        """Do what is asked for. For the loop."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.handle)
        for _ in range(self._calls.qsize()):
            with contextlib.suppress(queue.Empty):
                future, call = self._calls.get_nowait()
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(call())
                    except BaseException as error:
                        future.set_exception(error)
                        if not isinstance(error, Exception):
                            raise  # the loop is to end, not only this call

    def refuse(self) -> None:
        """Attend to nobody any more, also not to those who wait."""
        self._is_closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._calls.get_nowait()[0].cancel()

    def close(self) -> None:
        """Let go of the handle, when nobody is left who could ask."""
        self.refuse()
        os.close(self.handle)
