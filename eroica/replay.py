"""What an iteration would last if some ranks did less work: the recorded communications re-timed in their order.

Used by `diagnosis` to price a finding where a job has several groups or sends and receives, so that a delay travels
along a path that the ledger alone cannot see. It replays the steps of which every rank told every communication; a
rank's work between two communications is kept, a communication is done when its last member entered it plus its
transfer. A replay that does not reproduce the recorded length is thrown away, never trusted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eroica.collectives import JOINABLE, POINT_TO_POINT, Float64s, Ledger
from eroica.trace import CollectiveKind

MAX_NODES = 200_000
"""Communications replayed at most; beyond it the ledger prices findings."""
TOLERANCE = 0.03
"""A replay whose length differs more than this from the recorded one does not model the job."""
LOOK_BACK = 8
"""Communications before an entry that are checked to be done; older ones were waited for by these."""
BLOCKING_SHARE = 0.5
"""A communication of which work hides less than this blocks the rank that entered it."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Recorded steps, ready to be timed again with other work."""

    length_s: float
    """Mean recorded length of the replayed steps."""
    replayed_s: float
    """The same as re-timed without any change."""
    ledgers: tuple[Ledger, ...]
    steps: tuple[int, ...]

    def without(self, less_s: Mapping[int, float], peers: Mapping[int, Sequence[int]]) -> float:
        """Mean length of the steps when rank index -> seconds of own work per step are taken away. Seconds.

        They are taken where the rank does more than its `peers` (rank index -> indices) between the same two
        communications; only what exceeds that is taken evenly.
        """
        return float(np.mean([_time(self.ledgers, step, self._cuts(step, less_s, peers)) for step in self.steps]))

    def _cuts(self, step: int, less_s: Mapping[int, float], peers: Mapping[int, Sequence[int]]) -> dict[int, Float64s]:
        cuts = {}
        for w, seconds in less_s.items():
            own = _segments(self.ledgers[w], step)
            alike = [
                segments for p in peers.get(w, ()) if len(segments := _segments(self.ledgers[p], step)) == len(own)
            ]
            over = np.maximum(own - np.median(alike, axis=0), 0.0) if alike else np.zeros(len(own))
            cut = over * min(1.0, seconds / over.sum()) if over.sum() > 0 else over
            rest = max(seconds - float(cut.sum()), 0.0)
            left = own - cut
            cuts[w] = cut + left * min(1.0, rest / left.sum()) if left.sum() > 0 else cut
        return cuts


def _segments(ledger: Ledger, step: int) -> Float64s:
    """Own work before each communication of a step, and after the last one. Shape (samples + 1,)."""
    before = ledger.work_before_s[ledger.step == step].astype(np.float64)
    own = ledger.own_s[ledger.steps == step]
    return np.append(before, max(float(own[0]) - float(before.sum()), 0.0) if len(own) else 0.0)


def prepare(ledgers: Sequence[Ledger]) -> Replay | None:
    """Steps that all ranks told completely, if replaying them gives what was recorded; else None."""
    if not ledgers:
        return None
    if sum(len(ledger.step) for ledger in ledgers) > MAX_NODES:
        return None
    common = set(ledgers[0].complete_steps.tolist())
    for ledger in ledgers[1:]:
        common &= set(ledger.complete_steps.tolist())
    if not common:
        return None
    steps = sorted(common)
    replayed = [_time(ledgers, step, {}) for step in steps]
    if not np.isfinite(replayed).all():
        return None
    recorded = [
        max(float(ledger.length_s[ledger.steps == step].max(initial=0.0)) for ledger in ledgers) for step in steps
    ]
    keep = [
        k for k in range(len(steps)) if recorded[k] > 0 and abs(replayed[k] - recorded[k]) <= TOLERANCE * recorded[k]
    ]
    if len(keep) * 2 < len(steps):
        return None
    kept = tuple(steps[k] for k in keep)
    return Replay(
        float(np.mean([recorded[k] for k in keep])), float(np.mean([replayed[k] for k in keep])), tuple(ledgers), kept
    )


def _time(ledgers: Sequence[Ledger], step: int, cuts: Mapping[int, Float64s]) -> float:
    """Length of one step, from the first rank's start to the last rank's end, all ranks starting together. Seconds;
    NaN if the recorded order cannot be replayed (communications that wait for each other in a circle)."""
    rows = [np.flatnonzero(ledger.step == step) for ledger in ledgers]
    segments = [_segments(ledger, step) - cuts.get(w, 0.0) for w, ledger in enumerate(ledgers)]
    keys: list[list[tuple[str, int]]] = []
    members: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for w, ledger in enumerate(ledgers):
        own = []
        for k, row in enumerate(rows[w]):
            kind = int(ledger.kind[row])
            shared = CollectiveKind(kind) in JOINABLE or CollectiveKind(kind) in POINT_TO_POINT
            key = (ledger.channels[ledger.channel[row]].key, int(ledger.position[row])) if shared else (f"alone {w}", k)
            own.append(key)
            members[key].append((w, k))
        keys.append(own)
    transfer = {key: min(float(ledgers[w].duration_s[rows[w][k]]) for w, k in who) for key, who in members.items()}
    entered: dict[tuple[str, int], list[float]] = defaultdict(list)
    done: dict[tuple[str, int], float] = {}
    waiting: dict[tuple[str, int], list[int]] = defaultdict(list)
    now = [0.0] * len(ledgers)
    next_op = [0] * len(ledgers)
    ends: Float64s = np.zeros(len(ledgers))
    ready = list(range(len(ledgers)))
    finished = 0
    while ready:
        w = ready.pop()
        ledger, mine = ledgers[w], rows[w]
        while True:
            k = next_op[w]
            last = k == len(mine)
            # What had been done before this entry in the recording must be done now; what was in flight need not.
            reached = k if last else k - int(ledger.in_flight[mine[k]])
            must = range(max(reached - LOOK_BACK, 0), max(reached, 0))
            missing = next((keys[w][j] for j in must if keys[w][j] not in done), None)
            if missing is not None:
                waiting[missing].append(w)
                break
            work = max(float(segments[w][k]), 0.0)
            blocked = max((done[keys[w][j]] for j in must), default=0.0)
            previous = k - 1
            blocks_first = previous in must and _blocks(ledger, mine[previous])
            at = max(now[w], blocked) + work if blocks_first else max(now[w] + work, blocked)
            if last:
                ends[w] = at
                finished += 1
                break
            now[w] = at
            key = keys[w][k]
            entered[key].append(at)
            if len(entered[key]) == len(members[key]):
                done[key] = max(entered[key]) + transfer[key]
                ready.extend(waiting.pop(key, ()))
            next_op[w] = k + 1
    return float(ends.max()) if finished == len(ledgers) else float("nan")


def _blocks(ledger: Ledger, row: int) -> bool:
    duration = float(ledger.duration_s[row])
    return duration <= 0 or float(ledger.sample_exposed_s[row]) >= (1 - BLOCKING_SHARE) * duration
