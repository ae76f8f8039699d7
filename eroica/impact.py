"""What a finding costs: seconds per iteration that come back if its ranks were like their peers.

By replay where the communications of a step can be re-timed (several groups, sends and receives), else by the ledger:
in a job whose ranks all meet in one group an iteration lasts as long as its slowest own work. The method is part of
the answer. Used by `draft` and `diagnosis`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eroica import replay
from eroica.blame import Indices
from eroica.collectives import Float64s
from eroica.findings import Impact
from eroica.localization import Roles, lower_quartile, nan_median, unmarked_ranks
from eroica.pattern import Stacked

MODELLED = 0.5
"""A replay that gives back less than this share of what the peers are seen to wait for a rank, which is about its
excess, does not model the job, though it may last as long as the recording: a chain of its own making holds."""


def iteration_of(stacked: Stacked) -> float:
    """Length of an iteration over all ranks that tell of any, seconds; 0 if there is none."""
    lengths = np.delete(stacked.iteration_s, sorted(unmarked_ranks(stacked)))
    told = lengths[lengths > 0]
    return float(np.median(told)) if len(told) else 0.0


def longer_s(before: Stacked | None, iteration_s: float) -> float | None:
    """Seconds by which an iteration is longer than in an earlier window, below 0 if shorter; None without that one."""
    return iteration_s - iteration_of(before) if before is not None and len(before) else None


class Pricer:
    """Impact of taking the excess of some ranks away: replay where it models the job, else the ledger."""

    def __init__(self, stacked: Stacked, roles: Roles, iteration_s: float) -> None:
        self._stacked = stacked
        self._iteration_s = iteration_s
        self._roles = roles
        own = stacked.own_s
        self._level = np.full(own.shape, np.nan)
        for role in range(len(roles.names)):
            members = roles.members(role)
            self._level[members] = nan_median(own[members], axis=0)
        ledgers = [s.ledger for s in stacked.summaries]
        channels = {c for ledger in ledgers for c in ledger.channels}
        several = len(channels) > 1 or any(">" in c.key for c in channels)
        self._replay = replay.prepare(ledgers) if several else None

    def _share(self, seconds: float, method: str) -> Impact:
        seconds = min(max(seconds, 0.0), self._iteration_s)
        return Impact(seconds, seconds / self._iteration_s if self._iteration_s > 0 else None, method)

    def less(self, ranks: Indices, seconds: Float64s, others: Sequence[tuple[Indices, Float64s]] = ()) -> Impact:
        """What comes back without `seconds` (own time per iteration of each of `ranks`).

        `others` are the excesses of other findings: where one of them hides this one (both are late for the same
        collective, so mending one alone changes little), what this one costs once they are mended counts instead.
        """
        alone = self._length([]) - self._length([(ranks, seconds)])
        last = self._length(others) - self._length([*others, (ranks, seconds)]) if others else alone
        found = max(alone, last)
        if self._replay is not None:
            felt = min(self._felt(ranks), float(np.median(seconds)))
            if found < MODELLED * felt and felt >= MODELLED * float(np.median(seconds)):
                return self._share(felt, "ledger")
        return self._share(found, "replay" if self._replay is not None else "ledger")

    def _felt(self, ranks: Indices) -> float:
        """Seconds per iteration by which the peers of these ranks wait longer than these, in the middle of the steps: a
        rank that all wait for hardly waits itself. 0 without peers."""
        waits = self._stacked.exposed_s + self._stacked.waiting_s
        lacks = []
        for w in ranks:
            peers = np.setdiff1d(self._roles.members(int(self._roles.of[w])), ranks)
            if len(peers):
                lacks.append(nan_median(nan_median(waits[peers], axis=0) - waits[w], axis=0))
        return max(float(np.median(lacks)), 0.0) if lacks else 0.0

    def _length(self, less: Sequence[tuple[Indices, Float64s]]) -> float:
        """Iteration without these excesses, up to a constant."""
        stacked = self._stacked
        taken = np.zeros(len(stacked))
        for ranks, seconds in less:
            taken[ranks] += seconds
        if self._replay is not None:
            culprits = np.flatnonzero(taken)
            peers = {
                int(w): np.setdiff1d(self._roles.members(int(self._roles.of[w])), culprits).tolist() for w in culprits
            }
            return self._replay.without({int(w): float(taken[w]) for w in culprits}, peers)
        return self._maximum(stacked.own_s - taken[:, None])

    def without_peaks(self, ranks: Indices | None) -> Impact:
        """Each rank's steps held at its own lower quartile above its role's level: what rotating excess costs."""
        own = self._stacked.own_s
        usual = self._level + lower_quartile(own - self._level, axis=1, keepdims=True)
        after = own.copy()
        rows = slice(None) if ranks is None or not len(ranks) else ranks
        after[rows] = np.minimum(own[rows], usual[rows])
        return self._share(self._maximum(own) - self._maximum(after), "ledger")

    @staticmethod
    def _maximum(own: Float64s) -> float:
        return float(np.nanmean(np.nanmax(own, axis=0)))
