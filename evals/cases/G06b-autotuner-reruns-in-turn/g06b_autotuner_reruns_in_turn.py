"""Each rank pads its batch for itself: a new length makes that rank try all kernels, and the others wait."""

from __future__ import annotations

from evals.beside import SERIES_STEPS, beside, shape, world_size
from evals.catalogue import Case
from evals.made import Draw, Made, of_cluster
from evals.synth import cluster


def make(case: Case, draw: Draw) -> Made:
    """A data-parallel job whose environment tells the flag, and whose iterations tell how often sizes are new."""
    rng = draw.random()
    made = cluster(
        shape("dp", ("autotune", "rotating")),
        world_size=world_size(draw),
        effect=draw.effect,
        seed=draw.seed,
        base=draw.shape,
    )
    told = beside(made)
    for settings in told.settings:
        settings["torch.cudnn.benchmark"] = True
    usual, slow = (getattr(made.times.iteration_ns[1:], which)() / 1e9 for which in ("min", "max"))
    # As often as in the window.
    told.laps = [(slow if rng.random() < 2 / 3 else usual) * rng.gauss(1.0, 0.01) for _ in range(SERIES_STEPS)]
    return of_cluster(case, made, told.context("recurring"))
