"""Communication of one rank: recognised by name, and joined with its metadata where only one can be meant."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from eroica.communication import RULES, kind_of
from eroica.errors import UserError
from eroica.trace import Category, CollectiveKind, Rule, Trace, read_trace
from tests.traces import TRACES, document, event, kernel, write

K = CollectiveKind


def kinds(trace: Trace, *, transfers: bool = True) -> list[CollectiveKind]:
    table = trace.collectives
    return [
        K(kind) for kind, moves in zip(table.kind.tolist(), table.transfers.tolist(), strict=True) if moves == transfers
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", K.ALL_REDUCE),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", K.ALL_REDUCE),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", K.ALL_GATHER),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", K.REDUCE_SCATTER),
        ("ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", K.BROADCAST),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", K.SEND_RECV),
        ("ncclSymkDevKernel_AllReduce_LDMC_f32", K.ALL_REDUCE),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", K.UNKNOWN),
        ("void dpsk::ep::internode::dispatch<false, 8, true, 8>(int4*, float*)", K.DISPATCH),
        ("void deep_ep::intranode::notify_dispatch<8>(int const*)", K.DISPATCH),
        ("void deep_ep::internode_ll::combine<true, 7168>(void*)", K.COMBINE),
        ("void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)", K.ALL_REDUCE),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)", K.ALL_REDUCE),
        ("void tensorrt_llm::kernels::oneShotAllReduceKernel<__half, 8>(int)", K.ALL_REDUCE),
    ],
)
def test_kernels_of_every_library_are_recognised(tmp_path: Path, name: str, kind: CollectiveKind) -> None:
    assert kinds(read_trace(write(tmp_path / "a.json", document([kernel(name)])))) == [kind]


@pytest.mark.parametrize(
    "name",
    [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(float)",
        "void cub::DeviceReduceByKeyKernel<cub::DispatchReduceByKey<long*, long*>>(long)",
        "void dpsk::ep::cuda::get_dispatch_layout<256, 32, 8>(long const*)",
        "_combined_routing_compute",
        "void at::native::vectorized_gather_kernel<16, long>(char*)",
        "triton_poi_fused_all_gather_copy_kernel",
        "void splitKreduce_kernel<32, 16>(int)",
        "nccl_tests_gemm",
    ],
)
def test_computing_kernels_with_similar_names_are_not(tmp_path: Path, name: str) -> None:
    assert kinds(read_trace(write(tmp_path / "a.json", document([kernel(name)])))) == []


@pytest.mark.parametrize(
    ("word", "kind"),
    [("_allgather_base_", K.ALL_GATHER), ("all_to_all", K.ALL_TO_ALL), ("reduce_scatter_tensor", K.REDUCE_SCATTER),
     ("alltoall_base_", K.ALL_TO_ALL), ("recv_any_source_", K.RECV), ("wait_tensor", K.WAIT), ("gather", K.GATHER)],
)  # fmt: skip
def test_the_words_of_an_operation_tell_its_kind_in_any_spelling(word: str, kind: CollectiveKind) -> None:
    assert kind_of(word) == kind


def params(ts: Any, dur: Any = 100, name: Any = "allreduce", **more: Any) -> dict[str, Any]:
    told = {"Collective name": name, "In msg nelems": 64, "Out msg nelems": 64, "Group size": 2, "dtype": "Float"}
    return event(
        "record_param_comms", ts, dur, **{**told, "Process Group Ranks": "[0, 1]", "Process Group Name": "0", **more}
    )


def launch(ts: int, correlation: int) -> dict[str, Any]:
    return event("cudaLaunchKernelExC", ts, 5, "cuda_runtime", correlation=correlation)


def test_metadata_on_the_kernel_is_read() -> None:
    trace = read_trace(TRACES / "nccl_args_collectives_only.json.gz")
    table = trace.collectives

    assert Counter(kinds(trace)) == {K.ALL_REDUCE: 15, K.BROADCAST: 6}
    assert set(table.group.tolist()) == {0}
    assert trace.groups[0].ranks == (0, 1)
    moving = table.transfers & (table.kind == K.ALL_REDUCE)
    assert {6637568, 2049000} <= set(table.in_elements[moving].tolist())
    assert {trace.strings[index] for index in table.dtype[moving]} == {"Float"}
    assert Counter(kinds(trace, transfers=False))[K.WAIT] == 6


def test_metadata_of_the_host_operation_goes_to_the_kernel_by_its_id(tmp_path: Path) -> None:
    items = [params(1000, **{"External id": 40}), kernel("ncclKernel_AllReduce_RING", 2000, **{"External id": 40})]

    table = read_trace(write(tmp_path / "a.json", document(items))).collectives

    assert table.in_elements.tolist() == [64, 64]
    assert table.transfers.tolist() == [False, True]


def test_metadata_goes_to_the_kernel_by_the_launch_inside_where_ids_are_reused_p40(tmp_path: Path) -> None:
    """pytorch/kineto#782: from one release on, External id is the correlation."""
    items = [
        params(1000, **{"External id": 40}),
        launch(1010, 77),
        kernel("ncclKernel_AllReduce_RING", 2000, correlation=77),
    ]
    items += [params(3000, name="broadcast", **{"External id": 41, "In msg nelems": 5}), launch(3010, 78)]
    items += [kernel("ncclKernel_Broadcast_RING", 4000, correlation=78, **{"External id": 78})]

    items += [params(9000, name="broadcast", **{"External id": 78, "In msg nelems": 999})]

    trace = read_trace(write(tmp_path / "a.json", document(items)))

    moving = trace.collectives.transfers
    assert trace.collectives.in_elements[moving].tolist() == [64, 5]


def test_metadata_of_another_kind_is_not_given_to_a_kernel(tmp_path: Path) -> None:
    items = [
        params(1000, name="broadcast", **{"External id": 40}),
        kernel("ncclKernel_AllReduce_RING", 2000, **{"External id": 40}),
    ]

    table = read_trace(write(tmp_path / "a.json", document(items))).collectives

    assert table.kind.tolist() == [K.BROADCAST, K.ALL_REDUCE]
    assert table.in_elements.tolist() == [64, -1]


def test_send_recv_kernels_of_an_all_to_all_are_told_by_the_range_around_their_launch() -> None:
    trace = read_trace(TRACES / "two_ranks_of_128" / "sampled_rank-0.json.gz")

    assert Counter(kinds(trace)) == {K.ALL_TO_ALL: 4, K.ALL_REDUCE: 4, K.ALL_GATHER: 2}


def test_rocm_kernels_take_their_kind_from_the_range_around_them_on_the_stream(tmp_path: Path) -> None:
    span = {**event("nccl:all_reduce", 1000, 50, "gpu_user_annotation"), "pid": 0}
    items = [span, kernel("ncclDevKernel_Generic(x)", 1001, 40), kernel("ncclDevKernel_Generic(x)", 5000, 40)]

    assert kinds(read_trace(write(tmp_path / "a.json", document(items)))) == [K.ALL_REDUCE, K.UNKNOWN]


def test_gloo_runs_on_its_workers_and_is_enqueued_by_operators() -> None:
    trace = read_trace(TRACES / "gloo_torch_2_13_rank0.json.gz")
    table = trace.collectives

    assert kinds(trace) == [K.ALL_REDUCE] * 24
    assert kinds(trace, transfers=False) == [K.ALL_REDUCE] * 24
    assert set(table.group.tolist()) == {0}
    assert trace.groups[0].ranks == (0, 1, 2, 3)
    assert (trace.category[table.event[table.transfers]] == Category.ANNOTATION).all()


def test_sizes_of_gloo_operations_come_from_the_shapes() -> None:
    table = read_trace(TRACES / "cpu_only_rank34.json.gz").collectives

    assert set(table.in_elements.tolist()) == {321271, 2082411}


def test_the_kth_gloo_range_is_the_kth_operator_only_if_counts_agree(tmp_path: Path) -> None:
    enqueues = [event("c10d::allreduce_", 100 + index, 1, **{"Input Dims": [[index + 1]]}) for index in range(2)]
    workers = [event("gloo:all_reduce", 200 + index, 50, "user_annotation") for index in range(2)]

    both = read_trace(write(tmp_path / "a.json", document([*enqueues, *workers]))).collectives
    fewer = read_trace(write(tmp_path / "b.json", document([*enqueues[1:], *workers]))).collectives

    assert both.in_elements[both.transfers].tolist() == [1, 2]
    assert fewer.in_elements[fewer.transfers].tolist() == [-1, -1]


def test_uneven_splits_are_marked(tmp_path: Path) -> None:
    items = [
        params(1000, name="all_to_allv", **{"In split size": "[5, 5]"}),
        params(2000, name="all_to_allv", **{"In split size": "[5, 6]"}),
    ]

    assert read_trace(write(tmp_path / "a.json", document(items))).collectives.uneven.tolist() == [False, True]


def test_the_other_side_of_a_send_is_its_global_rank(tmp_path: Path) -> None:
    head = {
        "distributedInfo": {"rank": 4, "world_size": 8, "pg_config": [{"pg_name": "0", "ranks": [4, 6], "pg_size": 2}]}
    }
    items = [
        event(
            "ncclDevKernel_SendRecv",
            1,
            5,
            "kernel",
            **{"Collective name": "send", "Dst Rank": 6, "Process Group Name": "0"},
        ),
        event("nccl:recv 0<-1", 9, 5, "user_annotation"),
    ]

    table = read_trace(write(tmp_path / "a.json", document(items, head=head))).collectives

    assert table.kind.tolist() == [K.SEND, K.RECV]
    assert table.peer.tolist() == [6, 6]


def test_a_cut_list_of_ranks_is_completed_by_start_and_stride_only_where_these_agree(tmp_path: Path) -> None:
    cut = {"Process Group Ranks": "[0, 8, 16, ..., 56]", "Group size": 8, "Global rank start": 0}
    items = [params(1, **{**cut, "Process Group Name": "a", "Global rank stride": 8})]
    items += [params(2, **{**cut, "Process Group Name": "b", "Global rank stride": 4})]

    groups = read_trace(write(tmp_path / "a.json", document(items))).groups

    assert [(group.ranks, group.size) for group in groups] == [(tuple(range(0, 64, 8)), 8), ((), 8)]


def test_ranks_beyond_all_jobs_are_no_members_and_end_no_reading(tmp_path: Path) -> None:
    many = {"Process Group Ranks": "[0, 1, 2, ...]", "Group size": 1 << 30, "Global rank start": 0}
    items = [params(1, **{**many, "Process Group Name": "a", "Global rank stride": 1})]
    items += [params(2, **{"Process Group Ranks": f"[0, {'9' * 5000}]", "Process Group Name": "b"})]

    groups = read_trace(write(tmp_path / "a.json", document(items))).groups

    assert [group.ranks for group in groups] == [(), ()]


def test_sequence_numbers_are_read_where_they_are_told(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path / "a.json", document([params(1, Seq=17)]))).collectives.sequence.tolist() == [17]


def test_a_job_adds_its_own_kernels_by_an_argument_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.json", document([kernel("my_ring_exchange<8>")]))
    assert kinds(read_trace(path)) == []

    assert kinds(read_trace(path, rules=[Rule(Category.KERNEL, "my_ring", K.ALL_TO_ALL)])) == [K.ALL_TO_ALL]

    (tmp_path / "rules").write_text("# ours\nALL_GATHER my_ring_\\w+\n")
    monkeypatch.setenv("EROICA_COLLECTIVES", str(tmp_path / "rules"))
    assert kinds(read_trace(path)) == [K.ALL_GATHER]

    for line in ("ALLGATHER my_ring\n", "ALL_GATHER\n"):
        (tmp_path / "rules").write_text(line)
        with pytest.raises(UserError, match=r"rules:1: .*is not KIND REGEX"):
            read_trace(path)
    (tmp_path / "rules").write_bytes(b"ALL_GATHER \xff\n")
    with pytest.raises(UserError, match="cannot be read"):
        read_trace(path)


def test_every_rule_can_match_something() -> None:
    assert len({(rule.category, rule.pattern) for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("arrow", ["send 0->", "recv 0<-"])
def test_a_direction_to_a_rank_of_thousands_of_digits_is_not_told(tmp_path: Path, arrow: str) -> None:
    told = [event(f"nccl:{arrow}{peer}", 1000 + k, 1, "user_annotation") for k, peer in enumerate(["1", "1" * 5000])]
    groups = [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "ranks": [0, 1]}]
    made = read_trace(write(tmp_path / "t.json", document(told, distributedInfo={"rank": 0, "pg_config": groups})))
    assert made.collectives.peer.tolist() == [1, -1]
