"""Damaged files load what is sound and say what was lost. P numbers: the survey of other tools' bug reports."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from eroica import scanner
from eroica.errors import DataError
from eroica.records import MAX_BROKEN
from eroica.trace import Category, Trace, read_trace
from tests.traces import LAYOUTS, document, event, kernel, record, write

FAST = pytest.param("fast", marks=pytest.mark.skipif(not scanner.available(), reason="not built"))
ENGINES = ["tolerant", "records", FAST]
pytestmark = pytest.mark.parametrize("engine", ENGINES)


def names(trace: Trace) -> list[str]:
    return [trace.strings[index] for index in trace.name]


def three(broken: str | bytes, layout: str = "classic") -> bytes:
    """A file whose second event is `broken`, between two sound ones."""
    raw = broken.encode() if isinstance(broken, str) else broken
    text = document(
        [event("before", 1000), event("MIDDLE", 2000), event("after", 3000)], layout, distributedInfo={"rank": 3}
    )
    return text.encode().replace(record(event("MIDDLE", 2000), layout).encode(), raw)


def test_names_that_differ_in_broken_bytes_stay_two_names_p01(tmp_path: Path, engine: str) -> None:
    items = document([event("kernel_A", 1), event("kernel_B", 2)]).encode()
    items = items.replace(b"kernel_A", b"kernel\xc3(").replace(b"kernel_B", b"kernel\xc4(")

    trace = read_trace(write(tmp_path / "a.json", items), engine=engine)

    assert names(trace) == ["kernel\\xc3(", "kernel\\xc4("]
    assert trace.damage.repaired_names == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_key_without_its_opening_quote_costs_only_its_event_p02(tmp_path: Path, engine: str, layout: str) -> None:
    broken = record(event("broken"), layout).replace('"tid"', 'tid"')

    trace = read_trace(write(tmp_path / "a.json", three(broken, layout)), engine=engine)

    assert names(trace) == ["before", "after"]
    assert trace.rank == 3
    assert trace.damage.skipped_events == 1
    assert three(broken, layout)[trace.damage.first_offset :].startswith(broken.encode())


def test_unescaped_backslashes_keep_path_and_line_p03(tmp_path: Path, engine: str) -> None:
    broken = record(event("NAME", 2000)).replace("NAME", "a\\cuda\\torch\\__init__.py(219): f")

    trace = read_trace(write(tmp_path / "a.json", three(broken)), engine=engine)

    assert names(trace)[1] == "a\\cuda\\torch\\__init__.py(219): f"
    assert (trace.damage.skipped_events, trace.damage.repaired_names) == (0, 1)


def test_a_path_that_ends_in_a_backslash_does_not_swallow_the_event_p03(tmp_path: Path, engine: str) -> None:
    broken = record(event("NAME", 2000)).replace("NAME", "C:\\data\\")

    trace = read_trace(write(tmp_path / "a.json", three(broken)), engine=engine)

    assert names(trace) == ["before", "C:\\data\\", "after"]


@pytest.mark.parametrize("control", ["\x01", "\n", "\t"])
def test_control_characters_in_names_are_taken_p04(tmp_path: Path, engine: str, control: str) -> None:
    broken = record(event("NAME", 2000)).replace("NAME", f"config{control}module")

    trace = read_trace(write(tmp_path / "a.json", three(broken)), engine=engine)

    assert names(trace) == ["before", f"config{control}module", "after"]
    assert trace.damage.repaired_names == 1


def test_a_value_without_quotes_costs_the_arguments_but_not_the_time_p06(tmp_path: Path, engine: str) -> None:
    broken = record(event("NAME", 2000, **{"Call stack": "HERE"})).replace('"HERE"', "a.py(1): f;b.py(2): g")

    trace = read_trace(write(tmp_path / "a.json", three(broken)), engine=engine)

    assert names(trace) == ["before", "NAME", "after"]
    assert "the arguments of 1 events were unreadable; their times were kept" in trace.damage.notes


def test_bare_quotes_in_a_name_are_read_as_they_stand(tmp_path: Path, engine: str) -> None:
    """pytorch#146900."""
    broken = record(event("NAME", 2000)).replace("NAME", 'f("x", "y")')

    trace = read_trace(write(tmp_path / "a.json", three(broken)), engine=engine)

    assert names(trace) == ["before", 'f("x", "y")', "after"]


def test_brackets_and_quotes_in_file_level_text_change_nothing_p07(tmp_path: Path, engine: str) -> None:
    text = document([event()], head={"job": 'a] "traceEvents": [ {'}, traceName='fit-[Strategy] {Single}: ",".json')

    trace = read_trace(write(tmp_path / "[a] {b}, c.json", text), engine=engine)

    assert len(trace) == 1
    assert not trace.damage.any


def test_two_interleaved_events_cost_one_and_invent_none_p08(tmp_path: Path, engine: str) -> None:
    outer, inner = record(event("outer", 2000)), record(event("inner", 2500))
    cut = outer.index('"pid"')

    trace = read_trace(write(tmp_path / "a.json", three(outer[:cut] + inner + outer[cut:])), engine=engine)

    assert names(trace) == ["before", "inner", "after"]
    assert trace.damage.skipped_events == 1


def test_a_damaged_event_does_not_run_on_into_the_damaged_start_of_the_next_p08(tmp_path: Path, engine: str) -> None:
    text = document([event("first"), event("second"), event("third"), event("fourth")])
    text = text.replace('"name": "second", "pid": 7', '"name": "second", "pid": 7x')
    at = text.index('"ph"', text.index("second"))

    trace = read_trace(write(tmp_path / "a.json", text[:at] + '"ph"{' + text[at + 5 :]), engine=engine)

    assert names(trace) == ["first", "fourth"]
    assert trace.damage.skipped_events


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
@pytest.mark.parametrize("cut_in", ["event", "after a comma", "after the events"])
def test_a_cut_file_loads_up_to_the_cut_and_says_so_p08(tmp_path: Path, engine: str, suffix: str, cut_in: str) -> None:
    text = document([event(f"op{index}", 1000 + index) for index in range(10)])
    at = text.index("op7")
    at = {"event": at, "after a comma": text.rindex(",\n  {", 0, at) + 1, "after the events": text.rindex("]") + 1}[
        cut_in
    ]

    trace = read_trace(write(tmp_path / f"a{suffix}", text[:at]), engine=engine)

    assert len(trace) == (10 if cut_in == "after the events" else 7)
    assert trace.damage.truncated
    assert trace.damage.skipped_events == (cut_in == "event")


def test_a_cut_gzip_stream_loads_up_to_the_cut_p08(tmp_path: Path, engine: str) -> None:
    rng = np.random.default_rng(0)
    text = document([event(f"op{rng.integers(1 << 60)}", 1000 + index) for index in range(5000)])
    packed = gzip.compress(text.encode())

    trace = read_trace(write(tmp_path / "a.json", packed[: len(packed) // 2]), engine=engine)

    assert 1000 < len(trace) < 4000
    assert trace.damage.truncated
    assert "the gzip stream is cut" in trace.damage.notes


def test_a_gzip_file_of_several_members_is_read_to_its_end(tmp_path: Path, engine: str) -> None:
    data = document([event(f"op{index}") for index in range(100)]).encode()
    packed = b"".join(gzip.compress(data[at : at + 1000]) for at in range(0, len(data), 1000)) + bytes(512)

    trace = read_trace(write(tmp_path / "a.json", packed), engine=engine)

    assert len(trace) == 100
    assert not trace.damage.any


def test_a_broken_gzip_member_keeps_what_came_before(tmp_path: Path, engine: str) -> None:
    data = document([event(f"op{index}") for index in range(100)]).encode()
    packed = gzip.compress(data[:3000]) + b"\x1f\x8bnothing of the kind"

    trace = read_trace(write(tmp_path / "a.json", packed), engine=engine)

    assert 0 < len(trace) < 100
    assert trace.damage.truncated


def test_a_name_of_many_megabytes_is_read_p09(tmp_path: Path, engine: str) -> None:
    trace = read_trace(write(tmp_path / "a.json", document([event("x" * 5_000_000), event("after")])), engine=engine)

    assert sorted(map(len, names(trace))) == [5, 5_000_000]


def test_an_event_without_an_end_is_dropped_and_counted_p11(tmp_path: Path, engine: str) -> None:
    items = [event("good", 1700000000000000), event("open", 1700000000000000, -1700000000000000)]
    items += [event("wrapped", 1700000000000000, "18446744073709551.615")]

    trace = read_trace(write(tmp_path / "a.json", document(items)), engine=engine)

    assert names(trace) == ["good"]
    assert trace.damage.bad_times == 2


def test_kernels_at_time_zero_do_not_stretch_the_window_p12(tmp_path: Path, engine: str) -> None:
    items = [kernel("lost", 0, 0) for _ in range(3)] + [kernel("gemm", 1700000000000000 + index) for index in range(9)]

    trace = read_trace(write(tmp_path / "a.json", document(items)), engine=engine)

    assert set(names(trace)) == {"gemm"}
    assert trace.damage.bad_times == 3
    assert "3 events without usable start or duration were left out" in trace.damage.notes


@pytest.mark.parametrize(
    ("ts", "head", "expected", "epoch"),
    [
        (1700000000000123, {}, 1700000000000123000, True),
        ("1700000000000123.457", {}, 1700000000000123457, True),
        ("1700000000000123.4", {}, 1700000000000123400, True),
        ("1700000000000123.4565", {}, 1700000000000123456, True),
        ("1.7000000000001235e15", {}, 1700000000000123500, True),
        ("123.457", {"baseTimeNanoseconds": 1700000000000000000}, 1700000000000123457, True),
        ("123.457", {}, 123457, False),
        (123, {}, 123000, False),
        ("-0.5", {"baseTimeNanoseconds": 1700000000000000000}, 1699999999999999500, True),
    ],
)
def test_times_of_every_form_are_exact_p14(
    tmp_path: Path, engine: str, ts: int | str, head: dict[str, int], expected: int, epoch: bool
) -> None:
    trace = read_trace(write(tmp_path / "a.json", document([event(ts=ts, dur="0.24")], head=head)), engine=engine)

    assert trace.ts_ns.tolist() == [expected]
    assert trace.dur_ns.tolist() == [240]
    assert trace.epoch == epoch


def test_a_base_that_comes_after_the_events_counts_p14(tmp_path: Path, engine: str) -> None:
    text = document([event(ts="123.457")], baseTimeNanoseconds=1700000000000000000)

    assert read_trace(write(tmp_path / "a.json", text), engine=engine).ts_ns.tolist() == [1700000000000123457]


def test_launches_without_any_device_record_are_said_p17_p18(tmp_path: Path, engine: str) -> None:
    items = [event("cudaLaunchKernel", index, cat="cuda_runtime", correlation=index) for index in range(1, 6)]

    trace = read_trace(write(tmp_path / "a.json", document(items)), engine=engine)

    assert "no device records although 5 kernel launches were traced; the device's part of this rank is unknown" in (
        trace.damage.notes
    )


def test_events_that_overlap_instead_of_nesting_are_all_kept_p20(tmp_path: Path, engine: str) -> None:
    items = [
        event("parent", 1000, 10),
        event("child", "1005.0", "5.4"),
        event("ProfilerStep#3", 1003, 100, "user_annotation"),
    ]

    trace = read_trace(write(tmp_path / "a.json", document(items)), engine=engine)

    assert names(trace) == ["parent", "ProfilerStep#3", "child"]
    assert not trace.damage.any


def test_kernels_and_launches_without_each_other_are_kept_p21(tmp_path: Path, engine: str) -> None:
    items = [kernel("no launch", correlation=11), event("launch", cat="cuda_runtime", correlation=12)]
    items += [kernel("twice", 2000, correlation=13), kernel("twice", 3000, correlation=13)]

    assert len(read_trace(write(tmp_path / "a.json", document(items)), engine=engine)) == 4


def test_every_field_of_a_device_event_is_optional_p39(tmp_path: Path, engine: str) -> None:
    bare = {key: value for key, value in kernel().items() if key != "args"}
    odd = kernel("odd", 2000, stream="0x0", device=None, grid=[], correlation="x")

    trace = read_trace(write(tmp_path / "a.json", document([bare, odd], head={"deviceProperties": []})), engine=engine)

    assert trace.category.tolist() == [Category.KERNEL] * 2
    for column in (trace.stream, trace.device, trace.work):
        assert column.tolist() == [-1, -1]
    assert trace.correlation.tolist() == [0, 0]
    assert np.isnan(trace.occupancy).all()
    assert (trace.device_model, trace.num_devices) == ("", 0)


def test_a_raw_pointer_in_the_stream_of_an_operator_is_no_stream_p39(tmp_path: Path, engine: str) -> None:
    trace = read_trace(write(tmp_path / "a.json", document([event(stream=615352160)])), engine=engine)

    assert trace.stream.tolist() == [-1]


def test_graph_replays_that_share_one_id_are_all_kept_p41(tmp_path: Path, engine: str) -> None:
    items = [event("cudaGraphLaunch", cat="cuda_runtime", correlation=9)]
    items += [kernel(ts=2000 + index, correlation=9) for index in range(31)]

    trace = read_trace(write(tmp_path / "a.json", document(items)), engine=engine)

    assert (trace.correlation == 9).sum() == 32


def test_unknown_operators_and_categories_are_kept_p42(tmp_path: Path, engine: str) -> None:
    items = [event("jax::pjit"), event("what", 2000, cat="xla_something")]

    trace = read_trace(write(tmp_path / "a.json", document(items)), engine=engine)

    assert trace.category.tolist() == [Category.CPU_OP, Category.OTHER]


def test_two_reads_of_one_file_are_equal_p55(tmp_path: Path, engine: str) -> None:
    path = write(tmp_path / "a.json", document([event(f"op{index % 7}", index % 5) for index in range(100)]))

    first, second = read_trace(path, engine=engine), read_trace(path, engine=engine)

    assert first.strings == second.strings
    assert first.name.tobytes() == second.name.tobytes()
    assert first.ts_ns.tobytes() == second.ts_ns.tobytes()


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "null", '"soon"', "[]"])
def test_a_time_that_is_no_number_is_counted(tmp_path: Path, engine: str, value: str) -> None:
    trace = read_trace(write(tmp_path / "a.json", document([event("good"), event("bad", value)])), engine=engine)

    assert names(trace) == ["good"]
    assert trace.damage.bad_times == 1


def test_values_that_are_no_json_numbers_are_taken_where_nothing_depends_on_them(tmp_path: Path, engine: str) -> None:
    items = [event(other=float("nan"), more=[float("inf"), float("-inf")])]

    assert not read_trace(write(tmp_path / "a.json", document(items)), engine=engine).damage.any


@pytest.mark.parametrize("depth", [100, 100_000])
def test_deep_nesting_neither_crashes_nor_stops_the_read(tmp_path: Path, engine: str, depth: int) -> None:
    broken = record(event("deep", 2000, x="HERE")).replace('"HERE"', "[" * depth + "]" * depth)

    trace = read_trace(write(tmp_path / "a.json", three(broken)), engine=engine)

    assert [name for name in names(trace) if name != "deep"] == ["before", "after"]


def test_of_a_repeated_key_the_last_counts(tmp_path: Path, engine: str) -> None:
    text = document([event(correlation=1)]).replace('"correlation": 1', '"correlation": 1, "correlation": 2')

    assert read_trace(write(tmp_path / "a.json", text), engine=engine).correlation.tolist() == [2]


def test_a_byte_order_mark_is_no_damage(tmp_path: Path, engine: str) -> None:
    trace = read_trace(
        write(tmp_path / "a.json", b"\xef\xbb\xbf" + document([event()]).lstrip().encode()), engine=engine
    )

    assert len(trace) == 1
    assert not trace.damage.any


@pytest.mark.parametrize("ending", ["]", "", ",", "]\n"])
def test_a_plain_array_of_events_is_read(tmp_path: Path, engine: str, ending: str) -> None:
    """Chrome's own writers leave the closing bracket out."""
    text = "[" + record(event("a")) + ",\n" + record(event("b")) + ending

    trace = read_trace(write(tmp_path / "a.json", text), engine=engine)

    assert names(trace) == ["a", "b"]
    assert trace.damage.truncated == (not ending.startswith("]"))


def test_file_level_keys_after_a_broken_last_event_are_read(tmp_path: Path, engine: str) -> None:
    text = document([event("good"), event("bad")], distributedInfo={"rank": 5, "world_size": 8})
    text = text.replace('"name": "bad", "pid"', '"name": "bad", pid"')

    trace = read_trace(write(tmp_path / "a.json", text), engine=engine)

    assert (trace.rank, trace.world_size, len(trace)) == (5, 8, 1)


def test_damaged_file_level_keys_are_read_one_by_one(tmp_path: Path, engine: str) -> None:
    text = document([event()], head={"username": "HERE", "distributedInfo": {"rank": 4}}).replace('"HERE"', "me")

    trace = read_trace(write(tmp_path / "a.json", text), engine=engine)

    assert trace.rank == 4
    assert trace.damage.notes


@pytest.mark.parametrize(
    "text",
    ["", " \n", "{}", '{"traceEvents": 3}', "[1, 2]", "hello", json.dumps({"verdict": {}}), '{"schemaVersion": 1, "tr'],
)
def test_a_file_without_a_trace_is_refused_in_one_sentence(tmp_path: Path, engine: str, text: str) -> None:
    path = write(tmp_path / "a.json", text)

    with pytest.raises(DataError, match=r"a\.json: ") as caught:
        read_trace(path, engine=engine)
    assert "\n" not in str(caught.value)


def test_a_file_of_damage_alone_is_refused_and_not_called_empty(tmp_path: Path, engine: str) -> None:
    path = write(tmp_path / "a.json", '{"traceEvents": [{"ph": "X", name": "a"}]}')

    with pytest.raises(DataError, match="no event could be read"):
        read_trace(path, engine=engine)


def test_a_gzip_file_that_grows_a_thousandfold_is_not_inflated_to_its_end(tmp_path: Path, engine: str) -> None:
    sound = document([event("aten::mm", 1000 + k) for k in range(3)])[:-6].encode()
    blanks = gzip.compress(b" " * (1 << 22))
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(sound + b",") + 100 * blanks)
    trace = read_trace(path, engine=engine)
    assert len(trace) == 3 and trace.damage.truncated
    assert any("200-fold" in note for note in trace.damage.notes)


@pytest.mark.slow
def test_a_file_of_broken_records_is_given_up_and_said_to_be(tmp_path: Path, engine: str) -> None:
    broken = '{"ph":"X","name":\n' * (MAX_BROKEN + 1000)
    path = write(tmp_path / "rank0.json", document([event()])[:-6] + "," + broken + "]}")
    trace = read_trace(path, engine=engine)
    assert len(trace) == 1 and trace.damage.truncated
    assert trace.damage.skipped_events == MAX_BROKEN
