"""From stacked summaries to an answer: who, what, why, what it costs, how sure, and who merely waits.

`diagnose` puts together what `blame` (own time), `network` (transfers) and `localization` (distances) find, prices
each finding by replay or ledger, orders them by what they cost and words them. Pure: no clock, file or socket;
`context` carries all that no trace holds, and what is absent there is "not ruled out", never "fine". The JSON form is
in `findings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from eroica.blame import Excess, is_host_only, stable_excesses, too_few
from eroica.changes import changes
from eroica.collectives import Float64s
from eroica.context import FEW_STEPS, RECURRENT_STEPS, Context, durations_of, healthy_s, recurrence_of
from eroica.costly import Costly, costly_settings
from eroica.course import course_of
from eroica.critical_path import Activity
from eroica.detail import detail_of, waits_of
from eroica.draft import (
    Draft,
    capture_draft,
    excess_draft,
    finding_of,
    level_draft,
    name_of,
    noted_draft,
    readable_s,
    self_inflicted_draft,
    setting_draft,
    with_course,
    with_loader,
    with_records,
)
from eroica.findings import (
    Consequence,
    Coverage,
    Detail,
    Diagnosis,
    Evidence,
    Finding,
    Iteration,
    Role,
    Verdict,
    Window,
)
from eroica.held import beside, held_drafts
from eroica.impact import Pricer, iteration_of, longer_s
from eroica.job import format_missing, format_ranks
from eroica.levels import common_excess, does_other_work, heavy_roles, idle_excesses, input_bound
from eroica.localization import (
    EFFECT_FLOOR,
    EXPECTED_BETA,
    INCOMPLETE,
    Localization,
    Roles,
    localize_stacked,
    roles_of,
    unmarked_ranks,
)
from eroica.moving import settled
from eroica.network import slow_transfers
from eroica.noted import is_self_inflicted, noted_steps
from eroica.overheads import standing_costs
from eroica.pace import EFFECT
from eroica.pattern import Stacked
from eroica.placement import placed
from eroica.rotation import common_peaks, rotating_excess
from eroica.slowed import by_slow_cores
from eroica.stalls import stalls
from eroica.starved import by_workers
from eroica.transfers import network_draft

LEAST_EXPLAINED = 0.05
"""With less of the window explained, the traces say nothing: no conclusion, not even "healthy"."""
MANY_WAIT = 0.02
"""Share of the iteration that a rank must wait to be listed among the consequences."""
OTHER_KIND = 0.7
"""Times the usual length: iterations that are shorter still are not of the kind that was slow."""
OTHER_KIND_APART = 0.25
"""The usual length of what was slow and that of the healthy window differ by less where they are of one kind."""
OTHER_WORK_NOTE = (
    "the iterations of the window do other work than those of the healthy window, as in another phase of the job: the "
    "two are not compared"
)
HICCUP = 10.0
"""Times the usual iteration: one that is told though it came once."""
SWAMPED = 0.5
"""What single steps cost is no more than a part of what every step costs more, below this share of it."""
DETAIL_FUNCTIONS = 60
"""Functions that a page draws."""


def _summary(finding: Finding) -> str:
    who = {
        "rank": f"rank{'s' if ',' in finding.ranks or '-' in finding.ranks else ''} {finding.ranks}",
        "host": f"host {', '.join(finding.hosts)}",
        "group": f"ranks {finding.ranks}",
        "link": f"link {finding.link}" if finding.link else f"a link between ranks {finding.ranks}",
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
        cost = f", costing {readable_s(finding.impact.seconds_per_iteration)} per iteration" + (
            f" ({finding.impact.share:.0%})" if finding.impact.share is not None else ""
        )
    return f"{who}: {finding.cause.replace('_', ' ')}{what}{cost}"


def _consequences(stacked: Stacked, blamed: set[int], waits: Float64s, iteration_s: float) -> tuple[Consequence, ...]:
    """Who waits, gathered by the communication that they wait in most."""
    groups: dict[str, list[int]] = {}
    columns = [k for k, f in enumerate(stacked.functions) if f.activity in (Activity.COLLECTIVE, Activity.WAIT)]
    is_late = waits >= MANY_WAIT * iteration_s
    is_late[sorted(blamed)] = False
    late = np.flatnonzero(is_late)
    if len(late) and columns:
        most = stacked.beta[late[:, None], columns].argmax(axis=1)
        for w, column in zip(late.tolist(), most.tolist(), strict=True):
            groups.setdefault(stacked.functions[columns[column]].name, []).append(w)
    return tuple(
        Consequence(
            format_ranks(stacked.ranks[rows].tolist()), name,
            f"wait {readable_s(float(np.median(waits[rows])))} per iteration for late peers; not slow themselves",
        )
        for name, rows in groups.items()
    )  # fmt: skip


def _coverage(stacked: Stacked, roles: Roles, context: Context) -> Coverage:
    summaries = stacked.summaries
    unlike = sorted({w for r, name in enumerate(roles.names) if name.endswith(INCOMPLETE) for w in roles.members(r)})
    # A trace may hold events and tell of no time: marks alone, as where a capture ended at once.
    lost = {s.rank for s in summaries if s.coverage.partial or s.coverage.explained <= 0}
    lost |= {summaries[w].rank for w in unlike}
    partial = sorted(lost | set(context.partial_ranks))
    explained = float(np.mean([s.coverage.explained for s in summaries])) if summaries else 0.0
    notes = list(context.notes)
    notes.extend(
        f"rank {record.rank} gave no complete capture: {record.state}{f', {record.reason}' if record.reason else ''}"
        for record in context.captures
        if record.state != "done"
    )
    if summaries:
        events = sum(s.coverage.num_events for s in summaries)
        kernels = sum(s.coverage.num_kernels for s in summaries)
        collectives = sum(s.coverage.num_collectives for s in summaries)
        notes.append(
            f"read {events:,} events of {len(summaries)} rank{'s' if len(summaries) != 1 else ''}: "
            f"{kernels:,} kernels, {collectives:,} communications; iterations by {summaries[0].steps_by}"
        )
    by_note: dict[str, list[int]] = {}
    for s in summaries:
        for note in s.coverage.notes:
            by_note.setdefault(note, []).append(s.rank)
    notes.extend(
        f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}: {note}" for note, ranks in by_note.items()
    )
    has_device = [s.coverage.has_device for s in summaries]
    unmarked = unmarked_ranks(stacked)
    if unmarked:
        notes.append(
            f"rank{'s' if len(unmarked) > 1 else ''} {format_ranks(summaries[w].rank for w in unmarked)}: no mark of "
            "an iteration was found, unlike on the others, so there is nothing to compare with theirs"
        )
    unlike = [w for w in unlike if w not in unmarked]
    if unlike:
        notes.append(
            f"ranks {format_ranks(summaries[w].rank for w in unlike)} hold far fewer device events than their peers: "
            "part of their records is missing, so they are not compared with the others"
        )
    if len(summaries) > 1 and all(has_device) and not any(s.coverage.num_collectives for s in summaries):
        notes.append("no communication was recognised on any rank: waiting cannot be told from work")
    if not all(s.coverage.epoch for s in summaries):
        notes.append("the clock's base is unknown in some traces: durations are compared, instants are not")
    notes.extend(stacked.joined.not_joinable)
    return Coverage(
        stacked.world_size,
        len(stacked),
        format_missing(stacked.ranks.tolist(), stacked.world_size),
        format_ranks(partial),
        explained,
        tuple(notes),
    )


def _advice_notes(stacked: Stacked) -> list[str]:
    """Kinds of time that all ranks spend more of than experience expects: advice, never a blame."""
    notes = []
    middle = np.median(stacked.activity_beta, axis=0) if len(stacked) else np.zeros(len(Activity))
    for activity in (
        Activity.INPUT,
        Activity.SYNC,
        Activity.ALLOCATOR,
        Activity.GC,
        Activity.CHECKPOINT,
        Activity.COMPILE,
        Activity.COLLECTIVE,
    ):
        high = EXPECTED_BETA[activity][1]
        if middle[activity] > max(3 * high, 0.05) or (activity == Activity.COLLECTIVE and middle[activity] > high):
            notes.append(
                f"worth a look, on all ranks alike: {activity.name.lower()} owns {middle[activity]:.0%} of the "
                f"critical path (usually below {high:.0%})"
            )
    return notes


def diagnose(stacked: Stacked, context: Context | None = None) -> Diagnosis:
    """The whole answer for one window. Never raises on odd data; says `no_data` where the traces hold nothing to
    compare."""
    return diagnose_in_detail(stacked, context)[0]


def diagnose_in_detail(stacked: Stacked, context: Context | None = None) -> tuple[Diagnosis, Detail]:
    """`diagnose`, with the numbers behind it for a page."""
    context = context or Context()
    if (
        context.baseline is not None
        and context.trigger != "offline"
        and len(stacked)
        and len(context.baseline)
        and does_other_work(stacked, context.baseline)
    ):
        usual_s, noticed = iteration_of(context.baseline), context.noticed
        if noticed is not None and abs(noticed.usual_s / usual_s - 1) < OTHER_KIND_APART:
            # What was slow is slow against these very iterations, and the other work is why.
            noticed = None
        context = replace(context, baseline=None, noticed=noticed, notes=(*context.notes, OTHER_WORK_NOTE))
    iteration_s = iteration_of(stacked)
    roles = roles_of(stacked) if len(stacked) else Roles(np.empty(0, np.int32), (), "functions")
    where = localize_stacked(stacked, roles, context.baseline)
    coverage = _coverage(stacked, roles, context)
    waits, transfer = waits_of(stacked) if len(stacked) else (np.empty(0), np.empty(0))
    comparable = any(not too_few(stacked, roles.members(r)) for r in range(len(roles.names))) and len(stacked) > 1
    usable = (
        (comparable or (context.baseline is not None and len(context.baseline) > 0))
        and len(stacked) > 0
        and coverage.explained_share >= LEAST_EXPLAINED
        and iteration_s > 0
    )
    drafts = _drafts(stacked, roles, where, context, iteration_s, waits) if usable else []
    if not drafts and (not len(stacked) or context.trigger == "recurring"):
        drafts = [noted_draft(noted) for noted in (noted_steps(context),) if noted is not None]
    costly = (
        costly_settings(stacked, context, iteration_s, transfer) if coverage.explained_share >= LEAST_EXPLAINED else []
    )
    drafts = _with_settings(stacked, drafts, costly, context, iteration_s)
    coverage = replace(coverage, notes=(*coverage.notes, *_hiccups(context), *_setting_notes(costly, drafts)))
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
        findings.append(finding_of(stacked, draft, roles, where, number, keys, partial))
    blamed = {int(w) for draft in drafts if draft.scope in ("rank", "host") for w in draft.ranks}
    detail = detail_of(stacked, roles, waits, transfer)
    hosts: dict[str, list[int]] = {}
    for rank, host in zip(stacked.ranks.tolist(), stacked.hosts, strict=True):
        hosts.setdefault(host or "unknown", []).append(rank)
    baseline_s = iteration_of(context.baseline) if context.baseline is not None else healthy_s(context)
    if OTHER_WORK_NOTE in context.notes:
        baseline_s = None  # nor does a series of both kinds tell what is usual for one
    kind, verdict = _verdict(stacked, findings, coverage, usable, partial)
    if kind == "healthy" and _is_over(context, iteration_s, baseline_s):
        kind, verdict = "recovered", _recovered(context, iteration_s, verdict)
    marked = len(stacked) > 0 and stacked.summaries[0].steps_by != "window"
    diagnosis = Diagnosis(
        job=context.job,
        created=context.created,
        kind=kind,
        window=Window(
            trigger=context.trigger,
            started=_iso(min((s.started_ns for s in stacked.summaries if s.started_ns is not None), default=None)),
            ended=_iso(
                max(
                    (s.started_ns + int(s.window_s * 1e9) for s in stacked.summaries if s.started_ns is not None),
                    default=None,
                )
            ),
            first_step=int(stacked.steps[0]) if marked and len(stacked.steps) else None,
            num_steps=max(s.num_iterations for s in stacked.summaries) if marked else None,
            duration_s=float(np.median([s.window_s for s in stacked.summaries])) if len(stacked) else None,
            last_step=int(stacked.steps[-1]) if marked and len(stacked.steps) else None,
        ),
        coverage=coverage,
        iteration=Iteration(
            iteration_s if marked else None, baseline_s, iteration_s / baseline_s if marked and baseline_s else None
        ),
        roles=tuple(
            Role(name, format_ranks(stacked.ranks[roles.members(r)].tolist()), roles.by)
            for r, name in enumerate(roles.names)
        ),
        hosts={host: format_ranks(ranks) for host, ranks in hosts.items()},
        verdict=verdict,
        findings=tuple(findings),
        consequences=_consequences(stacked, blamed, waits, iteration_s) if findings else (),
        evidence=evidence,
        environment=context.environment,
        producer={"name": "eroica", "version": context.version},
    )
    return diagnosis, detail


def _is_over(context: Context, iteration_s: float, baseline_s: float | None) -> bool:
    """What was noticed had passed before the window began. Single slow iterations may come again, and a trend does not
    end: neither is over because a window shows none of it."""
    noticed = context.noticed
    if noticed is None or noticed.change != "slow" or noticed.usual_s <= 0:
        return False
    usual_s = baseline_s if baseline_s is not None else noticed.usual_s
    most_s = max(1 + EFFECT, (1 + noticed.observed_s / noticed.usual_s) / 2) * usual_s
    return OTHER_KIND * noticed.usual_s < iteration_s < most_s


def _is_slow_still(context: Context, iteration_s: float) -> bool:
    """Slow by the series alone."""
    noticed = context.noticed
    return noticed is not None and noticed.change == "slow" and not _is_over(context, iteration_s, None)


def _recovered(context: Context, iteration_s: float, verdict: Verdict) -> Verdict:
    noticed = context.noticed
    assert noticed is not None
    summary = (
        f"slow by step {noticed.step} ({readable_s(noticed.observed_s)} per iteration instead of "
        f"{readable_s(noticed.usual_s)}), gone in the window ({readable_s(iteration_s)}): who or what it was cannot be "
        "told any more"
    )
    return replace(verdict, summary=summary)


def _iso(ns: int | None) -> str | None:
    if ns is None:
        return None
    from datetime import UTC, datetime

    try:
        return datetime.fromtimestamp(ns / 1e9, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError, OSError):
        return None


def _is_by_the_way(common: Excess, moving: Excess) -> bool:
    """What moves over the ranks hits them all in some steps, by chance. And a step in which they all stay in Python for
    long is no second fault beside what moves and costs more: it counts because long steps recur, and they do."""
    is_vague = common.activity == Activity.PYTHON and common.seconds < moving.seconds / 2
    return common.activity == moving.activity or is_vague


def _is_news_beside(level: Excess, excesses: Sequence[Excess], priced_s: float) -> bool:
    """Of what all ranks take longer for than in the healthy window: what is not told already as what it is.

    What moves over the ranks, or comes in single steps, raises the mean of all of them, by as much as it costs. What
    helps nobody beside a finding is told where nothing else is; "unknown" would even stand above it.
    """
    if level.is_diffuse and priced_s >= level.seconds:
        return False
    if level.activity is None:
        return not priced_s
    of_steps = [e.seconds for e in excesses if e.steps != "stable" and e.activity == level.activity]
    return max(of_steps, default=0.0) < SWAMPED * level.seconds


def _is_part_of(stacked: Stacked, draft: Draft, risen: Sequence[Excess]) -> bool:
    """Single steps in which all ranks have more still of what they have more of in every step."""
    if draft.scope != "all" or draft.steps == "stable" or draft.function is None:
        return False
    return any(stacked.functions[draft.function].activity == level.activity for level in risen)


def _drafts(
    stacked: Stacked, roles: Roles, where: Localization, context: Context, iteration_s: float, waits: Float64s
) -> list[Draft]:
    pricer = Pricer(stacked, roles, iteration_s)
    held = held_drafts(stacked, context, iteration_s)
    excesses = beside(stable_excesses(stacked, roles, where, iteration_s), held)
    roots = np.unique(np.concatenate([e.ranks for e in excesses])) if excesses else np.empty(0, np.intp)
    recurrence = recurrence_of(context.series, context.onset, is_noticed=context.trigger in ("recurring", "offline"))
    common, together = common_peaks(stacked, iteration_s, recurrence, context.phases)
    rotating = rotating_excess(stacked, roles, iteration_s, excesses, recurrence, context.phases, together)
    if common is not None and rotating is not None and _is_by_the_way(common, rotating):
        common = None
    excesses += beside([excess for excess in (rotating, common) if excess is not None], held)
    if context.baseline is None or not len(context.baseline):
        known = {e.activity for e in excesses}
        excesses.extend(e for e in standing_costs(stacked, iteration_s) if e.activity not in known)
    excesses.extend(beside(idle_excesses(stacked, roles, iteration_s, roots), held))
    excesses.extend(heavy_roles(stacked, roles, iteration_s, roots))
    if context.baseline is None and not any(e.activity == Activity.INPUT for e in excesses):
        excesses.extend(input_bound(stacked, iteration_s))
    drafts = [with_records(stacked, excess_draft(stacked, e, pricer, iteration_s, excesses), context) for e in excesses]
    drafts.extend(held)
    # Between processes of one host without devices a transfer is a copy by its CPUs: there is no link to be slow.
    copied = is_host_only(stacked)
    slow = [s for s in slow_transfers(stacked, context.baseline, iteration_s) if not (copied and s.on_one_host)]
    stalled = stalls(stacked, recurrence, iteration_s)
    drafts.extend(
        with_records(stacked, network_draft(stacked, one, iteration_s, waits, context), context)
        for one in [*slow, *([stalled] if stalled is not None else [])]
    )
    drafts = [d for d in drafts if (d.impact.seconds_per_iteration or 0.0) >= EFFECT_FLOOR * iteration_s]
    left = _left_by_capture(stacked, context, drafts, iteration_s)
    if left is not None:
        drafts.append(left)
    elif context.baseline is not None and (gap := longer_s(context.baseline, iteration_s)) is not None:
        priced = sum(d.impact.seconds_per_iteration or 0.0 for d in drafts)
        if gap > 0 and priced < 0.5 * gap:
            changed = changes(context.baseline_environment, context.environment)
            above = common_excess(
                *(stacked, context.baseline, iteration_s, changed),
                recurs=recurrence is not None,
                is_noticed=context.noticed is not None,
            )
            risen = [e for e in above if _is_news_beside(e, excesses, priced)]
            drafts = [d for d in drafts if not _is_part_of(stacked, d, risen)]
            drafts.extend(with_records(stacked, excess_draft(stacked, e, pricer, iteration_s), context) for e in risen)
        common_rises = [d for d in drafts if d.scope == "all" and d.steps == "stable"]
        is_whole = len(stacked) >= stacked.world_size
        if common_rises and gap > 0 and is_whole and is_self_inflicted(context, stacked.steps):
            drafts = [d for d in drafts if all(d is not other for other in common_rises) and not _is_of_all(stacked, d)]
            drafts.append(self_inflicted_draft(stacked, gap, iteration_s))
    drafts = placed(stacked, settled(stacked, drafts, context), context)
    drafts = by_workers(stacked, by_slow_cores(stacked, drafts, context, iteration_s), context, iteration_s)
    if not drafts and context.baseline is None and _is_slow_still(context, iteration_s):
        assert context.noticed is not None
        drafts.append(level_draft(stacked, context.noticed, context.onset, iteration_s))
    drafts = [_with_loader(stacked, draft, context) for draft in drafts]
    drafts.sort(key=lambda d: -(d.impact.seconds_per_iteration or 0.0))
    course = course_of(context, int(stacked.steps[0]) if len(stacked.steps) else None) if drafts else None
    return [with_course(draft, course) for draft in drafts]


def _is_of_all(stacked: Stacked, draft: Draft) -> bool:
    """Transfers of all ranks take longer than they did."""
    slow = draft.network
    return slow is not None and slow.reference == "baseline" and len(slow.ranks) == len(stacked)


def _left_by_capture(stacked: Stacked, context: Context, drafts: Sequence[Draft], iteration_s: float) -> Draft | None:
    """The job is slower since one of our own windows, and what ranks do differently does not explain it."""
    noticed, steps, onset = context.noticed, context.earlier_capture, context.onset
    if noticed is None or steps is None or onset is None or noticed.observed_s <= noticed.usual_s:
        return None
    if len(stacked) < stacked.world_size:
        return None  # what the others wait for may be one of those that sent nothing
    gap_s = noticed.observed_s - noticed.usual_s
    if sum(d.impact.seconds_per_iteration or 0.0 for d in drafts) >= 0.5 * gap_s:
        return None
    since_s = longer_s(context.baseline, iteration_s)
    if since_s is not None and since_s < 0.5 * gap_s:
        return None  # the healthy window was before it, and recorded as this one is
    return capture_draft(stacked, noticed, steps, onset, iteration_s)


def _with_loader(stacked: Stacked, draft: Draft, context: Context) -> Draft:
    function = stacked.functions[draft.function] if draft.function is not None else None
    return with_loader(draft, context, name_of(function) if function is not None else None)


def _with_settings(
    stacked: Stacked, drafts: Sequence[Draft], costly: Sequence[Costly], context: Context, iteration_s: float
) -> list[Draft]:
    """The findings with those of settings, which stand for what they make all of their ranks look like."""
    found = list(drafts)
    for one in costly:
        if not one.is_finding:
            continue
        mine = set(one.ranks.tolist())
        same = [d for d in found if one.settings & set(d.cause.settings) and set(d.ranks.tolist()) <= mine]
        if any(set(draft.ranks.tolist()) < mine for draft in same):
            continue  # told already, and nearer
        shown = same + [
            draft
            for draft in found
            if draft.cause.cause in one.covers
            and (draft.scope in ("all", "rotating") or set(draft.ranks.tolist()) <= mine)
        ]
        # What all ranks take longer than before is what it costs, if it was not there before; or than their peers.
        told = [d for d in shown if d.scope == "all" or any(d is other for other in same)]
        rise = max((d.impact.seconds_per_iteration or 0.0 for d in told), default=0.0)
        found = [draft for draft in found if all(draft is not other for other in shown)]
        found.append(setting_draft(stacked, one, iteration_s, rise if rise > (one.seconds or 0.0) else None))
    return sorted(found, key=lambda d: -(d.impact.seconds_per_iteration or 0.0))


def _setting_notes(costly: Sequence[Costly], drafts: Sequence[Draft]) -> list[str]:
    told = {name for draft in drafts for name in draft.cause.settings}
    return [f"a setting worth a look: {one.because}" + (f". {one.advice}" if one.advice else "")
            for one in costly if not one.is_finding and not one.settings & told]  # fmt: skip


def _hiccups(context: Context) -> list[str]:
    """Single iterations that were very long and have not come back: told to whoever asks, and no finding."""
    steps, seconds = durations_of(context.series)
    if len(steps) < FEW_STEPS:
        return []
    usual = float(np.median(seconds))
    long = np.flatnonzero(seconds > HICCUP * usual)
    if not 0 < len(long) < RECURRENT_STEPS:
        return []
    notes = []
    for at in long:
        note = f"step {steps[at]} took {readable_s(float(seconds[at]))}, once (usually {readable_s(usual)})"
        within = [r for r in context.phases if r.step == steps[at] and r.kind in _HELD and r.duration_s > usual]
        if within:
            longest = max(within, key=lambda r: r.duration_s)
            note += f": rank {longest.rank} {_HELD[longest.kind]} for {readable_s(longest.duration_s)} of it"
        notes.append(note)
    return notes


_HELD = {
    "fetch": "waited for a batch",
    "checkpoint": "was saving or loading",
    "gc": "collected garbage",
    "compile": "compiled",
    "workers": "started the workers of a loader",
    "profile": "ended a profiler of its own",
    "capture": "wrote a trace of ours",
}


def _verdict(
    stacked: Stacked, findings: Sequence[Finding], coverage: Coverage, usable: bool, partial: bool
) -> tuple[str, Verdict]:
    def nothing(confidence: str, summary: str) -> Verdict:
        return Verdict("none", "none", "", (), confidence, summary)

    if findings:
        first = findings[0]
        return "slow", Verdict(first.scope, first.cause, first.ranks, first.hosts, first.confidence, _summary(first))
    if not len(stacked):
        return "no_data", nothing("unknown", "no trace could be used, so nothing can be said about this job")
    if coverage.explained_share < LEAST_EXPLAINED:
        return "no_data", nothing(
            "unknown",
            f"the traces explain {coverage.explained_share:.0%} of their window: too little to say anything, not even "
            "that the job is healthy",
        )
    seen = f"{coverage.ranks_reported} of {coverage.ranks_expected} ranks"
    if not usable and len(stacked) == 1:
        return "no_data", nothing(
            "unknown",
            f"only rank {stacked.ranks[0]} of {stacked.world_size} reported: there is nothing to compare it with",
        )
    if not usable:
        return "no_data", nothing("unknown", f"{seen} reported: too few of a kind to tell which of them is unusual")
    if len(stacked) == 1:
        return "healthy", nothing(
            "hypothesis",
            f"rank {stacked.ranks[0]} takes about as long as in its own healthy window; there is no other rank to "
            "compare it with",
        )
    whole = coverage.ranks_reported == coverage.ranks_expected and not partial
    return "healthy", nothing(
        "supported" if whole else "hypothesis",
        f"no rank, group or link differs from its peers by 1 % of the iteration or more ({seen} compared)",
    )
