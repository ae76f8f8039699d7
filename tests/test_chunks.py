"""Chunks of sound records are taken at once; whatever msgspec and strict JSON read unlike is refused untouched."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eroica import chunks, kineto
from eroica.chunks import Chunks
from eroica.records import DECODER, Rows
from tests.test_kineto_engines import assert_same
from tests.traces import LAYOUTS, TRACES, document, event, kernel, record, write


def _array(*records: str) -> bytes:
    return f"[{','.join(records)}]".encode()


def _one_by_one(text: bytes) -> Rows:
    rows = Rows()
    for item in DECODER.decode(text.decode()):
        rows.add(item, 0)
    return rows


def _told(rows: Rows) -> dict[str, Any]:
    told = {name: column.tobytes() for name, column in rows.values.items()}
    strings, tracks = list(rows.strings), list(rows.tracks)
    return {**told, "strings": strings, "tracks": tracks, "names": rows.track_names, "losses": rows.losses}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_taken_at_once(layout: str) -> None:
    items = [
        event("a\\b", "1.500", "2.000", **{"Input Dims": [[2, 3]], "External id": 4}),
        event("ü", 1, 2, "user_annotation"),
        kernel(ts="1700000000000000.125", **{"est. achieved occupancy %": 33}),
        event("copy", 3, 4.25, "gpu_memcpy", **{"bytes": 7, "memory bandwidth (GB/s)": 1.1, "stream": "7"}),
        event("odd", 3, 4, "python_function", stream=None, correlation=2**70),
        event("span", cat="Trace"),
        event("gather", 5, 6, "kernel", **{"Collective name": "allgather", "In msg nelems": 1.5}),
        {"ph": "f", "id": 1, "pid": 7, "tid": 7, "ts": 1, "cat": "ac2g", "name": "ac2g", "bp": "e"},
        {"ph": "b", "cat": "x", "name": "open", "pid": 7, "tid": 7, "ts": 1},
        {"ph": "M", "name": "thread_name", "pid": 7, "tid": 7, "args": {"name": "main"}},
    ]
    other_order = '{"name": "x", "dur": 5, "ts": 1, "args": {"correlation": 3}, "ph": "X"}'
    text = _array(*(record(item, layout) for item in items), other_order)
    rows = Rows()

    assert Chunks(rows).add(text)
    expected = _one_by_one(text)
    assert _told(rows) == _told(expected)
    assert rows.communication == expected.communication
    assert rows.communication[0][1]["In msg nelems"] == Decimal("1.5")


REFUSED = [
    '"name": "\\ud83d"', '"ph": "f"', '"ph": "Q"', '"pid": 1.0', '"pid": true', '"cat": null', '"args": []',
    '"ts": "soon"', '"ts": NaN', '"dur": -1', '"ts": 1e30', '"other": NaN', '"other": Infinity', '"other": 01',
    '"other": "a\tb"', '"other": "\\x"', '"args": {"correlation": 1.0}', '"args": {"stream": [7]}',
    '"other": 1e999999999999999999', '"other": [1.5E-1234567890123456789]', '"other": 1e+' + "0" * 40,
    '"other": ' + "1" * 4301, '"other": ' + "1" * 9000, '"other": ' + "[" * 200 + "]" * 200,
    '"other": ' + '{"a": ' * 150 + "1" + "}" * 150,
]  # fmt: skip


@pytest.mark.parametrize("odd", REFUSED, ids=lambda odd: odd[:25])
def test_a_chunk_with_anything_odd_is_refused_untouched(odd: str) -> None:
    rows = Rows()
    text = _array(record(event("before")), record(event())[:-1] + ", " + odd + "}", record(event("after")))

    assert not Chunks(rows).add(text)
    assert _told(rows) == _told(Rows())


@pytest.mark.parametrize("raw", [b"\xff", b"\xc3(", b"\xed\xa0\x80"])
@pytest.mark.parametrize("place", ["name", "other"])
def test_a_chunk_that_is_not_utf8_is_refused_even_where_it_is_not_needed(raw: bytes, place: str) -> None:
    text = _array(record({**event(), place: "TEXT"})).replace(b"TEXT", raw)

    assert not Chunks(Rows()).add(text)


@settings(max_examples=200, deadline=None)
@given(
    before=st.integers(0, 40),
    digits=st.one_of(st.integers(10, 30), st.integers(4290, 4310)),
    sign=st.sampled_from(["", "e", "E+", "1e-", "."]),
)
def test_numbers_of_any_length_are_read_as_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, before: int, digits: int, sign: str
) -> None:
    number = "1" + sign + "7" * digits
    items = [event("a" * before), event("x", other="HERE"), event("after")]
    text = document(items).replace('"HERE"', number)

    assert_same(write(tmp_path_factory.getbasetemp() / "numbers.json", text))


times = st.one_of(
    st.decimals(0, 10**16, places=3), st.sampled_from(["9223372036854775.807", "9223372036854775.808", "0.000"])
).map(str)


@settings(max_examples=100, deadline=None)
@given(pairs=st.lists(st.tuples(times, times), min_size=1, max_size=5))
def test_times_with_three_decimals_are_exact(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]]
) -> None:
    path = write(tmp_path_factory.getbasetemp() / "times.json", document([event("op", *pair) for pair in pairs]))

    assert_same(path)
    exact = [int(Decimal(ts) * 1000) for ts, dur in pairs if max(map(Decimal, (ts, dur))) * 1000 < 2**63]
    assert kineto.load(path, "tolerant").columns["ts_ns"].tolist() == exact


def test_damage_makes_only_its_own_chunk_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [event(f"op{index}", 1000 + index, **{"Call stack": "x" * 300}) for index in range(4000)]
    text = document(items).replace('"op2000"', '"op2000').encode()
    path = write(tmp_path / "a.json", text)
    taken = [0]
    add = Chunks.add

    def counting(self: Chunks, chunk: bytes) -> bool:
        sound = add(self, chunk)
        taken[0] += len(chunk) * sound
        return sound

    monkeypatch.setattr(Chunks, "add", counting)
    records = kineto.load(path, "tolerant")

    assert len(records.columns["ts_ns"]) >= 3999
    assert len(text) - taken[0] < 2 * chunks.CHUNK_BYTES
    assert_same(path)


@pytest.mark.parametrize("path", sorted(TRACES.glob("*.json*")), ids=lambda path: path.name)
def test_real_traces_need_no_record_by_record_reading_but_at_their_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    single = [0]
    add = Rows.add

    def counting(self: Rows, item: Any, offset: int) -> None:
        single[0] += 1
        add(self, item, offset)

    monkeypatch.setattr(Rows, "add", counting)
    kineto.load(path, "tolerant")

    assert single[0] < 200, "the records that name tracks, and the last of each buffer"
