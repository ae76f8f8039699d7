"""In each step all ranks search a Python list that it makes longer; the step grows by `effect` of its first length."""

from __future__ import annotations

from evals import series
from evals.catalogue import Case
from evals.made import Draw, Made
from evals.series import Part, Plan
from evals.truth import Place


def make(case: Case, draw: Draw) -> Made:
    """A data-parallel job; the search has a frame of its own."""
    rng = draw.random()
    seconds, onset = rng.uniform(0.1, 0.5), rng.randrange(100, 300)
    file, line = rng.choice(("recorder.py", "checkpointing.py", "train.py")), rng.randrange(20, 200)
    scan = f"{file}({line}): {rng.choice(('find', 'lookup', 'is_known'))}"

    def parts(step: int, rank: int) -> list[Part]:
        searches = Part(scan, seconds * (0.001 + draw.effect * max(step - onset, 0)), "python")
        return [searches, *series.host_step(seconds, draw.shape)]

    # On hosts alone: a device would have the search hidden behind its queue, or by a synchronisation before it.
    plan = Plan(num_steps=onset + 600, parts=parts, has_device=False)
    told = series.watched(plan, draw.seed)
    return series.made(case, plan, told, places=[Place(file=file, first=line, last=line)])
