"""An operator takes three percent longer with each hundred steps, on all ranks: same calls, same sizes, same cores."""

from __future__ import annotations

from dataclasses import replace

from evals.catalogue import Case
from evals.cpu_job import CpuJob, watched
from evals.made import Draw, Made
from evals.truth import Expected, Truth

SHAPES = {
    "convolutions": (
        ("aten::mkldnn_convolution", 30.0), ("aten::native_batch_norm", 8.0), ("aten::mul", 24.0),
        ("aten::convolution_backward", 34.0), ("aten::_foreach_add_", 5.0),
    ),
    "recurrent": (
        ("aten::addmm", 20.0), ("aten::_thnn_fused_lstm_cell", 18.0), ("aten::sigmoid", 14.0),
        ("aten::mm", 22.0), ("aten::_fused_adamw_", 4.0),
    ),
}  # fmt: skip
PER_STEP = 0.0003
"""Growth of the operator."""
MAY_DRIFT = ("aten::mkldnn_convolution", "aten::mul", "aten::addmm", "aten::_thnn_fused_lstm_cell", "aten::sigmoid")
BEGINS = 300


def make(case: Case, draw: Draw) -> Made:
    """A training that slows down by `draw.effect` in the end."""
    rng = draw.random()
    operators = SHAPES[draw.shape]
    slow = rng.choice([name for name, _ in operators if name in MAY_DRIFT])
    whole = sum(ms for _, ms in operators)
    growth = draw.effect * whole / dict(operators)[slow]

    def factor(rank: int, step: int, name: str) -> float:
        return 1 + min(max(step - BEGINS, 0) * PER_STEP, growth) if name == slow else 1.0

    job = CpuJob(case.recipe.ranks, operators, factor, draw.seed)
    said, windows = watched(job, BEGINS + int(growth / PER_STEP) + 200)
    answer = replace(case.faults[0], function=f"{slow}\\|")
    everyone = frozenset(range(job.world_size))
    truth = Truth(
        hosts=("host0",) * job.world_size,
        faults=(Expected(answer, everyone, frozenset({"host0"})),),
        tolerated=case.tolerated,
    )
    return Made(truth=truth, diagnoses=said, windows=windows)
