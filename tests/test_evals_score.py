"""The judge of the catalogue: each rule by a case that it passes and one that it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from eroica.findings import (
    Coverage,
    Diagnosis,
    Evidence,
    Finding,
    FunctionName,
    Impact,
    Iteration,
    PatternValues,
    Verdict,
    Window,
)  # fmt: skip
from evals.score import score, wrong
from evals.truth import Answer, Expected, Place, Truth

READ = FunctionName("python", "__getitem__", "train/data.py:41", "train/data.py:41")
HOSTS = ("a", "a", "b", "b")
RIGHT = Answer(causes=frozenset({"input_pipeline"}), scopes=frozenset({"rank"}), who="ranks")


def finding(**more: Any) -> Finding:
    empty = PatternValues()
    given: dict[str, Any] = {"cause": "input_pipeline", "scope": "rank", "ranks": "1", "hosts": (), "function": READ}
    given |= {"evidence": (), "ruled_out": (), "advice": "", "confidence": "supported"} | more
    return Finding(id="F1", steps="stable", pattern=empty, peers=empty, expected=empty, distance=None, delta=None,
                   impact=Impact(0.1, 0.1, "ledger"), **given)  # fmt: skip


def diagnosis(*findings: Finding, kind: str = "slow", evidence: str = "") -> Diagnosis:
    return Diagnosis(
        job="", created="", kind=kind, window=Window(), iteration=Iteration(), coverage=Coverage(4, 4, "", "", 1.0),
        roles=(), hosts={}, findings=findings, consequences=(), evidence={"E1": Evidence(evidence, "trace")},
        verdict=Verdict("none", "none", "", (), "unknown", "it is slow"),
    )  # fmt: skip


def truth(answer: Answer = RIGHT, ranks: tuple[int, ...] = (1,), hosts: tuple[str, ...] = (), **more: Any) -> Truth:
    places = (Place(file="data.py", first=40, last=44),)
    planted = Expected(answer, frozenset(ranks), frozenset(hosts), 0.2, places=places)
    return Truth(hosts=HOSTS, faults=(planted,), **more)


def fault_in(found: Finding, answer: Answer, kind: str = "slow", evidence: str = "", **of: Any) -> str | None:
    """What is wrong with this finding as the answer."""
    true = truth(answer, **of)
    return wrong(found, true.faults[0], true, diagnosis(found, kind=kind, evidence=evidence))


def test_a_right_finding_scores_full_and_its_cost_is_compared() -> None:
    judged = score([diagnosis(), diagnosis(finding())], truth())
    assert judged.right and judged.points("A") == 1 and judged.right_findings == ((1, 0),)
    assert judged.cost_ratio == (0.5,) and judged.near == () and judged.verdict_right


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"ranks": "0"}, "ranks 0"),
        ({"ranks": "1-2"}, "ranks 1-2"),
        ({"ranks": ""}, "ranks none"),
        ({"scope": "host"}, "scope host"),
        ({"cause": "host_gc"}, "cause host_gc"),
    ],
)
def test_ranks_scope_and_cause_must_each_be_right(changed: dict[str, str], said: str) -> None:
    judged = score([diagnosis(finding(**changed))], truth())
    assert judged.found == (False,) and judged.near[0].startswith(said) and judged.points("A") == 0


def test_the_kind_of_the_diagnosis_counts_where_the_answer_asks_for_it() -> None:
    asked = replace(RIGHT, kinds=frozenset({"hang"}))
    assert fault_in(finding(), asked) == "kind slow"
    assert fault_in(finding(), asked, kind="hang") is None


def test_a_function_is_right_by_name_or_by_the_lines_in_which_the_fault_was_planted() -> None:
    by_name, by_place = replace(RIGHT, function="__GETITEM__"), replace(RIGHT, place=True)
    elsewhere = finding(function=FunctionName("python", "step", "train/data.py:50"))
    other_file = finding(function=FunctionName("python", "step", "train/loop.py:41"))
    assert fault_in(finding(), by_name) is None and fault_in(finding(), by_place) is None
    for found in (elsewhere, other_file, finding(function=None)):
        assert str(fault_in(found, by_place)).startswith("function")
        assert str(fault_in(found, by_name)).startswith("function")
    either = replace(RIGHT, place=True, function="step")
    assert fault_in(elsewhere, either) is None and fault_in(finding(), either) is None


def test_a_location_without_a_line_is_no_place() -> None:
    for location in ("data.py", "data.py:", "data.py:x", ""):
        assert fault_in(finding(function=FunctionName("python", "f", location)), replace(RIGHT, place=True)) is not None


def test_a_device_or_link_may_be_asked_for_as_the_function() -> None:
    assert fault_in(finding(device="a/gpu1"), replace(RIGHT, function=r"/gpu\d")) is None
    assert fault_in(finding(link="a - b"), replace(RIGHT, function=r"\ba - b\b")) is None


def test_what_must_be_said_may_stand_in_evidence_advice_or_what_is_ruled_out() -> None:
    asked = replace(RIGHT, said="persistent_workers")
    assert fault_in(finding(), asked) == "nothing said of persistent_workers"
    assert fault_in(finding(evidence=("E1",)), asked, evidence="no PERSISTENT_WORKERS") is None
    assert fault_in(finding(), asked, evidence="persistent_workers") is not None  # evidence of another finding
    assert fault_in(finding(advice="set persistent_workers"), asked) is None
    assert fault_in(finding(ruled_out=("persistent_workers: set",)), asked) is None


def test_among_takes_the_culprits_with_whom_they_block() -> None:
    asked = replace(RIGHT, who="among")
    assert fault_in(finding(ranks="0-1"), asked) is None
    assert fault_in(finding(ranks="0,2"), asked) is not None


def test_hosts_are_right_by_name_or_by_ranks_on_them_alone() -> None:
    asked = replace(RIGHT, who="hosts")
    of: dict[str, Any] = {"ranks": (2, 3), "hosts": ("b",)}
    assert fault_in(finding(ranks="", hosts=("b",)), asked, **of) is None
    assert fault_in(finding(ranks="3"), asked, **of) is None
    assert fault_in(finding(ranks="1,3"), asked, **of) is not None
    assert fault_in(finding(ranks="", hosts=("a", "b")), asked, **of) is not None


def test_a_link_needs_both_ends() -> None:
    asked = replace(RIGHT, who="link")
    of: dict[str, Any] = {"ranks": (0, 1, 2, 3), "hosts": ("a", "b")}
    assert fault_in(finding(ranks="", link="a - b"), asked, **of) is None
    assert fault_in(finding(ranks="", hosts=("a", "b")), asked, **of) is None
    assert fault_in(finding(ranks="", hosts=("a",)), asked, **of) is not None


def test_members_are_all_none_or_a_known_set_and_nobody_is_nobody() -> None:
    members, nobody = replace(RIGHT, who="members"), replace(RIGHT, who="nobody")
    true = truth(members, members=(frozenset({2, 3}),))
    for ranks, fits in (("", True), ("0-3", True), ("2-3", True), ("1", False)):
        found = finding(ranks=ranks)
        assert (wrong(found, true.faults[0], true, diagnosis(found)) is None) == fits
    assert fault_in(finding(ranks=""), nobody) is None and fault_in(finding(ranks="0-3"), nobody) is not None


def test_whoever_names_a_victim_beside_the_culprit_has_no_points() -> None:
    judged = score([diagnosis(finding(), finding(ranks="2", cause="host_gc"))], truth())
    assert judged.found == (True,) and judged.points("A") == 0 and judged.points("C") == 0
    assert judged.false_blames[0].startswith("host_gc of scope rank on ranks 2")
    assert judged.blaming_findings == ((0, 1),)


def test_an_early_false_blame_is_not_forgiven_by_a_later_right_answer() -> None:
    assert score([diagnosis(finding(ranks="3")), diagnosis(finding())], truth()).points("A") == 0


def test_a_second_word_on_the_culprit_is_no_blame_and_no_answer() -> None:
    judged = score([diagnosis(finding(cause="host_gc"))], truth())
    assert judged.found == (False,) and judged.false_blames == () and judged.blaming_findings == ()
    assert judged.near == ("cause host_gc",)


def test_of_two_faults_each_scores_half() -> None:
    two = truth()
    other = Expected(replace(RIGHT, causes=frozenset({"host_gc"})), frozenset({3}), frozenset())
    two = replace(two, faults=(*two.faults, other))
    assert score([diagnosis(finding())], two).points("A") == 0.5
    assert score([diagnosis(finding(), finding(ranks="3", cause="host_gc"))], two).points("A") == 1


@pytest.mark.parametrize(("grade", "points"), [("A", 0), ("B", 0.5), ("C", 0.5)])
def test_an_unknown_among_the_right_answers_is_worth_less_than_a_cause(grade: str, points: float) -> None:
    open_ = replace(RIGHT, causes=frozenset({"unknown", "host_gc"}))
    judged = score([diagnosis(finding(cause="unknown"))], truth(open_))
    assert judged.right and judged.points(grade) == points and judged.points(grade, unknown_is_fair=True) == 1
    named = score([diagnosis(finding(cause="unknown"), finding(cause="host_gc"))], truth(open_))
    assert named.points(grade) == 1


def test_a_link_must_be_one_of_those_that_may_be_named() -> None:
    asked = replace(RIGHT, scopes=frozenset({"link", "all"}), who="members")
    fault = replace(truth(asked).faults[0], links=frozenset({"a-b", ""}))
    for link, wrong_with in (("a-b", None), (None, None), ("b-a", "link b-a")):
        found = finding(scope="link" if link else "all", link=link, ranks="")
        assert wrong(found, fault, truth(asked), diagnosis(found)) == wrong_with


def test_in_a_control_any_finding_is_a_blame_unless_it_is_tolerated() -> None:
    control = Truth(hosts=HOSTS)
    assert score([diagnosis(kind="healthy")], control).points("A") == 1 and score([], control).points("A") == 1
    assert score([diagnosis(finding(cause="unknown", ranks=""))], control).points("A") == 0
    advice = replace(RIGHT, who="members", scopes=frozenset({"all"}))
    tolerant = replace(control, tolerated=(advice,))
    assert score([diagnosis(finding(scope="all", ranks=""))], tolerant).points("A") == 1
    assert score([diagnosis(finding(scope="all", ranks="2"))], tolerant).points("A") == 0


@pytest.mark.parametrize(
    ("kind", "points"), [("slow", 0), ("hang", 0), ("crash", 0), ("recovered", 0), ("paused", 1), ("no_data", 1)]
)
def test_a_control_in_trouble_without_a_finding_is_blamed_all_the_same(kind: str, points: int) -> None:
    assert score([diagnosis(kind=kind)], Truth(hosts=HOSTS)).points("A") == points


@pytest.mark.parametrize(("trigger", "points"), [("slowdown", 0), ("recurring", 0), ("baseline", 1), ("manual", 1)])
def test_a_window_that_a_control_set_off_is_a_blame_though_nothing_was_found(trigger: str, points: int) -> None:
    seen = replace(diagnosis(kind="healthy"), window=Window(trigger=trigger))
    assert score([seen], Truth(hosts=HOSTS)).points("A") == points


def test_an_honest_unknown_is_half_a_point_where_nobody_knows_and_only_there() -> None:
    honest = finding(cause="unknown", ruled_out=("the network: as fast as before",))
    for grade, points in (("A", 0), ("B", 0), ("C", 0.5)):
        assert score([diagnosis(honest)], truth()).points(grade) == points
    assert score([diagnosis(replace(honest, ruled_out=()))], truth()).points("C") == 0
    assert score([diagnosis(replace(honest, ranks="2"))], truth()).points("C") == 0  # on a victim


def test_nothing_said_is_a_miss() -> None:
    judged = score([], truth())
    assert judged.found == (False,) and judged.near == ("no finding",) and not judged.verdict_right
