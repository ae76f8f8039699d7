"""From a flight ring, written with times of our own and read as an agent reads it, to iterations and triggers."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import exp
from pathlib import Path

import pytest

from eroica import ring as flight
from eroica.commands import Unit
from eroica.degradation import Change, Trigger
from eroica.marks import HOLD_NS, LAPPED, Watch, pause_of, watched
from eroica.ring import COLLECTIVE, GC, NEXT, PHASE, PHASES, SKIPPED, STEP, Record, Ring, Tail, what
from eroica.steps import Pause

S = 1_000_000_000
TRAINING, VALIDATION, ADAM = 1, 2, 3
SAVE, EVALUATE, COMPILE = (PHASES.index(name) for name in ("save", "evaluation", "compile"))


class Rank:
    """Writes a ring as the probe does, at times that it is told, and has it watched."""

    def __init__(self, path: Path, capacity: int = 16_384) -> None:
        self.ring = Ring.create(path, rank=0, world_size=4, capacity=capacity)
        self.tail = Tail(path)
        self.watch = Watch(0)
        self.now_ns = 1_000 * S
        self.nexts = self.steps = self.calls = 0
        self.triggers: list[Trigger] = []

    def next(self, seconds: float = 0.001, data: int = TRAINING, raised: bool = False) -> None:
        number = self.ring.begin(NEXT, self.now_ns, -1, data, self.nexts + 1, 0, self.steps)
        self._end(number, seconds, raised)
        self.nexts += 1
        self.ring.set(flight.NUM_NEXTS, self.nexts)

    def step(self, seconds: float = 0.002, optimizer: int = ADAM, flags: int = 0) -> None:
        number = self.ring.begin(what(STEP, flags=flags), self.now_ns, -1, optimizer, self.steps + 1, 0, self.steps)
        self._end(number, seconds)
        self.steps += 1
        self.ring.set(flight.NUM_STEPS, self.steps)

    def reduce(self, num: int = 3) -> None:
        for _ in range(num):
            self.calls += 1
            self._end(self.ring.begin(what(COLLECTIVE, 1), self.now_ns, -1, 77, self.calls, 400, self.steps), 0.001)

    def phase(self, kind: int, seconds: float) -> None:
        self._end(self.ring.begin(what(PHASE, kind), self.now_ns, -1, 0, 0, 0, self.steps), seconds)

    def train(self, seconds: float, fetching: float = 0.001) -> None:
        """One update."""
        self.next(fetching)
        self.now_ns += max(int((seconds - fetching) * S) - 5_000_000, 0)
        self.reduce()
        self.step()

    def evaluate(self, batches: int, seconds: float) -> None:
        for _ in range(batches):
            self.next(data=VALIDATION)
            self.now_ns += int(seconds / batches * S)
        self.next(data=VALIDATION, raised=True)

    def look(self) -> list[Trigger]:
        """What an agent does several times a second, here a while after the last record."""
        news = self.tail.poll()
        # As if the agent came a little later, when nothing is held back any more; the rank has gone on by then.
        found = self.watch.feed(news.begun, news.ended, news.words, self.now_ns + HOLD_NS)
        self.triggers += found + self.watch.check(self.now_ns)
        return found

    @property
    def changes(self) -> list[Change]:
        return [trigger.change for trigger in self.triggers]

    def _end(self, number: int, seconds: float, raised: bool = False) -> None:
        duration_ns = int(seconds * S)
        self.now_ns += duration_ns
        self.ring.end(number, duration_ns, raised)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    with _rank(tmp_path) as made:
        yield made


@contextmanager
def _rank(folder: Path, capacity: int = 16_384) -> Iterator[Rank]:
    made = Rank(folder / "rank0.ring", capacity)
    yield made
    made.tail.close()
    made.ring.close()


def seconds(seed: int = 0, sigma: float = 0.02) -> Callable[[], float]:
    """0.1 s and some noise."""
    rng = random.Random(seed)
    return lambda: 0.1 * exp(rng.gauss(0.0, sigma))


# Iterations.


def test_iterations_carry_the_counts_and_times_of_the_ring(rank: Rank) -> None:
    for _ in range(20):
        rank.train(0.1)
        rank.look()
    watch = rank.watch
    assert watch.num_iterations == 20
    assert [i.step for i in watch.iterations] == list(range(1, 21))
    assert {(i.num_batches, i.num_steps, i.num_collectives) for i in watch.iterations} == {(1, 1, 3)}
    assert [round(i.duration_ns / S, 6) for i in list(watch.iterations)[1:]] == [0.1] * 19
    assert (watch.unit, watch.steps_per_iteration, watch.pause) == (Unit.STEPS, 1, None)
    assert (watch.counts.steps, watch.counts.batches, watch.counts.collectives) == (20, 20, 60)
    assert watch.boundary(23) == 23


def test_the_same_iterations_come_whether_the_ring_is_read_often_or_once(rank: Rank) -> None:
    for index in range(40):
        rank.train(0.1)
        if index % 7 == 3:
            rank.evaluate(5, 0.4)
        rank.look()
    seen = flight.read_flight(rank.ring.path)
    once = watched(seen)
    assert list(once.iterations) == list(rank.watch.iterations) and len(once.iterations) == 40


def test_several_steps_in_an_iteration_are_told_so_that_windows_end_where_iterations_do(rank: Rank) -> None:
    """Two optimizers; an iteration ends at the second one's step."""
    for _ in range(20):
        rank.next()
        rank.step(optimizer=4)
        rank.step(optimizer=5)
    rank.look()
    watch = rank.watch
    assert (watch.num_iterations, watch.steps_per_iteration) == (20, 2)
    assert [watch.boundary(after) for after in (40, 41, 42, 43)] == [40, 42, 42, 44]


def test_windows_of_a_job_without_steps_are_asked_for_in_nexts(rank: Rank) -> None:
    for index in range(90):
        rank.next()
        rank.now_ns += 90_000_000
        if index % 30 == 29:
            rank.next(raised=True)
    rank.look()
    watch = rank.watch
    assert watch.unit is Unit.NEXTS
    assert watch.counts.batches == 93 == rank.nexts
    # The last one ended with the batch that the 92nd next brought; the open one began there.
    assert (watch.num_iterations, watch.iterations[-1].step, watch.steps_per_iteration) == (89, 92, 1)


def test_a_job_that_shows_only_collectives_has_iterations_but_no_unit_for_windows(rank: Rank) -> None:
    for _ in range(60):
        for size in (400, 800, 1200):
            number = rank.ring.begin(what(COLLECTIVE, 1), rank.now_ns, -1, 77, 1, size, 0)
            rank._end(number, 0.01)
    rank.look()
    assert rank.watch.num_iterations > 20
    assert {i.num_collectives for i in rank.watch.iterations} == {3}
    assert rank.watch.unit is None


def test_steps_that_a_scaler_left_out_are_iterations_that_are_not_judged(rank: Rank) -> None:
    for index in range(30):
        rank.next()
        rank.step(flags=SKIPPED if index in (0, 20) else 0)
    rank.look()
    assert [i.number for i in rank.watch.iterations if i.skipped] == [0, 20]
    assert [i.step for i in rank.watch.iterations] == list(range(1, 31))


def test_batches_that_no_step_followed_are_an_evaluation_also_on_the_data_of_training(rank: Rank) -> None:
    for index in range(30):
        for _ in range(4):
            rank.next()
        rank.step()
        if index % 10 == 9:
            for _ in range(40):
                rank.next()
            rank.look()
            assert rank.watch.pause is Pause.EVALUATION
    rank.look()
    assert [i.pause for i in rank.watch.iterations].count(Pause.EVALUATION) == 2
    assert rank.watch.num_iterations == 30


def test_an_evaluation_before_the_last_update_of_an_epoch_does_not_pass_for_training(rank: Rank) -> None:
    """A loader that fetches ahead has the last batch already, and finds the end of the epoch before the step."""
    for _ in range(4):
        rank.next()
        for index in range(10):
            if index == 9:
                rank.evaluate(6, 0.2)
            rank.next(raised=index == 9)
            rank.step()
    rank.look()
    assert [i.num_batches for i in rank.watch.iterations] == ([2] + [1] * 8 + [0]) * 4
    assert [i.number for i in rank.watch.iterations if i.pause is Pause.EVALUATION] == [9, 19, 29, 39]


def test_two_data_sets_that_both_feed_training_are_no_evaluation_for_long(rank: Rank) -> None:
    for _ in range(20):
        rank.next(data=4)
        rank.next(data=5)
        rank.step()
    rank.look()
    assert [(i.num_batches, i.pause) for i in rank.watch.iterations][-17:] == [(2, None)] * 17


def test_a_step_that_raised_is_no_step_and_disturbs_none(rank: Rank) -> None:
    for index in range(20):
        rank.next()
        if index == 7:
            number = rank.ring.begin(STEP, rank.now_ns, -1, ADAM, rank.steps + 1, 0, rank.steps)
            rank._end(number, 0.001, raised=True)
        else:
            rank.step()
        rank.look()
    assert [i.step for i in rank.watch.iterations] == list(range(1, 20))


def test_a_batch_counts_when_it_is_there_whatever_began_meanwhile(tmp_path: Path) -> None:
    """A step whose end was read before that of the next that came before it."""
    watch = Watch(0)
    words = [0] * 13
    now, number = S, 0
    for step in range(6):
        batch = Record(number + 1, now, 5_000, False, NEXT, 0, 0, 0, -1, TRAINING, step + 1, 0, step)
        update = Record(number + 2, now + 6_000, 1_000, False, STEP, 0, 0, 0, -1, ADAM, step + 1, 0, step)
        watch.feed([batch, update], [update], words, now + 7_000)
        watch.feed([], [batch], words, now + 8_000)
        now, number = now + S, number + 2
    watch.finish()
    assert [(i.num_batches, i.num_steps) for i in watch.iterations] == [(1, 1)] * 6
    assert watch.num_losses == 0


def test_what_was_overwritten_before_it_was_read_makes_no_iteration_and_no_trigger(tmp_path: Path) -> None:
    with _rank(tmp_path, capacity=1024) as rank:
        took = seconds(1)
        for index in range(600):
            rank.train(took())
            if index % 100 < 60:  # then the agent is kept from looking: 40 updates of five records, less than a lap
                rank.look()
        assert rank.watch.num_losses == 0 and rank.watch.num_iterations >= 560
        for _ in range(1000):
            rank.train(took())
        rank.look()
        watch = rank.watch
        assert watch.num_losses == 1
        assert watch.iterations[-1].step == rank.steps == watch.counts.steps == 1600
        assert max(i.duration_ns for i in watch.iterations) < 0.2 * S
        assert all(i.num_batches == 1 and i.num_collectives == 3 for i in list(watch.iterations)[1:])
        assert rank.changes == []


def test_an_agent_that_comes_late_counts_from_the_ring(tmp_path: Path) -> None:
    with _rank(tmp_path, capacity=512) as rank:
        for _ in range(500):
            rank.train(0.1)
        rank.look()
        rank.train(0.1)
        rank.look()
        assert rank.watch.iterations[-1].step == 501
        assert rank.watch.num_losses == 0
        assert {round(i.duration_ns / S, 3) for i in rank.watch.iterations} == {0.1}


def test_threads_that_fetch_at_the_same_time_are_not_taken_for_losses(rank: Rank) -> None:
    """Two nexts under way both say that they are the next one to end."""
    for _ in range(30):
        first = rank.ring.begin(NEXT, rank.now_ns, -1, TRAINING, rank.nexts + 1, 0, rank.steps)
        second = rank.ring.begin(NEXT, rank.now_ns + 1, -1, 9, rank.nexts + 1, 0, rank.steps)
        rank._end(first, 0.01)
        rank.ring.end(second, 12_000_000, False)
        rank.nexts += 2
        rank.now_ns += 5_000_000
        rank.step()
        rank.look()
    assert rank.watch.num_losses == 0 and rank.watch.num_iterations == 30


def test_collectives_that_are_recorded_in_one_step_of_many_change_no_kind_of_iteration(rank: Rank) -> None:
    took = seconds(2)
    for index in range(400):
        slower = 1.3 if index >= 300 else 1.0
        if index == 50:
            rank.ring.set(flight.ONE_STEP_IN, 10)
        rank.next()
        rank.now_ns += int(took() * slower * S)
        if index < 50 or index % 10 == 0:
            rank.reduce()
        rank.step()
        if index % 40 == 39:
            rank.evaluate(3, 0.5)
        rank.look()
    assert {i.num_collectives for i in rank.watch.iterations} == {3}
    assert rank.watch.num_iterations == 400
    assert rank.changes == [Change.SLOW]


def test_a_new_rendezvous_numbers_iterations_on_and_counts_anew(tmp_path: Path, rank: Rank) -> None:
    for _ in range(30):
        rank.train(0.1)
    rank.look()
    (tmp_path / "again").mkdir()
    with _rank(tmp_path / "again") as again:
        again.watch = rank.watch
        again.watch.restart(1, rank.now_ns)
        again.now_ns = rank.now_ns + 60 * S
        for _ in range(20):
            again.train(0.1)
        again.look()
        last = again.watch.iterations[-1]
        assert (last.number, last.step, last.generation) == (49, 20, 1)
        assert again.watch.counts.generation == 1 and again.changes == []


# What must be noticed.


def test_a_slowdown_of_a_few_percent_is_noticed_at_the_step_of_the_ring(rank: Rank) -> None:
    took = seconds(3, sigma=0.005)
    for index in range(600):
        rank.train(took() * (1.08 if index >= 300 else 1.0))
        rank.look()
    (found,) = rank.triggers
    assert found.change is Change.SLOW and 300 < found.step < 340
    assert found.observed_ns / found.baseline_ns == pytest.approx(1.08, abs=0.02)


def test_a_save_every_fifty_steps_is_recurring_told_by_the_probe_or_not(tmp_path: Path) -> None:
    for told in (True, False):
        (tmp_path / str(told)).mkdir()
        with _rank(tmp_path / str(told)) as rank:
            took = seconds(4)
            for index in range(1, 400):
                rank.train(took())
                if index % 50 == 0:
                    if told:
                        rank.phase(SAVE, 0.6)
                    else:
                        rank.now_ns += int(0.6 * S)
                rank.look()
            assert rank.changes == [Change.RECURRING], told
            assert rank.triggers[0].every == 50


@pytest.mark.parametrize("evaluation", [False, True], ids=["training alone", "with an evaluation"])
@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "fetches ahead"])
def test_a_slow_first_batch_of_each_epoch_is_recurring(rank: Rank, ahead: bool, evaluation: bool) -> None:
    took = seconds(5)
    for epoch in range(15):
        if evaluation and epoch:
            rank.evaluate(10, 4.0)
        rank.next(1.5)
        for index in range(25):
            last = index == 24
            if ahead:
                rank.next(raised=last)
            rank.now_ns += int(took() * S)
            rank.step()
            if not ahead:
                rank.next(raised=last)
            rank.look()
    assert rank.changes == [Change.RECURRING]
    assert rank.triggers[0].every == 25


def test_400_ms_every_eight_steps_are_recurring_from_the_first_step_on(rank: Rank) -> None:
    took = seconds(6)
    for index in range(250):
        rank.train(took() + (0.4 if index % 8 == 0 else 0.0))
        rank.look()
    assert rank.changes == [Change.RECURRING]
    assert rank.triggers[0].every == 8


def test_a_rank_that_stands_still_is_noticed_once_and_its_going_on_too(rank: Rank) -> None:
    took = seconds(7)
    for _ in range(50):
        rank.train(took())
        rank.look()
    rank.next()
    number = rank.ring.begin(what(COLLECTIVE, 1), rank.now_ns, -1, 77, 1, 400, 50)
    for _ in range(30):
        rank.now_ns += S
        rank.look()
    assert rank.changes == [Change.STALLED]
    rank.ring.end(number, 30 * S, False)
    rank.step()
    rank.look()
    assert rank.changes == [Change.STALLED, Change.RECOVERED]


# What must not.


def test_a_rank_that_stands_still_before_its_first_iteration_says_which_start_it_is_of(tmp_path: Path) -> None:
    ring = Ring.create(tmp_path / "a.ring", rank=0, world_size=4, generation=3)
    ring.begin(what(COLLECTIVE, 1), 1_000 * S, -1, 77, 1, 400, 0)
    tail = Tail(tmp_path / "a.ring")
    news = tail.poll()
    tail.close()
    ring.close()
    watch = Watch(0, 3)
    assert watch.feed(news.begun, news.ended, news.words, 1_000 * S) == []
    (trigger,) = watch.check(1_040 * S)
    assert (trigger.change, trigger.is_opening, trigger.generation) == (Change.STALLED, True, 3)


def test_one_hiccup_warm_up_and_compilation_are_silent(rank: Rank) -> None:
    took = seconds(8)
    for index in range(600):
        if index in (0, 1):
            rank.phase(COMPILE, 40.0)
        rank.train(took() * (4.0 if index < 8 else 1.0) + (3.0 if index == 300 else 0.0))
        if index == 450:
            rank.phase(COMPILE, 30.0)
        rank.look()
    assert rank.changes == []


@pytest.mark.parametrize("told", [False, True])
def test_evaluations_now_and_then_and_gaps_between_epochs_are_silent(rank: Rank, told: bool) -> None:
    took = seconds(9)
    for _ in range(12):
        for _ in range(50):
            rank.train(took())
            rank.look()
        rank.next(raised=True)
        rank.now_ns += int(0.05 * S)
        if told:
            rank.phase(EVALUATE, 8.0)
        else:
            rank.evaluate(20, 8.0)
        rank.look()
    assert rank.changes == []
    assert sum(i.pause is Pause.EVALUATION for i in rank.watch.iterations) == 11


def test_our_own_windows_are_silent_however_often(rank: Rank) -> None:
    took = seconds(10)
    for index in range(400):
        if index % 40 == 39:
            number = rank.ring.begin(flight.CAPTURE, rank.now_ns, -1, 0, index, 0, rank.steps)
            for _ in range(4):
                rank.train(took() * 3)
                rank.look()
            rank.ring.end(number, 1_200_000_000, False)
        rank.train(took())
        rank.look()
    assert rank.changes == []


def test_what_iterations_take_while_captures_are_read_is_not_judged_and_a_slowdown_after_it_is(rank: Rank) -> None:
    for _ in range(60):
        rank.train(0.1)
    rank.look()
    rank.watch.is_disturbed = True
    for _ in range(40):
        rank.train(0.13)
    assert rank.look() == []
    rank.watch.is_disturbed = False
    for _ in range(40):
        rank.train(0.1)
    assert rank.look() == []
    for _ in range(40):
        rank.train(0.13)
    assert [trigger.change for trigger in rank.look()] == [Change.SLOW]


def test_a_rank_at_its_end_or_in_a_save_is_not_taken_for_one_that_stands_still(rank: Rank) -> None:
    took = seconds(11)
    for _ in range(50):
        rank.train(took())
        rank.look()
    rank.phase(SAVE, 0.0)
    rank.ring.begin(what(PHASE, SAVE), rank.now_ns, -1, 0, 0, 0, rank.steps)
    for _ in range(40):
        rank.now_ns += S
        rank.look()
    assert rank.watch.pause is Pause.CHECKPOINT and rank.changes == [Change.QUIET]
    rank.ring.set(flight.STATE, flight.ENDED)
    rank.now_ns += 10_000 * S
    rank.look()
    assert rank.changes == [Change.QUIET]


def test_a_phase_whose_record_was_overwritten_does_not_last_for_ever(rank: Rank) -> None:
    for _ in range(20):
        rank.train(0.1)
    rank.ring.begin(what(PHASE, SAVE), rank.now_ns, -1, 0, 0, 0, rank.steps)
    rank.look()
    assert rank.watch.pause is Pause.CHECKPOINT
    for index in range(LAPPED // 5 + 2):
        rank.train(0.1)
        if index % 100 == 0:
            rank.look()
    rank.look()
    assert rank.watch.pause is None


def test_garbage_collections_are_no_sign_of_life(rank: Rank) -> None:
    for _ in range(50):
        rank.train(0.1)
        rank.look()
    for _ in range(20):
        rank._end(rank.ring.begin(GC, rank.now_ns, -1, 0, 2, 0, 50), 1.0)
        rank.look()
    assert rank.changes == [Change.STALLED]


def test_every_pause_that_the_probe_can_tell_has_a_phase_of_its_name() -> None:
    phases = [pause_of(Record(1, 1, None, False, PHASE, op, 0, 0, -1, 0, 0, 0, 0)) for op in range(len(PHASES) + 1)]
    assert phases[0] is None and phases[-1] is None  # other, and one of a newer eroica
    assert {phase for phase in phases if phase} == set(Pause) - {Pause.CAPTURE}


def test_a_module_that_is_switched_to_evaluation_in_each_step_hides_no_slowdown(rank: Rank) -> None:
    took = seconds(12)
    for index in range(400):
        rank.phase(EVALUATE, 0.001)
        rank.train(took() * (1.2 if index >= 200 else 1.0))
        rank.look()
    assert rank.changes == [Change.SLOW]
    assert [i.pause for i in rank.watch.iterations] == [Pause.EVALUATION] * 3 + [None] * 397


def test_a_ring_that_is_written_while_it_is_read_loses_no_iteration(rank: Rank) -> None:
    def write() -> None:
        for _ in range(2_000):
            rank.train(0.01)

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        rank.look()
    writer.join()
    rank.look()
    assert rank.watch.num_losses == 0
    assert [i.step for i in rank.watch.iterations] == list(range(1, 2_001))
