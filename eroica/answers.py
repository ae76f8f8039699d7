"""What a coordinator answers over HTTP, as records: the same for who writes the answers and who reads them.

Plain values without behaviour, of the standard library alone. Fields are only ever added, with a default, and a reader
leaves out what it does not know, so that client and coordinator may be a version apart. A diagnosis itself is not here:
that is `findings`, whose JSON is passed on as it is. Used by `store`, `desk`, `api` and `client`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SCOPES = ("read", "act", "admin")
"""Of a token, each holding those before it: look; ask for windows and confirm causes; read who did what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job, running or over."""

    name: str
    is_live: bool = False
    """A coordinator looks after it now."""
    has_ended: bool = False
    """Though it does, all agents have said that the job has ended on their hosts; it may be started again."""
    first_seen: str | None = None
    """ISO 8601, as all times here."""
    last_seen: str | None = None
    hosts: dict[str, bool] = field(default_factory=dict)
    """Those with an agent, and whether that is heard."""
    world_size: int = 0
    """0: unknown."""
    num_alive: int = 0
    num_iterations: int = 0
    """Of the rank that is furthest, in this start of the job."""
    iteration_s: float | None = None
    """Median over the ranks of their medians; None: not learnt yet, or over."""
    slowest_s: float | None = None
    """The same of the slowest rank."""
    has_baseline: bool = False
    window: str = ""
    """What is being captured or looked at right now, in a few words; "": nothing."""
    num_incidents: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Where one rank stands."""

    rank: int
    host: str
    is_alive: bool
    is_heard: bool
    """The agent of its host is."""
    generation: int
    unit: str | None
    """What `count` counts, steps or batches; None: neither is seen."""
    count: int
    num_iterations: int
    iteration_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """What a person found to be the cause of an incident."""

    cause: str
    """Of the closed list in `findings`."""
    note: str
    who: str
    """Name of the token."""
    at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One diagnosis that was told, in a line; the whole is its diagnosis.json."""

    id: str
    number: int
    """Counts up, over all jobs."""
    job: str
    created: str
    kind: str
    trigger: str
    scope: str
    cause: str
    ranks: str
    hosts: list[str]
    confidence: str
    summary: str
    fingerprint: str = ""
    """Equal for incidents of the same problem; "": like no other."""
    has_detail: bool = False
    confirmed: Confirmation | None = None
    """The last word of a person on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incidents:
    """A page of them, newest first."""

    incidents: list[Incident]
    next: int | None = None
    """Cursor of the page with older ones; None: there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenBefore:
    """Earlier incidents of the same problem, in this and other jobs."""

    num: int
    causes: dict[str, int]
    """Causes that people have confirmed for them, and how often."""
    incidents: list[Incident]
    """The newest of them."""
    confirmed: Confirmation | None = None
    """What a person found to be the cause of this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A window that a person asked for."""

    id: str
    job: str
    state: str
    """waiting, preparing, capturing, judging; done, cancelled or failed."""
    asked_at: str
    asked_by: str
    incident: str | None = None
    """The diagnosis that came of it."""
    why: str = ""
    """Why there is none, in a sentence."""

    @property
    def is_over(self) -> bool:
        """Nothing more will come of it."""
        return self.state in ("done", "cancelled", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast a job was at one moment."""

    at: str
    num_iterations: int
    iteration_s: float | None
    slowest_s: float | None
    slowest_rank: int | None
    num_alive: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PacingChange:
    """Something that pacing has decided, or that somebody has decided about it."""

    at: str
    step: int
    """Raw count of steps; 0 where it has to do with none."""
    mode: str
    phase: str
    """Of the policy: watching, trial, on or resting; "": of a person or of the job."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PacedGroup:
    """A process group, as pacing sees it."""

    name: str
    num_ranks: int
    wait_s: float | None
    """What its usual member waits in an iteration for the last one, of late; None: not seen."""
    longest_delay_s: float
    """Of the last order, or of the one that a dry run would have sent."""
    median_delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    """How the pacing of a job stands."""

    job: str
    mode: str
    """off, dry-run or enable."""
    phase: str
    """Of the policy: watching, trial, on or resting; "": it has not begun."""
    is_held: bool
    """Ranks are held back now."""
    would_hold: bool
    """A dry run would have them held now."""
    has_rehearsed: bool
    """A dry run has seen enough of the job to say what pacing would do."""
    threshold: float
    max_delay_s: float
    ttl_s: float
    group_caps_s: dict[str, float]
    """Smaller caps of a hold, for single process groups, by name."""
    who: str
    """Who has said so."""
    num_iterations: int
    """Seen of all ranks, since then."""
    iteration_s: float | None
    dispersion: float | None
    """Waiting over the iteration, while nobody is held; None: not seen."""
    gain: float | None
    """Of throughput, in the last trial that has ended; None: none has."""
    gain_error: float | None
    steadier: float | None
    """Fall of the coefficient of variation in it."""
    groups: list[PacedGroup]
    changes: list[PacingChange]
    """The last ones, oldest first."""
    why_not: str = ""
    """Why nothing comes of it, where that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """One act, or one that was refused."""

    at: str
    who: str
    """Name of the token; "": none, or none that is known."""
    address: str
    act: str
    target: str
    outcome: str
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that has just happened: an incident, a window that was closed, a sentence."""

    id: str
    """To go on from, should the connection break."""
    kind: str
    """incident, window, pacing or said."""
    data: dict[str, Any]
