"""The numbers of the fabric model, each with its source, fixed before there was a policy that could be flattered.

Not measured by us: this project has no cluster. "Assumed" means that no source was found and `docs/fabric-model.md`
sweeps the number; "calibrated" means that it was set so that the model meets a published figure (one number only,
`Stalls.rate`). Used by `topology` and `simulator`; changed in tests and sweeps with `dataclasses.replace`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from eroica.errors import UserError

Algorithm = Literal["auto", "ring", "tree", "hierarchical"]
Layout = Literal["data", "tensor"]
MOST_HOSTS = 4096
MOST_GPUS = 16
"""Of a host; beyond these a typing error is likelier than a machine."""


def _need(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise UserError(f"{name} is {value:g}; the model takes {low:g} to {high:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine: an H100 system with eight devices behind NVSwitch and a network card for each."""

    gpus: int = 8
    """NVIDIA DGX H100 User Guide: 8 devices, 8 ConnectX-7 for them, 2 sockets."""
    nvlink_bytes_s: float = 360e9
    """Out of one device. 450 GB/s per direction (18 links of 25 GB/s, NVIDIA H100 data sheet); 80 % of it reaches the
    payload (assumed)."""
    pcie_bytes_s: float = 55e9
    """Device to its card, one direction. PCIe 5.0 x16 is 63 GB/s raw; 87 % (assumed)."""
    nic_bytes_s: float = 46e9
    """One card, one direction. 400 Gbit/s is 50 GB/s; 92 % reaches the payload (assumed)."""
    far_slots: tuple[int, ...] = ()
    """Devices whose processor and card are on the other socket. () = none: a host as its maker wired it."""
    far_bandwidth: float = 0.55
    """Share of `pcie_bytes_s` that a far device gets through the link between sockets (assumed)."""
    far_slowdown: float = 0.08
    """Longer computing of a far device: its launches and input come from the other socket's memory (assumed)."""

    def __post_init__(self) -> None:
        _need("gpus of a host", self.gpus, 1, MOST_GPUS)
        for name in ("nvlink_bytes_s", "pcie_bytes_s", "nic_bytes_s"):
            _need(name, getattr(self, name), 1e3, 1e15)
        _need("far_bandwidth", self.far_bandwidth, 0.01, 1)
        _need("far_slowdown", self.far_slowdown, 0, 10)
        if any(not 0 <= slot < self.gpus for slot in self.far_slots):
            raise UserError(f"far_slots {self.far_slots} names a device that a host of {self.gpus} has not")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """Leaves, spines and how traffic takes its way over them."""

    hosts_per_leaf: int = 4
    """Rack cabling: 4 hosts x 8 cards fill the 32 lower ports of a 64-port switch (MegaScale, arXiv 2402.15627, has
    Tomahawk 4 with 64 x 400 Gbit/s)."""
    by_rail: bool = False
    """Card k of all hosts of a pod at leaf k instead of all cards of a host at one leaf (the rail-optimised cabling of
    NVIDIA's and Alibaba's reference designs)."""
    oversubscription: float = 2.0
    """Lower over upper bandwidth of a leaf. MegaScale has 1, general clusters 2 to 4; arXiv 2603.04424 speaks of
    oversubscribed clusters and gives no number. Assumed."""
    packed: bool = False
    """Hosts of the job stand in the order of its ring. False: a shared cluster gave it hosts where there were some, so
    that most hops leave their leaf."""
    paths: int = 4
    """Connections into which a flow is split, each hashed to an upper port. NCCL_IB_QPS_PER_CONNECTION; Meta (SIGCOMM
    2024, "RDMA over Ethernet for Distributed AI Training") reports up to 40 % on all-reduce from it over plain hashing.
    """
    spread: bool = False
    """Packets go over all upper ports alike (adaptive routing) instead of by hash."""
    goodput_loss: float = 0.2
    """Share of a switch link that congestion control wastes when very many flows meet; with k flows 1 - loss (1 - 1/k)
    of it is left. Assumed: DCQCN and PFC (SIGCOMM 2015) lose some to oscillation and head-of-line blocking, and C4
    (arXiv 2406.04594) measures a gap of 30 % at 512 devices, most of which here comes from collisions already."""
    meeting_loss: float = 0.0
    """Share of a switch link that is lost besides when very many reductions of the job's own groups meet there; of n,
    1 - loss (1 - 1/n) is left. Incast: what drops is sent again, all after it, too (go-back-N; IRN, SIGCOMM 2018), and
    TCP waits for a time-out (Vasudevan, SIGCOMM 2009). Added after the policy, to look for what could make pacing gain:
    0 in the headline, since PFC is there to prevent it; up to 0.5 in the box (assumed)."""
    base_latency_s: float = 8.4e-6
    """Of a collective. NCCL src/graph/tuning.cc, baseLat of Ring/Simple."""
    nvlink_latency_s: float = 3.4e-6
    """Of a step within a host. The same, hwLat of NVLink Ring/Simple."""
    net_latency_s: float = 14e-6
    """Of a step between hosts. The same, hwLat of the network."""

    def __post_init__(self) -> None:
        _need("hosts_per_leaf", self.hosts_per_leaf, 1, 1024)
        _need("oversubscription", self.oversubscription, 0.1, 64)
        _need("paths", self.paths, 1, 64)
        _need("goodput_loss", self.goodput_loss, 0, 0.9)
        _need("meeting_loss", self.meeting_loss, 0, 0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What each iteration does, the same at all sizes (weak scaling)."""

    compute_s: float = 0.080
    """Forward and backward of one device: 6 x 1.3e9 FLOP for each of 4096 tokens at 400 TFLOP/s, 40 % of an H100's
    dense bf16 peak (Llama 3, arXiv 2407.21783: 38 to 43 %). One sequence per device, so that reductions matter: with
    many they hide, and no fabric makes scaling fail."""
    forward_share: float = 1 / 3
    """Backward costs twice the forward (both products of each layer)."""
    optimizer_s: float = 0.008
    """16 bytes per parameter of Adam, sharded or not fused: assumed."""
    gradient_bytes: float = 2.6e9
    """1.3e9 parameters (GPT-3 XL, arXiv 2005.14165, table 2.1) in bf16."""
    buckets: int = 8
    """Reductions per iteration, at equal distances of the backward pass. DDP's default of 25 MB would make 104,
    Megatron's larger ones 3 to 30; assumed."""
    algorithm: Algorithm = "auto"
    """"auto": ring or tree, by what each would take with nobody else there, as NCCL chooses."""
    layout: Layout = "data"
    """"data": one group of all ranks. "tensor": the devices of a host compute one model in step, and device k of all
    hosts reduce among themselves: groups that share the upper links."""
    wait_slowdown: float = 0.10
    """Longer computing while a reduction that has begun waits for others: its blocks keep their processors. 20 of 132
    (DeepSeek-V3, arXiv 2412.19437), less what the rest makes up: assumed."""
    transfer_slowdown: float = 0.189
    """Longer computing while one transfers: mean over systems of arXiv 2507.03114 (40 % at most)."""
    crowding: float = 0.0
    """Longer computing of a rank while all the others of its host wait in a reduction; less where fewer do. Polling
    takes power, cores and memory bandwidth from who still computes. Added after the policy, to look for what could make
    pacing gain: 0 in the headline, since no figure was found; up to 0.1 in the box (assumed)."""

    def __post_init__(self) -> None:
        _need("compute_s", self.compute_s, 1e-6, 1e4)
        _need("forward_share", self.forward_share, 0, 1)
        _need("optimizer_s", self.optimizer_s, 0, 1e4)
        _need("gradient_bytes", self.gradient_bytes, 1, 1e15)
        _need("buckets", self.buckets, 1, 256)
        _need("wait_slowdown", self.wait_slowdown, 0, 10)
        _need("transfer_slowdown", self.transfer_slowdown, 0, 10)
        _need("crowding", self.crowding, 0, 1)
        if self.algorithm not in ("auto", "ring", "tree", "hierarchical"):
            raise UserError(f"{self.algorithm!r} is no algorithm of the model; it has auto, ring, tree, hierarchical")
        if self.layout not in ("data", "tensor"):
            raise UserError(f"{self.layout!r} is no layout of the model; it has data and tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalls:
    """Rare long delays of one rank: collections, page faults, a late batch, clock changes."""

    rate: float = 2.0e-4
    """Per rank and iteration. Calibrated: with everything else as it stands here, the iteration time of 64 hosts has a
    CV of 0.22 (arXiv 2603.04424, baseline); ten seeds of 1,000 iterations gave 0.220."""
    shortest_s: float = 0.03
    """Assumed: a collection of CPython's oldest generation in a training process takes tens of milliseconds."""
    exponent: float = 2.5
    """Of the Pareto tail; below 2 the variance would not exist. Heavy tails of noise: Hoefler et al., SC 2010; the
    number is assumed."""
    longest_s: float = 0.5
    """Cut: what is longer is a fault and no noise."""

    def __post_init__(self) -> None:
        _need("rate of stalls", self.rate, 0, 1)
        _need("shortest_s", self.shortest_s, 1e-9, 1e4)
        _need("exponent", self.exponent, 1.01, 100)
        _need("longest_s", self.longest_s, self.shortest_s, 1e5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """Other jobs' transfers over the switch links, in bursts that hit several links at once."""

    neighbours: float = 1.0
    """Bursts under way, in the mean over time: one job nearby communicates at any moment. Assumed."""
    size: float = 1.0
    """Flows that a burst adds to each link that it hits, relative to what a reduction of ours has on a link in the
    mean: a neighbour like ours."""
    burst_s: float = 0.4
    """Median length of a burst: the communicating phase of a neighbour's iteration (CASSINI, arXiv 2308.00852, shows
    phases of tenths of seconds)."""
    burst_spread: float = 0.8
    """Standard deviation of its logarithm: assumed."""
    width: float = 0.25
    """Share of the switch links that one burst hits: a neighbour of a size like ours, on links drawn each time
    (assumed)."""

    def __post_init__(self) -> None:
        _need("neighbours", self.neighbours, 0, 1000)
        _need("size of a burst", self.size, 0, 1000)
        _need("burst_s", self.burst_s, 1e-6, 1e4)
        _need("burst_spread", self.burst_spread, 0, 5)
        _need("width", self.width, 1e-6, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """What makes iterations and ranks unequal. Each part can be switched off alone."""

    scatter: float = 0.01
    """Standard deviation of the logarithm of each computing segment: MegaScale, 2402.15627, finds about 0.5 % of slow
    machines and otherwise little; 1 % assumed."""
    stalls: Stalls | None = Stalls()
    background: Background | None = Background()
    imbalance: float = 0.0
    """Standard deviation of the logarithm of the work per rank and iteration (lengths of sequences). 0 in the headline;
    arXiv 2505.05713 names it among the causes of stragglers."""
    straggler: int | None = None
    """A rank that computes longer in all iterations."""
    straggler_slowdown: float = 0.15
    """By how much: assumed."""

    def __post_init__(self) -> None:
        _need("scatter", self.scatter, 0, 2)
        _need("imbalance", self.imbalance, 0, 2)
        _need("straggler_slowdown", self.straggler_slowdown, 0, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """All of it, for one simulated job."""

    hosts: int = 64
    host: Host = Host()
    fabric: Fabric = Fabric()
    workload: Workload = Workload()
    noise: Noise = Noise()

    def __post_init__(self) -> None:
        _need("hosts", self.hosts, 1, MOST_HOSTS)
        straggler = self.noise.straggler
        if straggler is not None and not 0 <= straggler < self.ranks:
            raise UserError(f"rank {straggler} is to be slow, and the job has ranks 0 to {self.ranks - 1}")

    @property
    def ranks(self) -> int:
        """Devices of the job."""
        return self.hosts * self.host.gpus


QUIET = Noise(scatter=0.0, stalls=None, background=None)
"""Nothing is unequal."""
