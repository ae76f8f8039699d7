"""python -m bench.probe: what the hooks of `import eroica` cost per step and per collective, outside of any window.

A process of one rank repeats an empty optimizer step, a dataloader next and a small all_reduce (gloo, world size 1,
waited for), with eroica and with EROICA=0, in turn. Empty calls make the hooks the larger part of what is timed; the
figure is the difference of the fastest batches, since whatever else the machine does only adds. Real calls pay the
same sum.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import machine
from bench.measure import ROOT

ROUNDS = 3
TARGETS_NS = {"per step (next and optimizer step)": 2_000, "per all_reduce": 15_000}


def measured(rendezvous: str) -> dict[str, float]:
    """Nanoseconds per call in this process."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import dataloader

    import eroica  # noqa: F401

    torch.set_num_threads(1)
    os.environ.update(RANK="0", WORLD_SIZE="1")

    # Made with `type`, since both classes do less than their bases promise.
    optimizer: Any = type("Empty", (torch.optim.Optimizer,), {"step": lambda self: None})(
        [torch.nn.Parameter(torch.zeros(1))], {}
    )
    made = {"__init__": lambda self: None, "_next_data": lambda self: 1, "_profile_name": "x", "_sampler_iter": 1}
    counts = {"_num_yielded": 0, "_dataset_kind": 0, "_IterableDataset_len_called": None}
    batches: Any = type("Batches", (dataloader._BaseDataLoaderIter,), made | counts)()

    def step() -> None:
        next(batches)
        optimizer.step()

    values = torch.zeros(4)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    found = {
        "per step (next and optimizer step)": _fastest(step),
        "per all_reduce": _fastest(lambda: dist.all_reduce(values)),
    }
    dist.destroy_process_group()
    return found


def _fastest(call: Callable[[], object], size: int = 30, batches: int = 1_500) -> float:
    """Batches of about a millisecond: some of them pass between two interruptions, however busy the machine is."""
    best = float("inf")
    for _ in range(batches):
        begin = time.perf_counter_ns()
        for _ in range(size):
            call()
        best = min(best, (time.perf_counter_ns() - begin) / size)
    return best


def main(arguments: Sequence[str]) -> int:
    """Print the table; with `--in FILE`, be the measured process."""
    if arguments[:1] == ["--in"]:
        print(json.dumps(measured(arguments[1])))
        return 0
    found: dict[str, list[dict[str, float]]] = {"0": [], "1": []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(ROUNDS):
            for armed in found:
                environ = {**os.environ, "EROICA": armed, "EROICA_RING_DIR": folder, "PYTHONPATH": str(ROOT)}
                command = [sys.executable, "-m", "bench.probe", "--in", str(Path(folder) / f"{turn}-{armed}")]
                done = subprocess.run(command, env=environ, cwd=ROOT, check=True, capture_output=True, text=True)
                found[armed].append(json.loads(done.stdout))
    print(f"{'hooks':<38}{'bare':>10}{'armed':>10}{'cost':>10}{'target':>10}   us; best of {ROUNDS} processes each")
    for name, target in TARGETS_NS.items():
        bare, armed_ns = (min(each[name] for each in found[armed]) for armed in ("0", "1"))
        cells = (bare, armed_ns, armed_ns - bare, target)
        print(f"{name:<38}" + "".join(f"{cell / 1e3:>10.2f}" for cell in cells))
    print(", ".join((machine.processor(), f"torch {machine.version('torch')}")))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
