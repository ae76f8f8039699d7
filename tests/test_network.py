"""Slow transfers: which groups, and what they share (design section 4, last lines of "Root and victim")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eroica.collectives import Channel
from eroica.context import Context, Recurrence
from eroica.diagnosis import diagnose
from eroica.network import SlowTransfer, slow_transfers
from eroica.pattern import Stacked, stack
from eroica.stalls import stalls
from eroica.wires import Card, Way, Wires
from tests import handmade as h

HOSTS = "ABCD"
FAST, SLOW = 0.1, 0.3


def stacked(groups: Mapping[tuple[int, ...], tuple[float, ...]], per_host: int = 2) -> Stacked:
    """Groups (ranks -> duration of the collective on each member), ranks placed on hosts A to D in order."""
    size = len(HOSTS) * per_host
    samples: dict[int, list[h.Sample]] = {rank: [] for rank in range(size)}
    for ranks, durations in groups.items():
        channel = Channel(",".join(map(str, ranks)), "mesh_dp", len(ranks))
        for rank, duration in zip(ranks, durations, strict=True):
            samples[rank].append(h.Sample(duration, channel=channel))
    return stack(h.job([h.Rank(host=HOSTS[r // per_host], samples=samples[r]) for r in range(size)]))


def crossing(slow: str, quick: str = "AB CD AC BD AD BC") -> Stacked:
    """Pairs of hosts, each with a group of one rank on both; those in `slow` take three times as long."""
    groups = {}
    used = {host: 0 for host in HOSTS}
    for pair in [*quick.split(), *[p for p in slow.split() if p not in quick.split()]]:
        ranks = []
        for host in pair:
            ranks.append(HOSTS.index(host) * 6 + used[host])
            used[host] += 1
        groups[tuple(sorted(ranks))] = (SLOW if pair in slow.split() else FAST,) * 2
    return stacked(groups, per_host=6)


def found(made: Stacked) -> list[SlowTransfer]:
    return slow_transfers(made, None, 1.0)


def test_groups_that_are_all_alike_are_not_slow() -> None:
    assert found(crossing("")) == []


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_is_named_when_all_groups_through_it_are_slow_and_no_other(host: str) -> None:
    slow = " ".join(pair for pair in ("AB", "CD", "AC", "BD", "AD", "BC") if host in pair)
    (transfer,) = found(crossing(slow))
    assert (transfer.scope, transfer.hosts, transfer.undecided) == ("host", (host,), "")
    assert transfer.ranks.tolist() == list(range(6 * HOSTS.index(host), 6 * HOSTS.index(host) + 6))
    assert transfer.ratio == pytest.approx(3.0, rel=1e-3) and transfer.seconds == pytest.approx(0.2, rel=1e-3)
    assert not transfer.on_one_host and transfer.reference == "siblings"


@pytest.mark.parametrize("link", ["AB", "CD", "BC"])
def test_a_link_is_named_when_other_groups_of_both_hosts_are_quick(link: str) -> None:
    (transfer,) = found(crossing(link))
    assert (transfer.scope, transfer.hosts, transfer.undecided) == ("link", tuple(link), "")


def test_two_slow_links_are_two_findings() -> None:
    transfers = found(crossing("AB CD"))
    assert sorted(t.hosts for t in transfers) == [("A", "B"), ("C", "D")]


def test_a_link_and_its_ends_that_no_other_group_touches_cannot_be_told_apart() -> None:
    made = stacked({(0, 2): (SLOW, SLOW), (1, 3): (SLOW, SLOW), (4, 6): (FAST, FAST), (5, 7): (FAST, FAST)})
    (transfer,) = found(made)
    assert transfer.scope == "link" and transfer.hosts == ("A", "B") and "cannot be told apart" in transfer.undecided


def test_slow_groups_within_a_host_are_no_network() -> None:
    made = stacked({(0, 1): (SLOW, SLOW), (2, 3): (FAST, FAST), (4, 5): (FAST, FAST), (6, 7): (FAST, FAST)})
    (transfer,) = found(made)
    assert transfer.on_one_host and transfer.hosts == ("A",)


def test_waiting_for_a_late_member_is_no_slow_transfer() -> None:
    made = stacked({(0, 2): (SLOW, FAST), (1, 3): (FAST, FAST), (4, 6): (FAST, SLOW), (5, 7): (FAST, FAST)})
    assert found(made) == []


def test_fewer_than_three_groups_of_a_shape_are_no_reference_for_each_other() -> None:
    assert found(stacked({(0, 2): (SLOW, SLOW), (4, 6): (FAST, FAST)})) == []


def test_groups_of_other_shape_are_not_compared() -> None:
    made = stacked({(0, 1, 2, 3): (SLOW,) * 4, (4, 5): (FAST,) * 2, (6, 7): (FAST,) * 2, (4, 6): (FAST,) * 2})
    assert found(made) == []


def test_one_job_wide_group_is_slow_only_by_its_past_and_names_no_host() -> None:
    everyone = tuple(range(8))
    now, before = stacked({everyone: (SLOW,) * 8}), stacked({everyone: (FAST,) * 8})
    assert found(now) == []
    (transfer,) = slow_transfers(now, before, 1.0)
    assert (transfer.scope, transfer.hosts, transfer.reference) == ("group", (), "baseline")
    assert transfer.ranks.tolist() == list(everyone)


def test_a_window_in_whose_midst_transfers_become_slow_is_told_by_its_slow_part() -> None:
    everyone = tuple(range(8))

    def window(slow_from: int, num: int = 12) -> Stacked:
        made = []
        for rank in range(8):
            lengths = [1.0 if step < slow_from else 1.4 for step in range(num)]
            told = h.summary(
                rank,
                h.Rank(host=HOSTS[rank // 2], length=lengths, samples=[h.Sample(FAST, channel=h.everyone(8))]),
                world_size=8,
                num_steps=num,
            )
            late = told.ledger.step >= slow_from
            durations = np.where(late, np.float32(FAST + 0.4), told.ledger.duration_s).astype(np.float32)
            made.append(replace(told, ledger=replace(told.ledger, duration_s=durations, sample_exposed_s=durations)))
        return stack(made)

    healthy = window(12)
    assert slow_transfers(window(11), healthy, 1.0) == []
    for turn in (5, 7):
        (transfer,) = slow_transfers(window(turn), healthy, 1.2)
        assert (transfer.since, transfer.scope, transfer.ranks.tolist()) == (turn, "group", list(everyone))
        assert transfer.ratio == pytest.approx(5.0, rel=1e-3) and transfer.seconds == pytest.approx(0.4, rel=1e-3)
    (whole,) = slow_transfers(window(0), healthy, 1.4)
    assert whole.since is None


def test_a_group_of_a_job_on_one_host_is_slowed_by_no_network() -> None:
    everyone = tuple(range(8))
    slow, quick = (replace(stacked({everyone: (length,) * 8}), hosts=("A",) * 8) for length in (SLOW, FAST))
    (transfer,) = slow_transfers(slow, quick, 1.0)
    assert transfer.on_one_host and transfer.scope == "group"


def test_what_is_as_slow_as_ever_is_not_slow() -> None:
    everyone = tuple(range(8))
    same = stacked({everyone: (SLOW,) * 8})
    assert slow_transfers(same, same, 1.0) == []


def test_less_than_a_hundredth_of_the_iteration_is_not_worth_a_word() -> None:
    assert slow_transfers(crossing("AB"), None, 100.0) == []


def test_short_transfers_that_differ_by_less_than_that_are_alike_beside_a_slow_one() -> None:
    """A third of next to nothing is noise: none of these is the only one that is quick."""
    rings: dict[tuple[int, ...], tuple[float, ...]]
    rings = {(0, 2, 4, 6): (0.005,) * 4, (1, 3, 5, 7): (0.0035,) * 4, (8, 10, 12, 14): (0.08,) * 4}
    (slow,) = found(stacked(rings, per_host=4))
    assert slow.ranks.tolist() == [8, 10, 12, 14] and slow.reference == "siblings"
    assert found(stacked(rings | {(8, 10, 12, 14): (0.012,) * 4}, per_host=4)) == []


@given(st.permutations("ABCD"))
def test_renaming_hosts_renames_the_answer(order: list[str]) -> None:
    renamed = {old: new for old, new in zip(HOSTS, order, strict=True)}
    slow = " ".join("".join(sorted(renamed[x] for x in pair)) for pair in ("AB", "AC", "AD"))
    quick = " ".join("".join(sorted(renamed[x] for x in pair)) for pair in ("AB", "CD", "AC", "BD", "AD", "BC"))
    (transfer,) = found(crossing(slow, quick))
    assert transfer.hosts == (renamed["A"],)


def test_a_host_that_all_slow_rings_cross_with_the_same_others_is_not_told_from_its_ways_to_them() -> None:
    def window(length: float) -> Stacked:
        groups: dict[tuple[int, ...], tuple[float, ...]] = {ring: (length,) * 3 for ring in ((0, 2, 4), (1, 3, 5))}
        return stacked(groups | {(0, 1, 2, 3): (FAST,) * 4})

    (transfer,) = slow_transfers(window(SLOW), window(FAST), 1.0)
    assert (transfer.scope, transfer.hosts) == ("group", ("A", "B", "C"))
    assert "the card of C and its ways" in transfer.undecided


def test_a_slow_pair_of_a_host_that_meets_no_other_is_its_link_or_its_end() -> None:
    made = stacked({(0, 6): (SLOW, SLOW), (1, 2): (FAST, FAST), (3, 4): (FAST, FAST), (2, 5): (FAST, FAST)})
    (transfer,) = found(made)
    assert (transfer.scope, transfer.hosts) == ("link", ("A", "D")) and transfer.undecided


def test_groups_that_stay_within_hosts_exonerate_no_card() -> None:
    across: list[tuple[int, ...]] = [(0, 2), (1, 3)]
    inside: list[tuple[int, ...]] = [(0, 1), (2, 3), (4, 5)]
    now = stacked({group: (SLOW if group in across else FAST,) * 2 for group in across + inside})
    before = stacked({group: (FAST,) * 2 for group in across + inside})
    (transfer,) = slow_transfers(now, before, 1.0)
    assert transfer.scope != "host" and set(transfer.hosts) <= {"A", "B"}


def test_rings_over_several_hosts_name_none_of_the_pairs_that_they_cross() -> None:
    rings: list[tuple[int, ...]] = [(0, 2, 4, 6), (1, 3, 5, 7)]
    inside: list[tuple[int, ...]] = [(0, 1), (2, 3)]
    now = stacked({group: (SLOW if group in rings else FAST,) * len(group) for group in rings + inside})
    before = stacked({group: (FAST,) * len(group) for group in rings + inside})
    (transfer,) = slow_transfers(now, before, 1.0)
    assert (transfer.scope, transfer.hosts) == ("group", ())


def standing(excess: Mapping[int, float], *, hosts: str = "AABB", works: int | None = None) -> Stacked:
    """Eight steps of four ranks in one group; in those of `excess` all stand in communication, but for `works`."""
    made = h.job([h.Rank(host=host, samples=[h.Sample(0.1, channel=h.everyone(4))]) for host in hosts])
    told = []
    for rank, summary in enumerate(made):
        exposed = summary.ledger.exposed_s.copy()
        for step, seconds in excess.items():
            exposed[step] += 0.0 if rank == works else seconds
        told.append(h.less(summary, exposed_s=exposed))
    return stack(told)


def test_steps_in_which_all_stand_in_communication_and_none_works_are_a_stall_of_the_network() -> None:
    found = stalls(standing({1: 0.8, 4: 0.7, 6: 0.8}), None, 1.0)
    assert found is not None and (found.scope, found.steps, found.hosts) == ("group", "rotating", ())
    assert found.seconds == pytest.approx(2.3 / 8, rel=1e-3) and found.share_of_steps == 3 / 8


def test_a_step_in_which_one_rank_works_while_the_others_wait_is_no_stall_of_the_network() -> None:
    assert stalls(standing({1: 0.8, 4: 0.7, 6: 0.8}, works=2), None, 1.0) is None


def test_steps_of_which_the_rank_that_works_does_not_tell_are_no_stall_of_the_network() -> None:
    def rank(own: float, wait: float, host: str) -> h.Rank:
        return h.Rank(own, 2.0, [h.Sample(0.1 + wait, channel=h.everyone(4))], host=host)

    waiting = [h.summary(k, rank(0.9, 1.0, "AABB"[k]), num_steps=12) for k in range(3)]
    cut = h.summary(3, rank(1.9, 0.0, "B"), num_steps=8)
    assert stalls(stack([*waiting, cut]), None, 2.0) is None


def test_one_stall_is_a_hiccup_unless_the_series_says_that_it_recurs() -> None:
    made = standing({4: 0.8})
    assert stalls(made, None, 1.0) is None
    found = stalls(made, Recurrence(np.array([4, 24, 44]), 20, 0.1), 1.0)
    assert found is not None and found.steps == "every 20"


def test_on_one_host_the_network_is_not_blamed_for_what_all_ranks_wait_for() -> None:
    assert stalls(standing({1: 0.8, 4: 0.7, 6: 0.8}, hosts="AAAA"), None, 1.0) is None


def with_setting(name: str, ranks: str) -> Context:
    return Context(
        environment={"differences": [{"name": name, "usual": '"eth0"', "odd": [{"value": '"eth1"', "ranks": ranks}]}]}
    )


def a_slow_pair() -> Stacked:
    """Ranks 0 and 2 of four pairs; the others wait for them in the job-wide group that follows."""
    pairs: list[tuple[int, ...]] = [(0, 2), (1, 3), (4, 6), (5, 7)]
    groups = {pair: (SLOW if pair == (0, 2) else FAST,) * 2 for pair in pairs}
    waits = tuple(0.05 if rank in (0, 2) else 0.05 + SLOW - FAST for rank in range(8))
    return stacked({**groups, tuple(range(8)): waits})


def test_the_slow_group_of_a_rank_that_chose_another_card_is_a_matter_of_its_configuration() -> None:
    (finding,) = diagnose(a_slow_pair(), with_setting("env.NCCL_SOCKET_IFNAME", "2")).findings
    assert (finding.cause, finding.scope, finding.ranks, finding.hosts) == ("configuration", "rank", "2", ("B",))


@pytest.mark.parametrize("name, ranks", [("env.NCCL_SOCKET_IFNAME", "5"), ("env.OMP_NUM_THREADS", "2")])
def test_a_setting_of_another_rank_or_of_another_kind_does_not_explain_a_slow_group(name: str, ranks: str) -> None:
    (finding,) = diagnose(a_slow_pair(), with_setting(name, ranks)).findings
    assert (finding.cause, finding.scope) == ("fabric_contention", "link")


def test_a_host_is_named_by_its_card_where_rings_tell_none_apart() -> None:
    rings: list[tuple[int, ...]] = [(0, 2, 4, 6), (1, 3, 5, 7)]
    now, before = (stacked({ring: (length,) * 4 for ring in rings}) for length in (SLOW, FAST))
    ways = [Way(a, b, 0.5 if a == 4 else 0.02, 20.0) for ring in rings for a, b in pairwise(ring)]
    wires = Wires(tuple(ways), tuple(Card("", 2 * k, "eth0", 0.4 if k == 2 else 0.0) for k in range(4)))
    (finding,) = diagnose(now, Context(baseline=before, wires=wires)).findings
    assert (finding.cause, finding.scope, finding.hosts, finding.ranks) == (
        "nic_or_host_network",
        "host",
        ("C",),
        "4-5",
    )
    assert finding.device == "C/eth0"
    (finding,) = diagnose(now, Context(baseline=before)).findings
    assert (finding.cause, finding.scope, finding.hosts) == ("fabric_contention", "group", ())


def test_one_slow_collective_among_many_quick_ones_is_found_where_groups_are_not_told_apart() -> None:
    def made(large: float) -> Stacked:
        samples = [h.Sample(seconds, channel=h.everyone(4)) for seconds in (0.001, large, 0.001, 0.001, 0.002)]
        return stack(h.job([h.Rank(host=host, samples=samples) for host in "AABB"]))

    (transfer,) = slow_transfers(made(0.15), made(0.01), 1.0)
    assert transfer.scope == "group" and transfer.seconds == pytest.approx(0.14, rel=1e-2)


def test_slower_transfers_cost_no_more_than_the_iteration_is_longer_by() -> None:
    """The rest fills time in which ranks waited for each other before."""

    def made(seconds: float, length: float) -> Stacked:
        samples = [h.Sample(seconds, channel=h.everyone(4))]
        return stack(h.job([h.Rank(length=length, host=host, samples=samples) for host in "AABB"]))

    (finding,) = diagnose(made(SLOW, 1.05), Context(baseline=made(FAST, 1.0))).findings
    assert finding.impact.seconds_per_iteration == pytest.approx(0.05, rel=1e-3)


def within(slow: set[tuple[int, ...]], groups: str = "01 23 45 67 02 13 46 57") -> Stacked:
    """Pairs of the devices of one host, in two dimensions."""
    lanes = [tuple(map(int, pair)) for pair in groups.split()]
    made = stacked({lane: ((SLOW if lane in slow else FAST),) * 2 for lane in lanes})
    return replace(made, hosts=("A",) * 8)


def test_a_slow_pair_within_a_host_is_a_link_where_other_pairs_of_both_devices_are_quick() -> None:
    (transfer,) = found(within({(2, 3)}))
    assert (transfer.scope, transfer.hosts, transfer.ranks.tolist()) == ("link", ("A",), [2, 3])
    assert transfer.on_one_host and not transfer.undecided


def test_a_link_between_devices_that_no_trace_names_is_told_by_its_ranks() -> None:
    lanes = {(0, 1): FAST, (2, 3): SLOW, (4, 5): FAST, (6, 7): FAST, (0, 2): FAST, (1, 3): FAST, (4, 6): FAST}
    groups: dict[tuple[int, ...], tuple[float, ...]] = {lane: (seconds,) * 2 for lane, seconds in lanes.items()}
    groups[tuple(range(8))] = tuple(0.05 if rank in (2, 3) else 0.05 + SLOW - FAST for rank in range(8))
    made = diagnose(replace(stacked(groups), hosts=("A",) * 8))
    assert made.verdict.scope == "link" and "link between ranks 2-3" in made.verdict.summary
    assert "None" not in made.verdict.summary


def test_two_slow_pairs_that_share_a_device_are_that_device() -> None:
    (transfer,) = found(within({(2, 3), (0, 2)}))
    assert (transfer.scope, transfer.hosts, transfer.ranks.tolist()) == ("rank", ("A",), [2])


def test_a_slow_ring_within_a_host_names_no_pair_of_its_devices() -> None:
    groups = {tuple(range(k, k + 4)): ((SLOW if k == 4 else FAST),) * 4 for k in range(0, 16, 4)}
    (transfer,) = found(stacked(groups, per_host=4))
    assert (transfer.scope, transfer.hosts, transfer.ranks.tolist()) == ("host", ("B",), [4, 5, 6, 7])
    assert transfer.undecided


@dataclass(frozen=True)
class Counter:
    """A counter that stands out."""

    rank: int
    name: str = "nvlink_errors"
    host: str = "B"
    value: float = 900.0
    peers: float | None = None
    text: str = "device 1's NVLinks counted 900 errors"


@pytest.mark.parametrize(("odd", "scope", "ranks"), [((5, 6), "link", "5-6"), ((6,), "rank", "6"), ((), "host", "4-7")])
def test_link_counters_tell_which_edge_of_a_slow_ring_it_is(odd: tuple[int, ...], scope: str, ranks: str) -> None:
    groups: dict[tuple[int, ...], tuple[float, ...]] = {
        tuple(range(k, k + 4)): ((SLOW if k == 4 else FAST),) * 4 for k in range(0, 16, 4)
    }
    # Then all ranks meet, and those of the slow ring come last.
    groups[tuple(range(16))] = tuple(FAST if 4 <= rank < 8 else SLOW for rank in range(16))
    made = diagnose(
        replace(stacked(groups, per_host=4), device_models=("GPU",) * 16),
        Context(counters=[Counter(rank) for rank in odd]),
    )
    (finding,) = made.findings
    assert (finding.cause, finding.scope, finding.ranks) == ("intra_node_link", scope, ranks)
    assert finding.link == ("B/gpu1-B/gpu2" if scope == "link" else None)
    assert ("NVLinks" in " ".join(made.evidence[key].text for key in finding.evidence)) == bool(odd)


def test_a_window_with_more_of_one_kind_of_steps_has_no_slower_transfers() -> None:
    """Training reduces twice in a step, for long; generation five times, for a moment."""

    def made(kinds: str) -> Stacked:
        ranks = []
        for host in "AABB":
            samples = [h.Sample(0.3 if i < 2 else 0.1, channel=h.everyone(4)) for i in range(5)]
            ranks.append(h.Rank(host=host, samples=samples))
        told = []
        for summary in h.job(ranks, len(kinds)):
            ledger = summary.ledger
            is_training = np.array(list(kinds))[ledger.step - ledger.step.min()] == "t"
            keep = ~is_training | (ledger.position < 2)
            lengths = np.where(is_training, ledger.duration_s, np.float32(0.1))[keep]
            told.append(
                h.less(
                    summary,
                    **{
                        name: getattr(ledger, name)[keep]
                        for name in ("step", "channel", "position", "kind", "check", "work_before_s")
                    },
                    duration_s=lengths,
                    sample_exposed_s=lengths,
                )
            )
        return stack(told)

    assert slow_transfers(made("ttttttgg"), made("tggggggg"), 1.0) == []
