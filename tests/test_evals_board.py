"""Running the catalogue and its scoreboard: what is counted, what is told, and that nothing is lost on the way."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.peers import Environment
from evals import baselines, board, catalogue, peers, rows, suites
from evals.__main__ import GUESS_S, Pace, main, plan
from evals.catalogue import Case, CaseError
from evals.cores import Cores, spread_of
from evals.made import Draw
from evals.rows import Row, Said, Session

SESSION = Session(
    command="python -m evals run", started="2025-01-31 12:00:00 UTC", commit="abc", machine={"cores": "2"}
)
CASE = """
id = "{id}"
entry = "{entry}"
title = "What case {id} is about"
sources = ["somewhere#1"]
category = "data loading"
kind = "{kind}"
scope = "one rank"
grade = "{grade}"
suite = "{suite}"
innocent = "the others"
traps = []
{more}
[recipe]
program = "{name}.py"
ranks = 8
"""
ANSWER = """
[[faults]]
causes = ["input_pipeline"]
scopes = ["rank"]
who = "ranks"
"""
HEALTHY = """
from evals.made import Made
from evals.truth import Truth

def make(case, draw):
    return Made(truth=Truth(hosts=("a",) * 8), diagnoses=())
"""
FOUND = """
from evals.made import Made
from evals.truth import Expected, Truth
from tests.samples import slow_input

def make(case, draw):
    diagnosis = slow_input(8)[0]
    (culprit,) = (int(finding.ranks) for finding in diagnosis.findings[:1])
    faults = (Expected(case.faults[0], frozenset({culprit}), frozenset()),)
    return Made(truth=Truth(hosts=("a",) * 8, faults=faults), diagnoses=(diagnosis,))
"""
BROKEN = """
def make(case, draw):
    raise ZeroDivisionError("nothing to divide by")
"""


CLUSTER = """
from evals.made import Made, of_cluster
from evals.synth import cluster

def make(case, draw):
    made = cluster("slow_input", world_size=2, effect=draw.effect, seed=draw.seed, num_iterations=3, max_events=100)
    return of_cluster(case, made)
"""


def add(folder: Path, name: str, program: str, **of: str) -> None:
    """A case of the catalogue in `folder`."""
    given = {"id": name, "entry": name, "kind": "slow", "grade": "A", "suite": "synthetic", "more": ""} | of
    case = folder / f"{name}-made-up"
    case.mkdir(parents=True)
    text = CASE.format(**given, name=name.lower()) + (ANSWER if given["kind"] == "slow" else "")
    (case / "case.toml").write_text(text)
    (case / f"{name.lower()}.py").write_text(program)


def row(case: str = "Q01", points: float = 1.0, **more: Any) -> Row:
    key = f"{case}/{more.get('part', 'nominal')}/{more.get('effect', 0.5)}/{more.get('seed', 1)}"
    given: dict[str, Any] = {"key": key, "case": case, "entry": case[:3], "title": f"about {case}", "grade": "A",
                             "suite": "live", "kind": "slow", "shape": "convnet", "effect": 0.5, "seed": 1}  # fmt: skip
    return Row(points=points, **(given | more))


def run(folder: Path, *words: str) -> int:
    return main(["run", "--cases", str(folder / "cases"), "--results", str(folder / "results.jsonl"), *words])


# --- running -------------------------------------------------------------------------------------------------------


def test_a_case_that_fails_is_a_line_with_the_reason_and_costs_the_others_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(tmp_path / "cases", "Q01", BROKEN)
    add(tmp_path / "cases", "Q02", FOUND)
    add(tmp_path / "cases", "Q03", HEALTHY, kind="control")
    assert run(tmp_path) == 1
    shown = capsys.readouterr().out
    assert "no result (0 s): ZeroDivisionError: nothing to divide by" in shown
    assert "2 of 3 entries of grades A and B (66.7%)" in shown and "0 of 1 controls blamed" in shown
    by = {each.case: each for each in rows.read(tmp_path / "results.jsonl").rows}
    assert by["Q01"].problem and by["Q02"].points == 1 and by["Q03"].points == 1


def test_a_run_that_was_killed_in_the_middle_of_a_line_goes_on_behind_the_last_whole_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("Q01", "Q02"):
        add(tmp_path / "cases", name, FOUND)
    file = tmp_path / "results.jsonl"
    assert run(tmp_path) == 0
    whole = file.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut, again in ((last, 1), (last + 1, 1), (last + 40, 1), (len(whole) - 1, 0)):
        file.write_bytes(whole[:cut])
        capsys.readouterr()
        assert run(tmp_path, "--resume") == 0
        told = capsys.readouterr().err
        assert "[1/2, " not in told and told.count("[2/2, ") == again  # what the file holds is not run again
        held = rows.read(file)
        assert [each.case for each in held.rows] == ["Q01", "Q02"] and len(held.sessions) == 2
    assert run(tmp_path, "--resume") == 0 and len(rows.read(file).rows) == 2


def test_without_resume_a_file_begins_anew_unless_it_is_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(tmp_path / "cases", "Q01", FOUND)
    assert run(tmp_path) == 0 and run(tmp_path) == 0
    assert len(rows.read(tmp_path / "results.jsonl").sessions) == 1
    for text in ("a letter to my aunt\n", "a letter", '{"schema": "eroica.evals/0"}\n'):
        (tmp_path / "results.jsonl").write_text(text)
        assert run(tmp_path) == 1 and (tmp_path / "results.jsonl").read_text() == text
        told = capsys.readouterr().err.splitlines()[-1]
        assert told.startswith("evals: ") and "line 1" in told and "eroica.evals/1" in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--case", "Q99"], "no case or entry is called Q99"),
        (["--case", "Q01", "--suite", "live"], "no case of Q01 is of suite live; leave --suite out"),
        (["--repeat", "0"], "--repeat is 0; give 1 or more"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    add(tmp_path / "cases", "Q01", FOUND)
    assert run(tmp_path, *words) == 1
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("evals: ") and said in told
    assert not (tmp_path / "results.jsonl").exists()


def test_where_a_suite_cannot_run_its_cases_are_told_and_not_counted_and_tried_again_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add(tmp_path / "cases", "Q01", FOUND)
    add(tmp_path / "cases", "Q02", FOUND, suite="netns")
    monkeypatch.setattr(suites, "unavailable", lambda suite: "it needs root" if suite == "netns" else "")
    assert run(tmp_path) == 0
    shown = capsys.readouterr()
    assert "the netns cases are not run: it needs root" in shown.err.splitlines()[0]
    assert "not run: it needs root" in shown.out and "1 of 1 entries" in shown.out
    cases = catalogue.load(tmp_path / "cases")
    assert "**Not run** and not counted, since it needs root: Q02." in board.of_files(
        [tmp_path / "results.jsonl"], cases, tmp_path / "none.toml"
    )
    assert run(tmp_path, "--resume") == 0
    assert "[2/2, " in capsys.readouterr().err


def test_the_plan_has_each_effect_turn_and_shape_that_was_asked_for_and_a_control_has_one_effect(
    tmp_path: Path,
) -> None:
    from random import Random

    add(tmp_path, "Q01", FOUND)
    add(tmp_path, "Q02", HEALTHY, kind="control")
    cases = catalogue.load(tmp_path)
    turns = [(one.case.id, one.part, one.turn) for one in plan(cases, 2, "nominal", "drawn", Random(1))]
    assert turns == [("Q01", "nominal", 0), ("Q02", "nominal", 0), ("Q01", "repeat", 1), ("Q02", "repeat", 1)]
    assert [one.draw.effect for one in plan(cases[:1], 1, "nominal", "drawn", Random(1))] == [0.5]
    swept = list(plan(cases, 1, "all", "all", Random(1)))
    assert {one.part for one in swept} == {"sweep"} and len({one.key for one in swept}) == len(swept) == 3 * 2 + 2
    again = list(plan(cases, 1, "all", "all", Random(1)))
    assert [one.draw for one in again] == [one.draw for one in swept]


def test_the_time_left_is_guessed_by_the_case_itself_or_its_suite(tmp_path: Path) -> None:
    from random import Random

    for name in ("Q01", "Q02"):
        add(tmp_path, name, FOUND)
    todo = list(plan(catalogue.load(tmp_path), 1, "nominal", "drawn", Random(1)))
    assert Pace([]).left_s(todo) == 2 * GUESS_S["synthetic"]
    pace = Pace([row("Q01", suite="synthetic", seconds=10.0), row("Q09", suite="live", seconds=99.0)])
    pace.add(row("Q03", suite="synthetic", seconds=20.0))
    pace.add(row("Q02", suite="synthetic", not_run="it needs root"))
    assert pace.left_s(todo) == 10.0 + 15.0


# --- what counts ---------------------------------------------------------------------------------------------------


def test_an_entry_has_the_mean_of_its_cases_and_only_the_first_nominal_run_of_each_counts() -> None:
    made = [
        row("Q01", 1.0),
        row("Q01b", 0.0),
        row("Q01", 0.0, part="repeat", seed=2),
        row("Q01", 0.0, part="sweep", effect=0.1, is_nominal=False),
        row("Q02", 0.5, grade="C"),
        row("Q03", 0.0, not_run="it needs root"),
        row("Q04", 0.0, part="sweep", effect=0.1, is_nominal=False),
        row("Q04", 1.0, part="sweep", effect=0.5),
    ]
    assert board.by_entry(made, "AB") == {"Q01": 0.5, "Q04": 1.0}
    assert board.by_entry(made, "C") == {"Q02": 0.5}


def test_a_board_passes_with_enough_points_and_no_blamed_control() -> None:
    good = [row(f"Q{n:02}") for n in range(40)]
    assert board.passed(good) and board.passed([])
    assert board.passed([*good[1:], row("Q00", 0.0)])  # 39 of 40 are 97.5 %
    assert not board.passed([*good[2:], row("Q00", 0.0), row("Q01", 0.0)])
    assert board.passed([*good, row("Q50", 0.0, grade="C")])
    assert not board.passed([*good, row("Q50", 0.0, kind="control", false_blames=("rank 3",))])
    assert board.passed([*good, row("Q50", 0.0, kind="control", not_run="it needs root")])


# --- the document --------------------------------------------------------------------------------------------------


def cases(folder: Path) -> tuple[Case, ...]:
    add(folder, "Q01", FOUND)
    add(folder, "Q01b", HEALTHY, entry="Q01", kind="control")
    add(folder, "Q02", FOUND, more='changed = ["The host may be named: the report says so too."]')
    add(folder, "Q03", FOUND, grade="C")
    add(folder, "Q04", FOUND)
    return catalogue.load(folder)


def said(right: bool = True, blames: bool = False, confidence: str = "established") -> Said:
    return Said(kind="slow", cause="input_pipeline" if right else "host_gc", scope="rank", ranks="1", function="read",
                confidence=confidence, right=right, blames=blames)  # fmt: skip


MADE = [
    row("Q01", causes=("input_pipeline",), found=(True,), said=(said(),), seconds=20.0, to_diagnosis_s=9.0,
        anybody=True, by_ranks="right", baselines={"slowest step": "nobody", "last arriver": "wrong: 2"}),
    row("Q01b", kind="control", effect=0.0, by_ranks="right", baselines={"slowest step": "right", "last arriver": "-"}),
    row("Q02", 0.0, causes=("input_pipeline", "device_sync/host_python"), found=(True, False),
        said=(said(), said(False, True)), near=("cause host_gc",), false_blames=("host_gc on rank 1",)),
    row("Q03", 0.5, grade="C", causes=("unknown",), found=(False,), near=("cause unknown",)),
    row("Q01", 0.0, part="repeat", seed=2, near=("no finding",), found=(False,), causes=("input_pipeline",)),
    row("Q01", 0.0, part="sweep", effect=0.1, is_nominal=False, near=("no finding",), found=(False,)),
]  # fmt: skip


def test_the_scoreboard_tells_all_that_was_found_out(tmp_path: Path) -> None:
    text = board.markdown(MADE, cases(tmp_path), [SESSION], {"Q02": "Two things look alike."})
    for line in (
        "**1 of 2 entries of grades A and B (50.0%); 0.5 of 1 of grade C; 0 of 1 controls blamed.**",
        "3 of the catalogue's 4 entries (4 of 5 cases) stand behind this.",
        "**No result yet**, not counted: Q04.",
        "| `python -m evals run` | 2025-01-31 12:00:00 UTC | abc | - | cores 2 |",
        "| Q01 | about Q01 | A | live | 50% | right | input_pipeline of rank 1, read | 20 | 9 |",
        "| Q01b | about Q01b | A | live | - | silent | nothing | 0 | - |",
        "- **Q01** about Q01 (1 of 2 runs): no finding. *Why*: **not explained yet**",
        "- **Q02** about Q02 (1 of 1 runs): cause host_gc; blamed host_gc on rank 1. *Why*: Two things look alike.",
        "| **eroica** | 1 of 1 | 0 | 0 | 1 of 1 | 0 |",
        "| slowest step | 0 of 1 | 0 | 1 | 1 of 1 | 0 |",
        "| last arriver | 0 of 1 | 1 | 0 | 0 of 1 | 0 |",
        "| Q01 | right | nobody | wrong: 2 |",
        "| to 10% | 1 | 0 (0%) | 0 | Q01 |",
        "| to 50% | 4 | 1.5 (38%) | 1 | Q01, Q02, Q03 |",
        "Of 1 cases that ran more than once at nominal effect, 0 were right each time, 0 never.",
        "| Q01 | live | 1 of 2 | 9 to 9 |",
        "| (nothing) | 1 | 1 | - |",
        "| device_sync or host_python | 1 | 0 | host_gc (1) |",
        "| input_pipeline | 2 | 2 | - |",
        "| established | 3 | 2 | 0 | 1 | 67% |",
        "- **Q02**: The host may be named: the report says so too.",
    ):
        assert line in text, line


def test_the_board_tells_where_an_answer_asks_for_less_than_the_rules_say(tmp_path: Path) -> None:
    known = {case.id: case for case in cases(tmp_path)}
    (answer,) = known["Q02"].faults
    known["Q01"] = replace(known["Q01"], faults=(replace(answer, function="read"),))
    known["Q03"] = replace(known["Q03"], faults=(replace(answer, said="storage", causes=frozenset({"unknown"})),))
    known["Q04"] = replace(known["Q04"], faults=(replace(answer, who="link"),))
    found = replace(said(), cause="unknown")
    text = board.markdown([row("Q03", grade="C", said=(found,), found=(True,))], [*known.values()])
    assert "Neither a function nor words are asked for in Q02." in text
    assert '"Unknown" is among the right causes in Q03; it was said in Q03.' in text
    assert "are asked for in" not in board.markdown([row("Q01")], [known["Q01"], known["Q01b"]])


def test_of_several_faults_the_board_tells_how_many_were_found(tmp_path: Path) -> None:
    one = row("Q01", 1 / 3, found=(True, False, False), near=("no finding", "no finding"), causes=("unknown",) * 3)
    text = board.markdown([one], cases(tmp_path))
    assert "| Q01 | about Q01 | A | live | 50% | 1 of 3 |" in text and "half" not in text.partition("## Cases")[2]
    assert rows.one_line(one).startswith("1 of 3 (") and rows.one_line(MADE[3]).startswith("half (")


def test_a_wrong_cause_of_a_fault_that_was_missed_counts_against_its_confidence(tmp_path: Path) -> None:
    known = cases(tmp_path)
    missed = row("Q01", 0.0, found=(False,), near=("cause host_gc",), causes=("input_pipeline",), said=(said(False),))
    second = row("Q04", found=(True,), causes=("input_pipeline",), said=(said(), said(False)))
    assert "| established | 1 | 0 | 0 | 1 | 0% |" in board.markdown([missed], known)
    assert "| established | 2 | 1 | 1 | 0 | 100% |" in board.markdown([second], known)


def test_a_fault_that_grows_with_each_step_is_in_no_class_of_sizes(tmp_path: Path) -> None:
    known = cases(tmp_path)
    (first, *others) = known
    known = (replace(first, recipe=replace(first.recipe, is_growth=True)), *others)
    made = [row("Q01", effect=0.005), row("Q02", effect=0.2), row("Q03", effect=0.5)]
    text = board.markdown(made, known)
    assert "| to 20% | 1 |" in text and "| to 5% |" not in text
    assert "| Q01 | about Q01 | A | live | +0.5% a step | right |" in text


def test_the_board_tells_how_many_runs_stand_behind_each_command(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    rows.start(file, SESSION, resume=False)
    for name in ("Q01", "Q02"):
        rows.append(file, row(name))
    rows.start(file, replace(SESSION, commit="def"), resume=True)
    rows.append(file, row("Q02", 0.0))
    text = board.of_files([file], cases(tmp_path / "cases"), tmp_path / "none.toml")
    assert "UTC | abc | 1 | cores 2 |" in text and "UTC | def | 1 | cores 2 |" in text
    assert "Not all of it is of one commit" in text


def test_the_board_tells_how_even_the_cores_were(tmp_path: Path) -> None:
    made = [row("Q01", cores=1.1), row("Q02", cores=1.6), row("Q03")]
    text = board.markdown(made, cases(tmp_path / "cases"), [SESSION])
    assert "1.35 times what it took in the quickest (median of 2 runs; at most 1.60; 1.25 and more in 1)" in text


def test_cores_are_as_uneven_as_the_work_on_them() -> None:
    assert spread_of([1.0] * 9 + [2.0] * 11) == 2.0
    assert spread_of([1.0, 2.0]) is None
    with Cores(every_s=0.0) as cores:
        until = time.monotonic() + 10
        while cores.spread() is None and time.monotonic() < until:
            continue
    spread = cores.spread()
    assert spread is not None and spread >= 1


def test_text_from_jobs_cannot_break_the_tables(tmp_path: Path) -> None:
    odd = replace(said(), function="a|b\n" + "c" * 300)
    text = board.markdown([row("Q01", said=(odd,), found=(True,), causes=("unknown",))], cases(tmp_path))
    (line,) = (line for line in text.splitlines() if line.startswith("| Q01 | about"))
    assert "a\\|b c" in line and len(line) < 250


def test_a_board_of_nothing_says_that_there_is_nothing(tmp_path: Path) -> None:
    text = board.markdown([], cases(tmp_path))
    assert "0 of 0 entries" in text and "not counted: Q01, Q01b, Q02, Q03, Q04." in text


def test_a_run_without_a_result_is_told_on_top_and_counts_as_missed(tmp_path: Path) -> None:
    text = board.markdown([row("Q01", 0.0, problem="the job planted nothing")], cases(tmp_path))
    assert "**Without a valid run**, counted as missed: Q01." in text and "**0 of 1 entries" in text
    assert "(1 of 1 runs): the job planted nothing." in text


def test_the_first_file_counts_before_later_ones(tmp_path: Path) -> None:
    known = cases(tmp_path / "cases")
    for name, points in (("nominal", 1.0), ("repeats", 0.0)):
        file = tmp_path / f"{name}.jsonl"
        rows.start(file, SESSION, resume=False)
        rows.append(file, row("Q01", points))
    files = [tmp_path / "nominal.jsonl", tmp_path / "repeats.jsonl"]
    assert "**1 of 1 entries" in board.of_files(files, known, tmp_path / "none.toml")
    assert "**0 of 1 entries" in board.of_files(files[::-1], known, tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[miss]]\ncase = 'Q01'\n", "misses.toml: KeyError: 'why'"),
        ("[[miss]\n", "misses.toml: TOMLDecodeError"),
        ("[[miss]]\ncase = 'Q77'\nwhy = 'so'\n", "misses.toml: no case is called Q77"),
    ],
)
def test_an_explanation_that_explains_nothing_is_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "misses.toml").write_text(text)
    with pytest.raises(CaseError, match=told.replace("(", r"\(")):
        board.read_misses(tmp_path / "misses.toml", cases(tmp_path / "cases"))


def test_explanations_that_are_committed_are_of_cases_that_exist() -> None:
    board.read_misses(board.MISSES, catalogue.load())


def test_the_committed_scoreboard_is_the_one_of_the_committed_results() -> None:
    files = sorted((Path(board.__file__).parent / "results").glob("*.jsonl"))
    if files:
        shown = (Path(board.__file__).parent / "SCOREBOARD.md").read_text()
        assert shown == board.of_files(files, catalogue.load(), board.MISSES), (
            "write it again: python -m evals board --write"
        )


# --- peers ---------------------------------------------------------------------------------------------------------


def peer(folder: Path, script: str) -> Environment:
    """A stand-in for HTA's interpreter: PYTHON peer_hta.py FOLDER WORLD_SIZE."""
    tool = folder / "python"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    return Environment("hta", tool, {"HolisticTraceAnalysis": "0.5.0"}, "")


def test_a_peer_gets_a_file_per_rank_and_is_judged_by_whom_it_names(tmp_path: Path) -> None:
    add(tmp_path / "cases", "Q01", CLUSTER)
    (case,), draw = catalogue.load(tmp_path / "cases"), Draw(seed=3, effect=0.2, shape="bert")
    (culprit,) = baselines.to_blame(suites.make(case, draw).truth)
    checks = 'test -s "$2/rank0.json.gz" && test -s "$2/rank1.json.gz" && test "$3" = 2'
    told = peers.ask(case, draw, peer(tmp_path, f'{checks} && echo "[{culprit}]"'))
    assert told is not None
    assert (told.problem, told.word, told.anybody, told.said) == ("", "right", True, f"ranks {culprit}")
    told = peers.ask(case, draw, peer(tmp_path, f'echo "[{1 - culprit}]"'))
    assert told is not None and told.word.startswith("wrong")


def test_a_peer_that_fails_is_told_with_its_last_words_and_stands_on_the_board(tmp_path: Path) -> None:
    add(tmp_path / "cases", "Q01", CLUSTER)
    (case,), draw = catalogue.load(tmp_path / "cases"), Draw(seed=3, effect=0.2, shape="bert")
    told = peers.ask(case, draw, peer(tmp_path, "echo no such kernel >&2; exit 3"))
    assert told is not None and told.problem == "exit status 3: no such kernel" and told.word == "-"
    file = tmp_path / "peers.jsonl"
    rows.start(file, SESSION, resume=False)
    rows.append(file, told)
    text = board.of_files([file], [case], tmp_path / "none.toml")
    assert "| HTA 0.5.0 | 1 | 0 | 0 | 0 | 0 | 0 | 1 |" in text
    assert "| Q01 | HTA | - | exit status 3: no such kernel | - |" in text


def test_showing_cases_to_peers_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Q01", "Q02"):
        add(tmp_path / "cases", name, CLUSTER)
    monkeypatch.setattr("evals.__main__.environment", lambda name: peer(tmp_path, 'echo "[0]"'))
    command = ["peers", "--cases", str(tmp_path / "cases"), "--results", str(tmp_path / "peers.jsonl")]
    assert main([*command, "--case", "Q01"]) == 0
    assert main([*command, "--resume"]) == 0
    assert [told.case for told in rows.read(tmp_path / "peers.jsonl").peers] == ["Q01", "Q02"]


def test_traceml_gets_the_environment_of_the_case_and_a_job_that_planted_nothing_costs_the_others_nothing(
    tmp_path: Path,
) -> None:
    more = 'environment = { TORCH_DISTRIBUTED_DEBUG = "DETAIL" }'
    add(tmp_path / "cases", "Q01", HEALTHY, suite="live")
    file = tmp_path / "cases" / "Q01-made-up" / "case.toml"
    file.write_text(file.read_text().replace("ranks = 8", f"ranks = 8\n{more}"))
    (case,), draw = catalogue.load(tmp_path / "cases"), Draw(seed=3, effect=0.2, shape="convnet")
    seen = tmp_path / "seen"
    tool = replace(
        peer(tmp_path, f'echo "$TORCH_DISTRIBUTED_DEBUG" > {seen}'),
        name="traceml",
        versions={"msgspec": "1", "traceml-ai": "0.5.0"},
    )
    told = peers.ask(case, draw, tool)
    assert seen.read_text() == "DETAIL\n"
    assert told is not None and (told.peer, told.version) == ("TraceML", "0.5.0")
    assert told.problem == "the job planted nothing"


def test_peers_are_shown_only_what_they_can_look_at() -> None:
    shown = {case.id: peers.peer_of(case) for case in catalogue.load()}
    assert (shown["D01"], shown["G01"], shown["C01"]) == ("traceml", "hta", "")
    assert {shown[case.id] for case in catalogue.load() if case.kind in ("hang", "crash")} == {""}


def test_a_suite_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert suites.unavailable("live") == suites.unavailable("synthetic") == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "network namespaces need" in suites.unavailable("netns")
