"""All kernels of all ranks become slower at some step, tens or hundreds of steps after the last capture."""

from __future__ import annotations

from evals import series
from evals.catalogue import Case
from evals.made import Draw, Made
from evals.series import Part, Plan


def make(case: Case, draw: Draw) -> Made:
    """A data-parallel job that was captured by itself, and once more by request."""
    rng = draw.random()
    seconds = rng.choice((0.08, 0.3, 1.2)) * rng.uniform(0.9, 1.1)
    asked = rng.randrange(200, 260)
    onset = asked + rng.randrange(90, 400)

    def parts(step: int, rank: int) -> list[Part]:
        return series.device_step(draw.shape, seconds, factor=1 + draw.effect / 0.85 * (step >= onset))

    plan = Plan(num_steps=onset + 200, parts=parts, ask_at=(asked,))
    return series.made(case, plan, series.watched(plan, draw.seed))
