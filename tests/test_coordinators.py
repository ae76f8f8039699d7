"""The investigations of all jobs at one bus, over a network in memory."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from eroica import bus
from eroica.chronicle import Chronicle
from eroica.coordinators import Coordinators
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
    assert run(lambda: coordinators.is_over, first)
    second = agent("two")
    assert run(lambda: not coordinators.is_over, second)
    second.publish(bus.Leaving(host="a"))
    assert run(lambda: coordinators.is_over, second)
