"""From the end of one of our captures on every step takes longer, on all ranks: something was left attached."""

from __future__ import annotations

from evals import series
from evals.catalogue import Case
from evals.made import Draw, Made
from evals.series import Part, Plan


def make(case: Case, draw: Draw) -> Made:
    """A data-parallel job that was captured once by itself, or once more by request."""
    rng = draw.random()
    seconds = rng.choice((0.08, 0.3, 1.2)) * rng.uniform(0.9, 1.1)
    asked = rng.choice((None, rng.randrange(300, 500)))
    is_seen = rng.random() < 0.5
    slow_from: list[int] = []

    def profiled(first: int, end: int) -> None:
        if not slow_from and (asked is None or first >= asked):
            slow_from.append(end)

    def parts(step: int, rank: int) -> list[Part]:
        is_slow = bool(slow_from) and step >= slow_from[0]
        if is_seen:  # kernels run slower
            return series.device_step(draw.shape, seconds, factor=1 + draw.effect / 0.85 * is_slow)
        left = [Part("callbacks", draw.effect * seconds, "hidden")] if is_slow else []
        return [*left, *series.device_step(draw.shape, seconds)]

    plan = Plan(num_steps=1000, parts=parts, ask_at=() if asked is None else (asked,), is_profiled=profiled)
    return series.made(case, plan, series.watched(plan, draw.seed))
