"""The rules that eroica is compared with: each names the culprit in the case it is made for, and errs in another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from eroica.findings import Diagnosis
from evals import baselines
from evals.baselines import RULES, Naming, Window, all_of, judge, to_blame
from evals.kineto_file import write_cluster
from evals.synth import Cluster, cluster
from evals.truth import Answer, Expected, Truth
from tests import handmade
from tests.samples import healthy, slow_input

STEP = 1_000_000


def window(made: Cluster) -> Window:
    return Window(tuple(trace for trace, _ in made.traces()))


def said(rule: str, case: str, effect: float = 0.2) -> str:
    made = cluster(case, effect=effect, seed=1)
    return judge(RULES[rule](window(made)), made.truth)


def truth(who: str, ranks: tuple[int, ...], size: int = 4) -> Truth:
    answer = Answer(causes=frozenset({"unknown"}), scopes=frozenset({"rank"}), who=who)
    return Truth(hosts=("a",) * size, faults=(Expected(answer, frozenset(ranks), frozenset()),))


def operators(step_ns: int = STEP, op_ns: int = STEP // 2) -> list[handmade.Event]:
    """Five steps with one operator each."""
    events = []
    for k in range(5):
        events.append(handmade.mark(f"ProfilerStep#{k}", k * step_ns, step_ns))
        events.append(handmade.op("aten::mm", k * step_ns + 10, op_ns))
    return events


def job(step_ns: dict[int, int] | None = None, op_ns: dict[int, int] | None = None) -> Window:
    """Four ranks that do not wait for each other."""
    return Window(
        tuple(
            handmade.trace(operators((step_ns or {}).get(rank, STEP), (op_ns or {}).get(rank, STEP // 2)), rank=rank)
            for rank in range(4)
        )
    )


def test_the_slowest_step_is_seen_where_nobody_waits_and_hidden_by_waiting() -> None:
    assert RULES["slowest step"](job({2: 1_200_000})) == Naming(frozenset({2}))
    assert said("slowest step", "slow_input") == "nobody"


def test_the_longest_phase_finds_slow_input_and_blames_a_stage_that_has_more_to_do() -> None:
    assert said("longest phase", "slow_input") == "right"
    assert said("longest phase", "last_stage_heavier") == "wrong: 6-7"


def test_the_shortest_backward_is_who_waits_least_and_may_be_another_stage() -> None:
    rule = "shortest backward (TraceML's rule)"
    assert said(rule, "slow_input") == "right"
    assert said(rule, "gpu_throttle") == "nobody"  # slow work and little waiting make a backward like the others'
    assert said(rule, "last_stage_heavier").startswith("wrong")


def test_the_fastest_reference_finds_slow_kernels_from_a_third_on_and_blames_larger_ones() -> None:
    rule = "fastest rank as reference (NVRx's rule)"
    assert said(rule, "gpu_slow_no_counters", effect=0.8) == "right"
    assert said(rule, "gpu_slow_no_counters", effect=0.2) == "nobody"
    assert said(rule, "slow_input", effect=0.8) == "nobody"  # no kernel is slow
    larger = RULES[rule](job(op_ns={3: 900_000}))
    assert judge(larger, truth("nobody", ())) == "wrong: 3"


def test_the_last_arriver_is_found_on_one_host_and_somebody_else_where_clocks_are_apart() -> None:
    assert said("last arriver by clock", "slow_input") == "right"
    assert said("last arriver by clock", "two_ranks_one_fault").startswith("wrong")


def test_an_outlier_of_everything_is_the_slow_gpu_and_also_whoever_waits_harmlessly() -> None:
    assert said("z-score of everything", "gpu_throttle") == "right"
    assert said("z-score of everything", "device_sync_harmless").startswith("wrong")


@pytest.mark.parametrize("rule", RULES)
def test_in_a_healthy_job_no_rule_names_anybody(rule: str) -> None:
    assert said(rule, "healthy") == "right"


def test_a_rule_needs_the_traces_of_all_ranks_with_their_steps() -> None:
    whole = job()
    assert all(naming is not None for naming in all_of([whole], 4).values())
    nameless = Window((*whole.traces[:3], replace(whole.traces[3], rank=None)))
    for windows, size in (([], 4), ([Window(whole.traces[:3])], 4), ([Window(whole.traces[:1])], 1), ([nameless], 4)):
        assert set(all_of(windows, size).values()) == {None} and set(all_of(windows, size)) == set(RULES)


@pytest.mark.parametrize(
    ("who", "culprits", "named", "word"),
    [
        ("ranks", (1, 2), (1, 2), "right"),
        ("ranks", (1, 2), (2,), "right"),
        ("ranks", (1,), (), "nobody"),
        ("ranks", (1,), (1, 3), "wrong: 1,3"),
        ("hosts", (2, 3), (2,), "right"),
        ("among", (0,), (0,), "right"),
        ("nobody", (1,), (), "right"),
        ("nobody", (1,), (1,), "wrong: 1"),
        ("members", (0, 1, 2, 3), (0, 1, 2, 3), "right"),
        ("ranks", (0, 1, 2, 3), (), "right"),
        ("ranks", (0, 1, 2, 3), (2,), "wrong: 2"),
        ("ranks", (1,), (0, 1, 2, 3), "nobody"),
    ],
)
def test_whoever_names_culprits_alone_is_right_and_all_are_as_good_as_none(
    who: str, culprits: tuple[int, ...], named: tuple[int, ...], word: str
) -> None:
    assert judge(Naming(frozenset(named)), truth(who, culprits)) == word


def test_in_a_control_silence_is_right_and_a_rule_that_was_not_asked_has_no_word() -> None:
    control = Truth(hosts=("a",) * 4)
    assert to_blame(control) == frozenset()
    assert judge(Naming(frozenset()), control) == "right" and judge(Naming(frozenset({0})), control) == "wrong: 0"
    assert judge(None, control) == "-"


def test_eroica_is_held_to_all_ranks_that_it_ever_named() -> None:
    slow, well = slow_input(8)[0], healthy(8)[0]
    named = {int(rank) for finding in slow.findings for rank in finding.ranks.split(",")}
    everybody = replace(slow, findings=(replace(slow.findings[0], ranks="0-7"),))
    diagnoses: list[Diagnosis] = [well, slow, everybody]
    assert baselines.product(diagnoses, truth("ranks", (), 8)) == Naming(frozenset(named))


def test_a_window_that_ended_before_the_fault_cannot_show_it(tmp_path: Path) -> None:
    made = cluster("slow_input", world_size=4, seed=1)
    write_cluster(made, tmp_path / "captures-one")
    last = max(int(trace.ts_ns[-1]) for trace, _ in made.traces())
    assert [len(found.traces) for found in baselines.windows_in(tmp_path)] == [4]
    assert list(baselines.windows_in(tmp_path, since_ns=last)) == []
