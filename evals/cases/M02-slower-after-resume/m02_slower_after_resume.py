"""Two windows of a job, before and after a restart: in the second all ranks ask the device for memory in each step."""

from __future__ import annotations

from evals.beside import beside, shape, world_size
from evals.catalogue import Case
from evals.made import Draw, Made, of_cluster
from evals.synth import cluster


def make(case: Case, draw: Draw) -> Made:
    """A sharded or data-parallel job, the window before the restart as its healthy past."""
    layout = draw.random().choice(("hsdp", "dp"))
    size = world_size(draw)
    made = cluster(
        shape(layout, ("allocator", "all"), baseline=True),
        world_size=size,
        effect=draw.effect,
        seed=draw.seed,
        base=draw.shape,
    )
    return of_cluster(case, made, beside(made).context())
