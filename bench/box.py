"""python -m bench.box: in what share of the plausible parameter box does pacing gain, at 64 hosts of the model?

Each sample draws all parameters at once, within the ends that `bench.fabric` moves one at a time; with
`--also-assumed`, two mechanisms as well by which early ranks or groups could hurt late ones (`Fabric.meeting_loss`,
`Workload.crowding`), for which no source gives a number. Each is trained left alone, with early ranks held at all
times, and with groups that share links in turns besides; the same dice, seed by seed. Without trials, for the question
is whether there is anything for a trial to find.

Prints a line of JSON for each sample, so that a long run can go in parts; `--tell FILE...` makes them a table.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from eroica.fabric.pacing import Limits
from eroica.fabric.parameters import Background, Fabric, Host, Noise, Setting, Stalls, Workload
from eroica.fabric.simulator import Run, simulate
from eroica.gains import mean_of
from eroica.simulation import at_all_times, sharing

GAIN, CALM = 0.005, 0.1
"""Of throughput, and fall of the CV, that count as one: what a trial asks for, too."""
WARM = 20
"""Iterations left out: until the policy has seen enough."""


def drawn(number: int, *, assumed: bool) -> Setting:
    """Sample of this number. Positive scales by their logarithm, shares evenly, choices with equal chances."""
    rng = np.random.default_rng((number, int(assumed)))

    def scale(low: float, high: float) -> float:
        return float(math.exp(rng.uniform(math.log(low), math.log(high))))

    def share(low: float, high: float) -> float:
        return float(rng.uniform(low, high))

    def coin() -> bool:
        return bool(rng.integers(2))

    work = Workload(
        compute_s=scale(0.04, 0.16),
        gradient_bytes=scale(1.3e9, 5.2e9),
        buckets=round(scale(3, 30)),
        algorithm=("auto", "ring", "hierarchical")[rng.integers(3)],
        layout=("data", "tensor")[rng.integers(2)],
        wait_slowdown=share(0.0, 0.2),
        transfer_slowdown=share(0.0, 0.4),
        optimizer_s=scale(0.002, 0.02),
    )
    fabric = Fabric(
        oversubscription=scale(1.0, 4.0),
        by_rail=coin(),
        packed=coin(),
        paths=(1, 4, 16)[rng.integers(3)],
        spread=coin(),
        goodput_loss=share(0.0, 0.4),
        net_latency_s=scale(5e-6, 30e-6),
    )
    host = Host(
        nvlink_bytes_s=scale(250e9, 450e9),
        nic_bytes_s=scale(23e9, 50e9),
        far_slots=(4, 5, 6, 7) if coin() else (),
    )
    stalls = Stalls(rate=scale(1e-4, 4e-4), exponent=share(2.1, 2.5), shortest_s=scale(0.03, 0.1)) if coin() else None
    others = Background(
        neighbours=scale(0.5, 2.0),
        size=scale(0.5, 2.0),
        burst_s=scale(0.1, 2.0),
        burst_spread=share(0.2, 0.8),
        width=scale(0.1, 0.5),
    )
    noise = Noise(
        scatter=share(0.0, 0.03),
        stalls=stalls,
        background=others if coin() else None,
        imbalance=0.1 if coin() else 0.0,
        straggler=0 if coin() else None,
    )
    if assumed:
        fabric = replace(fabric, meeting_loss=share(0.0, 0.5))
        work = replace(work, crowding=share(0.0, 0.1))
    return Setting(hosts=64, host=host, fabric=fabric, workload=work, noise=noise)


def tried(setting: Setting, iterations: int, seeds: int) -> dict[str, Any]:
    """The three ways, seed by seed."""
    ways: dict[str, list[Run]] = {"alone": [], "held": [], "in turns": []}
    for seed in range(seeds):
        ways["alone"].append(simulate(setting, iterations, seed, detail=0))
        steer = at_all_times(setting, Limits(orders_groups=False))
        ways["held"].append(simulate(setting, iterations, seed, detail=0, steer=steer))
        if sharing(setting):
            steer = at_all_times(setting, Limits())
            ways["in turns"].append(simulate(setting, iterations, seed, detail=0, steer=steer))

    def cv(run: Run) -> float:
        return float(run.length_s[WARM:].std() / run.length_s[WARM:].mean())

    told: dict[str, Any] = {
        "iteration_s": float(np.mean([r.length_s[WARM:].mean() for r in ways["alone"]])),
        "cv": float(np.mean([cv(r) for r in ways["alone"]])),
    }
    for way in ("held", "in turns"):
        if ways[way]:
            pairs = list(zip(ways["alone"], ways[way], strict=True))
            gain = mean_of([float(a.length_s[WARM:].mean() / b.length_s[WARM:].mean()) - 1 for a, b in pairs])
            told[way] = {"gain": asdict(gain), "cv": float(np.mean([cv(r) for r in ways[way]]))}
    return told


def wilson(hits: int, of: int) -> str:
    """Share with its 95 % interval."""
    if not of:
        return "-"
    z, p = 1.96, hits / of
    middle, half = p + z * z / (2 * of), z * math.sqrt(p * (1 - p) / of + z * z / (4 * of * of))
    low, high = (middle - half) / (1 + z * z / of), (middle + half) / (1 + z * z / of)
    return f"{hits}/{of} = {p:.0%} ({max(low, 0):.0%} to {high:.0%})"


def table(samples: Sequence[dict[str, Any]]) -> str:
    """Shares, by layout and way; first what the policy would try: in turns where groups share links, else held."""
    lines = [
        f"| layout | way | gains {GAIN:.1%} or more, surely | loses as much, surely | CV falls by {CALM:.0%} "
        "| +11 % and CV halved | gain, 5 / 50 / 95 % of samples | best |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]

    def line(layout: str, way: str, rows: Sequence[tuple[float, dict[str, Any]]]) -> None:
        gains = np.array([told["gain"]["value"] for _, told in rows])
        sure = sum(told["gain"]["value"] >= GAIN and told["gain"]["low"] > 0 for _, told in rows)
        lost = sum(told["gain"]["value"] <= -GAIN and told["gain"]["high"] < 0 for _, told in rows)
        calm = sum(told["cv"] <= (1 - CALM) * cv for cv, told in rows)
        both = sum(told["gain"]["value"] >= 0.11 and told["cv"] <= 0.5 * cv for cv, told in rows)
        spread = " / ".join(f"{q:+.2%}" for q in np.quantile(gains, [0.05, 0.5, 0.95]))
        shares = " | ".join(wilson(hits, len(rows)) for hits in (sure, lost, calm, both))
        lines.append(f"| {layout} | {way} | {shares} | {spread} | {gains.max():+.1%} |")

    line("both", "the policy's", [(s["cv"], s.get("in turns", s["held"])) for s in samples])
    for layout in ("data", "tensor"):
        for way in ("held", "in turns"):
            rows = [(s["cv"], s[way]) for s in samples if s["setting"]["workload"]["layout"] == layout and way in s]
            if rows:
                line(layout, way, rows)
    return "\n".join(lines)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.box", description=__doc__)
    parser.add_argument("--samples", type=int, default=200, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="NUMBER")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--iterations", type=int, default=100, metavar="N")
    parser.add_argument("--also-assumed", action="store_true")
    parser.add_argument("--tell", nargs="+", type=Path, metavar="FILE", help="lines of an earlier run, as a table")
    options = parser.parse_args()
    if options.tell:
        samples = [json.loads(line) for path in options.tell for line in path.read_text().splitlines() if line]
        print(table(list({sample["number"]: sample for sample in samples}.values())))
        return
    for number in range(options.first, options.first + options.samples):
        setting = drawn(number, assumed=options.also_assumed)
        told = {"number": number, **tried(setting, options.iterations, options.seeds), "setting": asdict(setting)}
        rounded = json.loads(json.dumps(told), parse_float=lambda text: float(f"{float(text):.5g}"))
        print(json.dumps(rounded, separators=(",", ":")), flush=True)


if __name__ == "__main__":
    main()
