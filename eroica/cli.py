"""The command line: `eroica run`, `serve`, `agent`, `diagnose`, `show`, `compare`, `fix`, `mcp`, `doctor` and `demo`,
what asks a running coordinator (`remote`), `scaling` and `simulate` (`cli_scaling`), and `chat` (`cli_chat`).

It turns arguments into calls, and results and errors into text and exit statuses; no other module prints or exits.
stdout holds results only; progress and messages go to stderr, progress only on a terminal. What a command needs is
imported when it runs, so that `--help` answers at once.

Exit status: 0 done, 1 failed (one sentence on stderr), 2 wrong usage, 3 a kind named by --fail-on was found.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from eroica import __version__
from eroica.assist import command as fixes
from eroica.assist import connecting
from eroica.errors import EroicaError, UserError
from eroica.given import amount, count
from eroica.remote import add_api, add_commands, fetch, is_incident

if TYPE_CHECKING:
    from eroica.access import Pass
    from eroica.compare import Side
    from eroica.findings import Detail, Diagnosis
    from eroica.investigation import Incident
    from eroica.topology import Topology

_AMOUNT = amount(1e9)
FORMATS = ("text", "json", "md", "html", "prompt")
KINDS_FOUND = 3
"""Exit status for --fail-on."""
_BUS_HELP = (
    "where the coordinator (eroica serve) is to be reached: a pass that it wrote, or a URL without a secret (default: "
    "EROICA_COORDINATOR, which may hold one)"
)
_MEETS_HELP = "; store: the runs of all hosts find each other in the job's own store, and that of rank 0 coordinates"
_TOPOLOGY_HELP = (
    "leaf, rail and spine of each host, TOML or JSON, to tell findings that are all of one of them (docs/cluster.md)"
)
MAX_SHOWN_BYTES = 256 << 20
"""A diagnosis of a million ranks has some megabytes; what is bigger is another file, or a device without end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Raises SystemExit(2) on wrong usage, as argparse does."""
    options = _options(list(sys.argv[1:] if arguments is None else arguments))
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except EroicaError as error:
        _say(f"eroica {options.command}: {error}")
        return 1
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has seen enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = f": {error.filename}" if error.filename is not None else ""
        _say(f"eroica {options.command}: {error.strerror or error}{where}")
        return 1
    except KeyboardInterrupt:
        _say(f"eroica {options.command}: interrupted")
        return 130


def _options(arguments: list[str]) -> argparse.Namespace:
    if connecting.is_serving(arguments):  # what follows is another program's command line
        return argparse.Namespace(command="mcp", run=lambda options: connecting.serve(arguments[1:]))
    return _parser().parse_args(arguments)


def _parser() -> argparse.ArgumentParser:
    from eroica import cli_chat, cli_scaling

    parser = argparse.ArgumentParser(
        prog="eroica",
        description="Says which rank, function and cause make a distributed PyTorch job slow.",
        epilog="example: eroica diagnose traces/ --out report/",
    )
    parser.add_argument("--version", action="version", version=f"eroica {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = _command(
        commands,
        "run",
        _run,
        "run a training job and watch it: what makes it slow or hang is told while it runs",
        "eroica run --out incidents/ -- torchrun --nproc-per-node 4 train.py",
    )
    command.add_argument(
        "--out", type=Path, default=Path("eroica-out"), metavar="DIR", help="for the diagnoses (default: eroica-out)"
    )
    command.add_argument("--job", default="", metavar="NAME", help="name of the job in the reports")
    command.add_argument(
        "--no-baseline", action="store_true", help="do not capture a window after warm-up to compare later ones with"
    )
    command.add_argument(
        "--frames",
        choices=("sampled", "traced", "none"),
        default=None,
        help="how Python frames come into a window: looked at some hundred times a second, every call (dearer), or "
        "not; on demand they are traced or none (default: sampled; on demand traced)",
    )
    command.add_argument(
        "--capture",
        choices=("in-process", "on-demand"),
        default="in-process",
        help="who records windows: each rank by itself (default), or Kineto's own thread in it. On demand is for "
        "training with very many operators, where to stop the profiler in process would hold the interpreter for "
        "seconds. Its dangers: a rank that ends while a window is recorded ends some seconds later, and by SIGSEGV if "
        "the window cannot be ended first (one by the clock that lasts over 10 s); a child made by os.fork that ends "
        "in the ordinary way hangs at its end (workers of loaders do not)",
    )
    command.add_argument("--keep-captures", action="store_true", help="keep the traces of each diagnosis in DIR")
    command.add_argument(
        "--keep-rings",
        action="store_true",
        help="keep the flight rings in DIR/rings-TIME when the job has ended, for eroica show",
    )
    command.add_argument(
        "--pace",
        choices=("off", "dry-run", "enable"),
        default="off",
        help="hold ranks that would only wait back for a moment, where trials show a gain, or only say what that would "
        "do; DIR/pacing.jsonl tells what was decided (default: off; docs/pacing.md)",
    )
    command.add_argument("--bus", metavar="PASS|URL|store", default="", help=_BUS_HELP + _MEETS_HELP)
    command.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="-- COMMAND...", help="the job, as you would start it yourself"
    )

    command = _command(
        commands,
        "serve",
        _serve,
        "coordinate the jobs of many hosts: bring the bus along, and diagnose what their agents tell of",
        "eroica serve --job waves --out incidents/",
    )
    command.add_argument(
        "--out",
        type=Path,
        default=Path("eroica-out"),
        metavar="DIR",
        help="for the diagnoses, in a folder for each job",
    )
    command.add_argument(
        "--state", type=Path, metavar="DIR", help="for passes and the bus's configuration (default: ~/.eroica/serve)"
    )
    command.add_argument(
        "--job",
        action="append",
        default=[],
        metavar="NAME",
        help="make a pass for this job alone; again for more jobs (default: one pass for all jobs)",
    )
    command.add_argument(
        "--listen",
        type=_address,
        default=("127.0.0.1", 0),
        metavar="HOST[:PORT]",
        help="where the bus is to be reached (default: this host alone, any free port); off loopback it needs a "
        "certificate, since whoever can reach it may try to get in",
    )
    command.add_argument("--tls-cert", type=Path, metavar="FILE", help="the bus's certificate, PEM")
    command.add_argument("--tls-key", type=Path, metavar="FILE", help="its key, PEM")
    command.add_argument(
        "--tls-ca", type=Path, metavar="FILE", help="what agents are to trust, PEM (default: the certificate itself)"
    )
    command.add_argument(
        "--bus", metavar="PASS|URL", default="", help="use this bus instead, as its coordinator; no secret in a URL"
    )
    command.add_argument("--no-baseline", action="store_true", help="do not capture a window after warm-up")
    command.add_argument("--until-over", action="store_true", help="end when all agents that have come have left again")

    command.add_argument(
        "--http",
        type=_address_or_off,
        default=("127.0.0.1", 0),
        metavar="HOST[:PORT]|off",
        help="where the HTTP API is to be reached (default: this host alone, any free port); off loopback it takes the "
        "same certificate",
    )
    command.add_argument(
        "--http-name", action="append", default=[], metavar="NAME", help="a further name that the API is called by"
    )
    command.add_argument(
        "--token",
        action="append",
        type=_token,
        default=[],
        metavar="NAME:SCOPE",
        help="make a token of the API for somebody, who then stands in its audit log by that name; SCOPE is read, act "
        "or admin (default: one for each scope)",
    )
    command.add_argument(
        "--store",
        default="",
        metavar="FILE|URL",
        help="where to keep what is found: a file, or postgresql://HOST/DATABASE without a secret (default: "
        "EROICA_STORE, which may hold one, else eroica.db in --state)",
    )
    command.add_argument("--topology", type=Path, metavar="FILE", help=_TOPOLOGY_HELP)

    command = _command(
        commands,
        "agent",
        _agent,
        "watch the jobs of this host that were not started by eroica run, for a coordinator elsewhere",
        "EROICA_COORDINATOR=waves.pass eroica agent",
    )
    command.add_argument("--bus", metavar="PASS|URL", default="", help=_BUS_HELP)

    command = _command(
        commands,
        "diagnose",
        _diagnose,
        "find the cause in the profiler traces of a job, one per rank",
        "eroica diagnose 'run7/rank*.json.gz' --out report/ --fail-on slow,hang",
    )
    command.add_argument("paths", nargs="+", metavar="PATH", help="a directory, a glob or files; one trace per rank")
    command.add_argument("--out", type=Path, metavar="DIR", help="write DIR/diagnosis.json and DIR/report.html")
    command.add_argument("--format", choices=FORMATS, default="text", help="what stdout gets (default: text)")
    command.add_argument(
        "--engine",
        type=_engine,
        default="local",
        metavar="local|dask:URL",
        help="where traces are read: by processes here (default), or by the workers of a Dask cluster that you trust, "
        "such as dask:tcp://HOST:8786; they must see the files under the same paths",
    )
    command.add_argument(
        "--fail-on",
        type=_kinds,
        default=frozenset(),
        metavar="KINDS",
        help=f"exit with {KINDS_FOUND} if the diagnosis is of one of these kinds, such as slow,hang",
    )
    command.add_argument("--job", default="", metavar="NAME", help="name of the job in the report")
    command.add_argument(
        "--baseline", nargs="+", default=[], metavar="PATH", help="traces of the same job when it was well"
    )
    command.add_argument("--jobs", type=count, default=None, metavar="N", help="processes (default: one per core)")
    command.add_argument("--topology", type=Path, metavar="FILE", help=_TOPOLOGY_HELP)

    command = _command(
        commands,
        "show",
        _show,
        "show a diagnosis that was made before, here or by a coordinator, or where the ranks of a job stand by their "
        "flight rings",
        "eroica show report/diagnosis.json --format md",
    )
    command.add_argument(
        "file",
        type=Path,
        metavar="FILE|ID|RINGDIR",
        help="a diagnosis.json, or the directory that holds it; the identity of an incident, as eroica incidents "
        "shows it; a flight ring, or the directory where ranks leave "
        "them: EROICA_RING_DIR, else $XDG_RUNTIME_DIR/eroica or /tmp/eroica-UID",
    )
    command.add_argument(
        "--format", choices=FORMATS, default="text", help="what stdout gets (default: text); of rings text or json"
    )

    add_api(command)

    def asking(
        name: str, ask: Callable[[argparse.Namespace], str], purpose: str, example: str
    ) -> argparse.ArgumentParser:
        def run(options: argparse.Namespace) -> int:
            _print_text(ask(options))
            return 0

        return _command(commands, name, run, purpose, example)

    add_commands(asking)

    command = _command(
        commands,
        "compare",
        _compare,
        "tell what changed between two diagnoses or folders of traces",
        "eroica compare before/diagnosis.json after/diagnosis.json --format md",
    )
    command.add_argument(
        "before", type=Path, metavar="A", help="a diagnosis.json, the directory that holds it, or traces"
    )
    command.add_argument("after", type=Path, metavar="B", help="the same, of the later one")
    command.add_argument(
        "--format", choices=("text", "json", "md"), default="text", help="what stdout gets (default: text)"
    )
    command.add_argument("--jobs", type=count, default=None, metavar="N", help="processes (default: one per core)")

    cli_scaling.add(partial(_command, commands), _print_text, _write)
    cli_chat.add(partial(_command, commands), _print_text, _say, _is_agreed)

    command = _command(
        commands,
        "fix",
        _fix,
        "make a patch for what a diagnosis found in the code, try it by your own commands, and open a draft pull "
        "request",
        "eroica fix 1a81c511b065 --repo . --test 'pytest -q' --verify 'torchrun --nproc-per-node 4 train.py'",
    )
    fixes.add_options(command)

    command = _command(
        commands,
        "doctor",
        _doctor,
        "tell what this machine can and cannot observe, and how to mend it",
        "eroica doctor --python /venv/bin/python",
    )
    command.add_argument("--python", default=sys.executable, metavar="PYTHON", help="the Python that trains (this one)")
    command.add_argument("--format", choices=("text", "json"), default="text", help="what stdout gets (default: text)")

    command = _command(
        commands,
        "demo",
        _demo,
        "train on this machine with a planted fault, watched by eroica run, and compare its diagnosis with the fault",
        "eroica demo backward_delay --effect 0.15",
    )
    command.add_argument("fault", nargs="?", type=_fault, default="slow_input", metavar="FAULT", help="see --list")
    command.add_argument("--list", action="store_true", help="list the faults and leave")
    command.add_argument("--out", type=Path, default=Path("eroica-demo"), metavar="DIR", help="default: eroica-demo")
    command.add_argument("--ranks", type=count, default=4, metavar="N", help="training processes (default: 4)")
    command.add_argument("--after", type=count, default=150, metavar="N", help="first faulty step (default: 150)")
    command.add_argument(
        "--steps",
        type=count,
        default=2000,
        metavar="N",
        help="steps at most (default: 2000); healthy does them all",
    )
    size = command.add_mutually_exclusive_group()
    size.add_argument("--delay-ms", type=_AMOUNT, default=60.0, metavar="MS", help="planted per step (default: 60)")
    size.add_argument("--effect", type=_AMOUNT, metavar="SHARE", help="planted, as a share of the healthy step (0.15)")
    command.add_argument("--culprit", type=_rank, metavar="RANK", help="rank with the fault (default: drawn)")
    command.add_argument("--seed", type=int, metavar="N", help="makes the drawing repeatable")
    command.add_argument("--timeout", type=_AMOUNT, default=180.0, metavar="S", help="for the answer (default: 180)")
    command.add_argument("--keep-captures", action="store_true", help="keep the traces of the windows in DIR")

    connecting.add(_command(commands, "mcp", _mcp, connecting.PURPOSE, connecting.EXAMPLE))
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    purpose: str,
    example: str,
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".", epilog=f"example: {example}"
    )
    command.set_defaults(run=run, usage=command.error)
    return command


def _rank(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a rank")
    return int(text)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":") if text.count(":") == 1 or text.startswith("[") else (text, "", "0")
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


def _engine(text: str) -> str:
    if text != "local" and not (text.startswith("dask:") and len(text) > 5):
        raise argparse.ArgumentTypeError(f"{text!r} is no engine; write local or dask:URL")
    return text


def _fault(text: str) -> str:
    from eroica.demo import FAULTS

    if text not in FAULTS:
        raise argparse.ArgumentTypeError(f"no fault {text!r} can be planted; choose one of {', '.join(FAULTS)}")
    return text


def _kinds(text: str) -> frozenset[str]:
    from eroica.findings import KINDS

    kinds = frozenset(filter(None, (part.strip() for part in text.split(","))))
    if not kinds or kinds - set(KINDS):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(KINDS)}")
    return kinds


def _run(options: argparse.Namespace) -> int:
    from eroica.access import JOB_VARIABLE, STORE, VARIABLE
    from eroica.commands import Frames
    from eroica.conductor import Mode
    from eroica.coordinator import Policy
    from eroica.launch import NotStartedError
    from eroica.live import Run, pacing_log, run
    from eroica.relay import job_key

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
        options.usage("argument --pace: with a coordinator elsewhere, pacing is switched there: eroica pace JOB")
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
        return run(plan, _teller(options.out), lambda text: _say(f"eroica: {text}"))
    except NotStartedError as error:
        _say(f"eroica run: {error}")
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
    from eroica.coordinator import Policy
    from eroica.guard import Web
    from eroica.serve import Serve, serve

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
        topology=_topology(options),
    )
    tellers: dict[str, Callable[[Incident], None]] = {}

    def tell(job: str, incident: Incident) -> None:
        tellers.setdefault(job, _teller(options.out / job))(incident)

    serve(plan, tell, lambda text: _say(f"eroica: {text}"), _told_to_end())
    return 0


def _agent(options: argparse.Namespace) -> int:
    from eroica.serve import watch_host

    given = _coordinator(options, need=True)
    assert given is not None
    watch_host(given, lambda text: _say(f"eroica: {text}"), _told_to_end())
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
        failure = _write_reports(folder, diagnosis, incident.detail, names)
        if failure is None:
            with open(folder / "incidents.jsonl", "a", encoding="utf-8") as history:
                history.write(history_line(incident, names) + "\n")
        if diagnosis.kind == "healthy":
            _say(f"eroica: a window was taken ({diagnosis.window.trigger}), and {diagnosis.verdict.summary}")
        elif sys.stderr is not None:
            with contextlib.suppress(OSError):
                sys.stderr.write(_encodable(_render(diagnosis, incident.detail, "text"), sys.stderr.encoding) + "\n")
                sys.stderr.flush()
        _say(f"eroica: {failure}" if failure is not None else f"eroica: see {folder / names[1]}")

    def safe(incident: Incident) -> None:
        try:
            tell(incident)
        except OSError as error:
            _say(f"eroica: {folder}: a diagnosis could not be kept there ({error.strerror or error})")

    return safe


def _diagnose(options: argparse.Namespace) -> int:
    from eroica.offline import diagnose_paths, engine

    topology = _topology(options)
    with _progress() as progress, engine(options.engine) as executor:
        diagnosis, detail = diagnose_paths(
            options.paths,
            executor=executor,
            topology=topology,
            job=options.job,
            baseline_paths=options.baseline,
            jobs=options.jobs or os.cpu_count() or 1,
            progress=progress,
        )
    failure = _write_reports(options.out, diagnosis, detail) if options.out is not None else None
    _print(diagnosis, detail, options.format)
    if failure is not None:
        raise failure
    return KINDS_FOUND if diagnosis.kind in options.fail_on else 0


def _topology(options: argparse.Namespace) -> Topology | None:
    from eroica.topology import read_topology

    return read_topology(options.topology) if options.topology is not None else None


def _show(options: argparse.Namespace) -> int:
    from eroica.flights import holds_rings
    from eroica.postmortem import explanation, look, render_json, render_text
    from eroica.ring import SUFFIX

    file: Path = options.file
    if is_incident(str(file)):
        diagnosis, before = fetch(options, str(file))
        _print(diagnosis, None, options.format)
        if options.format == "text" and before:
            _print_text(before)
        return 0
    if file.suffix == SUFFIX or (not (file / "diagnosis.json").exists() and holds_rings(file)):
        if options.format not in ("text", "json"):
            options.usage(f"argument --format: a post-mortem comes as text or json, not {options.format}")
        report = look(file, time.monotonic_ns())
        why = explanation(file)
        if options.format == "text":
            _print_text((_render(why, None, "text") + "\n" if why is not None else "") + render_text(report))
        else:
            _print_text(render_json(report, why))
        return 0
    _print(_load(file), None, options.format)
    return 0


def _load(file: Path) -> Diagnosis:
    """The diagnosis in `file`, or in the directory of that name."""
    import json

    from eroica.findings import from_json

    if file.is_dir():
        file = file / "diagnosis.json"
    try:
        with open(file, "rb") as source:
            text = source.read(MAX_SHOWN_BYTES + 1)
        if len(text) > MAX_SHOWN_BYTES:
            raise UserError(f"{file} has more than {MAX_SHOWN_BYTES >> 20} MB; name a diagnosis.json")
        data = json.loads(text)
    except FileNotFoundError:
        raise UserError(f"{file} does not exist; `eroica diagnose --out DIR` writes DIR/diagnosis.json") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON ({error}); name a diagnosis.json") from None
    return from_json(data)


def _compare(options: argparse.Namespace) -> int:
    from eroica import compare

    before, after = (_side(options, path) for path in (options.before, options.after))
    comparison = compare.compare(before, after)
    render = {"text": compare.render_text, "json": compare.render_json, "md": compare.render_markdown}
    _print_text(render[options.format](comparison))
    return 0


def _side(options: argparse.Namespace, path: Path) -> Side:
    """A diagnosis that was made before, with no more than its file holds, or one that is made of traces now."""
    from eroica.compare import Side
    from eroica.offline import diagnose_paths

    if path.is_dir() and not (path / "diagnosis.json").exists():
        incidents = sorted(path.glob("diagnosis-*.json"))
        if len(incidents) > 1:
            shown = ", ".join(one.name for one in incidents[:5])
            raise UserError(f"{path} holds {len(incidents)} diagnoses ({shown}); name the one that is meant")
        if incidents:
            return Side(str(path), _load(incidents[0]), None)
    elif path.is_dir() or path.name.startswith("diagnosis"):
        return Side(str(path), _load(path), None)
    with _progress() as progress:
        jobs = options.jobs or os.cpu_count() or 1
        return Side(str(path), *diagnose_paths([str(path)], jobs=jobs, progress=progress))


def _fix(options: argparse.Namespace) -> int:
    return fixes.run(options, _load, _print_text, lambda text: _say(f"eroica: {text}"))


def _doctor(options: argparse.Namespace) -> int:
    from eroica import doctor
    from eroica.checks import Machine

    with _progress() as progress:
        progress(0, 0, "three steps under the probe")
        checks = doctor.examine(Machine(python=options.python))
    _print_text(doctor.render_text(checks) if options.format == "text" else doctor.render_json(checks))
    return 0


def _mcp(options: argparse.Namespace) -> int:
    return connecting.install(options, _print_text, lambda text: _say(f"eroica: {text}"), _is_agreed)


def _is_agreed(question: str) -> bool:
    """What a person says; no, where nobody can be asked."""
    if sys.stdin is None or not sys.stdin.isatty():
        return False
    if sys.stderr is not None:
        sys.stderr.write(f"{question} [y/N] ")
        sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _demo(options: argparse.Namespace) -> int:
    from eroica import demo

    if options.list:
        for name, text in demo.FAULTS.items():
            _print_text(f"{name:<22}{text}\n")
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
    with _progress() as progress:

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
            lambda text: _say(f"eroica: {text}"),
        )
    planted = demo.read_planted(out)
    troubles = [incident for incident in incidents if incident.diagnosis.kind not in ("healthy", "no_data")]
    if not troubles and plan.fault == "healthy" and status:
        raise UserError(f"the training failed with exit status {status}; {out / 'training.log'} says why")
    if not incidents and plan.fault == "healthy":
        _print_text("\nplanted: nothing\neroica said nothing: right\n")
        return 0
    if not incidents:
        raise UserError(
            f"eroica said nothing within {plan.timeout_s:g} s; the training ended with status {status}, and "
            f"{out / 'training.log'} has its words"
        )
    told = (troubles or incidents)[0]
    failure = _write_reports(out, told.diagnosis, told.detail)
    _print(told.diagnosis, told.detail, "text")
    if failure is not None:
        raise failure
    right = demo.names(told.diagnosis, planted)
    took_s = demo.seconds_to(told.diagnosis, planted) if planted is not None and troubles else None
    _print_text(
        f"\nplanted: {planted if planted is not None else 'nothing'}\n"
        f"eroica said: {told.diagnosis.verdict.summary}\n"
        f"{f'{took_s:.1f} s after the onset' if took_s is not None else 'no trouble'}, "
        f"{'right' if right else 'wrong'}; see {out / 'report.html'} and {out / 'diagnosis.json'}\n"
    )
    return 0 if right else 1


def _render(diagnosis: Diagnosis, detail: Detail | None, form: str) -> str:
    from eroica import report

    if form == "json":
        return report.render_json(diagnosis)
    if form == "md":
        return report.render_markdown(diagnosis)
    if form == "html":
        return report.render_html(diagnosis, detail)
    if form == "prompt":
        return report.render_prompt(diagnosis)
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    width = shutil.get_terminal_size((100, 24)).columns if on_terminal else 100
    return report.render_text(diagnosis, detail, width=width, color=on_terminal and not os.environ.get("NO_COLOR"))


def _print(diagnosis: Diagnosis, detail: Detail | None, form: str) -> None:
    _print_text(_render(diagnosis, detail, form).rstrip("\n") + "\n")


def _print_text(text: str) -> None:
    """Write to stdout in what encoding it has; a character that it lacks must not lose the answer."""
    if sys.stdout is None:
        raise UserError("standard output is closed, so the result cannot be shown; redirect it to a file")
    sys.stdout.write(_encodable(text, sys.stdout.encoding))
    sys.stdout.flush()


def _encodable(text: str, encoding: str | None) -> str:
    encoding = encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _say(message: str) -> None:
    """A sentence on stderr. File names and contents come from elsewhere: no escape sequence may reach the terminal."""
    from eroica.untrusted import escape

    if sys.stderr is not None:  # as it is if the caller closed it
        with contextlib.suppress(OSError):
            sys.stderr.write(escape(message) + "\n")


def _write_reports(
    folder: Path,
    diagnosis: Diagnosis,
    detail: Detail | None,
    names: tuple[str, str] = ("diagnosis.json", "report.html"),
) -> EroicaError | None:
    """Returns the error instead of raising it: a full disk must not lose an answer that can still be printed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / names[0], _render(diagnosis, detail, "json"))
        _write(folder / names[1], _render(diagnosis, detail, "html"))
    except OSError as error:
        return UserError(
            f"{folder}: the reports cannot be written there ({error.strerror or error}); choose another --out"
        )
    return None


def _write(path: Path, text: str) -> None:
    """Replace the file as a whole: a reader, or a crash here, never sees half of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes private files; a report is as public as any other output
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """A callback (done, total, what) that moves a bar on stderr, if that is a terminal; total 0 = unknown."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda done, total, what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total or None, description=what)
