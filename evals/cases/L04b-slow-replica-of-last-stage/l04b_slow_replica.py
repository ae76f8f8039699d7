"""Four pipeline stages, the last one heavier, and one of its replicas computes more slowly than the rest of it."""

from __future__ import annotations

from evals.beside import beside, shape, world_size
from evals.catalogue import Case
from evals.made import Draw, Made, of_cluster
from evals.synth import cluster


def make(case: Case, draw: Draw) -> Made:
    """A pipeline by either schedule."""
    layout = draw.random().choice(("pp_dp", "pp_1f1b"))
    made = cluster(
        shape(layout, ("gpu_slow", "last_stage"), extras="heavy_last_stage"),
        world_size=world_size(draw),
        effect=draw.effect,
        seed=draw.seed,
        base=draw.shape,
    )
    return of_cluster(case, made, beside(made).context())
