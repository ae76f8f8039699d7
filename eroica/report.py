"""A diagnosis as text, JSON, Markdown, self-contained HTML, and as a prompt for a model.

Strings out, nothing else: no file but the templates, no clock, no terminal. The same input gives the same bytes. What
is said comes from `wording`, and every string of the job passes `untrusted.clean`; here it is only arranged and escaped
for one syntax. HTML lives in `page`, since it draws. Used by the CLI, the store, MCP and assist.

All forms are bounded, whatever the size of the job: long lists end with how many more the JSON holds. The JSON form
alone is complete, and it alone is not redacted: it is the record itself.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator

import numpy as np
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from eroica import wording
from eroica.findings import Consequence, Detail, Diagnosis, Finding, to_json
from eroica.page import render_html
from eroica.templates import render
from eroica.untrusted import clean, clean_values, fence

__all__ = ["prompt_data", "render_html", "render_json", "render_markdown", "render_prompt", "render_text"]

MOST_FINDINGS = 12
"""Findings that text, Markdown and prompt show; they are ordered by impact."""
MOST_CONSEQUENCES = 12

_KIND_STYLES = {"slow": "bold yellow", "hang": "bold red", "crash": "bold red", "healthy": "bold green"}


def render_json(diagnosis: Diagnosis) -> str:
    """The contract, `eroica.diagnosis/1`, indented, in the contract's order, ending with a newline."""
    return json.dumps(to_json(diagnosis), indent=2, allow_nan=False) + "\n"


def render_text(diagnosis: Diagnosis, detail: Detail | None = None, *, width: int = 100, color: bool = False) -> str:
    """For a terminal `width` columns wide; the first line is the whole verdict, however long it is."""
    out = io.StringIO()
    console = Console(
        file=out,
        width=max(width, 40),
        color_system="standard" if color else None,
        force_terminal=color,
        no_color=not color,
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
        _environ={},
    )
    word = wording.kind_word(diagnosis)
    line = Text(wording.headline(diagnosis))
    if line.plain.startswith(word):
        line.stylize(_KIND_STYLES.get(wording.kind(diagnosis), "bold"), 0, len(word))
    console.print(line, soft_wrap=True)
    for index, finding in enumerate(diagnosis.findings[:MOST_FINDINGS]):
        if len(diagnosis.findings) > 1:
            console.print()
            console.print(
                Text(f"{clean(finding.id, 20)}  {finding.cause.replace('_', ' ')}, {wording.who(finding)}", "bold")
            )
        elif index == 0:
            console.print()
        console.print(_pairs(wording.facts(finding, diagnosis)))
        console.print(_pairs(_finding_lines(finding, diagnosis)))
    _print_more(console, len(diagnosis.findings) - MOST_FINDINGS, "findings")
    loose = _loose_evidence(diagnosis)
    if not diagnosis.findings:
        seen = wording.iteration(diagnosis)
        gaps = wording.not_seen(diagnosis, detail) if wording.kind(diagnosis) != "no_data" else []
        lines = ([("seen", seen)] if seen else []) + [("not seen", gap) for gap in gaps]
        if lines:
            console.print()
            console.print(_pairs(lines))
    if loose:
        _section(console, "Evidence")
        console.print(_pairs(loose))
    if diagnosis.consequences:
        _section(console, "Waiting, not slow")
        for item in diagnosis.consequences[:MOST_CONSEQUENCES]:
            console.print(Padding(Text(_consequence(item)), (0, 0, 0, 2)))
        _print_more(console, len(diagnosis.consequences) - MOST_CONSEQUENCES, "consequences")
    if detail is not None and len(detail.ranks):
        _section(console, f"Ranks, {_unit(detail)[0]} per iteration (median over the steps)")
        console.print(_rank_table(diagnosis, detail, console.width))
    _section(console, "Coverage")
    if diagnosis.findings and wording.iteration(diagnosis):
        console.print(Padding(Text(wording.iteration(diagnosis)), (0, 0, 0, 2)))
    for text in wording.coverage(diagnosis):
        console.print(Padding(Text(text), (0, 0, 0, 2)))
    # rich pads the lines of a table to its width; nobody needs these blanks in a log.
    return "\n".join(text.rstrip() for text in out.getvalue().splitlines()) + "\n"


def render_markdown(diagnosis: Diagnosis, detail: Detail | None = None) -> str:
    """GitHub-flavoured Markdown for an issue or a pull request; job strings cannot form markup, links or mentions."""
    return "\n".join(_markdown_lines(diagnosis, detail)) + "\n"


def render_prompt(diagnosis: Diagnosis, detail: Detail | None = None, *, max_chars: int = 7_600) -> str:
    """A request to explain the diagnosis, through `prompts/explain.md.j2`, of at most about `max_chars` characters."""
    frame = render("explain.md.j2", data="", kind=wording.kind(diagnosis))
    data = prompt_data(diagnosis, detail, max_chars=max_chars - len(frame))
    return render("explain.md.j2", data=data, kind=wording.kind(diagnosis))


def prompt_data(diagnosis: Diagnosis, detail: Detail | None = None, *, max_chars: int) -> str:
    """The diagnosis as data for a model, some `max_chars` characters long: all that the job could have written stands
    inside of one fence. What does not fit is left out in this order: rank table, consequences, evidence and numbers of
    the lesser findings; the data end with a count of what was cut.
    """
    room = max_chars - 200
    kept: list[str] = []
    cut: dict[str, int] = {}
    for what, line in _prompt_lines(diagnosis, detail):
        if room - len(line) - 3 >= 0 and what not in cut:
            kept.append(line)
            room -= len(line) + 3
        else:
            cut[what] = cut.get(what, 0) + 1
    if cut:
        kept.append("left out for length: " + ", ".join(f"{number} lines of {what}" for what, number in cut.items()))
    return fence(kept, "DIAGNOSIS")


# ---- text


def _section(console: Console, title: str) -> None:
    console.print()
    console.print(Text(title, "bold"))


def _pairs(rows: list[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(width=12, style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text("  " + name), Text(value))
    return table


def _finding_lines(finding: Finding, diagnosis: Diagnosis) -> list[tuple[str, str]]:
    rows = [("pattern", wording.pattern(finding))] if wording.pattern(finding) else []
    rows += _evidence(finding, diagnosis)
    rows += [("ruled out", clean(text, 300)) for text in finding.ruled_out[:8]]
    return rows


def _evidence(finding: Finding, diagnosis: Diagnosis, most: int = 8) -> list[tuple[str, str]]:
    rows = []
    for name in finding.evidence[:most]:
        item = diagnosis.evidence.get(name)
        rows.append((clean(name, 8), wording.evidence_line(item) if item else "is not in this diagnosis"))
    if len(finding.evidence) > most:
        rows.append(("...", f"{len(finding.evidence) - most} more are in the JSON"))
    return rows


def _loose_evidence(diagnosis: Diagnosis, most: int = 8) -> list[tuple[str, str]]:
    """Evidence that no finding cites: what a healthy verdict or an empty one rests on."""
    cited = {name for finding in diagnosis.findings for name in finding.evidence}
    loose = [(clean(k, 8), wording.evidence_line(v)) for k, v in diagnosis.evidence.items() if k not in cited]
    return loose[:most] + ([("...", f"{len(loose) - most} more are in the JSON")] if len(loose) > most else [])


def _consequence(item: Consequence) -> str:
    return f"{wording.ranks(item.ranks) or 'nobody'}: {clean(item.function, 80)}: {clean(item.text, 240)}"


def _print_more(console: Console, number: int, what: str) -> None:
    if number > 0:
        console.print(Text(f"  {number:,} more {what} are in the JSON", "dim"))


def _rank_table(diagnosis: Diagnosis, detail: Detail, width: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("  rank", overflow="fold")
    rows = wording.rank_rows(diagnosis, detail)
    with_hosts = width >= 70 and any(row.hosts for row in rows)
    if with_hosts:
        table.add_column("host", overflow="ellipsis", no_wrap=True, max_width=30)
    for name in ("own", "waiting", "transfer", "idle"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        label = Text(("> " if row.marked else "  ") + row.label, "bold" if row.marked else "")
        times = [Text(_time(value, detail)) for value in (row.own_s, row.wait_s, row.transfer_s, row.idle_s)]
        table.add_row(label, *([Text(row.hosts)] if with_hosts else []), *times)
    return table


def _unit(detail: Detail) -> tuple[str, float]:
    """One unit for all times of a table: seconds where iterations take ten of them."""
    longest = np.nanmax(np.nan_to_num(detail.own_s + np.nan_to_num(detail.wait_s)), initial=0.0)
    return ("s", 1.0) if longest >= 10 else ("ms", 1e3)


def _time(value: float, detail: Detail) -> str:
    """A number in the table's unit, "-" if it was not measured."""
    if not math.isfinite(value):
        return "-"
    number = value * _unit(detail)[1]
    return f"{number:,.0f}" if number >= 999.5 else f"{number:.1f}"


# ---- Markdown

_MARKUP = re.compile(
    # What would ring up a person or link to an issue or a site is parted by an empty comment ...
    r"(?P<link>@(?=\w)|#(?=\d)|GH-(?=\d)|(?i:www)(?=\.)|:(?=//)|(?i:mailto|xmpp)(?=:))"
    # ... and what means markup means itself.
    r"|[\\`*_\[\]~|<>&{}!$]"
)
_ENTITY = {"<": "&lt;", ">": "&gt;", "&": "&amp;", "|": "&#124;", "`": "&#96;", "$": "&#36;"}


def prose(text: str) -> str:
    """Text that means only itself in Markdown, also within a table and at the start of a line."""

    def escaped(match: re.Match[str]) -> str:
        return match[0] + "<!-- -->" if match["link"] else _ENTITY.get(match[0], "\\" + match[0])

    text = _MARKUP.sub(escaped, text)
    return re.sub(r"^(\s*)([#+=-])", r"\1\\\2", re.sub(r"^(\s*\d+)([.)])(?=\s|$)", r"\1\\\2", text))


def _code(text: str) -> str:
    """A name in code style: a code span where it is safe, else HTML."""
    text = text.strip()
    if text and not set("`|\\") & set(text):
        return f"`{text}`"
    return f"<code>{prose(text)}</code>" if text else "-"


def _markdown_table(header: list[str], rows: list[list[str]]) -> list[str]:
    return [
        "| " + " | ".join(header) + " |",
        "|" + " --- |" * len(header),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]


def _markdown_lines(diagnosis: Diagnosis, detail: Detail | None) -> Iterator[str]:
    yield f"**{wording.kind_word(diagnosis)}:** {prose(wording.summary(diagnosis))}"
    yield ""
    identity = to_json(diagnosis)["id"]
    yield f"Job {_code(clean(diagnosis.job, 80))}, diagnosis `{identity}`, {prose(wording.window(diagnosis))}."
    yield ""
    if not diagnosis.findings:
        seen = wording.iteration(diagnosis)
        if seen:
            yield f"- seen: {prose(seen)}"
        if wording.kind(diagnosis) != "no_data":
            for gap in wording.not_seen(diagnosis, detail):
                yield f"- not seen: {prose(gap)}"
        yield ""
    for finding in diagnosis.findings[:MOST_FINDINGS]:
        yield f"### {prose(clean(finding.id, 20))}: {prose(wording.cause(finding.cause))}"
        yield ""
        rows = [[name, prose(value)] for name, value in wording.facts(finding, diagnosis)]
        if finding.function is not None:
            rows[1][1] = _code(wording.function(finding.function))
        yield from _markdown_table(["", ""], rows)
        numbers = wording.pattern_rows(finding)
        if numbers:
            yield from _markdown_table(["", "here", "peers", "expected"], [list(row) for row in numbers])
        for name, text in _evidence(finding, diagnosis):
            yield f"- **{prose(name)}** {prose(text)}"
        for text in finding.ruled_out[:8]:
            yield f"- ruled out: {prose(clean(text, 300))}"
        yield ""
    if len(diagnosis.findings) > MOST_FINDINGS:
        yield f"{len(diagnosis.findings) - MOST_FINDINGS:,} more findings are in the JSON."
        yield ""
    loose = _loose_evidence(diagnosis)
    for name, text in loose:
        yield f"- **{prose(name)}** {prose(text)}"
    if loose:
        yield ""
    if diagnosis.consequences:
        yield "### Waiting, not slow"
        yield ""
        for item in diagnosis.consequences[:MOST_CONSEQUENCES]:
            yield f"- {prose(_consequence(item))}"
        if len(diagnosis.consequences) > MOST_CONSEQUENCES:
            yield f"- {len(diagnosis.consequences) - MOST_CONSEQUENCES:,} more are in the JSON"
        yield ""
    if detail is not None and len(detail.ranks):
        yield f"<details><summary>Time per rank, {_unit(detail)[0]} per iteration</summary>"
        yield ""
        yield from _markdown_table(
            ["rank", "host", "own", "waiting", "transfer", "idle"],
            [
                [f"**{row.label}**" if row.marked else row.label, _code(row.hosts)]
                + [_time(value, detail) for value in (row.own_s, row.wait_s, row.transfer_s, row.idle_s)]
                for row in wording.rank_rows(diagnosis, detail)
            ],
        )
        yield "</details>"
        yield ""
    yield "### Coverage"
    yield ""
    for text in ([wording.iteration(diagnosis)] if diagnosis.findings else []) + wording.coverage(diagnosis):
        if text:
            yield f"- {prose(text)}"


# ---- prompt


def _quoted(text: str) -> str:
    """A job's string as a JSON string: one line, quotes escaped."""
    return json.dumps(text, ensure_ascii=False)


def _prompt_lines(diagnosis: Diagnosis, detail: Detail | None) -> Iterator[tuple[str, str]]:
    """(section, line), what matters most first."""
    yield "verdict", f"kind: {wording.kind(diagnosis)}"
    yield "verdict", f"verdict: {_quoted(wording.summary(diagnosis))}"
    yield "verdict", f"job: {_quoted(clean(diagnosis.job, 80))}"
    for text in (wording.iteration(diagnosis), *wording.coverage(diagnosis, most_notes=6)):
        if text:
            yield "coverage", f"coverage: {_quoted(clean(text, 240))}"
    if wording.kind(diagnosis) == "healthy":
        for gap in wording.not_seen(diagnosis, detail):
            yield "coverage", f"not seen: {_quoted(gap)}"
    told: set[str] = set()
    for finding in diagnosis.findings[:MOST_FINDINGS]:
        name = clean(finding.id, 20)
        yield (
            "findings",
            f"finding {name}: cause {finding.cause}, scope {clean(finding.scope, 20)}, {wording.ranks(finding.ranks)}",
        )
        for key, value in wording.facts(finding, diagnosis):
            yield "findings", f"finding {name}: {key}: {_quoted(clean(value, 320))}"
        if wording.pattern(finding):
            yield "numbers", f"finding {name}: pattern: {_quoted(wording.pattern(finding))}"
        for key in finding.evidence[:6]:
            item = diagnosis.evidence.get(key)
            if item is not None and key not in told:
                told.add(key)
                values = "".join(f" {k}={_quoted(v)}" for k, v in clean_values(item.values, 60, 8).items())
                yield (
                    "evidence",
                    f"evidence {clean(key, 8)} (finding {name}): {_quoted(wording.evidence_line(item, 240))}{values}",
                )
        for text in finding.ruled_out[:4]:
            yield "evidence", f"finding {name}: ruled out: {_quoted(clean(text, 200))}"
    if len(diagnosis.findings) > MOST_FINDINGS:
        yield "findings", f"{len(diagnosis.findings) - MOST_FINDINGS} more findings of less impact are not shown"
    for key, text in _loose_evidence(diagnosis):
        yield "evidence", f"evidence {key}: {_quoted(text)}"
    for consequence in diagnosis.consequences[:6]:
        yield "consequences", f"waiting, not slow: {_quoted(_consequence(consequence))}"
    if len(diagnosis.consequences) > 6:
        yield "consequences", f"{len(diagnosis.consequences) - 6} more consequences are not shown"
    if detail is not None and len(detail.ranks):
        for row in wording.rank_rows(diagnosis, detail, most=8):
            times = ((row.own_s, "own"), (row.wait_s, "waiting"), (row.transfer_s, "transfer"), (row.idle_s, "idle"))
            text = ", ".join(f"{key} {_time(value, detail)}" for value, key in times)
            named = wording.ranks(row.label) + (" (in a finding)" if row.marked else "")
            yield "ranks", f"{_unit(detail)[0]} per iteration, {named}: {text}"
    for key, value in clean_values(diagnosis.environment, 60, 24).items():
        yield "environment", f"environment: {key} = {_quoted(value)}"
