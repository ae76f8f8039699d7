"""eroica's own work, each in a process that `measure` starts: python -m bench.work WHAT [ARGUMENT]. Prints one JSON
object.

Times are of the work alone, without starting Python and importing; memory is of the whole process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from bench.process import pin, tell, timed


def read(path: str) -> None:
    """`read_trace` of one file."""
    from eroica.trace import read_trace

    with timed() as clock:
        trace = read_trace(path)
    tell(**clock.told(), events=len(trace))


def summarize(path: str) -> None:
    """`read_trace` and then `summarize`, timed as users call them; then its parts once more, for the split."""
    from eroica import pattern
    from eroica.collectives import ledger_of
    from eroica.critical_path import critical_spans
    from eroica.offline import keep_freed_memory
    from eroica.trace import read_trace

    keep_freed_memory()  # as `eroica diagnose` does before it reads
    with timed() as clock:
        began = time.perf_counter()
        trace = read_trace(path)
        read_s = time.perf_counter() - began
        summary = pattern.summarize(trace)
    marks = [time.perf_counter()]
    spans = critical_spans(trace)
    marks.append(time.perf_counter())
    _, peaks = pattern._patterns(trace, spans, None)
    marks.append(time.perf_counter())
    ledger_of(trace, spans, peaks)
    marks.append(time.perf_counter())
    path_s, patterns_s, ledger_s = (later - earlier for earlier, later in pairwise(marks))
    tell(
        **clock.told(),
        read_s=read_s,
        path_s=path_s,
        patterns_s=patterns_s,
        ledger_s=ledger_s,
        events=len(trace),
        spans=len(spans.event),
        iterations=summary.num_iterations,
        explained=summary.coverage.explained,
    )


def localize(num_ranks: str, num_roles: str) -> None:
    """`localize` over random healthy patterns of 40 functions with one planted fault, which must be the only answer."""
    import numpy as np

    from eroica.critical_path import Activity
    from eroica.localization import Roles
    from eroica.localization import localize as locate

    ranks, roles, functions = int(num_ranks), int(num_roles), 40
    random = np.random.default_rng(ranks + roles)
    stage = (np.arange(ranks, dtype=np.int64) * roles // ranks).astype(np.int32)
    usual = random.dirichlet(np.ones(functions), roles).astype(np.float32)
    beta = usual[stage]
    beta += random.standard_normal((ranks, functions), np.float32) * np.float32(0.002)
    np.maximum(beta, 0, out=beta)
    mu = random.standard_normal((ranks, functions), np.float32) * np.float32(0.02) + np.float32(0.7)
    sigma = random.standard_normal((ranks, functions), np.float32) * np.float32(0.01) + np.float32(0.1)
    rank, function = int(random.integers(ranks)), int(random.integers(functions))
    beta[rank, function] += 0.05
    mu[rank, function] -= 0.3
    table = Roles(stage, tuple(f"stage {k}" for k in range(roles)), "groups")
    activities = [Activity.COMPUTE] * functions
    with timed() as clock:
        found = locate(beta, mu, sigma, activities, table)
    cells = [tuple(int(place) for place in cell) for cell in np.argwhere(found.unusual)]
    right = cells == [(rank, function)]
    tell(**clock.told(), right=right, planted=[rank, function], found=cells[:5])


def size(*paths: str) -> None:
    """Bytes of each part of the summary of each trace, and of a rank of synthetic jobs: those communicate most."""
    from eroica.codec import encode_summary
    from eroica.pattern import summarize as reduce
    from eroica.trace import read_trace
    from evals.cases_synth import BY_ID
    from evals.synth import cluster

    summaries = {Path(path).name: reduce(read_trace(path)) for path in paths}
    for case in ("gpu_throttle", "nic_slow"):
        made = cluster(BY_ID[case], world_size=64, effect=0.1, seed=0, base="mi300")
        trace, samples = next(iter(made.traces()))
        summaries[f"synthetic job of 64 ranks ({BY_ID[case].layout})"] = reduce(trace, samples)
    rows = []
    for name, summary in summaries.items():
        encoded = encode_summary(summary)
        rows.append(
            {
                "trace": name,
                "functions": len(summary.patterns.functions),
                "samples": len(summary.ledger.step),
                "patterns": len(encoded.patterns),
                "ledger": len(encoded.ledger),
                "names": sum(len(text) for text in encoded.names.values()),
            }
        )
    tell(rows=rows)


def load(module: str) -> None:
    """Import of one module in an interpreter that has imported nothing beyond what this file needs."""
    known = set(sys.modules)
    with timed() as clock:
        __import__(module)
    tell(**clock.told(), modules=len(set(sys.modules) - known))


if __name__ == "__main__":
    pin()
    WORK: dict[str, Callable[..., None]] = {
        "read": read,
        "summarize": summarize,
        "localize": localize,
        "size": size,
        "load": load,
    }
    WORK[sys.argv[1]](*sys.argv[2:])
