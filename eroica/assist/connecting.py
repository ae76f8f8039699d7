"""`eroica mcp`: start the MCP server, or connect a client to it.

The parser and the body of that command, which `cli` takes in. It prints through what `cli` hands it. The server itself
is no part of this package, so it is started as a program: what comes after `eroica mcp` is its command line.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from eroica.errors import UnavailableError

INSTALL = "install"
PURPOSE = "connect an assistant (Cursor, Claude, VS Code) to eroica, or be the server that it asks"
EXAMPLE = "eroica mcp install cursor eroica-out"
NOTE = (
    "Without install, what follows is the command line of the server, eroica-mcp: eroica mcp --help tells this, "
    "eroica-mcp --help that one."
)


def is_serving(arguments: Sequence[str]) -> bool:
    """`eroica mcp ...` that means the server."""
    return list(arguments[:1]) == ["mcp"] and list(arguments[1:2]) not in ([INSTALL], ["-h"], ["--help"])


def serve(arguments: Sequence[str]) -> int:
    """Become the server; returns only if that is not possible."""
    from importlib.util import find_spec

    from eroica.assist.clients import program

    if find_spec("mcp_server") is None:
        raise UnavailableError("the MCP server is not installed; try: pip install 'eroica[mcp]'")
    sys.stdout.flush()
    words = [*program(), *arguments]
    os.execv(words[0], words)


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of `eroica mcp install`."""
    parser.description = f"{PURPOSE[0].upper()}{PURPOSE[1:]}. {NOTE}"
    actions = parser.add_subparsers(dest="action", required=True, metavar=INSTALL)
    command = actions.add_parser(
        INSTALL,
        help="write what a client needs into a project, after showing it",
        description="Write what a client needs into a project's folder. The change is shown first.",
        epilog=f"example: {EXAMPLE}",
    )
    command.add_argument("client", choices=("cursor", "claude", "vscode"), help="which client")
    command.add_argument(
        "path",
        nargs="?",
        default="eroica-out",
        metavar="PATH|URL",
        help="what is asked about: a folder of diagnoses or traces (default: eroica-out, where eroica run writes)",
    )
    command.add_argument(
        "--project", type=Path, default=Path(), metavar="DIR", help="the folder that the client opens (default: this)"
    )
    command.add_argument("--allow-act", action="store_true", help="let the assistant start something, too")
    command.add_argument("--yes", action="store_true", help="do not ask")


def install(
    options: argparse.Namespace, show: Callable[[str], None], say: Callable[[str], None], ask: Callable[[str], bool]
) -> int:
    """Show the change, ask, write. Returns the exit status."""
    from eroica.assist.clients import CLIENTS, plan, shown, write

    path = options.path if "://" in options.path else str(Path(options.path).absolute())
    changes = plan(options.client, options.project, ["--allow-act", path] if options.allow_act else [path])
    then = CLIENTS[options.client].then
    if not changes:
        say(f"nothing is to be changed; {then}")
        return 0
    show(shown(changes))
    if not options.yes and not ask("write this?"):
        say("nothing was written; --yes writes without asking")
        return 1
    write(changes)
    say(f"written; now {then}")
    return 0
