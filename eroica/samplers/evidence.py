"""What counters say of an interval: samples on a trace's clock, plain numbers per target, and those that stand out.

`samples_for` feeds `summarize`; `counters` is what a host sends (JSON, a few kilobytes); `stand_out` compares the
targets of all hosts with each other and with what is never normal. Not here: causes. An observation is evidence for a
diagnosis and blames nobody: a power cap is active on many a healthy device. Pure but for reading the recorder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict, get_args

import numpy as np

from eroica.samplers import Kind, Metric, Rank, Target
from eroica.samplers.recorder import MAX_TARGETS, Recorder, Series, rates
from eroica.trace import Float64s, Int64s, Samples

MOST_TEXT, MOST_VALUES, LARGEST = 400, 100, 1e300
LEAST_PAST = 5
"""Readings before an interval that tell what is usual, at least: ten seconds of them."""
LATELY_S = 30.0
"""So long before an interval is looked at, too: a slowdown is captured some seconds after it began, and may be gone."""
FAR_S = 5.0
"""A counter of another target that was read so far from an instant says nothing about it."""


class Counted(TypedDict):
    """One target's counters over an interval, as they travel."""

    kind: Kind
    name: str
    rank: int | None
    values: dict[str, float]
    """By the rate's name, else the metric's; a counter without a rate: its increase."""
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Line:
    """One number over time."""

    ts_ns: Int64s
    values: Float64s


def _line(series: Series, name: str, metric: Metric) -> _Line | None:
    """A metric as it is told: a rate stands in the middle of the time that it is made of."""
    values = series.values.get(name)
    if values is None:
        return None
    if not metric.grows:
        return _Line(series.wall_ns, values)
    middle = series.wall_ns.copy()
    middle[1:] -= np.diff(series.wall_ns) // 2
    return _Line(middle[1:], rates(series.mono_ns, values, series.gap, metric.per)[1:])


def _nearest(grid: Int64s, line: _Line | None) -> Float64s:
    if line is None or not len(line.ts_ns):
        return np.full(len(grid), np.nan)
    at = np.clip(np.searchsorted(line.ts_ns, grid), 0, len(line.ts_ns) - 1)
    before = np.maximum(at - 1, 0)
    at = np.where(grid - line.ts_ns[before] < np.abs(line.ts_ns[at] - grid), before, at)
    found = line.values[at].astype(np.float64)
    found[np.abs(line.ts_ns[at] - grid) > FAR_S * 1e9] = np.nan
    return found


def _drives(series: Series, rank: Rank) -> bool:
    """Whether this is the device of a rank: as the rank says, else by the processes on it."""
    if rank.device:
        known = (series.target.name, series.labels.get("uuid", ""), series.labels.get("pci", ""))
        return rank.device.lower() in [name.lower() for name in known]
    return str(rank.pid) in series.labels.get("pids", "").split()


def samples_for(
    recorder: Recorder, rank: Rank, start_ns: int, end_ns: int, *, crosses_hosts: bool = False
) -> Samples | None:
    """Counters of a rank over an interval since 1970, on the clock of its trace; None if none were read.

    `crosses_hosts`: whether the job runs on several hosts; else a network card says nothing about its collectives, and
    `nic_gbps` is left out. All ranks of a network namespace share its cards.
    """
    every = list(recorder.between(start_ns, end_ns))
    own = [s for s in every if s.target.kind == "rank" and s.target.rank == rank.rank and s.target.pid == rank.pid]
    devices = [s for s in every if s.target.kind == "device" and _drives(s, rank)]
    if not own and not devices:
        return None
    base = max(own or devices, key=lambda s: len(s.wall_ns))
    grid = base.wall_ns.copy()
    grid[1:] -= np.diff(base.wall_ns) // 2
    grid = grid[1:]
    metrics = recorder.metrics
    values: dict[str, Float64s] = {}
    if own:
        values["cpu_ratio"] = _nearest(grid, _line(own[0], "driving_cpu_ns", metrics["driving_cpu_ns"]))
        if "driving_wait_ns" in own[0].values:
            values["runqueue_ratio"] = _nearest(grid, _line(own[0], "driving_wait_ns", metrics["driving_wait_ns"]))
    if devices:
        for name in ("sm_clock_ratio", "throttle"):
            if name in devices[0].values:
                values[name] = _nearest(grid, _line(devices[0], name, metrics[name]))
        values |= _sum("pcie_gbps", grid, devices[:1], ("pcie_rx_bytes", "pcie_tx_bytes"), metrics)
    if crosses_hosts:
        ports = [s for s in every if s.target.kind == "port"]
        cards = [s for s in every if s.target.kind == "nic" and s.target.name.rpartition("/")[2] != "lo"]
        inside = [s for s in cards if s.target.rank == rank.rank]
        outside = [s for s in cards if s.target.rank is None]
        names = ("port_rx_bytes", "port_tx_bytes") if ports else ("rx_bytes", "tx_bytes")
        values |= _sum("nic_gbps", grid, ports or inside or outside, names, metrics)
    return Samples(grid, values)


def _sum(
    told: str, grid: Int64s, chosen: Sequence[Series], names: tuple[str, str], metrics: Mapping[str, Metric]
) -> dict[str, Float64s]:
    """The busier direction, summed over targets: what a link carries one way is what limits it."""
    ways: list[Float64s] = []
    for name in names:
        lines = [_nearest(grid, _line(s, name, metrics[name])) for s in chosen if name in s.values]
        if lines:
            ways.append(np.nansum(lines, axis=0) + np.where(np.isnan(lines).all(axis=0), np.nan, 0.0))
    return {told: np.fmax.reduce(ways)} if ways else {}


def counters(recorder: Recorder, start_ns: int, end_ns: int) -> list[Counted]:
    """Every target's counters over an interval since 1970, as one number each.

    Of a metric with a past there are two more: what it was in the middle of the readings before (`usual_...`), and the
    most that two readings after each other have shown lately (`lately_...`).
    """
    found: list[Counted] = []
    past = _past(recorder, start_ns, end_ns)
    for series in recorder.between(start_ns, end_ns):
        values: dict[str, float] = {}
        for name, column in series.values.items():
            metric = recorder.metrics[name]
            known = column[np.isfinite(column)]
            if not len(known):
                continue
            if metric.grows:
                told = _increase(series, column, metric)
                if told is not None:
                    values[metric.rate or name] = told
            else:
                over = {"median": np.median(known), "mean": known.mean(), "max": known.max()}
                values[name] = float(over[metric.over])
        target = series.target
        values |= past.get(target, {})
        if target.kind == "way" and not values.get("way_mbps") and not values.get("way_got_mbps"):
            continue  # most connections of a job are idle: every rank has one to every other
        found.append(
            Counted(kind=target.kind, name=target.name, rank=target.rank, values=values, labels=dict(series.labels))
        )
    return found


def _past(recorder: Recorder, start_ns: int, end_ns: int) -> dict[Target, dict[str, float]]:
    """What metrics with a past were before the interval, and lately."""
    told = {name: metric for name, metric in recorder.metrics.items() if metric.has_past}
    found: dict[Target, dict[str, float]] = {}
    for series in recorder.between(0, end_ns) if told else ():
        for name in told.keys() & series.values.keys():
            line = _line(series, name, told[name])
            assert line is not None
            known = np.isfinite(line.values)
            at_ns, values = line.ts_ns[known], line.values[known]
            before = values[at_ns < start_ns]
            if len(before) < LEAST_PAST:
                continue
            lately = values[(at_ns >= start_ns - LATELY_S * 1e9) & (at_ns <= end_ns)]
            named = told[name].rate or name
            found.setdefault(series.target, {})[f"usual_{named}"] = float(np.median(before))
            if len(lately) > 1:
                found[series.target][f"lately_{named}"] = float(np.minimum(lately[1:], lately[:-1]).max())
    return found


def parse_counted(plain: object) -> list[Counted]:
    """What `counters` gave, after its travel. What is malformed or beyond bounds is left out: hosts are not trusted."""
    found: list[Counted] = []
    for one in plain[:MAX_TARGETS] if isinstance(plain, list) else []:
        if not isinstance(one, dict) or one.get("kind") not in get_args(Kind) or not isinstance(one.get("name"), str):
            continue
        rank, values, labels = one.get("rank"), one.get("values"), one.get("labels")
        if isinstance(rank, bool) or not isinstance(rank, int | None):
            continue
        numbers = values.items() if isinstance(values, dict) else ()
        words = labels.items() if isinstance(labels, dict) else ()
        sound = {
            str(name)[:MOST_TEXT]: float(value)
            for name, value in numbers
            # Integers may be longer than any float.
            if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST
        }
        texts = {str(name)[:MOST_TEXT]: text[:MOST_TEXT] for name, text in words if isinstance(text, str)}
        found.append(
            Counted(
                kind=one["kind"],
                name=one["name"][:MOST_TEXT],
                rank=rank,
                values=dict(list(sound.items())[:MOST_VALUES]),
                labels=dict(list(texts.items())[:MOST_VALUES]),
            )
        )
    return found


def _increase(series: Series, counts: Float64s, metric: Metric) -> float | None:
    """Over the whole interval; a part in which the count fell is left out."""
    known = np.flatnonzero(np.isfinite(counts))
    rise, seconds = np.diff(counts[known]), np.diff(series.mono_ns[known]) / 1e9
    sound = rise >= 0
    if not sound.any() or not seconds[sound].sum():
        return None
    total = float(rise[sound].sum())
    return total / float(seconds[sound].sum()) / metric.per if metric.rate else total
