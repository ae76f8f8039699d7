"""A window at the hottest hour, beside the baseline of the coolest one: all kernels of all ranks a little longer."""

from __future__ import annotations

from evals import series
from evals.catalogue import Case
from evals.made import Draw, Made
from evals.series import Part, Plan


def make(case: Case, draw: Draw) -> Made:
    """A data-parallel job; somebody asks when the clocks are low."""
    rng = draw.random()
    seconds, rise, asked = rng.uniform(0.5, 5.0), rng.uniform(0.015, 0.03), rng.randrange(600, 800)

    def parts(step: int, rank: int) -> list[Part]:
        return series.device_step(draw.shape, seconds, factor=1 + rise * min(step / 600, 1.0))

    plan = Plan(num_steps=900, parts=parts, common_noise=0.01, ask_at=(asked,))
    return series.made(case, plan, series.watched(plan, draw.seed))
