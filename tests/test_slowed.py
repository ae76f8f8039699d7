"""Cores that are slower themselves: the host is told, and only if it lasts; what they do not explain stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest

from eroica import bus
from eroica.background import History, Lap, Span
from eroica.commands import Frames, State
from eroica.context import Context
from eroica.critical_path import Activity
from eroica.degradation import Change, Trigger
from eroica.diagnosis import diagnose
from eroica.findings import Diagnosis
from eroica.investigation import Incident, judge
from eroica.pattern import Function, Summary, stack
from eroica.samplers.evidence import Counted
from eroica.samplers.standout import stand_out
from eroica.samplers.work import work_ns
from eroica.utilisation import MU_SOURCES
from eroica.windows import Window
from tests import handmade as h
from tests.buses import in_one_process
from tests.test_investigation import Agent, go_on, rounds_until, watching

OPERATOR = Function(Activity.OPERATOR, "aten::addmm", "train.py:7", "train.py:7")
PYTHON = Function(Activity.PYTHON, "forward", "train.py:30", "train.py:30")
INPUT = Function(Activity.INPUT, "__getitem__", "data.py:41", "data.py:41")


def host(factor: float, lately: float | None = None, busier: float = 0.0) -> Counted:
    """Two cores, both busy; fixed work takes so many times what it took."""
    return Counted(
        kind="host",
        name="",
        rank=None,
        values={
            "work_ns": 50e3 * factor,
            "usual_work_ns": 50e3,
            "lately_work_ns": 50e3 * (lately or factor),
            "num_cores": 2.0,
            "busy_cores": 1.9,
            "usual_busy_cores": 1.9 - busier,
        },
        labels={},
    )


def job(slower: Sequence[float], of_input: float = 0.0, transfer_s: float = 0.05) -> list[Summary]:
    """Ranks without devices, the last two on host b, the others on a; each takes so many times 0.5 s for operators and
    0.3 s for Python."""
    owns = [0.8 * factor + 0.1 + of_input for factor in slower]
    ranks = []
    for rank, (factor, own) in enumerate(zip(slower, owns, strict=True)):
        ranks.append(
            h.Rank(
                own=own,
                length=max(owns) + transfer_s,
                samples=[h.Sample(transfer_s + max(owns) - own, work_before=own, channel=h.everyone(len(slower)))],
                functions={OPERATOR: 0.5 * factor, PYTHON: 0.3 * factor, INPUT: 0.1 + of_input},
                has_device=False,
                host="b" if rank >= len(slower) - 2 else "a",
            )
        )
    return h.job(ranks)


def said(now: list[Summary], counters: dict[str, list[Counted]]) -> Diagnosis:
    context = Context(trigger="slowdown", baseline=stack(job([1.0] * len(now))), counters=stand_out(counters))
    return diagnose(stack(now), context)


def test_all_ranks_take_longer_for_everything_since_the_cores_of_their_hosts_are_slower() -> None:
    found = said(job([1.4] * 4), {"a": [host(1.4)], "b": [host(1.4)]})
    (finding,) = found.findings
    assert (finding.cause, finding.scope, finding.hosts, finding.ranks) == ("cpu_contention", "host", ("a", "b"), "0-3")
    assert finding.impact.seconds_per_iteration == pytest.approx(0.32, rel=0.1)
    assert "1.40 times on a" in " ".join(found.evidence[one].text for one in finding.evidence)


def test_ranks_of_one_host_are_slow_for_its_cores() -> None:
    (finding,) = said(job([1.0] * 6 + [2.0] * 2), {"a": [host(1.0)], "b": [host(2.0)]}).findings
    assert (finding.cause, finding.scope, finding.hosts, finding.ranks) == ("cpu_contention", "host", ("b",), "6-7")


@pytest.mark.parametrize(
    ("slower", "of_input", "counted", "cause"),
    [
        (1.4, 0.0, host(1.0), "unknown"),
        (1.4, 0.0, host(1.4, busier=0.5), "unknown"),
        (1.0, 0.3, host(1.4), "input_pipeline"),
    ],
)
def test_what_slower_cores_do_not_explain_stays_as_it_is(
    slower: float, of_input: float, counted: Counted, cause: str
) -> None:
    found = said(job([slower] * 4, of_input), {"a": [counted], "b": [counted]})
    assert {finding.scope for finding in found.findings} == {"all"}
    assert found.verdict.cause == cause


def test_one_slow_rank_of_a_host_is_not_excused_by_its_cores() -> None:
    found = said(job([1.0] * 7 + [2.0]), {"a": [host(1.0)], "b": [host(2.0)]}).findings
    assert {(finding.scope, finding.ranks) for finding in found} == {("rank", "7")}
    assert "cpu_contention" not in {finding.cause for finding in found}


@pytest.mark.parametrize(("lately", "is_told"), [(1.4, False), (1.0, True)])
def test_what_has_passed_is_not_told_where_the_cores_were_slow_meanwhile(lately: float, is_told: bool) -> None:
    cause = Trigger(Change.SLOW, 0, 0, 117, 117, 950_000_000, 1_300_000_000, 0.37)
    window = Window(number=2, trigger="slowdown", cause=cause, rank=0, asked_ns=0, start=130, num_steps=8)
    window.summaries = dict(enumerate(job([1.0] * 4)))
    window.counters = {name: (host(1.0, lately=lately),) for name in "ab"}
    made = judge(window, stack(job([1.0] * 4)), job="j", created="")
    assert (made.diagnosis.kind, made.is_news) == ("recovered", is_told)


@pytest.mark.parametrize("transfer_s", [0.05, 0.15], ids=["transfers as before", "longer transfers"])
def test_a_window_into_which_we_still_wrote_a_capture_is_looked_at_again(transfer_s: float) -> None:
    cause = Trigger(Change.SLOW, 0, 0, 122, 122, 950_000_000, 1_300_000_000, 0.37)
    window = Window(number=2, trigger="slowdown", cause=cause, rank=0, asked_ns=0, start=130, num_steps=8)
    slower = [h.less(summary, steps=summary.ledger.steps + 130) for summary in job([1.5] * 4, transfer_s=transfer_s)]
    window.summaries = dict(enumerate(slower))
    ns = [950_000_000 if step < 120 else 1_300_000_000 for step in range(140)]
    laps = tuple(Lap(step, sum(ns[:step]), ns[step], "") for step in range(140))
    writing = (Span("capture", 120, sum(ns[:120]), 30_000_000_000),)
    window.histories = {rank: History(laps, writing) for rank in range(4)}
    made = judge(window, stack(job([1.0] * 4)), job="j", created="")
    assert [finding.cause for finding in made.diagnosis.findings] == ["profiler_overhead"]
    assert made.may_pass


class Slow(Agent):
    """Its host tells how slow its cores are."""

    factor = 1.0

    def _take(self, message: bus.Message) -> None:
        if isinstance(message, bus.Commit):
            counted = (host(self.factor),)
            self._link.publish(bus.CountersRead(window=message.window, host=self._host, counters=counted))
        super()._take(message)


def test_slower_cores_are_told_when_a_second_window_shows_them_too() -> None:
    ends, told = in_one_process(), list[Incident]()
    investigation = watching(ends, told, baseline=False, rest_s=0.0)
    until = partial(rounds_until, ends, investigation)
    whole = job([1.0] * 6 + [2.0] * 2)
    agents = [Slow(ends.agents[0], "a", range(6), whole), Slow(ends.agents[1], "b", range(6, 8), whole)]
    agents[1].factor = 2.0
    until(lambda: len(investigation.coordinator.standings) == 8)
    agents[0].notice()
    until(lambda: len(agents[0].closed) == 1)
    assert not told and agents[0].closed[0].diagnosis == ""
    until(lambda: len(agents[0].closed) == 2)
    (incident,) = told
    verdict = incident.diagnosis.verdict
    assert (verdict.cause, verdict.scope, verdict.hosts, verdict.ranks) == ("cpu_contention", "host", ("b",), "6-7")


def by_turns(granted: float = 0.3) -> list[Summary]:
    """A job on two hosts whose ranks wait for a core in turns, in most steps one of them."""
    ranks = []
    for rank in range(8):
        late = {step: (1, 0.8, float("nan")) for step in range(40) if step % 10 == rank}
        ranks.append(
            h.Rank(
                own=[0.9 + 0.8 * (step in late) for step in range(40)],
                length=[1.0 + 0.8 * (step % 10 < 8) for step in range(40)],
                samples=[h.Sample(0.05, work_before=0.9, channel=h.everyone(8))],
                functions={OPERATOR: 0.5, PYTHON: 0.48},
                mu={PYTHON: granted},
                mu_source=MU_SOURCES.index("cpu_granted"),
                tops=late,
                has_device=False,
                host="ab"[rank // 6],
            )
        )
    return h.job(ranks, 40)


@pytest.mark.parametrize("trigger", ["baseline", "manual"])
def test_a_first_window_in_which_python_moves_over_the_ranks_is_taken_again(trigger: str) -> None:
    window = Window(number=1, trigger=trigger, cause=None, rank=0, asked_ns=0, start=0, num_steps=40)
    window.summaries = dict(enumerate(by_turns(granted=0.95)))
    made = judge(window, None, job="j", created="")
    assert [(f.scope, f.cause) for f in made.diagnosis.findings] == [("rotating", "host_python")]
    assert made.may_pass is (trigger == "baseline")


@pytest.mark.parametrize("is_seldom", [True, False])
def test_a_host_on_whose_cores_ranks_meet_is_looked_at_again_where_single_steps_show_it(is_seldom: bool) -> None:
    late = {step: (1, 0.8, float("nan")) for step in range(40) if step % 3 == 0 or not is_seldom}
    mean_s = 0.8 * len(late) / 40
    ranks = [
        h.Rank(
            own=[0.9 + 0.8 * (step in late) * (rank == 0) for step in range(40)],
            length=[1.0 + 0.8 * (step in late) for step in range(40)],
            samples=[h.Sample(0.05, work_before=0.9, channel=h.everyone(4))],
            functions={OPERATOR: 0.5, PYTHON: 0.4 + mean_s * (rank == 0)},
            mu={PYTHON: 0.3 if rank == 0 else 0.95},
            mu_source=MU_SOURCES.index("cpu_granted"),
            tops=late if rank == 0 else {},
            has_device=False,
            host="a",
        )
        for rank in range(4)
    ]
    window = Window(number=1, trigger="baseline", cause=None, rank=0, asked_ns=0, start=0, num_steps=40)
    window.summaries = dict(enumerate(h.job(ranks, 40)))
    window.counters = {
        "a": tuple(Counted(kind="rank", name=str(k), rank=k, values={}, labels={"cpus": "0-1"}) for k in range(4))
    }
    made = judge(window, None, job="j", created="")
    assert [(f.scope, f.cause, f.steps == "stable") for f in made.diagnosis.findings] == [
        ("host", "cpu_contention", not is_seldom)
    ]
    assert made.may_pass is is_seldom


AS_BEFORE = h.job([h.Rank(own=0.6, length=0.85, has_device=False, host="a")] * 8)
"""What kept ranks from their cores has gone."""


def watched_by_turns(baseline: bool) -> tuple[Callable[[Callable[[], bool]], None], list[Agent], list[Incident]]:
    """Agents of that job at work, what is told, and how to let time pass until something holds."""
    ends, told = in_one_process(), list[Incident]()
    investigation = watching(ends, told, baseline=baseline, rest_s=0.0)
    until = partial(rounds_until, ends, investigation)
    agents = [Agent(ends.agents[0], "a", range(6), by_turns()), Agent(ends.agents[1], "b", range(6, 8), by_turns())]
    until(lambda: len(investigation.coordinator.standings) == 8)
    return until, agents, told


@pytest.mark.parametrize("lasts", [True, False])
def test_that_changing_ranks_wait_for_cores_is_told_when_a_second_window_shows_it_too(lasts: bool) -> None:
    until, agents, told = watched_by_turns(baseline=False)
    agents[0].notice()
    until(lambda: len(agents[0].closed) == 1)
    assert not told
    if not lasts:
        agents[0].made = agents[1].made = AS_BEFORE
    until(lambda: len(agents[0].closed) == 2)
    if lasts:
        for _ in range(2):
            until(lambda: len(agents[0].closed) == 3)  # with sizes, and no more
    assert [(one.diagnosis.verdict.scope, one.diagnosis.verdict.cause) for one in told] == (
        [("rotating", "cpu_contention")] if lasts else []
    )


class Passing(Agent):
    """What slowed its ranks down is over when sizes are asked for."""

    def _take(self, message: bus.Message) -> None:
        if isinstance(message, bus.Prepare) and message.frames is Frames.SIZED:
            self.made = AS_BEFORE
        super()._take(message)


@pytest.mark.parametrize(("observed_ms", "kinds"), [(950, ["healthy"]), (1300, ["healthy", "recovered"])])
def test_what_moved_over_ranks_is_not_told_where_the_window_with_sizes_shows_the_job_as_before(
    observed_ms: int, kinds: list[str]
) -> None:
    ends, told = in_one_process(), list[Incident]()
    investigation = watching(ends, told, baseline=True, rest_s=0.0)
    agents = [Passing(ends.agents[0], "a", range(6), AS_BEFORE), Passing(ends.agents[1], "b", range(6, 8), AS_BEFORE)]
    go_on(ends, investigation)
    for agent in agents:
        agent.made = by_turns(granted=0.95)
    trigger = Trigger(Change.SLOW, 0, 0, 117, 117, 850_000_000, observed_ms * 1_000_000, 0.1)
    ends.agents[0].publish(bus.Noticed(rank=0, trigger=trigger))
    for _ in range(3):
        go_on(ends, investigation)
    assert [len(agent.closed) for agent in agents] == [3, 3]
    assert [one.diagnosis.kind for one in told] == kinds


class Busy(Agent):
    """Its ranks have another profiler running the first time that sizes are asked for."""

    def __init__(self, link: bus.Link, host: str, ranks: range, made: Sequence[Summary]) -> None:
        self.asked: list[Frames] = []
        super().__init__(link, host, ranks, made)

    def _take(self, message: bus.Message) -> None:
        if isinstance(message, bus.Prepare):
            self.asked.append(message.frames)
            if self.asked.count(Frames.SIZED) == 1:
                for rank in self._ranks:
                    self._link.publish(bus.Answered(window=message.window, rank=rank, state=State.BUSY))
                return
        super()._take(message)


def test_what_may_follow_sizes_waits_for_them_where_the_window_that_was_to_tell_them_gave_nothing() -> None:
    ends, told = in_one_process(), list[Incident]()
    investigation = watching(ends, told, baseline=False, rest_s=0.0, again_s=0.0)
    made = by_turns(granted=0.95)
    agents = [Busy(ends.agents[0], "a", range(6), made), Busy(ends.agents[1], "b", range(6, 8), made)]
    go_on(ends, investigation)
    agents[0].notice()
    for _ in range(4):
        go_on(ends, investigation)
    assert agents[0].asked == [Frames.SAMPLED, Frames.SIZED, Frames.SIZED]
    assert [one.diagnosis.verdict.cause for one in told] == ["host_python"]


@pytest.mark.parametrize(("lasts", "kinds"), [(True, ["slow"]), (False, ["healthy"])])
def test_the_first_window_is_taken_again_where_changing_ranks_wait_for_cores(lasts: bool, kinds: list[str]) -> None:
    until, agents, told = watched_by_turns(baseline=True)
    until(lambda: len(agents[0].closed) == 1)
    assert not told
    if not lasts:
        agents[0].made = agents[1].made = AS_BEFORE
    until(lambda: len(agents[0].closed) == 2)
    if lasts:
        until(lambda: len(agents[0].closed) == 3)
    assert [one.diagnosis.kind for one in told] == kinds


def test_the_work_is_done_and_its_shortest_piece_counts() -> None:
    ticks = iter([0, 70, 100, 150, 200, 290, 300, 360])
    assert work_ns(lambda: next(ticks)) == 50
    assert work_ns() > 0
