"""Differences that blame no rank: between roles, to the healthy past, and idle time that nothing explains.

A heavier role is structure, more work on all ranks than in the healthy window is a common cause, and a rank that
idles while others wait for it is late for a reason that its trace does not hold. Used by `diagnosis`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from eroica.blame import PART_FLOOR, Excess, Indices, spread_of, top_function
from eroica.causes import (
    BLOCKING,
    BUSY_THREAD,
    CLOCK_DROP,
    CROWDED,
    LAUNCHING,
    OF_VALUES,
    ON_THE_CPU,
    STARVATION_EXPLAINS,
    Cause,
    cause_of,
    columns_of,
    granted,
    granted_each,
    grants,
    launches_block,
    other_threads,
)
from eroica.changes import Change, of_versions, sentence
from eroica.collectives import Float64s
from eroica.critical_path import OWN_WORK, Activity
from eroica.growth import growth_of
from eroica.localization import EFFECT_FLOOR, INCOMPLETE, Roles
from eroica.names import Phase
from eroica.network import SLOWER, growth, lanes_of
from eroica.pattern import Function, Stacked
from eroica.utilisation import MU_SOURCES

HEAVY_ROLE = 0.10
"""A role must do this much more own work than the median of the others, relative to the iteration, to be a finding."""
HOST_COMMON_EFFECT = 0.05
"""Operators and Python on all ranks must take longer by this share of the healthy iteration: a host may be busier with
others' work in one window than in the next. As much as makes a level slow (`pace.EFFECT`)."""
UNEXPLAINED_EFFECT = 0.10
"""The same for time that nothing explains: twice as much, since the answer is worth less."""
INPUT_BOUND = 0.25
"""Share of the critical path that input must own on all ranks to be told without a past. Loaders that keep up own less
than a hundredth (`localization.EXPECTED_BETA`), but small jobs load in the process that trains, and pay a tenth or a
fifth for it knowingly: a quarter is no longer something beside the training."""
WORKERS = "MultiProcessingDataLoaderIter"
"""In the name of a loader, torch's or torchdata's, whose batches are made by worker processes."""
_SLEEPS = re.compile(r"(?:^|/python3\.\d+/)(?:multiprocessing/(?:queues|connection)|selectors|threading|queue)\.py:")
"""Where Python waits for somebody else's batch, if stacks were taken: there they stand for the loader."""
ALIKE = 0.5
"""Ranks are alike if none has less than this share of the middle one, or more than its inverse."""
MAY_LACK = 0.25
"""So many of the ranks may lack what all have more of: one of four is an exception, two of four are a half."""
SPOT_SHARE = 0.5
"""A function with this share of a rise is where it happens."""

COUNTS_DIFFER = 0.03
"""A function must run so much more or less often per iteration to be a sign of other work."""
LESS_TOO = 0.1
"""Of what is done more, so much must be done less instead."""
OF_EVERYTHING = 0.8
"""Or so much of what the healthy iterations do must be done more: less is one part that runs too often, a fault."""
MIX_EXPLAINS = 0.5
"""Share of longer computing that the other mix of work must explain."""
OTHER_WORK_EFFECT = 0.02
"""And that mix must make the iteration longer by so much: as much as is looked at when two windows are compared."""

_NOISY = frozenset({Activity.OPERATOR, Activity.LAUNCH, Activity.PYTHON})
_NO_SINGLE_RANK = ("a single rank: all are alike",)


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
    # Ranks that have lost records look light, and no role of theirs is one to compare others with.
    lost = np.array([name.endswith(INCOMPLETE) for name in roles.names], bool)
    if np.count_nonzero(~lost) < 3:
        return []
    stable = np.nanmedian(stacked.own_s, axis=1)
    level = np.array(
        [
            np.median(np.delete(stable, skip)[np.delete(roles.of, skip) == r])
            if not lost[r] and (np.delete(roles.of, skip) == r).any()
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
        peers = np.setdiff1d(np.flatnonzero(~lost[roles.of]), members)
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


def does_other_work(stacked: Stacked, baseline: Stacked) -> bool:
    """The iterations of the window are longer since they do more of one thing and less of another than the healthy
    ones: another phase of the job (generation and training by turns), or another share of the two. Or they do more of
    everything: more evaluations of a closure, more batches. Their lengths are not to be compared.

    Wrong where the same work is done by other kernels; two windows of one run have the same code, as a rule.
    """
    before_s = float(np.median(baseline.iteration_s))
    now, then = _executions(stacked), _executions(baseline)
    cutoff_s = [float(np.median(of.cutoff * of.iteration_s)) for of in (stacked, baseline)]
    more_s = less_s = all_s = grown_s = 0.0
    for function in now.keys() | then.keys():
        (often, total_s), (usually, usual_s) = now.get(function, (0.0, 0.0)), then.get(function, (0.0, 0.0))
        if (not often and usual_s <= cutoff_s[0]) or (not usually and total_s <= cutoff_s[1]):
            continue  # it may be there, too short to be told
        all_s += usual_s
        if often > (1 + COUNTS_DIFFER) * usually:
            grown_s += usual_s
            more_s += total_s * (1 - usually / often)
        elif often < (1 - COUNTS_DIFFER) * usually:
            less_s += usual_s * (1 - often / usually)
    is_mix, is_more = less_s >= LESS_TOO * more_s, grown_s >= OF_EVERYTHING * all_s
    # Of the computing alone: what one slow rank costs the others is waiting, and has nothing to do with the mix.
    grown = sum(seconds for _, seconds in now.values()) - sum(seconds for _, seconds in then.values())
    explains = more_s - less_s >= max(MIX_EXPLAINS * grown, OTHER_WORK_EFFECT * before_s)
    return explains and (is_mix or is_more)


def _executions(of: Stacked) -> dict[Function, tuple[float, float]]:
    """Of each function that computes: executions and seconds per iteration, in the middle of the ranks."""
    count, seconds = np.median(np.nan_to_num(of.count), axis=0), np.median(of.beta * of.iteration_s[:, None], axis=0)
    return {
        f: (float(count[k]), float(seconds[k]))
        for k, f in enumerate(of.functions)
        if f.activity in (Activity.COMPUTE, Activity.OPERATOR, Activity.MEMORY)
    }


FEW_STEPS_LONG = 3
"""So many long steps in a window are no hiccups any more."""
LONG_STEP = 1.25
"""Times the median step of the window."""
IN_MOST_STEPS = 0.5
"""Share of the growth of the mean that the median step must show, where fewer steps are long."""


def _is_common(stacked: Stacked, baseline: Stacked, gap_s: float) -> bool:
    """The window is longer by what most of its steps, or at least several, show: one long step is a hiccup."""
    if _is_in_most_steps(stacked, baseline, gap_s):
        return True
    lengths = np.nanmedian(stacked.length_s, axis=0)
    return int((lengths > LONG_STEP * np.nanmedian(lengths)).sum()) >= FEW_STEPS_LONG


def _is_in_most_steps(stacked: Stacked, baseline: Stacked, gap_s: float) -> bool:
    usual_s = float(np.nanmedian(np.nanmedian(stacked.length_s, axis=0)))
    return usual_s - float(np.nanmedian(baseline.length_s)) >= IN_MOST_STEPS * gap_s


def _is_by_turns(stacked: Stacked, baseline: Stacked, gap_s: float, rise_s: float) -> bool:
    """Most steps are longer, and still no rank has so much more of its own in most of its steps: in each step it is the
    turn of another one, and the mean of all of them rises, too."""
    now_s, then_s = (float(np.nanmedian(np.nanmedian(of.own_s, axis=1))) for of in (stacked, baseline))
    return _is_in_most_steps(stacked, baseline, gap_s) and now_s - then_s < ALIKE * rise_s


NOT_BY_CHANCE = 3.0
"""Standard errors by which two windows must differ, unless the pace of many iterations has shown it."""


def _may_be_chance(baseline: Stacked, num_steps: int, gap_s: float) -> bool:
    """Healthy iterations vary by so much that two windows of one job may lie that far apart.

    By the robust spread of the healthy ones; 1.2533 of it is the standard error of a median of one.
    """
    lengths = np.nanmedian(baseline.length_s, axis=0)
    lengths = lengths[np.isfinite(lengths)]
    if len(lengths) < 2 or not num_steps:
        return False
    spread_s = 1.4826 * float(np.median(np.abs(lengths - np.median(lengths))))
    return gap_s < NOT_BY_CHANCE * 1.2533 * spread_s * math.sqrt(1 / len(lengths) + 1 / num_steps)


def common_excess(
    stacked: Stacked,
    baseline: Stacked,
    iteration_s: float,
    changed: Sequence[Change] = (),
    *,
    recurs: bool = False,
    is_noticed: bool = False,
) -> list[Excess]:
    """What all ranks do more of than in the healthy window, by activity; a job of one rank has nothing else to be
    compared with. `changed`: settings of all ranks that are not as they were.

    If they take longer and no work of theirs has grown, one excess without an activity says that: a slower job is not
    to pass for a healthy one because nothing explains it. `recurs`: single long steps are known to come
    again and again. `is_noticed`: that the job is slower is known from many more iterations than the window's.
    """
    before_s = float(np.median(baseline.iteration_s))
    everyone = np.arange(len(stacked), dtype=np.intp)
    now, then = (np.median(of.activity_beta * of.iteration_s[:, None], axis=0) for of in (stacked, baseline))
    gap = iteration_s - before_s
    if gap < EFFECT_FLOOR * 2 * before_s or not (recurs or _is_common(stacked, baseline, gap)):
        return []
    if not is_noticed and _may_be_chance(baseline, len(stacked.steps), gap):
        return []
    rises = _rises(stacked, baseline)
    found = []
    for activity in sorted(OWN_WORK, key=lambda a: float(then[a] - now[a])):
        rise = float(now[activity] - then[activity])
        if rise < max(EFFECT_FLOOR * iteration_s, PART_FLOOR * gap):
            continue
        if activity in _NOISY and rise < HOST_COMMON_EFFECT * before_s:
            continue
        if not _is_of_most(stacked, baseline, activity, rise):
            continue
        columns = [k for k, f in enumerate(stacked.functions) if f.activity == activity]
        grown = max(columns, key=lambda k: float(rises[k]), default=None)
        is_spot = grown is not None and float(rises[grown]) >= SPOT_SHARE * rise
        cause = _common_cause(stacked, baseline, activity, rise, grown if is_spot else None)
        if cause.cause == "unknown":
            cause = _by_version(cause, changed)
        is_diffuse = activity in _NOISY and not is_spot and cause.cause in ("unknown", "host_python")
        excess = Excess(everyone, "all", "stable", activity, grown, rise, min(rise / gap, 1.0), 1.0, cause)
        found.append(replace(excess, is_diffuse=is_diffuse))
    is_by_turns = (
        bool(found) and len(stacked) > 1 and _is_by_turns(stacked, baseline, gap, sum(e.seconds for e in found))
    )
    if is_by_turns:
        found = []
    crowded = _crowded_hosts(stacked, baseline, gap, rises)
    if crowded is not None and not any(e.cause.cause == "cpu_contention" for e in found):
        found = [crowded[0], *(e for e in found if e.activity not in crowded[1])]
    if launches_block(stacked, everyone) and not launches_block(baseline, np.arange(len(baseline), dtype=np.intp)):
        found = _blocked(found)
    exposed = _exposed(stacked, baseline, gap, iteration_s, changed)
    if exposed is not None:
        found.append(exposed)
    if not found and gap >= UNEXPLAINED_EFFECT * before_s:
        why = "no kind of work grew by a quarter of that or more"
        if stacked.world_size > len(stacked):
            # What the others wait for may be one of these, and a wait for all looks like a long transfer.
            why += ", and some ranks sent nothing"
            everyone = everyone[:0]
        scope = "all"
        if is_by_turns:
            why = "most steps are longer, for more of their own in another rank each time, and no one function holds it"
            everyone, scope = everyone[:0], "rotating"
        cause = Cause("unknown", False, why, ())
        found.append(Excess(everyone, scope, "rotating" if is_by_turns else "stable", None, None, gap, 0.0, 1.0, cause))
    return found


def _is_of_most(stacked: Stacked, baseline: Stacked, activity: Activity, rise_s: float) -> bool:
    """At most a quarter of the ranks lack the rise: the middle of two halves, of which one is slow, is nobody's.

    Of the ranks that reported in both windows; True where none did, since who has how much more is not known then.
    """
    _, *both = np.intersect1d(stacked.ranks, baseline.ranks, assume_unique=True, return_indices=True)
    if not len(both[0]):
        return True
    now, then = (
        of.activity_beta[rows, activity] * of.iteration_s[rows]
        for of, rows in zip((stacked, baseline), both, strict=True)
    )
    return float(np.sort(now - then)[int(MAY_LACK * len(now))]) >= ALIKE * rise_s


def _crowded_hosts(
    stacked: Stacked, baseline: Stacked, gap_s: float, rises: Float64s
) -> tuple[Excess, Sequence[int]] | None:
    """On each host at least half of the training threads want for a core more than in the healthy window, and are
    longer at what they compute for that: ranks that nobody binds meet on one core, and others have one to themselves.

    All kinds of computing together: whom the scheduler takes the core from does not choose what to do less of. Returned
    with those kinds that take longer for that and not for a cause of their own.
    """
    if not np.array_equal(stacked.ranks, baseline.ranks):
        return None
    kinds = [int(activity) for activity in ON_THE_CPU]
    now_s, then_s = (of.activity_beta[:, kinds] * of.iteration_s[:, None] for of in (stacked, baseline))
    rise_s = now_s - then_s
    shares = [granted_each(of, *ON_THE_CPU) for of in (stacked, baseline)]
    with np.errstate(divide="ignore", invalid="ignore"):
        # No kind takes longer by more than what it took and what is granted less; the rest needs another cause.
        longer = then_s * (shares[1] / shares[0] - 1)[:, None]
        explained_s = np.fmin(longer, np.maximum(rise_s, 0.0))
    whole_s = rise_s.sum(axis=1)
    is_starved = (shares[0] > 0) & (shares[0] < CROWDED) & (shares[0] < shares[1])
    is_starved &= (whole_s >= ALIKE * gap_s) & (explained_s.sum(axis=1) >= STARVATION_EXPLAINS * whole_s)
    _, host = np.unique(np.array([name or "" for name in stacked.hosts]), return_inverse=True)
    if not len(host) or (np.bincount(host, is_starved) < 0.5 * np.bincount(host)).any():
        return None
    slow = np.flatnonzero(is_starved)
    rise_s, explained_s = rise_s[slow], explained_s[slow]
    is_explained = np.median(explained_s, axis=0) >= STARVATION_EXPLAINS * np.median(rise_s, axis=0)
    rise_s = np.where(is_explained, rise_s, 0.0)
    seconds = min(float(np.median(rise_s.sum(1))), gap_s)
    if seconds < HOST_COMMON_EFFECT * float(np.median(baseline.iteration_s)):
        return None
    threads = other_threads(stacked, slow) - other_threads(baseline, slow)
    if _are_its_own(stacked, threads, seconds):
        return None
    most = kinds[int(np.median(rise_s, axis=0).argmax())]
    columns = [k for k, f in enumerate(stacked.functions) if f.activity == most]
    now, then = (float(np.median(share[slow])) for share in shares)
    because = (
        f"ready to run, the training threads of {len(slow)} of {len(stacked)} ranks get a core {now:.0%} of the time, "
        f"in the healthy window {then:.0%}: that explains most of what they take longer"
    )
    excess = Excess(
        np.arange(len(stacked), dtype=np.intp),
        *("all", "stable", Activity(most), max(columns, key=lambda k: float(rises[k]), default=None)),
        *(seconds, seconds / gap_s, 1.0, Cause("cpu_contention", True, because, _NO_SINGLE_RANK)),
    )
    return excess, [kind for kind, told in zip(kinds, is_explained.tolist(), strict=True) if told]


def input_bound(stacked: Stacked, iteration_s: float) -> list[Excess]:
    """All ranks alike wait for their batches, as long as the window lasts: a level, not a rise. Only for windows
    without a past: a job that is slow from its first step on has nothing else that shows it."""
    share = stacked.activity_beta[:, Activity.INPUT] - _without_a_core(stacked)
    middle = float(np.median(share)) if len(share) else 0.0
    if middle < INPUT_BOUND or float(share.min()) < ALIKE * middle or float(share.max()) * ALIKE > middle:
        return []
    everyone = np.arange(len(stacked), dtype=np.intp)
    columns = [k for k, f in enumerate(stacked.functions) if f.activity == Activity.INPUT]
    most = max(columns, key=lambda k: float(np.median(stacked.beta[:, k])), default=None)
    cause = Cause("input_pipeline", True, "the time is spent inside of the dataloader's next", _NO_SINGLE_RANK)
    return [
        Excess(
            *(everyone, "all", "stable", Activity.INPUT, most, middle * iteration_s, 1.0, 1.0, cause),
            is_level=True,
        )
    ]


def _without_a_core(stacked: Stacked) -> Float64s:
    """(W,) Share of the critical path that threads spent ready to run for their input, without a core.

    Input that the training process prepares itself is late for that, not by itself. Nothing where workers do it: who
    waits for them wants no core.
    """
    columns = columns_of(stacked, (Activity.INPUT,))
    if any(WORKERS in stacked.functions[k].name for k in columns):
        return np.zeros(len(stacked))
    asleep = [bool(_SLEEPS.search(stacked.functions[k].location or "")) for k in columns]
    told, weight = grants(stacked, np.arange(len(stacked), dtype=np.intp), columns[~np.array(asleep, bool)])
    return np.asarray(((1 - told) * weight).sum(axis=1), np.float64)


def _blocked(found: Sequence[Excess]) -> list[Excess]:
    """All host work that the device waits for since launches block is one excess."""
    mine = [e for e in found if e.activity in LAUNCHING]
    if not mine:
        return list(found)
    head = max(mine, key=lambda e: e.seconds)
    seconds, coverage = sum(e.seconds for e in mine), min(sum(e.coverage for e in mine), 1.0)
    one = replace(head, seconds=seconds, coverage=coverage, cause=replace(BLOCKING, ruled_out=_NO_SINGLE_RANK))
    return [one, *(e for e in found if e.activity not in LAUNCHING)]


def _by_version(cause: Cause, changed: Sequence[Change]) -> Cause:
    """The code that runs is another one than in the healthy window: likelier than what nobody can name."""
    versions = of_versions(changed)
    if not versions:
        return cause
    because = f"{cause.because}; and other code runs than then: {sentence(versions)}"
    return Cause("version_change", False, because, cause.ruled_out)


def _exposed(
    stacked: Stacked, baseline: Stacked, gap: float, iteration_s: float, changed: Sequence[Change]
) -> Excess | None:
    """Communication that ran beside compute in the healthy window and does not any more: as many operations, each as
    long, but the ranks wait for them. Not the network's doing, which makes transfers longer."""
    lanes, before = (
        {of.joined.channels[lane.channel].key: lane for lane in lanes_of(of)} for of in (stacked, baseline)
    )
    if not lanes or lanes.keys() != before.keys():
        return None
    pairs = [(lane, before[key]) for key, lane in lanes.items()]
    for lane, known in pairs:
        now, then = ({operation[:3] for operation in of.operations} for of in (lane, known))
        ratio = growth(lane, known)
        # Two kinds of steps in turn have more of one in some windows, and more to wait for.
        if ratio is None or ratio > SLOWER or now != then or len(now) > len(lane.transfer_s):
            return None
    rise = sum(lane.exposed_s - known.exposed_s for lane, known in pairs)
    if rise < max(EFFECT_FLOOR * iteration_s, PART_FLOOR * gap):
        return None
    rises = _rises(stacked, baseline)
    columns = [k for k, f in enumerate(stacked.functions) if f.activity == Activity.COLLECTIVE]
    grown = max(columns, key=lambda k: float(rises[k]), default=None)
    because = (
        "as many communications as in the healthy window, and each transfer takes as long, but "
        f"{rise / iteration_s:.0%} of the iteration that ran beside compute is waited for now"
    )
    ruled = ("fabric_contention, nic_or_host_network: transfers take as long as before", *_NO_SINGLE_RANK)
    cause = _by_version(Cause("unknown", False, because, ruled), changed)
    if cause.cause == "unknown" and changed:
        because += f"; and settings differ: {sentence(changed)}"
        cause = Cause("configuration", False, because, ruled, tuple(change.name for change in changed))
    everyone = np.arange(len(stacked), dtype=np.intp)
    return Excess(everyone, "all", "stable", Activity.COLLECTIVE, grown, rise, min(rise / gap, 1.0), 1.0, cause)


def _rises(stacked: Stacked, baseline: Stacked) -> Float64s:
    """(F,) Seconds per iteration that each function takes beyond what it took in the healthy window, in the middle of
    the ranks; a function that was not seen there took none."""
    then = dict(zip(baseline.functions, np.median(baseline.beta * baseline.iteration_s[:, None], axis=0), strict=True))
    now = np.median(stacked.beta * stacked.iteration_s[:, None], axis=0)
    return np.array([s - then.get(f, 0.0) for f, s in zip(stacked.functions, now, strict=True)], np.float64)


def _common_cause(stacked: Stacked, baseline: Stacked, activity: Activity, rise: float, spot: int | None) -> Cause:
    """`spot`: the function that holds most of what all ranks take longer; None = no single one."""
    is_spot = spot is not None
    everyone = np.arange(len(stacked), dtype=np.intp)
    threads = other_threads(stacked, everyone) - other_threads(baseline, np.arange(len(baseline), dtype=np.intp))
    crowded = ""
    if activity in ON_THE_CPU:
        crowded = _crowded_now(stacked, baseline, activity, rise)
        # Whose core a thread of one's own takes, the interpreter or the host's, makes no difference: it is that thread.
        if crowded and not _are_its_own(stacked, threads, rise):
            return Cause("cpu_contention", True, crowded, _NO_SINGLE_RANK)
    if (crowded or (activity in _NOISY and not is_spot)) and threads >= BUSY_THREAD:
        return Cause(
            "gil_contention",
            False,
            f"other Python threads of these processes run {threads:.0%} of the time more than in "
            "the healthy window, and the training thread takes longer for everything",
            _NO_SINGLE_RANK,
        )
    if activity == Activity.SYNC and _syncs(stacked) <= MORE_SYNCS * _syncs(baseline):
        return Cause(
            "unknown",
            False,
            "the device idles longer after the same synchronisation as in the healthy window: the host takes longer to "
            "launch anything again",
            ("device_sync: there are as many as in the healthy window", *_NO_SINGLE_RANK),
        )
    if activity not in (Activity.COMPUTE, Activity.OPERATOR, Activity.LAUNCH, Activity.MEMORY):
        made = cause_of(stacked, activity, everyone, everyone, 1.0, Phase.NONE, spot=is_spot)
        return replace(made, ruled_out=(*made.ruled_out, *_NO_SINGLE_RANK))
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
    longer = growth_of(stacked, baseline, activity)
    if activity == Activity.COMPUTE and longer is not None and longer.is_of_all():
        told = ("gpu_throttle: clocks are those of the healthy window",) if ratios else ()
        because = (
            f"kernels of every kind take {longer.whole:.2f} times as long as in the healthy window, as many of them, "
            "on all ranks: it is the devices that are slower, not what they are given"
        )
        return Cause("gpu_compute", False, because, (*told, *_NO_SINGLE_RANK), advice="" if told else _READ_CLOCKS)
    alone = longer.of_one(spot) if longer is not None else None
    if alone is not None and spot is not None:
        factor, others = alone
        because = (
            f"all ranks take {factor:.2f} times as long for a call of {stacked.functions[spot].name} as in the healthy "
            f"window, for as many calls; others of its kind take {others:.2f} times as long"
        )
        advice = OF_VALUES if activity == Activity.OPERATOR else ""
        return Cause("unknown", False, because, _NO_SINGLE_RANK, advice=advice)
    if shared:
        return Cause(
            "unknown",
            False,
            "all ranks take longer for the same functions than in the healthy window; no rank differs from the others",
            _NO_SINGLE_RANK,
        )
    return Cause("version_change", False, "the functions differ from those of the healthy window", _NO_SINGLE_RANK)


_READ_CLOCKS = (
    "Read the clocks, the power and the reasons to throttle of the devices (nvidia-smi -q -d PERFORMANCE,CLOCK), which "
    "were not told here, and look for other processes on them."
)
OWN_THREADS = 0.5
"""Part of the longer time that other threads of these processes must run more, to be what takes the cores."""
MORE_SYNCS = 1.1
"""Times the synchronisations of the healthy window: there is a new one."""


def _are_its_own(stacked: Stacked, threads: float, rise_s: float) -> bool:
    """Other threads of these processes run so much more, as a share of the time, that they take the cores."""
    return threads >= max(OWN_THREADS * rise_s / float(np.median(stacked.iteration_s)), BUSY_THREAD)


def _syncs(of: Stacked) -> float:
    """Host calls per iteration that wait for the device to drain and leave it idle, in the middle of the ranks."""
    columns = [k for k, f in enumerate(of.functions) if f.activity == Activity.SYNC]
    return float(np.median(np.nansum(of.count[:, columns], axis=1)))


def _crowded_now(stacked: Stacked, baseline: Stacked, activity: Activity, rise: float) -> str:
    """Sentence about training threads that wait for a core more than they did in the healthy window, if that explains
    the rise of the activity; "" otherwise."""
    now, then = (granted(of, np.arange(len(of), dtype=np.intp), activity) for of in (stacked, baseline))
    if not (now < CROWDED and now < then):
        return ""
    usual_s = float(np.median(baseline.activity_beta[:, activity] * baseline.iteration_s))
    # The same work takes longer by the ratio of what is granted, at most; what is new, or sleeps, needs another cause.
    explained = usual_s * (then / now - 1) / rise if now > 0 else 1.0
    if explained < STARVATION_EXPLAINS:
        return ""
    return (
        f"ready to run, the training threads get a core {now:.0%} of the time, in the healthy window {then:.0%}: "
        f"waiting for one explains {min(explained, 1):.0%} of the longer time"
    )
