"""All ranks read the loss back where the host would wait anyhow, and launch at once."""

from __future__ import annotations

from evals.beside import beside, shape, world_size
from evals.catalogue import Case
from evals.made import Draw, Made, of_cluster
from evals.synth import cluster


def make(case: Case, draw: Draw) -> Made:
    """A data-parallel or sharded job."""
    layout = draw.random().choice(("dp", "hsdp"))
    extras = draw.random().choice(("harmless_sync", "harmless_syncs"))
    made = cluster(shape(layout, extras=extras), world_size=world_size(draw), seed=draw.seed, base=draw.shape)
    return of_cluster(case, made, beside(made).context())
