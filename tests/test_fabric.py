"""The fabric model keeps the laws that no parameter may break: bytes, capacities, symmetry, and closed forms."""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eroica.errors import UserError
from eroica.fabric.parameters import (
    QUIET,
    Algorithm,
    Background,
    Fabric,
    Host,
    Layout,
    Noise,
    Setting,
    Stalls,
    Workload,
)
from eroica.fabric.simulator import Passage, Run, Steering, Task, Traffic, max_min, play, simulate, tasks
from eroica.fabric.topology import build

SIZES = st.integers(1, 6)
ALGORITHMS = st.sampled_from(["ring", "tree", "hierarchical"])
LAYOUTS = st.sampled_from(["data", "tensor"])
BUSY = Noise(stalls=Stalls(rate=0.1), background=Background(burst_s=0.05))


def small(
    hosts: int = 4,
    gpus: int = 4,
    *,
    algorithm: Algorithm = "ring",
    layout: Layout = "data",
    noise: Noise = BUSY,
    fabric: Fabric | None = None,
    **work: Any,
) -> Setting:
    return Setting(
        hosts=hosts,
        host=Host(gpus=gpus),
        fabric=fabric or Fabric(hosts_per_leaf=2),
        workload=Workload(buckets=3, algorithm=algorithm, layout=layout, **work),
        noise=noise,
    )


# --- sharing --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_nobody_can_have_more_without_someone_who_has_less_losing_some(streams: int, links: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    usage = rng.integers(0, 3, (streams, links)) * rng.choice([0.5, 1.0], (streams, links))
    weight, limit = rng.integers(1, 4, streams).astype(float), rng.uniform(1, 20, streams)
    capacity, others = rng.uniform(1, 20, links), rng.integers(0, 3, links).astype(float)
    rate = max_min(usage, weight, limit, capacity, others)
    level = rate / weight
    load = rate @ usage
    assert (rate > 0).all() and (rate <= limit * (1 + 1e-6)).all() and (load <= capacity * (1 + 1e-6)).all()
    for s in range(streams):
        # Others on a full link go at the level of its fastest stream: they take what is left.
        at_limit = rate[s] >= limit[s] * (1 - 1e-6)
        mine = [k for k in range(links) if usage[s, k] > 0]
        bound = [
            k
            for k in mine
            if load[k] + others[k] * level[s] >= capacity[k] * (1 - 1e-6)
            and level[s] >= level[usage[:, k] > 0].max() * (1 - 1e-6)
        ]
        assert at_limit or bound


# --- conservation ---------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(SIZES, st.integers(1, 4), ALGORITHMS, LAYOUTS, st.booleans(), st.booleans(), st.integers(0, 1000))
def test_all_bytes_arrive_once_and_no_link_carries_more_than_it_can(
    hosts: int, gpus: int, algorithm: Algorithm, layout: Layout, by_rail: bool, spread: bool, seed: int
) -> None:
    setting = small(
        hosts, gpus, algorithm=algorithm, layout=layout, fabric=Fabric(hosts_per_leaf=2, by_rail=by_rail, spread=spread)
    )
    run = simulate(setting, 4, seed)
    asked = run.job.amount * 4 * setting.workload.buckets
    assert run.stream_bytes == pytest.approx(asked)
    assert run.link_bytes == pytest.approx(run.job.usage.T @ asked, rel=1e-5)
    assert (run.peak <= 1 + 1e-6).all()
    took_s = run.done_s - run.begin_s
    for g, group in enumerate(run.job.groups):
        alone_s = (run.job.amount[group.streams] / run.job.limit[group.streams]).max()
        assert (took_s[:, g] >= (alone_s + group.latency_s) * (1 - 1e-3) - 1e-7).all()


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 6), st.integers(1, 4), ALGORITHMS, st.integers(0, 1000))
def test_a_reduction_sends_each_card_what_its_algorithm_needs(
    hosts: int, gpus: int, algorithm: Algorithm, seed: int
) -> None:
    setting = small(hosts, gpus, algorithm=algorithm, fabric=Fabric(hosts_per_leaf=1, paths=2))
    job = build(setting, np.random.default_rng(seed))
    # Every hop leaves its leaf here, so that all of the cards' bytes go over the upper links: up, and down again.
    over_switches = float(job.amount @ job.usage[:, job.is_switch].sum(axis=1))
    share = setting.workload.gradient_bytes / setting.workload.buckets
    members = hosts * (gpus if algorithm == "ring" else 1)
    sent = 2 * hosts * (members - 1) / members if algorithm != "tree" else 2 * (hosts - 1)
    assert over_switches == pytest.approx(2 * sent * share)


# --- symmetry -------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(12)), ALGORITHMS, st.integers(0, 1000))
def test_renaming_ranks_renames_who_waits_and_changes_nothing_else(
    order: list[int], algorithm: Algorithm, seed: int
) -> None:
    setting = small(6, 2, algorithm=algorithm)
    drawn = [task for task, _ in zip(tasks(setting, np.random.default_rng(seed)), range(3), strict=False)]

    def run(some: list[Task]) -> Run:
        job = build(setting, np.random.default_rng(seed))
        traffic = Traffic(job, setting.noise.background, np.random.default_rng(seed))
        return play(job, iter(some), traffic, len(some))

    one = run(drawn)
    other = run([Task(task.segments_s[order], task.work[order]) for task in drawn])
    assert other.length_s == pytest.approx(one.length_s)
    assert other.enter_s == pytest.approx(one.enter_s[:, order]) and other.begin_s == pytest.approx(one.begin_s)
    assert other.compute_s == pytest.approx(one.compute_s[:, order])


# --- closed forms ---------------------------------------------------------------------------------------------------


def transfer_s(setting: Setting) -> float:
    """Of one bucket without anybody else, by hand; all hosts at one leaf, all links symmetric."""
    host, n, g = setting.host, setting.hosts, setting.host.gpus
    share = setting.workload.gradient_bytes / setting.workload.buckets / g
    f = setting.fabric
    if n == 1 or setting.workload.algorithm == "ring":
        rate = host.nvlink_bytes_s / g if g > 1 else np.inf
        rate = min(rate, host.nic_bytes_s, host.pcie_bytes_s) if n > 1 else rate
        between = 2 * (n - 1)
        steps = (2 * (n * g - 1) - between) * f.nvlink_latency_s + between * f.net_latency_s
        moved = 2 * (n * g - 1) / (n * g) * share
    elif setting.workload.algorithm == "hierarchical":
        moved = 2 * (n - 1) / n * share
        # Through each device: once its own part of everybody's, once everybody's of its own.
        inner = np.inf if g == 1 else host.nvlink_bytes_s / (2 * (g - 1) * share) * moved
        rate = min(host.nic_bytes_s, host.pcie_bytes_s, inner)
        steps = 2 * (g - 1) * f.nvlink_latency_s + 2 * (n - 1) * f.net_latency_s
    else:
        raise AssertionError
    return float(f.base_latency_s + steps + moved / rate)


@settings(max_examples=40, deadline=None)
@given(SIZES, st.integers(1, 8), st.sampled_from(["ring", "hierarchical"]), st.floats(1e8, 2e10), st.floats(0.02, 0.2))
def test_without_noise_an_iteration_takes_what_can_be_reckoned_by_hand(
    hosts: int, gpus: int, algorithm: Algorithm, gradient_bytes: float, compute_s: float
) -> None:
    setting = Setting(
        hosts=hosts,
        host=Host(gpus=gpus),
        fabric=Fabric(hosts_per_leaf=8, packed=True),
        workload=Workload(
            algorithm=algorithm,
            compute_s=compute_s,
            gradient_bytes=gradient_bytes,
            wait_slowdown=0.0,
            transfer_slowdown=0.0,
        ),
        noise=QUIET,
    )
    if hosts * gpus == 1:
        return
    work, one_s = setting.workload, transfer_s(setting)
    ready = compute_s * (work.forward_share + (1 - work.forward_share) * (np.arange(work.buckets) + 1) / work.buckets)
    done = 0.0
    for at in ready:
        done = max(done, at) + one_s
    run = simulate(setting, 3, 0)
    assert run.length_s == pytest.approx([done + work.optimizer_s] * 3) and run.variation < 1e-9


def test_a_tree_needs_fewer_steps_between_hosts_than_a_ring() -> None:
    ring, tree = (
        build(small(6, 2, algorithm=algorithm), np.random.default_rng(0)).groups[0].latency_s
        for algorithm in ("ring", "tree")
    )
    assert tree < ring


def test_a_rank_computes_more_slowly_while_its_reduction_waits_or_transfers() -> None:
    def run(wait: float, transfer: float) -> Run:
        setting = small(2, 1, noise=QUIET, wait_slowdown=wait, transfer_slowdown=transfer)
        # Rank 1 needs a second more for the first bucket; rank 0 has a second of work left meanwhile.
        task = Task(np.array([[0.1, 0.5, 0.5], [1.1, 0.5, 0.5]]), np.ones(2))
        job = build(setting, np.random.default_rng(0))
        return play(job, iter([task]), Traffic(job, None, np.random.default_rng(0)), 1)

    slowed = run(0.5, 0.0)
    free, waiting = run(0.0, 0.0).ready_s[0], slowed.ready_s[0]
    transfer_s = float(slowed.done_s[0, 0, 0] - slowed.begin_s[0, 0, 0])
    assert free[0].tolist() == pytest.approx([0.1, 0.6, 1.1])
    # While it waits, for the first bucket until 1.1 and then for the second, each second does the work of two thirds.
    assert waiting[0, 1] == pytest.approx(0.1 + 0.5 * 1.5)
    assert waiting[0, 2] == pytest.approx(0.85 + 0.5 * 1.5 - transfer_s / 2)
    assert waiting[1].tolist() == pytest.approx(free[1].tolist())
    assert run(0.0, 0.5).ready_s[0, 1, 1] > free[1, 1]


def test_others_traffic_costs_time_between_leaves_and_none_within_one() -> None:
    def mean(hosts_per_leaf: int, background: Background | None) -> float:
        setting = small(4, 4, noise=Noise(scatter=0, stalls=None, background=background), compute_s=0.001)
        fabric = Fabric(hosts_per_leaf=hosts_per_leaf, goodput_loss=0.0)
        return float(simulate(replace(setting, fabric=fabric), 20, 1).length_s.mean())

    heavy = Background(neighbours=8.0, burst_s=0.01)
    assert mean(1, heavy) > 1.3 * mean(1, None)
    assert mean(4, heavy) == pytest.approx(mean(4, None))


def test_neighbours_that_never_communicate_are_none() -> None:
    setting = small(4, 4, noise=replace(BUSY, background=Background(neighbours=0.0)))
    nobody = replace(setting, noise=replace(BUSY, background=None))
    assert simulate(setting, 3, 0).length_s.tolist() == simulate(nobody, 3, 0).length_s.tolist()


# --- steering -------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.floats(0, 1), st.integers(0, 7))
def test_holding_early_ranks_back_for_less_than_they_wait_delays_nobody(share: float, slow: int) -> None:
    noise = replace(QUIET, straggler=slow, straggler_slowdown=0.5)
    setting = small(4, 2, noise=noise, wait_slowdown=0.0, transfer_slowdown=0.0)

    def steer(passage: Passage) -> Steering:
        wait = np.maximum(passage.begin_s[0][None, :] - passage.enter_s, 0.0)
        return Steering(share * wait, np.array([-1]))

    free = simulate(setting, 4, 0)
    assert simulate(setting, 4, 0, steer=steer).length_s == pytest.approx(free.length_s)


def test_a_group_that_is_to_go_after_another_waits_for_it_and_no_longer_than_its_patience() -> None:
    setting = small(4, 2, layout="tensor", noise=QUIET)
    free = simulate(setting, 2, 0)

    def second(patience_s: float) -> Run:
        steering = Steering(np.zeros((8, 3)), np.array([-1, 0]), patience_s)
        return simulate(setting, 2, 0, steer=lambda passage: steering)

    one_s = float((free.done_s - free.begin_s)[1, 0, 0])
    patient, hasty = second(1.0), second(one_s / 3)
    assert free.begin_s[1, 0] == pytest.approx(free.begin_s[1, 1])
    assert patient.begin_s[1, 1, 0] == pytest.approx(patient.done_s[1, 0, 0])
    assert hasty.begin_s[1, 1, 0] - hasty.begin_s[1, 0, 0] == pytest.approx(one_s / 3, rel=1e-3)
    # Circles are nobody's fault, and cost their patience at most.
    circle = Steering(np.zeros((8, 3)), np.array([1, 0]), 0.01)
    assert simulate(setting, 2, 0, steer=lambda passage: circle).length_s[1] <= free.length_s[1] + 3 * 0.0101


def test_the_same_seed_gives_the_same_run_and_no_delay_changes_none() -> None:
    setting = small()
    nothing = Steering(np.zeros((16, 3)), np.array([-1]))
    one, other = simulate(setting, 5, 7), simulate(setting, 5, 7, steer=lambda passage: nothing)
    assert np.array_equal(one.length_s, other.length_s) and not np.array_equal(
        one.length_s, simulate(setting, 5, 8).length_s
    )


# --- input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Setting(hosts=0), "hosts is 0"),
        (lambda: Setting(hosts=2, noise=replace(QUIET, straggler=16)), "rank 16 is to be slow"),
        (lambda: Workload(compute_s=float("nan")), "compute_s is nan"),
        (lambda: Host(gpus=4, far_slots=(4,)), "names a device"),
        (lambda: Fabric(oversubscription=0), "oversubscription is 0"),
        (lambda: Stalls(rate=2), "rate of stalls is 2"),
    ],
)
def test_what_no_fabric_can_be_is_refused_in_one_sentence(make: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        make()


def test_a_job_of_one_device_has_nothing_to_reduce() -> None:
    setting = small(1, 1, noise=QUIET)
    assert (simulate(setting, 2, 0).length_s > 0).all()
    task = Task(np.full((1, 3), 0.01), np.ones(1))
    job = build(setting, np.random.default_rng(0))
    run = play(job, repeat(task), Traffic(job, None, np.random.default_rng(0)), 2)
    assert run.length_s == pytest.approx(0.03 + setting.workload.optimizer_s, abs=1e-3)
