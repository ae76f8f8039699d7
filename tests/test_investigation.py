"""The same job gives the same diagnosis over every bus: in one process, over a network that loses, over NATS."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from eroica import bus
from eroica.arrivals import Arrival
from eroica.background import History, Lap
from eroica.codec import write_summary
from eroica.commands import State, Unit
from eroica.conductor import Mode
from eroica.critical_path import Activity
from eroica.degradation import Change, Trigger
from eroica.fabric.pacing import Limits
from eroica.findings import to_json
from eroica.investigation import Incident, Investigation, judge
from eroica.pattern import Function, Summary, stack
from eroica.standing import Call, Group, RankView
from eroica.topology import Topology
from eroica.windows import Policy, Window
from tests import handmade as h
from tests.buses import Ends, Network, in_one_process, over, over_nats

INPUT = Function(Activity.INPUT, "__getitem__", "data.py:41", "data.py:41")
SLOW = 5


def summaries(slow: Sequence[int] = (SLOW,), late_s: float = 0.2) -> list[Summary]:
    """Of eight ranks on two hosts; rank 5, or whoever is named, takes longer for its batches."""
    own = [0.8 + 0.0005 * rank + (late_s if rank in slow else 0.0) for rank in range(8)]
    ranks = []
    for rank, work in enumerate(own):
        meet = h.Sample(0.05 + max(own) - work, work_before=work, channel=h.everyone(8))
        spent = {h.GEMM: 0.8, INPUT: work - 0.8}
        host = "a" if rank < 4 else "b"
        ranks.append(h.Rank(own=work, length=max(own) + 0.05, samples=[meet], functions=spent, host=host))
    return h.job(ranks)


def rounds_until(ends: Ends, investigation: Investigation, condition: Callable[[], bool]) -> None:
    """Messages go to and fro, and the time goes on, until it holds."""

    def holds() -> bool:
        investigation.tick(time.monotonic_ns())
        return condition()

    ends.rounds(holds)


class Agent:
    """Answers for the four ranks of one host as an agent would."""

    def __init__(self, link: bus.Link, host: str, ranks: range, made: Sequence[Summary]) -> None:
        self._link, self._host, self._ranks, self.made = link, host, ranks, made
        self.closed: list[bus.Closed] = []
        self.history: History | None = None
        """Of each of its ranks."""
        self.missing: Sequence[int] = ()
        """Ranks whose captures cannot be read."""
        link.subscribe((bus.Prepare, bus.Commit, bus.Closed), self._take)
        self.stand(117)

    def stand(self, count: int) -> None:
        """Its ranks have made so many steps."""
        for rank in self._ranks:
            self._link.publish(
                bus.Standing(
                    host=self._host,
                    rank=rank,
                    world_size=8,
                    generation=0,
                    training=f"of {self._host}",
                    unit=Unit.STEPS,
                    count=count,
                    per_iteration=1,
                    aligned=count,
                    num_iterations=count,
                    iteration_s=1.0,
                    is_alive=True,
                )
            )

    def notice(self, change: Change = Change.SLOW, ended: Change | None = None) -> None:
        """The job has become slow, or what else has changed."""
        trigger = Trigger(change, time.monotonic_ns(), 0, 117, 117, 850_000_000, 1_050_000_000, 0.2, ended=ended)
        self._link.publish(bus.Noticed(rank=self._ranks[0], trigger=trigger))

    def _take(self, message: bus.Message) -> None:
        if isinstance(message, bus.Prepare):
            for rank in self._ranks:
                self._link.publish(bus.Answered(window=message.window, rank=rank, state=State.PREPARED))
        elif isinstance(message, bus.Commit):
            for rank in self._ranks:
                self._link.publish(bus.Answered(window=message.window, rank=rank, state=State.DONE))
                data = write_summary(self.made[rank]) if rank not in self.missing else None
                problem = "" if data is not None else "gave a capture that cannot be read"
                told = bus.Summarized(
                    window=message.window, rank=rank, summary=data, history=self.history, problem=problem
                )
                self._link.publish(told)
        elif isinstance(message, bus.Closed):
            self.closed.append(message)


def watching(ends: Ends, told: list[Incident], **policy: Any) -> Investigation:
    """Of a job at these ends."""
    return Investigation(
        ends.coordinator,
        job="waves",
        policy=Policy(**policy),
        clock=time.monotonic_ns,
        tell=told.append,
        say=ends.said.append,
    )


def go_on(ends: Ends, investigation: Investigation) -> None:
    """All that can be said and done just now."""
    ends.rounds(lambda: True)
    investigation.tick(time.monotonic_ns())
    ends.rounds(lambda: True)


def diagnosed(
    ends: Ends,
    slow: Sequence[int] = (SLOW,),
    topology: Topology | None = None,
    before: Callable[[Investigation], Callable[[], bool]] = lambda investigation: lambda: True,
) -> dict[str, Any]:
    """What comes of it, but for the time at which it was made. `before`: what is done first, and when that is done."""
    told: list[Incident] = []
    investigation = Investigation(
        ends.coordinator,
        job="waves",
        policy=Policy(baseline=False),
        clock=time.monotonic_ns,
        tell=told.append,
        say=ends.said.append,
        topology=topology,
    )
    all_of_them = summaries(slow)
    agents = [Agent(ends.agents[0], "a", range(4), all_of_them), Agent(ends.agents[1], "b", range(4, 8), all_of_them)]

    until = partial(rounds_until, ends, investigation)
    until(lambda: len(investigation.coordinator.standings) == 8)
    until(before(investigation))
    for agent in agents:
        agent.notice()
    until(lambda: investigation.coordinator.window is not None or bool(told))
    until(lambda: bool(told))
    until(lambda: all(agent.closed for agent in agents))
    (incident,) = told
    made = to_json(incident.diagnosis)
    assert [closed.diagnosis for agent in agents for closed in agent.closed] == [made["id"]] * 2
    return {name: value for name, value in made.items() if name != "created"}


def test_a_slow_rank_is_told_with_its_host_and_cause() -> None:
    made = diagnosed(in_one_process())
    verdict = made["verdict"]
    assert (verdict["ranks"], verdict["hosts"], verdict["cause"]) == (str(SLOW), ["b"], "input_pipeline")
    assert made["placement"]["hosts"] == {"a": "0-3", "b": "4-7"} and made["coverage"]["ranks_reported"] == 8


@pytest.mark.parametrize(("slower", "num_told"), [((SLOW,), 1), ((1,), 2)])
def test_a_slowdown_that_the_first_window_has_shown_already_is_told_once_and_another_one_as_well(
    slower: Sequence[int], num_told: int
) -> None:
    ends, told = in_one_process(), list[Incident]()
    investigation = watching(ends, told, rest_s=0.0)
    made = summaries()
    agents = [Agent(ends.agents[0], "a", range(4), made), Agent(ends.agents[1], "b", range(4, 8), made)]

    go_on(ends, investigation)
    assert [one.diagnosis.window.trigger for one in told] == ["baseline"]
    for agent in agents:
        agent.made = summaries(slower)
    agents[0].notice()
    go_on(ends, investigation)
    assert [len(agent.closed) for agent in agents] == [2, 2]
    assert [one.diagnosis.verdict.ranks for one in told] == [str(SLOW), *map(str, slower)][:num_told]


@pytest.mark.parametrize(("count", "num_told"), [(117, 1), (40, 2)])
def test_a_slowdown_that_began_within_the_first_window_is_told_once_and_one_that_came_later_as_well(
    count: int, num_told: int
) -> None:
    ends, told = in_one_process(), list[Incident]()
    investigation = watching(ends, told, rest_s=0.0)
    made = summaries(late_s=0.15)
    agents = [Agent(ends.agents[0], "a", range(4), made), Agent(ends.agents[1], "b", range(4, 8), made)]

    for agent in agents:
        agent.stand(count)
    go_on(ends, investigation)
    # Slow from step 110 on: the window of the baseline, from `count` on, has seen a part of it, or nothing.
    laps = [Lap(step, step * 10**9, 850_000_000 if step < 110 else 1_300_000_000, "") for step in range(20, 117)]
    for agent in agents:
        agent.made, agent.history = summaries(late_s=0.45), History(laps=tuple(laps))
    agents[0].notice()
    go_on(ends, investigation)
    assert [len(agent.closed) for agent in agents] == [2, 2]
    assert [one.diagnosis.verdict.ranks for one in told] == [str(SLOW)] * num_told


@pytest.mark.parametrize(("missing", "num_told"), [((), 1), ((SLOW, 6, 7), 0)])
def test_a_slowdown_whose_cause_is_unknown_is_not_told_while_captures_are_missing(
    missing: Sequence[int], num_told: int
) -> None:
    ends, told = in_one_process(), list[Incident]()
    investigation = watching(ends, told, rest_s=0.0)

    def all_alike(seconds: float) -> list[Summary]:
        meet = h.Sample(0.05, work_before=seconds, channel=h.everyone(8))
        spent = {Function(Activity.OPERATOR, "aten::mm", None, None): seconds}
        return h.job(
            [h.Rank(seconds, seconds + 0.05, [meet], spent, has_device=False, host="ab"[k // 4]) for k in range(8)]
        )

    agents = [
        Agent(ends.agents[0], "a", range(4), all_alike(0.8)),
        Agent(ends.agents[1], "b", range(4, 8), all_alike(0.8)),
    ]

    def verdicts() -> list[tuple[str, str]]:
        return [(v.cause, v.ranks) for one in told if (v := one.diagnosis.verdict).cause != "none"]

    go_on(ends, investigation)
    assert not verdicts()
    for agent in agents:
        agent.made, agent.missing = all_alike(1.2), missing
    agents[0].notice()
    go_on(ends, investigation)
    assert [cause for cause, _ in verdicts()] == ["unknown"] * num_told
    if missing:
        for agent in agents:
            agent.made, agent.missing = summaries(), ()
        investigation.coordinator.tick(time.monotonic_ns() + 6 * 10**9)
        ends.rounds(lambda: True)
        assert verdicts() == [("input_pipeline", str(SLOW))]


def test_what_the_slow_ranks_have_in_common_in_the_network_is_told_live() -> None:
    rails = Topology({host: {"rail": ("r0", "r1", "r2", "r3")} for host in "ab"})
    made = diagnosed(in_one_process(), (1, 5), rails)
    assert "(all 2 ranks on rail r1)" in made["verdict"]["summary"]
    assert "topology" in {item["source"] for item in made["evidence"].values()}


def pace(ends: Ends, investigation: Investigation, seen: Sequence[bus.Message]) -> Callable[[], bool]:
    """Have it paced; the answer has seven ranks wait for the slow one, and says whether somebody is held."""
    investigation.pace(Mode.ENABLE, Limits(memory=4, block=4), "somebody")
    assert "no iteration was joined" in investigation.pacing.state("job").why_not
    step = 0

    def is_held() -> bool:
        nonlocal step
        step += 1
        for rank in range(8):
            firsts = ((7, step, 10_000_000 + (0 if rank == SLOW else 200_000_000)),)
            told = Arrival(step, 1_000_000_000, 0, firsts)
            met = (bus.Met(group=7, name="data", size=8),)
            ends.agents[rank // 4].publish(bus.Arrived(rank=rank, groups=met, arrivals=(told,)))
        return any(isinstance(message, bus.Hold) and message.delays for message in seen)

    return is_held


def test_a_job_that_was_paced_and_stands_still_is_told_to_have_been_paced() -> None:
    (ends, *_), seen, told = over(Network(random.Random(1))), list[bus.Message](), list[Incident]()
    ends.agents[0].subscribe((bus.Hold,), seen.append)
    investigation = Investigation(
        ends.coordinator,
        job="waves",
        policy=Policy(baseline=False, look_again_s=0.0),
        clock=time.monotonic_ns,
        tell=told.append,
        say=ends.said.append,
    )
    agents = [Agent(ends.agents[host], "ab"[host], range(4 * host, 4 * host + 4), ()) for host in (0, 1)]
    data = Group("a" * 16, "data", tuple(range(8)))

    def look(link: bus.Link, host: int, asked: bus.Message) -> None:
        assert isinstance(asked, bus.LookCloser)
        views = []
        for rank in range(4 * host, 4 * host + 4):
            calls = [Call(data.key, 4, "allreduce", "done", 400, "float32", 90.0, 5)]
            calls += [] if rank == SLOW else [Call(data.key, 5, "allreduce", "in", 400, "float32", 60.0, 5)]
            views.append(RankView(rank=rank, host="ab"[host], groups=(data,), calls=tuple(calls), silent_s=60.0))
        link.publish(bus.Looked(look=asked.look, host="ab"[host], views=tuple(views)))

    for host, link in enumerate(ends.agents):
        link.subscribe((bus.LookCloser,), partial(look, link, host))

    until = partial(rounds_until, ends, investigation)
    until(lambda: len(investigation.coordinator.standings) == 8)
    until(pace(ends, investigation, seen))
    agents[0].notice(Change.STALLED)
    until(lambda: bool(told))
    made = told[0].diagnosis
    assert (made.kind, made.verdict.ranks) == ("hang", str(SLOW))
    assert any("held back by eroica's pacing before they were looked at" in note for note in made.coverage.notes)


class Halted:
    """A job of eight ranks on two hosts that stands still, as `show` has it at the moment."""

    def __init__(self, show: Callable[[int], RankView]) -> None:
        self.show, self.told, self.ends = show, list[Incident](), in_one_process()
        self.investigation = Investigation(
            self.ends.coordinator,
            job="waves",
            policy=Policy(baseline=False, look_again_s=0.0, look_later_s=0.0),
            clock=time.monotonic_ns,
            tell=self.told.append,
            say=self.ends.said.append,
        )
        self.agents = [
            Agent(self.ends.agents[host], "ab"[host], range(4 * host, 4 * host + 4), summaries()) for host in (0, 1)
        ]
        for host, link in enumerate(self.ends.agents):
            link.subscribe((bus.LookCloser,), partial(self._look, link, host))

    def _look(self, link: bus.Link, host: int, asked: bus.Message) -> None:
        assert isinstance(asked, bus.LookCloser)
        views = tuple(self.show(rank) for rank in range(4 * host, 4 * host + 4))
        link.publish(bus.Looked(look=asked.look, host="ab"[host], views=views))

    def go_on(self, num_rounds: int = 4) -> None:
        """All that has been said is dealt with."""
        for _ in range(num_rounds):
            self.ends.rounds(lambda: True)
            self.investigation.tick(time.monotonic_ns())


DATA = Group("a" * 16, "data", tuple(range(8)))


def waiting(rank: int, **changes: Any) -> RankView:
    """All but one wait in the fifth call, which that one has not come to."""
    calls = [Call(DATA.key, 4, "allreduce", "done", 400, "float32", 90.0, 5)]
    calls += [] if rank == SLOW else [Call(DATA.key, 5, "allreduce", "in", 400, "float32", 60.0, 5)]
    given: dict[str, Any] = {"host": "a" if rank < 4 else "b", "groups": (DATA,), "calls": tuple(calls)}
    return RankView(rank=rank, **(given | {"state": "running", "silent_s": 60.0} | changes))


def test_a_hang_is_told_once_however_many_ranks_notice_it_one_after_the_other_and_again_when_it_comes_back() -> None:
    job = Halted(waiting)
    job.go_on()
    for agent in job.agents:
        agent.notice(Change.STALLED)
        job.go_on()
    assert [incident.diagnosis.verdict.ranks for incident in job.told] == [str(SLOW)]
    job.agents[0].notice(Change.RECOVERED, ended=Change.STALLED)
    job.agents[0].notice(Change.STALLED)
    job.go_on()
    assert len(job.told) == 2


def test_a_hang_that_comes_back_is_told_again_also_where_an_agent_that_is_new_has_not_seen_the_first() -> None:
    job = Halted(waiting)
    job.go_on()
    job.agents[0].notice(Change.STALLED)
    job.go_on()
    for agent in job.agents:
        agent.stand(130)
    job.go_on()
    job.agents[0].notice(Change.STALLED)
    job.go_on()
    assert [incident.diagnosis.kind for incident in job.told] == ["hang", "hang"]


def test_a_save_that_the_others_wait_for_is_told_once_however_long_it_takes() -> None:
    lasts_s = iter(range(20, 10_000))

    def saving(rank: int) -> RankView:
        return waiting(rank, **({"phase": "save", "phase_s": float(next(lasts_s))} if rank == SLOW else {}))

    job = Halted(saving)
    job.go_on()
    job.agents[0].notice(Change.STALLED)
    job.go_on(12)
    assert [(one.diagnosis.kind, one.diagnosis.verdict.cause) for one in job.told] == [("paused", "checkpoint_io")]


def test_a_death_that_a_look_at_a_silence_has_shown_is_not_told_again_when_the_others_are_ended() -> None:
    is_ended = False

    def dying(rank: int) -> RankView:
        if rank == SLOW:
            return waiting(rank, state="died", silent_s=None, exit_status=-9)
        return waiting(rank, state="died", silent_s=None, exit_status=-15) if is_ended else waiting(rank)

    job = Halted(dying)
    job.go_on()
    job.agents[0].notice(Change.STALLED)
    job.go_on()
    is_ended = True
    for rank in range(8):
        job.ends.agents[rank // 4].publish(bus.Died(rank=rank, pid=rank + 1))
    job.go_on()
    assert [(one.diagnosis.kind, one.diagnosis.verdict.ranks) for one in job.told] == [("crash", str(SLOW))]


def test_a_job_that_is_paced_is_captured_while_nobody_is_held_and_its_diagnosis_says_so() -> None:
    (ends, *_), seen = over(Network(random.Random(1), loses=0.1)), list[bus.Message]()
    ends.agents[0].subscribe((bus.Hold, bus.Prepare), seen.append)
    made = diagnosed(ends, before=lambda investigation: pace(ends, investigation, seen))
    assert made["verdict"]["ranks"] == str(SLOW)
    assert any("held back by eroica's pacing before this window" in note for note in made["coverage"]["notes"])
    after = seen[next(n for n, message in enumerate(seen) if isinstance(message, bus.Prepare)) :]
    first = next(message for message in after if isinstance(message, bus.Hold))
    assert not first.delays, "they are free before the window begins"


@pytest.mark.parametrize("seed", range(5))
def test_a_network_that_loses_doubles_and_reorders_changes_nothing_in_the_diagnosis(seed: int) -> None:
    lossy, *_ = over(Network(random.Random(seed), loses=0.3, doubles=0.2, reorders=0.2))
    assert json.dumps(diagnosed(lossy)) == json.dumps(diagnosed(in_one_process()))


def test_the_diagnosis_over_nats_is_that_of_one_process(tmp_path: Path) -> None:
    with over_nats(tmp_path) as ends:
        assert json.dumps(diagnosed(ends)) == json.dumps(diagnosed(in_one_process()))


@pytest.mark.parametrize(
    ("late_s", "on_device", "is_told"), [(0.2, False, True), (0.06, False, False), (0.06, True, True)]
)
def test_a_first_window_of_ranks_that_share_cores_must_show_more_to_be_told(
    late_s: float, on_device: bool, is_told: bool
) -> None:
    ranks = []
    for work in [0.8 + (late_s if rank == SLOW else 0.0) for rank in range(8)]:
        meet = h.Sample(0.85 + late_s - work, work_before=work, channel=h.everyone(8))
        spent = {h.GEMM: 0.8, INPUT: work - 0.8}
        ranks.append(h.Rank(own=work, length=0.85 + late_s, samples=[meet], functions=spent, has_device=on_device))
    window = Window(number=1, trigger="baseline", cause=None, rank=None, asked_ns=0, start=10, num_steps=8)
    window.summaries = dict(enumerate(h.job(ranks)))
    made = judge(window, None, job="j", created="")
    assert [finding.ranks for finding in made.diagnosis.findings] == [str(SLOW)]
    assert made.is_news == is_told


@pytest.mark.parametrize(("cost", "is_told"), [(0.07, True), (0.03, False)])
def test_a_first_window_tells_what_a_setting_costs_also_where_noise_could_cost_as_much(
    cost: float, is_told: bool
) -> None:
    spent = {h.GEMM: 1 - cost, Function(Activity.OPERATOR, "aten::_is_any_true", None, None): cost}
    rank = h.Rank(own=1.0, length=1.02, samples=[h.Sample(0.02, 1.0)], functions=spent, has_device=False)
    window = Window(number=1, trigger="baseline", cause=None, rank=None, asked_ns=0, start=10, num_steps=8)
    window.summaries = dict(enumerate(h.job([rank] * 8)))
    for summary in window.summaries.values():
        summary.patterns.count[[f.name for f in summary.patterns.functions].index("aten::_is_any_true")] = 30
    made = judge(window, None, job="j", created="")
    assert [finding.cause for finding in made.diagnosis.findings] == ["configuration"]
    assert made.is_news == is_told


@pytest.mark.parametrize(
    ("observed_s", "on_device", "is_told"), [(1.30, False, True), (1.16, False, False), (1.16, True, True)]
)
def test_what_was_gone_in_its_window_must_have_cost_more_where_ranks_share_cores(
    observed_s: float, on_device: bool, is_told: bool
) -> None:
    def made_of(length_s: float) -> dict[int, Summary]:
        meet = h.Sample(length_s - 0.8, work_before=0.8, channel=h.everyone(8))
        rank = h.Rank(own=0.8, length=length_s, samples=[meet], functions={h.GEMM: 0.8}, has_device=on_device)
        return dict(enumerate(h.job([rank] * 8)))

    cause = Trigger(Change.SLOW, 0, 0, 117, 117, 1_000_000_000, round(observed_s * 1e9), observed_s - 1)
    window = Window(number=2, trigger="slowdown", cause=cause, rank=0, asked_ns=0, start=130, num_steps=8)
    window.summaries = made_of(1.005)
    made = judge(window, stack(list(made_of(1.0).values())), job="j", created="")
    assert (made.diagnosis.kind, made.is_news) == ("recovered", is_told)


@pytest.mark.parametrize(("on_device", "is_told"), [(False, False), (True, True)])
def test_that_a_reduction_hides_behind_less_of_it_is_told_where_ranks_do_not_share_cores(
    on_device: bool, is_told: bool
) -> None:
    def made_of(exposed_s: float) -> list[Summary]:
        meet = h.Sample(0.04, work_before=0.2, channel=h.everyone(8), exposed=exposed_s)
        functions = {h.GEMM: 0.2, Function(Activity.COLLECTIVE, "all_reduce", None, None): exposed_s}
        rank = h.Rank(own=0.2, length=0.2 + exposed_s, samples=[meet], functions=functions, has_device=on_device)
        return h.job([rank] * 8)

    cause = Trigger(Change.SLOW, 0, 0, 117, 117, 200_000_000, 230_000_000, 0.15)
    window = Window(number=2, trigger="slowdown", cause=cause, rank=0, asked_ns=0, start=130, num_steps=8)
    window.summaries = dict(enumerate(made_of(0.03)))
    made = judge(window, stack(made_of(0.0)), job="j", created="")
    assert [(finding.scope, finding.cause) for finding in made.diagnosis.findings] == [("all", "unknown")]
    assert made.is_news == is_told
