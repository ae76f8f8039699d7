"""Ranks that are no longer there, or on their way out by an exception: who went first, and who only because of that.

Pure. When one rank dies, the others follow: their communication breaks ("Connection closed by peer"), their launcher
ends them by SIGTERM. Such departures are consequences. Clocks are not compared over hosts, so with several deaths of
one kind nobody is called the first. Used by `hang`, whose first question this is.
"""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from collections.abc import Mapping

from eroica import joining
from eroica.doing import Doing
from eroica.findings import Evidence, FunctionName
from eroica.standing import RankView
from eroica.suspect import Suspect, some
from eroica.waiting import Graph

_FOLLOWS = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|[Tt]imed? ?out|Timeout|Watchdog|remote process exited|"
    r"NCCL (error|communicator was aborted)|ncclRemoteError|ncclSystemError|Socket|enforce fail at .*gloo|"
    r"DistBackendError|DistNetworkError|Store.*(failed|closed)|received (SIG|signal)|SignalException|"
    r"^(KeyboardInterrupt|SystemExit|BrokenPipeError|ConnectionError|ConnectionResetError|EOFError)\b"
)
"""Exceptions that come from a peer that has gone, from a time-out or from whoever ended the job. Wrong for a program
whose own network code fails in these words: then the exception is shown among the evidence, without blame."""
_LOCAL = re.compile(r"/multiprocessing/(connection|queues|managers|synchronize)\.py:|/torch/utils/data/")
"""Where an error of communication is one with a worker process of the rank's own."""
_WORKER = re.compile(r"DataLoader worker \(pid[^)]*\)[^.]*(killed by signal|exited unexpectedly)")
_GAVE_UP = re.compile(r"[Tt]imed? ?out|Timeout|Watchdog")
"""A peer that has gone closes its connection at once; one that does not come is waited for until a limit."""
_BLIND = re.compile(r"Watchdog|NCCL|nccl")
"""Of communication in which a peer that has gone may be waited for as well."""
ENDED_BY_OTHERS = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
"""Signals by which launchers and people end the rest of a job."""
_KILL_ADVICE = (
    "SIGKILL comes from the kernel's out-of-memory killer (look at dmesg and the cgroup's memory.events), from a "
    "scheduler's limit or from a person"
)


def exit_words(status: int | None) -> str:
    """ "killed by SIGKILL", "exit status 1", "exit status unknown"."""
    if status is None:
        return "exit status unknown"
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def is_follower(view: RankView) -> bool:
    """It left by an exception that somebody else's departure causes."""
    return bool(view.exception) and not _is_workers(view) and bool(_FOLLOWS.search(view.exception))


def has_given_up(view: RankView) -> bool:
    """It left since somebody did not come for too long: while the job was up, so nobody had ended it."""
    return is_follower(view) and _GAVE_UP.search(view.exception) is not None


def _is_workers(view: RankView) -> bool:
    """It left because a worker process of its own had gone."""
    is_lost = _FOLLOWS.search(view.exception) is not None and _LOCAL.search(view.exception_at) is not None
    return is_lost or is_of_worker(view.exception)


def is_of_worker(error: str) -> bool:
    """The words by which torch's loader says that a worker process of its own has gone."""
    return _WORKER.search(error) is not None


def followers(views: Mapping[int, RankView]) -> list[Suspect]:
    """Where nothing else was found: everybody who left did so by an error of communication."""
    ranks = frozenset(rank for rank, view in views.items() if is_follower(view))
    if not ranks:
        return []
    if all(joining.is_starting(view) for view in views.values()):
        elsewhere = joining.misdirected(views)
        if elsewhere:
            return elsewhere
    over = frozenset(rank for rank, view in views.items() if view.state == "ended" and not view.exception)
    if over and over | ranks == views.keys():
        return [_left_early(over, ranks, views)]
    text = f"{some(ranks)} left by errors of communication, and nobody is seen to have gone first"
    shown = dict.fromkeys(f"{views[rank].exception} at {views[rank].exception_at}" for rank in sorted(ranks))
    evidence = tuple(Evidence(line, "ring", {}) for line in [text, *list(shown)[:4]])
    advice = "look at ranks without a ring, at the hosts, and at the network between them"
    return [Suspect("unknown", "group", ranks, "unknown", text, evidence, kind="crash", advice=advice)]


def _left_early(over: frozenset[int], ranks: frozenset[int], views: Mapping[int, RankView]) -> Suspect:
    """Some reached the end of their program, and then the communication of all others broke, or they were ended."""
    statuses = sorted({exit_words(views[rank].exit_status) for rank in over if views[rank].exit_status is not None})
    steps = sorted({views[rank].num_steps for rank in over})
    how = f" with {' and '.join(statuses)}" if statuses else ""
    text = f"{some(over)} ended{how} after step {steps[-1]}"
    text += f", and {some(ranks)} could not go on alone" if ranks else "; the others were ended then"
    shown = dict.fromkeys(f"{views[rank].exception} at {views[rank].exception_at}" for rank in sorted(ranks))
    evidence = tuple(Evidence(line, "ring", {"steps": steps[-1]}) for line in [text, *list(shown)[:2]])
    advice = "find out why it ended before the others: sys.exit, a loop with fewer batches, a return on an error"
    return Suspect("missing_rank", "rank", over, "supported", text, evidence, kind="crash", advice=advice)


def departures(views: Mapping[int, RankView], doings: Mapping[int, Doing], graph: Graph) -> list[Suspect] | None:
    """Who went first; an empty list where a job merely shuts down; None where nobody has gone, or nobody went first."""
    raised = {rank: view for rank, view in views.items() if view.exception}
    died = {
        rank: view
        for rank, view in views.items()
        if view.state == "died" and not view.exception and view.exit_status != 0
    }
    first = {rank: view for rank, view in raised.items() if not is_follower(view)}
    if first and all(joining.is_about_connecting(view) for view in first.values()):
        elsewhere = joining.misdirected(views)
        if elsewhere:
            return elsewhere
    if first:
        return _exceptions(first, views)
    early = frozenset(r for r, v in views.items() if v.state == "ended" and not v.exception and v.exit_status)
    were_ended = all(view.exit_status in (None, *ENDED_BY_OTHERS) for view in died.values())
    if early and were_ended and early | raised.keys() | died.keys() == views.keys() != early:
        return [_left_early(early, frozenset(raised), views)]
    rest = [rank for rank in views if rank not in died]
    over = [rank for rank in rest if doings[rank].what in ("ended", "leaving") or views[rank].exit_status == 0]
    is_over = not raised and len(over) == len(rest) > 0
    if is_over and were_ended:
        return []  # it shuts down; who left by os._exit looks dead, and that is nothing
    if len(died) == len(views) > 0 and all(view.exit_status in ENDED_BY_OTHERS for view in died.values()):
        return []  # whoever runs the job has ended it
    if not died or _were_given_up(died, raised):
        return None
    return _deaths(died, views, doings, len(raised), graph)


def _were_given_up(died: Mapping[int, RankView], raised: Mapping[int, RankView]) -> bool:
    """The others' patience came to its end first, and whoever runs the job then ended those that were left: by a signal
    as launchers send it, or nobody saw how, but their connections had lasted until then."""
    patient = [view for view in raised.values() if has_given_up(view)]
    may_have_died = any(_BLIND.search(view.exception) for view in patient)
    by_others = ENDED_BY_OTHERS if may_have_died else (None, *ENDED_BY_OTHERS)
    return bool(patient) and all(view.exit_status in by_others for view in died.values())


def _exceptions(first: Mapping[int, RankView], views: Mapping[int, RankView]) -> list[Suspect]:
    alike: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, view in first.items():
        # The same error on several ranks may carry other numbers on each.
        alike[re.sub(r"\d+", "#", view.exception), view.exception_at].append(rank)
    found = []
    for (_, at), ranks in sorted(alike.items(), key=lambda item: item[1]):
        view = first[ranks[0]]
        is_worker = _is_workers(view)
        where = f" at {at}" if at else ""
        if view.exception_from and view.exception_from != at:
            where += f", called from {view.exception_from}"
        text = f"{some(ranks)}: {view.exception}{where}"
        who, scope, cause = frozenset(ranks), "rank", "dead_worker" if is_worker else "exception"
        level = "established" if not is_worker or is_of_worker(view.exception) else "supported"
        if joining.is_about_start(view):
            cause = "startup_network"
        evidence = [Evidence(f"{some(ranks)} left by {view.exception}{where}", "ring", {"exception": view.exception})]
        if any(first[rank].state == "running" for rank in ranks):
            evidence.append(Evidence(f"{some(ranks)} still runs: its clean-up waits for the others", "process", {}))
        if len(ranks) == len(views) > 1:
            # Everybody's error is nobody's; unless they trip over one who is made otherwise.
            odd, models = joining.odd_models(views, ranks)
            if odd:
                who, cause, level = odd, "collective_mismatch", "supported"
                text = f"{models}; then {text}"
                evidence.insert(0, Evidence(f"models differ: {models}", "environment", {}))
            else:
                scope, text = "all", f"all ranks left by the same error: {text.partition(': ')[2]}"
        is_hang = scope != "all" and all(first[rank].state == "running" for rank in ranks)
        found.append(
            Suspect(
                *(cause, scope, who, level, text, tuple(evidence)),
                function=FunctionName(
                    "host", view.exception.partition(":")[0], at or None, view.exception_from or at or None
                ),
                kind="hang" if is_hang else "crash",
                advice="find out why the worker was killed: " + _KILL_ADVICE if is_worker else "mend what raised this",
            )
        )
    return found


def _deaths(
    died: Mapping[int, RankView],
    views: Mapping[int, RankView],
    doings: Mapping[int, Doing],
    num_raised: int,
    graph: Graph,
) -> list[Suspect]:
    by_others = {rank for rank, view in died.items() if view.exit_status in ENDED_BY_OTHERS}
    first = set(died) - by_others or set(died)
    known = {rank for rank in first if died[rank].exit_status is not None}
    level = "established" if known == first else "supported"
    if known and known != first:
        first = known  # the others may have been ended because of these
    if len(first) == len(views) > 1:
        text = f"all {len(views)} ranks died ({_statuses(views, first)}); nothing tells who went first"
        advice = "look at what ended the job: the launcher's log, the scheduler, the host"
        seen = (Evidence(text, "process", {"ranks": len(views)}),)
        return [Suspect("unknown", "all", frozenset(first), "unknown", text, seen, kind="crash", advice=advice)]
    if len(first) > 1 and not known:
        # Whoever waited for another rank was alive and well until that one had gone.
        active = {rank for rank in first if doings[rank].call is None}
        first, level = (active or first), "hypothesis"
    suspects = []
    alike: dict[int | None, list[int]] = defaultdict(list)
    for rank in sorted(first):
        alike[died[rank].exit_status].append(rank)
    for status, ranks in sorted(alike.items(), key=lambda item: item[1]):
        inside = "; ".join(
            f"rank {rank} was in {_inside(rank, views, doings)}" for rank in ranks[:4] if _inside(rank, views, doings)
        )
        word = f"{'the process' if len(ranks) == 1 else 'processes'} died ({exit_words(status)})"
        text = f"{some(ranks)}: {word}" + (f" in step {views[ranks[0]].num_steps + 1}" if len(ranks) == 1 else "")
        evidence = [Evidence(text + (f"; {inside}" if inside else ""), "process", {"exit_status": status})]
        if num_raised:
            evidence.append(Evidence(f"{num_raised} other ranks then left by errors of communication", "ring", {}))
        advice = _KILL_ADVICE if status == -signal.SIGKILL else "look at its last output, and at the kernel's log"
        suspects.append(
            Suspect(
                *("dead_worker", "rank", frozenset(ranks), level, text, tuple(evidence)), kind="crash", advice=advice
            )
        )
    return suspects


def _inside(rank: int, views: Mapping[int, RankView], doings: Mapping[int, Doing]) -> str:
    call = doings[rank].call
    if call is not None:
        return f"{call.op} {call.sequence}"
    return views[rank].open[-1].what if views[rank].open else ""


def _statuses(views: Mapping[int, RankView], ranks: set[int]) -> str:
    return ", ".join(sorted({exit_words(views[rank].exit_status) for rank in ranks}))
