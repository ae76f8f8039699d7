"""Whatever lies in a file that a job wrote: each reader gives what is sound, or refuses it in its own words, in bounded
memory. Summaries have their own such tests in `test_codec`, frames and messages in `test_bus`."""

from __future__ import annotations

import gzip
import json
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import given
from hypothesis import strategies as st

from eroica.errors import DataError
from eroica.ring import Ring, Tail, read_flight
from eroica.torchflight import parse_flight_recorder, read_flight_recorder
from eroica.trace import Trace, read_trace
from tests.traces import document, event, kernel

T = TypeVar("T")
MOST_BYTES = 64 << 20
"""For inputs of some kilobytes: buffers of readers are megabytes, whatever they read."""
ATOMS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = st.recursive(
    ATOMS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
RECORDED = {
    "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
    "entries": [
        {
            "record_id": 3,
            "pg_id": 0,
            "process_group": ["0", "default_pg"],
            "collective_seq_id": 3,
            "p2p_seq_id": 0,
            "op_id": 3,
            "profiling_name": "gloo:all_reduce",
            "input_sizes": [[4, 8]],
            "input_dtypes": ["Float"],
            "state": "scheduled",
            "retired": False,
            "time_created_ns": 1,
        }
    ],
}
EVENTS = [event("ProfilerStep#3", 1000, 900), event("aten::mm", 1010, 50), kernel("gemm", 1020, 30, stream=7)]
SOUND = document(EVENTS, head={"distributedInfo": {"rank": 0, "world_size": 2}}).encode()


@st.composite
def damaged(draw: st.DrawFn, sound: bytes) -> bytes:
    """`sound` with some of it overwritten, taken out, doubled or cut off; or no trace of it."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=600))
    data = bytearray(sound)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        end = min(at + draw(st.integers(0, 40)), len(data))
        piece = bytes(data[at:end])
        data[at:end] = draw(st.sampled_from([b"", 2 * piece]) | st.binary(max_size=12))
    return bytes(data[: draw(st.integers(0, len(data)))]) if draw(st.booleans()) else bytes(data)


def read(reader: Callable[[Path], T], name: str, data: bytes) -> T | None:
    """What `reader` makes of a file, or None if it refuses it as it should."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        tracemalloc.start()
        try:
            return reader(path)
        except DataError as error:
            assert "\n" not in str(error)
            return None
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < MOST_BYTES


def check_trace(trace: Trace | None) -> None:
    if trace is not None:
        assert (trace.dur_ns >= 0).all() and (trace.name < len(trace.strings)).all()


@given(damaged(SOUND))
def test_a_trace_is_read_or_refused(data: bytes) -> None:
    check_trace(read(read_trace, "rank0.json", data))


@given(damaged(gzip.compress(SOUND)))
def test_a_compressed_trace_is_read_or_refused(data: bytes) -> None:
    check_trace(read(read_trace, "rank0.json.gz", data))


@given(JSON, JSON)
def test_json_of_any_kind_is_a_trace_or_refused(top: Any, item: Any) -> None:
    for made in (top, {"traceEvents": top}, {"traceEvents": [item, top]}, {"traceEvents": [{"ph": "X", "args": item}]}):
        check_trace(read(read_trace, "rank0.json", json.dumps(made).encode()))


def ring_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        ring = Ring.create(Path(folder) / "a.ring", rank=0, world_size=2, capacity=8)
        ring.note(host="a")
        try:
            return ring.path.read_bytes()
        finally:
            ring.close()


RING = ring_file()


@given(damaged(RING))
def test_a_ring_is_read_or_refused_by_those_who_look_once_and_those_who_follow_it(data: bytes) -> None:
    def follow(path: Path) -> None:
        tail = Tail(path)
        try:
            tail.poll()
            tail.poll_words()
        finally:
            tail.close()

    read(read_flight, "rank0-1.ring", data)
    read(follow, "rank0-1.ring", data)


@given(damaged(json.dumps(RECORDED).encode()))
def test_a_dump_of_a_flight_recorder_is_read_as_far_as_it_makes_sense(data: bytes) -> None:
    told = read(read_flight_recorder, "dump.json", data)
    assert told is not None, "it refuses nothing"


@given(JSON, JSON, JSON)
def test_values_of_any_kind_in_a_dump_cost_their_entry_alone(config: Any, entry: Any, value: Any) -> None:
    parse_flight_recorder({"pg_config": config, "entries": entry})
    parse_flight_recorder({"pg_config": {"0": {"name": value, "desc": value, "ranks": value}}, "entries": [entry]})
    sound = RECORDED["entries"]
    assert isinstance(sound, list)
    for name in sound[0]:
        groups, calls = parse_flight_recorder(RECORDED | {"entries": [sound[0] | {name: value}, *sound]})
        assert calls[-1].op == "allreduce" and groups
        for call in calls:
            assert 0 <= call.sequence <= 1 << 62 and 0 <= call.num_bytes <= 1 << 62


def test_ranks_nested_without_end_cost_the_dump_their_group_alone() -> None:
    config = {"0": {"name": "0", "desc": "deep", "ranks": "[" * 100_000}}
    groups, calls = parse_flight_recorder(RECORDED | {"pg_config": config})
    assert [group.members for group in groups] == [()] and len(calls) == 1
