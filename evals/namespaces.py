"""Hosts made of namespaces, for the catalogue's jobs: each with its own network, host name and cards.

A script of the suite `netns` calls `launch` where it has no rank yet. That makes a switch per rack and the hosts with a
card `eth0` each, forks `ranks_per_host` ranks for every one of them (with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
so on, as any launcher; one import of torch serves all), and then does to the network what rank 0 asks for (`ask`),
since a rank lives inside of one host. Nothing has a name outside: every namespace is held by a process that dies with
its parent, so the kernel clears up also after `kill -9`. The launcher's own namespace is the room with the switches.

Limits are token buckets (`tc tbf`), on the host's own card ("host") or on the port of the switch that leads to it
("port"). `netem` may be missing from a kernel: loss is made by a bucket with hardly any queue. Needs root and iproute2;
where they are missing `launch` says so in one sentence and exits with status 1. Used by scripts only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_NEWNS, _NEWUTS, _NEWNET = 0x00020000, 0x04000000, 0x40000000
_PR_SET_PDEATHSIG = 1
_LINE = "EVALS_LINE"
_HOSTS = "EVALS_HOSTS"
BURST_BYTES = 65536
"""Passes at full speed: as much as a card hands over at once."""
QUEUE_MS = 50
"""What a switch port holds back, at the limit's rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A token bucket on the way to or from a host."""

    at: str
    """"host": what the host sends, on its own card. "port": what the switch sends to the host. "trunk": between racks,
    both ways. "way": what the switches send from one host to another (`host`, `to`) and from there back, of all such
    pairs with the same `bucket` together."""
    host: str = ""
    to: str = ""
    card: str = "eth0"
    bytes_per_s: float | None = None
    """None: as fast as can be again."""
    burst_bytes: int = BURST_BYTES
    queue_bytes: int | None = None
    """What is held back before it is thrown away; None: `QUEUE_MS` worth."""
    bucket: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """The port of the switch that leads to a host has no link for a while, again and again."""

    host: str
    seconds: float
    every_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stutter:
    """A host's card sends next to nothing for a while, again and again."""

    host: str
    seconds: float
    every_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Wandering:
    """A limit on one host's port of the switch after the other."""

    hosts: Sequence[str]
    """In this order, over and over."""
    bytes_per_s: float
    every_s: float


Change = Limit | Outage | Stutter | Wandering
_CHANGES: Mapping[str, Any] = {kind.__name__: kind for kind in (Limit, Outage, Stutter, Wandering)}


def is_rank() -> bool:
    """Whether this process has a place in the job."""
    return "RANK" in os.environ


def ask(change: Change) -> None:
    """Have the network changed; for rank 0, which does not wait for it."""
    line = json.dumps([type(change).__name__, asdict(change)]) + "\n"
    os.write(int(os.environ[_LINE]), line.encode())


def links(one: Collection[str], other: Collection[str]) -> tuple[str, str]:
    """How a finding may name the ways between two sides."""
    first, second = "+".join(sorted(one)), "+".join(sorted(other))
    return f"{first}-{second}", f"{second}-{first}"


def hosts() -> tuple[str, ...]:
    """Host of each rank, by rank; () where `launch` was not needed."""
    return tuple(os.environ[_HOSTS].split(",")) if _HOSTS in os.environ else ()


def launch(
    racks: Sequence[Sequence[str]],
    ranks_per_host: int = 2,
    *,
    cards: Sequence[str] = ("eth0",),
    environment: Mapping[int, Mapping[str, str]] | None = None,
) -> None:
    """Fork into one process per rank, in hosts of these names: returns in each of them, with its place in the
    environment. The launcher itself, which has imported what all need, exits as the ranks do.

    `cards`: of each host; all beyond the first lead to a switch of their own. `environment`: more of it, by rank.
    """
    reason = why_not()
    if reason:
        print(f"network namespaces cannot be made here: {reason}", file=sys.stderr)
        raise SystemExit(1)
    site = Site(racks, cards)
    names = [host for rack in racks for host in rack]
    world_size = len(names) * ranks_per_host
    reader, writer = os.pipe()
    common = dict(os.environ) | {
        _LINE: str(writer), _HOSTS: ",".join(name for name in names for _ in range(ranks_per_host)),
        "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(ranks_per_host), "MASTER_ADDR": site.address(names[0]),
        "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": cards[0],
    }  # fmt: skip
    ranks: list[int] = []
    for rank in range(world_size):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank % ranks_per_host), "GROUP_RANK": str(rank // ranks_per_host)}
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            os.environ.update(common | place | dict((environment or {}).get(rank, {})))
            enter(site.holder(names[rank // ranks_per_host]))
            return
        ranks.append(pid)
    os.close(writer)
    raise SystemExit(_watch(ranks, site, reader))


def enter(holder: int) -> None:
    """Move this process into the host that another process holds; it does not outlive its parent."""
    folder, libc = os.getcwd(), _libc()
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for kind in ("net", "uts", "mnt"):
        place = os.open(f"/proc/{holder}/ns/{kind}", os.O_RDONLY)
        if libc.setns(place, 0):
            raise OSError(ctypes.get_errno(), f"setns {kind}")
        os.close(place)
    os.chdir(folder)


def own_mounts() -> None:
    """What this process mounts from now on is seen by it and its children alone."""
    if _libc().unshare(_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def why_not() -> str:
    """Why namespaces cannot be made here; "" if they can."""
    if os.geteuid() != 0:
        return f"that needs root, and this is user {os.geteuid()}"
    missing = [tool for tool in ("ip", "tc", "unshare", "mount") if shutil.which(tool) is None]
    if missing:
        return f"{missing[0]} is not installed (apt-get install iproute2 util-linux)"
    if os.fork() == 0:
        os._exit(0 if _libc().unshare(_NEWNET | _NEWUTS | _NEWNS) == 0 else 1)
    if os.waitstatus_to_exitcode(os.wait()[1]):
        return "the kernel refuses new namespaces; a container needs CAP_SYS_ADMIN and CAP_NET_ADMIN for them"
    return ""


def _watch(ranks: Sequence[int], site: Site, reader: int) -> int:
    """Until all ranks have ended, or one has failed; the others are ended then."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    text, living = b"", set(ranks)
    try:
        while living:
            for rank in list(living):
                pid, status = os.waitpid(rank, os.WNOHANG)
                if pid:
                    living.discard(rank)
                    code = os.waitstatus_to_exitcode(status)
                    if code:
                        return code if code > 0 else 128 - code
            if select.select([reader], [], [], site.pause_s(time.monotonic()))[0]:
                text += os.read(reader, 1 << 16)
                *lines, text = text.split(b"\n")
                for line in lines:
                    kind, values = json.loads(line)
                    site.take(_CHANGES[kind](**values), time.monotonic())
            site.go_on(time.monotonic())
        return 0
    finally:
        for rank in living:
            os.kill(rank, signal.SIGTERM)
        until = time.monotonic() + 5
        while living:
            living -= {rank for rank in living if os.waitpid(rank, os.WNOHANG)[0]}
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        for rank in living:
            os.kill(rank, signal.SIGKILL)


class Site:
    """The switches, and a process that holds the namespaces of each host."""

    def __init__(self, racks: Sequence[Sequence[str]], cards: Sequence[str]) -> None:
        libc = _libc()
        if libc.unshare(_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        _run("ip link set lo up")
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._port: dict[tuple[str, str], str] = {}
        self._addresses: dict[str, str] = {}
        self._rack_of = {host: number for number, rack in enumerate(racks) for host in rack}
        self._due: list[tuple[float, Any]] = []
        self._buckets: dict[int, dict[str, float]] = {}
        for number in range(len(racks)):
            for k in range(len(cards)):
                self._bridge(f"rack{number}-{k}")
        for k in range(len(cards)):
            for number in range(1, len(racks)):
                near, far = f"up{number}-{k}", f"down{number}-{k}"
                _run(f"ip link add {near} type veth peer name {far}")
                _run(f"ip link set {near} master rack0-{k} up", f"ip link set {far} master rack{number}-{k} up")
        for number, host in enumerate(self._rack_of):
            holder = self._hold(host)
            self._holders[host] = holder
            for k, card in enumerate(cards):
                port = self._port[host, card] = f"p{number}-{k}"
                _run(f"ip link add {port} type veth peer name {card} netns {holder.pid}")
                _run(f"ip link set {port} master rack{self._rack_of[host]}-{k} up")
                # Of two ranks the one with the lower address is called, and so picks the card for both.
                address = f"10.{77 - k}.0.{number + 1}"
                _inside(holder.pid, f"ip addr add {address}/24 dev {card}", f"ip link set {card} up")
                self._addresses.setdefault(host, address)
            _inside(holder.pid, "ip link set lo up")
            self._use_common_transport(holder.pid)

    @staticmethod
    def _use_common_transport(pid: int) -> None:
        """Congestion control by loss, as most clusters have it; some kernels pace by default, which hides queues."""
        for name in ("cubic", "reno"):
            with contextlib.suppress(OSError):
                _inside(pid, f"sysctl -q -w net.ipv4.tcp_congestion_control={name}")
                return

    @staticmethod
    def _bridge(name: str) -> None:
        # No waiting for loops that cannot be there: packets pass from the first moment on.
        _run(f"ip link add {name} type bridge forward_delay 0 stp_state 0", f"ip link set {name} up")

    @staticmethod
    def _hold(host: str) -> subprocess.Popen[bytes]:
        """A process in namespaces of its own, with its own view of /sys as a container has it."""
        code = f"import socket, sys\nsocket.sethostname({host!r})\nprint('ready', flush=True)\nsys.stdin.read()\n"

        def enter() -> None:
            libc = _libc()
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if libc.unshare(_NEWNET | _NEWUTS | _NEWNS):
                os._exit(1)
            subprocess.run(["mount", "--make-rprivate", "/"], check=True)
            subprocess.run(["mount", "-t", "sysfs", "sysfs", "/sys"], check=True)

        holder = subprocess.Popen(
            [sys.executable, "-I", "-c", code], preexec_fn=enter, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert holder.stdout is not None
        if holder.stdout.readline() != b"ready\n":
            raise OSError(f"host {host} could not be made: its process ended with status {holder.wait()}")
        return holder

    def address(self, host: str) -> str:
        """Of its first card."""
        return self._addresses[host]

    def holder(self, host: str) -> int:
        """The process whose namespaces a host is; see `enter`."""
        return self._holders[host].pid

    def settle(self, number: int = 0, card: int = 0) -> str:
        """Put this process itself behind a switch, in a room of its own; returns the address."""
        address = f"10.{77 - card}.0.250"
        _run(f"ip addr add {address}/24 dev rack{number}-{card}")
        return address

    def plug(self, host: str, card: str, *, is_in: bool) -> None:
        """Put the cable of a card into the switch, or pull it."""
        _run(f"ip link set {self._port[host, card]} {'up' if is_in else 'down'}")

    def take(self, change: Change, now: float) -> None:
        """Begin a change."""
        if isinstance(change, Limit):
            self._limit(change)
        elif isinstance(change, Outage):
            self._due.append((now, ("outage", change, True)))
        elif isinstance(change, Stutter):
            self._due.append((now, ("stutter", change, True)))
        else:
            self._due.append((now, ("wandering", change, 0)))

    def pause_s(self, now: float) -> float:
        """Until something is to be done, a moment at most."""
        return max(min([0.2, *(at - now for at, _ in self._due)]), 0.0)

    def go_on(self, now: float) -> None:
        """Do what is due."""
        for item in [item for item in self._due if item[0] <= now]:
            self._due.remove(item)
            at, (kind, change, state) = item
            if kind == "wandering":
                before, here = change.hosts[state - 1], change.hosts[state % len(change.hosts)]
                if state:
                    self._limit(Limit(at="port", host=before))
                self._limit(Limit(at="port", host=here, bytes_per_s=change.bytes_per_s))
                self._due.append((at + change.every_s, (kind, change, state % len(change.hosts) + 1)))
                continue
            if kind == "outage":
                self.plug(change.host, "eth0", is_in=not state)
            else:
                self._limit(Limit(at="host", host=change.host, bytes_per_s=change.bytes_per_s if state else None))
            self._due.append(
                (at + (change.seconds if state else change.every_s - change.seconds), (kind, change, not state))
            )

    def _limit(self, limit: Limit) -> None:
        if limit.at == "way":
            self._limit_way(limit)
        elif limit.at == "trunk":
            for device in self._trunks(limit.card):
                _run(_bucket(device, limit))
        elif limit.at == "port":
            _run(_bucket(self._port[limit.host, limit.card], limit))
        else:
            _inside(self._holders[limit.host].pid, _bucket(limit.card, limit))

    def _trunks(self, card: str) -> list[str]:
        k = 0 if card == "eth0" else 1
        return [f"{end}{n}-{k}" for n in range(1, max(self._rack_of.values()) + 1) for end in ("up", "down")]

    def _limit_way(self, limit: Limit) -> None:
        """One class of a hierarchy on both ends of the trunk; the ways that share it are filtered into it."""
        assert limit.bytes_per_s is not None
        here, there = self._addresses[limit.host], self._addresses[limit.to]
        for device in self._trunks("eth0"):
            if not self._buckets:
                _run(f"tc qdisc replace dev {device} root handle 1: htb default 999")
                _run(f"tc class replace dev {device} parent 1: classid 1:999 htb rate 40gbit")
        for device in self._trunks("eth0"):
            rate = round(limit.bytes_per_s * 8)
            name = f"1:{limit.bucket + 1}"
            if limit.bucket not in self._buckets:
                _run(
                    f"tc class replace dev {device} parent 1: classid {name} htb rate {rate}bit ceil {rate}bit "
                    f"burst {limit.burst_bytes} cburst {limit.burst_bytes}"
                )
            for source, target in ((here, there), (there, here)):
                _run(
                    f"tc filter add dev {device} parent 1: protocol ip u32 match ip src {source}/32 "
                    f"match ip dst {target}/32 flowid {name}"
                )
        self._buckets.setdefault(limit.bucket, {})


def _bucket(device: str, limit: Limit) -> str:
    """The command that limits a device."""
    if limit.bytes_per_s is None:
        return f"tc qdisc del dev {device} root"
    rate = round(limit.bytes_per_s * 8)
    queue = f"limit {limit.queue_bytes}" if limit.queue_bytes is not None else f"latency {QUEUE_MS}ms"
    return f"tc qdisc replace dev {device} root tbf rate {rate}bit burst {limit.burst_bytes} {queue}"


def _inside(pid: int, *commands: str) -> None:
    for command in commands:
        _run(f"nsenter --net=/proc/{pid}/ns/net {command}")


def _run(*commands: str) -> None:
    for command in commands:
        done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{command}: {done.stderr.strip()}")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
