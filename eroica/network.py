"""Slow transfers: which groups, and what they share: a host, a link between two hosts, or the job-wide fabric.

The transfer of a collective is what remains when its members' waiting is taken out, so a rank that is slow elsewhere does not
make it long. Groups of the same shape (same operations, sizes and member counts) are each other's reference; a lone
group has only its own healthy window. A host is named when all groups through it are slow and no other is; a link when all
groups over both of its hosts are slow and neither host is slow elsewhere. What groups cannot tell apart is said to be undecided.
Used by `diagnosis`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from eroica.collectives import Float64s, Joined
from eroica.localization import EFFECT_FLOOR
from eroica.pattern import Stacked

SLOWER = 1.15
"""A group's transfers must be this much longer than its siblings' at the median: shared links make a few percent normal."""
SPREADS = 5.0
"""And this many robust spreads of its siblings away."""


@dataclass(frozen=True, slots=True)
class SlowTransfer:
    """Channels with slow transfers, and where that comes from."""

    scope: str
    """host, link or group."""
    hosts: tuple[str, ...]
    channels: tuple[int, ...]
    """Indices into Joined.channels."""
    ranks: npt.NDArray[np.intp]
    """Indices of the ranks of these channels (of the host's ranks, for scope host)."""
    seconds: float
    """Exposed transfer per iteration above the reference."""
    ratio: float
    reference: str
    """"siblings" or "baseline"."""
    on_one_host: bool
    """All slow channels stay within a host: not the network."""
    undecided: str
    """What the groups cannot tell apart; "" = nothing."""


@dataclass(frozen=True, slots=True)
class _Lane:
    """One channel as measured."""

    channel: int
    shape: tuple[object, ...]
    transfer_s: Float64s
    """Per position: median transfer over steps."""
    exposed_s: float
    """Exposed transfer per iteration, median over members."""
    spread: float
    """Relative spread of the summed transfer over steps."""
    ranks: npt.NDArray[np.intp]
    hosts: frozenset[str]


def _lanes(stacked: Stacked) -> list[_Lane]:
    joined = stacked.joined
    lanes = []
    order = np.argsort(joined.channel[joined.which], kind="stable") if len(joined.which) else np.empty(0, np.intp)
    row_channel = joined.channel[joined.which][order] if len(order) else np.empty(0, np.int32)
    for channel in np.unique(joined.channel):
        mine = np.flatnonzero(joined.channel == channel)
        rows = order[np.searchsorted(row_channel, channel, "left") : np.searchsorted(row_channel, channel, "right")]
        ranks = np.unique(joined.rank[rows])
        positions = np.unique(joined.position[mine])
        transfer = np.array([np.median(joined.transfer_s[mine[joined.position[mine] == p]]) for p in positions])
        steps, back = np.unique(joined.step[mine], return_inverse=True)
        sums, counts = np.bincount(back, weights=joined.transfer_s[mine]), np.bincount(back)
        full = sums[counts == counts.max()]
        middle = float(np.median(full)) if len(full) else 0.0
        spread = float(1.4826 * np.median(np.abs(full - middle)) / middle) if middle > 0 and len(steps) > 2 else 0.0
        exposed = _exposed_transfer(stacked, joined, rows, ranks)
        named = joined.channels[channel]
        shape = (named.description, named.size or len(ranks), len(positions), tuple(sorted(_kinds(stacked, joined, mine, rows))))
        hosts = frozenset(stacked.hosts[w] for w in ranks)
        lanes.append(_Lane(int(channel), (*shape, len(hosts)), transfer, exposed, spread, ranks, hosts))
    return lanes


def _kinds(stacked: Stacked, joined: Joined, mine: npt.NDArray[np.intp], rows: npt.NDArray[np.intp]) -> set[tuple[int, int]]:
    first = rows[: len(mine)]
    found = set()
    for row in first:
        ledger = stacked.summaries[joined.rank[row]].ledger
        sample = joined.sample[row]
        found.add((int(ledger.kind[sample]), int(ledger.check[sample])))
    return found


def _exposed_transfer(stacked: Stacked, joined: Joined, rows: npt.NDArray[np.intp], ranks: npt.NDArray[np.intp]) -> float:
    """Median over members of: exposed time of the channel per iteration, less its exposed waiting."""
    per_rank = []
    for w in ranks[:: max(1, len(ranks) // 64)]:
        mine = rows[joined.rank[rows] == w]
        ledger = stacked.summaries[w].ledger
        exposed = ledger.sample_exposed_s[joined.sample[mine]].astype(np.float64)
        steps = len(np.unique(joined.step[joined.which[mine]]))
        per_rank.append(float((exposed - np.minimum(joined.exposed_wait_s[mine], exposed)).sum()) / max(steps, 1))
    return float(np.median(per_rank)) if per_rank else 0.0


def slow_transfers(stacked: Stacked, baseline: Stacked | None, iteration_s: float) -> list[SlowTransfer]:
    """Slow channels, gathered by what they share. Empty where nothing is slow or nothing can be compared."""
    lanes = _lanes(stacked)
    families: dict[tuple[object, ...], list[_Lane]] = defaultdict(list)
    for lane in lanes:
        families[lane.shape].append(lane)
    found: list[SlowTransfer] = []
    for family in families.values():
        if len(family) >= 3:
            found.extend(_against_siblings(stacked, family, iteration_s))
    named = {c for slow in found for c in slow.channels}
    if baseline is not None:
        before = {baseline.joined.channels[lane.channel].key: lane for lane in _lanes(baseline)}
        late = []
        for lane in lanes:
            known = before.get(stacked.joined.channels[lane.channel].key)
            if known is None or lane.channel in named or len(known.transfer_s) != len(lane.transfer_s):
                continue
            ratio = float(np.median(lane.transfer_s / np.maximum(known.transfer_s, 1e-9)))
            seconds = lane.exposed_s - known.exposed_s
            if ratio > max(SLOWER, 1 + SPREADS * max(known.spread, lane.spread) / 2) and seconds > EFFECT_FLOOR * iteration_s:
                late.append((lane, ratio, seconds))
        if late:
            worst = max(seconds for _, _, seconds in late)
            ranks = np.unique(np.concatenate([lane.ranks for lane, _, _ in late]))
            hosts = frozenset().union(*(lane.hosts for lane, _, _ in late))
            found.append(
                SlowTransfer(
                    "group", tuple(sorted(hosts)) if len(hosts) < len(set(stacked.hosts)) else (), tuple(lane.channel for lane, _, _ in late), ranks, worst,
                    float(np.median([r for _, r, _ in late])), "baseline", all(len(lane.hosts) == 1 for lane, _, _ in late) and len(set(stacked.hosts)) > 1,
                    "every group is slower than in the healthy window, so groups cannot tell which link it is",
                )
            )  # fmt: skip
    return found


def _against_siblings(stacked: Stacked, family: Sequence[_Lane], iteration_s: float) -> list[SlowTransfer]:
    num = min(len(lane.transfer_s) for lane in family)
    table = np.array([lane.transfer_s[:num] for lane in family])
    ratio = np.median(table / np.maximum(np.median(table, axis=0), 1e-9), axis=1)
    low = float(np.quantile(ratio, 0.25, method="lower"))
    # With as many slow groups as others the median is no reference; the fast half is.
    fast = ratio[ratio <= low * SLOWER]
    ratio = ratio / float(np.median(fast))
    spread = max(float(1.4826 * np.median(np.abs(fast / np.median(fast) - 1))), 0.01)
    calm = [lane for lane, r in zip(family, ratio, strict=True) if r <= SLOWER]
    if len(calm) < max(2, len(family) // 4):
        return []
    normal = float(np.median([lane.exposed_s for lane in calm]))
    limit = max(SLOWER, 1 + SPREADS * spread)
    slow = [(lane, float(r)) for lane, r in zip(family, ratio, strict=True) if r > limit and lane.exposed_s - normal > EFFECT_FLOOR / 2 * iteration_s]
    if not slow or max(lane.exposed_s for lane, _ in slow) - normal <= EFFECT_FLOOR * iteration_s:
        return []
    slow_lanes = [lane for lane, _ in slow]
    quick = [lane for lane in family if lane not in slow_lanes]
    scope, hosts, undecided = _where([lane.hosts for lane in slow_lanes], [lane.hosts for lane in quick])
    ranks = np.unique(np.concatenate([lane.ranks for lane in slow_lanes]))
    if scope == "host":
        ranks = np.array([w for w in range(len(stacked)) if stacked.hosts[w] in hosts], np.intp)
    seconds = max(lane.exposed_s for lane in slow_lanes) - normal
    return [
        SlowTransfer(
            scope, hosts, tuple(lane.channel for lane in slow_lanes), ranks, float(seconds), float(np.median([r for _, r in slow])), "siblings",
            all(len(lane.hosts) == 1 for lane in slow_lanes), undecided,
        )
    ]  # fmt: skip


def _where(slow: Sequence[frozenset[str]], quick: Sequence[frozenset[str]]) -> tuple[str, tuple[str, ...], str]:
    """The smallest thing that all slow groups share and that no quick group has."""
    shared = frozenset.intersection(*slow)
    guilty = sorted(h for h in shared if not any(h in hosts for hosts in quick))
    pairs = [pair for pair in combinations(sorted(shared), 2) if not any(set(pair) <= hosts for hosts in quick)]
    if len(guilty) == 1:
        return "host", (guilty[0],), ""
    if not guilty and len(pairs) == 1:
        return "link", pairs[0], ""
    if guilty and len(slow) == 1 and len(guilty) == 2:
        return "link", (guilty[0], guilty[1]), "only one group crosses these hosts, so the link and its two ends cannot be told apart"
    everyone = tuple(sorted(frozenset().union(*slow)))
    return "group", everyone, "the slow groups share no single host or pair of hosts" if not guilty else "several hosts are in all slow groups and in no other"
