"""Which way between two hosts is slow, by connections and cards; and what a setting explains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from eroica.samplers.evidence import Counted
from eroica.settings import OF_THE_CPU, OF_THE_NETWORK, explaining
from eroica.wires import Card, Place, Way, Wires, locate, wires_of

HOSTS = ("a", "b", "c")
HOST_OF = {rank: HOSTS[rank // 2] for rank in range(6)}
RINGS = ((0, 2, 4), (1, 3, 5))


def ring(
    busy: Mapping[str, float], *, usual: float = 0.03, lost: Sequence[str] = (), cards: Sequence[Card] = ()
) -> Wires:
    """Two rings over three hosts with two ranks each; `busy` by way: "ab"."""
    ways = []
    for members in RINGS:
        for one, other in zip(members, (*members[1:], members[0]), strict=True):
            name = HOST_OF[one] + HOST_OF[other]
            resent = 40.0 if name in lost else 0.0
            ways.append(Way(one, other, busy.get(name, usual), 20.0, 2000.0, resent))
            ways.append(Way(other, one, 0.001, 0.05))
    return Wires(tuple(ways), tuple(cards))


def cards(**queued: float) -> tuple[Card, ...]:
    """The card of each host; those named have packets waiting."""
    return tuple(Card("", 2 * k, "eth0", queued.get(host, 0.0)) for k, host in enumerate(HOSTS))


def holding(**held: float) -> tuple[Card, ...]:
    """The card of each host, whose queues no look met; those named were held back so many times per packet."""
    return tuple(Card("", 2 * k, "eth0", 0.0, held=held.get(host, 0.0)) for k, host in enumerate(HOSTS))


def placed(wires: Wires | None, before: Wires | None = None) -> Place:
    found = locate(wires, before, HOST_OF, range(6))
    assert found is not None
    return found


@pytest.mark.parametrize("host, way", [("a", "ab"), ("b", "bc"), ("c", "ca")])
def test_a_host_whose_card_has_a_queue_before_the_slow_way_is_the_culprit(host: str, way: str) -> None:
    place = placed(ring({way: 0.4}, cards=cards(**{host: 0.5})))
    assert (place.scope, place.hosts, place.cause) == ("host", (host,), "nic_or_host_network")
    assert place.card == f"{host}/eth0" and place.certain
    assert any("waiting" in text for text in place.evidence)


def test_a_slow_way_before_which_no_card_has_a_queue_is_a_link_and_blames_no_host() -> None:
    place = placed(ring({"bc": 0.4}, cards=cards()))
    assert (place.scope, place.link, place.cause) == ("link", "b-c", "fabric_contention")
    assert not place.certain and "nic_or_host_network" in place.ruled_out[0]


def test_ways_whose_acknowledgements_come_late_are_not_the_slow_one() -> None:
    assert placed(ring({"bc": 0.4, "ab": 0.15}, cards=cards())).link == "b-c"


def test_a_queue_at_a_host_whose_ways_are_quick_blames_nobody() -> None:
    place = placed(ring({"bc": 0.4}, cards=cards(a=0.5)))
    assert place.scope == "link" and place.link == "b-c"


def test_a_host_that_is_alone_behind_slow_ways_is_exonerated_by_its_card() -> None:
    place = placed(ring({"bc": 0.4, "ca": 0.35}, cards=cards()))
    assert (place.scope, place.link) == ("link", "a+b-c")


def test_without_any_word_from_cards_such_a_host_is_left_to_the_groups() -> None:
    silent = tuple(Card("", 2 * k, "eth0", None) for k in range(3))
    assert locate(ring({"bc": 0.4, "ca": 0.35}, cards=silent), None, HOST_OF, range(6)) is None


def test_all_ways_alike_with_queues_before_all_cards_are_the_transport_of_all_hosts() -> None:
    slow = {"ab": 0.4, "bc": 0.38, "ca": 0.42}
    place = placed(ring(slow, cards=cards(a=0.5, b=0.45, c=0.5)))
    assert (place.scope, place.hosts, place.cause) == ("all", (), "nic_or_host_network")
    assert any("TCP sockets" in text for text in place.evidence)


@pytest.mark.parametrize(
    ("queued", "scope", "hosts"),
    [
        ({"a": 0.09, "b": 0.02, "c": 0.02}, "all", ()),  # seen where all cards were limited alike
        ({"a": 0.09}, "group", ()),
        ({"a": 0.3}, "host", ("a",)),
    ],
)
def test_where_all_ways_are_busy_alike_a_card_is_blamed_if_its_queue_lasts(
    queued: dict[str, float], scope: str, hosts: tuple[str, ...]
) -> None:
    place = placed(ring({"ab": 0.35, "bc": 0.35, "ca": 0.36}, cards=cards(**queued)))
    assert (place.scope, place.hosts) == (scope, hosts)


@pytest.mark.parametrize(
    ("held", "scope", "hosts", "cause"),
    [
        ({"a": 1.9, "b": 1.7, "c": 1.9}, "all", (), "nic_or_host_network"),
        ({"b": 1.9}, "host", ("b",), "nic_or_host_network"),
        ({"a": 0.02, "c": 0.03}, "group", (), "fabric_contention"),
    ],
)
def test_queues_that_no_look_met_are_told_by_how_often_they_were_held_back(
    held: dict[str, float], scope: str, hosts: tuple[str, ...], cause: str
) -> None:
    place = placed(ring({"ab": 0.35, "bc": 0.35, "ca": 0.36}, cards=holding(**held)))
    assert (place.scope, place.hosts, place.cause) == (scope, hosts, cause)


@pytest.mark.parametrize("kind", ["queued", "held"])
def test_a_card_that_was_slow_before_does_not_exonerate_the_one_that_has_become_so(kind: str) -> None:
    make = cards if kind == "queued" else holding
    before = ring({"ca": 0.2}, cards=make(c=0.5))
    place = placed(ring({"ab": 0.4, "ca": 0.38}, cards=make(a=0.5, c=0.5)), before)
    assert (place.scope, place.hosts, place.card) == ("host", ("a",), "a/eth0")


def test_cards_that_were_all_held_back_before_as_well_are_not_why_all_ways_have_become_slow() -> None:
    shaped = holding(a=1.9, b=1.7, c=1.9)
    place = placed(ring({"ab": 0.35, "bc": 0.35, "ca": 0.36}, cards=shaped), ring({}, cards=shaped))
    assert (place.scope, place.cause) == ("group", "fabric_contention")
    assert "none before" in place.ruled_out[0]


def test_all_ways_alike_that_lose_packets_no_host_counts_are_the_fabric() -> None:
    slow = {"ab": 0.4, "bc": 0.38, "ca": 0.42}
    place = placed(ring(slow, lost=("ab", "bc", "ca"), cards=cards()))
    assert (place.scope, place.cause) == ("group", "fabric_contention")
    assert any("sent again" in text and "Drop counters" in text for text in place.evidence)


def test_where_all_ways_lose_packets_the_one_that_was_busiest_is_not_named() -> None:
    """Who sends again most in a window is chance."""
    slow = {"ab": 0.4, "bc": 0.15, "ca": 0.14}
    place = placed(ring(slow, lost=("ab", "bc", "ca"), cards=cards()))
    assert (place.scope, place.link, place.cause) == ("group", None, "fabric_contention")
    assert placed(ring(slow, lost=("ab",), cards=cards())).link == "a-b"


def test_a_card_that_lost_its_carrier_names_its_host_whatever_else_is_slow() -> None:
    flapping = [Card("", 0, "eth0", 0.0), Card("", 2, "eth0", 0.0, link_changes=4.0), Card("", 4, "eth0", 0.0)]
    place = placed(ring({"ab": 0.4, "bc": 0.4, "ca": 0.3}, cards=flapping))
    assert (place.scope, place.hosts, place.card) == ("host", ("b",), "b/eth0")
    assert any("carrier" in text for text in place.evidence)


def test_a_way_that_was_always_busy_is_not_the_one_that_became_slow() -> None:
    before = ring({"ab": 0.5})
    place = placed(ring({"ab": 0.5, "bc": 0.6}, cards=cards()), before)
    assert place.link == "b-c"


def test_ways_that_are_hardly_busy_tell_nothing() -> None:
    assert locate(ring({}), None, HOST_OF, range(6)) is None
    assert locate(None, None, HOST_OF, range(6)) is None


def test_ranks_of_one_host_have_no_way_between_hosts() -> None:
    assert locate(ring({"ab": 0.5}), None, dict.fromkeys(range(6), "a"), range(6)) is None


def counted(kind: Any, name: str, rank: int | None, values: Mapping[str, float], **labels: str) -> Counted:
    return Counted(kind=kind, name=name, rank=rank, values=dict(values), labels=labels)


def test_the_two_ends_of_a_connection_are_brought_together_over_hosts() -> None:
    one, other = "10.0.0.1:4000", "10.0.0.2:5000"
    found = wires_of(
        {
            "x": [
                counted(
                    "way", "0/..", 0, {"way_mbps": 12.0, "way_busy": 0.3, "way_segments": 90.0}, here=one, there=other
                ),
                counted(
                    "nic",
                    "eth0",
                    None,
                    {"queued": 0.25, "carrier_changes": 2.0, "queue_held": 3.0, "queue_packets": 6.0},
                ),
            ],
            "y": [counted("way", "1/..", 1, {"way_mbps": 0.1, "way_resent": 3.0}, here=other, there=one)],
        }
    )
    assert found is not None
    assert {(way.sender, way.receiver, way.mbps, way.resent) for way in found.ways} == {
        (0, 1, 12.0, 0.0),
        (1, 0, 0.1, 3.0),
    }
    (card,) = found.cards
    assert (card.host, card.rank, card.queued, card.link_changes, card.held) == ("x", None, 0.25, 2.0, 0.5)
    assert found.addresses == {0: "10.0.0.1", 1: "10.0.0.2"}


def test_connections_to_itself_by_the_loopback_are_no_wires() -> None:
    ends = ("127.0.0.1:4000", "127.0.0.1:5000")
    every = [
        counted("way", "0/..", 0, {"way_mbps": 1.0}, here=ends[0], there=ends[1]),
        counted("way", "1/..", 1, {"way_mbps": 1.0}, here=ends[1], there=ends[0]),
    ]
    assert wires_of({"x": every}) is None


def apart(name: str, ranks: str, usual: str | None = '"eth0"') -> dict[str, Any]:
    return {"differences": [{"name": name, "usual": usual, "odd": [{"value": '"eth1"', "ranks": ranks}]}]}


def test_a_setting_that_just_the_slow_ranks_have_explains_them() -> None:
    (setting,) = explaining(apart("env.GLOO_SOCKET_IFNAME", "3"), OF_THE_NETWORK, [3])
    assert setting.text == 'GLOO_SOCKET_IFNAME is "eth1" on rank 3, and "eth0" on the others'
    assert explaining(apart("env.MKL_CBWR", "3-4", "null"), OF_THE_CPU, [3, 4])[0].text.endswith("absent on the others")


@pytest.mark.parametrize("ranks", [[2], [2, 3], []])
def test_a_setting_of_other_ranks_explains_nothing(ranks: list[int]) -> None:
    assert explaining(apart("env.GLOO_SOCKET_IFNAME", "3"), OF_THE_NETWORK, ranks) == []


def test_a_setting_explains_only_what_it_can_act_on() -> None:
    assert explaining(apart("env.MKL_CBWR", "3"), OF_THE_NETWORK, [3]) == []
    assert explaining(apart("env.GLOO_SOCKET_IFNAME", "3"), OF_THE_CPU, [3]) == []
    assert explaining(apart("env.NCCL_DEBUG", "3"), OF_THE_NETWORK, [3]) == []


def test_where_no_value_is_the_usual_one_none_is_odd() -> None:
    assert explaining(apart("env.GLOO_SOCKET_IFNAME", "3", None), OF_THE_NETWORK, [3]) == []
