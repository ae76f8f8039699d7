"""Decides when all ranks of a job are captured together or looked at closely, and makes the diagnosis of it.

A state machine: messages and the time go in, messages and diagnoses come out; it has no clock, thread or socket of its
own, so a test drives hours of it in milliseconds. One per job. It sees a job through what agents tell (`bus`) and
never touches a process, on one host or many. Used by `investigation`.

A window, from a slowdown that rank 2 notices at step 117, one step per iteration, 0.1 s each:

    Noticed(rank 2)                all ranks stand at 117 or 118
    Prepare(start 126, 20 steps)   8 ahead: what the commands need to arrive, twice
    Answered PREPARED x 4          the last one at 121
    Commit                         ranks capture from 126 to 146, each at its own boundary
    Answered DONE x 4, Summarized x 4
    diagnosis                      stack, localize, diagnose

A rank that answers LATE moves the start further ahead, for all; one that is busy or unable is left out and named, and
so are the ranks of a host whose agent is not heard.

Each agent names the training that it watches as it likes, since none knows the others'. When one turns to another
training, the job does, and the agents that still tell of the former are left aside until they follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from eroica import codec
from eroica.bus import (
    Abort,
    Answered,
    Closed,
    Commit,
    CountersRead,
    Died,
    Ending,
    Joined,
    Leaving,
    LookCloser,
    Looked,
    Message,
    Noticed,
    Prepare,
    Released,
    Resume,
    Silent,
    Standing,
    Summarized,
)
from eroica.commands import MOST_START, MOST_STEPS, Frames, State
from eroica.degradation import Change, Trigger
from eroica.errors import DataError
from eroica.job import format_ranks
from eroica.standing import RankView
from eroica.windows import Look, Policy, Window, why_missing


@dataclass(frozen=True, slots=True)
class _Again:
    """A silence without an explanation so far."""

    rank: int
    trigger: Trigger
    due_ns: int
    num: int


SIZED_COSTS = 3
"""To stop a window with sizes takes so many times as long per event (12 us instead of 4)."""
ENDED = (State.DONE, State.DISCARDED, State.FAILED, State.ABORTED, State.UNABLE, State.BUSY, State.LATE)
MOST_BASELINES = 3
"""Windows in search of the healthy level, at most: a job that becomes faster again and again has none."""
GONE = "has ended"
"""Why a rank that no longer lives gives no capture."""


class Coordinator:
    """See the module. `publish` sends a message; `on_window` and `on_look` get what is complete, and say whether
    that was told of or explained; `on_recovered` gets the rank and what it recovered from."""

    def __init__(
        self,
        publish: Callable[[Message], None],
        on_window: Callable[[Window], object],
        on_look: Callable[[Look], bool],
        on_recovered: Callable[[int, Trigger], None],
        policy: Policy | None = None,
        first_window: int = 1,
    ) -> None:
        """`first_window`: its number. Whoever may be started anew beside a job that goes on must not begin with the
        numbers of before: ranks and agents know windows by them."""
        self.policy = policy or Policy()
        self.standings: dict[int, Standing] = {}
        self._ranks_of: dict[str, set[int]] = {}
        """By host; also those that stand on another one by now."""
        self.window: Window | None = None
        self.look: Look | None = None
        self.has_baseline = not self.policy.baseline
        self.is_resting = False
        """The job is being ended: nothing new is begun, and nobody's death is a crash."""
        self._publish = publish
        self._on_window = on_window
        self._on_look = on_look
        self._on_recovered = on_recovered
        self._wanted: Window | None = None
        self._rest_until_ns = 0
        self._number = first_window - 1
        self._turn = 0
        self._turns: dict[str, tuple[str, int]] = {}
        """Host -> which training its agent tells of, by its name there, and the how manieth that is."""
        self._leaving: set[str] = set()
        """Hosts whose agents would leave."""
        self._silent: dict[str, int] = {}
        """Hosts whose agents are not heard -> since when."""
        self._claims: dict[int, str] = {}
        """Ranks that a second host claims while the first still has them -> that second host."""
        self._generation = 0
        self._training = ""
        self._dead: set[int] = set()
        self._is_crash_told = False
        self._again: _Again | None = None
        self._halted: dict[int, int] = {}
        """Counts of the ranks when it was told why they stand still, until one of them goes on; {}: they do not."""
        self._baseline_pace_s = 0.0
        """Of the iterations before the last baseline window; 0 before the first."""
        self._baselines_left = MOST_BASELINES
        self._events_per_iteration = 0.0
        """On the rank that has most, as windows of this start of the job have shown; 0 before the first."""

    def handle(self, message: Message, now_ns: int) -> None:
        """Take a message of an agent."""
        if isinstance(message, Standing):
            self._stand(message, now_ns)
        elif isinstance(message, Noticed):
            self._notice(message.rank, message.trigger, now_ns)
        elif isinstance(message, Died):
            # Those that die after the first do so because of it, as a rule: the launcher ends them.
            if message.rank not in self._dead and not self._is_crash_told:
                if self.look is not None and self.look.trigger is not None:
                    self.look.died.append(message.rank)
                else:
                    self._look_at(message.rank, None, now_ns)
            self._dead.add(message.rank)
        elif isinstance(message, Answered):
            self._answered(message, now_ns)
        elif isinstance(message, Summarized):
            self._summarized(message, now_ns)
        elif isinstance(message, CountersRead):
            if self.window is not None and self.window.number == message.window:
                self.window.counters[message.host] = message.counters
        elif isinstance(message, Looked):
            self._looked(message, now_ns)
        elif isinstance(message, Silent):
            self._miss(message.host, now_ns)
        elif isinstance(message, Joined):
            self._join(message.host, now_ns)
        elif isinstance(message, Ending):
            self.is_resting = True
        elif isinstance(message, Leaving):
            self._leaving.add(message.host)

    def ask(self, now_ns: int, num_iterations: int | None = None, asked: str = "") -> str:
        """A person wants a window now; `asked` names the request. Returns why that cannot be, "" if it can."""
        why = self._why_not()
        if why:
            return why
        self._wanted = self._new_window("manual", None, None, now_ns)
        self._wanted.asked = asked
        if num_iterations is not None:
            self._wanted.num_iterations = min(max(num_iterations, 1), self.policy.most)
        self._rest_until_ns = 0
        self._begin(now_ns)
        return ""

    def _why_not(self) -> str:
        """Why no window can be taken for a person, in a few words."""
        busy = self.window or self._wanted
        heard = [s for s in self.standings.values() if s.is_alive and s.host not in self._silent]
        if busy is not None:
            return f"another window ({busy.trigger}) is under way"
        if self.is_resting:
            return "the job is being ended"
        if self.look is not None or self._again is not None:
            return "ranks stand still or have died, and are being looked at"
        if self._halted:
            return "ranks stand still, and it was told why"
        if not heard:
            return "no rank of it is alive and heard"
        if not any(s.per_iteration > 0 and s.iteration_s and s.unit is not None for s in heard):
            return "no rank of it has shown yet how long an iteration is"
        return ""

    def stage(self, asked: str) -> str:
        """How far the window of that request is: waiting, preparing or capturing; "" if there is none."""
        if self.window is not None and self.window.asked == asked:
            return "capturing" if self.window.committed else "preparing"
        return "waiting" if self._wanted is not None and self._wanted.asked == asked else ""

    def cancel(self, asked: str, now_ns: int) -> bool:
        """Leave the window of that request; False if there is none."""
        stage = self.stage(asked)
        if stage == "waiting":
            self._wanted = None
        elif stage:
            self._abort()
            self._begin(now_ns)
        return bool(stage)

    def ask_for_sizes(self, seen: Window, now_ns: int) -> bool:
        """What was seen in a window depends on what operators were given: the same once more, with their sizes, at
        once. False if that cannot be."""
        if self.is_resting or self._wanted is not None or seen.frames is not Frames.SAMPLED:
            return False
        self._wanted = replace(self._same_again(seen, now_ns), frames=Frames.SIZED)
        self._rest_until_ns = now_ns
        return True

    def ask_once_more(self, seen: Window, now_ns: int, wait_s: float) -> bool:
        """What was seen in a window that nobody has asked for may pass by itself, or lacks captures that may come:
        another one after a while. False if that was such a one, or if it cannot be."""
        is_asked = seen.cause is None and seen.trigger != "baseline"
        if self.is_resting or self._wanted is not None or seen.is_second_look or is_asked:
            return False
        self._wanted = self._new_window(seen.trigger, seen.cause, seen.rank, now_ns)
        self._wanted.is_second_look = True
        self._rest_until_ns = now_ns + round(wait_s * 1e9)
        return True

    @property
    def is_sizing(self) -> bool:
        """A window with the sizes of operators is under way, or to be."""
        return any(window is not None and window.frames is Frames.SIZED for window in (self.window, self._wanted))

    @property
    def is_halted(self) -> bool:
        """It was told why ranks stand still, and none of them has gone on since."""
        return bool(self._halted)

    @property
    def start(self) -> tuple[int, int]:
        """The how manieth training it is, and the how manieth start of that."""
        return self._turn, self._generation

    @property
    def silent(self) -> frozenset[str]:
        """Hosts whose agents are not heard."""
        return frozenset(self._silent)

    def tick(self, now_ns: int) -> None:
        """Let time pass: deadlines, the baseline window, the second look."""
        window, look = self.window, self.look
        if window is not None and now_ns >= window.deadline_ns:
            if window.committed:
                self._finish(now_ns)
            else:
                self._commit_or_leave(now_ns, late=True)
        elif window is not None and window.committed:
            lost = [host for host, at_ns in self._silent.items() if now_ns - at_ns >= self.policy.return_s * 1e9]
            for host in lost:
                self._leave_out(window, host)
            if lost:
                self._finish_if_complete(now_ns)
        if look is not None:
            if look.due_ns is not None and now_ns >= look.due_ns:
                look.due_ns = None
                look.deadline_ns = now_ns + round(self.policy.answer_s * 1e9)
                self._publish(LookCloser(look=look.number))
            elif look.due_ns is None and now_ns >= look.deadline_ns:
                self._looked_enough(now_ns)
        again = self._again
        if again is not None and now_ns >= again.due_ns and self.look is None:
            self._look_at(again.rank, again.trigger, now_ns)
        if self._was_baseline_early():
            self.has_baseline = False
        if not self.has_baseline and self._wanted is None and self.window is None and self._is_warm():
            self.has_baseline = True
            self._wanted = self._new_window("baseline", None, None, now_ns)
        self._begin(now_ns)
        if self._leaving and self.look is None:
            for host in sorted(self._leaving):
                self._publish(Released(host=host))
            self._leaving.clear()

    def _was_baseline_early(self) -> bool:
        """The job has become so much faster since that the first window was of its warm-up: one more is due."""
        if not self._baseline_pace_s or self._baselines_left <= 0 or not self._is_warm():
            return False
        pace_s = max(s.iteration_s or 0.0 for s in self.standings.values())
        return 0 < pace_s * self.policy.warmer < self._baseline_pace_s

    def _is_warm(self) -> bool:
        alive = [s for s in self.standings.values() if s.is_alive]
        expected = max((s.world_size for s in alive), default=0)
        return len(alive) >= max(expected, 1) and all(
            s.per_iteration > 0 and s.num_iterations >= self.policy.baseline_after for s in alive
        )

    def _stand(self, standing: Standing, now_ns: int) -> None:
        if standing.host in self._silent:
            self._hear(standing.host)
        turn = self._turn_of(standing)
        if turn < self._turn:
            return
        if turn > self._turn:
            self._turn = turn
            self._turn_to(standing, now_ns)
        elif standing.generation > self._generation:
            # An elastic restart: counts start at 0, and what was under way is gone with its processes.
            self._generation = standing.generation
            self._forget()
            self._leave(now_ns)
        if standing.generation == self._generation and not self._is_disputed(standing):
            self.standings[standing.rank] = standing
            self._ranks_of.setdefault(standing.host, set()).add(standing.rank)
            if standing.is_alive:
                self._dead.discard(standing.rank)  # another host may tell late of a death before this start
            if self._halted and self._halted.get(standing.rank) != standing.count:
                self._halted = {}
            if not standing.is_alive and self.window is not None:
                if self.window.committed:
                    self._finish_if_complete(now_ns)
                else:
                    self._commit_if_answered(now_ns)

    def _turn_of(self, standing: Standing) -> int:
        """The how manieth training its agent tells of; one that joins joins in what the others are at."""
        known = self._turns.get(standing.host)
        if known is not None and known[0] == standing.training:
            return known[1]
        if known is not None:
            turn = known[1] + 1
        else:
            turn = self._turn if self._turns or standing.training == self._training else self._turn + 1
        self._turns[standing.host] = standing.training, turn
        return turn

    def _is_disputed(self, standing: Standing) -> bool:
        """Another host has this rank, and it lives there. One of the two agents errs or lies: the first one counts."""
        other = self.standings.get(standing.rank)
        if other is None or other.host == standing.host or not other.is_alive or other.host in self._silent:
            self._claims.pop(standing.rank, None)
            return False
        self._claims[standing.rank] = standing.host
        return True

    def _miss(self, host: str, now_ns: int) -> None:
        """Its agent is not heard any more: nobody waits for its ranks."""
        self._silent[host] = now_ns
        self._leaving.discard(host)
        window, look = self.window, self.look
        if window is not None and not window.committed:
            self._leave_out(window, host)
            self._commit_if_answered(now_ns)
        if look is not None and look.due_ns is None and self._hosts() <= look.hosts:
            self._looked_enough(now_ns)

    def _leave_out(self, window: Window, host: str) -> None:
        """Nobody waits for its ranks any more."""
        for rank in sorted(self._ranks_of.get(host, ())):
            has_come = rank in window.summaries or rank in window.undecoded
            if window.has(rank) and self._is_missed(rank) and not has_come:
                window.problems.setdefault(rank, self._missed(rank))

    def _join(self, host: str, now_ns: int) -> None:
        """A new agent, which knows nothing of a window that is open."""
        window = self.window
        if window is not None:
            expected_s = max((window.deadline_ns - now_ns) / 1e9 - self.policy.finish_s, window.expected_s)
            self._publish(
                Resume(
                    host=host,
                    window=window.number,
                    unit=window.unit,
                    start=window.start,
                    num_steps=window.num_steps,
                    frames=window.frames,
                    expected_s=expected_s if window.committed else 0.0,
                )
            )

    def _hear(self, host: str) -> None:
        """Its agent is back; what its ranks have to give is waited for again."""
        self._silent.pop(host, None)
        if self.window is not None:
            for rank, problem in list(self.window.problems.items()):
                if rank in self.standings and self.standings[rank].host == host and problem == self._missed(rank):
                    del self.window.problems[rank]

    def _is_missed(self, rank: int) -> bool:
        return rank in self.standings and self.standings[rank].host in self._silent

    def _missed(self, rank: int) -> str:
        return f"is on {self.standings[rank].host}, whose agent is not heard"

    def _hosts(self) -> set[str]:
        """Whose agents are heard."""
        return {standing.host for standing in self.standings.values()} - self._silent.keys()

    def _turn_to(self, standing: Standing, now_ns: int) -> None:
        """One training has ended, and the command runs another."""
        window = self.window
        if window is not None and window.committed and (window.summaries or window.undecoded):
            self._finish(now_ns)
        self._forget()
        self._leave(now_ns)
        self.has_baseline = not self.policy.baseline
        self._generation = standing.generation
        self._training = standing.training
        self.is_resting = False

    def _forget(self) -> None:
        self.standings.clear()
        self._ranks_of.clear()
        self._claims.clear()
        self._dead.clear()
        self._is_crash_told = False
        self._events_per_iteration = 0.0
        self._wanted = self._again = None
        self._halted = {}
        self._baseline_pace_s, self._baselines_left = 0.0, MOST_BASELINES

    def _notice(self, rank: int, trigger: Trigger, now_ns: int) -> None:
        if trigger.generation != self._generation and self.standings:
            return
        if trigger.change is Change.RECOVERED:
            if trigger.ended in (Change.STALLED, Change.QUIET):
                self._again = None
                self._halted = {}
            self._on_recovered(rank, trigger)
        elif trigger.change in (Change.STALLED, Change.QUIET):
            self._look_at(rank, trigger, now_ns)
        elif (self._wanted is None or self._wanted.trigger == "baseline") and (
            self.window is None or self.window.trigger in ("baseline", "manual")
        ):
            # Ranks of a job slow down together; the first one to say so speaks for all.
            kind = "recurring" if trigger.change is Change.RECURRING else "slowdown"
            if self._wanted is not None and self._wanted.is_second_look:
                self._rest_until_ns = now_ns
            self._wanted = self._new_window(kind, trigger, rank, now_ns)
            self._begin(now_ns)

    def _new_window(self, kind: str, cause: Trigger | None, rank: int | None, now_ns: int) -> Window:
        return Window(self._new_number(), kind, cause, rank, now_ns, self._training, self.policy.frames)

    def _begin(self, now_ns: int) -> None:
        """Propose the window that is wanted, if it can be now."""
        window = self._wanted
        if window is None or self.window is not None or self.look is not None or now_ns < self._rest_until_ns:
            return
        if self.is_resting or self._again is not None or self._halted:
            return
        alive = {rank: s for rank, s in self.standings.items() if s.is_alive and s.unit is not None}
        learnt = [s for s in alive.values() if s.per_iteration > 0 and s.iteration_s]
        if not learnt:
            return
        self._wanted = None
        self.window = window
        if window.trigger == "baseline":
            self._baseline_pace_s = max(s.iteration_s or 0.0 for s in learnt)
            self._baselines_left -= 1
        window.ranks = tuple(sorted(alive))
        window.problems |= {rank: self._missed(rank) for rank in window.ranks if self._is_missed(rank)}
        self._propose(window, learnt, now_ns)
        if self._claims:
            rank, host = min(self._claims.items())
            told = (
                f"ranks {format_ranks(self._claims)} are claimed by two hosts (rank {rank} by "
                f"{self.standings[rank].host} and {host}); those of the first are used",
            )
            window.notes = tuple(dict.fromkeys(window.notes + told))

    def _propose(self, window: Window, learnt: list[Standing], now_ns: int) -> None:
        policy = self.policy
        first = max(learnt, key=lambda s: s.count)
        assert first.unit is not None
        per, pace_s = first.per_iteration, max(s.iteration_s or 0.0 for s in learnt)
        every = window.cause.every if window.cause is not None else None
        most = self._bearable(pace_s)
        if window.frames is Frames.SIZED:
            most = max(most // SIZED_COSTS, min(policy.fewest, most))
        wanted = window.num_iterations or min(max(math.ceil(policy.window_s / pace_s), policy.fewest), policy.most)
        if every:
            wanted = max(2 * every, policy.fewest) if 2 * every <= policy.most else policy.fewest
            window.num_iterations = wanted if wanted <= most else min(policy.fewest, most)
        elif not window.num_iterations:
            window.num_iterations = min(wanted, most)
        lead = math.ceil(policy.lead_s * window.num_tries / pace_s) + 2 * window.num_tries
        start = first.aligned + (math.ceil((first.count - first.aligned) / per) + lead) * per
        if every and window.num_iterations < 2 * every:
            # Meet the next slow one: two periods if they are short, else the surroundings of one.
            assert window.cause is not None
            before = max(window.num_iterations // 2, 1)
            shown = window.cause.step
            ahead = math.ceil(max(start + before * per - shown, 0) / (every * per))
            start = shown + ahead * every * per - before * per
            window.num_iterations = 2 * before
        if self._events_per_iteration and most < wanted and window.num_iterations < wanted:
            window.notes = (
                f"the window has {window.num_iterations} iterations instead of {wanted}: one has "
                f"{self._events_per_iteration:,.0f} events, and {policy.most_events:,} on a rank are to be enough",
            )
        window.unit, window.start = first.unit, start
        # Whole iterations: where an optimizer steps for each parameter, one alone has hundreds of steps.
        window.num_iterations = min(window.num_iterations, max(MOST_STEPS // per, 1))
        window.num_steps = min(window.num_iterations * per, MOST_STEPS)
        window.expected_s = pace_s * window.num_steps / per
        window.answers.clear()
        if start > MOST_START:
            self.window = None
            return
        to_start_s = (start - first.count) / per * pace_s
        window.deadline_ns = now_ns + round((to_start_s + policy.answer_s) * 1e9)
        self._publish(
            Prepare(
                window=window.number,
                unit=window.unit,
                start=start,
                num_steps=window.num_steps,
                frames=window.frames,
            )
        )

    def _bearable(self, pace_s: float) -> int:
        """Most iterations in a window."""
        policy = self.policy
        if self._events_per_iteration:
            return min(max(int(policy.most_events / self._events_per_iteration), policy.least), policy.most)
        if pace_s * policy.fewest > policy.window_s:
            # Nothing is known of long iterations yet, and they may be long because they have very many operators.
            return min(max(math.ceil(policy.window_s / pace_s), policy.least), policy.fewest)
        return policy.most

    def _answered(self, message: Answered, now_ns: int) -> None:
        window = self.window
        if window is None or message.window != window.number or not window.has(message.rank):
            return
        window.answers[message.rank] = message.state
        if message.why:
            window.reasons[message.rank] = message.why
        if window.committed:
            if message.state in ENDED and message.state is not State.DONE:
                window.problems.setdefault(message.rank, why_missing(window, message.rank))
            self._finish_if_complete(now_ns)
        else:
            self._commit_if_answered(now_ns)

    def _commit_if_answered(self, now_ns: int) -> None:
        window = self.window
        assert window is not None
        answers = window.answers
        if not window.is_waited_for(
            lambda rank: rank not in answers and self._lives(rank) and not self._is_missed(rank)
        ):
            self._commit_or_leave(now_ns, late=False)

    def _lives(self, rank: int) -> bool:
        return rank not in self._dead and rank in self.standings and self.standings[rank].is_alive

    def _commit_or_leave(self, now_ns: int, *, late: bool) -> None:
        window = self.window
        assert window is not None
        prepared = {rank for rank, state in window.answers.items() if state is State.PREPARED}
        if State.LATE in window.answers.values() and window.num_tries < self.policy.tries:
            self._publish(Abort(window=window.number))
            again = replace(
                window,
                number=self._new_number(),
                num_tries=window.num_tries + 1,
                answers={},
                reasons={},
                problems={},  # what hindered a rank then may not now
            )
            self.window = None
            self._wanted = self._wanted or again
            self._begin(now_ns)
            return
        for rank in window.ranks:
            if rank not in window.answers:
                window.problems.setdefault(rank, "did not answer")
            elif rank not in prepared and rank not in window.problems:  # an agent may have said more
                window.problems[rank] = why_missing(window, rank)
        if not prepared:
            self._publish(Abort(window=window.number))
            self._close(now_ns)
            return
        window.committed = True
        # Of those that will come there: one that has ended may be a million steps behind for good.
        coming = [self.standings[rank] for rank in prepared if self._lives(rank)]
        to_start_s = ((window.start - s.count) / max(s.per_iteration, 1) * (s.iteration_s or 0.0) for s in coming)
        ahead_s = max([0.0, *to_start_s])
        window.deadline_ns = now_ns + round((ahead_s + 5 * window.expected_s + self.policy.finish_s) * 1e9)
        self._publish(Commit(window=window.number, expected_s=ahead_s + window.expected_s))

    def _new_number(self) -> int:
        self._number = self._number % 65535 + 1
        return self._number

    def is_of_window(self, message: Summarized) -> bool:
        """It is of the window under way, and of a rank that this was proposed to: agents may tell anything."""
        return self.window is not None and message.window == self.window.number and self.window.has(message.rank)

    def _summarized(self, message: Summarized, now_ns: int) -> None:
        window = self.window
        if window is None or not self.is_of_window(message):
            return
        if message.summary is not None:
            window.undecoded[message.rank] = message.summary
            window.problems.pop(message.rank, None)  # it was late, or not heard for a while
            if len(window.undecoded) >= codec.MOST_AT_ONCE:
                self._decode(window)
        elif message.problem:
            window.problems[message.rank] = message.problem
        if message.history is not None:
            window.histories[message.rank] = message.history
        self._finish_if_complete(now_ns)

    def _decode(self, window: Window) -> None:
        """See what has come; whoever has sent something else than its own summary is named."""
        came, window.undecoded = window.undecoded, {}
        for rank, summary in zip(came, codec.read_summaries(list(came.values())), strict=True):
            if isinstance(summary, DataError):
                window.problems[rank] = f"sent a summary that cannot be read ({summary})"
            elif summary.rank != rank:
                window.problems[rank] = f"sent the summary of rank {summary.rank}"
            else:
                window.summaries[rank] = summary
                seen = summary.coverage.num_events / max(summary.num_iterations, 1)
                self._events_per_iteration = max(self._events_per_iteration, seen)

    def _finish_if_complete(self, now_ns: int) -> None:
        window = self.window
        assert window is not None
        if window.committed and not window.is_waited_for(
            lambda rank: (
                rank not in window.summaries
                and rank not in window.undecoded
                and rank not in window.problems
                # What a rank wrote before it ended is still to be read.
                and (self._lives(rank) or window.answers.get(rank) is State.DONE)
            )
        ):
            self._finish(now_ns)

    def _finish(self, now_ns: int) -> None:
        window = self.window
        assert window is not None
        self._decode(window)
        for rank in window.ranks:
            if rank not in window.summaries:
                why = GONE if not self._lives(rank) else "left no summary in time"
                window.problems.setdefault(rank, why)
        self._close(now_ns)

    def _close(self, now_ns: int) -> None:
        window, self.window = self.window, None
        assert window is not None
        if self._has_missed(window):
            # Another phase of the job lay in the window: a longer one meets the phase that was slow.
            longer = min(2 * window.num_iterations, self.policy.most)
            self._rest_until_ns = now_ns
            if self._wanted is None:
                again = self._same_again(window, now_ns)
                self._wanted = replace(again, num_iterations=longer, num_misses=window.num_misses + 1)
            self._begin(now_ns)
            return
        # A window that no rank has captured has cost none of them anything: nobody need rest from it.
        is_costly = window.trigger != "baseline" and bool(window.summaries)
        self._rest_until_ns = now_ns + round(self.policy.rest_s * 1e9) if is_costly else now_ns
        is_told = self._on_window(window)
        if not is_told and self._may_pass(window) and self._wanted is None:
            wait_s = self.policy.again_s * 2**window.num_failures
            self._rest_until_ns = now_ns + round(wait_s * 1e9)
            self._wanted = replace(self._same_again(window, now_ns), num_failures=window.num_failures + 1)
        self._begin(now_ns)

    def _same_again(self, window: Window, now_ns: int) -> Window:
        """Another window for the same reason, which tells as much of operators."""
        return replace(
            self._new_window(window.trigger, window.cause, window.rank, now_ns),
            frames=window.frames,
            asked=window.asked,
            is_second_look=window.is_second_look,
        )

    def _may_pass(self, window: Window) -> bool:
        """Nothing was told, for want of captures and for reasons that may be over in a moment: no rank had any, or some
        had none of a slowdown, which may be theirs. Nobody waits for this window."""
        answers = set(window.answers.values())
        # Where nobody has answered, agents were held up, or ranks between two steps, for longer than is waited.
        may_answer = bool(answers) or any(self._lives(rank) and not self._is_missed(rank) for rank in window.ranks)
        is_empty = may_answer and answers <= {State.BUSY, State.FAILED} and not window.summaries
        is_part = window.cause is not None and any(
            self._lives(rank) and window.answers.get(rank) is not State.UNABLE for rank in window.problems
        )
        return (is_empty or is_part) and window.trigger != "manual" and window.num_failures < self.policy.tries - 1

    def _has_missed(self, window: Window) -> bool:
        """None of the window's iterations is of the kind that was slow, and it is worth another try."""
        cause = window.cause
        if cause is None or cause.change is not Change.SLOW or window.num_misses >= self.policy.tries:
            return False
        steps = range(window.start, window.start + window.num_steps)
        laps = [lap for history in window.histories.values() for lap in history.laps if lap.step in steps]
        return bool(laps) and not any(cause.is_like(lap.num_batches, lap.num_collectives) for lap in laps)

    def _abort(self) -> None:
        """Have the window under way left, and what some ranks may have written of it deleted."""
        window, self.window = self.window, None
        assert window is not None
        if window.committed:
            self._publish(Closed(window=window.number))
        self._publish(Abort(window=window.number))

    def _leave(self, now_ns: int) -> None:
        """Give up the window under way."""
        if self.window is not None:
            if self.window.trigger == "baseline":
                self.has_baseline = False
            self._abort()
            self._rest_until_ns = now_ns
        self.look = None

    def _look_at(self, rank: int, trigger: Trigger | None, now_ns: int) -> None:
        if self.look is not None or self.is_resting:
            return
        if trigger is None or trigger.change is Change.STALLED:
            # Ranks that stand still reach no boundary: a window would wait for its deadline.
            if self._wanted is not None and self._wanted.trigger == "baseline":
                self.has_baseline = False
            self._wanted = None
            self._leave(now_ns)
        self.look = Look(self._new_number(), trigger, rank)
        self.look.deadline_ns = now_ns + round(self.policy.answer_s * 1e9)
        self._publish(LookCloser(look=self.look.number))

    def _looked(self, message: Looked, now_ns: int) -> None:
        look = self.look
        if look is None or message.look != look.number:
            return
        if not look.hosts:
            look.notes.clear()
        look.hosts.add(message.host)
        look.views |= {view.rank: view for view in message.views}
        look.limit_s = max(look.limit_s, message.limit_s)
        look.notes += message.notes
        if self._hosts() <= look.hosts:
            self._looked_enough(now_ns)

    def _looked_enough(self, now_ns: int) -> None:
        """One round is complete, or late."""
        look = self.look
        assert look is not None
        look.num_looks += 1
        look.hosts.clear()
        # A dead process tells at once, and its peers are soon killed by the launcher. A silence must last, and ranks
        # that wait for the first silent one pass their own limit a moment after it.
        if look.num_looks < 2 and look.trigger is not None:
            look.due_ns = now_ns + round(self.policy.look_again_s * 1e9)
            return
        self.look = None
        num = self._again.num if self._again is not None else 0
        self._again = None
        look.notes += [f"the agent of {host} is not heard" for host in sorted(self._silent)]
        is_explained = self._on_look(look)
        if look.trigger is None:
            self._is_crash_told = is_explained
        elif is_explained:
            self._leave(now_ns)  # nobody comes to where a window begins or ends
            self._halted = {rank: standing.count for rank, standing in self.standings.items()}
        else:
            # Silent, and nothing to be said about it yet (a save within its limit): once more, later and later.
            wait_s = self.policy.look_later_s * 2 ** min(num, 5)
            self._again = _Again(look.rank, look.trigger, now_ns + round(wait_s * 1e9), num + 1)
        if look.died and not any(_is_seen_gone(look.views.get(rank)) for rank in look.died):
            self._look_at(look.died[0], None, now_ns)  # its host had been looked at by then
        self._begin(now_ns)


def _is_seen_gone(view: RankView | None) -> bool:
    """Whoever explained this look knew of the rank's death."""
    return view is not None and (view.state in ("died", "ended") or bool(view.exception))
