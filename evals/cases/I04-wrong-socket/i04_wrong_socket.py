"""The ranks of one socket of a host are bound to the cores of the other, and their copies are slow."""

from __future__ import annotations

from eroica.job import format_ranks
from evals.beside import CORES, beside, shape, world_size
from evals.catalogue import Case
from evals.made import Draw, Made, of_cluster
from evals.synth import cluster


def make(case: Case, draw: Draw) -> Made:
    """A data-parallel or tensor-parallel job with counters: cores of ranks and of devices."""
    layout = draw.random().choice(("dp", "tp_dp"))
    made = cluster(
        shape(layout, ("copy_slow", "socket"), counters=True),
        world_size=world_size(draw),
        effect=draw.effect,
        seed=draw.seed,
        base=draw.shape,
    )
    told = beside(made)
    first, second = (format_ranks(range(start, start + CORES // 2)) for start in (0, CORES // 2))
    for rank in made.expected[0].ranks:
        near = told.devices[rank]["labels"]["cpus"]
        far = second if near == first else first
        told.ranks[rank]["labels"]["cpus"] = far
        told.settings[rank]["affinity"] = far
    return of_cluster(case, made, told.context())
