"""The gate of pacing: who is held, for how long at most, and that it ends by itself. Clock and sleep are the test's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eroica import ring as flight
from eroica.fabric.pacing import HARD_CAP_S, LONGEST_TTL_S
from eroica.holds import MOST_DELAY_NS, MOST_TTL_NS, Holds, pack, parse
from eroica.probe.gate import Gate
from eroica.ring import HOLDS, PACED, Ring, post_holds, read_flight

MS = 1_000_000
SECOND = 1000 * MS


@dataclass
class Rank:
    """A gate at a ring, in a time that passes only while it sleeps."""

    ring: Ring
    now_ns: int = 1000 * SECOND
    is_free: bool = True
    slept_ns: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate = Gate(lambda: self.is_free, lambda: self.now_ns, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.slept_ns.append(round(seconds * 1e9))
        self.now_ns += round(seconds * 1e9)

    def order(self, delays: dict[int, int], ttl_ns: int = 10 * SECOND, moments: dict[int, int] | None = None) -> None:
        holds = Holds(self.now_ns, self.now_ns + ttl_ns, delays, moments or {})
        post_holds(self.ring.path, pack(holds) if delays else b"")

    def enter(self, group: int, step: int, cap_ns: int = MOST_DELAY_NS, since_ns: int | None = None) -> int:
        """For how long a collective is held, as the kernel would have it."""
        before = len(self.slept_ns)
        if self.ring.words[HOLDS]:
            self.gate.hold(self.ring, group, step, cap_ns, 0 if since_ns is None else self.now_ns - since_ns)
        return sum(self.slept_ns[before:])


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    ring = Ring.create(tmp_path / "rank0.ring", rank=0, world_size=2, capacity=64)
    yield Rank(ring)
    ring.close()


def test_the_first_collective_of_each_step_is_held_and_no_other(rank: Rank) -> None:
    assert rank.enter(7, 4) == 0
    rank.order({7: 20 * MS})
    assert rank.enter(7, 4) == 0, "earlier collectives of this step may have passed"
    assert [rank.enter(7, 5), rank.enter(7, 5), rank.enter(8, 5), rank.enter(7, 6)] == [20 * MS, 0, 0, 20 * MS]


def test_nobody_is_held_beyond_the_moment_of_its_own_step_nor_who_cannot_tell_it(rank: Rank) -> None:
    rank.order({7: 20 * MS, 8: 20 * MS}, moments={7: 100 * MS})
    rank.enter(7, 0)
    cases = ((50 * MS, 20 * MS), (90 * MS, 10 * MS), (100 * MS, 0), (150 * MS, 0), (None, 0))
    for step, (since_ns, held_ns) in enumerate(cases, start=1):
        assert rank.enter(7, step, since_ns=since_ns) == held_ns
        assert rank.enter(8, step, since_ns=since_ns) == 20 * MS, "of this group no moment is known"


def test_every_hold_is_a_record_of_the_ring_and_counts(rank: Rank) -> None:
    rank.order({7: 20 * MS, 8: 5 * MS})
    for step in range(3):
        rank.enter(7, step), rank.enter(8, step)
    seen = read_flight(rank.ring.path)
    held = [(record.group, record.step, record.duration_ns) for record in seen.records if record.kind == PACED]
    assert held == [(7, 1, 20 * MS), (8, 1, 5 * MS), (7, 2, 20 * MS), (8, 2, 5 * MS)]
    assert seen.words[flight.PACED_NS] == 50 * MS


def test_an_order_that_nobody_renews_ends_by_the_ranks_own_clock_and_the_ring_is_clean(rank: Rank) -> None:
    rank.order({7: 20 * MS}, ttl_ns=SECOND)
    rank.enter(7, 0)
    assert rank.enter(7, 1) == 20 * MS
    rank.now_ns += SECOND
    assert rank.enter(7, 2) == 0 and rank.ring.words[HOLDS] == 0
    rank.order({7: 20 * MS})
    assert [rank.enter(7, 3), rank.enter(7, 4)] == [0, 20 * MS], "another order is another one"


def test_a_hold_that_has_begun_ends_with_the_order(rank: Rank) -> None:
    rank.order({7: 100 * MS}, ttl_ns=SECOND)
    rank.enter(7, 0)
    rank.now_ns += SECOND - 30 * MS
    assert rank.enter(7, 1) == 30 * MS


def test_a_renewed_order_holds_in_the_step_in_which_it_comes(rank: Rank) -> None:
    rank.order({7: 20 * MS})
    rank.enter(7, 0)
    rank.now_ns += SECOND
    rank.order({7: 30 * MS})
    assert rank.enter(7, 1) == 30 * MS
    rank.order({})
    assert rank.enter(7, 2) == 0


def test_nobody_is_held_while_something_is_captured_or_an_exception_is_on_its_way(rank: Rank) -> None:
    rank.order({7: 20 * MS})
    rank.enter(7, 0)
    rank.is_free = False
    assert rank.enter(7, 1) == 0
    rank.is_free = True
    try:
        raise RuntimeError("the shard is gone")
    except RuntimeError:
        assert rank.enter(7, 2) == 0
    assert rank.enter(7, 3) == 20 * MS


@given(
    st.dictionaries(st.integers(1, 4), st.integers(0, MOST_DELAY_NS), max_size=4),
    st.integers(-SECOND, 1000 * SECOND),
    st.integers(0, 2 * MOST_DELAY_NS),
)
def test_whatever_lies_in_the_ring_no_step_is_held_beyond_the_cap(
    tmp_path_factory: pytest.TempPathFactory, delays: dict[int, int], ttl_ns: int, cap_ns: int
) -> None:
    ring = Ring.create(tmp_path_factory.mktemp("rings") / "r.ring", rank=0, world_size=2, capacity=64)
    rank = Rank(ring)
    try:
        rank.order(delays, ttl_ns)
        rank.enter(1, 0)
        held = [rank.enter(group, 1, cap_ns) for group in (1, 2, 3, 4)]
        assert all(one <= min(cap_ns, MOST_DELAY_NS) for one in held) and sum(held) <= MOST_DELAY_NS
        if not 0 < ttl_ns <= MOST_TTL_NS:
            assert sum(held) == 0
    finally:
        ring.close()


@given(st.binary(max_size=flight.HOLDS_BYTES))
def test_bytes_that_are_no_order_hold_nobody(data: bytes) -> None:
    assert parse(data) is None


@given(st.integers(0, 71), st.integers(0, 7))
def test_a_half_written_order_is_none(byte: int, bit: int) -> None:
    order = Holds(77, 5 * SECOND, {7: 20 * MS, 1 << 63: 3}, {7: 9 * MS})
    whole = bytearray(pack(order))
    assert parse(bytes(whole)) == order
    whole[byte] ^= 1 << bit
    assert parse(bytes(whole)) is None


def test_the_probe_and_the_policy_have_the_same_bounds() -> None:
    assert MOST_DELAY_NS == HARD_CAP_S * 1e9 and MOST_TTL_NS == LONGEST_TTL_S * 1e9


REAL = """
import os, sys, threading, time
from pathlib import Path
import torch, torch.distributed as dist
from eroica.holds import Holds, pack
from eroica.probe import collectives
from eroica.probe.recorder import RECORDER
from eroica.ring import PACED, PACED_NS, post_holds, read_flight

dist.init_process_group("gloo")
ones = torch.ones(4)
dist.all_reduce(ones)
ring = RECORDER.ring
(group,) = collectives._groups.values()
assert group.most_held_ns == 200_000_000, group.most_held_ns
def order(ms):
    now = time.monotonic_ns()
    post_holds(ring.path, pack(Holds(now, now + 100_000_000_000, {group.key: ms * 1_000_000})))
def step():
    RECORDER.num_steps += 1
    dist.all_reduce(ones)
order(100)
dist.all_reduce(ones)
ticks, stop = 0, False
def tick():
    global ticks
    while not stop:
        ticks += 1
        time.sleep(0.005)
thread = threading.Thread(target=tick)
thread.start()
step()
stop = True
thread.join()
print("ticks", ticks)
dist.all_reduce(ones)
with torch.profiler.profile():
    step()
torch.compile(lambda x: x + 1, backend="eager")(ones)
step()
held = [r.duration_ns for r in read_flight(ring.path).records if r.kind == PACED]
print("held", len(held), min(held) >= 100_000_000, ring.get(PACED_NS) == sum(held), RECORDER.is_off)
small = dist.new_group([0], timeout=__import__("datetime").timedelta(seconds=4))
dist.all_reduce(ones, group=small)
print("cap", collectives._by_address[id(small)].most_held_ns)
order(100)
RECORDER.num_steps += 1
before = ring.get(PACED_NS)
dist.monitored_barrier()
at_barrier = ring.get(PACED_NS) - before
dist.all_reduce(ones)
print("monitored", at_barrier, ring.get(PACED_NS) - before >= 100_000_000)
dist.destroy_process_group()
"""


@pytest.mark.full
def test_in_a_real_process_a_hold_leaves_the_interpreter_free_and_a_profiler_sees_none(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name[:6] != "EROICA"} | {
        **{"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
        **{"EROICA_RING_DIR": str(tmp_path / "rings"), "PYTHONPATH": str(Path(__file__).parent.parent)},
    }
    done = subprocess.run(
        [sys.executable, "-c", "import eroica\n" + REAL], env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    assert int(said["ticks"]) > 2, "other threads go on meanwhile"
    assert said["held"] == "2 True True False" and said["cap"] == "40000000"
    assert said["monitored"] == "0 True", "a monitored barrier is not held, and leaves the hold to the next collective"
