"""All compute kernels of one rank longer by a factor, and counters that show its clock low."""

from __future__ import annotations

from evals.catalogue import Case
from evals.made import Draw, Made, of_cluster
from evals.synth import cluster


def make(case: Case, draw: Draw) -> Made:
    """A data-parallel job."""
    made = cluster("gpu_throttle", world_size=case.recipe.ranks, effect=draw.effect, seed=draw.seed, base=draw.shape)
    return of_cluster(case, made)
