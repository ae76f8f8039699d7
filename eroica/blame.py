"""Roots, not victims: which ranks did more own work than their peers, in which functions, always or in turn.

A rank is a root only if its own time exceeds its role's by the effect floor in named functions; waiting never makes a
root, and a late rank without own excess is a victim of something else. An excess that moves over ranks has no culprit
rank. Roles are compared with each other as roles. Used by `diagnosis`, which words and prices what is found here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eroica.causes import MORE_OPERATORS, OWN_CORE, Cause, busy_thread, cause_of, granted, operator_ratio
from eroica.collectives import Float64s
from eroica.critical_path import OWN_WORK, Activity
from eroica.localization import EFFECT_FLOOR, Localization, Roles, family_quantile, nan_median
from eroica.names import ENGINE_WAIT_NAME, Phase
from eroica.pattern import Stacked

Indices = npt.NDArray[np.intp]

STEADY_SHARE = 0.6
"""A stable excess shows in at least this share of the steps."""
BEYOND_CHANCE = 3.0
"""Standard errors that a stable excess must lie above: those of the rank's own steps."""
FEWEST_VARYING = 4
"""Steps whose spread is one."""
RAREST = (0.05, 0.95)
"""Of steps: what lies beyond is a hiccup, and makes no excess uncertain."""
FELT_SHARE = 0.3
"""Part of an excess that must show in the rank's whole own time, or in what its peers wait for it."""
SPREAD_FLOOR = 0.003
"""Devices of one model differ by a few tenths of a percent; a smaller spread of own times is luck of few ranks."""
HOST_SPREAD_FLOOR = 0.015
"""The same for operators and Python on CPU jobs, where the operating system moves threads about."""
HOST_DIFFUSE_EFFECT = 0.25
"""On CPU jobs, operators and Python that are slower all over the place name nothing that can be mended: other processes
on a busy host do that to any rank, so a small excess of this kind is not a finding."""
HOST_CONTENDED_EFFECT = 0.08
"""Unless another thread of the rank is seen to compete for the interpreter."""
HOST_CROWDED_EFFECT = 0.15
"""Or others for its core: one that costs less moves on by itself, as tests that ran beside a training did (5 %)."""
HOST_SINGLE_EFFECT = 0.03
"""On CPU jobs one operator or Python function must cost this share of the iteration."""
NOVEL_SHARE = 0.2
"""Peers with less than this share of a rank's time in a function hardly have it; what merely takes longer by the noise
of a contended interpreter, they have."""
PART_FLOOR = 0.25
"""A second cause of the same rank must hold this share of the rank's excess, or it is a shadow of the first."""

_DIFFUSE = frozenset({Activity.OPERATOR, Activity.LAUNCH, Activity.PYTHON})
"""Host time that noise of the operating system inflates."""
_COMPUTED = _DIFFUSE | {Activity.INPUT}
"""And what it inflates where it is computed rather than waited for: a data set may work as hard as the model."""
_REFILL = frozenset({Activity.OPERATOR, Activity.LAUNCH, Activity.PYTHON})
"""Host time that surfaces while a drained launch queue fills again: a shadow of what drained it."""
_DRAINS = frozenset(
    {
        Activity.INPUT,
        Activity.SYNC,
        Activity.ALLOCATOR,
        Activity.CHECKPOINT,
        Activity.GC,
        Activity.COMPILE,
        Activity.PYTHON,
        Activity.MEMORY,
    }
)


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
    is_level: bool = False
    """Scope "all": how much it is, where there is no past to compare it with."""
    advice: str = ""
    """"" = what the cause advises."""
    is_diffuse: bool = False
    """Scope "all": host work takes longer in no one function, and why is not known."""


def reference(own_s: Float64s, floor_s: float) -> tuple[float, Float64s]:
    """Own time of a role's healthy ranks, and each rank's excess over it. Seconds.

    The median, unless the role falls into two populations and the slower is no clear majority: then the faster one's
    median, since a median between two populations is nobody's (design section 4: the slower of two).
    """
    middle = float(np.nanmedian(own_s))
    if len(own_s) >= 2:
        ordered = np.sort(own_s[np.isfinite(own_s)])
        jumps = np.diff(ordered)
        if len(jumps):
            cut = int(jumps.argmax())
            low, high = ordered[: cut + 1], ordered[cut + 1 :]
            within = max(float(low[-1] - low[0]), float(high[-1] - high[0]), floor_s)
            if (
                jumps[cut] > 3 * within / max(1.0, len(ordered) ** 0.5)
                and jumps[cut] > floor_s
                and len(low) >= 0.4 * len(ordered)
            ):
                middle = float(np.median(low))
    return middle, own_s - middle


def spread_of(excess: Float64s) -> float:
    """Robust spread: 1.4826 times the median distance to the median, a normal's standard deviation."""
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
    return HOST_SPREAD_FLOOR if host_only and activity in _COMPUTED else SPREAD_FLOOR


def stable_rises(stacked: Stacked, roles: Roles, where: Localization, iteration_s: float) -> list[Rise]:
    """Ranks that always do more own work of some kind than their peers.

    Tested kind by kind, since noise in one (operators on a busy CPU) would hide a plain excess in another (input). The
    rank's whole own time must exceed its peers', or the peers must wait for it, by part of the excess: what is made up
    for elsewhere delays nobody.
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
        if len(members) < 2 or too_few(stacked, members):
            continue
        own_excess = reference(nan_median(stacked.own_s[members], axis=1), floor_s)[1]
        for activity in kinds:
            values = seconds[members, activity].astype(np.float64)
            _, excess = reference(values, floor_s)
            calm = excess <= floor_s
            spread = spread_of(excess[calm]) if calm.sum() >= 3 else 0.0
            scale = max(spread, _scale_floor(activity, host_only) * iteration_s)
            limit = max(floor_s, k * scale)
            peers = np.flatnonzero(calm)
            if not len(peers):
                continue
            others = members[peers]
            usual, usual_wait = nan_median(stacked.own_s[others], axis=0), nan_median(waiting[others], axis=0)
            for m in np.flatnonzero(excess > floor_s):
                row = int(members[m])
                rise = float(excess[m])
                single = _single_function(stacked, where, row, activity, others)
                noisy = activity in _DIFFUSE and host_only and not _has_its_core(stacked, row, activity)
                if noisy and operator_ratio(stacked, members[m : m + 1], others) >= MORE_OPERATORS:
                    noisy = False  # it has more to do: that is no preemption
                contended = busy_thread(stacked, members[m : m + 1], others) if noisy else ""
                effect = HOST_CONTENDED_EFFECT if contended else HOST_DIFFUSE_EFFECT
                is_large = rise >= max(limit, effect * iteration_s)
                if noisy and (activity != Activity.PYTHON or single == 0 or contended):
                    if not is_large:
                        continue
                elif noisy and single < 0.6 * rise:
                    # One function stands out of a rank that is a little slower all over: it alone is the finding.
                    rise = rise if is_large else single
                elif rise <= limit and single < 0.6 * rise:
                    continue
                over = stacked.own_s[row] - usual
                late = usual_wait - waiting[row]
                steps = np.isfinite(over) & np.isfinite(late)
                if not steps.any():
                    # Its steps are numbered otherwise than its peers': theirs in the middle.
                    over = stacked.own_s[row] - np.nanmedian(usual)
                    late = np.nanmedian(usual_wait) - waiting[row]
                    steps = np.isfinite(over) & np.isfinite(late)
                if not steps.any():
                    continue
                part = 0.4 * rise
                share = float(((over > part) | (late > part))[steps].mean())
                felt = max(float(own_excess[m]), float(np.median(late[steps])))
                is_felt = felt >= FELT_SHARE * rise
                if share >= STEADY_SHARE and is_felt and rise >= BEYOND_CHANCE * _error_of(over[steps]):
                    found.append(Rise(row, activity, rise, max(float(own_excess[m]), rise), share))
    return found


def _error_of(over: Float64s) -> float:
    """Standard error of the mean of steps (I,) that vary like these, without the rarest; 0 where they are too few to
    tell. What moves over the ranks in most steps hits some of them more often than others, in any window."""
    if len(over) < FEWEST_VARYING:
        return 0.0
    return float(np.clip(over, *np.quantile(over, RAREST)).std() / len(over) ** 0.5)


def _has_its_core(stacked: Stacked, row: int, activity: Activity) -> bool:
    """Counters show that this rank never waits for a core in an activity: what takes longer there is no preemption."""
    return granted(stacked, np.array([row], np.intp), activity) >= OWN_CORE


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
    theirs = np.median(
        np.maximum(stacked.beta[np.ix_(peers, columns)], floor[:, None]) * stacked.iteration_s[peers, None], axis=0
    )
    rise = mine - theirs
    if activity in _COMPUTED and is_host_only(stacked) and not _has_its_core(stacked, row, activity):
        rise = np.where((mine >= 2 * theirs) & (rise >= HOST_SINGLE_EFFECT * stacked.iteration_s[row]), rise, 0.0)
    return float(rise.max())


def too_few(stacked: Stacked, members: Indices) -> bool:
    """Two ranks of a larger job: either may be the usual one, and the many that sent nothing would tell."""
    return len(members) < 3 and stacked.world_size > len(stacked)


def is_host_only(stacked: Stacked) -> bool:
    """No rank has device events: wall time on the host includes what other processes took."""
    return not any(s.coverage.has_device for s in stacked.summaries)


def _peers(roles: Roles, row: int, roots: Indices) -> Indices:
    members = roles.members(int(roles.of[row]))
    peers = np.setdiff1d(members, roots)
    return peers if len(peers) else np.setdiff1d(members, [row])


def top_function(stacked: Stacked, activity: Activity, ranks: Indices, peers: Indices) -> int | None:
    """The function of this activity with the largest excess over the peers' median."""
    columns = np.array([k for k, f in enumerate(stacked.functions) if f.activity == activity], np.intp)
    if not len(columns):
        return None
    mine = np.median(stacked.beta[np.ix_(ranks, columns)] * stacked.iteration_s[ranks, None], axis=0)
    theirs = (
        np.median(stacked.beta[np.ix_(peers, columns)] * stacked.iteration_s[peers, None], axis=0)
        if len(peers)
        else 0.0
    )
    return int(columns[int(np.argmax(mine - theirs))])


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
            function = top_function(stacked, activity, here, peers)
            phase = stacked.functions[function].phase if function is not None else Phase.NONE
            cause = cause_of(
                stacked,
                activity,
                here,
                peers,
                seconds[activity],
                phase,
                spot=_is_spot(stacked, function, here, peers, seconds[activity]),
                novel=_is_novel(stacked, function, here, peers),
            )
            cause = _in_the_engine(stacked, function, cause)
            coverage = min(seconds[activity] / whole, 1.0)
            if len(seconds) > 1:
                # Several causes on one rank each explain their own part of it.
                coverage = min(sum(seconds.values()) / max(whole, sum(seconds.values())), 1.0)
            parts.append(
                Excess(
                    here,
                    "rank",
                    "stable",
                    activity,
                    function,
                    seconds[activity],
                    coverage,
                    mine[activity].share_of_steps,
                    cause,
                )
            )
    return _gather(stacked, roles, rows, _crowded_enough(stacked, parts))


def _crowded_enough(stacked: Stacked, parts: list[Excess]) -> list[Excess]:
    """Without the ranks of CPU jobs from which others take no more of a core than any busy host does, all kinds of
    time together."""
    if not is_host_only(stacked):
        return parts
    floor_s = HOST_CROWDED_EFFECT * float(np.median(stacked.iteration_s))
    lost: dict[int, float] = {}
    for part in parts:
        if part.cause.cause == "cpu_contention":
            lost[int(part.ranks[0])] = lost.get(int(part.ranks[0]), 0.0) + part.seconds
    return [p for p in parts if p.cause.cause != "cpu_contention" or lost[int(p.ranks[0])] >= floor_s]


def _is_spot(stacked: Stacked, function: int | None, ranks: Indices, peers: Indices, excess_s: float) -> bool:
    """One function holds at least half of the excess."""
    if function is None:
        return False
    mine = float(np.median(stacked.beta[ranks, function] * stacked.iteration_s[ranks]))
    return mine - float(np.median(stacked.beta[peers, function] * stacked.iteration_s[peers])) >= 0.5 * excess_s


def _in_the_engine(stacked: Stacked, function: int | None, cause: Cause) -> Cause:
    """Not Python, if it is the autograd engine whose time leaves no event."""
    if function is None or ENGINE_WAIT_NAME not in stacked.functions[function].name or cause.cause != "host_python":
        return cause
    return Cause("unknown", False, "the autograd thread runs code that leaves no event", cause.ruled_out)


def _is_novel(stacked: Stacked, function: int | None, ranks: Indices, peers: Indices) -> bool:
    """The peers hardly have the function. All have the wait for the autograd engine, however short it is."""
    if function is None or ENGINE_WAIT_NAME in stacked.functions[function].name:
        return False
    mine = float(np.median(stacked.beta[ranks, function] * stacked.iteration_s[ranks]))
    return float(np.median(stacked.beta[peers, function] * stacked.iteration_s[peers])) < NOVEL_SHARE * mine


def _gather(stacked: Stacked, roles: Roles, roots: Indices, parts: list[Excess]) -> list[Excess]:
    """Excesses with the same cause, and the same function where it has a place in the source, become one finding."""
    groups: dict[tuple[str, object], list[Excess]] = {}
    for part in parts:
        name = stacked.functions[part.function] if part.function is not None else None
        told_apart = part.cause.cause == "unknown" or (
            part.activity in (Activity.PYTHON, Activity.INPUT, Activity.CHECKPOINT)
            # Where other work takes the core from a rank is chance: now in this function, now in that.
            and part.cause.cause not in ("configuration", "cpu_contention")
        )
        place: object = (name.user_location or name.name) if name is not None and told_apart else None
        groups.setdefault((part.cause.cause, place), []).append(part)
    gathered = []
    for (_, _), some in groups.items():
        if len(some) == 1:
            gathered.append(some[0])
            continue
        by_rank: dict[int, float] = {}
        for part in some:
            # One cause may show in several kinds of a rank's time.
            by_rank[int(part.ranks[0])] = by_rank.get(int(part.ranks[0]), 0.0) + part.seconds
        ranks = np.array(sorted(by_rank), np.intp)
        peers = np.setdiff1d(np.concatenate([_peers(roles, int(r), roots) for r in ranks]), ranks)
        if not len(peers):
            # All ranks of a role have an excess of their own: nobody is left to compare them with together.
            gathered.extend(some)
            continue
        head = max(some, key=lambda p: p.seconds)
        assert head.activity is not None
        function = top_function(stacked, head.activity, ranks, peers)
        seconds = float(np.median(list(by_rank.values())))
        phase = stacked.functions[function].phase if function is not None else Phase.NONE
        cause = cause_of(
            stacked,
            head.activity,
            ranks,
            peers,
            seconds,
            phase,
            spot=_is_spot(stacked, function, ranks, peers, seconds),
            novel=_is_novel(stacked, function, ranks, peers),
        )
        cause = _in_the_engine(stacked, function, cause)
        gathered.append(
            Excess(
                ranks,
                "rank",
                "stable",
                head.activity,
                function,
                seconds,
                float(np.median([p.coverage for p in some])),
                min(p.share_of_steps for p in some),
                cause,
            )
        )
    return gathered
