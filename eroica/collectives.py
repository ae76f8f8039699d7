"""The ledger: where one rank's iterations went, and how long it was in the same collectives as the others.

One rank first (`ledger_of`): per iteration its own work, exposed communication, waiting and idleness; and for a sample
of at most 224 communications, the same on every rank by a rule that needs no talk, duration, exposed part and the work
done before it. Then the join over ranks (`join`): the transfer is the shortest duration among the members, what a rank
spent beyond it is waiting (clock-free; the last to arrive has the shortest duration). Only operations in which every
member waits for every other are joined. Not here: who is to blame (`diagnosis`).
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eroica.critical_path import OWN_WORK, Activity, CriticalPath, Int32s, UInt8s
from eroica.intervals import Int64s
from eroica.job import group_key
from eroica.trace import Category, CollectiveKind, Trace

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]

MAX_ITERATIONS = 64
"""Longer windows are folded: means over neighbours. 64 x 13 bytes leave room for the samples in 4 KB."""
MAX_SAMPLES = 224
"""Communications told one by one; 12 bytes each, so that a ledger stays below 4 KB."""
MAX_GROUPS = 16
"""Groups told apart; the ones with the least exposed time are left out and counted in `dropped_groups`."""

JOINABLE = frozenset(
    {
        CollectiveKind.ALL_REDUCE,
        CollectiveKind.ALL_GATHER,
        CollectiveKind.REDUCE_SCATTER,
        CollectiveKind.BARRIER,
        CollectiveKind.ALL_TO_ALL,
    }
)
"""Every member waits for every other. Broadcast, reduce, gather and scatter have members that go on at once."""
POINT_TO_POINT = frozenset({CollectiveKind.SEND, CollectiveKind.RECV})


@dataclass(frozen=True, slots=True)
class Channel:
    """A process group, or one direction between two ranks, as all of its members name it."""

    key: str
    """Equal on all members: "0-3", "0>4", or the description where the members are not told."""
    description: str
    size: int
    """Members; 0 = not told."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """One rank's account. I iterations, C channels, S samples. Seconds."""

    steps: Int64s
    """(I,) Step numbers."""
    length_s: Float32s
    """(I,)"""
    own_s: Float32s
    """(I,) Owned by own work; exposed transfer is not in it."""
    exposed_s: Float32s
    """(I,) Owned by joinable collectives: transfer and waiting together."""
    waiting_s: Float32s
    """(I,) Owned by sends, receives, waits, and by collectives that cannot be joined."""
    top_function: Int32s
    """(I,) Index, in the rank's patterns, of the function that exceeded its own lower quartile most; -1 = none."""
    top_excess_s: Float32s
    """(I,) By how much."""
    top_by_work: Float32s
    """(I,) Share of that excess, 0..1, that more work in the step explains; NaN = the function does not tell its
    work."""
    channels: tuple[Channel, ...]
    channel_count: Float32s
    """(C,) Communications per iteration."""
    channel_exposed_s: Float32s
    """(C,) Exposed time per iteration."""
    channel_bytes: Float64s
    """(C,) Bytes of payload per iteration; NaN = not told."""
    step: Int64s
    """(S,) Step number of each sample; samples are in the order in which the rank entered them."""
    channel: Int32s
    """(S,)"""
    position: Int32s
    """(S,) Place among the channel's communications of that step."""
    kind: UInt8s
    """(S,) CollectiveKind."""
    check: Int64s
    """(S,) 16-bit hash of (operation, dtype, elements): equal on all members, or the channel is not joinable (of an
    all-to-all: this one is not). 0 = not told, and equal to any."""
    work_before_s: Float32s
    """(S,) Own work between the entry of the sample before (or the iteration's start) and this entry."""
    duration_s: Float32s
    """(S,) Entry to done."""
    sample_exposed_s: Float32s
    """(S,) The part that neither own work nor an earlier communication hides."""
    in_flight: Int32s
    """(S,) Earlier samples of the same step that were not done when this one was entered: what a replay must not wait
    for."""
    complete_steps: Int64s
    """Steps of which every communication is among the samples."""
    dropped_channels: int = 0


_DTYPE_BYTES = {
    "Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2, "Byte": 1, "Char": 1, "Bool": 1,
    "ComplexFloat": 8, "ComplexDouble": 16, "Float8_e4m3fn": 1, "Float8_e5m2": 1,
}  # fmt: skip


def _hash(text: str) -> int:
    return zlib.crc32(text.encode())


def _mix(values: Int64s) -> Int64s:
    """A fixed pseudo-random order of small integers (Fibonacci hashing), the same on every rank."""
    return ((values.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(33)).astype(np.int64)


def _channel_of(trace: Trace, row: int, is_told: bool) -> Channel:
    """`is_told`: of some of gloo's communications the trace tells the group."""
    table = trace.collectives
    kind, peer, group = int(table.kind[row]), int(table.peer[row]), int(table.group[row])
    me = trace.rank if trace.rank is not None else -1
    if kind in POINT_TO_POINT and peer >= 0:
        ends = (me, peer) if kind == CollectiveKind.SEND else (peer, me)
        return Channel(f"{ends[0]}>{ends[1]}", "point to point", 2)
    if group >= 0:
        known = trace.groups[group]
        return Channel(
            group_key(known.name, known.description, known.ranks), known.description, known.size or len(known.ranks)
        )
    if is_told and trace.category[table.event[row]] == Category.ANNOTATION:
        # What was not told beside others that were is no group: on each rank it may be another one's.
        return Channel(f"untold of rank {me}", "", 0)
    return Channel("default", "", 0)


def _iteration_of(trace: Trace, path: CriticalPath, rows: npt.NDArray[np.intp]) -> Int64s:
    """Iteration in which each communication was asked for: by its launch on the host where that is known, since a
    device may run behind its host by a different lead on each rank."""
    asked = trace.ts_ns[rows].copy()
    on_device = (trace.category[rows] == Category.KERNEL) & (trace.correlation[rows] > 0)
    callers = np.flatnonzero((trace.category == Category.RUNTIME) & (trace.correlation > 0))
    if on_device.any() and len(callers):
        ids = trace.correlation[callers]
        order = np.argsort(ids, kind="stable")
        at = np.minimum(np.searchsorted(ids[order], trace.correlation[rows]), len(ids) - 1)
        found = on_device & (ids[order][at] == trace.correlation[rows])
        asked[found] = trace.ts_ns[callers[order][at[found]]]
    return np.searchsorted(path.iterations.bounds_ns, asked, side="right") - 1


def _fold(values: Float64s, count: int) -> Float32s:
    """Mean over runs of neighbours so that at most `count` remain."""
    return _means(values, count).astype(np.float32)


def _means(values: Float64s, count: int) -> Float64s:
    if len(values) <= count:
        return values
    edges = np.linspace(0, len(values), count + 1).astype(int)[:-1]
    sizes = np.diff(np.append(edges, len(values)))
    return np.asarray(np.add.reduceat(values, edges) / sizes, np.float64)


@dataclass(frozen=True, slots=True)
class Peaks:
    """Per iteration of one rank the function that exceeded its own lower quartile most. Shapes (iterations,)."""

    function: Int32s
    """Index in the rank's patterns; -1 = none."""
    excess_s: Float64s
    by_work: Float64s
    """Share of the excess that more work explains; NaN = not told."""


def ledger_of(trace: Trace, path: CriticalPath, peaks: Peaks) -> Ledger:
    """Account of one rank."""
    iterations = path.iterations
    count = iterations.count
    owned_s = path.owned_ns / 1e9
    by_activity = np.zeros((count, len(Activity)))
    np.add.at(by_activity, (path.iteration, path.activity), owned_s)
    length = np.diff(iterations.bounds_ns) / 1e9
    own = by_activity[:, sorted(OWN_WORK)].sum(1)

    table = trace.collectives
    picked = np.flatnonzero(table.transfers & (table.kind != CollectiveKind.WAIT))
    rows = table.event[picked].astype(np.intp)
    picked = picked[np.argsort(trace.ts_ns[rows], kind="stable")]
    rows = table.event[picked].astype(np.intp)
    iteration = _iteration_of(trace, path, rows)
    inside = (iteration >= 0) & (iteration < count)
    picked, rows, iteration = picked[inside], rows[inside], iteration[inside]

    exposed_by_row = np.zeros(len(trace))
    mine = path.activity == Activity.COLLECTIVE
    np.add.at(exposed_by_row, path.event[mine], owned_s[mine])
    event_kind = np.zeros(len(trace), np.uint8)
    event_kind[table.event] = table.kind
    uneven = np.zeros(len(trace), bool)
    uneven[table.event[table.uneven]] = True
    joinable = np.isin(event_kind, list(JOINABLE)) & ~uneven
    by_joinable = np.zeros((count, 2))
    np.add.at(by_joinable, (path.iteration[mine], joinable[path.event[mine]].astype(int)), owned_s[mine])
    waiting = by_joinable[:, 0] + by_activity[:, Activity.WAIT]

    channels: dict[Channel, int] = {}
    is_told = bool((table.group[picked][trace.category[rows] == Category.ANNOTATION] >= 0).any())
    channel = np.array(
        [channels.setdefault(_channel_of(trace, int(r), is_told), len(channels)) for r in picked], np.int32
    )
    names = tuple(channels)
    exposed_s, duration_s = exposed_by_row[rows], trace.dur_ns[rows] / 1e9
    per_channel = (
        np.bincount(channel, weights=exposed_s, minlength=len(names)) if len(channel) else np.zeros(len(names))
    )
    dropped = 0
    if len(names) > MAX_GROUPS:
        keep = np.sort(np.argsort(-per_channel, kind="stable")[:MAX_GROUPS])
        dropped = len(names) - MAX_GROUPS
        number = np.full(len(names), -1, np.int32)
        number[keep] = np.arange(MAX_GROUPS)
        names = tuple(names[i] for i in keep)
        inside = number[channel] >= 0
        picked, rows, iteration, exposed_s, duration_s = (
            picked[inside],
            rows[inside],
            iteration[inside],
            exposed_s[inside],
            duration_s[inside],
        )
        channel, per_channel = number[channel[inside]], per_channel[keep]

    position = _positions(channel, iteration, table.sequence[picked], iterations.by == "window")
    kind = table.kind[picked]
    check = np.array(
        [
            _hash(f"{k} {trace.strings[d] if d >= 0 else ''} {e}") % 0xFFFF + 1
            for k, d, e in zip(kind, table.dtype[picked], table.in_elements[picked], strict=True)
        ],
        np.int64,
    )
    # Of a few the operation may not be told, where it is told of the others.
    is_known = table.dtype[picked] >= 0
    check[~is_known & np.isin(channel, channel[is_known])] = 0
    elements = np.maximum(table.in_elements[picked], table.out_elements[picked]).astype(np.float64)
    width = np.array([_DTYPE_BYTES.get(trace.strings[d], 0) if d >= 0 else 0 for d in table.dtype[picked]])
    payload = np.where((elements >= 0) & (width > 0), elements * width, np.nan)
    step = iterations.steps[np.maximum(iteration, 0)] if count else iteration
    chosen, complete = sample(step, channel, position, names)
    measure = path.work.measure(np.append(iterations.bounds_ns[:1], trace.ts_ns[rows])) / 1e9
    start_of = path.work.measure(iterations.bounds_ns[:-1]) / 1e9
    before = np.empty(len(rows))
    order_rows = np.flatnonzero(chosen)
    in_flight = np.zeros(len(rows), np.int32)
    previous_step, previous = -1, 0.0
    open_until: list[int] = []
    for r in order_rows:
        entered, now = measure[r + 1], int(trace.ts_ns[rows[r]])
        if iteration[r] != previous_step:
            previous_step, previous = int(iteration[r]), float(start_of[iteration[r]])
            open_until = []
        before[r] = max(entered - previous, 0.0)
        previous = float(entered)
        open_until = [t for t in open_until if t > now]
        in_flight[r] = min(len(open_until), 255)
        open_until.append(now + int(trace.dur_ns[rows[r]]))
    # Of neighbours in one, the function is that of the longest peak, which makes their mean what it is.
    edges = np.linspace(0, count, min(count, MAX_ITERATIONS) + 1).astype(int)
    kept = np.array([a + int(peaks.excess_s[a:b].argmax()) for a, b in itertools.pairwise(edges.tolist())], np.intp)
    return Ledger(
        # Numbers, of which 32 bits of a float would hold 24: from step 16,777,216 on two would be one.
        steps=_means(iterations.steps.astype(np.float64), MAX_ITERATIONS).astype(np.int64),
        length_s=_fold(length, MAX_ITERATIONS),
        own_s=_fold(own, MAX_ITERATIONS),
        exposed_s=_fold(by_joinable[:, 1], MAX_ITERATIONS),
        waiting_s=_fold(waiting, MAX_ITERATIONS),
        top_function=peaks.function[kept],
        top_excess_s=_fold(peaks.excess_s, MAX_ITERATIONS),
        top_by_work=peaks.by_work[kept].astype(np.float32),
        channels=names,
        channel_count=(np.bincount(channel, minlength=len(names)) / max(count, 1)).astype(np.float32),
        channel_exposed_s=(per_channel / max(count, 1)).astype(np.float32),
        channel_bytes=np.array(
            [
                np.nansum(payload[channel == c]) / max(count, 1) if np.isfinite(payload[channel == c]).any() else np.nan
                for c in range(len(names))
            ]
        ),
        step=step[chosen],
        channel=channel[chosen],
        position=position[chosen],
        kind=kind[chosen],
        check=check[chosen],
        work_before_s=before[chosen].astype(np.float32),
        duration_s=duration_s[chosen].astype(np.float32),
        sample_exposed_s=exposed_s[chosen].astype(np.float32),
        in_flight=in_flight[chosen],
        complete_steps=complete,
        dropped_channels=dropped,
    )


def _positions(channel: Int32s, iteration: Int64s, sequence: Int64s, by_sequence: bool) -> Int32s:
    """Place of each communication among those of its channel and iteration, in order of the calls where these are
    numbered, else of entry: several threads may take up two calls at once, in another order on each rank.

    Without iteration markers the sequence number is the place, where the trace has one: windows of different ranks
    need not start at the same communication.
    """
    if by_sequence and len(sequence) and bool((sequence >= 0).all()):
        return (sequence & 0x7FFF).astype(np.int32)
    group = iteration * (MAX_GROUPS * 64) + channel
    untold = np.zeros(int(channel.max(initial=-1)) + 1, bool)
    untold[channel[sequence < 0]] = True
    order = np.lexsort((np.where(untold[channel], 0, sequence), group))
    place = np.empty(len(group), np.int32)
    sorted_group = group[order]
    first = np.searchsorted(sorted_group, sorted_group, side="left")
    place[order] = np.arange(len(group)) - first
    return place


def sample(
    step: Int64s, channel: Int32s, position: Int32s, names: Sequence[Channel], limit: int = MAX_SAMPLES
) -> tuple[npt.NDArray[np.bool_], Int64s]:
    """At most `limit` communications, and the steps that are among them completely.

    Whole steps first, in a fixed pseudo-random order of step numbers; within a step by a hash of (channel, position).
    The choice of a rank with more communications is therefore a subset of its peers' choices: nothing needs to be
    agreed.
    """
    if len(step) <= limit:
        return np.ones(len(step), bool), np.unique(step)
    keys = np.array([_hash(name.key) for name in names], np.int64)
    within = _mix(keys[channel] * 65536 + position)
    order = np.lexsort((within, _mix(step + 1)))
    chosen = np.zeros(len(step), bool)
    chosen[order[:limit]] = True
    left_out = np.unique(step[~chosen])
    return chosen, np.setdiff1d(np.unique(step[chosen]), left_out)


@dataclass(frozen=True, slots=True)
class Joined:
    """Communications of many ranks, matched. M matched rows over all ranks; K distinct communications; P ranks in their
    channels."""

    rank: Int32s
    """(M,) Index of the rank (not its number)."""
    sample: Int32s
    """(M,) Row within that rank's samples."""
    member: Int32s
    """(M,) Index of (channel, rank), 0..P-1."""
    which: Int32s
    """(M,) Index of the communication, 0..K-1; ascending."""
    exposed_s: Float64s
    """(M,) What nothing hides of it."""
    transfer_s: Float64s
    """(K,) Shortest duration among its members."""
    member_channel: Int32s
    """(P,) Ascending."""
    member_rank: Int32s
    """(P,) Index of the rank; ascending within a channel."""
    wait_s: Float64s
    """(M,) Duration beyond the transfer."""
    members: Int32s
    """(K,) Ranks that reported it."""
    channel: Int32s
    """(K,) Index into `channels`; ascending."""
    step: Int64s
    """(K,) Ascending within a channel."""
    position: Int32s
    """(K,)"""
    kind: Int32s
    """(K,) CollectiveKind."""
    check: Int64s
    """(K,) See `Ledger.check`."""
    exposed_wait_s: Float64s
    """(M,) The part of the wait that nothing hides."""
    channels: tuple[Channel, ...]
    not_joinable: tuple[str, ...]
    """Sentences: channels whose members disagree about what they did."""


_IS_JOINABLE = np.isin(np.arange(256), [int(kind) for kind in JOINABLE])
"""By number of the kind: to look it up is ten times as fast as `np.isin` for each of a million ranks."""


def join(ledgers: Sequence[Ledger]) -> Joined:
    """Match the sampled collectives of all ranks by (channel, step, position), checked by operation, dtype and size.

    All ranks at once, as columns: with a million of them a few calls of numpy for each rank would take minutes.
    """
    numbers: dict[Channel, int] = {}
    codes = np.array([numbers.setdefault(c, len(numbers)) for ledger in ledgers for c in ledger.channels], np.int64)
    names = tuple(numbers)
    every = np.arange(len(ledgers), dtype=np.int32)
    num_samples = np.array([len(ledger.kind) for ledger in ledgers], np.int64)
    num_channels = np.array([len(ledger.channels) for ledger in ledgers], np.int64)
    kind = end_to_end([ledger.kind for ledger in ledgers], np.uint8)
    rows = np.flatnonzero(_IS_JOINABLE[kind])
    if not len(rows):
        empty32, empty64, emptyf = np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0)
        return Joined(
            *(empty32, empty32, empty32, empty32, emptyf, emptyf, empty32, empty32, emptyf, empty32),
            *(empty32, empty64, empty32, empty32, empty64, emptyf, names, ()),
        )
    rank = np.repeat(every, num_samples)[rows]
    sample = (rows - (np.cumsum(num_samples) - num_samples)[rank]).astype(np.int32)
    own = end_to_end([ledger.channel for ledger in ledgers], np.int32)[rows]
    pair = (np.cumsum(num_channels) - num_channels)[rank] + own
    channel = codes[pair]
    step = end_to_end([ledger.step for ledger in ledgers], np.int64)[rows]
    position = end_to_end([ledger.position for ledger in ledgers], np.int32)[rows]
    order = _order(channel, step, position)
    rows, rank, sample, pair = rows[order], rank[order], sample[order], pair[order]
    channel, step, position = channel[order], step[order], position[order]
    duration = end_to_end([ledger.duration_s for ledger in ledgers], np.float32)[rows].astype(np.float64)
    exposed = end_to_end([ledger.sample_exposed_s for ledger in ledgers], np.float32)[rows].astype(np.float64)
    check = end_to_end([ledger.check for ledger in ledgers], np.int64)[rows]
    kind = kind[rows]
    new = np.ones(len(rank), bool)
    new[1:] = (channel[1:] != channel[:-1]) | (step[1:] != step[:-1]) | (position[1:] != position[:-1])
    first = np.flatnonzero(new)
    which = np.cumsum(new) - 1
    members = np.diff(np.append(first, len(rank)))
    low, high = np.minimum.reduceat(np.where(check > 0, check, 1 << 16), first), np.maximum.reduceat(check, first)
    differs = low < high
    # Of an all-to-all the sizes may differ, which says nothing against the others of its group.
    is_exchange = np.logical_and.reduceat(kind == CollectiveKind.ALL_TO_ALL, first)
    torn = np.unique(channel[first][differs & ~is_exchange])
    notes = tuple(
        f"collectives of group {names[c].key} ({names[c].description or 'no description'}) are not joined: its members "
        "disagree on operation or size"
        for c in torn
    )
    good_k = (members >= 2) & ~differs & ~np.isin(channel[first], torn)
    keep = good_k[which]
    renumber = np.cumsum(good_k) - 1
    transfer = np.minimum.reduceat(duration, first)
    wait = duration - transfer[which]
    exposed_wait = np.minimum(wait, np.maximum(exposed - np.minimum(transfer[which], exposed), 0.0))
    # Who takes part in what, once each, by channel and rank.
    seen = np.zeros(len(codes), bool)
    seen[pair[keep]] = True
    met, back = np.unique(codes[seen] * len(ledgers) + np.repeat(every, num_channels)[seen], return_inverse=True)
    number = np.full(len(codes), -1, np.int32)
    number[seen] = back
    return Joined(
        rank=rank[keep],
        sample=sample[keep],
        member=number[pair[keep]],
        which=renumber[which[keep]].astype(np.int32),
        exposed_s=exposed[keep],
        transfer_s=transfer[good_k],
        member_channel=(met // len(ledgers)).astype(np.int32),
        member_rank=(met % len(ledgers)).astype(np.int32),
        wait_s=wait[keep],
        members=members[good_k].astype(np.int32),
        channel=channel[first][good_k].astype(np.int32),
        step=step[first][good_k],
        position=position[first][good_k].astype(np.int32),
        kind=kind[first][good_k].astype(np.int32),
        check=check[first][good_k],
        exposed_wait_s=exposed_wait[keep],
        channels=names,
        not_joinable=notes,
    )


def end_to_end(columns: Sequence[npt.NDArray[Any]], dtype: type) -> npt.NDArray[Any]:
    """Columns of many ranks as one."""
    return np.concatenate(columns).astype(dtype, copy=False) if columns else np.empty(0, dtype)


def _order(channel: Int64s, step: Int64s, position: Int32s) -> npt.NDArray[np.intp]:
    """`np.lexsort((position, step, channel))`, by one key where the three fit into one."""
    sizes = [int(column.max()) - int(column.min()) + 1 for column in (channel, step, position)]
    if sizes[0] * sizes[1] * sizes[2] >= 1 << 62:
        return np.lexsort((position, step, channel))
    key = ((channel - channel.min()) * sizes[1] + (step - step.min())) * sizes[2] + (position - position.min())
    return np.argsort(key, kind="stable")
