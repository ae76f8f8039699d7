"""The results as tables: on a terminal with rich, otherwise as plain text, and as Markdown for RESULTS.md. No
arithmetic here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.measure import Spread


@dataclass(frozen=True, slots=True)
class Target:
    """What the design asks for, and whether a figure meets it."""

    text: str
    met: bool

    def __str__(self) -> str:
        return f"{self.text}: {'met' if self.met else 'MISSED'}"


@dataclass(frozen=True, slots=True)
class Table:
    """One part of the results."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    targets: tuple[Target, ...] = ()
    notes: tuple[str, ...] = ()
    data: Any = None
    """The figures behind it, for --json."""


def figure(spread: Spread, digits: int = 3) -> str:
    """ "12.3 [11.9-14.0]"; the extremes are left out where all rounds agree or there was one."""
    if spread.low == spread.high:
        return number(spread.middle, digits)
    return f"{number(spread.middle, digits)} [{number(spread.low, digits)}-{number(spread.high, digits)}]"


def number(value: float, digits: int = 3) -> str:
    """So many significant digits, never in exponents."""
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    text = f"{value:.{digits}g}"
    return f"{value:.6f}" if "e" in text else text


def plain(table: Table) -> str:
    """Aligned text."""
    lines = [table.columns, *table.rows]
    widths = [max(len(line[k]) for line in lines) for k in range(len(table.columns))]
    text = [table.title]
    for line in lines:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        text.append("  " + "  ".join(cells).rstrip())
    text += [f"  target {target}" for target in table.targets] + [f"  {note}" for note in table.notes]
    return "\n".join(text) + "\n"


def markdown(table: Table) -> str:
    """A section of RESULTS.md."""
    lines = [f"## {table.title}", "", _line(table.columns), _line(["---", *["---:"] * (len(table.columns) - 1)])]
    lines += [_line(row) for row in table.rows]
    ends = [f"- Target: {target.text}: **{'met' if target.met else 'missed'}**." for target in table.targets]
    ends += [f"- {note}" for note in table.notes]
    return "\n".join([*lines, "", *ends, *([""] if ends else [])])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def show_facts(facts: Mapping[str, str]) -> None:
    """Print what the figures are taken on."""
    print("\n".join(f"{name}: {value}" for name, value in facts.items()) + "\n", flush=True)


def show(table: Table) -> None:
    """Print one part: as a rich table on a terminal, else as text."""
    if not sys.stdout.isatty():
        print(plain(table), flush=True)
        return
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(highlight=False)
    shown = RichTable(title=table.title, title_justify="left", title_style="bold")
    for place, column in enumerate(table.columns):
        shown.add_column(column, justify="right" if place else "left")
    for row in table.rows:
        shown.add_row(*(Text(cell, "bold" if row[0].startswith("eroica") else "") for cell in row))
    console.print(shown)
    for target in table.targets:
        console.print(Text(f"  target {target}", "green" if target.met else "red"))
    for note in table.notes:
        console.print(Text(f"  {note}", "dim"))
    console.print()
