"""The device of one rank becomes slower, by chance at the end of a capture of all ranks."""

from __future__ import annotations

from evals import series
from evals.catalogue import Case
from evals.made import Draw, Made
from evals.series import Part, Plan


def make(case: Case, draw: Draw) -> Made:
    """A data-parallel job."""
    rng = draw.random()
    seconds = rng.choice((0.3, 1.2)) * rng.uniform(0.9, 1.1)
    asked, culprit = rng.randrange(200, 400), rng.randrange(8)
    slow_from: list[int] = []

    def profiled(first: int, end: int) -> None:
        if not slow_from and first >= asked:
            slow_from.append(end)

    def parts(step: int, rank: int) -> list[Part]:
        is_slow = rank == culprit and bool(slow_from) and step >= slow_from[0]
        return series.device_step(draw.shape, seconds, factor=1 + draw.effect / 0.85 * is_slow)

    plan = Plan(num_steps=700, num_ranks=8, parts=parts, ask_at=(asked,), is_profiled=profiled)
    return series.made(case, plan, series.watched(plan, draw.seed), [culprit])
