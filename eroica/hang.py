"""Why a job stands still or broke off: from what each rank shows to who, what and why, as a diagnosis.

`explain` takes one `RankView` per rank and returns a diagnosis of kind hang, paused or crash, or None where nothing is
wrong: a rank that is slow but moves on, a job that shuts down. The order of its questions is that of design section 4:
who died or left by an exception; who entered another call than the rest; who waits in a circle; who keeps the rest
waiting, and with what; else a call that all have entered and nobody finishes. Pure: no clock, file or socket.

A wrong blame is worse than "unknown". A finding is `established` only by something that could have been otherwise: an
exit status, a stopped process, a call that the ring would show had it been entered, together with the stack of who has
not. Without the stack it is `supported`; a rank without any data is named, never blamed.
"""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from eroica.differing import by_handled, different, gone_past, uneven_batches
from eroica.doing import PHASES, asks_outside, doing
from eroica.entered import transport
from eroica.findings import (
    Consequence,
    Coverage,
    Diagnosis,
    Evidence,
    Finding,
    Impact,
    Iteration,
    PatternValues,
    Verdict,
    Window,
)
from eroica.gone import departures, exit_words, followers, is_follower, is_of_worker
from eroica.job import format_missing, format_ranks
from eroica.locking import entanglement
from eroica.looking import (
    Look,
    awaited_by,
    function_of,
    late,
    line_of,
    name_of,
    places,
    skews_of,
)
from eroica.merged import chain, lines, merge
from eroica.routine import departures as departures_of
from eroica.standing import RankView, user_frame
from eroica.suspect import Suspect, some
from eroica.waiting import Gathering, graph_of

LIMIT_S = 10.0
"""A job stands still when nothing has happened on a rank for this long (design section 4: max(5 x median, 10 s)); the
caller raises it where steps are longer."""
PHASE_LIMIT_S = 1800.0
"""How long a save, an evaluation or a compilation may keep the others waiting: the default of group time-outs."""
_CAUSE_OF_PHASE = {"save": "checkpoint_io", "load": "checkpoint_io", "compile": "recompilation", "evaluation": "none"}
MOST_CONSEQUENCES = 32


def explain(
    views: Sequence[RankView],
    *,
    world_size: int,
    job: str = "",
    created: str = "",
    version: str = "",
    limit_s: float = LIMIT_S,
    phase_limit_s: float = PHASE_LIMIT_S,
    trigger: str = "hang",
    notes: Sequence[str] = (),
) -> Diagnosis | None:
    """See the module. `views`: at most one per rank; `created`: ISO-8601, the caller's clock; `limit_s`: silence that
    counts as standing still; `phase_limit_s`: how long saving, evaluation and compiling may last."""
    of = {view.rank: view for view in sorted(views, key=lambda view: view.rank)}
    if not of:
        return None
    doings = {rank: doing(view) for rank, view in of.items()}
    look = Look(of, doings, graph_of(of, doings, world_size), limit_s, phase_limit_s, world_size)
    suspects = _suspects(look)
    if not suspects:
        return None
    return _diagnosis(look, suspects, job, created, version, trigger, notes)


def _suspects(look: Look) -> list[Suspect]:
    """What is wrong, surest and first cause first; empty if nothing is."""
    left = departures(look.views, look.doings, look.graph)
    if left is not None:
        return _broken_calls(look) if left and all(_is_broken_call(look, suspect) for suspect in left) else left
    found = _standing(look)
    found = [by_handled(look, suspect) for suspect in found]
    if any(is_follower(view) and view.state in ("ended", "died") for view in look.views.values()):
        return [replace(suspect, kind="crash") for suspect in found] or followers(look.views)
    return found


def _is_broken_call(look: Look, suspect: Suspect) -> bool:
    """Processes that a library ended inside of a call in which ranks differ: a message of another size than expected
    ends whoever receives it, and that need not be the one who is wrong."""
    aborted = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS)
    if suspect.cause != "dead_worker" or any(look.views[rank].exit_status not in aborted for rank in suspect.ranks):
        return False
    return bool(different(look))


def _broken_calls(look: Look) -> list[Suspect]:
    died = {rank: view for rank, view in look.views.items() if view.state == "died" and view.exit_status is not None}
    texts = [f"rank {rank} was ended by it ({exit_words(view.exit_status)})" for rank, view in died.items()]
    ended = tuple(Evidence(text, "process", {}) for text in texts[:8])
    found = [by_handled(look, suspect) for suspect in different(look)]
    return [replace(suspect, kind="crash", evidence=(*suspect.evidence, *ended)) for suspect in found]


def _standing(look: Look) -> list[Suspect]:
    """What keeps the living from moving on."""
    stuck = [
        rank for rank, done in look.doings.items() if look.is_silent(rank) and done.what not in ("ended", "leaving")
    ]
    broken = [rank for rank, view in look.views.items() if is_follower(view)]
    if not broken and not any(look.views[rank].silent_s is not None for rank in stuck):
        return []  # nobody was seen to stand still
    halted = _halted(look, stuck)
    if halted:
        return halted
    others = different(look)
    circles = _circles(look)
    if others or circles:
        return others + circles
    if any(rank in look.graph.edges for rank in [*stuck, *broken]):
        return _ends(look)
    return [] if broken else _alone(look, stuck)


def _halted(look: Look, stuck: Sequence[int]) -> list[Suspect]:
    """Processes that somebody stopped, or holds under a tracer: never the fault of the line that they stand in."""
    found = []
    for state, cause in (("stopped", "missing_rank"), ("traced", "profiler_overhead")):
        ranks = [rank for rank in stuck if look.views[rank].state == state]
        if not ranks:
            continue
        pids = ", ".join(str(look.views[rank].pid) for rank in ranks[:8])
        tracers = sorted({look.views[rank].tracer for rank in ranks} - {0})
        if state == "stopped":
            text = f"{some(ranks)}: stopped by a signal (process {pids}, state T)"
            advice = (
                f"kill -CONT {pids.replace(',', '')}; find out who sent SIGSTOP: a shell's job control, a scheduler"
            )
        else:
            text = f"{some(ranks)}: held by process {', '.join(map(str, tracers)) or 'unknown'}, which traces it"
            advice = "end the debugger or sampler that is attached"
        evidence = Evidence(text, "process", {"state": state, "pids": [look.views[rank].pid for rank in ranks]})
        found.append(Suspect(cause, "rank", frozenset(ranks), "established", text, (evidence,), advice=advice))
    return found


def _circles(look: Look) -> list[Suspect]:
    """Ranks that wait for one another: groups used in opposite order, sends and receives that face each other."""
    found = []
    for circle in look.graph.circles:
        meetings = [look.graph.gatherings[node] for node in circle if isinstance(node, tuple)]
        ranks = frozenset(node for node in circle if isinstance(node, int))
        if not any(look.is_silent(rank) for rank in ranks):
            continue
        meetings.sort(key=lambda meeting: (-len(meeting.calls), meeting.meeting))
        parts = []
        for meeting in meetings[:6]:
            here = frozenset(meeting.calls) & ranks
            at = {line_of(look, rank) for rank in here} - {""}
            parts.append(f"{some(here)} in {meeting.what}" + (f" ({', '.join(sorted(at)[:3])})" if at else ""))
        odd = _minority(meetings, ranks)
        left = [departure for rank, departure in departures_of(look.views).items() if rank in (odd or ranks)]
        text = f"{' while '.join(parts)}: each waits for the other"
        if left and len(left) < len(ranks):
            odd = odd or frozenset(departure.rank for departure in left)
            text += f"; {left[0].text}"
        evidence = [
            Evidence(
                f"{meeting.what}: in it {some(meeting.calls)}; not yet {some(meeting.behind)}",
                "ring",
                {"inside": format_ranks(meeting.calls), "behind": format_ranks(meeting.behind)},
            )
            for meeting in meetings[:6]
        ] + places(look, ranks)
        evidence += [Evidence(departure.text, "ring", {"rank": departure.rank}) for departure in left[:4]]
        is_seen = all(look.doings[rank].by == "stack" for rank in ranks)
        found.append(
            Suspect(
                *("deadlock", "rank" if odd else "group", odd or ranks, "established" if is_seen else "supported"),
                *(text, tuple(evidence)),
                function=function_of(look, min(odd or ranks)),
                advice="use the groups in one order on all ranks, and send before receiving on one side of each pair",
            )
        )
    return found


def _minority(meetings: Sequence[Gathering], ranks: frozenset[int]) -> frozenset[int]:
    """Those of a circle that are elsewhere than more than half of it; empty without such a majority."""
    most = frozenset(meetings[0].calls) & ranks if meetings else frozenset[int]()
    return ranks - most if len(most) * 2 > len(ranks) else frozenset()


def _ends(look: Look) -> list[Suspect]:
    """Whoever the walk from the waiting ranks leads to."""
    by_fault: dict[tuple[str, str, str, str, str], list[tuple[int, Suspect]]] = defaultdict(list)
    found: list[Suspect] = []
    blind: set[int] = set()
    for node in sorted(look.graph.ends, key=str):
        if isinstance(node, int):
            if look.is_silent(node):
                suspect = _culprit(look, node)
                where = suspect.function.location if suspect.function is not None else None
                key = (suspect.cause, suspect.confidence, where or "", suspect.kind, look.doings[node].what)
                by_fault[key].append((node, suspect))
            continue
        gathering = look.graph.gatherings[node]
        if not any(look.is_silent(rank) for rank in gathering.calls):
            continue
        if gathering.unknown:
            blind |= gathering.unknown
        else:
            found.append(gone_past(look, gathering) or transport(look, gathering))
    if not by_fault and not blind and not found:
        return []
    merged = [_joined(look, group) for group in by_fault.values()]
    if merged:
        return merged
    return [_no_data(look, blind)] if blind else found[:4]


def _culprit(look: Look, rank: int) -> Suspect:
    """What is wrong with a rank that others wait for and that waits for no rank."""
    view, done = look.views[rank], look.doings[rank]
    who = some([rank])
    line = line_of(look, rank)
    at = f" at {line}" if line else ""
    evidence = [late(look, rank), *places(look, [rank]), *skews_of(look, rank)]
    function = function_of(look, rank)
    if done.what == "unknown":
        return _no_data(look, {rank})
    if done.what == "exception":
        text = f"{who}: left by {view.exception}, while the others wait for it"
        return Suspect(
            *("nic_or_host_network", "rank", frozenset({rank}), "hypothesis", text, tuple(evidence)),
            kind="hang" if view.state == "running" else "crash",
            advice="look at the network of its host: nobody else is seen to have gone before it",
        )
    phase = view.phase if view.state == "died" else done.what
    if phase in PHASES:
        lasts_s = view.phase_s or view.silent_s or 0.0
        over = lasts_s > look.phase_limit_s
        level = "established" if phase == view.phase else "supported"
        text = f"{who}: {_PHASE_WORDS[phase]} for {lasts_s:.0f} s{at}; "
        text += "the others gave up" if view.state == "died" else "the others wait until it is over"
        cause = _CAUSE_OF_PHASE[phase]
        return Suspect(
            *("missing_rank" if over and cause == "none" else cause, "rank", frozenset({rank}), level, text),
            *(tuple(evidence), function),
            kind="hang" if over else "paused",
            advice="nothing, if it ends by itself; else do it on all ranks alike, or while the others work on",
        )
    if view.no_batch:
        is_worker = is_of_worker(view.no_batch)
        text = f"{who}: gets no batch{at}: {view.no_batch}; it goes on without, and never comes to what others wait in"
        evidence.append(Evidence(f"{who}: calls for a batch end by {view.no_batch}", "ring", {}))
        return Suspect(
            *("dead_worker" if is_worker else "input_pipeline", "rank", frozenset({rank})),
            *("established" if is_worker else "supported", text),
            tuple(evidence),
            function,
            advice="find out why the worker was killed (out of memory: the kernel's log); a loop must not swallow this"
            if is_worker
            else "mend what raises this; a loop that swallows it leaves the other ranks behind",
        )
    if done.what in ("loader", "queue"):
        dead = [child for child in view.children if child.state == "dead" and child.exit_status not in (0, None)]
        if dead:
            told = ", ".join(f"{child.pid} ({exit_words(child.exit_status)})" for child in dead[:4])
            text = f"{who}: waits{at} for a worker process that is dead: {told}"
            evidence.append(Evidence(text, "process", {"dead": [child.pid for child in dead]}))
            return Suspect(
                *("dead_worker", "rank", frozenset({rank}), "established", text, tuple(evidence), function),
                advice="find out why it was killed (out of memory: the kernel's log) and give the wait a time limit",
            )
        alive = [child for child in view.children if child.state == "alive"]
        if done.what == "loader" and (done.by == "stack" or view.children):
            text = f"{who}: waits{at} for the next batch; " + (
                f"its {len(alive)} worker processes are alive" if alive else "its workers cannot be seen"
            )
            return Suspect(
                *("input_pipeline", "rank", frozenset({rank}), "supported", text, tuple(evidence), function),
                advice="look at what its workers do: storage that does not answer, a lock taken before the fork",
            )
    if done.what == "lock":
        locked = entanglement(view)
        if locked is not None:
            return Suspect(
                *("deadlock" if locked.is_circle else "missing_rank", "rank", frozenset({rank})),
                *(locked.confidence, f"{who}: {locked.text}"),
                tuple(evidence + [Evidence(text, "stack", {}) for text in locked.lines]),
                function,
                advice="take the two locks in one order everywhere"
                if locked.is_circle
                else "look at what holds the lock",
            )
    if look.is_opening and view.is_still and done.what in ("own", "queue") and asks_outside(view.main):
        text = f"{who}: asks somebody outside of the job{at} and gets no answer, before it has come to "
        text += awaited_by(look, rank)
        evidence.append(Evidence(f"{who}: its thread stands in that connection and did not run meanwhile", "stack", {}))
        return Suspect(
            *("startup_network", "rank", frozenset({rank}), "established", text, tuple(evidence), function),
            advice="look whether its host reaches that server (name, route, proxy, firewall); give the call a time "
            "limit, or make it after the ranks have met, without the others waiting for it",
            ruled_out=("the rendezvous itself: the others stand in it and wait for this rank",),
        )
    if done.what in ("leaving", "ended"):
        word = "has come to its end" if done.what == "ended" else f"is leaving{at}"
        handler = next((f for t in view.threads if t.is_main for f in t.frames if f.is_users and f.block), None)
        if handler is not None:
            word += f", in {'an' if handler.block == 'except' else 'a'} `{handler.block}` block"
        text = f"{who}: {word}, while the others wait for it"
        cause = "exception" if handler is not None and handler.block == "except" else "missing_rank"
        return Suspect(
            *(cause, "rank", frozenset({rank}), "supported", text, tuple(evidence), function),
            advice="find out why it left the loop before the others: fewer batches, an early return, an exception",
        )
    gil = next((thread for thread in view.threads if thread.has_gil), None)
    if gil is not None and not gil.is_main:
        text = f"{who}: thread {gil.name} holds the GIL, in {chain(gil)}"
        return Suspect(
            *("gil_contention", "rank", frozenset({rank}), "supported", text),
            tuple([*evidence, Evidence(text, "stack", {})]),
            name_of(gil.frames[0], user_frame(gil)) if gil.frames else None,
            advice="have the extension release the GIL while it works or waits",
        )
    holding = ", holding the GIL" if gil is not None else ""
    if done.by == "stack":
        main = view.main
        inside = f" in {main.frames[0].function}" if main is not None and main.frames else ""
        text = f"{who}: has not come to {awaited_by(look, rank)}; it is{inside}{at}{holding}"
        if view.is_leaving:
            text += "; it has taken its process group down"
        level = "established" if view.silent_s is not None and view.is_recording else "hypothesis"
    elif view.state == "died":
        text = f"{who}: had not come to {awaited_by(look, rank)} when the others gave up, and was then ended "
        text += f"({exit_words(view.exit_status)})"
        level = "supported"
    else:
        text = f"{who}: has not come to {awaited_by(look, rank)}; {_without_stack(view)}"
        level = "supported" if view.silent_s is not None else "hypothesis"
    batches = uneven_batches(look, {rank}, frozenset(look.views) - {rank})
    if batches:
        text += f"; {batches}"
        evidence.append(Evidence(batches, "ring", {}))
    return Suspect(
        *("missing_rank", "rank", frozenset({rank}), level, text, tuple(evidence), function),
        advice="look at this line: what does it wait for, and does every rank come past it equally often?",
    )


_PHASE_WORDS = {
    "save": "saves a checkpoint",
    "load": "loads a checkpoint",
    "compile": "compiles",
    "evaluation": "evaluates",
}


def _no_data(look: Look, ranks: Iterable[int]) -> Suspect:
    blind = frozenset(ranks)
    text = f"{some(blind)} left no data that tells where they stand, and everybody else waits"
    if len(blind) == 1:
        text = f"{some(blind)} left no data that tells where it stands, and everybody else waits"
    why = sorted({look.views[rank].no_stack for rank in blind if rank in look.views} - {""})
    return Suspect(
        *("unknown", "rank", blind, "unknown", text),
        (Evidence(text, "ring", {"ranks": format_ranks(blind)}), *(Evidence(reason, "stack", {}) for reason in why)),
        advice="look whether these processes and their hosts are alive",
    )


def _alone(look: Look, stuck: Sequence[int]) -> list[Suspect]:
    """Ranks stand still, and none of them waits for another."""
    by_fault: dict[tuple[str, str, str], list[tuple[int, Suspect]]] = defaultdict(list)
    for rank in stuck:
        done = look.doings[rank]
        if done.what in ("lock", "loader", "queue") or done.what in PHASES:
            suspect = _culprit(look, rank)
            where = suspect.function.location if suspect.function is not None else None
            by_fault[suspect.cause, where or "", suspect.kind].append((rank, suspect))
    if by_fault:
        return [_joined(look, group) for group in by_fault.values()]
    if len(stuck) < len(look.views):
        return []  # the others move on and nobody waits: a job without collectives, or one that is about to meet
    text = f"nothing happens on {some(stuck)}, and none of them waits for another rank"
    is_seen = any(look.views[rank].threads for rank in stuck)
    if is_seen:
        text += f"; {some(stuck[:1])}: {line_of(look, stuck[0]) or look.doings[stuck[0]].what}"
    return [
        Suspect(
            *("unknown", "all", frozenset(stuck), "unknown", text),
            (Evidence(text, "ring", {}), *places(look, stuck)),
            function=function_of(look, stuck[0]),
            advice="a long computation looks the same from outside: look at the lines in the evidence",
        )
    ]


def _joined(look: Look, group: Sequence[tuple[int, Suspect]]) -> Suspect:
    """Ranks with one and the same fault are one finding."""
    if len(group) == 1:
        return group[0][1]
    ranks = frozenset(rank for rank, _ in group)
    first = group[0][1]
    evidence = tuple(item for _, suspect in group[:8] for item in suspect.evidence)
    if first.cause == "unknown" and first.confidence == "unknown":
        return _no_data(look, ranks)
    text = first.text.replace(some([group[0][0]]) + ":", some(ranks) + ":", 1)
    return Suspect(
        *(first.cause, first.scope, ranks, first.confidence, text, evidence, first.function, first.kind),
        *(first.advice, first.ruled_out),
    )


def _without_stack(view: RankView) -> str:
    return view.no_stack or "its stack was not taken"


def _diagnosis(
    look: Look,
    suspects: Sequence[Suspect],
    job: str,
    created: str,
    version: str,
    trigger: str,
    notes: Sequence[str],
) -> Diagnosis:
    evidence: dict[str, Evidence] = {}
    findings = []
    for number, suspect in enumerate(suspects, 1):
        keys = []
        for item in suspect.evidence:
            key = next((name for name, known in evidence.items() if known == item), f"E{len(evidence) + 1}")
            evidence[key] = item
            keys.append(key)
        hosts = {look.views[rank].host for rank in suspect.ranks if rank in look.views} - {""}
        findings.append(
            Finding(
                id=f"F{number}",
                cause=suspect.cause,
                scope=suspect.scope,
                ranks=format_ranks(suspect.ranks),
                hosts=tuple(sorted(hosts)) if suspect.scope == "rank" else (),
                steps="once",
                function=suspect.function,
                pattern=PatternValues(),
                peers=PatternValues(),
                expected=PatternValues(),
                distance=None,
                delta=None,
                impact=Impact(),
                confidence=suspect.confidence,
                evidence=tuple(dict.fromkeys(keys)),
                ruled_out=suspect.ruled_out,
                advice=suspect.advice,
            )
        )
    everybody = {rank: main for rank, view in look.views.items() if (main := view.main) is not None and main.frames}
    for line in lines(merge(everybody)):
        if not any(known.text == line for known in evidence.values()):
            evidence[f"E{len(evidence) + 1}"] = Evidence(line, "stack", {})
    first = suspects[0]
    seen = [rank for rank, view in look.views.items() if view.is_recording or view.threads]
    blind = sorted({view.no_stack for view in look.views.values() if view.no_stack and view.state != "died"})
    return Diagnosis(
        job=job,
        created=created,
        kind=_kind(suspects),
        window=Window(trigger=trigger),
        coverage=Coverage(
            ranks_expected=max(look.world_size, len(look.views)),
            ranks_reported=len(seen),
            missing_ranks=format_missing(seen, look.world_size) if look.world_size else "",
            partial_ranks=format_ranks(rank for rank in seen if not look.views[rank].threads),
            explained_share=len(everybody) / max(look.world_size, len(look.views)),
            notes=(*notes, *blind[:8]),
        ),
        iteration=Iteration(),
        roles=(),
        hosts=_hosts(look.views),
        verdict=Verdict(
            *(first.scope, first.cause, findings[0].ranks, findings[0].hosts, first.confidence, first.text)
        ),
        findings=tuple(findings),
        consequences=_consequences(look, frozenset[int]().union(*(s.ranks for s in suspects))),
        evidence=evidence,
        producer={"name": "eroica", "version": version},
    )


def _kind(suspects: Sequence[Suspect]) -> str:
    kinds = {suspect.kind for suspect in suspects}
    return "crash" if "crash" in kinds else "hang" if "hang" in kinds else "paused"


def _hosts(views: Mapping[int, RankView]) -> dict[str, str]:
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank, view in views.items():
        if view.host:
            by_host[view.host].append(rank)
    return {host: format_ranks(ranks) for host, ranks in sorted(by_host.items())}


def _consequences(look: Look, blamed: frozenset[int]) -> tuple[Consequence, ...]:
    """Who waits, by call and line."""
    found = []
    for gathering in sorted(look.graph.gatherings.values(), key=lambda g: (-len(g.calls), g.meeting)):
        by_line: dict[str, list[int]] = defaultdict(list)
        for rank in gathering.calls:
            if rank not in blamed and look.doings[rank].what in ("call", "message", "rendezvous"):
                by_line[line_of(look, rank)].append(rank)
        for line, ranks in sorted(by_line.items()):
            since_s = max(gathering.calls[rank].for_s for rank in ranks)
            whom = f" for {some(gathering.behind)}" if gathering.behind else ""
            text = f"wait{whom} since {since_s:.0f} s" + (f" at {line}" if line else "")
            found.append(Consequence(format_ranks(ranks), gathering.what, text))
    return tuple(found[:MOST_CONSEQUENCES])
