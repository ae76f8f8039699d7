"""A diagnosis as one HTML file that people want to look at: no network, no other file, nothing to install.

`render_html` fills `prompts/report.html.j2`: the verdict first, then who, what, why, cost and what to do, pictures
(`charts`), findings with their evidence, and at the end what was seen and what was not. All text and pictures are there
without JavaScript; the script only shows numbers under the mouse. A content security policy admits that one script and
that one style sheet by their hashes: a string of the job that got through the escaping still could not run or load
anything.

Bounded at any size of job: a page stays below some 1.5 MB, and says what it folded or left out.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from typing import Any

import numpy as np
from markupsafe import Markup

from eroica import charts, wording
from eroica.findings import Detail, Diagnosis, Evidence, Finding, to_json
from eroica.templates import load, render
from eroica.untrusted import clean, clean_values

MOST_FINDINGS = 16
MOST_CONSEQUENCES = 40
MOST_FUNCTIONS = 24
MOST_ROWS = 256
MOST_SCATTERS = 2
MOST_GROUPS = 40


def render_html(diagnosis: Diagnosis, detail: Detail | None = None) -> str:
    """One self-contained page. `detail` brings the pictures; without it the page says that there are none."""
    script, style = load("report.js.j2"), load("report.css.j2")
    pictures = _pictures(diagnosis, detail) if detail is not None and len(detail.ranks) else {}
    first = diagnosis.findings[0] if diagnosis.findings else None
    cited = {name for finding in diagnosis.findings for name in finding.evidence}
    return render(
        "report.html.j2",
        policy=f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        script=Markup(script),
        style=Markup(style),
        data=_embedded({name: item.data for name, item in pictures.items() if item.data is not None}),
        kind=wording.kind(diagnosis),
        kind_word=wording.kind_word(diagnosis),
        summary=wording.summary(diagnosis),
        confidence=clean(diagnosis.verdict.confidence, 20),
        confidence_words=wording.CONFIDENCE_WORDS.get(diagnosis.verdict.confidence, ""),
        job=clean(diagnosis.job, 80) or "unnamed job",
        identity=to_json(diagnosis)["id"],
        created=clean(diagnosis.created, 40),
        producer=" ".join(clean(diagnosis.producer.get(key, ""), 40) for key in ("name", "version")).strip(),
        window=wording.window(diagnosis),
        iteration=wording.iteration(diagnosis),
        cards=_cards(first, diagnosis) if first else [],
        findings=[_finding(item, diagnosis) for item in diagnosis.findings[:MOST_FINDINGS]],
        findings_left=max(0, len(diagnosis.findings) - MOST_FINDINGS),
        loose_evidence=[_evidence(k, v) for k, v in list(diagnosis.evidence.items())[:200] if k not in cited][:24],
        not_seen=wording.not_seen(diagnosis, detail) if wording.kind(diagnosis) != "no_data" else [],
        consequences=[
            (wording.ranks(item.ranks) or "nobody", clean(item.function, 80), clean(item.text, 300))
            for item in diagnosis.consequences[:MOST_CONSEQUENCES]
        ],
        consequences_left=max(0, len(diagnosis.consequences) - MOST_CONSEQUENCES),
        pictures=dict.fromkeys(("bars", "skyline", "share", "difference", "steps"), "")
        | {k: v.svg for k, v in pictures.items()},
        has_pictures=bool(pictures),
        any_marked=bool(pictures) and detail is not None and bool(wording.marked_ranks(diagnosis, detail).any()),
        rotating=first is not None and first.scope == "rotating",
        scatters=_scatter_names(diagnosis, detail) if pictures else [],
        fold_note=_fold_note(detail) if pictures and detail is not None else "",
        groups=_groups(detail) if detail is not None else [],
        groups_left=max(0, len(detail.groups) - MOST_GROUPS) if detail is not None else 0,
        coverage=wording.coverage(diagnosis, most_notes=60),
        coverage_share=_coverage_share(diagnosis),
        environment=clean_values(diagnosis.environment),
        placement=[
            (clean(host, 80), wording.fold(clean(found, 10_000))) for host, found in list(diagnosis.hosts.items())[:64]
        ],
        placement_left=max(0, len(diagnosis.hosts) - 64),
        roles=[
            (clean(role.id, 40), wording.fold(clean(role.ranks, 10_000)), clean(role.by, 20))
            for role in diagnosis.roles[:32]
        ],
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _embedded(data: dict[str, Any]) -> Markup:
    """JSON that may stand inside of a script element: nothing in it can end the element or open a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)  # ASCII, so U+2028 is already an escape
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _cards(finding: Finding, diagnosis: Diagnosis) -> list[dict[str, str]]:
    """who, what, why, cost, what to do of the first finding: a big line and a small one each."""
    impact, name = finding.impact, finding.function
    who, at = wording.who(finding), wording.hosts(finding.hosts)
    if finding.scope in ("rank", "group", "") and finding.ranks:
        who = wording.ranks(finding.ranks, 40)
    elif finding.scope == "rotating":
        who, at = "no rank in particular", f"it moves over {wording.ranks(finding.ranks) or 'the ranks'}"
    places = [clean(name.location or "", 80), wording.called_from(name, 80)] if name else []
    per = "per iteration"
    if impact.seconds_per_iteration is not None and diagnosis.iteration.observed_s:
        per = f"of {wording.seconds(diagnosis.iteration.observed_s)} per iteration"
    by = f", by {wording.METHOD_WORDS.get(impact.method, clean(impact.method, 20))}" if impact.method else ""
    cards = [
        {
            "name": "Who",
            "big": who,
            "small": f"device {clean(finding.device, 60)}" if finding.device else at,
        },
        {
            "name": "What",
            "big": clean(name.name, 56) if name else "no single function",
            "small": ", from ".join(filter(None, places)) or (clean(name.kind, 20) if name else ""),
        },
        {
            "name": "Why",
            "big": wording.cause_name(finding.cause),
            "small": wording.cause(finding.cause).partition(": ")[2] or wording.cause(finding.cause),
        },
        {
            "name": "Cost",
            "big": wording.seconds(impact.seconds_per_iteration),
            "small": per + by if impact.seconds_per_iteration is not None else "",
            "share": "" if impact.share is None else f"{min(1.0, max(0.0, impact.share)) * 100:.1f}",
        },
        {"name": "What to do", "big": "", "small": clean(finding.advice.strip(), 600) or "nothing known yet"},
    ]
    return [{"share": ""} | card for card in cards]


def _finding(finding: Finding, diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "id": clean(finding.id, 20),
        "cause": wording.cause(finding.cause),
        "confidence": clean(finding.confidence, 20),
        "steps": clean(finding.steps, 40),
        "facts": wording.facts(finding, diagnosis),
        "numbers": wording.pattern_rows(finding),
        "mu_source": clean(finding.pattern.mu_source or "", 40),
        "distances": [
            (name, f"{value:.3g}")
            for name, value in (("D, to the expected", finding.distance), ("Delta, to peers", finding.delta))
            if value is not None
        ],
        "evidence": [_evidence(name, diagnosis.evidence.get(name)) for name in finding.evidence[:12]],
        "evidence_left": max(0, len(finding.evidence) - 12),
        "ruled_out": [clean(text, 300) for text in finding.ruled_out[:16]],
    }


def _evidence(name: str, item: Evidence | None) -> dict[str, Any]:
    if item is None:
        return {"id": clean(name, 12), "text": "is not in this diagnosis", "source": "", "values": {}}
    values = clean_values(item.values, 100, 12)
    return {
        "id": clean(name, 12),
        "text": clean(item.text.strip(), 400),
        "source": clean(item.source, 40),
        "values": values,
    }


def _column(finding: Finding, detail: Detail) -> int | None:
    """The Detail's column of a finding's function."""
    return detail.functions.index(finding.function) if finding.function in detail.functions else None


def _scatter_names(diagnosis: Diagnosis, detail: Detail | None) -> list[tuple[str, str]]:
    assert detail is not None
    return [
        (f"scatter{n}", clean(detail.functions[column].name, 70))
        for n, column in enumerate(_scatter_columns(diagnosis, detail))
    ]


def _scatter_columns(diagnosis: Diagnosis, detail: Detail) -> list[int]:
    """The functions of the first findings; the largest function where nothing was found."""
    found = [
        column for finding in diagnosis.findings[:MOST_FINDINGS] if (column := _column(finding, detail)) is not None
    ]
    return list(dict.fromkeys(found or range(min(1, len(detail.functions)))))[:MOST_SCATTERS]


def _pictures(diagnosis: Diagnosis, detail: Detail) -> dict[str, charts.Picture]:
    marked = wording.marked_ranks(diagnosis, detail)
    rows = charts.pick_rows(detail, marked, MOST_ROWS)
    columns = [(finding, _column(finding, detail)) for finding in diagnosis.findings[:MOST_FINDINGS]]
    cells = {
        (int(i), column)
        for finding, column in columns
        if column is not None and finding.scope in ("rank", "host", "group", "link")
        for i in np.flatnonzero(wording.rank_mask(finding.ranks, detail.ranks) & marked)[:4096]
    }
    pictures: dict[str, charts.Picture] = {}
    shown = charts.pick_functions(detail, [c for _, c in columns if c is not None], MOST_FUNCTIONS)
    if len(shown):
        pictures["share"] = charts.function_map(detail, rows, shown, cells, difference=False)
        pictures["difference"] = charts.function_map(detail, rows, shown, cells, difference=True)
    for n, column in enumerate(_scatter_columns(diagnosis, detail)):
        about = [finding for finding, c in columns if c == column]
        named = np.zeros(len(marked), dtype=bool)
        for finding in about:
            named |= wording.rank_mask(finding.ranks, detail.ranks) & marked
        pictures[f"scatter{n}"] = charts.scatter(detail, column, named)
    if np.isfinite(detail.own_s).any():
        bars = wording.rank_rows(diagnosis, detail, most=24)
        usual = dict(zip(detail.ranks.tolist(), wording.role_median(detail.own_s, detail.roles).tolist(), strict=True))
        own = [usual.get(int(row.label), math.nan) if row.num_ranks == 1 else math.nan for row in bars]
        pictures["bars"] = charts.time_bars(bars, own)
        if len(detail.ranks) > 24:
            pictures["skyline"] = charts.skyline(detail, marked)
    if detail.own_by_step_s.size and np.isfinite(detail.own_by_step_s).any():
        pictures["steps"] = charts.step_map(detail, rows)
    return pictures


def _fold_note(detail: Detail) -> str:
    """What the pictures leave out, in words; "" if nothing."""
    notes = []
    if len(detail.ranks) > MOST_ROWS:
        notes.append(
            f"{len(detail.ranks):,} ranks are folded into rows by host; a folded cell shows its rank farthest from the "
            "median of its role, and ranks that a finding names keep a row of their own"
        )
    if len(detail.functions) > MOST_FUNCTIONS:
        notes.append(
            f"{MOST_FUNCTIONS} of {len(detail.functions):,} functions are shown: the largest and those in findings"
        )
    return "; ".join(notes)


def _groups(detail: Detail) -> list[dict[str, str]]:
    """Groups by falling waiting: the ledger's table, with lengths of bars from 0 to 100."""
    total = np.nan_to_num(detail.group_wait_s) + np.nan_to_num(detail.group_transfer_s)
    longest = float(total.max(initial=0.0)) or 1.0
    order = np.argsort(-np.nan_to_num(detail.group_wait_s), kind="stable")[:MOST_GROUPS]
    return [
        {
            "name": clean(detail.groups[i], 100),
            "ranks": wording.fold(clean(detail.group_ranks[i], 10_000), 40),
            "transfer": wording.seconds(float(detail.group_transfer_s[i])),
            "wait": wording.seconds(float(detail.group_wait_s[i])),
            "transfer_bar": f"{float(np.nan_to_num(detail.group_transfer_s[i])) / longest * 100:.1f}",
            "wait_bar": f"{float(np.nan_to_num(detail.group_wait_s[i])) / longest * 100:.1f}",
        }
        for i in order
    ]


def _coverage_share(diagnosis: Diagnosis) -> str:
    share = diagnosis.coverage.explained_share
    return f"{min(1.0, max(0.0, share)) * 100:.1f}" if math.isfinite(share) else "0"
