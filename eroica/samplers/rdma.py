"""RDMA ports, InfiniBand and RoCE, from sysfs: what they carry, whether they are up, errors and congestion.

Names are those of the kernel (Documentation/ABI/stable/sysfs-class-infiniband) and, under `hw_counters`, of the driver:
mlx5's congestion counters, EFA's bytes. Pause frames of Ethernet ports stand in `ethtool -S` alone and are not read.
Zero drops do not clear a fabric: a lossless one stalls instead, which `xmit_wait` and the CNP counts show. Used through
`eroica.samplers`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from eroica.samplers import Metric, Missing, Rank, Reading, Target
from eroica.samplers.proc import number, read_number, read_text

SLOW_NS = 1_000_000_000
"""Between two looks at all but the bytes: mlx5 asks its firmware for each of these counters."""
BYTES_PER_GBIT = 1e9 / 8

ERRORS = (
    *("symbol_error", "link_downed", "link_error_recovery", "local_link_integrity_errors", "port_rcv_errors"),
    *("port_rcv_remote_physical_errors", "port_xmit_discards", "excessive_buffer_overrun_errors"),
)
"""Under `counters`. On a sound link none of them grows while a job runs."""
CONGESTION = (
    *("np_cnp_sent", "np_ecn_marked_roce_packets", "rp_cnp_handled", "out_of_sequence", "packet_seq_err"),
    *("local_ack_timeout_err", "implied_nak_seq_err", "rnr_nak_retry_err", "roce_adp_retrans", "roce_slow_restart"),
    *("roce_slow_restart_cnps", "roce_slow_restart_trans", "rx_icrc_encapsulated", "retrans_timeout_events"),
)
"""Under `hw_counters`: marks, repeats and restarts. Some grow on every busy RoCE fabric."""

METRICS: Mapping[str, Metric] = {
    "port_rx_bytes": Metric("Gbit/s", True, "port_rx_gbps", BYTES_PER_GBIT),
    "port_tx_bytes": Metric("Gbit/s", True, "port_tx_gbps", BYTES_PER_GBIT),
    "xmit_wait": Metric("1/s", True, "xmit_wait_per_s"),
    **{name: Metric("", True) for name in ERRORS},
    **{name: Metric("1/s", True, f"{name}_per_s") for name in CONGESTION},
    "port_speed_gbps": Metric("Gbit/s"),
    "port_active": Metric(""),
}
"""`xmit_wait`: ticks in which a port had data and no credit to send; the length of a tick is the device's own."""


class Rdma:
    """All ports under a root folder."""

    def __init__(self, folder: Path) -> None:
        self._ports = {
            f"{device}/{port}": folder / device / "ports" / port
            for device in sorted(_names(folder))
            for port in sorted(_names(folder / device / "ports"))
        }
        self._slow_ns: int | None = None

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """See `METRICS`."""
        return METRICS

    @property
    def num_ports(self) -> int:
        """How many ports there are."""
        return len(self._ports)

    def read(self, now_ns: int, ranks: Sequence[Rank]) -> Reading:
        """All ports."""
        slow = self._slow_ns is None or now_ns - self._slow_ns >= SLOW_NS
        values: dict[Target, dict[str, float]] = {}
        labels: dict[Target, dict[str, str]] = {}
        for name, folder in self._ports.items():
            target = Target("port", name)
            values[target] = _traffic(folder)
            if slow:
                values[target] |= _health(folder)
                labels[target] = {
                    "state": _after_number(read_text(folder / "state")),
                    "link": read_text(folder / "link_layer").strip(),
                }
        if slow:
            self._slow_ns = now_ns
        return Reading(values, labels)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _after_number(text: str) -> str:
    """ "ACTIVE" of "4: ACTIVE"."""
    return text.partition(":")[2].strip()


def _traffic(folder: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, words, octets in (
        ("port_rx_bytes", "port_rcv_data", "rx_bytes"),
        ("port_tx_bytes", "port_xmit_data", "tx_bytes"),
    ):
        # In words of four bytes by the standard; EFA has bytes, among its own counters.
        value = read_number(folder / "counters" / words)
        if value is not None:
            found[name] = value * 4
            continue
        value = read_number(folder / "hw_counters" / octets)
        if value is not None:
            found[name] = value
    return found


def _health(folder: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in ERRORS:
        value = read_number(folder / "counters" / name)
        if value is not None:
            found[name] = value
    for name in CONGESTION:
        value = read_number(folder / "hw_counters" / name)
        if value is not None:
            found[name] = value
    value = read_number(folder / "counters" / "port_xmit_wait")
    if value is not None:
        found["xmit_wait"] = value
    # "200 Gb/sec (4X HDR)"
    speed = number((read_text(folder / "rate").split() or [""])[0])
    if speed is not None:
        found["port_speed_gbps"] = speed
    state = read_text(folder / "state")
    if state:
        found["port_active"] = float(state.startswith("4"))
    return found


def open_sampler(root: Path) -> Rdma | Missing:
    """A sampler of the ports under `root`."""
    folder = root / "sys" / "class" / "infiniband"
    found = Rdma(folder)
    if not found.num_ports:
        return Missing("rdma", f"no port under {folder}: this host has no RDMA device, or its driver is not loaded")
    return found
