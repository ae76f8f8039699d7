"""Results of the catalogue as JSON lines, a table and Markdown. Used by `evals.__main__`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from eroica.job import format_ranks
from evals.catalogue import Case
from evals.suites import Result

WANTED = 0.975
"""Share of the points of grades A and B: the hard cases that the paper's system got right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One finding, as a diagnosis told it."""

    kind: str
    cause: str
    scope: str
    ranks: str
    function: str
    confidence: str
    right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run of one case."""

    key: str
    case: str
    entry: str
    title: str
    grade: str
    suite: str
    kind: str
    shape: str
    effect: float
    seed: int
    points: float
    causes: tuple[str, ...]
    """Of the faults: the right ones of each, joined by "/"."""
    found: tuple[bool, ...]
    near: tuple[str, ...]
    false_blames: tuple[str, ...]
    said: tuple[Said, ...]
    baselines: Mapping[str, str] = field(default_factory=dict)
    """right, wrong, nobody, or "-" where the rule cannot say anything."""
    problem: str = ""
    seconds: float = 0.0
    to_diagnosis_s: float | None = None


def key(case: str, effect: float, turn: int, shape: str | None) -> str:
    """What tells runs apart in a file that is resumed."""
    return f"{case}/{effect:g}/{turn}" + (f"/{shape}" if shape else "")


def row(result: Result, named: str) -> Row:
    """A run for the file."""
    case, judged = result.case, result.score
    return Row(
        key=named,
        case=case.id,
        entry=case.entry,
        title=case.title,
        grade=case.grade,
        suite=case.suite,
        kind=case.kind,
        shape=result.draw.shape,
        effect=0.0 if case.is_control else result.draw.effect,
        seed=result.draw.seed,
        points=result.points,
        causes=tuple("/".join(sorted(fault.causes)) for fault in case.faults),
        found=judged.found,
        near=judged.near,
        false_blames=judged.false_blames,
        said=tuple(
            Said(
                kind=diagnosis.kind,
                cause=finding.cause,
                scope=finding.scope,
                ranks=finding.ranks,
                function=finding.function.name if finding.function else "",
                confidence=finding.confidence,
                right=(d, f) in judged.right_findings,
            )
            for d, diagnosis in enumerate(result.diagnoses)
            for f, finding in enumerate(diagnosis.findings)
        ),
        baselines={
            name: "-" if naming is None else _by_ranks(naming.ranks, result) for name, naming in result.named.items()
        },
        problem=result.problem,
        seconds=round(result.seconds, 1),
        to_diagnosis_s=None if result.to_diagnosis_s is None else round(result.to_diagnosis_s, 1),
    )


def _by_ranks(ranks: frozenset[int], result: Result) -> str:
    if not ranks:
        return "nobody"
    return "right" if ranks == result.truth.culprits else f"wrong: {format_ranks(sorted(ranks))}"


def append(file: Path, added: Row) -> None:
    """One line more."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as lines:
        lines.write(msgspec.json.encode(added) + b"\n")


def read(file: Path) -> list[Row]:
    """All rows of a file."""
    return [msgspec.json.decode(line, type=Row) for line in file.read_bytes().splitlines() if line.strip()]


def one_line(shown: Row) -> str:
    """How a run went."""
    word = "right" if shown.points == 1 else "half" if shown.points else "no result" if shown.problem else "missed"
    why = "; ".join([shown.problem, *shown.near, *(f"blamed {blame}" for blame in shown.false_blames)]).strip("; ")
    return f"{word} ({shown.seconds:.0f} s){': ' + why if why else ''}"


def passed(rows: Sequence[Row]) -> bool:
    """No control blamed, and enough points on grades A and B."""
    graded = [shown.points for shown in rows if shown.grade in "AB"]
    blamed = any(shown.kind == "control" and shown.points < 1 for shown in rows)
    return not blamed and (not graded or sum(graded) / len(graded) >= WANTED)


def table(rows: Sequence[Row]) -> str:
    """For a terminal."""
    lines = [f"{shown.case:>5} {shown.grade} {shown.suite:<9} {shown.effect:>5.0%} {one_line(shown)}" for shown in rows]
    graded = [shown.points for shown in rows if shown.grade in "AB"]
    lines.append(f"grades A and B: {sum(graded):g} of {len(graded)} points")
    return "\n".join(lines)


def markdown(rows: Sequence[Row], cases: Sequence[Case]) -> str:
    """SCOREBOARD.md."""
    lines = ["# Scoreboard", "", "| case | what | grade | suite | points | said |", "|---|---|---|---|---:|---|"]
    for shown in rows:
        said = "; ".join(f"{s.cause} of {s.scope} {s.ranks}" for s in shown.said) or "nothing"
        lines.append(f"| {shown.case} | {shown.title} | {shown.grade} | {shown.suite} | {shown.points:g} | {said} |")
    return "\n".join(lines) + "\n"
