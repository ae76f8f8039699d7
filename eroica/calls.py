"""The group of each communication in a trace of gloo's, by what the flight ring of its rank tells of the calls.

NCCL's events carry their process group; gloo's are bare: `gloo:all_reduce`, on a thread that works for one group only.
The ring has the calls with their groups, sizes and partners (in a window all of them), and the threads that have told
the end of a call of each group. So the thread tells the group of a collective, and the order in which the threads of a
group took up their work tells the call; a send or receive is the call that was made just before it on the same thread.
Where that leaves a doubt, nothing is told: a group that is guessed makes a rank late that was not there.

Each communication that is known gets an event without length at its begin, as torch writes them for NCCL
(`record_param_comms` and its arguments), so that the file tells all to whoever reads it later. Used by `captures`.

Worked example. Group "tp" has the threads 51 and 52 and the calls A (all-reduce, at 10.0 ms), B (all-gather, at 10.1);
group "dp" thread 61 and C (all-reduce, at 9.9). The trace has all-reduces on 61 from 9.95 and on 52 from 10.2, and an
all-gather on 51 from 10.15. By order alone the all-reduce of 10.2 could be either; thread 52 makes it A.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eroica import ring
from eroica.communication import CollectiveKind, kind_of
from eroica.errors import DataError, UserError
from eroica.job import ProcessGroup, told_ranks
from eroica.probe import weave
from eroica.ring import Flight, Record, read_flight
from eroica.trace import Category, Trace, read_trace

NEAR_NS = 10_000
"""Kineto's clock and the probe's differ by some microseconds; a call follows on another after ten times as much."""
FEW_EVENTS = 5
"""Fewer say nothing about whose thread it is."""
NEARLY_ALL = 0.9
"""Of a thread's events must begin just behind a call of one group."""
AT_EDGES = 2
"""So many events may belong to calls from before the window: one per thread of a group."""

_MESSAGES = (CollectiveKind.SEND, CollectiveKind.RECV)
_DTYPES = {
    "float32": ("Float", 4), "float16": ("Half", 2), "bfloat16": ("BFloat16", 2), "float64": ("Double", 8),
    "int64": ("Long", 8), "int32": ("Int", 4), "int16": ("Short", 2), "int8": ("Char", 1), "uint8": ("Byte", 1),
    "bool": ("Bool", 1), "float8_e4m3fn": ("Float8_e4m3fn", 1), "float8_e5m2": ("Float8_e5m2", 1),
    "complex64": ("ComplexFloat", 8), "complex128": ("ComplexDouble", 16),
}  # fmt: skip
"""By the ring's name: torch's in traces, and bytes."""


@dataclass(frozen=True, slots=True)
class Call:
    """What the ring tells of one communication of a trace."""

    event: int
    """Row in the trace."""
    group: ProcessGroup
    record: Record | None
    """None: the group is known by the thread, and the call is not."""


def read_told(path: str, rank: int, flight_path: str, shift_ns: int) -> Trace:
    """The trace at `path`, with what the ring at `flight_path` tells of its communication, which is written into the
    file. `shift_ns`: from CLOCK_MONOTONIC to the clock of the trace, ns since 1970.

    A ring that cannot be read, or a file that cannot be written, leaves the trace as it is. Raises as `read_trace` does
    where the trace cannot be read.
    """
    trace = read_trace(path, rank=rank)
    if not _bare(trace).size or not trace.epoch:
        return trace
    try:
        told = calls_of(trace, read_flight(Path(flight_path)), shift_ns)
        if told:
            weave.weave(path, _events(trace, told, weave.base_ns(path)))
    except (OSError, DataError, UserError, weave.Incomplete):
        return trace
    return read_trace(path, rank=rank) if told else trace


def calls_of(trace: Trace, flight: Flight, shift_ns: int) -> list[Call]:
    """Calls of the communications that a trace tells no group of, as far as they are certain; in the order of rows."""
    rows = _bare(trace)
    groups = _groups(trace, flight)
    if not len(rows) or not groups:
        return []
    since_ns = int(trace.ts_ns[0]) - NEAR_NS
    records = sorted(
        (
            replace(record, begin_ns=record.begin_ns + shift_ns)
            for record in flight.records
            if record.kind in (ring.COLLECTIVE, ring.P2P)
            and record.begin_ns + shift_ns >= since_ns
            and record.group in groups
            and record.op < len(ring.OPS)
        ),
        key=lambda record: record.begin_ns,
    )
    kinds = trace.collectives.kind[np.searchsorted(trace.collectives.event, rows)]
    is_message = np.isin(kinds, _MESSAGES)
    messages = [record for record in records if record.kind == ring.P2P]
    collectives = [record for record in records if record.kind == ring.COLLECTIVE]
    if (trace.category == Category.KERNEL).any():
        # Calls for a device are NCCL's; the ends of these cannot be seen.
        collectives = [record for record in collectives if record.duration_ns is not None]
    threads = {str(note["thread"]): ring.group_key(note.get("works_for")) for note in flight.notes if "thread" in note}
    found = [
        *_by_thread(trace, rows[~is_message], kinds[~is_message], collectives, groups, threads),
        *_by_caller(trace, rows[is_message], kinds[is_message], messages, groups),
    ]
    return sorted(found, key=lambda call: call.event)


def _bare(trace: Trace) -> npt.NDArray[np.intp]:
    """Rows of gloo's events without a group."""
    table = trace.collectives
    rows: npt.NDArray[np.intp] = table.event[table.transfers & (table.group < 0)].astype(np.intp)
    bare: npt.NDArray[np.intp] = rows[trace.category[rows] == Category.ANNOTATION]
    return bare


def _groups(trace: Trace, flight: Flight) -> dict[int, ProcessGroup]:
    """By the ring's key, those that the trace does not know as others: names are used again when a group has gone."""
    known = {group.name: group.ranks for group in trace.groups if group.ranks}
    found = {}
    for note in flight.notes:
        key = ring.group_key(note.get("group"))
        if not key:
            continue
        text = str(note.get("ranks", ""))
        ranks = told_ranks(text)
        if text and not ranks:
            continue
        name, size = str(note.get("name", "")), note.get("size")
        if not ranks or known.get(name, ranks) == ranks:
            found[key] = ProcessGroup(
                name, str(note.get("description", "")), ranks, size if isinstance(size, int) else len(ranks)
            )
    return found


@dataclass(frozen=True, slots=True)
class _Work:
    """A collective as a thread of gloo's did it."""

    row: int
    kind: CollectiveKind
    begin_ns: int


def _by_thread(
    trace: Trace,
    rows: npt.NDArray[np.intp],
    kinds: npt.NDArray[np.uint8],
    records: Sequence[Record],
    groups: Mapping[int, ProcessGroup],
    threads: Mapping[str, int],
) -> Iterator[Call]:
    """Collectives, by the thread that did them, in the order in which its group took up the calls."""
    work: dict[str, list[_Work]] = defaultdict(list)
    for row, kind in zip(rows.tolist(), kinds.tolist(), strict=True):
        work[trace.tracks[trace.track[row]][1]].append(_Work(row, CollectiveKind(kind), int(trace.ts_ns[row])))
    scatters = CollectiveKind.REDUCE_SCATTER in kinds
    asked: dict[int, dict[CollectiveKind, list[Record]]] = {key: defaultdict(list) for key in groups}
    for record in records:
        kind = kind_of(ring.OPS[record.op])
        if kind == CollectiveKind.REDUCE_SCATTER and not scatters:
            kind = CollectiveKind.ALL_REDUCE  # gloo makes one of the other
        asked[record.group][kind].append(record)
    done: dict[int, list[_Work]] = {key: [] for key in groups}
    strangers = []
    for thread, mine in work.items():
        if thread not in threads:
            strangers.append(mine)
        elif threads[thread] in groups:
            done[threads[thread]] += mine
    for key, mine in _inferred(strangers, done, asked):
        done[key] += mine
    for key, mine in done.items():
        for kind in {each.kind for each in mine}:
            ordered = sorted((each for each in mine if each.kind == kind), key=lambda each: each.begin_ns)
            for each, call in zip(ordered, _taken_up(ordered, asked[key][kind]), strict=True):
                yield Call(each.row, groups[key], call)


def _inferred(
    strangers: Sequence[list[_Work]],
    done: Mapping[int, Sequence[_Work]],
    asked: Mapping[int, Mapping[CollectiveKind, Sequence[Record]]],
) -> list[tuple[int, list[_Work]]]:
    """Groups of threads that never told an end, as those that do nothing but reduce-scatters: one that has as many
    calls left over, and one only, or whose calls come just before nearly all of what the thread did.

    Wrong only where two groups have calls left over that are always made in the same order at one moment; then their
    threads ask for more calls of one of them than it has, and neither is told.
    """
    found: list[tuple[int, list[_Work]]] = []
    num_calls = sum(len(calls) for kinds in asked.values() for calls in kinds.values())
    num_done = sum(len(mine) for mine in (*strangers, *done.values()))
    if num_calls < num_done - AT_EDGES * len(asked):
        return found  # not all calls were recorded: what is left over says nothing
    left = {key: {kind: len(calls) for kind, calls in kinds.items()} for key, kinds in asked.items()}
    for key, known in done.items():
        for each in known:
            left[key][each.kind] = left[key].get(each.kind, 0) - 1
    for mine in strangers:
        counts = Counter(each.kind for each in mine)
        able = [
            key
            for key, kinds in left.items()
            if all(_is_enough(kinds.get(kind, 0), num) for kind, num in counts.items())
        ]
        if len(mine) < FEW_EVENTS:
            continue
        if len(able) > 1:
            votes = Counter(_latest(each, able, asked) for each in mine)
            key, num = votes.most_common(1)[0]
            able = [key] if num >= NEARLY_ALL * len(mine) else []
        if len(able) == 1 and able[0]:
            found.append((able[0], mine))
    for key in {key for key, _ in found}:
        counts = Counter(each.kind for of, mine in found if of == key for each in mine)
        if not all(_is_enough(left[key].get(kind, 0), num) for kind, num in counts.items()):
            found = [(of, mine) for of, mine in found if of != key]
    return found


def _is_enough(num_calls: int, num_events: int) -> bool:
    return num_calls >= num_events - AT_EDGES and 2 * num_calls >= num_events


def _latest(work: _Work, keys: Sequence[int], asked: Mapping[int, Mapping[CollectiveKind, Sequence[Record]]]) -> int:
    """The group whose call was made last before this began and may be it; 0 = none."""
    best_ns, best = 0, 0
    for key in keys:
        calls = asked[key].get(work.kind, ())
        at = bisect_right(calls, work.begin_ns + NEAR_NS, key=lambda call: call.begin_ns)
        while at and _is_over(calls[at - 1], work.begin_ns - NEAR_NS):
            at -= 1
        if at and calls[at - 1].begin_ns > best_ns:
            best_ns, best = calls[at - 1].begin_ns, key
    return best


def _taken_up(work: Sequence[_Work], calls: Sequence[Record]) -> Iterator[Record | None]:
    """For each event (of one kind, ascending) the first call that no earlier event has taken, made before it began and
    not over by then. Where two threads take up two calls at once this may exchange them, and does so on all ranks."""
    waiting: list[Record] = []
    next_call = 0
    for each in work:
        while next_call < len(calls) and calls[next_call].begin_ns <= each.begin_ns + NEAR_NS:
            waiting.append(calls[next_call])
            next_call += 1
        waiting = [call for call in waiting if not _is_over(call, each.begin_ns - NEAR_NS)]
        yield waiting.pop(0) if waiting else None


def _is_over(call: Record, at_ns: int) -> bool:
    return call.duration_ns is not None and call.begin_ns + call.duration_ns < at_ns


def _by_caller(
    trace: Trace,
    rows: npt.NDArray[np.intp],
    kinds: npt.NDArray[np.uint8],
    records: Sequence[Record],
    groups: Mapping[int, ProcessGroup],
) -> Iterator[Call]:
    """Sends and receives, whose events begin on the calling thread, within the operator that our record begins in."""
    table = trace.collectives
    operators = table.event[~table.transfers & np.isin(table.kind, _MESSAGES)].astype(np.intp)
    operators = operators[trace.category[operators] == Category.CPU_OP]
    of_track: dict[int, list[int]] = defaultdict(list)
    for row in operators.tolist():
        of_track[int(trace.track[row])].append(row)
    begins = [record.begin_ns for record in records]
    for row, kind in zip(rows.tolist(), kinds.tolist(), strict=True):
        begin_ns = int(trace.ts_ns[row])
        callers = of_track[int(trace.track[row])]
        at = bisect_left(callers, row) - 1
        if at < 0 or trace.ts_ns[callers[at]] + trace.dur_ns[callers[at]] < begin_ns:
            continue
        low, high = int(trace.ts_ns[callers[at]]) - NEAR_NS, begin_ns + NEAR_NS
        near = [
            record
            for record in records[bisect_left(begins, low) : bisect_left(begins, high)]
            if kind_of(ring.OPS[record.op]) == kind
        ]
        if len({(record.group, record.peer, record.num_bytes) for record in near}) == 1:
            yield Call(row, groups[near[0].group], near[0])


def _events(trace: Trace, calls: Sequence[Call], base_ns: int) -> Iterator[str]:
    """As torch writes them for NCCL, each at the begin of the event that it tells of."""
    listed = {group.name for group in trace.groups if group.ranks}
    for call in calls:
        pid, tid = trace.tracks[trace.track[call.event]]
        if not pid.isdecimal() or not tid.isdecimal():
            continue
        at_ns = int(trace.ts_ns[call.event])
        told = json.dumps(_arguments(call, trace.strings[trace.name[call.event]], call.group.name in listed))[1:-1]
        yield weave.event("user_annotation", "record_param_comms", int(pid), int(tid), at_ns, at_ns, base_ns, told)


def _arguments(call: Call, name: str, is_listed: bool) -> dict[str, object]:
    group, record = call.group, call.record
    told: dict[str, object] = {
        "Collective name": name.partition(":")[2] if record is None else ring.OPS[record.op],
        "Process Group Name": group.name,
        "Process Group Description": group.description,
        "Group size": group.size,
    }
    if not is_listed and group.ranks:
        told["Process Group Ranks"] = str(list(group.ranks))
    if record is None:
        return told
    told["Seq"] = record.sequence
    if record.dtype < len(ring.DTYPES) and (dtype := _DTYPES.get(ring.DTYPES[record.dtype])) is not None:
        told["dtype"] = dtype[0]
        if kind_of(ring.OPS[record.op]) != CollectiveKind.ALL_TO_ALL:  # its parts, which may differ, are not recorded
            told["In msg nelems"] = record.num_bytes // dtype[1]
    if record.kind == ring.P2P and 0 <= record.peer < len(group.ranks):
        to = "Dst Rank" if ring.OPS[record.op] == "send" else "Src Rank"
        told[to] = group.ranks[record.peer]
    return told
