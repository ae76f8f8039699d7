"""Connections and queues as the kernel tells of them."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eroica.samplers import Missing, Rank
from eroica.samplers.evidence import counters
from eroica.samplers.links import Links, Queue, messages, open_sampler, parse_link, parse_queue, parse_way
from eroica.samplers.recorder import Recorder


def attribute(kind: int, value: bytes) -> bytes:
    size = 4 + len(value)
    return struct.pack("=HH", size, kind) + value + bytes(-size % 4)


def opened() -> Links:
    sampler = open_sampler(Path("/"))
    if isinstance(sampler, Missing):
        pytest.skip(sampler.reason)
    return sampler


def test_a_connection_is_told_with_its_ends_and_what_it_carried() -> None:
    body = bytearray(72)
    body[0] = socket.AF_INET
    struct.pack_into("!HH", body, 4, 4000, 5000)
    body[8:12], body[24:28] = socket.inet_aton("10.0.0.1"), socket.inet_aton("10.0.0.2")
    struct.pack_into("=I", body, 68, 77)
    info = bytearray(232)
    struct.pack_into("=I", info, 68, 250)
    struct.pack_into("=I", info, 100, 3)
    struct.pack_into("=QQ", info, 120, 1_000_000, 64)
    struct.pack_into("=I", info, 156, 700)
    struct.pack_into("=Q", info, 168, 12_000)
    way = parse_way(bytes(body) + attribute(2, bytes(info)))
    assert way is not None and (way.inode, way.here, way.there) == (77, "10.0.0.1:4000", "10.0.0.2:5000")
    assert way.values == {
        "way_acked_bytes": 1e6, "way_got_bytes": 64.0, "way_busy_us": 12_000.0, "way_segments": 700.0,
        "way_resent": 3.0, "way_rtt_us": 250.0,
    }  # fmt: skip


def test_both_ends_name_an_address_the_same_whatever_the_family_of_their_socket() -> None:
    body = bytearray(72)
    body[0] = socket.AF_INET6
    body[8:24] = socket.inet_pton(socket.AF_INET6, "::ffff:10.0.0.1")
    body[24:40] = socket.inet_pton(socket.AF_INET6, "fd00::2")
    way = parse_way(bytes(body) + attribute(2, bytes(232)))
    assert way is not None and (way.here, way.there) == ("10.0.0.1:0", "fd00::2:0")


def test_what_waits_before_a_card_and_how_often_its_carrier_changed_is_told() -> None:
    queue = attribute(1, struct.pack("=QI", 90_000, 60)) + attribute(3, struct.pack("=IIIII", 2, 3000, 9, 5, 80))
    body = struct.pack("=BBHiIII", 0, 0, 0, 4, 0, 0, 0) + attribute(1, b"tbf\0") + attribute(7, queue)
    assert parse_queue(body) == (4, Queue(3000, drops=9, held=85, packets=60))
    link = struct.pack("=BBHiII", 0, 0, 0, 4, 0, 0) + attribute(3, b"eth0\0") + attribute(35, struct.pack("=I", 6))
    assert parse_link(link) == (4, "eth0", 6.0)


@pytest.mark.parametrize("data", [b"", b"\x00" * 7, b"\xff" * 40, struct.pack("=IHHII", 4, 0, 0, 0, 0)])
def test_what_is_no_answer_is_left_out(data: bytes) -> None:
    assert list(messages(data)) == []
    assert parse_way(data) is None and parse_link(data) is None and parse_queue(data) is None


def test_the_connections_of_a_rank_are_found_and_only_those() -> None:
    sampler = opened()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            near.sendall(b"x" * 1000)
            far.recv(1000)
            reading = sampler.read(2 * 10**9, [Rank(3, os.getpid())])
            ends = {labels["here"]: target for target, labels in reading.labels.items() if target.kind == "way"}
            host, port = near.getsockname()
            target = ends[f"{host}:{port}"]
            assert target.rank == 3 and reading.values[target]["way_acked_bytes"] >= 1000
            with subprocess.Popen(
                [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
            ) as stranger:
                others = sampler.read(4 * 10**9, [Rank(3, stranger.pid)])
    assert f"{host}:{port}" not in {labels["here"] for labels in others.labels.values()}


def test_idle_connections_do_not_travel() -> None:
    recorder = Recorder({"links": opened()}, fast_s=1e-6, slow_s=1e-6)
    begin = time.time_ns()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            recorder.tick([Rank(0, os.getpid())])
            recorder.tick([Rank(0, os.getpid())])
            port = near.getsockname()[1]
            told = counters(recorder, begin, time.time_ns())
    assert not any(f":{port}" in one["name"] for one in told if one["kind"] == "way")


def test_a_recorded_tree_has_no_connections(tmp_path: Path) -> None:
    assert isinstance(open_sampler(tmp_path), Missing)


def test_where_the_kernel_gives_no_socket_that_is_said_and_nothing_else() -> None:
    code = """
import os, resource
from pathlib import Path
from eroica.samplers import links
links.open_sampler(Path("/nowhere"))
free = os.dup(0)
os.close(free)
for spare in (0, 1):
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + spare, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    print(links.open_sampler(Path("/")).reason)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("Too many open files") == 2 and not done.stderr
