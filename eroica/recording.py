"""Windows that Kineto records by itself, on demand: does for the ranks of a host what they do themselves in process.

In process a rank reads its mailbox, answers, and captures (`probe.capture`). Here nobody in the rank is asked: this
takes the same `Prepare`, `Commit` and `Abort`, hands requests to `ondemand`, and gives the answers that the rank would
have given, so that the coordinator knows no difference but one: a rank hears of a window up to two seconds late, so the
start must be `LEAD_S` ahead. Not the end point itself, and it reads no ring: the agent tells where its ranks are.

For op-dense training, whose in-process stop would hold the GIL for seconds: Kineto's own thread writes these traces.
By explicit option only, for what `ondemand` says about the end of a process. A job that is about to end is not asked
where that is known: its command was told to end, a rank says that it has. That training is about to return from its
loop cannot be known: `probe.outside` then ends the window first, in processes that are armed and reach their end.

Kineto counts the steps of torch's optimizers, nested ones too, and none that a gradient scaler skips; the ring counts
outermost and skipped ones. Where a rank has skipped some, or its last trace held other steps than were asked for,
windows of this host go by the wall clock instead, all ranks alike, and the ring's counts tell which steps came in.

    message      state of a rank            answer
    Prepare      asks Kineto's questions    PREPARED; BUSY, LATE or UNABLE if not
    Commit       its request waits          COMMITTED once it was fetched; LATE if it was not and the start is near
                 it records                 DONE when the trace is there and the ring tells of its last step
    Abort        nothing was fetched        ABORTED
                 it records                 ABORTED; the trace is deleted when it comes: Kineto knows no way back
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from eroica.amend import Told, amend
from eroica.bus import Commit, Prepare
from eroica.captures import OwnRing, capture_path, summarize_capture
from eroica.commands import Frames, State, Unit
from eroica.errors import DataError, EroicaError
from eroica.ondemand import LONGEST_S, BySteps, ByTime, OnDemand
from eroica.trace import Samples

LEAD_S = 3.0
"""From the proposal of a window to its start: two questions of Kineto's, and a second for what comes in between."""
MOST_EVENTS = 200_000
"""In a window of one rank: nobody holds the interpreter for them, but Kineto keeps 1.5 kB of each in memory."""
TRACE_S = 60.0
"""From the expected end of a window to its trace; Kineto writes some 20 MB/s beside a training that has all cores."""
MARKS_S = 10.0
"""How long a trace that is there waits for the ring to tell of its last step."""
UNHEARD_NS = 5_000_000_000
"""A process asks each second, on a thread of Kineto's own; one that has not for so long is stopped or has no core."""
_SERVE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank is, as its ring tells."""

    pid: int
    count: int
    """Outermost steps completed, skipped ones too."""
    num_skipped: int
    per_iteration: int
    iteration_s: float
    lap: tuple[int, int]
    """Steps completed and when (CLOCK_MONOTONIC, ns), at the end of the last iteration that the ring tells of."""
    folder: Path
    """Where its ring lies."""
    is_alive: bool
    """And has not said that it has come to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a rank would have said."""

    window: int
    rank: int
    state: State
    problem: str = ""
    """In words, where `state` says too little."""
    trace: Path | None = None
    """What Kineto wrote, with DONE."""
    begin_ns: int = 0
    end_ns: int = 0
    """The window as it was expected, CLOCK_MONOTONIC."""
    by_time: bool = False
    begins: bool = False
    """The capture begins about now; `state` is COMMITTED still."""


@dataclass(slots=True)
class _Request:
    """Of one rank, for the window under way."""

    pid: int
    state: State = State.PREPARED
    trace: Path | None = None
    begun: bool = False
    seen_ns: int = 0
    """When the trace was first seen; 0 = not yet."""


@dataclass(slots=True)
class _Window:
    asked: Prepare
    requests: dict[int, _Request] = field(default_factory=dict)
    by_time: bool = False
    start_ns: int = 0
    end_ns: int = 0
    """As expected, CLOCK_MONOTONIC."""

    @property
    def end(self) -> int:
        return self.asked.start + self.asked.num_steps


class Recording:
    """See the module. Serves the end point on a thread of its own, since a loop that reads rings and makes diagnoses is
    too slow for Kineto's 50 ms. `close` ends both."""

    def __init__(self, point: OnDemand) -> None:
        self._point = point
        self._window: _Window | None = None
        self._unwanted: set[Path] = set()
        """Traces of windows that were given up."""
        self._by_time = False
        """Kineto was seen to count other steps than the ring."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="eroica on demand", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The job has ended, or nobody watches it any more. Requests that were fetched cannot be taken back."""
        self._is_over.set()
        self._thread.join()
        self._point.close()

    def _serve(self) -> None:
        while not self._is_over.is_set():
            try:
                self._point.poll(_SERVE_S)
            except (OSError, ValueError):  # closed from elsewhere
                return

    def prepare(self, asked: Prepare, places: Mapping[int, Place], now_ns: int) -> list[Answer]:
        """Who can record this window. It takes the place of one that was prepared before."""
        answers = self.abort(self._window.asked.window) if self._window is not None else []
        window = self._window = _Window(asked)
        known = self._point.known()
        for rank, place in places.items():
            state, problem = State.PREPARED, ""
            process = known.get(place.pid)
            if asked.unit is not Unit.STEPS:
                state, problem = State.UNABLE, "has no optimizer whose steps Kineto could count"
            elif not place.is_alive:
                state = State.DISCARDED
            elif place.count > asked.start:
                state = State.LATE
            elif process is None:
                state, problem = (
                    State.UNABLE,
                    "has a Kineto that does not ask for windows, so none can be had on demand",
                )
            elif now_ns - process.heard_ns > UNHEARD_NS:
                state, problem = (
                    State.UNABLE,
                    "has not asked for windows for some seconds: it is stopped or has no core",
                )
            elif not process.is_free:
                state = State.BUSY
            if state is State.PREPARED:
                window.requests[rank] = _Request(place.pid)
            answers.append(Answer(window=asked.window, rank=rank, state=state, problem=problem))
        return answers

    def commit(self, message: Commit, places: Mapping[int, Place], now_ns: int) -> list[Answer]:
        """Hand the requests out."""
        window = self._window
        if window is None or window.asked.window != message.window:
            return []
        asked = window.asked
        present = {rank: places[rank] for rank in window.requests if rank in places}
        pace_s = max((place.iteration_s / max(place.per_iteration, 1) for place in present.values()), default=0.0)
        duration_s = pace_s * asked.num_steps
        window.end_ns = now_ns + round(message.expected_s * 1e9)
        window.start_ns = window.end_ns - round(duration_s * 1e9)
        window.by_time = self._by_time or any(place.num_skipped for place in present.values())
        how: BySteps | ByTime = BySteps(start=max(asked.start, 1), num_steps=asked.num_steps)
        if window.by_time:
            to_start_ms = max(round((window.start_ns - now_ns) / 1e6), round(LEAD_S * 1e3))
            window.start_ns = now_ns + to_start_ms * 1_000_000
            window.end_ns = window.start_ns + round(duration_s * 1e9)
            # An iteration more, since no rank is at a boundary when the clock says so.
            length_s = min(duration_s + pace_s * _longest(present), LONGEST_S)
            how = ByTime(duration_s=max(length_s, 0.001), start_ms=time.time_ns() // 1_000_000 + to_start_ms)
        answers = []
        for rank, request in list(window.requests.items()):
            try:
                path = capture_path(places[rank].folder, asked.window, rank)
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                request.trace = self._point.request(request.pid, path, how, stacks=asked.frames is not Frames.NONE)
            except (EroicaError, OSError, KeyError) as error:
                del window.requests[rank]
                problem = f"could not be asked for a window ({error})"
                answers.append(Answer(window=asked.window, rank=rank, state=State.FAILED, problem=problem))
        return answers

    def abort(self, number: int) -> list[Answer]:
        """Give the window up."""
        window = self._window
        if window is None or window.asked.window != number:
            return []
        self._window = None
        answers = []
        for rank, request in window.requests.items():
            if request.trace is not None and not self._point.cancel(request.pid):
                self._unwanted.add(request.trace)
            answers.append(_ended(window, rank, request, State.ABORTED))
        return answers

    def rest(self) -> list[Answer]:
        """The job is being ended: a process that ends while it records dies of it."""
        return self.abort(self._window.asked.window) if self._window is not None else []

    @property
    def is_busy(self) -> bool:
        """A window is under way here."""
        return self._window is not None and bool(self._window.requests)

    @property
    def asked(self) -> tuple[int, ...]:
        """Ranks that record, or are to."""
        return tuple(self._window.requests) if self._window is not None else ()

    @property
    def is_by_time(self) -> bool:
        """The window under way goes by the clock."""
        return self._window is not None and self._window.by_time

    def poll(self, places: Mapping[int, Place], now_ns: int) -> list[Answer]:
        """What has happened since the last time; to be called some ten times a second."""
        for path in list(self._unwanted):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
                self._unwanted.discard(path)
        window = self._window
        if window is None:
            return []
        answers: list[Answer] = []
        waiting = self._point.waiting()
        for rank, request in list(window.requests.items()):
            place = places.get(rank)
            answers += self._turn(window, rank, request, place, request.pid in waiting, now_ns)
        return answers

    def learn(self, asked: Prepare, steps: range | None, *, by_time: bool) -> str:
        """What is wrong with the steps that a trace turned out to hold, counted as the ring does; "" if nothing.

        If Kineto counted otherwise, windows go by time from then on."""
        wanted = range(asked.start, asked.start + asked.num_steps)
        if by_time:
            return "" if steps else "recorded no whole iteration"
        if steps and steps[0] in wanted and steps[-1] in wanted and len(steps) * 2 >= len(wanted):
            return ""
        self._by_time = True
        held = f"steps {steps[0]}-{steps[-1]}" if steps else "no whole iteration"
        return (
            f"recorded {held} where steps {wanted[0]}-{wanted[-1]} were asked for: Kineto counts its steps otherwise "
            "(steps within steps, a profiler of the job's own); later windows go by the clock"
        )

    def _turn(
        self, window: _Window, rank: int, request: _Request, place: Place | None, is_waiting: bool, now_ns: int
    ) -> list[Answer]:
        asked = window.asked
        if place is None or place.pid != request.pid or not place.is_alive:
            is_there = request.trace is not None and request.trace.exists()
            self._point.cancel(request.pid)
            del window.requests[rank]
            return [_ended(window, rank, request, State.DONE if is_there else State.DISCARDED)]
        if request.trace is None:
            return []
        if is_waiting:
            is_near = now_ns >= window.start_ns if window.by_time else place.count >= asked.start - 1
            if not is_near or not self._point.cancel(request.pid):
                return []
            del window.requests[rank]
            return [_ended(window, rank, request, State.LATE)]
        answers = []
        if request.state is State.PREPARED:
            request.state = State.COMMITTED
            answers.append(Answer(window=asked.window, rank=rank, state=State.COMMITTED))
        if not request.begun and self._is_about_to_begin(window, place, now_ns):
            request.begun = True
            answers.append(Answer(window=asked.window, rank=rank, state=State.COMMITTED, begins=True, begin_ns=now_ns))
        if not request.seen_ns and request.trace.exists():
            request.seen_ns = now_ns
        if request.seen_ns:
            last, at_ns = place.lap
            is_told = at_ns >= window.end_ns if window.by_time else last >= window.end
            if is_told or now_ns - request.seen_ns > MARKS_S * 1e9:
                del window.requests[rank]
                answers.append(_ended(window, rank, request, State.DONE))
        elif now_ns > window.end_ns + 4 * (window.end_ns - window.start_ns) + TRACE_S * 1e9:
            del window.requests[rank]
            self._unwanted.add(request.trace)
            answers.append(_ended(window, rank, request, State.FAILED, "left no trace in time"))
        return answers

    def _is_about_to_begin(self, window: _Window, place: Place, now_ns: int) -> bool:
        if window.by_time:
            return now_ns >= window.start_ns - 200_000_000
        soon = 0.2 / max(place.iteration_s, 1e-6) * place.per_iteration
        return place.count + soon >= window.asked.start - 1


def _ended(window: _Window, rank: int, request: _Request, state: State, problem: str = "") -> Answer:
    return Answer(
        window=window.asked.window,
        rank=rank,
        state=state,
        problem=problem,
        trace=request.trace if state is State.DONE else None,
        begin_ns=window.start_ns,
        end_ns=window.end_ns,
        by_time=window.by_time,
    )


def _longest(places: Mapping[int, Place]) -> int:
    """Steps of an iteration, on the rank that makes most."""
    return max((place.per_iteration for place in places.values()), default=1)


def take_in(trace: str, target: str, told: Told, host: str, samples: Samples | None, own: OwnRing) -> bytes | str:
    """Give a trace of Kineto's what the ring knows and its place among the captures, and reduce it; for a worker
    process. The summary, encoded, or why there is none."""
    try:
        if not os.path.exists(target):  # else the process that began this was killed
            amend(Path(trace), told)
            os.replace(trace, target)
    except (DataError, OSError) as error:
        return str(error)
    return summarize_capture(target, told.rank, told.world_size, host, samples, own)
