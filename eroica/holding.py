"""Pacing on one host: tells the conductor when ranks arrive, and leaves in their rings for how long they are held.

It decides nothing. What it passes on is bounded once more here, and ends by the clock of this host whatever becomes of
the coordinator, the bus or this process; an agent that leaves in peace takes its holds back. Used by `agent`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Reversible, Sequence
from itertools import islice
from pathlib import Path

from eroica import bus, ring
from eroica.arrivals import Arrival, Arrivals
from eroica.errors import DataError
from eroica.holds import MOST_DELAY_NS, MOST_GROUPS, MOST_TTL_NS, Holds, pack
from eroica.ring import Record
from eroica.steps import Iteration
from eroica.untrusted import clean

RECENT = 16
"""Iterations that can have ended since the last look at a ring."""
MOST_TOLD = 64
"""Iterations of a rank in one message."""
MOST_NAME = 100
MOST_SIZE = 1 << 24


class Holding:
    """See the module. One of an agent; owns what was left in which ring, and what ranks have to tell."""

    def __init__(self) -> None:
        self._tells_until_ns = 0
        self._ranks: dict[Path, Arrivals] = {}
        self._held: set[Path] = set()

    def tell(self, message: bus.TellArrivals, now_ns: int) -> None:
        """The conductor wants to know of arrivals for a while."""
        self._tells_until_ns = now_ns + min(round(message.ttl_s * 1e9), MOST_TTL_NS)

    def feed(
        self,
        path: Path,
        begun: Sequence[Record],
        ended: Sequence[Record],
        iterations: Reversible[Iteration],
        now_ns: int,
    ) -> list[Arrival]:
        """What is new of one rank, as far as somebody wants to know. `iterations`: its last ones, the oldest first."""
        if now_ns >= self._tells_until_ns:
            self._ranks.clear()
            return []
        arrivals = self._ranks.setdefault(path, Arrivals())
        arrivals.feed(begun, ended)
        return arrivals.take(list(islice(reversed(iterations), RECENT))[::-1])[-MOST_TOLD:]

    def hold(self, message: bus.Hold, rings: Mapping[int, Path], now_ns: int) -> None:
        """Leave for each rank of this host what it is asked for; those that are not named are free."""
        until_ns = now_ns + min(round(message.ttl_s * 1e9), MOST_TTL_NS)
        of_rank: dict[int, dict[int, int]] = {}
        for group, delays in message.delays:
            for rank, delay_ns in delays:
                if delay_ns > 0:
                    of_rank.setdefault(rank, {})[group] = min(delay_ns, MOST_DELAY_NS)
        moments = dict(message.moments)
        for rank, path in rings.items():
            own = dict(list(of_rank.get(rank, {}).items())[:MOST_GROUPS])
            if own:
                self._held.add(path)
                until = {group: moments[group] for group in own if group in moments}
                self._post(path, pack(Holds(now_ns, until_ns, own, until)))
            elif path in self._held:
                self._release(path)

    def close(self) -> None:
        """Nobody is held any more."""
        for path in list(self._held):
            self._release(path)

    def _release(self, path: Path) -> None:
        self._held.discard(path)
        self._post(path, b"")

    @staticmethod
    def _post(path: Path, data: bytes) -> None:
        with contextlib.suppress(OSError, DataError):  # deleted, or cut short: then nobody is held by it either
            ring.post_holds(path, data)


def met(notes: Iterable[Mapping[str, object]]) -> tuple[bus.Met, ...]:
    """The groups of a rank that have peers, by the notes of its ring."""
    found: dict[int, bus.Met] = {}
    for note in notes:
        key, size = ring.group_key(note.get("group")), note.get("size")
        if key and isinstance(size, int) and 1 < size <= MOST_SIZE:
            found[key] = bus.Met(group=key, name=clean(str(note.get("name", "")), MOST_NAME), size=size)
    return tuple(found.values())
