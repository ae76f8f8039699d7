"""Exactly once and in order, over a carrier that may lose, double and reorder: numbers, what was heard, sending again.

Pure: no clock, no bytes of a format, no network. One `Outbox` holds what an end has to say; a `Receiver` says how far
one listener is with it and what is to be sent to it now; an `Inbox` is the listener's side. Whoever misses one message
takes none of the later ones and gets all of them again (go-back-N): what agents have to say is little, and losses are
rare. Used by `relay`.

    agent                              coordinator
    put(a), put(b)      1 a, 2 b  ->   takes both, heard 2
    put(c)              3 c    lost
    put(d)              4 d       ->   not taken: 3 is missing; heard 2
    a second later      3 c, 4 d  ->   takes both, heard 4

Memory is bounded: an outbox beyond its limits gives up its oldest messages, counts them, and tells the listener by its
`base` not to wait for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias, TypeVar

Told: TypeAlias = tuple[str, bytes]
"""Kind and content of one message."""
_T = TypeVar("_T")

RESEND_NS = 500_000_000
"""Without a word of the listener, doubled each time: five rounds of a loop that looks ten times a second."""
MOST_RESEND_NS = 8_000_000_000
IN_FLIGHT, IN_FLIGHT_BYTES = 1_024, 2 << 20
"""Messages and their bytes, sent to one listener and not yet heard: more would fill the buffers of a bus that has just
come back."""


class Outbox:
    """What one end has to say, kept until it was heard."""

    def __init__(self, *, most: int = 4_096, most_bytes: int = 16 << 20) -> None:
        self.base = 0
        """The highest number that is not kept any more."""
        self.num_dropped = 0
        """Given up unheard."""
        self._most = most
        self._most_bytes = most_bytes
        self._kept: deque[Told] = deque()
        self._num_bytes = 0

    @property
    def last(self) -> int:
        """The highest number given."""
        return self.base + len(self._kept)

    def put(self, told: Told) -> None:
        """Give it the next number."""
        self._kept.append(told)
        self._num_bytes += len(told[1])
        while len(self._kept) > self._most or (self._num_bytes > self._most_bytes and len(self._kept) > 1):
            self._forget()
            self.num_dropped += 1

    def heard(self, number: int) -> None:
        """All up to `number` need not be kept."""
        while self._kept and self.base < number:
            self._forget()

    def _forget(self) -> None:
        self._num_bytes -= len(self._kept.popleft()[1])
        self.base += 1

    def after(self, number: int, most_bytes: int) -> list[Told]:
        """The messages from `number` + 1 on, as many as fit; one at least, if there is one."""
        found: list[Told] = []
        size = 0
        for told in islice(self._kept, max(number - self.base, 0), None):
            size += len(told[1])
            if found and size > most_bytes:
                break
            found.append(told)
        return found

    def num_bytes(self, after: int, to: int) -> int:
        """Of the messages after one number, up to another."""
        return sum(len(told[1]) for told in islice(self._kept, max(after - self.base, 0), max(to - self.base, 0)))


@dataclass(slots=True)
class Receiver:
    """How far one listener is with an outbox."""

    heard: int
    """It has taken all up to this number."""
    sent: int
    """What was sent to it last."""
    due_ns: int = 0
    """When to send again what it has not heard."""
    num_tries: int = 0

    def hears(self, number: int, now_ns: int) -> None:
        """It says how far it is."""
        if number > self.heard:
            self.heard = number
            self.sent = max(self.sent, number)
            self.num_tries = 0
            self.due_ns = now_ns + RESEND_NS

    def sends(self, number: int, now_ns: int) -> None:
        """All up to `number` was sent to it."""
        if self.sent <= self.heard:
            self.due_ns = now_ns + RESEND_NS
        self.sent = max(self.sent, number)

    def hurry(self) -> None:
        """What was sent is lost, most likely: send it again at once."""
        self.due_ns = self.num_tries = 0

    def due(self, outbox: Outbox, now_ns: int, most_bytes: int) -> Iterator[tuple[int, list[Told]]]:
        """What to send now: number of the first message, and messages of at most so many bytes."""
        if self.sent > self.heard and now_ns >= self.due_ns:
            self.sent = self.heard
            self.num_tries += 1
            self.due_ns = now_ns + min(RESEND_NS << min(self.num_tries - 1, 8), MOST_RESEND_NS)
        while max(self.sent, outbox.base) < outbox.last:
            self.sent = max(self.sent, outbox.base)
            if self.sent - self.heard > IN_FLIGHT or outbox.num_bytes(self.heard, self.sent) > IN_FLIGHT_BYTES:
                return
            messages = outbox.after(self.sent, most_bytes)
            first = self.sent + 1
            self.sends(self.sent + len(messages), now_ns)
            yield first, messages


class Inbox:
    """What has come from one end."""

    def __init__(self, taken: int) -> None:
        self.taken = taken
        """All up to this number."""
        self.num_lost = 0
        """Which the sender gave up."""
        self.num_again = 0
        """Messages that came although they had been taken."""

    def take(self, base: int, first: int, messages: Sequence[_T]) -> list[_T]:
        """Those that are new, in order."""
        if base > self.taken:
            self.num_lost += base - self.taken
            self.taken = base
        new = []
        for number, told in enumerate(messages, first):
            if number == self.taken + 1:
                self.taken = number
                new.append(told)
            elif number <= self.taken:
                self.num_again += 1
        return new
