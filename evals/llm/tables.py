"""Rows of Markdown tables, for `triage` and `evals.fixes`."""

from __future__ import annotations

from collections.abc import Iterable


def row(cells: Iterable[str], most: int) -> str:
    """One row; each cell on one line, without bars of its own, and at most so many characters of it."""
    return f"| {' | '.join(' '.join(text.replace('|', '/').split())[:most] for text in cells)} |"
