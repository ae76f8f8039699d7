"""On the ranks of one host each launch call lasts as long as its kernel, and their environment says why."""

from __future__ import annotations

from evals.beside import beside, shape, world_size
from evals.cases_synth import Case as Shape
from evals.catalogue import Case
from evals.made import Draw, Made, of_cluster
from evals.synth import Cluster, cluster


def make(case: Case, draw: Draw) -> Made:
    """A data-parallel job over several hosts."""
    made = drawn(shape("dp", ("launches_block", "host")), draw)
    told = beside(made)
    name = "env.HIP_LAUNCH_BLOCKING" if made.base.amd else "env.CUDA_LAUNCH_BLOCKING"
    for rank in made.expected[0].ranks:
        told.settings[rank][name] = "1"
    return of_cluster(case, made, told.context())


def drawn(wanted: Shape, draw: Draw) -> Cluster:
    """A job with kernels so long that blocking launches cost the wanted share: long kernels hide the launch."""
    short, long = 0.5, 64.0
    while True:
        stretch = (short * long) ** 0.5
        made = cluster(
            wanted, world_size=world_size(draw), seed=draw.seed, base=draw.shape, stretch=stretch, bucket_share=0.004
        )
        if long / short < 1.05 or abs(made.growth - draw.effect) < 0.05 * draw.effect:
            return made
        short, long = (stretch, long) if made.growth > draw.effect else (short, stretch)
