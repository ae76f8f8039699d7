"""The investigations of all jobs at one bus, over a network in memory."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from eroica import bus
from eroica.answers import Window
from eroica.chronicle import Chronicle
from eroica.coordinators import MOST_REQUESTS, Coordinators, _Request, _Requests
from eroica.relay import AgentLink
from eroica.windows import Policy
from tests.buses import Network

ROUNDS = 200


def test_a_host_that_comes_back_after_it_has_left_is_waited_for_again() -> None:
    network = Network(random.Random(1))
    coordinators = Coordinators(
        network.carrier(), Policy(baseline=False), lambda job, incident: None, lambda text: None, Chronicle(None)
    )

    def run(until: Callable[[], bool], link: AgentLink) -> bool:
        for _ in range(ROUNDS):
            link.deliver()
            coordinators.look()
            if until():
                return True
        return False

    def agent(session: str) -> AgentLink:
        return AgentLink(
            network.carrier(), job="j", host="a", clock=time.monotonic_ns, say=lambda text: None, session=session
        )

    first = agent("one")
    first.publish(bus.Leaving(host="a"))
    assert run(lambda: coordinators.is_over, first) and coordinators.snapshot("j").has_ended
    second = agent("two")
    assert run(lambda: not coordinators.is_over, second) and not coordinators.snapshot("j").has_ended
    second.publish(bus.Leaving(host="a"))
    assert run(lambda: coordinators.is_over, second)


def test_as_many_requests_are_remembered_as_are_said_to_be_and_the_oldest_that_are_over_go_first() -> None:
    def request(number: int, state: str) -> _Request:
        return _Request(Window(id=f"w-{number}", job="j", state=state, asked_at="", asked_by="a"))

    requests = _Requests()
    requests.add(request(0, "waiting"))
    for number in range(1, MOST_REQUESTS):
        requests.add(request(number, "done"))
    assert len(requests.known) == MOST_REQUESTS
    requests.add(request(MOST_REQUESTS, "waiting"))
    assert list(requests.known)[:2] == ["w-0", "w-2"] and len(requests.known) == MOST_REQUESTS


def test_nothing_is_kept_of_the_hosts_of_a_job_that_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(random.Random(1))
    coordinators = Coordinators(
        network.carrier(), Policy(baseline=False), lambda job, incident: None, lambda text: None, Chronicle(None)
    )
    link = AgentLink(network.carrier(), job="j", host="a", clock=time.monotonic_ns, say=lambda text: None)
    link.publish(bus.Leaving(host="a"))
    link.deliver()
    coordinators.look()
    assert coordinators._left == {("j", "a")}
    monkeypatch.setattr("eroica.relay.SILENT_NS", 1)
    monkeypatch.setattr("eroica.coordinators.FORGET_S", 0.0)
    for _ in range(ROUNDS):
        coordinators.look()
    assert not coordinators.jobs and not coordinators._left
