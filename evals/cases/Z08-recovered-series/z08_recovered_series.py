"""One rank, or all of them, are slow for just so many iterations as it takes to notice."""

from __future__ import annotations

from evals import series
from evals.catalogue import Case
from evals.made import Draw, Made
from evals.series import Part, Plan


def make(case: Case, draw: Draw) -> Made:
    """A data-parallel job."""
    rng = draw.random()
    seconds, onset, lasts = rng.uniform(0.3, 2.0), rng.randrange(200, 500), rng.choice((7, 8))
    culprit = rng.choice((None, rng.randrange(4)))

    def parts(step: int, rank: int) -> list[Part]:
        is_slow = onset <= step < onset + lasts and culprit in (None, rank)
        return series.device_step(draw.shape, seconds, factor=1 + draw.effect / 0.85 * is_slow)

    plan = Plan(num_steps=onset + 300, parts=parts)
    return series.made(case, plan, series.watched(plan, draw.seed))
