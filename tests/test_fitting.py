"""Sampled stacks beside the operators of a trace: exact edges, and one answer for one place."""

from __future__ import annotations

from types import CodeType
from typing import TypeAlias

from hypothesis import given
from hypothesis import strategies as st

from eroica.probe.fitting import HostEvent, Span, fitted
from eroica.probe.frames import PERIOD_S, Thread

MS = 1_000_000
Sample: TypeAlias = tuple[int, tuple[CodeType, ...]]


def _code(name: str) -> CodeType:
    return compile("", name, "exec")


LOOP, LOADER, READ, FORWARD = _code("loop"), _code("loader"), _code("read"), _code("forward")


def _job(read_ms: float, shift_ms: float = 0.0) -> tuple[list[HostEvent], list[Sample], int]:
    """Ten iterations: a next that reads for so long, an operator of 4 ms; a sample each 5 ms."""
    events: list[HostEvent] = []
    samples: list[Sample] = []
    at = 0
    for _ in range(10):
        read_end = at + int(read_ms * MS)
        events.append((at, read_end, False, b"enumerate(DataLoader)#X.__next__"))
        events.append((read_end + MS, read_end + 5 * MS, True, b"aten::mm"))
        at = read_end + 6 * MS
    now = int(shift_ms * MS)
    while now < at:
        inside = next((event for event in events if event[0] <= now < event[1]), None)
        samples.append((now, (LOOP,) if inside is None else (LOOP, FORWARD) if inside[2] else (LOOP, LOADER, READ)))
        now += int(PERIOD_S * 1e9)
    return events, samples, at


def _spans(spans: list[Span], code: CodeType) -> list[tuple[int, int]]:
    return [(span.begin_ns, span.end_ns) for span in spans if span.code is code]


@given(read_ms=st.floats(2.0, 80.0), shift_ms=st.floats(0.0, 4.9))
def test_a_function_between_operators_is_told_from_edge_to_edge_in_every_iteration(
    read_ms: float, shift_ms: float
) -> None:
    events, samples, end = _job(read_ms, shift_ms)
    spans = fitted([Thread(7, (LOOP,), samples)], {7: list(events)}, 0, end)
    assert _spans(spans, LOOP) == [(0, end)]
    nexts = [(event[0], event[1]) for event in events if not event[2]]
    assert _spans(spans, READ) in ([], nexts)
    if read_ms >= 5.0:
        assert _spans(spans, READ) == nexts == _spans(spans, LOADER)
    # What the operator does is its own.
    assert _spans(spans, FORWARD) == []
    for span in spans:
        assert (
            span.parent < 0 or spans[span.parent].begin_ns <= span.begin_ns <= span.end_ns <= spans[span.parent].end_ns
        )


def test_a_thread_off_the_path_is_told_only_where_it_worked() -> None:
    period = int(PERIOD_S * 1e9)
    busy = (_code("run"), _code("crunch"))
    samples: list[Sample] = [(k * period, busy if 4 <= k < 8 else ()) for k in range(12)]
    spans = fitted([Thread(9, None, samples)], {}, 0, 12 * period)
    assert [(span.begin_ns, span.end_ns) for span in spans] == [(int(3.5 * period), int(7.5 * period))] * 2
