"""The investigations of all jobs at one bus, and the windows that people ask for in them.

A job appears with the first word of one of its agents, and is forgotten when all have been away for long. It is for the
one thread that has the loop (`serve`): others reach it by the `desk`. A person's request is answered at once, with a
refusal or an identity; what becomes of it is seen by that, since a window may be moved, taken anew or followed by one
with sizes before there is a diagnosis. Requests are known by this coordinator only; the store keeps how they ended.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from eroica import bus
from eroica.answers import Job, Pacing, PacingChange, Rank, Window
from eroica.chronicle import Chronicle, now, pace_of
from eroica.conductor import Mode, in_words
from eroica.errors import UserError
from eroica.fabric.pacing import Limits
from eroica.investigation import Incident, Investigation
from eroica.relay import Carrier, CoordinatorLink, Reception
from eroica.topology import Topology
from eroica.untrusted import clean
from eroica.windows import Policy, missing_note
from eroica.windows import Window as Captured
from eroica.wire import MOST_WINDOW

OVER_BUS_S = 0.5
"""A command needs so much longer than on one host: where ranks stand is told five times a second, and once more for the
way."""
FORGET_S = 900.0
"""A job whose agents are all away for so long is over."""
MOST_REQUESTS = 256
"""That are remembered, over or not; the oldest of those that are over go first."""
LOST = "the coordinator ended before it was over"
GIVEN_UP = "it was given up: the job stood still, restarted or ended, or another window was more urgent"


class UnknownError(UserError):
    """There is nothing of that name."""


class RefusedError(UserError):
    """It cannot be now; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A job as it is at one moment: its records are not changed any more, so that other threads may look at them."""

    name: str
    standings: Mapping[int, bus.Standing]
    silent: frozenset[str]
    """Hosts whose agents are not heard."""
    hosts: Mapping[str, bool]
    has_ended: bool
    """On all of them, as their agents have said."""
    window: str
    has_baseline: bool


@dataclass(slots=True)
class _Request:
    """Of a person, for a window."""

    window: Window
    why: str = ""
    """What is known of a failure."""


@dataclass(slots=True)
class _Requests:
    """Of one coordinator, by identity, oldest first."""

    known: dict[str, _Request] = field(default_factory=dict)

    @property
    def num_open(self) -> int:
        """Not over."""
        return sum(not request.window.is_over for request in self.known.values())

    def add(self, request: _Request) -> None:
        """Remember it, and forget some that are over if there are many."""
        self.known[request.window.id] = request
        over = [id for id, other in self.known.items() if other.window.is_over]
        for id in over[: max(len(self.known) - MOST_REQUESTS, 0)]:
            del self.known[id]


def request_id(job: str, who: str, key: str) -> str:
    """Identity of a request. With a key of who asks it is the same each time, also after another coordinator has taken
    over: the store knows it by it, so that asking twice is asking once."""
    told = "\n".join((job, who, key)).encode()
    return f"w-{hashlib.sha256(told).hexdigest()[:12] if key else secrets.token_hex(6)}"


def far(policy: Policy) -> Policy:
    """The same where commands travel."""
    return replace(policy, lead_s=policy.lead_s + OVER_BUS_S)


class Coordinators:
    """See the module."""

    def __init__(
        self,
        carrier: Carrier,
        policy: Policy,
        tell: Callable[[str, Incident], None],
        say: Callable[[str], None],
        chronicle: Chronicle,
        topology: Topology | None = None,
    ) -> None:
        """`tell` gets the job's name and each incident of it. `topology`: where hosts stand in the network."""
        self._carrier = carrier
        self._topology = topology
        self._policy = far(policy)
        self._tell = tell
        self._say_outside = say
        self.chronicle = chronicle
        self._requests = _Requests()
        self.jobs: dict[str, Investigation] = {}
        self._seen_s: dict[str, float] = {}
        self._left: set[tuple[str, str]] = set()
        """Jobs and hosts whose agents have said so."""
        self._reception = Reception(carrier, self._begin, clock=time.monotonic_ns, say=self.say)

    def say(self, text: str, job: str = "") -> None:
        """A sentence for whoever watches."""
        self.chronicle.said(text, job)
        self._say_outside(f"job {job}: {text}" if job else text)

    @property
    def are_behind(self) -> bool:
        """More has come than one round deals with: the next is due at once."""
        return any(link.is_behind for link in self._reception.links.values())

    def look(self) -> None:
        """One round."""
        self._reception.deliver()
        now_ns = time.monotonic_ns()
        for job, investigation in list(self.jobs.items()):
            investigation.tick(now_ns)
            link = self._reception.links[job]
            link.deliver()
            self.chronicle.watch(job, investigation.coordinator, now_ns / 1e9)
            if any(link.hosts.values()):
                self._seen_s[job] = now_ns / 1e9
            elif now_ns / 1e9 - self._seen_s[job] > FORGET_S:
                investigation.finish()
                self._reception.forget(job)
                del self.jobs[job], self._seen_s[job]
                self._left = {(other, host) for other, host in self._left if other != job}
                self.chronicle.over(job)
                self.say(f"job {job} is over: no agent of it has been heard for {FORGET_S:.0f} s")
        self._settle()

    @property
    def is_over(self) -> bool:
        """Some have come, and all have left, or are heard no more."""
        links = self._reception.links
        return bool(links) and not any(
            is_heard and (job, host) not in self._left
            for job, link in links.items()
            for host, is_heard in link.hosts.items()
        )

    def finish(self) -> None:
        """We end: tell what was held back."""
        for investigation in self.jobs.values():
            investigation.finish()

    def snapshot(self, job: str) -> Snapshot:
        """Of one job. Raises UnknownError."""
        investigation = self._investigation(job)
        coordinator = investigation.coordinator
        hosts = self._reception.links[job].hosts
        return Snapshot(
            name=job,
            standings=dict(coordinator.standings),
            silent=coordinator.silent,
            hosts=hosts,
            has_ended=bool(hosts) and all((job, host) in self._left for host in hosts),
            window=_under_way(investigation),
            has_baseline=coordinator.has_baseline,
        )

    def snapshots(self) -> list[Snapshot]:
        """Of all jobs."""
        return [self.snapshot(job) for job in self.jobs]

    def ask(self, job: str, who: str, key: str) -> tuple[Window, bool]:
        """A person wants a window of all ranks; and whether that is news, or was asked before with this key. Raises
        UnknownError and RefusedError."""
        investigation = self._investigation(job)
        id = request_id(job, who, key)
        known = self._requests.known.get(id)
        if known is not None:
            return known.window, False
        window = Window(id=id, job=job, state="waiting", asked_at=now(), asked_by=who)
        if self._requests.num_open >= MOST_REQUESTS:
            raise RefusedError(f"{MOST_REQUESTS} windows that were asked for are under way; wait for some of them")
        # Known before it is asked for: with nobody left to answer, a window is over within that call.
        self._requests.add(_Request(window))
        why = investigation.coordinator.ask(time.monotonic_ns(), asked=window.id)
        if why:
            del self._requests.known[window.id]
            raise RefusedError(f"no window of job {job} can be taken now: {why}")
        self.chronicle.asked(window)
        self.say(f"{who} asked for a window", job)
        self._settle()
        return self._requests.known[window.id].window, True

    def asked(self, job: str, id: str) -> Window:
        """What has become of it. Raises UnknownError."""
        return self._request(job, id).window

    def cancel(self, job: str, id: str, who: str) -> Window:
        """Leave it. Raises UnknownError, and RefusedError if it is over."""
        request = self._request(job, id)
        investigation = self.jobs.get(job)
        if request.window.is_over or investigation is None:
            raise RefusedError(f"the window {id} of job {job} is over ({request.window.state})")
        investigation.cancel(id)
        if not request.window.is_over:
            self._come_to(request, "cancelled", why=f"{who} cancelled it")
            self.say(f"{who} cancelled the window that {request.window.asked_by} had asked for", job)
        return request.window

    def pacing(self, job: str) -> Pacing:
        """How the pacing of a job stands. Raises UnknownError."""
        return self._investigation(job).pacing.state(job)

    def pace(self, job: str, mode: Mode, limits: Limits, who: str) -> Pacing:
        """Somebody says what pacing may do from now on. Raises UnknownError."""
        investigation = self._investigation(job)
        investigation.pace(mode, limits, who)
        return investigation.pacing.state(job)

    def _investigation(self, job: str) -> Investigation:
        found = self.jobs.get(job)
        if found is None:
            raise UnknownError(f"no job {clean(job, 100)} is running here")
        return found

    def _request(self, job: str, id: str) -> _Request:
        request = self._requests.known.get(id)
        if request is None or request.window.job != job:
            raise UnknownError(f"no window {clean(id, 40)} of job {clean(job, 100)} was asked for")
        return request

    def _settle(self) -> None:
        """See how far the requests are."""
        for request in self._requests.known.values():
            window = request.window
            if window.is_over:
                continue
            investigation = self.jobs.get(window.job)
            stage = investigation.stage(window.id) if investigation is not None else ""
            if stage and stage != window.state:
                self._come_to(request, stage)
            elif not stage:
                self._come_to(request, "failed", why=request.why or GIVEN_UP)

    def _come_to(self, request: _Request, state: str, *, incident: str | None = None, why: str = "") -> None:
        request.window = replace(request.window, state=state, incident=incident, why=why)
        self.chronicle.asked(request.window)

    def _begin(self, link: CoordinatorLink) -> None:
        job = link.job
        self.say(f"job {job} has an agent")

        def come_or_leave(message: bus.Message) -> None:
            if isinstance(message, bus.Leaving):
                self._left.add((job, message.host))
            elif isinstance(message, bus.Joined):
                self._left.discard((job, message.host))

        link.subscribe((bus.Joined, bus.Leaving), come_or_leave)

        def tell(incident: Incident) -> None:
            id = self.chronicle.told(job, incident)
            request = self._requests.known.get(incident.asked)
            if request is not None and not request.window.is_over:
                self._come_to(request, "done", incident=id)
            self._tell(job, incident)
            if incident.diagnosis.kind not in ("healthy", "no_data"):
                link.publish(bus.Said(text=incident.diagnosis.verdict.summary))

        def say(text: str) -> None:
            self.say(text, job)
            link.publish(bus.Said(text=text))

        def closed(window: Captured, diagnosis: str) -> None:
            self.chronicle.closed(job, link.session, window, diagnosis)
            request = self._requests.known.get(window.asked)
            if request is not None and not diagnosis:
                request.why = f"the capture gave nothing: {missing_note(window) or 'no rank was left'}"

        def paced(change: PacingChange) -> None:
            self.chronicle.paced(job, change)
            say(in_words(change))

        def took(message: bus.Message) -> None:
            # Else an agent could fill the store.
            if isinstance(message, bus.Summarized) and self.jobs[job].coordinator.is_of_window(message):
                self.chronicle.took(job, link.session, message)

        link.subscribe((bus.Summarized,), took)  # before the investigation, which may close the window at that
        self._seen_s[job] = time.monotonic()
        self.jobs[job] = Investigation(
            link,
            job=job,
            policy=self._policy,
            clock=time.monotonic_ns,
            tell=tell,
            say=say,
            # Ranks and agents that have outlived another coordinator know its numbers.
            first_window=1 + secrets.randbelow(MOST_WINDOW),
            closed=closed,
            topology=self._topology,
            paced=paced,
        )


def _under_way(investigation: Investigation) -> str:
    """What is being captured or looked at, in a few words."""
    coordinator = investigation.coordinator
    if coordinator.window is not None:
        window = coordinator.window
        return f"{window.trigger}, {'capturing' if window.committed else 'preparing'}"
    return "looking at ranks that stand still or have died" if coordinator.look is not None else ""


def job_of(snapshot: Snapshot, kept: Job | None) -> Job:
    """As it is answered; `kept`: what the store knows of it. It looks at all ranks, so it is not for the loop."""
    pace = pace_of(snapshot.standings.values(), "")
    return replace(
        kept or Job(name=snapshot.name),
        is_live=True,
        has_ended=snapshot.has_ended,
        hosts=dict(sorted(snapshot.hosts.items())[:10_000]),
        world_size=max((standing.world_size for standing in snapshot.standings.values()), default=0),
        num_alive=pace.num_alive,
        num_iterations=pace.num_iterations,
        iteration_s=pace.iteration_s,
        slowest_s=pace.slowest_s,
        has_baseline=snapshot.has_baseline,
        window=snapshot.window,
    )


def ranks_of(snapshot: Snapshot, first: int, limit: int) -> list[Rank]:
    """By number, from `first` on."""
    chosen = sorted(rank for rank in snapshot.standings if rank >= first)[:limit]
    return [
        Rank(
            rank=rank,
            host=standing.host,
            is_alive=standing.is_alive,
            is_heard=standing.host not in snapshot.silent,
            generation=standing.generation,
            unit=standing.unit.name.lower() if standing.unit is not None else None,
            count=standing.count,
            num_iterations=standing.num_iterations,
            iteration_s=standing.iteration_s,
        )
        for rank, standing in ((rank, snapshot.standings[rank]) for rank in chosen)
    ]
