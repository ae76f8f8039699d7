"""A long warm-up, hundreds of even steps, and from some step on all kernels of all ranks take longer."""

from __future__ import annotations

from evals import series
from evals.catalogue import Case
from evals.made import Draw, Made
from evals.series import Part, Plan


def make(case: Case, draw: Draw) -> Made:
    """A data-parallel job whose warm-up outlasts the time at which a baseline is taken."""
    rng = draw.random()
    seconds, warm, times = rng.uniform(0.1, 0.4), rng.randrange(50, 120), rng.uniform(5.0, 60.0)
    onset = warm + rng.randrange(300, 600)

    def parts(step: int, rank: int) -> list[Part]:
        compiles = [Part("torch/_dynamo/convert_frame.py(940): compile", (times - 1) * seconds, "python")]
        step_parts = series.device_step(draw.shape, seconds, factor=1 + draw.effect / 0.85 * (step >= onset))
        return [*(compiles if step < warm else []), *step_parts]

    plan = Plan(num_steps=onset + 250, parts=parts)
    return series.made(case, plan, series.watched(plan, draw.seed))
