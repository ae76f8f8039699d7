"""Which cells (function, rank) are unusual: distance to expectation (D) and distance to peers (Delta).

Differential observability (EROICA, arXiv 2506.08528): no clocks, no training data; ranks with the same role should
behave alike. This module says where patterns differ and by how much; it names no root, since a victim's pattern
differs too: `diagnosis` decides with own times. Arrays in, arrays out; a million ranks in seconds on one machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from eroica.collectives import Float32s, Float64s, end_to_end
from eroica.critical_path import Activity, Int32s
from eroica.job import peer_groups
from eroica.pattern import Stacked
from eroica.trace import CollectiveKind

BETA_FLOOR = 0.01
"""Smallest spread of beta that counts as one unit of distance: a hundredth of the window."""
MU_FLOOR = 0.05
"""The same for mu and sigma: counters are not better than a few percent."""
DELTA_FLOOR = 0.5
"""Smallest spread of Delta within a role: below it, peers that agree to the last digit would make noise look rare."""
SMALL_ROLE = 16
"""A spread estimated from n ranks is uncertain: limits grow by 16/n. With normal noise this holds the family error from
16 ranks on; it is 3 % with 8 and 20 % with 4 (simulated)."""
FAMILY_ERROR = 0.01
"""Probability that any cell of a healthy job is called unusual, were the distances normal."""
EFFECT_FLOOR = 0.01
"""Share of the iteration below which a difference is not worth anybody's time (design section 4)."""
MEDIAN_ROWS = 1 << 16
"""Medians over more ranks than this are taken from an even sample: their standard error is below 1 % of the spread."""
SIGNATURE_BETA = 0.03
"""Kernels with less of the critical path do not tell roles apart."""
LOST_RECORDS = 0.5
"""A rank with fewer kernels per iteration than this share of its role's median has lost device records."""
INCOMPLETE = "incomplete records"
"""Ends the name of the role of ranks that have."""
SAME_ROLE = 0.7
"""Weighted overlap of the communication and kernels of two ranks from which they hold the same role."""


@dataclass(frozen=True, slots=True)
class Roles:
    """Who is comparable with whom. R roles."""

    of: Int32s
    """(W,) Role index of each rank."""
    names: tuple[str, ...]
    """(R,)"""
    by: str
    """"groups" or "functions"."""

    def members(self, role: int) -> npt.NDArray[np.intp]:
        """Row indices of the ranks of one role."""
        return np.flatnonzero(self.of == role)


@dataclass(frozen=True, slots=True)
class Localization:
    """Distances of each cell. W ranks, F functions, R roles."""

    roles: Roles
    peer_beta: Float32s
    """(R, F) Median of the role."""
    peer_mu: Float32s
    """(R, F) NaN = not measured."""
    peer_sigma: Float32s
    """(R, F)"""
    delta: Float32s
    """(W, F) Distance to the role's median pattern, in units of its spread."""
    limit: Float32s
    """(R, F) Delta above which a cell is unusual."""
    distance: Float32s
    """(W, F) D: how far beta lies outside of what is expected of the function's kind, in units of BETA_FLOOR."""
    unusual: npt.NDArray[np.bool_]
    """(W, F) Delta above the limit and an effect of at least 1 % of the iteration, upwards."""


EXPECTED_BETA = {
    Activity.COMPUTE: (0.0, 1.0),
    Activity.MEMORY: (0.0, 0.05),
    Activity.COLLECTIVE: (0.0, 0.30),
    Activity.INPUT: (0.0, 0.01),
    Activity.CHECKPOINT: (0.0, 0.01),
    Activity.COMPILE: (0.0, 0.0),
    Activity.GC: (0.0, 0.01),
    Activity.ALLOCATOR: (0.0, 0.005),
    Activity.SYNC: (0.0, 0.01),
    Activity.OPERATOR: (0.0, 1.0),
    Activity.PYTHON: (0.0, 0.01),
    Activity.LAUNCH: (0.0, 0.05),
    Activity.WAIT: (0.0, 0.30),
}
"""Box of beta that experience expects of a function, by what it is.

Host Python, input, collection and sync points own less than 1 % of a healthy iteration (arXiv 2506.08528 gives it for
Python functions); copies hide behind compute; exposed communication above 30 % means that scaling has stopped paying;
operators on the host are the compute of a CPU job. A prior for advice, never a blame."""


def roles_of(stacked: Stacked) -> Roles:
    """Roles from process groups and device models; where groups tell nothing, from what ranks communicate and
    compute."""
    summaries = stacked.summaries
    kinds = np.bincount(end_to_end([s.ledger.kind for s in summaries], np.uint8), minlength=len(CollectiveKind) + 1)
    staged = bool(kinds[[CollectiveKind.SEND, CollectiveKind.RECV]].any())
    told = peer_groups(stacked.ranks.tolist(), [s.groups for s in summaries], staged)
    by = "groups" if told is not None else "functions"
    labels = told if told is not None else _labels_by_function(stacked)
    models = set(stacked.device_models)
    if len(models - {""}) > 1:
        labels = [
            f"{label}, {model or 'unknown device'}" for label, model in zip(labels, stacked.device_models, strict=True)
        ]
    unlike = incomplete_ranks(stacked, labels)
    labels = [f"{label}, {INCOMPLETE}" if w in unlike else label for w, label in enumerate(labels)]
    number: dict[str, int] = {}
    of = np.array([number.setdefault(label, len(number)) for label in labels], np.int32)
    return Roles(of, tuple(number), by)


def incomplete_ranks(stacked: Stacked, labels: Sequence[str]) -> set[int]:
    """Rows whose device records are missing in whole or in good part: they look fast, and their peers slow beside them.

    Seen where a profiler lost a buffer or a stream on some ranks only (pytorch/kineto#996, #1255, pytorch#130560).
    `labels`: role of each rank by its other signs; only ranks of one role have about the same number of kernels.
    """
    counts = np.array([s.coverage.num_kernels for s in stacked.summaries]) / np.maximum(
        [s.num_iterations for s in stacked.summaries], 1
    )
    unlike = unmarked_ranks(stacked)
    number: dict[str, int] = {}
    of = np.array([number.setdefault(label, len(number)) for label in labels])
    of[sorted(unlike)] = -1
    for role in range(len(number)):
        members = np.flatnonzero(of == role)
        if not len(members):
            continue
        usual = float(np.median(counts[members]))
        unlike.update(members[counts[members] < LOST_RECORDS * usual].tolist())
    has_device = [s.coverage.has_device for s in stacked.summaries]
    if any(has_device):
        unlike.update(w for w, has in enumerate(has_device) if not has)
    return unlike if len(unlike) < len(stacked) else set()


def unmarked_ranks(stacked: Stacked) -> set[int]:
    """Rows without marks of iterations beside others with them: their whole window counts as one iteration, which is no
    iteration of theirs."""
    unmarked = {w for w, s in enumerate(stacked.summaries) if s.steps_by == "window"}
    return unmarked if len(unmarked) < len(stacked) else set()


def _labels_by_function(stacked: Stacked) -> list[str]:
    """Cluster ranks by the weighted overlap of their communication and main kernels; never by host functions or copies,
    which are what faults change. A cluster of one rank joins the nearest."""
    columns = [
        k
        for k, f in enumerate(stacked.functions)
        if f.activity == Activity.COLLECTIVE
        or (f.activity == Activity.COMPUTE and stacked.beta[:, k].max(initial=0) >= SIGNATURE_BETA)
    ]
    if not columns or len(stacked) < 4:
        return ["all"] * len(stacked)
    present = stacked.beta[:, columns] > 0
    weight = np.array(
        [
            1.0
            if stacked.functions[k].activity == Activity.COLLECTIVE
            else float(np.median(stacked.beta[present[:, i], k])) * 10
            for i, k in enumerate(columns)
        ]
    )
    unique, back, counts = _distinct(present)
    heads: list[int] = []
    cluster = np.zeros(len(unique), int)

    def overlap(a: int, b: int) -> float:
        union = float(weight[unique[a] | unique[b]].sum())
        return float(weight[unique[a] & unique[b]].sum()) / union if union else 1.0

    for k in np.argsort(-counts, kind="stable"):
        best = max(range(len(heads)), key=lambda h: overlap(int(k), heads[h]), default=-1)
        if best >= 0 and overlap(int(k), heads[best]) >= SAME_ROLE:
            cluster[k] = best
        else:
            cluster[k] = len(heads)
            heads.append(int(k))
    of = cluster[back]
    sizes = np.bincount(of, minlength=len(heads))
    for lonely in np.flatnonzero(sizes == 1):
        others = [h for h in range(len(heads)) if h != lonely and sizes[h] > 1]
        if others:
            of[of == lonely] = max(others, key=lambda h: overlap(heads[lonely], heads[h]))
    if len(set(of.tolist())) == 1:
        return ["all"] * len(stacked)
    return [f"kind {k}" for k in of]


def _distinct(
    rows: npt.NDArray[np.bool_],
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """`np.unique` of rows, ascending, with the place of each row among them and how often it is there; by numbers where
    a row fits into one, which sort several times as fast."""
    width = rows.shape[1]
    if width > 62:
        unique, back, counts = np.unique(rows, axis=0, return_inverse=True, return_counts=True)
        return unique, back.ravel(), counts
    bits = np.int64(1) << np.arange(width - 1, -1, -1, dtype=np.int64)
    keys, back, counts = np.unique(rows @ bits, return_inverse=True, return_counts=True)
    return (keys[:, None] & bits) > 0, back, counts


def family_quantile(cells: int) -> float:
    """K in "median + k * spread" for a family-wise error of 1 % over so many cells, were they normal."""
    return NormalDist().inv_cdf(1 - FAMILY_ERROR / max(cells, 1))


def _tail(cells: int) -> float:
    """The same for distances: sums of absolute values reach further above their median than a normal does."""
    half = NormalDist().inv_cdf(0.75)
    spread = 1.4826 * 0.3990
    return (NormalDist().inv_cdf(1 - FAMILY_ERROR / 2 / max(cells, 1)) - half) / spread


def _rows(members: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """An even sample of a role's ranks for medians."""
    if len(members) <= MEDIAN_ROWS:
        return members
    return members[np.linspace(0, len(members) - 1, MEDIAN_ROWS).astype(np.intp)]


def nan_median(values: npt.NDArray[np.floating], axis: int, keepdims: bool = False) -> Float64s:
    """Median along an axis, NaN left out; NaN, without a warning, where nothing is left (steps that a role lacks)."""
    if values.size and not np.isnan(values).any():
        return np.asarray(np.median(values, axis=axis, keepdims=keepdims), np.float64)
    empty = np.isnan(values).all(axis=axis, keepdims=True)
    result = np.asarray(np.nanmedian(np.where(empty, 0.0, values), axis=axis, keepdims=True), np.float64)
    result[empty] = np.nan
    return result if keepdims else result.squeeze(axis)


def lower_quartile(values: npt.NDArray[np.floating], axis: int, keepdims: bool = False) -> Float64s:
    """The value a quarter up from the least along an axis, NaN left out; NaN where nothing is left."""
    ordered = np.sort(values, axis=axis)  # NaN last
    last = np.isfinite(values).sum(axis=axis, keepdims=True) - 1
    picked = np.take_along_axis(ordered, np.maximum(last // 4, 0), axis=axis)
    result = np.asarray(np.where(last >= 0, picked, np.nan), np.float64)
    return result if keepdims else result.squeeze(axis)


def _median(values: npt.NDArray[np.floating]) -> Float32s:
    """Median over rows, NaN left out, NaN where a column has none; columns in one go where nothing is missing."""
    if not values.size:
        return np.full(values.shape[1], np.nan, np.float32)
    missing = np.isnan(values)
    if not missing.any():
        middle: Float32s = np.median(values, axis=0).astype(np.float32)
        return middle
    result = np.full(values.shape[1], np.nan, np.float32)
    for column in np.flatnonzero(~missing.all(0)):
        result[column] = np.median(values[~missing[:, column], column])
    return result


def localize(
    beta: Float32s,
    mu: Float32s,
    sigma: Float32s,
    activities: Sequence[Activity],
    roles: Roles,
    baseline_beta: Float32s | None = None,
) -> Localization:
    """Distances of every cell to expectation and to peers. Arrays (W, F); `baseline_beta`: (F,) of the job's own
    healthy window, which then is the expectation in place of the kind's box.

    Delta is the L1 distance to the role's component-wise median, each component over max(1.4826 MAD, floor); NaN
    components are left out. In roles of fewer than three ranks Delta has no direction: `unusual` is False there.
    """
    num_ranks, num_functions = beta.shape
    shape = (len(roles.names), num_functions)
    peer_beta, peer_mu, peer_sigma, limit = (np.full(shape, np.nan, np.float32) for _ in range(4))
    delta = np.zeros((num_ranks, num_functions), np.float32)
    unusual = np.zeros((num_ranks, num_functions), bool)
    cells = num_ranks * max(num_functions, 1)
    k, tail = family_quantile(cells), _tail(cells)
    for role in range(len(roles.names)):
        members = roles.members(role)
        everyone = len(members) == num_ranks
        part = delta if everyone else np.zeros((len(members), num_functions), np.float32)
        rise = np.zeros(0, np.float32)
        for values, peers, floor in (
            (beta, peer_beta, BETA_FLOOR),
            (mu, peer_mu, MU_FLOOR),
            (sigma, peer_sigma, MU_FLOOR),
        ):
            if values is not beta and np.isnan(values[:: max(1, num_ranks // 64)]).all() and np.isnan(values).all():
                continue
            few = values[_rows(members)]
            peers[role] = _median(few)
            spread = np.maximum(1.4826 * np.nan_to_num(_median(np.abs(few - peers[role]))), floor)
            away = (values if everyone else values[members]) - peers[role]
            if values is beta:
                rise = away
            part += np.nan_to_num(np.abs(away) / spread)
        few = part[:: max(1, len(members) // MEDIAN_ROWS)]
        middle = _median(few)
        noise = tail * (1 + SMALL_ROLE / len(members)) * 1.4826 * _median(np.abs(few - middle))
        limit[role] = middle + np.maximum(noise, k * DELTA_FLOOR)
        if len(members) >= 3:
            found = (part > limit[role]) & (rise >= EFFECT_FLOOR)
            if everyone:
                unusual = found
            else:
                unusual[members] = found
        if not everyone:
            delta[members] = part
    if baseline_beta is not None:
        distance = np.abs(beta - baseline_beta) / BETA_FLOOR
    else:
        high = np.array([EXPECTED_BETA[a][1] for a in activities], np.float32)
        distance = np.maximum(beta - high, 0) / BETA_FLOOR
    return Localization(roles, peer_beta, peer_mu, peer_sigma, delta, limit, distance.astype(np.float32), unusual)


def localize_stacked(stacked: Stacked, roles: Roles, baseline: Stacked | None = None) -> Localization:
    """`localize` on stacked summaries; a baseline is matched by function, functions that it lacks expect 0."""
    expected = None
    if baseline is not None and len(baseline):
        known = {f: k for k, f in enumerate(baseline.functions)}
        middle = np.median(baseline.beta, axis=0)
        expected = np.array([middle[known[f]] if f in known else 0.0 for f in stacked.functions], np.float32)
    return localize(stacked.beta, stacked.mu, stacked.sigma, [f.activity for f in stacked.functions], roles, expected)
