"""Two windows: in the second, by another version of torch, the backward pass waits for each bucket of gradients."""

from __future__ import annotations

from evals.beside import beside, shape, world_size
from evals.catalogue import Case
from evals.made import Draw, Made, of_cluster
from evals.synth import cluster


def make(case: Case, draw: Draw) -> Made:
    """A data-parallel job; three of its four buckets could hide behind compute."""
    made = cluster(
        shape("dp", ("reductions_exposed", "all"), baseline=True),
        world_size=world_size(draw),
        seed=draw.seed,
        base=draw.shape,
        bucket_share=draw.effect / 3,
    )
    told = beside(made)
    told.healthy_settings = {"torch": "2.6.0", "nccl": "2.21.5"}
    return of_cluster(case, made, told.context())
