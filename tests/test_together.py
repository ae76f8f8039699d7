"""All ranks at once: single steps in which everybody stops for the same thing, and a level that has no past."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eroica.context import Context, PhaseRecord, Series
from eroica.critical_path import Activity
from eroica.diagnosis import diagnose
from eroica.findings import Diagnosis
from eroica.names import Phase
from eroica.pattern import Function, stack
from eroica.samplers.standout import Observation
from tests import handmade as h

FETCH = Function(Activity.INPUT, "_try_get_data", "torch/utils/data/dataloader.py:1275", "train.py:9")
SAVE = Function(Activity.CHECKPOINT, "save_shard", "train.py:70", "train.py:70")
MATMUL = Function(Activity.OPERATOR, "aten::mm", None, None)
STEPS, USUAL, TRANSFER = 12, 0.060, 0.010


def job(function: Function, extra: list[float], hit: list[int]) -> list[h.Rank]:
    """Ranks that work alike, and in the steps `hit` longer by `extra`, each, in one function."""
    ranks = []
    longest = max(extra)
    for more in extra:
        own = np.full(STEPS, USUAL)
        own[hit] += more
        length = np.full(STEPS, USUAL + TRANSFER)
        length[hit] += longest
        mean = more * len(hit) / STEPS
        functions = {MATMUL: USUAL, function: max(mean, 1e-4)}
        place = sorted(functions, key=lambda f: (-functions[f], f.name)).index(function)
        ranks.append(
            h.Rank(
                own=own.tolist(),
                length=length.tolist(),
                samples=[h.Sample(TRANSFER, USUAL)],
                functions=functions,
                tops={step: (place, more, float("nan")) for step in hit if more},
                has_device=False,
            )
        )
    return ranks


def told(ranks: list[h.Rank], phases: list[PhaseRecord] | None = None, **context: object) -> Diagnosis:
    made = stack(h.job(ranks, STEPS))
    series = [Series(rank, tuple(range(STEPS)), tuple(made.length_s[rank].tolist())) for rank in range(len(ranks))]
    return diagnose(made, Context(trigger="recurring", series=series, phases=phases or [], **context))  # type: ignore[arg-type]


def test_saves_of_all_ranks_in_the_same_steps_blame_none_whoever_is_served_last() -> None:
    made = told(job(SAVE, [0.3, 0.5, 0.7, 0.9], [2, 6, 10]))
    (found,) = made.findings
    assert (found.cause, found.scope, found.ranks, found.steps) == ("checkpoint_io", "all", "0-3", "every 4")
    assert found.function is not None and found.function.user_location == "train.py:70"
    assert found.impact.seconds_per_iteration == pytest.approx(0.9 * 3 / STEPS, rel=0.05)
    assert "storage" in " ".join(evidence.text for evidence in made.evidence.values())


def test_a_save_of_one_rank_in_these_steps_is_its_own() -> None:
    (found,) = told(job(SAVE, [0.0, 0.0, 0.9, 0.0], [2, 6, 10])).findings
    assert (found.cause, found.scope, found.ranks) == ("checkpoint_io", "rank", "2")


def test_workers_that_are_started_anew_are_the_begin_of_an_epoch_and_could_be_kept() -> None:
    phases = [PhaseRecord(rank, "workers", step, 0.02) for rank in range(4) for step in (2, 6, 10)]
    (found,) = told(job(FETCH, [0.4] * 4, [2, 6, 10]), phases).findings
    assert (found.cause, found.scope) == ("input_pipeline", "all") and "persistent_workers" in found.advice
    (other,) = told(job(FETCH, [0.4] * 4, [2, 6, 10])).findings
    assert other.cause == "input_pipeline" and "persistent_workers" not in other.advice


def test_one_step_in_which_all_stop_is_a_hiccup() -> None:
    assert told(job(SAVE, [0.9] * 4, [6])).findings == ()


def test_operators_that_take_longer_everywhere_in_single_steps_are_a_busy_hosts() -> None:
    other = Function(Activity.OPERATOR, "aten::add", None, None)
    assert not any(f.scope == "all" for f in told(job(other, [0.1] * 4, [2, 6, 10])).findings)


def test_single_long_steps_of_what_takes_longer_in_every_step_are_no_finding_beside_it() -> None:
    forward = Function(Activity.PYTHON, "forward", "train.py:30", "train.py:30")
    longer, peak = 0.1, 0.2
    ranks = [
        replace(
            rank,
            own=[seconds + longer for seconds in rank.own],  # type: ignore[union-attr]
            length=[seconds + longer for seconds in rank.length],  # type: ignore[union-attr]
            functions={MATMUL: USUAL, forward: longer + peak * 3 / STEPS},
            tops={step: (0, peak, float("nan")) for step in (2, 6, 10)},
        )
        for rank in job(forward, [peak] * 4, [2, 6, 10])
    ]
    healthy = stack(h.job(job(forward, [0.0] * 4, []), STEPS))
    (found,) = told(ranks, baseline=healthy).findings
    assert (found.scope, found.steps, found.function and found.function.name) == ("all", "stable", "forward")
    assert found.impact.seconds_per_iteration == pytest.approx(longer + peak * 3 / STEPS, rel=0.1)


def test_what_another_rank_does_longer_in_each_step_is_no_level_of_all_where_no_function_holds_it() -> None:
    forward = Function(Activity.PYTHON, "forward", "train.py:30", "train.py:30")
    longer = 0.014
    ranks = []
    for rank, one in enumerate(job(forward, [0.0] * 4, [])):
        mine = [step for step in range(STEPS) if step % 3 == rank % 3]
        own = [USUAL + longer * (step in mine) for step in range(STEPS)]
        length = [USUAL + TRANSFER + longer] * STEPS
        ranks.append(replace(one, own=own, length=length, functions={MATMUL: USUAL, forward: longer / 3}))
    healthy = stack(h.job(job(forward, [0.0] * 4, []), STEPS))
    (found,) = told(ranks, baseline=healthy).findings
    assert (found.scope, found.cause, found.function, found.ranks) == ("rotating", "unknown", None, "")


def bound(inputs: list[float]) -> list[h.Rank]:
    """Ranks that wait for batches for so long in each step."""
    longest = max(inputs)
    return [
        h.Rank(
            own=USUAL + wait,
            length=USUAL + longest + TRANSFER,
            samples=[h.Sample(TRANSFER + longest - wait, USUAL + wait)],
            functions={MATMUL: USUAL, FETCH: wait},
            has_device=False,
            host="node1",
        )
        for wait in inputs
    ]


def test_all_ranks_that_wait_for_their_batches_from_the_first_step_on_are_told_without_a_past() -> None:
    busy = Observation("node1", "host", None, "busy_share", 0.98, None, "this host's cores are busy 98% of the time", 1)
    settings = {
        rank: {"loader.1.num_workers": 2, "loader.1.data": "Clips", "loader.1.data_at": "data.py:41"}
        for rank in range(4)
    }
    made = diagnose(stack(h.job(bound([0.05] * 4))), Context(trigger="baseline", settings=settings, counters=(busy,)))
    (found,) = made.findings
    assert (found.cause, found.scope, found.ranks) == ("input_pipeline", "all", "0-3")
    # Workers make them, out of sight of any capture: the data set is what can be named.
    assert found.function is not None and found.function.user_location == "data.py:41"
    assert any("cores are busy" in evidence.text for evidence in made.evidence.values())


def test_a_loader_that_keeps_up_or_waits_on_one_rank_only_is_no_level() -> None:
    assert diagnose(stack(h.job(bound([0.004] * 4)))).findings == ()
    assert [f.scope for f in diagnose(stack(h.job(bound([0.05, 0.0, 0.0, 0.0])))).findings] == ["rank"]


SEARCH = Function(Activity.COMPILE, "aten::cudnn_convolution", "model.py:57", "model.py:57", phase=Phase.TUNING)


def searching(hit: list[int]) -> Diagnosis:
    """A device job in which all ranks look for the fastest kernel of a new size in some steps, for a quarter of one."""
    ranks = [replace(rank, has_device=True) for rank in job(SEARCH, [0.015] * 4, hit)]
    return diagnose(
        stack(h.job(ranks, STEPS)), Context(environment={"common": {"torch.cudnn.benchmark": True}, "differences": []})
    )


def test_searches_for_kernels_by_all_ranks_are_a_setting_though_no_step_is_half_as_long_again() -> None:
    made = searching([2, 8])
    (found,) = made.findings
    assert (found.cause, found.scope, found.ranks) == ("configuration", "all", "0-3")
    assert "torch.cudnn.benchmark is true on all ranks" in [made.evidence[key].text for key in found.evidence]


@pytest.mark.parametrize("hit", [[2], [2, 3]])
def test_a_search_in_one_step_or_in_its_neighbours_is_that_of_one_new_size(hit: list[int]) -> None:
    assert searching(hit).findings == ()
