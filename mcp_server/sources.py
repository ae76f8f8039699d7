"""Where the server has its diagnoses from: a folder of them, or a folder of traces, which it then diagnoses itself.

`Source` is what tools ask; they know nothing of files. `DiagnosisFolder` reads what `eroica run`, `serve` and
`diagnose` write with --out, anew on each call, since a diagnosis made a moment ago must be there. `TraceFolder` makes
one diagnosis of all traces below it, in the background and again when they change. `Several` puts sources side by side.
A source that asks a running coordinator is in `coordinator`. No path ever comes from a caller of a tool.

All of it is called from threads, many at once. Files are hostile: what is no diagnosis is passed over, numbers and
sizes are bounded.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from eroica.assist.hiding import Names, hide, hide_detail
from eroica.errors import DataError, UnavailableError
from eroica.findings import Detail, Diagnosis, from_json, to_json
from mcp_server.work import State, Work, Works

MAX_FILES = 2_000
"""Files looked at, newest first; a folder with more of them is an archive, and the newest are what people ask about."""
MAX_FILE_BYTES = 16 << 20
"""A real diagnosis has some tens of kilobytes; a bigger file is something else."""
MAX_ENTRIES = 100_000
"""Names that a folder and those below it may hold. Somebody may point the server at their home."""
MAX_HISTORY_BYTES = 8 << 20
"""Of one incidents.jsonl, from its end: some 20,000 incidents."""
WAIT_S = 20.0
"""For traces to be read, before a call says how far it is; clients give a call up after 60 s."""

Diagnosed = tuple[Diagnosis, Detail | None]


@dataclass(frozen=True, slots=True)
class Seen:
    """An incident as a history remembers it."""

    id: str
    created: str
    job: str
    kind: str
    cause: str
    ranks: str
    summary: str
    place: str
    """Function or line of its first finding, or the fingerprint that a coordinator gave it; "" if it has none, or only
    the history has it."""
    is_kept: bool
    """The diagnosis itself can still be had."""
    confirmed: str = ""
    """What a person found to be the cause; "" if nobody said."""


class Source(Protocol):
    """Diagnoses, newest first, and what is known besides."""

    what: str
    """For people: "the diagnoses in /runs/out"."""

    def diagnoses(self) -> list[Diagnosis]:
        """Those that can be had, newest first, each with its id. Raises EroicaError."""
        ...

    def one(self, id: str) -> Diagnosis | None:
        """The diagnosis of exactly that id if `diagnoses` may have left it out, else None. Raises EroicaError."""
        ...

    def detail(self, id: str) -> Detail | None:
        """The numbers of each rank behind a diagnosis; None where the source keeps none."""
        ...

    def incidents(self) -> list[Seen]:
        """All that is remembered, newest first, diagnoses that are gone included."""
        ...

    def jobs(self) -> Mapping[str, Sequence[str]]:
        """What is known of jobs beyond their diagnoses: sentences for each."""
        ...

    def version(self) -> str:
        """Another one when something changed; cheap, and never waits."""
        ...


def identity(diagnosis: Diagnosis) -> str:
    """The id that a diagnosis is asked for by."""
    return diagnosis.id or str(to_json(diagnosis)["id"])


def seen(diagnosis: Diagnosis) -> Seen:
    """A diagnosis as a history remembers it."""
    first = diagnosis.findings[0].function if diagnosis.findings else None
    return Seen(
        id=identity(diagnosis),
        created=diagnosis.created,
        job=diagnosis.job,
        kind=diagnosis.kind,
        cause=diagnosis.verdict.cause,
        ranks=diagnosis.verdict.ranks,
        summary=diagnosis.verdict.summary,
        place=(first.user_location or first.location or first.name) if first is not None else "",
        is_kept=True,
    )


def _walk(root: Path, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, os.stat_result]]:
    """Files below `root` whose name is wanted. Links to folders are not followed."""
    left = MAX_ENTRIES
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        left -= len(names) + len(folders)
        for name in names:
            if is_wanted(name):
                path = os.path.join(folder, name)
                try:
                    yield path, os.stat(path)
                except OSError:
                    continue
        if left < 0:
            return


class DiagnosisFolder:
    """The diagnoses (`diagnosis*.json`) and histories (`incidents.jsonl`) in a folder and those below it."""

    def __init__(self, root: Path) -> None:
        self.what = f"the diagnoses in {root}"
        self._root = root
        self._lock = threading.Lock()
        self._parsed: dict[str, tuple[tuple[int, int], Diagnosis | None]] = {}
        """By path: time and size of the file as it was read, and the diagnosis in it, if it was one."""

    def diagnoses(self) -> list[Diagnosis]:
        """See `Source`."""
        files = sorted(self._files(_is_diagnosis), key=lambda file: -file[1].st_mtime_ns)[:MAX_FILES]
        found = []
        with self._lock:  # one reads, the others find it read
            known, self._parsed = self._parsed, {}
            for path, status in files:
                stamp = status.st_mtime_ns, status.st_size
                entry = known.get(path)
                if entry is None or entry[0] != stamp:
                    entry = stamp, _read(path) if status.st_size <= MAX_FILE_BYTES else None
                self._parsed[path] = entry
                if entry[1] is not None:
                    found.append(entry[1])
        return sorted(found, key=lambda item: item.created, reverse=True)

    def one(self, id: str) -> Diagnosis | None:
        """See `Source`: none is left out."""
        return None

    def detail(self, id: str) -> Detail | None:
        """See `Source`: the files hold none."""
        return None

    def incidents(self) -> list[Seen]:
        """See `Source`."""
        kept = [seen(diagnosis) for diagnosis in self.diagnoses()]
        have = {(one.id, one.created) for one in kept}
        for path, status in self._files(lambda name: name == "incidents.jsonl"):
            for one in _history(path, status.st_size):
                if (one.id, one.created) not in have:
                    have.add((one.id, one.created))
                    kept.append(one)
        return sorted(kept, key=lambda one: one.created, reverse=True)

    def jobs(self) -> Mapping[str, Sequence[str]]:
        """See `Source`: nothing."""
        return {}

    def version(self) -> str:
        """See `Source`."""
        files = self._files(lambda name: _is_diagnosis(name) or name == "incidents.jsonl")
        return _digest((path, status.st_mtime_ns, status.st_size) for path, status in files)

    def _files(self, is_wanted: Callable[[str], bool]) -> list[tuple[str, os.stat_result]]:
        return list(_walk(self._root, is_wanted))


def _is_diagnosis(name: str) -> bool:
    return name.startswith("diagnosis") and name.endswith(".json")


def _read(path: str) -> Diagnosis | None:
    try:
        diagnosis = from_json(json.loads(Path(path).read_bytes()))
    except (OSError, ValueError, RecursionError, DataError):
        return None
    return replace(diagnosis, id=identity(diagnosis)[:64])


def _history(path: str, size: int) -> Iterator[Seen]:
    """Lines of an incidents.jsonl; those that are none are passed over."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, size - MAX_HISTORY_BYTES))
            lines = file.read(MAX_HISTORY_BYTES).splitlines()
    except OSError:
        return
    for line in lines:
        try:
            plain = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(plain, dict):
            texts = {name: plain.get(name) for name in ("id", "created", "job", "kind", "cause", "ranks", "summary")}
            if all(isinstance(text, str) for text in texts.values()) and texts["id"]:
                yield Seen(**{name: str(text) for name, text in texts.items()}, place="", is_kept=False)


def _digest(parts: Iterator[object]) -> str:
    return hashlib.sha256(repr(sorted(map(repr, parts))).encode("utf-8", "replace")).hexdigest()[:16]


class TraceFolder:
    """One diagnosis of all traces in a folder, made when it is first asked for."""

    def __init__(self, root: Path, works: Works[Diagnosed], *, num_processes: int = 0) -> None:
        self.what = f"the traces in {root}"
        self._root = root
        self._works = works
        self._num_processes = num_processes

    def diagnoses(self) -> list[Diagnosis]:
        """See `Source`. Raises UnavailableError while traces are read, DataError or UserError if none can be."""
        return [self._diagnosed()[0]]

    def one(self, id: str) -> Diagnosis | None:
        """See `Source`: none is left out."""
        return None

    def detail(self, id: str) -> Detail | None:
        """See `Source`."""
        diagnosis, detail = self._diagnosed()
        return detail if identity(diagnosis) == id else None

    def incidents(self) -> list[Seen]:
        """See `Source`."""
        return [seen(self._diagnosed()[0])]

    def jobs(self) -> Mapping[str, Sequence[str]]:
        """See `Source`: how far reading is."""
        work = self._works.get(self.version())
        if work is None or work.state is State.DONE:
            return {}
        return {self._root.name: [standing(work)]}

    def version(self) -> str:
        """See `Source`."""
        return stamp_of(self._root)

    def _diagnosed(self) -> Diagnosed:
        work = self._works.start(
            self.version(), self.what, lambda progress: diagnosed(self._root, progress, self._num_processes)
        )
        if work.wait(WAIT_S) is State.DONE and work.result is not None:
            return work.result
        raise UnavailableError(standing(work))


def stamp_of(path: Path) -> str:
    """Another one when a file at or below `path` has changed."""
    files = [(str(path), os.stat(path))] if path.is_file() else _walk(path, lambda name: True)
    return _digest((name, status.st_mtime_ns, status.st_size) for name, status in files)


def diagnosed(
    path: Path, progress: Callable[[int, int, str], None], num_processes: int = 0, job: str = ""
) -> Diagnosed:
    """What `eroica diagnose PATH` says, with its id."""
    from eroica.offline import diagnose_paths

    diagnosis, detail = diagnose_paths(
        [str(path)], job=job or path.name, jobs=num_processes or os.cpu_count() or 1, progress=progress
    )
    return replace(diagnosis, id=identity(diagnosis)), detail


def standing(work: Work[Diagnosed]) -> str:
    """How far a work is, in one sentence."""
    if work.state is State.RUNNING:
        far = f"{work.done} of {work.total} traces are read" if work.total else "it has begun"
        return f"{work.what} are still being read ({far}); ask again in some seconds"
    if work.state is State.FAILED:
        return f"{work.what} cannot be diagnosed: {work.error}"
    return f"{work.what}: {work.state}"


class Made:
    """Diagnoses that this server made itself, on request; they live as long as it does."""

    def __init__(self) -> None:
        self.what = "diagnoses made by this server"
        self._lock = threading.Lock()
        self._made: dict[str, Diagnosed] = {}

    def add(self, made: Diagnosed) -> None:
        """Keep one; the same one again changes nothing."""
        with self._lock:
            self._made.setdefault(identity(made[0]), made)

    def diagnoses(self) -> list[Diagnosis]:
        """See `Source`."""
        with self._lock:
            return sorted((one for one, _ in self._made.values()), key=lambda item: item.created, reverse=True)

    def one(self, id: str) -> Diagnosis | None:
        """See `Source`: none is left out."""
        return None

    def detail(self, id: str) -> Detail | None:
        """See `Source`."""
        with self._lock:
            found = self._made.get(id)
        return found[1] if found is not None else None

    def incidents(self) -> list[Seen]:
        """See `Source`."""
        return [seen(diagnosis) for diagnosis in self.diagnoses()]

    def jobs(self) -> Mapping[str, Sequence[str]]:
        """See `Source`: nothing."""
        return {}

    def version(self) -> str:
        """See `Source`."""
        with self._lock:
            return _digest(iter(self._made))


class Several:
    """Sources side by side; a diagnosis that two of them have is the first one's."""

    def __init__(self, *sources: Source) -> None:
        self.what = sources[0].what
        self._sources = sources

    def diagnoses(self) -> list[Diagnosis]:
        """See `Source`."""
        found: dict[tuple[str, str], Diagnosis] = {}
        for source in self._sources:
            for diagnosis in source.diagnoses():
                found.setdefault((identity(diagnosis), diagnosis.created), diagnosis)
        return sorted(found.values(), key=lambda item: item.created, reverse=True)

    def one(self, id: str) -> Diagnosis | None:
        """See `Source`."""
        return next((found for source in self._sources if (found := source.one(id)) is not None), None)

    def detail(self, id: str) -> Detail | None:
        """See `Source`."""
        return next((found for source in self._sources if (found := source.detail(id)) is not None), None)

    def incidents(self) -> list[Seen]:
        """See `Source`."""
        found: dict[tuple[str, str], Seen] = {}
        for source in self._sources:
            for one in source.incidents():
                found.setdefault((one.id, one.created), one)
        return sorted(found.values(), key=lambda one: one.created, reverse=True)

    def jobs(self) -> Mapping[str, Sequence[str]]:
        """See `Source`."""
        found: dict[str, list[str]] = {}
        for source in self._sources:
            for job, lines in source.jobs().items():
                found.setdefault(job, []).extend(lines)
        return found

    def version(self) -> str:
        """See `Source`."""
        return "-".join(source.version() for source in self._sources)


class Nameless:
    """A source whose hosts and users go by other names, the same ones in all of its answers."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._names = Names()
        self.what = self._names.text(source.what)

    def diagnoses(self) -> list[Diagnosis]:
        """See `Source`."""
        return [hide(one, self._names) for one in self._source.diagnoses()]

    def one(self, id: str) -> Diagnosis | None:
        """See `Source`."""
        found = self._source.one(id)
        return hide(found, self._names) if found is not None else None

    def detail(self, id: str) -> Detail | None:
        """See `Source`."""
        found = self._source.detail(id)
        return hide_detail(found, self._names) if found is not None else None

    def incidents(self) -> list[Seen]:
        """See `Source`."""
        self.diagnoses()  # so that their hosts are known
        text = self._names.text
        return [
            replace(
                one,
                job=text(one.job),
                summary=text(one.summary),
                place=text(one.place),
                confirmed=text(one.confirmed),
            )
            for one in self._source.incidents()
        ]

    def jobs(self) -> Mapping[str, Sequence[str]]:
        """See `Source`."""
        text = self._names.text
        return {text(job): [text(line) for line in lines] for job, lines in self._source.jobs().items()}

    def version(self) -> str:
        """See `Source`."""
        return self._source.version()


def holds_diagnoses(root: Path) -> bool:
    """Somewhere below `root` lies a file that is named like one."""
    return next(_walk(root, _is_diagnosis), None) is not None
