"""Where a run loses time to its size: the three modes in which scaling fails, and what is no matter of scale.

`account` takes the stacked ledgers of one run and splits the mean iteration into parts that add up: the ideal (the
usual rank's own work), communication that nothing hides, and what was lost to *synchronisation* (small delays of
whoever it is this time, for which all wait), *contention* (transfers that take longer in some steps, whatever the
arrivals), *locality* (stable differences by a rank's place in its host), *imbalance* (time that follows work) and a
*straggler*. `study` puts runs of several sizes side by side: efficiency against the ideal, and the part of contention
that is there in all steps and only a smaller run can show.

No clocks are compared: the transfer of a collective is the shortest duration among its members. It blames nobody;
`diagnosis` does. Shares of waiting are by a model with one meeting per step, averaged over the orders in which causes
can be taken out (Shapley), and scaled to what was measured. Used by `efficiency` and the taxonomy bench.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import combinations

import numpy as np
import numpy.typing as npt

from eroica.collectives import MAX_ITERATIONS, Float64s
from eroica.job import format_ranks
from eroica.localization import family_quantile, roles_of
from eroica.pattern import Stacked, stack

Bools = npt.NDArray[np.bool_]


class Part(StrEnum):
    """What an iteration goes to. The first five are modes; SYNCHRONISATION, CONTENTION and LOCALITY are those of
    scaling."""

    SYNCHRONISATION = "synchronisation"
    CONTENTION = "contention"
    LOCALITY = "locality"
    IMBALANCE = "imbalance"
    STRAGGLER = "straggler"
    COMMUNICATION = "communication"
    """Transfer that nothing hides, as in the best steps."""
    PIPELINE = "pipeline"
    """Sends, receives and whatever cannot be joined."""
    ALIKE = "alike"
    """Own work that all ranks have more of in some steps."""
    IDLE = "idle"
    """No event covers it."""
    UNEXPLAINED = "unexplained"
    """Waiting beyond what differences of own work explain."""


MODES = (Part.SYNCHRONISATION, Part.CONTENTION, Part.LOCALITY, Part.IMBALANCE, Part.STRAGGLER)
OF_SCALE = frozenset({Part.SYNCHRONISATION, Part.CONTENTION, Part.LOCALITY})
_LATE = (Part.SYNCHRONISATION, Part.LOCALITY, Part.IMBALANCE, Part.STRAGGLER)

MODE_FLOOR = 0.03
"""Of the iteration. Below it a mode is not named: the largest of hundreds of ranks is some percent late by chance."""
FEW_STEPS = 8
"""Fewer say nothing about what is stable and what varies."""
STABLE_FLOOR = 0.01
"""Of the iteration, for the stable excess of a rank: the effect that counts as one everywhere else, too."""
BEST_STEPS = 0.1
"""Quantile over steps that stands for transfers with nobody in the way; the very shortest would be luck."""
ONE_RANK = 0.5
"""Share of the peaks' cost on one rank that makes it the culprit; in a job of a hundred, chance gives one percent."""
FEW_PEAKS = 4
"""Steps with peaks on that rank; fewer are chance."""
SLOT_HOSTS = 0.75
"""Share of the hosts that must show it, to lay an excess to a place within the host."""
ALIKE_WITHIN = 3.0
"""Times the smallest excess that the largest may be, to be one thing."""
MANY_RANKS = 0.1
"""Share of the ranks with a stable excess above which it is the work that is uneven: nobody has so many stragglers."""
BLOCK = 8
"""Steps drawn together in the bootstrap: bursts of others' traffic last several."""
DRAWS = 400
INTERVAL = (0.025, 0.975)


@dataclass(frozen=True, slots=True)
class Share:
    """Seconds per iteration, with a 95 % interval by resampling steps."""

    seconds: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Account:
    """One run. `ideal_s` and all `parts` add up to `iteration_s`."""

    num_ranks: int
    num_hosts: int
    """Hosts that the traces name; at least 1."""
    num_steps: int
    iteration_s: Share
    ideal_s: float
    """Own work of the usual rank."""
    parts: dict[Part, Share]
    modes: tuple[Part, ...]
    """Modes that stand out of the noise and cost 3 % or more, dearest first."""
    stragglers: tuple[int, ...]
    """Ranks that the straggler's part is laid to."""
    transfer_s: float
    """All transfers of an iteration in the best steps, hidden or not; NaN without any."""
    num_bytes: float
    """Payload per iteration and rank; NaN = not told."""
    group_size: int
    """Members of the group that transfers most; 0 without any."""
    notes: tuple[str, ...]

    @property
    def efficiency(self) -> float:
        """Share of the iteration that is the usual rank's own work."""
        return self.ideal_s / self.iteration_s.seconds

    def noting(self, notes: Sequence[str]) -> Account:
        """The same with more notes: what was lost when the traces were read."""
        return replace(self, notes=(*self.notes, *notes))


@dataclass(frozen=True, slots=True)
class _Steps:
    """Means over ranks in each step that can be accounted for. Shapes (I,) and (W, I)."""

    own_s: Float64s
    by_work: Float64s
    length_s: Float64s
    wait_s: Float64s
    hidden_s: Float64s
    """(I,) Waiting that own work hides, mean over ranks."""
    exposed_s: Float64s
    waiting_s: Float64s
    transfer_s: Float64s
    """(I,) All transfers, hidden or not."""
    least_s: float
    """The same in the best steps."""
    notes: tuple[str, ...]


def account(stacked: Stacked) -> Account | None:
    """Split a run's iteration; None where there are too few ranks or steps."""
    stacked, short = _without_short(stacked)
    steps = _steps(stacked)
    if steps is None:
        return None
    roles = roles_of(stacked)
    own = steps.own_s
    length = steps.length_s.mean(axis=0)
    iteration_s = float(length.mean())
    usual = np.median(own, axis=1)
    ideal = np.empty(len(usual))
    for role in range(len(roles.names)):
        members = roles.members(role)
        # A quarter up: half of the ranks may sit on the wrong socket, and then the median is nobody's usual work.
        ideal[members] = float(np.quantile(usual[members], 0.25))
    over = own - ideal[:, None]
    alike = np.median(over - (usual - ideal)[:, None], axis=0)
    over = over - alike[None, :]
    causes, stragglers = _causes(stacked, over, steps.by_work, iteration_s)

    # Where the last rank computes, transfers of the others come to light that would else be hidden: its cost, as far
    # as they waited for it at all, hidden or not.
    bare = steps.exposed_s - steps.wait_s
    shift = bare.mean(axis=0) - bare[over.argmax(axis=0), np.arange(over.shape[1])]
    exposed = bare.mean(axis=0) - np.clip(shift, 0.0, steps.hidden_s)
    usual_exposed = float(np.quantile(exposed, BEST_STEPS))
    contention = np.clip(steps.transfer_s - steps.least_s, 0.0, np.maximum(exposed - usual_exposed, 0.0))
    contention = np.where(np.isfinite(contention), contention, 0.0)
    communication = np.minimum(exposed, usual_exposed)
    late = over.mean(axis=0) + steps.wait_s.mean(axis=0) + (bare.mean(axis=0) - contention - communication)
    modelled = _shapley(causes)
    total, told = float(late.mean()), float(sum(m.mean() for m in modelled.values()))
    scale = min(1.0, max(total, 0.0) / told) if told > 0 else 0.0
    series = {part: scale * modelled[part] for part in _LATE}
    series[Part.UNEXPLAINED] = late - sum(series.values())
    series[Part.CONTENTION] = contention
    series[Part.COMMUNICATION] = communication
    series[Part.PIPELINE] = steps.waiting_s.mean(axis=0)
    series[Part.ALIKE] = alike
    rest = length - own.mean(axis=0) - steps.exposed_s.mean(axis=0) - series[Part.PIPELINE]
    series[Part.IDLE] = rest
    shares = _intervals([length, *(series[part] for part in Part)])
    parts = dict(zip(Part, shares[1:], strict=True))
    found = [p for p in MODES if parts[p].seconds >= MODE_FLOOR * iteration_s and parts[p].low > 0]
    size, num_bytes = _traffic(stacked)
    return Account(
        num_ranks=len(stacked),
        num_hosts=max(len(set(stacked.hosts) - {""}), 1),
        num_steps=len(length),
        iteration_s=shares[0],
        ideal_s=float(ideal.mean()),
        parts=parts,
        modes=tuple(sorted(found, key=lambda p: -parts[p].seconds)),
        stragglers=tuple(int(stacked.ranks[w]) for w in stragglers) if Part.STRAGGLER in found else (),
        transfer_s=steps.least_s,
        num_bytes=num_bytes,
        group_size=size,
        notes=(*short, *steps.notes),
    )


def _without_short(stacked: Stacked) -> tuple[Stacked, tuple[str, ...]]:
    """Without ranks that have too few of the steps that most have, as one whose trace was cut: only steps of all ranks
    count, and it would take them from all. And a note on those."""
    there = np.isfinite(stacked.own_s)
    is_short = there[:, there.mean(axis=0) > 0.5].sum(axis=1) < FEW_STEPS if len(stacked) else np.zeros(0, bool)
    if is_short.all() or not is_short.any():
        return stacked, ()
    kept = stack([summary for summary, left_out in zip(stacked.summaries, is_short, strict=True) if not left_out])
    which = format_ranks(stacked.ranks[is_short].tolist())
    note = f"rank {which} has fewer than {FEW_STEPS} of the iterations that most ranks have, and is left out"
    return replace(kept, world_size=stacked.world_size), (note,)


def _steps(stacked: Stacked) -> _Steps | None:
    """What each rank did in each step: from steps of which all communications are known, else by their share."""
    if len(stacked) < 2 or stacked.own_s.shape[1] < FEW_STEPS:
        return None
    there = np.isfinite(stacked.own_s).all(axis=0)
    if int(there.sum()) < FEW_STEPS:
        return None
    joined, notes = stacked.joined, list(stacked.joined.not_joinable)
    folded = any(s.num_iterations > MAX_ITERATIONS for s in stacked.summaries)
    complete = set(stacked.steps[there].tolist())
    for summary in stacked.summaries:
        complete &= set(summary.ledger.complete_steps.tolist())
    if len(stacked) < stacked.world_size:
        notes.append(f"{stacked.world_size - len(stacked)} of {stacked.world_size} ranks are missing")
    wait = np.zeros((len(stacked), len(stacked.steps)))
    hidden = np.zeros(len(stacked.steps))
    behind = np.maximum(joined.wait_s - joined.exposed_wait_s, 0.0) / len(stacked)
    transfer = np.zeros(len(stacked.steps))
    mine = np.isin(joined.step, stacked.steps)
    column = np.searchsorted(stacked.steps, np.where(mine, joined.step, stacked.steps[0]))
    if not folded and len(complete) >= FEW_STEPS:
        there &= np.isin(stacked.steps, sorted(complete))
        np.add.at(wait, (joined.rank, column[joined.which]), np.where(mine[joined.which], joined.exposed_wait_s, 0.0))
        np.add.at(hidden, column[joined.which], np.where(mine[joined.which], behind, 0.0))
        np.add.at(transfer, column, np.where(mine, joined.transfer_s, 0.0) * _weight(stacked))
        least_s = float(np.quantile(transfer[there], BEST_STEPS))
    else:
        # Only a sample of the communications is known: what it shows is taken for all of them.
        exposed = np.array([float(s.ledger.sample_exposed_s.sum()) for s in stacked.summaries])
        waited = np.bincount(joined.rank, joined.exposed_wait_s, minlength=len(stacked))
        share = float(waited.sum() / exposed.sum()) if exposed.sum() > 0 else 0.0
        wait = np.nan_to_num(stacked.exposed_s) * min(share, 1.0)
        least_s, usual_s = _by_place(stacked)
        per_step = np.mean([float(s.ledger.channel_count.sum()) for s in stacked.summaries])
        hidden[:] = behind.sum() * per_step / max(len(joined.rank) / len(stacked), 1.0)
        open_s = np.nan_to_num(stacked.exposed_s - wait).mean(axis=0)
        middle = float(np.mean(open_s[there])) or 1.0
        transfer = usual_s * open_s / middle
        if len(joined.transfer_s):
            notes.append("only a sample of the communications is known: waiting and transfer are estimated from it")
    if not len(joined.transfer_s):
        notes.append("no collective could be joined over ranks: what was waited for is not known")
        transfer, least_s = np.full(len(stacked.steps), np.nan), math.nan

    def chosen(values: Float64s) -> Float64s:
        return np.asarray(values[:, there], np.float64)

    return _Steps(
        own_s=chosen(stacked.own_s),
        by_work=np.nan_to_num(chosen(stacked.top_by_work)),
        length_s=chosen(stacked.length_s),
        wait_s=chosen(wait),
        hidden_s=hidden[there],
        exposed_s=chosen(stacked.exposed_s),
        waiting_s=chosen(stacked.waiting_s),
        transfer_s=transfer[there],
        least_s=least_s,
        notes=tuple(notes),
    )


def _weight(stacked: Stacked) -> Float64s:
    """(K,) Of each communication in a sum over the job: groups beside each other transfer at the same time."""
    joined = stacked.joined
    return joined.members / max(len(stacked), 1)


def _by_place(stacked: Stacked) -> tuple[float, float]:
    """Transfers of an iteration in the best steps and in the mean, from samples: by channel and place, times how many
    there are."""
    joined = stacked.joined
    if not len(joined.transfer_s):
        return math.nan, math.nan
    key = joined.channel.astype(np.int64) * (1 << 16) + joined.position
    least = usual = 0.0
    per_place = [joined.transfer_s[key == k] for k in np.unique(key)]
    weights = [float(_weight(stacked)[key == k].mean()) for k in np.unique(key)]
    for values, weight in zip(per_place, weights, strict=True):
        least += weight * float(np.quantile(values, BEST_STEPS))
        usual += weight * float(values.mean())
    return least, usual


def _traffic(stacked: Stacked) -> tuple[int, float]:
    """Members of the group with most exposed time, and payload per iteration and rank over all of its channels."""
    sizes: dict[str, list[float]] = {}
    payload = []
    for summary in stacked.summaries:
        ledger = summary.ledger
        told = ledger.channel_bytes[np.isfinite(ledger.channel_bytes)]
        payload.append(float(told.sum()) if len(told) else math.nan)
        for channel, exposed in zip(ledger.channels, ledger.channel_exposed_s, strict=True):
            sizes.setdefault(channel.key, [channel.size, 0.0])[1] += float(exposed)
    size = int(max(sizes.values(), key=lambda item: (item[1], item[0]))[0]) if sizes else 0
    finite = [value for value in payload if math.isfinite(value)]
    return size, float(np.median(finite)) if finite else math.nan


def _causes(
    stacked: Stacked, over: Float64s, by_work: Float64s, iteration_s: float
) -> tuple[dict[Part, Float64s], list[int]]:
    """(W, I) Seconds by which each rank is late in each step, by why; and the rows of stragglers."""
    stable = np.median(over, axis=1)
    varying = over - stable[:, None]
    scatter = 1.4826 * np.median(np.abs(varying), axis=1)
    error = 1.2533 * scatter / math.sqrt(over.shape[1])
    # Of hundreds of ranks some seem steady by chance, and would be held to a tighter limit than the rest.
    error = np.maximum(error, np.median(error))
    limit = np.maximum(STABLE_FLOOR * iteration_s, family_quantile(len(stable)) * error)
    uneven = np.minimum(_more_work(stacked, iteration_s), np.where(stable > limit, stable, 0.0))
    local = _slots(stacked, stable - uneven, float(np.median(error)), iteration_s)
    left = np.where(stable - uneven - local > limit, stable - uneven - local, 0.0)
    by_host = _sides(stacked, left)
    local, left = local + by_host, left - by_host
    late = np.flatnonzero(left > 0)
    if len(late) > max(1, MANY_RANKS * len(stable)) and not _is_one_host(stacked, late):
        uneven, left, late = uneven + left, np.zeros_like(left), late[:0]
    rest = stable - uneven - local - left

    up, down = np.maximum(varying, 0.0), np.minimum(varying, 0.0)
    by_size = up * np.clip(by_work, 0.0, 1.0)
    # Steps with less work, and the chance in a median of few steps, go where the steps with more work go.
    mostly = (by_size.sum(axis=1) / np.maximum(up.sum(axis=1), 1e-12))[:, None]
    by_size = by_size + mostly * (down + rest[:, None])
    jitter = varying + rest[:, None] - by_size
    # Peaks that are always the same rank's are no amplification of chance.
    high = family_quantile(over.size) * np.maximum(scatter, 1e-12)[:, None]
    peaks = np.where(jitter > np.maximum(high, MODE_FLOOR * iteration_s), jitter, 0.0)
    first = peaks.argmax(axis=0)
    per_rank = np.bincount(first, peaks.max(axis=0), minlength=len(stable))
    steps_hit = np.bincount(first, peaks.max(axis=0) > 0, minlength=len(stable))
    culprit = int(per_rank.argmax())
    moved = np.zeros_like(over)
    if len(stable) > 2 and steps_hit[culprit] >= FEW_PEAKS and per_rank[culprit] >= ONE_RANK * per_rank.sum():
        moved[culprit] = peaks[culprit]
        late = np.union1d(late, [culprit])
    ones = np.ones((1, over.shape[1]))
    return {
        Part.SYNCHRONISATION: jitter - moved,
        Part.LOCALITY: local[:, None] * ones,
        Part.IMBALANCE: uneven[:, None] * ones + by_size,
        Part.STRAGGLER: left[:, None] * ones + moved,
    }, late.tolist()


def _more_work(stacked: Stacked, iteration_s: float) -> Float64s:
    """(W,) Seconds per iteration that a rank's functions take since they are given more than the usual rank's."""
    more = np.zeros(len(stacked))
    seconds = stacked.beta.astype(np.float64) * iteration_s
    for column in range(len(stacked.functions)):
        work = stacked.work[:, column]
        if not np.isfinite(work).all() or float(np.median(work)) <= 0:
            continue
        usual = float(np.quantile(work, 0.25))  # 0 where a quarter of the ranks are given none
        more += seconds[:, column] * np.where(work > usual, 1.0 - usual / np.maximum(work, 1e-12), 0.0)
    return more


def _places(stacked: Stacked) -> dict[str, npt.NDArray[np.intp]]:
    """Rows of each host, in order of rank; ranks without a host are left out."""
    rows: dict[str, list[int]] = {}
    for w, host in enumerate(stacked.hosts):
        if host:
            rows.setdefault(host, []).append(w)
    return {host: np.array(found, np.intp) for host, found in rows.items()}


def _is_one_host(stacked: Stacked, rows: npt.NDArray[np.intp]) -> bool:
    return len({stacked.hosts[w] for w in rows}) == 1 and stacked.hosts[rows[0]] != ""


def _slots(stacked: Stacked, stable: Float64s, error: float, iteration_s: float) -> Float64s:
    """(W,) The part of a stable excess that ranks at the same place of most hosts share, and other places have not."""
    local = np.zeros(len(stable))
    hosts = [rows for rows in _places(stacked).values() if len(rows) > 1]
    if len(hosts) < 3 or len({len(rows) for rows in hosts}) != 1:
        return local
    table = stable[np.array(hosts)]
    slot = np.median(table, axis=0)
    least = max(STABLE_FLOOR * iteration_s, family_quantile(len(slot)) * 1.2533 * error / math.sqrt(len(hosts)))
    shown = (slot > least) & ((table > 0.5 * slot).mean(axis=0) >= SLOT_HOSTS)
    if shown.any() and not shown.all():
        for rows in hosts:
            local[rows] = np.where(shown, slot, 0.0)
    return local


def _sides(stacked: Stacked, left: Float64s) -> Float64s:
    """(W,) The stable excess of some of one host's ranks, but not all, alike: another socket, another switch."""
    local = np.zeros(len(left))
    for rows in _places(stacked).values():
        late = rows[left[rows] > 0]
        if 1 < len(late) < len(rows) and left[late].max() <= ALIKE_WITHIN * left[late].min():
            local[late] = left[late]
    return local


def _shapley(causes: dict[Part, Float64s]) -> dict[Part, Float64s]:
    """(I,) Seconds of each step that each cause costs the whole job, which goes on when its last rank has come: the
    mean, over all orders of taking causes out, of what each takes with it. They add up to the lateness of the last."""
    names = list(causes)
    last: dict[frozenset[Part], Float64s] = {}
    shape = next(iter(causes.values())).shape
    for size in range(len(names) + 1):
        for some in combinations(names, size):
            total = np.zeros(shape)
            for name in some:
                total = total + causes[name]
            last[frozenset(some)] = total.max(axis=0)
    shares = {}
    for name in names:
        share = np.zeros(shape[1])
        others = [other for other in names if other != name]
        for size in range(len(others) + 1):
            weight = math.factorial(size) * math.factorial(len(others) - size) / math.factorial(len(names))
            for some in combinations(others, size):
                share += weight * (last[frozenset({*some, name})] - last[frozenset(some)])
        shares[name] = share
    return shares


def _intervals(series: Sequence[Float64s]) -> list[Share]:
    """Mean of each series over steps, with the interval of blocks of steps drawn again; the same draws for all."""
    table = np.array(series)
    count = table.shape[1]
    block = min(BLOCK, max(1, count // 4))
    # The same for the same input: a report that changes when it is made again would be doubted.
    starts = np.random.default_rng(count).integers(0, count, (DRAWS, -(-count // block)))
    rows = ((starts[:, :, None] + np.arange(block)) % count).reshape(DRAWS, -1)[:, :count]
    means = table[:, rows].mean(axis=2)
    low, high = np.quantile(means, INTERVAL, axis=1)
    return [Share(float(m), float(a), float(b)) for m, a, b in zip(table.mean(axis=1), low, high, strict=True)]
