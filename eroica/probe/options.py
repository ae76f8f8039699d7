"""Options of loaders, of DistributedDataParallel and of FSDP, and where anomaly detection is asked for, for the
environment snapshot.

They are read where they are given: from the iterator of a loader at its first batch, from a DistributedDataParallel
that was just made, from the arguments of `fully_shard`. What lies deeper (schedules, hooks of communication) is left.
Of a data set its class and the line of its code are kept: worker processes run it, whose stacks no capture holds. Of
models that share gradients, how many bytes these have.
The models of both are those whose mode tells evaluation (`phases`).
"""

from __future__ import annotations

import functools
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from eroica.probe.environment import TRACEBACK
from eroica.probe.phases import EVALUATION, wrapped_everywhere
from eroica.probe.recorder import RECORDER
from eroica.ring import Ring

_LOADER = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "drop_last")
_MOST_WRAPPERS = 8
"""Data sets within data sets: subsets, caches."""
_MOST_PATH = 140
"""Characters of a path that are kept."""
_TRACEBACKS = 3
"""The first one reads the sources from their files, later ones do not; half a millisecond in all."""
_DDP = ("bucket_bytes_cap", "find_unused_parameters", "gradient_as_bucket_view", "static_graph", "broadcast_buffers")


def of_loader(ring: Ring, iterator: Any) -> None:
    """An iterator is asked for its first batch. May raise; the hook is guarded."""
    values: dict[str, object] = {name: getattr(iterator, f"_{name}", None) for name in _LOADER}
    values["batch_size"] = getattr(getattr(iterator, "_index_sampler", None), "batch_size", None)
    values |= _data_set(getattr(iterator, "_dataset", None))
    RECORDER.environment.option(ring, "loader", values)


def _data_set(data: Any) -> dict[str, object]:
    """Class of a data set and the line at which its samples are made, below what merely wraps or chooses from it."""
    for _ in range(_MOST_WRAPPERS):
        # Not `data.dataset`, which may be code of the user's: one that opens a file in each worker, say.
        inner = getattr(data, "__dict__", {}).get("dataset")
        if not hasattr(type(inner), "__getitem__") and not hasattr(type(inner), "__iter__"):
            break
        data = inner
    for method in ("__getitems__", "__getitem__", "__iter__"):
        code = getattr(getattr(type(data), method, None), "__code__", None)
        if code is not None:
            return {"data": type(data).__qualname__, "data_at": _place(code.co_filename, code.co_firstlineno)}
    return {}


def _place(file: str, line: int) -> str:
    """ "path:line", the end of the path if it is long: notes are cut, and the line is at the end."""
    return f"{file[-_MOST_PATH:]}:{line}"


def anomaly(module: Any) -> None:
    """`torch.autograd.anomaly_mode`: note which line of the job asks for it."""
    for name in ("detect_anomaly", "set_detect_anomaly"):
        kind = getattr(module, name, None)
        if kind is not None:
            _note_uses(kind)


def _traceback_s() -> float:
    """What one of the tracebacks takes that anomaly detection keeps for each node, from here: the training loop is
    called from the same place, and calls deeper."""
    spent_ns = []
    for _ in range(_TRACEBACKS):
        begin_ns = time.perf_counter_ns()
        traceback.format_list(traceback.extract_stack())
        spent_ns.append(time.perf_counter_ns() - begin_ns)
    return min(spent_ns) / 1e9


def _note_uses(kind: Any) -> None:
    original = kind.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        is_on = kwargs.get("mode", args[0] if args else True) if kind.__name__ == "set_detect_anomaly" else True
        if is_on and not RECORDER.is_off:
            try:
                code = sys._getframe(1).f_code
                place = _place(code.co_filename, sys._getframe(1).f_lineno)
                RECORDER.environment.option(RECORDER.ring, "anomaly", {"at": place, "in": code.co_name})
                if not RECORDER.environment.has(TRACEBACK):
                    RECORDER.environment.value(RECORDER.ring, TRACEBACK, _traceback_s())
            except Exception as error:
                RECORDER.fail(error)

    kind.__init__ = __init__


def data_parallel(module: Any) -> None:
    """`torch.nn.parallel.distributed`."""
    original = module.DistributedDataParallel.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        _tell("DistributedDataParallel", args[0] if args else kwargs.get("module"))
        original(self, *args, **kwargs)
        _keep("ddp", {name: getattr(self, name, None) for name in _DDP}, getattr(self, "module", None))
        _count_gradients("ddp", self, is_sum=True)

    module.DistributedDataParallel.__init__ = __init__


def _tell(wrapper: str, model: Any) -> None:
    """Note what is made ready to train with others, before it is: where ranks differ, that is what they trip over."""
    ring = RECORDER.ring
    if ring is None or not hasattr(model, "named_parameters"):
        return
    try:
        ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
        sizes = [p.numel() for name, p in model.named_parameters() if p.requires_grad and name not in ignored]
        ring.note(model=f"{wrapper} of {len(sizes)} parameters, {sum(sizes):,} elements")
    except (RuntimeError, ValueError):
        return  # parameters without a size so far: the wrapper will say what it thinks of them
    except Exception as error:
        RECORDER.fail(error)


def fully_shard(module: Any) -> None:
    """The module of torch that defines `fully_shard`."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            precision, offload = kwargs.get("mp_policy"), kwargs.get("offload_policy")
            _keep(
                "fsdp",
                {
                    "reshard_after_forward": kwargs.get("reshard_after_forward"),
                    "param_dtype": str(getattr(precision, "param_dtype", None)),
                    "reduce_dtype": str(getattr(precision, "reduce_dtype", None)),
                    "offload": type(offload).__name__ if offload is not None else None,
                },
                args[0] if args else kwargs.get("module"),
                replaces=True,  # the layers come first, the root last
            )
            _count_gradients("fsdp", args[0] if args else kwargs.get("module"), is_sum=False)
            return result

        return wrapper

    wrapped_everywhere(module, "fully_shard", make)


_gradients: dict[str, int] = {}


def _count_gradients(kind: str, model: Any, *, is_sum: bool) -> None:
    """Note how many bytes the gradients have that are reduced over ranks. is_sum: each model is reduced for itself;
    else the largest is the whole of which others are parts."""
    try:
        if RECORDER.is_off:
            return
        shared = [p for p in model.parameters() if p.requires_grad] if hasattr(model, "parameters") else []
        num_bytes = sum(p.numel() * p.element_size() for p in shared)
        known = _gradients.get(kind, 0)
        _gradients[kind] = known + num_bytes if is_sum else max(known, num_bytes)
        RECORDER.environment.value(RECORDER.ring, f"gradients.{kind}.num_bytes", _gradients[kind])
    except Exception as error:
        RECORDER.fail(error)


def _keep(kind: str, values: Mapping[str, object], model: Any, replaces: bool = False) -> None:
    try:
        if not RECORDER.is_off:
            if hasattr(model, "training"):
                EVALUATION.follow(model, replaces)
            RECORDER.environment.option(RECORDER.ring, kind, values)
    except Exception as error:
        RECORDER.fail(error)
