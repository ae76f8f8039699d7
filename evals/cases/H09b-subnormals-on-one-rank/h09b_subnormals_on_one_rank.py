"""The samples of one rank fade to values near zero: one operator on them takes longer and longer, there alone."""

from __future__ import annotations

from dataclasses import replace

from evals.catalogue import Case
from evals.cpu_job import CpuJob, watched
from evals.made import Draw, Made
from evals.truth import Expected, Truth

SHAPES = {
    "dense": (
        ("aten::addmm", 32.0), ("aten::relu", 6.0), ("aten::mm", 40.0), ("aten::threshold_backward", 8.0),
        ("aten::_foreach_add_", 6.0),
    ),
    "gated": (
        ("aten::linear", 28.0), ("aten::silu", 12.0), ("aten::mul", 16.0), ("aten::mm", 30.0),
        ("aten::_fused_adamw_", 5.0),
    ),
}  # fmt: skip
BEGINS = 250
FADES = 120
"""Steps until the data are as they stay."""


def make(case: Case, draw: Draw) -> Made:
    """A training whose step takes `draw.effect` longer in the end."""
    rng = draw.random()
    operators = SHAPES[draw.shape]
    culprit = rng.randrange(case.recipe.ranks)
    slow, usual = rng.choice([pair for pair in operators[:-1] if pair[1] > 10])
    growth = draw.effect * sum(ms for _, ms in operators) / usual

    def factor(rank: int, step: int, name: str) -> float:
        is_there = name == slow and rank == culprit
        return 1 + growth * min(max(step - BEGINS, 0) / FADES, 1) if is_there else 1.0

    job = CpuJob(case.recipe.ranks, operators, factor, draw.seed)
    said, windows = watched(job, BEGINS + FADES + 250)
    answer = replace(case.faults[0], function=f"{slow}\\|")
    truth = Truth(
        hosts=("host0",) * job.world_size,
        faults=(Expected(answer, frozenset({culprit}), frozenset({"host0"})),),
        tolerated=case.tolerated,
    )
    return Made(truth=truth, diagnoses=said, windows=windows)
