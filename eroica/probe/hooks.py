"""Hooks on the training loop: dataloader next, optimizer step, gradient scaler.

Each is placed once, by `place`, when its module of torch has been imported, and stays for the life of the process: a
hook that removes itself while torch walks over its hooks would break the walk. After a fault they are empty. What they
record is raw: every next, and every outermost step; what an iteration is made of is learnt by whoever reads the ring.

The three places see plain loops, several loader workers, torchdata, accelerate, the Trainer of transformers and
Lightning, closures, compiled steps and FSDP2 alike. They do not see an optimizer that is no `torch.optim.Optimizer`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import weakref
from collections.abc import Callable
from time import monotonic_ns
from types import FrameType, ModuleType
from typing import Any

from eroica.probe import collectives, options, phases
from eroica.probe.fallback import EVERY_NS, FALLBACK
from eroica.probe.phases import EVALUATION
from eroica.probe.recorder import RECORDER
from eroica.probe.thrift import LOOK_EVERY
from eroica.ring import NEXT, NUM_NEXTS, NUM_SKIPPED, NUM_STEPS, SKIPPED, STEP, Ring, what

_placed: set[str] = set()
_numbers: dict[int, int] = {}
"""By `id`: the numbers of the data sets and optimizers that have been met, 1, 2, ... An entry goes with its object."""
_next_number = itertools.count(1)
_MOST_NUMBERS = 100_000
"""Objects told apart at one time; further ones are number 0. An optimizer per parameter makes thousands."""


def place(name: str, module: ModuleType) -> None:
    """Put the hooks called `name` in place in `module` of torch, once. Raises nothing."""
    if name in _placed:
        return
    _placed.add(name)
    try:
        _PLACES[name](module)
    except Exception as error:
        RECORDER.fail(error)


def _number(source: object) -> int:
    """Number of a data set or optimizer that was not met before; 0 if there are too many."""
    key = id(source)
    if len(_numbers) >= _MOST_NUMBERS:
        return 0
    number = _numbers[key] = next(_next_number)
    with contextlib.suppress(TypeError):  # a list, say: another one at its place would take over its number
        weakref.finalize(source, _numbers.pop, key, None).atexit = False
    return number


def _loader(module: Any) -> None:
    """Class-level: iterators of one and of several workers, and those of torchdata, inherit it."""
    iterator = module._BaseDataLoaderIter
    recorder, numbers = RECORDER, _numbers
    original = iterator.__next__

    @functools.wraps(original)
    def __next__(self: Any) -> Any:
        # In one piece, without a call of our own that could be spared: this runs in every step of everybody.
        ring = recorder.ring or recorder.arm()
        if ring is None:
            return original(self)
        number = begin_ns = 0
        try:
            if EVALUATION.models:
                EVALUATION.at_next()
            if not getattr(self, "_num_yielded", 1):
                options.of_loader(ring, self)
            begin_ns = monotonic_ns()
            data = getattr(self, "_dataset", None)  # outlives its iterators and, with most trainers, its loaders
            source = numbers.get(id(data)) or _number(data)
            number = ring.begin(NEXT, begin_ns, -1, source, recorder.num_nexts + 1, 0, recorder.num_steps)
        except Exception as error:
            recorder.fail(error)
        try:
            batch = original(self)
        except BaseException as error:
            _next_ended(ring, number, begin_ns, True)
            if not isinstance(error, StopIteration):
                recorder.capture.interrupted(ring)
                recorder.missed(error)
            raise
        _next_ended(ring, number, begin_ns, False)
        return batch

    iterator.__next__ = __next__
    phases.workers(module)


def _next_ended(ring: Ring, number: int, begin_ns: int, raised: bool) -> None:
    if RECORDER.ring is not ring:
        return
    try:
        ring.end(number, monotonic_ns() - begin_ns, raised)
        RECORDER.num_nexts = num_nexts = RECORDER.num_nexts + 1
        ring.set(NUM_NEXTS, num_nexts)
        RECORDER.capture.fetched(ring, RECORDER.num_steps, num_nexts)
        if RECORDER.capture.has_begun:
            RECORDER.look_again(ring)
        if num_nexts % LOOK_EVERY == 1 and not RECORDER.num_steps:
            RECORDER.look(ring)
    except Exception as error:
        RECORDER.fail(error)


class _Steps:
    """The step under way. Optimizers nest: a subclass that calls `super().step()`, ZeroRedundancyOptimizer."""

    def __init__(self, file: str) -> None:
        self.file = file
        """Source file of torch's wrapper around every `step`."""
        self.number = 0
        self.begin_ns = 0

    def before(self, optimizer: object, args: object, kwargs: object) -> None:
        ring = RECORDER.ring or RECORDER.arm()
        if ring is None:
            return
        try:
            if RECORDER.depth and not _is_inside(self.file):
                # The last step left by an exception, and torch calls no hook then.
                ring.end(self.number, monotonic_ns() - self.begin_ns, True)
                RECORDER.depth = 0
                RECORDER.capture.interrupted(ring)
            depth = RECORDER.depth
            RECORDER.depth = depth + 1
            if not depth:
                if EVALUATION.models:
                    EVALUATION.at_step()
                self.begin_ns = monotonic_ns()
                steps = RECORDER.num_steps
                source = _numbers.get(id(optimizer)) or _number(optimizer)
                self.number = ring.begin(STEP, self.begin_ns, -1, source, steps + 1, 0, steps)
        except Exception as error:
            RECORDER.fail(error)

    def after(self, optimizer: object, args: object, kwargs: object) -> None:
        ring = RECORDER.ring
        if ring is None or not RECORDER.depth:
            return
        try:
            RECORDER.depth -= 1
            if not RECORDER.depth:
                now_ns = monotonic_ns()
                ring.end(self.number, now_ns - self.begin_ns, False)
                RECORDER.num_steps = num_steps = RECORDER.num_steps + 1
                RECORDER.stepped_ns = now_ns
                ring.set(NUM_STEPS, num_steps)
                RECORDER.capture.stepped(ring, num_steps, RECORDER.num_nexts)
                if num_steps % LOOK_EVERY == 1:
                    RECORDER.look(ring)
                if RECORDER.capture.has_begun:
                    RECORDER.look_again(ring)
                if now_ns - FALLBACK.set_ns >= EVERY_NS:
                    FALLBACK.step(ring, now_ns)
        except Exception as error:
            RECORDER.fail(error)


def _is_inside(file: str) -> bool:
    """Whether the step that called our hook runs inside of another: torch's wrapper is further up on this stack."""
    frame: FrameType | None = sys._getframe(3)  # this function, the hook and its wrapper are passed over
    while frame is not None:
        if frame.f_code.co_filename == file:
            return True
        frame = frame.f_back
    return False


def _optimizer(module: Any) -> None:
    FALLBACK.watch()
    steps = _Steps(module.__file__)
    module.register_optimizer_step_pre_hook(steps.before)
    module.register_optimizer_step_post_hook(steps.after)


def _scaler(module: Any) -> None:
    """A step that the scaler skips fires no hook of the optimizer; it counts all the same: an iteration it is."""
    original: Callable[..., Any] = module.GradScaler.step

    @functools.wraps(original)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = RECORDER.num_steps
        result = original(self, optimizer, *args, **kwargs)
        if RECORDER.num_steps == before and not RECORDER.depth:
            _counted_by_scaler(optimizer)
        return result

    module.GradScaler.step = step


def _counted_by_scaler(optimizer: Any) -> None:
    ring = RECORDER.ring or RECORDER.arm()
    if ring is None:
        return
    try:
        # Of an optimizer without torch's hooks we cannot tell whether it was skipped, only that it was its turn.
        is_skipped = isinstance(optimizer, sys.modules["torch"].optim.Optimizer)
        steps = RECORDER.num_steps
        flags = SKIPPED if is_skipped else 0
        source = _numbers.get(id(optimizer)) or _number(optimizer)
        now_ns = monotonic_ns()
        ring.end(ring.begin(what(STEP, flags=flags), now_ns, -1, source, steps + 1, 0, steps), 0, False)
        RECORDER.num_steps, RECORDER.stepped_ns = steps + 1, now_ns
        ring.set(NUM_STEPS, steps + 1)
        ring.add(NUM_SKIPPED, int(is_skipped))
        RECORDER.capture.stepped(ring, steps + 1, RECORDER.num_nexts)
        if steps % LOOK_EVERY == 0:
            RECORDER.look(ring)
    except Exception as error:
        RECORDER.fail(error)


def _profiler(module: Any) -> None:
    """Hear of the profilers of the user, who come first: torch has one at a time."""
    prepare, leave, started = module.profile._prepare_trace, module.profile.__exit__, module._run_on_profiler_start

    @functools.wraps(prepare)
    def _prepare_trace(self: Any) -> None:
        RECORDER.capture.prepares(self, RECORDER.ring)
        prepare(self)

    @functools.wraps(leave)
    def __exit__(self: Any, *error: Any) -> Any:
        RECORDER.capture.released(self)
        return leave(self, *error)

    @functools.wraps(started)
    def _run_on_profiler_start() -> None:
        # emit_nvtx and emit_itt begin with this alone.
        RECORDER.capture.starts(RECORDER.ring)
        started()

    module.profile._prepare_trace, module.profile.__exit__ = _prepare_trace, __exit__
    module._run_on_profiler_start = _run_on_profiler_start


def _distributed(module: Any) -> None:
    collectives.place(module)
    phases.groups(module)


def _dynamo(module: Any) -> None:
    """Keep the compiler out of our code: it runs as it is, between the graphs, and adds neither guard nor graph."""
    for name in ("eroica.ring", "eroica.probe"):
        module.add(name)


_PLACES: dict[str, Callable[[Any], None]] = {
    "loader": _loader,
    "optimizer": _optimizer,
    "scaler": _scaler,
    "collectives": _distributed,
    "profiler": _profiler,
    "traces": phases.traces,
    "anomaly": options.anomaly,
    "dynamo": _dynamo,
    "serialization": phases.serialization,
    "saver": phases.saver,
    "restorer": phases.restorer,
    "compiler": phases.compiler,
    "data parallel": options.data_parallel,
    "fully shard": options.fully_shard,
}
