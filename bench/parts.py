"""What is measured: one function for each table, from processes to figures, beside the targets of the design (section
10).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.measure import Contender, Failure, Series, Spread, interleave
from bench.peers import Environment, readers
from bench.tables import Table, Target, figure, number
from bench.traces import Grown

READ_MBS = 800.0
SUMMARIZE_MBS = 300.0
MEMORY_SHARE = 0.5
HTA_TIMES = 30.0
LOCALIZE_S = 10.0
IMPORT_S = 0.03
PATTERN_BYTES, LEDGER_BYTES = 3072, 4096
_BUSY = 1.25
"""Wall time over CPU time above which a row says that something else had the core."""


@dataclass(frozen=True, slots=True)
class Input:
    """A trace to read."""

    label: str
    grown: Grown

    @property
    def megabytes(self) -> float:
        """1e6 bytes."""
        return self.grown.num_bytes / 1e6


def work(name: str, *arguments: str, label: str = "", one_core: bool = True) -> Contender:
    """A contender out of `bench.work`."""
    return Contender(label or f"eroica {name}", (sys.executable, "-m", "bench.work", name, *arguments), one_core)


def _speeds(series: Series, megabytes: float) -> Spread:
    return Spread.of([megabytes / float(told["seconds"]) for told in series.rounds])


def _busy(all_series: Sequence[Series]) -> tuple[str, ...]:
    shares = [float(told["seconds"]) / max(float(told["cpu_s"]), 1e-9) for s in all_series for told in s.rounds]
    if not shares or sorted(shares)[len(shares) // 2] < _BUSY:
        return ()
    return (f"The machine was busy: work took up to {max(shares):.1f} times its CPU time, so all figures are too low.",)


def _of_python(series: Series) -> str:
    return f"Of eroica's peak, {series.spread('before').middle / 1e6:.0f} MB are Python and numpy."


def reading(trace: Input, rounds: int, hta: Environment, json_tools: Environment, *, slow: bool) -> Table:
    """`read_trace` beside the peers. `slow`: HTA too, which takes minutes on 1 GB."""
    peers = readers(trace.grown.path, hta, json_tools)
    if not slow:
        peers = [peer for peer in peers if not peer.name.startswith("HTA")]
    ours = work("read", str(trace.grown.path), label="eroica read_trace")
    series = interleave([ours, *peers], rounds, note=trace.label)
    mine = series[ours.name]
    if mine.problem:
        raise Failure(mine.problem)
    events = {int(told["events"]) for told in mine.rounds}
    if events != {trace.grown.num_events}:
        raise Failure(f"read_trace found {events} events in {trace.grown.path}, not {trace.grown.num_events}")
    rows = []
    for one in series.values():
        if one.problem:
            rows.append((one.name, "-", "-", "-", "-", one.problem[:60]))
            continue
        peak = one.spread("peak").middle / 1e6
        rows.append(
            (
                one.name,
                figure(one.spread("seconds")),
                figure(_speeds(one, trace.megabytes)),
                "1" if one is mine else figure(mine.ratio(one, "seconds")),
                f"{peak:,.0f} ({peak / trace.megabytes:.2f})",
                f"{int(one.rounds[0]['events']):,}",
            )
        )
    speed = _speeds(mine, trace.megabytes).middle
    share = mine.spread("peak").middle / trace.grown.num_bytes
    targets = [
        Target(f"at least {READ_MBS:.0f} MB/s (here {number(speed)})", speed >= READ_MBS),
        Target(f"at most {MEMORY_SHARE} of the file in memory (here {number(share)})", share <= MEMORY_SHARE),
    ]
    default = series.get("HTA, default")
    if default and default.rounds:
        times = mine.ratio(default, "seconds").middle
        targets.append(Target(f"at least {HTA_TIMES:.0f} x HTA's default (here {number(times)} x)", times >= HTA_TIMES))
    notes = [*_busy(list(series.values())), _of_python(mine)]
    notes += [f"{environment.name}: {environment.problem}" for environment in (hta, json_tools) if environment.problem]
    if "HTA, its fastest (ijson)" in series:
        notes.append("HTA's fastest parser leaves Python frames out; the others keep all events.")
    return Table(
        f"Reading {trace.label}, {trace.grown.num_events:,} events, one core, rounds: {rounds}",
        ("reader", "seconds", "MB/s", "times eroica's", "peak MB (of the file)", "events"),
        tuple(rows),
        tuple(targets),
        tuple(notes),
        {"input": trace.label, "bytes": trace.grown.num_bytes, "series": _raw(series)},
    )


def summarizing(traces: Sequence[Input], rounds: int) -> Table:
    """`read_trace` and `summarize` together, with the split."""
    contenders = {work("summarize", str(t.grown.path), label=t.label).name: t for t in traces}
    series = interleave([work("summarize", str(t.grown.path), label=t.label) for t in traces], rounds, note="summarize")
    rows, targets = [], []
    for label, one in series.items():
        if one.problem:
            raise Failure(one.problem)
        trace = contenders[label]
        speed = _speeds(one, trace.megabytes)
        peak = one.spread("peak").middle / 1e6
        share = peak / trace.megabytes
        parts = [f"{one.spread(key).middle * 1e3:.0f}" for key in ("read_s", "path_s", "patterns_s", "ledger_s")]
        rows.append(
            (
                label,
                figure(speed),
                " / ".join(parts),
                f"{int(one.rounds[0]['events']):,}",
                f"{int(one.rounds[0]['iterations'])}",
                f"{float(one.rounds[0]['explained']):.0%}",
                f"{peak:,.0f} ({share:.2f})",
            )
        )
        targets.append(
            Target(
                f"{label}: at least {SUMMARIZE_MBS:.0f} MB/s (here {number(speed.middle)})",
                speed.middle >= SUMMARIZE_MBS,
            )
        )
        targets.append(
            Target(
                f"{label}: at most {MEMORY_SHARE} of the file in memory (here {number(share)})", share <= MEMORY_SHARE
            )
        )
    return Table(
        f"read_trace and summarize, one core, rounds: {rounds}",
        (
            "trace",
            "MB/s",
            "read / path / patterns / ledger, ms",
            "events",
            "iterations",
            "explained",
            "peak MB (of the file)",
        ),
        tuple(rows),
        tuple(targets),
        (*_busy(list(series.values())), _of_python(next(iter(series.values())))),
        _raw(series),
    )


def localizing(sizes: Sequence[tuple[int, int]], rounds: int) -> Table:
    """`localize` over (ranks, roles); a planted fault that is not the only answer fails the bench."""
    contenders = [
        work(
            "localize",
            str(ranks),
            str(roles),
            label=f"{ranks:,} ranks, {roles} role{'s' * (roles > 1)}",
            one_core=False,
        )
        for ranks, roles in sizes
    ]
    series = interleave(contenders, rounds, note="localize")
    rows, targets = [], []
    for one, (ranks, _) in zip(series.values(), sizes, strict=True):
        if one.problem:
            raise Failure(one.problem)
        for told in one.rounds:
            if not told["right"]:
                raise Failure(f"localize, {one.name}: planted {told['planted']}, found {told['found']}")
        input_mb, peak_mb = one.spread("before").middle / 1e6, one.spread("peak").middle / 1e6
        rows.append(
            (one.name, figure(one.spread("seconds")), f"{peak_mb:.0f}", f"{input_mb:.0f}", "found, nothing else")
        )
        if ranks >= 1_000_000:
            seconds = one.spread("seconds").middle
            targets.append(
                Target(f"{one.name}: at most {LOCALIZE_S:.0f} s (here {number(seconds)} s)", seconds <= LOCALIZE_S)
            )
    return Table(
        f"localize, 40 functions, one planted fault, rounds: {rounds}",
        ("workers", "seconds", "peak MB", "MB before (input and its making)", "planted cell"),
        tuple(rows),
        tuple(targets),
        _busy(list(series.values())),
        _raw(series),
    )


def sizes(paths: Sequence[Path]) -> Table:
    """Bytes per worker on the wire."""
    series = interleave([work("size", *map(str, paths))], 1, note="bytes per worker")
    (one,) = series.values()
    if one.problem:
        raise Failure(one.problem)
    told = one.rounds[0]["rows"]
    rows = [
        (
            row["trace"],
            str(row["functions"]),
            str(row["samples"]),
            f"{row['patterns']:,}",
            f"{row['ledger']:,}",
            f"{row['names']:,}",
        )
        for row in told
    ]
    patterns, ledger = max(row["patterns"] for row in told), max(row["ledger"] for row in told)
    return Table(
        "Bytes per worker",
        ("rank of", "functions", "samples", "patterns", "ledger", "names, once per job"),
        tuple(rows),
        (
            Target(f"patterns at most {PATTERN_BYTES:,} bytes (here {patterns:,})", patterns <= PATTERN_BYTES),
            Target(f"ledger at most {LEDGER_BYTES:,} bytes (here {ledger:,})", ledger <= LEDGER_BYTES),
        ),
        data=told,
    )


def importing(rounds: int) -> Table:
    """`import eroica` in a training process, with numpy's for comparison."""
    contenders = [work("load", module, label=f"import {module}") for module in ("eroica", "numpy")]
    series = interleave(contenders, rounds, note="import")
    for one in series.values():
        if one.problem:
            raise Failure(one.problem)
    rows = [
        (
            one.name,
            figure(Spread.of([float(told["seconds"]) * 1e3 for told in one.rounds])),
            str(one.rounds[0]["modules"]),
        )
        for one in series.values()
    ]
    own = series["import eroica"].spread("seconds").middle
    return Table(
        f"Import in a fresh interpreter, rounds: {rounds}",
        ("", "ms", "modules loaded"),
        tuple(rows),
        (Target(f"below {IMPORT_S * 1e3:.0f} ms (here {number(own * 1e3)} ms)", own < IMPORT_S),),
        data=_raw(series),
    )


def _raw(series: dict[str, Series]) -> dict[str, object]:
    return {name: {"rounds": one.rounds, "problem": one.problem} for name, one in series.items()}
