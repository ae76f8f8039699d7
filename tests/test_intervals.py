"""Arithmetic on intervals and nested events against the plainest code that does the same (design section 4)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eroica.critical_path import _split
from eroica.intervals import Cover, Int64s, _inherit_by_jumps, first_come_parts, inherit, nest

Spans = list[tuple[int, int]]
spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda p: (p[0], p[0] + p[1])), max_size=12)


def arrays(some: Spans) -> tuple[Int64s, Int64s]:
    return np.array([s for s, _ in some], np.int64), np.array([e for _, e in some], np.int64)


def instants(some: Spans) -> set[int]:
    """The unit intervals that the union covers."""
    return {t for start, end in some for t in range(start, end)}


def by_start(some: Spans) -> Spans:
    """As `nest` wants them: by start, longer first."""
    return sorted(some, key=lambda s: (s[0], -s[1]))


@given(spans, spans)
def test_a_cover_measures_the_union_of_its_intervals(some: Spans, asked: Spans) -> None:
    cover = Cover.of(*arrays(some))
    union = instants(some)
    starts, ends = arrays(asked)
    assert (cover.ends > cover.starts).all() and (cover.starts[1:] > cover.ends[:-1]).all()
    assert cover.inside(starts, ends).tolist() == [len(union & set(range(s, e))) for s, e in asked]
    assert cover.outside(starts, ends).tolist() == [len(set(range(s, e)) - union) for s, e in asked]
    assert cover.measure(starts).tolist() == [len({t for t in union if t < s}) for s, _ in asked]
    assert int(cover.before[-1]) == len(union)


@given(spans, spans)
def test_joining_covers_is_the_union_of_both(some: Spans, others: Spans) -> None:
    joined = Cover.of(*arrays(some)).joined(Cover.of(*arrays(others)))
    assert instants(list(zip(joined.starts, joined.ends, strict=True))) == instants(some + others)


@given(spans, st.integers(-5, 30), st.integers(0, 40))
def test_gaps_are_what_a_cover_leaves_free(some: Spans, start: int, length: int) -> None:
    low, high = Cover.of(*arrays(some)).gaps(start, start + length)
    assert (high > low).all()
    assert instants(list(zip(low, high, strict=True))) == set(range(start, start + length)) - instants(some)


@given(spans)
def test_of_overlapping_siblings_the_one_that_started_first_owns_each_instant(some: Spans) -> None:
    ordered = sorted(some)
    starts, ends = arrays(ordered)
    owned = first_come_parts(starts, ends)
    for t in instants(some):
        first = next(k for k, (s, e) in enumerate(ordered) if s <= t < e)
        owners = [k for k in range(len(ordered)) if owned[k] <= t < ends[k]]
        assert owners == [first]


@st.composite
def trees(draw: st.DrawFn, low: int = 0, high: int = 60, depth: int = 0) -> Spans:
    """Properly nested events within [low, high); equal spans and shared borders included."""
    some: Spans = []
    at = low
    while at < high and len(some) < 12 and draw(st.booleans()):
        start = draw(st.integers(at, high - 1))
        end = draw(st.integers(start + 1, high))
        some.append((start, end))
        if depth < 4:
            some.extend(draw(trees(start, end, depth + 1)))
        at = end
    return some


def innermost(ordered: Spans, t: int) -> int:
    """The latest of the events that hold the instant; -1 = none."""
    return max((k for k, (s, e) in enumerate(ordered) if s <= t < e), default=-1)


def check_against_brute_force(ordered: Spans, cut: Spans) -> None:
    tree = nest(*arrays(ordered))
    owner_of = {t: int(o) for s, e, o in zip(tree.start, tree.end, tree.owner, strict=True) for t in range(s, e)}
    assert owner_of == {t: innermost(cut, t) for t in instants(cut)}
    for k, (start, end) in enumerate(cut):
        around = [j for j in range(k) if cut[j][0] <= start and cut[j][1] >= end and cut[j][1] > start]
        assert tree.parent[k] == (max(around) if around else -1)
        assert tree.depth[k] == len(around) + 1


@given(trees())
def test_nested_events_are_owned_by_the_innermost_as_by_brute_force(some: Spans) -> None:
    ordered = by_start(some)
    check_against_brute_force(ordered, ordered)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)).map(lambda p: (p[0], p[0] + p[1])), max_size=10))
def test_a_child_that_outlives_its_parent_is_cut_at_the_parents_end(some: Spans) -> None:
    ordered = by_start(some)
    cut: Spans = []
    for start, end in ordered:
        around = [e for s, e in cut if s <= start < e]
        cut.append((start, min([end, *around])))
    check_against_brute_force(ordered, cut)


def test_neighbours_do_not_nest_and_equal_spans_do() -> None:
    tree = nest(*arrays([(0, 5), (5, 9), (5, 9)]))
    assert tree.parent.tolist() == [-1, -1, 1] and tree.owner.tolist() == [0, 2]


@pytest.mark.parametrize("depth", [10_000, 70_000])
def test_thousands_of_levels_of_recursion_nest(depth: int) -> None:
    tree = nest(np.arange(depth), np.arange(3 * depth, 2 * depth, -1))
    assert tree.depth.max() == depth and tree.parent.tolist() == list(range(-1, depth - 1))
    label = np.full(depth, -1, np.int32)
    label[[1, depth // 2]] = 1, 2
    inherit([label], tree.parent, tree.depth)
    assert np.bincount(label + 1).tolist() == [1, 0, depth // 2 - 1, depth - depth // 2]


def test_thousands_of_events_that_overlap_without_nesting_are_cut_at_the_first_ones_end() -> None:
    starts = np.arange(30_000)
    tree = nest(starts, starts + 30_000)
    assert tree.depth.max() == 30_000 and tree.parent.tolist() == list(range(-1, 29_999))
    assert tree.end.max() == 30_000


@given(trees(), st.data())
def test_an_event_inherits_from_its_nearest_ancestor_that_has_a_value(some: Spans, data: st.DataObject) -> None:
    ordered = by_start(some)
    tree = nest(*arrays(ordered))
    values = [data.draw(st.sampled_from([-1, -1, k])) for k in range(len(ordered))]
    expected = []
    for k in range(len(ordered)):
        j = k
        while j >= 0 and values[j] < 0:
            j = int(tree.parent[j])
        expected.append(values[j] if j >= 0 else -1)
    label = np.array(values, np.int32)
    inherit([label], tree.parent, tree.depth)
    assert label.tolist() == expected
    label = np.array(values, np.int32)
    _inherit_by_jumps(label, tree.parent)
    assert label.tolist() == expected


@given(spans, st.sets(st.integers(0, 60), max_size=8), spans)
def test_cutting_at_edges_keeps_every_instant_with_its_piece(some: Spans, edges: set[int], away: Spans) -> None:
    whole = [(s, e) for s, e in some if e > s]
    starts, ends = arrays(whole)
    cut = np.array(sorted(edges), np.int64)
    low, high, what = _split(starts, ends, np.arange(len(whole), dtype=np.int32), cut)
    assert not any(s < edge < e for s, e in zip(low, high, strict=True) for edge in edges)
    for k, span in enumerate(whole):
        assert sorted(t for s, e, w in zip(low, high, what, strict=True) if w == k for t in range(s, e)) == list(
            range(*span)
        )
    gone = Cover.of(*arrays(away))
    both = np.unique(np.concatenate([gone.starts, gone.ends]))
    low, high, what = _split(starts, ends, np.arange(len(whole), dtype=np.int32), both, gone)
    for k, (start, end) in enumerate(whole):
        left = sorted(t for s, e, w in zip(low, high, what, strict=True) if w == k for t in range(s, e))
        assert left == sorted(set(range(start, end)) - instants(away))


def test_empty_input_gives_empty_output() -> None:
    nothing = np.empty(0, np.int64)
    cover = Cover.of(nothing, nothing)
    assert cover.measure(np.array([1, 2])).tolist() == [0, 0]
    assert len(nest(nothing, nothing).owner) == 0 and len(first_come_parts(nothing, nothing)) == 0
    assert [part.tolist() for part in cover.gaps(3, 9)] == [[3], [9]]
