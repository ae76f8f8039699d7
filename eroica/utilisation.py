"""How hard a span used its resource: the mu and sigma of EROICA (arXiv 2506.08528), with the source of each number.

Hardware counters where they were sampled, else what the trace itself holds (occupancy of kernels, bandwidth of
copies), else NaN: not measured is never 0. Used by `pattern`.
"""

from __future__ import annotations

import numpy as np

from eroica.collectives import Float64s
from eroica.critical_path import Activity, CriticalPath, UInt8s
from eroica.trace import Samples, Trace

PCIE_GBS = 64.0
"""Reference for host-device copies: PCIe 5.0 x16, one direction. mu of a copy is its bandwidth over this, at most 1."""
NIC_GBIT = 400.0
"""Reference for network counters."""
LONG_SPAN_SAMPLES = 3
"""A span that holds fewer counter samples is too short for its own distribution: it takes the nearest sample."""
MU_SOURCES = ("", "occupancy", "copy_bandwidth", "sm_clock", "pcie", "nic", "cpu", "trace", "cpu_granted")
"""Where mu came from; "" = not measured. Summaries carry the index, so the list is only ever appended to."""
LEAST_WANTED = 0.05
"""A driving thread that wanted less of a core over a sample says nothing about what it would have got."""


_COUNTERS = {
    Activity.COMPUTE: ("sm_clock_ratio", 1.0, "sm_clock"),
    Activity.MEMORY: ("pcie_gbps", PCIE_GBS, "pcie"),
    Activity.COLLECTIVE: ("nic_gbps", NIC_GBIT, "nic"),
}
_HOST_COUNTER = ("cpu_ratio", 1.0, "cpu")


def granted_cpu(samples: Samples) -> Float64s:
    """(samples,) Of the time in which the driving thread wanted a core, the share in which it had one; NaN where it
    wanted none.

    Unlike the CPU share itself it does not fall while the thread sleeps or waits for others, so a sample that covers
    both work and waiting still tells how the work fared.
    """
    ran, waited = samples.values["cpu_ratio"], samples.values["runqueue_ratio"]
    wanted = ran + waited
    # The kernel books a wait when it ends: one sample may hold more than its own time.
    return np.where(wanted >= LEAST_WANTED, np.clip(ran / np.where(wanted > 0, wanted, 1.0), 0.0, 1.0), np.nan)


def shortest_dense_part(values: Float64s, share: float = 0.8) -> tuple[int, int]:
    """Bounds [a, b) of the shortest contiguous part that holds at least `share` of the sum; the first such part on
    ties.

    Waiting moves no data, so it falls away (EROICA, arXiv 2506.08528: the critical execution duration L(e)).
    """
    total = float(values.sum())
    if total <= 0:
        return 0, len(values)
    cumulative = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.searchsorted(cumulative, cumulative[:-1] + share * total * (1 - 1e-12), side="left")
    lengths = np.where(ends < len(cumulative), ends - np.arange(len(values)), len(values) + 1)
    start = int(lengths.argmin())
    return start, start + int(lengths[start])


def utilisation_of(trace: Trace, path: CriticalPath, samples: Samples | None) -> tuple[Float64s, Float64s, UInt8s]:
    """Per span: mean utilisation, its spread within the span (NaN where one value stands for all of it), and the
    source."""
    mean = np.full(len(path.event), np.nan)
    spread = np.full(len(path.event), np.nan)
    source = np.zeros(len(path.event), np.uint8)
    occupancy = trace.occupancy[path.event]
    rows = (path.activity == Activity.COMPUTE) & np.isfinite(occupancy)
    mean[rows], source[rows] = occupancy[rows], MU_SOURCES.index("occupancy")
    bandwidth = trace.bandwidth_gbs[path.event]
    rows = (path.activity == Activity.MEMORY) & np.isfinite(bandwidth)
    mean[rows], source[rows] = np.minimum(bandwidth[rows] / PCIE_GBS, 1.0), MU_SOURCES.index("copy_bandwidth")
    if samples is None or not len(samples.ts_ns):
        return mean, spread, source
    for activity in Activity:
        counter, full, label = _COUNTERS.get(activity, _HOST_COUNTER)
        if counter not in samples.values or activity == Activity.WAIT:
            continue
        if counter == "cpu_ratio" and "runqueue_ratio" in samples.values:
            use, label = granted_cpu(samples), "cpu_granted"
        else:
            use = np.clip(samples.values[counter] / full, 0.0, 1.0)
        rows_of = np.flatnonzero(path.activity == activity)
        if not len(rows_of) or not np.isfinite(use).any():
            continue
        low = np.searchsorted(samples.ts_ns, path.start_ns[rows_of], side="left")
        high = np.searchsorted(samples.ts_ns, path.end_ns[rows_of], side="right")
        middle = (path.start_ns[rows_of] + path.end_ns[rows_of]) // 2
        nearest = (
            np.clip(np.searchsorted(samples.ts_ns, middle), 1, len(samples.ts_ns) - 1)
            if len(samples.ts_ns) > 1
            else np.zeros(len(rows_of), int)
        )
        if len(samples.ts_ns) > 1:
            closer = middle - samples.ts_ns[nearest - 1] < samples.ts_ns[nearest] - middle
            nearest = np.where(closer, nearest - 1, nearest)
        mean[rows_of] = use[nearest]
        source[rows_of] = MU_SOURCES.index(label)
        for k in np.flatnonzero(high - low >= LONG_SPAN_SAMPLES):
            inside = use[low[k] : high[k]]
            a, b = shortest_dense_part(np.nan_to_num(inside))
            part = inside[a:b][np.isfinite(inside[a:b])]
            if len(part):
                mean[rows_of[k]], spread[rows_of[k]] = part.mean(), part.std()
    return mean, spread, source
