"""Columns of real traces of every vendor and layout, and what they mean."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from eroica.trace import Category, CollectiveKind, read_timeline, read_trace
from tests.traces import TRACES, document, event, kernel, write

TIMELINES = TRACES.parent / "timelines"


@pytest.mark.parametrize("path", sorted(TRACES.rglob("*.json.gz")), ids=lambda path: path.name)
def test_every_complete_event_of_a_real_trace_becomes_a_row(path: Path) -> None:
    items = [
        item
        for item in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        if item["ph"] == "X" and item["cat"] != "Trace"
    ]

    trace = read_trace(path)

    assert Counter(trace.strings[index] for index in trace.name) == Counter(item["name"] for item in items)
    assert trace.tracks[trace.track[0]] in {(str(item["pid"]), str(item["tid"])) for item in items}
    assert int(trace.dur_ns.sum()) == sum(round(item["dur"] * 1000) for item in items)
    assert not trace.damage.skipped_events
    order = np.lexsort((-trace.dur_ns, trace.ts_ns))
    assert (trace.ts_ns[order] == trace.ts_ns).all()
    assert (trace.dur_ns[order] == trace.dur_ns).all()


@pytest.mark.parametrize(
    ("name", "device", "num_devices", "kernels", "epoch", "rank"),
    [
        ("alexnet_a100", "NVIDIA A100-PG509-200", 8, 79, True, 0),
        ("amd_mi250", "AMD Radeon Graphics", 4, 14, True, None),
        ("mi210_gpu_only", "AMD Instinct MI210", 4, 562, True, None),
        ("h100_bert_small", "NVIDIA H100 80GB HBM3", 1, 60, True, None),
        ("cpu_only_rank34", "", 0, 0, True, 34),
        ("gloo_torch_2_13_rank0", "", 0, 0, True, 0),
        ("two_ranks_of_128/sampled_rank-1", "", 0, 1104, True, 1),
    ],
)
def test_real_traces_tell_their_device_and_rank(
    name: str, device: str, num_devices: int, kernels: int, epoch: bool, rank: int | None
) -> None:
    trace = read_trace(TRACES / f"{name}.json.gz")

    assert (trace.device_model, trace.num_devices) == (device, num_devices)
    assert int((trace.category == Category.KERNEL).sum()) == kernels
    assert (trace.epoch, trace.rank) == (epoch, rank)


def test_rows_are_sorted_by_start_then_length_then_order_in_the_file(tmp_path: Path) -> None:
    items = [event("c", 5, 1), event("b", 5, 9), event("a", 1, 1), event("d", 5, 1), event("e", 5, 0)]

    trace = read_trace(write(tmp_path / "a.json", document(items)))

    assert [trace.strings[index] for index in trace.name] == ["a", "b", "c", "d", "e"]


def test_work_is_the_grid_the_bytes_or_the_elements_of_the_inputs(tmp_path: Path) -> None:
    items = [
        kernel("k", 1, grid=[4096, 2, 3]),
        event("copy", 2, 10, "gpu_memcpy", **{"bytes": 131072, "memory bandwidth (GB/s)": 13.1072}),
        event("op", 3, **{"Input Dims": [[2, 3], [], [[4], [5, 6]]]}),
        event("huge", 4, **{"Input Dims": [[2**40, 2**40], [7]]}),
        event("none", 5),
        event("scalar", 6, **{"Input Dims": [[]]}),
    ]

    trace = read_trace(write(tmp_path / "a.json", document(items)))

    assert trace.work.tolist() == [24576, 131072, 6 + 4 + 30, 2**63 - 1, -1, 0]
    assert trace.bandwidth_gbs[1] == np.float32(13.1072)
    assert np.isnan(trace.bandwidth_gbs[[0, 2, 3, 4, 5]]).all()


def test_occupancy_is_a_share(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", document([kernel(**{"est. achieved occupancy %": 63})]))

    assert read_trace(path).occupancy.tolist() == [np.float32(0.63)]


def test_category_strings_of_all_vendors_and_of_2022_are_known(tmp_path: Path) -> None:
    kinds = {
        "cpu_op": Category.CPU_OP,
        "Operator": Category.CPU_OP,
        "python_function": Category.PYTHON,
        "user_annotation": Category.ANNOTATION,
        "gpu_user_annotation": Category.DEVICE_ANNOTATION,
        "cuda_runtime": Category.RUNTIME,
        "cuda_driver": Category.RUNTIME,
        "mtia_runtime": Category.RUNTIME,
        "privateuse1_runtime": Category.RUNTIME,
        "Runtime": Category.RUNTIME,
        "kernel": Category.KERNEL,
        "Kernel": Category.KERNEL,
        "mtia_ccp_events": Category.KERNEL,
        "gpu_memcpy": Category.COPY,
        "Memcpy": Category.COPY,
        "gpu_memset": Category.MEMSET,
        "cuda_sync": Category.SYNC,
        "overhead": Category.OVERHEAD,
        "ac2g": Category.OTHER,
    }
    items = [event("x", index, cat=label) for index, label in enumerate(kinds)]

    assert read_trace(write(tmp_path / "a.json", document(items))).category.tolist() == list(kinds.values())


def test_spans_of_the_profiler_flows_instants_and_counters_are_no_events(tmp_path: Path) -> None:
    items = [
        event("PyTorch Profiler (0)", cat="Trace"),
        event("op"),
        {"ph": "M", "name": "process_name", "pid": 7, "tid": 0},
    ]
    items += [{"ph": phase, "id": 1, "pid": 7, "tid": 7, "ts": 1, "cat": "ac2g", "name": "ac2g"} for phase in "sftiC"]

    trace = read_trace(write(tmp_path / "a.json", document(items)))

    assert len(trace) == 1
    assert not trace.damage.any


def test_threads_have_the_first_name_that_the_trace_gives_them() -> None:
    trace = read_trace(TRACES / "gloo_torch_2_13_rank0.json.gz")

    workers = [name for name in trace.track_names if "pt_gloo_runloop" in name]
    assert len(workers) == 2


def test_begin_and_end_events_are_not_read_and_that_is_said(tmp_path: Path) -> None:
    items = [event("op"), {"ph": "B", "name": "x", "pid": 1, "tid": 1, "ts": 1}]

    assert any("begin/end" in note for note in read_trace(write(tmp_path / "a.json", document(items))).damage.notes)


def test_a_trace_without_events_is_empty_and_sound(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "a.json", '{"traceEvents": []}'))

    assert len(trace) == 0
    assert not trace.epoch


def test_a_given_rank_counts_more_than_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "rank9.json", document([event()], head={"distributedInfo": {"rank": 3}}))

    assert read_trace(path).rank == 3
    assert read_trace(path, rank=1).rank == 1


def test_an_op_timeline_gives_a_trace_per_rank_with_steps_in_a_row() -> None:
    traces = read_timeline(TIMELINES / "trace-ST.parquet")

    assert [trace.rank for trace in traces] == list(range(8))
    first = traces[0]
    assert (first.world_size, first.epoch) == (8, False)
    steps = first.category == Category.ANNOTATION
    assert int(steps.sum()) == 32
    assert first.strings[first.name[0]] == "ProfilerStep#23"
    ends = first.ts_ns[steps] + first.dur_ns[steps]
    assert (first.ts_ns[steps][1:] == ends[:-1]).all(), "steps overlap or leave a gap"
    assert all((trace.ts_ns[trace.category == Category.ANNOTATION] == first.ts_ns[steps]).all() for trace in traces)


def test_sends_of_an_op_timeline_meet_their_receives() -> None:
    traces = {trace.rank: trace for trace in read_timeline(TIMELINES / "trace-ST.parquet")}
    seen: dict[CollectiveKind, Counter[tuple[int, int, int]]] = {
        CollectiveKind.SEND: Counter(),
        CollectiveKind.RECV: Counter(),
    }
    for rank, trace in traces.items():
        assert rank is not None
        table = trace.collectives
        for kind, peer, sequence in zip(table.kind.tolist(), table.peer.tolist(), table.sequence.tolist(), strict=True):
            if kind == CollectiveKind.SEND:
                seen[CollectiveKind.SEND][rank, peer, sequence] += 1
            elif kind == CollectiveKind.RECV:
                seen[CollectiveKind.RECV][peer, rank, sequence] += 1

    assert seen[CollectiveKind.SEND] == seen[CollectiveKind.RECV]
    assert set(seen[CollectiveKind.SEND].values()) == {1}
    assert sum(seen[CollectiveKind.SEND].values()) == 1536


def test_groups_of_an_op_timeline_name_their_members() -> None:
    trace = read_timeline(TIMELINES / "trace-ST.parquet")[2]
    members = {group.description: (group.ranks, group.size) for group in trace.groups}

    assert members == {
        "world": (tuple(range(8)), 8),
        "data_parallel": ((2, 3), 2),
        "pipeline_parallel": ((0, 2, 4, 6), 4),
        "embedding": ((0, 6), 2),
        "tensor_parallel": ((), 1),
    }
