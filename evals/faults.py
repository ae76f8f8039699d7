"""Faults as changes of a plan's numbers, and how large they must be for a wanted effect.

Each transform takes (program, plan, culprits, magnitude, rng) and changes the plan in place; what this does to the
iteration is left to `evals.program.simulate`, and `calibrate` searches the magnitude whose simulated iteration is
longer by the wanted share. Used by `evals.synth` only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from eroica.trace import Bools, Int64s
from evals.program import Plan, Program, Random, simulate

COMPUTE = ("forward", "backward")


def gpu_slow(program: Program, plan: Plan, culprits: Int64s, magnitude: float, rng: Random) -> None:
    """All compute kernels take longer by one factor, as at a lower clock."""
    del rng
    for n in program.find("forward", "backward", "optimizer"):
        plan.factor[n, culprits] *= 1.0 + magnitude


def input_slow(program: Program, plan: Plan, culprits: Int64s, magnitude: float, rng: Random) -> None:
    """The next batch comes later, a little more or less so each time."""
    nominal = sum(item.piece.op_ns.sum() for item in program.items)
    for n in program.find("input"):
        delay = magnitude * nominal * np.exp(rng.normal(0.0, 0.05, plan.host_ns[n, culprits].shape))
        plan.host_ns[n, culprits] += delay


def copy_slow(program: Program, plan: Plan, culprits: Int64s, magnitude: float, rng: Random) -> None:
    """Copies from the host take (1 + magnitude) times as long for the same bytes."""
    del rng
    for n in program.find("copy"):
        plan.factor[n, culprits] *= 1.0 + magnitude


def _crossing(program: Program, hosts: set[int], both: bool) -> dict[int, bool]:
    """Groups with a member on one of `hosts` (on all of them if `both`) and members elsewhere."""
    found = {}
    for index, group in enumerate(program.groups):
        on = {int(program.hosts[r]) for r in group.ranks}
        found[index] = len(on) > 1 and (hosts <= on if both else bool(hosts & on))
    return found


def _slow_transfers(program: Program, plan: Plan, groups: Mapping[int, bool], magnitude: float) -> None:
    for n in program.find("comm"):
        comm = program.items[n].comm
        assert comm is not None
        hit = np.array([groups.get(int(g), False) for g in comm.group])
        plan.transfer_ns[n, hit] *= 1.0 + magnitude


def nic_slow(program: Program, plan: Plan, culprits: Int64s, magnitude: float, rng: Random) -> None:
    """Transfers of all groups that leave the culprits' host take longer."""
    del rng
    hosts = {int(h) for h in program.hosts[culprits]}
    _slow_transfers(program, plan, _crossing(program, hosts, both=False), magnitude)


def link_groups(program: Program, culprits: Int64s) -> dict[int, bool]:
    """The two groups of the culprits (two ranks on each end) that consist of both ends only."""
    chosen = {int(r) for r in culprits}
    return {index: len(group.ranks) > 1 and set(group.ranks) <= chosen for index, group in enumerate(program.groups)}


def link_slow(program: Program, plan: Plan, culprits: Int64s, magnitude: float, rng: Random) -> None:
    """Transfers of the groups that cross one link take longer."""
    del rng
    _slow_transfers(program, plan, link_groups(program, culprits), magnitude)


def gc(program: Program, plan: Plan, culprits: Int64s, magnitude: float, rng: Random) -> None:
    """A pause of the driving thread on another rank in each iteration, at the planted place in the forward pass."""
    del culprits
    nominal = sum(item.piece.op_ns.sum() for item in program.items)
    iterations = plan.host_ns.shape[2]
    order = rng.permutation(program.world_size)
    for n in program.find("gc"):
        for i in range(iterations):
            rank = order[i % len(order)]
            plan.active[n, rank, i] = True
            plan.host_ns[n, rank, i] = magnitude * nominal


def imbalance(program: Program, plan: Plan, culprits: Int64s, magnitude: float, rng: Random) -> None:
    """More work, so more time, in every iteration."""
    del rng
    for n in program.find(*COMPUTE):
        plan.factor[n, culprits] *= 1.0 + magnitude
        plan.work[n, culprits] *= 1.0 + magnitude


def imbalance_rotating(program: Program, plan: Plan, culprits: Int64s, magnitude: float, rng: Random) -> None:
    """More work on other ranks in each iteration."""
    del culprits
    count = max(1, program.world_size // 8)
    order = rng.permutation(program.world_size)
    for i in range(plan.host_ns.shape[2]):
        ranks = order[(i * count + np.arange(count)) % len(order)]
        for n in program.find(*COMPUTE):
            plan.factor[n, ranks, i] *= 1.0 + magnitude
            plan.work[n, ranks, i] *= 1.0 + magnitude


def everything(program: Program, plan: Plan, culprits: Int64s, magnitude: float, rng: Random) -> None:
    """All that takes time takes longer, on all ranks."""
    del program, culprits, rng
    plan.host_ns *= 1.0 + magnitude
    plan.factor *= 1.0 + magnitude
    plan.transfer_ns *= 1.0 + magnitude


def _planted_pause(program: Program, plan: Plan, culprits: Int64s, magnitude: float, drain: str, pause: str) -> None:
    nominal = sum(item.piece.op_ns.sum() for item in program.items)
    where = program.find(drain, pause)
    for n in where:
        plan.active[n, culprits] = True
    last = where[-1]
    plan.host_ns[last, culprits] = magnitude * nominal


def sync_gap(program: Program, plan: Plan, culprits: Int64s, magnitude: float, rng: Random) -> None:
    """The host waits until the device is idle, then works before it launches again."""
    del rng
    _planted_pause(program, plan, culprits, magnitude, "gap_sync", "gap")


def allocator(program: Program, plan: Plan, culprits: Int64s, magnitude: float, rng: Random) -> None:
    """Free and malloc pairs; the first free waits for the device."""
    del rng
    _planted_pause(program, plan, culprits, magnitude, "malloc", "malloc")


def autotune(program: Program, plan: Plan, culprits: Int64s, magnitude: float, rng: Random) -> None:
    """Some inputs have a new size, for which the library tries all its kernels: in one step of three on all ranks,
    where batches are padded for all alike (`culprits` are all), else in two of three on ranks that change."""
    ranks, iterations = plan.host_ns.shape[1:]
    nominal = sum(item.piece.op_ns.sum() for item in program.items)
    search, (trials,) = program.find("tune_wait", "tune"), program.find("tune")
    own = program.items[trials].piece.host_ns
    for i in range(iterations):
        if i % 3 == 0 or (i % 3 == 1 and len(culprits)):
            continue
        met = culprits if len(culprits) else rng.choice(ranks, max(1, ranks // 4), replace=False)
        plan.active[program.find("conv"), met, i] = False
        for n in search:
            plan.active[n, met, i] = True
        took = magnitude * nominal * np.exp(rng.normal(0.0, 0.05, len(met)))
        plan.host_ns[trials, met, i] = took
        plan.factor[trials, met, i] = took / own


def edge_slow(program: Program, plan: Plan, culprits: Int64s, magnitude: float, rng: Random) -> None:
    """Transfers of the groups within one host that hold all culprits (the two ends of a link) take longer."""
    del rng
    ends = {int(r) for r in culprits}
    hit = {
        index: ends <= set(group.ranks) and len({int(program.hosts[r]) for r in group.ranks}) == 1
        for index, group in enumerate(program.groups)
    }
    _slow_transfers(program, plan, hit, magnitude)


def reductions_exposed(program: Program, plan: Plan, culprits: Int64s, magnitude: float, rng: Random) -> None:
    """Gradients are reduced as before, but the backward pass waits for each bucket. The size is the layout's."""
    del culprits, magnitude, rng
    for n in program.find("comm"):
        comm = program.items[n].comm
        assert comm is not None
        plan.exposed[n] = not comm.blocks.any()


def launches_block(program: Program, plan: Plan, culprits: Int64s, magnitude: float, rng: Random) -> None:
    """Each launch call waits for its kernel. What that costs depends on how long kernels are."""
    del magnitude, rng
    plan.blocking[culprits] = True
    for n, item in enumerate(program.items):
        if item.blocked is not None and item.comm is None:
            # Host and device in one rhythm: the one waits for the other anyway.
            relative = plan.factor[n, culprits] / program.stretch[n, culprits][:, None]
            plan.host_ns[n, culprits] = item.blocked.host_ns * relative


FIXED = frozenset({"reductions_exposed", "launches_block"})
"""Transforms without a magnitude: the job around them makes their effect large or small."""

TRANSFORMS: Mapping[str, Callable[[Program, Plan, Int64s, float, Random], None]] = {
    "gpu_slow": gpu_slow,
    "input_slow": input_slow,
    "copy_slow": copy_slow,
    "nic_slow": nic_slow,
    "link_slow": link_slow,
    "gc": gc,
    "imbalance": imbalance,
    "imbalance_rotating": imbalance_rotating,
    "everything": everything,
    "sync_gap": sync_gap,
    "allocator": allocator,
    "autotune": autotune,
    "edge_slow": edge_slow,
    "reductions_exposed": reductions_exposed,
    "launches_block": launches_block,
}


def mean_iteration_ns(program: Program, plan: Plan) -> float:
    """Mean over the written iterations."""
    return float(simulate(program, plan).iteration_ns[1:].mean())


def apply(transform: str, program: Program, plan: Plan, culprits: Int64s, magnitude: float, seed: int) -> Plan:
    """A copy of the plan with the fault; the same seed draws the same details at every magnitude."""
    changed = plan.copy()
    TRANSFORMS[transform](program, changed, culprits, magnitude, np.random.default_rng(seed))
    return changed


def calibrate(transform: str, program: Program, plan: Plan, culprits: Int64s, effect: float, seed: int) -> float:
    """The magnitude at which the iteration grows by `effect`, within 1 % of the effect.

    Raises ValueError if no magnitude up to 1,000 reaches it.
    """
    if transform in FIXED:
        return 1.0
    healthy = mean_iteration_ns(program, plan)

    def growth(magnitude: float) -> float:
        return mean_iteration_ns(program, apply(transform, program, plan, culprits, magnitude, seed)) / healthy - 1.0

    low, high = 0.0, effect
    while growth(high) < effect:
        low, high = high, high * 2.0
        if high > 1_000.0:
            raise ValueError(f"{transform}: no magnitude makes the iteration {effect:.0%} longer; is it ever exposed?")
    for _ in range(30):
        middle = (low + high) / 2.0
        grown = growth(middle)
        if abs(grown - effect) < 0.01 * effect:
            return middle
        low, high = (middle, high) if grown < effect else (low, middle)
    return (low + high) / 2.0


def draw_culprits(kind: str, program: Program, taken: Bools, rng: Random) -> npt.NDArray[np.int64]:
    """Ranks of a fault by the case's word for them; `taken` ranks are left out. See `cases_synth.Fault.culprits`."""
    free = np.flatnonzero(~taken)
    hosts = program.hosts
    if kind == "one":
        return np.sort(rng.choice(free, 1))
    if kind == "two":
        first = int(rng.choice(free))
        others = free[hosts[free] != hosts[first]]
        if not len(others):
            others = free[free != first]
        return np.sort(np.array([first, int(rng.choice(others))], np.int64))
    if kind == "quarter":
        return np.sort(rng.choice(free, max(2, program.world_size // 8), replace=False))
    if kind == "host":
        host = int(rng.choice(hosts))
        return np.flatnonzero(hosts == host)
    if kind == "socket":
        members = np.flatnonzero(hosts == int(rng.choice(hosts)))
        half = len(members) // 2
        return members[:half] if rng.random() < 0.5 else members[half:]
    if kind == "link":
        block = 2 * int(rng.integers((int(hosts[-1]) + 1) // 2))
        ends = [np.flatnonzero(hosts == block + side)[:2] for side in (0, 1)]
        return np.concatenate(ends)
    if kind == "edge":
        pairs = [g.ranks for g in program.groups if len(g.ranks) == 2 and hosts[g.ranks[0]] == hosts[g.ranks[1]]]
        if pairs:
            return np.array(pairs[int(rng.integers(len(pairs)))], np.int64)
        first = int(rng.choice(np.flatnonzero(hosts[:-1] == hosts[1:])))
        return np.array([first, first + 1], np.int64)
    if kind == "middle_stage":
        inner = (program.stage > 0) & (program.stage < program.stage.max())
        return np.sort(rng.choice(np.flatnonzero(inner), 1))
    if kind == "last_stage":
        return np.sort(rng.choice(np.flatnonzero(program.stage == program.stage.max()), 1))
    if kind in ("rotating", "all"):
        return np.arange(program.world_size) if kind == "all" else np.zeros(0, np.int64)
    raise ValueError(f"culprits {kind!r} are unknown")
