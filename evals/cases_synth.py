"""The synthetic cases and their right answers: who, what, why, and who must not be blamed.

Data only. `evals.synth` plants the faults, `evals.score` judges a diagnosis by these answers, `evals.synthetic` runs
them all. The answers were written before the rules that must give them, from the catalogue's "right answer" lines
(the entry is named in `catalogue`), so that they describe faults and not our own output. Change one only with a reason
in the commit message.

Effects are shares of the iteration: a case "at 5 %" has a fault that makes the simulated iteration 5 % longer.
"""

from __future__ import annotations

from dataclasses import dataclass

from evals.truth import Answer

EFFECTS = (0.02, 0.05, 0.10, 0.20)
"""Shares of the iteration at which each fault is drawn unless its case says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault and its answer."""

    transform: str
    """Name in `evals.faults.TRANSFORMS`."""
    culprits: str
    """Who is drawn: one, two, quarter (an eighth of the ranks, at least two), socket, host, link, edge (two devices of
    one host), rotating, middle_stage, last_stage (one replica), all."""
    answer: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One cluster with its faults; no fault = a control, which must stay silent."""

    id: str
    catalogue: str
    """Entry of the fault catalogue that this follows; "" = none."""
    text: str
    layout: str
    """Parallelism, see `evals.layouts.LAYOUTS`: dp, tp_dp, hsdp, mesh, pp_dp, pp_1f1b, ep_dp."""
    faults: tuple[Fault, ...] = ()
    counters: bool = False
    """Hardware counters come with the traces."""
    baseline: bool = False
    """Traces of the same job when healthy come along."""
    effects: tuple[float, ...] = EFFECTS
    extras: frozenset[str] = frozenset()
    """Harmless peculiarities: models, power_cap, heavy_last_stage, harmless_sync (of one rank), harmless_syncs (of
    all), first_compile, hiccup."""
    tolerated: tuple[Answer, ...] = ()
    """Findings that are neither asked for nor a false blame (advice on structure)."""

    @property
    def control(self) -> bool:
        """Nothing is wrong: any blame is a false one."""
        return not self.faults


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_KERNEL = r"^(kernel|compute|gpu)|/gpu\d"
_COLLECTIVE = r"all_?reduce|all_?gather|reduce_?scatter|nccl|collective|nic"

_THROTTLED = Answer(causes=_set("gpu_throttle"), scopes=_set("rank"), who="ranks", function=_KERNEL)
_SLOW_GPU = Answer(causes=_set("gpu_compute"), scopes=_set("rank"), who="ranks", function=_KERNEL)
_INPUT = Answer(causes=_set("input_pipeline"), scopes=_set("rank"), who="ranks", function=r"DataLoader|data\.py")
_COPY = Answer(causes=_set("host_device_copy"), scopes=_set("rank host"), who="ranks", function=r"memcpy|copy")
_NIC = Answer(causes=_set("nic_or_host_network"), scopes=_set("host"), who="hosts", function=None)
_JOB_WIDE_NETWORK = Answer(
    causes=_set("nic_or_host_network fabric_contention"), scopes=_set("group all"), who="members", function=_COLLECTIVE
)
_LINK = Answer(causes=_set("nic_or_host_network fabric_contention"), scopes=_set("link"), who="link", function=None)
_GC = Answer(causes=_set("host_gc"), scopes=_set("rotating"), who="nobody", function=r"gc|garbage")
_HOLE = Answer(causes=_set("host_gc host_python unknown"), scopes=_set("rotating"), who="nobody", function=None)
_IMBALANCE = Answer(causes=_set("load_imbalance"), scopes=_set("rank"), who="ranks", function=_KERNEL)
_MOVING_IMBALANCE = Answer(causes=_set("load_imbalance"), scopes=_set("rotating"), who="nobody", function=_KERNEL)
_HEAVY_STAGE = Answer(causes=_set("load_imbalance"), scopes=_set("group"), who="members", function=None)
_COMMON = Answer(
    causes=_set("unknown gpu_compute gpu_throttle configuration version_change"),
    scopes=_set("all"),
    who="members",
    function=None,
)
_SYNC = Answer(
    causes=_set("device_sync"),
    scopes=_set("rank"),
    who="ranks",
    function=r"item|_local_scalar_dense|StreamSynchronize|train\.py",
)
_ALLOCATOR = Answer(
    causes=_set("memory_allocator"), scopes=_set("rank"), who="ranks", function=r"Malloc|Free|aten::empty"
)

CASES: tuple[Case, ...] = (
    Case(
        id="gpu_throttle",
        catalogue="G01",
        text="One GPU runs at a lower clock; its counters say so.",
        layout="dp",
        faults=(Fault(transform="gpu_slow", culprits="one", answer=_THROTTLED),),
        counters=True,
    ),
    Case(
        id="gpu_slow_no_counters",
        catalogue="G01",
        text="One GPU runs at a lower clock and nothing but its trace tells.",
        layout="dp",
        faults=(Fault(transform="gpu_slow", culprits="one", answer=_SLOW_GPU),),
    ),
    Case(
        id="gpu_slow_tensor_parallel",
        catalogue="G01",
        text="One slow GPU; tensor-parallel peers wait for it in each layer, data-parallel peers for all of these.",
        layout="tp_dp",
        faults=(Fault(transform="gpu_slow", culprits="one", answer=_SLOW_GPU),),
    ),
    Case(
        id="gpu_slow_expert_parallel",
        catalogue="G01",
        text="One slow GPU in a mixture of experts with uneven dispatch and combine.",
        layout="ep_dp",
        faults=(Fault(transform="gpu_slow", culprits="one", answer=_SLOW_GPU),),
    ),
    Case(
        id="slow_input",
        catalogue="D01",
        text="The dataset's __getitem__ is slow on one rank.",
        layout="dp",
        faults=(Fault(transform="input_slow", culprits="one", answer=_INPUT),),
    ),
    Case(
        id="copies_on_socket",
        catalogue="I04",
        text="Host-device copies are slow on the ranks of one socket of one host.",
        layout="dp",
        faults=(Fault(transform="copy_slow", culprits="socket", answer=_COPY),),
    ),
    Case(
        id="nic_slow",
        catalogue="N03",
        text="One host's NIC is slow: the groups that cross it are, other groups are not.",
        layout="hsdp",
        faults=(Fault(transform="nic_slow", culprits="host", answer=_NIC),),
    ),
    Case(
        id="nic_slow_counters",
        catalogue="N03",
        text="The same with NIC counters.",
        layout="hsdp",
        faults=(Fault(transform="nic_slow", culprits="host", answer=_NIC),),
        counters=True,
    ),
    Case(
        id="nic_slow_one_group",
        catalogue="N01",
        text="One host's NIC is slow, all ranks share the only group; only the healthy past tells that transfers grew.",
        layout="dp",
        faults=(Fault(transform="nic_slow", culprits="host", answer=_JOB_WIDE_NETWORK),),
        baseline=True,
    ),
    Case(
        id="link_slow",
        catalogue="N06",
        text="The link between two hosts is slow; two groups cross it, the other groups of these hosts are fine.",
        layout="hsdp",
        faults=(Fault(transform="link_slow", culprits="link", answer=_LINK),),
    ),
    Case(
        id="gc_rotating",
        catalogue="H01",
        text="Garbage collection on another rank in each step, with its frame in the trace.",
        layout="dp",
        faults=(Fault(transform="gc", culprits="rotating", answer=_GC),),
        extras=_set("gc_frame"),
    ),
    Case(
        id="gc_rotating_hole",
        catalogue="H01",
        text="The same, but the trace only has a hole.",
        layout="dp",
        faults=(Fault(transform="gc", culprits="rotating", answer=_HOLE),),
    ),
    Case(
        id="load_imbalance",
        catalogue="L01",
        text="Some ranks get more work in every step: launch grids grow with the time.",
        layout="dp",
        faults=(Fault(transform="imbalance", culprits="quarter", answer=_IMBALANCE),),
    ),
    Case(
        id="load_imbalance_rotating",
        catalogue="L02",
        text="In each step other ranks get more work.",
        layout="dp",
        faults=(Fault(transform="imbalance_rotating", culprits="rotating", answer=_MOVING_IMBALANCE),),
    ),
    Case(
        id="last_stage_heavier",
        catalogue="L04",
        text="Control: the last of four pipeline stages carries the vocabulary projection.",
        layout="pp_dp",
        extras=_set("heavy_last_stage"),
        tolerated=(_HEAVY_STAGE,),
    ),
    Case(
        id="last_stage_heavier_one_slow",
        catalogue="L04",
        text="The same with one replica of the last stage slower than its peers.",
        layout="pp_dp",
        faults=(Fault(transform="gpu_slow", culprits="last_stage", answer=_SLOW_GPU),),
        extras=_set("heavy_last_stage"),
        tolerated=(_HEAVY_STAGE,),
    ),
    Case(
        id="device_models",
        catalogue="",
        text="Control: half of the hosts have an older, slower device model.",
        layout="dp",
        extras=_set("models"),
    ),
    Case(
        id="everything_slower",
        catalogue="G03",
        text="Everything is 15 % slower on all ranks; the healthy past is known.",
        layout="dp",
        faults=(Fault(transform="everything", culprits="all", answer=_COMMON),),
        baseline=True,
        effects=(0.15,),
    ),
    Case(
        id="everything_slower_no_baseline",
        catalogue="G03",
        text="Control: the same without a past to compare with.",
        layout="dp",
        extras=_set("everything"),
    ),
    Case(
        id="two_ranks_one_fault",
        catalogue="G01",
        text="Two GPUs on different hosts are slow by the same factor: one finding with both ranks.",
        layout="dp",
        faults=(Fault(transform="gpu_slow", culprits="two", answer=_SLOW_GPU),),
    ),
    Case(
        id="two_faults",
        catalogue="X02",
        text="Slow input on one rank and a slow GPU elsewhere, in parts of the step that collectives keep apart.",
        layout="hsdp",
        faults=(
            Fault(transform="input_slow", culprits="one", answer=_INPUT),
            Fault(transform="gpu_slow", culprits="one", answer=_SLOW_GPU),
        ),
    ),
    Case(
        id="device_sync",
        catalogue="H04",
        text="One rank reads a scalar back in the forward pass and does host work before it launches again.",
        layout="dp",
        faults=(Fault(transform="sync_gap", culprits="one", answer=_SYNC),),
    ),
    Case(
        id="device_sync_harmless",
        catalogue="H04",
        text="Control: one rank reads a scalar back, long wait, and launches at once: no gap worth a word.",
        layout="dp",
        extras=_set("harmless_sync"),
    ),
    Case(
        id="allocator",
        catalogue="M01",
        text="cudaFree and cudaMalloc pairs inside the step on two ranks.",
        layout="dp",
        faults=(Fault(transform="allocator", culprits="two", answer=_ALLOCATOR),),
    ),
    Case(
        id="power_cap_flag",
        catalogue="G04",
        text="Control: the throttle flag is set on three ranks whose kernels are as fast as any.",
        layout="dp",
        counters=True,
        extras=_set("power_cap"),
    ),
    Case(
        id="healthy",
        catalogue="",
        text="Control: a healthy job; some seeds have one hiccup of one rank in one iteration.",
        layout="dp",
        extras=_set("hiccup"),
    ),
    Case(
        id="healthy_sharded",
        catalogue="",
        text="Control: a healthy job with sharded and replicated groups.",
        layout="hsdp",
        extras=_set("hiccup"),
    ),
)

BY_ID = {case.id: case for case in CASES}
