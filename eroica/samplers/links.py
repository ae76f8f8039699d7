"""What the kernel knows of a rank's network: its TCP connections one by one, and the queues of the cards they leave by.

In a ring of collectives every rank sends as much as the others and all end together, so neither durations nor bytes
say which way is slow. The connections do: the one over the slow way has data under way all the time (`way_busy`), the
others only for as long as theirs takes. A queue before the host's own card says that the card is what is slow; without
one, the limit lies farther on. Read by netlink (sock_diag, rtnetlink): no files of the ranks' are touched and nothing
is installed. For ranks in network namespaces of their own the question is asked from inside of them, which needs
CAP_SYS_ADMIN; without it they are left out. Blind to RDMA, which has counters of its own (`rdma`).

Formats: linux/inet_diag.h, linux/tcp.h, linux/rtnetlink.h, linux/gen_stats.h. Used through `eroica.samplers`.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from eroica.samplers import Metric, Missing, Rank, Reading, Target

METRICS: Mapping[str, Metric] = {
    # way: one direction of a connection
    "way_acked_bytes": Metric("MB/s", True, "way_mbps", 1e6),
    "way_got_bytes": Metric("MB/s", True, "way_got_mbps", 1e6),
    "way_busy_us": Metric("s/s", True, "way_busy", 1e6),
    "way_segments": Metric("", True),
    "way_resent": Metric("", True),
    "way_rtt_us": Metric("us"),
    # nic
    "queued": Metric("", over="mean"),
    "queue_drops": Metric("", True),
    "queue_held": Metric("", True),
    "queue_packets": Metric("", True),
    "link_changes": Metric("", True),
}
"""`way_busy`: share of the time in which something was sent and not yet acknowledged. `queued`: share of the looks at
which packets waited for the card; `queue_held`: times that its queue was not to send yet, or could not, which no look
misses; of so many `queue_packets`. `link_changes`: times the carrier came or went."""

SOCKETS_NS = 1_000_000_000
"""Which connections are whose is looked up once in so long, or when there are new ones."""
MOST_WAYS = 24
"""Connections per rank that are told: those that carried most. A ring has two per group."""
MOST_FILES = 4096

_SOCK_DIAG, _ROUTE = 4, 0
_BY_FAMILY, _GET_LINK, _GET_QDISC = 20, 18, 38
_DONE, _ERROR = 3, 2
_DUMP = 0x301
"""NLM_F_REQUEST | NLM_F_ROOT | NLM_F_MATCH"""
_ESTABLISHED = 1 << 1
_INFO = 2
_NEWNET = 0x40000000
_INODE = re.compile(r"socket:\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Way:
    """What one connection has sent so far."""

    inode: int
    here: str
    """"address:port"."""
    there: str
    values: Mapping[str, float]


class Queue(NamedTuple):
    """What waits before a card, and what its queue has counted since it was set up; of several queues the sums."""

    waiting: int = 0
    """Bytes or packets."""
    drops: int = 0
    held: int = 0
    packets: int = 0


@dataclass(frozen=True, slots=True)
class Card:
    """One network card."""

    name: str
    queue: Queue | None
    """None = not told."""
    link_changes: float | None


def _attributes(data: bytes, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    while start + 4 <= end:
        size, kind = struct.unpack_from("=HH", data, start)
        if size < 4 or start + size > end:
            return
        yield kind & 0x3FFF, data[start + 4 : start + size]
        start += (size + 3) & ~3


def messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Type and body of each netlink message of a datagram."""
    start = 0
    while start + 16 <= len(data):
        size, kind = struct.unpack_from("=IH", data, start)
        if size < 16 or start + size > len(data):
            return
        yield kind, data[start + 16 : start + size]
        start += (size + 3) & ~3


def parse_way(body: bytes) -> Way | None:
    """An inet_diag_msg with its tcp_info; None where the kernel told less."""
    if len(body) < 72:
        return None
    family = body[0]
    sport, dport = struct.unpack_from("!HH", body, 4)
    size = 4 if family == socket.AF_INET else 16
    if family not in (socket.AF_INET, socket.AF_INET6):
        return None
    source, target = (socket.inet_ntop(family, body[at : at + size]) for at in (8, 24))
    (inode,) = struct.unpack_from("=I", body, 68)
    for kind, info in _attributes(body, 72, len(body)):
        if kind == _INFO and len(info) >= 176:
            (rtt,) = struct.unpack_from("=I", info, 68)
            (resent,) = struct.unpack_from("=I", info, 100)
            acked, got = struct.unpack_from("=QQ", info, 120)
            (segments,) = struct.unpack_from("=I", info, 156)
            (busy,) = struct.unpack_from("=Q", info, 168)
            values = {
                "way_acked_bytes": acked, "way_got_bytes": got, "way_busy_us": busy, "way_segments": segments,
                "way_resent": resent, "way_rtt_us": rtt,
            }  # fmt: skip
            here, there = f"{_plain(source)}:{sport}", f"{_plain(target)}:{dport}"
            return Way(inode, here, there, {name: float(value) for name, value in values.items()})
    return None


def _plain(address: str) -> str:
    """IPv4 in IPv6 as IPv4: the two ends of a connection may name it differently."""
    return address.removeprefix("::ffff:")


def parse_link(body: bytes) -> tuple[int, str, float | None] | None:
    """Index, name and carrier changes of an interface."""
    if len(body) < 16:
        return None
    (index,) = struct.unpack_from("=i", body, 4)
    name, changes = "", None
    for kind, value in _attributes(body, 16, len(body)):
        if kind == 3:
            name = value.rstrip(b"\0").decode("utf-8", "replace")
        elif kind == 35 and len(value) == 4:
            changes = float(struct.unpack("=I", value)[0])
    return (index, name, changes) if name else None


def parse_queue(body: bytes) -> tuple[int, Queue] | None:
    """Interface and state of one queueing discipline."""
    if len(body) < 20:
        return None
    (index,) = struct.unpack_from("=i", body, 4)
    for kind, value in _attributes(body, 20, len(body)):
        if kind != 7:
            continue
        parts = dict(_attributes(value, 0, len(value)))
        numbers, sent = parts.get(3, b""), parts.get(1, b"")
        if len(numbers) >= 20:
            length, backlog, drops, requeues, overlimits = struct.unpack_from("=5I", numbers, 0)
            packets = struct.unpack_from("=QI", sent, 0)[1] if len(sent) >= 12 else 0
            return index, Queue(max(length, backlog), drops, requeues + overlimits, packets)
    return None


class _Room:
    """Netlink sockets in one network namespace."""

    def __init__(self) -> None:
        self._open: list[socket.socket] = []
        for protocol in (_SOCK_DIAG, _ROUTE):  # either may be refused
            self._open.append(_netlink(protocol))
        self._diag, self._route = self._open

    def close(self) -> None:
        for one in self._open:
            one.close()

    def __del__(self) -> None:
        # Samplers have no end of their own: they go with who reads them.
        self.close()

    def ways(self) -> list[Way]:
        """All established TCP connections."""
        found = []
        for family in (socket.AF_INET, socket.AF_INET6):
            request = struct.pack("=BBBBI48x", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _ESTABLISHED)
            for body in _dump(self._diag, _BY_FAMILY, request):
                way = parse_way(body)
                if way is not None:
                    found.append(way)
        return found

    def cards(self) -> list[Card]:
        """All interfaces but the loopback."""
        links = [link for body in _dump(self._route, _GET_LINK, bytes(16)) if (link := parse_link(body)) is not None]
        queues: dict[int, Queue] = {}
        for body in _dump(self._route, _GET_QDISC, bytes(20)):
            told = parse_queue(body)
            if told is not None:
                index, queue = told
                queues[index] = Queue(*map(sum, zip(queues.get(index, Queue()), queue, strict=True)))
        return [Card(name, queues.get(index), changes) for index, name, changes in links if name != "lo"]


def _netlink(protocol: int) -> socket.socket:
    opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
    # The kernel answers at once or not at all.
    opened.settimeout(0.5)
    opened.bind((0, 0))
    return opened


def _dump(asked: socket.socket, kind: int, body: bytes) -> list[bytes]:
    """All answers to a request; raises OSError where the kernel refuses."""
    asked.send(struct.pack("=IHHII", 16 + len(body), kind, _DUMP, 1, 0) + body)
    found: list[bytes] = []
    while True:
        for answer, content in messages(asked.recv(1 << 17)):
            if answer == _DONE:
                return found
            if answer == _ERROR:
                raise OSError(-struct.unpack_from("=i", content)[0], "netlink")
            found.append(content)


def _enter(place: str) -> _Room | None:
    """Sockets in another network namespace; None where we may not."""
    made: list[_Room] = []

    def work() -> None:
        # The namespace is this thread's alone, which ends here; its sockets stay where they were made.
        try:
            handle = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            if ctypes.CDLL(None, use_errno=True).setns(handle, _NEWNET) == 0:
                made.append(_Room())
        except OSError:
            return
        finally:
            os.close(handle)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join()
    return made[0] if made else None


@dataclass
class _Sockets:
    """Whose connections are whose, of one namespace."""

    room: _Room | None
    owners: dict[int, Rank] = field(default_factory=dict)
    pids: frozenset[int] = frozenset()
    """Whose files were looked at."""
    looked_ns: int = -SOCKETS_NS


class Links:
    """Asks the kernel, in each network namespace that a rank lives in."""

    def __init__(self, own: _Room) -> None:
        self._own_name = _link("/proc/self/ns/net")
        self._rooms: dict[str, _Sockets] = {self._own_name: _Sockets(own)}

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """See `METRICS`."""
        return METRICS

    def read(self, now_ns: int, ranks: Sequence[Rank]) -> Reading:
        """Connections of ranks, and cards of their namespaces."""
        values: dict[Target, dict[str, float]] = {}
        labels: dict[Target, dict[str, str]] = {}
        living: dict[str, list[Rank]] = {}
        for rank in ranks:
            name = _link(f"/proc/{rank.pid}/ns/net")
            if name:
                living.setdefault(name, []).append(rank)
        for name in [name for name in self._rooms if name not in living and name != self._own_name]:
            room = self._rooms.pop(name).room
            if room is not None:
                room.close()
        for name, inside in living.items():
            if name not in self._rooms:
                self._rooms[name] = _Sockets(_enter(f"/proc/{inside[0].pid}/ns/net"))
            sockets = self._rooms[name]
            if sockets.room is None:
                continue
            for way, rank in self._owned(sockets, now_ns, inside):
                target = Target("way", f"{rank.rank}/{way.here}>{way.there}", rank.rank, rank.pid)
                values[target] = dict(way.values)
                labels[target] = {"here": way.here, "there": way.there}
            only = inside[0].rank if name != self._own_name else None
            for card in sockets.room.cards():
                target = Target("nic", card.name if only is None else f"{only}/{card.name}", only)
                found: dict[str, float] = {}
                if card.queue is not None:
                    found = {
                        "queued": float(card.queue.waiting > 0),
                        "queue_drops": float(card.queue.drops),
                        "queue_held": float(card.queue.held),
                        "queue_packets": float(card.queue.packets),
                    }
                if card.link_changes is not None:
                    found["link_changes"] = card.link_changes
                values[target] = found
        return Reading(values, labels)

    @staticmethod
    def _owned(sockets: _Sockets, now_ns: int, inside: Sequence[Rank]) -> Iterator[tuple[Way, Rank]]:
        assert sockets.room is not None
        ways = sockets.room.ways()
        pids = frozenset(rank.pid for rank in inside)
        is_due = now_ns - sockets.looked_ns >= SOCKETS_NS and any(way.inode not in sockets.owners for way in ways)
        if is_due or pids != sockets.pids:
            sockets.looked_ns, sockets.pids = now_ns, pids
            sockets.owners = {inode: rank for rank in inside for inode in _sockets_of(rank.pid)}
        by_rank: dict[int, list[tuple[Way, Rank]]] = {}
        for way in ways:
            owner = sockets.owners.get(way.inode)
            if owner is not None:
                by_rank.setdefault(owner.rank, []).append((way, owner))
        for every in by_rank.values():
            every.sort(key=lambda pair: -pair[0].values["way_acked_bytes"] - pair[0].values["way_got_bytes"])
            yield from every[:MOST_WAYS]


def _sockets_of(pid: int) -> list[int]:
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)[:MOST_FILES]
    except OSError:
        return []
    found = [_INODE.fullmatch(_link(f"{folder}/{name}")) for name in names]
    return [int(match[1]) for match in found if match is not None]


def _link(path: str) -> str:
    """Where a symbolic link leads, "" if that cannot be seen."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def open_sampler(root: Path) -> Links | Missing:
    """A sampler of this host's connections."""
    if root != Path("/"):
        return Missing("links", f"{root} is a recorded tree, and connections are asked of the kernel")
    try:
        room = _Room()
        room.ways()
    except OSError as error:
        return Missing("links", f"the kernel does not tell of TCP connections ({error}); it needs CONFIG_INET_TCP_DIAG")
    return Links(room)
