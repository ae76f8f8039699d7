"""What names tell, on names from real traces (design section 4: function identity, critical path)."""

# ruff: noqa: E501 - kernel names stand here as traces have them

from __future__ import annotations

import json
from functools import lru_cache
from gzip import decompress

import pytest

from eroica.names import Owns, Phase, normal_kernel_name, read_host_name
from tests.traces import TRACES


@pytest.mark.parametrize(
    ("raw", "normal"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", "ncclKernel_AllGather_RING_LL_Sum_int8_t"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8::Params)", "cutlass::Kernel2"),
        ("triton_poi_fused_add_mul_0", "triton_poi_fused_add_mul"),
        ("triton_poi_fused_add_mul_17", "triton_poi_fused_add_mul"),
        ("_kernel_0d1d2de3de", "_kernel"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)", "at::native::vectorized_elementwise_kernel [CUDAFunctor_add]"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::TensorListMetadata<4>>(int)", "at::native::multi_tensor_apply_kernel"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD"),
        ("Cijk_Ailk_Bljk_BBS_BH_MT128x128x32_SN", "Cijk_Ailk_Bljk_BBS_BH_MT128x128x32_SN"),
        ("", ""),
    ],
)  # fmt: skip
def test_kernel_names_lose_types_arguments_and_instance_numbers(raw: str, normal: str) -> None:
    assert normal_kernel_name(raw) == normal


def test_kernels_that_differ_in_their_functor_stay_apart() -> None:
    add = "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl<at::native::CUDAFunctor_add<float> >()>(int)"
    mul = add.replace("CUDAFunctor_add", "BinaryFunctor")
    assert normal_kernel_name(add) != normal_kernel_name(mul)


@pytest.mark.parametrize(
    "name", ["operator<", "a<b", "a>b<", "x" * 5000, "void ", "(anonymous namespace)::", "<<<>>>", "f(" * 300]
)
def test_odd_kernel_names_keep_a_bounded_name(name: str) -> None:
    assert 0 < len(normal_kernel_name(name)) <= 240 or not name.strip()


FRAMES = [
    ("train.py(41): step", "train.py:41", True),
    ("/workspace/train/data.py(41): __getitem__", "/workspace/train/data.py:41", True),
    ("/home/me/my.project/run(1).py(7): f", "/home/me/my.project/run(1).py:7", True),
    ("torch/nn/modules/linear.py(130): forward", "torch/nn/modules/linear.py:130", False),
    ("/usr/lib/python3.11/threading.py(320): wait", "/usr/lib/python3.11/threading.py:320", False),
    ("/opt/venv/lib/python3.10/site-packages/mylib/x.py(3): f", "/opt/venv/lib/python3.10/site-packages/mylib/x.py:3", False),
    ("threading.py(320): wait", "threading.py:320", False),
    ("json/decoder.py(20): decode", "json/decoder.py:20", False),
    ("<string>(1): <module>", "<string>:1", False),
    ("<frozen importlib._bootstrap>(1022): _find_and_load", "<frozen importlib._bootstrap>:1022", False),
    ("transformers/models/bert/modeling_bert.py(10): forward", "transformers/models/bert/modeling_bert.py:10", False),
    ("models/bert.py(10): forward", "models/bert.py:10", True),
    ("eroica/demos/train.py(10): main", "eroica/demos/train.py:10", True),
]  # fmt: skip


@pytest.mark.parametrize(("name", "location", "is_user"), FRAMES)
def test_frames_tell_their_place_and_whose_code_they_are(name: str, location: str, is_user: bool) -> None:
    read = read_host_name(name)
    assert (read.location, read.is_user) == (location, is_user)
    assert "(" not in read.text.removesuffix("()")


def test_builtins_and_modules_lose_what_differs_between_processes() -> None:
    one = read_host_name("<built-in method step of Adam object at 0x7f0011223344>")
    other = read_host_name("<built-in method step of Adam object at 0x7eff55667788>")
    assert one == other and one.text == "step" and one.location is None and not one.is_user
    assert (
        read_host_name("nn.Module: Linear_0").text == read_host_name("nn.Module: Linear_11").text == "nn.Module: Linear"
    )
    assert read_host_name("<built-in function sleep>").text == "sleep"
    assert read_host_name("Thing at 0x7f00").text == "Thing"


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", Phase.INPUT),
        ("torch/utils/data/dataloader.py(708): __next__", Phase.INPUT),
        ("autograd::engine::evaluate_function: MmBackward0", Phase.BACKWARD),
        ("Optimizer.step#AdamW.step", Phase.OPTIMIZER),
        ("torch/optim/adamw.py(220): step", Phase.OPTIMIZER),
        ("torch/serialization.py(850): save", Phase.CHECKPOINT),
        ("torch/distributed/checkpoint/state_dict_saver.py(70): save", Phase.CHECKPOINT),
        ("train.py(9): save_checkpoint", Phase.CHECKPOINT),
        ("torch/_dynamo/convert_frame.py(500): __call__", Phase.COMPILE),
        ("torch/_dynamo/eval_frame.py(500): _fn", Phase.NONE),
        ("Python GC", Phase.GC),
        ("<built-in function collect>", Phase.GC),
        ("torch/distributed/distributed_c10d.py(2810): all_reduce", Phase.COMMUNICATION),
        ("torch/distributed/fsdp/_runtime_utils.py(330): _pre_forward", Phase.NONE),
        ("torch/nn/parallel/distributed.py(2360): _distributed_broadcast_coalesced", Phase.COMMUNICATION),
        ("torch/nn/parallel/distributed.py(1964): _match_all_reduce_for_bwd_pass", Phase.COMMUNICATION),
        ("torch/distributed/algorithms/join.py(230): __exit__", Phase.COMMUNICATION),
        ("torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py(30): fp16_compress_hook", Phase.NONE),
        ("<built-in method _broadcast_coalesced of PyCapsule object at 0x7f>", Phase.COMMUNICATION),
        ("c10d::allreduce_", Phase.COMMUNICATION),
        ("gloo:all_reduce", Phase.COMMUNICATION),
        ("record_param_comms", Phase.COMMUNICATION),
        ("aten::mm", Phase.NONE),
    ],
)
def test_phases_follow_from_names(name: str, phase: Phase) -> None:
    assert read_host_name(name).phase == phase


@pytest.mark.parametrize(
    ("name", "annotation", "owns"),
    [
        ("cudaStreamSynchronize", False, Owns.SYNC),
        ("hipDeviceSynchronize", False, Owns.SYNC),
        ("cudaEventSynchronize", False, Owns.SYNC),
        ("cuStreamSynchronize", False, Owns.SYNC),
        ("zeEventHostSynchronize", False, Owns.SYNC),
        ("urQueueFinish", False, Owns.SYNC),
        ("urEnqueueKernelLaunch", False, Owns.WORK),
        ("urUSMDeviceAlloc", False, Owns.ALLOCATOR),
        ("zeMemFree", False, Owns.ALLOCATOR),
        ("zeMemGetAllocProperties", False, Owns.WORK),
        ("cudaMalloc", False, Owns.ALLOCATOR),
        ("cudaFree", False, Owns.ALLOCATOR),
        ("cudaHostAlloc", False, Owns.ALLOCATOR),
        ("cuMemCreate", False, Owns.ALLOCATOR),
        ("hipMalloc", False, Owns.ALLOCATOR),
        ("cudaLaunchKernel", False, Owns.WORK),
        ("cudaMemcpyAsync", False, Owns.WORK),
        ("<built-in method run_backward of torch._C._EngineBase object at 0x7f>", False, Owns.WAIT),
        ("<built-in method acquire of _thread.lock object at 0x7f>", False, Owns.WAIT),
        ("<built-in method wait of torch._C._distributed_c10d.Work object at 0x7f>", False, Owns.WAIT),
        ("torch/profiler/profiler.py(800): step", False, Owns.NOBODY),
        ("nn.Module: Linear_3", False, Owns.PARENT),
        ("my own range", True, Owns.PARENT),
        ("ProfilerStep#12", True, Owns.PARENT),
        ("Optimizer.step#SGD.step", True, Owns.WORK),
        ("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", True, Owns.WORK),
        ("nccl:all_reduce", True, Owns.WAIT),
        ("aten::mm", False, Owns.WORK),
    ],
)
def test_who_may_own_an_instant_follows_from_names(name: str, annotation: bool, owns: Owns) -> None:
    assert read_host_name(name, annotation=annotation).owns == owns


def test_the_profilers_own_events_never_own() -> None:
    assert read_host_name("Activity Buffer Request", annotation=True, overhead=True).owns == Owns.NOBODY
    assert read_host_name("anything", overhead=True).owns == Owns.NOBODY


@lru_cache
def names_of_real_traces() -> list[str]:
    found: set[str] = set()
    for path in sorted(TRACES.rglob("*.json.gz")):
        text = decompress(path.read_bytes()).decode("utf-8", "replace")
        found.update(str(e.get("name")) for e in json.loads(text)["traceEvents"] if isinstance(e, dict))
    return sorted(found)


def test_no_name_of_a_real_trace_is_refused_or_keeps_an_address() -> None:
    names = names_of_real_traces()
    assert len(names) > 500
    for name in names:
        read = read_host_name(name)
        assert read.text and " at 0x" not in read.text and " at 0x" not in normal_kernel_name(name)
        assert read_host_name(name) == read


def test_normal_names_of_kernels_are_their_own_normal_names() -> None:
    for name in names_of_real_traces():
        normal = normal_kernel_name(name)
        assert normal_kernel_name(normal).partition(" [")[0] == normal.partition(" [")[0]
