"""python -m bench.probe: what the hooks of `import eroica` cost per step and per collective, outside of any window.

A process of one rank repeats an empty optimizer step, a dataloader next and a small all_reduce (gloo, world size 1,
waited for), with eroica and with EROICA=0, in turn. Empty calls make the hooks the larger part of what is timed; the
figure is the difference of the fastest batches, since whatever else the machine does only adds. Real calls pay the
same sum. An all_reduce is measured as in a step whose collectives are recorded, as in one whose are not (`thrift`), and
with a kernel that does nothing but hand on: the part that torch takes for that, which no Python can save.
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
STEP, RECORDED, POSITION, EMPTY = (
    "per step (next and optimizer step)",
    "per all_reduce, recorded",
    "per all_reduce, its position only",
    "per all_reduce, a kernel of nothing",
)
TARGETS_NS = {STEP: 2_000, RECORDED: 15_000, POSITION: 15_000, EMPTY: 15_000}


def measured(rendezvous: str) -> dict[str, float]:
    """Nanoseconds per call in this process."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import dataloader

    import eroica  # noqa: F401
    from eroica.probe.recorder import RECORDER

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

    def call() -> None:
        dist.all_reduce(values)

    found = {STEP: _fastest(step)}
    # Steps of 20 us would have nothing recorded; here we say what is.
    optimizer.step()
    step_is_odd = RECORDER.num_steps % 2
    RECORDER.thrift.mask = 0
    found[RECORDED] = _fastest(call)
    RECORDER.thrift.mask = 1
    RECORDER.num_steps += not step_is_odd
    found[POSITION] = _fastest(call)
    dist.destroy_process_group()
    return found


def handed_on(rendezvous: str) -> dict[str, float]:
    """The same of an all_reduce whose kernel hands on and does no more; eroica is not there."""
    import torch.distributed as dist

    torch: Any = sys.modules["torch"]
    torch.set_num_threads(1)
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    redispatch = torch.ops.c10d.allreduce_.default._handle.redispatch_boxed
    library = torch.library.Library("c10d", "IMPL")

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return redispatch(keys & after, *args, **kwargs)

    library.impl("allreduce_", kernel, "BackendSelect", with_keyset=True)
    values = torch.zeros(4)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    found = {EMPTY: _fastest(lambda: dist.all_reduce(values))}
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
    """Print the table; with `--in KIND FILE`, be a measured process."""
    if arguments[:1] == ["--in"]:
        kind, rendezvous = arguments[1:3]
        print(json.dumps(handed_on(rendezvous) if kind == "handing" else measured(rendezvous)))
        return 0
    kinds = {"bare": "0", "armed": "1", "handing": "0"}
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(ROUNDS):
            for kind, armed in kinds.items():
                environ = {**os.environ, "EROICA": armed, "EROICA_RING_DIR": folder, "PYTHONPATH": str(ROOT)}
                command = [sys.executable, "-m", "bench.probe", "--in", kind, str(Path(folder) / f"{turn}-{kind}")]
                done = subprocess.run(command, env=environ, cwd=ROOT, check=True, capture_output=True, text=True)
                found[kind].append(json.loads(done.stdout))
    print(f"{'hooks':<38}{'bare':>10}{'armed':>10}{'cost':>10}{'target':>10}   us; best of {ROUNDS} processes each")
    for name, target in TARGETS_NS.items():
        bare = min(each[RECORDED if name == EMPTY else name] for each in found["bare"])
        armed_ns = min(each[name] for each in found["handing" if name == EMPTY else "armed"])
        cells = (bare, armed_ns, armed_ns - bare, target)
        print(f"{name:<38}" + "".join(f"{cell / 1e3:>10.2f}" for cell in cells))
    print(", ".join((machine.processor(), f"torch {machine.version('torch')}")))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
