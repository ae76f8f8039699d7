"""Findings in the making: an excess, a setting or a record becomes who, what, evidence, cost and confidence.

A draft knows its evidence but not its number; `diagnosis` orders drafts by cost and turns them into findings. The texts
are written here, for people and in full sentences; forms (terminal, page, prompt) are `report`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from eroica.blame import Excess, Indices
from eroica.causes import ADVICE, Cause
from eroica.changes import holders, is_on
from eroica.context import Context, Turn
from eroica.costly import Costly
from eroica.critical_path import Activity
from eroica.findings import Evidence, Finding, FunctionName, Impact, PatternValues
from eroica.impact import Pricer
from eroica.job import format_ranks
from eroica.localization import EXPECTED_BETA, Localization, Roles
from eroica.network import SlowTransfer
from eroica.noted import Noted
from eroica.pattern import Function, Stacked
from eroica.settings import OF_THE_CPU, explaining
from eroica.utilisation import MU_SOURCES

ESTABLISHED_COVERAGE = 0.8
"""Share of the excess that a cause must cover to be called established (design section 4)."""
SUPPORTED_COVERAGE = 0.5
FEW_OBSERVATIONS = 3
"""Counters quoted with a finding; more would bury it."""
OUR_MAKING = (
    "Wait until it is written: it costs nothing afterwards. Put the folder of the flight rings on fast local storage "
    "(XDG_RUNTIME_DIR or TMPDIR), and take shorter windows."
)
"""Advice where a capture of ours is still being written."""
_OF_A_HOST = frozenset({"cpu_contention", "host_memory", "configuration"})
"""Causes that sit in a host, once all of its ranks show them."""
_NO_REASON = frozenset({"unknown", "host_python"})
"""What is said of host work that takes longer, where no counter tells why."""
_PHASE_CAUSES = {"host_gc": "gc", "checkpoint_io": "checkpoint", "recompilation": "compile"}
"""Kinds of the probe's own records that bear a cause out."""


@dataclass(frozen=True, slots=True)
class Draft:
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
    device: str | None = None
    named: FunctionName | None = None
    """What to name instead of the function: a setting, or the code that workers run out of sight."""
    advice: str = ""
    """"" = what the cause advises."""
    rank_numbers: tuple[int, ...] | None = None
    """Of whom, where no trace tells of them; None: `ranks`."""


def name_of(function: Function) -> FunctionName:
    """The function as people read it; a kernel is placed by the user's line that launches it."""
    return FunctionName(
        function.kind,
        function.name,
        function.location,
        function.user_location or function.launched_at,
        function.user_function,
    )


def readable_s(seconds: float) -> str:
    """Seconds with three digits and a fitting unit."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def pattern_of(stacked: Stacked, rows: Indices, function: int | None) -> PatternValues:
    """Medians of a function's pattern over these rows; empty without a function."""
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


def excess_draft(
    stacked: Stacked, excess: Excess, pricer: Pricer, iteration_s: float, all_excesses: Sequence[Excess] = ()
) -> Draft:
    """An excess of own time, priced. `all_excesses`: those of all findings, one of which may hide another."""
    evidence = []
    others = [
        (e.ranks, np.full(len(e.ranks), e.seconds))
        for e in all_excesses
        if e is not excess and e.steps == "stable" and len(e.ranks)
    ]
    named = stacked.functions[excess.function] if excess.function is not None else None
    where = f" in {named.name}" if named is not None else ""
    who, amount = format_ranks(stacked.ranks[excess.ranks].tolist()), readable_s(excess.seconds)
    if excess.scope == "all":
        impact = Impact(excess.seconds, excess.seconds / iteration_s, "pattern")
        who = "all ranks take" if len(stacked) > 1 else f"rank {who} takes"
        text = f"{who} {amount} longer per iteration than in the healthy window{where}"
        if excess.steps != "stable":
            text = (
                f"single steps take longer{where}, on all ranks at once: {excess.share_of_steps:.0%} of the steps, "
                f"{amount} per iteration on average"
            )
        elif excess.is_level:
            text = f"all ranks alike spend {amount} of each iteration{where}"
    elif excess.activity is None:
        # Idle time is no own work that could be taken out; the peers wait for about as long as it lasts.
        impact = Impact(excess.seconds, excess.seconds / iteration_s, "ledger")
        text = (
            f"{f'rank {who} idles' if who else 'changing ranks idle'} for {amount} per iteration while the others wait"
        )
    elif excess.steps == "stable":
        impact = pricer.less(excess.ranks, np.full(len(excess.ranks), excess.seconds), others)
        text = f"ranks {who} do {amount} more own work per iteration than the other roles{where}"
        if excess.scope == "rank":
            text = (
                f"own time of rank {who} exceeds its peers' by {amount} per iteration{where}, "
                f"in {excess.share_of_steps:.0%} of the steps"
            )
    else:
        impact = pricer.without_peaks(excess.ranks)
        text = (
            f"single steps take longer{where}: {excess.share_of_steps:.0%} of the steps, {amount} per iteration on "
            f"average, on {'one rank' if len(excess.ranks) else 'changing ranks'}"
        )
    evidence.append(
        Evidence(
            text,
            "ledger",
            {"excess_s": excess.seconds, "share_of_steps": excess.share_of_steps, "coverage": excess.coverage},
        )
    )
    evidence.append(Evidence(excess.cause.because, "pattern", {}))
    hosts = tuple(sorted({stacked.hosts[w] for w in excess.ranks} - {""})) if excess.scope == "rank" else ()
    return Draft(
        excess.cause,
        _scope(stacked, excess),
        excess.ranks,
        hosts,
        excess.steps,
        excess.function,
        impact,
        excess.coverage,
        tuple(evidence),
        advice=excess.advice,
    )


def with_records(stacked: Stacked, draft: Draft, context: Context) -> Draft:
    """The draft with what the probe's records and the counters say of its ranks."""
    evidence = list(draft.evidence)
    ranks = set(stacked.ranks[draft.ranks].tolist()) if len(draft.ranks) else set(stacked.ranks.tolist())
    kind = _PHASE_CAUSES.get(draft.cause.cause)
    window = set(stacked.steps.tolist())
    records = [r for r in context.phases if r.kind == kind and r.rank in ranks and r.step in window]
    if records:
        total_s, seen = sum(r.duration_s for r in records), sorted({r.rank for r in records})
        evidence.append(
            Evidence(
                f"in the window rank{'s' if len(seen) > 1 else ''} {format_ranks(seen)} noted {len(records)} "
                f"stretch{'es' if len(records) > 1 else ''} of {kind} of {readable_s(total_s)} together, the longest "
                f"{readable_s(max(r.duration_s for r in records))}",
                "probe",
                {"num": len(records), "total_s": total_s},
            )
        )
    evidence.extend(_settings(draft.cause, ranks, context))
    if draft.scope in ("rank", "host", "link"):
        told = [o for o in context.counters if o.rank in ranks or (o.rank is None and o.host in draft.hosts)]
        evidence.extend(
            Evidence(o.text, "counters", {"name": o.name, "value": o.value, "peers": o.peers})
            for o in told[:FEW_OBSERVATIONS]
        )
    return _by_setting(stacked, replace(draft, evidence=tuple(evidence)), context)


def _by_setting(stacked: Stacked, draft: Draft, context: Context) -> Draft:
    """The draft with a setting for its cause, if its ranks do the same work, take longer for it without another reason
    to be seen, and are just the ones with a setting of their own that acts on it."""
    if draft.scope != "rank" or draft.cause.cause not in _NO_REASON or draft.function is None:
        return draft
    if stacked.functions[draft.function].activity not in (Activity.OPERATOR, Activity.PYTHON):
        return draft
    found = explaining(context.environment, OF_THE_CPU, stacked.ranks[draft.ranks].tolist())
    if not found:
        return draft
    text = "the ranks that take longer are those with a setting of their own that acts on what they take longer for"
    return replace(
        draft,
        cause=Cause("configuration", False, text, draft.cause.ruled_out, tuple(setting.name for setting in found)),
        evidence=(*draft.evidence, *(Evidence(setting.text, "environment", {}) for setting in found)),
    )


def with_course(draft: Draft, course: tuple[str, dict[str, float]] | None) -> Draft:
    """The draft with how the job went to its present pace."""
    if course is None:
        return draft
    text, values = course
    return replace(draft, evidence=(*draft.evidence, Evidence(text, "series", values)))


def level_draft(stacked: Stacked, noticed: Turn, onset: int | None, iteration_s: float) -> Draft:
    """All ranks are slower than they were, by their series alone: there is no healthy window to compare with."""
    gap_s = noticed.observed_s - noticed.usual_s
    since = f"since step {onset}" if onset is not None else f"by step {noticed.step}"
    text = (
        f"{since} iterations take {readable_s(noticed.observed_s)} instead of {readable_s(noticed.usual_s)}, and no "
        "rank differs from the others"
    )
    cause = Cause(
        "unknown", False, "there is no healthy window of this work to compare with", ("a single rank: all are alike",)
    )
    everyone = np.arange(len(stacked), dtype=np.intp)
    evidence = (Evidence(text, "series", {}), Evidence(cause.because, "pattern", {}))
    impact = Impact(gap_s, gap_s / iteration_s if iteration_s else None, None)
    return Draft(cause, "all", everyone, (), "stable", None, impact, 0.0, evidence)


def capture_draft(stacked: Stacked, noticed: Turn, steps: tuple[int, int], onset: int, iteration_s: float) -> Draft:
    """All ranks are slower from the end of a window of ours on: what it attached is still there."""
    gap_s = noticed.observed_s - noticed.usual_s
    evidence = (
        Evidence(
            f"since step {onset}, right behind our capture of steps {steps[0]}-{steps[1]} and its reading, iterations "
            f"take {readable_s(noticed.observed_s)}; before it they took {readable_s(noticed.usual_s)}",
            "series",
            {"first_step": steps[0], "last_step": steps[1], "onset": onset},
        ),
        Evidence("all ranks were captured, and no rank is slower than the others", "ledger", {}),
    )
    cause = Cause(
        "profiler_overhead",
        False,
        evidence[0].text,
        ("gpu_compute, gpu_throttle: devices do not change on all ranks at the end of a capture", "a single rank"),
    )
    everyone = np.arange(len(stacked), dtype=np.intp)
    impact = Impact(gap_s, gap_s / iteration_s if iteration_s else None, None)
    return Draft(cause, "all", everyone, (), "stable", None, impact, 1.0, evidence)


def _ranks_text(stacked: Stacked, draft: Draft) -> str:
    if draft.scope == "rotating":
        return ""
    return format_ranks(stacked.ranks[draft.ranks].tolist() if draft.rank_numbers is None else draft.rank_numbers)


_OWN_PROFILER = (
    "Nothing is wrong with the job itself: profile fewer steps on fewer ranks, write traces to local storage and move "
    "them later, not all at once."
)


def noted_draft(noted: Noted) -> Draft:
    """Slow steps that the ranks' own records explain, without any trace of them."""
    share = noted.seconds / (noted.usual_s + noted.seconds)
    return Draft(
        noted.cause,
        "all" if noted.is_all else "rank",
        np.empty(0, np.intp),
        (),
        "rotating" if noted.period is None else f"every {noted.period}",
        None,
        Impact(noted.seconds, share, "ledger"),
        noted.share,
        (Evidence(noted.cause.because, "probe", {"share_of_excess": noted.share}),),
        advice=_OWN_PROFILER if noted.cause.cause == "profiler_overhead" else "",
        rank_numbers=noted.ranks,
    )


def self_inflicted_draft(stacked: Stacked, seconds: float, iteration_s: float) -> Draft:
    """A window that is slow because an earlier capture of ours is still being written."""
    because = (
        "while the window lasted the ranks still wrote an earlier capture of ours, and the job was not slow before: "
        "this slowdown is of our making"
    )
    return Draft(
        Cause("profiler_overhead", True, because, ("the job's own code: it was as fast as ever before the capture",)),
        "all",
        np.arange(len(stacked), dtype=np.intp),
        (),
        "once",
        None,
        Impact(seconds, seconds / iteration_s, "pattern"),
        1.0,
        (Evidence(because, "probe", {}),),
        advice=OUR_MAKING,
    )


def is_of_our_making(finding: Finding) -> bool:
    """Whether it was told by `self_inflicted_draft`."""
    return finding.cause == "profiler_overhead" and finding.advice == OUR_MAKING


def setting_draft(stacked: Stacked, costly: Costly, iteration_s: float, seconds: float | None) -> Draft:
    """A setting that costs time. `seconds`: by the job's own past, where that tells more than the window."""
    scope = "all" if len(costly.ranks) == len(stacked) else "rank"
    price = seconds if seconds is not None else costly.seconds
    impact = Impact(price, min(price / iteration_s, 1.0), "pattern") if price is not None else Impact()
    hosts = tuple(sorted({stacked.hosts[w] for w in costly.ranks} - {""})) if scope == "rank" else ()
    return Draft(
        Cause("configuration", True, costly.because, ("a single rank: all are alike",) if scope == "all" else ()),
        scope,
        costly.ranks,
        hosts,
        "stable",
        None,
        impact,
        # What it costs is known, or it is not: that it is on, is.
        SUPPORTED_COVERAGE if price is not None else 0.0,
        (Evidence(costly.because, "environment", costly.evidence),),
        named=costly.function,
        advice=costly.advice,
    )


def with_loader(draft: Draft, context: Context, name: FunctionName | None) -> Draft:
    """A wait for batches that worker processes make: named by the code that they run, since no capture sees them, and
    told with what the settings and the counters say of how it is fed."""
    if draft.cause.cause != "input_pipeline":
        return draft
    told: Mapping[str, object] = next(iter(context.settings.values()), {})
    loaders = sorted({n.split(".")[1] for n in told if n.startswith("loader.")})
    places = {str(told[f"loader.{n}.data_at"]) for n in loaders if f"loader.{n}.data_at" in told}
    workers = {told.get(f"loader.{n}.num_workers") for n in loaders}
    evidence = list(draft.evidence)
    named = draft.named
    if len(workers) == 1 and isinstance(num := next(iter(workers)), int):
        if num and len(places) == 1 and name is not None:
            data = next(str(told[f"loader.{n}.data"]) for n in loaders if f"loader.{n}.data" in told)
            named = replace(name, user_location=next(iter(places)), user_function=data)
        made = f"in {num} worker process{'es' if num > 1 else ''} per rank" if num else "in the training process itself"
        evidence.append(Evidence(f"batches are made {made}", "environment", {"num_workers": num}))
    if draft.scope == "all":
        about = [o for o in context.counters if o.name in _OF_INPUT]
        seen: set[str] = set()
        for o in about:
            if o.name not in seen:
                seen.add(o.name)
                evidence.append(Evidence(o.text, "counters", {"name": o.name, "value": o.value, "peers": o.peers}))
    return replace(draft, evidence=tuple(evidence), named=named)


_OF_INPUT = frozenset(
    {"file_read_mbps", "children_cpu", "busy_share", "io_pressure", "busy_ratio", "runnable_per_core"}
)
"""Counters that tell whether batches wait for storage or for cores."""


def _settings(cause: Cause, ranks: set[int], context: Context) -> Iterator[Evidence]:
    """What the environment says of the settings that bear a cause out."""
    for name in cause.settings:
        told = list(holders(context.environment, name))
        others = frozenset[int]().union(*(having for _, having in told if having is not None))
        for value, having in told:
            if is_on(value) and (ranks - others if having is None else ranks & having):
                where = f"rank{'s' if len(having) > 1 else ''} {format_ranks(having)}" if having else "all ranks"
                if not having and others:
                    where += f" but {format_ranks(others)}"
                text = f"{name.removeprefix('env.')} is {value} on {where}"
                yield Evidence(text, "environment", {"name": name, "value": value})


def _scope(stacked: Stacked, excess: Excess) -> str:
    """A cause of a host's own that shows on all ranks of some hosts, and on no other rank, is these hosts'."""
    if excess.scope != "rank" or excess.cause.cause not in _OF_A_HOST:
        return excess.scope
    mine = set(excess.ranks.tolist())
    hosts = {stacked.hosts[w] for w in mine} - {""}
    theirs = {w for w in range(len(stacked)) if stacked.hosts[w] in hosts}
    return "host" if hosts and theirs == mine and len(mine) > len(hosts) and len(mine) < len(stacked) else "rank"


def _confidence(draft: Draft, roles: Roles, partial: bool, missing: bool) -> str:
    """How sure: by what the cause covers, by a signal of its own, by how many peers there are to compare with."""
    level = 1 if draft.coverage >= SUPPORTED_COVERAGE else 2
    if draft.cause.certain and draft.coverage >= ESTABLISHED_COVERAGE:
        level = 0
    if draft.cause.cause == "unknown":
        level = 3 if draft.scope != "all" else 2
    elif draft.scope in ("rank", "host") and draft.network is None and len(draft.ranks):
        peers = len(roles.members(int(roles.of[draft.ranks[0]]))) - len(draft.ranks)
        # With a single peer either may be the odd one.
        level = max(level, 2 if peers < 1 else 1 if peers < 2 else 0)
        if missing:
            # The ranks that sent nothing may be slower still, and one peer alone says little of what is usual.
            level = max(level, 2 if peers < 2 else 1)
    elif draft.scope == "all" and draft.network is None:
        # A job may differ from its own past in more than one thing; a peer at the same time does not.
        level = max(level, 1)
    if partial:
        level = min(level + 1, 3)
    return ("established", "supported", "hypothesis", "unknown")[level]


def device_of(stacked: Stacked, row: int) -> str | None:
    """ "HOST/gpu3"; None where the trace tells no host or no device, and where a rank is missing that may be one of the
    host's and come before this one."""
    host = stacked.hosts[row]
    if not host or not stacked.device_models[row]:
        return None
    first = stacked.hosts.index(host)
    begin = int(stacked.ranks[first - 1]) + 1 if first else 0
    if int(stacked.ranks[row]) - begin != row - first:
        return None
    # Ranks of a host use its devices in order, as launchers number them.
    return f"{host}/gpu{sum(1 for w in range(row) if stacked.hosts[w] == host)}"


def finding_of(
    stacked: Stacked, draft: Draft, roles: Roles, where: Localization, number: int, keys: Sequence[str], partial: bool
) -> Finding:
    """The finding with its number; `keys` name its evidence, `partial` says that some rank's data are incomplete."""
    rows, function = draft.ranks, draft.function
    peers = PatternValues()
    expected = PatternValues()
    distance = delta = None
    if function is not None:
        role = int(roles.of[rows[0]]) if len(rows) else 0
        mu, sigma = where.peer_mu[role, function], where.peer_sigma[role, function]
        peers = PatternValues(
            float(where.peer_beta[role, function]),
            float(mu) if np.isfinite(mu) else None,
            float(sigma) if np.isfinite(sigma) else None,
        )
        if draft.scope == "group" and draft.network is None:
            peers = pattern_of(stacked, np.setdiff1d(np.arange(len(stacked), dtype=np.intp), rows), function)
        expected = PatternValues(EXPECTED_BETA[stacked.functions[function].activity][1])
        if len(rows):
            distance, delta = (
                float(np.median(where.distance[rows, function])),
                float(np.median(where.delta[rows, function])),
            )
    device = draft.device
    if (
        draft.scope == "rank"
        and len(rows) == 1
        and draft.cause.cause in ("gpu_throttle", "gpu_compute", "host_device_copy", "intra_node_link")
    ):
        device = device_of(stacked, int(rows[0]))
    return Finding(
        id=f"F{number}",
        cause=draft.cause.cause,
        scope=draft.scope,
        ranks=_ranks_text(stacked, draft),
        hosts=draft.hosts,
        steps=draft.steps,
        function=draft.named or (name_of(stacked.functions[function]) if function is not None else None),
        pattern=pattern_of(stacked, rows if len(rows) else np.arange(len(stacked), dtype=np.intp), function),
        peers=peers,
        expected=expected,
        distance=distance,
        delta=delta,
        impact=draft.impact,
        confidence=_confidence(draft, roles, partial, stacked.world_size > len(stacked)),
        evidence=tuple(keys),
        ruled_out=draft.cause.ruled_out,
        advice=draft.advice or draft.cause.advice or ADVICE.get(draft.cause.cause, ADVICE["unknown"]),
        device=device,
        link=draft.link,
    )
