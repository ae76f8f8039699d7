"""Excess of single steps: a delay that moves over ranks, or comes back on one rank every few steps.

Such an excess has no culprit rank; its cause is the variance itself and the function that varies (garbage collection,
uneven data). The ranks that happened to be late in a window are not named. Used by `diagnosis`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from eroica.blame import HOST_SPREAD_FLOOR, SPREAD_FLOOR, Excess, is_host_only
from eroica.causes import WORK_EXPLAINS, Cause, cause_of
from eroica.collectives import Float64s
from eroica.critical_path import Activity
from eroica.localization import EFFECT_FLOOR, Roles, family_quantile, nan_median
from eroica.names import Phase
from eroica.pattern import Stacked

HOST_COVERAGE = 0.6
"""On CPU jobs one function must hold this share of the excess of single steps."""
JITTER_EFFECT = 0.20
"""And single steps in which ordinary functions take up to three times as long are the host's jitter below this
share."""
FEW_ROTATING = 3
"""Cells that make a rotating excess; one or two are hiccups."""


def rotating_excess(stacked: Stacked, roles: Roles, iteration_s: float, stable: Sequence[Excess]) -> Excess | None:
    """Excess of single steps that moves over ranks, or comes back on one rank every few steps; None if there is none.

    Peaks of what a `stable` root does too much of anyway belong to that finding. Where no own work peaks, idle time
    may: a hole that no event covers, which names no function and is a hypothesis at most.
    """
    if stacked.own_s.shape[1] < 4 or len(stacked) < 2:
        return None
    over = _peaks(stacked.own_s, roles)
    kind = np.array([int(f.activity) for f in stacked.functions] + [-1])[stacked.top_function]
    for excess in stable:
        over[excess.ranks] = np.where(kind[excess.ranks] == excess.activity, np.nan, over[excess.ranks])
    cells, mean_s = _moving(stacked, over, iteration_s)
    if len(cells):
        return _of_functions(stacked, over, cells, mean_s, iteration_s)
    if is_host_only(stacked) or stable:
        return None
    idle = _peaks(stacked.length_s - stacked.own_s - stacked.exposed_s - stacked.waiting_s, roles)
    # Late because of it: the others wait in these steps and this rank does not.
    late = -_peaks(stacked.exposed_s + stacked.waiting_s, roles)
    cells, mean_s = _moving(stacked, np.where(late >= 0.5 * idle, idle, 0.0), iteration_s)
    if not len(cells):
        return None
    cause = Cause("unknown", False, "no event covers this time on the ranks that the others wait for", ())
    share = len(np.unique(cells[:, 1])) / stacked.own_s.shape[1]
    return Excess(np.empty(0, np.intp), "rotating", "rotating", None, None, mean_s, 0.0, share, cause)


def _peaks(values: Float64s, roles: Roles) -> Float64s:
    """(W, I) Each cell above its role in that step and above what is usual for that rank; NaN without peers."""
    over = np.full(values.shape, np.nan)
    for role in range(len(roles.names)):
        members = roles.members(role)
        if len(members) > 1:
            level = values[members] - nan_median(values[members], axis=0)
            over[members] = level - nan_median(level, axis=1, keepdims=True)
    return over


def _moving(stacked: Stacked, over: Float64s, iteration_s: float) -> tuple[npt.NDArray[np.intp], float]:
    """Cells (row, step) that stick out, and what they cost per iteration; no cells where that is a hiccup or noise."""
    none = np.empty((0, 2), np.intp)
    seen = over[np.isfinite(over)]
    if not len(seen):
        return none, 0.0
    noise = max(
        1.4826 * float(np.median(np.abs(seen))),
        (HOST_SPREAD_FLOOR if is_host_only(stacked) else SPREAD_FLOOR) * iteration_s,
    )
    limit = max(3 * EFFECT_FLOOR * iteration_s, family_quantile(len(seen)) * noise)
    cells = np.argwhere(np.nan_to_num(over) > limit)
    hit = np.unique(cells[:, 1])
    if len(hit) < FEW_ROTATING:
        return none, 0.0
    per_step = np.nanmax(np.where(np.isfinite(over), over, 0.0), axis=0)
    mean_s = float(per_step[hit].sum()) / over.shape[1]
    return (cells, mean_s) if mean_s >= 2 * EFFECT_FLOOR * iteration_s else (none, 0.0)


def _of_functions(
    stacked: Stacked, over: Float64s, cells: npt.NDArray[np.intp], mean_s: float, iteration_s: float
) -> Excess | None:
    """The excess of these cells with the function that holds most of it; None if it is a busy host's jitter."""
    hit = np.unique(cells[:, 1])
    num_steps = over.shape[1]
    ranks, counts = np.unique(cells[:, 0], return_counts=True)
    functions = [int(stacked.top_function[w, i]) for w, i in cells]
    held = np.zeros(len(stacked.functions))
    for (w, i), function in zip(cells, functions, strict=True):
        if function >= 0:
            held[function] += min(float(stacked.top_excess_s[w, i]), float(over[w, i]))
    total = float(sum(over[w, i] for w, i in cells))
    named = int(held.argmax()) if held.any() else None
    coverage = min(float(held.max()) / total, 1.0) if named is not None else 0.0
    activity = stacked.functions[named].activity if named is not None else None
    # Preemption on a busy host hits any function; a cause hits one.
    if (
        is_host_only(stacked)
        and (named is None or coverage < HOST_COVERAGE or _is_jitter(stacked, named, cells))
        and mean_s < JITTER_EFFECT * iteration_s
    ):
        return None
    one_rank = len(ranks) == 1 or counts.max() >= 0.8 * len(cells)
    if activity is None or named is None:
        cause = Cause("unknown", False, "no named function holds the excess of these steps", ())
    else:
        cause = _rotating_cause(stacked, activity, cells)
    if one_rank:
        culprit = np.array([ranks[counts.argmax()]], np.intp)
        spacing = np.diff(np.sort(stacked.steps[cells[cells[:, 0] == culprit[0], 1]]))
        steps = f"every {int(np.median(spacing))}" if len(spacing) and np.median(spacing) > 1 else "rotating"
        return Excess(culprit, "rank", steps, activity, named, mean_s, coverage, len(hit) / num_steps, cause)
    return Excess(
        np.empty(0, np.intp), "rotating", "rotating", activity, named, mean_s, coverage, len(hit) / num_steps, cause
    )


def _is_jitter(stacked: Stacked, function: int, cells: npt.NDArray[np.intp]) -> bool:
    """The function is there in every step and its peaks are no more than twice its usual time on top."""
    usual = float(np.median(stacked.beta[:, function] * stacked.iteration_s))
    peaks = [float(stacked.top_excess_s[w, i]) for w, i in cells if stacked.top_function[w, i] == function]
    return float(np.median(peaks)) < 2 * usual if peaks else True


def _rotating_cause(stacked: Stacked, activity: Activity, cells: npt.NDArray[np.intp]) -> Cause:
    by_work = stacked.top_by_work[cells[:, 0], cells[:, 1]]
    told = by_work[np.isfinite(by_work)]
    if (
        activity in (Activity.COMPUTE, Activity.OPERATOR, Activity.MEMORY)
        and len(told)
        and np.median(told) >= WORK_EXPLAINS
    ):
        return Cause(
            "load_imbalance",
            True,
            f"these ranks had more work in these steps: it explains {np.median(told):.0%} of the longer time",
            (),
        )
    same_work = ("load_imbalance: the work of these steps is the usual",) if len(told) else ()
    if activity in (Activity.COMPUTE, Activity.OPERATOR, Activity.LAUNCH):
        return Cause(
            "sync_amplification",
            False,
            "delays of changing ranks, in the same functions, add up at each synchronisation",
            same_work,
        )
    everyone = np.arange(len(stacked), dtype=np.intp)
    return cause_of(stacked, activity, np.unique(cells[:, 0]).astype(np.intp), everyone, float("inf"), Phase.NONE)
