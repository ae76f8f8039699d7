"""What a function's name tells: its normal form, where it lives in source, and what part of an iteration it is.

Works on strings alone. Used by `critical_path` (who owns an instant, and as what) and `pattern` (function identity).
The tables are heuristics over names that torch, Kineto and Python give today; each row says what it stands for, and a
name that no row knows is ordinary work of its own kind, never an error.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache


class Phase(IntEnum):
    """The part of an iteration that an event belongs to, inherited from the frames around it."""

    NONE = 0
    INPUT = 1
    """Dataloader next, and all that it calls."""
    BACKWARD = 2
    OPTIMIZER = 3
    CHECKPOINT = 4
    COMPILE = 5
    GC = 6
    COMMUNICATION = 7
    """Inside of torch.distributed or a wait for it."""
    TUNING = 8
    """Tries several kernels to see which is fastest, for a size that is new."""


class Owns(IntEnum):
    """How a host event may own an instant in which it is the innermost one."""

    WORK = 0
    """It is own work."""
    PARENT = 1
    """A label only; the frame around it owns (annotations, nn.Module frames)."""
    WAIT = 2
    """It waits for something that another event shows (a collective, the autograd thread)."""
    SYNC = 3
    """It waits for the device."""
    NOBODY = 4
    """The profiler's own doing."""
    ALLOCATOR = 5
    """Own work: the device or host allocator."""


_PHASES = (
    (re.compile(r"^enumerate\(DataLoader\)#|torch/utils/data/|^BatchSampler|^DataPipe|torchdata/"), Phase.INPUT),
    (
        re.compile(
            r"^autograd::engine::evaluate_function|^<built-in method run_backward|torch/autograd/graph\.py.*_engine_run"
        ),
        Phase.BACKWARD,
    ),
    (re.compile(r"^Optimizer\.step#|torch/optim/"), Phase.OPTIMIZER),
    (
        re.compile(
            r"torch/serialization\.py|torch/distributed/checkpoint/|safetensors/|save_checkpoint"
            r"|\): \w*(save|write|dump|store|persist)s?_\w*(checkpoint|ckpt|snapshot|weights|state_dict)"
        ),
        Phase.CHECKPOINT,
    ),
    (
        re.compile(
            r"torch/_dynamo/(?!eval_frame)|torch/_inductor/(?!output_code|runtime/)|^torchdynamo|triton/compiler/"
        ),
        Phase.COMPILE,
    ),
    (
        re.compile(
            r"triton/testing\.py|triton/runtime/autotuner\.py\(\d+\): (_bench|benchmark)|"
            r"torch/_inductor/runtime/benchmarking\.py"
        ),
        Phase.TUNING,
    ),
    (re.compile(r"^Python GC|^<built-in function collect>$|^gc\.collect"), Phase.GC),
    (
        re.compile(
            r"torch/distributed/(?!optim|fsdp|_composable|tensor|algorithms|checkpoint|pipelining)|^c10d::|^record_param_comms|"
            # DDP sends its buffers, and compares its parameters, by calls that leave no event on this thread.
            r"torch/nn/parallel/distributed\.py\(\d+\): _distributed_broadcast_coalesced|"
            # A rank that is out of data takes part in the collectives of the others, by torch's Join.
            r"torch/distributed/algorithms/join\.py|torch/nn/parallel/distributed\.py\(\d+\): _match_|"
            r"^<built-in method (_?broadcast_coalesced|_verify_params_across_processes)|"
            r"^(nccl|gloo|mpi|ucc|xccl|hccl):|"
            r"^<built-in method (wait|all_?reduce|all_?gather|reduce_?scatter|broadcast|barrier|send|recv)[a-z_]*"
            r" of .*(Work|ProcessGroup|PyCapsule|torch\._C\._distributed)|^_c10d_functional::wait_tensor"
        ),
        Phase.COMMUNICATION,
    ),
)

_SYNC = re.compile(r"^(cuda|hip|cu|mtia|xpu|ze)\w*Synchronize\w*$|^hipMemcpyWithStream$|^ur(QueueFinish|EventWait)$")
_ALLOCATOR = re.compile(
    r"^(cuda|hip|cu)\w*(Malloc|Free|MemAlloc|HostAlloc|MemCreate|MemMap|MemUnmap|MemRelease|HostRegister)\w*$|"
    r"^zeMem(Alloc|Free)\w*$|^urUSM(\w*Alloc|Free)$"
)
TUNABLE = re.compile(r"^aten::(\w*convolution\w*|\w*mm|linear|matmul|\w*attention\w*)$")
"""Operators that ask nothing of the device when they run, but where the library searches for the fastest kernel."""
ENGINE_WAIT = re.compile(r"^<built-in method run_backward |torch/autograd/graph\.py.*_engine_run_backward")
"""The driving thread waits for the autograd engine."""
ENGINE_WAIT_NAME = "run_backward"
"""Part of the name of functions that do."""
_WAIT = re.compile(rf"{ENGINE_WAIT.pattern}|^<built-in method (acquire|wait) of ")
_NOBODY = re.compile(
    r"torch/profiler/|torch/autograd/profiler\.py|^PyTorch Profiler|^<built-in method \w*profiler\w*|"
    r"^Activity Buffer Request|^ProfilerStep\*"
)
_LABEL = re.compile(r"^nn\.Module: ")
_MARKERS_THAT_OWN = re.compile(r"^enumerate\(DataLoader\)#|^Optimizer\.step#|^Python GC")
"""torch's own record_function ranges: where no Python stacks were taken, they are the only name that their time has."""

_FRAME = re.compile(r"^(?P<path>.+?)\((?P<line>\d+)\): (?P<function>.*)$", re.DOTALL)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_BUILTIN = re.compile(r"^<built-in (?:function|method) (?P<name>[\w.]+)(?: of (?P<owner>.*))?>$", re.DOTALL)
_TRAILING_NUMBER = re.compile(r"_\d+$")

_LIBRARIES = frozenset(
    "torch torchvision torchaudio torchdata numpy scipy pandas pyarrow transformers accelerate datasets tokenizers "
    "lightning pytorch_lightning lightning_fabric deepspeed triton apex flash_attn xformers einops timm PIL cv2 tqdm "
    "wandb tensorboard ray dask multiprocess huggingface_hub safetensors peft bitsandbytes sklearn jax nvidia "
    "transformer_engine vllm sglang eroica composer".split()
)
_STDLIB = frozenset(sys.stdlib_module_names)


@dataclass(frozen=True, slots=True)
class HostName:
    """What a host event's name tells."""

    text: str
    """Normal form: no addresses, no instance numbers."""
    location: str | None
    """"path:line" if the name is a Python frame."""
    is_user: bool
    """The frame is neither of the standard library, nor of a known library, nor of an installed package."""
    phase: Phase
    owns: Owns


def _is_user_path(path: str) -> bool:
    if path.startswith("<") or "site-packages/" in path or "dist-packages/" in path:
        return False
    parts = path.replace("\\", "/").split("/")
    if any(re.fullmatch(r"python3(\.\d+)?", part) for part in parts):
        return False
    first = next((part for part in parts if part), "")
    if path.startswith("/"):
        return True
    if "eroica/demos/" in path:
        return True
    stem = first.removesuffix(".py")
    return first not in _LIBRARIES and not (stem in _STDLIB and (len(parts) > 1 or first.endswith(".py")))


@lru_cache(maxsize=1 << 15)
def read_host_name(name: str, *, annotation: bool = False, overhead: bool = False) -> HostName:
    """Classify the name of a host event. `annotation`: a record_function range; `overhead`: the profiler's own
    event."""
    phase = next((phase for pattern, phase in _PHASES if pattern.search(name)), Phase.NONE)
    if overhead or _NOBODY.search(name):
        owns = Owns.NOBODY
    elif annotation and not _MARKERS_THAT_OWN.search(name):
        owns = Owns.WAIT if phase == Phase.COMMUNICATION else Owns.PARENT
    elif _LABEL.search(name):
        owns = Owns.PARENT
    elif _ALLOCATOR.search(name):
        owns = Owns.ALLOCATOR
    elif _SYNC.search(name):
        owns = Owns.SYNC
    elif phase == Phase.COMMUNICATION or _WAIT.search(name):
        owns = Owns.WAIT
    else:
        owns = Owns.WORK
    frame = _FRAME.match(name)
    if frame:
        path = frame["path"]
        return HostName(f"{frame['function']}", f"{path}:{frame['line']}", _is_user_path(path), phase, owns)
    builtin = _BUILTIN.match(name)
    if builtin:
        return HostName(builtin["name"], None, False, phase, owns)
    text = _ADDRESS.sub("", name)
    if _LABEL.search(text):
        text = _TRAILING_NUMBER.sub("", text)
    return HostName(text, None, False, phase, owns)


def _strip_angles(text: str) -> str:
    """Leave out template arguments; unbalanced brackets (operator<, operator->) keep the text as it is."""
    out: list[str] = []
    depth = 0
    for piece in re.split(r"([<>])", text):
        if piece == "<":
            depth += 1
        elif piece == ">":
            depth -= 1
            if depth < 0:
                return text
        elif not depth:
            out.append(piece)
    return "".join(out) if depth == 0 else text


_ANONYMOUS = re.compile(r"\(anonymous namespace\)::|\(anonymous\)::")
_RETURN_TYPE = re.compile(r"^(?:void|static|inline|__global__)\s+")
_NUMBERS = re.compile(r"_0d1d\w*$|_\d+$")


@lru_cache(maxsize=1 << 13)
def normal_kernel_name(name: str) -> str:
    """Kernel name without return type, arguments and template noise: equal for the same code on every rank.

    An element-wise kernel is told apart by its functor, so the innermost template argument that names one is kept in
    brackets: "vectorized_elementwise_kernel [CUDAFunctor_add]".
    """
    text = _RETURN_TYPE.sub("", _ANONYMOUS.sub("", _ADDRESS.sub("", name)))
    functor = ""
    if "elementwise" in text or "reduce_kernel" in text:
        found = re.findall(r"([A-Za-z_]\w*(?:[Ff]unctor|_kernel_cuda|Ops|Op)\w*)", text.partition("<")[2])
        functor = f" [{found[0]}]" if found else ""
    text = _strip_angles(text)
    cut = text.find("(")
    if cut > 0:
        text = text[:cut]
    text = _NUMBERS.sub("", text.strip())
    return (text or _ADDRESS.sub("", name))[:160] + functor[:80]
