"""`eroica status`, `incidents`, `profile`, `pace`, `confirm` and `show ID`: they ask a running coordinator.

Their options and their texts; what they ask goes through `client`. Nothing here prints or exits: `cli` does, with what
these return. What comes back holds strings of jobs, which are cleaned before a terminal sees them. Used by `cli`.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from eroica.errors import UnavailableError, UserError
from eroica.given import amount

if TYPE_CHECKING:
    from eroica.answers import Incident, Job, Pacing, Rank, Window
    from eroica.client import Client
    from eroica.findings import Diagnosis

_AMOUNT = amount(1e6)
POLL_S = 1.0
"""Between looks at a window: it takes a quarter of a minute at least."""
MOST_ROWS = 1000
MOST_MISSED = 10
"""Looks in a row that nobody answers."""
_ID = re.compile(r"[0-9a-f]{12}(-[0-9]{1,6})?")
_API_HELP = (
    "the coordinator: a token file that eroica serve wrote, or its URL, with the token in EROICA_TOKEN (default: "
    "EROICA_API, else ~/.eroica/serve/act.token)"
)
Command = Callable[[str, Callable[[argparse.Namespace], str], str, str], argparse.ArgumentParser]
"""Makes the parser of one command: name, what it runs, purpose, example."""


def add_commands(add: Command) -> None:
    """Add the parsers of these commands, whose functions return what stdout gets."""
    command = add(
        "status",
        status,
        "tell where the jobs of a running coordinator stand, or the ranks of one",
        "eroica status waves",
    )
    command.add_argument(
        "job", nargs="?", default="", metavar="JOB", help="its ranks, too (default: all jobs in a line each)"
    )
    command.add_argument("--format", choices=("text", "json"), default="text", help="what stdout gets (default: text)")
    add_api(command)

    command = add(
        "incidents",
        incidents,
        "list what a coordinator has found, newest first",
        "eroica incidents --job waves --since 2026-05-01",
    )
    command.add_argument("--job", default="", metavar="NAME", help="of this job alone")
    command.add_argument(
        "--since", default="", metavar="TIME", help="from then on, as in 2026-05-31 or 2026-05-31T12:00:00Z"
    )
    command.add_argument("--kind", default="", metavar="KIND", help="slow, hang, crash, ... (default: all)")
    command.add_argument("--limit", type=_count, default=50, metavar="N", help="at most so many (default: 50)")
    command.add_argument("--format", choices=("text", "json"), default="text", help="what stdout gets (default: text)")
    add_api(command)

    command = add(
        "profile",
        profile,
        "have all ranks of a running job captured now, and tell what that shows",
        "eroica profile waves",
    )
    command.add_argument("job", metavar="JOB", help="as eroica status names it")
    command.add_argument("--no-wait", action="store_true", help="leave at once; the coordinator tells what comes of it")
    add_api(command)

    command = add(
        "pace",
        pace,
        "tell how the pacing of a running job stands, or switch it: hold back ranks that would only wait, where a "
        "trial shows a gain (docs/pacing.md)",
        "eroica pace waves --dry-run",
    )
    command.add_argument("job", metavar="JOB", help="as eroica status names it")
    wish = command.add_mutually_exclusive_group()
    wish.add_argument("--dry-run", action="store_true", help="say what it would do, and do nothing")
    wish.add_argument("--enable", action="store_true", help="try it, and keep it only while trials show a gain")
    wish.add_argument("--off", action="store_true", help="hold nobody any more")
    command.add_argument(
        "--threshold",
        type=_AMOUNT,
        metavar="SHARE",
        help="waiting over the iteration above which it is tried (0.05)",
    )
    command.add_argument("--max-delay", type=_AMOUNT, metavar="MS", help="longest hold of a rank (50; at most 200)")
    command.add_argument(
        "--cap",
        type=_cap,
        action="append",
        default=[],
        metavar="GROUP=MS",
        help="the same for one process group, as eroica pace names it; can be given several times",
    )
    command.add_argument("--ttl", type=_AMOUNT, metavar="S", help="an order that is not renewed ends by itself (10)")
    command.add_argument("--format", choices=("text", "json"), default="text", help="what stdout gets (default: text)")
    add_api(command)

    command = add(
        "confirm",
        confirm,
        "tell the coordinator what the cause of an incident was found to be",
        "eroica confirm 3f9c2a7b10de host_gc --note 'gc.freeze() helped'",
    )
    command.add_argument("incident", metavar="INCIDENT_ID", help="as eroica incidents shows it")
    command.add_argument(
        "cause", metavar="CAUSE", help="one of eroica's causes, such as host_gc; a wrong one is answered with the list"
    )
    command.add_argument("--note", default="", metavar="TEXT", help="for whoever meets the same problem again")
    add_api(command)


def add_api(command: argparse.ArgumentParser) -> None:
    """Where the coordinator is."""
    command.add_argument("--api", default="", metavar="TOKEN|URL", help=_API_HELP)


def connect(options: argparse.Namespace) -> Client:
    """The coordinator that was named."""
    from eroica.client import find_client

    if "@" in options.api:
        options.usage("argument --api: all users of a host can read command lines; put the token into EROICA_TOKEN")
    return find_client(os.environ, options.api)


def is_incident(text: str) -> bool:
    """A word that is the identity of an incident, if it is no file."""
    return _ID.fullmatch(text) is not None and not os.path.exists(text)


def fetch(options: argparse.Namespace, id: str) -> tuple[Diagnosis, str]:
    """An incident, and what is known of the same problem."""
    from eroica.findings import from_json

    client = connect(options)
    return from_json(client.incident(id)), _before(client, id)


def status(options: argparse.Namespace) -> str:
    """`eroica status`."""
    client = connect(options)
    if not options.job:
        jobs = client.jobs()
        if options.format == "json":
            return _json(jobs)
        if not jobs:
            return "no job has reported to this coordinator yet\n"
        return _table(["job", "state", "ranks", "hosts", "iteration", "iterations", "incidents"], map(_of_job, jobs))
    job = client.job(options.job)
    ranks = client.ranks(options.job, limit=MOST_ROWS) if job.is_live else []
    if options.format == "json":
        return _json({"job": job, "ranks": ranks})
    lines = [_sentence(job)]
    lines += [f"under way: {job.window}"] if job.window else []
    silent = sorted(host for host, is_heard in job.hosts.items() if not is_heard and not job.has_ended)
    lines += (
        [f"not heard: the agent{'s' if len(silent) > 1 else ''} of {', '.join(map(_clean, silent))}"] if silent else []
    )
    if not ranks:
        return "\n".join(lines) + "\n"
    table = _table(["rank", "host", "state", "iterations", "iteration"], map(_of_rank, ranks))
    return "\n".join(lines) + "\n" + table


def incidents(options: argparse.Namespace) -> str:
    """`eroica incidents`."""
    client = connect(options)
    found: list[Incident] = []
    cursor = None
    while len(found) < options.limit:
        asked = min(options.limit - len(found), 200)
        page = client.incidents(job=options.job, kind=options.kind, since=options.since, cursor=cursor, limit=asked)
        found += page.incidents
        cursor = page.next
        if cursor is None:
            break
    if options.format == "json":
        return _json(found)
    if not found:
        return "no incident\n"
    return "".join(f"{_line(incident)}\n" for incident in found)


def profile(options: argparse.Namespace) -> str:
    """`eroica profile`."""
    client = connect(options)
    window = client.start_window(options.job, secrets.token_hex(8))
    if options.no_wait:
        return f"asked for a window of {_clean(options.job)}: {window.id}\n"
    window = _awaited(client, window)
    if window.incident is None:
        raise UserError(f"no window of {_clean(options.job)} came about: {_clean(window.why, 400)}")
    from eroica.findings import from_json
    from eroica.report import render_text

    return render_text(from_json(_kept(client, window.incident))) + _before(client, window.incident)


def pace(options: argparse.Namespace) -> str:
    """`eroica pace`."""
    client = connect(options)
    modes = {"off": options.off, "dry-run": options.dry_run, "enable": options.enable}
    mode = next((mode for mode, is_wished in modes.items() if is_wished), "")
    numbers = (options.threshold, options.max_delay, options.ttl)
    if mode in ("", "off") and (options.cap or numbers != (None, None, None)):
        options.usage("--threshold, --max-delay, --cap and --ttl go with --dry-run or --enable")
    if not mode:
        found = client.pacing(options.job)
    else:
        found = client.set_pacing(
            options.job,
            mode,
            threshold=options.threshold,
            max_delay_s=options.max_delay / 1e3 if options.max_delay is not None else None,
            ttl_s=options.ttl,
            group_caps_s={group: cap_ms / 1e3 for group, cap_ms in options.cap},
        )
    return _json(found) if options.format == "json" else render_pacing(found)


def _cap(text: str) -> tuple[str, float]:
    """ "GROUP=MS"; a group's name may hold a "="."""
    group, _, cap = text.rpartition("=")
    if not group:
        raise argparse.ArgumentTypeError(f"{text!r} is no GROUP=MS, as in default_pg=20")
    return group, _AMOUNT(cap)


def render_pacing(found: Pacing) -> str:
    """As text."""
    from eroica.fabric.pacing import readable_gain

    phase = f", {found.phase}" if found.phase else ""
    lines = [
        f"{_clean(found.job)}: pacing is {found.mode}{phase}; "
        + ("ranks are held back now" if found.is_held else "nobody is held back")
        + (", a dry run would do so now" if found.would_hold else "")
    ]
    if found.mode != "off":
        lines.append(
            f"tried above {found.threshold:.1%} of waiting, holds of {found.max_delay_s * 1e3:g} ms at most, orders "
            f"end after {found.ttl_s:g} s; set by {_clean(found.who)}"
        )
        lines += [
            f"  group {_clean(group, 60)}: holds of {cap_s * 1e3:g} ms at most"
            for group, cap_s in sorted(found.group_caps_s.items())
        ]
    if found.iteration_s is not None and found.dispersion is not None:
        lines.append(
            f"{found.num_iterations:,} iterations of all ranks seen, {_milliseconds(found.iteration_s)} each, of which "
            f"the usual rank waits {found.dispersion:.1%}"
        )
    if found.gain is not None and found.gain_error is not None and found.steadier is not None:
        lines.append(f"last trial: {readable_gain(found.gain, found.gain_error)}, variation {-found.steadier:+.0%}")
    lines += [
        f"  group {_clean(group.name, 60)}, {group.num_ranks} ranks: wait {_milliseconds(group.wait_s)}, holds up to "
        f"{_milliseconds(group.longest_delay_s)}, usually {_milliseconds(group.median_delay_s)}"
        for group in found.groups
    ]
    lines += [
        f"  {_time(change.at)}  step {change.step:,}  {change.phase or change.mode}: {_clean(change.why, 300)}"
        for change in found.changes[-10:]
    ]
    if found.why_not:
        lines.append(f"nothing comes of it: {_clean(found.why_not, 300)}")
    return "".join(f"{line}\n" for line in lines)


def confirm(options: argparse.Namespace) -> str:
    """`eroica confirm`."""
    made = connect(options).confirm(options.incident, options.cause, options.note)
    return f"{options.incident}: {made.cause}, confirmed by {_clean(made.who)}\n"


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text[:9]) <= 100_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 100000")
    return int(text)


def _awaited(client: Client, window: Window) -> Window:
    """When it is over. A coordinator that makes a diagnosis of many ranks answers nothing meanwhile."""
    num_missed = 0
    while not window.is_over:
        time.sleep(POLL_S)
        try:
            window = client.window(window.job, window.id)
            num_missed = 0
        except UnavailableError:
            num_missed += 1
            if num_missed > MOST_MISSED:
                raise
    return window


def _kept(client: Client, id: str) -> dict[str, object]:
    """The store's writer may be a moment behind the coordinator."""
    for _ in range(5):
        try:
            return client.incident(id)
        except UserError:
            time.sleep(POLL_S)
    return client.incident(id)


def _before(client: Client, id: str) -> str:
    """What is known of the same problem, in some lines."""
    seen = client.seen_before(id)
    lines = []
    if seen.confirmed is not None:
        note = f": {_clean(seen.confirmed.note, 400)}" if seen.confirmed.note else ""
        lines.append(f"confirmed by {_clean(seen.confirmed.who)} as {seen.confirmed.cause}{note}")
    if seen.num:
        causes = ", ".join(f"{cause} ({num})" for cause, num in seen.causes.items())
        found = f"; people found {causes}" if causes else "; nobody has confirmed a cause"
        lines.append(f"seen before: {seen.num} time{'s' if seen.num > 1 else ''}{found}")
        lines += [f"  {_line(incident)}" for incident in seen.incidents[:3]]
    return "".join(f"{line}\n" for line in lines)


def _line(incident: Incident) -> str:
    found = f" [confirmed: {incident.confirmed.cause}]" if incident.confirmed is not None else ""
    said = f"{incident.kind}: {_clean(incident.summary, 300)}{found}"
    return f"{incident.id}  {_time(incident.created)}  {_clean(incident.job, 40)}  {said}"


def _sentence(job: Job) -> str:
    if not job.is_live:
        return f"{job.name} is over, last seen {_time(job.last_seen or '')}; {_num(job.num_incidents, 'incident')}"
    if job.has_ended:
        return f"{job.name} has ended on {_num(len(job.hosts), 'host')}; {_num(job.num_incidents, 'incident')}"
    pace = f"{_milliseconds(job.iteration_s)} per iteration" if job.iteration_s else "no pace yet"
    of = f" of {job.world_size}" if job.world_size else ""
    return (
        f"{job.name}: {job.num_alive}{of} ranks on {_num(len(job.hosts), 'host')}, {pace} (slowest rank "
        f"{_milliseconds(job.slowest_s)}), {_num(job.num_incidents, 'incident')}"
    )


def _of_job(job: Job) -> list[str]:
    state = job.window or "running"
    if not job.is_live:
        state = "over"
    elif job.has_ended:
        state = "ended"
    elif not any(job.hosts.values()):
        state = "not heard"
    ranks = f"{job.num_alive}/{job.world_size or '?'}" if job.is_live else ""
    hosts = str(len(job.hosts)) if job.is_live else ""
    count = f"{job.num_iterations:,}" if job.is_live and not job.has_ended else ""
    return [job.name, state, ranks, hosts, _milliseconds(job.iteration_s), count, str(job.num_incidents)]


def _of_rank(rank: Rank) -> list[str]:
    state = "ended" if not rank.is_alive else "alive" if rank.is_heard else "not heard"
    return [str(rank.rank), _clean(rank.host, 60), state, f"{rank.num_iterations:,}", _milliseconds(rank.iteration_s)]


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f} ms"


def _num(num: int, what: str) -> str:
    return f"{num} {what}{'' if num == 1 else 's'}"


def _time(at: str) -> str:
    return _clean(at[:19].replace("T", " "))


def _clean(text: str, limit: int = 200) -> str:
    from eroica.untrusted import clean

    return clean(text, limit)


def _table(names: Sequence[str], rows: Iterator[list[str]]) -> str:
    lines = [list(names), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(names))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n" for line in lines
    )


def _json(value: object) -> str:
    import json

    import msgspec

    return json.dumps(msgspec.to_builtins(value), indent=2) + "\n"
