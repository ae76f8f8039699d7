"""python -m bench.pacing: does pacing help a job that runs, over a core link that is too narrow?

    python -m bench.pacing --steps 350            one piece of the measurement, under a minute; run it several times
    python -m bench.pacing --write                bench/PACING.md from all pieces, and no measurement

Eight ranks in network namespaces over two bridges (`pacing_job`), watched by what `eroica run --pace enable` is made
of. The policy's own trials make the comparison: blocks of iterations off, on, on, off, ... in one job, so that whatever
else the machine does meets both; one trial follows the other, whatever it shows. Which iterations were paced is read
from the flight rings, how long they took from the job's own clock. Pairs of neighbouring blocks are drawn again and
again for the intervals. Needs root, iproute2 and torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

from bench import machine
from bench.measure import ROOT
from eroica import ring
from eroica.answers import PacingChange
from eroica.conductor import Mode
from eroica.fabric.pacing import Limits
from eroica.live import Run, run
from eroica.windows import Policy

DATA = ROOT / "bench" / ".data" / "pacing"
BLOCK = 15
CARRY = 2
"""Iterations left out after each switch, as in the policy."""
DRAWS = 4000
ARMS = {
    "policy": Limits(threshold=0.0, memory=8, block=BLOCK, rest=1, again=1, ttl_s=5.0),
    "stronger": Limits(
        threshold=0.0, memory=8, block=BLOCK, rest=1, again=1, ttl_s=5.0, quantile=0.5, iteration_share=0.5
    ),
}
"""As shipped but for trials without end; and ranks held until the moment at which the last one comes in the median, not
in the earliest tenth of the iterations."""
MEANING = {
    "policy": "the last one came in one of ten iterations (as shipped)",
    "stronger": "the last one came in one of two",
}
Float64s = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Piece:
    """One job."""

    arm: str
    mbit: float
    seed: int
    off_s: list[list[float]]
    on_s: list[list[float]]
    """Iterations of each pair of neighbouring blocks."""
    held_ms: float
    """Of a rank that was held, in the usual iteration."""
    verdicts: list[str]
    """What the policy made of its trials."""
    load: float


def measure(arm: str, mbit: float, steps: int, seed: int) -> Piece:
    """One job of so many steps, as watched by `eroica run`."""
    changes: list[PacingChange] = []
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="bench-pacing-") as name:
        folder = Path(name)
        words = [sys.executable, "-m", "bench.pacing_job", str(steps), str(folder / "times"), f"{mbit:g}", str(seed)]
        plan = Run(
            command=words,
            job="bench-pacing",
            policy=Policy(baseline=False),
            pacing=Mode.ENABLE,
            pacing_limits=ARMS[arm],
            paced=changes.append,
            keep_rings=folder / "rings",
            environment={"OMP_NUM_THREADS": "1"},
        )
        status = run(plan, lambda incident: None, lambda text: None)
        if status or not (folder / "times").exists():
            raise SystemExit(f"bench.pacing: the job ended with status {status}; it needs root and iproute2")
        ends = np.array(json.loads((folder / "times").read_text()), dtype=np.float64) / 1e9
        held: dict[int, list[float]] = {}
        for path in (folder / "rings").iterdir():
            for record in ring.read_flight(path).records:
                if record.kind == ring.PACED:
                    held.setdefault(record.step, []).append((record.duration_ns or 0) / 1e6)
    first = next((change.step for change in changes if change.phase == "trial"), steps)
    off, on = pairs(np.diff(ends), {step - 1 for step in held}, first)
    verdicts = [f"{change.phase}: {change.why}" for change in changes if change.phase in ("on", "resting")]
    return Piece(arm, mbit, seed, off, on, median(map(median, held.values())) if held else 0.0, verdicts, load)


def pairs(length_s: Float64s, paced: set[int], first: int) -> tuple[list[list[float]], list[list[float]]]:
    """Neighbouring blocks without and with pacing, from the first trial on, each without its first iterations."""
    blocks: list[tuple[bool, list[float]]] = []
    for step in range(first, len(length_s)):
        # Held are those that come early; a lone iteration of a block in which nobody did belongs to it.
        is_paced = step in paced or {step - 1, step + 1} <= paced
        if not blocks or blocks[-1][0] != is_paced:
            blocks.append((is_paced, []))
        blocks[-1][1].append(float(length_s[step]))
    whole = [(is_paced, values[CARRY:]) for is_paced, values in blocks if len(values) >= BLOCK // 2]
    off, on = [], []
    while len(whole) >= 2:
        a, b = whole[0], whole[1]
        if a[0] == b[0]:
            whole.pop(0)
            continue
        whole = whole[2:]
        off.append(a[1] if not a[0] else b[1])
        on.append(b[1] if b[0] else a[1])
    return off, on


def _figures(off: Sequence[Float64s], on: Sequence[Float64s]) -> tuple[float, float, float, float, float, float]:
    a, b = np.concatenate(off), np.concatenate(on)
    cv_a, cv_b = a.std() / a.mean(), b.std() / b.mean()
    return (
        float(a.mean()),
        float(b.mean()),
        float(a.mean() / b.mean() - 1),
        float(cv_a),
        float(cv_b),
        float(cv_b - cv_a),
    )


def table(pieces: Sequence[Piece]) -> list[str]:
    """Rows of Markdown, one for each arm and rate."""
    lines = [
        "| held until | core link | jobs, pairs of blocks | iterations off, on | held, ms | ms off | ms on | "
        "throughput [95 %] | CV off | CV on | change of CV [95 %] |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    random = np.random.default_rng(0)
    for arm, mbit in sorted({(piece.arm, piece.mbit) for piece in pieces}):
        own = [piece for piece in pieces if (piece.arm, piece.mbit) == (arm, mbit)]
        off = [np.array(block) for piece in own for block in piece.off_s]
        on = [np.array(block) for piece in own for block in piece.on_s]
        seen = _figures(off, on)
        drawn = []
        for _ in range(DRAWS):
            chosen = random.integers(len(off), size=len(off))
            drawn.append(_figures([off[k] for k in chosen], [on[k] for k in chosen]))
        low, high = np.quantile(np.array(drawn), [0.025, 0.975], axis=0)
        lines.append(
            f"| {MEANING[arm]} | {mbit:g} Mbit/s | {len(own)}, {len(off)} | "
            f"{sum(map(len, off))}, {sum(map(len, on))} | {median(piece.held_ms for piece in own):.1f} | "
            f"{1e3 * seen[0]:.1f} | {1e3 * seen[1]:.1f} | "
            f"{seen[2]:+.1%} [{low[2]:+.1%}..{high[2]:+.1%}] | {seen[3]:.3f} | {seen[4]:.3f} | "
            f"{seen[5]:+.3f} [{low[5]:+.3f}..{high[5]:+.3f}] |"
        )
    return lines


def _report(pieces: Sequence[Piece]) -> str:
    verdicts = [verdict for piece in pieces if piece.arm == "policy" for verdict in piece.verdicts]
    kept = sum(verdict.startswith("on") for verdict in verdicts)
    loads = [piece.load for piece in pieces]
    facts = machine.facts({})
    return "\n".join(
        [
            "# Pacing of a live job",
            "",
            "Made by `python -m bench.pacing` (how is said there): 8 gloo ranks, each a host of its own in a network",
            "namespace, in two racks with one link between them, DDP with 0.5 MB of gradients in one bucket; each rank",
            "sleeps in place of a device, with jitter and, in 6 % of its steps, a stall. Off and on by turns within",
            "each job; intervals by drawing pairs of neighbouring blocks again. Throughput above 0 and a change of the",
            "coefficient of variation (CV) below 0 speak for pacing.",
            "",
            *table(pieces),
            "",
            f"- The policy as shipped kept pacing in {kept} of {len(verdicts)} trials that came to an end"
            + (
                ":"
                if verdicts
                else "; in jobs as short as these it was still undecided, which takes up to twenty pairs."
            ),
            *(f"  - {verdict}" for verdict in verdicts),
            f"- Load of the machine in the minute before the jobs: {min(loads):.1f} to {max(loads):.1f}.",
            *(f"- {name}: {facts[name]}" for name in ("date", "processor", "cores", "memory", "system", "Python")),
            "",
        ]
    )


def main(given: Sequence[str] | None = None) -> int:
    """Measure a piece, or write the report of all."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.pacing", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--arm", choices=sorted(ARMS), default="policy")
    parser.add_argument("--mbit", type=float, default=200.0, help="of the link between the racks (200)")
    parser.add_argument("--steps", type=int, default=350)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    parser.add_argument("--write", action="store_true", help="write bench/PACING.md from what was measured")
    options = parser.parse_args(given)
    if options.write:
        pieces = [Piece(**json.loads(path.read_text())) for path in sorted(DATA.glob("*.json"))]
        if not pieces:
            raise SystemExit("bench.pacing: nothing was measured yet")
        (ROOT / "bench" / "PACING.md").write_text(_report(pieces))
        print("\n".join(table(pieces)))
        return 0
    piece = measure(options.arm, options.mbit, options.steps, options.seed)
    DATA.mkdir(parents=True, exist_ok=True)
    (DATA / f"{piece.arm}-{piece.mbit:g}-{piece.seed}.json").write_text(json.dumps(asdict(piece)))
    print("\n".join([*table([piece]), *piece.verdicts]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
