"""All ranks call the device allocator in each step, from the first window on."""

from __future__ import annotations

from evals.beside import beside, shape, world_size
from evals.catalogue import Case
from evals.made import Draw, Made, of_cluster
from evals.synth import cluster


def make(case: Case, draw: Draw) -> Made:
    """A sharded or data-parallel job without a past."""
    layout = draw.random().choice(("hsdp", "dp"))
    size = world_size(draw)
    made = cluster(
        shape(layout, ("allocator", "all")), world_size=size, effect=draw.effect, seed=draw.seed, base=draw.shape
    )
    return of_cluster(case, made, beside(made).context("baseline"))
