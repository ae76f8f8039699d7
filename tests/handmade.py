"""Traces and summaries made by hand: a few events, or a few numbers, each of them chosen by the test that uses them.

Times in traces are nanoseconds, in summaries seconds. What a test does not say is harmless: CPU operators on thread 1,
one group of all ranks, equal steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from eroica.collectives import Channel, Ledger
from eroica.communication import CollectiveKind, CollectiveTable
from eroica.critical_path import NUM_ACTIVITIES, Activity
from eroica.job import ProcessGroup, format_ranks
from eroica.pattern import Coverage, Function, Patterns, Summary
from eroica.records import Damage
from eroica.trace import Category, Trace

MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Comm:
    """What a communicating event tells."""

    kind: CollectiveKind = CollectiveKind.ALL_REDUCE
    group: int = 0
    sequence: int = -1
    peer: int = -1
    elements: int = 1024
    dtype: str = "Float"
    uneven: bool = False
    transfers: bool = True


@dataclass(frozen=True, slots=True)
class Event:
    """One event; `thread` names the host thread or the device stream."""

    name: str
    ts: int
    dur: int
    category: Category = Category.CPU_OP
    thread: str = "1"
    correlation: int = 0
    work: int = -1
    bandwidth: float = float("nan")
    occupancy: float = float("nan")
    comm: Comm | None = None


def op(name: str, ts: int, dur: int, **more: Any) -> Event:
    return Event(name, ts, dur, Category.CPU_OP, **more)


def frame(name: str, ts: int, dur: int, **more: Any) -> Event:
    return Event(name, ts, dur, Category.PYTHON, **more)


def mark(name: str, ts: int, dur: int, **more: Any) -> Event:
    return Event(name, ts, dur, Category.ANNOTATION, **more)


def call(name: str, ts: int, dur: int, **more: Any) -> Event:
    return Event(name, ts, dur, Category.RUNTIME, **more)


def kernel(name: str, ts: int, dur: int, **more: Any) -> Event:
    return Event(name, ts, dur, Category.KERNEL, **{"thread": "stream 7", **more})


def copy(name: str, ts: int, dur: int, **more: Any) -> Event:
    return Event(name, ts, dur, Category.COPY, **{"thread": "stream 8", **more})


WORLD = ProcessGroup("0", "default_pg", (0, 1, 2, 3), 4)


def trace(
    events: Sequence[Event],
    *,
    rank: int | None = 0,
    world_size: int | None = 4,
    groups: Sequence[ProcessGroup] = (WORLD,),
    damage: Damage | None = None,
) -> Trace:
    """The events of one rank as `read_trace` would give them."""
    ordered = sorted(events, key=lambda e: (e.ts, -e.dur))
    strings = sorted({e.name for e in events} | {e.comm.dtype for e in events if e.comm})
    threads = sorted({e.thread for e in events})
    rows = [k for k, e in enumerate(ordered) if e.comm]
    told = [c for e in ordered if (c := e.comm)]

    def column(name: str, dtype: type) -> Any:
        return np.array([getattr(c, name) for c in told], dtype)

    def of(name: str, dtype: type) -> Any:
        return np.array([getattr(e, name) for e in ordered], dtype)

    device = np.array([e.category in (Category.KERNEL, Category.COPY, Category.MEMSET) for e in ordered], bool)
    return Trace(
        path="",
        rank=rank,
        world_size=world_size,
        host="host0",
        device_model="",
        num_devices=0,
        epoch=False,
        strings=tuple(strings),
        tracks=tuple(("1", thread) for thread in threads),
        track_names=tuple("" for _ in threads),
        groups=tuple(groups),
        ts_ns=of("ts", np.int64),
        dur_ns=of("dur", np.int64),
        name=np.array([strings.index(e.name) for e in ordered], np.int32),
        category=of("category", np.uint8),
        track=np.array([threads.index(e.thread) for e in ordered], np.int32),
        correlation=of("correlation", np.int64),
        stream=np.where(device, 7, -1).astype(np.int32),
        device=np.where(device, 0, -1).astype(np.int32),
        work=of("work", np.int64),
        bandwidth_gbs=of("bandwidth", np.float32),
        occupancy=of("occupancy", np.float32),
        collectives=CollectiveTable(
            event=np.array(rows, np.int32),
            kind=column("kind", np.uint8),
            group=column("group", np.int32),
            sequence=column("sequence", np.int64),
            peer=column("peer", np.int32),
            in_elements=column("elements", np.int64),
            out_elements=column("elements", np.int64),
            dtype=np.array([strings.index(c.dtype) for c in told], np.int32),
            uneven=column("uneven", np.bool_),
            transfers=column("transfers", np.bool_),
        ),
        damage=damage or Damage(),
    )


EVERYONE = Channel("0-3", "default_pg", 4)


@dataclass(frozen=True, slots=True)
class Sample:
    """One communication of one rank."""

    duration: float
    work_before: float = 0.0
    channel: Channel = EVERYONE
    kind: CollectiveKind = CollectiveKind.ALL_REDUCE
    exposed: float | None = None
    """None: all of it."""
    check: int = 7
    in_flight: int = 0


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank's account. Times are seconds per step; a number stands for all steps."""

    own: float | Sequence[float] = 0.9
    length: float | Sequence[float] = 1.0
    samples: Sequence[Sample] = ()
    """Of each step."""
    functions: Mapping[Function, float] = field(default_factory=dict)
    """Function -> seconds per step."""
    mu: Mapping[Function, float] = field(default_factory=dict)
    mu_source: int = 0
    work: Mapping[Function, float] = field(default_factory=dict)
    waiting: float = 0.0
    host: str = ""
    device_model: str = ""
    groups: tuple[ProcessGroup, ...] = ()
    has_device: bool = True
    tops: Mapping[int, tuple[int, float, float]] = field(default_factory=dict)
    """Step -> (function, excess seconds, share by work)."""
    explained: float = 1.0
    partial: bool = False


GEMM = Function(Activity.COMPUTE, "gemm", None, None)


def ledger(rank: Rank, num_steps: int = 8) -> Ledger:
    """The account as `ledger_of` gives it."""
    steps = np.arange(num_steps)
    own = np.broadcast_to(np.asarray(rank.own, np.float32), num_steps)
    length = np.broadcast_to(np.asarray(rank.length, np.float32), num_steps)
    channels = tuple(dict.fromkeys(s.channel for s in rank.samples))
    places: dict[Channel, int] = {}
    position = []
    for item in rank.samples:
        position.append(places.setdefault(item.channel, 0))
        places[item.channel] += 1
    exposed = np.array([s.duration if s.exposed is None else s.exposed for s in rank.samples], np.float32)
    tops = [rank.tops.get(int(step), (-1, 0.0, float("nan"))) for step in steps]

    def each(values: Sequence[Any], dtype: type) -> Any:
        return np.tile(np.array(values, dtype), num_steps)

    return Ledger(
        steps=steps.astype(np.int64),
        length_s=length.copy(),
        own_s=own.copy(),
        exposed_s=np.full(num_steps, exposed.sum(), np.float32),
        waiting_s=np.full(num_steps, rank.waiting, np.float32),
        top_function=np.array([t[0] for t in tops], np.int32),
        top_excess_s=np.array([t[1] for t in tops], np.float32),
        top_by_work=np.array([t[2] for t in tops], np.float32),
        channels=channels,
        channel_count=np.ones(len(channels), np.float32),
        channel_exposed_s=np.zeros(len(channels), np.float32),
        channel_bytes=np.full(len(channels), np.nan),
        step=np.repeat(steps, len(rank.samples)).astype(np.int64),
        channel=each([channels.index(s.channel) for s in rank.samples], np.int32),
        position=each(position, np.int32),
        kind=each([s.kind for s in rank.samples], np.uint8),
        check=each([s.check for s in rank.samples], np.int64),
        work_before_s=each([s.work_before for s in rank.samples], np.float32),
        duration_s=each([s.duration for s in rank.samples], np.float32),
        sample_exposed_s=each(exposed.tolist(), np.float32),
        in_flight=each([s.in_flight for s in rank.samples], np.int32),
        complete_steps=steps.astype(np.int64) if rank.samples else np.empty(0, np.int64),
    )


def summary(number: int, rank: Rank, *, world_size: int = 4, num_steps: int = 8) -> Summary:
    """All that leaves a rank."""
    account = ledger(rank, num_steps)
    mean = float(account.length_s.mean())
    told = dict(rank.functions) or {GEMM: float(account.own_s.mean())}
    functions = tuple(sorted(told, key=lambda f: (-told[f], f.name)))
    activity_beta = np.zeros(NUM_ACTIVITIES, np.float32)
    for function, seconds in told.items():
        activity_beta[function.activity] += seconds / mean
    return Summary(
        rank=number,
        world_size=world_size,
        host=rank.host,
        device_model=rank.device_model,
        groups=rank.groups or (ProcessGroup("0", "default_pg", tuple(range(world_size)), world_size),),
        steps_by="ProfilerStep",
        window_s=float(account.length_s.sum()),
        started_ns=None,
        num_iterations=num_steps,
        patterns=Patterns(
            functions=functions,
            beta=np.array([told[f] / mean for f in functions], np.float32),
            mu=np.array([rank.mu.get(f, np.nan) for f in functions], np.float32),
            sigma=np.full(len(functions), np.nan, np.float32),
            mu_source=np.array([rank.mu_source if f in rank.mu else 0 for f in functions], np.uint8),
            count=np.ones(len(functions), np.float32),
            work=np.array([rank.work.get(f, np.nan) for f in functions]),
            cutoff=0.0,
            activity_beta=activity_beta,
            threads=(),
        ),
        ledger=account,
        coverage=Coverage(
            num_events=100,
            num_kernels=10,
            num_launches=10,
            num_collectives=len(account.kind),
            explained=rank.explained,
            has_device=rank.has_device,
            partial=rank.partial,
            epoch=True,
            notes=(),
        ),
    )


def job(ranks: Sequence[Rank], num_steps: int = 8) -> list[Summary]:
    """Summaries of a whole job, ranks numbered as given."""
    return [summary(k, rank, world_size=len(ranks), num_steps=num_steps) for k, rank in enumerate(ranks)]


def everyone(size: int) -> Channel:
    """The job-wide group."""
    return Channel(format_ranks(range(size)), "default_pg", size)


def less(summary: Summary, **changes: Any) -> Summary:
    """A summary with another ledger column."""
    return replace(summary, ledger=replace(summary.ledger, **changes))
