"""The window holds the first step of a pipeline, in which each stage compiles when the first activations reach it."""

from __future__ import annotations

from evals.beside import beside, shape, world_size
from evals.catalogue import Case
from evals.made import Draw, Made, of_cluster
from evals.synth import cluster


def make(case: Case, draw: Draw) -> Made:
    """A healthy pipeline at its start."""
    made = cluster(
        shape("pp_1f1b", extras="first_compile"), world_size=world_size(draw), seed=draw.seed, base=draw.shape
    )
    return of_cluster(case, made, beside(made).context())
