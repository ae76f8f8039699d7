"""The throttle flag is set on three ranks whose kernels are as fast as any."""

from __future__ import annotations

from evals.beside import beside, shape, world_size
from evals.catalogue import Case
from evals.made import Draw, Made, of_cluster
from evals.synth import cluster


def make(case: Case, draw: Draw) -> Made:
    """A data-parallel, tensor-parallel or sharded job with counters."""
    layout = draw.random().choice(("dp", "hsdp", "tp_dp"))
    size = world_size(draw)
    made = cluster(shape(layout, counters=True, extras="power_cap"), world_size=size, seed=draw.seed, base=draw.shape)
    return of_cluster(case, made, beside(made).context())
