"""The catalogue of faults: every case says all that it must, and a case that does not is refused in one sentence."""

from __future__ import annotations

import ast
import random
import re
from functools import lru_cache
from pathlib import Path

import pytest

from evals import catalogue, jobs
from evals.catalogue import Case, CaseError

ROOT = Path(__file__).parents[1]
CASES = catalogue.load()
ENTRIES = frozenset(
    "D01 D02 D04 D05 D06 H01 H03 H04 H06 H08 H09 H10 M01 M02 G01 G03 G04 G05 G06 G09 I01 I02 I04 N01 N03 N04 N06 N07 "
    "N09 N10 N11 C01 C03 C04 C05 C06 C08 C10 C11 L01 L02 L04 L06 K01 K03 K05 F01 F02 F03 F05 F06 B01 B03 B04 T01 T03 "
    "T04 T05 T08 T09 X02".split()
)
"""The list of public reports that the catalogue was begun with."""
GOOD = """
id = "Q01"
title = "A rank is slow"
sources = ["somewhere#1"]
category = "data loading"
kind = "slow"
scope = "one rank"
grade = "A"
suite = "live"
innocent = "the others"
traps = []

[recipe]
program = "q01_slow.py"

[[faults]]
causes = ["input_pipeline"]
scopes = ["rank"]
who = "ranks"
"""


def written(folder: Path, text: str, name: str = "Q01-slow") -> Path:
    """A catalogue of one case."""
    (folder / name).mkdir()
    (folder / name / "case.toml").write_text(text)
    (folder / name / "q01_slow.py").write_text("")
    return folder


def test_a_case_is_read_with_what_its_folder_tells(tmp_path: Path) -> None:
    (case,) = catalogue.load(written(tmp_path, GOOD))
    assert (case.id, case.entry, case.slug, case.suite) == ("Q01", "Q01", "slow", "live")
    assert case.recipe.nominal == 0.5 and not case.is_control
    assert case.faults[0].causes == {"input_pipeline"} and case.faults[0].who == "ranks"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('id = "Q01"', 'id = "Q01', "TOMLDecodeError"),
        ('title = "A rank is slow"\n', "", "title"),
        ('title = "A rank is slow"', 'titel = "A rank is slow"', "titel"),
        ("[recipe]", "[recipes]", "recipe"),
        ('program = "q01_slow.py"', 'program = "q02.py"', "the program 'q02.py' is not in the folder"),
        ('program = "q01_slow.py"', 'program = "q01_slow.py"\nrank = 8', "rank"),
        ('program = "q01_slow.py"', 'program = "q01_slow.py"\nlaunch = "mpirun"', "launch is 'mpirun'; choose one of"),
        ('kind = "slow"', 'kind = "slower"', "kind is 'slower'; choose one of slow, hang, crash, control"),
        ('grade = "A"', 'grade = "D"', "grade is 'D'; choose one of A, B, C"),
        ('suite = "live"', 'suite = "lively"', "suite is 'lively'; choose one of live, netns, synthetic"),
        ('kind = "slow"', 'kind = "control"', "a control has no faults"),
        ('"input_pipeline"', '"input"', "'input' is not one of input_pipeline, host_python"),
        ('scopes = ["rank"]', 'scopes = ["ranks"]', "'ranks' is not one of rank, host"),
        ('who = "ranks"', 'who = "rank"', "who is 'rank'; choose one of ranks, among"),
        ('who = "ranks"', 'who = "ranks"\nkinds = ["hung"]', "'hung' is not one of slow, hang"),
        ('who = "ranks"', 'whom = "ranks"', "who"),
    ],
)
def test_a_case_that_does_not_say_what_it_must_is_refused_in_one_sentence(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    assert old in GOOD
    with pytest.raises(CaseError) as told:
        catalogue.load(written(tmp_path, GOOD.replace(old, new)))
    assert str(told.value).startswith("Q01-slow/case.toml: ") and said in str(told.value)


def test_a_fault_without_an_answer_is_refused_and_a_control_needs_none(tmp_path: Path) -> None:
    without = GOOD[: GOOD.index("[[faults]]")]
    with pytest.raises(CaseError, match="everything else has at least one"):
        catalogue.load(written(tmp_path, without))
    (tmp_path / "Q01-slow" / "case.toml").write_text(without.replace('"slow"', '"control"'))
    (case,) = catalogue.load(tmp_path)
    assert case.is_control


def test_one_id_for_two_folders_is_refused(tmp_path: Path) -> None:
    written(tmp_path, GOOD)
    with pytest.raises(CaseError, match="Q01: more than one folder has this id"):
        catalogue.load(written(tmp_path, GOOD, "Q01-again"))


def test_every_entry_of_the_list_has_a_case() -> None:
    assert len(ENTRIES) == 61
    assert {case.entry for case in CASES} >= ENTRIES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_ids_folders_and_programs_of_a_case_agree(case: Case) -> None:
    assert re.fullmatch(rf"{case.entry}[0-9]*[a-z]?", case.id)
    assert case.folder.name == f"{case.id}-{case.slug}"
    assert case.recipe.program.startswith(f"{case.id.lower()}_")
    assert case.sources or case.entry not in ENTRIES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_recipe_of_a_case_can_be_run(case: Case) -> None:
    recipe = case.recipe
    assert list(recipe.effects) == sorted(set(recipe.effects)) and min(recipe.effects) > 0
    assert recipe.ranks >= 1 and recipe.timeout_s > 0 and recipe.settle_s >= 0
    assert recipe.shapes and (case.suite == "synthetic" or set(recipe.shapes) <= set(jobs.SHAPES))
    for answer in (*case.faults, *case.tolerated):
        assert answer.causes and answer.scopes
        for pattern in (answer.function, answer.said):
            re.compile(pattern or "")


@lru_cache
def _imports(program: Path) -> frozenset[str]:
    """All modules that a program imports, those of `evals` that it imports followed."""
    found = set()
    for node in ast.walk(ast.parse(program.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
        for name in names:
            found.add(name)
            file = ROOT / f"{name.replace('.', '/')}.py"
            if name.startswith("evals.") and file.is_file():
                found |= _imports(file)
    return frozenset(found)


@pytest.mark.parametrize("case", [case for case in CASES if case.suite != "synthetic"], ids=lambda case: case.id)
def test_the_program_of_a_live_case_knows_nothing_of_eroica(case: Case) -> None:
    for program in case.folder.glob("*.py"):
        assert not [name for name in _imports(program) if name.split(".")[0] == "eroica"]


@pytest.mark.parametrize("num_steps", [150, 449, 450, 460, 1500])
def test_the_healthy_step_of_a_live_case_stays_what_it_was_before_the_fault(tmp_path: Path, num_steps: int) -> None:
    seconds = [9.0] * 40 + [0.02] * (jobs.AFTER - 40) + [0.5] * (num_steps - jobs.AFTER)
    job = jobs.Job(tmp_path, 1, 0.5, "perceptron", 1500, 0, 4, random.Random(1), seconds=seconds)
    assert job.healthy_s == 0.02 and job.cost_s == 0.01
