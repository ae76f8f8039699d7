"""`eroica serve` and `eroica agent`: a coordinator for the jobs of many hosts, and the agent of one host for its jobs.

The coordinator holds one investigation per job (`coordinators`), keeps what it finds out (`keeping`) and answers over
HTTP (`api`). It brings the bus along (`broker`) unless an operator's is named. The agent looks after every job of this
user whose ranks arm themselves without `eroica run`, and lets go of those that `eroica run` watches already, whose
folders say so by their names. Training notices neither, and goes on when either dies. Both are loops in one thread,
with the bus, the store and HTTP in others.
"""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from eroica import bus, ring
from eroica.access import ALL_JOBS, Pass, make_private
from eroica.agent import Agent, host_name
from eroica.broker import Broker, Listening
from eroica.captures import Readers, close_captures, forget_captures
from eroica.errors import EroicaError, UnavailableError, UserError
from eroica.guard import Web
from eroica.investigation import Incident
from eroica.nats import NatsCarrier
from eroica.probe.place import user_folder
from eroica.probe.workspace import has_living
from eroica.relay import AgentLink, Carrier, job_key
from eroica.topology import Topology
from eroica.windows import Policy

ROUND_S = 0.1
"""A round at least so often; one also begins when something has come."""
LAST_WORD_S = 2.0
"""For what agents that leave are to be told, and for another that is about to come."""
SCAN_S = 2.0
"""Between looks for new jobs on a host."""
TO_HEAR_S = 600.0
"""For a coordinator that is away to hear of a job that is over: a service manager has started it again by then, or
somebody has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """What to coordinate and how."""

    state: Path
    """Folder of this user alone, for passes and the configuration of the bus; outlives us."""
    listening: Listening = field(default_factory=Listening)
    jobs: tuple[str, ...] = ()
    """For each a pass is made; none: one for all jobs."""
    coordinator: Pass | None = None
    """The coordinator's pass to a bus that is there already; None: we bring one along."""
    policy: Policy = field(default_factory=Policy)
    until_over: bool = False
    """End once all agents that have come have left."""
    web: Web | None = field(default_factory=Web)
    """Where the HTTP API is; None: nowhere."""
    store: str = ""
    """A file, or the URL of a database; "": a file in `state`."""
    topology: Topology | None = None
    """Where hosts stand in the network."""


def serve(
    plan: Serve,
    tell: Callable[[str, Incident], None],
    say: Callable[[str], None],
    is_over: Callable[[], bool],
) -> None:
    """Coordinate until `is_over`, which is asked each round. Raises EroicaError if there is no bus to begin with."""
    try:
        # An agent of a host, which is here, too, has no use for what these bring along.
        from eroica.api import Server
        from eroica.chronicle import Chronicle
        from eroica.coordinators import Coordinators
        from eroica.desk import Desk
        from eroica.keeping import Keeper
    except ImportError as error:
        raise UserError(f"a coordinator needs {error.name}; pip install 'eroica[cluster]'") from None

    with ExitStack() as opened:
        broker: Broker | None = None
        given = plan.coordinator
        make_private(plan.state)
        if given is None:
            broker = Broker(plan.state, plan.listening, plan.jobs)
            opened.callback(broker.close)
            given = broker.own
            for job, path in broker.passes.items():
                who = "every job" if job == ALL_JOBS else f"job {job}"
                say(f"the bus is at {broker.url}; agents of {who} need EROICA_COORDINATOR={path.resolve()}")
        keeper = Keeper(plan.store or str(plan.state / "eroica.db"), say)
        opened.callback(keeper.close)
        carrier = NatsCarrier(given, name="eroica serve", say=say)
        opened.callback(carrier.close)
        coordinators = Coordinators(carrier, plan.policy, tell, say, Chronicle(keeper), plan.topology)
        desk = Desk()
        opened.callback(desk.close)
        server: Server | None = None
        if plan.web is not None:
            server = Server(plan.web, plan.state, coordinators, desk, coordinators.chronicle)
            opened.callback(server.close)
            opened.callback(desk.refuse)
            say(f"the HTTP API is at {server.url}; its tokens are in {plan.state.resolve()}")
        has_said = False
        over_s = math.inf
        while not is_over() and time.monotonic() < over_s:
            select.select([carrier.handle, desk.handle], [], [], 0 if coordinators.are_behind else ROUND_S)
            if broker is not None:
                try:
                    if broker.revive():
                        say("the bus had died and is started again")
                    has_said = False
                except UnavailableError as error:
                    if not has_said:
                        say(f"{error}; trying on")
                    has_said = True
            coordinators.look()
            keeper.look()
            if server is not None:
                server.look()
            if plan.until_over and coordinators.is_over:
                over_s = min(over_s, time.monotonic() + LAST_WORD_S)
            else:
                over_s = math.inf
        coordinators.finish()


class HostAgent:
    """Agents for all jobs of this user on this host."""

    def __init__(
        self, carrier: Carrier, environ: Mapping[str, str], say: Callable[[str], None], *, job: str = ""
    ) -> None:
        """`job`: the only one that may be told of; "": each by its own name."""
        self._carrier = carrier
        self._user = user_folder(environ)
        self._host = host_name(environ)
        self._say = say
        self._job = job
        self._agents: dict[Path, tuple[Agent, AgentLink]] = {}
        self._readers = Readers()
        self._scan_s = -SCAN_S
        self._over_s: dict[Path, float] = {}
        """Jobs that are over and not left yet -> since when."""
        self._leaving: set[Path] = set()
        """Those of which the coordinator was told that."""
        self._is_first = True

    @property
    def events(self) -> list[int]:
        """Handles that can be read when `look` is due at once."""
        return [event for agent, _ in self._agents.values() for event in agent.events]

    def look(self) -> None:
        """One round."""
        now_ns = time.monotonic_ns()
        for agent, link in self._agents.values():
            agent.poll(now_ns)
            link.deliver()
        if now_ns / 1e9 - self._scan_s >= SCAN_S:
            self._scan_s = now_ns / 1e9
            self._scan(now_ns / 1e9)

    def close(self) -> None:
        """Let go of all. Captures of ranks that live on stay for the agent that may take our place."""
        for folder, (agent, _) in self._agents.items():
            agent.close()
            if not has_living(folder):
                forget_captures(folder)
        self._readers.close()

    def _scan(self, now_s: float) -> None:
        """Take on jobs that have come, and leave those that are over and told."""
        is_first, self._is_first = self._is_first, False
        for folder in sorted(self._user.glob("*/")):
            # A folder run-... has a watcher of its own.
            if folder in self._agents or folder.name.startswith("run-"):
                continue
            if not has_living(folder):
                if is_first and _are_left(folder / "captures"):
                    forget_captures(folder)
            else:
                job = self._job or _job_of(folder)
                if job:
                    self._take_on(folder, job)
        for folder, (agent, link) in list(self._agents.items()):
            if folder not in self._leaving and (agent.is_busy or agent.has_living or has_living(folder)):
                self._over_s.pop(folder, None)
                continue
            # Not within the round in which it is seen: what has just been told may be asked after.
            over_s = now_s - self._over_s.setdefault(folder, now_s)
            if over_s <= 0 or not (link.is_told or over_s >= TO_HEAR_S):
                continue
            if folder not in self._leaving:
                self._leaving.add(folder)  # if it comes to life again, it is taken on anew
                link.publish(bus.Leaving(host=self._host))
            else:
                lost = "" if link.is_told else "; the coordinator is not heard, and what it has not taken is lost"
                self._say(f"job {link.job} is over here{lost}")
                link.leave()
                agent.close()
                forget_captures(folder)
                del self._agents[folder], self._over_s[folder]
                self._leaving.remove(folder)

    def _take_on(self, folder: Path, job: str) -> None:
        link = AgentLink(self._carrier, job=job, host=self._host, clock=time.monotonic_ns, say=self._say)
        link.subscribe(
            (bus.Closed,),
            lambda message: close_captures(folder, message.window, None) if isinstance(message, bus.Closed) else None,
        )
        self._agents[folder] = Agent(folder, link, host=self._host, readers=self._readers), link
        self._say(f"job {link.job} has ranks here")


def _are_left(captures: Path) -> bool:
    """The job has ended while no agent was here; another one of this host would have read them by now."""
    try:
        return time.time() - captures.stat().st_mtime > TO_HEAR_S
    except OSError:
        return False


def _job_of(folder: Path) -> str:
    """As its ranks name it, the same on all hosts; "" while none has said."""
    for path in folder.glob(f"*{ring.SUFFIX}"):
        try:
            notes = ring.read_flight(path).notes
        except (OSError, EroicaError):
            continue
        named = next((str(note["job"]) for note in notes if note.get("job")), "")
        if named:
            return job_key(named)
    return ""


def watch_host(given: Pass, say: Callable[[str], None], is_over: Callable[[], bool]) -> None:
    """`eroica agent`: watch the jobs of this host until `is_over`, which is asked each round."""
    host = host_name(os.environ)
    with ExitStack() as opened:
        carrier = NatsCarrier(given, name=f"eroica agent on {host}", say=say)
        opened.callback(carrier.close)
        agents = HostAgent(carrier, os.environ, say, job="" if given.job in ("", ALL_JOBS) else given.job)
        opened.callback(agents.close)
        while not is_over():
            select.select([carrier.handle, *agents.events], [], [], ROUND_S)
            agents.look()
