"""All ranks read the loss back in the forward pass and log it before they launch again; no healthy past is known."""

from __future__ import annotations

from evals.beside import beside, shape, world_size
from evals.catalogue import Case
from evals.made import Draw, Made, of_cluster
from evals.synth import cluster


def make(case: Case, draw: Draw) -> Made:
    """A data-parallel or sharded job."""
    layout = draw.random().choice(("dp", "hsdp"))
    size = world_size(draw)
    made = cluster(
        shape(layout, ("sync_gap", "all")), world_size=size, effect=draw.effect, seed=draw.seed, base=draw.shape
    )
    return of_cluster(case, made, beside(made).context())
