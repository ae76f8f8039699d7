"""One training on a modelled fabric, iteration by iteration: who enters which reduction when, and how long it takes.

Event driven over the streams of a job (`topology`): a reduction begins when its last rank has entered it, and while
any runs, rates are shared max-min and change when a stream begins or ends or others' traffic does. All ranks are
handled at once in arrays, so that thousands cost little more than eight. A rank computes on while its reductions run,
more slowly while one waits or transfers on its device; the next one enters when the one before is done.

Pure: segments of computing and others' traffic are drawn from a generator that the caller gives, or are given.
`steer` may tell from each iteration how the next is to be entered; that is all that pacing can do here. What the model
leaves out is listed in `docs/fabric-model.md`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eroica.fabric.parameters import Background, Setting, Stalls
from eroica.fabric.topology import Float64s, Intps, Job, build

Float32s = npt.NDArray[np.float32]
_ROUNDING = 1e-9
"""Relative; what rates, bytes and times may differ by and be the same."""


def max_min(usage: Float64s, weight: Float64s, limit: Float64s, capacity: Float64s, others: Float64s) -> Float64s:
    """(S,) Rate of each stream's flows: no stream can have more without another that has less losing some.

    `usage` (S, K) flows per link, `weight` (S,) competitors that each flow is, `limit` (S,) what the stream could do
    alone, `others` (K,) greedy competitors that use one link each. Rates are raised together, by weight, until a link
    is full or a limit is reached; who is bound by it stays there.
    """
    rate = np.zeros(len(weight))
    free = np.ones(len(weight), bool)
    weighted = usage * weight[:, None]
    used = np.zeros(len(capacity))
    ceiling = limit / weight
    while free.any():
        own = weighted[free].sum(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            level = np.where(own > 0, np.maximum(capacity - used, 0.0) / (own + others), np.inf)
        lowest = min(float(level.min(initial=np.inf)), float(ceiling[free].min()))
        full = level <= lowest * (1 + _ROUNDING)
        bound = free & ((ceiling <= lowest * (1 + _ROUNDING)) | (usage[:, full] > 0).any(axis=1))
        rate[bound] = np.minimum(lowest * weight[bound], limit[bound])
        used = used + rate[bound] @ usage[bound]
        free &= ~bound
    return rate


def goodput(job: Job, contenders: Float64s, reductions: Float64s) -> Float64s:
    """(K,) What a link carries of payload when so many flows meet on it, of so many reductions."""
    fabric = job.setting.fabric
    loss = fabric.goodput_loss * job.is_switch * (1 - 1 / np.maximum(contenders, 1.0))
    meeting = fabric.meeting_loss * job.is_switch * (1 - 1 / np.maximum(reductions, 1.0))
    return job.capacity * (1 - loss) * (1 - meeting)


class Traffic:
    """Others' flows on the switch links: how many are on each, now. Owns the place in a drawn course of bursts."""

    def __init__(self, job: Job, background: Background | None, rng: np.random.Generator) -> None:
        self._rng = rng
        self._links = len(job.links.capacity) - job.links.first_switch
        self._slot = np.full(self._links, -1, np.intp)
        mine = np.flatnonzero(job.is_switch)
        self._slot[job.shared[mine] - job.links.first_switch] = mine
        self.flows = np.zeros(len(job.capacity))
        """(K,) On each link of the job."""
        self._background = background if len(mine) and background is not None and background.neighbours else None
        self._times = np.empty(0)
        self._rows: Intps = np.empty((0, 0), np.intp)
        self._signs = np.empty(0)
        self._at = 0
        self._drawn_to = 0.0
        if self._background is not None:
            b = self._background
            self._width = max(1, round(b.width * self._links))
            self._mean_s = b.burst_s * math.exp(b.burst_spread**2 / 2)
            self._flows = b.size * float(job.usage[:, mine].sum(axis=0).mean())
            self._draw(first=True)

    def _draw(self, *, first: bool) -> None:
        b = self._background
        assert b is not None
        chunk_s = 40 * self._mean_s
        per_s = b.neighbours / self._mean_s
        # From well before the start, so that the first moment is like any other.
        begin = -8 * self._mean_s if first else self._drawn_to
        until = self._drawn_to + chunk_s
        count = int(self._rng.poisson(per_s * (until - begin)))
        starts = self._rng.uniform(begin, until, count)
        ends = starts + self._rng.lognormal(math.log(b.burst_s), b.burst_spread, count)
        rows = np.argsort(self._rng.random((count, self._links)), axis=1)[:, : self._width]
        rows = self._slot[rows]
        left = slice(self._at, None)
        times = np.concatenate([self._times[left], starts, ends])
        order = np.argsort(times, kind="stable")
        old = self._rows[left] if len(self._rows) else np.empty((0, self._width), np.intp)
        self._rows = np.concatenate([old, rows, rows])[order]
        self._signs = np.concatenate([self._signs[left], np.full(count, self._flows), np.full(count, -self._flows)])[
            order
        ]
        self._times = times[order]
        self._at = 0
        self._drawn_to = until

    def next_change(self) -> float:
        """When a burst begins or ends next."""
        if self._background is None:
            return math.inf
        while self._at >= len(self._times) or self._times[self._at] >= self._drawn_to:
            self._draw(first=False)
        return float(self._times[self._at])

    def move_to(self, now: float) -> None:
        """Take in all changes up to `now`."""
        while self.next_change() <= now:
            stop = int(np.searchsorted(self._times, min(now, math.nextafter(self._drawn_to, 0)), side="right"))
            rows, signs = self._rows[self._at : stop], self._signs[self._at : stop]
            here = rows >= 0
            np.add.at(self.flows, rows[here], np.broadcast_to(signs[:, None], rows.shape)[here])
            self._at = stop


@dataclass(frozen=True, slots=True)
class Steering:
    """How the next iteration is to be entered."""

    delay_s: Float64s
    """(ranks, buckets) From ready to entered."""
    after: Intps
    """(groups,) Group whose reduction of the same bucket is to be done first; -1 = none."""
    patience_s: float = 0.0
    """A group goes anyway when it has waited for so long."""
    not_before_s: Float64s | None = None
    """(groups, buckets) From the start of the iteration: nobody is held beyond, and `delay_s` is the longest. The hold
    begins when the rank is ready, and so may pass while the reduction before is still under way."""


@dataclass(frozen=True, slots=True)
class Passage:
    """One iteration. Seconds from its start."""

    step: int
    length_s: float
    ready_s: Float64s
    """(ranks, buckets) The gradients of the bucket are there; the last one is the end of computing."""
    enter_s: Float64s
    """(ranks, buckets) The reduction is on the device: it waits, or transfers."""
    begin_s: Float64s
    """(groups, buckets) The last member has entered."""
    done_s: Float64s
    """(groups, buckets)"""


Steer = Callable[[Passage], Steering | None]


@dataclass(frozen=True, slots=True)
class Run:
    """A simulated training. I iterations, R ranks, G groups, B buckets; D of them in detail, the last ones."""

    job: Job
    length_s: Float64s
    """(I,)"""
    compute_s: Float32s
    """(D, R) From the start to the end of computing, slowed by reductions."""
    work: Float32s
    """(D, R) Size of the rank's task relative to the usual."""
    ready_s: Float32s
    """(D, R, B)"""
    enter_s: Float32s
    """(D, R, B)"""
    begin_s: Float32s
    """(D, G, B)"""
    done_s: Float32s
    """(D, G, B)"""
    delay_s: Float32s
    """(D, R, B) As asked for by `steer`."""
    link_bytes: Float64s
    """(K,) What went over each link of the job."""
    peak: Float64s
    """(K,) Largest load of each link, relative to its capacity."""
    stream_bytes: Float64s
    """(S,) What each flow of the stream carried."""

    @property
    def variation(self) -> float:
        """Coefficient of variation of the iteration time."""
        return float(self.length_s.std() / self.length_s.mean())


@dataclass(frozen=True, slots=True)
class Task:
    """What the ranks have to do in one iteration."""

    segments_s: Float64s
    """(R, B) Undisturbed computing before each bucket is ready; forward is in the first."""
    work: Float64s
    """(R,) Relative size of the task."""


def tasks(setting: Setting, rng: np.random.Generator) -> Iterator[Task]:
    """The computing of all ranks, iteration after iteration, without end."""
    work, noise = setting.workload, setting.noise
    ranks, gpus, buckets = setting.ranks, setting.host.gpus, setting.workload.buckets
    usual = np.full(buckets, work.compute_s * (1 - work.forward_share) / buckets)
    usual[0] += work.compute_s * work.forward_share
    slots = np.arange(ranks) % gpus
    factor = np.ones(ranks)
    factor[np.isin(slots, setting.host.far_slots)] += setting.host.far_slowdown
    if noise.straggler is not None:
        factor[noise.straggler] *= 1 + noise.straggler_slowdown
    # Each kind of noise has dice of its own: with one switched off, the others fall as before.
    sizes, scatters, stalling = rng.spawn(3)
    while True:
        size = np.exp(noise.imbalance * sizes.standard_normal(ranks)) if noise.imbalance else np.ones(ranks)
        segments = (factor * size)[:, None] * usual[None, :]
        if noise.scatter:
            segments = segments * np.exp(noise.scatter * scatters.standard_normal(segments.shape))
        if noise.stalls is not None:
            _stall(segments, noise.stalls, work.forward_share, stalling)
        if work.layout == "tensor":
            # The devices of a host meet in every layer: each segment takes as long as the slowest of them.
            by_host = segments.reshape(setting.hosts, gpus, buckets).max(axis=1, keepdims=True)
            segments = np.broadcast_to(by_host, (setting.hosts, gpus, buckets)).reshape(ranks, buckets).copy()
        yield Task(segments, size)


def _stall(segments: Float64s, stalls: Stalls, forward_share: float, rng: np.random.Generator) -> None:
    """Lengthen some segments in place: of few ranks, at any point of their computing."""
    ranks, buckets = segments.shape
    hit = np.flatnonzero(rng.random(ranks) < stalls.rate)
    long_s = stalls.shortest_s * (1 - rng.random(len(hit))) ** (-1 / stalls.exponent)
    where = np.floor((rng.random(len(hit)) - forward_share) / (1 - forward_share) * buckets).clip(0, buckets - 1)
    segments[hit, where.astype(np.intp)] += np.minimum(long_s, stalls.longest_s)


def _ready(
    start_s: Float64s,
    work_s: Float64s,
    enter_s: Float64s,
    begin_s: Float64s,
    done_s: Float64s,
    waiting: float,
    moving: float,
) -> Float64s:
    """When each rank is through with `work_s` of computing begun at `start_s`, slower while a reduction is on its
    device. `enter_s`, `begin_s`, `done_s`: (ranks, reductions so far), in order."""
    now, left = start_s.copy(), work_s.copy()
    end = np.full(len(now), np.nan)
    first = int((done_s <= start_s[:, None]).all(axis=0).sum()) if done_s.shape[1] else 0
    for j in range(first, done_s.shape[1]):
        for until, pace in (
            (enter_s[:, j], 1.0),
            (begin_s[:, j], 1 / (1 + waiting)),
            (done_s[:, j], 1 / (1 + moving)),
        ):
            room = np.maximum(until - now, 0.0) * pace
            over = np.isnan(end) & (left <= room)
            end[over] = now[over] + left[over] / pace
            left = left - room
            now = np.maximum(now, until)
    return np.where(np.isnan(end), now + left, end)


class _Network:
    """Streams under way: owns what is left of each, and the account of links."""

    def __init__(self, job: Job, traffic: Traffic) -> None:
        self.job, self.traffic = job, traffic
        self.left = np.zeros(len(job.amount))
        self.active = np.zeros(len(job.amount), bool)
        self.rate = np.zeros(len(job.amount))
        self.link_bytes = np.zeros(len(job.capacity))
        self.stream_bytes = np.zeros(len(job.amount))
        self.peak = np.zeros(len(job.capacity))
        self._load = np.zeros(len(job.capacity))

    def begin(self, streams: Intps) -> None:
        self.left[streams] = self.job.amount[streams]
        self.active[streams] = True

    def share(self) -> None:
        """Rates from now on."""
        rows = np.flatnonzero(self.active)
        job = self.job
        usage = job.usage[rows]
        others = np.where(job.is_switch, self.traffic.flows, 0.0)
        flows = usage.sum(axis=0)
        # Where groups are one, its channels are the streams: one reduction, however many there are.
        reductions = (usage > 0).sum(axis=0) if len(job.groups) > 1 else np.ones(len(flows))
        capacity = goodput(job, flows + others, reductions)
        self.rate[:] = 0.0
        if len(rows):
            # A neighbour splits its flows as we do, so that all flows have equal rights.
            rights = others * job.setting.fabric.paths
            self.rate[rows] = max_min(usage, job.weight[rows], job.limit[rows], capacity, rights)
        self._load = self.rate[rows] @ usage
        np.maximum(self.peak, self._load / job.capacity, out=self.peak)

    def next_end(self) -> float:
        """Seconds until the first stream is through."""
        rows = self.active
        if not rows.any():
            return math.inf
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(np.where(self.left[rows] > 0, self.left[rows] / self.rate[rows], 0.0).min())

    def advance(self, duration: float) -> bool:
        """Let it flow; True if a stream is through."""
        moved = np.where(self.active, np.minimum(self.rate * duration, self.left), 0.0)
        self.left -= moved
        self.stream_bytes += moved
        self.link_bytes += self._load * duration
        # What takes less than a picosecond is rounding, and might be too short to move the clock.
        through = self.active & (self.left <= np.maximum(self.job.amount * _ROUNDING, self.rate * 1e-12))
        self.stream_bytes[through] += self.left[through]
        self.left[through] = 0.0
        self.active &= ~through
        return bool(through.any())


_ARRIVED, _RELEASED, _MOVES = 0, 1, 2


class _Iteration:
    """One iteration under way: owns how far each group is. Seconds are from its start, which all ranks share."""

    def __init__(self, network: _Network, task: Task, steering: Steering | None, start_s: float) -> None:
        self._network, self._job, self._task, self._steering = network, network.job, task, steering
        self._start_s = start_s
        work = self._job.setting.workload
        ranks, buckets, groups = self._job.setting.ranks, work.buckets, len(self._job.groups)
        self.ready, self.enter = np.zeros((ranks, buckets)), np.zeros((ranks, buckets))
        self.begin, self.done = np.zeros((groups, buckets)), np.full((groups, buckets), np.nan)
        self._at = [0] * groups
        self._open = [0] * groups
        self._held: set[int] = set()
        self._left = groups
        self._events: list[tuple[float, int, int, int]] = []  # when, what, group, bucket
        self._group_of = np.empty(len(self._job.amount), np.intp)
        for g, group in enumerate(self._job.groups):
            self._group_of[group.streams] = g
            self.ready[group.ranks, 0] = task.segments_s[group.ranks, 0]
            self._enters(g, 0.0)

    def run(self) -> None:
        """To its end."""
        network, traffic, now = self._network, self._network.traffic, 0.0
        while self._left:
            changed = False
            if network.active.any():
                other = traffic.next_change() - self._start_s
                event = self._events[0][0] if self._events else math.inf
                after = max(now, min(event, other, now + network.next_end()))
                was = network.active.copy()
                if network.advance(after - now):
                    changed = True
                    for s in np.flatnonzero(was & ~network.active):
                        g = int(self._group_of[s])
                        self._open[g] -= 1
                        if not self._open[g]:
                            self._is_done(g, after)
                now = after
                if other <= after:
                    changed = True
                    # Not to the sum of start and now: rounded down, it would leave the change ahead for ever.
                    traffic.move_to(traffic.next_change())
            else:
                now = max(now, self._events[0][0])
            traffic.move_to(self._start_s + now)
            while self._events and self._events[0][0] <= now:
                changed |= self._take(*heapq.heappop(self._events))
            if changed:
                network.share()

    def _enters(self, g: int, before_s: float) -> None:
        """The members go on to the group's next bucket: when ready, and through with the one before."""
        members, b = self._job.groups[g].ranks, self._at[g]
        if self._job.setting.workload.crowding:
            self._crowd(members, b, before_s)
        ready = self.ready[members, b]
        entered = np.maximum(ready, before_s)
        if self._steering is not None:
            entered = self._steered(g, b, ready, before_s)
        self.enter[members, b] = entered
        heapq.heappush(self._events, (float(entered.max()), _ARRIVED, g, b))

    def _steered(self, g: int, b: int, ready: Float64s, before_s: float) -> Float64s:
        """When the members enter that are ready then."""
        assert self._steering is not None
        delay, until = self._steering.delay_s[self._job.groups[g].ranks, b], self._steering.not_before_s
        if until is None:
            return np.asarray(np.maximum(ready, before_s) + delay)
        moment = until[g, b] if math.isfinite(until[g, b]) else 0.0
        return np.maximum(ready + np.clip(moment - ready, 0.0, delay), before_s)

    def _crowd(self, members: Intps, b: int, before_s: float) -> None:
        """Who still computes is slowed by those of its host that wait already; to the first order of `crowding`."""
        gpus = self._job.setting.host.gpus
        if gpus == 1 or self._job.setting.workload.layout == "tensor":
            return  # alone on its host as far as this group goes; in step with the others by the layout
        ready = self.ready[members, b]
        entered = np.maximum(ready, before_s) if self._steering is None else self._steered(0, b, ready, before_s)
        rows, entered = ready.reshape(-1, gpus), entered.reshape(-1, gpus)
        beside = np.maximum(rows[:, :, None] - entered[:, None, :], 0.0).sum(axis=2)
        self.ready[members, b] = (rows + self._job.setting.workload.crowding / (gpus - 1) * beside).ravel()

    def _take(self, now: float, what: int, g: int, b: int) -> bool:
        """One event; True if streams began."""
        if what == _MOVES:
            streams = self._job.groups[g].streams
            self._open[g] = len(streams)
            self._network.begin(streams)
            return True
        if what == _RELEASED:
            if g in self._held and self._at[g] == b:
                self._goes(g, now)
            return False
        first = self._first(g)
        if first >= 0 and math.isnan(self.done[first, b]):
            assert self._steering is not None
            self._held.add(g)
            heapq.heappush(self._events, (now + self._steering.patience_s, _RELEASED, g, b))
        else:
            self._goes(g, now)
        return False

    def _first(self, g: int) -> int:
        return int(self._steering.after[g]) if self._steering is not None else -1

    def _goes(self, g: int, now: float) -> None:
        self._held.discard(g)
        first, members, b = self._first(g), self._job.groups[g].ranks, self._at[g]
        if first >= 0 and self._steering is not None:
            # Each member has held back by itself, until the other group's was done or its patience was over.
            free = self.done[first, b] if not math.isnan(self.done[first, b]) else math.inf
            own = self.enter[members, b]
            self.enter[members, b] = np.minimum(np.maximum(own, free), own + self._steering.patience_s)
        self.begin[g, b] = now
        heapq.heappush(self._events, (now + self._job.groups[g].latency_s, _MOVES, g, b))

    def _is_done(self, g: int, now: float) -> None:
        members, b = self._job.groups[g].ranks, self._at[g]
        self.done[g, b] = now
        work = self._job.setting.workload
        if b + 1 == work.buckets:
            self._left -= 1
        else:
            shape = (len(members), b + 1)
            self.ready[members, b + 1] = _ready(
                self.ready[members, b],
                self._task.segments_s[members, b + 1],
                self.enter[members, : b + 1],
                np.broadcast_to(self.begin[g, : b + 1], shape),
                np.broadcast_to(self.done[g, : b + 1], shape),
                work.wait_slowdown,
                work.transfer_slowdown,
            )
            self._at[g] = b + 1
            self._enters(g, now)
        for other in [h for h in self._held if self._first(h) == g and self._at[h] == b]:
            self._goes(other, now)


def play(
    job: Job,
    each: Iterator[Task],
    traffic: Traffic,
    iterations: int,
    *,
    steer: Steer | None = None,
    detail: int = 64,
) -> Run:
    """Train for so many iterations. `steer` is called after each one with what could be seen of it."""
    network = _Network(job, traffic)
    optimizer_s = job.setting.workload.optimizer_s
    no_delay = np.zeros((job.setting.ranks, job.setting.workload.buckets))
    lengths = np.empty(iterations)
    kept: list[tuple[Passage, Task, Float64s]] = []
    steering: Steering | None = None
    clock_s = 0.0
    for step in range(iterations):
        task = next(each)
        going = _Iteration(network, task, steering, clock_s)
        going.run()
        length_s = max(float(going.done.max()), float(going.ready[:, -1].max())) + optimizer_s
        passage = Passage(step, length_s, going.ready, going.enter, going.begin, going.done)
        if step >= iterations - detail:
            kept.append((passage, task, steering.delay_s if steering is not None else no_delay))
        lengths[step] = length_s
        clock_s += length_s
        if steer is not None:
            steering = steer(passage)

    def column(values: list[Float64s]) -> Float32s:
        return np.array(values, np.float32)

    return Run(
        job=job,
        length_s=lengths,
        compute_s=column([p.ready_s[:, -1] for p, _, _ in kept]),
        work=column([t.work for _, t, _ in kept]),
        ready_s=column([p.ready_s for p, _, _ in kept]),
        enter_s=column([p.enter_s for p, _, _ in kept]),
        begin_s=column([p.begin_s for p, _, _ in kept]),
        done_s=column([p.done_s for p, _, _ in kept]),
        delay_s=column([d for _, _, d in kept]),
        link_bytes=network.link_bytes,
        peak=network.peak,
        stream_bytes=network.stream_bytes,
    )


def simulate(setting: Setting, iterations: int, seed: int, *, steer: Steer | None = None, detail: int = 64) -> Run:
    """Train on this setting. The same seed gives the same hosts, ways, computing and neighbours, however it is
    steered, so that two runs differ by the steering alone."""
    place, computing, neighbours = (np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(3))
    job = build(setting, place)
    traffic = Traffic(job, setting.noise.background, neighbours)
    return play(job, tasks(setting, computing), traffic, iterations, steer=steer, detail=detail)
