"""Two windows by two versions of torch, equally fast."""

from __future__ import annotations

from evals.beside import beside, shape, world_size
from evals.catalogue import Case
from evals.made import Draw, Made, of_cluster
from evals.synth import cluster


def make(case: Case, draw: Draw) -> Made:
    """A data-parallel or sharded job."""
    layout = draw.random().choice(("dp", "hsdp"))
    made = cluster(shape(layout, baseline=True), world_size=world_size(draw), seed=draw.seed, base=draw.shape)
    told = beside(made)
    told.healthy_settings = {"torch": "2.6.0", "nccl": "2.21.5"}
    return of_cluster(case, made, told.context())
