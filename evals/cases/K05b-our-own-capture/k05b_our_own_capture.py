"""All ranks take longer for everything while they write what an earlier window captured, and the window says so."""

from __future__ import annotations

from eroica.context import Context, PhaseRecord, Series
from eroica.pattern import stack, summarize
from evals.catalogue import Case
from evals.made import Draw, Made, of_cluster
from evals.synth import cluster


def make(case: Case, draw: Draw) -> Made:
    """A data-parallel job."""
    random = draw.random()
    ranks = range(case.recipe.ranks)
    made = cluster(
        "everything_slower", world_size=case.recipe.ranks, effect=draw.effect, seed=draw.seed, base=draw.shape
    )
    past = stack([summarize(trace, samples) for trace, samples in made.baseline()])
    window = stack([summarize(trace, samples) for trace, samples in made.traces()])
    first = int(window.steps[0])
    onset = first - 40
    before = tuple(range(onset - 100, first))
    healthy_s, slow_s = made.healthy_iteration_s, made.iteration_s
    seconds = tuple((slow_s if at >= onset else healthy_s) * random.uniform(0.99, 1.01) for at in before)
    # Written from the onset on, to the end of the window and beyond, on each rank.
    num_slow = 40 + len(window.steps) + random.randrange(5, 30)
    context = Context(
        trigger="slowdown",
        baseline=past,
        onset=onset,
        series=[Series(rank, before, seconds) for rank in ranks],
        phases=[PhaseRecord(rank, "capture", onset, num_slow * slow_s) for rank in ranks],
    )
    return of_cluster(case, made, context)
