"""The first steps take many times as long, on all ranks; one or a few do so again much later."""

from __future__ import annotations

from evals import series
from evals.catalogue import Case
from evals.made import Draw, Made
from evals.series import Part, Plan


def make(case: Case, draw: Draw) -> Made:
    """A data-parallel job that compiles, or tunes, as it goes."""
    rng = draw.random()
    seconds = rng.uniform(0.1, 0.4)
    warm, times = rng.choice(((30, 50.0), (100, 10.0), (500, 100.0), (45, 3.0)))
    late = warm + rng.randrange(300, 500)
    lasts = rng.choice((1, 1, 3))

    def parts(step: int, rank: int) -> list[Part]:
        is_slow = step < warm or late <= step < late + lasts
        compiles = [Part("torch/_dynamo/convert_frame.py(940): compile", (times - 1) * seconds, "python")]
        return [*(compiles if is_slow else []), *series.device_step(draw.shape, seconds)]

    plan = Plan(num_steps=late + 500, parts=parts, ask_at=(late + 200,))
    return series.made(case, plan, series.watched(plan, draw.seed))
