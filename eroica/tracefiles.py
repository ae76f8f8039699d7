"""Finds the trace files of a job and says which rank wrote which, without reading their events.

Not a reader: `trace` reads what is found here, one file at a time. Used by `trace` and through it by every command that
takes paths. A rank comes from the folder's manifest.json, then from the file's metadata, then from its name; two files
of one rank stop the run, because comparing a rank with itself hides whoever is missing (HolisticTraceAnalysis#107).
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eroica import kineto, timeline
from eroica.errors import DataError, EroicaError, UnavailableError, UserError
from eroica.job import format_ranks
from eroica.records import integer

MANIFEST = "manifest.json"
MANIFEST_SCHEMA = "eroica.manifest/1"
_TAIL_BYTES = 1 << 20
_HEAD_BYTES = 1 << 16
_ENDINGS = (".json", ".json.gz", ".trace", ".trace.gz", ".gz", ".parquet")


@dataclass(frozen=True, slots=True)
class TraceFile:
    """One rank's part of a file."""

    path: str
    rank: int
    timeline: bool = False
    """True for an op timeline, which holds many ranks."""


@dataclass(frozen=True, slots=True)
class TraceSet:
    """The files of one job, by rank."""

    files: tuple[TraceFile, ...]
    """Ascending by rank, each rank once."""
    world_size: int | None
    """As the manifest or the files tell it; None = unknown."""
    notes: tuple[str, ...] = ()
    """Sentences for people: how ranks were found, what disagrees."""
    ignored: tuple[tuple[str, str], ...] = ()
    """(path, why) of files that are no traces."""


@dataclass(frozen=True, slots=True)
class _Peek:
    """What a look at both ends of a file tells."""

    why_not: str = ""
    """Why it is no trace; "" = it is one."""
    rank: int | None = None
    world_size: int | None = None


_NAMED = re.compile(r"(?i)(?<![a-z])rank[-_ ]?(\d{1,7})(?!\d)")
_OTHER_RANKS = re.compile(
    r"(?i)(?<![a-z])(?:local|node|host|[ev]?[dtp]p|cp|ep|[fh]sdp|data|tensor|pipe(?:line)?)[-_ ]?rank[-_ ]?\d+"
)
"""Of words of their own: "ddp_rank3" and "step_rank3" tell a global rank."""


def rank_in_name(path: str | Path) -> int | None:
    """Global rank by file name: rank-34.Jul_15.json, rank3.json, sampled_rank_0.json.gz, 3.json.

    None if it tells none or several.
    """
    name = Path(path).name
    found = set(_NAMED.findall(_OTHER_RANKS.sub("", name)))
    if len(found) == 1:
        return int(found.pop())
    stem = name.split(".")[0]
    return int(stem) if stem.isdecimal() and len(stem) <= 7 else None


def _rank_in_metadata(metadata: Mapping[str, Any]) -> int | None:
    info = metadata.get("distributedInfo")
    for holder in (info, metadata):
        if isinstance(holder, Mapping):
            rank = integer(holder.get("rank"), -1, 32)
            if rank >= 0:
                return rank
    return None


def rank_of(metadata: Mapping[str, Any], path: str | Path) -> int | None:
    """Rank by the file's own metadata, else by its name."""
    rank = _rank_in_metadata(metadata)
    return rank_in_name(path) if rank is None else rank


def find_traces(paths: str | Path | Sequence[str | Path]) -> TraceSet:
    """The traces behind directories, globs and files, one or several.

    In directories and globs unrelated files are ignored and listed; a directory without traces or a manifest of its own
    is searched below. Raises UserError if nothing is found, a rank is claimed twice, or only some files tell a rank;
    DataError if a file that was named itself is no trace; UnavailableError if all that there is cannot be read here.
    """
    if isinstance(paths, (str, Path)):
        paths = [paths]
    named: list[Path] = []
    offered: list[Path] = []
    for item in paths:
        path = Path(item)
        if path.is_dir():
            offered += _files_of(path)
        elif path.exists():
            named.append(path)
        else:
            matches = sorted(Path(match) for match in glob.glob(str(item), recursive=True))
            if not matches:
                raise UserError(f"{item}: no such file or directory; give trace files, a directory of them or a glob")
            for match in matches:
                offered += _files_of(match) if match.is_dir() else [match]
    return _resolve(named, offered, ", ".join(str(item) for item in paths[:3]) + (", ..." if len(paths) > 3 else ""))


def _files_of(directory: Path) -> list[Path]:
    own = sorted(path for path in directory.iterdir() if _is_file(path))
    named = [Path(path) for path in _manifest(directory / MANIFEST)[0]]
    if named or any(_looks_like_trace(path) for path in own):
        return own + named
    return own + sorted(path for path in directory.rglob("*") if _is_file(path) and path.parent != directory)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a link into a place that may not be looked at
        return False


def _looks_like_trace(path: Path) -> bool:
    if not path.name.endswith(_ENDINGS):
        return False
    try:
        return path.suffix == ".parquet" or not _peek(path, whole=False).why_not
    except EroicaError:
        return False


def _resolve(named: Sequence[Path], offered: Sequence[Path], place: str) -> TraceSet:
    notes: list[str] = []
    ignored: list[tuple[str, str]] = []
    by_manifest: dict[str, int] = {}
    sizes: Counter[int] = Counter()
    world_size: int | None = None
    for path in (*named, *offered):
        if path.name == MANIFEST:
            ranks, size = _manifest(path)
            by_manifest.update(ranks)
            world_size = size or world_size
    ranked: list[TraceFile] = []
    unranked: list[str] = []
    unread: UnavailableError | None = None
    seen: set[str] = set()
    for path, is_named in [(path, True) for path in named] + [(path, False) for path in offered]:
        key = os.path.realpath(path)
        if path.name == MANIFEST or key in seen:
            continue
        seen.add(key)
        if not is_named and not path.name.endswith(_ENDINGS):
            ignored.append((str(path), "its name does not end like a trace"))
        elif path.suffix == ".parquet":
            try:
                ranked += [TraceFile(str(path), rank, timeline=True) for rank in timeline.ranks(path)]
            except EroicaError as error:
                if is_named:
                    raise
                if isinstance(error, UnavailableError):
                    unread = unread or error
                ignored.append((str(path), _reason(error, path)))
        else:
            try:
                peek = _peek(path, whole=key not in by_manifest)
            except UserError as error:
                if is_named:
                    raise
                peek = _Peek(_reason(error, path))
            if peek.why_not:
                if is_named:
                    raise DataError(f"{path}: {peek.why_not}, so it is no profiler trace")
                ignored.append((str(path), peek.why_not))
                if rank_in_name(path) is not None:
                    notes.append(f"{path.name} {peek.why_not}; the capture of that rank may have failed")
                continue
            if peek.world_size:
                sizes[peek.world_size] += 1
            rank = by_manifest.get(key, peek.rank)
            if rank is None:
                rank = rank_in_name(path)
            if rank is None:
                unranked.append(str(path))
            else:
                ranked.append(TraceFile(str(path), rank))
    ranked += _number(ranked, unranked, notes)
    if not ranked:
        if unread is not None:
            raise unread
        looked = f" among {len(ignored)} file{'s' if len(ignored) > 1 else ''}" if ignored else ""
        raise UserError(
            f"{place}: no trace files found{looked}; eroica reads Kineto JSON, plain or gzip, "
            "and op timelines in parquet"
        )
    _refuse_clashes(ranked)
    if len(sizes) > 1:
        notes.append(f"files disagree on the world size: {', '.join(map(str, sorted(sizes)))}; are they of one job?")
    world_size = world_size or (
        max(sizes) if sizes else timeline.world_size([file.path for file in ranked if file.timeline])
    )
    return TraceSet(tuple(sorted(ranked, key=lambda file: file.rank)), world_size, tuple(notes), tuple(ignored))


def _reason(error: EroicaError, path: Path) -> str:
    """The message without the name of the file."""
    return str(error).removeprefix(f"{path}: ").partition("; ")[0]


def _number(ranked: Sequence[TraceFile], unranked: list[str], notes: list[str]) -> list[TraceFile]:
    if not unranked:
        return []
    if ranked:
        listed = ", ".join(unranked)
        raise UserError(
            f"no rank in the metadata or the name of {listed}, while {len(ranked)} other files tell theirs; rename to "
            f"rank-N.json or add {MANIFEST}"
        )
    notes.append(f"no file tells its rank; {len(unranked)} files were numbered in the order of their names")
    return [TraceFile(path, rank) for rank, path in enumerate(sorted(unranked, key=_natural))]


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key in which "host2" comes before "host10"."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def _refuse_clashes(files: Sequence[TraceFile]) -> None:
    by_rank: dict[int, list[str]] = {}
    for file in files:
        by_rank.setdefault(file.rank, []).append(file.path)
    clashes: dict[tuple[str, ...], list[int]] = {}
    for rank, claimants in sorted(by_rank.items()):
        if len(claimants) > 1:
            clashes.setdefault(tuple(sorted(claimants)), []).append(rank)
    if clashes:
        listed = "; ".join(f"rank {format_ranks(ranks)}: {', '.join(paths)}" for paths, ranks in clashes.items())
        raise UserError(f"several files claim one rank ({listed}); keep one of each, or name the ranks in {MANIFEST}")


def _manifest(path: Path) -> tuple[dict[str, int], int | None]:
    """({real path: rank}, world size) of a manifest.json; ({}, None) if it is another program's."""
    try:
        told = json.loads(path.read_bytes()) if path.is_file() else None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error}); mend or remove it") from None
    if not isinstance(told, dict) or told.get("schema") != MANIFEST_SCHEMA:
        return {}, None
    ranks = told.get("ranks")
    result: dict[str, int] = {}
    for key, name in ranks.items() if isinstance(ranks, dict) else []:
        rank = integer(key, -1, 32)
        if rank < 0 or not isinstance(name, str):
            raise UserError(f"{path}: ranks must map numbers to file names, not {key!r:.80} to {name!r:.80}")
        file = path.parent / name
        if not os.path.exists(file):
            raise UserError(
                f"{path}: names {name} for rank {key}, which does not exist; copy it here or remove the entry"
            )
        if result.setdefault(os.path.realpath(file), rank) != rank:
            raise UserError(f"{path}: names {name} for two ranks; a trace is one rank's")
    size = integer(told.get("world_size"), 0, 32)
    return result, size if size > 0 else None


def _peek(path: Path, *, whole: bool) -> _Peek:
    """Look at the head, and with `whole` at the tail if that tells no rank: some writers put file-level keys last."""
    raw, inflater = kineto.open_text(path)
    with raw:
        try:
            return _look(path, raw, inflater, whole)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _look(path: Path, raw: Any, inflater: kineto.Inflater | None, whole: bool) -> _Peek:
    text = kineto.Text(inflater or raw, _HEAD_BYTES)
    text.more()
    if text.buffer[:3] == b"\xef\xbb\xbf":
        text.start = 3
    start = bytes(text.buffer[text.start : min(text.end, text.start + 4096)]).lstrip()
    if not start:
        return _Peek("is empty")
    if start.startswith(b"["):
        return _Peek("" if b'"ph"' in start else "holds no trace events")
    if not start.startswith(b"{"):
        return _Peek("is not JSON")
    match = kineto.find_events(text)
    if match is None:
        return _Peek("holds no traceEvents")
    head = bytes(text.buffer[text.start : match[0]])
    found = _told(head)
    if whole and "distributedInfo" not in found and rank_in_name(path) is None:
        found = _told(_last_bytes(raw, text, inflater is not None))
    info = found.get("distributedInfo")
    size = integer(info.get("world_size"), 0, 32) if isinstance(info, dict) else 0
    return _Peek("", _rank_in_metadata(found), size if size > 0 else None)


def _told(text: bytes) -> dict[str, Any]:
    """`distributedInfo` in a piece of text, cut anywhere else."""
    match = re.search(rb'"distributedInfo"\s*:\s*', text)
    if match is None:
        return {}
    try:
        value, _ = json.JSONDecoder(strict=False).raw_decode(text[match.end() :].decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return {}
    return {"distributedInfo": value}


def _last_bytes(raw: Any, text: kineto.Text, gzipped: bool) -> bytes:
    if not gzipped:
        size = raw.seek(0, os.SEEK_END)
        raw.seek(max(0, size - _TAIL_BYTES))
        return bytes(raw.read())
    # A gzip stream has no way to its end but through it.
    while not text.final:
        text.start = max(text.start, text.end - _TAIL_BYTES)
        text.more()
    return bytes(text.buffer[text.start : text.end])
