"""One to twenty evaluations in an iteration, drawn for all ranks together; somebody asks for a window now and then."""

from __future__ import annotations

from evals import series
from evals.catalogue import Case
from evals.made import Draw, Made
from evals.series import Part, Plan


def make(case: Case, draw: Draw) -> Made:
    """A data-parallel job whose optimizer takes a closure."""
    rng = draw.random()
    seconds, most = rng.uniform(0.05, 0.2), rng.choice((6, 12, 20))
    evaluations = [rng.randint(1, most) for _ in range(900)]

    def parts(step: int, rank: int) -> list[Part]:
        return evaluations[step] * series.device_step(draw.shape, seconds)

    plan = Plan(num_steps=900, parts=parts, ask_at=(200, 380, 560, 740))
    return series.made(case, plan, series.watched(plan, draw.seed))
