"""`eroica run`: starts a job with its ranks armed, watches it, and tells what it finds while the job runs.

On one host, agent and coordinator live in this one process, in one loop with one clock, and share messages by an
in-memory bus. Where the coordinator is another process (`serve`), the agent alone does, and reaches it by `relay`. The
ranks know of none of them. Whatever goes wrong here is said once and ends the watching, never the job: the job's exit
status is ours in every case. Used by `cli` and `demo`.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import shutil
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from eroica import bus
from eroica.access import VARIABLES, Pass
from eroica.agent import Agent, host_name
from eroica.answers import PacingChange
from eroica.captures import Readers, close_captures
from eroica.conductor import Mode, in_words
from eroica.errors import EroicaError
from eroica.fabric.pacing import Limits
from eroica.investigation import Incident, Investigation
from eroica.launch import Job, Workspace, environment_for, start
from eroica.meetup import Meeting
from eroica.nats import NatsCarrier
from eroica.ondemand import OnDemand
from eroica.recording import LEAD_S, MOST_EVENTS, Recording
from eroica.relay import AgentLink
from eroica.ring import SUFFIX
from eroica.views import STACKS_SUFFIX
from eroica.windows import Policy

LOOKS_PER_S = 10
"""Each reads the heads of all rings, some 100 microseconds per rank."""
MEET_S = 0.5
"""Between two looks for where ranks meet: each reads all rings."""
TO_HEAR_S = 3.0
"""After the end of the job, for a coordinator that is not heard to come back; a job may be over before it was there."""
LAST_WORDS_S = 30.0
"""After the end of the job, for what was captured before it."""


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
    pacing: Mode = Mode.OFF
    """Of our own coordinator."""
    pacing_limits: Limits = field(default_factory=Limits)
    paced: Callable[[PacingChange], None] = lambda change: None
    """Gets each change of the pacing."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of the command."""
    on_demand: bool = False
    """Have Kineto record the windows by itself; see `recording` for what for, and what it endangers."""
    enough: Callable[[int], bool] | None = None
    """Asked with the number of troubles told so far; True ends the job. For demos."""
    coordinator: Pass | None = None
    """How to reach the coordinator; None: there is none but our own."""
    meets: Path | None = None
    """Find the coordinator by the job's own store; where diagnoses go if it falls to us to bring it along."""
    key: str = ""
    """Name of the job on the bus, equal on all of its hosts."""


def run(plan: Run, tell: Callable[[Incident], None], say: Callable[[str], None]) -> int:
    """Run the command to its end; returns its exit status as a shell would (128+N for signal N).

    `tell` gets each incident, `say` a sentence now and then. Raises UserError if the command cannot be started.
    """
    with Workspace.create(os.environ) as workspace, ExitStack() as at_end, ExitStack() as opened:
        # The ranks have no use for our secrets.
        base = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        added, recording = dict(plan.environment), None
        if plan.on_demand:
            point = OnDemand(workspace.path / "kineto")
            opened.callback(point.close)
            added = point.environment(base | added) | added
            recording = Recording(point)
            opened.callback(recording.close)
        job = start(plan.command, environment=environment_for(workspace.path, added, base=base))
        if plan.keep_rings is not None:
            at_end.callback(_keep_rings, workspace.path, plan.keep_rings, say)
        watcher: _Watcher | None = None
        try:
            if plan.meets is not None:
                meeting = Meeting(workspace.path, job=plan.key, out=plan.meets, environ=base, say=say)
                at_end.callback(meeting.close, LAST_WORDS_S)  # the runs of other hosts need the coordinator till then
                found = _met(job, meeting)
                if isinstance(found, int):
                    say("the job ended before its runs had met: nothing of it was watched")
                    return found
                plan = replace(plan, coordinator=found)
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
        while (status := job.wait(60.0)) is None:
            pass
        return status


def _met(job: Job, meeting: Meeting) -> Pass | int:
    """The way to the coordinator, or the status of a job that has ended before there was one."""
    while (status := job.wait(MEET_S)) is None:
        found = meeting.look()
        if found is not None:
            return found
    return status


def _until_end(job: Job, watcher: _Watcher, plan: Run) -> int:
    is_ended = False
    while (status := job.wait(1 / LOOKS_PER_S, watcher.events)) is None:
        if job.is_told_to_end:
            watcher.rest()
        watcher.look()
        if not is_ended and plan.enough is not None and plan.enough(watcher.num_troubles):
            is_ended = True  # once: torchrun ends its workers at the first signal and loses them at the second
            job.end()
    watcher.last_look()
    return status


class _Watcher:
    """Agent, and coordinator unless that is another process, of one run."""

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
        self._say = say
        self._said: set[str] = set()
        self._host = host_name(os.environ)
        self._carrier: NatsCarrier | None = None
        self._far: AgentLink | None = None
        self._investigation: Investigation | None = None
        self._is_released = self._is_ending = False
        self._link: bus.Link
        if plan.coordinator is not None:
            self._carrier = NatsCarrier(plan.coordinator, name=f"eroica run on {self._host}", say=say)
            self._far = self._link = AgentLink(
                self._carrier, job=plan.key, host=self._host, clock=time.monotonic_ns, say=say
            )
        else:
            self._link = bus.Bus()
            policy = plan.policy
            if recording is not None:
                policy = on_demand(policy)
            self._investigation = Investigation(
                self._link,
                job=plan.job,
                policy=policy,
                clock=time.monotonic_ns,
                tell=tell,
                say=say,
                may_size=recording is None,
                paced=self._paced,
            )
            if plan.pacing is not Mode.OFF:
                self._investigation.pace(plan.pacing, plan.pacing_limits, "eroica run")
        self._link.subscribe((bus.Closed, bus.Released, bus.Said), self._take)
        self._readers = Readers()
        clears = plan.keep_rings is None
        self._agent = Agent(
            folder, self._link, host=self._host, readers=self._readers, on_demand=recording, clears=clears
        )

    @property
    def events(self) -> list[int]:
        """Handles that can be read when `look` is due at once."""
        return [*self._agent.events, *([self._carrier.handle] if self._carrier is not None else [])]

    @property
    def num_troubles(self) -> int:
        """Told so far; by a coordinator elsewhere none, as far as is known here."""
        return self._investigation.num_troubles if self._investigation is not None else 0

    def look(self) -> None:
        """One round."""
        self._agent.poll(time.monotonic_ns())
        self._link.deliver()
        if self._investigation is not None:
            self._investigation.tick(time.monotonic_ns())
            self._link.deliver()
        if self._agent.has_others:
            self._say_once(
                "a second training runs beside the one that is watched; start each by an eroica run of its own"
            )

    def rest(self) -> None:
        """The job was told to end: what dies or stands still from now on does so because of that."""
        if not self._is_ending:
            self._is_ending = True
            self._link.publish(bus.Ending(host=self._host))
            self._link.deliver()
            self._agent.rest()

    def last_look(self) -> None:
        """The job has ended: hear its last words, and tell all there is to tell."""
        self._hear_last_words()
        if self._investigation is not None:
            self._investigation.finish()

    def _hear_last_words(self) -> None:
        """Take what it left, wait for what is being read, and for whoever may ask once more."""
        until_ns = time.monotonic_ns() + round(LAST_WORDS_S * 1e9)
        self.look()
        while self._agent.is_busy and time.monotonic_ns() < until_ns:
            self._pause()
            self.look()
        self._link.publish(bus.Leaving(host=self._host))
        self.look()
        to_hear_ns = time.monotonic_ns() + round(TO_HEAR_S * 1e9)
        while not self._is_released and time.monotonic_ns() < until_ns:
            if self._far is not None and not self._far.is_heard and time.monotonic_ns() > to_hear_ns:
                self._say("the coordinator is not heard; what it has not taken of this run is lost")
                return
            self._pause()
            self.look()

    def close(self) -> None:
        """End the processes that read captures, and the connection."""
        self._agent.close()
        self._readers.close()
        if self._carrier is not None:
            self._carrier.close()

    def _pause(self) -> None:
        """Until the next round is due, or something has come."""
        select.select([self._carrier.handle] if self._carrier is not None else [], [], [], 1 / LOOKS_PER_S)

    def _take(self, message: bus.Message) -> None:
        if isinstance(message, bus.Said):
            self._say(message.text)
        elif isinstance(message, bus.Released):
            self._is_released = self._is_released or message.host == self._host
        elif isinstance(message, bus.Closed):
            keep = self._plan.keep_captures if message.diagnosis else None
            target = keep / f"captures-{message.diagnosis}" if keep is not None else None
            try:
                close_captures(self._folder, message.window, target)
            except OSError as error:
                self._say_once(f"captures could not be kept in {target}: {error.strerror or error}")

    def _paced(self, change: PacingChange) -> None:
        self._plan.paced(change)
        self._say(in_words(change))

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)


def pacing_log(folder: Path) -> Callable[[PacingChange], None]:
    """Keeps each change of a job's pacing, a line of JSON in `folder`/pacing.jsonl."""

    def keep(change: PacingChange) -> None:
        with suppress(OSError):  # the run goes on, and the change is said all the same
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / "pacing.jsonl", "a", encoding="utf-8") as log:
                log.write(json.dumps(asdict(change)) + "\n")

    return keep


def on_demand(policy: Policy) -> Policy:
    """The same for windows that Kineto records."""
    return replace(policy, lead_s=max(policy.lead_s, LEAD_S), most_events=max(policy.most_events, MOST_EVENTS))


def _keep_rings(folder: Path, target: Path, say: Callable[[str], None]) -> None:
    rings = sorted(folder.glob(f"*{SUFFIX}"))
    if not rings:
        say("no flight rings are kept, since no process of the job trained")
        return
    try:
        target.mkdir(parents=True, exist_ok=True)
        for ring in rings:
            shutil.copy2(ring, target)
            with suppress(FileNotFoundError):  # most ranks have no reason to leave any
                shutil.copy2(ring.with_suffix(STACKS_SUFFIX), target)
    except OSError as error:
        say(f"flight rings could not be kept in {target}: {error.strerror or error}")
    else:
        say(f"flight rings are kept; see eroica show {shlex.quote(str(target))}")
