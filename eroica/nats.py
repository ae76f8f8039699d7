"""Carries frames by NATS (`relay.Carrier`): one connection, in a thread of its own, for the process of a watcher.

It never runs in a rank. The thread has an event loop and hands what comes to a bounded queue, which `deliver` empties
in the watcher's own thread; `handle` can be read as soon as there is something. Reconnecting is done here, by a fresh
connection each time, rather than by the client, whose buffers would hold what is long outdated: whatever was lost
meanwhile is sent again by the ends. Used by `serve` and `live`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import ssl
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from eroica.access import Pass
from eroica.errors import UserError

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

MOST_IN_BYTES = 256 << 20
"""Waiting to be handed on. A coordinator of 100,000 workers gets that in summaries in one window."""
MOST_OUT_BYTES = 32 << 20
"""Waiting to be sent."""
CONNECT_S = 5
LEAVE_S = 1
"""For a connection to close: one whose TLS has failed never does."""
PING_S = 5
"""Three pings without an answer, and the connection is given up: a host that is cut off sends no word of it."""
LEAST_WAIT_S, MOST_WAIT_S = 0.1, 3.0
"""Between attempts to connect, doubled each time; no two agents wait alike."""


class NatsCarrier:
    """See the module. Connects, and reconnects, until `close`."""

    def __init__(self, pass_: Pass, *, name: str, say: Callable[[str], None]) -> None:
        """`name`: under which the server lists us. `say` is called in `deliver`. Raises UserError without nats-py."""
        try:
            import nats.aio.client  # noqa: F401
        except ImportError:
            raise UserError("the bus over hosts needs nats-py; pip install 'eroica[cluster]'") from None
        self.num_connects = 0
        self.is_connected = False
        self.num_dropped_in = self.num_dropped_out = 0
        self._pass = pass_
        self._name = name
        self._say = say
        self._takers: list[tuple[list[str], Callable[[str, bytes], None]]] = []
        self._subjects: list[str] = []
        self._in: deque[tuple[str, bytes]] = deque()
        self._out: deque[tuple[str, bytes]] = deque()
        self._news: deque[str] = deque()
        self._said: set[str] = set()
        self._lock = threading.Lock()
        """Of the sizes."""
        self._in_bytes = self._out_bytes = 0
        self.handle = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._loop = asyncio.new_event_loop()
        self._wake = asyncio.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="eroica-nats", daemon=True)
        self._thread.start()

    def subscribe(self, subject: str, take: Callable[[str, bytes], None]) -> None:
        """Have `take` called, within `deliver`, with subject and bytes of what comes; "*" is any one word."""
        self._takers.append((subject.split("."), take))
        self._loop.call_soon_threadsafe(self._add, subject)

    def unsubscribe(self, subject: str, take: Callable[[str, bytes], None]) -> None:
        """Have it called no more."""
        pattern = subject.split(".")
        self._takers.remove((pattern, take))
        if not any(other == pattern for other, _ in self._takers):
            self._loop.call_soon_threadsafe(self._remove, subject)

    def send(self, subject: str, data: bytes) -> None:
        """Never waits. Dropped, and counted, while there is no connection or too much waits."""
        with self._lock:
            if not self.is_connected or self._out_bytes + len(data) > MOST_OUT_BYTES or self._is_closing:
                self.num_dropped_out += 1
                return
            self._out_bytes += len(data)
        self._out.append((subject, data))
        self._loop.call_soon_threadsafe(self._wake.set)

    def deliver(self) -> None:
        """Hand on what has come so far."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.handle)
        while self._news:
            self._say(self._news.popleft())
        for _ in range(len(self._in)):
            subject, data = self._in.popleft()
            with self._lock:
                self._in_bytes -= len(data)
            words = subject.split(".")
            for pattern, take in self._takers:
                if len(pattern) == len(words) and all(p in ("*", w) for p, w in zip(pattern, words, strict=True)):
                    take(subject, data)

    def close(self) -> None:
        """Send what waits, and leave."""
        if self._is_closing:
            return
        self._is_closing = True
        self._loop.call_soon_threadsafe(self._wake.set)
        self._thread.join(2 * CONNECT_S)
        os.close(self.handle)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    def _add(self, subject: str) -> None:
        if subject not in self._subjects:
            self._subjects.append(subject)
            self._wake.set()

    def _remove(self, subject: str) -> None:
        if subject in self._subjects:
            self._subjects.remove(subject)
            self._wake.set()

    async def _serve(self) -> None:
        wait_s = LEAST_WAIT_S
        while not self._is_closing:
            client, ended = await self._connected()
            if client is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._until_closing(), wait_s * random.uniform(0.5, 1.0))
                wait_s = min(2 * wait_s, MOST_WAIT_S)
                continue
            wait_s = LEAST_WAIT_S
            try:
                await self._pump(client, ended)
            finally:
                self.is_connected = False
                await self._leave(client)

    async def _leave(self, client: Client) -> None:
        """Give a connection up, also one that never came about: the client leaves its socket open then."""
        import nats.errors

        with contextlib.suppress(OSError, nats.errors.Error, TimeoutError):
            await asyncio.wait_for(client.close(), LEAVE_S)

    async def _until_closing(self) -> None:
        while not self._is_closing:
            self._wake.clear()
            await self._wake.wait()

    async def _connected(self) -> tuple[Client | None, asyncio.Event]:
        import nats.errors
        from nats.aio.client import Client

        ended = asyncio.Event()
        is_up = False
        reasons: list[Exception] = []

        async def on_error(error: Exception) -> None:
            reasons.append(error)
            del reasons[:-1]
            if is_up:  # else whoever waits for the connection tells it
                self._tell(f"the bus at {self._pass.url} says: {str(error) or type(error).__name__}")

        async def on_end() -> None:
            ended.set()
            self._wake.set()

        client = Client()
        given = self._pass
        is_encrypted = given.url.startswith("tls:")
        try:
            await client.connect(
                given.urls,
                name=self._name,
                user=given.user or None,
                password=given.password or None,
                tls=ssl.create_default_context(cadata=given.ca or None) if is_encrypted else None,
                # Else whoever stands between could ask for our secret in the clear.
                tls_handshake_first=is_encrypted,
                allow_reconnect=False,
                reconnect_time_wait=0,
                max_reconnect_attempts=1,
                connect_timeout=CONNECT_S,
                ping_interval=PING_S,
                max_outstanding_pings=3,
                error_cb=on_error,
                closed_cb=on_end,
            )
        except (OSError, nats.errors.Error, TimeoutError, ValueError) as error:
            reason = reasons[-1] if reasons else error
            self._tell(f"no way to the bus at {given.url} ({str(reason) or type(reason).__name__}); trying on")
            await self._leave(client)
            return None, ended
        is_up = True
        return client, ended

    async def _pump(self, client: Client, ended: asyncio.Event) -> None:
        import nats.errors

        self._out.clear()
        with self._lock:
            self._out_bytes = 0
        subscribed: dict[str, Subscription] = {}
        while not ended.is_set():
            self._wake.clear()
            try:
                for subject in [subject for subject in self._subjects if subject not in subscribed]:
                    subscribed[subject] = await client.subscribe(subject, cb=self._came)
                for subject in [subject for subject in subscribed if subject not in self._subjects]:
                    await subscribed.pop(subject).unsubscribe()
                if not self.is_connected:
                    await client.flush(CONNECT_S)
                    if subscribed.keys() != set(self._subjects):
                        continue
                    self.is_connected = True
                    self.num_connects += 1
                    if self.num_connects > 1:
                        self._news.append(f"the bus at {self._pass.url} is back")
                        self._said.clear()
                    self._stir()
                while self._out:
                    subject, data = self._out.popleft()
                    with self._lock:
                        self._out_bytes -= len(data)
                    await client.publish(subject, data)
                if self._is_closing:
                    await client.flush(CONNECT_S)
                    return
            except (OSError, nats.errors.Error, TimeoutError) as error:
                self._tell(f"the bus at {self._pass.url} was lost ({str(error) or type(error).__name__}); trying on")
                return
            await self._wake.wait()

    async def _came(self, message: Msg) -> None:
        size = len(message.data)
        with self._lock:
            if self._in_bytes + size > MOST_IN_BYTES:
                self.num_dropped_in += 1
                return
            self._in_bytes += size
        self._in.append((message.subject, message.data))
        self._stir()

    def _tell(self, text: str) -> None:
        if text not in self._said and len(self._said) < 20:
            self._said.add(text)
            self._news.append(text)
            self._stir()

    def _stir(self) -> None:
        with contextlib.suppress(OSError, BlockingIOError):
            os.eventfd_write(self.handle, 1)
