"""Excess of single steps: a delay that moves over ranks, comes back on one rank every few steps, or hits all at once.

The first has no culprit rank; its cause is the variance itself and the function that varies (garbage collection, uneven
data). The ranks that happened to be late in a window are not named. Nor are they where all stop in the same steps: they
share what they do there (a save, the start of an epoch), and who is done last is chance. Used by `diagnosis`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from eroica.blame import HOST_CROWDED_EFFECT, HOST_SPREAD_FLOOR, SPREAD_FLOOR, Excess, is_host_only
from eroica.causes import ON_THE_CPU, STARVATION_EXPLAINS, TUNING, WORK_EXPLAINS, Cause, cause_of, crowding
from eroica.collectives import Float64s
from eroica.context import SLOW_STEP, PhaseRecord, Recurrence
from eroica.critical_path import Activity
from eroica.localization import EFFECT_FLOOR, Roles, family_quantile, lower_quartile, nan_median
from eroica.names import ENGINE_WAIT_NAME, Phase
from eroica.pattern import Function, Stacked
from eroica.utilisation import MU_SOURCES

HOST_COVERAGE = 0.6
"""On CPU jobs one function must hold this share of the excess of single steps."""
JITTER_EFFECT = 0.20
"""And single steps in which ordinary functions take up to three times as long are the host's jitter below this
share."""
FEW_ROTATING = 3
"""Steps that make a rotating excess; one or two are hiccups, unless the series says that they recur."""
ONE_RANK = 0.8
"""Share of the excess that one rank must hold to be named."""
OF_QUARTER = 4.0
"""Times what the quarter of the cells that lie nearest to what is usual for their rank stays below: the noise of single
steps, 1.6 standard deviations of even noise, since that of hosts is none. Half of the cells may be hit, and then the
median is no noise."""
NOTED_COVERAGE = 0.6
"""Share of the excess that the ranks' own records must cover to be its cause."""
MOST_EVALUATED = 1 / 3
"""Share of the steps of a window: a teacher that is switched to evaluation in each step is no evaluation."""
MOST_TOGETHER = 0.8
"""Share of the ranks that must do the same thing for longer in a step, to call it all."""
TOGETHER = 0.2
"""Part of the longest rank's excess that a quarter of the ranks at most may stay below: served one after the other, the
first ranks at a full server wait least."""
_TOGETHER = frozenset(
    {Activity.INPUT, Activity.CHECKPOINT, Activity.COMPILE, Activity.GC, Activity.ALLOCATOR, Activity.PYTHON}
)
"""What ranks do in step; operators that take longer everywhere in a step are a busy host's."""
_UNFAKED = frozenset({Activity.COMPILE})
"""What a step need not be half as long again for: no host's jitter makes all ranks prepare code anew, and no job means
to. A save or a collection of all ranks in one step is mostly meant."""
FEW_ANEW = 2
"""Stretches of steps in which all ranks do. One is the first steps, or a change of the job."""
_ONE_THING = frozenset({Activity.CHECKPOINT, Activity.COMPILE, Activity.GC, Activity.ALLOCATOR, Activity.SYNC})
_NOTED_CAUSES = {
    "gc": ("host_gc", "garbage collections"),
    "checkpoint": ("checkpoint_io", "a save or a load"),
    "compile": ("recompilation", "compilation"),
}


def rotating_excess(
    stacked: Stacked,
    roles: Roles,
    iteration_s: float,
    stable: Sequence[Excess],
    recurrence: Recurrence | None = None,
    phases: Sequence[PhaseRecord] = (),
    common: npt.NDArray[np.bool_] | None = None,
) -> Excess | None:
    """Excess of single steps that moves over ranks, or comes back on one rank every few steps; None if there is none.

    A window may hold one such step only: with `recurrence`, what the series of iterations says, that is enough.
    `phases` are the ranks' own records of what they did. `common`: (I,) steps in which all were hit (`common_peaks`).

    Peaks of what a `stable` root does too much of anyway belong to that finding. Where no own work peaks, idle time
    may: a hole that no event covers, which names no function and is a hypothesis at most.
    """
    if stacked.own_s.shape[1] < 4 or len(stacked) < 2:
        return None
    evaluated = _evaluated(stacked, phases)
    if common is not None:
        evaluated = evaluated | common
    over = np.where(evaluated, np.nan, _peaks(stacked.own_s, roles))
    kind = np.array([int(f.activity) for f in stacked.functions] + [-1])[stacked.top_function]
    for excess in stable:
        over[excess.ranks] = np.where(kind[excess.ranks] == excess.activity, np.nan, over[excess.ranks])
    cells, mean_s = _moving(stacked, over, iteration_s, recurrence)
    if len(cells):
        return _of_functions(stacked, roles, over, cells, mean_s, iteration_s, recurrence, phases)
    if is_host_only(stacked) or stable:
        return None
    idle = np.where(
        evaluated, np.nan, _peaks(stacked.length_s - stacked.own_s - stacked.exposed_s - stacked.waiting_s, roles)
    )
    # Late because of it: the others wait in these steps and this rank does not.
    late = -_peaks(stacked.exposed_s + stacked.waiting_s, roles)
    cells, mean_s = _moving(stacked, np.where(late >= 0.5 * idle, idle, 0.0), iteration_s)
    if not len(cells):
        return None
    cause = Cause("unknown", False, "no event covers this time on the ranks that the others wait for", ())
    share = len(np.unique(cells[:, 1])) / stacked.own_s.shape[1]
    return Excess(np.empty(0, np.intp), "rotating", "rotating", None, None, mean_s, 0.0, share, cause)


def common_peaks(
    stacked: Stacked,
    iteration_s: float,
    recurrence: Recurrence | None = None,
    phases: Sequence[PhaseRecord] = (),
) -> tuple[Excess | None, npt.NDArray[np.bool_]]:
    """Single steps in which all ranks do the same thing for long, and which steps (I,) these are.

    As with what moves, a few such steps must be there, or the series must say that they recur.
    """
    own = stacked.own_s
    none = np.zeros(own.shape[1], bool)
    if own.shape[1] < 4 or len(stacked) < 2:
        return None, none
    over = own - nan_median(own, axis=1, keepdims=True)
    most = np.nanmax(np.where(np.isfinite(over), over, -np.inf), axis=0)
    few = lower_quartile(over, axis=0)
    length = nan_median(stacked.length_s, axis=1)
    kinds = np.append(_kinds(stacked), -1)[stacked.top_function]
    noise = max(1.4826 * float(np.nanmedian(np.abs(over))), SPREAD_FLOOR * iteration_s)
    least_s = max(3 * EFFECT_FLOOR * iteration_s, family_quantile(own.shape[1]) * noise)
    hit, is_unfaked = [], True
    for i in np.flatnonzero(~_evaluated(stacked, phases)):
        counts = np.bincount(kinds[kinds[:, i] >= 0, i], minlength=len(Activity))
        kind = Activity(int(counts.argmax()))
        if counts[kind] < MOST_TOGETHER * len(stacked) or kind not in _TOGETHER:
            continue
        long_s = least_s if kind in _UNFAKED else (SLOW_STEP - 1) * float(np.median(length))
        if most[i] >= long_s and few[i] >= TOGETHER * most[i]:
            hit.append(i)
            is_unfaked = is_unfaked and kind in _UNFAKED
    together = none.copy()
    together[hit] = True
    if len(hit) < FEW_ROTATING and not (is_unfaked and int((np.diff(hit) > 1).sum()) + 1 >= FEW_ANEW):
        known = recurrence.steps if recurrence is not None else np.empty(0, np.int64)
        hit = [i for i in hit if int(stacked.steps[i]) in known]
    mean_s = float(most[hit].sum()) / own.shape[1]
    if not hit or mean_s < 2 * EFFECT_FLOOR * iteration_s:
        return None, together
    cells = np.argwhere(np.isfinite(over) & np.isin(np.arange(own.shape[1]), hit))
    held = np.zeros(len(stacked.functions))
    total = float(np.maximum(over[cells[:, 0], cells[:, 1]], 0.0).sum())
    for w, i in cells:
        if stacked.top_function[w, i] >= 0:
            held[stacked.top_function[w, i]] += min(float(stacked.top_excess_s[w, i]), max(float(over[w, i]), 0.0))
    named, covered = _heaviest(stacked, held)
    # A search for kernels has many functions, and each step tells of one.
    if named is None or (covered < HOST_COVERAGE * total and not is_unfaked):
        return None, none
    activity = stacked.functions[named].activity
    everyone = np.arange(len(stacked), dtype=np.intp)
    cause, advice = _shared_cause(stacked, stacked.functions[named], cells, total, phases), ""
    if activity == Activity.INPUT and _are_noted(stacked, cells, phases, "workers"):
        cause = Cause(
            "input_pipeline", True,
            "in these steps the ranks start the worker processes of a loader anew, as at the begin of each epoch",
            ("storage: the other steps get their batches in time",),
        )  # fmt: skip
        # It is the loader that takes long, whichever way of waiting for its workers was seen most.
        named = next((k for k, f in enumerate(stacked.functions) if _is_loader(f)), named)
        advice = (
            "Keep the workers from one epoch to the next (persistent_workers=True), or make what they do at their "
            "start cheaper (worker_init_fn, the data set's __init__, opening files)."
        )
    return (
        Excess(
            *(everyone, "all", _spacing(stacked.steps[hit], recurrence), activity, named, mean_s),
            *(min(covered / total, 1.0), len(hit) / own.shape[1], cause),
            advice=advice,
        ),
        together,
    )


def _is_loader(function: Function) -> bool:
    return function.activity == Activity.INPUT and "DataLoader" in function.name


def _shared_cause(
    stacked: Stacked,
    function: Function,
    cells: npt.NDArray[np.intp],
    total_s: float,
    phases: Sequence[PhaseRecord],
) -> Cause:
    noted = _noted(stacked, cells, total_s, phases)
    if noted is None:
        everyone = np.arange(len(stacked), dtype=np.intp)
        noted = cause_of(stacked, function.activity, everyone, everyone, float("inf"), function.phase)
    ruled = (*noted.ruled_out, "a single rank: all do it at once, and who is done last changes nothing")
    because = noted.because
    if noted.cause == "checkpoint_io":
        because += "; all ranks do so in the same steps, so what they share is the storage"
    return replace(noted, because=because, ruled_out=ruled)


def _are_noted(stacked: Stacked, cells: npt.NDArray[np.intp], phases: Sequence[PhaseRecord], kind: str) -> bool:
    """Most of these cells have a record of this kind, however short: what it began may last beyond it."""
    wanted = {(int(stacked.ranks[w]), int(stacked.steps[i])) for w, i in cells}
    seen = {(r.rank, r.step) for r in phases if r.kind == kind}
    return len(wanted & seen) >= MOST_TOGETHER * len(wanted)


def _evaluated(stacked: Stacked, phases: Sequence[PhaseRecord]) -> npt.NDArray[np.bool_]:
    """(I,) Steps with an evaluation in them: long for a reason that needs no diagnosis, and ranks that evaluate
    differ from each other for as many. Not those with a save as well, and none where evaluating is a part of training.

    An evaluation that no rank notes, since its code switches no module to it, is not seen here.
    """
    noted = {kind: {r.step for r in phases if r.kind == kind} for kind in ("evaluation", "checkpoint")}
    steps = np.isin(stacked.steps, sorted(noted["evaluation"] - noted["checkpoint"]))
    return steps if steps.mean() <= MOST_EVALUATED else np.zeros_like(steps)


def _peaks(values: Float64s, roles: Roles) -> Float64s:
    """(W, I) Each cell above its role in that step and above what is usual for that rank; NaN without peers."""
    over = np.full(values.shape, np.nan)
    for role in range(len(roles.names)):
        members = roles.members(role)
        if len(members) > 1:
            # A quarter up from below: in a step that hits half of the ranks the median is nobody's usual length, nor
            # is it on a rank that half of the steps hit.
            level = values[members] - lower_quartile(values[members], axis=0)
            over[members] = level - lower_quartile(level, axis=1, keepdims=True)
    return over


def _moving(
    stacked: Stacked, over: Float64s, iteration_s: float, recurrence: Recurrence | None = None
) -> tuple[npt.NDArray[np.intp], float]:
    """Cells (row, step) that stick out, and what they cost per iteration; no cells where that is a hiccup or noise."""
    none = np.empty((0, 2), np.intp)
    seen = over[np.isfinite(over)]
    if not len(seen):
        return none, 0.0
    noise = max(
        OF_QUARTER * float(np.quantile(np.abs(seen), 0.25)),
        (HOST_SPREAD_FLOOR if is_host_only(stacked) else SPREAD_FLOOR) * iteration_s,
    )
    limit = max(3 * EFFECT_FLOOR * iteration_s, family_quantile(len(seen)) * noise)
    cells = np.argwhere(np.nan_to_num(over) > limit)
    hit = np.unique(cells[:, 1])
    if len(hit) < FEW_ROTATING:
        known = recurrence.steps if recurrence is not None else np.empty(0, np.int64)
        cells = cells[np.isin(stacked.steps[cells[:, 1]], known)]
        hit = np.unique(cells[:, 1])
        if not len(hit):
            return none, 0.0
    per_step = np.nanmax(np.where(np.isfinite(over), over, 0.0), axis=0)
    mean_s = float(per_step[hit].sum()) / over.shape[1]
    return (cells, mean_s) if mean_s >= 2 * EFFECT_FLOOR * iteration_s else (none, 0.0)


def _of_functions(
    stacked: Stacked,
    roles: Roles,
    over: Float64s,
    cells: npt.NDArray[np.intp],
    mean_s: float,
    iteration_s: float,
    recurrence: Recurrence | None,
    phases: Sequence[PhaseRecord],
) -> Excess | None:
    """The excess of these cells with the function that holds most of it; None if it is a busy host's jitter."""
    hit = np.unique(cells[:, 1])
    num_steps = over.shape[1]
    excess_s = over[cells[:, 0], cells[:, 1]]
    total = float(excess_s.sum())
    functions = stacked.top_function[cells[:, 0], cells[:, 1]]
    held = np.zeros(len(stacked.functions))
    for (w, i), function in zip(cells, functions, strict=True):
        if function >= 0:
            held[function] += min(float(stacked.top_excess_s[w, i]), float(over[w, i]))
    named, coverage = _heaviest(stacked, held)
    coverage = min(coverage / total, 1.0)
    activity = stacked.functions[named].activity if named is not None else None
    if named is not None and ENGINE_WAIT_NAME in stacked.functions[named].name:
        return None  # code of the autograd engine that leaves no event: nothing that could be named
    # Preemption on a busy host hits any function; a cause hits one.
    if (
        is_host_only(stacked)
        and (named is None or coverage < HOST_COVERAGE or _is_jitter(stacked, named, cells))
        and mean_s < JITTER_EFFECT * iteration_s
    ):
        return None
    noted = _noted(stacked, cells, total, phases)
    if noted is not None:
        cause = noted
    elif activity is None or named is None:
        cause = Cause("unknown", False, "no named function holds the excess of these steps", ())
    else:
        cause = _rotating_cause(stacked, activity, cells, total, stacked.functions[named].phase)
    if cause.cause == "cpu_contention" and is_host_only(stacked) and mean_s < HOST_CROWDED_EFFECT * iteration_s:
        return None  # as much as other programs take from any rank of a busy host
    by_rank = np.bincount(cells[:, 0], weights=excess_s, minlength=len(stacked))
    steps_hit = int((cells[:, 0] == by_rank.argmax()).sum())
    if by_rank.max() >= ONE_RANK * total:
        if steps_hit < FEW_ROTATING and recurrence is None:
            return None  # a hiccup or two, and noise beside it
        culprit = np.array([by_rank.argmax()], np.intp)
        if noted is None and cause.cause == "sync_amplification" and activity is not None:
            # That is what changing ranks do to each other; one that is late again and again has a cause of its own.
            peers = np.setdiff1d(roles.members(int(roles.of[culprit[0]])), culprit)
            cause = cause_of(stacked, activity, culprit, peers, mean_s, Phase.NONE)
        steps = _spacing(stacked.steps[cells[cells[:, 0] == culprit[0], 1]], recurrence)
        return Excess(culprit, "rank", steps, activity, named, mean_s, coverage, len(hit) / num_steps, cause)
    return Excess(
        np.empty(0, np.intp), "rotating", "rotating", activity, named, mean_s, coverage, len(hit) / num_steps, cause
    )


def _heaviest(stacked: Stacked, held: Float64s) -> tuple[int | None, float]:
    """The function that holds most of `held`, seconds per function, and how much it and its like hold.

    What preemption does not fake (a collection, a save, the compiler, a search with the kernels that it tries) is one
    thing wherever it happens; operators and Python are each their own.
    """
    if not held.any():
        return None, 0.0
    kinds = _kinds(stacked)
    groups = [np.flatnonzero(kinds == kind) for kind in sorted(set(kinds.tolist())) if Activity(kind) in _ONE_THING]
    groups += [np.array([k]) for k in np.flatnonzero(held) if Activity(int(kinds[k])) not in _ONE_THING]
    best = max(groups, key=lambda columns: float(held[columns].sum()))
    return int(best[held[best].argmax()]), float(held[best].sum())


def _spacing(seen: npt.NDArray[np.int64], recurrence: Recurrence | None) -> str:
    """ "every N", by the series where it is told, else by the steps in the window; "rotating" without one period."""
    if recurrence is not None and recurrence.period is not None:
        return f"every {recurrence.period}"
    spacing = np.diff(np.sort(seen))
    return f"every {int(np.median(spacing))}" if len(spacing) and np.median(spacing) > 1 else "rotating"


def _noted(
    stacked: Stacked, cells: npt.NDArray[np.intp], total_s: float, phases: Sequence[PhaseRecord]
) -> Cause | None:
    """The cause that the ranks' own records give these cells, if one kind of record covers most of their excess."""
    wanted = {(int(stacked.ranks[w]), int(stacked.steps[i])) for w, i in cells}
    covered: dict[str, float] = {}
    for record in phases:
        if (record.rank, record.step) in wanted and record.kind in _NOTED_CAUSES:
            covered[record.kind] = covered.get(record.kind, 0.0) + record.duration_s
    kind = max(covered, key=lambda k: covered[k], default=None)
    if kind is None or covered[kind] < NOTED_COVERAGE * total_s:
        return None
    cause, what = _NOTED_CAUSES[kind]
    return Cause(cause, True, f"in these steps these ranks noted {what}, as long as the excess", ())


def _kinds(stacked: Stacked) -> npt.NDArray[np.int64]:
    """(F,) Of each function its activity, a search for kernels for what it is: preparing code, whatever runs in it."""
    return np.array(
        [int(Activity.COMPILE if f.phase == Phase.TUNING else f.activity) for f in stacked.functions], np.int64
    )


def _is_jitter(stacked: Stacked, function: int, cells: npt.NDArray[np.intp]) -> bool:
    """The function is there in every step and its peaks are no more than twice its usual time on top."""
    usual = float(np.median(stacked.beta[:, function] * stacked.iteration_s))
    peaks = [float(stacked.top_excess_s[w, i]) for w, i in cells if stacked.top_function[w, i] == function]
    return float(np.median(peaks)) < 2 * usual if peaks else True


def _waited_s(stacked: Stacked, activity: Activity, rows: npt.NDArray[np.intp]) -> float:
    """Seconds of the window that these ranks can have waited for a core in an activity, at most."""
    columns = np.flatnonzero([f.activity == activity for f in stacked.functions])
    cells = np.ix_(rows, columns)
    granted = np.where(stacked.mu_source[cells] == MU_SOURCES.index("cpu_granted"), stacked.mu[cells], np.nan)
    spent_s = stacked.beta[cells] * stacked.iteration_s[rows, None] * stacked.own_s.shape[1]
    return float((spent_s * (1 - np.nan_to_num(granted, nan=0.0))).sum())


ALL_HAVE_IT = 0.5
"""Share of the other ranks that have more work in a step as well, and share of the excess that it makes on them: then
the step is of another kind, and work is not what sets one rank apart."""


def _is_work_of_all(stacked: Stacked, cells: npt.NDArray[np.intp]) -> bool:
    """In most of these cells the other ranks have more of the same work than usual, too, and so they have not in any
    step: generation and training by turns differ in work from step to step, not from rank to rank."""
    has_more = np.nan_to_num(stacked.top_by_work) >= WORK_EXPLAINS
    told, anyway = [], []
    for w, i in cells:
        others = np.arange(len(stacked)) != w
        alike = (
            has_more[others]
            & (stacked.top_function[others] == stacked.top_function[w, i])
            & (stacked.top_excess_s[others] >= ALL_HAVE_IT * stacked.top_excess_s[w, i])
        )
        told.append(float(alike[:, i].mean()))
        anyway.append(float(alike.mean()))
    # Midway from what chance would give to all of them.
    return float(np.mean(told)) >= max(ALL_HAVE_IT, (1 + float(np.mean(anyway))) / 2)


def _rotating_cause(
    stacked: Stacked, activity: Activity, cells: npt.NDArray[np.intp], total_s: float, phase: Phase
) -> Cause:
    if phase == Phase.TUNING:
        return TUNING
    by_work, more_s = (of[cells[:, 0], cells[:, 1]] for of in (stacked.top_by_work, stacked.top_excess_s))
    told = np.isfinite(by_work) & (more_s > 0)
    # Where many cells stick out, those by a little are noise, which no work explains.
    share = float(np.average(by_work[told], weights=more_s[told])) if told.any() else float("nan")
    if (
        activity in (Activity.COMPUTE, Activity.OPERATOR, Activity.MEMORY, Activity.PYTHON)
        and share >= WORK_EXPLAINS
        and not _is_work_of_all(stacked, cells)
    ):
        return Cause(
            "load_imbalance",
            True,
            f"these ranks had more work in these steps: it explains {share:.0%} of the longer time",
            (),
        )
    same_work = ("load_imbalance: the work of these steps is the usual",) if told.any() else ()
    if activity in ON_THE_CPU:
        rows = np.unique(cells[:, 0]).astype(np.intp)
        crowded = crowding(stacked, rows)
        # A read that sleeps is no shorter with a core of its own.
        if crowded and _waited_s(stacked, activity, rows) >= STARVATION_EXPLAINS * total_s:
            return Cause("cpu_contention", True, crowded, same_work)
    if activity in (Activity.COMPUTE, Activity.OPERATOR, Activity.LAUNCH):
        return Cause(
            "sync_amplification",
            False,
            "delays of changing ranks, in the same functions, add up at each synchronisation",
            same_work,
        )
    everyone = np.arange(len(stacked), dtype=np.intp)
    return cause_of(stacked, activity, np.unique(cells[:, 0]).astype(np.intp), everyone, float("inf"), Phase.NONE)
