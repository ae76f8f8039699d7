"""Which function owns each instant of a rank's window: the critical path of EROICA (arXiv 2506.08528), made definite.

At each instant one function owns the time, or nobody: device compute before memory operations before collectives
before the host; among siblings on different streams the one that started first. Host time belongs to the innermost
event of the driving thread (the autograd thread while that one works). Waiting never owns what another event explains:
a host call that waits for the device owns only the device's idleness, a wait for a collective owns nothing while the
collective's own event is there. Not here: what a function is called (`names`), how spans become patterns (`pattern`),
what a wait costs (`collectives`). Vectorised: intervals are subtracted by measuring unions, never by walking events.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from eroica.intervals import Cover, Int64s, Nest, first_come_parts, inherit, nest
from eroica.names import ENGINE_WAIT, TUNABLE, Owns, Phase, read_host_name
from eroica.trace import Category, Trace

Int32s = npt.NDArray[np.int32]
UInt8s = npt.NDArray[np.uint8]


class Activity(IntEnum):
    """What kind of thing owns a span; the classes that causes are told apart by."""

    COMPUTE = 0
    """Kernel on the device."""
    MEMORY = 1
    """Copy or set on the device."""
    COLLECTIVE = 2
    """Communication that no work hides, its waiting included."""
    INPUT = 3
    CHECKPOINT = 4
    COMPILE = 5
    """Makes code for a size that is new, or searches for the fastest kernel."""
    GC = 6
    ALLOCATOR = 7
    SYNC = 8
    """Device left idle by a host call that waited for it."""
    OPERATOR = 9
    """Operator on the host: the compute of a CPU job, dispatch on a GPU job."""
    PYTHON = 10
    LAUNCH = 11
    """Runtime call."""
    WAIT = 12
    """Host waits for something that no event of this trace shows."""


NUM_ACTIVITIES = len(Activity)
OWN_WORK = frozenset(set(Activity) - {Activity.COLLECTIVE, Activity.WAIT})
"""Activities that count as a rank's own time."""

_PHASE_ACTIVITY = {
    Phase.INPUT: Activity.INPUT,
    Phase.CHECKPOINT: Activity.CHECKPOINT,
    Phase.COMPILE: Activity.COMPILE,
    Phase.TUNING: Activity.COMPILE,
    Phase.GC: Activity.GC,
}
_CATEGORY_ACTIVITY = {
    Category.CPU_OP: Activity.OPERATOR,
    Category.PYTHON: Activity.PYTHON,
    Category.ANNOTATION: Activity.PYTHON,
    Category.RUNTIME: Activity.LAUNCH,
    Category.OVERHEAD: Activity.PYTHON,
}
_HOST = (Category.CPU_OP, Category.PYTHON, Category.ANNOTATION, Category.RUNTIME, Category.OVERHEAD)
_NOBODY = 255
LEAST_TRIALS = 3
"""An operator of the model that waits for the device so many times in one run tries kernels. Libraries try ten and
more."""


@dataclass(frozen=True, slots=True)
class Iterations:
    """The window, cut at iteration boundaries."""

    bounds_ns: Int64s
    """(I + 1,) Ascending."""
    steps: Int64s
    """(I,) Step number of each iteration as the trace counts them; 0.. if it does not."""
    by: str
    """"ProfilerStep", "optimizer" or "window" (no marker: the whole window is one iteration of unknown length)."""

    @property
    def window_ns(self) -> int:
        """From the first boundary to the last."""
        return int(self.bounds_ns[-1] - self.bounds_ns[0])

    @property
    def count(self) -> int:
        """Number of iterations."""
        return len(self.steps)


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """Who owns the window. P spans; a span's owned part may be shorter than the span, since stronger owners are taken
    out."""

    iterations: Iterations
    start_ns: Int64s
    """(P,)"""
    end_ns: Int64s
    """(P,)"""
    owned_ns: Int64s
    """(P,) Above 0."""
    event: Int32s
    """(P,) Row in the trace."""
    activity: UInt8s
    """(P,)"""
    iteration: Int32s
    """(P,)"""
    frame: Int32s
    """(P,) Row of the innermost Python frame (of the launch, for device events); -1 = none."""
    user_frame: Int32s
    """(P,) Row of the innermost frame of the user's own code; -1 = none."""
    phase: UInt8s
    """(P,) names.Phase of host spans and of device spans' launches."""
    work: Cover
    """All instants that own work holds; what a collective overlaps with it is hidden."""
    has_device: bool
    """Some event ran on a device."""
    threads: tuple[tuple[int, float, str], ...]
    """(track, share of the window in which it ran, the user's function that ran longest or "") of host threads off
    the path."""
    explained: float
    """Owned share of the window, 0..1."""


def _step_number(name: str) -> int:
    digits = name.rpartition("#")[2]
    return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) < 19 else -1


def _named(trace: Trace, prefix: str, categories: tuple[Category, ...]) -> npt.NDArray[np.intp]:
    ids = np.array([i for i, text in enumerate(trace.strings) if text.startswith(prefix)], np.int32)
    if not len(ids):
        return np.empty(0, np.intp)
    return np.flatnonzero(np.isin(trace.name, ids) & np.isin(trace.category, categories))


def iterations_of(trace: Trace) -> Iterations:
    """Iteration boundaries: ProfilerStep annotations, else the ends of optimizer steps, else the whole window."""
    rows = _named(trace, "ProfilerStep#", (Category.ANNOTATION, Category.CPU_OP))
    if len(rows):
        numbers = np.array([_step_number(trace.strings[i]) for i in trace.name[rows]], np.int64)
        _, first = np.unique(numbers, return_index=True)
        rows, numbers = rows[first], numbers[first]
        order = np.argsort(trace.ts_ns[rows], kind="stable")
        rows, numbers = rows[order], numbers[order]
        ends = trace.ts_ns[rows] + trace.dur_ns[rows]
        if int(ends[-1]) > int(trace.ts_ns[rows[0]]):
            return Iterations(np.append(trace.ts_ns[rows], ends[-1]), numbers, "ProfilerStep")
    rows = _outermost(trace, _named(trace, "Optimizer.step#", (Category.ANNOTATION, Category.CPU_OP)))
    if len(rows) >= 3:
        ends = trace.ts_ns[rows] + trace.dur_ns[rows]
        order = np.argsort(ends, kind="stable")
        rows, ends = rows[order], ends[order]
        spacing = np.diff(ends)
        # Several optimizers, or one per parameter, step in bursts: a burst ends one iteration, not many. A batch
        # fetched in between says that it is none, however short it is beside one long step (a checkpoint).
        fetches = np.sort(trace.ts_ns[_named(trace, "enumerate(DataLoader)#", (Category.ANNOTATION, Category.CPU_OP))])
        fetched = np.diff(np.searchsorted(fetches, ends)) > 0
        last = _last_of_turn(trace.name[rows], spacing)
        keep = np.append((last[:-1] & (spacing > 0.2 * spacing.max())) | fetched, last[-1])
        ends = ends[keep]
        if len(ends) >= 3:
            return Iterations(ends, np.arange(len(ends) - 1), "optimizer")
    work = np.isin(trace.category, [*_HOST, Category.KERNEL, Category.COPY, Category.MEMSET]) & (trace.dur_ns > 0)
    if not work.any():
        return Iterations(np.array([0, 0], np.int64), np.zeros(1, np.int64), "window")
    start, end = trace.ts_ns[work].min(), (trace.ts_ns[work] + trace.dur_ns[work]).max()
    return Iterations(np.array([start, end], np.int64), np.zeros(1, np.int64), "window")


def _outermost(trace: Trace, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Those of `rows` that none of the others on the same thread holds: a wrapper's step has its optimizer's within."""
    kept = np.ones(len(rows), bool)
    for track in np.unique(trace.track[rows]):
        own = np.flatnonzero(trace.track[rows] == track)
        ends = trace.ts_ns[rows[own]] + trace.dur_ns[rows[own]]
        kept[own[1:]] = ends[1:] > np.maximum.accumulate(ends)[:-1]
    return rows[kept]


def _last_of_turn(name: Int32s, spacing: Int64s) -> npt.NDArray[np.bool_]:
    """(steps,) False for what cannot end an iteration: where several optimizers take turns, all but the one after which
    it lasts longest to the next. Optimizers of one name cannot be told apart; they must step in bursts."""
    _, which, counts = np.unique(name, return_inverse=True, return_counts=True)
    kinds = len(counts)
    if kinds < 2 or counts.min() < 3 or (which[kinds:] != which[:-kinds]).any():
        return np.ones(len(name), bool)
    pauses = [np.median(spacing[which[:-1] == kind]) for kind in range(kinds)]
    last: npt.NDArray[np.bool_] = which == int(np.argmax(pauses))
    return last


@dataclass(frozen=True, slots=True)
class _Strings:
    """What `names` says of each string that a host event uses. Shapes (strings,)."""

    phase: UInt8s
    owns: UInt8s
    is_user: npt.NDArray[np.bool_]
    is_autograd: npt.NDArray[np.bool_]
    is_tunable: npt.NDArray[np.bool_]


def _read_strings(trace: Trace, rows: npt.NDArray[np.intp]) -> tuple[_Strings, _Strings]:
    """Classification as plain event and as annotation; the same text may be both."""
    n = len(trace.strings)
    tables = []
    category, name = trace.category[rows], trace.name[rows]
    marked = (category == Category.ANNOTATION) | (category == Category.OVERHEAD)
    for is_marked in (False, True):
        table = _Strings(np.zeros(n, np.uint8), np.zeros(n, np.uint8), *(np.zeros(n, bool) for _ in range(3)))
        used = np.zeros(n, bool)
        used[name[marked == is_marked]] = True
        for index in np.flatnonzero(used):
            text = trace.strings[index]
            read = read_host_name(text, annotation=is_marked)
            table.phase[index], table.owns[index], table.is_user[index] = read.phase, read.owns, read.is_user
            table.is_autograd[index] = text.startswith("autograd::engine::evaluate_function")
            table.is_tunable[index] = bool(TUNABLE.search(text))
        tables.append(table)
    return tables[0], tables[1]


@dataclass(frozen=True, slots=True)
class _Host:
    """The driving threads' pieces."""

    start: Int64s
    end: Int64s
    event: Int32s
    """Trace row that owns the piece."""
    activity: UInt8s


@dataclass(frozen=True, slots=True)
class _Labels:
    """What each event of the driving threads inherits, by trace row."""

    frame: Int32s
    """-1 where not nested or none."""
    user_frame: Int32s
    phase: UInt8s
    is_nested: npt.NDArray[np.bool_]


def _thread_activity(
    trace: Trace, rows: npt.NDArray[np.intp], tree: Nest, strings: tuple[_Strings, _Strings]
) -> tuple[Int32s, UInt8s, Int32s, Int32s, UInt8s]:
    """Per event of a thread: owning event (after labels pass on), activity, innermost frame, user frame, phase."""
    name, category = trace.name[rows], trace.category[rows]
    marked = (category == Category.ANNOTATION) | (category == Category.OVERHEAD)
    plain, annotated = strings
    phase = np.where(marked, annotated.phase[name], plain.phase[name])
    owns = np.where(marked, annotated.owns[name], plain.owns[name])
    owns[category == Category.OVERHEAD] = Owns.NOBODY
    index = np.arange(len(rows), dtype=np.int32)
    is_frame = category == Category.PYTHON
    nothing = np.int32(-1)
    frame = np.where(is_frame & (owns != Owns.PARENT) & _has_location(trace, rows), index, nothing)
    user = np.where(is_frame & plain.is_user[name], index, nothing)
    owner = np.where(owns == Owns.PARENT, nothing, index)
    # The profiler's frames hide all that they call.
    hidden = (owns == Owns.NOBODY).astype(np.uint8)
    operator = np.where(plain.is_tunable[name] & (category == Category.CPU_OP), index, nothing)
    del index, is_frame
    inherit([phase, frame, user, owner, hidden, operator], tree.parent, tree.depth)
    searches = _searches(operator, owns == Owns.SYNC)
    phase[searches] = Phase.TUNING
    activity = np.empty(len(rows), np.uint8)
    for kind, of_category in _CATEGORY_ACTIVITY.items():
        activity[category == kind] = of_category
    # The engine's wrapper does no arithmetic of its own: what it owns itself is a hook or other code that it calls.
    activity[plain.is_autograd[name] & ~marked] = Activity.PYTHON
    activity[owns == Owns.ALLOCATOR] = Activity.ALLOCATOR
    activity[owns == Owns.SYNC] = Activity.SYNC
    activity[(owns == Owns.WAIT) | ((phase == Phase.COMMUNICATION) & (owns != Owns.SYNC))] = Activity.WAIT
    for part, of_phase in _PHASE_ACTIVITY.items():
        # Inside of these a wait or a copy is part of the thing (a loader's queue, a save's device-to-host copy).
        # So is memory for a search, but what asks for memory while it saves or loads is worth its own name.
        activity[(phase == part) & ((owns != Owns.ALLOCATOR) | searches)] = of_phase
    owner_activity = np.where(owner >= 0, activity[owner], np.uint8(_NOBODY))
    owner_activity[hidden > 0] = _NOBODY
    return owner, owner_activity, frame, user, phase


def _searches(operator: Int32s, syncs: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Events within an operator (index of each one's, -1 = none) that waits for the device again and again: it times
    kernels against each other. An allocator out of room waits as well, but once or twice."""
    inside = operator >= 0
    if not (inside & syncs).any():
        return np.zeros(len(operator), bool)
    waits = np.bincount(operator[inside & syncs], minlength=len(operator))
    found: npt.NDArray[np.bool_] = inside & (waits[operator] >= LEAST_TRIALS)
    return found


def _has_location(trace: Trace, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
    located = np.array(["): " in text for text in trace.strings], bool)
    return located[trace.name[rows]]


def _driving_tracks(trace: Trace, rows: npt.NDArray[np.intp], strings: _Strings) -> tuple[int, list[int]]:
    """The thread that runs the steps, and the autograd threads. (-1, []) if there is no host side."""
    if not len(rows):
        return -1, []
    track, name = trace.track[rows], trace.name[rows]
    weight = np.bincount(
        track, weights=np.where(trace.category[rows] != Category.OVERHEAD, 1.0, 0.0), minlength=len(trace.tracks)
    )
    autograd = np.unique(track[strings.is_autograd[name]])
    marked = _named(trace, "ProfilerStep#", (Category.ANNOTATION, Category.CPU_OP))
    loader = _named(trace, "enumerate(DataLoader)#", (Category.ANNOTATION, Category.CPU_OP))
    optimizer = _named(trace, "Optimizer.step#", (Category.ANNOTATION, Category.CPU_OP))
    hints = np.concatenate([trace.track[marked], trace.track[optimizer], trace.track[loader]])
    if len(hints):
        main = int(np.bincount(hints).argmax())
    else:
        candidates = weight.copy()
        others = np.setdiff1d(np.flatnonzero(weight), autograd)
        if len(others):
            mask = np.zeros(len(weight), bool)
            mask[others] = True
            candidates[~mask] = 0
        main = int(candidates.argmax())
    return main, [int(t) for t in autograd if t != main]


def _host(trace: Trace, window: tuple[int, int]) -> tuple[_Host, _Labels, tuple[tuple[int, float, str], ...]]:
    # Step markers begin inside of one profiler call and end inside of the next: they nest in nothing.
    markers = np.array([text.startswith("ProfilerStep#") for text in trace.strings] or [False], bool)
    all_rows = np.flatnonzero(np.isin(trace.category, _HOST) & (trace.dur_ns > 0) & ~markers[trace.name])
    strings = _read_strings(trace, all_rows)
    main, autograd = _driving_tracks(trace, all_rows, strings[0])
    n = len(trace)
    labels = _Labels(np.full(n, -1, np.int32), np.full(n, -1, np.int32), np.zeros(n, np.uint8), np.zeros(n, bool))
    # Rows by track, each track's in order: no thread looks at those of all others.
    by_track = all_rows[np.argsort(trace.track[all_rows], kind="stable")]
    edges = np.append(0, np.cumsum(np.bincount(trace.track[all_rows], minlength=len(trace.tracks))))
    rows_of = [by_track[edges[track] : edges[track + 1]] for track in autograd]
    parts = [_thread(trace, rows, strings, window, labels, None) for rows in rows_of]
    taken = None
    if parts:
        taken = Cover.of(np.concatenate([part.start for part in parts]), np.concatenate([part.end for part in parts]))
    rows = by_track[edges[main] : edges[main + 1]] if main >= 0 else by_track[:0]
    parts.append(_thread(trace, rows, strings, window, labels, taken))
    idle_tracks = np.setdiff1d(np.flatnonzero(np.diff(edges)), [main, *autograd])
    length = max(window[1] - window[0], 1)
    threads = []
    for track in idle_tracks:
        rows = by_track[edges[track] : edges[track + 1]]
        rows = rows[trace.category[rows] != Category.ANNOTATION]
        cover = Cover.of(
            np.maximum(trace.ts_ns[rows], window[0]), np.minimum(trace.ts_ns[rows] + trace.dur_ns[rows], window[1])
        )
        if int(cover.before[-1]) > 0:
            frames = rows[(trace.category[rows] == Category.PYTHON) & strings[0].is_user[trace.name[rows]]]
            longest = ""
            if len(frames):
                seen = read_host_name(trace.strings[trace.name[frames[trace.dur_ns[frames].argmax()]]])
                longest = f"{seen.text} ({seen.location})"
            threads.append((int(track), float(cover.before[-1]) / length, longest))
    host = _Host(*(_concatenated([getattr(part, name) for part in parts]) for name in _Host.__slots__))
    return host, labels, tuple(threads)


def _thread(
    trace: Trace,
    rows: npt.NDArray[np.intp],
    strings: tuple[_Strings, _Strings],
    window: tuple[int, int],
    labels: _Labels,
    taken: Cover | None,
) -> _Host:
    """The pieces of one thread, less `taken`; fills `labels` in."""
    start = trace.ts_ns[rows]
    tree = nest(start, start + trace.dur_ns[rows])
    owner, activity, frame, user_frame, phase = _thread_activity(trace, rows, tree, strings)
    labels.frame[rows] = np.where(frame >= 0, rows[frame], -1)
    labels.user_frame[rows] = np.where(user_frame >= 0, rows[user_frame], -1)
    labels.phase[rows] = phase
    labels.is_nested[rows] = True
    del start, frame, user_frame, phase
    owner = rows.astype(np.int32)[owner]
    # The tree is not needed any more: cut its pieces where they are.
    low, high = np.maximum(tree.start, window[0], out=tree.start), np.minimum(tree.end, window[1], out=tree.end)
    keep = np.flatnonzero((high > low) & (activity[tree.owner] != _NOBODY))
    low, high, piece = low[keep], high[keep], tree.owner[keep]
    del tree, keep
    if taken is not None and len(taken.starts):
        low, high, piece = _cut(low, high, piece, taken)
    return _Host(low, high, owner[piece], activity[piece])


def _concatenated(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """All parts in one, without a copy where one alone holds anything."""
    filled = [part for part in parts if len(part)]
    return np.concatenate(filled) if len(filled) > 1 else (filled or parts)[0]


def _cut(start: Int64s, end: Int64s, what: Int32s, away: Cover) -> tuple[Int64s, Int64s, Int32s]:
    """The pieces less the union `away`: pieces that it cuts in the middle become several."""
    edges = np.unique(np.concatenate([away.starts, away.ends]))
    return _split(start, end, what, edges, away)


def _split(
    start: Int64s, end: Int64s, what: Int32s, edges: Int64s, away: Cover | None = None
) -> tuple[Int64s, Int64s, Int32s]:
    """Pieces cut at each edge inside of them; parts within `away` are left out."""
    low = np.searchsorted(edges, start, side="right")
    high = np.searchsorted(edges, end, side="left")
    count = np.maximum(high - low, 0)
    total = int(count.sum())
    index = np.repeat(np.arange(len(start)), count + 1)
    new_start, new_end = np.repeat(start, count + 1), np.repeat(end, count + 1)
    if total:
        first = np.cumsum(count + 1) - (count + 1)
        within = np.arange(len(index)) - first[index]
        inner = within > 0
        new_start[inner] = edges[low[index[inner]] + within[inner] - 1]
        outer = within < count[index]
        new_end[outer] = edges[low[index[outer]] + within[outer]]
    if away is not None:
        keep = away.inside(new_start, new_end) == 0
        return new_start[keep], new_end[keep], what[index[keep]]
    return new_start, new_end, what[index]


def critical_spans(trace: Trace) -> CriticalPath:
    """Owner of each instant between the first and the last iteration boundary. Never raises on odd events."""
    iterations = iterations_of(trace)
    window = int(iterations.bounds_ns[0]), int(iterations.bounds_ns[-1])
    n = len(trace)
    is_transfer = np.zeros(n, bool)
    is_transfer[trace.collectives.event[trace.collectives.transfers]] = True
    clipped = (trace.dur_ns > 0) & (trace.ts_ns < window[1]) & (trace.ts_ns + trace.dur_ns > window[0])
    is_device = np.isin(trace.category, (Category.KERNEL, Category.COPY, Category.MEMSET))
    spans: list[_Spans] = []

    def claim(rows: npt.NDArray[np.intp], activity: Activity, above: Cover) -> Cover:
        """Give each event what neither stronger owners nor an earlier sibling hold; returns the union of both."""
        ts = trace.ts_ns[rows]
        low, high = np.maximum(ts, window[0]), np.minimum(ts + trace.dur_ns[rows], window[1])
        part = first_come_parts(low, high)
        keep = np.flatnonzero(high > part)
        what = np.full(len(keep), activity, np.uint8)
        spans.append(_outside(part[keep], high[keep], rows[keep].astype(np.int32), what, above))
        return above.joined(Cover.of(low, high))

    nothing = Cover.of(np.empty(0, np.int64), np.empty(0, np.int64))
    compute = claim(
        np.flatnonzero(clipped & (trace.category == Category.KERNEL) & ~is_transfer), Activity.COMPUTE, nothing
    )
    device_work = claim(
        np.flatnonzero(clipped & is_device & (trace.category != Category.KERNEL)), Activity.MEMORY, compute
    )
    device = claim(np.flatnonzero(clipped & is_device & is_transfer), Activity.COLLECTIVE, device_work)
    has_device = bool(is_device.any())

    host, labels, threads = _host(trace, window)
    if has_device:
        host = _give_gaps_to_syncs(trace, host, device, window)
    waiting = host.activity == Activity.WAIT
    free, held = (_where(host, which) for which in (~waiting, waiting))
    del host, waiting
    spans.append(_outside(free.start, free.end, free.event, free.activity, device))
    host_work = Cover.of(free.start, free.end)
    del free
    work = device_work.joined(host_work)
    busy = device.joined(host_work)
    busy = claim(np.flatnonzero(clipped & ~is_device & is_transfer), Activity.COLLECTIVE, busy)
    spans.append(_outside(held.start, held.end, held.event, _engines_own(trace, held, has_device), busy))
    del held, busy, clipped, is_transfer

    columns = [list(column) for column in zip(*spans, strict=True)]
    del spans[:]
    start, end, owned, event, activity = _by_iteration(columns, iterations.bounds_ns)
    launch = _launch_rows(trace, labels.is_nested)
    source = np.where(is_device[event], launch[event], event)
    del launch, is_device
    known = source >= 0
    length = max(iterations.window_ns, 1)
    return CriticalPath(
        iterations=iterations,
        start_ns=start,
        end_ns=end,
        owned_ns=owned,
        event=event,
        activity=activity,
        iteration=np.searchsorted(iterations.bounds_ns[1:-1], start, side="right").astype(np.int32),
        frame=np.where(known, labels.frame[source], np.int32(-1)),
        user_frame=np.where(known, labels.user_frame[source], np.int32(-1)),
        phase=np.where(known, labels.phase[source], np.uint8(0)),
        work=work,
        has_device=has_device,
        threads=threads,
        explained=min(float(owned.sum()) / length, 1.0),
    )


def _engines_own(trace: Trace, held: _Host, has_device: bool) -> UInt8s:
    """Activities of what a waiting host thread holds when all others have taken theirs.

    On a CPU the driving thread waits for the autograd thread, and a collective that both wait for has taken its time
    already. What is left is that thread's own: it runs code that leaves no event, or waits for the interpreter.
    """
    if has_device:
        return held.activity
    is_engines = np.array([bool(ENGINE_WAIT.search(text)) for text in trace.strings], bool)
    return np.where(is_engines[trace.name[held.event]], np.uint8(Activity.PYTHON), held.activity)


_Spans: TypeAlias = tuple[Int64s, Int64s, Int64s, Int32s, UInt8s]
"""start, end, owned, event, activity"""


def _outside(start: Int64s, end: Int64s, event: Int32s, activity: UInt8s, above: Cover) -> _Spans:
    """Spans that own something when stronger owners have taken theirs."""
    owned = above.outside(start, end)
    if bool((owned > 0).all()):
        return start, end, owned, event, activity
    keep = np.flatnonzero(owned > 0)
    return start[keep], end[keep], owned[keep], event[keep], activity[keep]


def _where(host: _Host, which: npt.NDArray[np.bool_]) -> _Host:
    if bool(which.all()):
        return host
    rows = np.flatnonzero(which)
    return _Host(host.start[rows], host.end[rows], host.event[rows], host.activity[rows])


def _by_iteration(columns: list[list[npt.NDArray[Any]]], bounds: Int64s) -> list[npt.NDArray[Any]]:
    """The parts of `_Spans` put together and cut at iteration boundaries; what the few that cross one own is shared out
    by length. Takes `columns` apart while it goes, so that only one of them is held twice.
    """
    inner = bounds[1:-1]
    start, end, owned = (_concatenated(columns[k]) for k in range(3))
    crossing = np.searchsorted(inner, start, side="right") != np.searchsorted(inner, end, side="left")
    rows = np.flatnonzero(crossing)
    low, high, index = _split(start[rows], end[rows], rows.astype(np.int32), inner)
    share = np.rint(owned[index] * ((high - low) / (end[index] - start[index]))).astype(np.int64)
    del start, end, owned
    rest = np.flatnonzero(~crossing) if len(rows) else rows
    whole = []
    for pieces in (low, high, share, None, None):
        column = _concatenated(columns.pop(0))
        if len(rows):
            column = np.concatenate([column[rest], column[index] if pieces is None else pieces])
        whole.append(column)
    return whole


def _launch_rows(trace: Trace, is_nested: npt.NDArray[np.bool_]) -> Int32s:
    """Per event the row of the host call that launched it; -1 = unknown. Graph replays share their launch."""
    launch = np.full(len(trace), -1, np.int32)
    callers = np.flatnonzero(is_nested & (trace.correlation > 0) & (trace.category == Category.RUNTIME))
    if not len(callers):
        return launch
    ids = trace.correlation[callers]
    order = np.argsort(ids, kind="stable")
    ids, callers = ids[order], callers[order]
    rows = np.flatnonzero(
        np.isin(trace.category, (Category.KERNEL, Category.COPY, Category.MEMSET)) & (trace.correlation > 0)
    )
    at = np.minimum(np.searchsorted(ids, trace.correlation[rows]), len(ids) - 1)
    found = ids[at] == trace.correlation[rows]
    launch[rows[found]] = callers[at[found]]
    return launch


def _give_gaps_to_syncs(trace: Trace, host: _Host, device: Cover, window: tuple[int, int]) -> _Host:
    """An idle device after a host sync that drained its queue belongs to that sync: refilling the queue is its cost.

    Work that would leave the device idle in any case (input, checkpoint, compile, collection, allocator, a call out of
    Python that holds most of the gap, such as a write or a sleep) keeps its own time; plain Python frames do not,
    since with a full queue the device would not have noticed them.
    """
    syncs = np.flatnonzero(host.activity == Activity.SYNC)
    low, high = device.gaps(*window)
    if not len(syncs) or not len(low):
        return host
    # A sync drained the queue if the device fell idle while it waited.
    gap = np.searchsorted(low, host.end[syncs], side="right") - 1
    gap = np.maximum(gap, 0)
    drained = (
        (low[gap] <= host.end[syncs])
        & (host.end[syncs] <= high[gap])
        & (low[gap] >= host.start[syncs])
        & (low[gap] > window[0])
    )
    if not drained.any():
        return host
    sync_of = np.full(len(low), -1, np.int64)
    sync_of[gap[drained]] = syncs[drained]
    piece_gap = np.maximum(np.searchsorted(low, host.end - 1, side="right") - 1, 0)
    length = np.minimum(host.end, high[piece_gap]) - np.maximum(host.start, low[piece_gap])
    owner = sync_of[piece_gap]
    light = np.isin(host.activity, (Activity.OPERATOR, Activity.LAUNCH, Activity.SYNC))
    calls = np.array([text.startswith("<built-in ") for text in trace.strings], bool)[trace.name[host.event]]
    light |= (host.activity == Activity.PYTHON) & ~(calls & (length * 2 > high[piece_gap] - low[piece_gap]))
    moved = (owner >= 0) & light & (length > 0)
    event, activity = host.event.copy(), host.activity.copy()
    event[moved] = host.event[owner[moved]]
    activity[moved] = Activity.SYNC
    # Host time that no event covers inside of such a gap is refill too.
    filled = Cover.of(host.start, host.end)
    used = sync_of >= 0
    edges = np.unique(np.concatenate([filled.starts, filled.ends]))
    rest_start, rest_end, rest = _split(low[used], high[used], sync_of[used].astype(np.int32), edges, filled)
    return _Host(
        start=np.concatenate([host.start, rest_start]),
        end=np.concatenate([host.end, rest_end]),
        event=np.concatenate([event, host.event[rest]]),
        activity=np.concatenate([activity, np.full(len(rest), Activity.SYNC, np.uint8)]),
    )
