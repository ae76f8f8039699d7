"""Options of loaders, of DistributedDataParallel and of FSDP, for the environment snapshot.

They are read where they are given: from the iterator of a loader at its first batch, from a DistributedDataParallel
that was just made, from the arguments of `fully_shard`. What lies deeper (schedules, hooks of communication) is left.
The models of both are those whose mode tells evaluation (`phases`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from eroica.probe.phases import EVALUATION, wrapped_everywhere
from eroica.probe.recorder import RECORDER
from eroica.ring import Ring

_LOADER = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "drop_last")
_DDP = ("bucket_bytes_cap", "find_unused_parameters", "gradient_as_bucket_view", "static_graph", "broadcast_buffers")


def of_loader(ring: Ring, iterator: Any) -> None:
    """An iterator is asked for its first batch. May raise; the hook is guarded."""
    values: dict[str, object] = {name: getattr(iterator, f"_{name}", None) for name in _LOADER}
    values["batch_size"] = getattr(getattr(iterator, "_index_sampler", None), "batch_size", None)
    RECORDER.environment.option(ring, "loader", values)


def data_parallel(module: Any) -> None:
    """`torch.nn.parallel.distributed`."""
    original = module.DistributedDataParallel.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        _tell("DistributedDataParallel", args[0] if args else kwargs.get("module"))
        original(self, *args, **kwargs)
        _keep("ddp", {name: getattr(self, name, None) for name in _DDP}, getattr(self, "module", None))

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
            return result

        return wrapper

    wrapped_everywhere(module, "fully_shard", make)


def _keep(kind: str, values: Mapping[str, object], model: Any, replaces: bool = False) -> None:
    try:
        if not RECORDER.is_off:
            if hasattr(model, "training"):
                EVALUATION.follow(model, replaces)
            RECORDER.environment.option(RECORDER.ring, kind, values)
    except Exception as error:
        RECORDER.fail(error)
