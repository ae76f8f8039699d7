"""Whether diagnoses are right, by the catalogue's rules.

A blame counts only if rank or host set *and* function (or link, or device) *and* cause are right. A finding that names
a rank which is no culprit is a false blame, and the fault it was meant for is missed. In controls any finding that is
not tolerated is a false blame, and so is a diagnosis of trouble without any. Of two faults each scores for itself. Used
by `evals.synthetic`, `evals.suites` and tests; it looks at the diagnosis records alone, never at how they were made.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from eroica.findings import Diagnosis, Finding, Impact, PatternValues
from eroica.job import parse_ranks
from evals.truth import Answer, Expected, Truth

TROUBLE = frozenset({"slow", "hang", "crash", "recovered"})
"""Kinds of diagnoses that must not be made of a job in which nothing is wrong. A trouble that is said to be over was
a reason to look all the same."""
SET_OFF = frozenset({"slowdown", "recurring"})
"""What a window is for that nobody has asked for; a control must give no reason for one."""


@dataclass(frozen=True, slots=True)
class Score:
    """How the diagnoses of one job did."""

    found: tuple[bool, ...]
    """For each expected fault, in the case's order."""
    near: tuple[str, ...]
    """For each missed fault: what the closest finding got wrong."""
    false_blames: tuple[str, ...]
    """Findings that blame who or what is innocent, as sentences."""
    cost_ratio: tuple[float | None, ...]
    """For each found fault: seconds per iteration that the finding claims, by the true cost; None = not told."""
    verdict_right: bool
    """The first verdict names one of the faults, or nothing in a control."""
    is_unknown: bool = False
    """Somebody was told that the cause is unknown, with what was ruled out."""
    unknowns: tuple[bool, ...] = ()
    """For each expected fault: it was found, and all that found it call its cause unknown."""
    right_findings: tuple[tuple[int, int], ...] = ()
    """(diagnosis, finding) of each that is right."""
    blaming_findings: tuple[tuple[int, int], ...] = ()
    """(diagnosis, finding) of each that is a false blame."""

    @property
    def right(self) -> bool:
        """All faults found, nobody else blamed."""
        return all(self.found) and not self.false_blames

    def points(self, grade: str, *, unknown_is_fair: bool = False) -> float:
        """From 0 to 1. Any false blame makes it 0; an honest "unknown" is worth nothing where the reports are sure of
        the cause (grade A), and a half where it answers all else that is asked (B), or where nobody knows (C)."""
        if self.false_blames:
            return 0.0
        if not self.found:
            return 1.0
        missed = 0.5 if grade == "C" and self.is_unknown else 0.0
        unknown = 1.0 if unknown_is_fair else 0.0 if grade == "A" else 0.5
        worth = [
            (unknown if is_unknown else 1.0) if hit else missed
            for hit, is_unknown in zip(self.found, self.unknowns, strict=True)
        ]
        return sum(worth) / len(worth)


def _text(finding: Finding) -> str:
    function = finding.function
    parts: list[str | None] = [finding.device, finding.link]
    if function is not None:
        parts = [function.kind, function.name, function.location, function.user_location, *parts]
    return "|".join(part or "" for part in parts)


def _said(finding: Finding, diagnosis: Diagnosis) -> str:
    proofs = [diagnosis.evidence[key].text for key in finding.evidence if key in diagnosis.evidence]
    return "\n".join([*proofs, *finding.ruled_out, finding.advice])


def _is_planted_there(finding: Finding, expected: Expected) -> bool:
    function = finding.function
    for place in (function.location, function.user_location) if function else ():
        path, _, line = (place or "").rpartition(":")
        if line.isdecimal() and any(
            os.path.basename(path) == p.file and p.first <= int(line) <= p.last for p in expected.places
        ):
            return True
    return False


def wrong(finding: Finding, expected: Expected, truth: Truth, diagnosis: Diagnosis) -> str | None:
    """What is wrong with a finding of a diagnosis as the answer to a fault; None = it is right."""
    answer = expected.answer
    ranks = frozenset(parse_ranks(finding.ranks))
    if answer.kinds and diagnosis.kind not in answer.kinds:
        return f"kind {diagnosis.kind}"
    if finding.scope not in answer.scopes:
        return f"scope {finding.scope}"
    if not _who_is_right(answer, ranks, finding, expected, truth):
        return f"ranks {finding.ranks or 'none'} hosts {', '.join(finding.hosts) or 'none'}"
    if finding.cause not in answer.causes:
        return f"cause {finding.cause}"
    if expected.links and (finding.link or "") not in expected.links:
        return f"link {finding.link or 'none'}"
    asked, named = answer.place or answer.function is not None, answer.place and _is_planted_there(finding, expected)
    if answer.function is not None:
        named = named or bool(re.search(answer.function, _text(finding), re.IGNORECASE | re.MULTILINE))
    if asked and not named:
        return f"function {_text(finding)!r}"
    if answer.said is not None and not re.search(answer.said, _said(finding, diagnosis), re.IGNORECASE):
        return f"nothing said of {answer.said}"
    return None


def _who_is_right(answer: Answer, ranks: frozenset[int], finding: Finding, expected: Expected, truth: Truth) -> bool:
    hosts = frozenset(finding.hosts) or truth.hosts_of(ranks)
    if answer.who == "ranks":
        return ranks == expected.ranks
    if answer.who == "among":
        return expected.ranks <= ranks
    if answer.who == "hosts":
        return hosts == expected.hosts and ranks <= expected.ranks
    if answer.who == "link":
        named = hosts | {host for host in truth.hosts if host in (finding.link or "")}
        return named == expected.hosts and ranks <= expected.ranks
    if answer.who == "members":
        return not ranks or ranks == frozenset(range(truth.world_size)) or ranks in truth.members
    return not ranks


def score(diagnoses: Sequence[Diagnosis], truth: Truth) -> Score:
    """Judge all diagnoses that were made of a job."""
    told = [(d, f, diagnosis, finding) for d, diagnosis in enumerate(diagnoses)
            for f, finding in enumerate(diagnosis.findings or _recovery(diagnosis))]  # fmt: skip
    found, near, costs, right = [], [], list[float | None](), set[tuple[int, int]]()
    unknowns = []
    for expected in truth.faults:
        faults = [wrong(finding, expected, truth, diagnosis) for _, _, diagnosis, finding in told]
        hits = [entry for entry, fault in zip(told, faults, strict=True) if fault is None]
        right |= {(d, f) for d, f, _, _ in hits}
        found.append(bool(hits))
        unknowns.append(bool(hits) and all(finding.cause == "unknown" for *_, finding in hits))
        if not hits:
            near.append(_closest([finding for *_, finding in told], faults, expected))
            costs.append(None)
            continue
        seconds = hits[0][3].impact.seconds_per_iteration
        costs.append(seconds / expected.cost_s if seconds is not None and expected.cost_s else None)
    blamed = {
        (d, f): blame
        for d, f, diagnosis, finding in told
        if (d, f) not in right and (blame := _false_blame(finding, diagnosis, truth)) is not None
    }
    blames = list(blamed.values())
    if not truth.faults:
        blames += [f"{d.kind} with no finding, looked at for {d.window.trigger}: {d.verdict.summary}" for d in diagnoses
                   if (d.kind in TROUBLE or d.window.trigger in SET_OFF) and not d.findings]  # fmt: skip
    return Score(
        tuple(found),
        tuple(near),
        tuple(blames),
        tuple(costs),
        verdict_right=any((d, 0) in right for d in range(len(diagnoses))) if truth.faults else not blames,
        is_unknown=any(finding.cause == "unknown" and finding.ruled_out for *_, finding in told),
        unknowns=tuple(unknowns),
        right_findings=tuple(sorted(right)),
        blaming_findings=tuple(blamed),
    )


def _recovery(diagnosis: Diagnosis) -> tuple[Finding, ...]:
    """A trouble that is over has no findings; its verdict is the answer."""
    if diagnosis.kind != "recovered":
        return ()
    nothing, verdict = PatternValues(), diagnosis.verdict
    return (
        Finding(
            id="",
            cause=verdict.cause,
            scope=verdict.scope,
            ranks=verdict.ranks,
            hosts=verdict.hosts,
            steps="once",
            function=None,
            pattern=nothing,
            peers=nothing,
            expected=nothing,
            distance=None,
            delta=None,
            impact=Impact(),
            confidence=verdict.confidence,
            evidence=tuple(diagnosis.evidence),
            ruled_out=(),
            advice=verdict.summary,
        ),
    )


def _closest(findings: Sequence[Finding], faults: Sequence[str | None], expected: Expected) -> str:
    """What stands nearest to a missed fault: the finding of its ranks if there is one, else the first."""
    if not findings:
        return "no finding"
    for finding, fault in zip(findings, faults, strict=True):
        if expected.ranks and frozenset(parse_ranks(finding.ranks)) == expected.ranks:
            return str(fault)
    return str(faults[0])


def _false_blame(finding: Finding, diagnosis: Diagnosis, truth: Truth) -> str | None:
    """A finding that answers no fault: does it blame the innocent? A sentence, or None.

    Not a false blame (though it may have missed the cause): a second finding about ranks that are all culprits, a
    second one with the true cause about the true hosts, one without ranks and hosts whose cause is true or unknown.
    """
    for answer in truth.tolerated:
        if wrong(finding, Expected(answer, frozenset(), frozenset()), truth, diagnosis) is None:
            return None
    named = f"{finding.cause} of scope {finding.scope} on ranks {finding.ranks or 'none'}, {_text(finding)[:80]}"
    if not truth.faults:
        return None if finding.cause == "none" and not finding.ranks else named
    ranks, hosts = frozenset(parse_ranks(finding.ranks)), frozenset(finding.hosts)
    causes = frozenset().union(*(expected.answer.causes for expected in truth.faults))
    if not ranks and not hosts:
        return None if finding.cause in causes | {"unknown", "none"} else named
    for expected in truth.faults:
        on_culprits = expected.answer.who == "ranks" and ranks and ranks <= truth.culprits
        same_hosts = expected.answer.who in ("hosts", "link") and (hosts or truth.hosts_of(ranks)) == expected.hosts
        if on_culprits or (same_hosts and finding.cause in expected.answer.causes):
            return None
        if expected.answer.who in ("members", "nobody") and finding.scope == "all" and finding.cause in causes:
            return None
    return named
