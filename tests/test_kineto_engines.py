"""The C scanner, msgspec by chunks and the reader of single records give the same columns, on sound, reformatted and
damaged text."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eroica import kineto, scanner
from eroica.errors import DataError, UserError
from eroica.records import COLUMNS, Records
from tests.traces import LAYOUTS, TRACES, document, event, kernel, record, write

needs_scanner = pytest.mark.skipif(not scanner.available(), reason="the C scanner is not built")


def _load(path: Path, engine: str, chunk_bytes: int) -> Records | str:
    try:
        return kineto.load(path, engine, chunk_bytes)
    except DataError as error:
        return str(error)


def assert_same(path: Path, chunk_bytes: int = kineto.CHUNK_BYTES) -> None:
    """All engines agree on a file: on each value, on what was lost and where."""
    single = _load(path, "records", 1 << 20)
    for engine in ("tolerant", "fast") if scanner.available() else ("tolerant",):
        _assert_equal(_load(path, engine, chunk_bytes), single)


def _assert_equal(one: Records | str, other: Records | str) -> None:
    if isinstance(one, str) or isinstance(other, str):
        assert one == other
        return
    assert [one.strings[i] for i in one.columns["name"]] == [other.strings[i] for i in other.columns["name"]]
    assert [one.tracks[i] for i in one.columns["track"]] == [other.tracks[i] for i in other.columns["track"]]
    for name in COLUMNS:
        if name not in ("name", "track"):
            np.testing.assert_array_equal(one.columns[name], other.columns[name], err_msg=name)
            assert one.columns[name].dtype == other.columns[name].dtype
    assert one.track_names == other.track_names
    assert one.communication == other.communication
    assert one.metadata == other.metadata
    assert one.losses == other.losses


names = st.one_of(
    st.sampled_from(
        ["aten::mm", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "a\\b", 'quote "x"', "ünï", "<lambda> {[,]}", ""]
    ),
    st.text(max_size=20),
)
numbers = st.one_of(
    st.integers(-5, 10**17),
    st.floats(0, 1e6),
    st.decimals(0, 10**15, places=3).map(str),
    st.sampled_from(
        ["1e3", "1.5E+2", "0.1234", "-0", "-0.0", "9200000000000001", "1767189312000000.1234", "99999999999999999999"]
    ),
)
sizes = st.lists(st.one_of(st.integers(-1, 2**40), st.just(0)), max_size=4)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "External id": st.one_of(st.integers(0, 2**63), values),
        "correlation": st.one_of(st.integers(0, 2**31), values),
        "stream": st.one_of(st.integers(-1, 2**33), st.sampled_from(["7", "0x0"]), values),
        "device": st.one_of(st.integers(-1, 8), values),
        "grid": st.one_of(sizes, values),
        "bytes": st.one_of(st.integers(0, 2**40), values),
        "memory bandwidth (GB/s)": st.one_of(st.floats(0, 1e4), values),
        "est. achieved occupancy %": st.one_of(st.integers(0, 100), st.floats(0, 100)),
        "Input Dims": st.one_of(st.lists(st.one_of(sizes, st.lists(sizes, max_size=2)), max_size=3), values),
        "Collective name": st.sampled_from(["allreduce", "wait", ""]),
        "Call stack": st.text(max_size=30),
        "other": values,
    },
)
ids = st.one_of(
    st.integers(-2, 2**40), st.text(max_size=6), st.sampled_from(["Spans", "", 0]), st.floats(0, 9), st.none()
)
categories = st.sampled_from(
    "cpu_op python_function user_annotation gpu_user_annotation cuda_runtime kernel Kernel gpu_memcpy gpu_memset "
    "cuda_sync Trace overhead mtia_ccp_events ac2g unheard_of".split()
)


@st.composite
def events(draw: st.DrawFn) -> dict[str, Any]:
    phase = draw(st.sampled_from("XXXXXXXXMsfiCB"))
    item: dict[str, Any] = {"ph": phase, "cat": draw(categories), "name": draw(names)}
    item |= {"pid": draw(ids), "tid": draw(ids), "ts": draw(numbers), "dur": draw(numbers)}
    if draw(st.booleans()):
        item["args"] = draw(arguments)
    if draw(st.integers(0, 9)) == 0:
        keys = draw(st.permutations(list(item)))
        item = {key: item[key] for key in keys[: draw(st.integers(1, len(keys)))]}
    return item


def _respaced(text: str, seed: int) -> str:
    """Random white space wherever JSON allows it."""
    pick = random.Random(seed)
    result, inside, escaped = [], False, False
    for char in text:
        if not inside and char in "{}[],:":
            blanks = ["".join(pick.choices(" \n\t\r", k=pick.choice([0, 0, 1, 5, 20]))) for _ in range(2)]
            result.append(blanks[0] + char + blanks[1])
        elif not inside and char in " \n":
            continue
        else:
            result.append(char)
        if inside and char == "\\" and not escaped:
            escaped = True
            continue
        if char == '"' and not escaped:
            inside = not inside
        escaped = False
    return "".join(result)


@settings(max_examples=150, deadline=None)
@given(
    items=st.lists(events(), max_size=6),
    layout=st.sampled_from(LAYOUTS),
    seed=st.one_of(st.none(), st.integers(0, 2**32)),
    chunk_bytes=st.sampled_from([64, 100, 333, 1 << 20]),
)
def test_all_engines_read_the_same_from_sound_text(
    tmp_path_factory: pytest.TempPathFactory,
    items: list[dict[str, Any]],
    layout: str,
    seed: int | None,
    chunk_bytes: int,
) -> None:
    text = document(items, layout, traceName="fit-[Strategy]{1}.json")
    path = write(tmp_path_factory.getbasetemp() / "sound.json", _respaced(text, seed) if seed is not None else text)

    assert_same(path, chunk_bytes)


@st.composite
def damage(draw: st.DrawFn) -> tuple[str, float, bytes]:
    kind = draw(st.sampled_from(["cut", "delete", "insert", "replace"]))
    piece = draw(
        st.one_of(
            st.binary(min_size=1, max_size=4),
            st.sampled_from(
                [b'"', b"\\", b"{", b"}", b"]", b",", b"\0", b"\xc3(", b'{"ph": "X"', b"\x01", b"NaN", b"}]", b"]}"]
            ),
        )
    )
    return kind, draw(st.floats(0, 1)), piece


@settings(max_examples=400, deadline=None)
@given(
    items=st.lists(events(), min_size=1, max_size=5),
    layout=st.sampled_from(LAYOUTS),
    wounds=st.lists(damage(), min_size=1, max_size=4),
    chunk_bytes=st.sampled_from([64, 200, 1 << 20]),
)
def test_all_engines_lose_the_same_from_damaged_text(
    tmp_path_factory: pytest.TempPathFactory,
    items: list[dict[str, Any]],
    layout: str,
    wounds: list[tuple[str, float, bytes]],
    chunk_bytes: int,
) -> None:
    text = document(items, layout, distributedInfo={"rank": 3}).encode()
    for kind, where, piece in wounds:
        at = int(where * len(text))
        if kind == "cut":
            text = text[: max(at, 40)]
        else:
            text = (
                text[:at] + (b"" if kind == "delete" else piece) + text[at + (0 if kind == "insert" else len(piece)) :]
            )
    assert_same(write(tmp_path_factory.getbasetemp() / "damaged.json", text), chunk_bytes)


@pytest.mark.parametrize("path", sorted(TRACES.glob("*.json*")), ids=lambda path: path.name)
def test_all_engines_read_the_same_from_real_traces(path: Path) -> None:
    assert_same(path)
    assert_same(path, chunk_bytes=4099)


@needs_scanner
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_scanner_takes_every_layout_without_help(tmp_path: Path, layout: str) -> None:
    items = [event("a\\b", 1.5, 2, **{"Input Dims": [[2, 3]], "External id": 4}), kernel(ts="1700000000000000.125")]
    engine = scanner.Fast()
    text = document(items, layout).encode()
    buffer = bytearray(text + bytes(64))

    _, ended = engine.scan(buffer, text.index(b"[", text.index(b"traceEvents")) + 1, len(text), True, 0)

    assert ended
    assert len(engine.rows) == 0, "a record of this layout fell back to Python"
    assert engine.finish().columns["ts_ns"].tolist() == [1500, 1700000000000000125]


@needs_scanner
def test_the_scanner_ignores_keys_inside_values(tmp_path: Path) -> None:
    item = event(**{"other": {"correlation": 9, "ph": "X"}, "correlation": 3, "text": json.dumps({"stream": 4})})
    path = write(tmp_path / "nested.json", document([item]))

    assert kineto.load(path, "fast").columns["correlation"].tolist() == [3]
    assert_same(path)


ODD_VALUES = [
    "01", "-0", "-01", "1.", ".5", "1e5", "1E+05", "1e", "1e1234567",
    "1" * 18, "1" * 19, "1" * 4300, "1" * 4301,
    "9200000000000000", "9200000000000001", "9223372036854775", "9223372036854776", "9250000000000000",
    "0.1239", "1.5.5", "+1", "0x10",
    "NaN", "-Infinity", "Infinit", "nul", "true",
    '"7"', '"\\u00e9"', '"\\ud83d"', '"\\x"', '"\\u12"', '"a\tb"', '""', "[]", "[[]]", "[1, 2,]", "[-1]", "[1, [2]]",
    "[[2], 3]", "[4611686018427387904, 4]", "[0, 9999999999999, 9999999999999]", "{}", '{"a": 1,}', '{"ph": "X"}',
    "[" * 499 + "]" * 499, "[" * 501 + "]" * 501, "[[[[[[[[[[[5]]]]]]]]]]]", "4294967296", "-2147483649", "2147483647",
    "null", "12 ", "1\n", '"\\/"',
]  # fmt: skip
ODD_BYTES = [
    b"\xc3(", b"\xc0\x80", b"\xed\xa0\x80", b"\xf0\x80\x80\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\xff", b"\x80",
    b"\x00", b"\x7f", "é".encode(), "€".encode(), "😀".encode(),
    b"\xf8\x88\x80\x80\x80", b"\xe0\x9f\xbf", b"\xf4\x8f\xbf\xbf",
]  # fmt: skip


@pytest.mark.parametrize("key", ["pid", "tid", "ts", "dur", "name", "cat"])
@pytest.mark.parametrize("value", ODD_VALUES, ids=lambda value: value[:20])
def test_all_engines_agree_on_odd_values_of_a_key(tmp_path: Path, key: str, value: str) -> None:
    item = {**kernel("a", 5, 5), key: 777777}
    text = document([event("before"), item, event("after", 3000)]).replace("777777", value)

    assert_same(write(tmp_path / "a.json", text))


ARGUMENTS = [
    ("cpu_op", "Input Dims"), ("kernel", "stream"), ("kernel", "device"), ("kernel", "grid"), ("gpu_memcpy", "bytes"),
    ("gpu_memcpy", "memory bandwidth (GB/s)"), ("kernel", "est. achieved occupancy %"), ("cpu_op", "stream"),
    ("cuda_runtime", "correlation"), ("cpu_op", "External id"), ("cpu_op", "Collective name"), ("cpu_op", "other"),
]  # fmt: skip


@pytest.mark.parametrize(("category", "key"), ARGUMENTS)
def test_all_engines_agree_on_odd_values_of_an_argument(tmp_path: Path, category: str, key: str) -> None:
    for value in ODD_VALUES:
        item = event("x", 5, 5, category, **{key: 777777, "correlation ": 3})
        assert_same(write(tmp_path / "a.json", document([item, event("after")]).replace("777777", value)))


@pytest.mark.parametrize("place", ["name", "cat", "pid", "argument", "key"])
def test_all_engines_agree_on_odd_bytes_in_strings(tmp_path: Path, place: str) -> None:
    for piece in ODD_BYTES:
        item = {**event("x", 5, 5, **{"key" if place == "key" else "argument": "y"}), "pid": "p"}
        if place == "key":
            text = document([item]).replace('"key"', '"kTEXTy"')
        elif place == "argument":
            text = document([item]).replace('"y"', '"yTEXT"')
        else:
            text = document([{**item, place: "yTEXT"}])
        assert_same(write(tmp_path / "a.json", text.encode().replace(b"TEXT", piece)))


def test_all_engines_agree_on_a_key_that_comes_twice(tmp_path: Path) -> None:
    flow = record({"ph": "f", "id": 1, "pid": 7, "tid": 7, "ts": 1, "cat": "ac2g", "name": "ac2g"})
    merged = flow[:-1].rstrip() + ", " + record(event("second")).lstrip("{\n ")
    path = write(tmp_path / "a.json", document([event("MARK")]).replace(record(event("MARK")), merged))

    assert_same(path)
    assert kineto.load(path, "records").strings == ["second"]


def test_without_the_scanner_everything_is_read_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.json", document([event(), kernel()]))
    monkeypatch.setattr(scanner, "available", lambda: False)

    assert len(kineto.load(path).columns["ts_ns"]) == 2
    with pytest.raises(UserError, match="the C scanner is not built"):
        kineto.load(path, "fast")
