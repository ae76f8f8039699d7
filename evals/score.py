"""Whether a diagnosis is right, by the catalogue's rules.

A blame counts only if rank or host set *and* function (or link, or device) *and* cause are right. A finding that names
a rank which is no culprit is a false blame, and the fault it was meant for is missed. In controls any finding that is
not tolerated is a false blame. Of two faults each scores for itself. Used by `evals.synthetic` and by tests; it looks
at the diagnosis record alone, never at how it was made.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from eroica.findings import Diagnosis, Finding
from eroica.job import parse_ranks
from evals.cases_synth import Answer
from evals.synth import Cluster, Expected


@dataclass(frozen=True, slots=True)
class Score:
    """How a diagnosis did on one cluster."""

    found: tuple[bool, ...]
    """For each expected fault, in the case's order."""
    near: tuple[str, ...]
    """For each missed fault: what the closest finding got wrong."""
    false_blames: tuple[str, ...]
    """Findings that blame who or what is innocent, as sentences."""
    cost_ratio: tuple[float | None, ...]
    """For each found fault: seconds per iteration that the finding claims, by the true cost; None = not told."""
    verdict_right: bool
    """The verdict names one of the faults, or nothing in a control."""

    @property
    def right(self) -> bool:
        """All faults found, nobody else blamed."""
        return all(self.found) and not self.false_blames


def _text(finding: Finding) -> str:
    function = finding.function
    parts: list[str | None] = [finding.device, finding.link]
    if function is not None:
        parts = [function.kind, function.name, function.location, function.user_location, *parts]
    return "|".join(part or "" for part in parts)


def _hosts_of(cluster: Cluster, ranks: frozenset[int]) -> frozenset[str]:
    return frozenset(cluster.host_names[int(cluster.program.hosts[rank])] for rank in ranks)


def wrong(finding: Finding, expected: Expected, cluster: Cluster) -> str | None:
    """What is wrong with a finding as the answer to a fault; None = it is right."""
    answer = expected.answer
    ranks = frozenset(parse_ranks(finding.ranks))
    if finding.scope not in answer.scopes:
        return f"scope {finding.scope}"
    if not _who_is_right(answer, ranks, finding, expected, cluster):
        return f"ranks {finding.ranks or 'none'} hosts {', '.join(finding.hosts) or 'none'}"
    if finding.cause not in answer.causes:
        return f"cause {finding.cause}"
    if answer.function is not None and not re.search(answer.function, _text(finding), re.IGNORECASE | re.MULTILINE):
        return f"function {_text(finding)!r}"
    return None


def _who_is_right(
    answer: Answer, ranks: frozenset[int], finding: Finding, expected: Expected, cluster: Cluster
) -> bool:
    hosts = frozenset(finding.hosts) or _hosts_of(cluster, ranks)
    if answer.who == "ranks":
        return ranks == expected.ranks
    if answer.who == "hosts":
        return hosts == expected.hosts and ranks <= expected.ranks
    if answer.who == "link":
        named = hosts | {host for host in cluster.host_names if host in (finding.link or "")}
        return named == expected.hosts and ranks <= expected.ranks
    if answer.who == "members":
        everybody = frozenset(range(cluster.world_size))
        last = frozenset(r for r in everybody if cluster.program.stage[r] == cluster.program.stage.max())
        return not ranks or ranks in (everybody, last)
    return not ranks


def score(diagnosis: Diagnosis, cluster: Cluster) -> Score:
    """Judge a diagnosis of `cluster`."""
    findings = list(diagnosis.findings)
    found: list[bool] = []
    near: list[str] = []
    costs: list[float | None] = []
    used: set[int] = set()
    for expected in cluster.expected:
        faults = [wrong(finding, expected, cluster) for finding in findings]
        hit = next((k for k, fault in enumerate(faults) if fault is None), None)
        found.append(hit is not None)
        if hit is None:
            near.append(_closest(findings, faults, expected))
            costs.append(None)
            continue
        used.add(hit)
        seconds = findings[hit].impact.seconds_per_iteration
        costs.append(None if seconds is None or expected.cost_s <= 0 else seconds / expected.cost_s)
    blames = [
        blame
        for k, finding in enumerate(findings)
        if k not in used and (blame := _false_blame(finding, cluster)) is not None
    ]
    verdict_right = not blames if cluster.case.control else 0 in used
    return Score(tuple(found), tuple(near), tuple(blames), tuple(costs), verdict_right)


def _closest(findings: Sequence[Finding], faults: Sequence[str | None], expected: Expected) -> str:
    """What stands nearest to a missed fault: the finding of its ranks if there is one, else the first."""
    if not findings:
        return "no finding"
    for finding, fault in zip(findings, faults, strict=True):
        if expected.ranks and frozenset(parse_ranks(finding.ranks)) == expected.ranks:
            return str(fault)
    return str(faults[0])


def _false_blame(finding: Finding, cluster: Cluster) -> str | None:
    """A finding that answers no fault: does it blame the innocent? A sentence, or None.

    Not a false blame (though it may have missed the cause): a second finding about ranks that are all culprits, a
    second one with the true cause about the true hosts, one without ranks and hosts whose cause is true or unknown.
    """
    for answer in cluster.case.tolerated:
        stand_in = Expected(answer, frozenset(), frozenset(), 0.0, 0.0)
        if wrong(finding, stand_in, cluster) is None:
            return None
    named = f"{finding.cause} of scope {finding.scope} on ranks {finding.ranks or 'none'}, {_text(finding)[:80]}"
    if cluster.case.control:
        return named
    ranks, hosts = frozenset(parse_ranks(finding.ranks)), frozenset(finding.hosts)
    causes = frozenset().union(*(expected.answer.causes for expected in cluster.expected))
    if not ranks and not hosts:
        return None if finding.cause in causes | {"unknown"} else named
    for expected in cluster.expected:
        on_culprits = expected.answer.who == "ranks" and ranks and ranks <= cluster.culprits
        same_hosts = expected.answer.who in ("hosts", "link") and (hosts or _hosts_of(cluster, ranks)) == expected.hosts
        if on_culprits or (same_hosts and finding.cause in expected.answer.causes):
            return None
    return named
