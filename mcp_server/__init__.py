"""The MCP server: an assistant such as Cursor or Claude reads the diagnoses in a folder.

`eroica-mcp [PATH]` speaks MCP over standard input and output. `mcp_server.server` has the tools.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Run the server; the entry point of the console script `eroica-mcp`. Returns the exit status."""
    try:
        from mcp_server.server import main as serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "mcp":
            raise
        sys.stderr.write("eroica-mcp: the MCP SDK is not installed; try: pip install 'eroica[mcp]'\n")
        return 1
    return serve()
