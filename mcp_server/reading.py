"""What the read tools say: records filled from diagnoses and their numbers.

Pure: diagnoses in, answers out, every string of a job cleaned on the way. Nothing is judged here; who is to blame was
decided in `eroica.diagnosis`. Lists are whole or bounded by a page; the cut to a budget is made by `answers.fitted`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

from eroica import wording
from eroica.findings import Detail, Diagnosis, Evidence, Finding
from eroica.untrusted import clean, clean_values
from mcp_server.answers import Answer, Page, Row
from mcp_server.code import Excerpt
from mcp_server.sources import Seen, Source, identity

PAGE = 60
"""Entries of a list that are prepared at most; a budget cuts it further."""
MOST_FUNCTIONS = 40
NO_NUMBERS = (
    "This source keeps diagnoses without the numbers of each rank, so only what findings cite can be shown; "
    "eroica-mcp on the folder of traces itself has them all."
)


# ---- diagnoses and jobs


class JobRow(Row):
    """A job and its newest diagnosis."""

    job: str
    diagnoses: int
    latest: str
    kind: str
    created: str
    verdict: str
    standing: list[str] = Field(default_factory=list)


class Jobs(Answer):
    """Answer of list_jobs."""

    cut_order = ("jobs",)
    source: str
    jobs: list[JobRow]


class DiagnosisRow(Row):
    """A diagnosis in one line."""

    id: str
    created: str
    kind: str
    cause: str
    ranks: str
    confidence: str
    verdict: str


class JobStatus(Answer):
    """Answer of job_status."""

    cut_order = ("diagnoses", "coverage", "standing")
    job: str
    kind: str
    verdict: str
    iteration: str
    standing: list[str]
    coverage: list[str]
    diagnoses: list[DiagnosisRow]


def job_name(diagnosis: Diagnosis) -> str:
    """A job as it is listed and asked for."""
    return clean(diagnosis.job, 80) or "(job without a name)"


def jobs(
    what: str, diagnoses: Sequence[Diagnosis], live: Mapping[str, Sequence[str]], cursor: str
) -> tuple[Jobs, Page]:
    """All jobs that anything is known of, the one with the newest diagnosis first."""
    by_name: dict[str, list[Diagnosis]] = {}
    for diagnosis in diagnoses:
        by_name.setdefault(job_name(diagnosis), []).append(diagnosis)
    standings = {clean(name, 80) or "(job without a name)": [clean(t, 300) for t in v] for name, v in live.items()}
    rows = [
        JobRow(
            job=name,
            diagnoses=len(own),
            latest=clean(identity(own[0]), 40),
            kind=wording.kind(own[0]),
            created=clean(own[0].created, 40),
            verdict=wording.summary(own[0]),
            standing=standings.pop(name, []),
        )
        for name, own in by_name.items()
    ]
    rows += [
        JobRow(job=name, diagnoses=0, latest="", kind="", created="", verdict="", standing=texts)
        for name, texts in standings.items()
    ]
    page = Page.open("list_jobs", len(rows), cursor)
    shown = rows[page.first : page.first + PAGE]
    note = "" if rows else f"There are no diagnoses yet in {clean(what, 200)}. {HOW_TO_START}"
    following = [f"get_diagnosis(id='{row.latest}')" for row in shown[:1] if row.latest]
    return Jobs(source=clean(what, 200), jobs=shown, note=note, next=[*following, "list_incidents()"]), page


HOW_TO_START = (
    "`eroica run --out DIR -- COMMAND` watches a job and writes them, `eroica diagnose TRACES --out DIR` makes one of "
    "traces."
)


def job_status(name: str, diagnoses: Sequence[Diagnosis], live: Sequence[str]) -> JobStatus:
    """How a job is by its newest diagnosis, and what is known of it now."""
    if not diagnoses and not live:
        raise ToolError(f"nothing is known of a job {clean(name, 80)!r}; list_jobs shows the names")
    newest = diagnoses[0] if diagnoses else None
    return JobStatus(
        job=clean(name, 80),
        kind=wording.kind(newest) if newest is not None else "not diagnosed",
        verdict=wording.summary(newest) if newest is not None else "no diagnosis yet",
        iteration=wording.iteration(newest) if newest is not None else "",
        standing=[clean(text, 300) for text in live[:20]],
        coverage=[clean(text, 300) for text in wording.coverage(newest)] if newest is not None else [],
        diagnoses=[_row(diagnosis) for diagnosis in diagnoses[:PAGE]],
        next=[f"get_diagnosis(id='{clean(identity(newest), 40)}')"] if newest is not None else [],
    )


def _row(diagnosis: Diagnosis) -> DiagnosisRow:
    verdict = diagnosis.verdict
    return DiagnosisRow(
        id=clean(identity(diagnosis), 40),
        created=clean(diagnosis.created, 40),
        kind=wording.kind(diagnosis),
        cause=clean(verdict.cause, 40),
        ranks=wording.fold(clean(verdict.ranks, 10_000)),
        confidence=clean(verdict.confidence, 20),
        verdict=wording.summary(diagnosis, 160),
    )


# ---- one diagnosis


class FindingRow(Row):
    """A finding in one line."""

    id: str
    cause: str
    who: str
    what: str
    seconds_per_iteration: float | None
    share: float | None
    confidence: str
    evidence: list[str]


class EvidenceRow(Row):
    """An observation."""

    id: str
    text: str
    source: str
    values: str

    def line(self) -> str:
        """See `Row`."""
        return f"{self.id}: {self.text} [{self.source}]" + (f" ({self.values})" if self.values else "")


class DiagnosisAnswer(Answer):
    """Answer of get_diagnosis."""

    cut_order = ("environment", "consequences", "evidence", "coverage", "findings")
    id: str
    job: str
    created: str
    kind: str
    verdict: str
    confidence: str
    iteration: str
    advice: str
    findings: list[FindingRow]
    evidence: list[EvidenceRow]
    consequences: list[str]
    coverage: list[str]
    environment: list[str]


def diagnosis(of: Diagnosis, detail: Detail | None) -> DiagnosisAnswer:
    """Who, what, why, how much, how sure, what to do; and who only waits."""
    id = clean(identity(of), 40)
    what = wording.kind(of)
    notes = {
        "no_data": "There was too little data to judge by: this does not say that the job is healthy.",
        "healthy": "Nothing wrong was found in what was seen; the coverage says what was not.",
    }
    first = of.findings[0] if of.findings else None
    following = []
    if first is not None:
        following.append(f"explain_finding(id='{id}', finding='{clean(first.id, 20)}')")
        if place_of(first):
            following.append(f"get_source(id='{id}', finding='{clean(first.id, 20)}')")
    following.append(f"compare_workers(id='{id}')" if detail is not None else f"get_stacks(id='{id}')")
    cited = [key for finding in of.findings for key in finding.evidence]
    order = list(dict.fromkeys([*cited, *of.evidence]))
    gaps = [f"not seen: {gap}" for gap in wording.not_seen(of, detail)] if what == "healthy" else []
    return DiagnosisAnswer(
        note=notes.get(what, ""),
        id=id,
        job=job_name(of),
        created=clean(of.created, 40),
        kind=what,
        verdict=wording.summary(of),
        confidence=wording.confidence(of.verdict.confidence),
        iteration=wording.iteration(of),
        advice=clean(first.advice.strip(), 600) if first is not None else "",
        findings=[_finding_row(finding) for finding in of.findings[:PAGE]],
        evidence=[_evidence_row(key, of.evidence[key]) for key in order[:PAGE] if key in of.evidence],
        consequences=[
            f"{wording.ranks(one.ranks) or 'nobody'}: {clean(one.function, 80)}: {clean(one.text, 240)}"
            for one in of.consequences[:PAGE]
        ],
        coverage=[*gaps, *(clean(text, 300) for text in wording.coverage(of))],
        environment=[f"{name} = {value}" for name, value in clean_values(of.environment, 60, 24).items()],
        next=following,
    )


def _finding_row(finding: Finding) -> FindingRow:
    return FindingRow(
        id=clean(finding.id, 20),
        cause=clean(finding.cause, 40),
        who=wording.who(finding),
        what=wording.function(finding.function, 120),
        seconds_per_iteration=finding.impact.seconds_per_iteration,
        share=finding.impact.share,
        confidence=clean(finding.confidence, 20),
        evidence=[clean(key, 8) for key in finding.evidence[:12]],
    )


def _evidence_row(key: str, item: Evidence, limit: int = 400) -> EvidenceRow:
    values = clean_values(item.values, 60, 12)
    return EvidenceRow(
        id=clean(key, 8),
        text=clean(item.text.strip(), limit),
        source=clean(item.source, 40),
        values=", ".join(f"{name}={value}" for name, value in values.items()),
    )


class FindingAnswer(Answer):
    """Answer of explain_finding."""

    cut_order = ("ruled_out", "evidence")
    id: str
    finding: str
    cause: str
    cause_in_words: str
    who: str
    what: str
    cost: str
    confidence: str
    advice: str
    numbers: str
    evidence: list[EvidenceRow]
    ruled_out: list[str]


def explanation(of: Diagnosis, one: Finding, detail: Detail | None) -> FindingAnswer:
    """All that a finding rests on."""
    id, name = clean(identity(of), 40), clean(one.id, 20)
    lost = sum(key not in of.evidence for key in one.evidence)
    following = [f"get_source(id='{id}', finding='{name}')"] if place_of(one) else []
    if detail is not None:
        following.append(f"compare_workers(id='{id}', ranks='{wording.fold(clean(one.ranks, 10_000), 40)}')")
    return FindingAnswer(
        note=f"{lost} of its evidence ids {'are' if lost > 1 else 'is'} not in this diagnosis." if lost else "",
        id=id,
        finding=name,
        cause=clean(one.cause, 40),
        cause_in_words=wording.cause(one.cause),
        who=wording.who(one),
        what=wording.function(one.function, 160),
        cost=wording.cost(one, of),
        confidence=wording.confidence(one.confidence),
        advice=clean(one.advice.strip(), 600) or "nothing known yet",
        numbers=wording.pattern(one),
        evidence=[_evidence_row(key, of.evidence[key]) for key in one.evidence[:PAGE] if key in of.evidence],
        ruled_out=[clean(text, 300) for text in one.ruled_out[:PAGE]],
        next=following,
    )


def find(of: Diagnosis, name: str) -> Finding:
    """The finding of that id. Raises ToolError."""
    for one in of.findings:
        if one.id == name:
            return one
    plain = [one.id for one in of.findings[:20] if _FINDING.fullmatch(one.id)]
    known = ", ".join(plain) or ("others" if of.findings else "none: nothing was found")
    raise ToolError(f"no finding {clean(name, 40)!r} in this diagnosis; it has {known}")


def place_of(one: Finding) -> str:
    """ "path:line" of the user's code behind a finding; "" if it has none."""
    return (one.function.user_location or one.function.location or "") if one.function is not None else ""


# ---- numbers of ranks


class WorkerRow(Row):
    """Where the time of a rank, or of ranks alike, goes."""

    ranks: str
    hosts: str
    own_ms: float | None
    waiting_ms: float | None
    transfer_ms: float | None
    idle_ms: float | None
    in_a_finding: bool = False


class FunctionRow(Row):
    """A function's share of the critical path."""

    function: str
    share: float | None
    peers: float | None
    most_on_rank: str = ""
    most: float | None = None


class Workers(Answer):
    """Answer of compare_workers."""

    cut_order = ("functions", "workers")
    id: str
    of: str
    workers: list[WorkerRow]
    functions: list[FunctionRow]


def workers(of: Diagnosis, detail: Detail | None, ranks: str) -> Workers:
    """Ranks beside each other: those named, or those that stand out and the rest folded."""
    id = clean(identity(of), 40)
    if detail is None or not len(detail.ranks):
        rows = [
            f"{clean(one.id, 20)}: {wording.who(one)}: {wording.pattern(one) or 'no pattern'}"
            for one in of.findings[:8]
        ]
        return Workers(note=NO_NUMBERS, id=id, of="; ".join(rows) or "nothing was found", workers=[], functions=[])
    if ranks.strip():
        if not wording.spans(ranks):
            raise ToolError(f"ranks {clean(ranks, 40)!r} are no ranges; write them as in '0-3,17'")
        chosen = wording.rank_mask(ranks, detail.ranks)
        if not chosen.any():
            raise ToolError(
                f"none of ranks {clean(ranks, 40)} reported; there are "
                f"{wording.fold(wording.format_spans(detail.ranks), 120)}"
            )
        some = np.flatnonzero(chosen)
        marked = wording.marked_ranks(of, detail)
        table = [_worker(detail, np.array([i]), bool(marked[i])) for i in some[:PAGE]]
        others = np.flatnonzero(~chosen & np.isin(np.array(detail.roles), np.array(detail.roles)[some]))
        if len(others):
            table.append(_worker(detail, others, False))
        what = f"{wording.ranks(wording.format_spans(detail.ranks[some]))}, then the median of peers"
        functions = _functions(detail, some)
    else:
        table = [
            WorkerRow(
                ranks=row.label,
                hosts=row.hosts,
                own_ms=_ms(row.own_s),
                waiting_ms=_ms(row.wait_s),
                transfer_ms=_ms(row.transfer_s),
                idle_ms=_ms(row.idle_s),
                in_a_finding=row.marked,
            )
            for row in wording.rank_rows(of, detail)
        ]
        what = "ranks that stand out one by one, the others as medians"
        functions = _functions(detail, None)
    return Workers(
        id=id,
        of=f"{what}; ms per iteration, median over the steps",
        workers=table,
        functions=functions,
        next=[f"get_collectives(id='{id}')"],
    )


def _worker(detail: Detail, members: npt.NDArray[np.intp], is_marked: bool) -> WorkerRow:
    values = (detail.own_s, detail.wait_s, detail.transfer_s, detail.idle_s)
    own, wait, transfer, idle = (_ms(_median(one[members])) for one in values)
    names = list(dict.fromkeys(clean(detail.hosts[i], 64) for i in members[:4096]))
    return WorkerRow(
        ranks=wording.fold(wording.format_spans(detail.ranks[members]), 40),
        hosts=wording.hosts(names, 1),
        own_ms=own,
        waiting_ms=wait,
        transfer_ms=transfer,
        idle_ms=idle,
        in_a_finding=is_marked,
    )


def _functions(detail: Detail, some: npt.NDArray[np.intp] | None) -> list[FunctionRow]:
    """With ranks: the functions in which they differ most from their peers. Without: those with the widest spread."""
    beta = detail.beta.astype(np.float64)
    peers = wording.role_median(beta, detail.roles)
    filled, usual = np.nan_to_num(beta), np.nan_to_num(peers)
    away = filled - usual
    if some is None:
        order = np.argsort(-np.abs(away).max(axis=0), kind="stable")
    else:
        order = np.argsort(-np.abs(np.median(away[some], axis=0)), kind="stable")
    rows = []
    for index in order[:MOST_FUNCTIONS]:
        most = int(np.argmax(filled[:, index]))
        here = beta[:, index] if some is None else beta[some, index]
        around = beta[:, index] if some is None else peers[some, index]
        rows.append(
            FunctionRow(
                function=wording.function(detail.functions[index], 100),
                share=_share(_median(here)),
                peers=_share(_median(around)),
                most_on_rank=str(int(detail.ranks[most])),
                most=_share(float(filled[most, index])),
            )
        )
    return rows


def _median(values: npt.NDArray[np.floating]) -> float:
    measured = values[np.isfinite(values)]
    return float(np.median(measured)) if len(measured) else float("nan")


def _ms(seconds: float) -> float | None:
    return float(f"{seconds * 1e3:.4g}") if np.isfinite(seconds) else None


def _share(value: float) -> float | None:
    return float(f"{value:.3g}") if np.isfinite(value) else None


class CollectiveRow(Row):
    """A group's communication, per iteration."""

    group: str
    ranks: str
    transfer_ms: float | None
    waiting_ms: float | None


class Collectives(Answer):
    """Answer of get_collectives."""

    cut_order = ("seen", "collectives")
    id: str
    of: str
    seen: list[str]
    collectives: list[CollectiveRow]


def collectives(of: Diagnosis, detail: Detail | None, cursor: str) -> tuple[Collectives, Page]:
    """Groups by what their members wait and transfer; who came last, as far as findings tell it."""
    id = clean(identity(of), 40)
    seen = [
        f"{clean(key, 8)}: {wording.evidence_line(item, 240)}"
        for key, item in of.evidence.items()
        if item.source in ("ledger", "ring")
    ]
    seen += [f"{wording.ranks(one.ranks) or 'nobody'}: {clean(one.text, 240)}" for one in of.consequences[:PAGE]]
    if detail is None:
        page = Page.open(f"get_collectives {id}", 0, cursor)
        return Collectives(note=NO_NUMBERS, id=id, of="what was seen of them", seen=seen[:PAGE], collectives=[]), page
    costs = np.nan_to_num(detail.group_transfer_s) + np.nan_to_num(detail.group_wait_s)
    order = np.argsort(-costs, kind="stable")
    page = Page.open(f"get_collectives {id}", len(order), cursor)
    rows = [
        CollectiveRow(
            group=clean(detail.groups[i], 120),
            ranks=wording.fold(clean(detail.group_ranks[i], 10_000)),
            transfer_ms=_ms(float(detail.group_transfer_s[i])),
            waiting_ms=_ms(float(detail.group_wait_s[i])),
        )
        for i in order[page.first : page.first + PAGE]
    ]
    return (
        Collectives(
            id=id,
            of="ms per iteration; transfer: of the fastest rank; waiting for the last to come: mean of members",
            seen=seen[:PAGE] if not page.first else [],
            collectives=rows,
            next=[f"compare_workers(id='{id}')"],
        ),
        page,
    )


# ---- stacks


class Place(Row):
    """Where ranks stand."""

    ranks: str
    number_of_ranks: int
    frames: list[str]
    evidence: str


class Stacks(Answer):
    """Answer of get_stacks."""

    cut_order = ("other", "places")
    id: str
    other: list[str]
    places: list[Place]


_ID = re.compile(r"[0-9a-f]{12}(-[0-9]{1,6})?")
_FINDING = re.compile(r"F\d{1,4}")
"""As we number them. A message stands in no fence, so that no other is told there."""
_MERGED = re.compile(r"([\d,-]+): (.*)", re.S)


def stacks(of: Diagnosis, cursor: str) -> tuple[Stacks, Page]:
    """Stacks of all ranks, folded: where they stand, rarest first, since who is alone tells most."""
    id = clean(identity(of), 40)
    places, other = [], []
    for key, item in of.evidence.items():
        if item.source != "stack":
            continue
        match = _MERGED.fullmatch(item.text)
        if match is None or not wording.spans(match[1]):
            other.append(f"{clean(key, 8)}: {clean(item.text, 300)}")
            continue
        places.append(
            Place(
                ranks=wording.fold(match[1]),
                number_of_ranks=wording.count_ranks(match[1]),
                frames=[clean(frame.strip(), 160) for frame in match[2].split(" <- ")[:12]],
                evidence=clean(key, 8),
            )
        )
    places.sort(key=lambda one: one.number_of_ranks)
    page = Page.open(f"get_stacks {id}", len(places), cursor)
    note = ""
    if not places:
        note = (
            "This diagnosis holds no stacks: they are taken when a job stands still"
            + (", and where py-spy may look at the ranks" if wording.kind(of) in ("hang", "crash", "paused") else "")
            + "."
        )
    return Stacks(note=note, id=id, other=other[:PAGE], places=places[page.first : page.first + PAGE]), page


# ---- incidents


class IncidentRow(Row):
    """An incident, and whether its like was there before."""

    id: str
    created: str
    job: str
    kind: str
    cause: str
    ranks: str
    verdict: str
    seen_before: int
    last_seen: str
    confirmed: str
    diagnosis_kept: bool


class Incidents(Answer):
    """Answer of list_incidents."""

    cut_order = ("incidents",)
    alike: ClassVar[str] = "same job, cause and place in the code; without a place the same ranks"
    counted_as_seen_before: str = alike
    incidents: list[IncidentRow]


def incidents(
    history: Sequence[Seen], *, job: str, cause: str, kind: str, with_healthy: bool, cursor: str
) -> tuple[Incidents, Page]:
    """The history, newest first, as far as it is asked for."""
    earlier: dict[tuple[str, ...], list[str]] = {}
    rows = []
    for one in reversed(history):  # from the oldest on
        past = earlier.setdefault(_likeness(one), [])
        rows.append((one, len(past), past[-1] if past else ""))
        past.append(one.created)
    wanted = [
        (one, times, last)
        for one, times, last in reversed(rows)
        if (not job or (clean(one.job, 80) or "(job without a name)") == job)
        and (not cause or one.cause == cause)
        and (one.kind == kind if kind else with_healthy or one.kind not in ("healthy", "no_data"))
    ]
    page = Page.open(f"list_incidents {job!r} {cause!r} {kind!r} {with_healthy}", len(wanted), cursor)
    shown = [
        IncidentRow(
            id=clean(one.id, 40),
            created=clean(one.created, 40),
            job=clean(one.job, 80) or "(job without a name)",
            kind=clean(one.kind, 20),
            cause=clean(one.cause, 40),
            ranks=wording.fold(clean(one.ranks, 10_000)),
            verdict=clean(one.summary, 160),
            seen_before=times,
            last_seen=clean(last, 40),
            confirmed=clean(one.confirmed, 160),
            diagnosis_kept=one.is_kept,
        )
        for one, times, last in wanted[page.first : page.first + PAGE]
    ]
    note = ""
    if not wanted:
        note = "There is no incident of that kind." if history else f"There are no incidents yet. {HOW_TO_START}"
    first = next((row.id for row in shown if row.diagnosis_kept), "")
    return Incidents(incidents=shown, note=note, next=[f"get_diagnosis(id='{first}')"] if first else []), page


def _likeness(one: Seen) -> tuple[str, ...]:
    return (one.job, one.kind, one.cause, one.place or f"ranks {one.ranks}")


# ---- source code


class CodeLine(Row):
    """A line of source."""

    number: int
    text: str

    def line(self) -> str:
        """See `Row`: as an editor shows it."""
        return f"{self.number:>5}  {self.text}"


class SourceAnswer(Answer):
    """Answer of get_source."""

    cut_order = ("code",)
    id: str
    finding: str
    named: str
    file: str
    line: int
    code: list[CodeLine]


def source(of: Diagnosis, one: Finding, excerpt: Excerpt) -> SourceAnswer:
    """The lines around a finding."""
    return SourceAnswer(
        note=excerpt.note,
        id=clean(identity(of), 40),
        finding=clean(one.id, 20),
        named=excerpt.named,
        file=excerpt.file,
        line=excerpt.line,
        code=code_lines(excerpt),
        next=[f"explain_finding(id='{clean(identity(of), 40)}', finding='{clean(one.id, 20)}')"],
    )


def code_lines(excerpt: Excerpt) -> list[CodeLine]:
    """Its lines with their numbers."""
    return [CodeLine(number=excerpt.first + index, text=text) for index, text in enumerate(excerpt.lines)]


# ---- what is meant


def chosen(source: Source, id: str) -> Diagnosis:
    """The diagnosis of that id, or the one whose id begins so; the newest for "latest".

    What a coordinator finds again has the first one's id and a number, so that a whole id may begin others. Raises
    ToolError, EroicaError.
    """
    diagnoses = source.diagnoses()
    matching = diagnoses[:1] if id == "latest" else [one for one in diagnoses if identity(one) == id]
    if not matching and _ID.fullmatch(id):
        older = source.one(id)
        matching = [older] if older is not None else []
    if not matching:
        matching = [one for one in diagnoses if id and identity(one).startswith(id)]
    if not matching and id == "latest":
        raise ToolError(f"there is no diagnosis yet. {HOW_TO_START}")
    if not matching:
        raise ToolError(f"no diagnosis has an id that begins with {clean(id, 40)!r}; list_jobs shows the newest ones")
    if len({identity(one) for one in matching}) > 1:
        raise ToolError(f"{len(matching)} diagnoses have an id that begins with {clean(id, 40)!r}; give more of it")
    return matching[0]
