"""From a finding to where to look: its lines and those of its evidence, as places in the files of a repository.

The job may have run elsewhere: `/app/src/train.py` there is `src/train.py` here, by the longest end of the path that
the repository has. A line counts only if it still lies in the function that the finding names: files change. Libraries
are never taken for files of the repository. Pure; used by `fixing`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence

from eroica import wording
from eroica.assist.change import Lead, Place
from eroica.assist.reading import Code, Function, Sources
from eroica.findings import Diagnosis, Finding

_FRAME = re.compile(r"([\w.<>]{1,200}) \(([^()\s]{1,400}\.py):(\d{1,7})\)")
_LINE = re.compile(r"([^\s()'\":,]{1,400}\.py):(\d{1,7})")
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python\d")
MOST_TEXT = 4_000
"""Characters of one piece of evidence that are searched for lines."""
_WORTH_A_LOOK = "a setting worth a look: "


def lead_of(finding: Finding, diagnosis: Diagnosis, sources: Sources, root: str) -> Lead:
    """What `finding` tells. `root`: of the repository, on this machine."""
    told = [diagnosis.evidence[name] for name in finding.evidence if name in diagnosis.evidence]
    values: dict[str, object] = {}
    for one in told:
        values |= one.values
    places: list[Place] = []
    lines = [*_named(finding, [one.text for one in told]), *_data(finding, diagnosis)]
    for path, line, function in lines:
        found = locate(path, sources.paths, root)
        code = sources.code(found) if found is not None else None
        if found is None or code is None or not _is_in(code, line, function):
            continue
        place = Place(found, line, function)
        if place not in places:
            places.append(place)
    name = finding.function.name if finding.function is not None else ""
    return Lead(
        finding.cause,
        finding.scope,
        name,
        tuple(places),
        values,
        finding.impact.share,
        _cores_per_rank(diagnosis),
    )


def common(diagnosis: Diagnosis) -> Mapping[str, object]:
    """Settings that all ranks have, by their names in the environment snapshot."""
    told = diagnosis.environment.get("common")
    return told if isinstance(told, Mapping) else {}


def _cores_per_rank(diagnosis: Diagnosis) -> float | None:
    told = common(diagnosis)
    cores = [
        told[name] for name in ("cpus", "affinity.cpus", "cgroup.cpus") if isinstance(told.get(name), (int, float))
    ]
    ranks = max((wording.count_ranks(one) for one in diagnosis.hosts.values()), default=0)
    return min(cores) / ranks if cores and ranks else None  # type: ignore[type-var,operator]


def notes_of(diagnosis: Diagnosis) -> list[Lead]:
    """Settings that the diagnosis found worth a look and no finding: a lead with no place, of the note's own words."""
    notes = [note.removeprefix(_WORTH_A_LOOK) for note in diagnosis.coverage.notes if note.startswith(_WORTH_A_LOOK)]
    return [Lead("configuration", "all", note[:300]) for note in notes]


def locate(path: str, paths: Sequence[str], root: str) -> str | None:
    """The file of the repository that a job called `path`; None if none is, or several may be."""
    path = path.replace("\\", "/")
    if path.startswith(root.rstrip("/") + "/"):
        inside = path[len(root.rstrip("/")) + 1 :]
        return inside if inside in paths else None
    if _LIBRARY.search(path) or not path:
        return None
    known = set(paths)
    parts = path.lstrip("/").split("/")
    for n in range(len(parts)):
        end = "/".join(parts[n:])
        if end in known:
            return end
    # The path may also be the shorter one: a stack shows names of files alone.
    found = [one for one in paths if one.endswith("/" + path.lstrip("./"))]
    return found[0] if len(found) == 1 else None


def _data(finding: Finding, diagnosis: Diagnosis) -> Iterator[tuple[str, int, str]]:
    """Where the samples of the job's loaders are made, for a finding about input."""
    if finding.cause == "input_pipeline":
        for name, value in common(diagnosis).items():
            match = _LINE.search(value) if name.endswith(".data_at") and isinstance(value, str) else None
            if match is not None:
                yield match[1], int(match[2]), ""


def _named(finding: Finding, texts: Sequence[str]) -> Iterator[tuple[str, int, str]]:
    """Path, line and function, likeliest first."""
    function = finding.function
    if function is not None:
        told = [(function.user_location, function.user_function or "")]
        if function.location != function.user_location:
            # The name is one of a function where the kind is host; a setting's is none.
            told.append((function.location, function.name if function.kind == "host" else ""))
        for place, name in told:
            if place is not None and (match := _LINE.search(place)) is not None:
                yield match[1], int(match[2]), _plain(name)
    for text in texts:
        for frame in _FRAME.finditer(text[:MOST_TEXT]):
            yield frame[2], int(frame[3]), _plain(frame[1])
        for match in _LINE.finditer(text[:MOST_TEXT]):
            yield match[1], int(match[2]), ""


def _plain(name: str) -> str:
    """ "Clips.__getitem__" -> "__getitem__"; what is no name of a function -> ""."""
    last = name.rpartition(".")[2]
    return last if last.isidentifier() or last == "<module>" else ""


def _is_in(code: Code, line: int, function: str) -> bool:
    """The line is there, and in a function or class of that name, if one is given."""
    statement = code.at(line)
    if statement is None:
        return False
    if not function or function == "<module>":
        return bool(not function or code.function(statement) is None)
    around = [statement, *code.ancestors(statement)]
    return any(isinstance(one, (Function, ast.ClassDef)) and one.name == function for one in around)
