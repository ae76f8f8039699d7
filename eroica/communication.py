"""Recognises communication among a trace's events, and finds its metadata: kind, group, sequence, sizes.

Not the join over ranks (that is `collectives`): one rank's events only. Used by `trace`. Names come first, since old
traces and custom kernels have nothing else; metadata wins where it is told. RULES is a table that a job can extend
by a file named in EROICA_COLLECTIVES, since every framework writes its own all-reduce kernel sooner or later.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eroica.errors import UserError
from eroica.groups import Groups, rank_list
from eroica.records import Category, integer


class CollectiveKind(IntEnum):
    """What a communication does; decides whether all members wait for all others in it."""

    UNKNOWN = 0
    ALL_REDUCE = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    ALL_TO_ALL = 4
    BROADCAST = 5
    REDUCE = 6
    GATHER = 7
    SCATTER = 8
    BARRIER = 9
    SEND = 10
    RECV = 11
    SEND_RECV = 12
    """Point to point, direction not told (ncclDevKernel_SendRecv without metadata)."""
    WAIT = 13
    """A wait for an earlier communication; moves nothing."""
    DISPATCH = 14
    """Expert-parallel all-to-all of uneven sizes (DeepEP dispatch)."""
    COMBINE = 15
    """The way back (DeepEP combine)."""


@dataclass(frozen=True, slots=True)
class CollectiveTable:
    """Communication metadata, a row per communicating event (operator, annotation, kernel). Shape of each: (rows,)."""

    event: npt.NDArray[np.int32]
    """Row in the trace's event columns, ascending."""
    kind: npt.NDArray[np.uint8]
    """CollectiveKind."""
    group: npt.NDArray[np.int32]
    """Index into `Trace.groups`; -1 = not told."""
    sequence: npt.NDArray[np.int64]
    """Sequence number within the group as the trace tells it; -1 = not told."""
    peer: npt.NDArray[np.int32]
    """Global rank on the other side of a send or recv; -1 = not told or not point to point."""
    in_elements: npt.NDArray[np.int64]
    """-1 = not told."""
    out_elements: npt.NDArray[np.int64]
    """-1 = not told."""
    dtype: npt.NDArray[np.int32]
    """String id of the c10 name (Float, BFloat16, Long, ...); -1 = not told."""
    uneven: npt.NDArray[np.bool_]
    """True where split sizes are given and differ: members do not all wait for the same amount of data."""
    transfers: npt.NDArray[np.bool_]
    """True on the event whose span covers the transfer (kernel; gloo worker annotation), False on mere enqueues."""

    def __len__(self) -> int:
        return len(self.event)


@dataclass(frozen=True, slots=True)
class Rule:
    """Events of `category` whose name matches `pattern` communicate."""

    category: Category
    pattern: str
    """Regular expression, searched; its group `op`, if any, is the word that tells the kind."""
    kind: CollectiveKind | None = None
    """None: told by `op`, by metadata or by the annotation around it."""
    transfers: bool = True
    """False: the event only enqueues."""


_OPS = r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"
RULES: tuple[Rule, ...] = (
    # NCCL, RCCL and their kin: ncclDevKernel_AllReduce_Sum_f32_RING_LL, ncclKernel_SendRecv_..., ncclDevKernel_Generic.
    Rule(Category.KERNEL, r"(?i)\b(?:nccl|rccl|msccl|xccl|oneccl)\w*?kernel_?(?P<op>[a-z]*)"),
    Rule(Category.KERNEL, r"(?i)\b(?:hccl|hcom)_+(?P<op>[a-z]+)"),
    # DeepEP; get_dispatch_layout beside them is plain computing.
    Rule(Category.KERNEL, r"::(?:internode|intranode|internode_ll)::\w*dispatch", CollectiveKind.DISPATCH),
    Rule(Category.KERNEL, r"::(?:internode|intranode|internode_ll)::\w*combine", CollectiveKind.COMBINE),
    # Kernels over peer memory: symmetric memory, vLLM, TensorRT-LLM, FlashInfer.
    Rule(Category.KERNEL, r"(?i)\bcross_device_reduce", CollectiveKind.ALL_REDUCE),
    Rule(Category.KERNEL, rf"(?i)(?P<op>{_OPS})(?!\w*copy)\w*?kernel"),
    Rule(Category.KERNEL, r"(?i)\bnvshmem\w*?(?P<op>alltoall|broadcast|reduce|barrier)"),
    # Host side: operators that enqueue.
    Rule(Category.CPU_OP, r"^record_param_comms$", transfers=False),
    Rule(Category.CPU_OP, r"^(?:c10d|_?c10d_functional|_c10d_functional_autograd)::(?P<op>\w+)$", transfers=False),
    Rule(Category.CPU_OP, rf"^(?:symm_mem|vllm|sglang|sgl_kernel)::\w*?(?P<op>{_OPS})\w*$", transfers=False),
    Rule(Category.ANNOTATION, r"^(?:nccl|ucc|xccl|hccl):(?P<op>\w+)", transfers=False),
    # gloo and MPI run the operation itself inside the annotation, on a thread of their own.
    Rule(Category.ANNOTATION, r"^(?:gloo|mpi):(?P<op>\w+)"),
)
"""What communicates, by name. The first rule of an event's category that matches decides."""

_WORDS: tuple[tuple[str, CollectiveKind], ...] = (
    ("allreduce", CollectiveKind.ALL_REDUCE),
    ("reducescatter", CollectiveKind.REDUCE_SCATTER),
    ("allgather", CollectiveKind.ALL_GATHER),
    ("alltoall", CollectiveKind.ALL_TO_ALL),
    ("broadcast", CollectiveKind.BROADCAST),
    ("barrier", CollectiveKind.BARRIER),
    ("sendrecv", CollectiveKind.SEND_RECV),
    ("dispatch", CollectiveKind.DISPATCH),
    ("combine", CollectiveKind.COMBINE),
    ("wait", CollectiveKind.WAIT),
    ("gather", CollectiveKind.GATHER),
    ("scatter", CollectiveKind.SCATTER),
    ("reduce", CollectiveKind.REDUCE),
    ("send", CollectiveKind.SEND),
    ("recv", CollectiveKind.RECV),
)


# Plain numbers: members of an enumeration are slow to look up, and these are compared for each row.
_UNKNOWN, _SEND, _RECV = int(CollectiveKind.UNKNOWN), int(CollectiveKind.SEND), int(CollectiveKind.RECV)
_SEND_RECV, _WAIT = int(CollectiveKind.SEND_RECV), int(CollectiveKind.WAIT)
_KERNEL, _CPU_OP, _ANNOTATION = int(Category.KERNEL), int(Category.CPU_OP), int(Category.ANNOTATION)


@lru_cache(maxsize=4096)
def kind_of(word: str) -> CollectiveKind:
    """Kind by the operation's word in any spelling: "AllReduce", "_allgather_base_", "nccl:all_to_all"."""
    letters = re.sub("[^a-z]", "", word.lower())
    return next((kind for part, kind in _WORDS if part in letters), CollectiveKind.UNKNOWN)


def user_rules() -> tuple[Rule, ...]:
    """Rules of the file named in EROICA_COLLECTIVES: a line each, "KIND REGEX" for kernel names, `#` starts a comment.

    Raises UserError for a line that is not so.
    """
    path = os.environ.get("EROICA_COLLECTIVES")
    if not path:
        return ()
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise UserError(f"EROICA_COLLECTIVES={path}: cannot be read ({why}); unset it or mend the path") from None
    rules = []
    for number, line in enumerate(lines, 1):
        kind, _, pattern = line.split("#")[0].strip().partition(" ")
        if not kind:
            continue
        try:
            if not pattern:  # it would match every kernel
                raise KeyError
            re.compile(pattern.strip())
            rules.append(Rule(Category.KERNEL, pattern.strip(), CollectiveKind[kind.upper()]))
        except (KeyError, re.error):
            kinds = " ".join(item.name for item in CollectiveKind)
            raise UserError(f"{path}:{number}: {line!r} is not KIND REGEX with KIND one of {kinds}") from None
    return tuple(rules)


@dataclass(slots=True)
class _Row:
    """What is known so far of one communicating event."""

    category: int
    kind: int
    transfers: bool
    args: Mapping[str, Any] | None = None
    elements: int = -1


class _Names:
    """Which (category, name) communicates."""

    def __init__(self, strings: Sequence[str], rules: Iterable[Rule]) -> None:
        self._strings = strings
        self._rules: dict[int, list[tuple[re.Pattern[str], Rule]]] = {}
        for rule in rules:
            self._rules.setdefault(rule.category, []).append((re.compile(rule.pattern), rule))

    def rows(self, category: npt.NDArray[np.uint8], name: npt.NDArray[np.int32]) -> dict[int, _Row]:
        """Event row -> what its name tells."""
        found: dict[int, _Row] = {}
        for code, patterns in self._rules.items():
            events = np.flatnonzero(category == code)
            used = np.zeros(len(self._strings), np.bool_)
            used[name[events]] = True
            told = {index: row for index in np.flatnonzero(used).tolist() if (row := self._match(index, patterns))}
            if told:
                wanted = np.zeros(len(self._strings), np.bool_)
                wanted[list(told)] = True
                for event in events[wanted[name[events]]].tolist():
                    row = told[int(name[event])]
                    found[event] = _Row(code, row.kind, row.transfers)
        return found

    def _match(self, index: int, patterns: list[tuple[re.Pattern[str], Rule]]) -> _Row | None:
        text = self._strings[index]
        for pattern, rule in patterns:
            match = pattern.search(text)
            if match is None:
                continue
            word = match.groupdict().get("op")
            kind = rule.kind if rule.kind is not None else kind_of(word) if word else CollectiveKind.UNKNOWN
            if kind == CollectiveKind.UNKNOWN and word and rule.category == Category.CPU_OP:
                continue
            return _Row(rule.category, int(kind), rule.transfers)
        return None


@dataclass(frozen=True, slots=True)
class Events:
    """The columns that recognition needs, in the trace's row order."""

    ts_ns: npt.NDArray[np.int64]
    dur_ns: npt.NDArray[np.int64]
    name: npt.NDArray[np.int32]
    category: npt.NDArray[np.uint8]
    track: npt.NDArray[np.int32]
    correlation: npt.NDArray[np.int64]
    external: npt.NDArray[np.int64]
    work: npt.NDArray[np.int64]


def table(
    events: Events,
    strings: list[str],
    args: Mapping[int, Mapping[str, Any]],
    groups: Groups,
    rules: Sequence[Rule] = RULES,
) -> CollectiveTable:
    """The communication of one rank. `args`: event row -> its arguments, where they have a "Collective name".

    Appends names of data types to `strings` and groups that only events name to `groups`.
    """
    rows = _Names(strings, rules).rows(events.category, events.name)
    for event, told in args.items():
        category = int(events.category[event])
        row = rows.setdefault(event, _Row(category, _UNKNOWN, category == _KERNEL))
        row.args = told
    if rows:
        _join_launches(events, rows)
        _join_annotations(events, strings, rows)
    for event, row in rows.items():
        if row.args is None and row.category in (_ANNOTATION, _CPU_OP):
            row.elements = int(events.work[event])
    _join_told(events, rows)
    _join_workers(events, rows)
    return _columns(events, strings, rows, groups)


def _compatible(named: int, told: int) -> bool:
    """Whether metadata may belong to a kernel: SendRecv kernels carry all-to-all, gather and scatter too."""
    unclear = (_UNKNOWN, _SEND_RECV)
    return told != _WAIT and (named in unclear or told == _UNKNOWN or named == told)


def _join_launches(events: Events, rows: dict[int, _Row]) -> None:
    """Give kernels without metadata that of the host operation that launched them, where only one can be meant."""
    kernels = [e for e, r in rows.items() if r.transfers and r.args is None and r.category == _KERNEL]
    hosts = sorted(e for e, r in rows.items() if not r.transfers and r.category != _KERNEL)
    if not kernels or not hosts:
        return
    by_external: dict[int, list[int]] = {}
    by_track: dict[int, _Spans] = {}
    for event in hosts:
        if rows[event].args is not None and events.external[event]:
            by_external.setdefault(int(events.external[event]), []).append(event)
        by_track.setdefault(int(events.track[event]), _Spans()).add(events, event)
    wanted = np.unique(events.correlation[kernels])
    calls = np.flatnonzero(events.category == Category.RUNTIME)
    calls = calls[np.isin(events.correlation[calls], wanted[wanted != 0])]
    ids, first, counts = np.unique(events.correlation[calls], return_index=True, return_counts=True)
    launch = {int(i): int(calls[f]) for i, f, n in zip(ids, first, counts, strict=True) if n == 1}
    for kernel in kernels:
        row = rows[kernel]
        # Where the id is the correlation again (pytorch/kineto#782), it may equal an unrelated operator's id.
        reused = events.external[kernel] == events.correlation[kernel]
        around = [] if reused else by_external.get(int(events.external[kernel]), [])
        if len(around) != 1:
            call = launch.get(int(events.correlation[kernel]))
            spans = by_track.get(int(events.track[call])) if call is not None else None
            around = spans.around(int(events.ts_ns[call])) if spans is not None else []
        for host in around:
            told = rows[host].args
            kind = kind_of(str(told.get("Collective name"))) if told else rows[host].kind
            if kind != _UNKNOWN and _compatible(row.kind, kind):
                row.args = row.args or told
                row.kind = kind
                if row.args is not None:
                    break


class _Spans:
    """Spans of one track, by start."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.starts: list[int] = []
        self.ends: list[int] = []

    def add(self, events: Events, row: int) -> None:
        """Rows come in ascending order."""
        self.rows.append(row)
        self.starts.append(int(events.ts_ns[row]))
        self.ends.append(self.starts[-1] + int(events.dur_ns[row]))

    def around(self, at: int) -> list[int]:
        """Rows whose span holds the instant, innermost first; at most 4, and none that started 64 spans ago."""
        position = bisect_right(self.starts, at) - 1
        near = range(position, max(position - 64, -1), -1)
        return [self.rows[index] for index in near if self.ends[index] >= at][:4]


def _join_annotations(events: Events, strings: Sequence[str], rows: dict[int, _Row]) -> None:
    """ROCm names every kernel ncclDevKernel_Generic: its kind is that of the `nccl:` range around it on the stream."""
    unclear = [e for e, r in rows.items() if r.transfers and r.args is None and r.kind == _UNKNOWN]
    if not unclear:
        return
    spans: dict[int, _Spans] = {}
    for event in np.flatnonzero(events.category == Category.DEVICE_ANNOTATION).tolist():
        if strings[events.name[event]].startswith(("nccl:", "rccl:")):
            spans.setdefault(int(events.track[event]), _Spans()).add(events, event)
    for kernel in unclear:
        on_stream = spans.get(int(events.track[kernel]))
        for span in on_stream.around(int(events.ts_ns[kernel]))[:1] if on_stream is not None else []:
            rows[kernel].kind = kind_of(strings[events.name[span]])


def _join_told(events: Events, rows: dict[int, _Row]) -> None:
    """Give gloo's worker ranges, which have no arguments, those of the event that says them (see `calls`)."""
    told = [e for e, r in rows.items() if r.category == _ANNOTATION and not r.transfers and r.args is not None]
    if not told:
        return
    spans: dict[int, _Spans] = {}
    for event in sorted(e for e, r in rows.items() if r.category == _ANNOTATION and r.transfers):
        spans.setdefault(int(events.track[event]), _Spans()).add(events, event)
    for event in told:
        on_track = spans.get(int(events.track[event]))
        for worker in on_track.around(int(events.ts_ns[event]))[:1] if on_track is not None else []:
            rows[worker].args = rows[worker].args or rows[event].args


def _join_workers(events: Events, rows: dict[int, _Row]) -> None:
    """Gloo's worker ranges have no arguments: the k-th of a kind is the k-th operator of that kind, if counts agree."""
    workers: dict[int, list[int]] = {}
    enqueues: dict[int, list[int]] = {}
    for event in sorted(rows):
        row = rows[event]
        if row.transfers and row.category == _ANNOTATION and row.args is None:
            workers.setdefault(row.kind, []).append(event)
        elif not row.transfers and row.category == _CPU_OP and row.kind != _UNKNOWN:
            enqueues.setdefault(row.kind, []).append(event)
    for kind, spans in workers.items():
        operators = enqueues.get(kind, [])
        if len(operators) == len(spans):
            for span, operator in zip(spans, operators, strict=True):
                rows[span].args = rows[span].args or rows[operator].args
                if rows[span].elements < 0:
                    rows[span].elements = rows[operator].elements


_DIRECTION = re.compile(r":(?:send|recv)\w* \d+(?:->|<-)(\d{1,9})(?!\d)")


def _uneven(args: Mapping[str, Any]) -> bool:
    for key in ("In split size", "Out split size"):
        sizes, _ = rank_list(args.get(key))
        if len(set(sizes)) > 1:
            return True
    return False


def _columns(events: Events, strings: list[str], rows: dict[int, _Row], groups: Groups) -> CollectiveTable:
    count = len(rows)
    only_group = 0 if len(groups.table) == 1 else -1
    string_ids: dict[str, int] = {}
    result = empty(count)
    for index, event in enumerate(sorted(rows)):
        row = rows[event]
        result.event[index] = event
        result.transfers[index] = row.transfers
        kind, group = row.kind, -1
        if row.args is not None:
            args = row.args
            told = kind_of(str(args.get("Collective name")))
            kind = told if told != _UNKNOWN else kind
            group = groups.index(args)
            result.sequence[index] = integer(args.get("Seq"), -1)
            result.in_elements[index] = integer(args.get("In msg nelems"), -1)
            result.out_elements[index] = integer(args.get("Out msg nelems"), -1)
            result.uneven[index] = _uneven(args)
            dtype = args.get("dtype")
            if isinstance(dtype, str) and dtype:
                if dtype not in string_ids:
                    string_ids[dtype] = len(strings)
                    strings.append(dtype)
                result.dtype[index] = string_ids[dtype]
            key = "Dst Rank" if kind == _SEND else "Src Rank" if kind == _RECV else ""
            result.peer[index] = integer(args.get(key), -1, 32)
        elif row.elements >= 0:
            result.in_elements[index] = row.elements
        if group < 0:
            group = only_group
        result.kind[index] = kind
        result.group[index] = group
        if result.peer[index] < 0 and kind in (_SEND, _RECV):
            match = _DIRECTION.search(strings[events.name[event]])
            members = groups.table[group].ranks if group >= 0 else ()
            if match and int(match.group(1)) < len(members):
                result.peer[index] = members[int(match.group(1))]
    return result


def empty(count: int) -> CollectiveTable:
    """A table of `count` rows that tell nothing yet."""

    def unknown(kind: type[np.generic]) -> npt.NDArray[Any]:
        return np.full(count, -1, kind)

    return CollectiveTable(
        event=np.zeros(count, np.int32),
        kind=np.zeros(count, np.uint8),
        group=unknown(np.int32),
        sequence=unknown(np.int64),
        peer=unknown(np.int32),
        in_elements=unknown(np.int64),
        out_elements=unknown(np.int64),
        dtype=unknown(np.int32),
        uneven=np.zeros(count, np.bool_),
        transfers=np.zeros(count, np.bool_),
    )
