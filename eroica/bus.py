"""What agents and the coordinator tell each other, and the bus that carries it inside of one process.

Messages are values without behaviour. Commands carry raw step counts, never "on receipt". `eroica run` delivers them
by `Bus`, in order, when its loop says so; nothing here knows of sockets: over hosts, `relay` stands in its place behind
the same `Link`. Used by `agent`, `coordinator` and whoever runs them.

Messages travel between versions of eroica: fields are only ever added, with a default, and a reader leaves out what it
does not know (`wire`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from eroica.arrivals import Arrival
from eroica.background import History
from eroica.commands import Frames, State, Unit
from eroica.degradation import Trigger
from eroica.samplers.evidence import Counted
from eroica.standing import RankView


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where one rank is. Told whenever it has moved."""

    host: str
    rank: int
    world_size: int
    """0 if unknown."""
    generation: int
    """Start of the job that this rank belongs to."""
    training: str = ""
    """Which job that is: one command may run several, one after the other."""
    unit: Unit | None
    """What `count` counts; None while neither steps nor batches are seen."""
    count: int
    per_iteration: int
    """Units to one iteration; 0 while it is not learnt."""
    aligned: int
    """A count at which an iteration ended: a window starts whole iterations away from it."""
    num_iterations: int
    """Seen in this start of the job."""
    iteration_s: float | None
    """Median of the last ones."""
    is_alive: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Noticed:
    """A rank's pace has changed."""

    rank: int
    trigger: Trigger


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """A rank's process has gone without saying that it reached its end, or by an exception."""

    rank: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """How far a rank is with a window."""

    window: int
    rank: int
    state: State
    why: str = ""
    """What the rank says of its failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summarized:
    """A rank's capture, reduced (`codec.write_summary`), or why there is none; "" and no summary: only its history."""

    window: int
    rank: int
    summary: bytes | None
    problem: str = ""
    history: History | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CountersRead:
    """A host's counters over a window."""

    window: int
    host: str
    counters: tuple[Counted, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What an agent saw when it looked at its ranks closely."""

    look: int
    host: str
    views: tuple[RankView, ...]
    limit_s: float = 0.0
    """Silence that counts as standing still in this job."""
    notes: tuple[str, ...] = ()
    """What could not be looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The job was told to end: what dies or stands still from now on does so because of that."""

    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """The job has ended on this host, and its agent would leave."""

    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent:
    """The agent of a host is not heard any more. Told by the coordinator's own end of the bus."""

    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """A process group of a rank, with peers."""

    group: int
    """Its key in the ring."""
    name: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """Iterations of a rank that are over, and how it came to the first collective of each group in them."""

    rank: int
    groups: tuple[Met, ...]
    arrivals: tuple[Arrival, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """An agent of a host speaks for the first time. Told by the coordinator's own end of the bus."""

    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Capture these steps, if all ranks can; see `commands`."""

    window: int
    unit: Unit
    start: int
    num_steps: int
    frames: Frames


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """All that can have answered: do it."""

    window: int
    expected_s: float
    """From now to the end of the capture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Leave it."""

    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """This window is under way: for the agent of one host, which is new and takes the place of one that was lost."""

    host: str
    window: int
    unit: Unit
    start: int
    num_steps: int
    frames: Frames
    expected_s: float = 0.0
    """See `Commit`; 0: not committed yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookCloser:
    """Read stacks and process states of all local ranks."""

    look: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TellArrivals:
    """Tell of arrivals, for so long from now on."""

    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Hold ranks back at the first collective of each step on these groups, until this is replaced or its time over."""

    number: int
    ttl_s: float
    delays: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    """Key of a group -> rank and nanoseconds; who is not named is free."""
    moments: tuple[tuple[int, int], ...] = ()
    """Key of a group -> for how many nanoseconds after its own step began a rank may be held at most; a group that is
    not here is held for its delays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """The diagnosis of a window is made, or it was given up: its captures are needed no more."""

    window: int
    diagnosis: str = ""
    """Identity of the diagnosis that was told; "": nothing was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """The agent of a host that would leave is needed no more."""

    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A sentence for whoever watches the job, on each of its hosts."""

    text: str


Message: TypeAlias = (
    Standing
    | Noticed
    | Died
    | Answered
    | Summarized
    | CountersRead
    | Looked
    | Ending
    | Leaving
    | Silent
    | Arrived
    | Joined
    | Prepare
    | Commit
    | Abort
    | Resume
    | LookCloser
    | TellArrivals
    | Hold
    | Closed
    | Released
    | Said
)

TO_COORDINATOR = (
    Standing,
    Noticed,
    Died,
    Answered,
    Summarized,
    CountersRead,
    Looked,
    Ending,
    Leaving,
    Silent,
    Arrived,
    Joined,
)
TO_AGENTS = (Prepare, Commit, Abort, Resume, LookCloser, TellArrivals, Hold, Closed, Released, Said)


class Link(Protocol):
    """An end of the bus, for one thread: nothing is handed on but within `deliver`."""

    def subscribe(self, kinds: tuple[type, ...], take: Callable[[Message], None]) -> None:
        """Have `take` called with each message of these kinds that comes from the other side."""

    def publish(self, message: Message) -> None:
        """Queue a message for the other side. Never waits."""

    def deliver(self) -> None:
        """Hand on all that has come, and send what was published."""


class Bus:
    """Carries messages in the order in which they were published; takers may publish more."""

    def __init__(self) -> None:
        self._takers: list[tuple[tuple[type, ...], Callable[[Message], None]]] = []
        self._queue: deque[Message] = deque()

    def subscribe(self, kinds: tuple[type, ...], take: Callable[[Message], None]) -> None:
        """Have `take` called with each message of these kinds."""
        self._takers.append((kinds, take))

    def publish(self, message: Message) -> None:
        """Queue a message; `deliver` hands it on."""
        self._queue.append(message)

    def deliver(self) -> None:
        """Hand on all that is queued, and what comes of it."""
        while self._queue:
            message = self._queue.popleft()
            for kinds, take in self._takers:
                if isinstance(message, kinds):
                    take(message)
