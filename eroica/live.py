"""`eroica run`: starts a job with its ranks armed, watches it, and tells what it finds while the job runs.

Agent and coordinator live in this one process, in one loop with one clock, and share messages by an in-memory bus; the
ranks know of none of them. Whatever goes wrong here is said once and ends the watching, never the job: the job's exit
status is ours in every case. Used by `cli` and `demo`. Results go to a folder as they are made, one pair of files and
one line of history per incident.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from eroica import __version__, bus, hang
from eroica.agent import Agent
from eroica.background import context_of
from eroica.captures import Readers
from eroica.commands import Frames
from eroica.coordinator import GONE, Coordinator, Look, Policy, Window, missing_note
from eroica.degradation import Change, Limits, Trigger
from eroica.diagnosis import diagnose_in_detail
from eroica.errors import EroicaError
from eroica.findings import Detail, Diagnosis, Verdict, to_json
from eroica.gone import ENDED_BY_OTHERS, is_follower
from eroica.job import format_ranks, parse_ranks
from eroica.launch import Job, Workspace, environment_for, start
from eroica.ondemand import OnDemand
from eroica.pace import EFFECT
from eroica.pattern import Stacked, stack
from eroica.recording import LEAD_S, MOST_EVENTS, Recording
from eroica.ring import SUFFIX
from eroica.wires import Wires

LOOKS_PER_S = 10
"""Each reads the heads of all rings, some 100 microseconds per rank."""
LAST_WORDS_S = 30.0
"""After the end of the job, for what was captured before it."""
FOR_GOOD = ("deadlock", "collective_mismatch", "exception", "dead_worker", "startup_network", "configuration")
"""Causes of a standstill that do not pass. A rank that merely has not come may still compile, load or start."""
COMPUTES_S = 120.0
"""Silence of ranks that wait for nobody, from which on it is told: a person would not look sooner, either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One diagnosis, as it was made."""

    diagnosis: Diagnosis
    detail: Detail | None
    made_ns: int
    """CLOCK_MONOTONIC."""
    noticed_ns: int | None
    """The end of the iteration that showed it, same clock; None for windows that nothing triggered."""
    window: int | None
    """Number of the window; None without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What to run and how."""

    command: Sequence[str]
    job: str = ""
    keep_captures: Path | None = None
    """Where to copy the captures of each diagnosis; None: they are deleted with the run."""
    keep_rings: Path | None = None
    """Where to copy the flight rings once the job has ended; None: they are deleted with the run."""
    policy: Policy = field(default_factory=Policy)
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of the command."""
    on_demand: bool = False
    """Have Kineto record the windows by itself; see `recording` for what for, and what it endangers."""
    enough: Callable[[int], bool] | None = None
    """Asked with the number of troubles told so far; True ends the job. For demos."""


def run(plan: Run, tell: Callable[[Incident], None], say: Callable[[str], None]) -> int:
    """Run the command to its end; returns its exit status as a shell would (128+N for signal N).

    `tell` gets each incident, `say` a sentence now and then. Raises UserError if the command cannot be started.
    """
    with Workspace.create(os.environ) as workspace, ExitStack() as opened:
        added, recording = dict(plan.environment), None
        if plan.on_demand:
            point = OnDemand(workspace.path / "kineto")
            opened.callback(point.close)
            added = point.environment(os.environ | added) | added
            recording = Recording(point)
            opened.callback(recording.close)
        job = start(plan.command, environment=environment_for(workspace.path, added, base=os.environ))
        watcher: _Watcher | None = None
        try:
            watcher = _Watcher(plan, workspace.path, tell, say, recording)
            return _until_end(job, watcher, plan)
        except Exception as error:  # a fault of ours, too: the job must not lose its parent and its status to it
            at = traceback.extract_tb(error.__traceback__)[-1]
            place = "" if isinstance(error, (EroicaError, OSError)) else f" ({Path(at.filename).name}:{at.lineno})"
            say(f"stopped watching: {type(error).__name__}: {error}{place}; the job goes on")
        finally:
            if watcher is not None:
                watcher.close()
            opened.close()  # before the job ends: its Kineto would wait for answers that nobody gives
            if plan.keep_rings is not None and job.poll() is not None:
                _keep_rings(workspace.path, plan.keep_rings, say)
        while (status := job.wait(60.0)) is None:
            pass
        return status


def _until_end(job: Job, watcher: _Watcher, plan: Run) -> int:
    while (status := job.wait(1 / LOOKS_PER_S, watcher.events)) is None:
        if job.is_told_to_end:
            watcher.rest()
        watcher.look()
        if plan.enough is not None and plan.enough(watcher.num_troubles):
            job.end()
    watcher.last_look()
    return status


class _Watcher:
    """Agent, coordinator and what they share, of one run."""

    def __init__(
        self,
        plan: Run,
        folder: Path,
        tell: Callable[[Incident], None],
        say: Callable[[str], None],
        recording: Recording | None,
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._tell = tell
        self._say = say
        self._bus = bus.Bus()
        self._readers = Readers()
        self._agent = Agent(folder, self._bus, host=socket.gethostname(), readers=self._readers, on_demand=recording)
        policy = plan.policy
        if recording is not None:
            policy = replace(
                policy, lead_s=max(policy.lead_s, LEAD_S), most_events=max(policy.most_events, MOST_EVENTS)
            )
        self._coordinator = Coordinator(self._bus.publish, self._on_window, self._on_look, self._on_recovered, policy)
        self._bus.subscribe(bus.TO_COORDINATOR, lambda message: self._coordinator.handle(message, time.monotonic_ns()))
        self._baseline: Stacked | None = None
        self._wires: Wires | None = None
        """Connections and cards in the window of the baseline."""
        self._training = ""
        """Whose the baseline is."""
        self._said: set[str] = set()
        self._recording = recording
        self._held: tuple[Judged, Window] | None = None
        """What a window showed, until another one with the sizes of operators is there."""
        self._paused: Verdict | None = None
        self._told_changes: set[Change] = set()
        """Of pace, that a diagnosis was told of and that have not ended."""
        self._recovered: dict[Change, dict[int, int]] = {}
        """What has ended in this round, and the nanoseconds that each rank shows for it."""
        self.num_troubles = 0

    @property
    def events(self) -> list[int]:
        """Handles that can be read when `look` is due at once."""
        return self._agent.events

    def look(self) -> None:
        """One round."""
        self._agent.poll(time.monotonic_ns())
        self._bus.deliver()
        self._coordinator.tick(time.monotonic_ns())
        self._bus.deliver()
        self._say_recovered()
        if self._agent.has_others:
            self._say_once(
                "a second training runs beside the one that is watched; start each by an eroica run of its own"
            )

    def rest(self) -> None:
        """The job was told to end: what dies or stands still from now on does so because of that."""
        if not self._coordinator.is_resting:
            self._coordinator.is_resting = True
            self._agent.rest()

    def last_look(self) -> None:
        """The job has ended: take what it left, and wait for what is being read."""
        until_ns = time.monotonic_ns() + round(LAST_WORDS_S * 1e9)
        self.look()
        while (self._agent.is_busy or self._coordinator.look is not None) and time.monotonic_ns() < until_ns:
            time.sleep(1 / LOOKS_PER_S)
            self.look()
        self._say_held()

    def close(self) -> None:
        """End the processes that read captures."""
        self._agent.close()
        self._readers.close()

    def _on_window(self, window: Window) -> None:
        if not window.summaries and not window.histories:
            self._say_nothing_came(window)
            return
        if window.training != self._training:
            self._baseline, self._wires, self._training = None, None, window.training
        judged = judge(window, self._baseline, job=self._plan.job, created=_now(), wires=self._wires)
        if not window.summaries and judged.diagnosis.kind == "no_data":
            self._say_nothing_came(window)
            return
        is_sized = window.frames is Frames.SIZED
        if not is_sized:
            self._say_held()  # the window with sizes was given up for this one
        if window.trigger == "baseline" and window.summaries and not is_sized:
            self._baseline, self._wires = judged.stacked, judged.wires
        if judged.is_news:
            self._keep(window, judged.diagnosis)
        shutil.rmtree(self._folder / "captures" / str(window.number), ignore_errors=True)
        if is_sized and (not judged.is_news or judged.diagnosis.kind in ("healthy", "no_data")):
            self._say_held()
        elif judged.is_news:
            self._held = None
            if self._asks_for_sizes(window, judged):
                self._held = judged, window
            else:
                self._report(judged.diagnosis, judged.detail, window.cause, window.number)

    def _asks_for_sizes(self, window: Window, judged: Judged) -> bool:
        """What moves over the ranks may follow what they are given. Sizes cost, so they are asked for only then."""
        if self._recording is not None or not _depends_on_sizes(judged.diagnosis):
            return False
        return self._coordinator.ask_for_sizes(window, time.monotonic_ns())

    def _say_held(self) -> None:
        """Sizes have told nothing more, or did not come."""
        held, self._held = self._held, None
        if held is not None:
            judged, window = held
            self._report(judged.diagnosis, judged.detail, window.cause, window.number)

    def _say_nothing_came(self, window: Window) -> None:
        """No rank captured, and their records explain nothing by themselves."""
        self._say_held()
        standings = self._coordinator.standings
        if not self._coordinator.is_resting and any(r in standings and standings[r].is_alive for r in window.ranks):
            self._say_once(f"a capture gave nothing: {missing_note(window)}")

    def _on_look(self, look: Look) -> bool:
        if look.trigger is None and _were_ended(look):
            return False
        world_size = max((s.world_size for s in self._coordinator.standings.values()), default=0)
        diagnosis = hang.explain(
            list(look.views.values()),
            world_size=world_size,
            job=self._plan.job,
            created=_now(),
            version=__version__,
            limit_s=look.limit_s or hang.LIMIT_S,
            notes=look.notes,
        )
        if diagnosis is None:
            return False
        if _may_compute(diagnosis, look) or _may_pass(diagnosis, look):
            return False
        if diagnosis.kind == "paused":
            # It may become a hang: it is looked at again, and told again only if it has changed.
            if self._paused != diagnosis.verdict:
                self._paused = diagnosis.verdict
                self._report(diagnosis, None, look.trigger, None)
            return False
        self._report(diagnosis, None, look.trigger, None)
        return True

    def _on_recovered(self, rank: int, trigger: Trigger) -> None:
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

    def _report(self, diagnosis: Diagnosis, detail: Detail | None, cause: Trigger | None, window: int | None) -> None:
        if diagnosis.kind not in ("healthy", "no_data", "recovered"):
            self.num_troubles += 1
            if cause is not None:
                self._told_changes.add(cause.change)
        self._tell(
            Incident(
                diagnosis=diagnosis,
                detail=detail,
                made_ns=time.monotonic_ns(),
                noticed_ns=cause.time_ns if cause is not None else None,
                window=window,
            )
        )

    def _keep(self, window: Window, diagnosis: Diagnosis) -> None:
        if self._plan.keep_captures is None:
            return
        source = self._folder / "captures" / str(window.number)
        target = self._plan.keep_captures / f"captures-{to_json(diagnosis)['id']}"
        try:
            shutil.copytree(source, target, dirs_exist_ok=True)
        except OSError as error:
            self._say_once(f"captures could not be kept in {target}: {error.strerror or error}")

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


def judge(window: Window, baseline: Stacked | None, *, job: str, created: str, wires: Wires | None = None) -> Judged:
    """The diagnosis of a window that has summaries, and whether it is told. `wires`: those of the baseline's window."""
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
        notes=window.notes,
    )
    diagnosis, detail = diagnose_in_detail(stacked, context)
    is_cut = diagnosis.kind == "no_data" and (window.trigger == "baseline" or GONE in window.problems.values())
    is_nothing = is_cut or (window.cause is not None and diagnosis.kind == "healthy" and _is_back(diagnosis))
    # Nobody asked for the first window. What it shows is told if it costs as much as a slowdown would have to.
    is_nothing = is_nothing or (window.trigger == "baseline" and 0 < _cost(diagnosis) < EFFECT)
    return Judged(diagnosis, detail, stacked, context.wires, not is_nothing)


_BY_SIZE = frozenset({"sync_amplification", "host_python", "unknown"})
"""Causes of what moves over the ranks that may be uneven work, as long as sizes are not known. Kernels tell theirs."""


def _depends_on_sizes(diagnosis: Diagnosis) -> bool:
    return any(finding.scope == "rotating" and finding.cause in _BY_SIZE for finding in diagnosis.findings)


def _cost(diagnosis: Diagnosis) -> float:
    """The dearest finding's share of the iteration; infinite where one has no price, 0 without findings."""
    return max((math.inf if f.impact.share is None else f.impact.share for f in diagnosis.findings), default=0.0)


def _is_back(diagnosis: Diagnosis) -> bool:
    """What was noticed had passed before the window began."""
    iteration = diagnosis.iteration
    return iteration.slowdown is not None and iteration.slowdown < 1 + EFFECT


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
    if not dead or any(view.exception and not is_follower(view) for view in views):
        return False
    return all(view.exit_status in ENDED_BY_OTHERS for view in dead) or (
        len(dead) == len(views) > 1 and all(view.exit_status in (None, *ENDED_BY_OTHERS) for view in dead)
    )


def _keep_rings(folder: Path, target: Path, say: Callable[[str], None]) -> None:
    rings = sorted(folder.glob(f"*{SUFFIX}"))
    if not rings:
        say("no flight rings are kept, since no process of the job trained")
        return
    try:
        target.mkdir(parents=True, exist_ok=True)
        for ring in rings:
            shutil.copy2(ring, target)
    except OSError as error:
        say(f"flight rings could not be kept in {target}: {error.strerror or error}")
    else:
        say(f"flight rings are kept; see eroica show {shlex.quote(str(target))}")


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
