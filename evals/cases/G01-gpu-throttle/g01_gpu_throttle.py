"""All compute kernels of one rank longer by a factor, and counters that show its clock low."""

from __future__ import annotations

from evals.beside import beside, shape, world_size
from evals.catalogue import Case
from evals.made import Draw, Made, of_cluster
from evals.synth import cluster


def make(case: Case, draw: Draw) -> Made:
    """A data-parallel, tensor-parallel or sharded job with counters."""
    layout = draw.random().choice(("dp", "tp_dp", "hsdp"))
    made = cluster(
        shape(layout, ("gpu_slow", "one"), counters=True),
        world_size=world_size(draw),
        effect=draw.effect,
        seed=draw.seed,
        base=draw.shape,
    )
    return of_cluster(case, made, beside(made).context())
