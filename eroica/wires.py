"""Which way between two hosts is slow, by what connections and cards showed over a window.

In a ring all members send the same bytes and end together, so that a ledger can say "this group is slow" and no more.
The connection over the slow way is busy for as long as the transfer lasts, the others for a moment each. What waits in
the queue before the sender's own card, or what that card counts as errors and lost carriers, makes the host the
culprit; where its queue is empty the limit lies farther on, and no host is to be cordoned for it. Pure; blind to
transports that are no TCP, and then None. Used by `background`, which makes the records, and `network`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Literal

from eroica.samplers.evidence import Counted

CARRIES = 0.1
"""A connection with less than this share of what the busiest one carries is none of a ring's."""
LEAST_BUSY = 0.05
"""Share of the time that the busiest connection must be so: below, the network is not what a job waits for."""
CONTRAST = 1.8
"""Between the slow ways and the others lies a factor of so much in busy time. All at one limit are within 1.5 of each
other, since they carry alike; a single slow way keeps the others waiting for it."""
QUEUED = 0.05
"""Share of the looks at which packets wait before a card that is too slow; cards that keep up have none."""
QUEUED_APART = 2.0
"""And so many times the share at the other hosts, and its own in the healthy window."""
FILLS = 0.5
"""And so much of the time in which its host's ways are busy, where all ways are busy alike: a card that holds up the
others has packets waiting for nearly all of that time (85 % seen), one of many slow ones by chance for a quarter."""
SOME_QUEUED = 0.01
"""Share of the looks from which on packets wait before a card at all, where they wait before another one."""
HELD = 0.1
"""Times that a card's queue is held back, per packet, from which on packets wait before it, whether or not a look meets
them: queues that shape, and drivers that are full, count them. A bucket that is too small counts more than one (1.9
seen); where no card is the limit there are next to none."""
LOST = 0.002
"""Share of segments that are sent again where packets get lost; kernels that fill a queue lose some at its end."""
FEW_LOST = 5
LOSE_ALIKE = 0.5
"""Part of the share that the busiest ways lose which the others lose too: packets get lost between all hosts, and which
connection lasts longest is chance."""


@dataclass(frozen=True, slots=True)
class Way:
    """One direction of a connection between two ranks."""

    sender: int
    receiver: int
    busy: float
    """Share of the time in which something was sent and not yet acknowledged."""
    mbps: float
    """Million bytes per second, over the whole time."""
    segments: float = 0.0
    resent: float = 0.0


@dataclass(frozen=True, slots=True)
class Card:
    """A network card of a host."""

    host: str
    """"" where `rank` says it."""
    rank: int | None
    name: str
    queued: float | None
    """Share of the looks at which packets waited for it."""
    drops: float = 0.0
    """Packets that were thrown away before it."""
    link_changes: float = 0.0
    errors: float = 0.0
    held: float | None = None
    """Times that its queue was held back, per packet; None where nothing left it."""


@dataclass(frozen=True, slots=True)
class Wires:
    """What was read of connections and cards over a window."""

    ways: tuple[Way, ...]
    cards: tuple[Card, ...]
    rdma_gbps: float | None = None
    """What RDMA ports carried; None = there are none."""
    addresses: Mapping[int, str] = field(default_factory=dict)
    """The address that each rank sends from most."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where transfers are slow."""

    scope: str
    """host, link, group or all."""
    hosts: tuple[str, ...]
    link: str | None
    cause: str
    card: str
    """"host/eth0"; "" = no card."""
    because: str
    certain: bool
    evidence: tuple[str, ...]
    ruled_out: tuple[str, ...]
    ends: tuple[str, ...] = ()
    """Hosts at an end of a slow way."""


def wires_of(counters: Mapping[str, Sequence[Counted]]) -> Wires | None:
    """What hosts read, with the two ends of each connection brought together; None where no connection was told."""
    ends: dict[tuple[str, str], tuple[int, Mapping[str, float]]] = {}
    cards: dict[tuple[str, int | None, str], dict[str, float]] = {}
    rdma: list[float] = []
    for host, every in counters.items():
        for counted in every:
            values, labels = counted["values"], counted["labels"]
            if counted["kind"] == "way" and counted["rank"] is not None:
                here, there = labels.get("here", ""), labels.get("there", "")
                if not here.startswith(("127.", "::1")):
                    ends[here, there] = counted["rank"], values
            elif counted["kind"] == "nic" and counted["name"].rpartition("/")[2] != "lo":
                key = ("" if counted["rank"] is not None else host, counted["rank"], counted["name"].rpartition("/")[2])
                cards.setdefault(key, {}).update(values)
            elif counted["kind"] == "port":
                rdma.append(max(values.get("port_rx_gbps", 0.0), values.get("port_tx_gbps", 0.0)))
    ways = []
    most: dict[int, tuple[float, str]] = {}
    for (here, there), (rank, sent) in ends.items():
        peer = ends.get((there, here))
        mbps = sent.get("way_mbps", 0.0)
        if peer is None or peer[0] == rank:
            continue
        ways.append(
            Way(
                rank, peer[0], min(sent.get("way_busy", 0.0), 1.0), mbps,
                sent.get("way_segments", 0.0), sent.get("way_resent", 0.0),
            )
        )  # fmt: skip
        address = here.rpartition(":")[0]
        most[rank] = max(most.get(rank, (0.0, "")), (mbps, address))
    if not ways:
        return None
    return Wires(
        tuple(ways),
        tuple(
            Card(
                host, rank, name, values.get("queued"), values.get("queue_drops", 0.0),
                max(values.get("link_changes", 0.0), values.get("carrier_changes", 0.0)),
                values.get("rx_errors", 0.0) + values.get("tx_errors", 0.0),
                values["queue_held"] / values["queue_packets"] if values.get("queue_packets") else None,
            )
            for (host, rank, name), values in cards.items()
        ),
        sum(rdma) if rdma else None,
        {rank: address for rank, (_, address) in most.items()},
    )  # fmt: skip


@dataclass(slots=True)
class _Edge:
    """All connections from one host to another."""

    busy: float = 0.0
    mbps: float = 0.0
    segments: float = 0.0
    resent: float = 0.0


def _edges(wires: Wires, host_of: Mapping[int, str], members: Collection[int]) -> dict[tuple[str, str], _Edge]:
    ways = [
        way
        for way in wires.ways
        if way.sender in members
        and way.receiver in members
        and host_of.get(way.sender, "") != host_of.get(way.receiver, "")
    ]
    most = max((way.mbps for way in ways), default=0.0)
    found: dict[tuple[str, str], _Edge] = {}
    for way in ways:
        if way.mbps < CARRIES * most:
            continue
        edge = found.setdefault((host_of[way.sender], host_of[way.receiver]), _Edge())
        edge.busy = max(edge.busy, way.busy)
        edge.mbps += way.mbps
        edge.segments += way.segments
        edge.resent += way.resent
    return found


def _slow(edges: Mapping[tuple[str, str], _Edge], before: Mapping[tuple[str, str], _Edge]) -> list[tuple[str, str]]:
    """The ways that keep the others waiting; all, where none differs or all lose packets alike."""
    rise = {pair: max(edge.busy - (before[pair].busy if pair in before else 0.0), 0.0) for pair, edge in edges.items()}
    order = sorted(rise, key=lambda pair: -rise[pair])
    if rise[order[0]] < LEAST_BUSY:
        return []
    lost = {pair: edge.resent / max(edge.segments, 1.0) for pair, edge in edges.items()}
    if min(lost.values()) >= max(LOST, LOSE_ALIKE * lost[order[0]]):
        return order
    # The first gap from above, not the widest: acknowledgements of other ways that pass the slow one come late as well,
    # and make those busier than the rest, though by less than it is itself.
    for k, (one, other) in enumerate(pairwise(order)):
        if rise[one] >= CONTRAST * max(rise[other], LEAST_BUSY / 10):
            return order[: k + 1]
    return order


@dataclass(frozen=True, slots=True)
class _Complaint:
    card: str
    text: str
    sends: bool
    """It speaks of what the host sends."""


def _holder(card: Card, host_of: Mapping[int, str]) -> str:
    """The host of a card; "" if it is not known."""
    return card.host or host_of.get(card.rank if card.rank is not None else -1, "")


def _risen(now: Wires, before: Wires | None, host_of: Mapping[int, str]) -> Wires:
    """The same without the queues that were as long in the healthy window: those are not what became slow."""
    then = {(_holder(card, host_of), card.name): card for card in before.cards} if before is not None else {}

    def rise(card: Card, name: Literal["queued", "held"]) -> float | None:
        was, value = then.get((_holder(card, host_of), card.name)), getattr(card, name)
        is_old = was is not None and value is not None and value < QUEUED_APART * (getattr(was, name) or 0.0)
        return 0.0 if is_old else value

    return replace(
        now, cards=tuple(replace(card, queued=rise(card, "queued"), held=rise(card, "held")) for card in now.cards)
    )


def _complaints(wires: Wires, host_of: Mapping[int, str], hosts: Collection[str]) -> dict[str, list[_Complaint]]:
    """What cards of these hosts say against them."""
    cards = [(_holder(card, host_of), card) for card in wires.cards]
    cards = [(host, card) for host, card in cards if host in hosts]
    found: dict[str, list[_Complaint]] = {}

    def add(host: str, card: Card, text: str, sends: bool) -> None:
        found.setdefault(host, []).append(_Complaint(f"{host}/{card.name}", f"{host}/{card.name} {text}", sends))

    for host, card in cards:
        others = [other for name, other in cards if name != host and other.name == card.name]
        if card.link_changes >= 1 and card.link_changes >= 2 * max((o.link_changes for o in others), default=0.0):
            add(host, card, f"lost or found its carrier {card.link_changes:.0f} times: its link goes down", False)
        if card.errors >= 1 and card.errors >= 2 * max((o.errors for o in others), default=0.0):
            add(host, card, f"counted {card.errors:.0f} broken packets", False)
        usual, usually_held = (_usually(others, name) for name in ("queued", "held"))
        thrown = f", and {card.drops:.0f} were thrown away" if card.drops else ""
        if card.queued is not None and card.queued >= max(QUEUED, QUEUED_APART * usual):
            text = f"has packets waiting for it {card.queued:.0%} of the time (other hosts: {usual:.0%})"
            add(host, card, text + thrown, True)
        elif card.held is not None and card.held >= max(HELD, QUEUED_APART * usually_held):
            text = f"held its packets back {card.held:.2g} times each (other hosts: {usually_held:.2g})"
            add(host, card, text + thrown, True)
    return found


def _usually(cards: Sequence[Card], name: str) -> float:
    return median([getattr(card, name) or 0.0 for card in cards]) if cards else 0.0


def _fills(wires: Wires, host_of: Mapping[int, str], host: str, edges: Mapping[tuple[str, str], _Edge]) -> bool:
    """Packets wait before a card of this host for much of the time in which it sends, or are held back there."""
    cards = [card for card in wires.cards if _holder(card, host_of) == host]
    if any((card.held or 0.0) >= HELD for card in cards):
        return True
    return max(card.queued or 0.0 for card in cards) >= FILLS * max(
        (edge.busy for (a, _), edge in edges.items() if a == host), default=0.0
    )


def locate(
    wires: Wires | None, before: Wires | None, host_of: Mapping[int, str], members: Collection[int]
) -> Place | None:
    """Where the transfers among `members` are slow; None where connections do not tell.

    `before`: the same in the healthy window, so that what was always busy is not taken for new.
    """
    if wires is None:
        return None
    edges = _edges(wires, host_of, members)
    if not edges:
        return None
    hosts = sorted({host for pair in edges for host in pair})
    wires = _risen(wires, before, host_of)
    complaints = _complaints(wires, host_of, hosts)
    slow = _slow(edges, _edges(before, host_of, members) if before is not None else {})
    if not slow:
        return None
    ends = sorted({host for pair in slow for host in pair})
    segments, resent = (sum(getattr(edges[pair], name) for pair in slow) for name in ("segments", "resent"))
    lossy = resent >= max(FEW_LOST, LOST * segments)
    evidence = [_told(slow, edges), _transport(wires)]
    loss = f"{resent:.0f} of {segments:.0f} segments ({resent / max(segments, 1):.1%}) were sent again on these ways"
    common = [host for host in ends if all(host in pair for pair in slow)]
    blamed = [
        host for host in ends if any(not c.sends or any(a == host for a, _ in slow) for c in complaints.get(host, ()))
    ]
    flapping = [host for host in complaints if any(not c.sends for c in complaints[host])]
    told = [card for card in wires.cards if card.queued is not None]
    is_alone = len(blamed) == 1 and (
        blamed[0] in common or (len(slow) == len(edges) and _fills(wires, host_of, blamed[0], edges))
    )
    if len(flapping) == 1 or is_alone:
        host = flapping[0] if len(flapping) == 1 else blamed[0]
        evidence += [c.text for c in complaints[host]]
        others = "no other host's card shows any of this"
        return Place(
            "host", (host,), None, "nic_or_host_network", complaints[host][0].card, others, True, tuple(evidence),
            ("fabric_contention: what is slow is the host's own card",), tuple(ends),
        )  # fmt: skip
    queues_of = "packets waiting" if before is None else "packets waiting that had none before"
    clean = f"no card of these hosts has {queues_of}, lost carriers or errors" if told and not blamed else ""
    ruled_out = (f"nic_or_host_network: {clean}",) if clean else ()
    if lossy:
        evidence.append(
            f"{loss}: packets get lost. Drop counters of the hosts that read zero do not exclude it, since switches "
            "drop where no host counts"
        )
    if len(slow) == len(edges) and len(hosts) > 2:
        senders = {a for a, _ in edges}
        queues = [host for host in senders if any(c.sends for c in complaints.get(host, ()))]
        is_held = {_holder(c, host_of) for c in wires.cards if (c.held or 0.0) >= HELD}
        waiting = {_holder(c, host_of) for c in told if (c.queued or 0.0) >= SOME_QUEUED} | is_held
        is_seen = senders <= is_held or max((c.queued or 0.0 for c in told), default=0.0) >= QUEUED
        is_before_all = senders <= waiting and is_seen
        if not lossy and (len(queues) == len(senders) or is_before_all):
            text = (
                "packets wait before the cards of all hosts alike: the transport of each is slower, and no host differs"
            )
            return Place("all", (), None, "nic_or_host_network", "", text, False, tuple(evidence), (), tuple(ends))
        text = "all ways between the hosts are slow alike"
        return Place("group", (), None, "fabric_contention", "", text, lossy, tuple(evidence), ruled_out, tuple(ends))
    if len(common) == 1 and len(slow) > 1 and not told:
        return None  # cards that were not asked do not exonerate a host that all slow ways have in common
    if not common:
        return None  # several ways that share no end: which of them belong together the groups tell better
    if len(common) == 1 and len(slow) > 1:
        others_of = [host for host in ends if host != common[0]]
        link = f"{'+'.join(others_of)}-{common[0]}"
        text = (
            f"all ways between {common[0]} and the others are slow, and its card is not the reason: it is its port of "
            "the switch, or what lies beyond"
        )
    else:
        link = "-".join(ends)
        text = (
            f"the way from {' and '.join(a for a, _ in slow)} to {' and '.join(b for _, b in slow)} is slow, and the "
            "other ways of these hosts are not"
        )
    return Place(
        "link", tuple(ends), link, "fabric_contention", "", text, False, tuple(evidence), ruled_out, tuple(ends)
    )


def _told(slow: Sequence[tuple[str, str]], edges: Mapping[tuple[str, str], _Edge]) -> str:
    shown = ", ".join(f"{a} to {b} {edges[a, b].busy:.0%}" for a, b in slow[:6])
    rest = [edge.busy for pair, edge in edges.items() if pair not in slow]
    other = f"; other ways {min(rest):.0%} to {max(rest):.0%}" if rest else ""
    return f"share of the time in which connections between hosts were busy: {shown}{other}"


def _transport(wires: Wires) -> str:
    rdma = "there are no RDMA ports"
    if wires.rdma_gbps is not None:
        rdma = f"RDMA ports carried {wires.rdma_gbps:.3g} Gbit/s"
    return f"the transport between hosts is TCP sockets ({len(wires.ways)} directions of connections seen); {rdma}"
