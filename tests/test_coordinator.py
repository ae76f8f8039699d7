"""The coordinator: when all ranks are captured together or looked at, driven by messages and a clock of the test's."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from eroica import bus
from eroica.background import History, Lap
from eroica.bus import (
    Abort,
    Answered,
    Closed,
    Commit,
    Died,
    Ending,
    Joined,
    Leaving,
    LookCloser,
    Looked,
    Noticed,
    Prepare,
    Released,
    Resume,
    Silent,
    Standing,
    Summarized,
)
from eroica.codec import write_summary
from eroica.commands import Frames, State, Unit
from eroica.coordinator import Coordinator
from eroica.degradation import Change, Trigger
from eroica.windows import Look, Policy, Window, missing_note
from tests.handmade import Rank, summary

SECOND = 1_000_000_000


@dataclass
class Job:
    """Ranks that do as they are told, at 0.1 s per iteration, and a record of all that the coordinator says."""

    num_ranks: int = 4
    per_iteration: int = 1
    policy: Policy = field(default_factory=lambda: Policy(baseline=False))
    sent: list[bus.Message] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    recovered: list[int] = field(default_factory=list)
    now_ns: int = 0
    count: int = 0
    explains: bool = True
    """Whether looks lead to a diagnosis."""

    def __post_init__(self) -> None:
        self.coordinator = Coordinator(
            self.sent.append,
            self.windows.append,
            self._explain,
            lambda rank, trigger: self.recovered.append(rank),
            self.policy,
        )

    def _explain(self, look: Look) -> bool:
        self.looks.append(look)
        return self.explains

    def stand(self, count: int, **changes: object) -> None:
        """All ranks have completed `count` units."""
        self.count = count
        for rank in range(self.num_ranks):
            self.tell(self.standing(rank, count, **changes))

    def standing(self, rank: int, count: int, **changes: object) -> Standing:
        made = Standing(
            host="a",
            rank=rank,
            world_size=self.num_ranks,
            generation=0,
            unit=Unit.STEPS,
            count=count,
            per_iteration=self.per_iteration,
            aligned=count - count % self.per_iteration,
            num_iterations=count // self.per_iteration,
            iteration_s=0.1,
            is_alive=True,
        )
        return replace(made, **changes)  # type: ignore[arg-type]

    def tell(self, message: bus.Message) -> None:
        self.coordinator.handle(message, self.now_ns)

    def notice(
        self, change: Change = Change.SLOW, rank: int = 2, every: int | None = None, generation: int = 0
    ) -> None:
        self.tell(
            Noticed(
                rank=rank,
                trigger=Trigger(change, self.now_ns, generation, self.count, self.count, 100, 120, 0.2, every=every),
            )
        )

    def answer(self, state: State, ranks: range | list[int] | None = None) -> None:
        for rank in range(self.num_ranks) if ranks is None else ranks:
            self.tell(Answered(window=self.prepared.window, rank=rank, state=state))

    def summarize(self, ranks: range | list[int] | None = None, num_events: int = 0) -> None:
        for rank in range(self.num_ranks) if ranks is None else ranks:
            made = summary(rank, Rank())
            made = replace(made, num_iterations=2, coverage=replace(made.coverage, num_events=num_events))
            data = write_summary(made)
            self.tell(Summarized(window=self.prepared.window, rank=rank, summary=data))

    def look_closer(self) -> None:
        """The look under way, to its end."""
        while (look := self.coordinator.look) is not None:
            if look.due_ns is None:
                self.tell(Looked(look=look.number, host="a", views=()))
            self.pass_time(1)

    def pass_time(self, seconds: float) -> None:
        self.now_ns += round(seconds * SECOND)
        self.coordinator.tick(self.now_ns)

    @property
    def prepared(self) -> Prepare:
        """The last proposal."""
        return [message for message in self.sent if isinstance(message, Prepare)][-1]

    def count_of(self, kind: type) -> int:
        return sum(isinstance(message, kind) for message in self.sent)


def test_a_slowdown_is_proposed_ahead_of_all_ranks_committed_and_collected() -> None:
    job = Job()
    job.stand(117)
    job.tell(job.standing(3, 118))
    job.notice()
    assert job.prepared.start > 118 + 0.6 / 0.1 and job.prepared.num_steps == 20
    assert job.prepared.frames is Frames.SAMPLED and job.count_of(Commit) == 0
    job.answer(State.PREPARED)
    assert job.count_of(Commit) == 1
    job.answer(State.DONE)
    assert not job.windows
    job.summarize()
    (window,) = job.windows
    assert sorted(window.summaries) == [0, 1, 2, 3] and window.trigger == "slowdown" and missing_note(window) == ""


def test_a_window_is_taken_again_with_sizes_at_once_shorter_and_not_a_third_time() -> None:
    job = Job()
    job.stand(117)
    job.notice()
    job.answer(State.PREPARED)
    job.answer(State.DONE)
    job.summarize()
    (window,) = job.windows
    assert job.coordinator.ask_for_sizes(window, job.now_ns)
    job.pass_time(0.1)
    assert job.prepared.frames is Frames.SIZED and job.prepared.window != window.number
    assert job.prepared.num_steps < window.num_steps or window.num_steps == job.coordinator.policy.fewest
    job.answer(State.PREPARED)
    job.answer(State.DONE)
    job.summarize()
    sized = job.windows[-1]
    assert (sized.trigger, sized.cause, sized.frames) == (window.trigger, window.cause, Frames.SIZED)
    assert not job.coordinator.ask_for_sizes(sized, job.now_ns)


def test_ranks_that_notice_the_same_slowdown_open_one_window() -> None:
    job = Job()
    job.stand(117)
    for rank in range(4):
        job.notice(rank=rank)
    job.answer(State.PREPARED)
    job.notice(rank=1)
    job.summarize()
    assert len(job.windows) == 1 and job.count_of(Prepare) == 1


def test_nothing_is_committed_before_every_rank_has_answered() -> None:
    job = Job()
    job.stand(50)
    job.notice()
    job.answer(State.PREPARED, [0, 1, 3])
    assert job.count_of(Commit) == 0
    job.answer(State.PREPARED, [2])
    assert job.count_of(Commit) == 1


def test_a_rank_that_was_late_moves_the_start_ahead_for_all() -> None:
    job = Job()
    job.stand(50)
    job.notice()
    first = job.prepared
    job.answer(State.PREPARED, [0, 1, 3])
    job.answer(State.LATE, [2])
    assert job.count_of(Abort) == 1 and job.count_of(Commit) == 0
    assert job.prepared.window != first.window and job.prepared.start > first.start
    job.answer(State.PREPARED)
    assert job.count_of(Commit) == 1


def test_after_three_late_starts_the_window_goes_on_without_that_rank() -> None:
    job = Job()
    job.stand(50)
    job.notice()
    for _ in range(3):
        job.answer(State.PREPARED, [0, 1, 3])
        job.answer(State.LATE, [2])
    assert job.count_of(Commit) == 1
    job.summarize([0, 1, 3])
    (window,) = job.windows
    assert missing_note(window) == "rank 2 saw the command too late"


def test_a_rank_with_a_profiler_of_its_own_is_left_out_and_named() -> None:
    job = Job()
    job.stand(50)
    job.notice()
    job.answer(State.PREPARED, [0, 1, 2])
    job.answer(State.BUSY, [3])
    job.summarize([0, 1, 2])
    assert missing_note(job.windows[0]) == "rank 3 has another profiler active"


def test_what_ranks_say_of_their_failures_is_passed_on_once_for_all_that_say_the_same() -> None:
    job = Job(num_ranks=2)
    job.stand(50)
    job.notice()
    for rank in range(2):
        job.tell(Answered(window=job.prepared.window, rank=rank, state=State.UNABLE, why="no room in /run"))
    assert missing_note(job.windows[0]) == "ranks 0-1 cannot capture (no room in /run)"


def test_if_no_rank_can_capture_the_window_ends_at_once_and_says_why() -> None:
    job = Job()
    job.stand(50)
    job.notice()
    job.answer(State.UNABLE)
    (window,) = job.windows
    assert not window.summaries and missing_note(window) == "ranks 0-3 cannot capture" and job.count_of(Commit) == 0


def test_ranks_that_cannot_capture_tell_how_they_went_on_all_the_same() -> None:
    job = Job()
    job.stand(50)
    job.notice(Change.RECURRING)
    for rank in range(4):
        history = History(laps=(Lap(49, 0, 100, ""),))
        job.tell(Summarized(window=job.prepared.window, rank=rank, summary=None, history=history))
        job.answer(State.BUSY, [rank])
    (window,) = job.windows
    assert sorted(window.histories) == [0, 1, 2, 3] and not window.summaries
    assert missing_note(window) == "ranks 0-3 have another profiler active"


def test_a_rank_that_does_not_answer_delays_the_window_but_does_not_stop_it() -> None:
    job = Job()
    job.stand(50)
    job.notice()
    job.answer(State.PREPARED, [0, 1, 2])
    job.pass_time(25)
    assert job.count_of(Commit) == 1
    job.summarize([0, 1, 2])
    assert missing_note(job.windows[0]) == "rank 3 did not answer"


def test_a_rank_that_fails_in_the_window_is_named_and_the_others_are_used() -> None:
    job = Job()
    job.stand(50)
    job.notice()
    job.answer(State.PREPARED)
    job.answer(State.DISCARDED, [1])
    job.summarize([0, 2, 3])
    assert sorted(job.windows[0].summaries) == [0, 2, 3] and 1 in job.windows[0].problems


def test_a_rank_that_ends_in_the_window_is_not_waited_for() -> None:
    job = Job()
    job.stand(50)
    job.notice()
    job.answer(State.PREPARED)
    job.summarize([0, 1, 2])
    assert not job.windows
    job.tell(job.standing(3, 60, is_alive=False))
    job.pass_time(1)
    assert missing_note(job.windows[0]) == "rank 3 has ended"


def test_what_a_rank_wrote_before_it_ended_is_waited_for() -> None:
    job = Job()
    job.stand(50)
    job.notice()
    job.answer(State.PREPARED)
    job.answer(State.DONE)
    job.stand(70, is_alive=False)
    assert job.windows == []
    job.summarize()
    assert missing_note(job.windows[0]) == "" and len(job.windows[0].summaries) == 4


def test_a_silence_or_a_death_ends_the_window_under_way() -> None:
    job = Job()
    job.stand(50)
    job.notice()
    job.answer(State.PREPARED)
    job.tell(Died(rank=3, pid=1))
    assert job.count_of(Abort) == 1 and job.coordinator.window is None and job.count_of(LookCloser) == 1


def test_captures_of_a_window_that_is_given_up_are_let_go() -> None:
    job = Job()
    job.stand(50)
    job.notice()
    job.answer(State.PREPARED)
    job.answer(State.DONE, [0, 1])  # these have written theirs
    job.notice(Change.STALLED)
    assert [message.window for message in job.sent if isinstance(message, Closed)] == [job.prepared.window]
    other = Job()
    other.stand(50)
    assert other.coordinator.ask(other.now_ns, asked="w-1") == ""
    other.answer(State.PREPARED)
    assert other.coordinator.cancel("w-1", other.now_ns) and other.count_of(Closed) == 1


def test_a_silence_that_may_last_is_looked_at_and_leaves_the_window_alone() -> None:
    job = Job()
    job.stand(50)
    job.notice()
    job.answer(State.PREPARED)
    job.notice(Change.QUIET)
    assert job.count_of(LookCloser) == 1 and job.count_of(Abort) == 0 and job.coordinator.window is not None


def test_a_silence_that_is_explained_ends_the_window_and_no_other_is_begun_before_a_rank_goes_on() -> None:
    job = Job()
    job.stand(50)
    job.notice()
    job.answer(State.PREPARED)
    job.notice(Change.QUIET)
    job.look_closer()
    assert len(job.looks) == 1 and job.count_of(Abort) == 1 and job.coordinator.window is None
    job.notice()
    job.pass_time(100)
    assert job.count_of(Prepare) == 1
    assert job.coordinator.ask(job.now_ns) != ""
    job.stand(51)
    job.pass_time(1)
    assert job.count_of(Prepare) == 2


def test_a_standstill_that_is_told_does_not_cost_the_baseline_window_either() -> None:
    job = Job(policy=Policy())
    job.stand(30)
    job.pass_time(1)
    job.notice(Change.STALLED)
    job.look_closer()
    for _ in range(300):
        job.pass_time(1)
    assert job.count_of(Prepare) == 1 and not job.windows
    job.stand(31)
    job.pass_time(1)
    assert job.coordinator.window is not None and job.coordinator.window.trigger == "baseline"


def test_nothing_is_begun_and_no_death_is_told_while_the_job_is_being_ended() -> None:
    job = Job()
    job.stand(50)
    job.coordinator.is_resting = True
    job.tell(Died(rank=3, pid=1))
    job.notice()
    job.notice(Change.STALLED)
    job.pass_time(100)
    assert not job.sent


def test_a_summary_that_never_comes_ends_the_window_at_its_deadline() -> None:
    job = Job()
    job.stand(50)
    job.notice()
    job.answer(State.PREPARED)
    job.summarize([0, 1])
    job.pass_time(100)
    assert not job.windows
    job.pass_time(100)
    assert missing_note(job.windows[0]) == "ranks 2-3 left no summary in time"


def test_after_a_window_the_job_is_left_in_peace_for_a_while() -> None:
    job = Job()
    job.stand(50)
    job.notice()
    job.answer(State.PREPARED)
    job.summarize()
    job.notice()
    assert job.count_of(Prepare) == 1
    job.stand(90)
    job.pass_time(21)
    assert job.count_of(Prepare) == 2


def test_the_baseline_window_waits_until_every_rank_is_warm() -> None:
    job = Job(policy=Policy())
    job.stand(10)
    job.pass_time(1)
    assert job.count_of(Prepare) == 0
    job.stand(24)
    job.tell(job.standing(3, 23))
    job.pass_time(1)
    assert job.count_of(Prepare) == 0
    job.stand(25)
    job.pass_time(1)
    assert job.count_of(Prepare) == 1
    job.answer(State.PREPARED)
    job.summarize()
    assert job.windows[0].trigger == "baseline"
    job.pass_time(100)
    assert job.count_of(Prepare) == 1


def test_a_job_that_became_much_faster_than_in_its_baseline_window_gets_another_one() -> None:
    job = Job(policy=Policy())
    job.stand(30, iteration_s=2.0)
    job.pass_time(1)
    job.answer(State.PREPARED)
    job.summarize()
    job.stand(60, iteration_s=1.5)
    job.pass_time(30)
    assert job.count_of(Prepare) == 1
    job.stand(90, iteration_s=0.1)
    job.pass_time(1)
    assert job.count_of(Prepare) == 2
    job.answer(State.PREPARED)
    job.summarize()
    assert [window.trigger for window in job.windows] == ["baseline", "baseline"]


def test_a_window_that_met_another_phase_than_the_slow_one_is_taken_again_and_longer() -> None:
    job = Job()
    job.stand(50)
    trigger = Trigger(Change.SLOW, 0, 0, 50, 50, 100, 120, 0.2, num_batches=1, num_collectives=100)
    job.tell(Noticed(rank=2, trigger=trigger))
    first = job.prepared

    def answer(num_collectives: int) -> None:
        job.answer(State.PREPARED)
        window = job.coordinator.window
        assert window is not None
        lap = Lap(window.start + 1, 0, 100, "capture", 1, num_collectives)
        window.histories.update({rank: History(laps=(lap,)) for rank in range(4)})
        job.summarize()

    answer(5)
    assert not job.windows and job.prepared.num_steps == 2 * first.num_steps
    answer(100)
    assert len(job.windows) == 1


def test_the_baseline_waits_for_ranks_that_have_not_appeared() -> None:
    job = Job(policy=Policy())
    for rank in range(3):
        job.tell(job.standing(rank, 100))
    job.pass_time(1)
    assert job.count_of(Prepare) == 0


def test_a_slowdown_during_the_baseline_window_gets_its_own_window_right_after() -> None:
    job = Job(policy=Policy())
    job.stand(30)
    job.pass_time(1)
    job.answer(State.PREPARED)
    job.notice()
    job.stand(60)
    job.summarize()
    assert [window.trigger for window in job.windows] == ["baseline"] and job.count_of(Prepare) == 2


def test_several_steps_to_an_iteration_are_captured_as_whole_iterations() -> None:
    job = Job(per_iteration=6)
    job.stand(603)
    job.notice()
    assert job.prepared.start % 6 == 0 and job.prepared.num_steps == 20 * 6


def test_an_optimizer_for_each_parameter_gets_whole_iterations_as_far_as_they_fit() -> None:
    job = Job(per_iteration=300)
    job.stand(30_000)
    job.notice()
    assert job.prepared.num_steps == 900 and job.prepared.start % 300 == 0


def test_a_short_period_is_captured_twice_over() -> None:
    job = Job()
    job.stand(400)
    job.notice(Change.RECURRING, every=15)
    assert job.prepared.num_steps == 30


def test_a_long_period_is_met_at_its_next_slow_iteration() -> None:
    job = Job()
    job.stand(400)  # the slow one was the iteration that ended at 400; the next ends at 450
    job.notice(Change.RECURRING, every=50)
    assert job.prepared.start < 449 < job.prepared.start + job.prepared.num_steps
    assert job.prepared.num_steps <= 12


def test_the_first_window_of_long_iterations_is_short_and_the_next_as_long_as_their_events_allow() -> None:
    job = Job(policy=Policy())
    job.stand(30, iteration_s=0.5)
    job.pass_time(1)
    assert job.prepared.num_steps == 4
    job.answer(State.PREPARED)
    job.summarize(num_events=100 * 2)  # of two iterations
    job.notice()
    job.pass_time(1)
    assert job.prepared.num_steps == 10  # what it would have been; nothing was cut
    assert job.coordinator.window is not None and job.coordinator.window.notes == ()


def test_short_iterations_are_not_cut_in_the_first_window() -> None:
    job = Job()
    job.stand(50)
    job.notice()
    assert job.prepared.num_steps == 20


def test_a_window_holds_no_more_events_than_can_be_borne_by_the_rank_with_most_of_them() -> None:
    job = Job(policy=Policy())
    job.stand(30)
    job.pass_time(1)
    job.answer(State.PREPARED)
    job.summarize([0, 1, 2], num_events=1_000 * 2)
    job.summarize([3], num_events=5_000 * 2)
    job.notice()
    job.pass_time(1)
    assert job.prepared.num_steps == 8
    job.answer(State.PREPARED)
    job.summarize(num_events=5_000 * 2)
    assert job.windows[1].notes == (
        "the window has 8 iterations instead of 20: one has 5,000 events, and 40,000 on a rank are to be enough",
    )


def test_a_window_has_four_iterations_however_many_events_they_have() -> None:
    job = Job(policy=Policy())
    job.stand(30)
    job.pass_time(1)
    job.answer(State.PREPARED)
    job.summarize(num_events=1_000_000)
    job.notice()
    job.pass_time(1)
    assert job.prepared.num_steps == 4


@pytest.mark.parametrize("every", [3, 15, 50])
def test_a_window_that_is_cut_meets_the_next_slow_iteration_all_the_same(every: int) -> None:
    job = Job(policy=Policy())
    job.stand(30)
    job.pass_time(1)
    job.answer(State.PREPARED)
    job.summarize(num_events=8_000 * 2)
    job.stand(400)
    job.notice(Change.RECURRING, every=every)  # the slow one was the iteration that ended at 400
    job.pass_time(1)
    assert job.prepared.num_steps == 4
    held = range(job.prepared.start, job.prepared.start + job.prepared.num_steps)
    assert any((step + 1 - 400) % every == 0 for step in held)
    assert job.coordinator.window is not None and "4 iterations instead of" in job.coordinator.window.notes[0]


def test_what_was_learnt_of_events_is_forgotten_when_the_job_starts_anew() -> None:
    job = Job(policy=Policy(baseline=False, rest_s=0))
    job.stand(50)
    job.notice()
    job.answer(State.PREPARED)
    job.summarize(num_events=1_000_000)
    job.stand(40, generation=1)
    job.notice(generation=1)
    assert job.prepared.num_steps == 20


def test_a_job_without_learnt_iterations_is_not_captured() -> None:
    job = Job()
    job.stand(50, unit=None, per_iteration=0, iteration_s=None)
    job.notice()
    assert job.count_of(Prepare) == 0


def test_a_rank_that_stands_still_is_looked_at_twice() -> None:
    job = Job()
    job.stand(50)
    job.notice(Change.STALLED)
    assert job.count_of(LookCloser) == 1
    first = next(message for message in job.sent if isinstance(message, LookCloser))
    job.tell(Looked(look=first.look, host="a", views=()))
    assert not job.looks
    job.pass_time(1.1)
    assert job.count_of(LookCloser) == 2
    job.tell(Looked(look=first.look, host="a", views=()))
    assert len(job.looks) == 1 and job.looks[0].num_looks == 2


def test_a_death_is_looked_at_once_and_reported_once() -> None:
    job = Job()
    job.stand(50)
    job.tell(Died(rank=1, pid=7))
    job.tell(Died(rank=1, pid=7))
    look = [message for message in job.sent if isinstance(message, LookCloser)]
    job.tell(Looked(look=look[0].look, host="a", views=()))
    assert len(look) == 1 and len(job.looks) == 1
    job.tell(Died(rank=2, pid=8))
    assert job.count_of(LookCloser) == 1  # it went because rank 1 did
    job.stand(3, generation=1)
    job.tell(Died(rank=2, pid=9))
    assert job.count_of(LookCloser) == 2


def test_a_death_without_an_explanation_does_not_hide_the_next() -> None:
    job = Job(explains=False)
    job.stand(50)
    job.tell(Died(rank=1, pid=7))
    job.tell(Looked(look=next(m for m in job.sent if isinstance(m, LookCloser)).look, host="a", views=()))
    job.tell(Died(rank=2, pid=8))
    assert job.count_of(LookCloser) == 2


def test_a_death_of_an_earlier_start_that_is_told_late_hides_none_of_this_one() -> None:
    job = Job(explains=False)
    job.stand(50)
    job.stand(30, generation=1)  # as another host tells first
    job.tell(Died(rank=2, pid=9))
    job.look_closer()
    job.stand(31, generation=1)
    job.notice(generation=1)
    job.answer(State.PREPARED, [0, 1, 3])
    assert job.count_of(Commit) == 0  # rank 2 lives, and is waited for
    job.tell(Died(rank=2, pid=10))
    assert job.count_of(LookCloser) == 2


def test_a_host_that_does_not_answer_is_not_waited_for_forever() -> None:
    job = Job(num_ranks=3)
    job.stand(50)
    job.tell(job.standing(3, 50, host="b"))
    job.tell(Died(rank=3, pid=7))
    job.tell(Looked(look=next(m for m in job.sent if isinstance(m, LookCloser)).look, host="a", views=()))
    assert not job.looks
    job.pass_time(25)
    assert len(job.looks) == 1


def test_recovery_is_told() -> None:
    job = Job()
    job.stand(50)
    job.notice(Change.RECOVERED, rank=1)
    assert job.recovered == [1] and job.count_of(Prepare) == 0


def test_an_elastic_restart_gives_up_the_window_and_counts_anew() -> None:
    job = Job()
    job.stand(500)
    job.notice()
    job.stand(3, generation=1)
    assert job.count_of(Abort) == 1 and job.coordinator.window is None
    job.stand(40, generation=1)
    job.notice(generation=1)
    assert job.prepared.start < 100


def test_news_of_an_earlier_start_is_ignored() -> None:
    job = Job()
    job.stand(3, generation=1)
    job.notice(generation=0)
    job.tell(job.standing(2, 900))
    assert job.count_of(Prepare) == 0 and job.coordinator.standings[2].count == 3


def test_the_next_training_of_a_command_starts_from_nothing_with_a_baseline_of_its_own() -> None:
    job = Job(policy=Policy())
    job.stand(40, training="first")
    job.pass_time(1)
    job.answer(State.PREPARED)
    job.summarize()
    job.tell(Died(rank=1, pid=11))
    job.num_ranks = 2
    job.stand(40, training="second")
    assert set(job.coordinator.standings) == {0, 1}
    job.pass_time(1)
    job.answer(State.PREPARED)
    job.summarize()
    assert [(window.trigger, window.training) for window in job.windows] == [
        ("baseline", "first"),
        ("baseline", "second"),
    ]


def test_a_window_that_the_end_of_its_training_leaves_open_is_diagnosed_by_what_has_come() -> None:
    job = Job()
    job.stand(117, training="first")
    job.notice()
    job.answer(State.PREPARED)
    job.summarize([0, 1, 2])
    job.stand(1, training="second")
    assert [sorted(window.summaries) for window in job.windows] == [[0, 1, 2]]


def test_a_person_can_ask_for_a_window_of_a_length() -> None:
    job = Job()
    job.stand(50)
    job.coordinator.ask(job.now_ns, 5)
    assert job.prepared.num_steps == 5


def test_a_person_is_refused_with_the_reason_and_what_is_under_way_goes_on() -> None:
    job = Job()
    assert job.coordinator.ask(0, asked="w") == "no rank of it is alive and heard"
    job.stand(50, iteration_s=None)
    assert "how long an iteration is" in job.coordinator.ask(0, asked="w")
    job.stand(50)
    job.notice()
    assert job.coordinator.ask(0, asked="w") == "another window (slowdown) is under way"
    assert job.coordinator.stage("w") == "" and job.count_of(Prepare) == 1 and not job.coordinator.cancel("w", 0)
    halted = Job()
    halted.stand(50)
    halted.notice(Change.STALLED)
    assert "are being looked at" in halted.coordinator.ask(0)
    ending = Job()
    ending.stand(50)
    ending.tell(Ending(host="a"))
    assert ending.coordinator.ask(0) == "the job is being ended"
    silent = Job()
    silent.stand(50)
    silent.tell(Silent(host="a"))
    assert silent.coordinator.ask(0) == "no rank of it is alive and heard"
    assert ending.count_of(Prepare) == silent.count_of(Prepare) == halted.count_of(Prepare) == 0


def test_a_window_of_a_person_is_followed_by_its_request_through_retries_and_can_be_cancelled() -> None:
    job = Job()
    job.stand(50)
    assert job.coordinator.ask(job.now_ns, asked="w") == "" and job.coordinator.stage("w") == "preparing"
    first = job.prepared.window
    job.answer(State.LATE)
    assert job.prepared.window != first and job.coordinator.stage("w") == "preparing"
    job.answer(State.PREPARED)
    assert job.coordinator.stage("w") == "capturing" and job.coordinator.stage("v") == ""
    assert job.coordinator.cancel("w", job.now_ns) and job.coordinator.stage("w") == ""
    assert job.sent[-1] == Abort(window=job.prepared.window) and not job.windows
    job.summarize()
    assert not job.windows, "what comes of a window that was left is of no use"


def test_a_slowdown_in_a_window_of_a_person_gets_one_of_its_own() -> None:
    job = Job()
    job.stand(50)
    job.coordinator.ask(job.now_ns, asked="w")
    job.notice()
    job.answer(State.PREPARED)
    job.answer(State.DONE)
    job.summarize()
    job.pass_time(job.policy.rest_s + 1)
    assert [window.trigger for window in job.windows] == ["manual"] and job.windows[0].asked == "w"
    assert job.coordinator.window is not None and job.coordinator.window.trigger == "slowdown"
    assert job.coordinator.stage("w") == ""


def test_a_silence_that_cannot_be_explained_is_looked_at_again_later_and_later_until_it_ends() -> None:
    job = Job(explains=False)
    job.stand(50)
    job.notice(Change.STALLED)
    for _ in range(4000):
        sent = [m for m in job.sent if isinstance(m, LookCloser)]
        if job.coordinator.look is not None and job.coordinator.look.due_ns is None:
            job.tell(Looked(look=sent[-1].look, host="a", views=()))
        job.pass_time(0.1)
    assert len(job.looks) == 6  # about 0, 10, 30, 70, 150 and 310 seconds in
    trigger = Trigger(Change.RECOVERED, job.now_ns, 0, 50, 50, 100, 120, 0.0, ended=Change.STALLED)
    job.tell(Noticed(rank=2, trigger=trigger))
    job.pass_time(1000)
    assert len(job.looks) == 6 and job.coordinator.look is None


def test_nobody_waits_for_the_ranks_of_a_host_whose_agent_is_not_heard_and_they_are_named() -> None:
    job = Job(num_ranks=3)
    job.stand(50)
    job.tell(job.standing(3, 50, host="b"))
    job.notice()
    job.answer(State.PREPARED)
    assert job.count_of(Commit) == 0
    job.tell(Silent(host="b"))
    assert job.count_of(Commit) == 1
    job.summarize()
    (window,) = job.windows
    assert missing_note(window) == "rank 3 is on b, whose agent is not heard"


def test_an_agent_that_is_lost_while_its_ranks_capture_is_waited_for_so_long_and_no_longer() -> None:
    job = Job(num_ranks=3)
    job.stand(50)
    job.tell(job.standing(3, 50, host="b"))
    job.notice()
    job.answer(State.PREPARED, range(4))
    job.tell(Silent(host="b"))
    job.answer(State.DONE)
    job.summarize()
    job.pass_time(11)
    assert not job.windows
    job.pass_time(2)
    (window,) = job.windows
    assert missing_note(window) == "rank 3 is on b, whose agent is not heard"


def test_an_agent_that_takes_the_place_of_a_lost_one_is_told_of_the_window_and_its_ranks_are_used() -> None:
    job = Job(num_ranks=3)
    job.stand(50)
    job.tell(job.standing(3, 50, host="b"))
    job.tell(Joined(host="b"))
    assert job.count_of(Resume) == 0, "nothing is under way"
    job.notice()
    job.tell(Joined(host="b"))
    job.answer(State.PREPARED, range(4))
    job.summarize()
    job.tell(Silent(host="b"))
    job.tell(Joined(host="b"))
    before, after = (message for message in job.sent if isinstance(message, Resume))
    assert (before.host, before.window, before.start) == ("b", job.prepared.window, job.prepared.start)
    assert before.expected_s == 0 and after.expected_s >= 2.0, "only the second one is to capture at once"
    job.tell(job.standing(3, 60, host="b"))
    job.pass_time(15)
    assert not job.windows
    job.summarize([3])
    assert sorted(job.windows[0].summaries) == [0, 1, 2, 3] and missing_note(job.windows[0]) == ""


@pytest.mark.parametrize("state", [State.BUSY, State.FAILED])
def test_a_window_in_which_no_rank_could_capture_is_taken_again_later_and_later_three_times_in_all(
    state: State,
) -> None:
    job = Job(policy=Policy())
    job.stand(50)
    job.pass_time(1)
    for num, wait_s in ((1, 5), (2, 10)):
        job.answer(state)
        assert len(job.windows) == num and job.windows[-1].trigger == "baseline"
        job.pass_time(wait_s - 1)
        assert job.count_of(Prepare) == num
        job.pass_time(1)
        assert job.count_of(Prepare) == num + 1
    job.answer(state)
    job.pass_time(100)
    assert job.count_of(Prepare) == 3, "what lasts is left alone"
    job.notice()
    assert job.count_of(Prepare) == 4, "a slowdown has tries of its own"
    job.answer(state)
    job.pass_time(5)
    job.answer(State.PREPARED)
    job.summarize()
    assert sorted(job.windows[-1].summaries) == [0, 1, 2, 3] and job.windows[-1].trigger == "slowdown"


def test_a_window_that_nobody_has_answered_is_taken_again_while_ranks_live() -> None:
    job = Job()
    job.stand(50)
    job.notice()
    job.pass_time(25)
    assert missing_note(job.windows[0]) == "ranks 0-3 did not answer" and job.count_of(Prepare) == 1
    job.pass_time(25)
    assert job.count_of(Prepare) == 2
    job.answer(State.PREPARED)
    job.summarize()
    assert [sorted(window.summaries) for window in job.windows] == [[], [0, 1, 2, 3]]
    job.notice()
    job.pass_time(25)
    job.stand(60, is_alive=False)
    job.pass_time(100)
    assert job.count_of(Prepare) == 3, "nobody is left who could answer"


def test_a_slowdown_of_which_a_capture_is_missing_is_looked_at_again_where_nothing_could_be_told() -> None:
    job = Job(policy=Policy(baseline=False))
    job.stand(50)
    job.notice()
    job.answer(State.PREPARED)
    job.tell(Summarized(window=job.prepared.window, rank=2, summary=None, problem="its clock was set meanwhile"))
    job.summarize([0, 1, 3])
    assert missing_note(job.windows[0]) == "rank 2 its clock was set meanwhile"
    job.pass_time(4)
    assert job.count_of(Prepare) == 1
    job.pass_time(1)
    assert job.count_of(Prepare) == 2
    job.answer(State.PREPARED)
    job.summarize()
    job.pass_time(100)
    assert job.count_of(Prepare) == 2, "all have told, and nothing is to be told"


def test_a_slowdown_comes_before_a_window_that_is_only_to_be_taken_again() -> None:
    job = Job(policy=Policy())
    job.stand(50)
    job.pass_time(1)
    job.answer(State.BUSY)
    job.notice()
    job.pass_time(5)
    job.answer(State.PREPARED)
    job.summarize()
    assert [window.trigger for window in job.windows] == ["baseline", "slowdown"]


def test_a_host_that_is_silent_before_the_window_is_asked_all_the_same_and_used_if_it_comes_back() -> None:
    job = Job(num_ranks=3)
    job.stand(50)
    job.tell(job.standing(3, 50, host="b"))
    job.tell(Silent(host="b"))
    job.notice()
    job.tell(job.standing(3, 51, host="b"))
    job.answer(State.PREPARED, range(4))
    job.summarize(range(4))
    assert sorted(job.windows[0].summaries) == [0, 1, 2, 3] and missing_note(job.windows[0]) == ""


def test_a_look_goes_on_without_a_host_that_is_lost_meanwhile_and_says_so() -> None:
    job = Job(num_ranks=3)
    job.stand(50)
    job.tell(job.standing(3, 50, host="b"))
    job.tell(Died(rank=1, pid=7))
    job.tell(Looked(look=1, host="a", views=()))
    job.tell(Silent(host="b"))
    (look,) = job.looks
    assert look.notes == ["the agent of b is not heard"]


def test_agents_name_trainings_as_they_like_and_the_job_turns_once_when_they_turn_one_after_the_other() -> None:
    job = Job(num_ranks=1, policy=Policy())
    for host, name in (("a", "x.1"), ("b", "y.7")):
        job.tell(job.standing(0 if host == "a" else 1, 30, host=host, training=name, world_size=2))
    job.pass_time(1)
    assert job.prepared.window == 1 and job.coordinator.window is not None
    assert job.coordinator.window.ranks == (0, 1)
    job.tell(job.standing(0, 5, host="a", training="x.2", world_size=2))
    job.tell(job.standing(1, 31, host="b", training="y.7", world_size=2))
    assert sorted(job.coordinator.standings) == [0]
    job.tell(job.standing(1, 5, host="b", training="y.8", world_size=2))
    job.tell(job.standing(0, 30, host="a", training="x.2", world_size=2))
    job.tell(job.standing(1, 30, host="b", training="y.8", world_size=2))
    job.pass_time(1)
    assert job.count_of(Prepare) == 2 and job.coordinator.window.ranks == (0, 1)


def test_a_rank_that_two_hosts_claim_is_the_first_ones_and_that_is_told() -> None:
    job = Job(num_ranks=2)
    job.stand(50)
    job.tell(job.standing(1, 900, host="evil"))
    job.notice()
    job.answer(State.PREPARED)
    job.summarize()
    assert job.prepared.start < 100
    assert job.windows[0].notes == (
        "ranks 1 are claimed by two hosts (rank 1 by a and evil); those of the first are used",
    )


def test_a_summary_that_is_none_or_of_another_rank_is_a_problem_of_who_sent_it() -> None:
    job = Job(num_ranks=3)
    job.stand(50)
    job.notice()
    job.answer(State.PREPARED)
    job.summarize([0])
    for rank, data in ((1, b"nonsense"), (2, write_summary(summary(0, Rank())))):
        job.tell(Summarized(window=job.prepared.window, rank=rank, summary=data))
    (window,) = job.windows
    assert list(window.summaries) == [0] and "cannot be read" in window.problems[1]
    assert window.problems[2] == "sent the summary of rank 0"


def test_an_agent_that_would_leave_is_let_go_once_nothing_is_looked_at() -> None:
    job = Job(num_ranks=2)
    job.stand(50)
    job.tell(Died(rank=1, pid=7))
    job.tell(Leaving(host="a"))
    job.pass_time(0.1)
    assert job.count_of(Released) == 0
    job.tell(Looked(look=1, host="a", views=()))
    job.pass_time(0.1)
    assert [message for message in job.sent if isinstance(message, Released)] == [Released(host="a")]


def test_a_job_that_is_told_to_end_on_any_host_is_left_in_peace() -> None:
    job = Job()
    job.stand(50)
    job.tell(Ending(host="b"))
    job.tell(Died(rank=3, pid=1))
    job.notice()
    assert not job.sent


def test_windows_are_numbered_from_where_a_coordinator_that_starts_anew_says() -> None:
    sent: list[bus.Message] = []
    coordinator = Coordinator(
        sent.append, lambda window: None, lambda look: True, lambda rank, trigger: None, first_window=65_535
    )
    job = Job(num_ranks=1)
    coordinator.handle(job.standing(0, 50), 0)
    coordinator.ask(0)
    assert isinstance(sent[0], Prepare) and sent[0].window == 65_535


def test_a_silence_before_the_baseline_window_does_not_cost_it() -> None:
    job = Job(policy=Policy(), explains=False)
    job.stand(30)
    job.pass_time(1)
    assert job.count_of(Prepare) == 1
    job.notice(Change.STALLED)  # a save that ends by itself, in the midst of the window
    while len(job.looks) < 2:
        look = job.coordinator.look
        if look is not None and look.due_ns is None:
            job.tell(Looked(look=look.number, host="a", views=()))
        job.pass_time(1)
    trigger = Trigger(Change.RECOVERED, job.now_ns, 0, 30, 30, 100, 120, 0.0, ended=Change.STALLED)
    job.tell(Noticed(rank=2, trigger=trigger))
    job.pass_time(1)
    assert job.count_of(Prepare) == 2 and job.coordinator.window is not None
    assert job.coordinator.window.trigger == "baseline"


def test_a_rank_that_has_ended_long_ago_does_not_draw_a_window_out() -> None:
    job = Job(num_ranks=3)
    job.stand(100_000)
    job.tell(job.standing(3, 10, is_alive=False))
    job.notice()
    job.answer(State.PREPARED)
    (commit,) = [message for message in job.sent if isinstance(message, Commit)]
    assert commit.expected_s < 10
    job.answer(State.DONE)
    job.summarize([0, 1])
    job.pass_time(200)
    assert missing_note(job.windows[0]) == "rank 2 left no summary in time"


def test_a_rank_that_ends_before_it_has_answered_is_not_waited_for() -> None:
    job = Job()
    job.stand(50)
    job.notice()
    job.answer(State.PREPARED, [0, 1, 2])
    assert job.count_of(Commit) == 0
    job.tell(job.standing(3, 51, is_alive=False))
    assert job.count_of(Commit) == 1


def test_a_death_during_a_look_of_which_it_was_not_part_is_looked_at_afterwards() -> None:
    job = Job(num_ranks=3, explains=False)
    job.stand(50)
    job.tell(job.standing(3, 50, host="b"))
    job.notice(Change.QUIET)
    for seconds in (1.1, 0):
        for host in ("a", "b"):
            if host == "b" and not seconds:
                job.tell(Died(rank=1, pid=7))  # its host has answered already, for the last time
            job.tell(Looked(look=1, host=host, views=()))
        job.pass_time(seconds)
    assert len(job.looks) == 1 and job.coordinator.look is not None
    assert job.coordinator.look.trigger is None and job.coordinator.look.rank == 1


def test_summaries_of_ranks_that_a_window_was_not_proposed_to_are_not_kept() -> None:
    job = Job()
    job.stand(50)
    job.notice()
    job.answer(State.PREPARED)
    for rank in (-1, 4, 10**9):
        job.tell(Summarized(window=job.prepared.window, rank=rank, summary=b"x" * 100, problem="lies"))
    window = job.coordinator.window
    assert window is not None and not window.undecoded and not window.problems and not window.histories


def test_what_an_agent_said_of_a_rank_before_the_start_was_moved_ahead_does_not_hold() -> None:
    job = Job()
    job.stand(50)
    job.notice()
    job.tell(Summarized(window=job.prepared.window, rank=3, summary=None, problem="has not asked for windows"))
    job.answer(State.UNABLE, [3])
    job.answer(State.PREPARED, [0, 1])
    job.answer(State.LATE, [2])
    assert job.count_of(Prepare) == 2
    job.answer(State.PREPARED)
    job.answer(State.DONE)
    job.summarize([0, 1, 2])
    assert not job.windows
    job.summarize([3])
    assert missing_note(job.windows[0]) == ""
