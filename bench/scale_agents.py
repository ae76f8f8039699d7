"""Simulated agents of `bench.scale`: python -m bench.scale_agents PASS SUMMARIES FIRST_HOST HOSTS PER_CONNECTION RANKS

Each is a real `AgentLink` with a session of its own; some share a connection to the bus, and this process holds many.
In place of ranks there are the summaries that such ranks would send, encoded beforehand into a file. Simulated: that
nobody trains. Real: all that is said, in which form, and how it is carried, acknowledged and sent again. It says
"ready" on stdout when the summaries are read, begins when it is told "go", notices the slowdown on "notice", and ends
with its standard input.
"""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from bench.fleet import DELAY, FIRST_STEP, PER_HOST, STEP_S, STEPS, Fleet
from eroica import bus
from eroica.access import load_pass
from eroica.background import History, Lap
from eroica.codec import write_summary
from eroica.commands import State, Unit
from eroica.degradation import Change, Trigger
from eroica.nats import NatsCarrier
from eroica.relay import AgentLink

JOB = "fleet"
LAPS = 64
"""Iterations of each rank's past that come with its summary."""
ROUND_S = 0.2


class Host:
    """One agent, with 8 ranks that do as they are told at once."""

    def __init__(self, carrier: NatsCarrier, fleet: Fleet, number: int, file: BinaryIO) -> None:
        self.name = f"node{number:06d}"
        self.ranks = range(number * PER_HOST, min((number + 1) * PER_HOST, fleet.num_ranks))
        self._fleet = fleet
        self._summaries = {rank: file.read(int.from_bytes(file.read(4), "little")) for rank in self.ranks}
        self._history = _history()
        self.link = AgentLink(carrier, job=JOB, host=self.name, clock=time.monotonic_ns, say=_ignore)
        self.link.subscribe((bus.Prepare, bus.Commit), self._take)
        self._window: bus.Prepare | None = None
        self._has_noticed = fleet.culprit not in self.ranks

    def begin(self) -> None:
        """Say where the ranks are."""
        for rank in self.ranks:
            self.link.publish(
                bus.Standing(
                    host=self.name,
                    rank=rank,
                    world_size=self._fleet.num_ranks,
                    generation=0,
                    training="fleet.1",
                    unit=Unit.STEPS,
                    count=FIRST_STEP - 50,
                    per_iteration=1,
                    aligned=FIRST_STEP - 50,
                    num_iterations=FIRST_STEP - 50,
                    iteration_s=STEP_S + DELAY,
                    is_alive=True,
                )
            )

    def look(self, may_notice: bool) -> None:
        """One round."""
        if may_notice and not self._has_noticed:
            self._has_noticed = True
            self.link.publish(bus.Noticed(rank=self._fleet.culprit, trigger=_trigger()))
        self.link.deliver()

    def _take(self, message: bus.Message) -> None:
        if isinstance(message, bus.Prepare):
            self._window = message
            for rank in self.ranks:
                self.link.publish(bus.Answered(window=message.window, rank=rank, state=State.PREPARED))
        elif isinstance(message, bus.Commit) and self._window is not None and self._window.window == message.window:
            for rank in self.ranks:
                self.link.publish(bus.Answered(window=message.window, rank=rank, state=State.DONE))
                self.link.publish(
                    bus.Summarized(
                        window=message.window, rank=rank, summary=self._summaries[rank], history=self._history
                    )
                )
            self._window = None


def _ignore(text: str) -> None:
    pass


def _trigger() -> Trigger:
    return Trigger(
        change=Change.SLOW,
        time_ns=time.time_ns(),
        generation=0,
        step=FIRST_STEP - 52,
        number=FIRST_STEP - 52,
        baseline_ns=round(STEP_S * 1e9),
        observed_ns=round((STEP_S + DELAY) * 1e9),
        cost=DELAY,
        num_batches=1,
        num_collectives=2,
    )


def _history() -> History:
    """As long as before, then slow, up to the end of the window."""
    last = FIRST_STEP + STEPS
    laps = []
    for step in range(last - LAPS, last):
        seconds = STEP_S + (DELAY if step >= FIRST_STEP - 20 else 0.0)
        laps.append(Lap(step, step * round(STEP_S * 1e9), round(seconds * 1e9), "", 1, 2, round(0.15e9)))
    return History(laps=tuple(laps))


def encode(path: Path, first: int, num_hosts: int, num_ranks: int) -> float:
    """Write the summaries of these hosts, each behind its length; returns seconds for each."""
    fleet, num, spent_s = Fleet(num_ranks), 0, 0.0
    with open(path, "wb") as file:
        for summary in fleet.summaries(first * PER_HOST, num_hosts * PER_HOST):
            began = time.process_time()
            data = write_summary(summary)
            spent_s += time.process_time() - began
            file.write(len(data).to_bytes(4, "little") + data)
            num += 1
    return spent_s / num


def main(pass_: str, summaries: str, first: int, num_hosts: int, per_connection: int, num_ranks: int) -> None:
    """Until standard input ends."""
    given, fleet = load_pass(Path(pass_)), Fleet(num_ranks)
    carriers: list[NatsCarrier] = []
    hosts: list[Host] = []
    with open(summaries, "rb") as file:
        for number in range(first, first + num_hosts):
            if len(hosts) % per_connection == 0:
                carriers.append(NatsCarrier(given, name=f"agents from host {number}", say=_ignore))
            hosts.append(Host(carriers[-1], fleet, number, file))
    print("ready", flush=True)
    sys.stdin.readline()
    for host in hosts:
        host.begin()
    may_notice = _asked()
    while not may_notice("end"):
        began = time.monotonic()
        for host in hosts:
            host.look(may_notice("notice"))
        select.select(
            [sys.stdin, *(carrier.handle for carrier in carriers)], [], [], max(0.0, began + ROUND_S - time.monotonic())
        )
    for carrier in carriers:
        carrier.close()


def _asked() -> Callable[[str], bool]:
    """Whether our parent has said a word, or is gone."""
    said: set[str] = set()

    def asked(word: str) -> bool:
        while select.select([sys.stdin], [], [], 0)[0]:
            line = sys.stdin.readline()
            said.add(line.strip() or "end")
            if not line:
                break
        return word in said

    return asked


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *(int(word) for word in sys.argv[3:]))
