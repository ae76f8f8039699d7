"""Edits that somebody else proposes: made exactly, or refused with a sentence."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eroica.assist.edits import (
    MOST_CHANGED_FILES,
    MOST_CHARS,
    MOST_EDITS,
    MOST_LINES,
    Edit,
    apply,
    edits_of,
    num_changed,
)
from eroica.errors import DataError

TEXTS = {"train.py": "a = 1\nb = 2\nc = 2\n", "data.py": "x = 1\n", "secret.py": "key = 1\n"}
ALLOWED = {"train.py", "data.py"}


def test_edits_are_made_in_order_and_in_no_other_place() -> None:
    edits = edits_of(
        [
            {"path": "train.py", "search": "a = 1\n", "replace": "a = 3\n"},
            {"path": "data.py", "search": "x = 1", "replace": "x = 4"},
            {"path": "train.py", "search": "a = 3\nb", "replace": "a = 5\nb"},
        ]
    )
    changes = apply(edits, TEXTS, ALLOWED, "Set numbers", ["E1 \x1b[31m says so"])
    assert {one.path: one.after for one in changes} == {"train.py": "a = 5\nb = 2\nc = 2\n", "data.py": "x = 4\n"}
    assert changes[0].title == "Set numbers"
    assert "\x1b" not in changes[0].because[0]


@pytest.mark.parametrize(
    ("edits", "reason"),
    [
        ([Edit("train.py", "= 2", "= 3")], "stands 2 times in train.py"),
        ([Edit("train.py", "d = 1", "d = 3")], "stands 0 times"),
        ([Edit("secret.py", "key", "no")], "not among the files"),
        ([Edit("../train.py", "a", "b")], "not among the files"),
        ([Edit("new.py", "", "import os")], "not among the files"),
        ([Edit("train.py", " \n", "b")], "searches for nothing"),
        ([Edit("train.py", "a = 1", "a = 1")], "changes nothing"),
        ([Edit("train.py", "a = 1", "a = 2"), Edit("train.py", "a = 2", "a = 1")], "taken together"),
        ([Edit("train.py", "a = 1", "x" * (MOST_CHARS + 1))], "characters"),
        ([Edit("train.py", "a = 1", "x\n" * (MOST_LINES + 1))], "lines"),
    ],
)
def test_an_edit_that_cannot_be_made_as_it_stands_is_refused(edits: list[Edit], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        apply(edits, TEXTS, ALLOWED, "x")


def test_edits_of_many_files_are_refused() -> None:
    texts = {f"{n}.py": "a = 1\n" for n in range(MOST_CHANGED_FILES + 1)}
    with pytest.raises(DataError, match="files"):
        apply([Edit(path, "a = 1", "a = 2") for path in texts], texts, texts, "x")


@pytest.mark.parametrize(
    "data",
    [None, {}, [], "text", [1], [{"path": "a", "search": "b"}], [{"path": "a", "search": "b", "replace": 1}],
     [{"path": "a", "search": "b", "replace": "c", "run": "rm"}],
     [{"path": "a", "search": "b", "replace": "c"}] * (MOST_EDITS + 1)],
)  # fmt: skip
def test_what_is_no_list_of_edits_is_refused(data: object) -> None:
    with pytest.raises(DataError):
        edits_of(data)


@given(st.text("ab\n", max_size=30), st.text("ab\n", min_size=1, max_size=4), st.text("abc\n", max_size=4))
def test_an_edit_is_made_only_where_its_text_stands_once(text: str, search: str, replacement: str) -> None:
    places = len(re.findall(f"(?={re.escape(search)})", text))
    try:
        (change,) = apply([Edit("f.py", search, replacement)], {"f.py": text}, {"f.py"}, "x")
    except DataError:
        assert (
            places != 1
            or search == replacement
            or not search.strip()
            or num_changed(text, text.replace(search, replacement)) == 0
        )
    else:
        assert places == 1
        at = text.index(search)
        assert change.after == text[:at] + replacement + text[at + len(search) :]
