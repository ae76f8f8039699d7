"""What all ranks pay in each step is told without peers and without a past, where it costs as much as a slowdown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from eroica.causes import BLOCKING
from eroica.context import Context
from eroica.critical_path import Activity
from eroica.diagnosis import diagnose
from eroica.draft import Draft, with_records
from eroica.findings import Diagnosis, Impact
from eroica.pattern import Function, Summary, stack
from tests import handmade as h

READ = Function(Activity.SYNC, "cudaStreamSynchronize", "train.py:12", "train.py:12")
MALLOC = Function(Activity.ALLOCATOR, "cudaMalloc", "model.py:3", "model.py:3")
LINEAR = Function(Activity.OPERATOR, "aten::linear", "model.py:8", "model.py:8")


def job(functions: Mapping[Function, float], ranks: range = range(8), *, blocks: range = range(0)) -> list[Summary]:
    """Eight ranks on two hosts that compute for 0.9 s per step; `ranks` do the rest as well, and the others wait."""
    extra = sum(functions.values())
    made = []
    for rank in range(8):
        own = {h.GEMM: 0.9} | (dict(functions) if rank in ranks else {})
        wait = 0.05 if rank in ranks else 0.05 + extra
        made.append(
            h.Rank(
                own=sum(own.values()), length=0.95 + extra, functions=own, host=f"node{rank // 4}",
                samples=[h.Sample(wait, sum(own.values()), channel=h.everyone(8))],
            )
        )  # fmt: skip
    return [replace(s, coverage=replace(s.coverage, launches_block=s.rank in blocks)) for s in h.job(made)]


def said(made: Diagnosis) -> list[tuple[str, str, str]]:
    return [(f.cause, f.scope, f.ranks) for f in made.findings]


@pytest.mark.parametrize(("function", "cause"), [(READ, "device_sync"), (MALLOC, "memory_allocator")])
def test_what_all_ranks_lose_in_each_step_is_told_with_its_place_and_its_cost(function: Function, cause: str) -> None:
    made = diagnose(stack(job({function: 0.1})))
    assert said(made) == [(cause, "all", "0-7")]
    (found,) = made.findings
    assert found.function is not None and found.function.user_location == function.user_location
    assert found.impact.seconds_per_iteration == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize("function", [READ, MALLOC])
def test_a_few_percent_of_it_are_the_jobs_choice(function: Function) -> None:
    assert diagnose(stack(job({function: 0.03}))).findings == ()


def test_what_one_rank_alone_loses_is_that_ranks() -> None:
    made = diagnose(stack(job({READ: 0.1}, range(3, 4))))
    assert said(made) == [("device_sync", "rank", "3")]


def test_what_the_healthy_window_had_already_is_not_told_again() -> None:
    same = job({READ: 0.1})
    assert diagnose(stack(same), Context(baseline=stack(same))).findings == ()


def test_launches_that_block_on_all_ranks_are_a_setting_and_the_environment_names_it() -> None:
    environment = {"common": {"env.CUDA_LAUNCH_BLOCKING": "1"}, "differences": []}
    made = diagnose(stack(job({LINEAR: 0.1}, blocks=range(8))), Context(environment=environment))
    assert said(made) == [("configuration", "all", "0-7")]
    texts = [made.evidence[key].text for key in made.findings[0].evidence]
    assert "CUDA_LAUNCH_BLOCKING is 1 on all ranks" in texts


def test_launches_that_block_and_cost_nothing_are_not_told() -> None:
    assert diagnose(stack(job({LINEAR: 0.01}, blocks=range(8)))).findings == ()


def test_launches_that_block_on_one_host_are_that_hosts() -> None:
    odd = {"name": "env.CUDA_LAUNCH_BLOCKING", "usual": "null", "odd": [{"value": '"1"', "ranks": "4-7"}]}
    made = diagnose(
        stack(job({LINEAR: 0.1}, range(4, 8), blocks=range(4, 8))), Context(environment={"differences": [odd]})
    )
    (found,) = made.findings
    assert (found.cause, found.scope, found.hosts) == ("configuration", "host", ("node1",))
    assert "CUDA_LAUNCH_BLOCKING is 1 on ranks 4-7" in [made.evidence[key].text for key in found.evidence]


def excess_of(rows: range, context: Context) -> Draft:
    """A finding of launches that block on these ranks of eight."""
    ranks = np.array(rows, np.intp)
    impact = Impact(0.1, 0.1, "pattern")
    draft = Draft(BLOCKING, "rank", ranks, (), "stable", None, impact, 1.0, ())
    return with_records(stack(job({})), draft, context)


@pytest.mark.parametrize(("slow", "is_told"), [(range(5), True), (range(5, 8), False)])
def test_a_setting_of_most_ranks_is_told_of_no_rank_that_has_it_otherwise(slow: range, is_told: bool) -> None:
    odd = {"name": "env.CUDA_LAUNCH_BLOCKING", "usual": '"1"', "odd": [{"value": '"0"', "ranks": "5-7"}]}
    made = excess_of(slow, Context(environment={"differences": [odd]}))
    texts = [item.text for item in made.evidence]
    assert ("CUDA_LAUNCH_BLOCKING is 1 on all ranks but 5-7" in texts) == is_told
    assert not any(text.endswith("on all ranks") or text.endswith("ranks 5-7") for text in texts)


def test_launches_that_block_since_the_healthy_window_are_one_finding() -> None:
    forward = Function(Activity.PYTHON, "forward", "model.py:8", "model.py:8")
    now, then = job({LINEAR: 0.1, forward: 0.1}, blocks=range(8)), job({})
    made = diagnose(stack(now), Context(baseline=stack(then)))
    assert said(made) == [("configuration", "all", "0-7")]
    assert made.findings[0].impact.seconds_per_iteration == pytest.approx(0.2, rel=0.01)
