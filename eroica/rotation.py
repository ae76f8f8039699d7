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
from eroica.critical_path import Activity
from eroica.localization import EFFECT_FLOOR, Roles, family_quantile
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

    Peaks of what a `stable` root does too much of anyway belong to that finding.
    """
    num_ranks, num_steps = stacked.own_s.shape
    if num_steps < 4 or num_ranks < 2:
        return None
    over = np.full((num_ranks, num_steps), np.nan)
    for role in range(len(roles.names)):
        members = roles.members(role)
        if len(members) < 2:
            continue
        own = stacked.own_s[members]
        level = own - np.nanmedian(own, axis=0)
        over[members] = level - np.nanmedian(level, axis=1, keepdims=True)
    kind = np.array([int(f.activity) for f in stacked.functions] + [-1])[stacked.top_function]
    for excess in stable:
        over[excess.ranks] = np.where(kind[excess.ranks] == excess.activity, np.nan, over[excess.ranks])
    seen = over[np.isfinite(over)]
    if not len(seen):
        return None
    noise = 1.4826 * float(np.median(np.abs(seen)))
    host_only = is_host_only(stacked)
    limit = max(
        3 * EFFECT_FLOOR * iteration_s,
        family_quantile(len(seen)) * max(noise, (HOST_SPREAD_FLOOR if host_only else SPREAD_FLOOR) * iteration_s),
    )
    cells = np.argwhere(np.nan_to_num(over) > limit)
    if len(cells) < FEW_ROTATING:
        return None
    per_step = np.nanmax(np.where(np.isfinite(over), over, 0.0), axis=0)
    hit = np.unique(cells[:, 1])
    mean_s = float(per_step[hit].sum()) / num_steps
    if len(hit) < FEW_ROTATING or mean_s < 2 * EFFECT_FLOOR * iteration_s:
        return None
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
        host_only
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
