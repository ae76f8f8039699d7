"""What simpler rules say about the same windows: what one would do without eroica, and what its peers' rules do.

Each takes the traces that eroica saw and names ranks, or nobody. None tells causes or functions, so they are judged by
ranks alone, and generously: whoever names culprits and nobody else is right, even if it names only some of them, and
where no rank is to blame (a configuration, a moving culprit, a link without ends, a healthy job) silence is right. They
also owe to eroica that there is a window of the fault at all. The rules of peers are re-made from their documents, with
the peers' own thresholds; `python -m evals peers` runs the peers themselves. Used by `evals.suites` and `evals.rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eroica.critical_path import iterations_of
from eroica.findings import Diagnosis
from eroica.job import format_ranks, parse_ranks
from eroica.names import Phase, read_host_name
from eroica.trace import Category, CollectiveKind, Trace, find_traces, read_all
from evals.truth import Truth

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

STANDS_OUT = 1.05
"""A rank is slow from so many times the median on; eroica's floor is 5 % as well."""
LATE_SHARE = 0.5
"""Whoever comes last in more than half of the collectives is the last arriver."""
TRACEML_SCORE = 0.10
"""TraceML reports a straggler from this share of the step on (docs/developer_guide/rank-straggler-policy.md)."""
NVRX_SCORE = 0.75
"""NVRx calls a rank whose score is below this a straggler (its documents' default)."""
MANY_SIGMAS = 3.5
"""Of the median absolute deviation: what textbooks call an outlier."""
_DEVICE = (Category.KERNEL, Category.COPY, Category.MEMSET)
_COLLECTIVES = (
    CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Naming:
    """What a rule says."""

    ranks: frozenset[int]
    """Empty = nobody."""


@dataclass(frozen=True, slots=True)
class Window:
    """One capture: a trace per rank."""

    traces: tuple[Trace, ...]


def windows_in(folder: Path, since_ns: int = 0) -> Iterator[Window]:
    """The captures that `eroica run --keep-captures` left, in the order of their making.

    since_ns: when the fault began, since 1970; windows that had ended by then cannot show it and are left out.
    """
    for capture in sorted(folder.glob("captures-*"), key=lambda path: path.stat().st_mtime):
        if not any(capture.iterdir()):
            continue  # of a window to which no rank gave a trace
        window = Window(tuple(read_all(find_traces([capture]))))
        if any(len(trace) and int(trace.ts_ns[-1]) > since_ns for trace in window.traces):
            yield window


# Judging by ranks alone.


def to_blame(truth: Truth) -> frozenset[int]:
    """The ranks that may be named; empty where nobody may."""
    everyone = frozenset(range(truth.world_size))
    named = frozenset().union(
        *(fault.ranks for fault in truth.faults if fault.answer.who in ("ranks", "among", "hosts", "link"))
    )
    return frozenset() if named == everyone else named


def judge(naming: Naming | None, truth: Truth) -> str:
    """right, "wrong: RANKS", nobody (where somebody was to be named), or "-"."""
    if naming is None:
        return "-"
    culprits, named = to_blame(truth), naming.ranks
    if len(named) == truth.world_size:  # all of them are as good as none
        named = frozenset()
    if not named:
        return "nobody" if culprits else "right"
    return "right" if named <= culprits else f"wrong: {format_ranks(sorted(named))}"


def product(diagnoses: Sequence[Diagnosis], truth: Truth) -> Naming:
    """Whom eroica named, all findings of all diagnoses together: what it is compared by with these rules."""
    named = frozenset().union(
        *(
            parse_ranks(finding.ranks)
            for diagnosis in diagnoses
            for finding in diagnosis.findings
            if len(parse_ranks(finding.ranks)) < truth.world_size
        )
    )
    return Naming(named)


# What rules look at.


def _iterations_ns(trace: Trace) -> Int64s:
    return np.diff(iterations_of(trace).bounds_ns)


def _step_ns(window: Window) -> float:
    """The usual length of an iteration."""
    return float(np.median([np.median(lengths) for trace in window.traces if len(lengths := _iterations_ns(trace))]))


def _rank(trace: Trace) -> int:
    assert trace.rank is not None
    return trace.rank


def _covered_ns(trace: Trace, rows: Bools) -> int:
    """Length of the union of these events."""
    start, end = trace.ts_ns[rows], trace.ts_ns[rows] + trace.dur_ns[rows]
    if not len(start):
        return 0
    reached = np.maximum.accumulate(end)
    before = np.append(start[:1], reached[:-1])
    return int(np.maximum(reached - np.maximum(before, start), 0).sum())


def _is_communication(trace: Trace) -> Bools:
    """(events,)"""
    by_name = np.array([read_host_name(name).phase == Phase.COMMUNICATION for name in trace.strings], bool)
    found = by_name[trace.name] if len(by_name) else np.zeros(len(trace), bool)
    found[trace.collectives.event] = True
    return found


def phases_ns(trace: Trace) -> dict[str, float]:
    """Wall time per iteration of each phase, waiting included, as timers around the phases of a training loop give it.

    Of the device where there is one: what was launched in backward lasts until its last kernel, as CUDA events say.
    forward is what is left of the iteration.
    """
    count, window_ns = len(_iterations_ns(trace)), int(_iterations_ns(trace).sum())
    phase = np.array([read_host_name(name).phase for name in trace.strings], np.int64)[trace.name]
    host = ~np.isin(trace.category, (*_DEVICE, Category.DEVICE_ANNOTATION))
    inside = {name: host & (phase == of) for name, of in
              (("input", Phase.INPUT), ("backward", Phase.BACKWARD), ("optimizer", Phase.OPTIMIZER))}  # fmt: skip
    device = np.isin(trace.category, _DEVICE)
    if device.any():
        for name in ("backward", "optimizer"):
            inside[name] = device & _launched_in(trace, inside[name])
    measured = {name: _covered_ns(trace, rows) / max(count, 1) for name, rows in inside.items()}
    left = window_ns / max(count, 1) - sum(measured.values())
    return {**measured, "forward": max(left, 0.0)}


def _launched_in(trace: Trace, spans: Bools) -> Bools:
    """(events,) Whose launch lies in one of these host events."""
    start, end = trace.ts_ns[spans], np.maximum.accumulate(trace.ts_ns[spans] + trace.dur_ns[spans])
    calls = np.flatnonzero((trace.category == Category.RUNTIME) & (trace.correlation != 0))
    if not len(start) or not len(calls):
        return np.zeros(len(trace), bool)
    before = np.searchsorted(start, trace.ts_ns[calls], "right") - 1
    called = (before >= 0) & (trace.ts_ns[calls] < end[np.maximum(before, 0)])
    return np.isin(trace.correlation, trace.correlation[calls[called]])


# The rules.


def slowest_step(window: Window) -> Naming:
    """The ranks whose iterations take longest."""
    medians = {
        trace.rank: float(np.median(lengths))
        for trace in window.traces
        if trace.rank is not None and len(lengths := _iterations_ns(trace))
    }
    usual = float(np.median(list(medians.values()))) if medians else 0.0
    return Naming(frozenset(rank for rank, length in medians.items() if length > STANDS_OUT * usual))


def longest_phase(window: Window) -> Naming:
    """The ranks that spend most beyond the median in input, forward, backward or optimizer, whichever differs most."""
    measured = {_rank(trace): phases_ns(trace) for trace in window.traces}
    floor, worst, named = (STANDS_OUT - 1) * _step_ns(window), 0.0, frozenset[int]()
    for phase in ("input", "forward", "backward", "optimizer"):
        usual = float(np.median([of[phase] for of in measured.values()]))
        excess = {rank: of[phase] - usual for rank, of in measured.items()}
        most = max(excess.values())
        if most > max(floor, worst):
            worst = most
            named = frozenset(rank for rank, over in excess.items() if over > max(floor, most / 2))
    return Naming(named)


def shortest_backward(window: Window) -> Naming:
    """TraceML's rule: whoever has the shortest backward, and so waited least in it, is late; against the upper median,
    as a share of that rank's step. FSDP's forward pass is counted as backward, as it waits too."""
    backward = {_rank(trace): phases_ns(trace)["backward"] for trace in window.traces}
    if len(backward) < 2 or not all(backward.values()):
        return Naming(frozenset())
    order = sorted(backward, key=lambda rank: (backward[rank], rank))
    culprit, victim = order[0], order[len(order) // 2]
    score = (backward[victim] - backward[culprit]) / _step_ns(window)
    return Naming(frozenset([culprit]) if score >= TRACEML_SCORE else frozenset())


def fastest_reference(window: Window) -> Naming:
    """NVRx's rule: each kernel (operator, on a CPU) against the fastest rank's median of it, weighted by its time."""
    medians: list[dict[str, float]] = []
    totals: list[dict[str, float]] = []
    for trace in window.traces:
        kernels = trace.category == Category.KERNEL
        wanted = (kernels if kernels.any() else trace.category == Category.CPU_OP) & ~_is_communication(trace)
        rows = np.flatnonzero(wanted)
        rows = rows[np.argsort(trace.name[rows], kind="stable")]
        ids, first = np.unique(trace.name[rows], return_index=True)
        parts = np.split(trace.dur_ns[rows], first[1:]) if len(ids) else []
        names = [trace.strings[i] for i in ids]
        medians.append({name: float(np.median(part)) for name, part in zip(names, parts, strict=True)})
        totals.append({name: float(part.sum()) for name, part in zip(names, parts, strict=True)})
    fastest: dict[str, float] = {}
    for medians_of in medians:
        for name, value in medians_of.items():
            fastest[name] = min(value, fastest.get(name, value))
    slow = set()
    for trace, own, total in zip(window.traces, medians, totals, strict=True):
        timed = {name: time for name, time in total.items() if own[name] > 0}
        if timed:
            score = sum(fastest[name] / own[name] * time for name, time in timed.items()) / sum(timed.values())
            if score < NVRX_SCORE:
                slow.add(_rank(trace))
    return Naming(frozenset(slow))


def last_arriver(window: Window) -> Naming:
    """The rank that enters most collectives last, by the time stamps as they stand in the traces (clocks of hosts may
    be apart), if it is more than half of them and late by more than the floor on the whole."""
    entered: dict[tuple[object, int, int], dict[int, int]] = {}
    for trace in window.traces:
        table = trace.collectives
        rows = np.flatnonzero(table.transfers & np.isin(table.kind, _COLLECTIVES))
        bounds, steps = iterations_of(trace).bounds_ns, iterations_of(trace).steps
        count: dict[tuple[object, int], int] = {}
        who = [group.ranks or group.name for group in trace.groups]
        for row in rows[np.argsort(trace.ts_ns[table.event[rows]], kind="stable")]:
            begin, group = int(trace.ts_ns[table.event[row]]), int(table.group[row])
            iteration = int(np.searchsorted(bounds, begin, "right")) - 1
            if 0 <= iteration < len(steps):
                key = (who[group] if group >= 0 else "", int(steps[iteration]))
                count[key] = count.get(key, 0) + 1
                entered.setdefault((*key, count[key]), {})[_rank(trace)] = begin
    lateness: dict[int, list[int]] = {}
    compared = [times for times in entered.values() if len(times) > 1]
    for times in compared:
        order = sorted(times, key=lambda rank: times[rank])
        lateness.setdefault(order[-1], []).append(times[order[-1]] - int(np.median(list(times.values()))))
    if not lateness:
        return Naming(frozenset())
    rank = max(sorted(lateness), key=lambda rank: len(lateness[rank]))
    steps_seen = max(len({step for _, step, _ in entered}), 1)
    is_late = sum(lateness[rank]) / steps_seen > (STANDS_OUT - 1) * _step_ns(window)
    often = len(lateness[rank]) > LATE_SHARE * len(compared)
    return Naming(frozenset([rank]) if often and is_late else frozenset())


def outliers(window: Window) -> Naming:
    """Every function of every rank, time per iteration, by a robust z-score; those below the floor are left out."""
    measured: dict[str, dict[int, float]] = {}
    for trace in window.traces:
        per = np.bincount(trace.name, weights=trace.dur_ns, minlength=len(trace.strings))
        count = max(len(_iterations_ns(trace)), 1)
        for name, value in zip(trace.strings, per.tolist(), strict=True):
            if value:
                measured.setdefault(name, {})[_rank(trace)] = value / count
    floor, found = (STANDS_OUT - 1) * _step_ns(window), set[int]()
    ranks = [_rank(trace) for trace in window.traces]
    for of in measured.values():
        values = np.array([of.get(rank, 0.0) for rank in ranks])
        away = values - np.median(values)
        sigma = 1.4826 * float(np.median(np.abs(away)))
        found |= {rank for rank, over in zip(ranks, away.tolist(), strict=True)
                  if over > floor and over > MANY_SIGMAS * sigma}  # fmt: skip
    return Naming(frozenset(found))


RULES: Mapping[str, Callable[[Window], Naming]] = {
    "slowest step": slowest_step,
    "longest phase": longest_phase,
    "shortest backward (TraceML's rule)": shortest_backward,
    "fastest rank as reference (NVRx's rule)": fastest_reference,
    "last arriver by clock": last_arriver,
    "z-score of everything": outliers,
}


def all_of(windows: Sequence[Window], world_size: int) -> dict[str, Naming | None]:
    """What each rule says about the last window (the one that the fault triggered); None where there is none."""
    if not windows or len(windows[-1].traces) < world_size or world_size < 2:
        return dict.fromkeys(RULES)
    if any(trace.rank is None or not len(_iterations_ns(trace)) for trace in windows[-1].traces):
        return dict.fromkeys(RULES)
    return {name: rule(windows[-1]) for name, rule in RULES.items()}
