"""Training and generation by turns, with other operations and three times the length; weights move in between."""

from __future__ import annotations

from evals import series
from evals.catalogue import Case
from evals.made import Draw, Made
from evals.series import Part, Plan


def make(case: Case, draw: Draw) -> Made:
    """Iterations of 20 and 60 s, one of each by turns or many in a row; windows are asked for in either phase."""
    rng = draw.random()
    train_s, rollout_s = rng.uniform(15.0, 25.0), rng.uniform(50.0, 70.0)
    train, rollout = rng.choice(((1, 1), (2, 1), (4, 4), (16, 12), (60, 40)))

    def parts(step: int, rank: int) -> list[Part]:
        place = step % (train + rollout)
        moved = [Part("memcpy_kernel", 1.5, "device")] if place in (0, train) else []
        if place < train:
            return [*moved, *series.device_step(draw.shape, train_s - 1.5)]
        generated = [Part("paged_attention_kernel", rollout_s / 25, "device"), Part("sample_kernel", 0.1, "device")]
        return [*moved, *(20 * generated), Part("all_reduce", 1.0, "meet")]

    asked = [round(400 + turn * (train + rollout) * 2.5) for turn in range(4)]
    plan = Plan(num_steps=asked[-1] + 200, parts=parts, ask_at=asked)
    return series.made(case, plan, series.watched(plan, draw.seed))
