"""A healthy window that somebody asked for, and before it one fetch of minutes on one rank, which all waited for.

Silence is not enough here: a note must tell how long it was, at which step, on which rank, and that it came once.
"""

from __future__ import annotations

from eroica.context import Context, PhaseRecord, Series
from evals.catalogue import Case, CaseError
from evals.made import Draw, Made, of_cluster
from evals.synth import cluster


def make(case: Case, draw: Draw) -> Made:
    """A data-parallel job."""
    random = draw.random()
    rank, step, long_s = random.randrange(case.recipe.ranks), random.randrange(60, 200), random.uniform(60, 400)
    made = cluster("healthy", world_size=case.recipe.ranks, seed=draw.seed, base=draw.shape)
    steps = tuple(range(20, 260))
    usual_s = made.iteration_s
    seconds = tuple(usual_s * random.uniform(0.98, 1.02) + (long_s if at == step else 0.0) for at in steps)
    context = Context(
        trigger="manual",
        series=[Series(r, steps, seconds) for r in range(case.recipe.ranks)],
        phases=[PhaseRecord(rank, "fetch", step, long_s)],
    )
    result = of_cluster(case, made, context)
    wanted = (f"step {step}", f"rank {rank}", "once")
    notes = result.diagnoses[0].coverage.notes
    if not any(all(word in note for word in wanted) for note in notes):
        raise CaseError(f"nothing is said of the fetch of {long_s:.0f} s at {' on '.join(wanted[:2])}: {notes}")
    return result
