"""Counters of a host and its devices: one small protocol, and who speaks it.

A sampler opens once and reads many times: `host` (/proc, cgroups, disks, network cards), `links` (connections, and the
queues before cards), `nvml` (NVIDIA devices), `rdma` (InfiniBand and RoCE ports); others are found by the entry point
group `eroica.samplers`. Samplers give what the system counts, as it counts it; `recorder` keeps the readings of a while
and makes rates of them, `evidence` turns these into what the product takes, `standout` names what is unusual. Not here:
threads, loops, judgement. Used by the agent of a host; nothing of this runs inside of training.

Every sampler takes a root folder, so that tests read trees that were recorded elsewhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Literal, Protocol, TypeAlias, runtime_checkable

GROUP = "eroica.samplers"
"""Entry points of this group name a callable that takes the root folder and returns a sampler or `Missing`."""

Kind: TypeAlias = Literal["rank", "thread", "process", "host", "nic", "port", "disk", "device", "way"]


@dataclass(frozen=True, slots=True)
class Target:
    """What a counter belongs to."""

    kind: Kind
    """"rank": a training process; "thread": one of its threads; "process": one that is not of the job; "port": an RDMA
    port; "way": one direction of a connection."""
    name: str
    """Unique within the kind on this host: "3", "3/pt_data_pin", "eth0", "mlx5_0/1", the device's index, ..."""
    rank: int | None = None
    """Whose it is, where it belongs to one rank alone."""
    pid: int = 0
    """Of processes, so that a rank that was started anew is another target; 0 for the rest."""


@dataclass(frozen=True, slots=True)
class Metric:
    """What a number in a reading means."""

    unit: str
    """Of what is recorded: "s/s", "Gbit/s", "" for plain numbers and shares of 0..1."""
    grows: bool = False
    """A count since some start: only its increase means something."""
    rate: str = ""
    """Name of its increase per second; "" = the increase itself is told, under the counter's own name."""
    per: float = 1.0
    """The increase per second is divided by this: 1e9 makes seconds of nanoseconds."""
    over: Literal["median", "mean", "max"] = "median"
    """What stands for a while of a value that is no count: the mean makes a share of the time of 0 and 1."""
    has_past: bool = False
    """What it was before the interval is told as well, and what it lately was at most: `evidence.counters`."""


@dataclass(frozen=True, slots=True)
class Rank:
    """A training process of this host, as the agent knows it."""

    rank: int
    pid: int
    """In the pid namespace of the agent."""
    device: str = ""
    """Index (as the driver counts), UUID or PCI address of its device; "" = learn it from the device's processes."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one read gave. What could not be read is absent; 0 means that the system said 0."""

    values: Mapping[Target, Mapping[str, float]]
    labels: Mapping[Target, Mapping[str, str]] = field(default_factory=dict)
    """Words about a target: its processes, throttle reasons, cores. They come from the job: data, never trusted."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A sampler that cannot work here."""

    name: str
    reason: str
    """A sentence with the way out, for `eroica doctor` and the notes of a diagnosis."""


@runtime_checkable
class Sampler(Protocol):
    """One source of counters."""

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """All numbers that a reading can hold, by name."""
        ...

    def read(self, now_ns: int, ranks: Sequence[Rank]) -> Reading:
        """Read now. `now_ns`: a monotonic clock. May leave out what changes slowly; never waits for anything."""
        ...


Opener: TypeAlias = Callable[[Path], Sampler | Missing]

BUILT_IN = {name: f"eroica.samplers.{name}:open_sampler" for name in ("host", "links", "nvml", "rdma")}


def _opener(place: str) -> Opener:
    module, _, name = place.partition(":")
    opener: Opener = getattr(importlib.import_module(module), name)
    return opener


def open_samplers(root: Path = Path("/")) -> tuple[dict[str, Sampler], tuple[Missing, ...]]:
    """All samplers that work here by name, and why the others do not. `root`: where /proc and /sys are."""
    openers: dict[str, Callable[[], Opener]] = {}
    missing: list[Missing] = []
    for name, place in BUILT_IN.items():
        openers[name] = lambda place=place: _opener(place)  # type: ignore[misc]
    for point in entry_points(group=GROUP):
        if point.name in openers:
            missing.append(Missing(point.name, f"{point.value} has the name of another sampler and is left out"))
        else:
            openers[point.name] = point.load
    found: dict[str, Sampler] = {}
    for name, load in openers.items():
        # Whatever an extension raises must not cost us the other samplers.
        try:
            opened: object = load()(root)
        except Exception as error:
            missing.append(Missing(name, f"it failed to open with {type(error).__name__}: {error}"))
            continue
        if isinstance(opened, Missing):
            missing.append(opened)
        elif isinstance(opened, Sampler):
            found[name] = opened
        else:
            missing.append(Missing(name, f"its opener returned {type(opened).__name__}, neither Sampler nor Missing"))
    return found, tuple(missing)
