"""How a job went from its usual pace to the present one: at once, more and more, or back and forth.

Pure: the series of iterations and what the watchers noticed come in, a sentence goes out. It blames nobody and decides
nothing; a finding quotes it as evidence. Used by `diagnosis`. Not here: what counts as slow (`degradation`), and steps
that stick out one by one (`context.recurrence_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from eroica.collectives import Float64s
from eroica.context import Context, Turn, durations_of
from eroica.intervals import Int64s

LEAST_RISE = 0.05
"""A trend must have made iterations so much longer: as much as makes a level slow (`pace.EFFECT`)."""
BETTER = 0.6
"""A trend must leave so much less of the length of iterations unexplained than a jump does, where the two differ."""
FEW_LAPS = 12
"""Fewer iterations on the slope are no trend: noise draws slopes, too."""
EDGE = 5
"""No change is looked for so near to either end."""
ALIKE = 1.2
"""Slow stretches whose lengths differ by less are one level."""
HICCUP = 3.0
"""Times the median: longer iterations count as long as this."""


def course_of(context: Context, first_step: int | None) -> tuple[str, dict[str, float]] | None:
    """One sentence and its numbers; None where there is nothing to say but that it became slow. `first_step`: of the
    window, whose own iterations are longer for being captured."""
    return _switching(context.turns) or _growing(context, first_step)


def _switching(turns: Sequence[Turn]) -> tuple[str, dict[str, float]] | None:
    """Slow, over, and slow again by about as much: two modes."""
    slow, fast = [t for t in turns if t.change == "slow"], [t for t in turns if t.change == "recovered"]
    if len(slow) < 2 or not fast or max(t.observed_s for t in slow) > ALIKE * min(t.observed_s for t in slow):
        return None
    low, high = float(np.median([t.usual_s for t in slow])), float(np.median([t.observed_s for t in slow]))
    seen = ", ".join(
        f"{'slow' if t.change == 'slow' else 'fast'} by step {t.step}" for t in turns if t in slow or t in fast
    )
    return (
        f"iterations switch between two levels, {_ms(low)} and {_ms(high)}, about the same each time: {seen}",
        {"fast_s": low, "slow_s": high, "num_switches": len(turns)},
    )


@dataclass(frozen=True, slots=True)
class _Fit:
    """A series that is level and then changes."""

    at: int
    values: Float64s


def _growing(context: Context, first_step: int | None) -> tuple[str, dict[str, float]] | None:
    steps, seconds = durations_of(context.series)
    if first_step is not None:
        steps, seconds = steps[steps < first_step], seconds[steps < first_step]
    if len(steps) < 2 * FEW_LAPS:
        return None
    seconds = np.minimum(seconds, HICCUP * float(np.median(seconds)))
    jump, slope = _best(steps, seconds, _jump), _best(steps, seconds, _slope)
    first, last = float(slope.values[slope.at]), float(slope.values[-1])
    since = min(jump.at, slope.at)
    left = [float(np.abs(seconds - fit.values)[since:].sum()) for fit in (slope, jump)]
    if len(steps) - slope.at < FEW_LAPS or last < (1 + LEAST_RISE) * first or left[0] > BETTER * left[1]:
        return None
    each = (last / first - 1) / max(int(steps[-1] - steps[slope.at]), 1)
    return (
        f"iterations take longer and longer, a trend and no jump: {_ms(first)} at step {steps[slope.at]}, "
        f"{_ms(last)} at step {steps[-1]}, {each:.2%} more with each step",
        {"first_s": first, "last_s": last, "per_step": each},
    )


def _best(steps: Int64s, seconds: Float64s, model: Callable[[Int64s, Float64s, int], Float64s]) -> _Fit:
    fits = [_Fit(at, model(steps, seconds, at)) for at in range(EDGE, len(steps) - EDGE)]
    return min(fits, key=lambda fit: float(np.abs(seconds - fit.values).sum()))


def _jump(steps: Int64s, seconds: Float64s, at: int) -> Float64s:
    values = np.full(len(seconds), np.median(seconds[:at]))
    values[at:] = np.median(seconds[at:])
    return values


def _slope(steps: Int64s, seconds: Float64s, at: int) -> Float64s:
    values = np.full(len(seconds), np.median(seconds[:at]))
    along = (steps[at:] - steps[at]).astype(np.float64)
    rise = float((along * (seconds[at:] - values[at])).sum() / max(float((along**2).sum()), 1e-12))
    values[at:] += rise * along
    return values


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
