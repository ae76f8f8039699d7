"""The fault catalogue: one folder per case under `cases/`, each with the answer in its `case.toml`.

An answer is committed before the rules that must give it; what was changed of one after a miss says so in `changed`.
Used by `evals.suites`, which runs the cases, and `evals.board`, which shows how they went.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eroica.findings import CAUSES, KINDS, SCOPES
from evals.truth import WHO, Answer

CASES = Path(__file__).parent / "cases"
SUITES = ("live", "netns", "synthetic")
CONTROL = "control"


class CaseError(Exception):
    """A case.toml that does not say what it must, or a case that could not be run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a case is made."""

    program: str
    """File in the case's folder. live, netns: a training script. synthetic: a module with `make(draw)`."""
    ranks: int = 4
    effects: tuple[float, ...] = (0.15, 0.5, 2.0)
    """What the fault costs, as a share of the healthy iteration: near the floor, nominal, gross."""
    is_growth: bool = False
    """The effects are what each iteration adds to the one before: in the end the fault costs many times that share."""
    shapes: tuple[str, ...] = ("perceptron", "transformer")
    """Models (live, netns: of `evals.jobs.SHAPES`; synthetic: traces of `evals.base.BASES`)."""
    launch: str = "torchrun"
    """torchrun starts the program once per rank; script: it starts its ranks itself."""
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 120.0
    """After which the job is ended, whatever was said until then."""
    settle_s: float = 8.0
    """How long a job goes on after the right answer, for wrong ones to come."""

    @property
    def nominal(self) -> float:
        """The effect that the board shows."""
        return self.effects[len(self.effects) // 2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One folder of the catalogue."""

    id: str
    entry: str
    """Of the list of public reports that this follows; several cases may follow one (a fault and its control)."""
    slug: str
    title: str
    sources: tuple[str, ...]
    category: str
    kind: str
    """slow, hang, crash or control."""
    scope: str
    """In words: who the cause sits on."""
    grade: str
    """A, B or C: how sure the reports are of the cause."""
    suite: str
    innocent: str
    """Who must not be blamed, for people."""
    traps: tuple[str, ...]
    recipe: Recipe
    folder: Path
    faults: tuple[Answer, ...] = ()
    tolerated: tuple[Answer, ...] = ()
    unknown_is_fair: str = ""
    """Why an "unknown" that answers all that is asked counts as any other answer; "": it does not (`evals.score`)."""
    changed: tuple[str, ...] = ()
    """What was changed of the answer or the program after a miss, and why."""

    @property
    def is_control(self) -> bool:
        """Nothing is wrong: any blame is a false one."""
        return self.kind == CONTROL


def load(folder: Path = CASES) -> tuple[Case, ...]:
    """All cases, by id. Raises CaseError if one is not complete."""
    cases = sorted((_read(file) for file in folder.glob("*/case.toml")), key=lambda case: case.id)
    twice = {case.id for case in cases if sum(other.id == case.id for other in cases) > 1}
    if twice:
        raise CaseError(f"{', '.join(sorted(twice))}: more than one folder has this id")
    return tuple(cases)


def _read(file: Path) -> Case:
    where = file.parent.name
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
        given = data.pop("recipe")
        data = data | {
            "entry": data.get("entry", data["id"]),
            "slug": where.removeprefix(f"{data['id']}-"),
            "recipe": Recipe(**{key: _frozen(value) for key, value in given.items()}),
            "faults": tuple(_answer(item, where) for item in data.get("faults", [])),
            "tolerated": tuple(_answer(item, where) for item in data.get("tolerated", [])),
            "folder": file.parent,
        }
        case = Case(**{key: _frozen(value) for key, value in data.items()})
    except (KeyError, TypeError, tomllib.TOMLDecodeError) as error:
        raise CaseError(f"{where}/case.toml: {type(error).__name__}: {error}") from None
    for name, value, allowed in (
        ("kind", case.kind, ("slow", "hang", "crash", CONTROL)),
        ("grade", case.grade, ("A", "B", "C")),
        ("suite", case.suite, SUITES),
        ("launch", case.recipe.launch, ("torchrun", "script")),
    ):
        if value not in allowed:
            raise CaseError(f"{where}/case.toml: {name} is {value!r}; choose one of {', '.join(allowed)}")
    if case.is_control == bool(case.faults):
        raise CaseError(f"{where}/case.toml: a control has no faults, everything else has at least one")
    if not (case.folder / case.recipe.program).is_file():
        raise CaseError(f"{where}/case.toml: the program {case.recipe.program!r} is not in the folder")
    return case


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _answer(data: Mapping[str, Any], where: str) -> Answer:
    sets = {name: _known(data[name], known, where) for name, known in (("causes", CAUSES), ("scopes", SCOPES))}
    kinds = _known(data.get("kinds", []), KINDS, where)
    if data["who"] not in WHO:
        raise CaseError(f"{where}/case.toml: who is {data['who']!r}; choose one of {', '.join(WHO)}")
    return Answer(**dict(data) | sets | {"kinds": kinds})


def _known(given: Sequence[str], known: Sequence[str], where: str) -> frozenset[str]:
    strange = [name for name in given if name not in known]
    if strange:
        raise CaseError(f"{where}/case.toml: {strange[0]!r} is not one of {', '.join(known)}")
    return frozenset(given)
