"""Slow transfers: which groups, and what they share: a host, a link between two hosts, or the job-wide fabric.

The transfer of a collective is what remains when its members' waiting is taken out, so a rank that is slow elsewhere
does not make it long. Groups of the same shape (same operations, sizes and member counts) are each other's reference;
a lone group has only its own healthy window. A host is named when all groups through it are slow and no other is; a
link when all groups over both of its hosts are slow and neither host is slow elsewhere. Groups that stay within a host
are explained by its devices in the same way. What groups cannot tell apart is said to be undecided; `wires` may know
more. Transfers that are slow in single steps: `stalls`. Used by `diagnosis`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

from eroica.collectives import Float64s, Joined
from eroica.localization import EFFECT_FLOOR
from eroica.pattern import Stacked
from eroica.turning import since, turn_of

SLOWER = 1.15
"""A group's transfers must be this much longer than its siblings' at the median: shared links make a few percent
normal."""
SPREADS = 5.0
"""And this many robust spreads of its siblings away."""
MANY_HOSTS = 16
"""Groups over more hosts than this are not searched for pairs: they cross too many links to name one."""


@dataclass(frozen=True, slots=True)
class SlowTransfer:
    """Channels with slow transfers, and where that comes from."""

    scope: str
    """host, link or group; rank: one device of a host."""
    hosts: tuple[str, ...]
    channels: tuple[int, ...]
    """Indices into Joined.channels."""
    ranks: npt.NDArray[np.intp]
    """Indices of the ranks of these channels (of the host's ranks, for scope host; of both ends, for a link within a
    host)."""
    seconds: float
    """Exposed transfer per iteration above the reference."""
    ratio: float
    reference: str
    """"siblings", "baseline" or "other steps"."""
    on_one_host: bool
    """All slow channels stay within a host: not the network."""
    undecided: str
    """What the groups cannot tell apart; "" = nothing."""
    steps: str = "stable"
    """"rotating": in single steps; "every N": at equal distances."""
    share_of_steps: float = 1.0
    since: int | None = None
    """The step within the window from which on they are slow; None = in all of it."""


Operation = tuple[int, ...]
"""(communications of its step, position, kind, hash of its type and size)"""


@dataclass(frozen=True, slots=True)
class Lane:
    """One channel as measured."""

    channel: int
    shape: tuple[object, ...]
    transfer_s: Float64s
    """Per position: median transfer over steps."""
    operations: Mapping[Operation, tuple[int, float]]
    """What runs at each position, in steps of each length: how often, and its median transfer."""
    exposed_s: float
    """Exposed transfer per iteration, waiting left out, median over members."""
    spread: float
    """Relative spread of the summed transfer over steps."""
    ranks: npt.NDArray[np.intp]
    hosts: frozenset[str]


def lanes_of(stacked: Stacked) -> list[Lane]:
    """All channels of which some communication could be joined. By columns: a large job has 100,000 channels."""
    joined = stacked.joined
    channels = np.unique(joined.channel)
    if not len(channels):
        return []
    of = np.searchsorted(channels, joined.channel)
    # Transfers by place in the step.
    places, place = _groups(joined.channel, joined.position)
    transfers = medians(joined.transfer_s, place, len(places))
    place_ends = np.searchsorted(of[places], np.arange(len(channels) + 1))
    # Sums by step, of the steps that tell of all communications.
    steps, step = _groups(joined.channel, joined.step)
    sums = np.bincount(step, weights=joined.transfer_s, minlength=len(steps))
    counts = np.bincount(step, minlength=len(steps))
    of_step = of[steps]
    most = np.zeros(len(channels), np.intp)
    np.maximum.at(most, of_step, counts)
    full = counts == most[of_step]
    middle = medians(sums[full], of_step[full], len(channels))
    away = medians(np.abs(sums[full] - middle[of_step[full]]), of_step[full], len(channels))
    is_steady = (middle > 0) & (np.bincount(of_step, minlength=len(channels)) > 2)
    spread = np.where(is_steady, 1.4826 * away / np.where(is_steady, middle, 1.0), 0.0)
    exposed = _exposed_transfers(joined, channels)
    operations = _operations(joined, of, counts[step], len(channels))
    begins = np.searchsorted(joined.member_channel, channels)
    ends = np.append(begins[1:], len(joined.member_channel))
    lanes = []
    for k, (channel, begin, end) in enumerate(zip(channels.tolist(), begins, ends, strict=True)):
        ranks = joined.member_rank[begin:end].astype(np.intp)
        transfer = transfers[place_ends[k] : place_ends[k + 1]]
        named = joined.channels[channel]
        hosts = frozenset(stacked.hosts[w] for w in ranks.tolist())
        shape = (
            named.description,
            named.size or len(ranks),
            len(transfer),
            tuple(sorted({operation[2:] for operation in operations[k]})),
            len(hosts),
        )
        lanes.append(Lane(channel, shape, transfer, operations[k], float(exposed[k]), float(spread[k]), ranks, hosts))
    return lanes


def _groups(
    channel: npt.NDArray[np.integer], within: npt.NDArray[np.integer]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """For each pair of values its first row, ascending by channel and then value; and for each row its pair."""
    low = within.min()
    key = channel.astype(np.int64) * (int(within.max()) - int(low) + 1) + (within - low)
    _, first, back = np.unique(key, return_index=True, return_inverse=True)
    return first, back


def medians(values: Float64s, group: npt.NDArray[np.integer], num: int) -> Float64s:
    """Of the values of each group 0..num-1; NaN for one without values."""
    order = np.lexsort((values, group))
    ordered = values[order]
    ends = np.searchsorted(group[order], np.arange(num + 1))
    size = np.diff(ends)
    found: Float64s = np.full(num, np.nan)
    some = size > 0
    low, high = (ends[:-1] + (size - 1) // 2)[some], (ends[:-1] + size // 2)[some]
    found[some] = np.where(low == high, ordered[low], (ordered[low] + ordered[high]) / 2)
    return found


def _operations(
    joined: Joined, of: npt.NDArray[np.intp], lengths: npt.NDArray[np.intp], num: int
) -> list[dict[Operation, tuple[int, float]]]:
    """For each channel what runs at each place, in order of appearance. `of`: which channel each communication is of;
    `lengths`: communications in its step."""
    columns = (of, lengths, joined.position, joined.kind, joined.check)
    order = np.lexsort(columns[::-1])
    new = np.ones(len(order), bool)
    new[1:] = np.any([column[order[1:]] != column[order[:-1]] for column in columns], axis=0)
    group = np.empty(len(order), np.intp)
    group[order] = np.cumsum(new) - 1
    first = np.full(int(new.sum()), len(order), np.intp)
    np.minimum.at(first, group, np.arange(len(order)))
    counts, middle = np.bincount(group), medians(joined.transfer_s, group, len(first))
    found: list[dict[Operation, tuple[int, float]]] = [{} for _ in range(num)]
    appeared = np.argsort(first, kind="stable")
    rows = first[appeared]
    told = (column[rows].tolist() for column in columns)
    for k, length, position, kind, check, count, seconds in zip(
        *told, counts[appeared].tolist(), middle[appeared].tolist(), strict=True
    ):
        found[k][length, position, kind, check] = count, seconds
    return found


def _exposed_transfers(joined: Joined, channels: npt.NDArray[np.int32]) -> Float64s:
    """For each channel the median over its members of: exposed time per iteration, less its exposed waiting. Of many
    members an even sample."""
    num = len(joined.member_rank)
    left = joined.exposed_s - np.minimum(joined.exposed_wait_s, joined.exposed_s)
    seconds = np.bincount(joined.member, weights=left, minlength=num)
    _, step = np.unique(joined.step, return_inverse=True)
    num_steps = int(step.max()) + 1
    met = np.zeros(num * num_steps, bool)
    met[joined.member.astype(np.intp) * num_steps + step[joined.which]] = True
    per_step = seconds / np.maximum(met.reshape(num, num_steps).sum(axis=1), 1)
    begin = np.searchsorted(joined.member_channel, channels)
    size = np.append(begin[1:], num) - begin
    of = np.repeat(np.arange(len(channels)), size)
    every = np.maximum(size // 64, 1)[of]
    is_picked = (np.arange(num) - begin[of]) % every == 0
    return medians(per_step[is_picked], of[is_picked], len(channels))


def slow_transfers(stacked: Stacked, baseline: Stacked | None, iteration_s: float) -> list[SlowTransfer]:
    """Slow channels, gathered by what they share. Empty where nothing is slow or nothing can be compared."""
    turn = turn_of(stacked, float(np.median(baseline.iteration_s))) if baseline is not None and len(baseline) else None
    if turn is not None:
        stacked = since(stacked, turn)
    lanes = lanes_of(stacked)
    families: dict[tuple[object, ...], list[Lane]] = defaultdict(list)
    for lane in lanes:
        families[lane.shape].append(lane)
    slow: list[_Slow] = []
    quick: list[Lane] = []
    for number, family in enumerate(families.values()):
        found = _against_siblings(family, number, EFFECT_FLOOR * iteration_s) if len(family) >= 3 else []
        slow.extend(found)
        if len(family) >= 3:
            late = {item.lane.channel for item in found}
            quick.extend(lane for lane in family if lane.channel not in late)
    transfers = _explain_all(stacked, slow, quick, "siblings")
    if baseline is not None:
        before = {baseline.joined.channels[lane.channel].key: lane for lane in lanes_of(baseline)}
        named = {c for transfer in transfers for c in transfer.channels}
        keys = {lane.channel: stacked.joined.channels[lane.channel].key for lane in lanes}
        grown, steady = _against_baseline([lane for lane in lanes if lane.channel not in named], before, keys)
        transfers.extend(_explain_all(stacked, grown, steady, "baseline"))
    return [replace(t, since=turn) for t in transfers if t.seconds >= EFFECT_FLOOR * iteration_s]


@dataclass(frozen=True, slots=True)
class _Slow:
    """A lane with its distance to the reference."""

    lane: Lane
    ratio: float
    seconds: float
    """Exposed transfer above the reference, per iteration."""
    family: int


def _against_siblings(family: Sequence[Lane], number: int, least_s: float) -> list[_Slow]:
    """Lanes that are slower than others of their family. `least_s`: a difference that nobody is told of."""
    length = min(len(lane.transfer_s) for lane in family)
    table = np.array([lane.transfer_s[:length] for lane in family])
    ratio = np.median(table / np.maximum(np.median(table, axis=0), 1e-9), axis=1)
    # With as many slow groups as others the median is no reference; the fast part is. Where transfers are short, a
    # large share of one is noise.
    low = float(np.quantile(ratio, 0.25, method="lower"))
    spent_s = table.sum(axis=1)
    is_fast = (ratio <= low * SLOWER) | (spent_s <= spent_s[ratio <= low].min() + least_s)
    fast = ratio[is_fast]
    if len(fast) < max(2, len(family) // 4):
        return []
    middle = float(np.median(fast))
    limit = max(SLOWER, 1 + SPREADS * max(float(1.4826 * np.median(np.abs(fast / middle - 1))), 0.01))
    normal = float(np.median([lane.exposed_s for lane, fits in zip(family, is_fast, strict=True) if fits]))
    return [
        _Slow(lane, float(r / middle), max(lane.exposed_s - normal, 0.0), number)
        for lane, r in zip(family, ratio, strict=True)
        if r / middle > limit
    ]


SHARED = 0.5
"""Part of the transfers of either window that must be of operations that both have, to compare them."""


def growth(lane: Lane, before: Lane) -> float | None:
    """Times what the same transfers of a lane together took in the healthy window; None = they are not the same ones.

    Of the sums: where groups are not told apart, or only large messages are slow, most collectives are as quick as
    ever, and the few that take the time would be outvoted. Of the same operations at the same places of steps that
    communicate as often: where a job does two things by turns, a window with more of one has longer transfers. Sizes
    that are new in each step are left out of account.
    """
    if len(lane.transfer_s) != len(before.transfer_s):
        return None
    for depth in (4, 3):
        now, then = (_at_depth(of.operations, depth) for of in (lane, before))
        both = now.keys() & then.keys()
        now_s, then_s = (sum(of[operation] for operation in both) for of in (now, then))
        if both and now_s >= SHARED * sum(now.values()) and then_s >= SHARED * sum(then.values()):
            return now_s / max(then_s, 1e-9)
    return None


def _at_depth(operations: Mapping[Operation, tuple[int, float]], depth: int) -> dict[Operation, float]:
    """Transfers by the first `depth` things that are known of an operation."""
    spent: dict[Operation, float] = defaultdict(float)
    counts: dict[Operation, int] = defaultdict(int)
    for operation, (count, seconds) in operations.items():
        spent[operation[:depth]] += count * seconds
        counts[operation[:depth]] += count
    return {operation: seconds / counts[operation] for operation, seconds in spent.items()}


def _against_baseline(
    lanes: Sequence[Lane], before: Mapping[str, Lane], keys: Mapping[int, str]
) -> tuple[list[_Slow], list[Lane]]:
    grown, steady = [], []
    for number, lane in enumerate(lanes):
        known = before.get(keys[lane.channel])
        ratio = growth(lane, known) if known is not None else None
        if known is None or ratio is None:
            continue
        if ratio > max(SLOWER, 1 + SPREADS * max(known.spread, lane.spread) / 2):
            grown.append(_Slow(lane, ratio, max(lane.exposed_s - known.exposed_s, 0.0), number))
        else:
            steady.append(lane)
    return grown, steady


def _explain_all(stacked: Stacked, slow: Sequence[_Slow], quick: Sequence[Lane], reference: str) -> list[SlowTransfer]:
    """Groups within a host are slowed by its devices and their links, others by what lies between hosts."""
    if len(set(stacked.hosts)) < 2 and reference == "baseline" and not quick:
        return _explain(stacked, slow, quick, reference)
    within = [item for item in slow if len(item.lane.hosts) == 1 and "" not in item.lane.hosts]
    explained = _explain(stacked, [item for item in slow if item not in within], quick, reference)
    for host in sorted({min(item.lane.hosts) for item in within}):
        explained += _explain_within(
            stacked,
            host,
            [item for item in within if host in item.lane.hosts],
            [lane for lane in quick if lane.hosts == {host}],
            reference,
        )
    return explained


def _explain_within(
    stacked: Stacked, host: str, slow: Sequence[_Slow], quick: Sequence[Lane], reference: str
) -> list[SlowTransfer]:
    """Devices and pairs of devices of one host that explain its slow lanes, as hosts and pairs of hosts do outside:
    each lies in slow lanes only, and the one that explains most comes first."""
    left, explained = list(slow), []
    calm = [set(lane.ranks.tolist()) for lane in quick]
    while left:
        sets = [set(item.lane.ranks.tolist()) for item in left]
        everyone = sorted(set().union(*sets))
        devices = [(w,) for w in everyone if not any(w in lane for lane in calm)]
        pairs = [p for p in combinations(everyone, 2) if not any(lane.issuperset(p) for lane in calm)]
        reach = {place: sum(some.issuperset(place) for some in sets) for place in [*devices, *pairs]}
        # A single group shows no device: its link, or any of them, may be the bad one.
        reach = {place: number for place, number in reach.items() if number > 0 and (len(place) == 2 or number > 1)}
        best = max(reach, key=lambda place: (reach[place], -len(place)), default=None)
        if best is None or any(
            reach[place] == reach[best] and len(place) == len(best) for place in reach if place != best
        ):
            whole = {w for w in range(len(stacked)) if stacked.hosts[w] == host} <= set(everyone)
            undecided = "the slow groups share no two devices of this host that other groups avoid"
            explained.append(
                _transfer(stacked, left, "host" if whole else "group", (host,), reference, undecided, everyone)
            )
            break
        mine = [item for item, some in zip(left, sets, strict=True) if some.issuperset(best)]
        scope = "link" if len(best) == 2 else "rank"
        explained.append(_transfer(stacked, mine, scope, (host,), reference, "", best))
        left = [item for item in left if item not in mine]
    return explained


def _explain(stacked: Stacked, slow: Sequence[_Slow], quick: Sequence[Lane], reference: str) -> list[SlowTransfer]:
    """Hosts and links that explain the slow lanes: each lies in slow lanes only; the one that explains most comes
    first."""
    left = list(slow)
    explained = []
    while left:
        hosts_of = [item.lane.hosts for item in left]
        everywhere = sorted(frozenset().union(*hosts_of))
        if any(len(some) > 1 for some in hosts_of):
            # What stays within a host passes no card: it says nothing about one.
            quick = [lane for lane in quick if len(lane.hosts) > 1]
        hosts = [h for h in everywhere if not any(h in lane.hosts for lane in quick)]
        pairs = sorted({pair for some in hosts_of if len(some) <= MANY_HOSTS for pair in combinations(sorted(some), 2)})
        pairs = [p for p in pairs if not any(lane.hosts.issuperset(p) for lane in quick)]
        through = {
            place: frozenset(k for k, some in enumerate(hosts_of) if some.issuperset(place))
            for place in [*((host,) for host in hosts), *pairs]
        }
        best = max(through, key=lambda place: (len(through[place]), -len(place), place), default=None)
        # Two pairs of hosts that explain a slow group each are two links.
        rivals = [p for p in through if best is not None and p != best and _rival(through[p], through[best])]
        shared_hosts = tuple(sorted(frozenset.intersection(*hosts_of)))
        if best is None and len(shared_hosts) in (1, 2):
            # Quick groups cross the same hosts: not the host or the whole path, but one port or rail of it.
            place = "host" if len(shared_hosts) == 1 else "link"
            explained.append(
                _transfer(
                    stacked,
                    left,
                    place,
                    shared_hosts,
                    reference,
                    "other groups over the same hosts are quick: it is the one NIC or rail of these groups' ranks",
                )
            )
            break
        if best is None or (reference == "baseline" and not quick):
            explained.append(
                _transfer(
                    stacked,
                    left,
                    "group",
                    (),
                    reference,
                    "the slow groups share no single host or pair of hosts that other groups avoid",
                )
            )
            break
        mine = [item for item in left if item.lane.hosts.issuperset(best)]
        undecided = ""
        scope = "host" if len(best) == 1 else "link"
        if scope == "host" and rivals:
            shared = frozenset.intersection(*(item.lane.hosts for item in mine))
            if len(shared) == 2:
                best, scope = (min(shared), max(shared)), "link"
                undecided = (
                    "the slow groups cross the same two hosts and no other group does, so the link and its two ends "
                    "cannot be told apart"
                )
            else:
                several = "several hosts are in all slow groups and in no other"
                ways = f"the slow groups cross the same hosts: the card of {best[0]} and its ways to them may be it"
                text = several if any(len(rival) == 1 for rival in rivals) else ways
                explained.append(_transfer(stacked, left, "group", (), reference, text))
                break
        if scope == "link" and not undecided and any(len(rival) == 2 for rival in rivals):
            text = "several pairs of hosts are in all slow groups and in no other"
            explained.append(_transfer(stacked, mine, "group", (), reference, text))
        else:
            explained.append(_transfer(stacked, mine, scope, best, reference, undecided))
        left = [item for item in left if item not in mine]
    return explained


def _rival(one: frozenset[int], other: frozenset[int]) -> bool:
    """Whether two places explain as many slow lanes, of which some are the same."""
    return len(one) == len(other) and not one.isdisjoint(other)


def _transfer(
    stacked: Stacked,
    items: Sequence[_Slow],
    scope: str,
    hosts: tuple[str, ...],
    reference: str,
    undecided: str,
    within: Sequence[int] = (),
) -> SlowTransfer:
    """`within`: the ranks to tell where a single host's devices explain it."""
    lanes = [item.lane for item in items]
    ranks = np.unique(np.concatenate([lane.ranks for lane in lanes]))
    if within:
        ranks = np.array(sorted(within), np.intp)
    elif scope == "host":
        ranks = np.array([w for w in range(len(stacked)) if stacked.hosts[w] in hosts], np.intp)
    if scope == "group" and not within:
        several = len(set(stacked.hosts)) > 1
        union = frozenset().union(*(lane.hosts for lane in lanes))
        hosts = tuple(sorted(union)) if several and len(union) < len(set(stacked.hosts)) else ()
    # Groups of one family run side by side on different ranks; families follow each other.
    by_family: dict[int, float] = defaultdict(float)
    for item in items:
        by_family[item.family] = max(by_family[item.family], item.seconds)
    return SlowTransfer(
        scope=scope,
        hosts=hosts,
        channels=tuple(lane.channel for lane in lanes),
        ranks=ranks,
        seconds=sum(by_family.values()),
        ratio=float(np.median([item.ratio for item in items])),
        reference=reference,
        on_one_host=all(len(lane.hosts) == 1 for lane in lanes) and "" not in stacked.hosts,
        undecided=undecided,
    )
