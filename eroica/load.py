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
VARIES = 0.2
"""An operator is uneven if in some step it has so much more to do than usually, as a share. The rest of a step, such as
the optimizer's, is the same each time and often most of it."""
MOST_ELASTIC = 4.0
"""Own time may rise by so many times the share by which the load does: attention costs the square of a length, of which
its operators tell less. More than that is not what these operators cost (a log line, a save)."""


def load_of(trace: Trace, iterations: Iterations) -> tuple[Float64s, bool]:
    """(I,) Of a step's operators, those that are uneven: the elements of all of their inputs, where these are told
    (True), else how many they are. 0 everywhere if none is uneven."""
    is_operator = trace.category == Category.CPU_OP
    is_operator[trace.collectives.event] = False
    rows = np.flatnonzero(is_operator)
    step = np.searchsorted(iterations.bounds_ns, trace.ts_ns[rows], side="right") - 1
    inside = (step >= 0) & (step < iterations.count)
    rows, step = rows[inside], step[inside]
    work = trace.work[rows]
    is_sized = len(rows) > 0 and float((work >= 0).mean()) >= 0.5
    names, name = np.unique(trace.name[rows], return_inverse=True)
    weights = np.maximum(work, 0).astype(np.float64) if is_sized else None
    each = np.bincount(
        name * iterations.count + step, weights=weights, minlength=len(names) * iterations.count
    ).reshape(len(names), iterations.count)
    # What there is in a few steps only (a log line, a metric) is another thing than more of the usual.
    usual = np.quantile(each, 0.25, axis=1, method="lower")
    uneven = (usual > 0) & (each.max(axis=1, initial=0) >= (1 + VARIES) * usual)
    return each[uneven].sum(axis=0).astype(np.float64), is_sized


def explained_by_load(own_s: Float64s, load: Float64s, is_sized: bool) -> Float64s:
    """(I,) Share of each step's excess of own time, 0..1, that its load explains; 0 = none. NaN where the load does not
    vary or the steps are too few to tell, and where a mere number of operators (not `is_sized`) explains nothing: their
    sizes might."""
    nothing = np.full(len(own_s), np.nan)
    if len(own_s) < FEW_STEPS or len(load) != len(own_s):
        return nothing
    usual, usual_s = (float(np.quantile(values, 0.25, method="lower")) for values in (load, own_s))
    more, longer_s = load - usual, own_s - usual_s
    if usual <= 0 or usual_s <= 0 or not own_s.std() or not load.std():
        return nothing
    correlation = float(np.corrcoef(load, own_s)[0, 1])
    slope = correlation * float(own_s.std()) / float(load.std())
    if correlation <= 0 or correlation**2 < FOLLOWS or slope * usual > MOST_ELASTIC * usual_s:
        return np.zeros(len(own_s)) if is_sized else nothing
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(longer_s > 0, np.clip(slope * more / longer_s, 0.0, 1.0), np.nan)
