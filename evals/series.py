"""Jobs made up step by step and watched by the product as a real one is: for faults whose evidence is a series.

`watched` lets every rank's flight records go through `marks.Watch`, what is noticed through the bus to the real
`Coordinator`, and answers its commands as ranks would: the steps of a window are written as Kineto writes them, read
and summarized by `captures`, and judged by `investigation.judge`. Only the clock, the processes and the agent's files
are made up, and hours of a job pass in seconds. Used by synthetic cases of the catalogue.

A step is a list of parts per rank. Between two meetings each rank goes on by itself; at a meeting all wait for the
last. On a job with devices, device parts are launched ahead and run in order on one stream, and the host waits for the
device at the end of the step.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp
from pathlib import Path
from typing import Any

from eroica import bus, ring
from eroica.captures import summarize_capture
from eroica.commands import State
from eroica.coordinator import Coordinator
from eroica.degradation import Trigger
from eroica.findings import Diagnosis
from eroica.investigation import judge
from eroica.marks import HOLD_NS, Watch
from eroica.pattern import Stacked
from eroica.ring import Record
from eroica.watched import history_of
from eroica.windows import Look, Policy, Window
from evals.catalogue import Case, CaseError
from evals.made import Made
from evals.truth import Expected, Place, Truth

START_NS = 3_600_000_000_000
"""CLOCK_MONOTONIC at the first step."""
WALL_NS = 1_764_000_000_000_000_000
"""From there to the wall clock."""
LAUNCH_S = 12e-6
"""What the host spends on one operator whose kernel the device runs."""
RECENT = 16
"""Iterations whose median an agent tells as the pace."""


@dataclass(frozen=True, slots=True)
class Part:
    """Something that a rank does in a step."""

    name: str
    seconds: float
    on: str = "host"
    """host: an operator; python: a frame, named "file.py(line): function"; device: a kernel; meet: a collective, whose
    seconds are the transfer; hidden: time that leaves no event."""


Parts = Callable[[int, int], Sequence[Part]]
"""(step, rank) -> what the rank does in that step, without noise. All ranks meet equally often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A job."""

    num_steps: int
    parts: Parts
    num_ranks: int = 4
    ranks_per_host: int = 4
    has_device: bool = True
    noise: float = 0.01
    """Standard deviation of each part's length, as a share."""
    common_noise: float = 0.0
    """And of all parts of a step together."""
    policy: Policy = field(default_factory=Policy)
    is_profiled: Callable[[int, int], None] | None = None
    """Called with (first step, step after the last) of each capture, once it is over."""
    profiling: float = 0.02
    """How much longer a step is while it is captured."""
    ask_at: Sequence[int] = ()
    """Steps at which a person asks for a window."""

    def host(self, rank: int) -> str:
        """Where the rank runs."""
        return f"node{rank // self.ranks_per_host:03d}"


@dataclass(frozen=True, slots=True)
class Watched:
    """What the product did."""

    diagnoses: tuple[Diagnosis, ...]
    captures: tuple[range, ...]
    """Steps of each window."""
    triggers: tuple[Trigger, ...]
    """As the first rank's pace gave them."""


@dataclass(slots=True)
class _Event:
    category: str
    name: str
    track: int
    begin_ns: int
    duration_ns: int
    args: dict[str, Any]


@dataclass(slots=True)
class _Rank:
    number: int
    watch: Watch
    events: list[_Event] = field(default_factory=list)
    """Of the window under way."""
    num_records: int = 0
    begun: list[Record] = field(default_factory=list)
    ended: list[Record] = field(default_factory=list)
    capture: Record | None = None


_MAIN, _OTHER, _STREAM, _NETWORK = 1000, 1001, 7, 20


class _Play:
    """The job while it runs."""

    def __init__(self, plan: Plan, draw: random.Random, folder: Path) -> None:
        self.plan = plan
        self.draw = draw
        self.folder = folder
        self.now_ns = START_NS
        self.ranks = [_Rank(rank, Watch(rank)) for rank in range(plan.num_ranks)]
        self.bus = bus.Bus()
        self.coordinator = Coordinator(
            self.bus.publish, self._on_window, _on_look, lambda rank, trigger: None, plan.policy
        )
        self.bus.subscribe(bus.TO_COORDINATOR, lambda message: self.coordinator.handle(message, self.now_ns))
        self.bus.subscribe(bus.TO_AGENTS, self._take)
        self.asked: bus.Prepare | None = None
        self.is_committed = False
        self.count = 0
        self.baseline: Stacked | None = None
        self.diagnoses: list[Diagnosis] = []
        self.captures: list[range] = []
        self.triggers: list[Trigger] = []

    def run(self) -> Watched:
        for step in range(self.plan.num_steps):
            self._step(step)
            self._poll()
        return Watched(tuple(self.diagnoses), tuple(self.captures), tuple(self.triggers))

    def _step(self, step: int) -> None:
        """All ranks do one step."""
        asked = self.asked if self.is_committed else None
        is_captured = asked is not None and asked.start <= step < asked.start + asked.num_steps
        begin_ns, slower = self.now_ns, self.draw.gauss(0.0, self.plan.common_noise)
        slower = exp(slower) * (1 + self.plan.profiling * is_captured)
        if asked is not None and step == asked.start:
            for rank in self.ranks:
                rank.capture = self._record(rank, ring.CAPTURE, begin_ns, None, asked.window, step)
                rank.begun.append(rank.capture)
        todo = [list(self.plan.parts(step, rank.number)) for rank in self.ranks]
        host, device = [begin_ns] * len(self.ranks), [begin_ns] * len(self.ranks)
        place, num_meets = [0] * len(self.ranks), 0
        while any(at < len(parts) for at, parts in zip(place, todo, strict=True)):
            for r, rank in enumerate(self.ranks):
                while place[r] < len(todo[r]) and todo[r][place[r]].on != "meet":
                    self._do(rank, r, todo[r][place[r]], slower, host, device, is_captured)
                    place[r] += 1
            if all(at < len(parts) for at, parts in zip(place, todo, strict=True)):
                self._meet(todo[0][place[0]], slower, host, device, num_meets, step, is_captured)
                num_meets += 1
            place = [at + 1 for at in place]
        for r, rank in enumerate(self.ranks):
            if self.plan.has_device and device[r] > host[r]:
                if is_captured:
                    rank.events.append(
                        _Event("cuda_runtime", "cudaDeviceSynchronize", _MAIN, host[r], device[r] - host[r], {})
                    )
                host[r] = device[r]
        end_ns = max(host)
        for rank in self.ranks:
            self._close_step(rank, step, begin_ns, end_ns, is_captured)
        self.now_ns, self.count = end_ns, step + 1
        if asked is not None and self.count == asked.start + asked.num_steps:
            self._captured(asked)

    def _do(
        self, rank: _Rank, r: int, part: Part, slower: float, host: list[int], device: list[int], is_captured: bool
    ) -> None:
        length_ns = round(part.seconds * slower * exp(self.draw.gauss(0.0, self.plan.noise)) * 1e9)
        if part.on == "device":
            launch_ns, key = round(LAUNCH_S * 1e9), len(rank.events) + 1
            begin_ns = max(device[r], host[r] + launch_ns)
            if is_captured:
                operator = part.name.split("_kernel")[0]
                called = {"correlation": key}
                shape = {"device": 0, "stream": _STREAM, "grid": [1024, 1, 1], "block": [128, 1, 1]}
                rank.events += [
                    _Event("cpu_op", f"aten::{operator}", _MAIN, host[r], launch_ns, {}),
                    _Event("cuda_runtime", "cudaLaunchKernel", _MAIN, host[r] + 2000, launch_ns - 4000, called),
                    _Event("kernel", part.name, _STREAM, begin_ns, length_ns, called | shape),
                ]
            host[r] += launch_ns
            device[r] = begin_ns + length_ns
            return
        if is_captured and part.on != "hidden":
            category = "python_function" if part.on == "python" else "cpu_op"
            rank.events.append(_Event(category, part.name, _MAIN, host[r], length_ns, {}))
        host[r] += length_ns
        device[r] = max(device[r], host[r])

    def _meet(
        self, part: Part, slower: float, host: list[int], device: list[int], number: int, step: int, is_captured: bool
    ) -> None:
        """All wait for the last one."""
        arrived = list(device if self.plan.has_device else host)
        end_ns = max(arrived) + round(part.seconds * slower * exp(self.draw.gauss(0.0, self.plan.noise)) * 1e9)
        for r, rank in enumerate(self.ranks):
            record = self._record(
                rank, ring.COLLECTIVE, arrived[r], end_ns - arrived[r], number + 1, step, op=1, group=1
            )
            rank.begun.append(record)
            rank.ended.append(record)
            if is_captured:
                rank.events.append(self._collective(part, arrived[r], end_ns - arrived[r], rank))
            device[r] = end_ns
            if not self.plan.has_device:
                host[r] = end_ns

    def _collective(self, part: Part, begin_ns: int, duration_ns: int, rank: _Rank) -> _Event:
        if not self.plan.has_device:
            return _Event("user_annotation", f"gloo:{part.name}", _OTHER, begin_ns, duration_ns, {})
        size = self.plan.num_ranks
        return _Event(
            *("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", _NETWORK),
            *(begin_ns, duration_ns),
            {
                "correlation": len(rank.events) + 1, "device": 0, "stream": _NETWORK, "grid": [8, 1, 1],
                "block": [544, 1, 1], "Collective name": "allreduce", "In msg nelems": 1 << 20,
                "Out msg nelems": 1 << 20, "Group size": size, "dtype": "Float", "Process Group Name": "0",
                "Process Group Description": "default_pg", "Process Group Ranks": str(list(range(size))),
            },
        )  # fmt: skip

    def _close_step(self, rank: _Rank, step: int, begin_ns: int, end_ns: int, is_captured: bool) -> None:
        rank.ended += [
            self._record(rank, ring.NEXT, begin_ns, 20_000, step + 1, step, group=1),
            self._record(rank, ring.STEP, end_ns - 30_000, 30_000, step + 1, step, group=1),
        ]
        rank.begun += rank.ended[-2:]
        if is_captured:
            mark = _Event("user_annotation", f"ProfilerStep#{step}", _MAIN, begin_ns, end_ns - begin_ns, {})
            rank.events.append(mark)

    def _record(
        self, rank: _Rank, kind: int, begin_ns: int, duration_ns: int | None, sequence: int, step: int,
        *, op: int = 0, group: int = 0,
    ) -> Record:  # fmt: skip
        rank.num_records += 1
        return Record(
            rank.num_records, begin_ns, duration_ns, False, kind, op, 0, 0, -1, group, sequence, 4 << 20, step
        )

    def _poll(self) -> None:
        """What an agent does several times a second, and the coordinator's clock."""
        for rank in self.ranks:
            watch = rank.watch
            words = [rank.number, self.plan.num_ranks, ring.ARMED, self.count, self.count, *[0] * 7, 1]
            found = watch.feed(rank.begun, rank.ended, words, self.now_ns + HOLD_NS)
            found += watch.check(self.now_ns + HOLD_NS)
            rank.begun, rank.ended = [], []
            if rank.number == 0:
                self.triggers += found
            for trigger in found:
                self.bus.publish(bus.Noticed(rank=rank.number, trigger=trigger))
            self.bus.publish(self._standing(rank))
        self.bus.deliver()
        if self.count in self.plan.ask_at:
            self.coordinator.ask(self.now_ns)
        self.coordinator.tick(self.now_ns)
        self.bus.deliver()

    def _standing(self, rank: _Rank) -> bus.Standing:
        watch = rank.watch
        recent = sorted(iteration.duration_ns for iteration in list(watch.iterations)[-RECENT:])
        return bus.Standing(
            host=self.plan.host(rank.number),
            rank=rank.number,
            world_size=self.plan.num_ranks,
            generation=0,
            unit=watch.unit,
            count=self.count,
            per_iteration=watch.steps_per_iteration if watch.unit is not None and watch.iterations else 0,
            aligned=watch.iterations[-1].step if watch.iterations else 0,
            num_iterations=watch.num_iterations,
            iteration_s=recent[len(recent) // 2] / 1e9 if recent else None,
            is_alive=True,
        )

    def _take(self, message: bus.Message) -> None:
        """The ranks' answers to the coordinator."""
        if isinstance(message, bus.Prepare):
            self.asked, self.is_committed = message, False
            state = State.PREPARED if self.count <= message.start else State.LATE
            for rank in self.ranks:
                self.bus.publish(bus.Answered(window=message.window, rank=rank.number, state=state))
        elif isinstance(message, bus.Commit) and self.asked is not None and message.window == self.asked.window:
            self.is_committed = True
        elif isinstance(message, bus.Abort):
            self.asked = None

    def _captured(self, asked: bus.Prepare) -> None:
        """A window is over: its traces are written, read and summarized."""
        self.captures.append(range(asked.start, asked.start + asked.num_steps))
        for rank in self.ranks:
            assert rank.capture is not None
            rank.ended.append(replace(rank.capture, duration_ns=self.now_ns - rank.capture.begin_ns))
        self._poll_captured()
        for rank in self.ranks:
            path = self.folder / f"rank{rank.number}.json"
            _write(path, rank, self.plan)
            rank.events = []
            made = summarize_capture(str(path), rank.number, self.plan.num_ranks, self.plan.host(rank.number), None)
            self.bus.publish(bus.Answered(window=asked.window, rank=rank.number, state=State.DONE))
            history = history_of(rank.watch, (), {}, WALL_NS)
            summary, problem = (None, made) if isinstance(made, str) else (made, "")
            self.bus.publish(
                bus.Summarized(window=asked.window, rank=rank.number, summary=summary, problem=problem, history=history)
            )
        self.asked = None
        if self.plan.is_profiled is not None:
            self.plan.is_profiled(asked.start, asked.start + asked.num_steps)

    def _poll_captured(self) -> None:
        """Records of the window itself must be known before its history is told."""
        for rank in self.ranks:
            words = [rank.number, self.plan.num_ranks, ring.ARMED, self.count, self.count, *[0] * 7, 1]
            found = rank.watch.feed(rank.begun, rank.ended, words, self.now_ns + HOLD_NS)
            rank.begun, rank.ended = [], []
            for trigger in found:
                self.bus.publish(bus.Noticed(rank=rank.number, trigger=trigger))

    def _on_window(self, window: Window) -> None:
        if not window.summaries:
            raise CaseError(f"a window gave nothing: {window.problems}")
        judged = judge(window, self.baseline, job="series", created="")
        if window.trigger == "baseline":
            self.baseline = judged.stacked
        if judged.is_news:
            self.diagnoses.append(judged.diagnosis)


def _on_look(look: Look) -> bool:
    raise CaseError(f"rank {look.rank} of a job that goes on was taken to stand still")


def _write(path: Path, rank: _Rank, plan: Plan) -> None:
    """A rank's window as Kineto writes it."""
    size = plan.num_ranks
    group = {"pg_name": "0", "pg_desc": "default_pg", "backend_config": "", "pg_size": size, "ranks": list(range(size))}
    head: dict[str, Any] = {
        "schemaVersion": 1,
        "distributedInfo": {
            "backend": "nccl" if plan.has_device else "gloo",
            "rank": rank.number,
            "world_size": size,
            "pg_count": 1,
            "pg_config": [group],
        },
        "host_name": plan.host(rank.number),
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": WALL_NS,
    }
    if plan.has_device:
        head["deviceProperties"] = [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]
    head["traceEvents"] = [
        {
            "ph": "X",
            "cat": event.category,
            "name": event.name,
            "pid": 0 if event.category == "kernel" else _MAIN,
            "tid": event.track,
            "ts": event.begin_ns / 1e3,
            "dur": event.duration_ns / 1e3,
            "args": event.args,
        }
        for event in rank.events
    ]
    path.write_text(json.dumps(head))


def watched(plan: Plan, seed: int) -> Watched:
    """Run the job to its end under the product's eyes."""
    with tempfile.TemporaryDirectory(prefix="eroica-evals-") as name:
        return _Play(plan, random.Random(seed), Path(name)).run()


def made(case: Case, plan: Plan, told: Watched, ranks: Sequence[int] = (), places: Sequence[Place] = ()) -> Made:
    """What a case gives back: the product's words and the truth, each fault on the same ranks and places."""
    hosts = tuple(plan.host(rank) for rank in range(plan.num_ranks))
    blamed = frozenset(ranks)
    named = frozenset(hosts[rank] for rank in blamed)
    faults = tuple(Expected(answer, blamed, named, places=tuple(places)) for answer in case.faults)
    return Made(truth=Truth(hosts=hosts, faults=faults, tolerated=case.tolerated), diagnoses=told.diagnoses)


MODELS: Mapping[str, tuple[str, ...]] = {
    "transformer": ("layer_norm_kernel", "flash_attention_kernel", "gelu_kernel", "mm_kernel", "adam_kernel"),
    "convnet": ("cudnn_convolution_kernel", "batch_norm_kernel", "relu_kernel", "max_pool2d_kernel", "sgd_kernel"),
    "recommender": ("embedding_bag_kernel", "bmm_kernel", "sigmoid_kernel", "mm_kernel", "adagrad_kernel"),
}
"""Kernels of a step, by the model; the last one is the optimizer's."""


def device_step(shape: str, seconds: float, *, factor: float = 1.0, share: float = 0.85) -> list[Part]:
    """A step on devices: forward and backward passes with an all-reduce in the middle of the latter, the optimizer.

    seconds: of the whole step; share: of it that kernels take, all of them `factor` times as long; the rest is
    transferred.
    """
    *layers, optimizer = MODELS[shape]
    each = seconds * share * factor / (3 * len(layers) + 1)
    forward = [Part(name, each, "device") for name in layers]
    backward = [Part(f"backward_{name}", 2 * each, "device") for name in reversed(layers)]
    half, transfer = len(backward) // 2, seconds * (1 - share) / 2
    meet = Part("all_reduce", transfer, "meet")
    return [*forward, *backward[:half], meet, *backward[half:], meet, Part(optimizer, each, "device")]


OPERATORS: Mapping[str, tuple[str, ...]] = {
    "transformer": ("embedding", "layer_norm", "addmm", "softmax", "bmm", "gelu", "mm", "_foreach_add_"),
    "convnet": ("conv2d", "batch_norm", "relu", "max_pool2d", "convolution_backward", "sum", "add_"),
    "perceptron": ("addmm", "relu", "mm", "threshold_backward", "sum", "add_", "copy_"),
}
"""Operators of a step, by the model."""


def host_step(seconds: float, shape: str = "perceptron", *, factor: float = 1.0, share: float = 0.85) -> list[Part]:
    """The same on hosts alone."""
    names = [f"aten::{name}" for name in OPERATORS[shape]]
    each = seconds * share * factor / len(names)
    return [*(Part(name, each) for name in names), Part("all_reduce", seconds * (1 - share), "meet")]
