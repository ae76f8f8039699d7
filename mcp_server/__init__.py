"""The MCP server: an assistant such as Cursor or Claude asks eroica why a training is slow.

`eroica-mcp [PATH|URL]` speaks MCP over standard input and output, or over HTTP on this host. `server` has the tools
that read, `acting` those that start something, `sources` where diagnoses come from, `command` the command line.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Run the server; the entry point of the console script `eroica-mcp`. Returns the exit status."""
    try:
        from mcp_server.command import main as serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "mcp":
            raise
        sys.stderr.write("eroica-mcp: the MCP SDK is not installed; try: pip install 'eroica[mcp]'\n")
        return 1
    return serve()
