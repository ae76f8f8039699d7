"""From stacked summaries to an answer: who, what, why, what it costs, how sure, and who merely waits.

`diagnose` puts together what `blame` (own time), `network` (transfers) and `localization` (distances) find, prices each
finding by replay or ledger, orders them by what they cost and words them. Pure: no clock, file or socket; `context` carries
all that no trace holds, and what is absent there is "not ruled out", never "fine". The JSON form is in `findings`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from eroica import replay
from eroica.blame import Excess, Indices, common_excess, heavy_roles, idle_excesses, rotating_excess, stable_excesses
from eroica.causes import ADVICE, Cause
from eroica.collectives import Float64s
from eroica.critical_path import OWN_WORK, Activity
from eroica.findings import (
    Consequence,
    Coverage,
    Detail,
    Diagnosis,
    Evidence,
    Finding,
    FunctionName,
    Impact,
    Iteration,
    PatternValues,
    Role,
    Verdict,
    Window,
)
from eroica.job import format_ranks
from eroica.localization import EFFECT_FLOOR, EXPECTED_BETA, Localization, Roles, localize_stacked, roles_of
from eroica.network import SlowTransfer, slow_transfers
from eroica.pattern import MU_SOURCES, Function, Stacked

ESTABLISHED_COVERAGE = 0.8
"""Share of the excess that a cause must cover to be called established (design section 4)."""
SUPPORTED_COVERAGE = 0.5
LEAST_EXPLAINED = 0.05
"""With less of the window explained, the traces say nothing: no conclusion, not even "healthy"."""
MANY_WAIT = 0.02
"""Share of the iteration that a rank must wait to be listed among the consequences."""
DETAIL_FUNCTIONS = 60
"""Functions that a page draws."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What no trace holds; each part is optional."""

    job: str = ""
    created: str = ""
    """ISO-8601; the caller's clock."""
    version: str = ""
    trigger: str = "offline"
    baseline: Stacked | None = None
    """The same job when it was healthy."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What happened on the way here: files left out, ranks numbered by hand."""
    partial_ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Draft:
    """A finding before it has a number."""

    cause: Cause
    scope: str
    ranks: Indices
    hosts: tuple[str, ...]
    steps: str
    function: int | None
    impact: Impact
    coverage: float
    evidence: tuple[Evidence, ...]
    link: str | None = None
    network: SlowTransfer | None = None


def _name(function: Function) -> FunctionName:
    return FunctionName(function.kind, function.name, function.location, function.user_location or function.launched_at, function.user_function)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


class _Pricer:
    """Impact of taking the excess of some ranks away: replay where it models the job, else the ledger."""

    def __init__(self, stacked: Stacked, roles: Roles, iteration_s: float) -> None:
        self._stacked = stacked
        self._iteration_s = iteration_s
        self._roles = roles
        own = stacked.own_s
        self._level = np.full(own.shape, np.nan)
        for role in range(len(roles.names)):
            members = roles.members(role)
            self._level[members] = np.nanmedian(own[members], axis=0)
        ledgers = [s.ledger for s in stacked.summaries]
        channels = {c for ledger in ledgers for c in ledger.channels}
        several = len(channels) > 1 or any(">" in c.key for c in channels)
        self._replay = replay.prepare(ledgers) if several else None

    def _share(self, seconds: float, method: str) -> Impact:
        seconds = min(max(seconds, 0.0), self._iteration_s)
        return Impact(seconds, seconds / self._iteration_s if self._iteration_s > 0 else None, method)

    def less(self, ranks: Indices, seconds: Float64s, others: Sequence[tuple[Indices, Float64s]] = ()) -> Impact:
        """What comes back without `seconds` (own time per iteration of each of `ranks`).

        `others` are the excesses of other findings: where one of them hides this one (both are late for the same
        collective, so mending one alone changes little), what this one costs once they are mended counts instead.
        """
        alone = self._length([]) - self._length([(ranks, seconds)])
        last = self._length(others) - self._length([*others, (ranks, seconds)]) if others else alone
        return self._share(max(alone, last), "replay" if self._replay is not None else "ledger")

    def _length(self, less: Sequence[tuple[Indices, Float64s]]) -> float:
        """Iteration without these excesses, up to a constant."""
        stacked = self._stacked
        taken = np.zeros(len(stacked))
        for ranks, seconds in less:
            taken[ranks] += seconds
        if self._replay is not None:
            culprits = np.flatnonzero(taken)
            peers = {int(w): np.setdiff1d(self._roles.members(int(self._roles.of[w])), culprits).tolist() for w in culprits}
            return self._replay.without({int(w): float(taken[w]) for w in culprits}, peers)
        return self._maximum(stacked.own_s - taken[:, None])

    def without_peaks(self, ranks: Indices | None) -> Impact:
        """Each rank's steps held at its own median above its role's level: what rotating excess costs."""
        own = self._stacked.own_s
        usual = self._level + np.nanmedian(own - self._level, axis=1, keepdims=True)
        after = own.copy()
        rows = slice(None) if ranks is None or not len(ranks) else ranks
        after[rows] = np.minimum(own[rows], usual[rows])
        return self._share(self._maximum(own) - self._maximum(after), "ledger")

    @staticmethod
    def _maximum(own: Float64s) -> float:
        return float(np.nanmean(np.nanmax(own, axis=0)))


def _iteration_s(stacked: Stacked) -> float:
    return float(np.median(stacked.iteration_s)) if len(stacked) else 0.0


def _pattern(stacked: Stacked, rows: Indices, function: int | None) -> PatternValues:
    if function is None or not len(rows):
        return PatternValues()
    mu, sigma = stacked.mu[rows, function], stacked.sigma[rows, function]
    source = int(np.bincount(stacked.mu_source[rows, function]).argmax())
    return PatternValues(
        float(np.median(stacked.beta[rows, function])),
        float(np.nanmedian(mu)) if np.isfinite(mu).any() else None,
        float(np.nanmedian(sigma)) if np.isfinite(sigma).any() else None,
        MU_SOURCES[source] or None,
    )


def _excess_draft(stacked: Stacked, excess: Excess, pricer: _Pricer, iteration_s: float, all_excesses: Sequence[Excess] = ()) -> _Draft:
    evidence = []
    others = [(e.ranks, np.full(len(e.ranks), e.seconds)) for e in all_excesses if e is not excess and e.steps == "stable" and len(e.ranks)]
    named = stacked.functions[excess.function] if excess.function is not None else None
    where = f" in {named.name}" if named is not None else ""
    if excess.steps == "stable":
        impact = pricer.less(excess.ranks, np.full(len(excess.ranks), excess.seconds), others) if excess.scope != "all" else Impact(excess.seconds, excess.seconds / iteration_s, "pattern")
        if excess.scope == "rank":
            text = f"own time of rank {format_ranks(stacked.ranks[excess.ranks].tolist())} exceeds its peers' by {_ms(excess.seconds)} per iteration{where}, in {excess.share_of_steps:.0%} of the steps"
        elif excess.scope == "group":
            text = f"ranks {format_ranks(stacked.ranks[excess.ranks].tolist())} do {_ms(excess.seconds)} more own work per iteration than the other roles{where}"
        else:
            text = f"all ranks take {_ms(excess.seconds)} longer per iteration than in the healthy window{where}"
    else:
        impact = pricer.without_peaks(excess.ranks)
        text = f"single steps take longer{where}: {excess.share_of_steps:.0%} of the steps, {_ms(excess.seconds)} per iteration on average, on {'changing ranks' if not len(excess.ranks) else 'one rank'}"
    evidence.append(Evidence(text, "ledger", {"excess_s": excess.seconds, "share_of_steps": excess.share_of_steps, "coverage": excess.coverage}))
    evidence.append(Evidence(excess.cause.because, "pattern", {}))
    hosts = tuple(sorted({stacked.hosts[w] for w in excess.ranks} - {""})) if excess.scope == "rank" else ()
    return _Draft(excess.cause, excess.scope, excess.ranks, hosts, excess.steps, excess.function, impact, excess.coverage, tuple(evidence))


def _network_draft(stacked: Stacked, slow: SlowTransfer, iteration_s: float, waits: Float64s) -> _Draft:
    names = [stacked.joined.channels[c] for c in slow.channels]
    shown = ", ".join(f"{n.key} ({n.description})" if n.description else n.key for n in names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    evidence = [
        Evidence(
            f"transfers of group{'s' if len(names) > 1 else ''} {shown} take {slow.ratio:.2f} times as long as {'those of groups of the same shape' if slow.reference == 'siblings' else 'in the healthy window'}",
            "ledger",
            {"ratio": slow.ratio, "exposed_excess_s": slow.seconds},
        ),
        Evidence("no rank of these groups shows more own time than its peers in this transfer: the transfer is the shortest duration among the members", "ledger", {}),
    ]
    if slow.undecided:
        evidence.append(Evidence(slow.undecided, "ledger", {}))
    link = None
    if slow.on_one_host:
        cause = Cause("intra_node_link", False, "the slow groups stay within a host", ())
    elif slow.scope == "host":
        cause = Cause("nic_or_host_network", not slow.undecided, "all groups through this host are slow, and no other", ())
    elif slow.scope == "link":
        link = "-".join(slow.hosts)
        cause = Cause("fabric_contention", not slow.undecided, "all groups over this pair of hosts are slow, and other groups of these hosts are not", ())
    else:
        cause = Cause("fabric_contention", False, "groups tell no host or link apart", ())
    function = _collective_function(stacked, slow)
    seconds = slow.seconds
    slowed = np.unique(np.concatenate([_members(stacked, c) for c in slow.channels]))
    rest = np.setdiff1d(np.arange(len(stacked)), slowed)
    if len(rest):
        # Part of a slow transfer may hide behind slack; what it costs is what the other ranks wait for these.
        seconds = min(seconds, max(float(np.median(waits[rest]) - np.median(waits[slowed])), 0.0))
    impact = Impact(seconds, seconds / iteration_s if iteration_s else None, "ledger")
    return _Draft(cause, slow.scope, slow.ranks, slow.hosts, "stable", function, impact, 0.9 if not slow.undecided else 0.4, tuple(evidence), link, slow)


def _members(stacked: Stacked, channel: int) -> Indices:
    joined = stacked.joined
    return np.unique(joined.rank[joined.channel[joined.which] == channel]).astype(np.intp)


def _collective_function(stacked: Stacked, slow: SlowTransfer) -> int | None:
    descriptions = {stacked.joined.channels[c].description for c in slow.channels}
    columns = [k for k, f in enumerate(stacked.functions) if f.activity == Activity.COLLECTIVE and (any(d and f"[{d}]" in f.name for d in descriptions) or descriptions == {""})]
    columns = columns or [k for k, f in enumerate(stacked.functions) if f.activity == Activity.COLLECTIVE]
    return max(columns, key=lambda k: float(np.median(stacked.beta[slow.ranks, k])), default=None)


def _confidence(draft: _Draft, roles: Roles, partial: bool, num_ranks: int) -> str:
    level = 0 if draft.cause.certain and draft.coverage >= ESTABLISHED_COVERAGE else 1 if draft.coverage >= SUPPORTED_COVERAGE else 2
    if draft.cause.cause == "unknown":
        level = 3 if draft.scope != "all" else 2
    elif draft.scope == "rank" and len(draft.ranks):
        peers = len(roles.members(int(roles.of[draft.ranks[0]]))) - len(draft.ranks)
        # With a single peer either may be the odd one.
        level = max(level, 2 if peers < 1 else 1 if peers < 2 else 0)
    if partial:
        level = min(level + 1, 3)
    return ("established", "supported", "hypothesis", "unknown")[level]


def _finding(stacked: Stacked, draft: _Draft, roles: Roles, where: Localization, number: int, keys: Sequence[str], partial: bool) -> Finding:
    rows, function = draft.ranks, draft.function
    peers = PatternValues()
    expected = PatternValues()
    distance = delta = None
    if function is not None:
        role = int(roles.of[rows[0]]) if len(rows) else 0
        mu, sigma = where.peer_mu[role, function], where.peer_sigma[role, function]
        peers = PatternValues(float(where.peer_beta[role, function]), float(mu) if np.isfinite(mu) else None, float(sigma) if np.isfinite(sigma) else None)
        if draft.scope == "group" and draft.network is None:
            peers = _pattern(stacked, np.setdiff1d(np.arange(len(stacked), dtype=np.intp), rows), function)
        expected = PatternValues(EXPECTED_BETA[stacked.functions[function].activity][1])
        if len(rows):
            distance, delta = float(np.median(where.distance[rows, function])), float(np.median(where.delta[rows, function]))
    device = None
    if draft.scope == "rank" and len(rows) == 1 and draft.cause.cause in ("gpu_throttle", "gpu_compute", "host_device_copy"):
        host = stacked.hosts[rows[0]]
        if host and stacked.device_models[rows[0]]:
            # Ranks of a host use its devices in order, as launchers number them.
            device = f"{host}/gpu{sum(1 for w in range(rows[0]) if stacked.hosts[w] == host)}"
    return Finding(
        id=f"F{number}",
        cause=draft.cause.cause,
        scope=draft.scope,
        ranks=format_ranks(stacked.ranks[rows].tolist()) if draft.scope != "rotating" else "",
        hosts=draft.hosts,
        steps=draft.steps,
        function=_name(stacked.functions[function]) if function is not None else None,
        pattern=_pattern(stacked, rows if len(rows) else np.arange(len(stacked), dtype=np.intp), function),
        peers=peers,
        expected=expected,
        distance=distance,
        delta=delta,
        impact=draft.impact,
        confidence=_confidence(draft, roles, partial, len(stacked)),
        evidence=tuple(keys),
        ruled_out=draft.cause.ruled_out,
        advice=ADVICE.get(draft.cause.cause, ADVICE["unknown"]),
        device=device,
        link=draft.link,
    )


def _summary(finding: Finding) -> str:
    who = {
        "rank": f"rank{'s' if ',' in finding.ranks or '-' in finding.ranks else ''} {finding.ranks}",
        "host": f"host {', '.join(finding.hosts)}",
        "group": f"ranks {finding.ranks}",
        "link": f"link {finding.link}",
        "all": "all ranks",
        "rotating": "changing ranks",
    }[finding.scope]
    what = ""
    if finding.function is not None:
        place = finding.function.user_location or finding.function.location
        what = f" in {finding.function.name}" + (f" ({place})" if place else "")
        if finding.function.user_function and finding.function.user_function != finding.function.name:
            what = f" in {finding.function.user_function} ({place}), calling {finding.function.name}"
    cost = ""
    if finding.impact.seconds_per_iteration is not None:
        cost = f", costing {_ms(finding.impact.seconds_per_iteration)} per iteration" + (f" ({finding.impact.share:.0%})" if finding.impact.share is not None else "")
    return f"{who}: {finding.cause.replace('_', ' ')}{what}{cost}"


def _consequences(stacked: Stacked, blamed: set[int], waits: Float64s, iteration_s: float) -> tuple[Consequence, ...]:
    """Who waits, gathered by the communication that they wait in most."""
    groups: dict[str, list[int]] = {}
    columns = [k for k, f in enumerate(stacked.functions) if f.activity in (Activity.COLLECTIVE, Activity.WAIT)]
    for w in range(len(stacked)):
        if w in blamed or not columns or waits[w] < MANY_WAIT * iteration_s:
            continue
        most = columns[int(np.argmax(stacked.beta[w, columns]))]
        groups.setdefault(stacked.functions[most].name, []).append(w)
    return tuple(
        Consequence(
            format_ranks(stacked.ranks[rows].tolist()), name,
            f"wait {_ms(float(np.median(waits[rows])))} per iteration for late peers; not slow themselves",
        )
        for name, rows in groups.items()
    )  # fmt: skip


def waits_of(stacked: Stacked) -> tuple[Float64s, Float64s]:
    """Per rank and iteration, medians in seconds: waiting (joined collectives, receives, waits) and exposed transfer."""
    joined = stacked.joined
    num = len(stacked)
    exposed, waited = np.zeros(num), np.zeros(num)
    for w, summary in enumerate(stacked.summaries):
        exposed[w] = 0.0 if not len(summary.ledger.kind) else 1.0
    sampled = np.zeros(num)
    if len(joined.rank):
        waited = np.bincount(joined.rank, weights=joined.exposed_wait_s, minlength=num)
        told = np.concatenate([s.ledger.sample_exposed_s for s in stacked.summaries]).astype(np.float64)
        offset = np.concatenate([[0], np.cumsum([len(s.ledger.kind) for s in stacked.summaries])])
        sampled = np.bincount(joined.rank, weights=told[offset[joined.rank] + joined.sample], minlength=num)
    share = np.where(sampled > 0, waited / np.maximum(sampled, 1e-12), 0.0)
    total = np.nanmedian(stacked.exposed_s, axis=1) if stacked.exposed_s.size else np.zeros(num)
    waiting = np.nanmedian(stacked.waiting_s, axis=1) if stacked.waiting_s.size else np.zeros(num)
    return total * share + waiting, total * (1 - share)


def _coverage(stacked: Stacked, context: Context) -> Coverage:
    summaries = stacked.summaries
    missing = sorted(set(range(stacked.world_size)) - set(stacked.ranks.tolist()))
    if stacked.world_size - len(stacked) != len(missing):
        missing = []
    partial = sorted({s.rank for s in summaries if s.coverage.partial} | set(context.partial_ranks))
    explained = float(np.mean([s.coverage.explained for s in summaries])) if summaries else 0.0
    notes = list(context.notes)
    if summaries:
        events = sum(s.coverage.num_events for s in summaries)
        kernels = sum(s.coverage.num_kernels for s in summaries)
        collectives = sum(s.coverage.num_collectives for s in summaries)
        notes.append(f"read {events:,} events of {len(summaries)} rank{'s' if len(summaries) != 1 else ''}: {kernels:,} kernels, {collectives:,} communications; iterations by {summaries[0].steps_by}")
    by_note: dict[str, list[int]] = {}
    for s in summaries:
        for note in s.coverage.notes:
            by_note.setdefault(note, []).append(s.rank)
    notes.extend(f"rank {format_ranks(ranks)}: {note}" for note, ranks in by_note.items())
    has_device = [s.coverage.has_device for s in summaries]
    if any(has_device) and not all(has_device):
        notes.append(f"ranks {format_ranks(s.rank for s in summaries if not s.coverage.has_device)} hold no device events while others do: they cannot be compared")
    if len(summaries) > 1 and all(has_device) and not any(s.coverage.num_collectives for s in summaries):
        notes.append("no communication was recognised on any rank: waiting cannot be told from work")
    if not all(s.coverage.epoch for s in summaries):
        notes.append("the clock's base is unknown in some traces: durations are compared, instants are not")
    notes.extend(stacked.joined.not_joinable)
    return Coverage(stacked.world_size, len(stacked), format_ranks(missing), format_ranks(partial), explained, tuple(notes))


def _advice_notes(stacked: Stacked) -> list[str]:
    """Kinds of time that all ranks spend more of than experience expects: advice, never a blame."""
    notes = []
    middle = np.median(stacked.activity_beta, axis=0) if len(stacked) else np.zeros(len(Activity))
    for activity in (Activity.INPUT, Activity.SYNC, Activity.ALLOCATOR, Activity.GC, Activity.CHECKPOINT, Activity.COMPILE, Activity.COLLECTIVE):
        high = EXPECTED_BETA[activity][1]
        if middle[activity] > max(3 * high, 0.05) or (activity == Activity.COLLECTIVE and middle[activity] > high):
            notes.append(f"worth a look, on all ranks alike: {activity.name.lower()} owns {middle[activity]:.0%} of the critical path (usually below {high:.0%})")
    return notes


def diagnose(stacked: Stacked, context: Context | None = None) -> Diagnosis:
    """The whole answer for one window. Never raises on odd data; says `no_data` where the traces hold nothing to compare."""
    return diagnose_in_detail(stacked, context)[0]


def diagnose_in_detail(stacked: Stacked, context: Context | None = None) -> tuple[Diagnosis, Detail]:
    """`diagnose`, with the numbers behind it for a page."""
    context = context or Context()
    iteration_s = _iteration_s(stacked)
    roles = roles_of(stacked) if len(stacked) else Roles(np.empty(0, np.int32), (), "functions")
    where = localize_stacked(stacked, roles, context.baseline)
    coverage = _coverage(stacked, context)
    waits, transfer = waits_of(stacked) if len(stacked) else (np.empty(0), np.empty(0))
    usable = len(stacked) >= 2 and coverage.explained_share >= LEAST_EXPLAINED and iteration_s > 0
    drafts = _drafts(stacked, roles, where, context, iteration_s, waits) if usable else []
    if usable and not drafts:
        coverage = replace(coverage, notes=(*coverage.notes, *_advice_notes(stacked)))
    evidence: dict[str, Evidence] = {}
    findings = []
    partial = bool(coverage.partial_ranks)
    for number, draft in enumerate(drafts, start=1):
        keys = []
        for item in draft.evidence:
            keys.append(f"E{len(evidence) + 1}")
            evidence[keys[-1]] = item
        findings.append(_finding(stacked, draft, roles, where, number, keys, partial))
    blamed = {int(w) for draft in drafts if draft.scope in ("rank", "host") for w in draft.ranks}
    detail = _detail(stacked, roles, waits, transfer)
    hosts: dict[str, list[int]] = {}
    for rank, host in zip(stacked.ranks.tolist(), stacked.hosts, strict=True):
        hosts.setdefault(host or "unknown", []).append(rank)
    baseline_s = _iteration_s(context.baseline) if context.baseline is not None else None
    kind, verdict = _verdict(stacked, findings, coverage, usable, partial)
    marked = len(stacked) > 0 and stacked.summaries[0].steps_by != "window"
    diagnosis = Diagnosis(
        job=context.job,
        created=context.created,
        kind=kind,
        window=Window(
            trigger=context.trigger,
            started=_iso(min((s.started_ns for s in stacked.summaries if s.started_ns is not None), default=None)),
            ended=_iso(max((s.started_ns + int(s.window_s * 1e9) for s in stacked.summaries if s.started_ns is not None), default=None)),
            first_step=int(stacked.steps[0]) if marked and len(stacked.steps) else None,
            num_steps=max(s.num_iterations for s in stacked.summaries) if marked else None,
            duration_s=float(np.median([s.window_s for s in stacked.summaries])) if len(stacked) else None,
        ),
        coverage=coverage,
        iteration=Iteration(
            iteration_s if marked else None, baseline_s, iteration_s / baseline_s if marked and baseline_s else None
        ),
        roles=tuple(Role(name, format_ranks(stacked.ranks[roles.members(r)].tolist()), roles.by) for r, name in enumerate(roles.names)),
        hosts={host: format_ranks(ranks) for host, ranks in hosts.items()},
        verdict=verdict,
        findings=tuple(findings),
        consequences=_consequences(stacked, blamed, waits, iteration_s) if findings else (),
        evidence=evidence,
        environment=context.environment,
        producer={"name": "eroica", "version": context.version},
    )
    return diagnosis, detail


def _iso(ns: int | None) -> str | None:
    if ns is None:
        return None
    from datetime import UTC, datetime

    try:
        return datetime.fromtimestamp(ns / 1e9, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError, OSError):
        return None


def _drafts(stacked: Stacked, roles: Roles, where: Localization, context: Context, iteration_s: float, waits: Float64s) -> list[_Draft]:
    pricer = _Pricer(stacked, roles, iteration_s)
    excesses = stable_excesses(stacked, roles, where, iteration_s)
    roots = np.unique(np.concatenate([e.ranks for e in excesses])) if excesses else np.empty(0, np.intp)
    rotating = rotating_excess(stacked, roles, iteration_s, excesses)
    if rotating is not None:
        excesses.append(rotating)
    excesses.extend(idle_excesses(stacked, roles, iteration_s, roots))
    excesses.extend(heavy_roles(stacked, roles, iteration_s, roots))
    drafts = [_excess_draft(stacked, e, pricer, iteration_s, excesses) for e in excesses]
    drafts.extend(_network_draft(stacked, slow, iteration_s, waits) for slow in slow_transfers(stacked, context.baseline, iteration_s))
    drafts = [d for d in drafts if (d.impact.seconds_per_iteration or 0.0) >= EFFECT_FLOOR / 2 * iteration_s]
    if context.baseline is not None and len(context.baseline):
        gap = iteration_s - _iteration_s(context.baseline)
        priced = sum(d.impact.seconds_per_iteration or 0.0 for d in drafts)
        if gap > 0 and priced < 0.5 * gap:
            drafts.extend(_excess_draft(stacked, e, pricer, iteration_s) for e in common_excess(stacked, context.baseline, iteration_s))
    drafts.sort(key=lambda d: -(d.impact.seconds_per_iteration or 0.0))
    return drafts


def _verdict(stacked: Stacked, findings: Sequence[Finding], coverage: Coverage, usable: bool, partial: bool) -> tuple[str, Verdict]:
    def nothing(confidence: str, summary: str) -> Verdict:
        return Verdict("none", "none", "", (), confidence, summary)

    if findings:
        first = findings[0]
        return "slow", Verdict(first.scope, first.cause, first.ranks, first.hosts, first.confidence, _summary(first))
    if not len(stacked):
        return "no_data", nothing("unknown", "no trace could be used, so nothing can be said about this job")
    if coverage.explained_share < LEAST_EXPLAINED:
        return "no_data", nothing("unknown", f"the traces explain {coverage.explained_share:.0%} of their window: too little to say anything, not even that the job is healthy")
    if not usable:
        return "no_data", nothing("unknown", f"only rank {stacked.ranks[0]} of {stacked.world_size} reported: there is nothing to compare it with")
    whole = coverage.ranks_reported == coverage.ranks_expected and not partial
    seen = f"{coverage.ranks_reported} of {coverage.ranks_expected} ranks"
    return "healthy", nothing("supported" if whole else "hypothesis", f"no rank, group or link differs from its peers by 1 % of the iteration or more ({seen} compared)")


def _detail(stacked: Stacked, roles: Roles, waits: Float64s, transfer: Float64s) -> Detail:
    own = np.nanmedian(stacked.own_s, axis=1) if stacked.own_s.size else np.zeros(len(stacked))
    length = np.nanmedian(stacked.length_s, axis=1) if stacked.length_s.size else np.zeros(len(stacked))
    order = np.arange(min(len(stacked.functions), DETAIL_FUNCTIONS))
    joined = stacked.joined
    channels = np.unique(joined.channel)
    steps = [len(np.unique(joined.step[joined.channel == c])) for c in channels]
    transfers = [float(joined.transfer_s[joined.channel == c].sum()) / n for c, n in zip(channels, steps, strict=True)]
    row_channel = joined.channel[joined.which] if len(joined.which) else np.empty(0, np.int32)
    waited, members = [], []
    for c, n in zip(channels, steps, strict=True):
        mine = row_channel == c
        ranks = np.unique(joined.rank[mine])
        waited.append(float(joined.wait_s[mine].sum()) / n / max(len(ranks), 1))
        members.append(format_ranks(stacked.ranks[ranks].tolist()))
    labels = tuple(
        (f"{joined.channels[c].description}: {joined.channels[c].key}" if joined.channels[c].description else joined.channels[c].key) for c in channels
    )
    marked = len(stacked) > 0 and stacked.summaries[0].steps_by != "window"
    absent = stacked.beta[:, order]
    return Detail(
        ranks=stacked.ranks,
        hosts=stacked.hosts,
        roles=tuple(roles.names[r] for r in roles.of),
        functions=tuple(_name(stacked.functions[k]) for k in order),
        beta=np.where(absent > 0, absent, np.nan).astype(np.float32),
        mu=stacked.mu[:, order],
        own_s=own,
        wait_s=waits,
        transfer_s=transfer,
        idle_s=np.maximum(length - own - waits - transfer, 0.0),
        own_by_step_s=stacked.own_s.astype(np.float32),
        first_step=int(stacked.steps[0]) if marked and len(stacked.steps) else None,
        groups=labels,
        group_transfer_s=np.array(transfers),
        group_wait_s=np.array(waited),
        group_ranks=tuple(members),
    )


__all__ = ["OWN_WORK", "Context", "diagnose", "diagnose_in_detail", "waits_of"]
