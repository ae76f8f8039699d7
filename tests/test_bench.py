"""The bench measures what it says: grown traces hold known events, and a measurement that fails says why."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from bench import pacing
from bench.measure import Contender, Failure, Series, Spread, interleave, run
from bench.overhead import KINDS, _measured, _tables, train
from bench.tables import Table, Target, figure, markdown, number, plain
from bench.traces import MAX_STEPS, Layout, grow
from eroica.pattern import summarize
from eroica.trace import read_trace

SEED = Path(__file__).parents[1] / "evals" / "data" / "h100_bert_small.json.gz"
LAYOUTS: tuple[Layout, ...] = ("classic", "torch 2.13")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_grown_trace_holds_each_event_of_its_seed_once_per_repetition(tmp_path: Path, layout: Layout) -> None:
    made = grow(SEED, tmp_path / "big.json", 1.5, layout)
    seed, big = read_trace(SEED), read_trace(made.path)
    assert made.repeats >= 2 and made.num_bytes >= 1.5e6
    assert len(big) == made.num_events == made.repeats * len(seed)
    assert int(big.dur_ns.sum()) == made.repeats * int(seed.dur_ns.sum())
    for category in np.unique(seed.category):
        assert (big.category == category).sum() == made.repeats * (seed.category == category).sum()
    assert not big.damage.notes and big.device_model == seed.device_model
    assert json.loads(made.path.read_text())["traceEvents"][-1]["ph"] == "X"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_engines_read_a_grown_trace_alike(tmp_path: Path, layout: Layout) -> None:
    made = grow(SEED, tmp_path / "big.json", 1, layout)
    fast, tolerant = read_trace(made.path), read_trace(made.path, engine="tolerant")
    assert np.array_equal(fast.ts_ns, tolerant.ts_ns)
    assert np.array_equal(fast.correlation, tolerant.correlation)


def test_repetitions_share_no_correlation_id_and_count_their_steps_on(tmp_path: Path) -> None:
    made = grow(SEED, tmp_path / "big.json", 2, "classic")
    seed, big = read_trace(SEED), read_trace(made.path)
    assert len(np.unique(big.correlation[big.correlation > 0])) == made.repeats * len(
        np.unique(seed.correlation[seed.correlation > 0])
    )
    summary = summarize(big)
    assert summary.num_iterations == made.repeats
    assert summary.ledger.steps.tolist() == list(range(6, 6 + made.repeats))


def test_a_long_trace_has_no_more_steps_than_a_profiler_window(tmp_path: Path) -> None:
    made = grow(SEED, tmp_path / "big.json", 30, "classic")
    big = read_trace(made.path)
    markers = sum(name.startswith("ProfilerStep#") for name in big.strings)
    assert made.repeats > 2 * MAX_STEPS and markers == made.num_steps <= MAX_STEPS
    assert len(big) == made.num_events
    assert summarize(big).num_iterations == made.num_steps


def test_a_seed_without_events_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.json"
    empty.write_text('{"traceEvents": [{"ph": "M", "name": "process_name", "pid": 1, "ts": 0}]}')
    with pytest.raises(ValueError, match="no complete event"):
        grow(empty, tmp_path / "big.json", 1, "classic")


def test_a_measurement_that_fails_says_why_and_leaves_the_others_in(tmp_path: Path) -> None:
    good = Contender("good", (sys.executable, "-c", "print('{\"seconds\": 2.0}')"))
    bad = Contender("bad", (sys.executable, "-c", "raise SystemExit('no such parser')"))
    with pytest.raises(Failure, match="bad: no such parser"):
        run(bad)
    series = interleave([good, bad], 2)
    assert len(series["good"].rounds) == 2
    assert not series["bad"].rounds and "no such parser" in series["bad"].problem


def test_two_contenders_of_one_name_are_refused() -> None:
    same = Contender("same", (sys.executable, "-c", "print('{}')"))
    with pytest.raises(ValueError, match="one name"):
        interleave([same, same], 1)


def test_ratios_are_taken_within_each_round() -> None:
    ours = Series("ours", [{"seconds": 1.0}, {"seconds": 10.0}])
    theirs = Series("theirs", [{"seconds": 3.0}, {"seconds": 50.0}])
    assert ours.ratio(theirs, "seconds") == Spread(4.0, 3.0, 5.0)


def test_tables_show_figures_targets_and_what_was_missed() -> None:
    table = Table(
        "Reading", ("reader", "MB/s"), (("eroica", figure(Spread(12.34, 11.0, 14.0))),), (Target("faster", False),)
    )
    assert "12.3 [11-14]" in plain(table) and "target faster: MISSED" in plain(table)
    assert "| eroica | 12.3 [11-14] |" in markdown(table) and "**missed**" in markdown(table)
    assert [number(value) for value in (0.0, 0.01234, 9.876, 123.4, 12345.6)] == [
        "0",
        "0.0123",
        "9.88",
        "123",
        "12,346",
    ]


def test_the_overhead_of_a_window_is_told_in_units_of_the_median_step_before_it() -> None:
    # 200 steps of 10 ms; the window begins when 150 are done, its last step takes 60 ms more, the next two are late.
    lengths = [10] * 200
    lengths[159], lengths[160], lengths[161] = 70, 20, 30
    ends = [sum(lengths[: i + 1]) * 1_000_000 for i in range(200)]
    late = [(ends[100], 6_000_000), (ends[158] + 5_000_000, 55_000_000)]
    told = {"ends": ends, "cpu": [9 * (i + 1) * 1_000_000 for i in range(200)], "late": late}
    told |= {"over_ns": ends[-1], "import_s": 1.0, "peak_mb": 300.0}
    written_ns = ends[161] - 1
    run = _measured([told], 150, written_ns, ends[-1] + 500_000_000, 100)
    assert (run.calm_ms, run.calm_cpu_ms, run.calm_gap_ms, run.exit_s) == (10, 9, 6, 0.5)
    assert run.window["window"] == 1 and run.window["worst"] == 7 and run.window["after"] == 1
    assert run.window["gap_ms"] == 55 and run.window["cpu_s"] == 0
    assert run.window["written_s"] == pytest.approx(0.05)
    (at_rest, window) = _tables(2, {"bare": [run]}, {"TraceML": "not installed"})
    assert at_rest.notes == ("TraceML is left out: not installed",) and len(window.rows) == 1


@pytest.mark.e2e
@pytest.mark.full
@pytest.mark.parametrize("name", ["bare", "on demand, no frames", "eroica in process, sampled frames"])
def test_each_kind_of_training_of_the_overhead_bench_can_be_measured(name: str) -> None:
    (kind,) = (kind for kind in KINDS if kind.name == name)
    run = train(kind, 1, sys.executable, calm_steps=10)
    assert run.calm_ms > 0 and run.peak_mb > 50
    assert bool(run.window) == (name != "bare")


def test_blocks_with_and_without_pacing_are_paired_with_their_neighbours_and_lose_what_carries_over() -> None:
    # What is before the first trial; off; on, twice as long, as in off on on off; off; on; and an off without a pair.
    paced = {*range(30, 70), *range(110, 130)}
    length = np.array([2.0 if step in paced else 1.0 for step in range(150)])
    length[[5, 30, 111]] = 9.0
    off, on = pacing.pairs(length, paced, 10)
    assert off == [[1.0] * 18, [1.0] * 38] and on == [[2.0] * 38, [2.0] * 18]
