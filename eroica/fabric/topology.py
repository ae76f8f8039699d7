"""Links of hosts and switches, and what each channel of a collective asks of them.

A collective runs in channels (one for each network card); a channel is a pipeline of flows that all go at the rate of
its slowest, so it is one *stream*: a vector of flows per link. `build` lays a job's hosts out over leaves, chooses
ways (by hash, once per job), and gives for each group its streams over the links that matter: links of one stream
alone become its `limit`, links that all streams use alike are kept once. Reductions only; ring, double tree and
hierarchical. Not here: time (`simulator`), packets, routing that changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from eroica.fabric.parameters import Setting

Float64s = npt.NDArray[np.float64]
Intps = npt.NDArray[np.intp]
_NO_LIMIT = 1e18
"""Bytes per second of a stream that uses no link: a job of one device."""


@dataclass(frozen=True, slots=True)
class Links:
    """All links of a job's part of the fabric, numbered: out of each device by NVLink, device to card, card out, card
    in, leaf up, leaf down."""

    hosts: int
    gpus: int
    leaves: int
    uplinks: int
    """Of each leaf; the down links are as many."""
    capacity: Float64s
    """(L,) Bytes per second."""
    leaf_of: Intps
    """(hosts, gpus) Leaf of each card."""

    @property
    def first_switch(self) -> int:
        """Links from here on are a switch's; others' traffic comes here alone."""
        return 4 * self.hosts * self.gpus

    def nvlink(self, host: Intps | int, gpu: Intps | int) -> Intps:
        """Out of a device to its host's others."""
        return np.asarray(host * self.gpus + gpu, np.intp)

    def pcie(self, host: Intps | int, gpu: Intps | int) -> Intps:
        """Device to card; one link for both directions' numbers, which are equal in all algorithms here."""
        return self.hosts * self.gpus + self.nvlink(host, gpu)

    def card(self, host: Intps | int, gpu: Intps | int, *, inward: bool) -> Intps:
        """Card to leaf, or back."""
        return (3 if inward else 2) * self.hosts * self.gpus + self.nvlink(host, gpu)

    def switch(self, leaf: Intps, port: Intps, *, down: bool) -> Intps:
        """Leaf to spine, or back. Port p of a leaf goes to spine p."""
        return np.asarray(self.first_switch + (leaf + down * self.leaves) * self.uplinks + port, np.intp)


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that reduce together."""

    ranks: Intps
    streams: Intps
    """Rows of `Job.usage`."""
    latency_s: float


@dataclass(frozen=True, slots=True)
class Job:
    """A job on its links. S streams, K links that more than one stream or others' traffic can fill."""

    setting: Setting
    links: Links
    groups: tuple[Group, ...]
    usage: Float64s
    """(S, K) Flows of the stream over the link."""
    weight: Float64s
    """(S,) Competitors that a flow is at a link: its paths."""
    limit: Float64s
    """(S,) Bytes per second of each flow that the stream's own links allow."""
    amount: Float64s
    """(S,) Bytes of each flow for one bucket."""
    capacity: Float64s
    """(K,)"""
    shared: Intps
    """(K,) Their numbers in `links`; one stands for all that are used alike."""
    is_switch: npt.NDArray[np.bool_]
    """(K,) Others' traffic goes here, and goodput is lost where flows meet."""

    @property
    def group_of(self) -> Intps:
        """(ranks,)"""
        of = np.empty(self.setting.ranks, np.intp)
        for number, group in enumerate(self.groups):
            of[group.ranks] = number
        return of


def links_of(setting: Setting) -> Links:
    """The part of a fabric that a job of this size sees."""
    host, fabric, hosts = setting.host, setting.fabric, setting.hosts
    gpus = host.gpus
    if fabric.by_rail:
        # A pod has as many leaves as a host has cards, each with as many ports as a rack's leaf.
        pod = np.arange(hosts) // (fabric.hosts_per_leaf * gpus)
        leaf_of = pod[:, None] * gpus + np.arange(gpus)[None, :]
    else:
        leaf_of = np.repeat((np.arange(hosts) // fabric.hosts_per_leaf)[:, None], gpus, axis=1)
    leaves = int(leaf_of.max()) + 1
    uplinks = max(1, round(fabric.hosts_per_leaf * gpus / fabric.oversubscription))
    pcie = np.full((hosts, gpus), host.pcie_bytes_s)
    pcie[:, list(host.far_slots)] *= host.far_bandwidth
    capacity = np.concatenate(
        [
            np.full(hosts * gpus, host.nvlink_bytes_s),
            pcie.ravel(),
            np.full(2 * hosts * gpus, host.nic_bytes_s),
            np.full(2 * leaves * uplinks, host.nic_bytes_s),
        ]
    )
    return Links(hosts, gpus, leaves, uplinks, capacity, leaf_of.astype(np.intp))


def _send(
    links: Links,
    setting: Setting,
    rng: np.random.Generator,
    into: Float64s,
    channel: int,
    source: Intps,
    target: Intps,
) -> None:
    """Add one flow from each `source` host to the `target` host beside it, over card `channel`."""
    np.add.at(into, links.pcie(source, channel), 1.0)
    np.add.at(into, links.card(source, channel, inward=False), 1.0)
    np.add.at(into, links.card(target, channel, inward=True), 1.0)
    a, b = links.leaf_of[source, channel], links.leaf_of[target, channel]
    away = np.flatnonzero(a != b)
    if setting.fabric.spread:
        ports = np.broadcast_to(np.arange(links.uplinks), (len(away), links.uplinks))
    else:
        ports = rng.integers(links.uplinks, size=(len(away), setting.fabric.paths))
    share = 1.0 / max(ports.shape[1], 1)
    np.add.at(into, links.switch(a[away, None], ports, down=False).ravel(), share)
    np.add.at(into, links.switch(b[away, None], ports, down=True).ravel(), share)


def _ring(
    links: Links, setting: Setting, rng: np.random.Generator, channel: int, order: Intps, local: bool
) -> tuple[Float64s, float]:
    """Flows per link of a ring over `order`ed hosts, and bytes of each flow per byte of the channel's share.

    `local`: the ring goes through all devices of each host on its way."""
    into = np.zeros(len(links.capacity))
    members = len(order) * (links.gpus if local else 1)
    if len(order) > 1:
        _send(links, setting, rng, into, channel, order, np.roll(order, -1))
    if local and links.gpus > 1:
        np.add.at(into, links.nvlink(order[:, None], np.arange(links.gpus)[None, :]).ravel(), 1.0)
    return into, 2 * (members - 1) / members


def _hierarchical(
    links: Links, setting: Setting, rng: np.random.Generator, channel: int, order: Intps
) -> tuple[Float64s, float]:
    """Reduce within hosts to device `channel`, ring over the hosts, and gather within hosts, all in one pipeline."""
    into, amount = _ring(links, setting, rng, channel, order, local=False)
    if links.gpus > 1:
        others = np.array([g for g in range(links.gpus) if g != channel])
        np.add.at(into, links.nvlink(order[:, None], others[None, :]).ravel(), 1 / amount)
        np.add.at(into, links.nvlink(order, channel), (links.gpus - 1) / amount)
    return into, amount


def _tree(
    links: Links, setting: Setting, rng: np.random.Generator, channel: int, order: Intps
) -> tuple[Float64s, float]:
    """Two binary trees over the hosts, half of the data each, the second one backwards, so that the leaves of one are
    the knots of the other; up and down. A chain within each host."""
    into = np.zeros(len(links.capacity))
    n = len(order)
    child = np.arange(1, n)
    for hosts in (order, order[::-1]):
        up, down = hosts[child], hosts[(child - 1) // 2]
        _send(links, setting, rng, into, channel, up, down)
        _send(links, setting, rng, into, channel, down, up)
    if links.gpus > 1:
        chain = 4.0 * (links.gpus - 1) / links.gpus
        np.add.at(into, links.nvlink(order[:, None], np.arange(links.gpus)[None, :]).ravel(), chain)
    return into, 0.5


def _latency_s(setting: Setting, local: bool) -> float:
    """Of one reduction, as NCCL's own tuning reckons it."""
    fabric, hosts = setting.fabric, setting.hosts
    gpus = setting.host.gpus if local else 1
    if setting.workload.algorithm == "tree" and hosts > 1:
        steps = 2 * (gpus - 1) * fabric.nvlink_latency_s + 2 * math.log2(hosts) * fabric.net_latency_s
    elif setting.workload.algorithm == "hierarchical" and hosts > 1:
        steps = 2 * (gpus - 1) * fabric.nvlink_latency_s + 2 * (hosts - 1) * fabric.net_latency_s
    else:
        between = 2 * (hosts - 1)
        steps = (2 * (hosts * gpus - 1) - between) * fabric.nvlink_latency_s + between * fabric.net_latency_s
    return fabric.base_latency_s + steps


def _alone_s(job: Job) -> float:
    """What a reduction would take if switches were no limit."""
    return float((job.amount / job.limit).max()) + job.groups[0].latency_s


def build(setting: Setting, rng: np.random.Generator) -> Job:
    """Lay a job out. The dice choose where its hosts stand (unless packed) and which ways the flows take."""
    if setting.workload.algorithm == "auto":
        # Both from the same dice, so that the choice alone differs.
        seed = int(rng.integers(2**63))
        ring, tree = (
            build(replace(setting, workload=replace(setting.workload, algorithm=a)), np.random.default_rng(seed))
            for a in ("ring", "tree")
        )
        return ring if _alone_s(ring) <= _alone_s(tree) else tree
    links = links_of(setting)
    work, hosts, gpus = setting.workload, setting.hosts, setting.host.gpus
    order = np.arange(hosts) if setting.fabric.packed else rng.permutation(hosts)
    tensor = work.layout == "tensor"
    local = not tensor
    rows, amounts = [], []
    share = work.gradient_bytes / work.buckets / gpus  # of a channel, or of a group: both are as many as cards
    for channel in range(gpus):
        if tensor or work.algorithm == "ring" or hosts == 1:
            if tensor and work.algorithm == "tree" and hosts > 1:
                into, amount = _tree(links, setting, rng, channel, order)
                into[: hosts * gpus] = 0.0
            else:
                into, amount = _ring(links, setting, rng, channel, order, local)
        elif work.algorithm == "tree":
            into, amount = _tree(links, setting, rng, channel, order)
        else:
            into, amount = _hierarchical(links, setting, rng, channel, order)
        rows.append(into)
        amounts.append(amount * share)
    flows = np.array(rows)
    devices = np.arange(hosts * gpus).reshape(hosts, gpus)
    latency_s = _latency_s(setting, local)
    if tensor:
        groups = tuple(Group(devices[:, g], np.array([g], np.intp), latency_s) for g in range(gpus))
    else:
        groups = (Group(devices.ravel(), np.arange(gpus), latency_s),)
    users = (flows > 0).sum(axis=0)
    with np.errstate(divide="ignore"):
        alone = np.where((flows > 0) & (users == 1), links.capacity / flows, np.inf)
    alone[:, links.first_switch :] = np.inf
    numbers = np.arange(len(links.capacity))
    chosen = (users > 0) & ((users > 1) | (numbers >= links.first_switch))
    kept = np.flatnonzero(chosen)
    inner = kept[kept < links.first_switch]
    if len(inner):
        # Links of hosts are used alike by the hundred; one of each kind says as much.
        columns = np.vstack([flows[:, inner], links.capacity[inner]])
        inner = inner[np.sort(np.unique(columns, axis=1, return_index=True)[1])]
    kept = np.concatenate([inner, kept[kept >= links.first_switch]])
    return Job(
        setting=setting,
        links=links,
        groups=groups,
        usage=flows[:, kept],
        weight=np.full(gpus, float(setting.fabric.paths)),
        limit=np.minimum(alone.min(axis=1), _NO_LIMIT),
        amount=np.array(amounts),
        capacity=links.capacity[kept],
        shared=kept,
        is_switch=kept >= links.first_switch,
    )
