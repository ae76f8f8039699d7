"""The training of `bench.overhead`, a small transformer on the CPU: python bench/overhead_job.py FOLDER KIND.

One process of one rank or more, by RANK and WORLD_SIZE as launchers set them. It says how far it is in FOLDER/board,
eight bytes per rank, and ends after the step that the first word of it names. When each step ended, what the process
had computed by then, when no other thread got the GIL, and what was paid for imports and memory is left in
FOLDER/rank<R>.json.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import mmap
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

STOP_AT, PROGRESS, DONE = 0, 8, 16
"""Words of the board: the last step, as the driver sets it; steps done and "my trace is written", plus the rank."""
WINDOW = 10
PROFILE_FROM = 150
"""First step of the window of torch's own profiler."""


def _model(torch: Any) -> Any:
    """Four blocks of 128, as op-dense as the small transformers that people train on one device."""
    nn = torch.nn
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(512, 128), nn.TransformerEncoder(layer, 4), nn.Linear(128, 512))


class Ticks(threading.Thread):
    """Wakes once a millisecond; where it could not, somebody held the GIL (or the core)."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.late: list[tuple[int, int]] = []
        """(when, how long), both ns, above 5 ms: CPython hands the GIL over after 5 ms by itself."""
        self.is_over = False

    def run(self) -> None:
        """Until `is_over`."""
        last = time.monotonic_ns()
        while not self.is_over:
            time.sleep(0.001)
            now = time.monotonic_ns()
            if now - last > 5_000_000:
                self.late.append((last, now - last))
            last = now


def main(folder: Path, kind: str) -> None:
    """Train until the driver says stop."""
    begin = time.perf_counter()
    import torch
    import torch.distributed as dist

    if kind.startswith("eroica"):
        import eroica  # noqa: F401
    traced_step: Any = contextlib.nullcontext
    if kind == "traceml":
        traceml_ai = importlib.import_module("traceml_ai")  # in its own environment only
        traceml_ai.init(mode="auto")
        traced_step = traceml_ai.trace_step
    import_s = time.perf_counter() - begin
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = _model(torch)
    if size > 1:
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    data: Any = torch.randint(0, 512, (1 << 14, 32))
    loader: Any = torch.utils.data.DataLoader(data, batch_size=4)
    with open(folder / "board", "r+b") as file:
        board = memoryview(mmap.mmap(file.fileno(), 256)).cast("q")
    ticks = Ticks()
    ticks.start()
    profiler: Any = None
    ends: list[int] = []
    cpu: list[int] = []
    batches = iter(loader)
    (folder / f"rank{rank}.pid").write_text(str(os.getpid()))
    while not 0 < board[STOP_AT] <= len(ends):
        if kind == "profiler" and len(ends) == PROFILE_FROM:
            profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True)
            profiler.start()
        with traced_step(model) if kind == "traceml" else traced_step():
            batch = next(batches, None)
            if batch is None:
                batches = iter(loader)
                batch = next(batches)
            optimizer.zero_grad()
            logits = model(batch)
            loss: Any = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())
            loss.backward()
            optimizer.step()
        if profiler is not None and len(ends) == PROFILE_FROM + WINDOW - 1:
            profiler.stop()
            profiler.export_chrome_trace(str(folder / f"trace{rank}.json"))
            profiler = None
            board[DONE + rank] = 1
        ends.append(time.monotonic_ns())
        cpu.append(time.process_time_ns())
        board[PROGRESS + rank] = len(ends)
    ticks.is_over = True
    ticks.join()
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    told = {"ends": ends, "cpu": cpu, "late": ticks.late, "import_s": import_s, "peak_mb": int(peak.split()[1]) / 1024}
    if size > 1:
        dist.destroy_process_group()
    told["over_ns"] = time.monotonic_ns()
    (folder / f"rank{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
