"""What a synthetic case of the catalogue is given and gives back; the ready-made way through simulated clusters.

A synthetic case's module has `make(case, draw) -> Made`: it makes a job up, calls the product's public functions on it,
and says what is true. `of_cluster` does so for faults that `evals.faults` can plant into traces; cases whose evidence
is a series of iterations, counters, or ranks that stand still make these themselves.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from eroica.context import Context
from eroica.diagnosis import diagnose
from eroica.findings import Diagnosis
from eroica.pattern import stack, summarize
from evals.baselines import Window
from evals.catalogue import Case
from evals.synth import Cluster
from evals.truth import Truth


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What varies from run to run."""

    seed: int
    effect: float
    """Cost of the fault, as a share of the healthy iteration."""
    shape: str
    """Which model; synthetic: which real trace the job is made from."""

    def random(self) -> random.Random:
        """Of the seed alone."""
        return random.Random(self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a synthetic case gives back."""

    truth: Truth
    diagnoses: tuple[Diagnosis, ...]
    """All that the product said."""
    windows: tuple[Window, ...] = ()
    """For the baselines: the traces that the product saw; () where it saw none."""


def of_cluster(case: Case, made: Cluster, context: Context | None = None) -> Made:
    """Diagnose a simulated cluster, and judge by the case's answers, one for each fault of the cluster in turn.

    context: what a live job would have added; None = the healthy past if the cluster has one, else nothing.
    """
    pairs = list(made.traces())
    if context is None:
        past = stack([summarize(trace, samples) for trace, samples in made.baseline()]) if made.case.baseline else None
        context = Context(baseline=past)
    diagnosis = diagnose(stack([summarize(trace, samples) for trace, samples in pairs]), context)
    faults = tuple(replace(fault, answer=answer) for fault, answer in zip(made.expected, case.faults, strict=True))
    truth = replace(made.truth, faults=faults, tolerated=case.tolerated)
    return Made(truth=truth, diagnoses=(diagnosis,), windows=(Window(tuple(trace for trace, _ in pairs)),))
