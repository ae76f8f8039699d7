"""How much longer calls of a kind take than in the healthy window: all of them alike, or one function alone.

All kernels alike are a device that runs slower, whatever it computes; one function alone is what it is given. Per call
and of the middle of the ranks, for jobs in which all ranks are longer alike. Used by `levels`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eroica.collectives import Float64s
from eroica.critical_path import Activity
from eroica.pattern import Stacked

SHARED = 0.9
"""Share of the time, then and now, in functions that both windows have; below, the program is another one."""
AS_OFTEN = 0.05
"""Part by which the number of calls may differ."""
ALIKE = 0.9
"""Share of the time in functions that are longer by at least half of, and at most twice, what all are."""
APART = 4.0
"""Times what the others are longer that one function alone is."""
LEAST = 0.02
"""A call is longer by at least this part."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Calls of one kind against the healthy window. K functions that both windows have."""

    columns: tuple[int, ...]
    """(K,) Of the window."""
    factor: Float64s
    """(K,) What a call takes by what it took."""
    usual_s: Float64s
    """(K,) Per iteration, in the healthy window."""
    calls: Float64s
    """(K,) Calls of an iteration by what they were."""
    work: Float64s
    """(K,) Work of a call by what it was; NaN where it does not tell."""
    shared: float
    """Share of the time in these functions, in the window that has less of them."""

    @property
    def whole(self) -> float:
        """What all calls take by what they took."""
        return float(self.factor @ self.usual_s / self.usual_s.sum())

    def is_of_all(self) -> bool:
        """All functions take longer, by about as much, for as many calls of as much work."""
        rise = self.whole - 1
        if self.shared < SHARED or rise < LEAST or len(self.columns) < 2 or self._has_more_work(rise):
            return False
        alike = (self.factor - 1 >= 0.5 * rise) & (self.factor - 1 <= 2 * rise) & (abs(self.calls - 1) <= AS_OFTEN)
        return float(self.usual_s[alike].sum()) >= ALIKE * float(self.usual_s.sum())

    def of_one(self, column: int | None) -> tuple[float, float] | None:
        """What a call of this function takes by what it took, and the same of all others; None if it is not it alone
        that is longer, for as many calls of as much work."""
        if column not in self.columns or len(self.columns) < 2:
            return None
        at = self.columns.index(column)
        rest = np.arange(len(self.columns)) != at
        factor, others_s = float(self.factor[at]), float(self.usual_s[rest].sum())
        if others_s <= 0 or abs(self.calls[at] - 1) > AS_OFTEN or self.work[at] - 1 > 0.25 * (factor - 1):
            return None
        others = float(self.factor[rest] @ self.usual_s[rest]) / others_s
        return (factor, others) if factor - 1 >= max(APART * (others - 1), LEAST) else None

    def _has_more_work(self, rise: float) -> bool:
        told = np.isfinite(self.work)
        return bool(told.any()) and float(np.median(self.work[told])) - 1 > 0.25 * rise


def growth_of(stacked: Stacked, baseline: Stacked, activity: Activity) -> Growth | None:
    """Functions of one activity against the healthy window; None if the windows share none that tells its calls."""
    known = {f: k for k, f in enumerate(baseline.functions) if f.activity == activity}
    now, then = (np.median(of.beta * of.iteration_s[:, None], axis=0) for of in (stacked, baseline))
    often, usually = (np.median(np.nan_to_num(of.count), axis=0) for of in (stacked, baseline))
    pairs = [(k, known[f]) for k, f in enumerate(stacked.functions) if f in known]
    pairs = [(k, b) for k, b in pairs if min(now[k], then[b], often[k], usually[b]) > 0]
    if not pairs:
        return None
    mine, theirs = (np.array(side, np.intp) for side in zip(*pairs, strict=True))
    whole_s = [sum(s[k] for k, f in enumerate(of.functions) if f.activity == activity)
               for of, s in ((stacked, now), (baseline, then))]  # fmt: skip
    calls = often[mine] / usually[theirs]
    with np.errstate(divide="ignore", invalid="ignore"):
        work = np.array([_middle(stacked.work[:, k]) / _middle(baseline.work[:, b]) for k, b in pairs]) / calls
    return Growth(
        tuple(mine.tolist()),
        np.asarray(now[mine] / then[theirs] / calls, np.float64),
        np.asarray(then[theirs], np.float64),
        np.asarray(calls, np.float64),
        np.where(np.isfinite(work), work, np.nan),
        float(min(now[mine].sum() / whole_s[0], then[theirs].sum() / whole_s[1])),
    )


def _middle(values: Float64s) -> np.float64:
    told = values[np.isfinite(values)]
    return np.float64(np.median(told)) if len(told) else np.float64(np.nan)
