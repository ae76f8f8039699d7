"""Results of the catalogue: one JSON line per run of a case, and one per start of the runner that tells what it ran on.

Lines, because a run of the whole catalogue takes an hour and a half and may be killed at any moment: what was done then
stays, the line that was cut is dropped, and `--resume` goes on behind it. Used by `evals.__main__`, which writes them,
and `evals.board`, which shows them; nothing here judges.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from evals import baselines
from evals.catalogue import Case, CaseError
from evals.made import Draw
from evals.suites import Result

SCHEMA = "eroica.evals/1"
PARTS = ("nominal", "repeat", "sweep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One start of the runner."""

    command: str
    started: str
    """UTC, to the second."""
    commit: str
    """Short; with "+" if files were changed since."""
    machine: Mapping[str, str]


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
    blames: bool = False
    """It blames who or what is innocent; what neither blames nor is right is advice, or a second word on a culprit."""


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
    """0 in a control."""
    seed: int
    part: str = "nominal"
    """nominal: the first turn of the middle effect; repeat: a later one; sweep: of all effects or shapes."""
    is_nominal: bool = True
    """At the effect that the board shows, whatever the part."""
    points: float
    causes: tuple[str, ...] = ()
    """Of the faults: the right ones of each, joined by "/"."""
    found: tuple[bool, ...] = ()
    near: tuple[str, ...] = ()
    false_blames: tuple[str, ...] = ()
    said: tuple[Said, ...] = ()
    verdict: str = ""
    """The last diagnosis in a sentence."""
    by_ranks: str = "-"
    """How the product does by the rule of the baselines, which looks at ranks alone."""
    anybody: bool = False
    """There is a rank to blame."""
    baselines: Mapping[str, str] = field(default_factory=dict)
    """right, wrong: RANKS, nobody (missed), or "-" where the rule was not asked."""
    problem: str = ""
    """Why it is no result: the fault was never there, or the runner failed. Counts as no points."""
    not_run: str = ""
    """Why it was not tried on this machine. Counts for nothing."""
    seconds: float = 0.0
    to_diagnosis_s: float | None = None
    cores: float | None = None
    """How unevenly the machine's cores worked meanwhile (`evals.cores`); None: not measured."""

    @property
    def is_control(self) -> bool:
        """Any blame is a false one."""
        return self.kind == "control"

    @property
    def is_blamed_control(self) -> bool:
        """A control of which something was said that must not be."""
        return self.is_control and not self.not_run and not self.problem and self.points < 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What another tool says of a case, itself (`evals.peers`)."""

    case: str
    peer: str
    version: str
    word: str
    """As in Row.baselines."""
    anybody: bool
    """There is a rank to blame."""
    said: str
    """In its own words."""
    problem: str = ""
    """Why it said nothing."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    schema: str
    session: Session | None = None
    row: Row | None = None
    peer: Peer | None = None


@dataclass(frozen=True, slots=True)
class Results:
    """What a file holds; of a run that was made again (it had not been possible before), the later one."""

    sessions: tuple[Session, ...]
    rows: tuple[Row, ...]
    peers: tuple[Peer, ...] = ()
    num_rows: tuple[int, ...] = ()
    """How many of the rows and of the peers' words each session has made."""


_BEGIN = b'{"schema":"'
"""How each line begins: the last one of a file that was cut is told by it from another kind of file."""


def key(case: str, effect: float, turn: int, shape: str | None) -> str:
    """What tells runs apart in a file that is resumed."""
    return f"{case}/{effect:g}/{turn}" + (f"/{shape}" if shape else "")


def _blank(case: Case, draw: Draw, named: str, part: str) -> Row:
    return Row(
        key=named,
        case=case.id,
        entry=case.entry,
        title=case.title,
        grade=case.grade,
        suite=case.suite,
        kind=case.kind,
        shape=draw.shape,
        effect=0.0 if case.is_control else draw.effect,
        seed=draw.seed,
        part=part,
        is_nominal=case.is_control or draw.effect == case.recipe.nominal,
        points=0.0,
        causes=tuple("/".join(sorted(fault.causes)) for fault in case.faults),
    )


def row(result: Result, named: str, part: str = "nominal") -> Row:
    """A run for the file."""
    judged = result.score
    return replace(
        _blank(result.case, result.draw, named, part),
        points=result.points,
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
                blames=(d, f) in judged.blaming_findings,
            )
            for d, diagnosis in enumerate(result.diagnoses)
            for f, finding in enumerate(diagnosis.findings)
        ),
        verdict=result.diagnoses[-1].verdict.summary if result.diagnoses else "",
        by_ranks=baselines.judge(baselines.product(result.diagnoses, result.truth), result.truth),
        anybody=bool(baselines.to_blame(result.truth)),
        baselines={name: baselines.judge(naming, result.truth) for name, naming in result.named.items()},
        problem=result.problem,
        seconds=round(result.seconds, 1),
        to_diagnosis_s=None if result.to_diagnosis_s is None else round(result.to_diagnosis_s, 1),
    )


def failed(case: Case, draw: Draw, named: str, part: str, why: str, seconds: float = 0.0) -> Row:
    """A run that the runner itself could not finish."""
    return replace(_blank(case, draw, named, part), problem=why, seconds=round(seconds, 1))


def left_out(case: Case, draw: Draw, named: str, part: str, why: str) -> Row:
    """A run that this machine does not allow."""
    return replace(_blank(case, draw, named, part), not_run=why)


def start(file: Path, session: Session, *, resume: bool) -> tuple[Row, ...]:
    """Open a file for rows: empty, or with what an earlier run has left, which is returned."""
    held = read(file).rows if file.exists() else ()  # not only to resume: another kind of file is not overwritten
    if resume and file.exists():
        _mend(file)
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"")
    _append(file, _Line(schema=SCHEMA, session=session))
    return held if resume else ()


def _mend(file: Path) -> None:
    """End the last line, or drop it if it was cut when the runner was killed."""
    data = file.read_bytes()
    kept = data.rfind(b"\n") + 1
    try:
        msgspec.json.decode(data[kept:], type=_Line)
    except msgspec.DecodeError:
        os.truncate(file, kept)
    else:
        with file.open("ab") as lines:
            lines.write(b"\n")


def append(file: Path, added: Row | Peer) -> None:
    """One line more."""
    if isinstance(added, Row):
        _append(file, _Line(schema=SCHEMA, row=added))
    else:
        _append(file, _Line(schema=SCHEMA, peer=added))


def _append(file: Path, line: _Line) -> None:
    with file.open("ab") as lines:
        lines.write(msgspec.json.encode(line) + b"\n")


def read(file: Path) -> Results:
    """All that a file holds; a last line that was cut is left out. Raises CaseError if it is no file of results."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise CaseError(f"{file}: {error.strerror}; python -m evals run writes such files") from None
    sessions, found, peers = list[Session](), dict[str, tuple[Row, int]](), list[Peer]()
    made_by = list[int]()
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            read_line = msgspec.json.decode(line, type=_Line)
        except msgspec.DecodeError as error:
            if number == len(lines) and line.startswith(_BEGIN[: len(line)]):
                break
            raise CaseError(
                f"{file}, line {number} is no result of schema {SCHEMA} ({error}); delete it or name another"
            ) from None
        if read_line.schema != SCHEMA:
            raise CaseError(
                f"{file}, line {number} has schema {read_line.schema!r}, not {SCHEMA}; delete it or name another"
            )
        if read_line.session is not None:
            sessions.append(read_line.session)
        if read_line.row is not None:
            found[read_line.row.key] = read_line.row, len(sessions)
        if read_line.peer is not None:
            peers.append(read_line.peer)
            made_by.append(len(sessions))
    made_by += [number for _, number in found.values()]
    num_rows = tuple(made_by.count(number) for number in range(1, len(sessions) + 1))
    return Results(tuple(sessions), tuple(each for each, _ in found.values()), tuple(peers), num_rows)


def part_of(shown: Row) -> str:
    """What a run with some of the points has: half of them, or so many of its faults."""
    if any(shown.found) and len(shown.found) > 1:
        return f"{sum(shown.found)} of {len(shown.found)}"
    return "half"


def one_line(shown: Row) -> str:
    """How a run went."""
    if shown.not_run:
        return f"not run: {shown.not_run}"
    some = part_of(shown) if shown.points else "missed"
    word = "no result" if shown.problem else "right" if shown.points == 1 else some
    blames = [f"blamed {blame}" for blame in shown.false_blames]
    why = "; ".join(text for text in (shown.problem, *shown.near, *blames) if text)
    return f"{word} ({shown.seconds:.0f} s){': ' + why if why else ''}"
