"""The wire and file form of a Summary: at most 3,072 bytes of patterns and 4,096 bytes of ledger per worker, always.

Texts (function names, places, groups) stand in neither part: each is known by 8 bytes of BLAKE2b and travels once
per job. Used by whoever sends, stores or receives summaries; it knows nothing of buses and stores. Fixed-width
little-endian columns rather than a general format or a compressor, because the size must hold for every worker and a
million of them are read at once. Durations are 16 bits on a logarithmic scale, off by 0.03 % at most between 1 ns and
27 h; patterns are kept as they are. What does not fit is left out by rule, functions of least beta and samples last
in the order of `collectives.sample`, and the summary says so among its notes. Decoding believes nothing: any other
bytes give DataError, and memory stays within a few times the input plus the names it refers to.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from eroica.collectives import MAX_GROUPS, MAX_ITERATIONS, MAX_SAMPLES, Channel, Ledger, sample
from eroica.critical_path import NUM_ACTIVITIES, Activity
from eroica.errors import DataError
from eroica.job import ProcessGroup
from eroica.names import Phase
from eroica.packing import (
    MAX_MEMBERS,
    MAX_NAME_BYTES,
    NONE,
    Reader,
    Texts,
    Unlike,
    framed,
    known_digest,
    members,
    members_text,
    pack_durations,
    pack_ints,
    unpack_durations,
)
from eroica.pattern import MAX_FUNCTIONS, Coverage, Function, Patterns, Summary
from eroica.trace import CollectiveKind
from eroica.utilisation import MU_SOURCES

VERSION = 1
MAX_PATTERN_BYTES = 3072
MAX_LEDGER_BYTES = 4096
MAX_THREADS = 8
MAX_NOTES = 15
MAX_PROCESS_GROUPS = 20
"""Groups told; those that the rank belongs to come first, since roles are read from them. With these limits no part
refers to more than 254 texts."""

_PATTERN_MAGIC, _LEDGER_MAGIC, _FILE_MAGIC = b"eroP", b"eroL", b"eroS"
_HEAD = struct.Struct("<IIBBBBdqIQIIIfdBBBBB")
_HEAD_ROW = np.dtype(
    [
        ("rank", "<u4"),
        ("world_size", "<u4"),
        ("flags", "u1"),
        ("host", "u1"),
        ("model", "u1"),
        ("steps_by", "u1"),
        ("window_s", "<f8"),
        ("started_ns", "<i8"),
        ("num_iterations", "<u4"),
        ("num_events", "<u8"),
        ("num_kernels", "<u4"),
        ("num_launches", "<u4"),
        ("num_collectives", "<u4"),
        ("explained", "<f4"),
        ("cutoff", "<f8"),
        ("num_activities", "u1"),
        ("num_functions", "u1"),
        ("num_threads", "u1"),
        ("num_groups", "u1"),
        ("num_notes", "u1"),
    ]
)
"""As `_HEAD` has it."""
_COUNTS = ["num_activities", "num_functions", "num_threads", "num_groups", "num_notes"]
_LEDGER_HEAD = struct.Struct("<BBBBBI")
_LEDGER_ROW = np.dtype(
    [
        ("num_iterations", "u1"),
        ("num_channels", "u1"),
        ("num_samples", "u1"),
        ("num_shapes", "u1"),
        ("num_steps", "u1"),
        ("dropped", "<u4"),
    ]
)
_LEDGER_COUNTS = ["num_iterations", "num_channels", "num_samples", "num_shapes", "num_steps"]
_FLAG_WORLD, _FLAG_EPOCH, _FLAG_STARTED, _FLAG_DEVICE, _FLAG_PARTIAL, _FLAG_BLOCKS = 1, 2, 4, 8, 16, 32
_FUNCTION = np.dtype(
    [
        ("activity", "u1"),
        ("phase", "u1"),
        ("source", "u1"),
        ("name", "u1"),
        ("location", "u1"),
        ("user", "u1"),
        ("launched", "u1"),
        ("user_function", "u1"),
        ("beta", "<f4"),
        ("mu", "<f4"),
        ("sigma", "<f4"),
        ("count", "<f4"),
        ("work", "<f4"),
    ]
)
_THREAD = np.dtype([("name", "u1"), ("share", "<f4")])
_GROUP = np.dtype([("name", "u1"), ("description", "u1"), ("members", "u1"), ("size", "<u4")])
_CHANNEL = np.dtype(
    [("key", "u1"), ("description", "u1"), ("size", "<u4"), ("count", "<f4"), ("exposed", "<u2"), ("bytes", "<f4")]
)
_SHAPE = np.dtype([("channel", "u1"), ("kind", "u1"), ("check", "<u2")])

_MOST = (1 << 31) - 1
T = TypeVar("T")
_IS_KIND = np.isin(np.arange(256), [int(kind) for kind in CollectiveKind])


@dataclass(frozen=True, slots=True)
class EncodedSummary:
    """One worker's summary as it travels."""

    patterns: bytes
    """At most MAX_PATTERN_BYTES."""
    ledger: bytes
    """At most MAX_LEDGER_BYTES."""
    names: dict[bytes, bytes]
    """Digest (8 bytes) -> text; a receiver that has a digest need not get its text again."""


# --- writing -------------------------------------------------------------------------------------------------------


def _told(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """float32 with all that is not finite as NaN."""
    with np.errstate(over="ignore"):
        narrow = np.asarray(values).astype(np.float32)
    return np.where(np.isfinite(narrow), narrow, np.float32(np.nan))


def _encode_patterns(summary: Summary, num_functions: int, notes: Sequence[str]) -> tuple[bytes, Texts]:
    patterns, coverage = summary.patterns, summary.coverage
    texts = Texts()
    kept = slice(0, num_functions)
    rows = np.zeros(num_functions, _FUNCTION)
    for k, function in enumerate(patterns.functions[kept]):
        rows[k]["activity"], rows[k]["phase"] = function.activity, function.phase
        rows[k]["name"], rows[k]["location"] = texts(function.name), texts(function.location)
        rows[k]["user"], rows[k]["launched"] = texts(function.user_location), texts(function.launched_at)
        rows[k]["user_function"] = texts(function.user_function)
    rows["source"] = patterns.mu_source[kept]
    for column, values in (
        ("beta", patterns.beta),
        ("mu", patterns.mu),
        ("sigma", patterns.sigma),
        ("count", patterns.count),
        ("work", patterns.work),
    ):
        rows[column] = _told(values[kept])
    left_out = patterns.beta[num_functions:]
    cutoff = max(patterns.cutoff, float(left_out.max(initial=0.0)))
    threads = np.zeros(min(len(patterns.threads), MAX_THREADS), _THREAD)
    for k, (name, share) in enumerate(patterns.threads[:MAX_THREADS]):
        threads[k] = texts(name), share
    told = _groups(summary)
    groups = np.zeros(len(told), _GROUP)
    for k, group in enumerate(told):
        groups[k] = texts(group.name), texts(group.description), texts(members_text(group.ranks)), group.size
    note_refs = bytes(texts(note) for note in notes)
    flags = (
        (_FLAG_WORLD if summary.world_size is not None else 0)
        | (_FLAG_EPOCH if coverage.epoch else 0)
        | (_FLAG_STARTED if summary.started_ns is not None else 0)
        | (_FLAG_DEVICE if coverage.has_device else 0)
        | (_FLAG_PARTIAL if coverage.partial else 0)
        | (_FLAG_BLOCKS if coverage.launches_block else 0)
    )
    head = _HEAD.pack(
        summary.rank,
        summary.world_size or 0,
        flags,
        texts(summary.host),
        texts(summary.device_model),
        texts(summary.steps_by),
        summary.window_s,
        summary.started_ns or 0,
        summary.num_iterations,
        coverage.num_events,
        coverage.num_kernels,
        coverage.num_launches,
        coverage.num_collectives,
        coverage.explained,
        cutoff,
        NUM_ACTIVITIES,
        len(rows),
        len(threads),
        len(groups),
        len(note_refs),
    )
    body = (
        head
        + texts.table()
        + _told(patterns.activity_beta).astype("<f4").tobytes()
        + rows.tobytes()
        + threads.tobytes()
        + groups.tobytes()
        + note_refs
    )
    return framed(_PATTERN_MAGIC, VERSION, body), texts


def _groups(summary: Summary) -> list[ProcessGroup]:
    """The groups that travel: those of the rank before others, lists of members only as long as they fit."""
    order = sorted(
        range(len(summary.groups)),
        key=lambda k: bool(summary.groups[k].ranks) and summary.rank not in summary.groups[k].ranks,
    )
    room = MAX_MEMBERS
    told = []
    for group in (summary.groups[k] for k in sorted(order[:MAX_PROCESS_GROUPS])):
        listed = len(group.ranks) <= room and len(members_text(group.ranks)) <= MAX_NAME_BYTES
        told.append(group if listed else replace(group, ranks=(), size=group.size or len(group.ranks)))
        room -= len(told[-1].ranks)
    return told


def _encode_ledger(ledger: Ledger, num_functions: int, kept: npt.NDArray[np.bool_]) -> tuple[bytes, Texts]:
    texts = Texts()
    channels = np.zeros(len(ledger.channels), _CHANNEL)
    for k, channel in enumerate(ledger.channels):
        channels[k]["key"], channels[k]["description"], channels[k]["size"] = (
            texts(channel.key),
            texts(channel.description),
            max(channel.size, 0),
        )
    channels["count"], channels["bytes"] = _told(ledger.channel_count), _told(ledger.channel_bytes)
    channels["exposed"] = pack_durations(ledger.channel_exposed_s)
    shape_of = np.zeros(int(kept.sum()), _SHAPE)
    shape_of["channel"], shape_of["kind"], shape_of["check"] = (
        ledger.channel[kept],
        ledger.kind[kept],
        ledger.check[kept],
    )
    shapes, shape = np.unique(shape_of, return_inverse=True)
    steps, step = np.unique(ledger.step[kept], return_inverse=True)
    before, in_flight = _without(ledger, kept)
    partly = np.unique(ledger.step[~kept])
    complete = np.isin(steps, ledger.complete_steps) & ~np.isin(steps, partly)
    by_work = np.asarray(ledger.top_by_work, np.float64)
    top = np.where((ledger.top_function >= 0) & (ledger.top_function < num_functions), ledger.top_function, NONE)
    head = _LEDGER_HEAD.pack(
        len(ledger.steps), len(channels), len(shape), len(shapes), len(steps), min(ledger.dropped_channels, 1 << 31)
    )
    parts = [
        head,
        texts.table(),
        channels.tobytes(),
        shapes.tobytes(),
        pack_ints(ledger.steps),
        *(
            pack_durations(c).tobytes()
            for c in (ledger.length_s, ledger.own_s, ledger.exposed_s, ledger.waiting_s, ledger.top_excess_s)
        ),
        top.astype("u1").tobytes(),
        np.where(np.isfinite(by_work), np.rint(np.clip(np.nan_to_num(by_work), 0, 1) * 254), NONE)
        .astype("u1")
        .tobytes(),
        pack_ints(steps),
        np.packbits(complete).tobytes(),
        step.astype("u1").tobytes(),
        shape.astype("u1").tobytes(),
        pack_ints(ledger.position[kept]),
        pack_durations(before).tobytes(),
        pack_durations(ledger.duration_s[kept]).tobytes(),
        pack_durations(ledger.sample_exposed_s[kept]).tobytes(),
        np.minimum(in_flight, 255).astype("u1").tobytes(),
    ]
    return framed(_LEDGER_MAGIC, VERSION, b"".join(parts)), texts


def _without(ledger: Ledger, kept: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Own work before each kept sample and earlier ones in flight, when the others are left out."""
    before, in_flight = [], []
    carried, step = 0.0, None
    for k in range(len(kept)):
        if ledger.step[k] != step:
            carried, step = 0.0, ledger.step[k]
        carried += float(ledger.work_before_s[k])
        if kept[k]:
            before.append(carried)
            in_flight.append(int(kept[max(k - int(ledger.in_flight[k]), 0) : k].sum()))
            carried = 0.0
    return np.array(before, np.float64), np.array(in_flight, np.int64)


def encode_summary(summary: Summary) -> EncodedSummary:
    """Both parts within their limits, and the texts that they refer to. Pure and deterministic.

    Raises ValueError for a summary that `summarize` would not make: more functions, iterations, groups or samples than
    its own limits.
    """
    patterns, ledger = summary.patterns, summary.ledger
    num_functions = len(patterns.functions)
    if (
        num_functions > MAX_FUNCTIONS
        or len(ledger.steps) > MAX_ITERATIONS
        or len(ledger.channels) > MAX_GROUPS
        or len(ledger.kind) > MAX_SAMPLES
    ):
        raise ValueError("encode_summary: more functions, iterations, groups or samples than a summary holds")
    while True:
        kept = np.ones(len(ledger.kind), bool)
        encoded_ledger, ledger_texts = _encode_ledger(ledger, num_functions, kept)
        while len(encoded_ledger) > MAX_LEDGER_BYTES:
            # No sample takes more than 16 bytes, so that no round leaves out more than it must.
            fewer = int(kept.sum()) - max((len(encoded_ledger) - MAX_LEDGER_BYTES) // 16, 1)
            kept = sample(ledger.step, ledger.channel, ledger.position, ledger.channels, fewer)[0]
            encoded_ledger, ledger_texts = _encode_ledger(ledger, num_functions, kept)
        encoded, texts = _encode_patterns(summary, num_functions, _notes(summary, num_functions, int((~kept).sum())))
        if len(encoded) <= MAX_PATTERN_BYTES:
            return EncodedSummary(encoded, encoded_ledger, {**texts.names, **ledger_texts.names})
        num_functions -= 1


def _notes(summary: Summary, num_functions: int, samples_left_out: int) -> list[str]:
    lost = []
    if num_functions < len(summary.patterns.functions):
        lost.append(f"{len(summary.patterns.functions) - num_functions} functions")
    if samples_left_out:
        lost.append(f"{samples_left_out} sampled communications")
    if len(summary.groups) > MAX_PROCESS_GROUPS:
        lost.append(f"{len(summary.groups) - MAX_PROCESS_GROUPS} process groups")
    listed = sum(1 for group in summary.groups if group.ranks)
    unlisted = min(listed, MAX_PROCESS_GROUPS) - sum(1 for group in _groups(summary) if group.ranks)
    if unlisted:
        lost.append(f"the members of {unlisted} process groups")
    if len(summary.patterns.threads) > MAX_THREADS:
        lost.append(f"{len(summary.patterns.threads) - MAX_THREADS} threads")
    notes = list(summary.coverage.notes)
    room = MAX_NOTES - (1 if lost else 0)
    if len(notes) > room:
        notes = [*notes[: room - 1], f"and {len(notes) - room + 1} more notes"]
    return [*notes, *([f"left out of the summary, which must stay small: {', '.join(lost)}"] if lost else [])]


# --- reading -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=65536)
def _function(activity: int, phase: int, name: str, *places: str | None) -> Function:
    location, user, launched, user_function = places
    return Function(Activity(activity), name, location, user, Phase(phase), launched, user_function)


def _shares(*columns: npt.NDArray[Any]) -> bool:
    """All are finite and not negative."""
    return all(bool(((column >= 0) & (column < np.inf)).all()) for column in columns)


def _measured(*columns: npt.NDArray[Any]) -> bool:
    """All are finite or NaN."""
    return not any(bool(np.isinf(column).any()) for column in columns)


def decode_summary(patterns: bytes, ledger: bytes, names: Mapping[bytes, bytes]) -> Summary:
    """Inverse of `encode_summary`; `names` may hold more than this summary needs. Raises DataError on anything else."""
    return _decode([_Parts(bytes(patterns), bytes(ledger), names)])[0]


@dataclass(frozen=True, slots=True)
class _Parts:
    """One summary, as it came."""

    patterns: bytes
    ledger: bytes
    names: Mapping[bytes, bytes]


def _decode(parts: Sequence[_Parts]) -> list[Summary]:
    """Summaries whose parts are as long as the first one's, as columns: what numpy does costs as much for one as for a
    thousand. Raises DataError if one is bad, and Unlike."""
    reader = Reader([part.patterns for part in parts], _PATTERN_MAGIC, VERSION, "summary: the part of patterns")
    names = [part.names for part in parts]
    head = reader.array(_HEAD_ROW, 1)[:, 0]
    num_activities, num_functions, num_threads, num_groups, num_notes = reader.alike(head[_COUNTS])
    reader.texts(names)
    reader.check(num_activities == NUM_ACTIVITIES, f"counts {num_activities} activities, not {NUM_ACTIVITIES}")
    is_few = num_functions <= MAX_FUNCTIONS and num_threads <= MAX_THREADS
    is_few = is_few and num_groups <= MAX_PROCESS_GROUPS and num_notes <= MAX_NOTES
    reader.check(is_few and (head["num_events"] <= _MOST << 20).all(), "counts too much")
    for column in ("rank", "world_size", "num_iterations"):
        reader.check(head[column] <= _MOST, "counts too much")
    is_number = _shares(head["window_s"], head["explained"], head["cutoff"])
    reader.check(is_number, "has a share or a window that is no number")
    reader.listed(head["host"], head["model"], head["steps_by"])
    activity_beta = reader.array("<f4", NUM_ACTIVITIES)
    rows = reader.array(_FUNCTION, num_functions)
    threads = reader.array(_THREAD, num_threads)
    groups = reader.array(_GROUP, num_groups)
    notes = reader.array("u1", num_notes)
    for column, limit in (("activity", NUM_ACTIVITIES), ("phase", len(Phase)), ("source", len(MU_SOURCES))):
        reader.check(rows[column] < limit, f"has a function of unknown {column}")
    reader.check(_shares(rows["beta"], threads["share"], activity_beta), "has a share that is no number")
    reader.check(_measured(rows["mu"], rows["sigma"], rows["count"], rows["work"]), "has a pattern that is no number")
    # The first eight columns are bytes: activity, phase, source, numbers of texts.
    heads = np.ascontiguousarray(_as_bytes(rows)[:, :, :8])
    reader.listed(heads[:, :, 4:], or_none=True)
    reader.listed(heads[:, :, 3], threads["name"], notes, groups["name"], groups["description"], groups["members"])
    functions = _each(reader, heads, lambda table, told: _functions(reader, table, told))
    told_groups = _each(reader, groups, lambda table, told: _process_groups(reader, table, told))
    ledgers = _decode_ledgers([part.ledger for part in parts], names, num_functions)
    columns = {
        name: list(rows[name].astype(kind))
        for name, kind in (
            ("beta", "f4"),
            ("mu", "f4"),
            ("sigma", "f4"),
            ("source", "u1"),
            ("count", "f4"),
            ("work", "f8"),
        )
    }
    return [
        Summary(
            rank=rank,
            world_size=world_size if flags & _FLAG_WORLD else None,
            host=table[host],
            device_model=table[model],
            groups=told,
            steps_by=table[steps_by],
            window_s=window_s,
            started_ns=started_ns if flags & _FLAG_STARTED else None,
            num_iterations=num_iterations,
            patterns=Patterns(
                functions=named,
                beta=beta,
                mu=mu,
                sigma=sigma,
                mu_source=source,
                count=count,
                work=work,
                cutoff=cutoff,
                activity_beta=activity,
                threads=tuple([(table[name], share) for name, share in ran]),
            ),
            ledger=ledger,
            coverage=Coverage(
                num_events=num_events,
                num_kernels=num_kernels,
                num_launches=num_launches,
                num_collectives=num_collectives,
                explained=explained,
                has_device=bool(flags & _FLAG_DEVICE),
                partial=bool(flags & _FLAG_PARTIAL),
                epoch=bool(flags & _FLAG_EPOCH),
                notes=tuple([table[number] for number in noted]),
                launches_block=bool(flags & _FLAG_BLOCKS),
            ),
        )
        for (
            (rank, world_size, flags, host, model, steps_by, window_s, started_ns, num_iterations, num_events,
             num_kernels, num_launches, num_collectives, explained, cutoff, *_),
            table, named, told, ledger, beta, mu, sigma, source, count, work, activity, ran, noted,
        ) in zip(
            head.tolist(), reader.tables, functions, told_groups, ledgers, *columns.values(),
            activity_beta.astype("f4"), threads.tolist(), notes.tolist(), strict=True,
        )
    ]  # fmt: skip


def _as_bytes(rows: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """(N, K) records as (N, K, bytes of a record)."""
    return np.ascontiguousarray(rows).view("u1").reshape(*rows.shape, rows.dtype.itemsize)


def _each(
    reader: Reader, told: npt.NDArray[Any], make: Callable[[tuple[str, ...], npt.NDArray[Any]], T]
) -> Iterator[T]:
    """What `make` makes of each row and its texts: once where both are the same, as they are on the ranks of a host."""
    made: dict[tuple[int, bytes], T] = {}
    for table, row in zip(reader.tables, told, strict=True):
        key = id(table), row.tobytes()
        if key not in made:
            made[key] = make(table, row)
        yield made[key]


def _functions(reader: Reader, table: tuple[str, ...], heads: npt.NDArray[np.uint8]) -> tuple[Function, ...]:
    texts: list[str | None] = [*table, *[None] * (NONE + 1 - len(table))]
    functions = tuple(
        [
            _function(activity, phase, texts[name] or "", texts[at], texts[user], texts[launched], texts[inside])
            for activity, phase, _, name, at, user, launched, inside in heads.tolist()
        ]
    )
    reader.check(len(set(functions)) == len(functions), "tells a function twice")
    return _kept(functions)


@lru_cache(maxsize=4096)
def _kept(functions: tuple[Function, ...]) -> tuple[Function, ...]:
    """The same as one object, however many ranks tell it: what lines them up goes through each object once."""
    return functions


def _process_groups(reader: Reader, table: tuple[str, ...], groups: npt.NDArray[Any]) -> tuple[ProcessGroup, ...]:
    told = []
    num_members = 0
    for name, description, listed, size in groups.tolist():
        ranks = members(table[listed])
        num_members += len(ranks)
        reader.check(num_members <= MAX_MEMBERS and size <= _MOST, "lists too many members of groups")
        told.append(ProcessGroup(table[name], table[description], ranks, size))
    return tuple(told)


def _decode_ledgers(
    parts: Sequence[bytes], names: Sequence[Mapping[bytes, bytes]], num_functions: int
) -> Iterator[Ledger]:
    reader = Reader(parts, _LEDGER_MAGIC, VERSION, "summary: the ledger")
    head = reader.array(_LEDGER_ROW, 1)[:, 0]
    num_iterations, num_channels, num_samples, num_shapes, num_steps = reader.alike(head[_LEDGER_COUNTS])
    reader.check(
        num_iterations <= MAX_ITERATIONS and num_channels <= MAX_GROUPS and num_samples <= MAX_SAMPLES,
        "counts too much",
    )
    reader.texts(names)
    channels = reader.array(_CHANNEL, num_channels)
    shapes = reader.array(_SHAPE, num_shapes)
    steps = reader.ints(num_iterations)
    length, own, exposed, waiting, excess = (reader.durations(num_iterations) for _ in range(5))
    top = reader.array("u1", num_iterations).astype(np.int32)
    by_work = reader.array("u1", num_iterations)
    sample_steps = reader.ints(num_steps)
    packed = reader.array("u1", (num_steps + 7) // 8)
    complete = np.unpackbits(packed, axis=1, count=num_steps).astype(bool)
    step, shape = reader.array("u1", num_samples), reader.array("u1", num_samples)
    position = reader.ints(num_samples)
    before, duration, sample_exposed = (reader.durations(num_samples) for _ in range(3))
    in_flight = reader.array("u1", num_samples)
    reader.check((top == NONE) | (top < num_functions), "names a function that the patterns do not hold")
    reader.check(shapes["channel"] < num_channels, "has a communication of an unknown group")
    reader.check(_IS_KIND[shapes["kind"]], "has a communication of an unknown kind")
    reader.check(step < num_steps, "has a sample of an unknown step")
    reader.check(shape < num_shapes, "has a sample of an unknown shape")
    reader.check((position >= 0) & (position <= _MOST), "has a sample out of place")
    reader.check(_measured(channels["count"], channels["bytes"]), "has a group that is no number")
    reader.check(channels["size"] <= _MOST, "counts too much")
    reader.check(sample_steps[:, 1:] > sample_steps[:, :-1], "has steps out of order")
    reader.listed(channels["key"], channels["description"])
    row = np.arange(len(parts))[:, None]
    shape_of = shapes[row, shape]
    # The first six bytes: numbers of two texts, and the size.
    told_channels = _each(reader, _as_bytes(channels)[:, :, :6], _channels)
    return map(
        Ledger,
        steps,
        length,
        own,
        exposed,
        waiting,
        np.where(top == NONE, -1, top).astype(np.int32),
        excess,
        np.where(by_work == NONE, np.nan, by_work / 254).astype(np.float32),
        told_channels,
        channels["count"].astype(np.float32),
        unpack_durations(channels["exposed"]),
        channels["bytes"].astype(np.float64),
        sample_steps[row, step],
        shape_of["channel"].astype(np.int32),
        position.astype(np.int32),
        shape_of["kind"].astype(np.uint8),
        shape_of["check"].astype(np.int64),
        before,
        duration,
        sample_exposed,
        in_flight.astype(np.int32),
        (of[has] for of, has in zip(sample_steps, complete, strict=True)),
        head["dropped"].tolist(),
    )


def _channels(table: tuple[str, ...], told: npt.NDArray[np.uint8]) -> tuple[Channel, ...]:
    return tuple(
        [
            Channel(table[key], table[description], int.from_bytes(size, "little"))
            for key, description, *size in told.tolist()
        ]
    )


# --- files ---------------------------------------------------------------------------------------------------------

_FILE_HEAD = struct.Struct("<4sHHHI")


def write_summary(summary: Summary) -> bytes:
    """Both parts and the texts in one piece, for a file of its own."""
    encoded = encode_summary(summary)
    texts = b"".join(struct.pack("<I", len(text)) + text for text in encoded.names.values())
    head = _FILE_HEAD.pack(_FILE_MAGIC, VERSION, len(encoded.patterns), len(encoded.ledger), len(encoded.names))
    return head + encoded.patterns + encoded.ledger + texts


MOST_AT_ONCE = 1024
"""Summaries that are decoded as one: more gain nothing."""


def read_summary(data: bytes) -> Summary:
    """Inverse of `write_summary`. Raises DataError on anything else."""
    return _decode([_parts(data)])[0]


def read_summaries(files: Sequence[bytes]) -> list[Summary | DataError]:
    """The same for many, at a tenth of the time for each where they are laid out alike, as those of a job are. For each
    it gives the summary, or the error that `read_summary` raises."""
    found: dict[int, Summary | DataError] = {}
    parts: dict[int, _Parts] = {}
    for k, data in enumerate(files):
        try:
            parts[k] = _parts(data)
        except DataError as error:
            found[k] = error
    waiting = _split(list(parts), [(len(part.patterns), len(part.ledger)) for part in parts.values()])
    while waiting:
        group = waiting.pop()
        try:
            found.update(zip(group, _decode([parts[k] for k in group]), strict=True))
        except Unlike as unlike:
            waiting += _split(group, unlike.layouts)
        except DataError as error:
            if len(group) == 1:
                found[group[0]] = error
            else:
                half = len(group) // 2
                waiting += [group[:half], group[half:]]
    return [found[k] for k in range(len(files))]


def _split(members: Sequence[int], layouts: Sequence[Hashable]) -> list[list[int]]:
    """By layout, and in pieces that are decoded at once."""
    by_layout: dict[Hashable, list[int]] = {}
    for k, layout in zip(members, layouts, strict=True):
        by_layout.setdefault(layout, []).append(k)
    return [
        group[first : first + MOST_AT_ONCE]
        for group in by_layout.values()
        for first in range(0, len(group), MOST_AT_ONCE)
    ]


def _parts(data: bytes) -> _Parts:
    if len(data) < _FILE_HEAD.size or data[:4] != _FILE_MAGIC:
        raise DataError("summary: not a file of summaries (no header); make it again with this version of eroica")
    _, version, num_patterns, num_ledger, count = _FILE_HEAD.unpack_from(data)
    if version != VERSION:
        raise DataError(f"summary: the file has version {version}, this eroica reads version {VERSION}; make it again")
    middle = _FILE_HEAD.size + num_patterns
    end = middle + num_ledger
    return _Parts(bytes(data[_FILE_HEAD.size : middle]), bytes(data[middle:end]), _names(bytes(data[end:]), count))


@lru_cache(maxsize=256)
def _names(told: bytes, count: int) -> Mapping[bytes, bytes]:
    """Texts, each behind its length, by their digests; cached, since the ranks of a host tell the same ones."""
    at = 0
    names: dict[bytes, bytes] = {}
    for _ in range(count):
        size = int.from_bytes(told[at : at + 4], "little")
        if at + 4 > len(told) or at + 4 + size > len(told):
            raise DataError("summary: the file ends too early; copy or make it again")
        text = told[at + 4 : at + 4 + size]
        names[known_digest(text)] = text
        at += 4 + size
    return MappingProxyType(names)
