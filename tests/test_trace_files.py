"""Which files are a job's traces, and which rank wrote each."""

from __future__ import annotations

import gzip
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eroica.errors import DataError, UnavailableError, UserError
from eroica.trace import find_traces, read_all, read_timeline, read_trace
from eroica.tracefiles import rank_in_name
from tests.traces import TRACES, document, event, write

TIMELINES = TRACES.parent / "timelines"


def trace_of(rank: int | None, **more: Any) -> str:
    info = {} if rank is None else {"distributedInfo": {"rank": rank, "world_size": 4, **more}}
    return document([event()], head={"schemaVersion": 1, **info})


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank-34.Jul_15_10_52_41.1074.pt.trace.json", 34),
        ("rank3.json", 3),
        ("rank_3.json.gz", 3),
        ("sampled_rank-0.json", 0),
        ("train_rank0_of_64.json", 0),
        ("Rank 12.json", 12),
        ("17.json", 17),
        ("dp_rank1_rank5.json", 5),
        ("vpp_rank1_edp_rank2_rank5.json", 5),
        ("ddp_rank3.json", 3),
        ("step_rank3.json", 3),
        ("multinode-rank3.json", 3),
        ("local_rank2.json", None),
        ("hsdp_rank2.json", None),
        ("rank1_rank2.json", None),
        ("frank3.json", None),
        ("host_12345.1700000000.pt.trace.json", None),
        ("trace.json", None),
    ],
)
def test_a_rank_is_read_from_a_file_name(name: str, rank: int | None) -> None:
    assert rank_in_name(name) == rank


def test_a_directory_gives_its_traces_by_rank_and_lists_what_it_ignored(tmp_path: Path) -> None:
    write(tmp_path / "b.json", trace_of(0))
    write(tmp_path / "a.json.gz", trace_of(10))
    write(tmp_path / "diagnosis.json", json.dumps({"schema": "eroica.diagnosis/1", "findings": []}))
    write(tmp_path / "report.html", "<html>")

    found = find_traces([tmp_path])

    assert [(Path(file.path).name, file.rank) for file in found.files] == [("b.json", 0), ("a.json.gz", 10)]
    assert found.world_size == 4
    assert {Path(path).name: why for path, why in found.ignored} == {
        "diagnosis.json": "holds no traceEvents",
        "report.html": "its name does not end like a trace",
    }


def test_a_glob_and_files_work_alike(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"rank{rank}.json", trace_of(None)) for rank in range(3)]

    by_glob = find_traces([str(tmp_path / "rank*.json")])
    assert by_glob.files == find_traces([*map(str, paths), *paths]).files == find_traces(str(tmp_path)).files


def test_a_directory_of_directories_is_searched_below(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"node{rank}").mkdir()
        write(tmp_path / f"node{rank}" / "t.json", trace_of(rank))

    assert [file.rank for file in find_traces([tmp_path]).files] == [0, 1]


def test_metadata_counts_more_than_the_name_and_the_manifest_most_p48(tmp_path: Path) -> None:
    write(tmp_path / "rank5.json", trace_of(1))
    assert [file.rank for file in find_traces([tmp_path]).files] == [1]

    write(
        tmp_path / "manifest.json",
        json.dumps({"schema": "eroica.manifest/1", "ranks": {"7": "rank5.json"}, "world_size": 9}),
    )
    found = find_traces([tmp_path])

    assert [file.rank for file in found.files] == [7]
    assert found.world_size == 9
    trace = next(read_all(found))
    assert (trace.rank, trace.world_size) == (7, 4)


def test_another_programs_manifest_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "manifest.json", json.dumps({"name": "app"}))
    write(tmp_path / "rank1.json", trace_of(None))

    assert [file.rank for file in find_traces([tmp_path]).files] == [1]


def test_another_programs_manifest_hides_no_traces_below(tmp_path: Path) -> None:
    write(tmp_path / "manifest.json", json.dumps({"name": "app"}))
    (tmp_path / "node0").mkdir()
    write(tmp_path / "node0" / "rank1.json", trace_of(None))

    assert [file.rank for file in find_traces([tmp_path]).files] == [1]


def test_a_manifest_names_traces_in_folders_below_beside_others(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"node{rank}").mkdir()
        write(tmp_path / f"node{rank}" / "t.json", trace_of(None))
    ranks = {"0": "node0/t.json", "1": "node1/t.json"}
    write(tmp_path / "manifest.json", json.dumps({"schema": "eroica.manifest/1", "ranks": ranks}))
    assert [(file.rank, Path(file.path).parent.name) for file in find_traces([tmp_path]).files] == [
        (0, "node0"),
        (1, "node1"),
    ]
    write(tmp_path / "rank2.json", trace_of(None))
    assert [file.rank for file in find_traces([tmp_path]).files] == [0, 1, 2]


def test_two_files_of_one_rank_stop_the_run_and_all_are_named_p48(tmp_path: Path) -> None:
    for name, rank in (("a.json", 0), ("b.json", 0), ("c.json", 1), ("d.json", 1), ("e.json", 2)):
        write(tmp_path / name, trace_of(rank))

    with pytest.raises(UserError) as caught:
        find_traces([tmp_path])

    assert all(name in str(caught.value) for name in ("a.json", "b.json", "c.json", "d.json"))
    assert "e.json" not in str(caught.value)


def test_two_timelines_of_the_same_ranks_are_named_once_p48(tmp_path: Path) -> None:
    for name in ("a.parquet", "b.parquet"):
        (tmp_path / name).write_bytes((TIMELINES / "trace-ST.parquet").read_bytes())

    with pytest.raises(UserError, match=r"rank 0-7: \S+a\.parquet, \S+b\.parquet\)"):
        find_traces(tmp_path)


def test_files_without_any_rank_are_numbered_and_that_is_said_p48(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        write(tmp_path / f"host_{number}.170.pt.trace.json", trace_of(None))

    found = find_traces([tmp_path])

    assert [(Path(file.path).name[:7], file.rank) for file in found.files] == [
        ("host_1.", 0),
        ("host_2.", 1),
        ("host_10", 2),
    ]
    assert "no file tells its rank; 3 files were numbered in the order of their names" in found.notes


def test_ranks_told_by_some_files_only_stop_the_run_p48(tmp_path: Path) -> None:
    write(tmp_path / "a.json", trace_of(0))
    write(tmp_path / "lost.json", trace_of(None))

    with pytest.raises(UserError, match=r"lost\.json"):
        find_traces([tmp_path])


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_rank_after_the_events_is_found(tmp_path: Path, suffix: str) -> None:
    text = document([event(f"op{index}") for index in range(3000)], distributedInfo={"rank": 6, "world_size": 8})
    write(tmp_path / f"trace{suffix}", text)

    found = find_traces([tmp_path])

    assert [file.rank for file in found.files] == [6]
    assert found.world_size == 8


def test_a_long_list_of_ranks_before_the_events_is_no_obstacle(tmp_path: Path) -> None:
    config = [{"pg_name": str(number), "ranks": list(range(20_000)), "pg_size": 20_000} for number in range(3)]
    path = write(tmp_path / "a.json", trace_of(19_999, pg_config=config))

    assert [file.rank for file in find_traces([path]).files] == [19_999]
    assert read_trace(path).groups[2].size == 20_000


def test_world_sizes_that_disagree_are_said(tmp_path: Path) -> None:
    write(tmp_path / "a.json", trace_of(0))
    write(tmp_path / "b.json", trace_of(1).replace('"world_size": 4', '"world_size": 8'))

    assert any("disagree on the world size: 4, 8" in note for note in find_traces([tmp_path]).notes)


def test_a_named_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no profiler trace"):
        find_traces([write(tmp_path / "a.json", "{}")])


@pytest.mark.parametrize("name", ["missing", "missing/*.json"])
def test_a_path_without_files_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="no such file or directory"):
        find_traces([tmp_path / name])


def test_a_directory_without_traces_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "notes.json", "{}")

    with pytest.raises(UserError, match="no trace files found among 1 file;"):
        find_traces([tmp_path])


def test_a_manifest_that_names_a_missing_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "manifest.json", json.dumps({"schema": "eroica.manifest/1", "ranks": {"0": "gone.json"}}))

    with pytest.raises(UserError, match=r"names gone\.json for rank 0"):
        find_traces([tmp_path])


def test_files_are_read_one_at_a_time_p51(tmp_path: Path) -> None:
    for rank in range(3):
        write(tmp_path / f"rank{rank}.json", trace_of(None))
    found = find_traces([tmp_path])
    traces = read_all(found)

    assert next(traces).rank == 0
    Path(found.files[1].path).unlink()
    with pytest.raises(UserError, match=r"rank1\.json: no such file"):
        next(traces)


def test_the_ranks_of_an_op_timeline_are_found() -> None:
    found = find_traces([TIMELINES / "trace-ST.parquet"])

    assert [file.rank for file in found.files] == list(range(8))
    assert found.world_size == 8
    assert [trace.rank for trace in read_all(found)] == list(range(8))


def test_a_file_that_only_looks_like_gzip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(b"{}")[:11])

    with pytest.raises(DataError):
        read_trace(path)


def test_an_empty_file_with_a_rank_in_its_name_is_said_not_just_ignored(tmp_path: Path) -> None:
    write(tmp_path / "rank0.json", trace_of(0))
    write(tmp_path / "rank1.json", "")

    assert "rank1.json is empty; the capture of that rank may have failed" in find_traces([tmp_path]).notes


def test_a_timeline_without_pyarrow_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(UnavailableError, match=r'pip install "eroica\[parquet\]"'):
        find_traces([TIMELINES])


def test_a_parquet_file_beside_traces_is_left_out_without_pyarrow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data.parquet").write_bytes(b"PAR1")
    write(tmp_path / "rank0.json", trace_of(0))
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    found = find_traces([tmp_path])

    assert [file.rank for file in found.files] == [0]
    assert [(Path(path).name, why) for path, why in found.ignored] == [
        ("data.parquet", "reading parquet needs pyarrow")
    ]
    with pytest.raises(UnavailableError, match="pip install"):
        find_traces([tmp_path / "data.parquet", tmp_path / "rank0.json"])


def test_a_parquet_file_of_something_else_is_ignored_or_refused(tmp_path: Path) -> None:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet as parquet  # type: ignore[import-untyped]

    path = tmp_path / "other.parquet"
    parquet.write_table(pyarrow.table({"a": [1]}), path)
    write(tmp_path / "rank0.json", trace_of(0))

    assert [name for name, _ in find_traces([tmp_path]).ignored] == [str(path)]
    with pytest.raises(DataError, match="so it is no op timeline"):
        find_traces([path])


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("rank", [0, None]),
        ("rank", [0, -1]),
        ("rank", [0, 2**40]),
        ("rank", [0.0, 0.5]),
        ("step", [5, None]),
        ("stage", ["a", "b"]),
        ("seq_id", [None, 1]),
        ("mc", [None, 0]),
        ("duration", ["x", "y"]),
    ],
)
def test_a_timeline_with_a_column_of_something_else_is_refused_in_one_sentence(
    tmp_path: Path, column: str, values: list[object]
) -> None:
    import pyarrow
    import pyarrow.parquet as parquet

    columns: dict[str, list[object]] = {"dp_rank": [0, 0], "stage": [0, 0], "rank": [0, 0], "step": [5, 5]}
    columns |= {"seq_id": [0, 1], "optype": ["forward-compute"] * 2, "start_ts": [0.0, 1.0], "duration": [0.5, 0.5]}
    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table(columns | {column: values}), path)

    with pytest.raises(DataError, match=f"column {column}"):
        read_timeline(path)


def test_rows_of_a_timeline_without_a_time_are_counted(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet as parquet

    columns = {"dp_rank": [0, 0, 1, 1], "stage": [0] * 4, "rank": [0, 0, 1, 1], "step": [5] * 4, "seq_id": [0] * 4}
    times = {
        "optype": ["forward-compute"] * 4,
        "start_ts": [0.0, float("nan"), 0.5, 0.5],
        "duration": [1.0, 1.0, -1.0, 1e12],
    }
    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table({**columns, **times}), path)

    traces = read_timeline(path)

    assert [trace.damage.bad_times for trace in traces] == [1, 2]
    assert [trace.dur_ns.tolist() for trace in traces] == [[10**9, 10**9], [10**9]]


@pytest.mark.parametrize(
    ("told", "hint"),
    [
        ('{"99999999999": "rank0.json"}', "must map numbers"),
        ('{"' + "9" * 5000 + '": "rank0.json"}', "must map numbers"),
        ('{"-1": "rank0.json"}', "must map numbers"),
        ('{"0": ["rank0.json"]}', "must map numbers"),
        ('{"0": "rank0.json", "1": "./rank0.json"}', "two ranks"),
        ('{"0": "rank\\u00000.json"}', "does not exist"),
        ('{"0": "' + "a" * 300 + '"}', "does not exist"),
        ('{"0": ' + "[" * 100_000, "cannot be read as JSON"),
    ],
    ids=["too big", "too long", "negative", "list", "twice", "zero byte", "long name", "deep"],
)
def test_a_manifest_that_makes_no_sense_is_one_sentence(told: str, hint: str, tmp_path: Path) -> None:
    write(tmp_path / "rank0.json", trace_of(0))
    write(tmp_path / "manifest.json", '{"schema": "eroica.manifest/1", "ranks": ' + told + "}")
    with pytest.raises(UserError, match=hint) as caught:
        find_traces([tmp_path])
    assert "\n" not in str(caught.value)


def test_pipes_are_never_waited_for(tmp_path: Path) -> None:
    write(tmp_path / "rank0.json", trace_of(0))
    for name in ("rank1.json", "manifest.json", "rank2.parquet"):
        os.mkfifo(tmp_path / name)
    assert [file.rank for file in find_traces([tmp_path]).files] == [0]
    found = find_traces([tmp_path / "*"])
    assert [file.rank for file in found.files] == [0]
    assert any("rank1.json" in note for note in found.notes)
    for name in ("rank1.json", "rank2.parquet"):
        with pytest.raises((UserError, DataError), match=name):
            find_traces([tmp_path / name])


@pytest.fixture
def anybodys() -> Iterator[Path]:
    """A folder of a user without rights, as whom the test runs: nothing is unreadable to root."""
    user, nobody = os.geteuid(), 65534
    with tempfile.TemporaryDirectory() as folder:
        if user != 0:
            yield Path(folder)
            return
        os.chown(folder, nobody, nobody)
        os.seteuid(nobody)
        try:
            yield Path(folder)
        finally:
            os.seteuid(user)


def test_a_file_that_may_not_be_read_is_left_out_and_named(anybodys: Path) -> None:
    for rank in range(3):
        write(anybodys / f"rank{rank}.json", trace_of(rank))
    (anybodys / "rank1.json").chmod(0)
    found = find_traces([anybodys])
    assert [file.rank for file in found.files] == [0, 2]
    assert any("rank1.json cannot be opened" in note for note in found.notes)
    with pytest.raises(UserError, match="Permission denied"):
        find_traces([anybodys / "rank1.json"])


def test_a_file_that_a_disk_does_not_give_is_left_out_and_named(tmp_path: Path) -> None:
    write(tmp_path / "rank0.json", trace_of(0))
    (tmp_path / "rank1.json").symlink_to("/proc/self/mem")  # a plain file whose first byte cannot be read
    found = find_traces([tmp_path])
    assert [file.rank for file in found.files] == [0]
    assert any("rank1.json cannot be read" in note for note in found.notes)
    with pytest.raises(UserError, match=r"rank1\.json: cannot be read"):
        read_trace(tmp_path / "rank1.json")
