"""A job that switches between two speeds, each constant, at steps that follow no rule; all ranks at once."""

from __future__ import annotations

from bisect import bisect_right

from evals import series
from evals.catalogue import Case
from evals.made import Draw, Made
from evals.series import Part, Plan


def make(case: Case, draw: Draw) -> Made:
    """A data-parallel job."""
    rng = draw.random()
    seconds = rng.uniform(0.05, 0.3)
    switches = [rng.randrange(250, 400)]
    while len(switches) < 6:
        switches.append(switches[-1] + rng.randrange(150, 350))
    is_seen = rng.random() < 0.7

    def parts(step: int, rank: int) -> list[Part]:
        is_slow = bisect_right(switches, step) % 2 == 1
        if is_seen:
            return series.device_step(draw.shape, seconds, factor=1 + draw.effect / 0.85 * is_slow)
        waits = [Part("nothing", draw.effect * seconds, "hidden")] if is_slow else []
        return [*waits, *series.device_step(draw.shape, seconds)]

    plan = Plan(num_steps=switches[-1] + 150, parts=parts)
    return series.made(case, plan, series.watched(plan, draw.seed))
