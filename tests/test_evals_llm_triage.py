"""Questions to models about jobs: a good answer gets all points, a bad one loses those that it should, no others."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from eroica.assist.endpoints import Endpoint
from eroica.errors import UnavailableError
from evals.llm.endpoint import Answer, Asked, Call, Fail, Model, Say, serving
from evals.llm.grading import named
from evals.llm.questions import QUESTIONS
from evals.llm.triage import Price, Row, made, main, run, stability, table
from evals.truth import Truth

QUICK = ("mismatch", "crash", "healthy", "over", "driver")
"""Of jobs that are made up in half a second."""


def good(asked: Asked) -> Answer:
    """Reads the diagnosis that it is given, and asks for one more thing."""
    question = next(str(one["content"]) for one in asked.messages if one["role"] == "user")
    if "driver" in question:
        return Say("The version of the driver is not in the data.")
    if "| finding: F1" not in asked.text:
        return Say("No rank can be blamed: no cause was found in what was seen.")
    if "| cause: exception" in asked.text:
        return Say("All ranks left by the same AssertionError (E1).")
    if not any(one["role"] == "tool" for one in asked.messages):
        return Call([("get_diagnosis", {"id": "latest"})])
    rank = re.search(r"\| who: rank (\d+)", asked.text)
    assert rank is not None
    return Say(f"Rank {rank[1]} entered another collective than the others, which wait for it: a mismatch (E1).")


def but(change: Callable[[str], str]) -> Model:
    """The good model, its words changed."""

    def model(asked: Asked) -> Answer:
        answer = good(asked)
        return Say(change(answer.text)) if isinstance(answer, Say) else answer

    return model


Asking = Callable[..., list[Row]]


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Asking:
    """Asks a model; what its answers get."""
    chosen = [one for one in QUESTIONS if one.id in QUICK]
    jobs = made(chosen, tmp_path_factory.mktemp("jobs"))

    def ask(model: Model, repeat: int = 1, price: Price | None = None) -> list[Row]:
        with serving(model) as at:
            return list(run(chosen, jobs, Endpoint("openai", "scripted", at.url), repeat=repeat, price=price))

    return ask


def lost(rows: Sequence[Row]) -> set[tuple[str, str]]:
    """(question, grade) of all that is wrong."""
    return {(row.question, name) for row in rows for name, right in row.grades.items() if right is False}


def test_a_model_that_answers_well_gets_every_point_with_its_tokens_and_cost(answered: Asking) -> None:
    rows = answered(good, price=Price(per_million_in=3.0, per_million_out=15.0))
    assert lost(rows) == set()
    for row in rows:
        (question,) = (one for one in QUESTIONS if one.id == row.question)
        assert {name for name, right in row.grades.items() if right is not None} == set(question.asks)
        assert row.tokens_in and row.tokens_out and row.tokens_in > row.tokens_out
        assert row.cost == (row.tokens_in * 3.0 + row.tokens_out * 15.0) / 1e6
    assert rows[0].tools == ("get_diagnosis",)
    assert "| scripted | 2 of 2 | 2 of 2 | 2 of 2 | 3 of 3 | 5 of 5 |" in table(rows)


def test_who_names_a_victim_loses_the_culprit_and_nothing_else(answered: Asking) -> None:
    rows = answered(but(lambda text: text + " Rank 5 is slow, too (E1)." if "mismatch" in text else text))
    assert lost(rows) == {("mismatch", "culprit")}


def test_who_names_another_cause_loses_the_cause(answered: Asking) -> None:
    rows = answered(but(lambda text: text.replace("a mismatch", "a GPU throttling")))
    assert lost(rows) == {("mismatch", "cause")}


def test_who_invents_evidence_loses_the_evidence(answered: Asking) -> None:
    rows = answered(but(lambda text: text.replace("E1", "E77")))
    assert lost(rows) == {("mismatch", "evidence"), ("crash", "evidence")}
    assert all(row.num_unsupported for row in rows if row.question in ("mismatch", "crash"))


def test_who_always_knows_loses_the_abstentions(answered: Asking) -> None:
    def model(asked: Asked) -> Answer:
        answer = good(asked)
        is_abstention = isinstance(answer, Say) and re.search(r"not in the data|No rank", answer.text)
        return Say("Rank 1 is slow; its driver is 550.54.") if is_abstention else answer

    rows = answered(model)
    assert lost(rows) == {("healthy", "abstention"), ("over", "abstention"), ("driver", "abstention")}


def test_rambling_of_what_is_not_measured_is_no_abstention(answered: Asking) -> None:
    text = (
        "The one that stands still makes the job slow. It is a task that is not measured by its own size."  # SmolLM2's
    )
    rows = answered(but(lambda said: text if "No rank" in said else said))
    assert lost(rows) == {("healthy", "abstention"), ("over", "abstention")}


def test_silence_is_wrong_in_all_that_was_asked(answered: Asking) -> None:
    rows = answered(lambda asked: Say(""))
    assert len(lost(rows)) == sum(len(one.asks) for one in QUESTIONS if one.id in QUICK)
    assert all("said nothing" in row.problem and row.tokens_in is None and row.cost is None for row in rows)


def test_what_is_answered_otherwise_the_second_time_is_not_stable(answered: Asking) -> None:
    times = 0

    def model(asked: Asked) -> Answer:
        nonlocal times
        answer = good(asked)
        if isinstance(answer, Say) and "driver" in answer.text:
            times += 1
            return answer if times == 1 else Say("The driver is 550.54.")
        return answer

    rows = answered(model, repeat=2)
    assert stability(rows) == 0.8
    assert stability(rows[:5]) is None
    assert "| 80% |" in table(rows)
    assert "| driver | C08b | not asked | not asked | not asked | 1 of 2 |" in table(rows)


def test_a_dead_endpoint_is_one_sentence_and_what_was_answered_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-nobody")
    file = tmp_path / "results.jsonl"
    assert main(["--question", "crash", "--model", "m", "--results", str(file)]) == 1
    told = capsys.readouterr()
    progress, said = told.err.splitlines()
    assert re.fullmatch(r"\[1/1\] no model: crash \.\.\. right \(\d+\.\d s\)", progress)
    assert re.fullmatch(r"triage: m at http://127\.0\.0\.1:9/v1 does not answer: .*", said)
    assert "sk-of-nobody" not in told.out + told.err
    (row,) = map(json.loads, file.read_text().splitlines())
    assert row["model"] == "no model"


def test_an_endpoint_that_breaks_off_ends_the_run(answered: Asking) -> None:
    with pytest.raises(UnavailableError, match="does not answer"):
        answered(lambda asked: Fail(400, '{"error": {"message": "the context is full"}}'))


def test_without_a_model_the_diagnosis_answers_and_costs_are_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("EROICA_MODEL", raising=False)
    file, board = tmp_path / "results.jsonl", tmp_path / "board.md"
    words = [word for name in QUICK for word in ("--question", name)]
    assert main([*words, "--results", str(file), "--board", str(board)]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert not any(False in row["grades"].values() for row in rows)
    assert all(row[name] is None for row in rows for name in ("tokens_in", "tokens_out", "cost"))
    assert capsys.readouterr().out in board.read_text()


def test_a_price_alone_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--price-in", "3"])
    assert "--price-in and --price-out belong together" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "who"),
    [
        ("Rank 2 is slow; ranks 0-1,3 only wait.", "rank 2"),
        ("The other ranks wait for rank 2.", "rank 2"),
        ("Ranks 0, 1 and 3 wait for rank 2.", "rank 2"),
        ("Rank 2 makes ranks 0-1 wait.", "rank 2"),
        ("Rank 2 is in one call, while ranks 0-1,3 are in another.", "rank 2"),
        ("The others wait while rank 2 computes.", "rank 2"),
        ("Not rank 1, but rank 2 is to blame.", "rank 2"),
        ("Rank 1 is not to blame, rank 2 is.", "rank 2"),
        ("Rank 2 takes longer than rank 0.", "rank 2"),
        ("Rank 2 is in another call than the others, which wait for it.", "rank 2"),
        ("Rank 1, a victim, waits. Rank 2 is late.", "rank 2"),
        ("Ranks 1 and 2 on node0 are slow.", "ranks 1-2 on node0"),
        ("Ranks 0 to 2 are slow.", "ranks 0-2"),
        ("E1: ranks 0-3 have entered allreduce\nrank 2 has not.", "rank 2"),
        ("It is on all ranks alike.", "all ranks"),
        ("No rank differs from its peers.", "nobody"),
    ],
)
def test_who_waits_or_is_compared_is_not_taken_for_blamed(text: str, who: str) -> None:
    assert named(text, Truth(hosts=("node0",) * 2 + ("node1",) * 2)).text == who
