"""The made job of the scale bench: its fault is found, in one piece and in parts, and its summaries travel."""

from __future__ import annotations

import pytest

from bench.fleet import PER_HOST, Fleet
from bench.scale import modelled
from eroica.codec import read_summary, write_summary
from eroica.diagnosis import diagnose
from eroica.pattern import stack


@pytest.mark.parametrize("num_ranks", [16, 200, 1000])
def test_the_planted_fault_is_the_only_finding(num_ranks: int) -> None:
    fleet = Fleet(num_ranks)
    (finding,) = diagnose(stack(list(fleet.summaries()))).findings
    assert (finding.scope, finding.cause, finding.ranks) == ("rank", "input_pipeline", str(fleet.culprit))
    assert finding.hosts == (f"node{fleet.culprit // PER_HOST:06d}",)


def test_parts_made_apart_and_sent_as_bytes_give_the_same_answer() -> None:
    fleet = Fleet(64)
    parts = [summary for first in (0, 32) for summary in fleet.summaries(first, 32)]
    made = diagnose(stack([read_summary(write_summary(summary)) for summary in parts]))
    assert (made.verdict.cause, made.verdict.ranks) == ("input_pipeline", str(fleet.culprit))
    assert made.coverage.ranks_reported == 64 and made.coverage.missing_ranks == ""


def test_the_model_counts_what_is_done_once_for_all_only_once() -> None:
    localized = {"ranks": 1_000_000, "parts": {"stack": 20.0, "localize and diagnose": 10.0}}
    bus = {"ranks": 100_000, "cpu": {"noticed": 1.0, "told": 44.0}}
    rows = dict((row[0], row[1]) for row in modelled(localized, bus).rows)
    assert rows["take and decode all summaries"] == "400" and rows["stack, localize, diagnose"] == "30"
