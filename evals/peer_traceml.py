"""One rank of a live case under TraceML, in TraceML's own environment; `python -m evals peers` has its launcher run it.

    peer_traceml.py PROGRAM ARGUMENTS...

TraceML wants its calls in the training loop. The programs of the catalogue are left as they are; the loop that they all
use (`evals.jobs.Job.batches`) is wrapped, so that a step counts from its batch to the next one's fetch, as TraceML's
documents have it.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from evals import jobs


def main(program: str) -> None:
    """Train."""
    traceml = importlib.import_module("traceml_ai")  # by name: type checks need no TraceML
    traceml.init(mode="auto")
    models: list[Any] = []
    plain_model, plain_batches = jobs.Job.model, jobs.Job.batches

    def model(job: jobs.Job, **options: Any) -> Any:
        models.append(plain_model(job, **options))
        return models[-1]

    def batches(job: jobs.Job, loader: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        for step, batch in plain_batches(job, loader):
            with traceml.trace_step(*models[-1:]):
                yield step, batch

    wrapped: Any = jobs.Job
    wrapped.model, wrapped.batches = model, batches
    sys.argv = sys.argv[1:]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1])
