"""`python -m eroica`: the command line, for where the console script is not on PATH."""

from __future__ import annotations

import sys

from eroica.cli import main

if __name__ == "__main__":
    sys.exit(main())
