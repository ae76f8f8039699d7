"""What a host knows of a window beyond the traces: how its ranks went on before it, what they did besides, counters.

An agent fills the records from flight rings and samplers; `context_of` makes of them, for all ranks, what the diagnosis
takes as its `Context`. Pure. All times are of the wall clock, so that they fit the traces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import Annotated, TypeAlias

import msgspec

from eroica.context import CaptureRecord, Context, PhaseRecord, Series, Turn
from eroica.degradation import Change, Trigger
from eroica.probe.environment import differences
from eroica.samplers.evidence import Counted
from eroica.samplers.standout import shared_cores, stand_out
from eroica.wires import wires_of

MOSTLY = 0.7
"""Share of the steps since the onset that must be slow: hiccups of the other kind lie between them."""


_Whole: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]
"""What may be reckoned with in 64 bits. Seen to on reading alone, by the decoder: laps are too many to look at each."""


class Lap(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One iteration that is over. A row on the wire, and nothing that the collector need follow: the ranks of a large
    job tell millions of them with one window. Fields are only ever added, at the end and with a default."""

    step: _Whole
    """Raw count at its begin: the number of its `ProfilerStep#` mark, should it be captured."""
    start_ns: _Whole
    duration_ns: _Whole
    pause: str
    """What else happened in it: "evaluation", "checkpoint", ...; "" if nothing is known."""
    num_batches: _Whole = 0
    num_collectives: _Whole = 0
    waited_ns: _Whole = -1
    """In collectives that began in it, all together; -1: not seen."""


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Something else that a rank did: a garbage collection, a phase. A row, as a lap is."""

    name: str
    """"gc", "fetch" (a batch that was long in coming), "capture" (a trace of ours is written), or one of
    `ring.PHASES`: "save", "evaluation", "compile", ..."""
    step: _Whole
    """Steps completed before it began."""
    start_ns: _Whole
    duration_ns: _Whole


@dataclass(frozen=True, slots=True)
class History:
    """Of one rank, up to the end of a window."""

    laps: tuple[Lap, ...] = ()
    """The last ones, those of the window among them."""
    spans: tuple[Span, ...] = ()
    """In the time of the laps."""
    environment: Mapping[str, object] = field(default_factory=dict)
    """The last snapshot; empty if the probe took none."""
    reduced_bytes: int = 0
    """Summed over ranks per step, outside of optimizer steps; 0: not known."""
    changes: tuple[Trigger, ...] = ()
    """Of its pace, as far as they are remembered."""


def context_of(
    histories: Mapping[int, History],
    counters: Mapping[str, Sequence[Counted]],
    problems: Mapping[int, str],
    cause: Trigger | None,
    window: range,
) -> Context:
    """`counters`: by host; `problems`: why a rank gave no capture; `cause`: what was noticed, None for windows that
    nothing triggered; `window`: raw counts from its begin to its end."""

    def counts(lap: Lap) -> bool:
        # Evaluations explain themselves, and so do earlier windows. Saves and compilations do not.
        return lap.pause in ("", "checkpoint", "compile") or (lap.pause == "capture" and lap.step in window)

    onset = _onset(histories, cause) if cause is not None else None
    return Context(
        environment=_environment({rank: history.environment for rank, history in histories.items()}),
        settings={rank: history.environment for rank, history in histories.items() if history.environment},
        reduced_bytes=max((history.reduced_bytes for history in histories.values()), default=0),
        series=[
            Series(
                rank,
                tuple(lap.step for lap in laps),
                tuple(lap.duration_ns / 1e9 for lap in laps),
                tuple(lap.waited_ns / 1e9 if lap.waited_ns >= 0 else float("nan") for lap in laps),
            )
            for rank, history in sorted(histories.items())
            if (laps := [lap for lap in history.laps if counts(lap)])
        ],
        onset=onset,
        phases=[
            PhaseRecord(rank, _KINDS.get(span.name, span.name), span.step, span.duration_ns / 1e9)
            for rank, history in sorted(histories.items())
            for span in history.spans
        ],
        counters=stand_out(counters),
        shared_cores=shared_cores(counters),
        wires=wires_of(counters),
        captures=[CaptureRecord(rank, why) for rank, why in sorted(problems.items())],
        noticed=_turn(cause) if cause is not None else None,
        turns=_turns(histories),
        earlier_capture=(
            _earlier_capture(histories, onset, cause, window) if cause is not None and onset is not None else None
        ),
    )


_KINDS = {"save": "checkpoint", "load": "checkpoint"}


def _environment(snapshots: Mapping[int, Mapping[str, object]]) -> dict[str, object]:
    """What most ranks have, and who differs in what."""
    if not any(snapshots.values()):
        return {}
    apart = differences(snapshots)
    first = next(snapshot for snapshot in snapshots.values() if snapshot)
    odd = {difference.name for difference in apart}
    return {
        "common": {name: value for name, value in sorted(first.items()) if name not in odd and name != "host"},
        "differences": [
            {
                "name": difference.name,
                "usual": difference.usual,
                "odd": [{"value": value, "ranks": ranks} for value, ranks in difference.odd],
            }
            for difference in apart
        ],
    }


def _turn(change: Trigger) -> Turn:
    return Turn(change.step, change.change.value, change.baseline_ns / 1e9, change.observed_ns / 1e9)


def _turns(histories: Mapping[int, History]) -> tuple[Turn, ...]:
    """Slow and usual levels by turns, as the rank saw them that saw most of them: ranks of a job slow down together."""
    told = [
        [c for c in history.changes if c.change is Change.SLOW or c.ended is Change.SLOW]
        for _, history in sorted(histories.items())
    ]
    return tuple(_turn(change) for change in max(told, key=len, default=[]))


RIGHT_AFTER = 3
"""Iterations from the end of a window of ours to the first slow one, at most: the onset is not known better."""
BEFORE, AFTER = 10, 5
"""Iterations on either side of that window that must show the two levels."""
JUMPS = 0.7
"""Share of the slowdown that must be there at once after that window, and must not be there before it: a trend that
began before, or goes on, is something else's."""


def _earlier_capture(
    histories: Mapping[int, History], onset: int, cause: Trigger, window: range
) -> tuple[int, int] | None:
    """First and last step of a window of ours with whose end the slowdown began, on most ranks; None without one."""
    found: list[tuple[int, int]] = []
    gap_ns = cause.observed_ns - cause.baseline_ns
    for history in histories.values():
        laps = [lap for lap in history.laps if lap.step not in window]
        ends = [i for i, lap in enumerate(laps) if lap.pause == "capture" and lap.step < onset]
        if not ends or sum(laps[ends[-1]].step < lap.step < onset for lap in laps) > RIGHT_AFTER:
            continue
        first = last = ends[-1]
        while first and laps[first - 1].pause == "capture":
            first -= 1
        before = [lap.duration_ns for lap in laps[:first] if not lap.pause][-BEFORE:]
        after = [lap.duration_ns for lap in laps[last + 1 :] if not lap.pause][:AFTER]
        if (
            before
            and after
            and median(before) - cause.baseline_ns <= (1 - JUMPS) * gap_ns
            and median(after) - cause.baseline_ns >= JUMPS * gap_ns
        ):
            found.append((laps[first].step, laps[last].step))
    return median_low(found) if 2 * len(found) > len(histories) else None


def _onset(histories: Mapping[int, History], cause: Trigger) -> int | None:
    """First slow step of a slowdown that lasts: before the one that showed it, as far back as most steps are slow.

    None where nothing lies before it, and for other changes: single slow steps have no onset that a level could show.
    """
    if cause.change is not Change.SLOW:
        return None
    middle_ns = (cause.baseline_ns + cause.observed_ns) / 2
    by_step: dict[int, list[int]] = {}
    for history in histories.values():
        for lap in history.laps:
            if not lap.pause and lap.step <= cause.step:
                by_step.setdefault(lap.step, []).append(lap.duration_ns)
    steps = sorted(by_step)
    onset, num_slow = None, 0
    for num_seen, step in enumerate(reversed(steps), start=1):
        if median(by_step[step]) > middle_ns:
            num_slow += 1
            onset = step
        if num_slow < MOSTLY * num_seen:
            break
    return onset if onset is not None and steps[0] < onset else None
