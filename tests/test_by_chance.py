"""Ranks that what moves over all of them hit more often than others in one window."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from eroica.context import Context
from eroica.diagnosis import diagnose
from eroica.findings import Finding
from eroica.pattern import stack, summarize
from eroica.trace import Trace
from tests import handmade as h

RANKS, STEPS, WORK_MS = 4, 40, 20


def traced(rank: int, collected_ms: Sequence[int], longest_ms: Sequence[int]) -> Trace:
    """A rank that collects garbage for so long in each step, and waits until the longest collection is over."""
    events, now = [], 0
    for step in range(STEPS):
        begin = now
        events.append(h.op("aten::mm", now, WORK_MS * h.MS))
        now += WORK_MS * h.MS
        events.append(h.frame("train.py(167): parse", now, (collected_ms[step] + 2) * h.MS))
        events.append(h.mark("Python GC", now + h.MS, collected_ms[step] * h.MS))
        now += (collected_ms[step] + 2) * h.MS
        end = begin + (WORK_MS + longest_ms[step] + 10) * h.MS
        events.append(h.op("c10d::allreduce_", now, end - now, comm=h.Comm(transfers=False)))
        events.append(h.mark("gloo:all_reduce", now, end - now, thread="2", comm=h.Comm()))
        events.append(h.mark(f"ProfilerStep#{step}", begin, end - begin))
        now = end
    return h.trace(events, rank=rank)


def said(seed: int, more_ms: int = 0) -> tuple[Finding, ...]:
    """Collections of any length up to 90 ms, mostly short; on rank 2 longer by `more_ms`."""
    draw = random.Random(seed)
    collected = [[int(draw.random() ** 2 * 90) + 1 for _ in range(STEPS)] for _ in range(RANKS)]
    collected[2] = [one + more_ms for one in collected[2]]
    longest = [max(of) for of in zip(*collected, strict=True)]
    return diagnose(
        stack([summarize(traced(rank, collected[rank], longest)) for rank in range(RANKS)]), Context()
    ).findings


@pytest.mark.parametrize("seed", [12, 28, 36, 47, 51])
def test_who_was_hit_more_often_by_chance_is_not_named_beside_what_moves(seed: int) -> None:
    (finding,) = said(seed)
    assert (finding.scope, finding.ranks, finding.cause) == ("rotating", "", "host_gc")


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_who_has_more_in_every_step_is(seed: int) -> None:
    assert {(finding.scope, finding.ranks) for finding in said(seed, more_ms=20)} >= {("rank", "2")}
