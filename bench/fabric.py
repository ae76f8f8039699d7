"""python -m bench.fabric: what each parameter of the fabric model does to the iteration time of 64 hosts.

One parameter at a time is moved to both ends of what is plausible; the rest stays as `eroica.fabric.parameters` has it.
Prints the table of `docs/fabric-model.md`, and how long the model itself takes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from eroica.fabric.parameters import Background, Setting, Stalls
from eroica.fabric.simulator import simulate

HEADLINE = Setting()


def _with(part: str, **changes: object) -> Setting:
    return replace(HEADLINE, **{part: replace(getattr(HEADLINE, part), **changes)})


def variants() -> Iterator[tuple[str, Setting]]:
    """Name and setting of each end of each parameter."""
    ends: dict[tuple[str, str], tuple[object, ...]] = {
        ("workload", "compute_s"): (0.04, 0.16),
        ("workload", "gradient_bytes"): (1.3e9, 5.2e9),
        ("workload", "buckets"): (3, 30),
        ("workload", "algorithm"): ("ring", "hierarchical"),
        ("workload", "layout"): ("tensor",),
        ("workload", "wait_slowdown"): (0.0, 0.2),
        ("workload", "transfer_slowdown"): (0.0, 0.4),
        ("workload", "optimizer_s"): (0.002, 0.02),
        ("host", "nvlink_bytes_s"): (250e9, 450e9),
        ("host", "nic_bytes_s"): (23e9, 50e9),
        ("host", "far_slots"): ((4, 5, 6, 7),),
        ("fabric", "oversubscription"): (1.0, 4.0),
        ("fabric", "by_rail"): (True,),
        ("fabric", "packed"): (True,),
        ("fabric", "paths"): (1, 16),
        ("fabric", "spread"): (True,),
        ("fabric", "goodput_loss"): (0.0, 0.4),
        ("fabric", "net_latency_s"): (5e-6, 30e-6),
        ("noise", "scatter"): (0.0, 0.03),
        ("noise", "stalls"): (None, Stalls(rate=1e-4), Stalls(rate=4e-4), Stalls(exponent=2.1), Stalls(shortest_s=0.1)),
        ("noise", "background"): (
            None,
            Background(neighbours=0.5),
            Background(neighbours=2.0),
            Background(size=0.5),
            Background(size=2.0),
            Background(burst_s=0.1),
            Background(burst_s=2.0),
            Background(burst_spread=0.2),
            Background(width=0.1),
            Background(width=0.5),
        ),
        ("noise", "imbalance"): (0.1,),
        ("noise", "straggler"): (0,),
    }
    yield "as it stands", HEADLINE
    for (part, name), values in ends.items():
        for value in values:
            told = getattr(getattr(HEADLINE, part), name)
            yield _named(name, value, told), _with(part, **{name: value})


def _named(name: str, value: object, told: object) -> str:
    if isinstance(value, (Stalls, Background)):
        usual = type(value)()
        changed = [f for f in value.__slots__ if getattr(value, f) != getattr(usual, f)]
        return ", ".join(f"{type(value).__name__.lower()}.{f} {getattr(value, f)}" for f in changed)
    return f"{name} {value:g}" if isinstance(value, float) else f"{name} {'none' if value is None else value}"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.fabric", description=__doc__)
    parser.add_argument("--iterations", type=int, default=300, metavar="N")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    options = parser.parse_args()
    print("| parameter | 64 hosts, ms | CV | 4 hosts, ms | efficiency |\n| --- | ---: | ---: | ---: | ---: |")
    for name, setting in variants():
        rows = [simulate(setting, options.iterations, seed, detail=1) for seed in range(options.seeds)]
        few = simulate(replace(setting, hosts=4), options.iterations, 0, detail=1)
        mean, few_s = float(np.mean([r.length_s.mean() for r in rows])), float(few.length_s.mean())
        cv = float(np.mean([r.variation for r in rows]))
        print(f"| {name} | {mean * 1e3:.1f} | {cv:.3f} | {few_s * 1e3:.1f} | {few_s / mean:.2f} |", flush=True)
    begun = time.process_time()
    simulate(HEADLINE, 1000, 0)
    print(f"\n64 hosts x 8 devices x 1,000 iterations: {time.process_time() - begun:.1f} s of one core")


if __name__ == "__main__":
    main()
