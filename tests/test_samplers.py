from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eroica.samplers
from eroica.samplers import GROUP, Metric, Missing, Rank, Reading, Target, open_samplers
from eroica.samplers.evidence import counters, parse_counted, samples_for
from eroica.samplers.host import METRICS as HOST
from eroica.samplers.nvml import METRICS as NVML
from eroica.samplers.rdma import METRICS as RDMA
from eroica.samplers.recorder import MAX_TARGETS, Recorder, rates
from eroica.samplers.standout import stand_out

SECOND = 1_000_000_000
MS = 1_000_000
START = 1_700_000_000 * SECOND


class Clock:
    """Both clocks of a recorder, moved by hand."""

    def __init__(self) -> None:
        self.ns = 0

    def wall(self) -> int:
        return START + self.ns

    def monotonic(self) -> int:
        return self.ns


class Scripted:
    """A sampler that says what it is told to."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self.metrics = metrics
        self.now: dict[Target, dict[str, float]] = {}
        self.labels: dict[Target, dict[str, str]] = {}
        self.reads: list[int] = []

    def read(self, now_ns: int, ranks: Sequence[Rank]) -> Reading:
        self.reads.append(now_ns)
        return Reading({target: dict(values) for target, values in self.now.items()}, self.labels)


RANK = Rank(0, 100)
OWN = Target("rank", "0", 0, 100)


def recorder_of(sampler: Scripted, **options: int) -> tuple[Recorder, Clock]:
    clock = Clock()
    return Recorder({"x": sampler}, wall_ns=clock.wall, monotonic_ns=clock.monotonic, **options), clock


def test_a_recorder_reads_seldom_outside_of_windows_and_often_inside() -> None:
    sampler = Scripted(HOST)
    recorder, clock = recorder_of(sampler)
    while clock.ns < 10 * SECOND:
        if clock.ns == 4 * SECOND:
            recorder.hurry(2)
        recorder.tick([RANK])
        clock.ns += 50 * MS
    outside = [at for at in sampler.reads if at < 4 * SECOND or at >= 6 * SECOND + 100 * MS]
    inside = [at for at in sampler.reads if 4 * SECOND <= at < 6 * SECOND]
    assert outside == [0, 2 * SECOND, 7900 * MS, 9900 * MS] and len(inside) == 20


def test_a_tick_says_when_the_next_one_is_due() -> None:
    recorder, clock = recorder_of(Scripted(HOST))
    assert recorder.tick([]) == 2
    clock.ns = SECOND // 2
    assert recorder.tick([]) == 1.5


def test_a_late_reading_leaves_a_gap_over_which_there_is_no_rate() -> None:
    sampler = Scripted(HOST)
    recorder, clock = recorder_of(sampler)
    for at in (0, 2, 4, 60, 62):
        clock.ns = at * SECOND
        sampler.now = {OWN: {"driving_cpu_ns": float(clock.ns)}}
        recorder.tick([RANK])
    (series,) = recorder.between(START, START + 100 * SECOND)
    found = rates(series.mono_ns, series.values["driving_cpu_ns"], series.gap, 1e9)
    assert series.gap.tolist() == [False, False, False, True, False]
    assert np.array_equal(found, [np.nan, 1, 1, np.nan, 1], equal_nan=True)


def test_a_step_of_the_wall_clock_changes_no_rate() -> None:
    sampler = Scripted(HOST)
    wall = iter([START, START + 2 * SECOND, START - 3600 * SECOND])
    ticks = [0]
    recorder = Recorder({"x": sampler}, wall_ns=lambda: next(wall), monotonic_ns=lambda: ticks[0])
    for at in (0, 2, 4):
        ticks[0] = at * SECOND
        sampler.now = {OWN: {"driving_cpu_ns": 0.5 * ticks[0]}}
        recorder.tick([RANK])
    (counted,) = counters(recorder, 0, 2 * START)
    assert counted["values"]["cpu_ratio"] == 0.5


def test_a_metric_with_a_past_is_told_with_what_it_was_and_lately_was_for_two_readings() -> None:
    sampler = Scripted(HOST)
    recorder, clock = recorder_of(sampler)
    slow, cores = Target("host", ""), {"num_cores": 2.0}
    for at in range(0, 80, 2):
        clock.ns = at * SECOND
        factor = 1.5 if at in (20, 60, 62, 64, 70) else 1.0
        sampler.now = {slow: {"work_ns": 50e3 * factor, "busy_ticks": 190.0 * at, **cores}}
        recorder.tick([RANK])
    (counted,) = counters(recorder, START + 71 * SECOND, START + 79 * SECOND)
    values = counted["values"]
    assert (values["work_ns"], values["usual_work_ns"], values["lately_work_ns"]) == (50e3, 50e3, 75e3)
    assert values["busy_cores"] == values["usual_busy_cores"] == 1.9
    (early,) = counters(recorder, START + 6 * SECOND, START + 10 * SECOND)
    assert "usual_work_ns" not in early["values"], "too little is known of before"
    (calm,) = counters(recorder, START + 41 * SECOND, START + 50 * SECOND)
    assert calm["values"]["lately_work_ns"] == 50e3, "one reading alone tells nothing"


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=40), st.integers(1, 10**9))
def test_rates_add_up_to_the_increase(rises: list[float], step_ns: int) -> None:
    counts = np.cumsum(rises)
    mono = np.arange(len(counts), dtype=np.int64) * step_ns
    found = rates(mono, counts, np.zeros(len(counts), bool))
    assert np.isnan(found[0])
    assert np.nansum(found) * step_ns / 1e9 == pytest.approx(counts[-1] - counts[0], rel=1e-6, abs=1e-6)


def test_a_count_that_falls_or_is_missing_makes_no_rate() -> None:
    mono = np.arange(5, dtype=np.int64) * SECOND
    found = rates(mono, np.array([10, np.nan, 14, 3, 5.0]), np.zeros(5, bool))
    assert np.array_equal(found, [np.nan, np.nan, 2, np.nan, 2], equal_nan=True)


def test_memory_is_bounded_in_readings_and_in_targets() -> None:
    sampler = Scripted(HOST)
    recorder, clock = recorder_of(sampler, keep=32)
    for k in range(700):
        clock.ns = k * 2 * SECOND
        sampler.now = {OWN: {"memory_ratio": float(k)}, Target("process", str(k), None, k): {"cpu": 1.0}}
        recorder.tick([RANK])
    every = list(recorder.between(0, 2 * START))
    assert len(every) == MAX_TARGETS
    (own,) = [series for series in every if series.target == OWN]
    assert own.values["memory_ratio"].tolist() == list(range(668, 700)), "the latest, in order"


def test_a_sampler_that_fails_is_left_out_and_the_others_go_on() -> None:
    class Failing(Scripted):
        def read(self, now_ns: int, ranks: Sequence[Rank]) -> Reading:
            raise OSError("the driver is gone")

    good, clock = Scripted(HOST), Clock()
    samplers = {"bad": Failing({}), "good": good}
    recorder = Recorder(samplers, wall_ns=clock.wall, monotonic_ns=clock.monotonic)
    for k in range(3):
        clock.ns = k * 2 * SECOND
        recorder.tick([])
    assert len(good.reads) == 3
    assert recorder.lost == [Missing("bad", "reading failed with OSError: the driver is gone")]


def fill(sampler: Scripted, recorder: Recorder, clock: Clock, seconds: float, **per_second: float) -> None:
    """Let counts of rank 0 grow at these speeds, read ten times a second."""
    recorder.hurry(seconds + 1)
    for _ in range(int(seconds * 10)):
        for name, speed in per_second.items():
            values = sampler.now.setdefault(OWN, {})
            values[name] = values.get(name, 0.0) + speed / 10
        recorder.tick([RANK])
        clock.ns += 100 * MS


def test_samples_hold_the_cpu_share_and_the_wait_for_a_core_on_the_clock_of_the_trace() -> None:
    sampler = Scripted(HOST)
    recorder, clock = recorder_of(sampler)
    fill(sampler, recorder, clock, 5, driving_cpu_ns=0.9e9, driving_wait_ns=0.0)
    fill(sampler, recorder, clock, 5, driving_cpu_ns=0.4e9, driving_wait_ns=0.5e9)
    samples = samples_for(recorder, RANK, START + 6 * SECOND, START + 9 * SECOND)
    assert samples is not None
    assert set(samples.values) == {"cpu_ratio", "runqueue_ratio"}
    assert (np.diff(samples.ts_ns) == 100 * MS).all()
    assert samples.ts_ns[0] >= START + 5.9 * SECOND and samples.ts_ns[-1] <= START + 9.2 * SECOND
    assert samples.values["cpu_ratio"] == pytest.approx(0.4) and samples.values["runqueue_ratio"] == pytest.approx(0.5)


def test_a_rank_that_was_started_anew_has_no_samples_of_its_past() -> None:
    sampler = Scripted(HOST)
    recorder, clock = recorder_of(sampler)
    fill(sampler, recorder, clock, 2, driving_cpu_ns=1e9)
    assert samples_for(recorder, Rank(0, 101), START, START + 2 * SECOND) is None


def test_samples_take_the_device_that_runs_the_rank_and_the_card_only_between_hosts() -> None:
    device, other = Target("device", "1"), Target("device", "0")
    card, loopback = Target("nic", "eth0"), Target("nic", "lo")
    sampler = Scripted({**HOST, **NVML, **RDMA})
    recorder, clock = recorder_of(sampler)
    recorder.hurry(10)
    for k in range(20):
        sampler.now = {
            device: {"sm_clock_ratio": 0.6, "throttle": 1.0, "pcie_rx_bytes": k * 1e9, "pcie_tx_bytes": 0.0},
            other: {"sm_clock_ratio": 1.0, "throttle": 0.0},
            card: {"rx_bytes": k * 1.25e9, "tx_bytes": k * 2.5e9},
            loopback: {"rx_bytes": k * 1e12, "tx_bytes": k * 1e12},
        }
        sampler.labels = {device: {"pids": "7 100", "uuid": "GPU-b"}, other: {"pids": "8", "uuid": "GPU-a"}}
        recorder.tick([RANK])
        clock.ns += 100 * MS
    samples = samples_for(recorder, RANK, START, START + 2 * SECOND, crosses_hosts=True)
    alone = samples_for(recorder, Rank(0, 0, device="gpu-B"), START, START + 2 * SECOND)
    assert samples is not None and alone is not None
    assert samples.values["sm_clock_ratio"] == pytest.approx(0.6) and samples.values["throttle"] == pytest.approx(1)
    assert samples.values["pcie_gbps"] == pytest.approx(10), "gigabytes"
    assert samples.values["nic_gbps"] == pytest.approx(200), "gigabits of the busier direction, without loopback"
    assert set(alone.values) == {"sm_clock_ratio", "throttle", "pcie_gbps"}


def test_counters_tell_rates_by_their_names_increases_by_the_counters_and_are_plain_json() -> None:
    card, device = Target("nic", "eth0"), Target("device", "0")
    sampler = Scripted({**HOST, **NVML})
    recorder, clock = recorder_of(sampler)
    for k in range(5):
        clock.ns = k * 2 * SECOND
        sampler.now = {
            card: {"rx_bytes": k * 2.5e9, "rx_errors": 3.0 * k, "speed_gbps": 25.0},
            device: {"throttle": float(k == 0), "temperature_c": 60.0 + k, "retired_pages": float("nan")},
        }
        recorder.tick([])
    told = json.loads(json.dumps(counters(recorder, START, START + 8 * SECOND)))
    assert parse_counted(told) == told
    assert told == [
        {
            "kind": "nic",
            "name": "eth0",
            "rank": None,
            "values": {"rx_gbps": 10.0, "rx_errors": 12.0, "speed_gbps": 25.0},
            "labels": {},
        },
        {
            "kind": "device",
            "name": "0",
            "rank": None,
            "values": {"throttle": 0.2, "temperature_c": 62.0},
            "labels": {},
        },
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(
    st.lists(
        JSON
        | st.fixed_dictionaries(
            {"kind": st.sampled_from(["rank", "nic", "device", "x"]), "name": JSON | st.just("3/a 4"), "rank": JSON},
            optional={
                "values": JSON | st.dictionaries(st.sampled_from(["sm_clock_ratio", "cpu_ratio"]), JSON),
                "labels": JSON | st.dictionaries(st.sampled_from(["cpus", "pid", "state"]), JSON),
            },
        ),
        max_size=6,
    )
)
def test_counters_that_a_host_makes_up_are_left_out_and_harm_nobody(plain: object) -> None:
    sound = parse_counted(plain)
    stand_out({"h": sound})
    assert parse_counted(json.loads(json.dumps(sound))) == sound
    assert parse_counted({"kind": "rank"}) == []


def test_an_interval_without_a_reading_takes_the_ones_around_it() -> None:
    sampler = Scripted(HOST)
    recorder, clock = recorder_of(sampler)
    for k in range(3):
        clock.ns = k * 2 * SECOND
        sampler.now = {OWN: {"driving_cpu_ns": 0.5 * clock.ns}}
        recorder.tick([RANK])
    (counted,) = counters(recorder, START + SECOND, START + SECOND + 1)
    assert counted["values"] == {"cpu_ratio": 0.5}


def test_what_two_samplers_call_by_one_name_means_the_same() -> None:
    every = [HOST, NVML, RDMA]
    names = [name for metrics in every for name in metrics]
    assert len(names) == len(set(names))


def test_the_built_in_samplers_open_or_say_why_not(tmp_path: Path) -> None:
    found, missing = open_samplers(tmp_path)
    assert not found and {one.name for one in missing} == {"host", "links", "nvml", "rdma"}
    assert all(len(one.reason.split()) > 5 for one in missing)


def test_other_samplers_are_found_by_entry_point_and_a_broken_one_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "extra_samplers.py").write_text(
        "from eroica.samplers import Reading\n"
        "class Fans:\n    metrics = {}\n    def read(self, now_ns, ranks): return Reading({})\n"
        "def good(root): return Fans()\n"
        "def bad(root): raise RuntimeError('no fans')\n"
        "def odd(root): return 7\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    points = [EntryPoint(n, f"extra_samplers:{f}", GROUP) for n, f in (("fans", "good"), ("b", "bad"), ("c", "odd"))]
    points += [EntryPoint("host", "extra_samplers:good", GROUP), EntryPoint("d", "no_such_module:x", GROUP)]
    monkeypatch.setattr(eroica.samplers, "entry_points", lambda group: points)
    found, missing = open_samplers(tmp_path)
    reasons = {one.name: one.reason for one in missing if one.name in "bcd"}
    assert set(found) == {"fans"} and "no fans" in reasons["b"] and "int" in reasons["c"]
    assert "ModuleNotFoundError" in reasons["d"]
    assert [one for one in missing if one.name == "host" and "another sampler" in one.reason]
