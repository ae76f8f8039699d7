"""What a live job would tell beside its traces, for simulated clusters: settings of each rank, counters of devices and
ranks, the series of iterations. Cases of the catalogue change what their fault changes, and give it to the diagnosis as
an agent would, through `background.context_of`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from eroica.background import History, Lap, context_of
from eroica.context import Context
from eroica.job import format_ranks
from eroica.pattern import stack, summarize
from eroica.samplers.evidence import Counted
from evals.cases_synth import Case as Shape
from evals.cases_synth import Fault
from evals.made import Draw
from evals.synth import Cluster
from evals.truth import Answer

SERIES_STEPS = 240
"""Iterations that are told before the window."""
FIRST_STEP = 10
"""Number of a simulated window's first step."""
CORES = 64
"""Of each host, in two sockets."""


def shape(
    layout: str, *faults: tuple[str, str], counters: bool = False, baseline: bool = False, extras: str = ""
) -> Shape:
    """A cluster to be drawn. faults: (transform, culprits)."""
    # Stands where the catalogue's answer comes, and says whether there are ranks to be named.
    later = {
        who: Answer(causes=frozenset(), scopes=frozenset(), who="members" if who in ("all", "rotating") else "ranks")
        for _, who in faults
    }
    made = tuple(Fault(transform=transform, culprits=who, answer=later[who]) for transform, who in faults)
    return Shape(
        id=layout, catalogue="", text="", layout=layout, faults=made, counters=counters, baseline=baseline,
        extras=frozenset(extras.split()),
    )  # fmt: skip


def world_size(draw: Draw) -> int:
    """8 ranks on a host or two, in one of four draws 64 on eight hosts."""
    return 64 if draw.seed % 4 == 3 else 8


@dataclass(slots=True)
class Beside:
    """The records of one job, to be changed by a case before they are handed over."""

    made: Cluster
    settings: list[dict[str, object]]
    """By rank: the environment snapshot."""
    devices: list[Counted]
    """By rank: its device."""
    ranks: list[Counted]
    """By rank: its process."""
    laps: Sequence[float] = ()
    """Seconds of the iterations before the window."""
    healthy_settings: Mapping[str, object] = field(default_factory=dict)
    """What was different in the healthy past, if there is one."""

    def context(self, trigger: str = "manual") -> Context:
        """As a live job fills it, the healthy past included if the cluster has one."""
        made = self.made
        histories = {
            rank: History(laps=self._laps(rank), environment=settings) for rank, settings in enumerate(self.settings)
        }
        counters: dict[str, list[Counted]] = {host: [] for host in made.host_names}
        if made.case.counters:
            for rank, host in enumerate(made.truth.hosts):
                counters[host] += [self.devices[rank], self.ranks[rank]]
        count = made.plan.host_ns.shape[2] - 1
        context = context_of(histories, counters, {}, None, range(FIRST_STEP, FIRST_STEP + count))
        if made.case.baseline:
            past = stack([summarize(trace, samples) for trace, samples in made.baseline()])
            then = {rank: History(environment={**settings, **self.healthy_settings})
                    for rank, settings in enumerate(self.settings)}  # fmt: skip
            known = context_of(then, {}, {}, None, range(0)).environment
            context = replace(context, baseline=past, baseline_environment=known)
        return replace(context, trigger=trigger)

    def _laps(self, rank: int) -> tuple[Lap, ...]:
        seconds = [*self.laps, *(self.made.times.iteration_ns[1:] / 1e9 if len(self.laps) else ())]
        lengths = np.rint(np.array(seconds) * 1e9).astype(np.int64)
        starts = self.made.clock_ns(rank) + np.cumsum(lengths) - int(lengths.sum())
        first = FIRST_STEP - len(self.laps)
        return tuple(
            Lap(first + k, int(start), int(length), "")
            for k, (start, length) in enumerate(zip(starts, lengths, strict=True))
        )


def beside(made: Cluster) -> Beside:
    """The records of a healthy job of this shape; what the simulation knows of clocks is in the counters."""
    local = _local(made)
    amd = made.base.amd
    per_host = max(local) + 1
    settings: list[dict[str, object]] = []
    devices, ranks = [], []
    for rank, host in enumerate(made.truth.hosts):
        socket = 2 * local[rank] // per_host
        near = format_ranks(range(socket * CORES // 2, (socket + 1) * CORES // 2))
        settings.append(
            {
                "host": host, "python": "3.11.9", "kernel": "5.15.0-105-generic", "cpus": CORES, "affinity": near,
                "affinity.cpus": CORES // 2, "torch": "2.7.1", "torch.hip" if amd else "torch.cuda": "6.3" if amd
                else "12.6", "nccl": "2.26.2", "torch.threads": 8, "torch.anomaly_mode": False,
                "torch.cudnn.benchmark": False, "torch.matmul_precision": "high", "gc.enabled": True,
                "gc.thresholds": "700 10 10", "env.NCCL_DEBUG": "WARN", "env.OMP_NUM_THREADS": "8",
                "env.CUDA_VISIBLE_DEVICES": str(local[rank]), "device": made.device_models[rank],
                "device.memory_bytes": 80 << 30, "loader.1.workers": 4, "loader.1.pinned": True,
            }
        )  # fmt: skip
        clock, flagged = float(made.throttle[rank]), bool(made.throttle_flag[rank])
        values = {
            "sm_clock_mhz": 1980.0 * clock, "sm_clock_ratio": clock, "throttle": float(flagged),
            "throttle_power_cap": float(flagged), "throttle_hw_slowdown": 0.0, "throttle_thermal": 0.0,
            "throttle_hw_thermal": 0.0, "throttle_power_brake": 0.0, "power_w": 640.0 * clock,
            "power_limit_w": 700.0, "temperature_c": 61.0 + rank % 3, "busy_ratio": 0.97, "memory_busy_ratio": 0.5,
            "pcie_width": 16.0, "pcie_width_ratio": 1.0, "pcie_generation": 5.0, "pcie_replays": 0.0,
            "num_nvlinks": 18.0, "nvlink_errors": 0.0, "uncorrected_ecc": 0.0, "num_processes": 1.0, "lost": 0.0,
        }  # fmt: skip
        labels = {
            "name": made.device_models[rank], "uuid": f"GPU-{rank:08d}", "pci": f"00000000:{local[rank] + 1:02X}:00.0",
            "pids": str(4000 + rank), "reasons": "power_cap" if flagged else "", "cpus": near,
        }  # fmt: skip
        devices.append(Counted(kind="device", name=str(local[rank]), rank=None, values=values, labels=labels))
        ranks.append(
            Counted(
                kind="rank", name=str(rank), rank=rank,
                values={"cpu_ratio": 0.97, "runqueue_ratio": 0.002, "process_cpu": 1.3, "major_faults_per_s": 0.0},
                labels={"pid": str(4000 + rank), "cpus": near, "state": "R (running)"},
            )
        )  # fmt: skip
    return Beside(made, settings, devices, ranks)


def _local(made: Cluster) -> list[int]:
    """Number of each rank on its host."""
    hosts = made.truth.hosts
    return [hosts[:rank].count(host) for rank, host in enumerate(hosts)]


def device_of(made: Cluster, rank: int) -> str:
    """As a finding names it."""
    return f"{made.truth.hosts[rank]}/gpu{_local(made)[rank]}"
