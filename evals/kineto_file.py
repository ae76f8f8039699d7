"""Writes a synthetic rank's trace as the JSON that Kineto writes, so that a case can go the whole way through a file.

Key order, `baseTimeNanoseconds`, microseconds with three decimals, deviceProperties, distributedInfo and the arguments
of communication are as torch 2.x writes them. Used by tests and by whoever wants a folder of traces to try
`eroica diagnose` on; scoring runs skip it, since writing text is most of the time.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

from eroica.trace import Category, Trace
from evals.emit import Written
from evals.synth import Cluster

_CATEGORY = {
    Category.CPU_OP: "cpu_op",
    Category.PYTHON: "python_function",
    Category.ANNOTATION: "user_annotation",
    Category.DEVICE_ANNOTATION: "gpu_user_annotation",
    Category.RUNTIME: "cuda_runtime",
    Category.KERNEL: "kernel",
    Category.COPY: "gpu_memcpy",
    Category.MEMSET: "gpu_memset",
}


def _microseconds(nanoseconds: int) -> str:
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


def _args(trace: Trace, row: int, communication: dict[str, Any]) -> dict[str, Any]:
    category = int(trace.category[row])
    work, args = int(trace.work[row]), dict(communication)
    if category == Category.CPU_OP and work >= 0:
        args["Input Dims"] = [[work]]
    if trace.correlation[row] and category != Category.DEVICE_ANNOTATION:
        args["correlation"] = int(trace.correlation[row])
    if trace.stream[row] >= 0:
        args.update(device=int(trace.device[row]), stream=int(trace.stream[row]))
    if category == Category.KERNEL:
        if work >= 0:
            args.update(grid=[work, 1, 1], block=[128, 1, 1])
        if not np.isnan(trace.occupancy[row]):
            args["est. achieved occupancy %"] = round(float(trace.occupancy[row]) * 100.0, 4)
    elif category in (Category.COPY, Category.MEMSET) and work >= 0:
        args["bytes"] = work
        if not np.isnan(trace.bandwidth_gbs[row]):
            args["memory bandwidth (GB/s)"] = float(trace.bandwidth_gbs[row])
    return args


def write_json(written: Written, path: str | Path) -> None:
    """Write one rank's trace. A path that ends in .gz is compressed."""
    trace = written.trace
    base = int(trace.ts_ns[0]) // 1_000_000_000 * 1_000_000_000 if len(trace) else 0
    head = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": k, "name": trace.device_model} for k in range(trace.num_devices)],
        "distributedInfo": {
            "backend": "nccl",
            "rank": trace.rank,
            "world_size": trace.world_size,
            "pg_count": len(written.groups),
            "pg_config": list(written.groups),
        },
        "host_name": trace.host,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base,
    }
    events = []
    for (process, thread), name in zip(trace.tracks, trace.track_names, strict=True):
        shown = {
            "name": "thread_name",
            "ph": "M",
            "ts": 0,
            "pid": int(process),
            "tid": int(thread),
            "args": {"name": name},
        }
        events.append(json.dumps(shown))
    for row in range(len(trace)):
        process, thread = trace.tracks[int(trace.track[row])]
        category = _CATEGORY[Category(int(trace.category[row]))]
        name = json.dumps(trace.strings[int(trace.name[row])])
        when = _microseconds(int(trace.ts_ns[row]) - base)
        args = json.dumps(_args(trace, row, dict(written.args.get(row, {}))))
        events.append(
            f'{{"ph": "X", "cat": "{category}", "name": {name}, "pid": {process}, "tid": {thread},\n'
            f'    "ts": {when}, "dur": {_microseconds(int(trace.dur_ns[row]))},\n    "args": {args}\n  }}'
        )
    text = json.dumps(head, indent=1)[:-2] + ',\n "traceEvents": [\n  ' + ",\n  ".join(events) + "\n ]\n}\n"
    data = text.encode()
    Path(path).write_bytes(gzip.compress(data, 1) if str(path).endswith(".gz") else data)


def write_cluster(cluster: Cluster, directory: str | Path) -> None:
    """Write all ranks as DIRECTORY/rank<N>.json.gz."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    for rank in range(cluster.world_size):
        write_json(cluster.written(rank), Path(directory) / f"rank{rank}.json.gz")
