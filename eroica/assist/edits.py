"""Edits that somebody else proposes: exact search and replace, within limits.

The form in which a model writes a patch. It is data: the text to search must stand exactly once in a file that the
evidence names, the outcome must be small, and no file is made, moved or removed. Pure: texts in, changes out, or a
sentence that says which edit cannot be made, so that its writer can try again. Whether the change is good is not asked
here; it goes through the same trial as that of a codemod (`fixing`).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from eroica.assist.change import Change
from eroica.errors import DataError, UserError
from eroica.untrusted import clean

MOST_LINES = 120
"""Lines that a change may add and take away: what is longer is not read as carefully as a patch by a program must be
read."""
MOST_CHANGED_FILES = 3
MOST_EDITS = 12
MOST_CHARS = 8_000
"""Of one search or replacement."""
MOST_TITLE = 72
_FIELDS = frozenset({"path", "search", "replace"})


@dataclass(frozen=True, slots=True)
class Edit:
    """One replacement."""

    path: str
    """Relative to the repository, with slashes."""
    search: str
    """Whole lines or a part of one; stands exactly once in the file."""
    replace: str


def edits_of(data: object) -> list[Edit]:
    """Edits from JSON: a list of {"path", "search", "replace"}. Raises DataError if it is anything else."""
    if not isinstance(data, list) or not data:
        raise DataError("edits are a list of objects with path, search and replace, and not empty")
    if len(data) > MOST_EDITS:
        raise DataError(f"{len(data)} edits were given; at most {MOST_EDITS} are taken")
    found = []
    for number, one in enumerate(data, 1):
        if (
            not isinstance(one, dict)
            or set(one) != _FIELDS
            or not all(isinstance(value, str) for value in one.values())
        ):
            raise DataError(f"edit {number} is not an object of the texts path, search and replace")
        found.append(Edit(one["path"], one["search"], one["replace"]))
    return found


def apply(
    edits: Sequence[Edit], texts: Mapping[str, str], allowed: Collection[str], title: str, because: Sequence[str] = ()
) -> list[Change]:
    """The files as they are after all edits, in the order of the edits.

    `texts`: files of the repository; `allowed`: those that the evidence names. Raises DataError, and nothing is
    changed, if one of the edits cannot be made as it stands.
    """
    after: dict[str, str] = {}
    for number, edit in enumerate(edits, 1):
        if edit.path not in texts or edit.path not in allowed:
            raise DataError(f"edit {number}: {clean(edit.path)} is not among the files that the evidence names")
        if len(edit.search) > MOST_CHARS or len(edit.replace) > MOST_CHARS:
            raise DataError(f"edit {number} has more than {MOST_CHARS:,} characters")
        if not edit.search.strip():
            raise DataError(f"edit {number} searches for nothing")
        if edit.search == edit.replace:
            raise DataError(f"edit {number} changes nothing")
        text = after.get(edit.path, texts[edit.path])
        count = _count(text, edit.search)
        if count != 1:
            raise DataError(
                f"edit {number}: its text stands {count} times in {clean(edit.path)}, not once; quote it exactly, "
                "with more lines around it"
            )
        after[edit.path] = text.replace(edit.search, edit.replace)
    if len(after) > MOST_CHANGED_FILES:
        raise DataError(f"the edits touch {len(after)} files; at most {MOST_CHANGED_FILES} are patched at once")
    total = sum(num_changed(texts[path], text) for path, text in after.items())
    if total > MOST_LINES:
        raise DataError(f"the edits change {total} lines; at most {MOST_LINES} are changed without a person")
    if not total:
        raise DataError("the edits change nothing, taken together")
    words = clean(title, MOST_TITLE) or "Change what the diagnosis names"
    return [Change(path, text, words, tuple(clean(one, 300) for one in because)) for path, text in after.items()]


def _count(text: str, search: str) -> int:
    """Occurrences, those that overlap included."""
    found, at = 0, text.find(search)
    while at >= 0:
        found, at = found + 1, text.find(search, at + 1)
    return found


def refuse_big(changes: Sequence[Change], before: Mapping[str, str]) -> None:
    """Raises UserError if the changes are more than a person reads through."""
    if len(changes) > MOST_CHANGED_FILES:
        raise UserError(f"the patch touches {len(changes)} files; at most {MOST_CHANGED_FILES} are patched at once")
    num = sum(num_changed(before.get(change.path, ""), change.after) for change in changes)
    if num > MOST_LINES:
        raise UserError(f"the patch changes {num} lines; at most {MOST_LINES} are changed without a person")


def num_changed(before: str, after: str) -> int:
    """Lines added and taken away."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    return sum(1 for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---"))
