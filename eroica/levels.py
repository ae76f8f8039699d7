"""Differences that blame no rank: between roles, to the healthy past, and idle time that nothing explains.

A heavier role is structure, more work on all ranks than in the healthy window is a common cause, and a rank that
idles while others wait for it is late for a reason that its trace does not hold. Used by `diagnosis`.
"""

from __future__ import annotations

import numpy as np

from eroica.blame import PART_FLOOR, Excess, Indices, spread_of, top_function
from eroica.causes import CLOCK_DROP, ON_THE_CPU, Cause, cause_of, crowding
from eroica.critical_path import OWN_WORK, Activity
from eroica.localization import EFFECT_FLOOR, Roles
from eroica.names import Phase
from eroica.pattern import Stacked
from eroica.utilisation import MU_SOURCES

HEAVY_ROLE = 0.10
"""A role must do this much more own work than the median of the others, relative to the iteration, to be a finding."""


def idle_excesses(stacked: Stacked, roles: Roles, iteration_s: float, roots: Indices) -> list[Excess]:
    """Ranks that idle, uncovered by any event, while their peers wait for them: late, and this trace does not say
    why."""
    found = []
    idle = np.nanmedian(stacked.length_s - stacked.own_s - stacked.exposed_s - stacked.waiting_s, axis=1)
    waits = np.nanmedian(stacked.exposed_s + stacked.waiting_s, axis=1)
    for role in range(len(roles.names)):
        members = roles.members(role)
        if len(members) < 3:
            continue
        rise, lack = idle[members] - np.median(idle[members]), np.median(waits[members]) - waits[members]
        spread = max(spread_of(rise), EFFECT_FLOOR * iteration_s)
        for m, row in enumerate(members):
            if (
                int(row) in set(roots.tolist())
                or rise[m] < max(5 * EFFECT_FLOOR * iteration_s, 5 * spread)
                or lack[m] < 0.5 * rise[m]
            ):
                continue
            cause = Cause("unknown", False, "no event covers this time on the rank that the others wait for", ())
            found.append(
                Excess(np.array([row], np.intp), "rank", "stable", None, None, float(rise[m]), 0.0, 1.0, cause)
            )
    return found


def heavy_roles(stacked: Stacked, roles: Roles, iteration_s: float, skip: Indices) -> list[Excess]:
    """Roles that do clearly more own work than the other roles: structure, no rank's fault."""
    if len(roles.names) < 3:
        return []
    stable = np.nanmedian(stacked.own_s, axis=1)
    level = np.array(
        [
            np.median(np.delete(stable, skip)[np.delete(roles.of, skip) == r])
            if (np.delete(roles.of, skip) == r).any()
            else np.nan
            for r in range(len(roles.names))
        ]
    )
    found = []
    for role in np.flatnonzero(np.isfinite(level)):
        others = np.delete(level, role)
        excess = float(level[role] - np.nanmedian(others))
        if excess <= HEAVY_ROLE * iteration_s or level[role] < np.nanmax(level):
            continue
        members = roles.members(int(role))
        ranks = np.setdiff1d(members, skip)
        peers = np.setdiff1d(np.arange(len(stacked), dtype=np.intp), members)
        rise = np.median(stacked.activity_beta[ranks] * stacked.iteration_s[ranks, None], axis=0) - np.median(
            stacked.activity_beta[peers] * stacked.iteration_s[peers, None], axis=0
        )
        activity = max(OWN_WORK, key=lambda a: (float(rise[a]), -a))
        function = top_function(stacked, activity, ranks, peers)
        cause = Cause(
            "load_imbalance",
            False,
            "this role does more own work than the other roles, on each of its ranks",
            ("gpu_compute: all ranks of the role are alike",),
        )
        found.append(
            Excess(
                members,
                "group",
                "stable",
                activity,
                function,
                excess,
                min(max(float(rise[activity]) / excess, 0.0), 1.0),
                1.0,
                cause,
            )
        )
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
    everyone = np.arange(len(stacked), dtype=np.intp)
    crowded = crowding(stacked, everyone) if activity in ON_THE_CPU else ""
    if crowded and not crowding(baseline, np.arange(len(baseline), dtype=np.intp)):
        return Cause("cpu_contention", True, crowded, ("a single rank: all are alike",))
    if activity not in (Activity.COMPUTE, Activity.OPERATOR, Activity.LAUNCH, Activity.MEMORY):
        return cause_of(
            stacked,
            activity,
            everyone,
            everyone,
            1.0,
            Phase.NONE,
        )
    known = {f: k for k, f in enumerate(baseline.functions)}
    shared = [(k, known[f]) for k, f in enumerate(stacked.functions) if f.activity == activity and f in known]
    clock = MU_SOURCES.index("sm_clock")
    ratios = [
        float(np.nanmedian(stacked.mu[:, k]) / max(float(np.nanmedian(baseline.mu[:, b])), 1e-9))
        for k, b in shared
        if (stacked.mu_source[:, k] == clock).all() and (baseline.mu_source[:, b] == clock).all()
    ]
    if activity == Activity.COMPUTE and ratios and np.median(ratios) < CLOCK_DROP:
        return Cause("gpu_throttle", True, "all clocks are lower than in the healthy window", ())
    if shared:
        return Cause(
            "unknown",
            False,
            "all ranks take longer for the same functions than in the healthy window; no rank differs from the others",
            ("a single rank: all are alike",),
        )
    return Cause(
        "version_change",
        False,
        "the functions differ from those of the healthy window",
        ("a single rank: all are alike",),
    )
