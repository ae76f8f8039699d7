"""`eroica run`, `serve`, `agent` and `demo`: their arguments and their bodies. Jobs that are watched while they run.

Diagnoses are shown on stderr, since stdout is the job's, and kept in a folder as they come. What a command needs is
imported when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from eroica.cli_output import encodable, print_diagnosis, print_text, progress_bar, render, say, write_reports
from eroica.errors import UserError
from eroica.given import amount, count

if TYPE_CHECKING:
    from eroica.access import Pass
    from eroica.cli_scaling import Adder
    from eroica.investigation import Incident
    from eroica.topology import Topology

_AMOUNT = amount(1e9)
_BUS_HELP = (
    "where the coordinator (eroica serve) is to be reached: a pass that it wrote, or a URL without a secret (default: "
    "EROICA_COORDINATOR, which may hold one)"
)
_MEETS_HELP = "; store: the runs of all hosts find each other in the job's own store, and that of rank 0 coordinates"
TOPOLOGY_HELP = (
    "leaf, rail and spine of each host, TOML or JSON, to tell findings that are all of one of them (docs/cluster.md)"
)


def add(command: Adder) -> None:
    """Add them."""
    parser = command(
        "run",
        _run,
        "run a training job and watch it: what makes it slow or hang is told while it runs",
        "eroica run --out incidents/ -- torchrun --nproc-per-node 4 train.py",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("eroica-out"), metavar="DIR", help="for the diagnoses (default: eroica-out)"
    )
    parser.add_argument("--job", default="", metavar="NAME", help="name of the job in the reports")
    parser.add_argument(
        "--no-baseline", action="store_true", help="do not capture a window after warm-up to compare later ones with"
    )
    parser.add_argument(
        "--frames",
        choices=("sampled", "traced", "none"),
        default=None,
        help="how Python frames come into a window: looked at some hundred times a second, every call (dearer), or "
        "not; on demand they are traced or none (default: sampled; on demand traced)",
    )
    parser.add_argument(
        "--capture",
        choices=("in-process", "on-demand"),
        default="in-process",
        help="who records windows: each rank by itself (default), or Kineto's own thread in it. On demand is for "
        "training with very many operators, where to stop the profiler in process would hold the interpreter for "
        "seconds. Its dangers: a rank that ends while a window is recorded ends some seconds later, and by SIGSEGV if "
        "the window cannot be ended first (one by the clock that lasts over 10 s); a child made by os.fork that ends "
        "in the ordinary way hangs at its end (workers of loaders do not)",
    )
    parser.add_argument("--keep-captures", action="store_true", help="keep the traces of each diagnosis in DIR")
    parser.add_argument(
        "--keep-rings",
        action="store_true",
        help="keep the flight rings in DIR/rings-TIME when the job has ended, for eroica show",
    )
    parser.add_argument(
        "--pace",
        choices=("off", "dry-run", "enable"),
        default="off",
        help="hold ranks that would only wait back for a moment, where trials show a gain, or only say what that would "
        "do; DIR/pacing.jsonl tells what was decided (default: off; docs/pacing.md)",
    )
    parser.add_argument("--bus", metavar="PASS|URL|store", default="", help=_BUS_HELP + _MEETS_HELP)
    parser.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="-- COMMAND...", help="the job, as you would start it yourself"
    )

    parser = command(
        "serve",
        _serve,
        "coordinate the jobs of many hosts: bring the bus along, and diagnose what their agents tell of",
        "eroica serve --job waves --out incidents/",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("eroica-out"),
        metavar="DIR",
        help="for the diagnoses, in a folder for each job (default: eroica-out)",
    )
    parser.add_argument(
        "--state",
        type=Path,
        metavar="DIR",
        help="for passes, tokens, the store and the bus's configuration (default: ~/.eroica/serve)",
    )
    parser.add_argument(
        "--job",
        action="append",
        default=[],
        metavar="NAME",
        help="make a pass for this job alone; again for more jobs (default: one pass for all jobs)",
    )
    parser.add_argument(
        "--listen",
        type=_address,
        default=("127.0.0.1", 0),
        metavar="HOST[:PORT]",
        help="where the bus is to be reached (default: this host alone, any free port); off loopback it needs a "
        "certificate, since whoever can reach it may try to get in",
    )
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="the bus's certificate, PEM")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its key, PEM")
    parser.add_argument(
        "--tls-ca", type=Path, metavar="FILE", help="what agents are to trust, PEM (default: the certificate itself)"
    )
    parser.add_argument(
        "--bus", metavar="PASS|URL", default="", help="use this bus instead, as its coordinator; no secret in a URL"
    )
    parser.add_argument("--no-baseline", action="store_true", help="do not capture a window after warm-up")
    parser.add_argument("--until-over", action="store_true", help="end when all agents that have come have left again")

    parser.add_argument(
        "--http",
        type=_address_or_off,
        default=("127.0.0.1", 0),
        metavar="HOST[:PORT]|off",
        help="where the HTTP API is to be reached (default: this host alone, any free port; off: nowhere); off "
        "loopback it takes the same certificate",
    )
    parser.add_argument(
        "--http-name", action="append", default=[], metavar="NAME", help="a further name that the API is called by"
    )
    parser.add_argument(
        "--token",
        action="append",
        type=_token,
        default=[],
        metavar="NAME:SCOPE",
        help="make a token of the API for somebody, who then stands in its audit log by that name; SCOPE is read, act "
        "or admin (default: one for each scope)",
    )
    parser.add_argument(
        "--store",
        default="",
        metavar="FILE|URL",
        help="where to keep what is found: a file, or postgresql://HOST/DATABASE without a secret (default: "
        "EROICA_STORE, which may hold one, else eroica.db in --state)",
    )
    parser.add_argument("--topology", type=Path, metavar="FILE", help=TOPOLOGY_HELP)

    parser = command(
        "agent",
        _agent,
        "watch the jobs of this host that were not started by eroica run, for a coordinator elsewhere",
        "EROICA_COORDINATOR=waves.pass eroica agent",
    )
    parser.add_argument("--bus", metavar="PASS|URL", default="", help=_BUS_HELP)

    parser = command(
        "demo",
        _demo,
        "train on this machine with a planted fault, watched by eroica run, and compare its diagnosis with the fault",
        "eroica demo backward_delay --effect 0.15",
    )
    parser.add_argument("fault", nargs="?", type=_fault, default="slow_input", metavar="FAULT", help="see --list")
    parser.add_argument("--list", action="store_true", help="list the faults and leave")
    parser.add_argument("--out", type=Path, default=Path("eroica-demo"), metavar="DIR", help="default: eroica-demo")
    parser.add_argument("--ranks", type=count, default=4, metavar="N", help="training processes (default: 4)")
    parser.add_argument("--after", type=count, default=150, metavar="N", help="first faulty step (default: 150)")
    parser.add_argument(
        "--steps",
        type=count,
        default=2000,
        metavar="N",
        help="steps at most (default: 2000); healthy does them all",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--delay-ms", type=_AMOUNT, default=60.0, metavar="MS", help="planted per step (default: 60)")
    size.add_argument("--effect", type=_AMOUNT, metavar="SHARE", help="planted, as a share of the healthy step (0.15)")
    parser.add_argument("--culprit", type=_rank, metavar="RANK", help="rank with the fault (default: drawn)")
    parser.add_argument("--seed", type=int, metavar="N", help="makes the drawing repeatable")
    parser.add_argument("--timeout", type=_AMOUNT, default=180.0, metavar="S", help="for the answer (default: 180)")
    parser.add_argument("--keep-captures", action="store_true", help="keep the traces of the windows in DIR")


def _rank(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a rank")
    return int(text)


def _address(text: str) -> tuple[str, int]:
    has_port = "]:" in text if text.startswith("[") else text.count(":") == 1
    host, _, port = text.rpartition(":") if has_port else (text, "", "0")
    host = host.strip("[]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no address; write HOST or HOST:PORT")
    return host, int(port)


def _address_or_off(text: str) -> tuple[str, int] | None:
    return None if text == "off" else _address(text)


def _token(text: str) -> tuple[str, str]:
    name, _, scope = text.partition(":")
    if not name or scope not in ("read", "act", "admin"):
        raise argparse.ArgumentTypeError(f"{text!r} is no token; write NAME:read, NAME:act or NAME:admin")
    return name, scope


def _fault(text: str) -> str:
    from eroica.demo import FAULTS

    if text not in FAULTS:
        raise argparse.ArgumentTypeError(f"no fault {text!r} can be planted; choose one of {', '.join(FAULTS)}")
    return text


def _run(options: argparse.Namespace) -> int:
    from eroica.access import JOB_VARIABLE, STORE, VARIABLE
    from eroica.commands import Frames
    from eroica.conductor import Mode
    from eroica.launch import NotStartedError
    from eroica.live import Run, pacing_log, run
    from eroica.relay import job_key
    from eroica.windows import Policy

    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    if not words:
        options.usage("no COMMAND; for example: eroica run -- torchrun --nproc-per-node 4 train.py")
    on_demand = options.capture == "on-demand"
    if on_demand and options.frames == "sampled":
        options.usage("argument --frames: on demand, frames are traced or none: nobody in the process looks at stacks")
    meets = (options.bus or os.environ.get(VARIABLE, "")) == STORE
    given = None if meets else _coordinator(options, need=False)
    key = ""
    if meets:
        key = job_key(options.job or os.environ.get(JOB_VARIABLE, "") or "job")
    elif given is not None:
        key = _key(given.job, options)
    if options.pace != "off" and (meets or given is not None):
        where = "is not to be had where runs meet" if meets else "is switched at the coordinator: eroica pace JOB"
        options.usage(f"argument --pace: with --bus, pacing {where}")
    for name, is_given in (("--no-baseline", options.no_baseline), ("--frames", options.frames is not None)):
        if is_given and (meets or given is not None):
            other = "; eroica serve has --no-baseline" if given is not None and options.no_baseline else ""
            options.usage(f"argument {name}: with --bus, the coordinator says how windows are taken{other}")
    frames = Frames[(options.frames or ("traced" if on_demand else "sampled")).upper()]
    plan = Run(
        command=words,
        job=options.job,
        on_demand=on_demand,
        keep_captures=options.out if options.keep_captures else None,
        keep_rings=options.out / f"rings-{time.strftime('%Y%m%d-%H%M%S')}" if options.keep_rings else None,
        policy=Policy(baseline=not options.no_baseline, frames=frames),
        pacing=Mode(options.pace),
        paced=pacing_log(options.out),
        coordinator=given,
        meets=options.out if meets else None,
        key=key,
    )
    try:
        return run(plan, _teller(options.out), lambda text: say(f"eroica: {text}"))
    except NotStartedError as error:
        say(f"eroica run: {error}")
        return error.status


def _coordinator(options: argparse.Namespace, *, need: bool) -> Pass | None:
    """The way to the coordinator, by --bus, else by the environment."""
    from eroica.access import VARIABLE, find_pass

    if "@" in options.bus and "://" in options.bus:
        options.usage(f"argument --bus: all users of a host can read command lines; put the secret into {VARIABLE}")
    found = find_pass({**os.environ, VARIABLE: options.bus} if options.bus else os.environ)
    if found is None and need:
        options.usage(f"no coordinator; name the pass that eroica serve wrote by --bus or {VARIABLE}")
    return found


def _key(job: str, options: argparse.Namespace) -> str:
    """Name of the job on the bus: as the pass says, else as the user or the scheduler does."""
    from eroica.access import ALL_JOBS, JOB_VARIABLE
    from eroica.probe.place import job_name

    if job not in ("", ALL_JOBS):
        return job
    named = options.job or os.environ.get(JOB_VARIABLE, "")
    if not named and os.environ.get("SLURM_JOB_ID"):
        named = job_name(os.environ)
    if not named:
        options.usage(
            f"the pass is for all jobs; say which one this is, the same on all hosts, by --job or {JOB_VARIABLE}"
        )
    return str(named)


def _serve(options: argparse.Namespace) -> int:
    from eroica.access import is_loopback
    from eroica.broker import Listening
    from eroica.guard import Web
    from eroica.serve import Serve, serve
    from eroica.windows import Policy

    if "@" in options.store and "://" in options.store and ":" in options.store.partition("://")[2].partition("@")[0]:
        options.usage("argument --store: all users of a host can read command lines; put the secret into EROICA_STORE")
    host, port = options.listen
    web = None
    if options.http is not None:
        # On loopback nothing is heard by others, and the certificate is for another address as a rule.
        is_open = not is_loopback(options.http[0])
        web = Web(
            host=options.http[0],
            port=options.http[1],
            certificate=options.tls_cert if is_open else None,
            key=options.tls_key if is_open else None,
            ca=options.tls_ca if is_open else None,
            names=tuple(options.http_name),
            tokens=dict(options.token),
        )
    plan = Serve(
        state=options.state or Path.home() / ".eroica" / "serve",
        listening=Listening(host=host, port=port, certificate=options.tls_cert, key=options.tls_key, ca=options.tls_ca),
        jobs=tuple(options.job),
        coordinator=_coordinator(options, need=False) if options.bus else None,
        policy=Policy(baseline=not options.no_baseline),
        until_over=options.until_over,
        web=web,
        store=options.store or os.environ.get("EROICA_STORE", ""),
        topology=topology_of(options),
    )
    tellers: dict[str, Callable[[Incident], None]] = {}

    def tell(job: str, incident: Incident) -> None:
        tellers.setdefault(job, _teller(options.out / job))(incident)

    serve(plan, tell, lambda text: say(f"eroica: {text}"), _told_to_end())
    return 0


def _agent(options: argparse.Namespace) -> int:
    from eroica.serve import watch_host

    given = _coordinator(options, need=True)
    assert given is not None
    watch_host(given, lambda text: say(f"eroica: {text}"), _told_to_end())
    return 0


def _told_to_end() -> Callable[[], bool]:
    """Says, from now on, whether a signal has asked us to end."""
    import signal

    told: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: told.append(number))
    return lambda: bool(told)


def _teller(folder: Path) -> Callable[[Incident], None]:
    """Shows an incident on stderr, since stdout is the job's, and keeps it in `folder`."""

    def tell(incident: Incident) -> None:
        from eroica.findings import to_json
        from eroica.investigation import history_line

        diagnosis = incident.diagnosis
        # A rank alone has no peers: its first window is there to be compared with later.
        has_nothing = diagnosis.kind == "healthy" or (
            diagnosis.kind == "no_data" and diagnosis.coverage.ranks_expected == diagnosis.coverage.ranks_reported == 1
        )
        if has_nothing and diagnosis.window.trigger == "baseline":
            return
        number = to_json(diagnosis)["id"]
        names = (f"diagnosis-{number}.json", f"report-{number}.html")
        failure = write_reports(folder, diagnosis, incident.detail, names)
        if failure is None:
            with open(folder / "incidents.jsonl", "a", encoding="utf-8") as history:
                history.write(history_line(incident, names) + "\n")
        if diagnosis.kind == "healthy":
            say(f"eroica: a window was taken ({diagnosis.window.trigger}), and {diagnosis.verdict.summary}")
        elif sys.stderr is not None:
            with contextlib.suppress(OSError):
                sys.stderr.write(encodable(render(diagnosis, incident.detail, "text"), sys.stderr.encoding) + "\n")
                sys.stderr.flush()
        say(f"eroica: {failure}" if failure is not None else f"eroica: see {folder / names[1]}")

    def safe(incident: Incident) -> None:
        try:
            tell(incident)
        except OSError as error:
            say(f"eroica: {folder}: a diagnosis could not be kept there ({error.strerror or error})")

    return safe


def topology_of(options: argparse.Namespace) -> Topology | None:
    """What --topology names; None: nothing. Raises UserError."""
    from eroica.topology import read_topology

    return read_topology(options.topology) if options.topology is not None else None


def _demo(options: argparse.Namespace) -> int:
    from eroica import demo

    if options.list:
        for name, text in demo.FAULTS.items():
            print_text(f"{name:<22}{text}\n")
        return 0
    if options.culprit is not None and options.culprit >= options.ranks:
        options.usage(f"argument --culprit: {options.ranks} ranks are numbered from 0 to {options.ranks - 1}")
    from eroica.live import Run, run

    plan = demo.Plan(
        fault=options.fault,
        num_ranks=options.ranks,
        after=options.after,
        num_steps=options.steps,
        delay_s=options.delay_ms / 1e3,
        effect=options.effect,
        culprit=options.culprit,
        seed=options.seed,
        timeout_s=options.timeout,
    )
    out: Path = options.out
    demo.prepare(out)
    incidents: list[Incident] = []
    until = time.monotonic() + plan.timeout_s
    with progress_bar() as progress:

        def is_over(num_troubles: int) -> bool:
            # A healthy training is left to its end, however long it takes.
            progress(0, 0, f"training on {plan.num_ranks} ranks")
            return num_troubles > 0 or (plan.fault != "healthy" and time.monotonic() > until)

        status = run(
            Run(
                command=demo.command(plan, out),
                job=f"demo-{plan.fault}",
                keep_captures=out if options.keep_captures else None,
                enough=is_over,
            ),
            incidents.append,
            lambda text: say(f"eroica: {text}"),
        )
    planted = demo.read_planted(out)
    troubles = [incident for incident in incidents if incident.diagnosis.kind not in ("healthy", "no_data")]
    if not troubles and plan.fault == "healthy" and status:
        raise UserError(f"the training failed with exit status {status}; {out / 'training.log'} says why")
    if not incidents and plan.fault == "healthy":
        print_text("\nplanted: nothing\neroica said nothing: right\n")
        return 0
    if not incidents:
        raise UserError(
            f"eroica said nothing within {plan.timeout_s:g} s; the training ended with status {status}, and "
            f"{out / 'training.log'} has its words"
        )
    told = (troubles or incidents)[0]
    failure = write_reports(out, told.diagnosis, told.detail)
    print_diagnosis(told.diagnosis, told.detail, "text")
    if failure is not None:
        raise failure
    right = demo.names(told.diagnosis, planted)
    took_s = demo.seconds_to(told.diagnosis, planted) if planted is not None and troubles else None
    print_text(
        f"\nplanted: {planted if planted is not None else 'nothing'}\n"
        f"eroica said: {told.diagnosis.verdict.summary}\n"
        f"{f'{took_s:.1f} s after the onset' if took_s is not None else 'no trouble'}, "
        f"{'right' if right else 'wrong'}; see {out / 'report.html'} and {out / 'diagnosis.json'}\n"
    )
    return 0 if right else 1
