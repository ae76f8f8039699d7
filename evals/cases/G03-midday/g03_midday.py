"""Three days of iterations that swing by 1.5 % with the hour of the day, under 1 % of noise."""

from __future__ import annotations

from math import pi, sin

from evals import series
from evals.catalogue import Case
from evals.made import Draw, Made
from evals.series import Part, Plan


def make(case: Case, draw: Draw) -> Made:
    """A data-parallel job whose devices get warmer and cooler together."""
    rng = draw.random()
    seconds, hour = rng.uniform(20.0, 40.0), rng.uniform(0.0, 24.0)
    kernel = series.MODELS[draw.shape][1]

    def parts(step: int, rank: int) -> list[Part]:
        swing = 1 + 0.015 * sin(2 * pi * (hour / 24 + step * seconds / 86_400))
        return [Part(kernel, 0.85 * seconds * swing, "device"), Part("all_reduce", 0.15 * seconds, "meet")]

    plan = Plan(num_steps=round(3 * 86_400 / seconds), parts=parts, noise=0.002, common_noise=0.01)
    return series.made(case, plan, series.watched(plan, draw.seed))
