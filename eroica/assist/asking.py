"""Requests to a model or a person, from the templates under `prompts/`: triage, a fix, a post-mortem.

Diagnoses in, one text out: no file but the templates, no clock, no model. Each request says first that all between its
marker lines is data, and everything that a job could have written stands there, cleaned and bounded; so do lines of
source.

Used by the MCP server's prompts and by whoever drafts fixes. `eroica.report` has the request to explain one diagnosis.
"""

from __future__ import annotations

from collections.abc import Sequence

from eroica import wording
from eroica.errors import UserError
from eroica.findings import Diagnosis, Finding, to_json
from eroica.report import prompt_data
from eroica.templates import render
from eroica.untrusted import clean, clean_values, fence

BYTES_PER_TOKEN = 3.5
"""On the safe side for prose, paths and code; tokenizers differ and load from the network, so none is used."""
MOST_LISTED = 8
MOST_LINES = 121
DATA_CHARS = 4_000
"""Of one diagnosis within a request."""
STYLES = ("claude", "cursor", "chat", "edits")


def count_tokens(text: str) -> int:
    """How many tokens a text is taken for."""
    return int(len(text.encode("utf-8", "replace")) / BYTES_PER_TOKEN) + 1


def triage(diagnoses: Sequence[Diagnosis], question: str = "") -> str:
    """Find out what is wrong with a job, by the tools. `diagnoses`: newest first; `question`: the user's own words."""
    lines = [
        f"{clean(_id(one), 40)}  {clean(one.created, 40)}  {clean(one.job, 80) or 'job without a name'}  "
        f"{wording.headline(one)}"
        for one in diagnoses[:MOST_LISTED]
    ]
    if len(diagnoses) > MOST_LISTED:
        lines.append(f"{len(diagnoses) - MOST_LISTED} older ones are not shown")
    data = [fence(lines, "DIAGNOSES")] if lines else []
    if diagnoses:
        data.append(prompt_data(diagnoses[0], max_chars=DATA_CHARS))
    return render("triage.md.j2", data="\n\n".join(data), question=clean(question, 400))


def follow_up(known: Sequence[str]) -> str:
    """Answer questions about a job, by the tools. `known`: what they have told so far, fenced by them."""
    return render("triage.md.j2", data="\n\n".join(known), question="")


def fix(
    one: Diagnosis,
    finding: Finding,
    *,
    file: str = "",
    lines: Sequence[str] = (),
    style: str = "claude",
    has_code: bool = False,
) -> str:
    """Change the code behind a finding. `lines`: of `file`, numbered. `style`: for whom; one of STYLES. `has_code`: the
    caller appends lines of its own."""
    _known(style)
    facts = [f"{name}: {value}" for name, value in wording.facts(finding, one)]
    facts += [f"ruled out: {clean(text, 300)}" for text in finding.ruled_out[:8]]
    for key in finding.evidence[:12]:
        item = one.evidence.get(key)
        if item is not None:
            values = ", ".join(f"{name}={value}" for name, value in clean_values(item.values, 60, 8).items())
            facts.append(f"{clean(key, 8)}: {wording.evidence_line(item, 300)}" + (f" ({values})" if values else ""))
    place = ""
    if finding.function is not None:
        place = clean(finding.function.user_location or finding.function.location or "", 200)
    return render(
        "fix.md.j2",
        data=fence([f"diagnosis: {clean(_id(one), 40)}", f"finding: {clean(finding.id, 20)}", *facts], "FINDING"),
        code=fence([f"file: {clean(file, 300)}", *lines[:MOST_LINES]], "CODE") if lines else "",
        has_code=has_code or bool(lines),
        has_place=bool(place),
        style=style,
    )


def how_to_fix(style: str = "claude", *, has_code: bool) -> str:
    """How to go about a fix, without rules on data and without the data: for whom has them already."""
    _known(style)
    return render("fix_how.md.j2", has_code=has_code, has_place=True, style=style)


def _known(style: str) -> None:
    if style not in STYLES:
        raise UserError(f"no way to ask for a fix is called {clean(style, 40)!r}; there are {', '.join(STYLES)}")


def postmortem(one: Diagnosis, history: Sequence[Diagnosis]) -> str:
    """Write down what happened. `history`: diagnoses of the same job, newest first, this one among them."""
    lines = [
        f"{clean(other.created, 40)}  {clean(_id(other), 40)}  {wording.headline(other)}"
        for other in reversed(history[:MOST_LISTED])
    ]
    return render(
        "postmortem.md.j2",
        data=prompt_data(one, max_chars=DATA_CHARS + 2_000),
        history=fence(lines, "HISTORY") if len(lines) > 1 else "",
    )


def _id(one: Diagnosis) -> str:
    return one.id or str(to_json(one)["id"])
