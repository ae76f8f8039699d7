"""The command line: `eroica diagnose`, `show`, `compare`, `fix`, `mcp` and `doctor`, what watches jobs (`cli_watching`)
and what asks a running coordinator (`remote`), `scaling` and `simulate` (`cli_scaling`), and `chat` (`cli_chat`).

It turns arguments into calls, and results and errors into text (`cli_output`) and exit statuses; no other module exits.
stdout holds results only; progress and messages go to stderr, progress only on a terminal. What a command needs is
imported when it runs, so that `--help` answers at once.

Exit status: 0 done, 1 failed (one sentence on stderr), 2 wrong usage, 3 a kind named by --fail-on was found, 130
interrupted; `eroica run` has that of its job.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from eroica import __version__
from eroica.assist import command as fixes
from eroica.assist import connecting
from eroica.cli_output import (
    is_agreed,
    print_diagnosis,
    print_text,
    progress_bar,
    render,
    say,
    write_file,
    write_reports,
)
from eroica.cli_watching import TOPOLOGY_HELP, topology_of
from eroica.errors import EroicaError, UserError
from eroica.given import count
from eroica.remote import add_api, add_commands, fetch, is_incident

if TYPE_CHECKING:
    from eroica.compare import Side
    from eroica.findings import Diagnosis

FORMATS = ("text", "json", "md", "html", "prompt")
KINDS_FOUND = 3
"""Exit status for --fail-on."""
MAX_SHOWN_BYTES = 256 << 20
"""A diagnosis of a million ranks has some megabytes; what is bigger is another file, or a device without end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Raises SystemExit(2) on wrong usage, as argparse does."""
    options = _options(list(sys.argv[1:] if arguments is None else arguments))
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except EroicaError as error:
        say(f"eroica {options.command}: {error}")
        return 1
    except BrokenPipeError:
        _drop_what_is_left()  # the reader of a pipe (`| head`) has seen enough
        return 0
    except OSError as error:
        _drop_what_is_left()
        where = f": {error.filename}" if error.filename is not None else ""
        say(f"eroica {options.command}: {error.strerror or error}{where}")
        return 1
    except KeyboardInterrupt:
        say(f"eroica {options.command}: interrupted")
        return 130


def _drop_what_is_left() -> None:
    """Of what stdout does not take: else Python complains again, with a status of its own, as it flushes at exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _options(arguments: list[str]) -> argparse.Namespace:
    if connecting.is_serving(arguments):  # what follows is another program's command line
        return argparse.Namespace(command="mcp", run=lambda options: connecting.serve(arguments[1:]))
    return _parser().parse_args(arguments)


def _parser() -> argparse.ArgumentParser:
    from eroica import cli_chat, cli_scaling, cli_watching

    parser = argparse.ArgumentParser(
        prog="eroica",
        description="Says which rank, function and cause make a distributed PyTorch job slow.",
        epilog="example: eroica diagnose traces/ --out report/",
    )
    parser.add_argument("--version", action="version", version=f"eroica {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    cli_watching.add(partial(_command, commands))

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
    command.add_argument("--topology", type=Path, metavar="FILE", help=TOPOLOGY_HELP)

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
            print_text(ask(options))
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

    cli_scaling.add(partial(_command, commands), print_text, write_file)
    cli_chat.add(partial(_command, commands), print_text, say, is_agreed)

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


def _engine(text: str) -> str:
    if text != "local" and not (text.startswith("dask:") and len(text) > 5):
        raise argparse.ArgumentTypeError(f"{text!r} is no engine; write local or dask:URL")
    return text


def _kinds(text: str) -> frozenset[str]:
    from eroica.findings import KINDS

    kinds = frozenset(filter(None, (part.strip() for part in text.split(","))))
    if not kinds or kinds - set(KINDS):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(KINDS)}")
    return kinds


def _diagnose(options: argparse.Namespace) -> int:
    from eroica.offline import diagnose_paths, engine

    topology = topology_of(options)
    with progress_bar() as progress, engine(options.engine) as executor:
        diagnosis, detail = diagnose_paths(
            options.paths,
            executor=executor,
            topology=topology,
            job=options.job,
            baseline_paths=options.baseline,
            jobs=options.jobs or os.cpu_count() or 1,
            progress=progress,
        )
    failure = write_reports(options.out, diagnosis, detail) if options.out is not None else None
    print_diagnosis(diagnosis, detail, options.format)
    if failure is not None:
        raise failure
    return KINDS_FOUND if diagnosis.kind in options.fail_on else 0


def _show(options: argparse.Namespace) -> int:
    from eroica.flights import holds_rings
    from eroica.postmortem import explanation, look, render_json, render_text
    from eroica.ring import SUFFIX

    file: Path = options.file
    if is_incident(str(file)):
        diagnosis, before = fetch(options, str(file))
        print_diagnosis(diagnosis, None, options.format)
        if options.format == "text" and before:
            print_text(before)
        return 0
    if file.suffix == SUFFIX or (not (file / "diagnosis.json").exists() and holds_rings(file)):
        if options.format not in ("text", "json"):
            options.usage(f"argument --format: a post-mortem comes as text or json, not {options.format}")
        report = look(file, time.monotonic_ns())
        why = explanation(file)
        if options.format == "text":
            print_text((render(why, None, "text") + "\n" if why is not None else "") + render_text(report))
        else:
            print_text(render_json(report, why))
        return 0
    print_diagnosis(_load(file), None, options.format)
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
    print_text(render[options.format](comparison))
    return 0


def _says_diagnosis(path: Path) -> bool:
    """Whether a file of any name begins as ours do."""
    try:
        with path.open("rb") as file:
            return re.search(rb'"schema"\s*:\s*"eroica\.diagnosis/', file.read(256)) is not None
    except OSError:
        return False


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
    elif path.is_dir() or path.name.startswith("diagnosis") or _says_diagnosis(path):
        return Side(str(path), _load(path), None)
    with progress_bar() as progress:
        jobs = options.jobs or os.cpu_count() or 1
        return Side(str(path), *diagnose_paths([str(path)], jobs=jobs, progress=progress))


def _fix(options: argparse.Namespace) -> int:
    return fixes.run(options, _load, print_text, lambda text: say(f"eroica: {text}"))


def _doctor(options: argparse.Namespace) -> int:
    from eroica import doctor
    from eroica.checks import Machine

    with progress_bar() as progress:
        progress(0, 0, "three steps under the probe")
        checks = doctor.examine(Machine(python=options.python))
    print_text(doctor.render_text(checks) if options.format == "text" else doctor.render_json(checks))
    return 0


def _mcp(options: argparse.Namespace) -> int:
    return connecting.install(options, print_text, lambda text: say(f"eroica: {text}"), is_agreed)
