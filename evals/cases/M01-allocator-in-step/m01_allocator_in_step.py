"""On two ranks of a sharded job the caching allocator frees and asks the device for memory in each step."""

from __future__ import annotations

from evals.beside import beside, shape, world_size
from evals.catalogue import Case
from evals.made import Draw, Made, of_cluster
from evals.synth import cluster


def make(case: Case, draw: Draw) -> Made:
    """A sharded or tensor-parallel job."""
    layout = draw.random().choice(("hsdp", "hsdp", "tp_dp"))
    size = world_size(draw)
    made = cluster(
        shape(layout, ("allocator", "two")), world_size=size, effect=draw.effect, seed=draw.seed, base=draw.shape
    )
    return of_cluster(case, made, beside(made).context())
