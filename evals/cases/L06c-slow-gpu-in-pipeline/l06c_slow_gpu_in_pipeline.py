"""One forward, one backward over four stages; one replica of a middle stage computes more slowly."""

from __future__ import annotations

from evals.beside import beside, shape, world_size
from evals.catalogue import Case
from evals.made import Draw, Made, of_cluster
from evals.synth import cluster


def make(case: Case, draw: Draw) -> Made:
    """A pipeline with one slow device."""
    made = cluster(
        shape("pp_1f1b", ("gpu_slow", "middle_stage")),
        world_size=world_size(draw),
        effect=draw.effect,
        seed=draw.seed,
        base=draw.shape,
    )
    return of_cluster(case, made, beside(made).context())
