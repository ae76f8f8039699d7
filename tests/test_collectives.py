"""The ledger of one rank and the join over ranks (design section 4, "Waits and own time")."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eroica.collectives import JOINABLE, MAX_SAMPLES, Channel, Ledger, join, sample
from eroica.communication import CollectiveKind
from eroica.job import ProcessGroup
from eroica.pattern import summarize
from tests import handmade as h

WORLD = Channel("0-3", "default_pg", 4)


def ledgers(durations: list[list[float]], **more: object) -> list[Ledger]:
    """Rank -> durations of its collectives in each of 8 steps."""
    return [h.ledger(h.Rank(samples=[h.Sample(d, **more) for d in mine])) for mine in durations]  # type: ignore[arg-type]


def ledger_of(events: list[h.Event], rank: int = 0) -> Ledger:
    return summarize(h.trace(events, rank=rank)).ledger


# --- join ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.floats(1e-6, 10), min_size=3, max_size=3), min_size=2, max_size=6))
def test_the_transfer_is_the_shortest_duration_and_the_rest_is_waiting(durations: list[list[float]]) -> None:
    joined = join(ledgers(durations))
    table = np.array(durations, np.float32).astype(float)
    assert len(joined.transfer_s) == 3 * 8 and (joined.members == len(durations)).all()
    for k in range(len(joined.transfer_s)):
        assert joined.transfer_s[k] == table[:, joined.position[k]].min()
    for rank, which, wait in zip(joined.rank, joined.which, joined.wait_s, strict=True):
        assert wait == pytest.approx(table[rank, joined.position[which]] - joined.transfer_s[which], abs=1e-9)
    assert (joined.wait_s >= 0).all() and (joined.exposed_wait_s <= joined.wait_s + 1e-12).all()


def test_waiting_that_work_hides_is_no_exposed_waiting() -> None:
    late = h.ledger(h.Rank(samples=[h.Sample(0.1)]))
    hidden = h.ledger(h.Rank(samples=[h.Sample(0.5, exposed=0.0)]))
    partly = h.ledger(h.Rank(samples=[h.Sample(0.5, exposed=0.3)]))
    joined = join([late, hidden, partly])
    mean = [joined.exposed_wait_s[joined.rank == r].mean() for r in range(3)]
    assert mean == pytest.approx([0.0, 0.0, 0.2])


@given(st.permutations(range(4)))
def test_the_order_of_ranks_does_not_matter_to_the_join(order: list[int]) -> None:
    some = ledgers([[0.1, 0.2], [0.3, 0.1], [0.2, 0.2], [0.4, 0.5]])
    ours, theirs = join(some), join([some[k] for k in order])
    assert sorted(ours.transfer_s) == sorted(theirs.transfer_s)
    for place, rank in enumerate(order):
        assert sorted(theirs.wait_s[theirs.rank == place]) == sorted(ours.wait_s[ours.rank == rank])


def test_a_group_whose_members_disagree_is_not_joined_and_never_shifted_to_fit() -> None:
    torn = [
        h.ledger(h.Rank(samples=[h.Sample(0.1, check=1), h.Sample(0.1, check=2)])),
        h.ledger(h.Rank(samples=[h.Sample(0.1, check=2), h.Sample(0.1, check=1)])),
    ]
    joined = join(torn)
    assert not len(joined.transfer_s) and len(joined.not_joinable) == 1
    assert "0-3" in joined.not_joinable[0] and "disagree" in joined.not_joinable[0]


def test_an_operation_that_one_member_does_not_tell_is_that_of_the_others() -> None:
    some = [h.ledger(h.Rank(samples=[h.Sample(0.1, check=check)])) for check in (5, 0, 5)]
    assert join(some).members.tolist() == [3] * 8
    torn = [*some, h.ledger(h.Rank(samples=[h.Sample(0.1, check=6)]))]
    assert len(join(torn).not_joinable) == 1


def test_a_torn_group_leaves_the_others_joined() -> None:
    other = Channel("0,1", "mesh_tp", 2)
    some = [
        h.ledger(h.Rank(samples=[h.Sample(0.1, check=k + 1), h.Sample(0.1 * (k + 1), channel=other)])) for k in range(2)
    ]
    joined = join(some)
    assert len(joined.not_joinable) == 1 and {joined.channels[c].key for c in joined.channel} == {"0,1"}


@pytest.mark.parametrize("kind", list(CollectiveKind))
def test_only_operations_in_which_every_rank_waits_for_every_other_are_joined(kind: CollectiveKind) -> None:
    joined = join(ledgers([[0.1], [0.2]], kind=kind))
    assert bool(len(joined.transfer_s)) == (kind in JOINABLE)


def test_a_collective_that_one_rank_tells_alone_is_not_joined() -> None:
    one, other = ledgers([[0.1, 0.2], [0.1]])
    assert set(join([one, other]).position) == {0}
    assert not len(join([one]).transfer_s) and not len(join([]).transfer_s)


def test_ranks_join_by_place_within_the_step_and_not_by_count() -> None:
    one, other = ledgers([[0.1, 0.2], [0.3, 0.4]])
    late = replace(other, step=other.step + 3, steps=other.steps + 3)
    joined = join([one, late])
    assert set(joined.step) == {3, 4, 5, 6, 7} and len(joined.transfer_s) == 10


# --- sampling ------------------------------------------------------------------------------------------------------


@given(
    st.sets(st.tuples(st.integers(0, 40), st.integers(0, 3), st.integers(0, 20)), min_size=1, max_size=300),
    st.integers(1, 60),
    st.data(),
)
def test_what_a_rank_with_more_communications_tells_is_a_subset_of_its_peers_choice(
    rows: set[tuple[int, int, int]], limit: int, data: st.DataObject
) -> None:
    names = [Channel(f"{c}-{c + 1}", "", 2) for c in range(4)]
    kept = data.draw(st.sets(st.sampled_from(sorted(rows)), min_size=1))

    def choice(some: list[tuple[int, int, int]]) -> tuple[set[tuple[int, int, int]], set[int]]:
        columns = np.array(some)
        chosen, complete = sample(
            columns[:, 0], columns[:, 1].astype(np.int32), columns[:, 2].astype(np.int32), names, limit
        )
        return {row for row, take in zip(some, chosen, strict=True) if take}, set(complete.tolist())

    (more, complete), (fewer, _) = choice(sorted(rows)), choice(sorted(kept))
    assert len(more) <= limit and more & kept <= fewer
    assert all(row in more for row in rows if row[0] in complete)


def test_a_long_window_is_sampled_by_whole_steps_the_same_on_every_rank() -> None:
    def events(num: int) -> list[h.Event]:
        made = []
        for s in range(num):
            made.append(h.mark(f"ProfilerStep#{s}", s * h.MS, h.MS))
            made += [h.kernel("nccl", s * h.MS + k * 10_000, 5_000, comm=h.Comm(elements=k)) for k in range(20)]
        return made

    told = ledger_of(events(60))
    assert len(told.kind) == MAX_SAMPLES and len(told.complete_steps) == MAX_SAMPLES // 20
    shorter = ledger_of(events(59))
    assert set(told.complete_steps) - {59} <= set(shorter.step)


# --- one rank's account --------------------------------------------------------------------------------------------


def account(*events: h.Event) -> Ledger:
    return ledger_of([h.mark("ProfilerStep#5", 0, 100 * h.MS), *events])


def test_an_iteration_is_own_time_exposed_transfer_waiting_and_idle() -> None:
    told = account(
        h.kernel("gemm", 0, 40 * h.MS),
        h.kernel("ncclAllReduce", 30 * h.MS, 40 * h.MS, thread="stream 9", comm=h.Comm()),
        h.kernel("ncclRecv", 70 * h.MS, 10 * h.MS, thread="stream 9", comm=h.Comm(CollectiveKind.RECV, peer=3)),
    )
    values = [told.length_s[0], told.own_s[0], told.exposed_s[0], told.waiting_s[0]]
    assert values == pytest.approx([0.100, 0.040, 0.030, 0.010]) and told.steps.tolist() == [5]
    assert told.duration_s == pytest.approx([0.040, 0.010]) and told.sample_exposed_s == pytest.approx([0.030, 0.010])
    assert told.work_before_s == pytest.approx([0.030, 0.010]) and told.in_flight.tolist() == [0, 0]


def test_overlapping_communications_count_their_instants_once() -> None:
    told = account(
        h.kernel("ncclA", 0, 60 * h.MS, thread="stream 1", comm=h.Comm()),
        h.kernel("ncclB", 30 * h.MS, 60 * h.MS, thread="stream 2", comm=h.Comm(CollectiveKind.ALL_GATHER)),
    )
    assert told.exposed_s == pytest.approx([0.090]) and told.sample_exposed_s == pytest.approx([0.060, 0.030])
    assert told.in_flight.tolist() == [0, 1]


def test_uneven_all_to_all_and_rooted_collectives_count_as_waiting() -> None:
    told = account(
        h.kernel("ncclA", 0, 20 * h.MS, comm=h.Comm(CollectiveKind.ALL_TO_ALL, uneven=True)),
        h.kernel("ncclB", 30 * h.MS, 20 * h.MS, comm=h.Comm(CollectiveKind.BROADCAST)),
        h.kernel("ncclC", 60 * h.MS, 20 * h.MS, comm=h.Comm(CollectiveKind.ALL_TO_ALL)),
    )
    assert told.waiting_s == pytest.approx([0.040]) and told.exposed_s == pytest.approx([0.020])


def test_all_to_alls_whose_sizes_differ_leave_the_collectives_of_their_group_joined() -> None:
    def rank(kind: CollectiveKind, size: int) -> Ledger:
        return ledger_of(
            [
                h.mark("ProfilerStep#3", 0, 100 * h.MS),
                h.kernel("ncclA", 10 * h.MS, 5 * h.MS, comm=h.Comm()),
                h.kernel("ncclB", 40 * h.MS, 5 * h.MS, comm=h.Comm(kind, elements=size)),
                h.kernel("ncclC", 60 * h.MS, 5 * h.MS, comm=h.Comm(CollectiveKind.ALL_TO_ALL)),
            ]
        )

    joined = join([rank(CollectiveKind.ALL_TO_ALL, 100), rank(CollectiveKind.ALL_TO_ALL, 300)])
    assert not joined.not_joinable and joined.position.tolist() == [0, 2]
    for other in (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER):
        torn = join([rank(CollectiveKind.ALL_TO_ALL, 100), rank(other, 100)])
        assert len(torn.not_joinable) == 1 and not len(torn.position)


def test_sends_and_receives_are_told_by_direction_on_both_sides() -> None:
    def told(rank: int, kind: CollectiveKind, peer: int) -> Channel:
        events = [h.mark("ProfilerStep#0", 0, h.MS), h.kernel("nccl", 0, 9, comm=h.Comm(kind, peer=peer))]
        return ledger_of(events, rank).channels[0]

    assert told(1, CollectiveKind.SEND, 2) == told(2, CollectiveKind.RECV, 1) == Channel("1>2", "point to point", 2)


def test_collectives_that_are_numbered_have_their_places_by_number_and_not_by_who_took_them_up_first() -> None:
    def rank(first: int) -> Ledger:
        starts = {0: 10 + first, 1: 11 - first}
        events = [h.mark("ProfilerStep#3", 0, 100 * h.MS)]
        events += [
            h.mark(
                "gloo:all_reduce",
                starts[k] * h.MS,
                (k + 1) * h.MS,
                thread=f"worker {k}",
                comm=h.Comm(sequence=k + 7, elements=100 * (k + 1)),
            )
            for k in range(2)
        ]
        return ledger_of(events)

    joined = join([rank(0), rank(1)])
    assert not joined.not_joinable and joined.transfer_s == pytest.approx([1e-3, 2e-3])


def test_a_few_untold_operations_leave_those_that_are_told_joinable() -> None:
    def rank(untold: str) -> Ledger:
        events = [h.mark("ProfilerStep#3", 0, 100 * h.MS)]
        told = h.Comm(sequence=1)
        events.append(h.mark("gloo:all_reduce", 10 * h.MS, h.MS, thread="a", comm=told))
        events.append(h.mark("gloo:all_reduce", 20 * h.MS, h.MS, thread="a", comm=told))
        made = h.trace(events)
        made.collectives.dtype[0] = -1 if untold else made.collectives.dtype[0]
        made.collectives.in_elements[0] = -1 if untold else 1024
        return summarize(made).ledger

    joined = join([rank("first"), rank("")])
    assert not joined.not_joinable and joined.members.tolist() == [2, 2]


def test_a_collective_of_unknown_group_beside_known_ones_is_joined_with_nobodys() -> None:
    def rank(number: int, others: int) -> Ledger:
        events = [h.mark("ProfilerStep#3", 0, 100 * h.MS)]
        events.append(h.mark("gloo:all_reduce", 10 * h.MS, h.MS, thread="a", comm=h.Comm(group=-1)))
        events.append(h.mark("gloo:all_reduce", 20 * h.MS, h.MS, thread="b", comm=h.Comm(group=others)))
        return ledger_of(events, number)

    told = join([rank(0, others=0), rank(1, others=0)])
    assert [told.channels[c].key for c in told.channel] == ["0-3"]
    bare = join([rank(0, others=-1), rank(1, others=-1)])
    assert [bare.channels[c].key for c in bare.channel] == ["default", "default"]


def test_groups_are_told_by_their_members_whatever_each_process_calls_them() -> None:
    def told(name: str) -> Channel:
        events = [h.mark("ProfilerStep#0", 0, h.MS), h.kernel("nccl", 0, 9, comm=h.Comm())]
        group = ProcessGroup(name, "mesh_tp", (0, 4), 2)
        return summarize(h.trace(events, groups=[group])).ledger.channels[0]

    assert told("17") == told("23") == Channel("0,4", "mesh_tp", 2)


def test_more_groups_than_a_ledger_holds_are_counted() -> None:
    groups = [ProcessGroup(str(k), f"g{k}", (0, k + 1), 2) for k in range(20)]
    events = [h.mark("ProfilerStep#0", 0, h.MS)]
    events += [h.kernel("nccl", 10_000 * k, 100 * (k + 1), comm=h.Comm(group=k)) for k in range(20)]
    made = summarize(h.trace(events, groups=groups))
    assert len(made.ledger.channels) == 16 and made.ledger.dropped_channels == 4
    assert "g0" not in {c.description for c in made.ledger.channels}
    assert any("4 process groups" in note for note in made.coverage.notes)


def test_long_windows_are_folded_into_means_that_keep_the_total() -> None:
    events = []
    for s in range(200):
        events += [h.mark(f"ProfilerStep#{s}", s * h.MS, h.MS), h.op("aten::mm", s * h.MS, 1000 * (s + 1))]
    told = ledger_of(events)
    assert len(told.steps) == 64 and told.length_s == pytest.approx(0.001)
    assert np.average(told.own_s) == pytest.approx(100.5e-6, rel=0.02)


def test_a_folded_step_names_the_function_of_its_longest_peak() -> None:
    events = []
    for s in range(128):
        events += [h.mark(f"ProfilerStep#{s}", s * h.MS, h.MS), h.op("aten::mm", s * h.MS, 1000 if s % 2 else 1100)]
        if s in (7, 33, 90):
            events.append(h.op("aten::sort", s * h.MS + 10_000, 500_000))
    made = summarize(h.trace(events))
    told = [made.patterns.functions[made.ledger.top_function[s // 2]].name for s in (7, 33, 90)]
    assert told == ["aten::sort"] * 3


def test_steps_beyond_sixteen_million_keep_their_numbers() -> None:
    first, events = (1 << 24) + 1, []
    for s in range(8):
        events += [h.mark(f"ProfilerStep#{first + s}", s * h.MS, h.MS), h.op("aten::mm", s * h.MS, 1000)]
    assert ledger_of(events).steps.tolist() == [first + s for s in range(8)]


def test_communication_is_counted_in_the_iteration_that_launched_it() -> None:
    events = [h.mark("ProfilerStep#0", 0, 100), h.mark("ProfilerStep#1", 100, 100)]
    events += [
        h.call("cudaLaunchKernel", 90, 5, correlation=4),
        h.kernel("nccl", 120, 30, correlation=4, comm=h.Comm()),
    ]
    assert ledger_of(events).step.tolist() == [0]
