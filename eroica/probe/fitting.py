"""From sampled stacks to spans of frames that fit between the operators of the trace.

Samples tell what was open at an instant, operators tell exact times. Spans made of samples alone would end some
milliseconds off, and an operator of 0.1 ms would be told under one function in this iteration and under another in the
next, by chance: differences between ranks where there are none. So a span never cuts an operator, and what is said of a
place is said of it in all iterations:

- The frames that all samples of the training thread share with its stack at the boundary where the window begins (the
  training loop) are one span over the whole window.
- A *gap* is a time without an operator inside of it: between operators, or within one that may call Python (a backward
  node, a dataloader's next). Gaps that lie between the same neighbours are one place. If enough samples fell into a
  place and agree, its gaps carry the frames that they agree on, from edge to edge.

Not told: which function called an operator, beyond the loop; for that there is tracing (`Frames.TRACED`). Wrong where
one place is two functions by turns: it then shows what both share. Pure; used by `capture`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from types import CodeType
from typing import TypeAlias

from eroica.probe.frames import PERIOD_S, Thread

HostEvent: TypeAlias = tuple[int, int, bool, bytes]
"""Begin and end by the wall clock in nanoseconds, whether it is an operator (else an annotation), name."""

_LEAST_GAP_NS = 300_000
"""Shorter gaps are a matter of the dispatcher, and stay with the loop."""
_LEAST_SAMPLES = 3
"""Samples from which on a place is told: in a window of a second, a share of 1.5 %."""
_AGREED = 0.8
"""Share of a place's samples that must show a frame: the others fell beside the edges, whose clocks differ a little."""
_NATIVE = (b"aten::", b"c10d::", b"record_param_comms", b"gloo:", b"nccl:", b"prim::", b"torch::autograd::")
"""Operators that call no Python: what they hold is their own work."""
_Key: TypeAlias = tuple[bytes, bytes, bytes]


@dataclass(frozen=True, slots=True)
class Span:
    """One frame of one thread."""

    tid: int
    begin_ns: int
    """Wall clock."""
    end_ns: int
    code: CodeType
    parent: int
    """Place of the frame that called it among the spans; -1 = none that was seen."""


def fitted(threads: list[Thread], events: dict[int, list[HostEvent]], begin_ns: int, end_ns: int) -> list[Span]:
    """Spans of all threads between two instants; those around others stand before them."""
    found: list[Span] = []
    for thread in threads:
        samples = [sample for sample in thread.samples if begin_ns <= sample[0] <= end_ns]
        if thread.outer is None:
            _runs(found, thread.tid, samples)
        elif samples:
            loop = _agreed([thread.outer, *(stack for _, stack in samples)], 1.0)
            _between(found, thread.tid, loop, samples, events.get(thread.tid, []), begin_ns, end_ns)
    return found


def _runs(found: list[Span], tid: int, samples: list[tuple[int, tuple[CodeType, ...]]]) -> None:
    """A thread off the path: each sample in which it was at work stands for the period before it."""
    half_ns = int(PERIOD_S * 5e8)
    first = 0
    for index in range(1, len(samples) + 1):
        if index == len(samples) or samples[index][1] != samples[first][1]:
            begin, end = samples[max(first - 1, 0)][0] + half_ns, samples[index - 1][0] + half_ns
            if end > begin:
                _add(found, tid, begin, end, samples[first][1], -1)
            first = index


def _between(
    found: list[Span],
    tid: int,
    loop: tuple[CodeType, ...],
    samples: list[tuple[int, tuple[CodeType, ...]]],
    events: list[HostEvent],
    begin_ns: int,
    end_ns: int,
) -> None:
    """A thread on the path."""
    _add(found, tid, begin_ns, end_ns, loop, -1)
    last = len(found) - 1 if loop else -1
    times = [at for at, _ in samples]
    gaps: dict[_Key, list[tuple[int, int]]] = {}
    for key, begin, end in _gaps(events, begin_ns, end_ns):
        gaps.setdefault(key, []).append((begin, end))
    for places in gaps.values():
        stacks = [
            stack for begin, end in places for _, stack in samples[bisect_left(times, begin) : bisect_left(times, end)]
        ]
        if len(stacks) >= _LEAST_SAMPLES:
            agreed = _agreed(stacks, _AGREED)[len(loop) :]
            for begin, end in places:
                _add(found, tid, begin, end, agreed, last)


def _add(found: list[Span], tid: int, begin: int, end: int, stack: Iterable[CodeType], parent: int) -> None:
    for code in stack:
        found.append(Span(tid, begin, end, code, parent))
        parent = len(found) - 1


def _agreed(stacks: list[tuple[CodeType, ...]], share: float) -> tuple[CodeType, ...]:
    """The frames, from the outermost on, that so many of the stacks have in common."""
    least = share * len(stacks)
    agreed: list[CodeType] = []
    while True:
        depth = len(agreed)
        nexts = Counter(stack[depth] for stack in stacks if len(stack) > depth)
        if not nexts:
            return tuple(agreed)
        code, count = nexts.most_common(1)[0]
        if count < least:
            return tuple(agreed)
        agreed.append(code)
        stacks = [stack for stack in stacks if len(stack) > depth and stack[depth] is code]


def _gaps(events: list[HostEvent], begin_ns: int, end_ns: int) -> Iterable[tuple[_Key, int, int]]:
    """Times without an edge of an event in which Python may run: what is around and beside them, begin and end."""
    events.sort(key=lambda event: (event[0], -event[1]))
    opened: list[HostEvent] = []
    at, before = begin_ns, b"("

    def gap(until: int, after: bytes) -> Iterable[tuple[_Key, int, int]]:
        if until - at >= _LEAST_GAP_NS and at >= begin_ns and until <= end_ns:
            around = opened[-1] if opened else None
            if around is None or not around[2] or not around[3].startswith(_NATIVE):
                yield (around[3] if around else b"", before, after), at, until

    for event in events:
        if event[3].startswith(b"ProfilerStep"):
            continue
        while opened and opened[-1][1] <= event[0]:
            yield from gap(opened[-1][1], b")")
            at, before = opened[-1][1], opened[-1][3]
            opened.pop()
        yield from gap(event[0], event[3])
        at, before = event[0], b"("
        opened.append(event)
    while opened:
        yield from gap(opened[-1][1], b")")
        at, before = opened[-1][1], opened[-1][3]
        opened.pop()
    yield from gap(end_ns, b")")
