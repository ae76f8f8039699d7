"""What happens to the jobs of a coordinator, as it happens: to the store, and to whoever listens.

The coordinator's loop tells it; records go to the `Keeper`, and events to a list of bounded length that threads of the
HTTP API read from. Who listens too slowly misses the oldest and sees so by their numbers. Used by `serve`.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any

from eroica import bus
from eroica.answers import Audited, Event, Pace, PacingChange, Window
from eroica.coordinator import Coordinator
from eroica.findings import to_json
from eroica.investigation import Incident
from eroica.keeping import Keeper
from eroica.store import IncidentTold, JobSeen, PaceSeen, PatternTaken, WindowClosed
from eroica.untrusted import clean
from eroica.windows import Window as Captured
from eroica.windows import missing_note

MOST_EVENTS = 1000
MOST_CONTENTS = 10_000
PACING = "eroica"
"""Who stands in the audit log for what pacing does by itself; who asked for it stands there by name."""
PACE_S = 10.0
"""Between two records of a job's pace."""
SEEN_S = 600.0
"""Between two records that a job is still there."""


def now() -> str:
    """The time, as records have it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Events:
    """The last of what happened, in order. Safe in many threads."""

    def __init__(self) -> None:
        self._events: deque[tuple[int, Event]] = deque(maxlen=MOST_EVENTS)
        self._lock = threading.Lock()
        self._wakers: set[Callable[[], None]] = set()
        self._session = secrets.token_hex(4)
        """Ours, so that nobody goes on from a number of an earlier coordinator."""
        self.last = 0
        """Number of the newest."""

    def add(self, kind: str, data: dict[str, Any]) -> None:
        """Something has happened."""
        with self._lock:
            self.last += 1
            self._events.append((self.last, Event(id=f"{self._session}-{self.last}", kind=kind, data=data)))
            wakers = list(self._wakers)
        for wake in wakers:
            wake()

    def number_of(self, id: str) -> int:
        """From where who has seen that event goes on: with all that is here, if it is none of ours."""
        session, _, number = id.partition("-")
        return int(number) if session == self._session and number.isdecimal() and len(number) < 20 else 0

    def after(self, number: int) -> list[tuple[int, Event]]:
        """Those that came later, with their numbers, as far as they are still here."""
        with self._lock:
            return [pair for pair in self._events if pair[0] > number]

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
        self._contents: dict[str, int] = {}
        """What diagnoses say -> how often it was told; the last ones."""

    def said(self, text: str, job: str = "") -> None:
        """A sentence was said."""
        self.events.add("said", {"job": job, "text": clean(text, 1000)})

    def told(self, job: str, incident: Incident) -> str:
        """A diagnosis was made; returns the identity under which it is kept."""
        diagnosis = incident.diagnosis
        verdict = diagnosis.verdict
        content = str(to_json(diagnosis)["id"])
        num = self._contents.pop(content, 0) + 1
        self._contents[content] = num
        if len(self._contents) > MOST_CONTENTS:
            del self._contents[next(iter(self._contents))]
        id = f"{content}-{num}" if num > 1 else content
        if diagnosis.kind == "healthy" and diagnosis.window.trigger == "baseline":
            return id  # nobody asked, and nothing is wrong
        self._put(IncidentTold(id=id, job=job, diagnosis=diagnosis, detail=incident.detail, at=now()))
        data = {
            "id": id,
            "job": job,
            "kind": diagnosis.kind,
            "cause": verdict.cause,
            "scope": verdict.scope,
            "ranks": clean(verdict.ranks),
            "summary": clean(verdict.summary, 1000),
        }
        self.events.add("incident", data)
        return id

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

    def paced(self, job: str, change: PacingChange) -> None:
        """The pacing of a job has changed, by itself or by somebody: that is for the audit log, too."""
        outcome = f"{change.phase}: {change.why}" if change.phase else change.why
        act = f"pacing ({change.mode}), step {change.step}"
        self._put(Audited(at=change.at, who=PACING, address="", act=act, target=job, outcome=clean(outcome, 400)))
        self.events.add("pacing", {"job": job, **asdict(change)})

    def watch(self, job: str, coordinator: Coordinator, now_s: float) -> None:
        """How a job is going; to be called each round."""
        course = self._courses.setdefault(job, _Course())
        if now_s - course.seen_s >= SEEN_S:
            course.seen_s = now_s
            self._put(JobSeen(job=job, at=now()))
        if now_s - course.pace_s >= PACE_S:
            course.pace_s = now_s
            if any(standing.num_iterations for standing in coordinator.standings.values()):
                self._put(PaceSeen(job=job, pace=pace_of(coordinator.standings.values(), now())))

    def over(self, job: str) -> None:
        """A job is forgotten."""
        self._courses.pop(job, None)
        self._put(JobSeen(job=job, at=now()))

    def _put(self, record: JobSeen | IncidentTold | WindowClosed | PatternTaken | PaceSeen | Audited | Window) -> None:
        if self.keeper is not None:
            self.keeper.put(record)


def pace_of(standings: Iterable[bus.Standing], at: str) -> Pace:
    """How fast these ranks are."""
    alive = [standing for standing in standings if standing.is_alive]
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
