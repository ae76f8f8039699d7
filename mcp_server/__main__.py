"""`python -m mcp_server`: the same as `eroica-mcp`, for an interpreter whose scripts are not on the PATH."""

from __future__ import annotations

import sys

from mcp_server import main

if __name__ == "__main__":
    sys.exit(main())
