"""One job's investigation: what its coordinator finds out becomes diagnoses, and those are told.

Windows and looks that are complete go through the offline path's own functions, with what the job adds to them
(`context_of`); what is told when, and what is left untold, is decided here, once for all ways to run. It has no clock
and no loop: who has (`live` for one host, `serve` for many) hands it the time. Used by both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from eroica import __version__, bus, hang
from eroica.answers import PacingChange
from eroica.background import context_of
from eroica.blame import is_host_only
from eroica.commands import Frames
from eroica.conductor import Conductor, Mode, View
from eroica.context import Context
from eroica.coordinator import GONE, Coordinator
from eroica.degradation import Change, Limits, Trigger
from eroica.diagnosis import diagnose_in_detail
from eroica.draft import is_of_our_making
from eroica.fabric import pacing
from eroica.findings import Detail, Diagnosis, Finding, Verdict, to_json
from eroica.gone import ENDED_BY_OTHERS, has_given_up, is_follower
from eroica.impact import iteration_of
from eroica.job import format_ranks, parse_ranks
from eroica.pace import EFFECT
from eroica.pattern import Stacked, stack
from eroica.slowed import is_of_slow_cores, were_slow
from eroica.topology import Topology, with_roll_ups
from eroica.windows import Look, Policy, Window, missing_note
from eroica.wires import Wires

FOR_GOOD = ("deadlock", "collective_mismatch", "exception", "dead_worker", "startup_network", "configuration")
"""Causes of a standstill that do not pass. A rank that merely has not come may still compile, load or start."""
COMPUTES_S = 120.0
"""Silence of ranks that wait for nobody, from which on it is told: a person would not look sooner, either."""
HOST_EFFECT = 2 * EFFECT
"""What a first window must cost to be told in jobs without devices: ranks that share cores always differ by some per
cent, and there is no healthy window yet that would show so."""
HOST_VAGUE_EFFECT = 4 * EFFECT
"""What a slowdown must have cost to be told in such jobs if it was gone in its window, or is of all ranks and of
nothing that they do: no more can be said of it, and the pace of four ranks on two cores was seen to rise by 16 % for
some seconds while nothing else ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One diagnosis, as it was made."""

    diagnosis: Diagnosis
    detail: Detail | None
    window: int | None
    """Number of the window; None without one."""
    asked: str = ""
    """The request of a person that it answers; "": none."""


class Investigation:
    """See the module."""

    def __init__(
        self,
        link: bus.Link,
        *,
        job: str,
        policy: Policy,
        clock: Callable[[], int],
        tell: Callable[[Incident], None],
        say: Callable[[str], None],
        may_size: bool = True,
        first_window: int = 1,
        closed: Callable[[Window, str], None] = lambda window, diagnosis: None,
        topology: Topology | None = None,
        paced: Callable[[PacingChange], None] = lambda change: None,
    ) -> None:
        """`tell` gets each incident, `say` a sentence now and then, `closed` each window that is over and the identity
        of what was told of it. `may_size`: ranks can capture the sizes of operators. `first_window`: see
        `Coordinator`. `topology`: where hosts stand in the network. `paced` gets each change
        of the job's pacing."""
        self.coordinator = Coordinator(
            link.publish, self._on_window, self._on_look, self._on_recovered, policy, first_window
        )
        self.pacing = Conductor(link.publish, paced, _now, topology)
        self.num_troubles = 0
        self._link = link
        self._job = job
        self._tell = tell
        self._say = say
        self._clock = clock
        self._may_size = may_size
        self._closed = closed
        self._topology = topology
        self._baseline: Stacked | None = None
        self._wires: Wires | None = None
        """Connections and cards in the window of the baseline."""
        self._baseline_environment: Mapping[str, Any] = {}
        self._training = ""
        """Whose the baseline is."""
        self._said: set[str] = set()
        self._held: tuple[Judged, Window] | None = None
        """What a window showed, until another one with the sizes of operators is there."""
        self._is_in_doubt = False
        """What the last window has shown may have passed by the next one, and is no news then."""
        self._halt: tuple[object, ...] | None = None
        """What was told of a job that stands still or has broken off, until a rank goes on: ranks notice it one after
        the other, and what lasts is looked at again and again."""
        self._ailing: tuple[Verdict, int] | None = None
        """What the window of the baseline has shown and was told of, and the first step after that window."""
        self._told_changes: set[Change] = set()
        """Of pace, that a diagnosis was told of and that have not ended."""
        self._recovered: dict[Change, dict[int, int]] = {}
        """What has ended in this round, and the nanoseconds that each rank shows for it."""
        link.subscribe(bus.TO_COORDINATOR, lambda message: self._take(message, clock()))

    def tick(self, now_ns: int) -> None:
        """Let time pass; to be called each round, after messages were delivered."""
        self.coordinator.tick(now_ns)
        if self.pacing.mode is not Mode.OFF:
            self.pacing.tick(self._view(), now_ns)
        self._say_recovered()
        if self._held is not None and not (
            self.coordinator.is_sizing and any(s.is_alive for s in self.coordinator.standings.values())
        ):
            self._say_held()  # nobody will tell sizes any more

    def pace(self, mode: Mode, limits: pacing.Limits, who: str) -> None:
        """Somebody says what pacing may do from now on."""
        self.pacing.wish(mode, limits, who, self._clock())
        self.pacing.tick(self._view(), self._clock())  # who asks how it stands is not to hear of no ranks at all

    def _take(self, message: bus.Message, now_ns: int) -> None:
        if isinstance(message, bus.Arrived):
            self.pacing.handle(message, now_ns)
        else:
            self.coordinator.handle(message, now_ns)

    def _view(self) -> View:
        """The job, for pacing."""
        coordinator = self.coordinator
        return View(
            start=coordinator.start,
            host_of={
                rank: standing.host
                for rank, standing in coordinator.standings.items()
                if standing.is_alive and standing.host not in coordinator.silent
            },
            is_free=coordinator.window is None and coordinator.look is None and not coordinator.is_resting,
        )

    def stage(self, asked: str) -> str:
        """How far the window of a person's request is; "" if nothing more will come of it."""
        if self._held is not None and self._held[1].asked == asked:
            return "judging"
        return self.coordinator.stage(asked)

    def cancel(self, asked: str) -> bool:
        """Leave the window of a person's request; what is known of it already is told. False if there is none."""
        is_there = self.coordinator.cancel(asked, self._clock())
        if self._held is not None and self._held[1].asked == asked:
            self._say_held()
        return is_there

    def finish(self) -> None:
        """Nothing more will come: tell what was held back."""
        self._say_held()

    def _on_window(self, window: Window) -> bool:
        """Whether there was something to tell, now or with the sizes."""
        if not window.summaries and not window.histories:
            self._say_nothing_came(window)
            return False
        if window.training != self._training:
            self._baseline, self._wires, self._training = None, None, window.training
            self._baseline_environment = {}
            self._ailing = None
        note = self.pacing.note()
        window.notes += (note,) if note else ()
        is_first = window.trigger == "baseline"
        judged = judge(
            window,
            None if is_first and window.is_second_look else self._baseline,
            job=self._job,
            created=_now(),
            wires=self._wires,
            baseline_environment=self._baseline_environment,
        )
        judged = replace(judged, diagnosis=with_roll_ups(judged.diagnosis, self._topology))
        if not window.summaries and judged.diagnosis.kind == "no_data":
            self._say_nothing_came(window)
            return False
        has_passed = window.is_second_look and self._is_in_doubt and judged.diagnosis.kind == "recovered"
        if has_passed or self._is_held_back(window, judged) or self._is_told_already(window, judged):
            judged = replace(judged, is_news=False)
        is_sized = window.frames is Frames.SIZED
        if not is_sized:
            self._say_held()  # the window with sizes was given up for this one
        if is_first and window.summaries and not is_sized and not window.is_second_look:
            self._baseline, self._wires = judged.stacked, judged.wires
            self._baseline_environment = judged.diagnosis.environment
        number = str(to_json(judged.diagnosis)["id"]) if judged.is_news else ""
        self._link.publish(bus.Closed(window=window.number, diagnosis=number))
        self._closed(window, number)
        if is_sized and (not judged.is_news or judged.diagnosis.kind in ("healthy", "no_data")):
            # What is held is told by the next round, unless sizes are asked for once more.
            if window.cause is not None and is_host_only(judged.stacked) and _is_over(judged.diagnosis):
                self._held = None
        elif judged.is_news:
            self._held = None
            if self._asks_for_sizes(window, judged):
                self._held = judged, window
            else:
                self._report(judged.diagnosis, judged.detail, window.cause, window)
        return judged.is_news

    def _is_held_back(self, window: Window, judged: Judged) -> bool:
        """It is told if the next window shows it, too, which is asked for with this."""
        policy = self.coordinator.policy
        wait_s = policy.rest_s if judged.may_pass else policy.again_s
        may_wait = (judged.may_pass and judged.is_news) or judged.is_partial
        is_held = may_wait and self.coordinator.ask_once_more(window, self._clock(), wait_s)
        self._is_in_doubt = is_held and judged.may_pass
        return is_held

    def _is_told_already(self, window: Window, judged: Judged) -> bool:
        """The first window was taken when the job had become slow, as by a coordinator that was started again, or was
        just becoming so, and has shown the same: the same ranks and cause, at the same pace or since that window."""
        verdict = judged.diagnosis.verdict
        if self._ailing is None or window.trigger != "slowdown":
            return False
        before, end = self._ailing
        is_within = judged.onset is not None and judged.onset < end
        if not (is_within or _is_back(judged.diagnosis)):
            return False
        is_same = (verdict.scope, verdict.cause, verdict.ranks) == (before.scope, before.cause, before.ranks)
        if is_same and window.cause is not None:
            self._told_changes.add(window.cause.change)
        return is_same

    def _asks_for_sizes(self, window: Window, judged: Judged) -> bool:
        """What moves over the ranks may follow what they are given. Sizes cost, so they are asked for only then."""
        if not self._may_size or not _depends_on_sizes(judged.diagnosis):
            return False
        return self.coordinator.ask_for_sizes(window, self._clock())

    def _say_held(self) -> None:
        """Sizes have told nothing more, or did not come."""
        held, self._held = self._held, None
        if held is not None:
            judged, window = held
            self._report(judged.diagnosis, judged.detail, window.cause, window)

    def _say_nothing_came(self, window: Window) -> None:
        """No rank captured, and their records explain nothing by themselves."""
        standings = self.coordinator.standings
        if not self.coordinator.is_resting and any(r in standings and standings[r].is_alive for r in window.ranks):
            self._say_once(f"a capture gave nothing: {missing_note(window)}")
        self._link.publish(bus.Closed(window=window.number))
        self._closed(window, "")

    def _on_look(self, look: Look) -> bool:
        if look.trigger is None and _were_ended(look):
            return False
        world_size = max((s.world_size for s in self.coordinator.standings.values()), default=0)
        note = self.pacing.note_of_look()
        diagnosis = hang.explain(
            list(look.views.values()),
            world_size=world_size,
            job=self._job,
            created=_now(),
            version=__version__,
            limit_s=look.limit_s or hang.LIMIT_S,
            notes=(*look.notes, *((note,) if note else ())),
        )
        if diagnosis is None:
            return False
        diagnosis = with_roll_ups(diagnosis, self._topology)
        if _may_compute(diagnosis, look) or _may_pass(diagnosis, look):
            return False
        verdict = diagnosis.verdict
        halt = self.coordinator.start, diagnosis.kind, verdict.cause, verdict.scope, verdict.ranks
        is_over = diagnosis.kind == "hang" and not self.coordinator.is_halted
        if halt != self._halt or is_over:
            self._halt = halt
            self._report(diagnosis, None, look.trigger, None)
        elif look.trigger is not None:
            self._told_changes.add(look.trigger.change)
        return diagnosis.kind != "paused"  # that may become a hang: it is looked at again

    def _on_recovered(self, rank: int, trigger: Trigger) -> None:
        if trigger.ended in (Change.STALLED, Change.QUIET):
            self._halt = None
        if trigger.ended in self._told_changes:
            self._recovered.setdefault(trigger.ended, {})[rank] = trigger.observed_ns

    def _say_recovered(self) -> None:
        """Who recovered in this round, of what was told."""
        for change, ranks in self._recovered.items():
            self._told_changes.discard(change)
            who = f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)} {'are' if len(ranks) > 1 else 'is'}"
            if change in (Change.STALLED, Change.QUIET):
                self._say(f"{who} going on, after {max(ranks.values()) / 1e9:.0f} s")
            else:
                what = "back at the usual pace" if change is Change.SLOW else "without slow iterations"
                self._say(f"{who} {what}: {max(ranks.values()) / 1e6:.1f} ms per iteration")
        self._recovered.clear()

    def _report(
        self, diagnosis: Diagnosis, detail: Detail | None, cause: Trigger | None, window: Window | None
    ) -> None:
        if diagnosis.kind not in ("healthy", "no_data", "recovered"):
            self.num_troubles += 1
            if window is not None and window.trigger == "baseline":
                self._ailing = diagnosis.verdict, window.start + window.num_steps
            if cause is not None:
                self._told_changes.add(cause.change)
        self._tell(
            Incident(
                diagnosis=diagnosis,
                detail=detail,
                window=window.number if window is not None else None,
                asked=window.asked if window is not None else "",
            )
        )

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)


@dataclass(frozen=True, slots=True)
class Judged:
    """A window, diagnosed."""

    diagnosis: Diagnosis
    detail: Detail
    stacked: Stacked
    wires: Wires | None
    is_news: bool
    """Somebody is to be told."""
    onset: int | None
    """First step of the slowdown, as far as the series shows it."""
    may_pass: bool = False
    """Cores of a shared machine are slower, or taken, for some seconds now and then, and what slows the job down while
    a capture of ours is written may last beyond it. So it is told if it lasts."""
    is_partial: bool = False
    """No cause is known, and some ranks gave no capture: it may be theirs."""


def judge(
    window: Window,
    baseline: Stacked | None,
    *,
    job: str,
    created: str,
    wires: Wires | None = None,
    baseline_environment: Mapping[str, Any] = MappingProxyType({}),
) -> Judged:
    """The diagnosis of a window that has summaries, and whether it is told. `wires`, `baseline_environment`: those of
    the baseline's window."""
    stacked = stack(list(window.summaries.values()))
    context = replace(
        context_of(
            window.histories,
            window.counters,
            window.problems,
            window.cause,
            range(window.start, window.start + window.num_steps),
        ),
        job=job,
        created=created,
        version=__version__,
        trigger=window.trigger,
        # A second window in search of the healthy level is not measured by the first, which is taken for no such level.
        baseline=baseline if window.trigger != "baseline" else None,
        wires_before=wires,
        baseline_environment=baseline_environment,
        notes=window.notes,
    )
    diagnosis, detail = diagnose_in_detail(stacked, context)
    is_cut = diagnosis.kind == "no_data" and (window.trigger == "baseline" or GONE in window.problems.values())
    is_nothing = is_cut or (window.cause is not None and diagnosis.kind == "healthy" and _is_back(diagnosis))
    # Nobody asked for the first window. What it shows is told if it costs as much as a slowdown would have to; noise of
    # a shared host makes findings, but sets no options.
    least = HOST_EFFECT if is_host_only(stacked) else EFFECT
    is_small = 0 < _cost(diagnosis.findings) < least
    is_set = _cost([f for f in diagnosis.findings if f.cause == "configuration"]) >= EFFECT
    is_nothing = is_nothing or (window.trigger == "baseline" and is_small and not is_set)
    if diagnosis.kind == "recovered":
        is_vague = _was_slight(context) or were_slow(context)
    else:
        is_vague = _is_vague(diagnosis, context)
    is_nothing = is_nothing or (is_host_only(stacked) and is_vague)
    findings = diagnosis.findings
    is_first = window.trigger == "baseline"
    may_pass = bool(findings) and all(_is_of_the_host(finding, stacked, is_first) for finding in findings)
    may_pass = may_pass or any(map(is_of_our_making, findings))
    is_partial = bool(window.problems) and {finding.cause for finding in findings} == {"unknown"}
    return Judged(diagnosis, detail, stacked, context.wires, not is_nothing, context.onset, may_pass, is_partial)


def _is_of_the_host(finding: Finding, stacked: Stacked, is_first: bool) -> bool:
    """Cores that were slower, or that changing ranks of a job on hosts alone, or a host's in single steps, had to wait
    for: others who use the machine do that for some seconds, too. In the first window, which nobody asked for, the wait
    for a core may pass for work, where neither holds much of it."""
    is_now_and_then = finding.scope == "rotating" or (finding.scope == "host" and finding.steps != "stable")
    is_a_wait = finding.cause == "cpu_contention" or (is_first and finding.cause in _BY_SIZE)
    return (is_now_and_then and is_a_wait and is_host_only(stacked)) or is_of_slow_cores(finding)


def _was_slight(context: Context) -> bool:
    """What had passed before anybody could look cost so little that ranks which share cores may have done it to each
    other."""
    noticed = context.noticed
    if noticed is None or context.baseline is None or not len(context.baseline):
        return False
    return noticed.observed_s < (1 + HOST_VAGUE_EFFECT) * max(noticed.usual_s, iteration_of(context.baseline))


_VAGUE = frozenset({"unknown", "profiler_overhead"})
"""Causes that all ranks are said to have where nothing that they do takes longer."""


_NOBODY = frozenset({"all", "rotating"})
"""Scopes that name no rank."""


def _is_vague(diagnosis: Diagnosis, context: Context) -> bool:
    """Nobody asked, and nothing is found, or that all ranks, or one after the other, take a little longer, for nothing
    that they do: at most a reduction hides behind less of it than it did."""
    vague = [
        f
        for f in diagnosis.findings
        if f.scope in _NOBODY and f.cause in _VAGUE and (f.function is None or f.function.kind == "collective")
    ]
    is_all = len(vague) == len(diagnosis.findings) and diagnosis.kind in ("slow", "healthy")
    return context.noticed is not None and is_all and _cost(vague) < HOST_VAGUE_EFFECT


_BY_SIZE = frozenset({"sync_amplification", "host_python", "cpu_contention", "unknown"})
"""Causes of what moves over the ranks that may be uneven work, as long as sizes are not known. Kernels tell theirs."""


def _depends_on_sizes(diagnosis: Diagnosis) -> bool:
    return any(finding.scope == "rotating" and finding.cause in _BY_SIZE for finding in diagnosis.findings)


def _cost(findings: Sequence[Finding]) -> float:
    """The dearest finding's share of the iteration; infinite where one has no price, 0 without findings."""
    return max((math.inf if f.impact.share is None else f.impact.share for f in findings), default=0.0)


def _is_back(diagnosis: Diagnosis) -> bool:
    """What was noticed had passed before the window began."""
    iteration = diagnosis.iteration
    return iteration.slowdown is not None and iteration.slowdown < 1 + EFFECT


def _is_over(diagnosis: Diagnosis) -> bool:
    """Nothing is wrong in this window, and the job as quick as before: what moved over ranks that share cores in the
    one before it was of the machine."""
    return not diagnosis.findings and _is_back(diagnosis)


def _may_compute(diagnosis: Diagnosis, look: Look) -> bool:
    """All are busy with something of their own, of which nothing is known but that it lasts: an evaluation of data in
    memory, a search, a sleep. That alone is no hang before `COMPUTES_S`."""
    if (diagnosis.kind, diagnosis.verdict.scope, diagnosis.verdict.cause) != ("hang", "all", "unknown"):
        return False
    return min((view.silent_s or 0.0 for view in look.views.values()), default=0.0) < COMPUTES_S


def _may_pass(diagnosis: Diagnosis, look: Look) -> bool:
    """Before the first step ranks load, read and compile for as long as that takes, and so do evaluations and saves.
    What waiting does not mend is told early, all else when its own limit is over."""
    trigger, verdict = look.trigger, diagnosis.verdict
    if trigger is None or diagnosis.kind == "crash":
        return False
    if verdict.cause in FOR_GOOD and verdict.confidence in ("established", "supported"):
        return False
    silences = [view.silent_s for view in look.views.values() if view.silent_s is not None]
    is_early = trigger.is_opening and min(silences, default=0.0) < Limits().start_ns / 1e9
    return is_early or trigger.change is Change.QUIET


def _were_ended(look: Look) -> bool:
    """Somebody has ended the ranks, or is about to: not one of them died of anything but a signal to end.

    A launcher that ends its ranks waits for each, so that they are gone before anybody sees how. One that dies of
    itself is seen, since its launcher looks at it ten times a second. If the rest lives on, and waits, that is a hang.
    """
    views = list(look.views.values())
    dead = [view for view in views if view.state == "died" and not view.exception]
    if not dead or any(has_given_up(view) or (view.exception and not is_follower(view)) for view in views):
        return False
    return all(view.exit_status in ENDED_BY_OTHERS for view in dead) or (
        len(dead) == len(views) > 1 and all(view.exit_status in (None, *ENDED_BY_OTHERS) for view in dead)
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def history_line(incident: Incident, files: Sequence[str]) -> str:
    """One line of OUT/incidents.jsonl."""
    diagnosis = incident.diagnosis
    verdict = diagnosis.verdict
    return json.dumps(
        {
            "created": diagnosis.created,
            "id": to_json(diagnosis)["id"],
            "job": diagnosis.job,
            "kind": diagnosis.kind,
            "trigger": diagnosis.window.trigger,
            "scope": verdict.scope,
            "cause": verdict.cause,
            "ranks": verdict.ranks,
            "num_ranks": len(parse_ranks(verdict.ranks)),
            "confidence": verdict.confidence,
            "summary": verdict.summary,
            "files": list(files),
        }
    )
