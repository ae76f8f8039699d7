"""What is true about a job with planted faults, and what a right answer to each must say.

Records only. The catalogue (`evals.catalogue`) gives the answers, whoever plants a fault (a training script, a
transform of traces) gives the ranks and places, `evals.score` judges a diagnosis by both.
"""

from __future__ import annotations

from dataclasses import dataclass

WHO = ("ranks", "among", "hosts", "link", "members", "nobody")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a finding must say to count as right."""

    causes: frozenset[str]
    scopes: frozenset[str]
    who: str
    """ranks: exactly the culprits. among: the culprits and whom they block (a deadlock is a circle). hosts: exactly the
    culprits' hosts, ranks within them. link: both ends, named as hosts or in `link`, ranks within the slow groups.
    members: no rank, or all members. nobody: no rank at all."""
    function: str | None = None
    """Regular expression, found in "kind|name|location|user_location|device|link" (case ignored); None = not asked."""
    place: bool = False
    """The function must lie where the fault was planted (or match `function`, if both are asked)."""
    kinds: frozenset[str] = frozenset()
    """Of the diagnosis; empty = any."""
    said: str | None = None
    """Regular expression, found in the evidence, advice or ruled-out causes of the finding; None = not asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Lines of a file in which a fault was planted."""

    file: str
    """Base name."""
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Expected:
    """One planted fault: what a diagnosis must say, and what it truly costs."""

    answer: Answer
    ranks: frozenset[int]
    hosts: frozenset[str]
    cost_s: float | None = None
    """Seconds per iteration that come back without this fault (others stay); None = not known."""
    magnitude: float = 0.0
    """The planter's own number, for people."""
    places: tuple[Place, ...] = ()
    links: frozenset[str] = frozenset()
    """What `link` of a right finding may be, "" for none; empty = not asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """A job and its faults."""

    hosts: tuple[str, ...]
    """(W,) Host of each rank."""
    faults: tuple[Expected, ...] = ()
    """() in a control, which must stay silent."""
    members: tuple[frozenset[int], ...] = ()
    """Sets of ranks, besides all of them, that an answer with who = members may name."""
    tolerated: tuple[Answer, ...] = ()
    """Findings that are neither asked for nor a false blame (advice on structure)."""

    @property
    def world_size(self) -> int:
        """W."""
        return len(self.hosts)

    @property
    def culprits(self) -> frozenset[int]:
        """Ranks that some fault sits on."""
        return frozenset().union(*(fault.ranks for fault in self.faults))

    def hosts_of(self, ranks: frozenset[int]) -> frozenset[str]:
        """Hosts of these ranks; ranks that do not exist have none."""
        return frozenset(self.hosts[rank] for rank in ranks if rank < self.world_size)
