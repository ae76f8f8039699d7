"""Arithmetic on time intervals and on nested events, vectorised: what `critical_path` and `collectives` are made of.

Times are integer nanoseconds; an interval is [start, end). Nothing here knows what the intervals mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64s: TypeAlias = npt.NDArray[np.int64]


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
        piece = np.searchsorted(self.starts, times, side="right") - 1
        inside = np.maximum(np.minimum(times, self.ends[piece]) - self.starts[piece], 0)
        return np.where(piece < 0, 0, self.before[np.maximum(piece, 0)] + inside)

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

    A child that outlives its parent (pytorch/pytorch#174555) is cut at the parent's end. Linear but for one sort: the owner
    after a boundary is the latest start at the depth that the boundary leaves.
    """
    tree = _nest(starts, ends)
    if len(starts) and bool(_outlives(ends, tree).any()):
        tree = _nest(starts, _cut_at_parents(starts, ends))
    return tree


def _outlives(ends: Int64s, tree: Nest) -> npt.NDArray[np.bool_]:
    return (tree.parent >= 0) & (ends > ends[np.maximum(tree.parent, 0)])


def _cut_at_parents(starts: Int64s, ends: Int64s) -> Int64s:
    """Ends, none behind that of the event around it. A plain walk: one crossing event shifts the depth of all that follow, so
    they cannot be mended together, and traces with crossings are few."""
    cut = ends.tolist()
    open_ends: list[int] = []
    for k, start in enumerate(starts.tolist()):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        if open_ends and cut[k] > open_ends[-1]:
            cut[k] = open_ends[-1]
        open_ends.append(cut[k])
    return np.array(cut, np.int64)


def _nest(starts: Int64s, ends: Int64s) -> Nest:
    n = len(starts)
    if not n:
        empty32 = np.empty(0, np.int32)
        return Nest(empty32, empty32, starts, ends, empty32)
    sorted_ends = np.sort(ends)
    # Ends come before starts at the same instant, so that neighbours do not nest.
    start_at = np.arange(n) + np.searchsorted(sorted_ends, starts, side="right")
    end_at = np.arange(n) + np.searchsorted(starts, sorted_ends, side="left")
    times = np.empty(2 * n, np.int64)
    times[start_at], times[end_at] = starts, sorted_ends
    step = np.full(2 * n, -1, np.int32)
    step[start_at] = 1
    event = np.full(2 * n, -1, np.int32)
    event[start_at] = np.arange(n)
    depth = np.cumsum(step, dtype=np.int32)
    # Latest start with the same depth, by a stable sort on depth (radix on small integers) and a running maximum.
    order = np.argsort(depth.astype(np.uint16), kind="stable")
    latest = np.maximum.accumulate(np.where(event[order] >= 0, np.arange(2 * n), 0))
    owner = np.empty(2 * n, np.int32)
    owner[order] = event[order][latest]
    owner[depth <= 0] = -1
    before = np.concatenate([[np.int32(-1)], owner[:-1]])
    parent = before[start_at]
    piece = np.flatnonzero((owner[:-1] >= 0) & (times[1:] > times[:-1]))
    return Nest(parent, depth[start_at], times[piece], times[piece + 1], owner[piece])


def inherit(values: npt.NDArray[np.int32], parent: npt.NDArray[np.int32], depth: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Each event's own value, or, where that is -1, the nearest ancestor's. Shapes (events,)."""
    result = values.copy()
    if not len(result):
        return result
    order = np.argsort(depth.astype(np.uint16), kind="stable")
    edges = np.searchsorted(depth[order], np.arange(2, int(depth.max()) + 2))
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        rows = order[low:high]
        rows = rows[result[rows] < 0]
        up = parent[rows]
        result[rows] = np.where(up >= 0, result[np.maximum(up, 0)], -1)
    return result
