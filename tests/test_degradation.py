"""What counts as slow, recurring, drifting and stalled; and what must stay silent (scenarios D02 to T08)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import exp, pi, sin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eroica.degradation import Change, Degradation, Limits, Trigger
from eroica.steps import Iteration, Iterations, Mark, Pause

S = 1_000_000_000
SECOND = 1.0


def iteration(
    number: int,
    start_ns: int,
    seconds: float,
    *,
    pause: Pause | None = None,
    skipped: bool = False,
    num_batches: int = 1,
    num_collectives: int = 5,
    generation: int = 0,
) -> Iteration:
    end_ns = start_ns + int(seconds * S)
    return Iteration(
        number, 0, start_ns, end_ns, generation, number + 1, num_batches, 1, num_collectives, 0, skipped, pause
    )


def judged(durations: Iterable[float], judge: Degradation | None = None) -> list[Trigger]:
    """Triggers of plain iterations of these seconds."""
    judge = judge or Degradation()
    number, now = (judge.history[-1].number + 1, judge.history[-1].end_ns) if judge.history else (0, 0)
    found: list[Trigger] = []
    for seconds in durations:
        made = iteration(number, now, seconds)
        number, now = number + 1, made.end_ns
        found += judge.add(made)
    return found


def noisy(seed: int, sigma: float, factor: Callable[[int], float], num: int) -> list[float]:
    """Lognormal noise around 0.1 s times a factor."""
    rng = random.Random(seed)
    return [0.1 * factor(i) * exp(rng.gauss(0.0, sigma)) for i in range(num)]


def changes(found: Iterable[Trigger]) -> list[Change]:
    return [t.change for t in found]


# What must be noticed.


@pytest.mark.parametrize("sigma", [0.01, 0.03])
@pytest.mark.parametrize("effect", [1.07, 1.15, 2.0])
def test_a_step_in_the_duration_is_noticed_once_with_its_size(effect: float, sigma: float) -> None:
    for seed in range(5):
        found = judged(noisy(seed, sigma, lambda i: effect if i >= 300 else 1.0, 500))
        assert changes(found) == [Change.SLOW]
        assert 300 < found[0].number < 400
        assert found[0].observed_ns / found[0].baseline_ns == pytest.approx(effect, abs=3 * sigma)
        assert found[0].cost == pytest.approx(1 - found[0].baseline_ns / found[0].observed_ns)


def test_data_sets_that_are_made_anew_for_each_shard_do_not_use_up_what_can_be_judged() -> None:
    judge = Degradation()
    found = []
    for number, seconds in enumerate(noisy(1, 0.01, lambda i: 1.3 if i >= 24_300 else 1.0, 24_500)):
        plain = iteration(number, number * S, seconds)
        found += judge.add(replace(plain, loader=1 + number // 1000))  # without optimizers that can be seen
    assert changes(found) == [Change.SLOW]


def test_a_job_on_a_busy_host_that_becomes_slow_before_its_first_hundred_iterations_is_noticed() -> None:
    found = [judged(noisy(seed, 0.20, lambda i: 1.8 if i >= 75 else 1.0, 200)) for seed in range(20)]
    assert [changes(each)[0] for each in found] == [Change.SLOW] * 20
    healthy = [judged(noisy(seed, 0.20, lambda i: 1.0, 400)) for seed in range(20)]
    assert healthy == [[]] * 20


def test_a_small_step_in_much_noise_is_noticed_later_by_a_longer_median() -> None:
    found = judged(noisy(1, 0.10, lambda i: 1.15 if i >= 500 else 1.0, 900))
    assert changes(found) == [Change.SLOW]
    assert found[0].number > 510


def test_a_slowdown_soon_after_warm_up_is_noticed_against_the_first_iterations() -> None:
    found = judged(noisy(2, 0.01, lambda i: 1.15 if i >= 45 else 1.0, 100))
    assert changes(found) == [Change.SLOW]
    assert found[0].number < 65


def test_what_our_own_first_window_leaves_behind_is_noticed_although_few_iterations_came_before_it() -> None:
    judge, now, found = Degradation(), 0, []
    draw = random.Random(3)
    for i in range(120):
        is_captured = 22 <= i < 32
        seconds = (1.15 if i >= 32 else 1.0) * exp(draw.gauss(0.0, 0.01))
        made = iteration(i, now, seconds, pause=Pause.CAPTURE if is_captured else None)
        now = made.end_ns
        found += judge.add(made)
    assert changes(found) == [Change.SLOW] and found[0].number < 45


def test_recovery_is_told_and_a_second_slowdown_is_noticed_again() -> None:
    found = judged(noisy(3, 0.01, lambda i: 1.2 if 300 <= i < 400 or i >= 700 else 1.0, 900))
    assert changes(found) == [Change.SLOW, Change.RECOVERED, Change.SLOW]
    assert found[1].ended is Change.SLOW and 400 < found[1].number < 440


@pytest.mark.parametrize("shift", range(10))
def test_recovery_is_told_wherever_it_falls_among_ten_iterations(shift: int) -> None:
    found = judged(noisy(3, 0.01, lambda i: 1.2 if 300 <= i < 400 + shift else 1.0, 500))
    assert changes(found) == [Change.SLOW, Change.RECOVERED]


def test_slower_still_is_news_again_but_more_of_the_same_is_not() -> None:
    found = judged(noisy(4, 0.01, lambda i: 1.0 if i < 300 else 1.2 if i < 2000 else 2.0, 3000))
    assert changes(found) == [Change.SLOW, Change.SLOW]
    assert 2000 < found[1].number < 2020


def test_garbage_collection_every_eight_steps_is_recurring_with_its_distance() -> None:
    found = judged(noisy(5, 0.02, lambda i: 10.0 if i >= 200 and i % 8 == 0 else 1.0, 400))
    assert changes(found) == [Change.RECURRING]
    assert found[0].every == 8 and found[0].number < 230
    assert found[0].observed_ns == pytest.approx(S, rel=0.1)


def test_one_rank_that_loses_400_ms_every_eight_steps_is_recurring_from_the_first_step_on() -> None:
    found = judged(noisy(6, 0.02, lambda i: 5.0 if i % 8 == 0 else 1.0, 200))
    assert changes(found) == [Change.RECURRING]
    assert found[0].every == 8


def test_a_save_every_fifty_steps_is_recurring_also_when_the_probe_tells_that_it_is_one() -> None:
    judge, now, found = Degradation(), 0, []
    for i in range(400):
        saved = i % 50 == 49
        made = iteration(i, now, 0.6 if saved else 0.1, pause=Pause.CHECKPOINT if saved else None)
        now = made.end_ns
        found += judge.add(made)
    assert changes(found) == [Change.RECURRING]
    assert found[0].every == 50


def test_a_save_in_the_first_iteration_of_a_kind_leaves_nothing_to_stumble_over() -> None:
    judge = Degradation()
    judged([0.1] * 20, judge)
    judge.add(iteration(20, 2 * S, 0.6, pause=Pause.CHECKPOINT, num_batches=7))
    assert judge.silence_limit_ns(None) == Limits().silence_ns


def test_workers_rebuilt_at_each_epoch_are_recurring_at_the_length_of_the_epoch() -> None:
    """D02: the first of 20 batches takes seconds."""
    found = judged(noisy(7, 0.03, lambda i: 20.0 if i % 20 == 0 else 1.0, 200))
    assert changes(found) == [Change.RECURRING]
    assert found[0].every == 20


def test_irregular_slow_iterations_are_recurring_when_they_are_many() -> None:
    """N10, H01: congestion and garbage collection follow no count of steps."""
    rng = random.Random(8)
    found = judged(noisy(8, 0.02, lambda i: 6.0 if i > 300 and rng.random() < 0.08 else 1.0, 900))
    assert changes(found) == [Change.RECURRING]


def test_recurring_slow_iterations_that_stop_are_told() -> None:
    found = judged(noisy(9, 0.02, lambda i: 10.0 if 100 <= i < 300 and i % 8 == 0 else 1.0, 800))
    assert changes(found) == [Change.RECURRING, Change.RECOVERED]
    assert found[1].ended is Change.RECURRING


def test_half_a_percent_more_with_each_step_is_slow_soon_and_drift_when_it_goes_on() -> None:
    """B04."""
    found = judged(noisy(10, 0.02, lambda i: 1 + 0.005 * max(i - 300, 0), 600))
    assert found[0].change is Change.SLOW and found[0].number < 340
    assert Change.DRIFT in changes(found)
    assert len(found) <= 8


def test_a_drift_from_the_first_step_on_is_noticed_although_there_is_no_level() -> None:
    found = judged(noisy(11, 0.02, lambda i: 1 + 0.005 * i, 300))
    assert found and found[0].change in (Change.DRIFT, Change.SLOW)


def test_a_slow_drift_is_a_drift() -> None:
    assert Change.DRIFT in changes(judged(noisy(12, 0.01, lambda i: 1 + 0.0001 * i, 3000)))


def test_silence_is_a_stall_once_and_its_end_is_told() -> None:
    judge = Degradation()
    judged([0.1] * 50, judge)
    last = 5 * S
    assert judge.check(last + 10 * S, last, None) is None
    found = judge.check(last + 11 * S, last, None)
    assert found is not None and found.change is Change.STALLED
    assert found.observed_ns == 11 * S and found.baseline_ns == 10 * S and found.number == 49
    assert judge.check(last + 12 * S, last, None) is None
    over = judge.check(last + 31 * S, last + 30 * S, None)
    assert over is not None and (over.change, over.ended) == (Change.RECOVERED, Change.STALLED)
    assert over.observed_ns == 30 * S


def test_long_iterations_may_be_silent_for_five_times_their_length() -> None:
    judge = Degradation()
    judged([20.0] * 30, judge)
    assert judge.silence_limit_ns(None) == 100 * S
    assert judge.check(700 * S, 600 * S, None) is None
    assert judge.check(701 * S, 600 * S, None) is not None


# What must stay silent.


@pytest.mark.parametrize("size", [2.0, 20.0, 4200.0])
def test_one_hiccup_is_silent_whatever_its_size(size: float) -> None:
    """D04: one fetch of 210 s among those of 0.05 s."""
    assert not judged(noisy(20, 0.03, lambda i: size if i == 60 else 1.0, 600))


def test_three_hiccups_of_which_one_is_huge_are_silent() -> None:
    assert not judged(noisy(21, 0.03, lambda i: {100: 3.0, 163: 900.0, 290: 2.0}.get(i, 1.0), 600))


def test_warm_up_and_compilation_of_the_first_steps_are_silent() -> None:
    """T04: the first 30 steps take 50 times as long."""
    assert not judged(noisy(22, 0.03, lambda i: 50.0 if i < 30 else 1.0, 600))
    assert not judged(noisy(23, 0.03, lambda i: 100.0 if i < 500 else 1.0, 1500))
    assert not judged(noisy(24, 0.03, lambda i: 50.0 if i in (0, 1, 3, 7) else 1.0, 600))


@pytest.mark.parametrize("warm", [15, 60, 104, 170])
@pytest.mark.parametrize("times", [1.5, 5.0, 60.0])
def test_a_long_warm_up_is_no_slowdown_afterwards_and_hides_none(warm: int, times: float) -> None:
    """T04: what was slow from the first step on is over, and windows are still half full of it."""
    for seed in range(5):
        durations = noisy(seed, 0.01, lambda i: times if i < warm else 1.2 if i >= 600 else 1.0, 800)
        found = judged(durations)
        assert changes(found[:1]) == [Change.SLOW] and 600 <= found[0].number < 640
        assert found[0].observed_ns / found[0].baseline_ns == pytest.approx(1.2, abs=0.03)


def test_one_late_recompilation_is_silent_also_when_it_takes_several_steps() -> None:
    """T04: at step 400, on all ranks."""
    assert not judged(noisy(25, 0.03, lambda i: 60.0 if i == 400 else 1.0, 900))
    assert not judged(noisy(26, 0.03, lambda i: 60.0 if 400 <= i < 404 else 1.0, 900))


def test_a_midday_of_one_and_a_half_percent_is_silent() -> None:
    """G03: a daily sine with 1 % noise over three days, 10 s per iteration."""
    rng = random.Random(27)
    series = (10 * (1 + 0.015 * sin(2 * pi * i / 8640)) * (1 + rng.gauss(0.0, 0.01)) for i in range(25_920))
    assert not judged(series)


def test_closures_with_varying_evaluations_are_silent() -> None:
    """T03: 1 to 20 evaluations in a step."""
    for seed in range(5):
        rng = random.Random(seed)
        assert not judged(0.1 + 0.05 * rng.randint(1, 20) * exp(rng.gauss(0.0, 0.02)) for _ in range(3000))


@pytest.mark.parametrize("share", [0.5, 0.3, 0.7])
def test_two_modes_that_mix_at_random_are_silent(share: float) -> None:
    """T08, with the same operations in both."""
    for seed in range(5):
        rng = random.Random(seed)
        assert not judged(0.1 * (3.0 if rng.random() < share else 1.0) * exp(rng.gauss(0.0, 0.02)) for _ in range(2000))


def test_of_two_even_lengths_in_equal_parts_the_longer_one_is_no_slowdown() -> None:
    """Medians and quantiles are one or the other by chance, and then differ by next to nothing."""
    for seed in range(60):
        rng = random.Random(seed)
        assert not judged(rng.choice((0.2, 0.3)) * exp(rng.gauss(0.0, 0.003)) for _ in range(900)), seed


def test_phases_that_alternate_are_silent() -> None:
    """T08: 20 s and 60 s."""
    assert not judged(noisy(28, 0.02, lambda i: 3.0 if i % 2 else 1.0, 2000))


def test_blocks_of_another_phase_with_other_operations_are_another_kind() -> None:
    """T08: training and rollout by turns; and either kind is still judged."""
    for slow in (False, True):
        judge, now, found = Degradation(), 0, []
        rng = random.Random(29)
        for i in range(1200):
            rollout = i // 40 % 2 == 1
            seconds = (60.0 if rollout else 20.0) * exp(rng.gauss(0.0, 0.01))
            seconds *= 1.3 if slow and rollout and i >= 800 else 1.0
            made = iteration(i, now, seconds, num_collectives=300 if rollout else 50)
            now = made.end_ns
            found += judge.add(made)
        assert changes(found) == ([Change.SLOW] if slow else [])


def test_a_phase_with_one_collective_is_another_kind_than_one_with_two() -> None:
    """T08: the numbers may be small."""
    judge, now, found = Degradation(), 0, []
    for i in range(800):
        rollout = i // 40 % 2 == 1
        made = iteration(i, now, 60.0 if rollout else 20.0, num_collectives=1 if rollout else 2)
        now = made.end_ns
        found += judge.add(made)
    assert not found


def test_the_last_shorter_group_of_an_epoch_is_neither_a_speed_up_nor_a_base_for_the_others() -> None:
    """T01: accumulation of 4, 18 batches in an epoch."""
    judge, now, found = Degradation(), 0, []
    for i in range(1000):
        batches = 2 if i % 5 == 4 else 4
        made = iteration(i, now, 0.1 * batches, num_batches=batches)
        now = made.end_ns
        found += judge.add(made)
    assert not found


def test_pauses_between_epochs_that_cost_little_are_silent() -> None:
    assert not judged(noisy(30, 0.02, lambda i: 8.0 if i % 200 == 0 else 1.0, 2000))


def test_evaluations_skipped_steps_and_our_own_windows_are_not_judged() -> None:
    """T05: 60 s every 200 steps."""
    judge, now, found = Degradation(), 0, []
    for i in range(1500):
        pause = Pause.EVALUATION if i % 20 == 0 else Pause.CAPTURE if i % 20 == 1 else None
        made = iteration(i, now, 60.0 if pause else 0.1, pause=pause)
        now = made.end_ns
        found += judge.add(made)
        made = iteration(i, now, 0.5, skipped=True)
        now = made.end_ns
        found += judge.add(made)
    assert not found


@pytest.mark.parametrize("pause", [Pause.EVALUATION, Pause.CHECKPOINT, Pause.COMPILE, Pause.RENDEZVOUS])
def test_a_pause_explains_silence_up_to_its_own_limit(pause: Pause) -> None:
    judge = Degradation()
    judged([0.1] * 50, judge)
    quiet = judge.check(605 * S, 5 * S, pause)
    assert quiet is not None and (quiet.change, quiet.pause) == (Change.QUIET, pause)
    found = judge.check(606 * S, 5 * S, pause)
    assert found is not None and (found.change, found.pause) == (Change.STALLED, pause)


def test_a_silence_that_may_last_is_worth_one_look_and_its_end_is_told() -> None:
    judge = Degradation()
    judged([0.1] * 50, judge)
    assert judge.check(34 * S, 5 * S, Pause.EVALUATION) is None
    found = judge.check(36 * S, 5 * S, Pause.EVALUATION)
    assert found is not None and (found.change, found.observed_ns) == (Change.QUIET, 31 * S)
    assert judge.check(90 * S, 5 * S, Pause.EVALUATION) is None
    over = judge.check(91 * S, 91 * S, None)
    assert over is not None and (over.change, over.ended) == (Change.RECOVERED, Change.QUIET)
    # Windows of our own have a limit that is shorter.
    assert judge.check(110 * S, 91 * S, Pause.CAPTURE) is None


def test_the_limit_of_a_pause_follows_the_longest_one_seen() -> None:
    judge = Degradation()
    judged([0.1] * 50, judge)
    judge.add(iteration(50, 5 * S, 1000.0, pause=Pause.CHECKPOINT))
    assert judge.silence_limit_ns(Pause.CHECKPOINT) == 3000 * S
    assert judge.silence_limit_ns(Pause.EVALUATION) == 600 * S


def test_the_first_iterations_after_a_rendezvous_may_be_silent_for_long() -> None:
    judge = Degradation()
    assert judge.check(500 * S, None, None) is None
    judged([0.1], judge)
    early, late = judge.check(1800 * S, 0, None), judge.check(1801 * S, 0, None)
    assert early is not None and early.change is Change.QUIET
    assert late is not None and late.change is Change.STALLED
    judged([0.1] * 50, judge)
    judge.restart()
    assert judge.silence_limit_ns(None) == 1800 * S


def test_a_silence_before_the_first_iteration_is_worth_a_look_and_said_to_be_one_of_the_start() -> None:
    judge = Degradation()
    assert judge.check(30 * S, 0, Pause.RENDEZVOUS) is None
    found = judge.check(31 * S, 0, Pause.RENDEZVOUS)
    assert found is not None and found.is_opening
    judged([0.1] * 50, judge)
    later = judge.check(900 * S, 5 * S, None)
    assert later is not None and not later.is_opening


def test_silence_that_came_twice_and_ended_by_itself_is_usual() -> None:
    judge = Degradation()
    judged([0.1] * 50, judge)
    assert judge.check(105 * S, 5 * S, None, gap_ns=60 * S) is None
    assert judge.check(126 * S, 5 * S, None, gap_ns=60 * S) is not None


def test_limits_can_be_raised_and_must_make_sense() -> None:
    judge = Degradation(Limits(pause_ns=3600 * S))
    judged([0.1] * 50, judge)
    found = judge.check(3000 * S, 5 * S, Pause.EVALUATION)
    assert found is not None and found.change is Change.QUIET
    with pytest.raises(ValueError, match="silence_ns is 0"):
        Limits(silence_ns=0)


def test_a_new_rendezvous_learns_a_new_level_and_keeps_what_was_seen() -> None:
    judge = Degradation()
    assert not judged(noisy(31, 0.01, lambda i: 1.0, 300), judge)
    now = judge.history[-1].end_ns
    found = []
    for i, seconds in enumerate(noisy(32, 0.01, lambda i: 2.0 if i < 300 else 2.4, 400)):  # Half of the hosts are left.
        made = iteration(300 + i, now, seconds, generation=1)
        now = made.end_ns
        found += judge.add(made)
    assert [(t.change, t.generation) for t in found] == [(Change.SLOW, 1)]
    assert found[0].baseline_ns == pytest.approx(0.2 * S, rel=0.02)
    assert len(judge.history) == 300 and list(judge.triggers) == found


def healthy(seed: int, num: int) -> list[float]:
    """Lognormal noise of any size up to 15 %, half of the time with a heavy tail, and hiccups in up to 1 %."""
    rng = random.Random(seed)
    sigma, heavy, rate = rng.uniform(0.002, 0.15), rng.random() < 0.5, rng.uniform(0.0, 0.01)
    series = []
    for _ in range(num):
        seconds = 0.1 * exp(rng.gauss(0.0, sigma))
        if heavy:  # Student's t with three degrees of freedom, upwards.
            seconds *= (
                1 + sigma * abs(rng.gauss(0.0, 1.0)) / (sum(rng.gauss(0.0, 1.0) ** 2 for _ in range(3)) / 3) ** 0.5
            )
        series.append(seconds * (rng.uniform(2.0, 10.0) if rng.random() < rate else 1.0))
    return series


@pytest.mark.slow
@pytest.mark.parametrize("num_jobs", [15, pytest.param(200, marks=pytest.mark.full)])
def test_of_many_random_healthy_jobs_at_most_one_is_suspected(num_jobs: int) -> None:
    """Not none: three hiccups at equal distances that cost the same do happen by chance."""
    suspected = [seed for seed in range(1000, 1000 + num_jobs) if judged(healthy(seed, 3000))]
    assert len(suspected) <= 1, suspected


@pytest.mark.parametrize(("rho", "sigma"), [(0.5, 0.03), (0.9, 0.03)])
def test_noise_in_which_neighbours_are_alike_is_silent(rho: float, sigma: float) -> None:
    """Other jobs' traffic comes and goes over tens of iterations: medians scatter more than single iterations say."""
    for seed in range(10):
        rng, drift, series = random.Random(seed), 0.0, []
        for _ in range(3000):
            drift = rho * drift + rng.gauss(0.0, sigma * (1 - rho * rho) ** 0.5)
            series.append(0.1 * exp(drift))
        assert not judged(series)


def wandering(seed: int, tau: float, num: int, effect: float = 0.0, onset: int = 0) -> list[float]:
    """A pace that wanders by 2 %, forgotten after `tau` iterations, and noise of 3 % upon it."""
    rng = random.Random(seed)
    keeps, level, made = exp(-1 / tau), rng.gauss(0.0, 1.0), []
    for i in range(num):
        level = keeps * level + rng.gauss(0.0, (1 - keeps * keeps) ** 0.5)
        made.append(0.1 * exp(0.02 * level) * (1 + 0.03 * abs(rng.gauss(0.0, 1.0))) * (1 + effect * (i >= onset)))
    return made


@pytest.mark.parametrize("tau", [30.0, 100.0, 1000.0])
def test_a_pace_that_wanders_slowly_is_seldom_suspected_and_a_step_upon_it_is_noticed(tau: float) -> None:
    suspected = [seed for seed in range(8) if judged(wandering(seed, tau, 1000))]
    assert len(suspected) <= 1
    for seed in range(8):
        found = judged(wandering(seed, tau, 500, 0.2, 300))
        assert [t for t in found if t.number >= 300] or seed in suspected


def test_a_small_slowdown_that_nobody_noticed_hides_no_large_one() -> None:
    for seed in range(12):
        small_and_large = noisy(seed, 0.10, lambda i: (1.08 if i >= 500 else 1.0) * (1.3 if i >= 800 else 1.0), 900)
        assert [t for t in judged(small_and_large) if t.change is Change.SLOW and 800 <= t.number < 840]


def test_a_small_slowdown_that_was_told_does_not_hide_the_next_one_of_its_size() -> None:
    told = []
    for seed in range(8):
        found = judged(noisy(seed, 0.06, lambda i: 1.08 if 400 <= i < 800 or i >= 1200 else 1.0, 1700))
        slow = [t.number for t in found if t.change is Change.SLOW]
        told += [slow[-1] >= 1200] if slow and slow[0] < 800 else []
    assert told.count(True) >= 6


def test_what_stays_slow_does_not_recover_and_begin_again_where_spells_came_before_it() -> None:
    for seed in range(10):
        found = judged(
            noisy(seed, 0.02, lambda i: 1.07 if (300 <= i < 900 and i % 150 < 40) or i >= 1300 else 1.0, 1800)
        )
        assert len([t for t in found if t.number >= 1300]) <= 2


@given(st.integers(0, 10**6))
def test_a_random_healthy_job_of_a_few_hundred_steps_is_never_slow(seed: int) -> None:
    assert not {Change.SLOW, Change.DRIFT} & set(changes(judged(healthy(seed, 600))))


@given(
    st.lists(
        st.tuples(
            st.integers(-5, 10**13),
            st.sampled_from([None, *Pause]),
            st.integers(0, 40),
            st.integers(0, 10**6),
            st.integers(0, 2),
            st.booleans(),
        ),
        max_size=300,
    ),
    st.integers(0, 10**13),
)
def test_no_series_of_iterations_raises(
    series: list[tuple[int, Pause | None, int, int, int, bool]], scale: int
) -> None:
    judge = Degradation()
    for number, (duration, pause, batches, collectives, generation, skipped) in enumerate(series):
        made = Iteration(number, 0, 0, duration, generation, 0, batches, 0, collectives, 0, skipped, pause)
        for trigger in judge.add(made):
            assert 0 <= trigger.cost <= 1 and trigger.observed_ns >= 0
        judge.check(scale, duration, pause)


def test_marks_to_triggers_evaluation_and_a_slowdown_in_one_run() -> None:
    """Together with `steps`: 130 steps, 3 validation batches every 30, and 20 % more from step 80 on."""
    learnt, judge, now = Iterations(), Degradation(), 0
    found: list[Trigger] = []

    def feed(mark: Mark, seconds: float, source: int) -> None:
        nonlocal now
        now += int(seconds * S)
        for made in learnt.feed(mark, now, source):
            found.extend(judge.add(made))
        assert judge.check(now, learnt.last_ns, learnt.pause, learnt.gaps_ns[1]) is None

    for step in range(130):
        feed(Mark.NEXT, 0.01, 1)
        feed(Mark.BEGIN, 0.1 if step < 80 else 0.122, 7)
        feed(Mark.END, 0.001, 7)
        if step % 30 == 29:
            for _ in range(3):
                feed(Mark.NEXT, 3.0, 2)
    assert changes(found) == [Change.SLOW] and 80 < found[0].number < 90
    stalled = judge.check(now + 11 * S, learnt.last_ns, learnt.pause, learnt.gaps_ns[1])
    assert stalled is not None and stalled.change is Change.STALLED and stalled.step == 130
