"""Root and victim, impact, confidence, and what is said when there is nothing to say (design sections 4 and 6)."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eroica.codec import decode_summary, encode_summary
from eroica.communication import CollectiveKind
from eroica.context import Context
from eroica.critical_path import Activity
from eroica.diagnosis import diagnose, diagnose_in_detail
from eroica.findings import CAUSES, CONFIDENCES, KINDS, SCOPES, from_json, to_json
from eroica.job import parse_ranks
from eroica.pattern import Function, Summary, stack, summarize
from eroica.trace import Category, Trace
from eroica.utilisation import MU_SOURCES
from evals.cases_synth import CASES
from evals.score import score
from evals.synth import cluster
from evals.synthetic import diagnose_cluster
from tests import handmade as h

INPUT = Function(Activity.INPUT, "__getitem__", "data.py:41", "data.py:41")
SAVE = Function(Activity.CHECKPOINT, "save", "torch/serialization.py:850", "train.py:9")
TRANSFER = 0.05


def data_parallel(
    excess: Sequence[float], function: Function = h.GEMM, *, steps: int = 8, unit: float = 1.0, seed: int = 0
) -> list[Summary]:
    """Ranks that work 0.8 (and their excess), meet once per step, and wait for the last; times in `unit` seconds."""
    rng = np.random.default_rng(seed)
    own = unit * (0.8 + np.array(excess) + rng.normal(0, 0.0005, len(excess)))
    ranks = []
    for rank, work in enumerate(own):
        spent: dict[Function, float] = {h.GEMM: unit * 0.8, function: float(work) - unit * 0.8}
        if function == h.GEMM:
            spent = {h.GEMM: float(work)}
        wait = float(own.max() - work)
        meet = h.Sample(unit * TRANSFER + wait, work_before=float(work), channel=h.everyone(len(own)))
        length = float(own.max()) + unit * TRANSFER
        ranks.append(h.Rank(own=float(work), length=length, samples=[meet], functions=spent, host=f"host{rank // 4}"))
    return h.job(ranks, steps)


def answer(summaries: Sequence[Summary], **context: Any) -> Any:
    return diagnose(stack(summaries), Context(**context))


# --- root and victim -----------------------------------------------------------------------------------------------


@given(st.integers(3, 12), st.integers(0, 100), st.floats(0.03, 0.5), st.sampled_from([h.GEMM, INPUT, SAVE]))
def test_the_rank_with_more_own_work_is_blamed_and_those_that_wait_for_it_are_not(
    size: int, who: int, excess: float, function: Function
) -> None:
    rank = who % size
    made = answer(data_parallel([excess if r == rank else 0.0 for r in range(size)], function))
    assert made.kind == "slow" and made.verdict.scope == "rank" and made.verdict.ranks == str(rank)
    assert all(finding.ranks == str(rank) for finding in made.findings)
    assert made.findings[0].function.name == function.name
    assert made.findings[0].impact.seconds_per_iteration == pytest.approx(excess, rel=0.05, abs=0.003)


def test_victims_are_named_as_consequences_with_what_they_wait_in() -> None:
    made = answer(data_parallel([0.0, 0.3, 0.0, 0.0]))
    blamed = {rank for finding in made.findings for rank in parse_ranks(finding.ranks)}
    assert blamed == {1} and all(1 not in parse_ranks(c.ranks) for c in made.consequences)


@given(st.permutations(range(6)), st.integers(0, 5))
def test_renaming_ranks_renames_the_verdict(order: list[int], who: int) -> None:
    some = data_parallel([0.2 if r == who else 0.0 for r in range(6)])
    renumbered = [replace(summary, rank=order[summary.rank]) for summary in some]
    assert answer(renumbered).verdict.ranks == str(order[who])


@pytest.mark.parametrize("unit", [1e-3, 1.0, 50.0])
def test_the_length_of_an_iteration_does_not_matter(unit: float) -> None:
    made = answer(data_parallel([0.0, 0.0, 0.1, 0.0], unit=unit))
    assert made.verdict.ranks == "2" and made.verdict.cause == "gpu_compute"
    assert made.findings[0].impact.share == pytest.approx(0.1 / 0.95, rel=0.05)


@given(st.integers(0, 10**6), st.integers(2, 32))
def test_healthy_jobs_are_healthy(seed: int, size: int) -> None:
    made = answer(data_parallel([0.0] * size, seed=seed))
    assert made.kind == "healthy" and made.findings == () and made.verdict.scope == "none"
    assert made.verdict.confidence == "supported"


def test_less_than_a_hundredth_of_the_iteration_is_healthy() -> None:
    assert answer(data_parallel([0.0, 0.006, 0.0, 0.0])).kind == "healthy"


def test_two_ranks_with_one_fault_are_one_finding() -> None:
    made = answer(data_parallel([0.0, 0.2, 0.0, 0.0, 0.0, 0.2, 0.0, 0.0]))
    assert [f.ranks for f in made.findings] == ["1,5"]


def test_of_two_ranks_the_slower_is_blamed_and_no_more_than_supported() -> None:
    made = answer(data_parallel([0.0, 0.2]))
    assert made.verdict.ranks == "1" and made.verdict.confidence in ("supported", "hypothesis")


FAULTS = [case.id for case in CASES if case.faults]


@pytest.mark.parametrize("case", FAULTS)
def test_in_no_synthetic_fault_a_victim_is_blamed(case: str) -> None:
    made = cluster(case, effect=0.10, seed=7)
    judged = score([diagnose_cluster(made)], made.truth)
    assert judged.false_blames == ()
    assert judged.found == (True,) * len(judged.found), judged.near


# --- nothing to say ------------------------------------------------------------------------------------------------


MATMUL = Function(Activity.OPERATOR, "aten::mm", None, None)
PYTHON = Function(Activity.PYTHON, "train_step", "train.py:7", "train.py:7")


def starved(function: Function, spent_s: float, granted: float, usual: float = 0.95) -> list[Summary]:
    """Rank 1 of four spends `spent_s` in a host function where the others spend 0.5, and gets `granted` of the core."""
    source = MU_SOURCES.index("cpu_granted")
    ranks = [
        h.Rank(own=0.5, waiting=spent_s - 0.5, functions={function: 0.5}, mu={function: usual}, mu_source=source),
        h.Rank(own=spent_s, functions={function: spent_s}, mu={function: granted}, mu_source=source),
    ]
    everyone = [h.Sample(spent_s - 0.5 + 0.1), h.Sample(0.1)]
    told = [replace(rank, length=spent_s + 0.1, samples=[s]) for rank, s in zip(ranks, everyone, strict=True)]
    return h.job([told[0], told[1], told[0], told[0]])


@pytest.mark.parametrize("function", [MATMUL, PYTHON], ids=["operator", "python"])
def test_a_rank_that_waits_for_a_core_has_cpu_contention(function: Function) -> None:
    verdict = answer(starved(function, 1.0, 0.48))
    assert (verdict.verdict.cause, verdict.verdict.ranks) == ("cpu_contention", "1")
    assert any("waiting for a core explains" in one.text for one in verdict.evidence.values())


@pytest.mark.parametrize("function", [MATMUL, PYTHON], ids=["operator", "python"])
def test_a_little_contention_does_not_explain_a_rank_that_takes_twice_as_long(function: Function) -> None:
    verdict = answer(starved(function, 1.0, 0.85))
    assert verdict.verdict.ranks == "1" and verdict.verdict.cause != "cpu_contention"


@pytest.mark.parametrize(("granted", "found"), [(0.99, "1"), (0.9, ""), (None, "")])
def test_an_operator_that_takes_longer_where_its_rank_has_its_core_is_no_preemption(
    granted: float | None, found: str
) -> None:
    ranks = []
    for rank in range(4):
        own = 0.6 if rank == 1 else 0.5
        told = {MATMUL: granted} if granted is not None else {}
        meet = [h.Sample(0.7 - own, work_before=own)]
        ranks.append(
            h.Rank(
                own=own,
                length=0.7,
                samples=meet,
                functions={MATMUL: own - 0.1, PYTHON: 0.1},
                mu=told,
                mu_source=MU_SOURCES.index("cpu_granted"),
                has_device=False,
            )
        )
    verdict = answer(h.job(ranks)).verdict
    assert (verdict.ranks, verdict.cause) == (found, "unknown" if found else "none")


def test_a_host_on_which_all_wait_alike_for_cores_blames_no_rank_for_it() -> None:
    verdict = answer(starved(MATMUL, 1.0, 0.3, usual=0.3))
    assert verdict.verdict.cause != "cpu_contention"


def test_no_traces_are_no_data_and_never_healthy() -> None:
    made = answer([])
    assert (made.kind, made.verdict.scope, made.verdict.confidence) == ("no_data", "none", "unknown")
    assert made.coverage.ranks_reported == 0


def test_a_trace_without_events_is_no_data() -> None:
    empty = [summarize(h.trace([], rank=r)) for r in range(4)]
    assert answer(empty).kind == "no_data"


def test_one_rank_of_many_has_nothing_to_be_compared_with() -> None:
    made = answer([h.summary(3, h.Rank(), world_size=8)])
    assert made.kind == "no_data" and "only rank 3 of 8" in made.verdict.summary
    assert made.coverage.missing_ranks == "0-2,4-7"


def test_traces_that_explain_nothing_of_their_window_are_no_data() -> None:
    made = answer(h.job([h.Rank(explained=0.01)] * 4))
    assert made.kind == "no_data" and "1%" in made.verdict.summary


def test_missing_ranks_are_listed_and_make_health_a_hypothesis() -> None:
    made = answer(data_parallel([0.0] * 8)[:5])
    assert made.coverage.missing_ranks == "5-7" and made.coverage.ranks_expected == 8
    assert made.kind == "healthy" and made.verdict.confidence == "hypothesis" and "5 of 8" in made.verdict.summary


def test_a_rank_whose_file_was_cut_lowers_the_confidence() -> None:
    whole = data_parallel([0.0, 0.3, 0.0, 0.0], INPUT)
    damage = replace(whole[2].coverage, partial=True, notes=("cut short",))
    cut = [replace(s, coverage=damage) if s.rank == 2 else s for s in whole]
    sure, unsure = answer(whole), answer(cut)
    assert unsure.coverage.partial_ranks == "2" and any("rank 2: cut short" in note for note in unsure.coverage.notes)
    assert CONFIDENCES.index(unsure.verdict.confidence) > CONFIDENCES.index(sure.verdict.confidence)


def test_a_rank_without_device_events_among_others_with_them_is_said() -> None:
    whole = data_parallel([0.0] * 4)
    blind = [replace(s, coverage=replace(s.coverage, has_device=s.rank != 3)) for s in whole]
    assert any("3" in note and "device" in note for note in answer(blind).coverage.notes)


def only_here(mine: Mapping[Function, float], theirs: Mapping[Function, float]) -> Any:
    """The finding on rank 2 of four, which spends its time otherwise than its peers; all tell their work."""
    ranks = []
    for spent in (theirs, theirs, mine, theirs):
        own = sum(spent.values())
        meet = h.Sample(1 - own, own)
        ranks.append(h.Rank(own, samples=[meet], functions=spent, work=dict.fromkeys(spent, 1e6)))
    made = answer(h.job(ranks))
    assert made.verdict.ranks == "2"
    return made.findings[0]


def test_copies_that_the_peers_hide_are_no_more_work() -> None:
    copy = Function(Activity.MEMORY, "Memcpy HtoD", None, None)
    found = only_here({h.GEMM: 0.6, copy: 0.3}, {h.GEMM: 0.6})
    assert found.cause == "host_device_copy" and found.confidence != "established"


def test_the_same_work_by_another_kernel_is_neither_more_work_nor_a_slow_device() -> None:
    found = only_here({Function(Activity.COMPUTE, "gemm_b", None, None): 0.9}, {h.GEMM: 0.6})
    assert found.cause == "unknown"


def test_a_kernel_more_is_more_work() -> None:
    found = only_here({h.GEMM: 0.6, Function(Activity.COMPUTE, "expert", None, None): 0.3}, {h.GEMM: 0.6})
    assert (found.cause, found.confidence) == ("load_imbalance", "established")


def test_a_rank_that_numbers_its_steps_otherwise_is_compared_all_the_same() -> None:
    made = data_parallel([0.0, 0.0, 0.0, 0.3])
    made[3] = h.less(made[3], steps=made[3].ledger.steps + 100, step=made[3].ledger.step + 100)
    assert (answer(made).verdict.ranks, answer(made).kind) == ("3", "slow")


def test_a_rank_that_has_lost_records_makes_no_heavy_role_of_the_other_half_of_a_job() -> None:
    def rank(k: int) -> h.Rank:
        own = 0.60 if k < 4 else 0.72
        return h.Rank(own, samples=[h.Sample(0.28, channel=h.everyone(8))], device_model="A" if k < 4 else "B")

    whole = h.job([rank(k) for k in range(8)])
    assert answer(whole).kind == "healthy"
    light = h.less(whole[3], own_s=np.full(8, 0.1, np.float32))
    whole[3] = replace(light, coverage=replace(light.coverage, num_kernels=1))
    made = answer(whole)
    assert made.kind == "healthy" and made.coverage.partial_ranks == "3"


@pytest.mark.parametrize(("absent", "device"), [(None, "B/gpu2"), (1, "B/gpu2"), (7, "B/gpu2"), (4, None), (5, None)])
def test_a_device_has_a_number_only_where_all_ranks_before_it_on_its_host_are_known(
    absent: int | None, device: str | None
) -> None:
    def rank(k: int) -> h.Rank:
        own = 0.95 if k == 6 else 0.6
        return h.Rank(own, samples=[h.Sample(1 - own, channel=h.everyone(8))], host="AB"[k // 4], device_model="A")

    made = answer([s for s in h.job([rank(k) for k in range(8)]) if s.rank != absent])
    assert (made.verdict.ranks, made.findings[0].device) == ("6", device)


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_without_marks_of_its_iterations_is_not_blamed_for_the_length_of_its_window(size: int) -> None:
    made = data_parallel([0.0] * size)
    whole = h.summary(size - 1, h.Rank(8 * 0.8, 8 * 0.85, functions={h.GEMM: 8 * 0.8}), world_size=size, num_steps=1)
    told = answer([*made[:-1], replace(whole, steps_by="window")])
    assert told.kind == "healthy" and told.coverage.partial_ranks == str(size - 1)
    assert told.iteration.observed_s == pytest.approx(0.85, abs=0.01)
    assert any("no mark of an iteration" in note for note in told.coverage.notes)
    assert not any("fewer device events" in note for note in told.coverage.notes)


def test_a_rank_whose_trace_tells_of_no_time_is_told_and_makes_no_iteration_shorter() -> None:
    whole = data_parallel([0.0] * 2)
    made = answer([whole[0], summarize(h.trace([], rank=1, world_size=2))])
    assert made.coverage.partial_ranks == "1" and made.verdict.confidence != "supported"
    assert made.iteration.observed_s == pytest.approx(0.85, abs=0.01)


# --- the record ----------------------------------------------------------------------------------------------------


def test_the_same_summaries_give_the_same_bytes_but_for_the_clock() -> None:
    some = data_parallel([0.0, 0.3, 0.0, 0.0])
    first, second = to_json(answer(some, created="a")), to_json(answer(list(reversed(some)), created="b"))
    assert first.pop("created") == "a" and second.pop("created") == "b"
    assert json.dumps(first) == json.dumps(second) and len(first["id"]) == 12


def test_other_content_has_another_id() -> None:
    one, other = (to_json(answer(data_parallel([0.0, e, 0.0, 0.0]))) for e in (0.3, 0.31))
    assert one["id"] != other["id"]


@settings(max_examples=8)
@given(st.sampled_from([c.id for c in CASES]), st.integers(0, 3))
def test_every_word_of_an_answer_is_of_the_contract(case: str, seed: int) -> None:
    plain = to_json(diagnose_cluster(cluster(case, effect=0.05, seed=seed)))
    text = json.dumps(plain, allow_nan=False)
    assert plain["schema"] == "eroica.diagnosis/1" and plain["kind"] in KINDS
    assert to_json(from_json(json.loads(text))) == plain
    assert plain["verdict"]["cause"] in CAUSES and plain["verdict"]["scope"] in SCOPES
    for finding in plain["findings"]:
        assert finding["cause"] in CAUSES and finding["scope"] in SCOPES and finding["confidence"] in CONFIDENCES
        assert set(finding["evidence"]) <= set(plain["evidence"]) and finding["evidence"] and finding["advice"]
        parse_ranks(finding["ranks"])
    costs = [f["impact"]["seconds_per_iteration"] for f in plain["findings"]]
    assert costs == sorted(costs, reverse=True)


def test_the_detail_for_a_page_adds_up_to_the_iteration() -> None:
    stacked = stack(data_parallel([0.0, 0.3, 0.0, 0.0]))
    _, detail = diagnose_in_detail(stacked)
    total = detail.own_s + detail.wait_s + detail.transfer_s + detail.idle_s
    assert total == pytest.approx([1.15] * 4, rel=0.01)
    assert detail.wait_s[1] == pytest.approx(0, abs=0.01) and detail.wait_s[0] == pytest.approx(0.3, rel=0.02)


ODD_NAMES = [
    "aten::mm",
    "train.py(3): f",
    "cudaStreamSynchronize",
    "cudaMalloc",
    "gloo:all_reduce",
    "Python GC",
    "ProfilerStep#3",
    "ProfilerStep#4",
    "Optimizer.step#SGD.step",
    "enumerate(DataLoader)#_Iter.__next__",
    "",
    "\ud800",
    "x" * 3000,
    "a\nb\x1b[31m",
    "autograd::engine::evaluate_function: MmBackward0",
    "void f<int>(int)",
    "torch/serialization.py(8): save",
]


def odd_traces(seed: int) -> list[Trace]:
    """Traces of up to five ranks, of any events at all."""
    draw = random.Random(seed)

    def time() -> int:
        return draw.choice([draw.randint(0, 5), draw.randint(0, 100), draw.randint(0, 2**40)])

    def number() -> float:
        return draw.choice([float("nan"), float("inf"), 0.0, -1.0, 0.5, 1e30])

    def comm() -> h.Comm:
        kind, elements = draw.choice(list(CollectiveKind)), draw.choice([-1, 7, 2**62])
        return h.Comm(kind, draw.choice([-1, 0]), draw.randint(-1, 9), draw.randint(-1, 9), elements)

    made = []
    for rank in range(draw.randint(1, 5)):
        events = [
            h.Event(
                draw.choice(ODD_NAMES),
                time(),
                time(),
                draw.choice(list(Category)),
                thread=draw.choice("12"),
                correlation=draw.randint(0, 3),
                work=draw.choice([-1, 5, 2**62]),
                occupancy=number(),
                bandwidth=number(),
                comm=draw.choice([None, comm()]),
            )
            for _ in range(draw.randint(0, 14))
        ]
        made.append(h.trace(events, rank=rank, world_size=draw.choice([None, 1, 9])))
    return made


@given(st.integers(0, 10**9))
def test_odd_traces_are_summarized_sent_and_diagnosed_without_a_fault(seed: int) -> None:
    summaries = [summarize(trace) for trace in odd_traces(seed)]
    back = [decode_summary(e.patterns, e.ledger, e.names) for e in map(encode_summary, summaries)]
    for some in (summaries, back):
        json.dumps(to_json(diagnose(stack(some), Context(baseline=stack(some)))), allow_nan=False)
