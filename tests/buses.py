"""The same bus in three ways, for `test_bus.py`: in one process, over a network that loses on purpose, over NATS."""

from __future__ import annotations

import random
import select
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from eroica.access import load_pass
from eroica.broker import Broker, Listening
from eroica.bus import Bus, Link
from eroica.nats import NatsCarrier
from eroica.relay import AgentLink, CoordinatorLink, Reception

JOB = "waves"
TIMEOUT_S = 20.0


@dataclass
class Clock:
    """Moves by a tenth of a second with each round."""

    now_ns: int = 0

    def __call__(self) -> int:
        return self.now_ns


@dataclass
class Network:
    """Loses, doubles and reorders frames by chance."""

    random: random.Random
    loses: float = 0.0
    doubles: float = 0.0
    reorders: float = 0.0
    is_cut: bool = False
    carriers: list[NetworkCarrier] = field(default_factory=list)

    def carrier(self) -> NetworkCarrier:
        made = NetworkCarrier(self)
        self.carriers.append(made)
        return made

    def send(self, subject: str, data: bytes) -> None:
        if self.is_cut:
            return
        for carrier in self.carriers:
            copies = (self.random.random() >= self.loses) + (self.random.random() < self.doubles)
            for _ in range(copies):
                at = len(carrier.waiting)
                if self.random.random() < self.reorders:
                    at = self.random.randint(0, at)
                carrier.waiting.insert(at, (subject, data))


class NetworkCarrier:
    """One connection to it."""

    def __init__(self, network: Network) -> None:
        self.waiting: deque[tuple[str, bytes]] = deque()
        self.num_connects = 1
        self._network = network
        self._takers: list[tuple[list[str], Callable[[str, bytes], None]]] = []

    def subscribe(self, subject: str, take: Callable[[str, bytes], None]) -> None:
        self._takers.append((subject.split("."), take))

    def unsubscribe(self, subject: str, take: Callable[[str, bytes], None]) -> None:
        self._takers.remove((subject.split("."), take))

    def send(self, subject: str, data: bytes) -> None:
        self._network.send(subject, data)

    def deliver(self) -> None:
        for _ in range(len(self.waiting)):
            subject, data = self.waiting.popleft()
            words = subject.split(".")
            for pattern, take in self._takers:
                if len(pattern) == len(words) and all(p in ("*", w) for p, w in zip(pattern, words, strict=True)):
                    take(subject, data)


@dataclass
class Ends:
    """Two agents and a coordinator of one job."""

    agents: list[Link]
    coordinator: Link
    rounds: Callable[[Callable[[], bool]], None]
    """Goes on until the condition holds; fails if it does not in time."""
    said: list[str] = field(default_factory=list)
    server: Broker | None = None

    @property
    def broker(self) -> Broker:
        """The server between them."""
        assert self.server is not None
        return self.server


def in_one_process() -> Ends:
    shared = Bus()

    def rounds(until: Callable[[], bool]) -> None:
        shared.deliver()
        assert until()

    return Ends([shared, shared], shared, rounds)


def over(network: Network, most_rounds: int = 20_000) -> tuple[Ends, list[AgentLink], Reception, Clock]:
    """Over a network in memory, by a clock of the test's."""
    clock, said = Clock(), list[str]()
    jobs: list[CoordinatorLink] = []
    reception = Reception(network.carrier(), jobs.append, clock=clock, say=said.append)
    agents = [
        AgentLink(network.carrier(), job=JOB, host=host, clock=clock, say=said.append, session=f"s-{host}")
        for host in ("a", "b")
    ]

    def go() -> None:
        clock.now_ns += 100_000_000
        for agent in agents:
            agent.deliver()
        reception.deliver()

    def rounds(until: Callable[[], bool]) -> None:
        for _ in range(most_rounds):
            if until():
                return
            go()
        assert until()

    rounds(lambda: bool(jobs) and len(jobs[0].hosts) == 2 and all(agent.is_heard for agent in agents))
    return Ends(list(agents), jobs[0], rounds, said), agents, reception, clock


@contextmanager
def over_nats(folder: Path) -> Iterator[Ends]:
    """A real server, real connections, real time."""
    said: list[str] = []
    broker = Broker(folder / "bus", Listening(), jobs=(JOB,))
    ticket = load_pass(broker.passes[JOB])
    carriers = [NatsCarrier(broker.own, name="coordinator", say=said.append)]
    carriers += [NatsCarrier(ticket, name=f"agent {host}", say=said.append) for host in ("a", "b")]
    try:
        jobs: list[CoordinatorLink] = []
        reception = Reception(carriers[0], jobs.append, clock=time.monotonic_ns, say=said.append)
        agents = [
            AgentLink(carrier, job=JOB, host=host, clock=time.monotonic_ns, say=said.append)
            for carrier, host in zip(carriers[1:], ("a", "b"), strict=True)
        ]

        def rounds(until: Callable[[], bool]) -> None:
            deadline = time.monotonic() + TIMEOUT_S
            while not until():
                assert time.monotonic() < deadline, said
                select.select([carrier.handle for carrier in carriers], [], [], 0.1)
                for agent in agents:
                    agent.deliver()
                reception.deliver()

        rounds(lambda: bool(jobs) and len(jobs[0].hosts) == 2 and all(agent.is_heard for agent in agents))
        yield Ends(list(agents), jobs[0], rounds, said, broker)
    finally:
        for carrier in carriers:
            carrier.close()
        broker.close()
