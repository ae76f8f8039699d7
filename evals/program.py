"""What one iteration of a synthetic job consists of, and when everything in it happens on every rank.

A program is a list of items that all W ranks run in order: host work, device work, waits of the host for the device,
communication. `simulate` walks it for all ranks at once. Kernels start when they are launched and their stream is free;
a collective ends for all members when the last has arrived plus the transfer. So waits, gaps and lateness follow from
causes and are never painted on. Used by `evals.faults` (which changes a plan's numbers) and `evals.synth` (which writes
events); it is not a model of a fabric: a transfer is a duration with jitter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from eroica.job import ProcessGroup
from eroica.trace import Bools, CollectiveKind, Float64s, Int32s
from evals.base import Piece

Random: TypeAlias = np.random.Generator

LAUNCH_NS = 4_000.0
"""From the launch call to the earliest start on an idle stream."""
GAP_NS = 1_000.0
"""Between kernels of one stream."""


@dataclass(frozen=True, slots=True)
class Comm:
    """A communication in the program. group[w] is the index of w's group for this item, -1 = w takes no part."""

    kind: CollectiveKind
    stream: int
    group: Int32s
    """(W,) Index into Program.groups of those who meet."""
    blocks: Bools
    """(W,) The compute stream waits for the end before its next kernel."""
    peer: Int32s
    """(W,) Other side of point to point; -1."""
    sends: Bools
    """(W,) Point to point: this rank sends."""
    transfer_ns: float
    elements: int
    dtype: str
    uneven: bool = False
    shown: Int32s | None = None
    """(W,) Group that the trace names, where it is another than those who meet (point to point in a larger group)."""


@dataclass(frozen=True, slots=True)
class Item:
    """One step of the program."""

    label: str
    """input, copy, forward, backward, optimizer, comm, sync, log, or what a case plants: gc, gap_sync, gap, malloc,
    harmless_sync, conv, tune_wait, tune, compile."""
    piece: Piece
    drains: bool = False
    """The host first waits until the compute stream is empty."""
    joins: bool = False
    """The compute stream waits for all communication before the item's first kernel."""
    comm: Comm | None = None
    base_piece: int = -1
    """Which forward piece of the base this is, for frames that span pieces; -1 = none."""
    blocked: Piece | None = None
    """The piece where each launch call lasts until its kernel is done; None = no rank of the job launches so."""


@dataclass(frozen=True, slots=True)
class Program:
    """N items run by W ranks."""

    items: tuple[Item, ...]
    groups: tuple[ProcessGroup, ...]
    hosts: Int32s
    """(W,) Host index of each rank."""
    stage: Int32s
    """(W,) Pipeline stage."""
    inactive: Bools
    """(N, W) Ranks that skip an item."""
    stretch: Float64s
    """(N, W) How much longer than the base an item's kernels take by the job's design (heavier stage, older device)."""

    @property
    def world_size(self) -> int:
        """W."""
        return len(self.hosts)

    def find(self, *labels: str) -> list[int]:
        """Indices of the items with one of these labels."""
        return [n for n, item in enumerate(self.items) if item.label in labels]


@dataclass(slots=True)
class Plan:
    """The numbers that jitter and faults set. N items, W ranks, I iterations (the first is warm-up, never written)."""

    host_ns: Float64s
    """(N, W, I) Host time of the item, without waits."""
    factor: Float64s
    """(N, W, I) Duration of kernels relative to the template."""
    work: Float64s
    """(N, W, I) Work of kernels relative to the template."""
    active: Bools
    """(N, W, I)"""
    transfer_ns: Float64s
    """(N, W, I) Equal on all members of a group."""
    exposed: Bools
    """(N,) Communications that the compute stream waits for although the program lets them run beside it."""
    blocking: Bools
    """(W,) Ranks on which each launch call waits for its kernel."""

    def copy(self) -> Plan:
        """A plan of its own, to be changed."""
        return Plan(
            self.host_ns.copy(),
            self.factor.copy(),
            self.work.copy(),
            self.active.copy(),
            self.transfer_ns.copy(),
            self.exposed.copy(),
            self.blocking.copy(),
        )


@dataclass(frozen=True, slots=True)
class Times:
    """When it happened, ns since the job's start. Shapes (N, W, I)."""

    host: Float64s
    """Start of the item on the host."""
    host_len: Float64s
    """Its length on the host, waits included."""
    free: Float64s
    """Instant from which the compute stream could run the item's kernels."""
    begin: Float64s
    """Communication: start of the kernel on this rank."""
    end: Float64s
    """Communication: end. Device work: end of the last kernel."""
    iteration_ns: Float64s
    """(I,) Mean over ranks of the growth of the device's last instant."""


def kernel_times(
    piece: Piece,
    factor: npt.NDArray[np.float64],
    host: npt.NDArray[np.float64],
    length: npt.NDArray[np.float64],
    free: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Start and end of a piece's kernels, shape (..., K), for inputs of shape (...).

    start_k = max(end_(k-1) + gap, launch_k + latency), solved by a running maximum over launch_k - work before k.
    """
    duration = piece.op_ns * factor[..., None]
    launch = host[..., None] + piece.op_at * length[..., None] + LAUNCH_NS
    before = np.cumsum(duration + GAP_NS, axis=-1) - duration
    launch[..., 0] = np.maximum(launch[..., 0], free + GAP_NS)
    start = np.maximum.accumulate(launch - before, axis=-1) + before
    return start, start + duration


def simulate(program: Program, plan: Plan) -> Times:
    """Walk the program for all ranks and iterations."""
    shape = plan.host_ns.shape
    num_ranks, num_iterations = shape[1], shape[2]
    host, device = np.zeros(num_ranks), np.zeros(num_ranks)
    streams: dict[int, Float64s] = {}
    out = {key: np.zeros(shape) for key in ("host", "host_len", "free", "begin", "end")}
    iteration = np.zeros(num_iterations)
    for i in range(num_iterations):
        began = device.mean()
        for n, item in enumerate(program.items):
            active = plan.active[n, :, i]
            if not active.any():
                out["host"][n, :, i] = host
                continue
            length = np.where(active, plan.host_ns[n, :, i], 0.0)
            if item.joins:
                for busy in streams.values():
                    device = np.where(active, np.maximum(device, busy), device)
            blocking = plan.blocking & active
            if item.drains:
                length = np.where(active, np.maximum(device - host, 0.0) + length, 0.0)
            out["host"][n, :, i] = host
            out["host_len"][n, :, i] = length
            out["free"][n, :, i] = device
            if item.comm is not None:
                comm = item.comm
                members = active & (comm.group >= 0)
                busy = streams.setdefault(comm.stream, np.zeros(num_ranks))
                begin = np.maximum(np.maximum(host + 0.5 * length + LAUNCH_NS, device), busy + GAP_NS)
                last = np.full(len(program.groups), -np.inf)
                np.maximum.at(last, comm.group[members], begin[members])
                end = np.where(members, last[comm.group] + plan.transfer_ns[n, :, i], 0.0)
                streams[comm.stream] = np.where(members, end, busy)
                waits = comm.blocks | plan.exposed[n] | blocking
                device = np.where(members & waits, np.maximum(device, end), device)
                length = np.where(members & blocking, np.maximum(length, end + LAUNCH_NS - host), length)
                out["host_len"][n, :, i] = length
                out["begin"][n, :, i] = begin
                out["end"][n, :, i] = end
            elif len(item.piece.op_ns):
                _, ends = kernel_times(item.piece, plan.factor[n, :, i], host, length, device)
                if item.blocked is not None and blocking.any():
                    _, late = kernel_times(item.blocked, plan.factor[n, :, i], host, length, device)
                    ends = np.where(blocking[:, None], late, ends)
                device = np.where(active, ends[:, -1], device)
                length = np.where(blocking, np.maximum(length, device - host), length)
                out["host_len"][n, :, i] = length
                out["end"][n, :, i] = device
            host = host + length
        iteration[i] = device.mean() - began
    return Times(**out, iteration_ns=iteration)


def draw_plan(program: Program, num_iterations: int, rng: Random) -> Plan:
    """A healthy plan: devices differ by 0.3 % for good, jitter of 1 % with a heavy tail, transfer jitter of 3 %."""
    count, ranks = len(program.items), program.world_size
    shape = (count, ranks, num_iterations)
    nominal = np.array([item.piece.host_ns for item in program.items])[:, None, None]
    host = nominal * np.exp(rng.normal(0.0, 0.03, shape) + rng.normal(0.0, 0.01, (1, ranks, 1)))
    stable = np.exp(rng.normal(0.0, 0.003, (1, ranks, 1)))
    whole = np.exp(0.003 * np.clip(rng.standard_t(4, (1, ranks, num_iterations)), -8, 8))
    factor = program.stretch[:, :, None] * stable * whole * np.exp(rng.normal(0.0, 0.01, shape))
    transfer = np.zeros(shape)
    for n, item in enumerate(program.items):
        if item.comm is not None:
            jitter = np.exp(rng.normal(0.0, 0.03, (len(program.groups), num_iterations)))
            transfer[n] = item.comm.transfer_ns * np.where(item.comm.group[:, None] >= 0, jitter[item.comm.group], 1.0)
    active = np.broadcast_to(~program.inactive[:, :, None], shape).copy()
    return Plan(host, factor, np.ones(shape), active, transfer, np.zeros(count, bool), np.zeros(ranks, bool))
