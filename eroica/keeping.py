"""Keeps a coordinator's records in the store, beside its loop: nothing there ever waits for a disk or a database.

Records are queued and written by a thread, in batches. While the store cannot be reached, written or read, that is said
once, records wait, within bounds, and the thread tries again: the coordinator goes on as if there were none. Where too
much waits, patterns go first, then the course of the pace, then the oldest. Records that the database cannot hold are
left out, one by one, and said. Used by `serve`, by way of `chronicle`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import islice

from eroica.errors import DataError, EroicaError, UnavailableError
from eroica.store import IncidentTold, Kept, PaceSeen, PatternTaken, Retention, Store

MOST_WAITING = 20_000
"""Records."""
MOST_WAITING_BYTES = 64 << 20
"""Of patterns, by far the largest; those of some 10,000 ranks in one window."""
MOST_BATCH = 500
RETRY_S = 5.0
PRUNE_S = 3600.0
LEAVE_S = 10.0
"""For what waits to be written at the end."""


class Keeper:
    """See the module. Writes, in a thread, until `close`."""

    def __init__(self, where: str, say: Callable[[str], None], retention: Retention | None = None) -> None:
        """`where`: see `store.address_of`. `say` is called in `look`. Raises UserError for no address at all."""
        self.why = "the store is not open yet"
        """Why there is no store, in a sentence."""
        self._where = where
        self._say = say
        self._retention = retention or Retention()
        self._store: Store | None = None
        self._waiting: deque[Kept] = deque()
        self._bytes = 0
        self._num_dropped = 0
        self._news: deque[str] = deque(maxlen=100)
        self._is_closing = self._is_failing = False
        self._changed = threading.Condition()
        """Guards all of the above."""
        self._thread = threading.Thread(target=self._run, name="eroica-store", daemon=True)
        self._thread.start()

    @property
    def store(self) -> Store:
        """To read from. Raises UnavailableError while it is not open."""
        store = self._store
        if store is None:
            raise UnavailableError(self.why)
        return store

    def put(self, record: Kept) -> None:
        """Queue a record. Never waits and never raises."""
        with self._changed:
            size = _size(record)
            is_full = len(self._waiting) >= MOST_WAITING or self._bytes + size > MOST_WAITING_BYTES
            if isinstance(record, PatternTaken) and is_full:
                self._num_dropped += 1
                return
            while len(self._waiting) >= MOST_WAITING:
                self._drop()
            self._waiting.append(record)
            self._bytes += size
            self._changed.notify_all()

    def look(self) -> None:
        """Say what there is to say; to be called each round."""
        while self._news:
            self._say(self._news.popleft())

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was put is kept; whether it was within that time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and self._store is not None, timeout_s)

    def close(self) -> None:
        """Keep what waits, and leave."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(LEAVE_S)
        with self._changed:
            if self._waiting:
                why = self.why if self._store is None else f"they took more than {LEAVE_S:.0f} s to write"
                self._news.append(f"{len(self._waiting)} records for the store are lost; {why}")
        self.look()

    def _drop(self) -> None:
        """Give up what is missed least: patterns, then the course, then the oldest."""
        for kind in (PatternTaken, PaceSeen):
            for at, record in enumerate(self._waiting):
                if isinstance(record, kind):
                    self._bytes -= _size(record)
                    del self._waiting[at]
                    self._num_dropped += 1
                    return
        self._bytes -= _size(self._waiting.popleft())
        self._num_dropped += 1

    def _run(self) -> None:
        pruned_s: float | None = None
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: bool(self._waiting) or self._is_closing or self._store is None or self._is_failing, PRUNE_S
                )
                batch = list(islice(self._waiting, MOST_BATCH))
                if self._is_closing and not batch:
                    break
            try:
                store = self._opened()
                self._keep(store, batch)
                now_s = time.monotonic()
                if pruned_s is None or now_s - pruned_s >= PRUNE_S:
                    pruned_s = now_s
                    store.prune(self._retention, time.time())
                self._recovered()
            except EroicaError as error:
                self._failed(error)
                with self._changed:
                    if self._is_closing or self._changed.wait_for(lambda: self._is_closing, RETRY_S):
                        break
        if self._store is not None:
            self._store.close()

    def _opened(self) -> Store:
        if self._store is None:
            store = Store(self._where)
            with self._changed:
                self._store = store
                self._changed.notify_all()
        return self._store

    def _keep(self, store: Store, batch: list[Kept]) -> None:
        """Write it, as a whole if that can be, and take it out of the queue."""
        try:
            store.write(batch)
        except (ValueError, DataError):
            for record in batch:
                try:
                    store.write([record])
                except (ValueError, DataError) as error:
                    self._news.append(f"the store cannot hold a record ({type(record).__name__}): {error}")
                self._take_out([record])
        else:
            self._take_out(batch)

    def _take_out(self, records: list[Kept]) -> None:
        with self._changed:
            # Whoever puts more may have dropped some of these from the queue meanwhile.
            written = {id(record) for record in records}
            while self._waiting and id(self._waiting[0]) in written:
                self._bytes -= _size(self._waiting.popleft())
            self._changed.notify_all()

    def _failed(self, error: EroicaError) -> None:
        with self._changed:
            self.why = str(error)
            store, self._store = self._store, None  # opened anew: its file may be another one by then
            if not self._is_failing:
                self._news.append(f"{error}; the coordinator goes on, and what is to be kept waits")
            self._is_failing = True
        if store is not None:
            store.close()

    def _recovered(self) -> None:
        with self._changed:
            lost = f"; {self._num_dropped} records, patterns first, were too much to wait" if self._num_dropped else ""
            if self._is_failing or lost:
                self._news.append(f"the store is {'back' if self._is_failing else 'behind'}{lost}")
            self._is_failing, self._num_dropped = False, 0


def _size(record: Kept) -> int:
    """Roughly, of those that are large."""
    if isinstance(record, PatternTaken):
        return len(record.summary)
    return 20_000 if isinstance(record, IncidentTold) else 0
