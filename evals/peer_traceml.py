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

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evals import jobs


def main(program: str) -> None:
    """Train."""
    traceml = importlib.import_module("traceml_ai")  # by name: type checks need no TraceML
    traceml.init(mode="auto")
    models: list[Any] = [nn.Identity()]  # TraceML wants one; a program that makes its own elsewhere is still timed
    plain_init, plain_optimizer, plain_batches = (
        DistributedDataParallel.__init__,
        jobs.Job.optimizer,
        jobs.Job.batches,
    )

    def init(made: DistributedDataParallel, *arguments: Any, **options: Any) -> None:
        plain_init(made, *arguments, **options)
        models.append(made)

    def optimizer(job: jobs.Job, model: nn.Module) -> Any:
        models.append(model)
        return plain_optimizer(job, model)

    def batches(job: jobs.Job, loader: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        for step, batch in plain_batches(job, loader):
            with traceml.trace_step(models[-1]):
                yield step, batch

    wrapped: Any = jobs.Job
    wrapped.optimizer, wrapped.batches = optimizer, batches
    parallel: Any = DistributedDataParallel
    parallel.__init__ = init
    sys.argv = sys.argv[1:]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1])
