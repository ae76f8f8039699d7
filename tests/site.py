"""A coordinator with its HTTP API and two hosts of four ranks, in this process: real sockets, a network in memory."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from eroica import bus
from eroica.api import Server
from eroica.chronicle import Chronicle
from eroica.client import Client
from eroica.commands import Unit
from eroica.coordinators import Coordinators
from eroica.desk import Desk
from eroica.guard import Web
from eroica.investigation import Incident
from eroica.keeping import Keeper
from eroica.relay import AgentLink
from eroica.windows import Policy
from tests.buses import Network
from tests.test_investigation import Agent, summaries

JOB = "waves"
TIMEOUT_S = 20.0


class Quiet(Agent):
    """Takes commands and answers none, until it is told to."""

    is_quiet = False

    def __init__(self, link: bus.Link, host: str, ranks: range) -> None:
        self.missed: list[bus.Message] = []
        super().__init__(link, host, ranks, summaries())
        link.subscribe((bus.Abort,), self.missed.append)

    def _take(self, message: bus.Message) -> None:
        if self.is_quiet:
            self.missed.append(message)
        else:
            super()._take(message)

    def end(self) -> None:
        """All of its ranks have ended."""
        for rank in self._ranks:
            gone = bus.Standing(
                host=self._host,
                rank=rank,
                world_size=8,
                generation=0,
                training=f"of {self._host}",
                unit=Unit.STEPS,
                count=118,
                per_iteration=1,
                aligned=118,
                num_iterations=118,
                iteration_s=1.0,
                is_alive=False,
            )
            self._link.publish(gone)


@dataclass
class Site:
    """Runs from `start` to `close`; its loop is a thread of its own, reached by the desk as it is by the API."""

    folder: Path
    web: Web = field(default_factory=Web)
    store: str = ""
    attends: bool = True
    """The loop makes rounds."""
    said: list[str] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    agents: list[Quiet] = field(default_factory=list)

    def start(self, with_job: bool = True) -> Site:
        self._opened = ExitStack()
        self.state = self.folder / "state"
        self.state.mkdir(mode=0o700, exist_ok=True)
        self.keeper = Keeper(self.store or str(self.state / "eroica.db"), self.said.append)
        self._opened.callback(self.keeper.close)
        network = Network(Random(1))
        self.chronicle = Chronicle(self.keeper)
        self.coordinators = Coordinators(
            network.carrier(),
            Policy(baseline=False),
            lambda job, incident: self.incidents.append(incident),
            self.said.append,
            self.chronicle,
        )
        self.desk = Desk()
        self._opened.callback(self.desk.close)
        self.server = Server(self.web, self.state, self.coordinators, self.desk, self.chronicle)
        self._opened.callback(self.server.close)
        self._opened.callback(self.desk.refuse)
        self._links: list[AgentLink] = []
        if with_job:
            for host, ranks in (("a", range(4)), ("b", range(4, 8))):
                link = AgentLink(
                    network.carrier(), job=JOB, host=host, clock=time.monotonic_ns, say=self.said.append, session=host
                )
                self._links.append(link)
                self.agents.append(Quiet(link, host, ranks))
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._rounds, daemon=True)
        self._thread.start()
        if with_job:
            self.wait(lambda: len(self.client().ranks(JOB)) == 8, "eight ranks")
        if not self.store:
            self.wait(lambda: self.keeper.flush(0.0), "a store that is open")
        return self

    def _rounds(self) -> None:
        while not self._is_closing.is_set():
            select.select([self.desk.handle], [], [], 0.01)
            if self.attends:
                for link in self._links:
                    link.deliver()
                self.coordinators.look()
                self.keeper.look()
                self.server.look()

    def client(self, name: str = "act") -> Client:
        file = self.server.files[name]
        return Client(file.url, file.token, file.ca)

    def in_loop(self, function: Callable[[], object]) -> None:
        self.desk.call(function)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < until, (what, self.said)
            select.select([], [], [], 0.01)

    def kept(self) -> None:
        """Whatever was told is in the store."""
        assert self.keeper.flush(TIMEOUT_S), self.said

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join(TIMEOUT_S)
        self._opened.close()
