"""Training and generation by turns; from some step on one rank generates more slowly, and trains as ever."""

from __future__ import annotations

from evals import series
from evals.catalogue import Case
from evals.made import Draw, Made
from evals.series import Part, Plan


def make(case: Case, draw: Draw) -> Made:
    """Iterations of 20 and 60 s. The effect is a share of the iteration in which it is."""
    rng = draw.random()
    train_s, rollout_s = rng.uniform(15.0, 25.0), rng.uniform(50.0, 70.0)
    train, rollout = rng.choice(((1, 1), (2, 1), (4, 4), (16, 12)))
    culprit, onset = rng.randrange(8), rng.randrange(500, 700)

    def parts(step: int, rank: int) -> list[Part]:
        place = step % (train + rollout)
        if place < train:
            return series.device_step(draw.shape, train_s)
        slower = 1 + draw.effect * (rank == culprit and step >= onset)
        generated = [Part("paged_attention_kernel", slower * rollout_s / 20, "device")] * 20
        gathers, reduces = [Part("all_gather", 0.5, "meet")] * 2, [Part("all_reduce", 0.1, "meet")] * 4
        return [*generated, *gathers, Part("sample_kernel", 0.1, "device"), *reduces]

    plan = Plan(num_steps=onset + 500, num_ranks=8, parts=parts)
    return series.made(case, plan, series.watched(plan, draw.seed), [culprit])
