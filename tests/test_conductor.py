"""The conductor: a job's arrivals in, orders out, on a job and a clock of the test's; who lies reaches nobody."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from eroica import bus, ring
from eroica.answers import PacingChange
from eroica.arrivals import Arrival, Arrivals
from eroica.conductor import STRAYS, Conductor, Mode, View
from eroica.errors import DataError
from eroica.fabric.pacing import Limits
from eroica.holding import Holding, met
from eroica.holds import MOST_GROUPS, parse
from eroica.ring import COLLECTIVE, PACED, STEP, Record, Ring
from eroica.steps import Iteration
from eroica.topology import Topology
from eroica.wire import read_message, write_message

MS = 1_000_000
SECOND = 1000 * MS
KEY, OTHER = 0xABC, 0xDEF
SHORT = Limits(memory=4, block=4, most_blocks=12, rest=20, again=1000, ttl_s=5.0)


@dataclass
class Job:
    """Four ranks, of which three wait for the last one, at 0.2 s per step. They are held as told, some steps later."""

    gain: float = 0.0
    """Of an iteration in which ranks are held."""
    lag: int = 3
    """Steps until an order has come."""
    limits: Limits = SHORT
    mode: Mode = Mode.ENABLE
    topology: Topology | None = None
    is_free: bool = True
    obeys: bool = True
    groups: tuple[int, ...] = (KEY,)
    rotates: bool = False
    """Another rank is the last one in each step, and all can tell when they came."""
    strides: int = 1
    """Steps of optimizers in an iteration."""
    late_ns: int = 0
    """So much later all of them come, and so much longer it takes."""
    lies: dict[int, int] = field(default_factory=dict)
    """Rank -> the duration that it claims."""
    sent: list[bus.Message] = field(default_factory=list)
    changes: list[PacingChange] = field(default_factory=list)
    step: int = 0
    now_ns: int = 0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.conductor = Conductor(self.sent.append, self.changes.append, lambda: "now", self.topology)
        self.conductor.wish(self.mode, self.limits, "somebody", 0)
        self._coming: list[tuple[int, dict[int, int]]] = []
        self._held: dict[int, int] = {}
        self._num_heard = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            view = View(start=(1, 0), host_of={r: f"h{r}" for r in range(4)}, is_free=self.is_free)
            self.conductor.tick(view, self.now_ns)
            for message in self.sent[self._num_heard :]:
                if isinstance(message, bus.Hold):
                    delays = {rank: ns for _, ranks in message.delays for rank, ns in ranks}
                    self._coming.append((self.step + self.lag, delays))
            self._num_heard = len(self.sent)
            while self._coming and self._coming[0][0] <= self.step:
                self._held = self._coming.pop(0)[1] if self.obeys else self._coming.pop(0)[1] and {}
            is_held = bool(self._held)
            length_ns = round(0.2 * SECOND * (1 - self.gain * is_held) * np.exp(0.01 * self.random.standard_normal()))
            length_ns += self.late_ns
            self.now_ns += length_ns
            for rank in range(4):
                is_last = rank == (self.step % 4 if self.rotates else 3)
                duration = 10 * MS + (0 if is_last else 30 * MS)
                firsts = tuple((key, self.step, self.lies.get(rank, duration)) for key in self.groups)
                held_ns, entered = self._held.get(rank, 0), tuple[int, ...]()
                if self.rotates:
                    held_ns = 0 if is_last or self.late_ns else held_ns
                    entered = ((120 if is_last else 90) * MS + self.late_ns,) * len(firsts)
                told = Arrival(self.step * self.strides, length_ns, held_ns, firsts, entered)
                groups = tuple(bus.Met(group=key, name="data", size=4) for key in self.groups)
                self.conductor.handle(bus.Arrived(rank=rank, groups=groups, arrivals=(told,)), self.now_ns)
            self.step += 1

    @property
    def holds(self) -> list[bus.Hold]:
        return [message for message in self.sent if isinstance(message, bus.Hold)]


def delays(hold: bus.Hold) -> dict[int, int]:
    return {rank: ns for _, ranks in hold.delays for rank, ns in ranks}


def test_where_a_trial_shows_a_gain_ranks_stay_held_and_orders_are_renewed() -> None:
    job = Job(gain=0.1)
    job.run(400)
    assert job.conductor.state("waves").phase == "on"
    assert any(delays(hold) for hold in job.holds[-3:])
    assert [change.phase for change in job.changes] == ["", "trial", "on"]
    assert max(ns for hold in job.holds for ns in delays(hold).values()) <= 50 * MS
    asked = [message for message in job.sent if isinstance(message, bus.TellArrivals)]
    assert len(asked) >= job.now_ns / (2.5 * SECOND) - 2, "agents that are not asked again fall silent"


@pytest.mark.parametrize("gain", [0.0, -0.05])
def test_where_it_gains_nothing_or_costs_it_is_given_up_and_nobody_is_held(gain: float) -> None:
    job = Job(gain=gain, limits=replace(SHORT, rest=10_000))
    job.run(400)
    assert job.changes[-1].phase == "resting" and "no gain" in job.changes[-1].why
    assert not delays(job.holds[-1]) and not job.conductor.state("waves").is_held


def test_ranks_that_are_late_in_turn_are_held_until_the_last_one_usually_comes_and_not_beyond() -> None:
    job = Job(gain=0.1, rotates=True)
    job.run(400)
    assert job.conductor.state("waves").phase == "on", "the last one of each step is free, as it is to be"
    for hold in job.holds:
        assert dict(hold.moments) == ({KEY: 120 * MS} if hold.delays else {})
    assert any(set(delays(hold)) == {0, 1, 2, 3} for hold in job.holds)


def test_ranks_that_are_free_though_they_come_before_the_moment_do_not_follow() -> None:
    job = Job(gain=0.1, rotates=True, obeys=False)
    job.run(40 + STRAYS)
    assert job.changes[-1].why == "ranks are not held as ordered" and not delays(job.holds[-1])


def test_orders_that_take_long_to_arrive_spoil_no_trial() -> None:
    job = Job(gain=0.1, lag=15)
    job.run(300)
    assert job.conductor.state("waves").phase == "on"


def test_of_more_groups_than_an_order_has_room_for_those_it_names_are_paced_and_the_others_free() -> None:
    sent: list[bus.Message] = []
    conductor, num_ranks, random = Conductor(sent.append), 2 * MOST_GROUPS + 4, np.random.default_rng(0)
    conductor.wish(Mode.ENABLE, SHORT, "somebody", 0)
    view = View(start=(1, 0), host_of={rank: "h" for rank in range(num_ranks)}, is_free=True)
    now_ns, held = 0, dict[int, int]()
    for step in range(300):
        conductor.tick(view, now_ns)
        for message in sent:
            held = delays(message) if isinstance(message, bus.Hold) else held
        sent.clear()
        length_ns = round(0.2 * SECOND * (0.9 if held else 1.0) * np.exp(0.01 * random.standard_normal()))
        now_ns += length_ns
        for rank in range(num_ranks):
            key = rank // 2 + 1
            first = key, step, 10 * MS if rank % 2 else 40 * MS
            told = Arrival(step, length_ns, held.get(rank, 0), (first,))
            conductor.handle(
                bus.Arrived(rank=rank, groups=(bus.Met(group=key, name="pair", size=2),), arrivals=(told,)), now_ns
            )
    assert conductor.state("waves").phase == "on" and len(held) == MOST_GROUPS


def test_that_all_come_after_the_moment_is_no_disobedience_and_counts_for_pacing() -> None:
    job = Job(gain=0.1, rotates=True)
    job.run(100)
    assert job.conductor.state("waves").phase == "on"
    job.late_ns = 100 * MS
    job.run(STRAYS + 10)
    assert job.conductor.state("waves").phase == "on" and job.conductor.state("waves").is_held
    assert job.conductor.state("waves").iteration_s == pytest.approx(0.18 + 0.1, rel=0.05)


def test_a_dry_run_tells_what_it_would_do_and_sends_no_order() -> None:
    job = Job(mode=Mode.DRY_RUN)
    job.run(40)
    state = job.conductor.state("waves")
    assert state.has_rehearsed and not job.holds
    assert any(change.phase == "trial" for change in state.changes)
    assert state.groups[0].num_ranks == 4 and state.groups[0].wait_s == pytest.approx(0.03)
    assert state.dispersion == pytest.approx(0.15, rel=0.1)


def test_switched_off_everybody_is_free_at_once() -> None:
    job = Job(gain=0.1)
    while not (job.holds and delays(job.holds[-1])):
        job.run(1)
    job.conductor.wish(Mode.OFF, Limits(), "somebody", job.now_ns)
    assert not delays(job.holds[-1]) and job.changes[-1].why == "switched off by somebody"


def test_a_window_is_taken_of_ranks_that_are_free_and_says_what_was_before() -> None:
    job = Job(gain=0.1)
    job.run(300)
    assert job.conductor.state("waves").is_held
    job.is_free = False
    job.run(1)
    assert not delays(job.holds[-1])
    assert "held back by eroica's pacing before" in job.conductor.note() and job.conductor.note() == ""
    job.is_free = True
    job.run(1)
    assert delays(job.holds[-1]), "and goes on after it"


def test_a_rank_that_lies_makes_nobody_wait_longer_than_the_cap() -> None:
    for claim in (0, 1, 10**15):
        job = Job(lies={2: claim}, limits=replace(SHORT, max_delay_s=0.02))
        job.run(300)
        assert job.holds or claim == 0
        assert all(ns <= 20 * MS for hold in job.holds for ns in delays(hold).values())


def test_of_two_ranks_one_that_lies_about_its_iteration_has_the_other_held_within_the_share_of_it() -> None:
    sent: list[bus.Message] = []
    conductor, now_ns = Conductor(sent.append), 0
    conductor.wish(Mode.ENABLE, SHORT, "somebody", 0)
    groups = (bus.Met(group=KEY, name="pair", size=2),)
    for step in range(100):
        conductor.tick(View(start=(1, 0), host_of={0: "h", 1: "h"}, is_free=True), now_ns)
        now_ns += 100 * MS
        for rank, length_ns, duration_ns in ((0, 100 * MS, 45 * MS), (1, 700 * MS, 0)):
            told = Arrival(step, length_ns, 0, ((KEY, step, duration_ns),))
            conductor.handle(bus.Arrived(rank=rank, groups=groups, arrivals=(told,)), now_ns)
    held = [ns for message in sent if isinstance(message, bus.Hold) for ns in delays(message).values()]
    assert held and max(held) <= 0.2 * 100 * MS


def test_a_group_has_the_cap_that_its_name_was_given() -> None:
    job = Job(gain=0.1, limits=replace(SHORT, group_caps_s={"data": 0.004}))
    job.run(200)
    assert any(delays(hold) for hold in job.holds)
    assert all(ns <= 4 * MS for hold in job.holds for ns in delays(hold).values())


def test_a_rank_in_several_groups_is_held_for_all_of_them_together_within_its_share() -> None:
    keys = tuple(range(1, 9))
    job = Job(gain=0.1, groups=keys, limits=replace(SHORT, iteration_share=0.1, max_delay_s=0.2))
    job.run(300)
    for hold in job.holds:
        for rank in range(4):
            assert sum(ns for _, ranks in hold.delays for r, ns in ranks if r == rank) <= 0.1 * 0.22 * SECOND
    assert any(delays(hold) for hold in job.holds)


def test_a_rank_whose_optimizers_step_several_times_is_held_in_all_steps_together_within_its_share() -> None:
    job = Job(gain=0.1, strides=5, limits=replace(SHORT, iteration_share=0.1, max_delay_s=0.2))
    job.run(300)
    held = [ns for hold in job.holds for ns in delays(hold).values()]
    assert held and 5 * max(held) <= 0.1 * 0.22 * SECOND


def test_groups_that_share_a_link_take_turns_by_what_those_before_them_need() -> None:
    topology = Topology({f"h{rank}": {"leaf": (f"leaf{rank % 2}",)} for rank in range(4)})
    job = Job(gain=0.1, groups=(KEY, OTHER), topology=topology)
    job.run(300)
    held = {key: max(ns for _, ns in ranks) for key, ranks in next(h for h in job.holds if delays(h)).delays}
    assert held[OTHER] >= held.get(KEY, 0) + 5 * MS, "a transfer of the group before takes 10 ms"


def test_ranks_that_do_not_follow_end_it() -> None:
    job = Job(gain=0.1, obeys=False)
    job.run(40 + STRAYS)
    assert job.changes[-1].why == "ranks are not held as ordered" and not delays(job.holds[-1])


def test_a_job_whose_ends_of_collectives_are_not_seen_is_told_so() -> None:
    job = Job(lies=dict.fromkeys(range(4), -1))
    job.run(30)
    assert "NCCL" in job.conductor.state("waves").why_not and not job.holds


def test_another_set_of_ranks_is_another_job_to_learn() -> None:
    job = Job(gain=0.1)
    job.run(300)
    job.conductor.tick(View(start=(1, 1), host_of={0: "h0"}, is_free=True), job.now_ns)
    assert not delays(job.holds[-1]) and not job.conductor.state("waves").is_held
    assert "learnt anew" in job.changes[-1].why


def _record(number: int, kind: int, step: int, begin_ns: int, duration_ns: int | None, sequence: int = 0) -> Record:
    return Record(number, begin_ns, duration_ns, False, kind, 1, 1, 0, -1, KEY, sequence, 4, step)


def _lap(step: int) -> Iteration:
    return Iteration(step, 0, step * 100, step * 100 + 90, 0, step, 1, 1, 2, 0, False, None)


def test_the_first_collective_of_each_step_is_told_once_its_iteration_is_over() -> None:
    arrivals = Arrivals()
    first = [_record(n, COLLECTIVE, n // 2, 10 * n, 5 + n, n) for n in range(8)]
    held = _record(9, PACED, 2, 39, 3)
    arrivals.feed(first, [*first, held])
    assert arrivals.take([_lap(1)]) == [], "of the step in which a group is met first, calls may be missing"
    assert arrivals.take([_lap(1), _lap(2), _lap(3)]) == [
        Arrival(1, 90, 0, ((KEY, 2, 7),), (-1,)),
        Arrival(2, 90, 3, ((KEY, 4, 9),), (-1,)),
    ]
    assert arrivals.take([_lap(2), _lap(3)]) == []


def test_when_a_rank_came_is_told_by_the_end_of_the_step_before() -> None:
    arrivals = Arrivals()
    calls = [_record(n, COLLECTIVE, n, 100 * n + 40, 5, n) for n in range(4)]
    steps = [_record(10 + n, STEP, n, 100 * n + 70, 20, n + 1) for n in range(2)]
    arrivals.feed([*calls, *steps], [*calls, *steps])
    told = arrivals.take([_lap(1), _lap(2), _lap(3), _lap(4)])
    assert [(one.step, one.entered_ns) for one in told] == [(1, (50,)), (2, (50,)), (3, (-1,))]


def test_an_end_that_comes_later_is_waited_for_and_one_that_never_comes_is_not_seen() -> None:
    arrivals = Arrivals()
    begun = [_record(n, COLLECTIVE, n, 10 * n, None, n) for n in range(4)]
    arrivals.feed(begun, [])
    arrivals.feed([], [_record(2, COLLECTIVE, 2, 20, 6, 2)])
    arrivals.take([_lap(1)])
    assert [one.firsts for one in arrivals.take([_lap(2), _lap(3)])] == [((KEY, 1, -1),), ((KEY, 2, 6),)]


def test_an_agent_leaves_in_each_ring_what_its_rank_is_asked_for_and_takes_it_back(tmp_path: Path) -> None:
    rings = [Ring.create(tmp_path / f"r{rank}.ring", rank=rank, world_size=2, capacity=8) for rank in range(2)]
    paths = {rank: one.path for rank, one in enumerate(rings)}
    holding = Holding()
    asked = bus.Hold(number=1, ttl_s=2.0, delays=((KEY, ((0, 5 * MS), (7, MS))),), moments=((KEY, MS), (OTHER, MS)))
    holding.hold(asked, paths, SECOND)
    found = parse(rings[0].holds)
    assert found is not None and found.delay_ns == {KEY: 5 * MS} and found.until_ns == 3 * SECOND
    assert found.moment_ns == {KEY: MS}
    assert rings[1].words[ring.HOLDS] == 0
    holding.hold(bus.Hold(number=2, ttl_s=2.0, delays=((KEY, ((1, 5 * MS),)),)), paths, 2 * SECOND)
    assert rings[0].words[ring.HOLDS] == 0 and rings[1].words[ring.HOLDS]
    paths[0].unlink()  # a ring that has gone is nobody's trouble
    holding.hold(bus.Hold(number=3, ttl_s=2.0, delays=((KEY, ((0, MS), (1, MS))),)), paths, 3 * SECOND)
    holding.close()
    assert rings[1].words[ring.HOLDS] == 0
    for one in rings:
        one.close()


def test_an_agent_tells_of_arrivals_only_while_somebody_wants_to_know() -> None:
    holding, laps = Holding(), [_lap(1), _lap(2)]
    records = [_record(n, COLLECTIVE, n, 10 * n, 5, n) for n in range(3)] + [_record(5, STEP, 1, 1, 1)]
    assert holding.feed(Path("r"), records, records, laps, 0) == []
    holding.tell(bus.TellArrivals(ttl_s=1.0), 0)
    assert len(holding.feed(Path("r"), records, records, laps, SECOND - 1)) == 1
    assert holding.feed(Path("r"), [], [], [*laps, _lap(3)], SECOND) == []


def test_claims_beyond_all_bounds_do_not_travel() -> None:
    arrived = bus.Arrived(rank=3, groups=(bus.Met(group=KEY, name="data", size=4),), arrivals=())
    hold = bus.Hold(number=2, ttl_s=5.0, delays=())
    wrong: list[bus.Message] = [
        replace(arrived, arrivals=(Arrival(7, 0, 0, ()),)),
        replace(arrived, arrivals=(Arrival(7, 1, 0, ((KEY, 1, -2),)),)),
        replace(arrived, groups=(bus.Met(group=KEY, name="alone", size=1),)),
        replace(arrived, arrivals=(Arrival(7, 1, 0, ((KEY, 1, 2),), (-2,)),)),
        replace(arrived, arrivals=(Arrival(7, 1, 0, ((KEY, 1, 2),), (3, 3)),)),
        replace(hold, ttl_s=1e9),
        replace(hold, moments=((KEY, 0),)),
        replace(hold, delays=((KEY, ((0, SECOND),)),)),
    ]
    for claim in wrong:
        with pytest.raises(DataError, match="beyond all bounds"):
            read_message(*write_message(claim), (*bus.TO_COORDINATOR, *bus.TO_AGENTS))


def test_groups_without_peers_and_notes_that_make_no_sense_are_no_groups() -> None:
    notes: list[dict[str, object]] = [
        {"group": f"{KEY:016x}", "name": "data", "size": 4},
        {"group": "-000000000000001", "name": "x", "size": 4},
        {"group": "f" * 17, "name": "x", "size": 4},
        {"group": "0" * 16, "name": "x", "size": 4},
        {"group": f"{1:016x}", "name": "alone", "size": 1},
        {"group": "rank", "name": "x", "size": 4},
        {"group": 7, "size": "four"},
        {"host": "h"},
    ]
    assert met(notes) == (bus.Met(group=KEY, name="data", size=4),)
