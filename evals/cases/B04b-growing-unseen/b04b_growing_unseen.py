"""Each step of all ranks is longer than the one before by time that leaves no event."""

from __future__ import annotations

from evals import series
from evals.catalogue import Case
from evals.made import Draw, Made
from evals.series import Part, Plan


def make(case: Case, draw: Draw) -> Made:
    """A data-parallel job."""
    rng = draw.random()
    seconds, onset = rng.uniform(0.1, 0.5), rng.randrange(100, 300)

    def parts(step: int, rank: int) -> list[Part]:
        grows = Part("nothing", seconds * draw.effect * max(step - onset, 0), "hidden")
        return [grows, *series.device_step(draw.shape, seconds)]

    plan = Plan(num_steps=onset + 600, parts=parts)
    return series.made(case, plan, series.watched(plan, draw.seed))
