"""Whose contention for cores it is: ranks that meet by chance are not named, those beside a stranger are."""

from __future__ import annotations

from collections.abc import Sequence

from eroica.context import Context
from eroica.critical_path import Activity
from eroica.diagnosis import diagnose
from eroica.findings import Diagnosis
from eroica.pattern import Function, stack
from eroica.samplers.evidence import Counted
from eroica.samplers.standout import shared_cores
from eroica.utilisation import MU_SOURCES
from tests import handmade as h

FORWARD = Function(Activity.PYTHON, "forward", "train.py:30", "train.py:30")
BACKWARD = Function(Activity.PYTHON, "backward", "train.py:60", "train.py:60")
OPERATOR = Function(Activity.OPERATOR, "aten::mm", "train.py:7", "train.py:7")


def host(name: str, cpus: Sequence[str], first: int = 0, hog: str = "") -> list[Counted]:
    """Ranks that may run on these cores, and a stranger."""
    found = [
        Counted(kind="rank", name=str(rank), rank=rank, values={}, labels={"cpus": where})
        for rank, where in enumerate(cpus, first)
    ]
    if hog:
        found.append(Counted(kind="process", name="77", rank=None, values={"cpu": 0.9}, labels={"cpus": hog}))
    return found


def said(
    hosts: dict[str, list[Counted]], slow: Sequence[int], size: int = 8, strikes: Sequence[Function] = (OPERATOR,)
) -> Diagnosis:
    """The slow ranks get half of the core that they want, each of them in one of the functions that it strikes, by
    turns."""
    of = {c["rank"]: name for name, every in hosts.items() for c in every if c["kind"] == "rank"}
    ranks = []
    for rank in range(size):
        own = 1.0 if rank in slow else 0.5
        struck = strikes[rank % len(strikes)]
        spent = {function: 0.5 / len(strikes) for function in strikes}
        spent[struck] += own - 0.5
        ranks.append(
            h.Rank(
                own=own,
                length=1.1,
                samples=[h.Sample(1.1 - own, work_before=own, channel=h.everyone(size))],
                functions=spent,
                mu={function: 0.48 if rank in slow else 0.95 for function in strikes},
                mu_source=MU_SOURCES.index("cpu_granted"),
                has_device=False,
                host=of[rank],
            )
        )
    return diagnose(stack(h.job(ranks)), Context(shared_cores=shared_cores(hosts)))


def test_ranks_that_meet_on_a_core_are_not_named_and_their_host_is() -> None:
    crowded = {"a": host("a", ["0", "0", "0", "0", "0", "1", "1", "1"])}
    (finding,) = said(crowded, [0, 1, 2]).findings
    assert (finding.cause, finding.scope, finding.ranks, finding.hosts) == ("cpu_contention", "host", "0-7", ("a",))


def test_the_host_on_which_they_meet_is_told_from_the_others() -> None:
    hosts = {"a": host("a", ["0-1"] * 4), "b": host("b", ["0", "1", "2", "3"], first=4)}
    (finding,) = said(hosts, [1, 2]).findings
    assert (finding.scope, finding.ranks, finding.hosts) == ("host", "0-3", ("a",))


def test_a_stranger_on_the_cores_of_some_ranks_leaves_it_with_these() -> None:
    hosts = {"a": host("a", ["0", "0", "1", "1", "2", "2", "3", "3"], hog="1")}
    (finding,) = said(hosts, [2, 3]).findings
    assert (finding.scope, finding.ranks) == ("rank", "2-3")


def test_where_others_are_as_crowded_and_not_slow_it_stays_with_the_ranks_of_the_slow_cores() -> None:
    hosts = {"a": host("a", ["0", "0", "1", "1", "2", "2", "3", "3"])}
    (finding,) = said(hosts, [2, 3]).findings
    assert (finding.scope, finding.ranks) == ("rank", "2-3")
    (finding,) = said(hosts, [2]).findings
    assert (finding.scope, finding.ranks) == ("host", "0-7")


def test_ranks_that_want_for_the_same_core_in_different_functions_are_one_finding() -> None:
    hosts = {"a": host("a", ["0", "0", "1", "1", "2", "2", "3", "3"])}
    (finding,) = said(hosts, [2, 3], strikes=(FORWARD, BACKWARD)).findings
    assert (finding.cause, finding.scope, finding.ranks) == ("cpu_contention", "rank", "2-3")


def test_a_rank_slowed_all_over_is_slowed_all_over_though_one_of_its_functions_stands_out() -> None:
    many = [Function(Activity.PYTHON, f"part{n}", f"train.py:{n}", f"train.py:{n}") for n in range(20)]
    ranks = []
    for rank in range(4):
        is_slow = rank >= 2
        spent = dict.fromkeys(many, 0.04 if is_slow else 0.022) | ({FORWARD: 0.09} if rank == 2 else {FORWARD: 0.03})
        own = sum(spent.values())
        ranks.append(
            h.Rank(
                own=own,
                length=1.0,
                samples=[h.Sample(1.0 - own, work_before=own, channel=h.everyone(4))],
                functions=spent,
                mu=dict.fromkeys(spent, 0.3 if is_slow else 0.95),
                mu_source=MU_SOURCES.index("cpu_granted"),
                has_device=False,
            )
        )
    (finding,) = diagnose(stack(h.job(ranks))).findings
    assert (finding.cause, finding.ranks) == ("cpu_contention", "2-3")


def test_a_rank_that_waits_on_a_core_of_its_own_is_named() -> None:
    hosts = {"a": host("a", [str(core) for core in range(8)])}
    (finding,) = said(hosts, [5]).findings
    assert (finding.scope, finding.ranks) == ("rank", "5")
    assert said({"a": host("a", ["0-63"] * 8)}, [5]).findings[0].ranks == "5"


def test_ranks_share_cores_also_by_way_of_others() -> None:
    first, second = shared_cores({"a": host("a", ["0-1", "1-2", "4", "2-3"], hog="4")})
    assert (first.ranks, first.num_cores, first.strangers) == ((2,), 1, 0.9)
    assert (second.ranks, second.num_cores, second.strangers) == ((0, 1, 3), 4, 0.0)
