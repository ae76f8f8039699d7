"""Arithmetic on time intervals and on nested events, vectorised: what `critical_path` and `collectives` are made of.

Times are integer nanoseconds; an interval is [start, end). Nothing here knows what the intervals mean.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64s: TypeAlias = npt.NDArray[np.int64]


MAX_LEVELS = 2_000
"""Nested deeper than Python recurses by default (1,000 calls, with an operator each), events are no stack of calls."""


@dataclass(frozen=True, slots=True)
class Cover:
    """A union of intervals as disjoint ascending pieces, ready for measuring."""

    starts: Int64s
    """(pieces,)"""
    ends: Int64s
    """(pieces,)"""
    before: Int64s
    """(pieces + 1,) Total length of the pieces before each one."""

    @staticmethod
    def of(starts: Int64s, ends: Int64s) -> Cover:
        """Union of any intervals; empty and negative ones count for nothing. Shapes (n,)."""
        keep = ends > starts
        if not keep.all():
            starts, ends = starts[keep], ends[keep]
        if len(starts) > 1 and not np.all(starts[1:] >= starts[:-1]):
            order = np.argsort(starts, kind="stable")
            starts, ends = starts[order], ends[order]
        if len(starts):
            reach = np.maximum.accumulate(ends)
            first = np.ones(len(starts), bool)
            first[1:] = starts[1:] > reach[:-1]
            index = np.flatnonzero(first)
            starts = starts[index]
            ends = reach[np.append(index[1:] - 1, len(reach) - 1)]
        return Cover(starts, ends, np.concatenate([[0], np.cumsum(ends - starts)]).astype(np.int64))

    def measure(self, times: Int64s) -> Int64s:
        """Length of the union before each instant. Shape as `times`."""
        if not len(self.starts):
            return np.zeros_like(times)
        piece = self._piece(times)
        measured = np.minimum(times, self.ends[piece])
        measured -= self.starts[piece]
        # Before the first piece: nothing.
        np.maximum(measured, 0, out=measured)
        measured += self.before[piece]
        return measured

    def _piece(self, times: Int64s) -> npt.NDArray[np.intp]:
        """The last piece that starts by each instant, or the first one. Ascending instants are cut at the starts of the
        pieces: where pieces are few, that is far fewer searches."""
        if len(times) > 8 * len(self.starts) and bool((times[1:] >= times[:-1]).all()):
            until = np.searchsorted(times, self.starts[1:], side="left")
            return np.repeat(np.arange(len(self.starts)), np.diff(until, prepend=0, append=len(times)))
        piece = np.searchsorted(self.starts, times, side="right")
        piece -= 1
        return np.maximum(piece, 0, out=piece)

    def inside(self, starts: Int64s, ends: Int64s) -> Int64s:
        """Length of each interval's part within the union."""
        return self.measure(ends) - self.measure(starts)

    def outside(self, starts: Int64s, ends: Int64s) -> Int64s:
        """Length of each interval's part outside of the union."""
        return (ends - starts) - self.inside(starts, ends)

    def joined(self, other: Cover) -> Cover:
        """Union of both."""
        if not len(other.starts):
            return self
        if not len(self.starts):
            return other
        return Cover.of(np.concatenate([self.starts, other.starts]), np.concatenate([self.ends, other.ends]))

    def gaps(self, start: int, end: int) -> tuple[Int64s, Int64s]:
        """The pieces of [start, end) that the union leaves free."""
        lows = np.concatenate([[start], np.clip(self.ends, start, end)]).astype(np.int64)
        highs = np.concatenate([np.clip(self.starts, start, end), [end]]).astype(np.int64)
        keep = highs > lows
        return lows[keep], highs[keep]


def first_come_parts(starts: Int64s, ends: Int64s) -> Int64s:
    """Start of the part that each interval owns when, among overlapping ones, the one that started first owns the time.

    Intervals must be sorted by start. The owned part is [result, end); empty where result >= end.
    """
    if not len(starts):
        return starts
    reach = np.maximum.accumulate(ends)
    owned = starts.copy()
    owned[1:] = np.maximum(starts[1:], reach[:-1])
    return owned


@dataclass(frozen=True, slots=True)
class Nest:
    """Events of one thread as a tree, and which of them is innermost at each instant."""

    parent: npt.NDArray[np.int32]
    """(events,) Index of the enclosing event; -1 = none."""
    depth: npt.NDArray[np.int32]
    """(events,) 1 = outermost."""
    start: Int64s
    """(pieces,) Instants at which the innermost event changes."""
    end: Int64s
    """(pieces,)"""
    owner: npt.NDArray[np.int32]
    """(pieces,) The innermost event from start to end."""


def nest(starts: Int64s, ends: Int64s) -> Nest:
    """Tree of the events of one thread, sorted by (start, -duration); events of no length must be left out.

    A child that outlives its parent (pytorch/pytorch#174555) is cut at the parent's end. Linear but for sorts of runs:
    the owner after a boundary is the latest start at the depth that the boundary leaves.
    """
    tree = _nest(starts, ends)
    if len(starts):
        crossing = np.flatnonzero((tree.parent >= 0) & (ends > ends[np.maximum(tree.parent, 0)]))
        if len(crossing):
            parent = tree.parent
            del tree
            tree = _nest(starts, _cut_at_parents(starts, ends, parent, crossing))
    return tree


def _cut_at_parents(
    starts: Int64s, ends: Int64s, parent: npt.NDArray[np.int32], crossing: npt.NDArray[np.intp]
) -> Int64s:
    """Ends, none behind that of the event around it; `crossing`: events that end after their `parent` by `_nest`.

    A plain walk, but only where needed. A crossing event shifts the depth that `_nest` counts until it ends, so
    `parent` is right up to the first crossing event, and again once that has ended and all that began meanwhile has
    ended too. In between, an event inside of which no shift ends and nothing crosses is passed over with all of it.
    """
    cut = ends.copy()
    # Items of a memoryview are plain integers; lists of all would take more memory than the columns.
    start_of, end_of, parent_of = starts.data, cut.data, parent.data
    suspects = crossing.tolist()
    k = 0
    for first in suspects:
        if first < k:
            continue
        open_ends: list[int] = []
        above = parent_of[first]
        while above >= 0:
            open_ends.append(end_of[above])
            above = parent_of[above]
        open_ends.reverse()
        before = len(open_ends)
        shifted_until: list[int] = []  # a heap
        k = first
        while k < len(starts):
            start, end = start_of[k], end_of[k]
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            before = min(before, len(open_ends))
            while shifted_until and shifted_until[0] <= start:
                heappop(shifted_until)
            following = suspects[bisect_left(suspects, k)] if k <= suspects[-1] else len(starts)
            if len(open_ends) == before and not shifted_until and following > k:
                break
            if open_ends and end > open_ends[-1]:
                heappush(shifted_until, end)
                end_of[k] = end = open_ends[-1]
            elif not shifted_until or shifted_until[0] >= end:
                after = bisect_left(start_of, end, k + 1)
                if following >= after:
                    k = after
                    continue
            open_ends.append(end)
            k += 1
    return cut


def _nest(starts: Int64s, ends: Int64s) -> Nest:
    n = len(starts)
    if not n:
        empty32 = np.empty(0, np.int32)
        return Nest(empty32, empty32, starts, ends, empty32)
    # Ends come before starts at the same instant, so that neighbours do not nest. A stable sort merges ascending runs.
    times = np.concatenate([np.sort(ends), starts])
    event = np.argsort(times, kind="stable").astype(np.int32)
    times = times[event]
    event -= n
    is_start = event >= 0
    depth = np.cumsum(np.where(is_start, np.int8(1), np.int8(-1)), dtype=np.int32)
    # Latest start with the same depth, by a stable sort on depth (radix on small integers) and a running maximum.
    order = _by_depth(depth)
    latest = np.arange(2 * n, dtype=np.int32)
    latest *= is_start[order]
    np.maximum.accumulate(latest, out=latest)
    owner = np.empty(2 * n, np.int32)
    owner[order] = event[order[latest]]
    del order, latest, event
    owner[depth <= 0] = -1
    depth = depth[is_start]
    start_at = np.flatnonzero(is_start)
    parent = owner[np.maximum(start_at - 1, 0)]
    parent[start_at == 0] = -1
    del start_at
    piece = np.flatnonzero((owner[:-1] >= 0) & (times[1:] > times[:-1]))
    return Nest(parent, depth, times[piece], times[piece + 1], owner[piece])


def _by_depth(depth: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Stable order by depth; numpy sorts integers of 8 and 16 bits by radix."""
    deepest = int(depth.max(initial=0)) if depth.min(initial=0) >= 0 else 1 << 16
    small = depth.astype(np.uint8 if deepest < 1 << 8 else np.uint16) if deepest < 1 << 16 else depth
    return np.argsort(small, kind="stable").astype(np.int32)


def inherit(
    labels: Sequence[npt.NDArray[np.int32] | npt.NDArray[np.uint8]],
    parent: npt.NDArray[np.int32],
    depth: npt.NDArray[np.int32],
) -> None:
    """In each label, put the nearest ancestor's value where an event has none: -1, or 0 in labels of 8 bits, which
    take a quarter of the time. In place. Shapes (events,).
    """
    if not len(depth):
        return
    if int(depth.max()) > MAX_LEVELS:
        for label in labels:
            _inherit_by_jumps(label, parent)
        return
    order = _by_depth(depth)
    edges = np.cumsum(np.bincount(depth))
    for low, high in pairwise(edges[1:]):
        rows = order[low:high]
        up = parent[rows]
        for label in labels:
            own = label[rows]
            label[rows] = np.where(own > 0 if label.dtype == np.uint8 else own >= 0, own, label[up])


def _inherit_by_jumps(label: npt.NDArray[np.int32] | npt.NDArray[np.uint8], parent: npt.NDArray[np.int32]) -> None:
    """The same in as many rounds as the depth has binary digits: each doubles the ancestors that were asked."""
    jump = parent.copy()
    while True:
        rows = np.flatnonzero((jump >= 0) & (label == 0 if label.dtype == np.uint8 else label < 0))
        if not len(rows):
            return
        above = jump[rows]
        label[rows], jump[rows] = label[above], jump[above]
