"""From an excess to a cause: what kind of own time it is, what could have caused it, and what to do about it.

Rules, each with the signal that decides it and could have been absent. Used by `diagnosis`. Not here: who has the
excess (own times and `localization`) and what it costs. A rule never looks at scenario names, only at activities,
work, counts and counters; where two causes fit, the weaker claim is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eroica.critical_path import Activity
from eroica.names import Phase
from eroica.pattern import Stacked
from eroica.utilisation import MU_SOURCES

WORK_EXPLAINS = 0.5
"""Share of an excess that more work must explain before it is called load imbalance."""
CLOCK_DROP = 0.985
"""Ratio of clocks to peers below which a clock counts as lowered: the counter's own noise is about 1 %."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause with what supports it."""

    cause: str
    certain: bool
    """A signal that could have been absent names it, so that "established" may be said."""
    because: str
    """One sentence of evidence."""
    ruled_out: tuple[str, ...]
    settings: tuple[str, ...] = ()
    """Names, as in the environment snapshot, of which one with a value bears this out."""
    advice: str = ""
    """What to do where it is more than the cause's own advice."""


BLOCKING = Cause(
    "configuration",
    True,
    "each launch call lasts until its kernel is done, so that the host prepares nothing while the device works; "
    "CUDA_LAUNCH_BLOCKING (on AMD: HIP_LAUNCH_BLOCKING, AMD_SERIALIZE_KERNEL) does that",
    (),
    ("env.CUDA_LAUNCH_BLOCKING", "env.HIP_LAUNCH_BLOCKING", "env.AMD_SERIALIZE_KERNEL"),
)
"""Of ranks whose launches block, whatever host work the device then waits for."""
TUNING = Cause(
    "configuration",
    True,
    "in these steps the library times many kernels against each other, as it does for each size that is new where "
    "torch.backends.cudnn.benchmark is on",
    (),
    ("torch.cudnn.benchmark",),
)
"""Of time in a search for the fastest kernel of an operator."""

ADVICE = {
    "input_pipeline": (
        "Look at the named dataset line on these ranks' hosts: storage, decoding, or a remote read; raise "
        "num_workers or prefetch_factor if the CPU has room, and compare the host's disk and network with a "
        "healthy one."
    ),
    "host_python": (
        "Move this Python work off the training thread or make all ranks do it at the same step; if it belongs to "
        "logging or metrics, do it less often."
    ),
    "host_gc": (
        "Collect at fixed steps on all ranks together (gc.disable(), then gc.collect() every N steps), and "
        "gc.freeze() after warm-up."
    ),
    "memory_allocator": (
        "The allocator asks the device for memory inside of the step: try "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or use less memory on these ranks."
    ),
    "gil_contention": (
        "Another Python thread of this process competes for the interpreter: move its work to a process, or make "
        "it sleep or release the GIL."
    ),
    "gpu_throttle": (
        "Check power cap, temperature and throttle reasons of this device (nvidia-smi -q -d PERFORMANCE, or "
        "rocm-smi); drain the node if it stays."
    ),
    "gpu_compute": (
        "Same kernels and same work take longer on this device: read its clocks, power and temperature, and its "
        "memory errors; swap the device or move the rank to confirm."
    ),
    "recompilation": (
        "Mark changing sizes dynamic or pad them, and agree on sizes over ranks; compile frames run inside of the "
        "step."
    ),
    "device_sync": (
        "Read the value less often or later (keep it on the device, log every N steps, non_blocking copies); each "
        "read drains the launch queue."
    ),
    "host_device_copy": (
        "Check that process, memory and device share a socket (numactl --cpunodebind/--membind, nvidia-smi topo "
        "-m), that the source is pinned, and the PCIe link's width and speed."
    ),
    "load_imbalance": (
        "The time follows the work that these ranks were given: balance tokens, sequence lengths or layers over "
        "ranks."
    ),
    "checkpoint_io": (
        "Write checkpoints asynchronously or to faster storage; the other ranks wait at their next collective."
    ),
    "cpu_contention": (
        "Another process or too many threads compete for the CPU of this host: look at run queue and affinity, pin "
        "ranks to cores."
    ),
    "nic_or_host_network": (
        "Check this host's NIC: link state and speed, error and pause counters, cable and driver; compare with a "
        "healthy host."
    ),
    "fabric_contention": (
        "Look at the switches between these hosts: congestion, path collisions, oversubscription; move the job or "
        "spread its flows to confirm."
    ),
    "intra_node_link": "Check the links between devices on this host (nvidia-smi nvlink -s, topo -m, Xid messages).",
    "profiler_overhead": (
        "End what stops this rank (a stack sampler, a debugger, a script that sends signals), or let it look less "
        "often. Where our own capture left something attached, restart the ranks at their next checkpoint (CUPTI is "
        "torn down after each capture under TEARDOWN_CUPTI=1) and capture this job no more until then."
    ),
    "configuration": (
        "Change the named setting and compare the iterations before and after. What only some ranks have comes from "
        "the launcher, the shell's profile or the container of their hosts; a flag for debugging is taken out; where "
        "the size of the input varies, switch the benchmark mode off or pad to a few sizes."
    ),
    "version_change": (
        "Run the healthy window's versions again to confirm, then compare the two releases; what differs is in the "
        "evidence."
    ),
    "sync_amplification": (
        "Small random delays of changing ranks add up at each synchronisation: remove their source, or pace the "
        "early ranks."
    ),
    "unknown": (
        "Capture again with Python stacks (with_stack=True) and hardware counters: this trace shows who is late "
        "and not why."
    ),
}  # fmt: skip
"""One sentence or two for each cause that rules here can name."""
OF_VALUES = (
    "Compare the sizes of what this operator is given. Where they are the same, look at the values: CPUs take many "
    "times as long for numbers close to zero (subnormal ones); torch.set_flush_denormal(True) on all ranks shows "
    "whether it is that."
)
"""Of one operator on a host that takes longer for as many calls, with as much of a core."""


def _work_share(
    stacked: Stacked,
    ranks: npt.NDArray[np.intp],
    peers: npt.NDArray[np.intp],
    columns: npt.NDArray[np.intp],
    excess_s: float,
) -> float:
    """Share of the excess that more work explains, were time proportional to work. NaN where no function tells its
    work."""
    explained, told = 0.0, 0.0
    is_other = bool(_other_functions(stacked, ranks, peers, columns))
    for f in columns:
        mine, theirs = stacked.work[ranks, f], stacked.work[peers, f]
        time_mine = float(np.median(stacked.beta[ranks, f] * stacked.iteration_s[ranks]))
        time_peers = float(np.median(stacked.beta[peers, f] * stacked.iteration_s[peers]))
        rise = max(time_mine - time_peers, 0.0)
        if not rise:
            continue
        if np.isnan(mine).all():
            continue
        if np.isnan(theirs).all() and (is_other or stacked.functions[f].activity == Activity.MEMORY):
            continue  # the peers do the same otherwise, or hide it behind their kernels: who does more is not known
        told += rise
        reference = float(np.nanmedian(theirs)) if np.isfinite(theirs).any() else 0.0
        ratio = float(np.nanmedian(mine)) / reference if reference > 0 else np.inf
        explained += min(rise, time_peers * (ratio - 1)) if np.isfinite(ratio) else rise
    return explained / excess_s if told >= 0.3 * excess_s else float("nan")


OTHER_FUNCTIONS = 0.5
"""Part of what these ranks spend in functions that their peers lack which the peers must spend in functions that these
lack: then it is the same work by other kernels, or as likely that as more work."""


def _other_functions(
    stacked: Stacked, ranks: npt.NDArray[np.intp], peers: npt.NDArray[np.intp], columns: npt.NDArray[np.intp]
) -> str:
    """Sentence about functions that these ranks run in place of those of their peers; "" if there are none."""
    if not len(columns) or not len(peers):
        return ""
    mine, theirs = (
        np.median(stacked.beta[np.ix_(rows, columns)] * stacked.iteration_s[rows, None], axis=0)
        for rows in (ranks, peers)
    )
    only_mine, only_theirs = float(mine[theirs == 0].sum()), float(theirs[mine == 0].sum())
    # The longest of what only these have is what is told of them; the rest of a step may differ by chance.
    if only_theirs < OTHER_FUNCTIONS * only_mine or only_mine <= 0 or theirs[int(np.argmax(mine - theirs))] > 0:
        return ""
    return "these ranks run other kernels than their peers, in place of theirs: which of the two do more is not known"


MORE_OPERATORS = 1.1
"""A rank that runs the model's operators so many times as often as its peers does more of the same work; below, an
operator more or less here and there would do it."""
FEW_OPERATORS = 5
"""Operators that must be seen on both sides to compare how often they run."""


def operator_ratio(stacked: Stacked, ranks: npt.NDArray[np.intp], peers: npt.NDArray[np.intp]) -> float:
    """How many times as often as on the peers the operators of the model run on these ranks: the median over operators.
    NaN where too few are seen on both.

    Work that is cut into pieces (micro-batches, chunks of a sequence) shows so without sizes, which most traces lack.
    Blind to work that grows within one call.
    """
    named: dict[str, list[int]] = {}
    for k, function in enumerate(stacked.functions):
        if function.activity == Activity.OPERATOR:
            named.setdefault(function.name, []).append(k)
    ratios = []
    for columns in (np.array(found, np.intp) for found in named.values()):
        mine = np.median(np.nansum(stacked.count[np.ix_(ranks, columns)], axis=1))
        theirs = np.median(np.nansum(stacked.count[np.ix_(peers, columns)], axis=1)) if len(peers) else 0.0
        if mine > 0 and theirs > 0:
            ratios.append(float(mine / theirs))
    return float(np.median(ratios)) if len(ratios) >= FEW_OPERATORS else float("nan")


def _more_calls(
    stacked: Stacked,
    ranks: npt.NDArray[np.intp],
    peers: npt.NDArray[np.intp],
    columns: npt.NDArray[np.intp],
    excess_s: float,
) -> tuple[float, float]:
    """How many times as often the model's operators run, and the share of the excess that this explains, were time
    proportional to it. NaN where it is not told."""
    ratio = operator_ratio(stacked, ranks, peers)
    if not np.isfinite(ratio) or not len(columns) or excess_s <= 0:
        return ratio, float("nan")
    usual_s = float(np.median(stacked.beta[np.ix_(peers, columns)].sum(1) * stacked.iteration_s[peers]))
    return ratio, max(ratio - 1, 0.0) * usual_s / excess_s


def _clock_ratio(
    stacked: Stacked,
    ranks: npt.NDArray[np.intp],
    peers: npt.NDArray[np.intp],
    columns: npt.NDArray[np.intp],
    source: str,
) -> float:
    """Utilisation of these ranks over their peers', weighted by time; NaN where the counter is missing."""
    number = MU_SOURCES.index(source)
    ratios, weights = [], []
    for f in columns:
        mine = stacked.mu[ranks, f][stacked.mu_source[ranks, f] == number]
        theirs = stacked.mu[peers, f][stacked.mu_source[peers, f] == number]
        if len(mine) and len(theirs) and np.nanmedian(theirs) > 0:
            ratios.append(float(np.nanmedian(mine) / np.nanmedian(theirs)))
            weights.append(float(np.median(stacked.beta[ranks, f])))
    return float(np.average(ratios, weights=weights)) if ratios and sum(weights) > 0 else float("nan")


ON_THE_CPU = (Activity.INPUT, Activity.GC, Activity.OPERATOR, Activity.LAUNCH, Activity.PYTHON)
"""Kinds of host time that grow where a thread waits for a core."""
LAUNCHING = frozenset({Activity.OPERATOR, Activity.LAUNCH, Activity.PYTHON})
"""Host work that the device sees only where nothing is queued for it."""
STARVATION_EXPLAINS = 0.5
"""Share of an excess that waiting for a core must explain before it is called contention."""


def _starved(
    stacked: Stacked,
    ranks: npt.NDArray[np.intp],
    peers: npt.NDArray[np.intp],
    columns: npt.NDArray[np.intp],
    excess_s: float,
) -> str:
    """Sentence about a training thread that was ready to run and had no core, if that explains the excess; else ""."""
    ratio = _clock_ratio(stacked, ranks, peers, columns, "cpu_granted")
    if not np.isfinite(ratio) or excess_s <= 0:
        return ""
    spent_s, usual_s = (
        float(np.median(stacked.beta[np.ix_(rows, columns)].sum(1) * stacked.iteration_s[rows]))
        for rows in (ranks, peers)
    )
    # With the peers' share of the core, the same work would have taken `ratio` times as long; and it is the peers' work
    # that takes longer, not a sleep or a read that they do not have.
    explained = min(spent_s * (1 - ratio), usual_s * (1 / max(ratio, 1e-9) - 1)) / excess_s
    if explained < STARVATION_EXPLAINS:
        return ""
    return (
        f"ready to run, the training thread gets {ratio:.0%} of the CPU time that its peers get then: waiting for a "
        f"core explains {min(explained, 1):.0%} of the longer time"
    )


OWN_CORE = 0.95
"""A training thread that gets this much of the CPU time that it wants loses no time worth telling to other programs."""


def granted_each(stacked: Stacked, *activities: Activity) -> npt.NDArray[np.float64]:
    """(W,) Share of the CPU time wanted that each rank's training thread got in activities; NaN = not measured."""
    told, weight = grants(stacked, np.arange(len(stacked), dtype=np.intp), columns_of(stacked, activities))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray((told * weight).sum(axis=1) / weight.sum(axis=1), np.float64)


def granted(stacked: Stacked, rows: npt.NDArray[np.intp], activity: Activity) -> float:
    """The same of several ranks together, in one activity."""
    return granted_in(stacked, rows, columns_of(stacked, (activity,)))


def granted_in(stacked: Stacked, rows: npt.NDArray[np.intp], columns: npt.NDArray[np.intp]) -> float:
    """The same in functions."""
    return mean_grant(*grants(stacked, rows, columns))


def mean_grant(told: npt.NDArray[np.float64], weight: npt.NDArray[np.float64]) -> float:
    """The mean of what `grants` gives; NaN = not measured."""
    return float((told * weight).sum() / weight.sum()) if weight.any() else float("nan")


def columns_of(stacked: Stacked, activities: Sequence[Activity]) -> npt.NDArray[np.intp]:
    """Functions of these activities."""
    return np.flatnonzero([f.activity in activities for f in stacked.functions])


def grants(
    stacked: Stacked, rows: npt.NDArray[np.intp], columns: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """(ranks, functions) Shares of the CPU time wanted that was got, and shares of the critical path where that was
    measured; 0 elsewhere."""
    cells = np.ix_(rows, columns)
    told = np.where(stacked.mu_source[cells] == MU_SOURCES.index("cpu_granted"), stacked.mu[cells], np.nan)
    return np.nan_to_num(told), np.where(np.isfinite(told), stacked.beta[cells], 0.0)


CROWDED = 0.7
"""A training thread that gets less than this of the CPU time that it wants shares its core with much else. Seen on an
idle host: above 0.9."""


def crowding(stacked: Stacked, ranks: npt.NDArray[np.intp]) -> str:
    """Sentence about training threads that had no core for much of the time in which they wanted one; "" otherwise."""
    share = granted_in(stacked, ranks, np.arange(len(stacked.functions), dtype=np.intp))
    if not share < CROWDED:
        return ""
    return f"ready to run, the training threads of these ranks get a core {share:.0%} of the time only"


BUSY_THREAD = 0.1
"""A thread off the path must run this much more of the window than on the peers to count as competing for the
interpreter."""


def other_threads(stacked: Stacked, rows: npt.NDArray[np.intp]) -> float:
    """How much of the time other Python threads than the one that trains run, all together, in the middle of these
    ranks. They are named by numbers that differ from rank to rank, so only their sum compares."""
    sums = [sum(share for _, share in stacked.summaries[w].patterns.threads) for w in rows]
    return float(np.median(sums)) if sums else 0.0


def busy_thread(stacked: Stacked, ranks: npt.NDArray[np.intp], peers: npt.NDArray[np.intp]) -> str:
    """Sentence about a host thread that runs on these ranks and not on their peers; "" if there is none."""
    threads = dict(stacked.summaries[ranks[0]].patterns.threads)
    rise = other_threads(stacked, ranks) - other_threads(stacked, peers)
    if rise < BUSY_THREAD or not threads:
        return ""
    name = max(threads, key=lambda thread: threads[thread])
    return f"another Python thread ({name}) runs {rise:.0%} of the time more than on the peers"


def launches_block(stacked: Stacked, ranks: npt.NDArray[np.intp]) -> bool:
    """On all of these ranks each launch call lasts until its kernel is done."""
    return len(ranks) > 0 and all(stacked.summaries[w].coverage.launches_block for w in ranks)


def cause_of(
    stacked: Stacked,
    activity: Activity,
    ranks: npt.NDArray[np.intp],
    peers: npt.NDArray[np.intp],
    excess_s: float,
    phase: Phase,
    spot: bool = True,
    novel: bool = True,
) -> Cause:
    """Cause of an excess of own time of one activity. `ranks`, `peers`: row indices; `excess_s`: per iteration;
    `spot`: one function holds most of it; `novel`: and the peers hardly have it."""
    columns = np.array([k for k, f in enumerate(stacked.functions) if f.activity == activity], np.intp)
    direct = {
        Activity.INPUT: ("input_pipeline", "the time is spent inside of the dataloader's next"),
        Activity.CHECKPOINT: ("checkpoint_io", "the time is spent inside of saving"),
        Activity.COMPILE: ("recompilation", "the time is spent in compiler frames inside of the step"),
        Activity.GC: ("host_gc", "the time is spent in Python's garbage collector"),
        Activity.ALLOCATOR: ("memory_allocator", "the time is spent in device allocator calls inside of the step"),
        Activity.SYNC: ("device_sync", "the device is idle after a host call that waited for it to drain"),
    }
    if activity in LAUNCHING and launches_block(stacked, ranks) and not launches_block(stacked, peers):
        return BLOCKING
    # A thread of the rank's own first: what it does to the interpreter, it does to the core as well.
    busy = busy_thread(stacked, ranks, peers)
    if busy and activity in (Activity.OPERATOR, Activity.LAUNCH, Activity.PYTHON) and not (spot and novel):
        return Cause(
            "gil_contention",
            False,
            f"{busy}, and the training thread takes longer for {'what the peers do too' if spot else 'everything'}",
            (),
        )
    if activity in ON_THE_CPU:
        starved = _starved(stacked, ranks, peers, columns, excess_s)
        if starved:
            return Cause("cpu_contention", True, starved, ())
    if activity == Activity.COMPILE and phase == Phase.TUNING:
        return TUNING
    if activity in direct:
        cause, because = direct[activity]
        return Cause(cause, True, because, ())
    share = _work_share(stacked, ranks, peers, columns, excess_s)
    if np.isfinite(share) and share >= WORK_EXPLAINS:
        return Cause(
            "load_imbalance",
            True,
            f"these ranks were given more work: it explains {min(share, 1):.0%} of the longer time",
            (),
        )
    same_work = ("load_imbalance: the work is the same as the peers'",) if np.isfinite(share) else ()
    if not same_work and np.isfinite(excess_s):
        ratio, by_calls = _more_calls(stacked, ranks, peers, columns, excess_s)
        if ratio >= MORE_OPERATORS and by_calls >= WORK_EXPLAINS:
            return Cause(
                "load_imbalance",
                False,
                f"these ranks run the model's operators {ratio:.2f} times as often as their peers: it explains "
                f"{min(by_calls, 1):.0%} of the longer time",
                (),
            )
    if activity == Activity.COMPUTE and phase == Phase.TUNING:
        return TUNING
    if activity == Activity.COMPUTE:
        clock = _clock_ratio(stacked, ranks, peers, columns, "sm_clock")
        if np.isfinite(clock) and clock < CLOCK_DROP:
            return Cause(
                "gpu_throttle", True, f"the clock during these kernels is {clock:.0%} of the peers'", same_work
            )
        if not same_work and (other := _other_functions(stacked, ranks, peers, columns)):
            return Cause("unknown", False, other, ())
        ruled = (*same_work, *(("gpu_throttle: the clock is that of the peers",) if np.isfinite(clock) else ()))
        return Cause("gpu_compute", False, "the same kernels take longer on this device", ruled)
    if activity == Activity.MEMORY:
        ratio = _clock_ratio(stacked, ranks, peers, columns, "copy_bandwidth")
        if np.isfinite(ratio) and ratio < 0.9:
            return Cause("host_device_copy", True, f"copies reach {ratio:.0%} of the peers' bandwidth", same_work)
        because = "copies of the same size take longer" if same_work else "copies hold the device up for longer"
        return Cause("host_device_copy", bool(same_work), because, same_work)
    if activity in (Activity.OPERATOR, Activity.LAUNCH):
        cpu = _clock_ratio(stacked, ranks, peers, columns, "cpu")
        if np.isfinite(cpu) and cpu < 0.9:
            return Cause(
                "cpu_contention",
                True,
                f"the training thread gets {cpu:.0%} of the CPU time that its peers get",
                same_work,
            )
        if activity == Activity.OPERATOR and phase == Phase.OPTIMIZER:
            return Cause("unknown", False, "optimizer operators take longer on the host", same_work)
        because = "operators take longer on the host and no CPU counter tells why"
        return Cause("unknown", False, because, same_work, advice=OF_VALUES if spot else "")
    if not spot:
        return Cause("host_python", False, "Python on the training thread takes longer, in no one function", ())
    return Cause("host_python", True, "the time is spent in Python on the training thread", ())
