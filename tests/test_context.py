"""What a live job adds to its traces: what recurs, what was usual before, and how it changes an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eroica.context import CaptureRecord, Context, PhaseRecord, Series, healthy_s, recurrence_of
from eroica.critical_path import Activity
from eroica.diagnosis import diagnose
from eroica.findings import Diagnosis
from eroica.pattern import Function, stack, summarize
from eroica.utilisation import MU_SOURCES
from tests import handmade as h

RANKS, STEPS = 4, 10
OPERATORS = ("aten::addmm", "aten::relu", "aten::mm", "aten::sum", "aten::add_", "aten::copy_")

Spent = Sequence[tuple[str, float]]
"""Python frames of a step on top of the operators, with their milliseconds."""


def cpu_job(spent: Callable[[int, int], Spent], calls: Callable[[int], int] = lambda rank: 1) -> Any:
    """Ranks that run OPERATORS `calls(rank)` times per step, 18 ms a time, and `spent(rank, step)`, and meet once."""
    draw = np.random.default_rng(3)
    events: list[list[h.Event]] = [[] for _ in range(RANKS)]
    at = 0
    for step in range(STEPS):
        arrivals = []
        for rank in range(RANKS):
            now = at
            for _ in range(calls(rank)):
                for name in OPERATORS:
                    length = int(3 * h.MS + draw.normal(0, 0.02) * h.MS)
                    events[rank].append(h.op(name, now, length))
                    now += length
            for name, ms in spent(rank, step):
                events[rank].append(h.frame(name, now, int(ms * h.MS)))
                now += int(ms * h.MS)
            arrivals.append(now)
        end = max(arrivals) + 2 * h.MS
        for rank, arrived in enumerate(arrivals):
            meet = h.Comm(sequence=step)
            events[rank].append(h.mark("gloo:all_reduce", arrived, end - arrived, thread="2", comm=meet))
            events[rank].append(h.mark(f"ProfilerStep#{100 + step}", at, end - at))
        at = end
    return stack([summarize(h.trace(of_rank, rank=rank)) for rank, of_rank in enumerate(events)])


def saves_every(period: int, seconds: float, usual: float = 0.02, first: int = 40, last: int = 112) -> Series:
    steps = tuple(range(first, last))
    return Series(0, steps, tuple(seconds if step % period == 0 else usual for step in steps))


SAVE = "torch/serialization.py(900): save"
COLLECT = "Python GC"


def save_once(rank: int, step: int) -> Spent:
    return [(SAVE, 200.0)] if rank == 0 and step == 4 else []


def test_one_long_save_in_a_window_is_a_hiccup_unless_the_series_says_that_it_comes_again() -> None:
    stacked = cpu_job(save_once)
    assert diagnose(stacked).kind == "healthy"
    made = diagnose(stacked, Context(series=[saves_every(8, 0.2)], onset=80))
    (finding,) = made.findings
    assert (finding.cause, finding.scope, finding.ranks, finding.steps) == ("checkpoint_io", "rank", "0", "every 8")


def test_long_steps_elsewhere_do_not_make_this_one_recur() -> None:
    # Steps 46, 53, ... 109 are long, the window's long step is 104.
    series = Series(0, tuple(range(40, 112)), tuple(0.2 if step % 7 == 4 else 0.02 for step in range(40, 112)))
    assert diagnose(cpu_job(save_once), Context(series=[series])).kind == "healthy"


def test_collections_that_hit_half_of_the_ranks_in_a_step_are_found_and_blame_no_rank() -> None:
    def spent(rank: int, step: int) -> Spent:
        return [(COLLECT, 60.0)] if (step + rank // 2) % 3 == 0 else []

    (finding,) = diagnose(cpu_job(spent)).findings
    assert (finding.cause, finding.scope, finding.ranks) == ("host_gc", "rotating", "")


def test_collections_that_move_over_the_ranks_are_told_once_though_all_take_longer_than_in_the_healthy_window() -> None:
    def spent(rank: int, step: int) -> Spent:
        # Ranks collect in turn, and each a little in every step: the mean of all of them rises by more than the turns.
        return [(COLLECT, 100.0 if (step + rank) % 8 == 0 else 40.0)]

    made = diagnose(cpu_job(spent), Context(baseline=cpu_job(lambda rank, step: [])))
    assert [(f.cause, f.scope) for f in made.findings] == [("host_gc", "rotating")]


def test_a_rank_that_runs_the_models_operators_more_often_has_more_load() -> None:
    made = diagnose(cpu_job(lambda rank, step: [], lambda rank: 2 if rank == 3 else 1))
    assert (made.verdict.cause, made.verdict.ranks) == ("load_imbalance", "3")
    assert any("2.00 times as often" in item.text for item in made.evidence.values())


def test_a_rank_with_the_same_operators_that_is_slow_in_python_has_no_more_load() -> None:
    made = diagnose(cpu_job(lambda rank, step: [("train.py(7): log", 20.0)] if rank == 3 else []))
    assert (made.verdict.cause, made.verdict.ranks) == ("host_python", "3")


def evidence(made: Diagnosis, source: str) -> list[str]:
    return [item.text for item in made.evidence.values() if item.source == source]


@dataclass(frozen=True)
class Counter:
    host: str
    rank: int | None
    name: str
    value: float
    peers: float | None
    text: str


def test_records_and_counters_of_the_blamed_rank_are_evidence_and_those_of_others_are_not() -> None:
    series = [saves_every(8, 0.2)]
    phases = [PhaseRecord(0, "checkpoint", 104, 0.2), PhaseRecord(0, "checkpoint", 96, 9.0)]
    counters = [
        Counter("host0", 0, "file_write_mbps", 90.0, 1.0, "rank 0 writes 90 MB/s to disks"),
        Counter("host0", 2, "process_cpu", 2.0, 1.0, "rank 2's process uses 2 cores"),
    ]
    made = diagnose(cpu_job(save_once), Context(series=series, phases=phases, counters=counters))
    assert evidence(made, "counters") == ["rank 0 writes 90 MB/s to disks"]
    (told,) = evidence(made, "probe")
    assert "1 stretch of checkpoint of 200 ms" in told


def test_a_phase_that_the_trace_does_not_show_gives_the_cause() -> None:
    def spent(rank: int, step: int) -> Spent:
        return [("train.py(7): keep", 200.0)] if rank == 0 and step == 4 else []

    series, phases = [saves_every(8, 0.2)], [PhaseRecord(0, "checkpoint", 104, 0.19)]
    assert diagnose(cpu_job(spent), Context(series=series, phases=phases)).verdict.cause == "checkpoint_io"
    assert diagnose(cpu_job(spent), Context(series=series)).verdict.cause == "host_python"


def test_steps_with_an_evaluation_are_no_excess_unless_something_is_saved_in_them_as_well() -> None:
    def spent(rank: int, step: int) -> Spent:
        return [(SAVE, 200.0)] if rank == 0 and step in (1, 5, 9) else []

    stacked = cpu_job(spent)
    assert diagnose(stacked).verdict.cause == "checkpoint_io"
    evaluations = [PhaseRecord(rank, "evaluation", 100 + step, 0.2) for rank in range(4) for step in (1, 5, 9)]
    assert diagnose(stacked, Context(phases=evaluations)).kind == "healthy"
    saves = [PhaseRecord(0, "checkpoint", 100 + step, 0.19) for step in (1, 5, 9)]
    assert diagnose(stacked, Context(phases=[*evaluations, *saves])).verdict.cause == "checkpoint_io"
    teacher = [PhaseRecord(0, "evaluation", 100 + step, 0.001) for step in range(12)]
    assert diagnose(stacked, Context(phases=teacher)).verdict.cause == "checkpoint_io"


@pytest.mark.parametrize(("granted", "cause"), [(0.65, "input_pipeline"), (0.30, "cpu_contention")])
def test_single_steps_of_a_read_are_contention_only_where_waiting_for_a_core_can_explain_them(
    granted: float, cause: str
) -> None:
    fetch = Function(Activity.INPUT, "fetch", "train.py:12", "train.py:12")
    matmul = Function(Activity.OPERATOR, "aten::mm", None, None)
    slow = [2, 5, 7]
    usual = [0.05] * 10
    some = [replace_at(usual, slow, 0.15)] + [usual] * 3
    ranks = [
        h.Rank(
            own=own,
            length=0.16,
            samples=[h.Sample(0.01, 0.05)],
            functions={matmul: 0.04, fetch: sum(own) / 10 - 0.04},
            mu={matmul: granted, fetch: granted},
            mu_source=MU_SOURCES.index("cpu_granted"),
            has_device=False,
            tops={step: (int(sum(own) / 10 - 0.04 < 0.04), 0.1, float("nan")) for step in slow} if own != usual else {},
        )
        for own in some
    ]
    (finding,) = diagnose(stack(h.job(ranks, num_steps=10))).findings
    assert (finding.cause, finding.ranks) == (cause, "0")


def replace_at(values: list[float], places: list[int], value: float) -> list[float]:
    return [value if k in places else old for k, old in enumerate(values)]


def test_ranks_that_did_not_capture_are_named_in_the_coverage() -> None:
    captures = [CaptureRecord(0, "done"), CaptureRecord(2, "busy", "another profiler is active")]
    notes = diagnose(cpu_job(lambda rank, step: []), Context(captures=captures)).coverage.notes
    assert "rank 2 gave no complete capture: busy, another profiler is active" in notes
    assert not any("rank 0 gave" in note for note in notes)


def test_without_a_baseline_window_the_series_tells_what_was_usual() -> None:
    series = Series(1, tuple(range(60)), (0.02,) * 40 + (0.05,) * 20)
    made = diagnose(cpu_job(lambda rank, step: []), Context(series=[series], onset=40))
    assert made.iteration.baseline_s == pytest.approx(0.02)
    assert healthy_s(Context(series=[series])) is None
    assert healthy_s(Context(series=[series], onset=3)) is None


@given(st.integers(2, 12), st.floats(2.0, 30.0), st.integers(1, 4), st.randoms(use_true_random=False))
def test_the_period_is_found_whatever_its_length_and_however_many_ranks_tell_it(
    period: int, factor: float, ranks: int, draw: Any
) -> None:
    steps = tuple(range(17, 17 + 10 * period))
    series = [
        Series(r, steps, tuple((factor if s % period == 3 % period else 1.0) * draw.uniform(0.97, 1.03) for s in steps))
        for r in range(ranks)
    ]
    found = recurrence_of(series)
    if period == 2:  # half of all steps are long: that is no exception any more
        assert found is None or found.period == 2
    else:
        assert found is not None and found.period == period


@given(st.lists(st.floats(0.9, 1.1), min_size=8, max_size=60), st.integers(0, 59))
def test_one_hiccup_does_not_recur(usual: list[float], where: int) -> None:
    seconds = list(usual)
    seconds[where % len(seconds)] = 50.0
    assert recurrence_of([Series(0, tuple(range(len(seconds))), tuple(seconds))]) is None
