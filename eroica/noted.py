"""What the ranks' own records explain by themselves: slow steps that a save, a collection or a profiler fills, with no
trace of them; and a job that is slow because we write a capture of it.

A profiler of the job's own keeps ours out, and what it costs is then known from the records alone: when each rank ended
it, and how long the iterations were. Pure. Used by `diagnosis`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eroica.causes import Cause
from eroica.context import FEW_STEPS, Context, durations_of, recurrence_of

EXPLAINS = 0.6
"""Share of the excess of a rank's slow steps that its records must fill."""
MOSTLY = 0.7
"""Share of the slow steps in which each rank must have such a record, to call it all."""
EARLIER = 5
"""A slowdown that began so many steps before a capture was written is not of its making."""
_CAUSES = {
    "profile": ("profiler_overhead", "ended a profiler of the job's own and wrote what it had recorded"),
    "capture": ("profiler_overhead", "wrote a capture of ours"),
    "checkpoint": ("checkpoint_io", "saved or loaded"),
    "gc": ("host_gc", "collected garbage"),
    "compile": ("recompilation", "compiled"),
}


@dataclass(frozen=True, slots=True)
class Noted:
    """Slow steps that records explain."""

    cause: Cause
    ranks: tuple[int, ...]
    """That have such records."""
    is_all: bool
    period: int | None
    seconds: float
    """Per iteration, of all iterations seen."""
    usual_s: float
    """Of an iteration without."""
    share: float
    """Of the excess that the records fill, on the ranks that have them."""


def noted_steps(context: Context) -> Noted | None:
    """Steps that stick out again and again, and what fills them on all ranks or on one; None if nothing does."""
    recurrence = recurrence_of(context.series, context.onset, is_noticed=context.trigger == "recurring")
    if recurrence is None or len(context.series) < 2:
        return None
    slow = set(recurrence.steps.tolist())
    steps, seconds = durations_of(context.series)
    if context.onset is not None:
        seconds = seconds[steps >= context.onset]
    usual_s = float(np.median(seconds))
    excess = {
        one.rank: sum(
            s - usual_s for step, s in zip(one.steps, one.duration_s, strict=True) if step in slow and s > usual_s
        )
        for one in context.series
    }
    excesses = {
        step: max(one.duration_s[one.steps.index(step)] - usual_s for one in context.series if step in one.steps)
        for step in slow
    }
    best: Noted | None = None
    for kind, (cause, did) in _CAUSES.items():
        filled = dict.fromkeys(excess, 0.0)
        longest: dict[int, float] = {}
        seen = dict.fromkeys(excess, 0)
        for record in context.phases:
            # A record that begins with the last step's end counts among the steps before it.
            step = next((s for s in (record.step, record.step - 1) if s in slow), None)
            if record.kind == kind and record.rank in filled and step is not None:
                filled[record.rank] += record.duration_s
                seen[record.rank] += 1
                longest[step] = max(longest.get(step, 0.0), record.duration_s)
        ranks = tuple(r for r in sorted(filled) if excess[r] > 0 and filled[r] >= EXPLAINS * excess[r])
        # Of ranks that one server serves in turn the last has such records for as long as all wait.
        whole = min(seen.values()) >= MOSTLY * len(slow) and sum(longest.values()) >= EXPLAINS * sum(excesses.values())
        if whole:
            ranks = tuple(sorted(excess))
            share = min(sum(longest.values()) / sum(excesses.values()), 1.0)
        elif len(ranks) == 1 and len(excess) > 1:
            share = min(filled[ranks[0]] / excess[ranks[0]], 1.0)
        else:
            continue
        because = (
            f"in its slow steps {'each rank' if whole else f'rank {ranks[0]}'} {did}, for {share:.0%} of the excess"
        )
        ruled = ("a single rank: all do so in the same steps",) if whole else ()
        found = Noted(
            Cause(cause, True, because, ruled), ranks, whole, recurrence.period,
            recurrence.share * float(seconds.mean()), usual_s, share,
        )  # fmt: skip
        if best is None or found.share > best.share:
            best = found
    return best


def is_self_inflicted(context: Context, window: np.ndarray[tuple[int], np.dtype[np.int64]]) -> bool:
    """Most ranks still wrote a capture of ours when the window began, and the job was not slow before they did.

    Wrong where something else slows the job down in the very steps in which a capture begins to be written.
    """
    steps, seconds = durations_of(context.series)
    if not len(window) or len(steps) < FEW_STEPS:
        return False
    first = int(window[0])
    ranks = {one.rank for one in context.series}
    writing = set()
    for record in context.phases:
        since = (steps >= record.step) & (steps < first)
        if record.kind != "capture" or record.step > first or record.duration_s < float(seconds[since].sum()):
            continue
        if context.onset is None or context.onset >= record.step - EARLIER:
            writing.add(record.rank)
    return 2 * len(writing & ranks) > len(ranks)
