"""Now and then one iteration of one rank takes many times as long; one falls into a window that somebody asks for."""

from __future__ import annotations

from evals import series
from evals.catalogue import Case
from evals.made import Draw, Made
from evals.series import Part, Plan


def make(case: Case, draw: Draw) -> Made:
    """A data-parallel job of eight ranks, with a hiccup in 400 iterations."""
    rng = draw.random()
    seconds, asked = rng.uniform(0.2, 1.0), rng.randrange(600, 900)
    at = {step: (rng.randrange(8), rng.uniform(2.0, 100.0)) for step in range(60, 2000) if rng.random() < 1 / 400}
    at[asked + 9] = (rng.randrange(8), rng.uniform(2.0, 20.0))

    def parts(step: int, rank: int) -> list[Part]:
        stumbles = (
            [Part("stumble_kernel", at[step][1] * seconds, "device")] if step in at and at[step][0] == rank else []
        )
        return [*stumbles, *series.device_step(draw.shape, seconds)]

    plan = Plan(num_steps=2000, num_ranks=8, parts=parts, ask_at=(asked,))
    return series.made(case, plan, series.watched(plan, draw.seed))
