"""Synthetic clusters: every rank's trace of a job with planted faults, made from one real single-GPU trace.

`cluster(case, ...)` draws jitter and culprits from a seed, searches the fault's size for the wanted effect, simulates
the job (`evals.program`) and then writes one rank's events at a time, so that 512 ranks need no more memory than one.
The record says what is true: who the culprits are and how many seconds per iteration each fault costs, by the same
simulation with and without it. Used by `evals.synthetic` (which scores eroica on it) and by tests.

What it is not: a fabric or a GPU model. `evals/README.md` lists what is less rich than reality.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from eroica.trace import Bools, Float64s, Int64s, Samples, Trace
from evals.base import Base, blocked, load_base
from evals.cases_synth import BY_ID, Case
from evals.emit import Rank, Template, Written, counters, emit
from evals.faults import apply, calibrate, draw_culprits, mean_iteration_ns
from evals.layouts import BUCKET_SHARE, LAYOUTS, MICROBATCHES, build
from evals.program import Item, Plan, Program, Times, draw_plan, simulate
from evals.truth import Expected, Truth

_PLANTED = {"gc": "gc", "sync_gap": "sync_gap", "allocator": "allocator", "autotune": "autotune"}
"""Transform -> items that it needs in the program."""


@dataclass(frozen=True)
class Cluster:
    """A job whose every rank's trace can be had, with the truth about it."""

    case: Case
    base: Base
    program: Program
    plan: Plan
    times: Times
    seed: int
    expected: tuple[Expected, ...]
    effect: float
    """Wanted growth of the iteration (of each fault alone)."""
    growth: float
    """Growth of the iteration with all faults over the same job without, by the simulation."""
    iteration_s: float
    healthy_iteration_s: float
    host_names: tuple[str, ...]
    throttle: Float64s
    """(W,) Clock relative to maximum."""
    throttle_flag: Bools
    """(W,)"""
    device_models: tuple[str, ...]
    """(W,)"""
    healthy_plan: Plan

    @property
    def world_size(self) -> int:
        """W."""
        return self.program.world_size

    @cached_property
    def truth(self) -> Truth:
        """What a diagnosis of this job is judged by."""
        last = frozenset(np.flatnonzero(self.program.stage == self.program.stage.max()).tolist())
        return Truth(
            hosts=tuple(self.host_names[int(host)] for host in self.program.hosts),
            faults=self.expected,
            members=(last,),
            tolerated=self.case.tolerated,
        )

    def traces(self) -> Iterator[tuple[Trace, Samples | None]]:
        """Each rank's trace and counters, in the order of ranks; made when asked for."""
        for rank in range(self.world_size):
            yield self.trace(rank), self.samples(rank) if self.case.counters else None

    def baseline(self) -> Iterator[tuple[Trace, Samples | None]]:
        """The same job when healthy, with other jitter."""
        plan = _healthy(self.program, self.seed + 1_000_003)
        other = replace(self, plan=plan, times=simulate(self.program, plan), seed=self.seed + 1_000_003)
        yield from other.traces()

    @cached_property
    def _templates(self) -> tuple[Template, Template]:
        """Of an ordinary rank, and of one whose launch calls wait."""
        ordinary = Template.of(self.base, self.program)
        return ordinary, Template.of(self.base, self.program, True) if self.plan.blocking.any() else ordinary

    @cached_property
    def _groups_of(self) -> list[list[int]]:
        of: list[list[int]] = [[] for _ in range(self.world_size)]
        for index, group in enumerate(self.program.groups):
            if not group.description.startswith("pp_pair"):
                for rank in group.ranks:
                    of[rank].append(index)
        return of

    def clock_ns(self, rank: int) -> int:
        """What the rank's clock shows at the job's start: clocks of different ranks are seconds apart."""
        offset = np.random.default_rng([self.seed, 77, int(self.program.hosts[rank])]).integers(
            -3_000_000_000, 3_000_000_000
        )
        own = np.random.default_rng([self.seed, 78, rank]).integers(-200_000, 200_000)
        return 1_764_000_000_000_000_000 + int(offset) + int(own)

    def trace(self, rank: int) -> Trace:
        """One rank's columns, as `read_trace` gives them for the same file."""
        return self.written(rank).trace

    def written(self, rank: int) -> Written:
        """The same with what only a file tells, for `kineto_file.write_json`."""
        template = self._templates[int(self.plan.blocking[rank])]
        return emit(self.base, self.program, self.plan, self.times, template, self._who(rank))

    def samples(self, rank: int) -> Samples:
        """One rank's counters on a grid of 10 ms (a tenth of the iteration if that is shorter)."""
        ratio, flag = float(self.throttle[rank]), bool(self.throttle_flag[rank])
        return counters(self.program, self.plan, self.times, self._who(rank), ratio, flag, self.seed)

    def _who(self, rank: int) -> Rank:
        return Rank(
            rank=rank,
            world_size=self.world_size,
            host=self.host_names[int(self.program.hosts[rank])],
            device_model=self.device_models[rank],
            num_devices=int((self.program.hosts == 0).sum()),
            groups=tuple(self._groups_of[rank]),
            clock_ns=self.clock_ns(rank),
        )


@lru_cache(maxsize=8)
def _base(name: str, num_pieces: int, max_events: int) -> Base:
    return load_base(name, num_pieces, max_events)


def _healthy(program: Program, seed: int, num_iterations: int = 7) -> Plan:
    return draw_plan(program, num_iterations, np.random.default_rng([seed, 1]))


def cluster(
    case: str | Case,
    *,
    world_size: int = 8,
    effect: float = 0.10,
    seed: int = 0,
    base: str = "bert",
    num_iterations: int = 6,
    max_events: int = 1600,
    bucket_share: float = BUCKET_SHARE,
    stretch: float = 1.0,
) -> Cluster:
    """Draw a cluster.

    case: id of a case in `cases_synth`; effect: share by which each fault alone makes the iteration longer; base: name
    in `evals.base.BASES` or the path of a Kineto trace; bucket_share: see `layouts.build`; stretch: all kernels and
    transfers take so many times as long, as with larger batches. The same arguments give the same cluster. Raises
    ValueError for a size that the case's layout cannot split.
    """
    chosen = BY_ID[case] if isinstance(case, str) else case
    ranks_per_host = (
        8 if world_size >= 32 else max(1, world_size // 4) if chosen.layout == "hsdp" else min(8, world_size)
    )
    if any(f.culprits in ("host", "two") for f in chosen.faults) and world_size < 32:
        ranks_per_host = max(1, world_size // 4)
    if "models" in chosen.extras and world_size < 32:
        ranks_per_host = max(1, world_size // 2)
    if chosen.layout == "tp_dp" and world_size < 32:
        ranks_per_host = max(1, world_size // 2)
    max_events //= MICROBATCHES.get(chosen.layout, 1)  # the piece is run once for each microbatch
    source = _base(base, LAYOUTS[chosen.layout], max_events)
    planted = next((_PLANTED[f.transform] for f in chosen.faults if f.transform in _PLANTED), None)
    planted = "gc_frame" if "gc_frame" in chosen.extras else planted
    planted = "harmless_sync" if {"harmless_sync", "harmless_syncs"} & chosen.extras else planted
    planted = "compile" if "first_compile" in chosen.extras else planted
    program = build(source, chosen.layout, world_size, ranks_per_host, planted, bucket_share)
    if stretch != 1.0:
        program = replace(program, items=tuple(_stretched(item, stretch) for item in program.items))
    if any(f.transform == "launches_block" for f in chosen.faults):
        program = replace(program, items=tuple(replace(item, blocked=blocked(item.piece)) for item in program.items))
    rng = np.random.default_rng([seed, 0])
    models = [source.device_model] * world_size
    num_hosts = int(program.hosts[-1]) + 1
    if "models" in chosen.extras:
        older = program.hosts >= num_hosts // 2
        for n in program.find("forward", "backward", "optimizer"):
            program.stretch[n, older] = 1.25
        models = [("NVIDIA A100-SXM4-80GB" if old else source.device_model) for old in older.tolist()]
    if "heavy_last_stage" in chosen.extras:
        for n in program.find("forward", "backward"):
            program.stretch[n, program.stage == program.stage.max()] = 1.24
    plan = draw_plan(program, num_iterations + 1, np.random.default_rng([seed, 1]))
    throttle, flag = np.ones(world_size), np.zeros(world_size, bool)
    _extras(chosen, program, plan, flag, rng, seed)
    healthy_ns = mean_iteration_ns(program, plan)
    taken = np.zeros(world_size, bool)
    drawn: list[tuple[int, Int64s, float]] = []
    for index, fault in enumerate(chosen.faults):
        culprits = draw_culprits(fault.culprits, program, taken, rng)
        taken[culprits] = True
        magnitude = calibrate(fault.transform, program, plan, culprits, effect, seed * 31 + index)
        drawn.append((index, culprits, magnitude))
        if chosen.counters and fault.transform == "gpu_slow":
            throttle[culprits], flag[culprits] = 1.0 / (1.0 + magnitude), True

    def with_faults(skip: int) -> Plan:
        changed = plan
        for index, culprits, magnitude in drawn:
            if index != skip:
                fault = chosen.faults[index]
                changed = apply(fault.transform, program, changed, culprits, magnitude, seed * 31 + index)
        return changed

    faulty = with_faults(-1)
    times = simulate(program, faulty)
    iteration_ns = float(times.iteration_ns[1:].mean())
    names = tuple(f"node{h:03d}" for h in range(num_hosts))
    expected = []
    for index, culprits, magnitude in drawn:
        answer = chosen.faults[index].answer
        without = mean_iteration_ns(program, with_faults(index)) if len(drawn) > 1 else healthy_ns
        blamed = culprits if answer.who in ("ranks", "hosts", "link") else np.zeros(0, np.int64)
        expected.append(
            Expected(
                answer,
                frozenset(int(r) for r in blamed),
                frozenset(names[int(program.hosts[r])] for r in blamed),
                (iteration_ns - without) / 1e9,
                magnitude,
            )
        )
    return Cluster(
        case=chosen,
        base=source,
        program=program,
        plan=faulty,
        times=times,
        seed=seed,
        expected=tuple(expected),
        effect=effect if chosen.faults else 0.0,
        growth=iteration_ns / healthy_ns - 1.0,
        iteration_s=iteration_ns / 1e9,
        healthy_iteration_s=healthy_ns / 1e9,
        host_names=names,
        throttle=throttle,
        throttle_flag=flag,
        device_models=tuple(models),
        healthy_plan=plan,
    )


def _stretched(item: Item, by: float) -> Item:
    comm = replace(item.comm, transfer_ns=item.comm.transfer_ns * by) if item.comm is not None else None
    return replace(item, piece=replace(item.piece, op_ns=item.piece.op_ns * by), comm=comm)


def _extras(case: Case, program: Program, plan: Plan, flag: Bools, rng: np.random.Generator, seed: int) -> None:
    """Harmless peculiarities of a case."""
    everything = np.arange(program.world_size)
    if "everything" in case.extras:
        changed = apply("everything", program, plan, everything, 0.15, seed)
        plan.host_ns[:], plan.factor[:], plan.transfer_ns[:] = changed.host_ns, changed.factor, changed.transfer_ns
    if "power_cap" in case.extras:
        flag[rng.choice(program.world_size, 3, replace=False)] = True
    if {"harmless_sync", "harmless_syncs"} & case.extras:
        ranks = everything if "harmless_syncs" in case.extras else rng.integers(program.world_size, size=1)
        for n in program.find("harmless_sync"):
            plan.active[n, ranks] = True
    if "first_compile" in case.extras:
        # Each stage compiles when the first activations reach it, so one after another.
        compiled, usual = program.find("compile"), sum(item.piece.op_ns.sum() for item in program.items)
        for stage, (wait, work) in enumerate(zip(compiled[::2], compiled[1::2], strict=True)):
            members = program.stage == stage
            plan.active[wait, members, 1] = plan.active[work, members, 1] = True
            plan.host_ns[work, members, 1] = usual * rng.uniform(0.8, 1.2)
    if "hiccup" in case.extras and seed % 4 == 0:
        rank, step = int(rng.integers(program.world_size)), int(rng.integers(1, plan.factor.shape[2]))
        for n in program.find("forward", "backward"):
            plan.factor[n, rank, step] *= 1.0 + rng.uniform(0.1, 0.3)
