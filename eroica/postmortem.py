"""A post-mortem: where each rank of a job stands, or stood when it died, from the flight rings that it left.

`read_rings` opens the files of a folder, `post_mortem` turns them into a plain record, `render_text` and `render_json`
show it. It tells positions: steps, the last collective of each group, who has entered it and who has not, what is
still open, how long iterations took, garbage collection, dead processes and their exceptions. It names no cause and no
culprit; that is `hang`'s part, which looks at the processes, too, and is shown on top. Used by `eroica show RINGDIR`.

Numbers of calls on a group are compared over ranks; clocks are not, except that times of one host are shown side by
side.
"""

from __future__ import annotations

import json
import socket
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from eroica import __version__, ring
from eroica.findings import Diagnosis, to_json
from eroica.flights import groups_of, last_sign_ns, newest_of, newest_start, noted, read_rings, what_of, with_place
from eroica.hang import explain
from eroica.job import format_ranks, told_ranks
from eroica.marks import watched
from eroica.ring import Flight, Record
from eroica.untrusted import clean
from eroica.views import look_closer

SCHEMA = "eroica.postmortem/1"
MOST_RANKS = 40
"""Ranks that the text shows; those that died or are behind come first."""
MOST_GROUPS = 12


@dataclass(frozen=True, slots=True)
class Open:
    """A span that began and has not ended."""

    what: str
    """"allreduce 41", "dataloader next 7", "optimizer step 7", "garbage collection"."""
    group: str
    """Description of the process group; "" if it has none."""
    for_s: float
    """Until now if the process runs here, else until the last thing that it recorded."""


@dataclass(frozen=True, slots=True)
class RankPosition:
    """One rank."""

    rank: int
    state: str
    """running, ended, died (without coming to its end), off (the probe gave up), unknown (on another host)."""
    host: str
    pid: int
    num_steps: int
    """Outermost optimizer steps completed, or left out by a gradient scaler."""
    num_skipped: int
    """Those left out by a gradient scaler."""
    num_nexts: int
    """Batches asked for, the end of each epoch included."""
    open: list[Open]
    """What it is in, outermost first."""
    silent_s: float | None
    """Since the last beginning or end of anything, if the process runs here."""
    gc_s: float
    num_gc: int
    exception: str
    """What ended the process; "" if nothing is known."""
    fault: str
    """What made the probe give up; "" if nothing did."""
    num_torn: int
    iteration_s: float | None = None
    """Median of the completed iterations that the ring still holds, evaluations and the like left out; None without."""
    last_iteration_s: float | None = None
    """The last one of these."""


@dataclass(frozen=True, slots=True)
class GroupPosition:
    """One process group, at the furthest call that any of its ranks has entered."""

    name: str
    ranks: str
    """Members, as far as known."""
    sequence: int
    ops: dict[str, str]
    """What the ranks that have entered it call: operation -> ranks. More than one is a mismatch."""
    waiting: str
    """Ranks that are in it."""
    done: str
    """Ranks that have it behind them."""
    failed: str
    """Ranks in which it ended by an error."""
    entered: str
    """Ranks that have entered it and whose end cannot be seen."""
    behind: dict[str, str]
    """Rank -> its last call here ("allreduce 40", or "none")."""
    unknown: str
    """Members without a ring, or whose ring no longer holds a call on this group."""


@dataclass(frozen=True, slots=True)
class PostMortem:
    """All ranks of one start of a job."""

    job: str
    generation: int
    world_size: int
    """0 if unknown."""
    ranks: list[RankPosition]
    missing: str
    """Ranks that left no ring here."""
    groups: list[GroupPosition]
    """Those with ranks behind first."""
    notes: list[str]
    """What was not used: unreadable files, older starts."""


def post_mortem(
    flights: Sequence[Flight], notes: Sequence[str], *, host: str, clock_ns: int, alive: Sequence[bool | None]
) -> PostMortem:
    """`alive`: per flight, whether its process runs; `clock_ns`: CLOCK_MONOTONIC of `host`, where the reader is."""
    notes = list(notes)
    newest = newest_of(flights)
    world_size = max(newest.words[ring.WORLD_SIZE], 0)
    latest, num_older = newest_start(flights, alive)
    if num_older:
        notes.append(f"{num_older} rings of earlier starts or of helper processes were left out")
    groups = {rank: groups_of(flight) for rank, (flight, _) in latest.items()}
    names = {key: name for own in groups.values() for key, (name, _) in own.items()}
    positions = [_rank(flight, lives, names, host, clock_ns) for _, (flight, lives) in latest.items()]
    return PostMortem(
        job=noted(newest, "job"),
        generation=newest.identity.generation,
        world_size=world_size,
        ranks=positions,
        missing=format_ranks(set(range(min(world_size, 1 << 20))) - set(latest)),
        groups=_group_positions({rank: flight for rank, (flight, _) in latest.items()}, groups),
        notes=notes,
    )


def look(path: Path, clock_ns: int) -> PostMortem:
    """`read_rings` and `post_mortem` on this host, now."""
    flights, notes = read_rings(path)
    host = socket.gethostname()
    alive = [ring.is_alive(flight.identity) if noted(flight, "host") == host else None for flight in flights]
    return post_mortem(flights, notes, host=host, clock_ns=clock_ns, alive=alive)


def explanation(path: Path) -> Diagnosis | None:
    """Why the job of the rings at `path` stands still or broke off; None if nothing is wrong, or nothing can be seen.

    Stacks are taken only where a rank that runs here has been silent for long: py-spy pauses what it looks at.
    """
    closer = look_closer(path, with_stacks=False)
    if any(view.silent_s is not None and view.silent_s >= closer.limit_s for view in closer.views):
        closer = look_closer(path)
    return explain(
        closer.views,
        world_size=closer.world_size,
        job=closer.job,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        version=__version__,
        limit_s=closer.limit_s,
    )


def render_json(report: PostMortem, why: Diagnosis | None = None) -> str:
    """One object, indented, ending with a newline; fields are only ever added within this schema. `why`: `explanation`,
    given as a diagnosis of its own schema; null if there is none."""
    body = {"schema": SCHEMA, **asdict(report), "explanation": to_json(why) if why is not None else None}
    return json.dumps(body, indent=2) + "\n"


def render_text(report: PostMortem) -> str:
    """For a terminal; bounded, whatever the size of the job."""
    most = max((rank.num_steps for rank in report.ranks), default=0)
    lines = [_headline(report), ""]
    rows = [("rank", "state", "steps", "nexts", "iteration", "gc", "in")]
    shown = sorted(
        report.ranks, key=lambda rank: (rank.state not in ("died", "off"), rank.num_steps == most, rank.rank)
    )
    for rank in sorted(shown[:MOST_RANKS], key=lambda rank: rank.rank):
        rows.append(
            (
                str(rank.rank),
                rank.state,
                str(rank.num_steps) + (f" ({rank.num_skipped} skipped)" if rank.num_skipped else ""),
                str(rank.num_nexts),
                _pace(rank),
                f"{rank.gc_s:.3f} s",
                _inside(rank),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines += [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    lines += _more(len(shown) - MOST_RANKS, "ranks")
    if report.groups:
        lines += ["", "Groups, at the furthest collective that a rank has entered"]
        lines += [f"  {_group_line(group)}" for group in report.groups[:MOST_GROUPS]]
        lines += _more(len(report.groups) - MOST_GROUPS, "groups")
    told = [f"rank {rank.rank} left by {clean(rank.exception)}" for rank in report.ranks if rank.exception]
    told += [f"rank {rank.rank}: the probe gave up: {clean(rank.fault)}" for rank in report.ranks if rank.fault]
    told += [f"rank {rank.rank}: {rank.num_torn} records half written" for rank in report.ranks if rank.num_torn]
    if report.missing:
        told.append(f"no ring from ranks {clean(report.missing)}")
    told += [clean(note) for note in report.notes]
    if told:
        lines += ["", "Notes"] + [f"  {text}" for text in told[:MOST_RANKS]] + _more(len(told) - MOST_RANKS, "notes")
    return "\n".join(lines) + "\n"


def _pace(rank: RankPosition) -> str:
    if rank.iteration_s is None or rank.last_iteration_s is None:
        return "-"
    return f"{rank.iteration_s:.3f} s, last {rank.last_iteration_s:.3f} s"


def _headline(report: PostMortem) -> str:
    size = f" of {report.world_size}" if report.world_size > len(report.ranks) else ""
    parts = [f"{len(report.ranks)}{size} ranks"]
    for state in ("died", "off", "running", "ended", "unknown"):
        ranks = format_ranks(rank.rank for rank in report.ranks if rank.state == state)
        if ranks:
            parts.append(f"{state}: {ranks}")
    start = f", start {report.generation + 1}" if report.generation else ""
    return f"post-mortem of {clean(report.job) or 'a job'}{start}: " + "; ".join(parts)


def _inside(rank: RankPosition) -> str:
    texts = [
        f"{span.what}{f' of {clean(span.group, 40)}' if span.group else ''}, {span.for_s:.1f} s" for span in rank.open
    ]
    if len(texts) > 2:
        texts = [texts[0], f"... {len(texts) - 2} more ...", texts[-1]]
    if not texts and rank.silent_s is not None:
        return f"its own code, {rank.silent_s:.1f} s"
    return "; ".join(texts) or "-"


def _group_line(group: GroupPosition) -> str:
    parts = [f"{clean(group.name, 60)} ({clean(group.ranks, 60)}), call {group.sequence}:"]
    calls = [f"{op} by {clean(ranks, 60)}" if len(group.ops) > 1 else op for op, ranks in group.ops.items()]
    parts.append(" but ".join(calls) + ";")
    for word, ranks in (
        *(("in it", group.waiting), ("done", group.done)),
        *(("failed", group.failed), ("entered", group.entered)),
    ):
        if ranks:
            parts.append(f"{word}: {clean(ranks, 60)};")
    if group.behind:
        calls = [f"{rank} (last: {call})" for rank, call in list(group.behind.items())[:6]]
        parts.append(
            f"not yet: {', '.join(calls)}" + (f" and {len(group.behind) - 6} more;" if len(group.behind) > 6 else ";")
        )
    if group.unknown:
        parts.append(f"unknown: {clean(group.unknown, 60)};")
    return " ".join(parts).rstrip(";")


def _more(count: int, what: str) -> list[str]:
    return [f"  and {count} more {what}; --format json has all"] if count > 0 else []


def _rank(flight: Flight, lives: bool | None, names: dict[int, str], host: str, clock_ns: int) -> RankPosition:
    words = flight.words
    last_ns = last_sign_ns(flight)
    is_here = lives is True and noted(flight, "host") == host
    until_ns = clock_ns if is_here else last_ns
    state = {ring.ENDED: "ended", ring.OFF: "off"}.get(words[ring.STATE], "running")
    if state == "running" and lives is not True:
        state = "unknown" if lives is None else "died"
    spans = [
        Open(what_of(record), names.get(record.group, ""), max(0, until_ns - record.begin_ns) / 1e9)
        for record in flight.records
        if record.duration_ns is None and not record.flags & ring.UNTIMED
    ]
    iterations_ns = [i.duration_ns for i in watched(flight).iterations if i.pause is None and not i.skipped]
    return RankPosition(
        rank=words[ring.RANK],
        state=state,
        host=noted(flight, "host"),
        pid=flight.identity.pid,
        num_steps=words[ring.NUM_STEPS],
        num_skipped=words[ring.NUM_SKIPPED],
        num_nexts=words[ring.NUM_NEXTS],
        open=spans,
        silent_s=max(0, clock_ns - last_ns) / 1e9 if is_here else None,
        gc_s=words[ring.GC_NS] / 1e9,
        num_gc=words[ring.NUM_GC],
        exception=with_place(flight, "exception"),
        fault=with_place(flight, "fault"),
        num_torn=flight.num_torn,
        iteration_s=median(iterations_ns) / 1e9 if iterations_ns else None,
        last_iteration_s=iterations_ns[-1] / 1e9 if iterations_ns else None,
    )


def _group_positions(flights: dict[int, Flight], groups: dict[int, dict[int, tuple[str, str]]]) -> list[GroupPosition]:
    last: dict[int, dict[int, dict[int, Record]]] = defaultdict(lambda: defaultdict(dict))
    for rank, flight in flights.items():
        for record in flight.records:
            if record.kind == ring.COLLECTIVE:
                last[record.group][rank][record.sequence] = record
    known = {key: named for own in groups.values() for key, named in own.items()}
    for rank, flight in flights.items():
        # In steps whose collectives are not recorded, the position alone says how far a rank is.
        for record in flight.unrecorded():
            if record.kind == ring.COLLECTIVE:
                last[record.group][rank][record.sequence] = record
    positions = []
    for key, calls in last.items():
        name, members_text = known.get(key, (f"{key:016x}", ""))
        members = set(told_ranks(members_text)) or set(calls)
        furthest = max(max(own) for own in calls.values())
        here = {rank: own[furthest] for rank, own in calls.items() if furthest in own}
        # A rank that has neither record nor position here has made no call, if its ring still holds its first record.
        behind = {str(rank): what_of(own[max(own)]) for rank, own in sorted(calls.items()) if rank not in here}
        for rank in sorted(members - set(calls)):
            if rank in flights and (not flights[rank].records or flights[rank].records[0].number == 1):
                behind[str(rank)] = "none"
        ops: dict[str, set[int]] = defaultdict(set)
        for rank, record in here.items():
            ops[what_of(record).split(" ")[0]].add(rank)
        ended = {rank for rank, record in here.items() if record.duration_ns is not None}
        failed = {rank for rank in ended if here[rank].raised}
        untimed = {rank for rank, record in here.items() if record.flags & ring.UNTIMED} - ended
        positions.append(
            GroupPosition(
                name=name,
                ranks=format_ranks(members),
                sequence=furthest,
                ops={op: format_ranks(ranks) for op, ranks in sorted(ops.items())},
                waiting=format_ranks(set(here) - ended - untimed),
                done=format_ranks(ended - failed),
                failed=format_ranks(failed),
                entered=format_ranks(untimed),
                behind=behind,
                unknown=format_ranks(members - set(here) - {int(rank) for rank in behind}),
            )
        )
    return sorted(positions, key=lambda group: (not group.behind, len(group.ops) < 2, group.name, group.ranks))
