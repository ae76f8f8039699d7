"""python -m bench.device: whether the NVML sampler tells the truth on a real NVIDIA device, and what a read costs.

Idles, multiplies matrices and copies from the host in turn, each for three seconds, reading ten times a second, then
checks that what must differ does. To be run wherever a device is lent or owned; needs torch with CUDA and nvidia-ml-py.
Not part of the tests, which have no device. Exit status 1 if a check fails, 2 if there is no device.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from eroica.samplers import Missing, Rank
from eroica.samplers.evidence import Counted, counters, samples_for
from eroica.samplers.nvml import METRICS, open_sampler
from eroica.samplers.recorder import Recorder

SECONDS = 3.0


def main() -> int:
    """Print what was read and each check."""
    import torch

    sampler = open_sampler(Path("/"))
    if isinstance(sampler, Missing) or not torch.cuda.is_available():
        reason = sampler.reason if isinstance(sampler, Missing) else "torch sees no CUDA device"
        print(f"bench.device: {reason}", file=sys.stderr)
        return 2
    rank = Rank(0, os.getpid())
    recorder = Recorder({"nvml": sampler})
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    pinned = torch.empty(1 << 28, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(pinned, device="cuda")

    def during(work: Callable[[], object] | None) -> tuple[dict[str, float], Counted]:
        torch.cuda.synchronize()
        start_ns, costs = time.time_ns(), []
        recorder.hurry(2 * SECONDS)
        while time.time_ns() - start_ns < SECONDS * 1e9:
            before = recorder.cost_ns
            recorder.tick([rank])
            costs.append((recorder.cost_ns - before) / 1e6)
            for _ in range(10):
                if work is not None:
                    work()
            torch.cuda.synchronize()
            time.sleep(0 if work else 0.05)
        reads = sorted(cost for cost in costs if cost)
        # What runs at the ends belongs to its neighbours.
        told = counters(recorder, start_ns + 500_000_000, time.time_ns())
        (first,) = [one for one in told if one["kind"] == "device" and one["name"] == "0"]
        print(f"  reads {len(reads)}, median {statistics.median(reads):.2f} ms, dearest {reads[-1]:.2f} ms")
        return first["values"], first

    phases: dict[str, dict[str, float]] = {}
    for name, work in (("idle", None), ("matmul", lambda: a @ a), ("copies", lambda: target.copy_(pinned))):
        print(name)
        phases[name], last = during(work)
        for key, value in sorted(phases[name].items()):
            print(f"    {key:<24}{value:12.4g}")
    print("labels", last["labels"])
    names = {metric.rate or name for name, metric in METRICS.items()}
    print("never read:", " ".join(sorted(names - {key for values in phases.values() for key in values})))
    idle, busy, copies = phases["idle"], phases["matmul"], phases["copies"]
    moved = "pcie_rx_gbps" if "pcie_rx_gbps" in copies else "pcie_rx_now_gbps"
    samples = samples_for(recorder, rank, time.time_ns() - 2_000_000_000, time.time_ns())
    checks = {
        "the clock is a share of the top clock": 0 < busy.get("sm_clock_ratio", -1) <= 1.001,
        "the device is busy while it multiplies": busy.get("busy_ratio", 0) > 0.8 > idle.get("busy_ratio", 1),
        "it draws more power then": busy.get("power_w", 0) > 1.5 * idle.get("power_w", 1e9),
        "copies show on the PCIe link": copies.get(moved, 0) > 2 > busy.get(moved, 9),
        "this process is listed on the device, or pids are of another namespace": (
            str(rank.pid) in last["labels"]["pids"].split() or Path("/.dockerenv").exists()
        ),
        "samples name the clock of the rank's device": samples is not None and "sm_clock_ratio" in samples.values,
        "nothing failed": not recorder.lost,
    }
    for text, holds in checks.items():
        print(f"{'ok  ' if holds else 'FAIL'}  {text}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
