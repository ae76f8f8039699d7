"""What happens to the jobs of a coordinator, as it happens: to the store, and to whoever listens.

The coordinator's loop tells it; records go to the `Keeper`, and events to a list of bounded length that threads of the
HTTP API read from. Who listens too slowly misses the oldest and sees so by their numbers. Used by `serve`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any

from eroica import bus
from eroica.answers import Audited, Event, Pace, Window
from eroica.coordinator import Coordinator, missing_note
from eroica.coordinator import Window as Captured
from eroica.findings import to_json
from eroica.investigation import Incident
from eroica.keeping import Keeper
from eroica.store import IncidentTold, JobSeen, PaceSeen, PatternTaken, WindowClosed
from eroica.untrusted import clean

MOST_EVENTS = 1000
PACE_S = 10.0
"""Between two records of a job's pace."""
SEEN_S = 600.0
"""Between two records that a job is still there."""


def now() -> str:
    """The time, as records have it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Events:
    """The last of what happened, by number. Safe in many threads."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._lock = threading.Lock()
        self._wakers: set[Callable[[], None]] = set()
        self._number = 0

    def add(self, kind: str, data: dict[str, Any]) -> None:
        """Something has happened."""
        with self._lock:
            self._number += 1
            self._events.append(Event(id=self._number, kind=kind, data=data))
            wakers = list(self._wakers)
        for wake in wakers:
            wake()

    @property
    def last(self) -> int:
        """Number of the newest."""
        return self._number

    def after(self, number: int) -> list[Event]:
        """Those that came later, as far as they are still here."""
        with self._lock:
            return [event for event in self._events if event.id > number]

    def listen(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Have `wake` called, in any thread, after each; returns what ends that."""
        with self._lock:
            self._wakers.add(wake)

        def leave() -> None:
            with self._lock:
                self._wakers.discard(wake)

        return leave


@dataclass(slots=True)
class _Course:
    """When a job was last recorded."""

    pace_s: float = float("-inf")
    seen_s: float = float("-inf")


class Chronicle:
    """See the module. For the coordinator's loop alone, but for `events` and `act`."""

    def __init__(self, keeper: Keeper | None) -> None:
        self.events = Events()
        self.keeper = keeper
        self._courses: dict[str, _Course] = {}

    def said(self, text: str, job: str = "") -> None:
        """A sentence was said."""
        self.events.add("said", {"job": job, "text": clean(text, 1000)})

    def told(self, job: str, incident: Incident) -> None:
        """A diagnosis was made."""
        diagnosis = incident.diagnosis
        verdict = diagnosis.verdict
        self._put(IncidentTold(job=job, diagnosis=diagnosis, detail=incident.detail, at=now()))
        data = {
            "id": to_json(diagnosis)["id"],
            "job": job,
            "kind": diagnosis.kind,
            "cause": verdict.cause,
            "scope": verdict.scope,
            "ranks": clean(verdict.ranks),
            "summary": clean(verdict.summary, 1000),
        }
        self.events.add("incident", data)

    def closed(self, job: str, session: str, window: Captured, incident: str) -> None:
        """A window is over."""
        record = WindowClosed(
            job=job,
            session=session,
            number=window.number,
            trigger=window.trigger,
            at=now(),
            first_step=window.start,
            num_steps=window.num_steps,
            num_ranks=len(window.ranks),
            num_reported=len(window.summaries),
            missing=missing_note(window),
            incident=incident,
        )
        self._put(record)
        names = ("job", "number", "trigger", "num_ranks", "num_reported", "incident")
        self.events.add("window", {name: getattr(record, name) for name in names})

    def took(self, job: str, session: str, message: bus.Message) -> None:
        """A rank's summary came."""
        if isinstance(message, bus.Summarized) and message.summary is not None:
            taken = PatternTaken(
                job=job, session=session, number=message.window, rank=message.rank, summary=message.summary, at=now()
            )
            self._put(taken)

    def asked(self, window: Window) -> None:
        """What a person asked for has come further."""
        self._put(window)
        self.events.add("window", asdict(window))

    def act(self, audited: Audited) -> None:
        """Somebody did something, or was refused."""
        self._put(audited)

    def watch(self, job: str, coordinator: Coordinator, now_s: float) -> None:
        """How a job is going; to be called each round."""
        course = self._courses.setdefault(job, _Course())
        if now_s - course.seen_s >= SEEN_S:
            course.seen_s = now_s
            self._put(JobSeen(job=job, at=now()))
        if now_s - course.pace_s >= PACE_S:
            course.pace_s = now_s
            if any(standing.num_iterations for standing in coordinator.standings.values()):
                self._put(PaceSeen(job=job, pace=pace_of(coordinator, now())))

    def over(self, job: str) -> None:
        """A job is forgotten."""
        self._courses.pop(job, None)
        self._put(JobSeen(job=job, at=now()))

    def _put(self, record: JobSeen | IncidentTold | WindowClosed | PatternTaken | PaceSeen | Audited | Window) -> None:
        if self.keeper is not None:
            self.keeper.put(record)


def pace_of(coordinator: Coordinator, at: str) -> Pace:
    """How fast its ranks are."""
    alive = [standing for standing in coordinator.standings.values() if standing.is_alive]
    paces = [(standing.iteration_s, standing.rank) for standing in alive if standing.iteration_s]
    slowest = max(paces, default=None)
    return Pace(
        at=at,
        num_iterations=max((standing.num_iterations for standing in alive), default=0),
        iteration_s=median(pace for pace, _ in paces) if paces else None,
        slowest_s=slowest[0] if slowest is not None else None,
        slowest_rank=slowest[1] if slowest is not None else None,
        num_alive=len(alive),
    )
