"""Lines of source around a finding: of files that a diagnosis names, below folders that the user allowed, no others.

A diagnosis comes from traces, and those from anybody: a made-up one could name any file of this machine, and its
content would go to a model. So a file is shown only if it is source code by its name, lies below an allowed folder
after all links are followed, is not hidden, and is of a size that people write. Paths of another machine
("/workspace/train/data.py") are looked for by their end below the allowed folders; a match by the file's name alone is
none, since every project has a utils.py.

Used by get_source and by the tool that suggests fixes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from eroica.errors import UserError
from eroica.source import lines_of
from eroica.untrusted import clean, clean_source

SUFFIXES = frozenset((".py", ".pyx", ".pxd", ".cu", ".cuh", ".cpp", ".cc", ".cxx", ".c", ".h", ".hpp"))
MAX_FILE_BYTES = 2 << 20
_PLAIN = re.compile(r"[\w./:+@~-]{1,400}")
_PACKAGES = ("site-packages", "dist-packages")
MOST_AROUND = 60
"""Lines on each side."""
LEAST_PARTS = 2
"""Of a path's end that must be alike for a file of another machine: folder and name."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Some lines of one file."""

    named: str
    """"path:line", as the diagnosis has it."""
    file: str
    """Where it was found."""
    line: int
    first: int
    """Number of the first of `lines`."""
    lines: tuple[str, ...]
    note: str
    """How sure it is that this is the file; "" if there is no doubt."""


def excerpt(location: str, roots: Sequence[Path], around: int = 12) -> Excerpt:
    """The lines around a "path:line" of a diagnosis. Raises UserError in one sentence if they may not or cannot be
    shown."""
    path, line = _split(location)
    # A message stands in no fence: what is no plain path is not told there.
    shown = clean(location, 200) if _PLAIN.fullmatch(location) else "what the finding names"
    if PurePosixPath(path).suffix not in SUFFIXES:
        raise UserError(f"{shown} is no source file that is shown; those end in {', '.join(sorted(SUFFIXES))}")
    if not roots:
        raise UserError("no folder of sources is allowed; start eroica-mcp with --source DIR")
    file, note = _find(path, roots)
    if file is None:
        allowed = ", ".join(clean(root, 120) for root in roots[:4])
        raise UserError(f"{shown} is not below the allowed folders ({allowed}); --source names others")
    try:
        with open(file, "rb") as source:
            data = source.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UserError(f"{shown} cannot be read ({error.strerror or error})") from None
    if len(data) > MAX_FILE_BYTES:
        raise UserError(f"{shown} has more than {MAX_FILE_BYTES >> 20} MB; nobody wrote that by hand")
    lines = lines_of(data.decode("utf-8", "replace"))
    if not 1 <= line <= len(lines):
        raise UserError(f"{shown}: the file has {len(lines)} lines now; it has changed since the job ran")
    around = max(0, min(around, MOST_AROUND))
    first, last = max(1, line - around), min(len(lines), line + around)
    return Excerpt(
        named=clean(location, 200),
        file=clean(file, 300),
        line=line,
        first=first,
        lines=tuple(clean_source(lines, first, last)),
        note=note,
    )


def _split(location: str) -> tuple[str, int]:
    match = re.fullmatch(r"(.{1,1000}):(\d{1,7})", location)
    if match is None or "\0" in location:
        raise UserError("the place of the finding is no line of a file")
    return match[1], int(match[2])


def _find(path: str, roots: Sequence[Path]) -> tuple[str | None, str]:
    """The file, and what to know about how it was found."""
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", ".")]
    if ".." in parts:
        return None, ""
    real = [Path(os.path.realpath(root)) for root in roots]
    if PurePosixPath(path).is_absolute():
        found = os.path.realpath(path)
        if _may_show(Path(found), real):
            return found, ""
    # Of an environment or a cache: a file of the project with the same end is another one.
    is_foreign = any(part.startswith(".") or part in _PACKAGES for part in parts)
    # From the longest end on: what more of the path names is surer.
    for count in range(len(parts), len(parts) - 1 if is_foreign else 0, -1):
        is_whole = count == len(parts)
        if count < LEAST_PARTS and not (is_whole and not PurePosixPath(path).is_absolute()):
            break
        end = PurePosixPath(*parts[-count:])
        found_ones = {
            os.path.realpath(root / end) for root in real if _may_show(Path(os.path.realpath(root / end)), real)
        }
        if len(found_ones) == 1:
            is_same = is_whole and not PurePosixPath(path).is_absolute()
            note = "" if is_same else f"found by the end of its path, {clean(end, 120)}; check that it is the same file"
            return found_ones.pop(), note
        if found_ones:
            return None, ""
    return None, ""


def _may_show(file: Path, roots: Sequence[Path]) -> bool:
    """`file` and `roots` have no links any more."""
    for root in roots:
        if file.is_relative_to(root):
            inside = file.relative_to(root)
            return (
                file.suffix in SUFFIXES
                and not any(part.startswith(".") for part in inside.parts)
                and os.path.isfile(file)
            )
    return False
