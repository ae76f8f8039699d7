"""What records explain without a trace: a profiler of the job's own, saves, and captures of ours."""

from __future__ import annotations

import pytest

from eroica.context import CaptureRecord, Context, PhaseRecord, Series
from eroica.diagnosis import diagnose
from eroica.pattern import stack

USUAL_S, SLOW_S, EVERY = 0.1, 1.1, 20


def series(num_ranks: int, num_steps: int = 120) -> list[Series]:
    """All ranks take long in every 20th step."""
    seconds = tuple(SLOW_S if step % EVERY == EVERY - 1 else USUAL_S for step in range(num_steps))
    return [Series(rank, tuple(range(num_steps)), seconds) for rank in range(num_ranks)]


def records(ranks: list[int], kind: str, duration_s: float = 1.0) -> list[PhaseRecord]:
    return [PhaseRecord(rank, kind, step, duration_s) for rank in ranks for step in range(EVERY - 1, 120, EVERY)]


@pytest.mark.parametrize(
    ("kind", "who", "cause", "scope", "ranks"),
    [
        ("profile", [0, 1, 2, 3], "profiler_overhead", "all", "0-3"),
        ("checkpoint", [0, 1, 2, 3], "checkpoint_io", "all", "0-3"),
        ("checkpoint", [2], "checkpoint_io", "rank", "2"),
    ],
)
def test_slow_steps_that_records_fill_are_explained_without_a_trace(
    kind: str, who: list[int], cause: str, scope: str, ranks: str
) -> None:
    captures = [CaptureRecord(rank, "has another profiler active") for rank in range(4)]
    context = Context(trigger="recurring", series=series(4), phases=records(who, kind), captures=captures)
    made = diagnose(stack([]), context)
    (found,) = made.findings
    assert (made.kind, found.cause, found.scope, found.ranks) == ("slow", cause, scope, ranks)
    assert found.steps == f"every {EVERY}"
    assert found.impact.seconds_per_iteration == pytest.approx(1.0 / EVERY, rel=0.05)


@pytest.mark.parametrize("phases", [[], records([0, 1, 2, 3], "profile", 0.2), records([0, 1], "checkpoint")])
def test_records_that_do_not_fill_the_slow_steps_explain_nothing(phases: list[PhaseRecord]) -> None:
    made = diagnose(stack([]), Context(trigger="recurring", series=series(4), phases=phases))
    assert made.kind == "no_data" and made.findings == ()


def test_of_ranks_that_one_server_serves_in_turn_the_last_tells_how_long_all_wait() -> None:
    """Each waits in its own write for a part only, and for the others in the rest."""
    phases = [
        PhaseRecord(rank, "profile", step, 0.25 * (1 + (rank + turn) % 4))
        for turn, step in enumerate(range(EVERY - 1, 120, EVERY))
        for rank in range(4)
    ]
    made = diagnose(stack([]), Context(trigger="recurring", series=series(4), phases=phases))
    assert [(found.cause, found.scope) for found in made.findings] == [("profiler_overhead", "all")]
