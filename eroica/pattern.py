"""Behaviour patterns: each function of one rank as (beta, mu, sigma), and the summaries of many ranks stacked.

`summarize` turns one rank's trace into a few kilobytes: the 40 functions that own most of the critical path, and the
ledger. `stack` lines the summaries of many ranks up for comparison. EROICA (arXiv 2506.08528, "behaviour patterns")
gives the three numbers; design section 4 fixes how they are computed here. Not here: comparing (`localization`), wire
form (`codec`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from eroica.collectives import Float32s, Float64s, Joined, Ledger, Peaks, end_to_end, join, ledger_of
from eroica.critical_path import NUM_ACTIVITIES, OWN_WORK, Activity, CriticalPath, Int32s, UInt8s, critical_spans
from eroica.intervals import Int64s
from eroica.job import ProcessGroup
from eroica.load import FEW_STEPS, explained_by_load, load_of
from eroica.names import Phase, normal_kernel_name, read_host_name
from eroica.trace import Category, CollectiveKind, Samples, Trace
from eroica.utilisation import utilisation_of

MAX_FUNCTIONS = 40
"""Functions told per rank: 40 x 20 bytes stay far below 3 KB, and on the real traces in tests 40 hold over 90 % of
the path."""

KINDS = {activity: activity.name.lower() for activity in Activity} | {
    Activity.COMPUTE: "kernel",
    Activity.LAUNCH: "runtime",
}
"""The `kind` of a function that people read."""


@dataclass(frozen=True, slots=True)
class Function:
    """Identity of a function over ranks: for host functions with its place in the source, for device functions
    without."""

    activity: Activity
    name: str
    location: str | None
    """"path:line" of the innermost Python frame; None for device functions."""
    user_location: str | None
    """"path:line" of the innermost frame of the user's own code; None for device functions."""
    phase: Phase = field(default=Phase.NONE, compare=False)
    """Device functions: only TUNING is told, of kernels that nothing else launches."""
    launched_at: str | None = field(default=None, compare=False)
    """Device functions: the user's line that launches it, where all of its launches share one."""
    user_function: str | None = field(default=None, compare=False)
    """Name of the function at `user_location`."""

    @property
    def kind(self) -> str:
        """What people call this kind of function."""
        return KINDS[self.activity]


@dataclass(frozen=True, slots=True)
class Patterns:
    """One rank's functions. F <= 40, by falling beta."""

    functions: tuple[Function, ...]
    beta: Float32s
    """(F,) Share of the window in which the function owned the critical path."""
    mu: Float32s
    """(F,) Utilisation, 0..1, of the resource that it uses; NaN = not measured."""
    sigma: Float32s
    """(F,) Spread of that utilisation: within executions from counters, else over executions; NaN = not measured."""
    mu_source: UInt8s
    """(F,) Index into MU_SOURCES."""
    count: Float32s
    """(F,) Executions per iteration."""
    work: Float64s
    """(F,) Size of what was asked for per iteration (blocks, bytes, elements); NaN = not told."""
    cutoff: float
    """Largest beta that was left out; 0 = nothing was."""
    activity_beta: Float32s
    """(NUM_ACTIVITIES,) Totals over all functions, the left-out ones too."""
    threads: tuple[tuple[str, float], ...]
    """(name, share of the window in which it ran) of host threads off the path, busiest first."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """What the summary rests on."""

    num_events: int
    num_kernels: int
    num_launches: int
    num_collectives: int
    explained: float
    """Share of the window that some function owns."""
    has_device: bool
    partial: bool
    """Part of the file was lost, so totals do not compare with full ranks."""
    epoch: bool
    notes: tuple[str, ...]
    launches_block: bool = False
    """Each launch call lasts until its kernel is done."""


@dataclass(frozen=True, slots=True)
class Summary:
    """All that leaves a rank."""

    rank: int
    world_size: int | None
    host: str
    device_model: str
    groups: tuple[ProcessGroup, ...]
    steps_by: str
    """What marked the iterations: "ProfilerStep", "optimizer" or "window"."""
    window_s: float
    started_ns: int | None
    """Start of the window since 1970; None where the clock's base is unknown."""
    num_iterations: int
    patterns: Patterns
    ledger: Ledger
    coverage: Coverage


def _numbered(codes: npt.NDArray[np.integer], size: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Distinct codes in ascending order, and the place of each code among them. Codes are in 0..size-1.

    `np.unique` sorts, which for a million spans takes longer than reading them; few codes are merely marked.
    """
    if size > max(4 * len(codes), 1 << 20):
        unique, back = np.unique(codes, return_inverse=True)
        return unique.astype(np.intp), back
    used = np.zeros(size, bool)
    used[codes] = True
    return np.flatnonzero(used), (np.cumsum(used) - 1)[codes]


def _texts(trace: Trace, path: CriticalPath) -> tuple[Int32s, list[tuple[str, str | None]]]:
    """Per span the id of its (text, own location), so that names that differ only in noise meet."""
    table: dict[tuple[str, str | None], int] = {}
    device = np.isin(trace.category[path.event], (Category.KERNEL, Category.COPY, Category.MEMSET))
    collective = path.activity == Activity.COLLECTIVE
    ids = np.full(len(path.event), -1, np.int32)
    name = trace.name[path.event]
    for is_device in (True, False):
        rows = np.flatnonzero((device == is_device) & ~collective)
        unique, back = _numbered(name[rows], len(trace.strings))
        numbers = np.empty(len(unique), np.int32)
        for k, string in enumerate(unique):
            text = trace.strings[string]
            if is_device:
                key: tuple[str, str | None] = (normal_kernel_name(text), None)
            else:
                # A frame's own place is its innermost frame; told twice, a Python function and a built-in of the same
                # name that it calls would be two rows of one identity.
                key = (read_host_name(text).text, None)
            numbers[k] = table.setdefault(key, len(table))
        ids[rows] = numbers[back]
    rows = np.flatnonzero(collective)
    if len(rows):
        row_of = np.full(len(trace), -1, np.int32)
        row_of[trace.collectives.event] = np.arange(len(trace.collectives.event))
        row_of[trace.collectives.event[trace.collectives.transfers]] = np.flatnonzero(trace.collectives.transfers)
        label: dict[tuple[int, int], int] = {}
        kinds, groups = (
            trace.collectives.kind[row_of[path.event[rows]]],
            trace.collectives.group[row_of[path.event[rows]]],
        )
        for r, kind, group in zip(rows, kinds, groups, strict=True):
            pair = (int(kind), int(group))
            if pair not in label:
                known = trace.groups[group] if group >= 0 else None
                where = "" if known is None else f" [{_group_name(known)}]"
                label[pair] = table.setdefault((CollectiveKind(kind).name.lower() + where, None), len(table))
            ids[r] = label[pair]
    return ids, list(table)


def _group_name(group: ProcessGroup) -> str:
    """What ranks of like groups call them alike: torch numbers groups that nobody has described."""
    return group.description or (f"group of {group.size}" if group.size else group.name)


def _locations(trace: Trace, frames: Int32s) -> tuple[Int32s, list[str | None], list[str | None]]:
    """Per span the id of its frame's "path:line", 0 = none; the locations, and the names of the functions there."""
    found: list[str | None] = [None]
    functions: list[str | None] = [None]
    ids = np.zeros(len(frames), np.int32)
    known = frames >= 0
    unique, back = _numbered(trace.name[frames[known]], len(trace.strings))
    numbers = np.empty(len(unique), np.int32)
    table: dict[str, int] = {}
    for k, string in enumerate(unique):
        read = read_host_name(trace.strings[string])
        if read.location is None:
            numbers[k] = 0
            continue
        if read.location not in table:
            table[read.location] = len(found)
            found.append(read.location)
            functions.append(read.text)
        numbers[k] = table[read.location]
    ids[known] = numbers[back]
    return ids, found, functions


def _patterns(trace: Trace, path: CriticalPath, samples: Samples | None) -> tuple[Patterns, Peaks]:
    """Patterns, and per iteration the function that exceeded its usual time most."""
    window_ns = max(path.iterations.window_ns, 1)
    count = path.iterations.count
    activity_beta = np.bincount(path.activity, weights=path.owned_ns, minlength=NUM_ACTIVITIES) / window_ns
    threads: dict[str, float] = {}
    for track, share, function in path.threads:
        name = function or trace.track_names[track] or f"thread {trace.tracks[track][1]}"
        threads[name] = threads.get(name, 0.0) + share
    mean, spread, source = utilisation_of(trace, path, samples)
    measured = np.flatnonzero(np.isfinite(mean))
    mean, spread, source = mean[measured], spread[measured], source[measured]
    text, texts = _texts(trace, path)
    frame, frames, _ = _locations(trace, path.frame)
    user, users, user_functions = _locations(trace, path.user_frame)
    on_device = np.isin(path.activity, (Activity.COMPUTE, Activity.MEMORY, Activity.COLLECTIVE))
    what, what_of = _numbered(path.activity.astype(np.intp) * len(texts) + text, NUM_ACTIVITIES * len(texts))
    where, where_of = _numbered(
        np.where(on_device, 0, frame.astype(np.intp) * len(users) + user), len(frames) * len(users)
    )
    keys, group = _numbered(what_of * len(where) + where_of, len(what) * len(where))
    del what_of, where_of
    owned = np.bincount(group, weights=path.owned_ns, minlength=len(keys))
    order = np.argsort(-owned, kind="stable")[:MAX_FUNCTIONS]
    cutoff = float(np.sort(owned)[::-1][MAX_FUNCTIONS] / window_ns) if len(keys) > MAX_FUNCTIONS else 0.0

    of_measured = group[measured]
    weight = path.owned_ns[measured].astype(np.float64)
    total = np.bincount(of_measured, weights=weight, minlength=len(keys))
    with np.errstate(invalid="ignore", divide="ignore"):
        mu = np.bincount(of_measured, weights=weight * mean, minlength=len(keys)) / total
        over = np.sqrt(
            np.maximum(np.bincount(of_measured, weights=weight * mean**2, minlength=len(keys)) / total - mu**2, 0)
        )
        inner_weight = np.where(np.isfinite(spread), weight, 0)
        inner = np.bincount(
            of_measured, weights=inner_weight * np.nan_to_num(spread), minlength=len(keys)
        ) / np.bincount(of_measured, weights=inner_weight, minlength=len(keys))
    sigma = np.where(np.isfinite(inner), inner, over)
    group_source = np.zeros(len(keys), np.uint8)
    np.maximum.at(group_source, of_measured, source)

    first = _first_spans(path.event, group, len(trace), len(keys))
    executions = np.bincount(group[first], minlength=len(keys)) / max(count, 1)
    asked = trace.work[path.event[first]]
    told = asked >= 0
    work = np.bincount(group[first][told], weights=asked[told], minlength=len(keys)) / max(count, 1)
    work[np.bincount(group[first][told], minlength=len(keys)) == 0] = np.nan

    # Numpy sorts integers of 16 bits by radix.
    by_group = np.argsort(group.astype(np.uint16) if len(keys) <= 1 << 16 else group, kind="stable")
    edges = np.append(0, np.cumsum(np.bincount(group, minlength=len(keys))))
    functions = []
    for g in order:
        mine = by_group[edges[g] : edges[g + 1]]
        heaviest = mine[path.owned_ns[mine].argmax()]
        activity = Activity(int(path.activity[heaviest]))
        name, location = texts[text[heaviest]]
        if on_device[heaviest]:
            shared = len(np.unique(user[mine])) == 1
            functions.append(
                Function(
                    activity,
                    name,
                    None,
                    None,
                    Phase.TUNING if bool((path.phase[mine] == Phase.TUNING).all()) else Phase.NONE,
                    launched_at=users[user[heaviest]] if shared else None,
                )
            )
        else:
            functions.append(
                Function(
                    activity,
                    name,
                    location or frames[frame[heaviest]],
                    users[user[heaviest]],
                    Phase(int(path.phase[heaviest])),
                    user_function=user_functions[user[heaviest]],
                )
            )
    # With a million spans each of these takes as much memory as several columns of the trace.
    del by_group, text, frame, user, on_device
    patterns = Patterns(
        functions=tuple(functions),
        beta=(owned[order] / window_ns).astype(np.float32),
        mu=mu[order].astype(np.float32),
        sigma=sigma[order].astype(np.float32),
        mu_source=group_source[order],
        count=executions[order].astype(np.float32),
        work=work[order],
        cutoff=cutoff,
        activity_beta=activity_beta.astype(np.float32),
        threads=tuple(sorted(threads.items(), key=lambda item: (-item[1], item[0]))[:8]),
    )
    # Functions that are not told share one row behind the others.
    place = np.full(len(keys), len(order), np.int32)
    place[order] = np.arange(len(order))
    of_span = place[group]
    del group
    shape = (len(order) + 1, count)
    seconds = _sums(of_span, path.iteration, path.owned_ns / 1e9, shape)[:-1]
    rows = first[told]
    step_work = _sums(of_span[rows], path.iteration[rows], trace.work[path.event[rows]], shape)[:-1]
    return patterns, _peaks(seconds, step_work, np.array([f.activity in OWN_WORK for f in functions], bool))


def _first_spans(event: Int32s, group: npt.NDArray[np.intp], num_events: int, num_groups: int) -> npt.NDArray[np.intp]:
    """The first span of each event in each group, in no order. Nearly all events have all spans in one group."""
    number = np.arange(len(event), dtype=np.int32)
    first_of = np.empty(num_events, np.int32)
    # Of several values for one place the last one stays.
    first_of[event[::-1]] = number[::-1]
    leading = first_of[event]
    elsewhere = np.flatnonzero(group[leading] != group)
    _, among = np.unique(event[elsewhere].astype(np.int64) * (num_groups + 1) + group[elsewhere], return_index=True)
    return np.concatenate([np.flatnonzero(leading == number), elsewhere[among]])


def _sums(row: npt.NDArray[np.integer], column: Int32s, values: npt.NDArray[Any], shape: tuple[int, int]) -> Float64s:
    """Totals of `values` by (row, column)."""
    flat = row.astype(np.intp) * shape[1] + column
    totals = np.bincount(flat, weights=values.astype(np.float64), minlength=shape[0] * shape[1])
    return totals.astype(np.float64, copy=False).reshape(shape)


def _peaks(seconds: Float64s, work: Float64s, own: npt.NDArray[np.bool_]) -> Peaks:
    """`seconds`, `work`: (F, I) of each function in each iteration; `own`: (F,) which count as own work."""
    count = seconds.shape[1]
    if not own.any() or count < 2:
        return Peaks(np.full(count, -1, np.int32), np.zeros(count), np.full(count, np.nan))
    # A quarter up from below: half of the steps may be long, and then the median is no usual one.
    usual, usual_work = np.quantile([seconds, work], 0.25, axis=2, method="lower")
    excess = seconds - usual[:, None]
    excess[~own] = -np.inf
    best = excess.argmax(0)
    rise = np.maximum(excess[best, np.arange(count)], 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        by_work = np.clip((work[best, np.arange(count)] / usual_work[best] - 1) * usual[best] / rise, 0.0, 1.0)
    return Peaks(best.astype(np.int32), rise, np.where((usual_work[best] > 0) & (rise > 0), by_work, np.nan))


BLOCKING_LAUNCHES = 0.9
"""Share of the kernels whose launch call must outlast them to say that launches block. A call that returns when the
kernel is queued outlasts a few of the shortest at most."""
FEW_KERNELS = 20
"""Fewer launches than this say nothing about how a rank launches."""


def _launches_block(trace: Trace) -> bool:
    """Whether launch calls wait for their kernels, as with CUDA_LAUNCH_BLOCKING."""
    calls = np.flatnonzero((trace.category == Category.RUNTIME) & (trace.correlation > 0))
    kernels = np.flatnonzero((trace.category == Category.KERNEL) & (trace.correlation > 0))
    if len(calls) < FEW_KERNELS or len(kernels) < FEW_KERNELS:
        return False
    order = np.argsort(trace.correlation[calls], kind="stable")
    calls = calls[order]
    at = np.minimum(np.searchsorted(trace.correlation[calls], trace.correlation[kernels]), len(calls) - 1)
    found = trace.correlation[calls[at]] == trace.correlation[kernels]
    call, kernel = calls[at[found]], kernels[found]
    if len(kernel) < FEW_KERNELS:
        return False
    outlasts = trace.ts_ns[call] + trace.dur_ns[call] >= trace.ts_ns[kernel] + trace.dur_ns[kernel]
    return bool(outlasts.mean() >= BLOCKING_LAUNCHES)


def summarize(trace: Trace, samples: Samples | None = None) -> Summary:
    """One rank's patterns and ledger. Pure; a trace without any event gives an empty summary with explained = 0.

    A trace of unknown rank is taken as rank 0 of its own: give `read_trace` a rank to say otherwise.
    """
    path = critical_spans(trace)
    patterns, peaks = _patterns(trace, path, samples)
    if path.iterations.count >= FEW_STEPS:
        # What a function does not tell of its own work, the operators of the step may.
        own = np.isin(path.activity, sorted(OWN_WORK))
        own_s = np.bincount(path.iteration[own], path.owned_ns[own] / 1e9, path.iterations.count).astype(np.float64)
        by_load = explained_by_load(own_s, *load_of(trace, path.iterations))
        peaks = replace(peaks, by_work=np.where(np.isnan(peaks.by_work), by_load, peaks.by_work))
    ledger = ledger_of(trace, path, peaks)
    num_kernels = int(np.count_nonzero(trace.category == Category.KERNEL))
    num_launches = int(np.count_nonzero((trace.category == Category.RUNTIME) & (trace.correlation > 0)))
    notes = list(trace.damage.notes)
    if num_launches > 20 and not num_kernels:
        notes.append(
            f"no device data although {num_launches} launches were seen: the device side of this rank was not recorded"
        )
    elif num_kernels and num_launches > 20 and path.has_device:
        linked = np.isin(
            trace.correlation[(trace.category == Category.RUNTIME) & (trace.correlation > 0)],
            trace.correlation[trace.category == Category.KERNEL],
        )
        if linked.mean() < 0.02:
            notes.append(
                "launches and device events hardly match by correlation id: links between host and device are unknown"
            )
    if ledger.dropped_channels:
        notes.append(f"{ledger.dropped_channels} process groups with the least exposed time are not told apart")
    return Summary(
        rank=trace.rank if trace.rank is not None else 0,
        world_size=trace.world_size,
        host=trace.host,
        device_model=trace.device_model,
        groups=trace.groups,
        steps_by=path.iterations.by,
        window_s=path.iterations.window_ns / 1e9,
        started_ns=int(path.iterations.bounds_ns[0]) if trace.epoch else None,
        num_iterations=path.iterations.count,
        patterns=patterns,
        ledger=ledger,
        coverage=Coverage(
            num_events=len(trace),
            num_kernels=num_kernels,
            num_launches=num_launches,
            num_collectives=int(np.count_nonzero(trace.collectives.transfers)),
            explained=path.explained,
            has_device=path.has_device,
            partial=trace.damage.truncated
            or trace.damage.skipped_events > 0.01 * max(len(trace), 1)
            or (num_launches > 20 and not num_kernels),
            epoch=trace.epoch,
            notes=tuple(notes),
            launches_block=_launches_block(trace),
        ),
    )


@dataclass(frozen=True, slots=True)
class Stacked:
    """Summaries of W ranks, lined up. F functions, I iterations, A activities. Rows follow ascending rank."""

    ranks: Int32s
    """(W,)"""
    hosts: tuple[str, ...]
    device_models: tuple[str, ...]
    world_size: int
    """Ranks expected: the largest that any trace tells, at least those seen."""
    functions: tuple[Function, ...]
    beta: Float32s
    """(W, F) 0 where below the rank's cut-off."""
    mu: Float32s
    """(W, F) NaN = not measured."""
    sigma: Float32s
    """(W, F)"""
    mu_source: UInt8s
    """(W, F)"""
    work: Float64s
    """(W, F) Per iteration; NaN = not told or below the cut-off."""
    count: Float32s
    """(W, F) Executions per iteration; NaN below the cut-off."""
    cutoff: Float32s
    """(W,)"""
    activity_beta: Float32s
    """(W, A)"""
    iteration_s: Float64s
    """(W,) Mean length of an iteration: window / iterations."""
    steps: Int64s
    """(I,) Steps that some rank reports; NaN in the arrays below where a rank does not."""
    length_s: Float64s
    """(W, I)"""
    own_s: Float64s
    """(W, I)"""
    exposed_s: Float64s
    """(W, I)"""
    waiting_s: Float64s
    """(W, I)"""
    top_function: Int32s
    """(W, I) Index into `functions`; -1 = none."""
    top_excess_s: Float64s
    """(W, I)"""
    top_by_work: Float64s
    """(W, I)"""
    joined: Joined
    summaries: tuple[Summary, ...]
    """As given, by rank: for groups, coverage, samples of the ledger."""

    def __len__(self) -> int:
        return len(self.ranks)


def _function_codes(summaries: Sequence[Summary]) -> tuple[dict[int, npt.NDArray[np.int64]], list[Function]]:
    """All functions in order of appearance, and for each tuple of functions, by its identity, their places in there.

    By identity first: what was decoded or made in one process shares its records, and to hash forty of them for each of
    a million ranks takes longer than all else.
    """
    number: dict[Function, int] = {}
    by_identity: dict[int, int] = {}
    codes: dict[int, npt.NDArray[np.int64]] = {}

    for summary in summaries:
        own = summary.patterns.functions
        if id(own) in codes:
            continue
        places = list(map(by_identity.get, map(id, own)))
        if None in places:
            for function in own:
                by_identity.setdefault(id(function), number.setdefault(function, len(number)))
            places = [by_identity[id(function)] for function in own]
        codes[id(own)] = np.array(places, np.int64)
    return codes, list(number)


def stack(summaries: Sequence[Summary]) -> Stacked:
    """Line summaries up by rank, function and step. Ranks must differ (ValueError), order does not matter.

    All ranks at once, as columns, so that a million of them take seconds.
    """
    ordered = tuple(sorted(summaries, key=lambda s: s.rank))
    ranks = np.array([s.rank for s in ordered], np.int32)
    if len(np.unique(ranks)) != len(ranks):
        raise ValueError("stack: two summaries have the same rank")
    codes, known = _function_codes(ordered)
    num_functions = np.array([len(s.patterns.functions) for s in ordered], np.int64)
    code = end_to_end([codes[id(s.patterns.functions)] for s in ordered], np.int64)
    betas = end_to_end([s.patterns.beta for s in ordered], np.float32)
    weight = np.zeros(len(known))
    np.fmax.at(weight, code, betas.astype(np.float64))
    by_weight = sorted(
        range(len(known)),
        key=lambda k: (
            *(-weight[k], known[k].activity, known[k].name),
            *(known[k].location or "", known[k].user_location or ""),
        ),
    )
    functions = tuple(known[k] for k in by_weight)
    column_of = np.empty(len(known), np.int64)
    column_of[by_weight] = np.arange(len(known))
    column = column_of[code]
    shape = (len(ordered), len(functions))
    every = np.arange(len(ordered), dtype=np.int64)
    cell = np.repeat(every, num_functions) * len(functions) + column

    def by_function(values: Sequence[npt.NDArray[Any]], empty: npt.NDArray[Any]) -> npt.NDArray[Any]:
        empty.reshape(-1)[cell] = end_to_end(values, empty.dtype.type)
        return empty

    beta = by_function([s.patterns.beta for s in ordered], np.zeros(shape, np.float32))
    mu = by_function([s.patterns.mu for s in ordered], np.full(shape, np.nan, np.float32))
    sigma = by_function([s.patterns.sigma for s in ordered], np.full(shape, np.nan, np.float32))
    count = by_function([s.patterns.count for s in ordered], np.full(shape, np.nan, np.float32))
    work = by_function([s.patterns.work for s in ordered], np.full(shape, np.nan))
    source = by_function([s.patterns.mu_source for s in ordered], np.zeros(shape, np.uint8))
    del cell
    num_steps = np.array([len(s.ledger.steps) for s in ordered], np.int64)
    own_steps = end_to_end([s.ledger.steps for s in ordered], np.int64)
    steps = np.unique(own_steps)
    row = np.repeat(every, num_steps)
    cell = row * len(steps) + np.searchsorted(steps, own_steps)

    def by_step(values: Sequence[npt.NDArray[Any]]) -> Float64s:
        made: Float64s = np.full((len(ordered), len(steps)), np.nan)
        made.reshape(-1)[cell] = end_to_end(values, np.float32)
        return made

    ledgers = [s.ledger for s in ordered]
    length, own = by_step([of.length_s for of in ledgers]), by_step([of.own_s for of in ledgers])
    exposed, waiting = by_step([of.exposed_s for of in ledgers]), by_step([of.waiting_s for of in ledgers])
    top_excess, by_work = by_step([of.top_excess_s for of in ledgers]), by_step([of.top_by_work for of in ledgers])
    top = np.full((len(ordered), len(steps)), -1, np.int32)
    told_top = end_to_end([of.top_function for of in ledgers], np.int32)
    has_top = (told_top >= 0) & (num_functions[row] > 0)
    first_function = np.cumsum(num_functions) - num_functions
    top.reshape(-1)[cell[has_top]] = column[first_function[row[has_top]] + told_top[has_top]]
    told = [s.world_size for s in ordered if s.world_size]
    groups = [] if told else [max(g.ranks) + 1 for s in ordered for g in s.groups if g.ranks]
    seen = int(ranks.max()) + 1 if len(ranks) else 0
    return Stacked(
        ranks=ranks,
        hosts=tuple(s.host for s in ordered),
        device_models=tuple(s.device_model for s in ordered),
        world_size=max([*told, *groups, 0 if told else seen, len(ranks)]),
        functions=functions,
        beta=beta,
        mu=mu,
        sigma=sigma,
        mu_source=source,
        work=work,
        count=count,
        cutoff=np.array([s.patterns.cutoff for s in ordered], np.float32),
        activity_beta=end_to_end([s.patterns.activity_beta for s in ordered], np.float32).reshape(
            len(ordered), NUM_ACTIVITIES
        ),
        iteration_s=np.array([s.window_s / max(s.num_iterations, 1) for s in ordered]),
        steps=steps,
        length_s=length,
        own_s=own,
        exposed_s=exposed,
        waiting_s=waiting,
        top_function=top,
        top_excess_s=top_excess,
        top_by_work=by_work,
        joined=join(ledgers),
        summaries=ordered,
    )
