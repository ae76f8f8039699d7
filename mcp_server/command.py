"""`eroica-mcp`: what to serve, to whom, and what is allowed; then serve until the client goes.

Standard output belongs to the protocol, so everything for people goes to standard error, and there is little of it:
many clients show that as an error. Over standard input and output the client that started us is trusted, as it runs as
the same user. Over HTTP nobody is: see `web`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from eroica.client import find_client
from eroica.errors import EroicaError, UserError
from eroica.given import count
from eroica.untrusted import escape
from mcp_server.coordinator import CoordinatorSource
from mcp_server.reader import Setup
from mcp_server.server import build
from mcp_server.sources import Diagnosed, DiagnosisFolder, Nameless, Source, TraceFolder, holds_diagnoses
from mcp_server.work import Works


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until standard input closes, or a signal ends us. Returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        setup = _setup(options)
        if options.http is None:
            build(setup).run("stdio")
        else:
            from mcp_server import web

            web.serve(setup, options.http, options.tokens or web.default_tokens(), _say)
    except (EroicaError, OSError) as error:
        _say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eroica-mcp",
        description="MCP server: assistants ask eroica why a training is slow. It speaks on standard input and output.",
        epilog="example: eroica-mcp ~/runs/reports --source ~/train",
    )
    parser.add_argument(
        "path",
        nargs="?",
        default=".",
        metavar="PATH|URL",
        help="a folder of diagnoses, as eroica run --out writes it, or of profiler traces (default: this one); or a "
        "running coordinator: the file of its token, or its URL, with the token in EROICA_TOKEN",
    )
    parser.add_argument(
        "--source",
        type=Path,
        action="append",
        metavar="DIR",
        help="source code below this folder may be shown around a finding; again for more (default: the working "
        "directory, unless it is a home or the root)",
    )
    parser.add_argument(
        "--allow-act",
        action="store_true",
        help="offer tools that start something, such as diagnosing traces; each asks before, where the client can ask",
    )
    parser.add_argument(
        "--traces",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="with --allow-act: traces below this folder may be diagnosed; again for more (default: PATH)",
    )
    parser.add_argument(
        "--hide-names",
        action="store_true",
        help="give hosts, users and addresses other names, the same in all answers; job names and functions stay",
    )
    parser.add_argument("--jobs", type=count, default=0, metavar="N", help="processes that read traces (one per core)")
    parser.add_argument(
        "--http",
        type=_port,
        metavar="PORT",
        help="serve streamable HTTP on this port of this host (0: any) instead; every request needs a token",
    )
    parser.add_argument(
        "--tokens",
        type=Path,
        metavar="FILE",
        help="with --http: the tokens and their scopes; made if it is not there (default: ~/.eroica/mcp-tokens)",
    )
    return parser


def _setup(options: argparse.Namespace) -> Setup:
    works: Works[Diagnosed] = Works()
    windows = client = None
    source: Source
    if "://" in options.path or os.path.isfile(options.path):
        source = coordinator = _coordinator(options.path)
        windows, client = coordinator.windows, coordinator.client
        traces = list(options.traces)
    else:
        folder = Path(options.path).absolute()
        if not folder.is_dir():
            raise UserError(f"{options.path} is no folder; name one that holds diagnoses or traces")
        source = _folder(folder, works, options.jobs)
        traces = list(options.traces) or [folder]
    for one in (*(options.source or ()), *options.traces):
        if not one.is_dir():
            raise UserError(f"{one} is no folder; --source and --traces allow what lies below a folder")
    if options.hide_names:
        source = Nameless(source)
    setup = Setup(
        source=source,
        works=works,
        windows=windows,
        client=client,
        allow_act=options.allow_act,
        num_processes=options.jobs,
    )
    sources = tuple(options.source) if options.source else _default_sources()
    return replace(setup, sources=sources, traces=tuple(traces) if options.allow_act else ())


def _folder(folder: Path, works: Works[Diagnosed], num_processes: int) -> Source:
    """Diagnoses if there are any; else traces if there are any; else the diagnoses that are still to come."""
    from eroica.trace import find_traces

    if not holds_diagnoses(folder):
        try:
            find_traces(folder)
        except EroicaError:
            pass
        else:
            return TraceFolder(folder, works, num_processes=num_processes)
    return DiagnosisFolder(folder)


def _coordinator(named: str) -> CoordinatorSource:
    """The coordinator of a URL, with its token in EROICA_TOKEN, or of a token file."""
    if "@" in named:
        raise UserError("all users of a host can read command lines; put the token into EROICA_TOKEN")
    return CoordinatorSource(find_client(os.environ, named))


def _default_sources() -> tuple[Path, ...]:
    """The working directory, which an editor sets to its project."""
    here = Path(os.getcwd())
    return () if here in (Path("/"), Path.home()) else (here,)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port")
    return int(text)


def _say(message: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"eroica-mcp: {escape(message)}\n")
        sys.stderr.flush()
