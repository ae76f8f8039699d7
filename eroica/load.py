"""How much a rank had to do in each step, as its operators tell, and what of a step's length follows from that.

Uneven work shows in every function that does it, be it operators, Python around them or waits for a device, while each
function alone tells no size. So the steps of one rank are compared with each other: where its own time rises and falls
with the sizes (else the number) of its operators, and by about as much, the work makes the difference. Used by
`pattern`.

Wrong where something else happens in just those steps that have more operators, and costs about as much as they do.
"""

from __future__ import annotations

import numpy as np

from eroica.collectives import Float64s
from eroica.critical_path import Iterations
from eroica.trace import Category, Trace

FEW_STEPS = 8
"""Fewer steps than this show no connection."""
FOLLOWS = 0.5
"""Share of the scatter of own time that the load must explain, as the square of their correlation."""
VARIES = 0.05
"""A load that never lies so far above its median, as a share of it, explains nothing."""
MOST_ELASTIC = 4.0
"""Own time may rise by so many times the share by which the load does: attention costs the square of a length, of which
its operators tell less. More than that is not what these operators cost (a log line, a save)."""


def load_of(trace: Trace, iterations: Iterations) -> tuple[Float64s, bool]:
    """(I,) Elements of all inputs of a step's operators, where they are told (True), else how many operators it has."""
    is_operator = trace.category == Category.CPU_OP
    is_operator[trace.collectives.event] = False
    rows = np.flatnonzero(is_operator)
    bounds = iterations.bounds_ns
    step = np.searchsorted(bounds, trace.ts_ns[rows], side="right") - 1
    inside = (step >= 0) & (step < iterations.count)
    rows, step = rows[inside], step[inside]
    work = trace.work[rows]
    weights = np.maximum(work, 0).astype(np.float64) if len(rows) and (work >= 0).mean() >= 0.5 else None
    return np.bincount(step, weights=weights, minlength=iterations.count).astype(np.float64), weights is not None


def explained_by_load(own_s: Float64s, load: Float64s, is_sized: bool) -> Float64s:
    """(I,) Share of each step's excess of own time, 0..1, that its load explains; 0 = none. NaN where the load does not
    vary or the steps are too few to tell, and where a mere number of operators (not `is_sized`) explains nothing: their
    sizes might."""
    nothing = np.full(len(own_s), np.nan)
    if len(own_s) < FEW_STEPS or len(load) != len(own_s):
        return nothing
    usual, usual_s = float(np.median(load)), float(np.median(own_s))
    more, longer_s = load - usual, own_s - usual_s
    if usual <= 0 or usual_s <= 0 or float(more.max()) < VARIES * usual:
        return nothing
    if not own_s.std():
        return nothing
    correlation = float(np.corrcoef(load, own_s)[0, 1])
    slope = correlation * float(own_s.std()) / float(load.std())
    if correlation <= 0 or correlation**2 < FOLLOWS or slope * usual > MOST_ELASTIC * usual_s:
        return np.zeros(len(own_s)) if is_sized else nothing
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(longer_s > 0, np.clip(slope * more / longer_s, 0.0, 1.0), np.nan)
