"""One forward, one backward over four stages; the bubble is all that there is."""

from __future__ import annotations

from evals.beside import beside, shape, world_size
from evals.catalogue import Case
from evals.made import Draw, Made, of_cluster
from evals.synth import cluster


def make(case: Case, draw: Draw) -> Made:
    """A healthy pipeline."""
    made = cluster(shape("pp_1f1b"), world_size=world_size(draw), seed=draw.seed, base=draw.shape)
    return of_cluster(case, made, beside(made).context())
