"""Tensor-parallel rings over all devices of a host; one edge of one ring is slow, so all its members are."""

from __future__ import annotations

import re
from dataclasses import replace

from evals.beside import beside, device_of, shape, world_size
from evals.catalogue import Case
from evals.made import Draw, Made, of_cluster
from evals.synth import cluster


def make(case: Case, draw: Draw) -> Made:
    """A tensor-parallel job."""
    made = cluster(
        shape("tp_dp", ("edge_slow", "edge"), counters=True, baseline=True),
        world_size=world_size(draw),
        effect=draw.effect,
        seed=draw.seed,
        base=draw.shape,
    )
    told, ends = beside(made), sorted(made.expected[0].ranks)
    for rank in ends:
        # A contact that is bad repeats; one that is gone leaves a link fewer.
        if draw.seed % 2:
            told.devices[rank]["values"]["nvlink_errors"] = float(draw.random().randrange(2_000, 90_000))
        else:
            told.devices[rank]["values"]["num_nvlinks"] -= 1.0
    both = "-".join(device_of(made, rank) for rank in ends)
    asked = replace(case, faults=(replace(case.faults[0], function=re.escape(both)),))
    # The whole ring is as slow as its slowest edge.
    ring = next(group.ranks for group in made.program.groups[1:] if set(ends) <= set(group.ranks))
    made = replace(made, expected=(replace(made.expected[0], ranks=frozenset(ring)),))
    return of_cluster(asked, made, told.context())
