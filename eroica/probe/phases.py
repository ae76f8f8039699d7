"""Phases: what a rank does instead of training, as records of kind PHASE; nested ones are records of their own.

    save, load      torch.save, torch.load; torch.distributed.checkpoint's save, async_save (until it returns) and load
    compile         from the first to the last of the compiler's own start and end signals that overlap
    rendezvous      init_process_group, new_group
    workers         worker processes of a loader are started, as each new iterator of it does unless they are kept
    profile         a profiler of the job's own ends, and hands its trace to whoever writes it
    teardown        destroy_process_group; of the whole job a note `leaving`, too, so that noise after it is no hang
    evaluation      from a batch that finds all models of the job (DistributedDataParallel, `fully_shard`) in evaluation
                    mode, until a batch that finds one in training mode, a step, or teardown

Evaluation is told by the mode of models and not by `no_grad` or `inference_mode`, which are all over training itself
(metrics, moving averages, clipping). `Module.eval` and `Module.train` are not hooked: the compiler traces through them,
and many loops call them in each step. So a job without these wrappers has no such phase; its evaluation is seen by
whoever reads which loader the batches come from.

`compile` and `evaluation` may begin on one thread and end on another, so the records are kept here and not on a stack.
Functions that a script imported by name before `import eroica` are replaced in torch's modules and in `__main__`, not
elsewhere.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from time import monotonic_ns
from types import ModuleType
from typing import Any

from eroica.probe import meeting
from eroica.probe.recorder import RECORDER
from eroica.ring import PHASE, PHASES, Ring, what

MOST_NOTES = 16
"""Notes on leaving that one process makes; a ring has little room, and some tests form and end jobs by the hundred."""

MOST_MODELS = 8
"""Models that are asked for their mode at each batch."""

_counts: Counter[str] = Counter()


def begin(name: str, *, arms: bool = False) -> tuple[Ring, int, int] | None:
    """Record that the phase `name` begins; None if nothing is recorded. Raises nothing.

    `arms`: make the ring if need be. Only for what ranks alone do: their helper programs save and load, too.
    """
    ring = RECORDER.ring or (RECORDER.arm() if arms else None)
    if ring is None:
        return None
    try:
        error = sys.exception()
        if error is not None:
            RECORDER.handles(ring, error)
        begin_ns = monotonic_ns()
        _counts[name] += 1
        kind = what(PHASE, PHASES.index(name))
        return ring, ring.begin(kind, begin_ns, -1, 0, _counts[name], 0, RECORDER.num_steps), begin_ns
    except Exception as error:
        RECORDER.fail(error)
        return None


def end(begun: tuple[Ring, int, int] | None, raised: bool = False) -> None:
    """The end of what `begin` returned. Raises nothing."""
    if begun is None or RECORDER.ring is not begun[0]:
        return
    ring, number, begin_ns = begun
    try:
        ring.end(number, monotonic_ns() - begin_ns, raised)
    except Exception as error:
        RECORDER.fail(error)


def wrap(module: Any, function: str, name: str, *, arms: bool = False) -> None:
    """Make each call of `module.function` a phase."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if name == "teardown":
                EVALUATION.over()
            if arms:
                _joins(args, kwargs)
            begun = begin(name, arms=arms)
            if name == "teardown":
                _leaves(begun, args, kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException:
                end(begun, True)
                raise
            end(begun)
            return result

        return wrapper

    wrapped_everywhere(module, function, make)


def wrapped_everywhere(module: Any, function: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `make(original)` in the place of `module.function` and of its copies in torch's modules and in `__main__`."""
    original = getattr(module, function, None)
    if original is None:  # another version of torch
        return
    wrapper = make(original)
    setattr(module, function, wrapper)
    for name, other in list(sys.modules.items()):
        if name == "__main__" or name == "torch" or name.startswith("torch."):
            names = getattr(other, "__dict__", None)
            if isinstance(names, dict) and names.get(function) is original:
                names[function] = wrapper


def _joins(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note where the rank looks for the others, before it does."""
    ring = RECORDER.ring or RECORDER.arm()
    if ring is None:
        return
    try:
        ring.note(joins=meeting.told(args, kwargs, os.environ))
    except Exception as error:
        RECORDER.fail(error)


def _leaves(begun: tuple[Ring, int, int] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note that the rank leaves the job, if it is the whole of it whose groups are destroyed."""
    if begun is None or _counts["teardown"] > MOST_NOTES:
        return
    group = args[0] if args else kwargs.get("group")
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        if group is None or distributed is None or group is distributed.GroupMember.WORLD:
            RECORDER.leave(sys.exc_info()[1])
    except Exception as error:
        RECORDER.fail(error)


def serialization(module: ModuleType) -> None:
    """`torch.serialization`."""
    wrap(module, "save", "save")
    wrap(module, "load", "load")


def workers(module: Any) -> None:
    """`torch.utils.data.dataloader`: an iterator that starts processes."""
    iterator = getattr(module, "_MultiProcessingDataLoaderIter", None)
    if iterator is not None:
        _wrap_method(iterator, "__init__", "workers")


def traces(module: Any) -> None:
    """`torch.profiler.profiler`: only a trace that is complete is ended so, and handed on; steps between are free."""
    profiler = getattr(module, "profile", None)
    for method in ("stop_trace", "_trace_ready"):
        if hasattr(profiler, method):
            _wrap_method(profiler, method, "profile")


def _wrap_method(owner: Any, method: str, name: str) -> None:
    """Make each call of a method a phase."""
    original = getattr(owner, method)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        begun = begin(name)
        try:
            result = original(*args, **kwargs)
        except BaseException:
            end(begun, True)
            raise
        end(begun)
        return result

    setattr(owner, method, wrapper)


def saver(module: ModuleType) -> None:
    """`torch.distributed.checkpoint.state_dict_saver`."""
    wrap(module, "save", "save")
    wrap(module, "async_save", "save")


def restorer(module: ModuleType) -> None:
    """`torch.distributed.checkpoint.state_dict_loader`."""
    wrap(module, "load", "load")


def groups(module: ModuleType) -> None:
    """`torch.distributed.distributed_c10d`."""
    wrap(module, "init_process_group", "rendezvous", arms=True)
    wrap(module, "new_group", "rendezvous")
    wrap(module, "destroy_process_group", "teardown")


def compiler(module: Any) -> None:
    """`torch._dynamo.callback`: its handler runs the lists of callbacks at the first start and at the last end.

    The methods are wrapped, since `torch._dynamo.reset()` empties the lists.
    """
    handler = getattr(module, "CompilationCallbackHandler", None)
    if handler is None or not hasattr(handler, "run_start_callbacks"):  # another version of torch
        return
    start, stop = handler.run_start_callbacks, handler.run_end_callbacks
    begun: list[tuple[Ring, int, int] | None] = []

    @functools.wraps(start)
    def run_start_callbacks(self: Any, *args: Any) -> Any:
        begun.append(begin("compile"))
        return start(self, *args)

    @functools.wraps(stop)
    def run_end_callbacks(self: Any, *args: Any) -> Any:
        if begun:
            end(begun.pop())
        return stop(self, *args)

    handler.run_start_callbacks, handler.run_end_callbacks = run_start_callbacks, run_end_callbacks


class Evaluation:
    """The models that are trained here, and the evaluation under way."""

    def __init__(self) -> None:
        self.models: list[Callable[[], Any]] = []
        self._begun: tuple[Ring, int, int] | None = None
        self._is_on = False
        self._is_blind = False
        """Steps are made in evaluation mode (frozen statistics): it says nothing until training mode is seen again."""

    def follow(self, model: Any, replaces: bool = False) -> None:
        """`model` was made ready for training with others; `replaces`: it is the whole of which others were parts."""
        if replaces:
            self.models.clear()
        self.models.append(weakref.ref(model))
        del self.models[:-MOST_MODELS]

    def at_next(self) -> None:
        """A batch is asked for; called only if there are models."""
        modes = [model.training for model in (known() for known in self.models) if model is not None]
        if not modes or any(modes):
            self._is_blind = False
            self.over()
        elif not (self._is_on or self._is_blind):
            self._begun, self._is_on = begin("evaluation"), True

    def at_step(self) -> None:
        """A step begins; called only if there are models."""
        if self._is_on:
            self._is_blind = not any(
                model.training for model in (known() for known in self.models) if model is not None
            )
            self.over()

    def over(self) -> None:
        """The end, if one is under way."""
        if self._is_on:
            self._is_on = False
            end(self._begun)


EVALUATION = Evaluation()
