"""Roots, not victims: which ranks did more own work than their peers, in which functions, always or in turn.

A rank is a root only if its own time exceeds its role's by the effect floor in named functions; waiting never makes a root,
and a late rank without own excess is a victim of something else. An excess that moves over ranks has no culprit rank.
Roles are compared with each other as roles. Used by `diagnosis`, which words and prices what is found here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eroica.causes import WORK_EXPLAINS, Cause, cause_of
from eroica.collectives import Float64s
from eroica.critical_path import OWN_WORK, Activity
from eroica.localization import EFFECT_FLOOR, Localization, Roles, family_quantile
from eroica.names import Phase
from eroica.pattern import Stacked

Indices = npt.NDArray[np.intp]

STEADY_SHARE = 0.6
"""A stable excess shows in at least this share of the steps."""
FELT_SHARE = 0.3
"""Part of an excess that must show in the rank's whole own time, or in what its peers wait for it."""
SPREAD_FLOOR = 0.002
"""Devices of one model differ by a few tenths of a percent; a smaller spread of own times is luck of few ranks."""
HOST_SPREAD_FLOOR = 0.015
"""The same for operators and Python on CPU jobs, where the operating system moves threads about."""
HOST_DIFFUSE_EFFECT = 0.15
"""On CPU jobs, operators that are slower all over the place name nothing that can be mended: other processes on a busy host
do that to any rank, so a small excess of this kind is not a finding."""
HOST_SINGLE_EFFECT = 0.03
"""On CPU jobs one operator or Python function must cost this share of the iteration."""
HOST_COVERAGE = 0.6
"""On CPU jobs one function must hold this share of the excess of single steps."""
JITTER_EFFECT = 0.20
"""And single steps in which ordinary functions take up to three times as long are the host's jitter below this share."""
FEW_ROTATING = 3
"""Cells that make a rotating excess; one or two are hiccups."""
PART_FLOOR = 0.25
"""A second cause of the same rank must hold this share of the rank's excess, or it is a shadow of the first."""
HEAVY_ROLE = 0.10
"""A role must do this much more own work than the median of the others, relative to the iteration, to be a finding."""

_DIFFUSE = frozenset({Activity.OPERATOR, Activity.LAUNCH, Activity.PYTHON})
"""Host time that noise of the operating system inflates."""
_REFILL = frozenset({Activity.OPERATOR, Activity.LAUNCH, Activity.PYTHON})
"""Host time that surfaces while a drained launch queue fills again: a shadow of what drained it."""
_DRAINS = frozenset({Activity.INPUT, Activity.SYNC, Activity.ALLOCATOR, Activity.CHECKPOINT, Activity.GC, Activity.COMPILE, Activity.PYTHON, Activity.MEMORY})


@dataclass(frozen=True, slots=True)
class Excess:
    """More own time than peers have, in one activity."""

    ranks: Indices
    """Row indices; empty where no rank is to blame."""
    scope: str
    steps: str
    activity: Activity | None
    """None: idle time that nothing explains."""
    function: int | None
    """Index into stacked.functions of the largest part."""
    seconds: float
    """Per iteration, median over the ranks."""
    coverage: float
    """Share of the ranks' own excess that this activity holds."""
    share_of_steps: float
    cause: Cause


def reference(own_s: Float64s, floor_s: float) -> tuple[float, Float64s]:
    """Own time of a role's healthy ranks, and each rank's excess over it. Seconds.

    The median, unless the role falls into two populations and the slower is no clear majority: then the faster one's median,
    since a median between two populations is nobody's (design section 4: the slower of two).
    """
    middle = float(np.nanmedian(own_s))
    if len(own_s) >= 2:
        ordered = np.sort(own_s[np.isfinite(own_s)])
        jumps = np.diff(ordered)
        if len(jumps):
            cut = int(jumps.argmax())
            low, high = ordered[: cut + 1], ordered[cut + 1 :]
            within = max(float(low[-1] - low[0]), float(high[-1] - high[0]), floor_s)
            if jumps[cut] > 3 * within / max(1.0, len(ordered) ** 0.5) and jumps[cut] > floor_s and len(low) >= 0.4 * len(ordered):
                middle = float(np.median(low))
    return middle, own_s - middle


def _spread(excess: Float64s) -> float:
    return float(1.4826 * np.nanmedian(np.abs(excess - np.nanmedian(excess))))


@dataclass(frozen=True, slots=True)
class Rise:
    """One rank's excess in one activity, found significant."""

    row: int
    activity: Activity
    seconds: float
    """Per iteration above the peers."""
    own_s: float
    """The rank's whole own excess."""
    share_of_steps: float


def _scale_floor(activity: Activity, host_only: bool) -> float:
    """Smallest believable spread of an activity's time over healthy ranks, as a share of the iteration."""
    if activity in _DIFFUSE:
        return HOST_SPREAD_FLOOR if host_only else SPREAD_FLOOR
    return SPREAD_FLOOR


def stable_rises(stacked: Stacked, roles: Roles, where: Localization, iteration_s: float) -> list[Rise]:
    """Ranks that always do more own work of some kind than their peers.

    Tested kind by kind, since noise in one (operators on a busy CPU) would hide a plain excess in another (input). The rank's
    whole own time must exceed its peers', or the peers must wait for it, by part of the excess: what is made up for
    elsewhere delays nobody.
    """
    found: list[Rise] = []
    floor_s = EFFECT_FLOOR * iteration_s
    host_only = is_host_only(stacked)
    seconds = stacked.activity_beta * stacked.iteration_s[:, None]
    kinds = [a for a in sorted(OWN_WORK) if float(seconds[:, a].max(initial=0.0)) > floor_s]
    k = family_quantile(len(stacked) * max(len(kinds), 1))
    waiting = stacked.exposed_s + stacked.waiting_s
    for role in range(len(roles.names)):
        members = roles.members(role)
        if len(members) < 2:
            continue
        own_excess = reference(np.nanmedian(stacked.own_s[members], axis=1), floor_s)[1]
        for activity in kinds:
            values = seconds[members, activity].astype(np.float64)
            _, excess = reference(values, floor_s)
            calm = excess <= floor_s
            spread = _spread(excess[calm]) if calm.sum() >= 3 else 0.0
            scale = max(spread, _scale_floor(activity, host_only) * iteration_s)
            limit = max(floor_s, k * scale)
            peers = np.flatnonzero(calm)
            if not len(peers):
                continue
            usual, usual_wait = np.nanmedian(stacked.own_s[members[peers]], axis=0), np.nanmedian(waiting[members[peers]], axis=0)
            for m in np.flatnonzero(excess > floor_s):
                row = int(members[m])
                rise = float(excess[m])
                single = _single_function(stacked, where, row, activity, members[peers])
                if activity in _DIFFUSE and host_only and (activity != Activity.PYTHON or single < 0.6 * rise):
                    if rise < max(limit, HOST_DIFFUSE_EFFECT * iteration_s):
                        continue
                elif rise <= limit and single < 0.6 * rise:
                    continue
                over = stacked.own_s[row] - usual
                late = usual_wait - waiting[row]
                steps = np.isfinite(over) & np.isfinite(late)
                if not steps.any():
                    continue
                part = 0.4 * rise
                share = float(((over > part) | (late > part))[steps].mean())
                felt = max(float(own_excess[m]), float(np.median(late[steps])))
                if share >= STEADY_SHARE and felt >= FELT_SHARE * rise:
                    found.append(Rise(row, activity, rise, max(float(own_excess[m]), rise), share))
    return found


def _single_function(stacked: Stacked, where: Localization, row: int, activity: Activity, peers: Indices) -> float:
    """Excess, in seconds per iteration, of the one function of this kind that is unusual on this rank; 0 = none is.

    On CPU jobs a function that its peers have too must at least double: less is what preemption does to any of them.
    """
    columns = [f for f in np.flatnonzero(where.unusual[row]) if stacked.functions[f].activity == activity]
    if not columns:
        return 0.0
    mine = stacked.beta[row, columns] * stacked.iteration_s[row]
    # A peer without the function may still spend up to its own cut-off in it.
    floor = stacked.cutoff[peers]
    theirs = np.median(np.maximum(stacked.beta[np.ix_(peers, columns)], floor[:, None]) * stacked.iteration_s[peers, None], axis=0)
    rise = mine - theirs
    if activity in _DIFFUSE and is_host_only(stacked):
        rise = np.where((mine >= 2 * theirs) & (rise >= HOST_SINGLE_EFFECT * stacked.iteration_s[row]), rise, 0.0)
    return float(rise.max())


def is_host_only(stacked: Stacked) -> bool:
    """No rank has device events: wall time on the host includes what other processes took."""
    return not any(s.coverage.has_device for s in stacked.summaries)


def _peers(roles: Roles, row: int, roots: Indices) -> Indices:
    members = roles.members(int(roles.of[row]))
    peers = np.setdiff1d(members, roots)
    return peers if len(peers) else np.setdiff1d(members, [row])


def _top_function(stacked: Stacked, activity: Activity, ranks: Indices, peers: Indices) -> int | None:
    """The function of this activity with the largest excess over the peers' median."""
    columns = [k for k, f in enumerate(stacked.functions) if f.activity == activity]
    if not columns:
        return None
    mine = np.median(stacked.beta[np.ix_(ranks, columns)] * stacked.iteration_s[ranks, None], axis=0)
    theirs = np.median(stacked.beta[np.ix_(peers, columns)] * stacked.iteration_s[peers, None], axis=0) if len(peers) else 0.0
    return columns[int(np.argmax(mine - theirs))]


def stable_excesses(stacked: Stacked, roles: Roles, where: Localization, iteration_s: float) -> list[Excess]:
    """Stable own excess by rank and activity, ranks with the same cause gathered."""
    rises = stable_rises(stacked, roles, where, iteration_s)
    rows = np.array(sorted({rise.row for rise in rises}), np.intp)
    parts: list[Excess] = []
    for row in rows:
        peers = _peers(roles, int(row), rows)
        here = np.array([row], np.intp)
        mine = {rise.activity: rise for rise in rises if rise.row == row}
        seconds = {a: rise.seconds for a, rise in mine.items()}
        whole = max(rise.own_s for rise in mine.values())
        main = max(seconds, key=lambda a: seconds[a])
        drain = max((a for a in seconds if a in _DRAINS), key=lambda a: seconds[a], default=None)
        if drain is not None:
            for shadow in _REFILL & seconds.keys() - {drain}:
                if seconds[shadow] < seconds[drain]:
                    seconds.pop(shadow)
        for activity in sorted(seconds, key=lambda a: -seconds[a]):
            if seconds[activity] < PART_FLOOR * seconds.get(main, 0.0):
                continue
            function = _top_function(stacked, activity, here, peers)
            phase = stacked.functions[function].phase if function is not None else Phase.NONE
            cause = cause_of(stacked, activity, here, peers, seconds[activity], phase, spot=_is_spot(stacked, function, here, peers, seconds[activity]))
            coverage = min(seconds[activity] / whole, 1.0)
            if len(seconds) > 1:
                # Several causes on one rank each explain their own part of it.
                coverage = min(sum(seconds.values()) / max(whole, sum(seconds.values())), 1.0)
            parts.append(Excess(here, "rank", "stable", activity, function, seconds[activity], coverage, mine[activity].share_of_steps, cause))
    return _gather(stacked, roles, rows, parts)


def _is_spot(stacked: Stacked, function: int | None, ranks: Indices, peers: Indices, excess_s: float) -> bool:
    """One function holds at least half of the excess."""
    if function is None:
        return False
    mine = float(np.median(stacked.beta[ranks, function] * stacked.iteration_s[ranks]))
    return mine - float(np.median(stacked.beta[peers, function] * stacked.iteration_s[peers])) >= 0.5 * excess_s


def _gather(stacked: Stacked, roles: Roles, roots: Indices, parts: list[Excess]) -> list[Excess]:
    """Excesses with the same cause, and the same function where it has a place in the source, become one finding."""
    groups: dict[tuple[str, object], list[Excess]] = {}
    for part in parts:
        name = stacked.functions[part.function] if part.function is not None else None
        told_apart = part.cause.cause == "unknown" or part.activity in (Activity.PYTHON, Activity.INPUT, Activity.CHECKPOINT)
        place: object = (name.user_location or name.name) if name is not None and told_apart else None
        groups.setdefault((part.cause.cause, place), []).append(part)
    gathered = []
    for (_, _), some in groups.items():
        if len(some) == 1:
            gathered.append(some[0])
            continue
        ranks = np.array(sorted(int(p.ranks[0]) for p in some), np.intp)
        peers = np.setdiff1d(np.concatenate([_peers(roles, int(r), roots) for r in ranks]), ranks)
        head = max(some, key=lambda p: p.seconds)
        assert head.activity is not None
        function = _top_function(stacked, head.activity, ranks, peers)
        seconds = float(np.median([p.seconds for p in some]))
        phase = stacked.functions[function].phase if function is not None else Phase.NONE
        cause = cause_of(stacked, head.activity, ranks, peers, seconds, phase, spot=_is_spot(stacked, function, ranks, peers, seconds))
        gathered.append(
            Excess(ranks, "rank", "stable", head.activity, function, seconds, float(np.median([p.coverage for p in some])), min(p.share_of_steps for p in some), cause)
        )
    return gathered


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
    limit = max(3 * EFFECT_FLOOR * iteration_s, family_quantile(len(seen)) * max(noise, (HOST_SPREAD_FLOOR if host_only else SPREAD_FLOOR) * iteration_s))
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
    if host_only and (named is None or coverage < HOST_COVERAGE or _is_jitter(stacked, named, cells)) and mean_s < JITTER_EFFECT * iteration_s:
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
    return Excess(np.empty(0, np.intp), "rotating", "rotating", activity, named, mean_s, coverage, len(hit) / num_steps, cause)


def _is_jitter(stacked: Stacked, function: int, cells: npt.NDArray[np.intp]) -> bool:
    """The function is there in every step and its peaks are no more than twice its usual time on top."""
    usual = float(np.median(stacked.beta[:, function] * stacked.iteration_s))
    peaks = [float(stacked.top_excess_s[w, i]) for w, i in cells if stacked.top_function[w, i] == function]
    return float(np.median(peaks)) < 2 * usual if peaks else True


def _rotating_cause(stacked: Stacked, activity: Activity, cells: npt.NDArray[np.intp]) -> Cause:
    by_work = stacked.top_by_work[cells[:, 0], cells[:, 1]]
    told = by_work[np.isfinite(by_work)]
    if activity in (Activity.COMPUTE, Activity.OPERATOR, Activity.MEMORY) and len(told) and np.median(told) >= WORK_EXPLAINS:
        return Cause("load_imbalance", True, f"these ranks had more work in these steps: it explains {np.median(told):.0%} of the longer time", ())
    same_work = ("load_imbalance: the work of these steps is the usual",) if len(told) else ()
    if activity in (Activity.COMPUTE, Activity.OPERATOR, Activity.LAUNCH):
        return Cause("sync_amplification", False, "delays of changing ranks, in the same functions, add up at each synchronisation", same_work)
    everyone = np.arange(len(stacked), dtype=np.intp)
    return cause_of(stacked, activity, np.unique(cells[:, 0]).astype(np.intp), everyone, float("inf"), Phase.NONE)


def idle_excesses(stacked: Stacked, roles: Roles, iteration_s: float, roots: Indices) -> list[Excess]:
    """Ranks that idle, uncovered by any event, while their peers wait for them: late, and this trace does not say why."""
    found = []
    idle = np.nanmedian(stacked.length_s - stacked.own_s - stacked.exposed_s - stacked.waiting_s, axis=1)
    waits = np.nanmedian(stacked.exposed_s + stacked.waiting_s, axis=1)
    for role in range(len(roles.names)):
        members = roles.members(role)
        if len(members) < 3:
            continue
        rise, lack = idle[members] - np.median(idle[members]), np.median(waits[members]) - waits[members]
        spread = max(_spread(rise), EFFECT_FLOOR * iteration_s)
        for m, row in enumerate(members):
            if int(row) in set(roots.tolist()) or rise[m] < max(5 * EFFECT_FLOOR * iteration_s, 5 * spread) or lack[m] < 0.5 * rise[m]:
                continue
            cause = Cause("unknown", False, "no event covers this time on the rank that the others wait for", ())
            found.append(Excess(np.array([row], np.intp), "rank", "stable", None, None, float(rise[m]), 0.0, 1.0, cause))
    return found


def heavy_roles(stacked: Stacked, roles: Roles, iteration_s: float, skip: Indices) -> list[Excess]:
    """Roles that do clearly more own work than the other roles: structure, no rank's fault."""
    if len(roles.names) < 3:
        return []
    stable = np.nanmedian(stacked.own_s, axis=1)
    level = np.array([np.median(np.delete(stable, skip)[np.delete(roles.of, skip) == r]) if (np.delete(roles.of, skip) == r).any() else np.nan for r in range(len(roles.names))])
    found = []
    for role in np.flatnonzero(np.isfinite(level)):
        others = np.delete(level, role)
        excess = float(level[role] - np.nanmedian(others))
        if excess <= HEAVY_ROLE * iteration_s or level[role] < np.nanmax(level):
            continue
        members = roles.members(int(role))
        ranks = np.setdiff1d(members, skip)
        peers = np.setdiff1d(np.arange(len(stacked), dtype=np.intp), members)
        rise = (np.median(stacked.activity_beta[ranks] * stacked.iteration_s[ranks, None], axis=0) - np.median(stacked.activity_beta[peers] * stacked.iteration_s[peers, None], axis=0))
        activity = max(OWN_WORK, key=lambda a: (float(rise[a]), -a))
        function = _top_function(stacked, activity, ranks, peers)
        cause = Cause("load_imbalance", False, "this role does more own work than the other roles, on each of its ranks", ("gpu_compute: all ranks of the role are alike",))
        found.append(Excess(members, "group", "stable", activity, function, excess, min(max(float(rise[activity]) / excess, 0.0), 1.0), 1.0, cause))
    return found


def common_excess(stacked: Stacked, baseline: Stacked, iteration_s: float) -> list[Excess]:
    """What all ranks do more of than in the healthy window, by activity."""
    before_s = float(np.median(baseline.iteration_s))
    everyone = np.arange(len(stacked), dtype=np.intp)
    now = np.median(stacked.activity_beta * stacked.iteration_s[:, None], axis=0)
    then = np.median(baseline.activity_beta * baseline.iteration_s[:, None], axis=0)
    gap = iteration_s - before_s
    found = []
    for activity in sorted(OWN_WORK, key=lambda a: float(then[a] - now[a])):
        rise = float(now[activity] - then[activity])
        if rise < max(EFFECT_FLOOR * iteration_s, PART_FLOOR * gap) or gap < EFFECT_FLOOR * 2 * before_s:
            continue
        columns = [k for k, f in enumerate(stacked.functions) if f.activity == activity]
        heaviest = max(columns, key=lambda k: float(np.median(stacked.beta[:, k])), default=None)
        cause = _common_cause(stacked, baseline, activity)
        found.append(Excess(everyone, "all", "stable", activity, heaviest, rise, min(rise / gap, 1.0), 1.0, cause))
    return found


def _common_cause(stacked: Stacked, baseline: Stacked, activity: Activity) -> Cause:
    if activity not in (Activity.COMPUTE, Activity.OPERATOR, Activity.LAUNCH, Activity.MEMORY):
        return cause_of(stacked, activity, np.arange(len(stacked), dtype=np.intp), np.arange(len(stacked), dtype=np.intp), 1.0, Phase.NONE)
    known = {f: k for k, f in enumerate(baseline.functions)}
    shared = [(k, known[f]) for k, f in enumerate(stacked.functions) if f.activity == activity and f in known]
    clocks = [(float(np.nanmedian(stacked.mu[:, k])), float(np.nanmedian(baseline.mu[:, b]))) for k, b in shared if (stacked.mu_source[:, k] == 3).all() and (baseline.mu_source[:, b] == 3).all()]
    if activity == Activity.COMPUTE and clocks and np.median([now / max(then, 1e-9) for now, then in clocks]) < 0.985:
        return Cause("gpu_throttle", True, "all clocks are lower than in the healthy window", ())
    if shared:
        return Cause("unknown", False, "all ranks take longer for the same functions than in the healthy window; no rank differs from the others", ("a single rank: all are alike",))
    return Cause("version_change", False, "the functions differ from those of the healthy window", ("a single rank: all are alike",))
