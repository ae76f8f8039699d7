"""Texts against what their writer was shown: what passes, what is marked, what is dropped."""

from __future__ import annotations

import string
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eroica.assist.grounding import KEPT, Shown, Status, check, dropped, is_grounded, marked, shown
from eroica.findings import Evidence
from tests import samples

SLOW = shown(samples.slow_input()[0])


def _status(sentence: str, was_shown: Shown = SLOW) -> Status:
    (piece,) = check(sentence, was_shown)
    return piece.status


@pytest.mark.parametrize(
    "sentence",
    [
        "Rank 3 spends 239 ms per iteration on its own work, its peers 118 ms (E1).",
        "Own time is 0.239 s against 0.118 s [E1].",
        "Rank 3 on gpu-node-00 loads its input too slowly, in train/data.py:41 (E2).",
        "31 % of its critical path is TokenDataset.__getitem__ (E2), against 0.3 %.",
        "It arrives last at 20 of 20 all_reduce (E3).",
        "This costs 121 ms of 255 ms per iteration, 47.4 % (E1).",
        "Ranks 0-2 and 4-7 only wait for rank 3 (E3).",
        "Ranks 5-6 wait (E3).",
        "- Compared with 134 ms when healthy it is 1.90 times as slow (E1).",
        "F1 is established (E1, E2).",
    ],
)
def test_a_sentence_that_cites_what_was_shown_is_grounded(sentence: str) -> None:
    assert _status(sentence) is Status.GROUNDED, check(sentence, SLOW)


@pytest.mark.parametrize(
    ("sentence", "problem"),
    [
        ("Rank 4 spends 239 ms (E1).", "rank 4 is not in the evidence cited"),
        ("Ranks 4-7 are slow (E3).", "rank 4-7 is not in the evidence cited"),
        ("Rank 3 spends 250 ms (E1).", "250 ms is not in the evidence cited"),
        ("Rank 3 spends 239 s (E1).", "239 s is not"),
        ("Rank 3 on gpu-node-01 is slow (E1).", "gpu-node-01 was not shown"),
        ("The cause is in train/data.py:42 (E2).", "train/data.py:42 was not shown"),
        ("Rank 3 is slow (E9).", "E9 was not shown"),
        ("It arrives last at 19 of 20 (E3).", "19 is not"),
        ("Ranks 0-9 wait (E3).", "rank 0-9 is not"),
        ("My guess is 300 ms more.", "300 ms is not"),
        ("The clock fell by 40 % (E2).", "40 % is not"),
    ],
)
def test_a_number_rank_or_name_that_is_not_there_is_ungrounded(sentence: str, problem: str) -> None:
    (piece,) = check(sentence, SLOW)
    assert piece.status is Status.UNGROUNDED
    assert problem in "; ".join(piece.problems)


def test_a_claim_without_evidence_is_uncited_and_a_guess_says_so() -> None:
    assert _status("The disk of that host is slow.") is Status.UNCITED
    assert _status("My guess is that the disk of that host is slow.") is Status.GUESS
    assert _status("Which job do you mean?") is Status.OPEN
    assert _status("## What to do") is Status.OPEN
    assert _status("```\nrank 99 takes 5000 ms\n```\n") is Status.OPEN


def test_a_citation_after_the_full_stop_belongs_to_the_sentence_before() -> None:
    pieces = check("Rank 3 arrives last at 20 of 20. (E3) The disk is slow.", SLOW)
    assert [piece.status for piece in pieces] == [Status.GROUNDED, Status.UNCITED]


def test_missing_ranks_may_be_called_missing_and_nothing_else() -> None:
    was_shown = shown(samples.partial()[0])
    assert _status("Ranks 4-127 are missing, so little may be said (E1).", was_shown) is Status.GROUNDED
    assert _status("Ranks 4-127 are slow (E1).", was_shown) is Status.UNGROUNDED


def test_evidence_that_was_not_shown_cannot_be_cited() -> None:
    diagnosis, _ = samples.slow_input()
    assert _status("Rank 3 arrives last (E3).", shown(diagnosis, ["E3"])) is Status.GROUNDED
    assert _status("Rank 3 arrives last (E3).", shown(diagnosis, ["E1"])) is Status.UNGROUNDED


def test_a_marked_text_keeps_all_and_a_dropped_one_only_what_is_grounded() -> None:
    text = (
        "## Summary\n\nRank 3 spends 239 ms on its own work (E1). Its disk is broken.\n\n"
        "- It is last at 20 of 20 (E3).\n- Rank 5 is slow, too (E3).\n"
    )
    pieces = check(text, SLOW)
    assert "Its disk is broken. [cites no evidence]" in marked(pieces)
    assert "Rank 5 is slow, too (E3). [rank 5 is not" not in dropped(pieces)
    kept = dropped(pieces)
    assert "disk" not in kept
    assert "20 of 20" in kept
    assert is_grounded(check(kept, SLOW))


def test_ranks_of_merged_stacks_and_of_values_may_be_named() -> None:
    was_shown = Shown(
        {
            "E1": Evidence("7,9-11: all_reduce <- step (train.py:40)", "stack", {}),
            "E2": Evidence("x", "ring", {"rank": 5}),
        }
    )
    assert _status("Ranks 9-11 stand in train.py:40 (E1).", was_shown) is Status.GROUNDED
    assert _status("Rank 5 is missing (E2).", was_shown) is Status.GROUNDED
    assert _status("Rank 8 stands in train.py:40 (E1).", was_shown) is Status.UNGROUNDED


# ---- properties

NUMBERS = st.floats(1e-3, 1e6).map(lambda value: float(f"{value:.6g}"))


def _said(value: float, unit: str) -> str:
    return f"The rank takes {value:.8f} {unit} of it (E1)."


@given(NUMBERS, st.floats(-0.0099, 0.0099), st.sampled_from(["ms", "s", "%", "MB", "times", ""]))
def test_a_number_within_one_per_cent_is_grounded(value: float, off: float, unit: str) -> None:
    was_shown = Shown({"E1": Evidence(f"it takes {value:.8f} {unit}", "ledger", {})})
    claimed = float(f"{value:.8f}") * (1 + off)
    assert _status(_said(claimed, unit), was_shown) is Status.GROUNDED


@given(NUMBERS, st.floats(0.011, 10.0), st.booleans(), st.sampled_from(["ms", "s", "%", "MB", "times"]))
def test_a_number_further_off_is_not(value: float, off: float, is_more: bool, unit: str) -> None:
    was_shown = Shown({"E1": Evidence(f"it takes {value:.8f} {unit}", "ledger", {})})
    claimed = float(f"{value:.8f}") * (1 + off if is_more else 1 / (1 + off))
    assert _status(_said(claimed, unit), was_shown) is Status.UNGROUNDED


@given(st.sets(st.integers(0, 5_000), min_size=1, max_size=40), st.integers(0, 5_000))
def test_a_rank_may_be_named_exactly_if_it_was_shown(ranks: set[int], named: int) -> None:
    text = ",".join(map(str, sorted(ranks)))
    was_shown = Shown({"E1": Evidence(f"ranks {text} are late", "ledger", {})})
    expected = Status.GROUNDED if named in ranks else Status.UNGROUNDED
    assert _status(f"Rank {named} is late (E1).", was_shown) is expected


WORDS = st.sampled_from(
    "rank|ranks|3|4|0-2|239|ms|118|%|E1|E2|E9|(E3)|F1|guess|gpu-node-00|gpu-node-07|waits|.|?|!|,|-|#|```|1.|*|\n|e.g.|:".split(
        "|"
    )
)
PROSE = st.lists(WORDS, max_size=60).map(" ".join)


@given(st.one_of(st.text(max_size=400), PROSE))
def test_any_text_is_taken_apart_without_loss_and_what_is_kept_passes_again(text: str) -> None:
    pieces = check(text, SLOW)
    assert "".join(piece.text for piece in pieces) == text
    assert all(piece.problems for piece in pieces if piece.status not in KEPT)
    for word in text.split():
        assert word in marked(pieces)
    kept = [piece for piece in pieces if piece.status in KEPT]
    assert is_grounded(kept)


@given(PROSE)
def test_dropping_leaves_nothing_but_pieces_that_were_kept(text: str) -> None:
    pieces = check(text, SLOW)
    kept = {piece.text.strip() for piece in pieces if piece.status in KEPT}
    rest = dropped(pieces)
    for piece in kept:
        rest = rest.replace(piece, "", 1)
    assert not [letter for letter in rest if letter in string.ascii_letters]


@given(PROSE)
def test_who_was_shown_less_may_say_less(text: str) -> None:
    diagnosis, _ = samples.slow_input()
    bare = replace(diagnosis, evidence={}, findings=(), consequences=())
    before = [piece.status in KEPT for piece in check(text, SLOW)]
    after = [piece.status in KEPT for piece in check(text, shown(bare))]
    assert all(was or not now for was, now in zip(before, after, strict=True))
