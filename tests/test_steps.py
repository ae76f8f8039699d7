"""Iterations are learnt from every event string that real frameworks were seen to produce, and from nothing else."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import pairwise, zip_longest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eroica.periods import Period, smallest_period
from eroica.steps import MAX_CUTS, MAX_OPTIMIZERS, Basis, Iteration, Iterations, Mark, Pause

MS = 1_000_000
TRAINING, VALIDATION = 1, 2


def play(text: str, learnt: Iterations | None = None, *, finish: bool = True) -> list[Iteration]:
    """Feeds an event string, a mark each millisecond.

    n and v: a batch of the training or the validation set; u: of an unknown one; x: an epoch ends; c: a collective;
    [ ]: a step, of the optimizer that a capital letter after [ names.
    """
    learnt = learnt or Iterations()
    now = (learnt.last_ns or 0) // MS
    open_steps: list[int] = []
    done: list[Iteration] = []
    for letter, following in zip_longest(text, text[1:], fillvalue=""):
        if letter.isupper():
            continue
        now += 1
        if letter == "[":
            open_steps.append(ord(following) if following.isupper() else 1)
            done += learnt.feed(Mark.BEGIN, now * MS, open_steps[-1])
        elif letter == "]":
            done += learnt.feed(Mark.END, now * MS, open_steps.pop() if open_steps else 1)
        elif letter == "c":
            done += learnt.feed(Mark.COLLECTIVE, now * MS, 5)
        else:
            mark = Mark.EXHAUSTED if letter == "x" else Mark.NEXT
            done += learnt.feed(mark, now * MS, {"n": TRAINING, "v": VALIDATION, "u": 0, "x": TRAINING}[letter])
    return done + list(learnt.finish()) if finish else done


def sizes(iterations: Iterable[Iteration]) -> list[int]:
    return [i.num_batches for i in iterations]


@pytest.mark.parametrize(
    ("loop", "events", "batches"),
    [
        ("SGD, Adam, LBFGS, any number of workers", "n[]n[]n[]x", [1, 1, 1]),
        ("the same, loaders and ends of epochs unknown", "u[]u[]u[]u", [1, 1, 1]),
        ("accelerate, accumulation of 2", "nnn[]nn[]nn[]", [3, 2, 2]),
        ("HF Trainer, accumulation of 2, evaluation", "nnn[]nn[]nn[]vvx", [3, 2, 2]),
        ("the same, loaders unknown", "uuu[]uu[]uu[]uuu", [3, 2, 2]),
        ("Lightning with sanity validation", "vvn[]n[]n[]vv", [1, 1, 1]),
        ("the same, loaders unknown", "uuu[]u[]u[]uu", [3, 1, 1]),
        ("grad scaler that finds inf in the 2nd and 3rd batch", "n[]nnx", [1, 1, 1]),
        ("nested steps: super().step(), ZeroRedundancyOptimizer", "n[[]]n[[]]n[[]]x", [1, 1, 1]),
        ("optimizer in backward, one per parameter", "n[A][B][C][D]n[A][B][C][D]n[A][B][C][D]", [1, 1, 1]),
        ("duck-typed optimizer", "nnnx", [1, 1, 1]),
        ("a compiled step on the same tensors", "[][][]", [0, 0, 0]),
        ("two optimizers", "n[D][G]n[D][G]n[D][G]", [1, 1, 1]),
    ],
)
def test_each_event_string_that_frameworks_produce_gives_one_iteration_per_update_cycle(
    loop: str, events: str, batches: list[int]
) -> None:
    assert sizes(play(events)) == batches, loop


def test_an_iteration_lasts_from_the_end_of_the_last_step_to_the_end_of_its_own() -> None:
    done = play("nc[]nc[]nc[]")
    assert [(i.start_ns // MS, i.end_ns // MS) for i in done] == [(1, 4), (4, 8), (8, 12)]
    assert [(i.number, i.step, i.num_steps, i.num_collectives) for i in done] == [
        (0, 1, 1, 1),
        (1, 2, 1, 1),
        (2, 3, 1, 1),
    ]
    assert done[1].duration_ns == 4 * MS


def test_iterations_come_as_soon_as_their_step_ends_once_the_unit_is_known() -> None:
    learnt = Iterations()
    assert [i.step for i in play("n[]n[]", learnt, finish=False)] == [1, 2]
    assert [i.step for i in play("n[]", learnt, finish=False)] == [3]


def test_the_last_shorter_group_of_an_epoch_is_an_iteration_of_its_own_size() -> None:
    epoch = "nnnn[]nnnn[]nnnn[]nnnn[]nn[]x"
    assert sizes(play(epoch * 3)) == [4, 4, 4, 4, 2] * 3


def test_synchronising_each_micro_batch_does_not_make_it_an_iteration() -> None:
    done = play("ncncncnc[]" * 5)
    assert [(i.num_batches, i.num_collectives) for i in done] == [(4, 4)] * 5


def test_loaders_rebuilt_each_epoch_do_not_disturb_the_count() -> None:
    assert [i.step for i in play("n[]n[]n[]x" * 4)] == list(range(1, 13))


def test_five_critic_steps_and_one_generator_step_are_one_iteration_once_learnt() -> None:
    done = play(("n[D]" * 5 + "[G]") * 20)
    assert [(i.num_batches, i.num_steps) for i in done[-15:]] == [(5, 6)] * 15
    assert done[-1].unit > done[0].unit


def test_an_optimizer_that_steps_rarely_does_not_stretch_the_iteration() -> None:
    done = play(("n[A]" * 100 + "[B]") * 5)
    assert len(done) >= 490


def test_training_goes_on_being_counted_when_one_of_two_optimizers_is_frozen() -> None:
    learnt = Iterations()
    play("n[D][G]" * 20, learnt, finish=False)
    done = play("n[D]" * 100, learnt)
    assert sizes(done[-60:]) == [1] * 60


def test_a_change_of_accumulation_is_learnt() -> None:
    done = play("n[]" * 40 + "nnnn[]" * 60)
    assert [(i.num_batches, i.skipped) for i in done[-30:]] == [(4, False)] * 30


def test_hundreds_of_optimizers_more_than_are_told_apart_still_give_one_iteration_per_backward() -> None:
    learnt = Iterations()
    done: list[Iteration] = []
    now = 0
    for _ in range(40):
        now += MS
        done += learnt.feed(Mark.NEXT, now, TRAINING)
        for optimizer in range(MAX_OPTIMIZERS + 100):
            now += 1000
            done += learnt.feed(Mark.BEGIN, now, optimizer)
            done += learnt.feed(Mark.END, now + 500, optimizer)
    assert {i.num_steps for i in done[2:]} == {MAX_OPTIMIZERS + 100}
    assert len(done) >= 39


def test_steps_that_a_grad_scaler_skips_count_as_iterations() -> None:
    done = play("n[]n[]nnn[]n[]")
    assert [i.skipped for i in done] == [False, False, True, True, False, False]
    assert [i.step for i in done] == [1, 2, 2, 2, 3, 4]
    assert all(a.end_ns == b.start_ns for a, b in pairwise(done))
    assert all(i.duration_ns > 0 for i in done)


def test_skipped_steps_under_accumulation_take_as_many_batches_as_the_others() -> None:
    done = play("nnn[]nn[]nn[]nnnn[]nn[]")
    assert [(i.num_batches, i.skipped) for i in done] == [
        (3, False),
        (2, False),
        (2, False),
        (2, True),
        (2, False),
        (2, False),
    ]


def test_a_grad_scaler_that_skips_forever_still_gives_iterations() -> None:
    learnt = Iterations()
    play("n[]" * 5, learnt, finish=False)
    assert len(play("n" * (2 * MAX_CUTS), learnt, finish=False)) >= MAX_CUTS


def test_batches_of_unknown_loaders_are_skipped_steps_only_with_the_collectives_of_training() -> None:
    trained = play("uccc[]" * 5 + "uccc" * 2 + "uccc[]")
    assert [i.skipped for i in trained] == [False] * 5 + [True, True, False]
    evaluated = play("uccc[]" * 5 + "uuuuc" + "uccc[]")
    assert [i.skipped for i in evaluated] == [False] * 6
    assert evaluated[-1].pause is Pause.EVALUATION


def test_an_evaluation_is_a_pause_of_the_iteration_around_it_and_adds_none() -> None:
    learnt = Iterations()
    assert len(play("n[]" * 10, learnt, finish=False)) == 10
    assert play("v" * 1000, learnt, finish=False) == []
    assert learnt.pause == Pause.EVALUATION
    after = play("n[]n[]", learnt, finish=False)
    assert [(i.pause, i.num_batches) for i in after] == [(Pause.EVALUATION, 1), (None, 1)]
    assert learnt.pause is None


def test_a_pause_that_the_probe_tells_marks_the_iterations_that_it_touches() -> None:
    learnt = Iterations()
    play("n[]n[]n", learnt, finish=False)
    learnt.begin(Pause.CHECKPOINT, 8 * MS)
    assert learnt.pause is Pause.CHECKPOINT
    learnt.end(Pause.CHECKPOINT, 9 * MS)
    assert [i.pause for i in play("[]n[]", learnt)] == [Pause.CHECKPOINT, None]


def test_a_step_that_raised_counts_as_skipped_and_hides_none_of_the_following() -> None:
    assert [(i.step, i.skipped) for i in play("n[]n[n[]n[]")] == [(1, False), (1, True), (2, False), (3, False)]


def test_a_closure_that_fetches_batches_is_one_step() -> None:
    assert [(i.num_steps, i.num_batches) for i in play("n[nn]n[n]n[]")] == [(1, 3), (1, 2), (1, 1)]


def test_without_steps_each_batch_is_an_iteration_and_the_first_step_corrects_that() -> None:
    learnt = Iterations()
    done = play("n" * 40, learnt, finish=False)
    assert learnt.basis == Basis.BATCHES
    assert len(done) == 39 and [i.step for i in done] == list(range(1, 40))
    corrected = play("[]n[]n[]", learnt)
    assert learnt.counts.steps == 3
    assert [i.num_steps for i in corrected] == [1, 1, 1] and corrected[0].unit > done[0].unit


def test_without_batches_and_steps_the_period_of_the_collectives_is_the_iteration() -> None:
    learnt = Iterations()
    done: list[Iteration] = []
    now = 0
    for i in range(100):
        now += 50 * MS  # Forward: the long silence before the first collective.
        for symbol in (11, 12, 12, 12, 13):
            now += MS
            done += learnt.feed(Mark.COLLECTIVE, now, symbol)
        if i % 10 == 0:  # A logged value now and then.
            done += learnt.feed(Mark.COLLECTIVE, now, 99)
    assert learnt.basis is Basis.COLLECTIVES
    assert {i.duration_ns for i in done[1:]} == {55 * MS}
    assert len(done) > 60


def test_collectives_without_a_pattern_give_no_iterations() -> None:
    learnt = Iterations()
    for i in range(5000):
        assert not learnt.feed(Mark.COLLECTIVE, i * MS, i * i % 7919)
    assert learnt.basis is Basis.LEARNING


def test_a_period_is_found_again_after_the_stream_changes() -> None:
    period = Period()
    for i in range(300):
        period.feed(i % 5, i * MS)
    assert period.length == 5
    for i in range(3000):
        period.feed(100 + i % 7, i * MS)
    assert period.length == 7


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(0, 11))
def test_the_smallest_period_is_what_trying_all_of_them_gives(unit: list[int], cut: int) -> None:
    symbols = (unit * 40)[cut:]
    expected = next(
        p for p in range(1, len(symbols)) if all(a == b for a, b in zip(symbols, symbols[p:], strict=False))
    )
    assert smallest_period(symbols) == expected


def test_a_rendezvous_restarts_the_raw_counts_and_numbers_iterations_on() -> None:
    learnt = Iterations()
    play("n[]" * 7, learnt, finish=False)
    learnt.restart(1, learnt.last_ns or 0)
    assert (learnt.counts.steps, learnt.counts.batches, learnt.counts.generation) == (0, 0, 1)
    again = play("nn[]nn[]", learnt)
    assert [(i.number, i.step, i.generation, i.num_batches) for i in again] == [(7, 1, 1, 2), (8, 2, 1, 2)]


def test_raw_counts_are_those_of_the_marks_whatever_was_learnt() -> None:
    learnt = Iterations()
    play("vvnc[[]]nc[]ncx", learnt)
    counts = learnt.counts
    assert (counts.steps, counts.batches, counts.collectives) == (2, 5, 3)


def test_the_second_longest_silence_is_remembered_and_a_single_one_is_not() -> None:
    learnt = Iterations()
    play("n[]" * 20, learnt, finish=False)
    for seconds, second in ((210, 1), (60, 60_000)):
        learnt.feed(Mark.NEXT, (learnt.last_ns or 0) + seconds * 1000 * MS, TRAINING)
        play("[]", learnt, finish=False)
        assert learnt.gaps_ns[1] == second * MS


feeds = st.tuples(st.sampled_from(Mark), st.integers(-(10**12), 10**15), st.integers(0, 5))
tellings = st.tuples(
    st.sampled_from(["begin", "end", "restart"]), st.integers(-(10**12), 10**15), st.sampled_from(Pause)
)


@given(st.lists(st.one_of(feeds, tellings), max_size=400))
def test_no_order_of_marks_raises_or_gives_iterations_that_overlap(
    marks: list[tuple[Mark, int, int] | tuple[str, int, Pause]],
) -> None:
    learnt = Iterations()
    done: list[Iteration] = []
    for mark, time_ns, other in marks:
        if isinstance(mark, Mark):
            assert isinstance(other, int)
            done += learnt.feed(mark, time_ns, other)
        elif isinstance(other, Pause):
            if mark == "restart":
                learnt.restart(len(done), time_ns)
            else:
                (learnt.begin if mark == "begin" else learnt.end)(other, time_ns)
        assert learnt.pause is None or isinstance(learnt.pause, Pause)
    done += learnt.finish()
    assert [i.number for i in done] == list(range(len(done)))
    assert all(i.end_ns >= i.start_ns for i in done)
    same = [(a, b) for a, b in pairwise(done) if a.generation == b.generation]
    assert all(b.start_ns >= a.end_ns for a, b in same)


@given(st.lists(st.sampled_from(["n", "v", "[]", "[D][G]", "c", "x", "[", "]", "nn[]"]), max_size=300))
def test_never_more_iterations_than_steps_and_batches_together(parts: list[str]) -> None:
    learnt = Iterations()
    done = play("".join(parts), learnt)
    assert sum(i.num_steps for i in done) <= learnt.counts.steps
    assert sum(i.num_batches for i in done) <= learnt.counts.batches
    assert all(i.num_batches >= 0 and i.num_collectives >= 0 for i in done)


def test_memory_stays_bounded_over_a_long_run() -> None:
    def reach(thing: object, seen: set[int]) -> int:
        if id(thing) in seen:
            return 0
        seen.add(id(thing))
        parts: list[object] = list(getattr(thing, "__dict__", {}).values())
        parts += [getattr(thing, s) for s in getattr(thing, "__slots__", ()) if hasattr(thing, s)]
        if isinstance(thing, dict):
            parts += [*thing.keys(), *thing.values()]
        elif hasattr(thing, "__iter__") and not isinstance(thing, str | bytes | type):
            parts += list(thing)
        return sys.getsizeof(thing) + sum(reach(p, seen) for p in parts)

    learnt = Iterations()
    now = 0
    for i in range(60_000):
        now += MS
        learnt.feed(Mark(i % 3 + 1), now, i)  # A new loader each time, steps that never end.
    for i in range(30_000):
        now += MS
        learnt.feed(Mark.BEGIN, now, i)
        learnt.feed(Mark.END, now, i)  # A new optimizer each time.
    assert reach(learnt, set()) < 300_000
