"""Recorded communications timed again with less work (design section 4, "Impact")."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eroica import replay
from eroica.collectives import Channel, Ledger
from eroica.communication import CollectiveKind
from tests import handmade as h

PAIR = Channel("0-1", "default_pg", 2)


def ledgers(ranks: list[h.Rank], num_steps: int = 3) -> list[Ledger]:
    return [h.ledger(rank, num_steps) for rank in ranks]


def data_parallel(work: list[float], after: float = 0.0, transfer: float = 0.1) -> list[Ledger]:
    """All ranks work, meet once, and end."""
    length = max(work) + transfer + after
    return ledgers(
        [
            h.Rank(
                own=w + after, length=length, samples=[h.Sample(max(work) - w + transfer, work_before=w, channel=PAIR)]
            )
            for w in work
        ]
    )


@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=5), st.floats(0, 0.5))
def test_ranks_that_meet_once_are_as_slow_as_the_slowest(work: list[float], after: float) -> None:
    made = replay.prepare(data_parallel(work, after))
    assert made is not None and made.replayed_s == pytest.approx(made.length_s, rel=1e-5)
    assert made.replayed_s == pytest.approx(max(work) + 0.1 + after, rel=1e-5)


def test_an_excess_is_taken_where_the_rank_does_more_than_its_peers() -> None:
    made = replay.prepare(data_parallel([1.0, 0.5, 0.5], after=0.4))
    assert made is not None
    assert made.without({0: 0.3}, {0: [1, 2]}) == pytest.approx(0.7 + 0.1 + 0.4, rel=1e-3)
    # Without peers it is taken evenly, some of it after the collective.
    evenly = made.without({0: 0.3}, {})
    assert evenly == pytest.approx(1.5 - 0.3 * 1.0 / 1.4, rel=1e-3)


def test_less_work_on_a_rank_that_waits_changes_nothing() -> None:
    made = replay.prepare(data_parallel([1.0, 0.5]))
    assert made is not None and made.without({1: 0.4}, {1: [0]}) == pytest.approx(made.replayed_s)


def pipeline(stage_s: list[float], transfer: float = 0.01) -> list[Ledger]:
    """One microbatch through a line of stages: stage k receives, works, sends; the last one ends the step."""
    count = len(stage_s)
    ends = np.cumsum(stage_s) + transfer * np.arange(count)
    length = float(ends[-1])
    ranks = []
    for k, work in enumerate(stage_s):
        samples = []
        if k:
            line = Channel(f"{k - 1}>{k}", "point to point", 2)
            samples.append(h.Sample(float(ends[k - 1]) + transfer, channel=line, kind=CollectiveKind.RECV))
        if k + 1 < count:
            line = Channel(f"{k}>{k + 1}", "point to point", 2)
            samples.append(h.Sample(transfer, work_before=work, channel=line, kind=CollectiveKind.SEND))
        ranks.append(h.Rank(own=work, length=length, samples=samples))
    return ledgers(ranks)


def test_a_pipeline_of_hand_is_reproduced() -> None:
    made = replay.prepare(pipeline([0.3, 0.5, 0.2, 0.4]))
    assert made is not None
    assert made.replayed_s == pytest.approx(0.3 + 0.5 + 0.2 + 0.4 + 3 * 0.01, rel=1e-4)


@pytest.mark.parametrize("stage", range(4))
def test_taking_an_excess_out_of_a_pipeline_gives_the_analytic_answer(stage: int) -> None:
    made = replay.prepare(pipeline([0.3, 0.5, 0.2, 0.4]))
    assert made is not None
    assert made.replayed_s - made.without({stage: 0.15}, {}) == pytest.approx(0.15, rel=1e-3)


def test_a_delay_travels_through_groups_that_overlap() -> None:
    # Ranks 0 and 1 meet, then 1 and 2: what rank 0 is late by, rank 2 pays for.
    first, second = Channel("0,1", "a", 2), Channel("1,2", "b", 2)
    ranks = [
        h.Rank(own=0.8, length=1.2, samples=[h.Sample(0.1, work_before=0.8, channel=first)]),
        h.Rank(
            own=0.4,
            length=1.2,
            samples=[
                h.Sample(0.7, work_before=0.2, channel=first),
                h.Sample(0.1, work_before=0.2, channel=second),
            ],
        ),
        h.Rank(own=0.3, length=1.2, samples=[h.Sample(0.9, work_before=0.3, channel=second)]),
    ]
    made = replay.prepare(ledgers(ranks))
    assert made is not None and made.replayed_s == pytest.approx(1.2, rel=1e-4)
    assert made.without({0: 0.4}, {}) == pytest.approx(0.8, rel=1e-3)
    assert made.without({2: 0.3}, {}) == pytest.approx(1.2, rel=1e-3)


def test_communication_in_flight_behind_work_does_not_block() -> None:
    ranks = [
        h.Rank(
            own=1.0,
            length=1.1,
            samples=[
                h.Sample(0.5, work_before=0.3, exposed=0.0, channel=PAIR),
                h.Sample(0.1, work_before=0.7, in_flight=0, channel=PAIR),
            ],
        )
    ] * 2
    made = replay.prepare(ledgers(ranks))
    assert made is not None and made.replayed_s == pytest.approx(1.1, rel=1e-3)


def test_a_replay_that_does_not_reproduce_the_recording_is_thrown_away() -> None:
    wrong = [h.ledger(h.Rank(own=0.5, length=2.0, samples=[h.Sample(0.1, work_before=0.5, channel=PAIR)]), 3)] * 2
    assert replay.prepare(wrong) is None


def test_communications_that_wait_for_each_other_in_a_circle_are_no_replay() -> None:
    a, b = Channel("0,1", "a", 2), Channel("0-1", "b", 2)

    def rank(order: list[Channel]) -> h.Rank:
        return h.Rank(own=0.2, length=0.4, samples=[h.Sample(0.1, work_before=0.1, channel=c) for c in order])

    assert replay.prepare(ledgers([rank([a, b]), rank([b, a])])) is None


def test_no_ranks_and_no_complete_steps_are_no_replay() -> None:
    assert replay.prepare([]) is None
    assert replay.prepare(ledgers([h.Rank()])) is None
