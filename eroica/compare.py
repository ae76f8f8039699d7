"""What changed between two diagnoses of a job: before and after a fix, last week and today, two windows of one run.

Pure: two sides in, differences out, ordered by what they cost; then text, JSON or Markdown. It says what differs, not
why: an environment that differs is named beside a slower iteration, and which of the two made the other is for people
(and for `diagnose`, which takes the first as a baseline). Shares of functions can only be compared where both sides
come from traces; a diagnosis.json holds the functions of its findings alone.

Used by `eroica compare`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from eroica import wording
from eroica.findings import Detail, Diagnosis, Finding, FunctionName
from eroica.report import prose
from eroica.untrusted import clean

SCHEMA = "eroica.comparison/1"
FLOOR = 0.01
"""Of the longer iteration; the effect that counts as one everywhere else, too."""
MOST_FUNCTIONS = 10
MOST_SHOWN = 40
"""Differences that text and Markdown show; JSON has all."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two."""

    name: str
    """What the caller named it: a path."""
    diagnosis: Diagnosis
    detail: Detail | None
    """None if only a diagnosis.json was there."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not as it was."""

    what: str
    """iteration, finding, time, function, coverage, environment."""
    change: str
    """came, went, more, less, other."""
    text: str
    effect_s: float | None
    """Seconds per iteration that it adds; negative: that it saves. None: unknown, or no matter of time."""
    before: float | str | None
    after: float | str | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sides and what differs."""

    before: str
    after: str
    summary: str
    differences: tuple[Difference, ...]
    """By falling size of the effect; those without one last."""
    notes: tuple[str, ...]
    """What could not be compared."""


def compare(before: Side, after: Side) -> Comparison:
    """What differs between them."""
    length_a, length_b = _length_s(before), _length_s(after)
    floor_s = FLOOR * max((value for value in (length_a, length_b) if value is not None), default=0.0)
    found = [
        *_findings(before.diagnosis, after.diagnosis, floor_s),
        *_coverage(before.diagnosis, after.diagnosis),
        *_environment(before.diagnosis.environment, after.diagnosis.environment),
    ]
    notes = []
    if before.detail is not None and after.detail is not None:
        found += _times(before.detail, after.detail, floor_s)
        if length_a is not None and length_b is not None:
            found += _functions(before.detail, after.detail, length_a, length_b, floor_s)
    else:
        lacking = [clean(side.name, 200) for side in (before, after) if side.detail is None]
        notes.append(
            f"functions and times of ranks were not compared: {' and '.join(lacking)} "
            + ("hold diagnoses alone" if len(lacking) > 1 else "holds a diagnosis alone")
        )
    if length_a is None or length_b is None:
        notes.append("the length of an iteration is not known on both sides")
    found.sort(key=lambda one: -abs(one.effect_s) if one.effect_s is not None else 1.0)
    return Comparison(
        before.name, after.name, _summary(before, after, length_a, length_b, floor_s), tuple(found), tuple(notes)
    )


def _length_s(side: Side) -> float | None:
    """Seconds per iteration."""
    if side.diagnosis.iteration.observed_s:
        return side.diagnosis.iteration.observed_s
    if side.detail is None or not len(side.detail.ranks):
        return None
    whole = side.detail.own_s + side.detail.wait_s + side.detail.transfer_s + side.detail.idle_s
    middle = float(np.median(whole))
    return middle if math.isfinite(middle) and middle > 0 else None


def _summary(before: Side, after: Side, length_a: float | None, length_b: float | None, floor_s: float) -> str:
    kinds = [wording.kind_word(side.diagnosis).lower() for side in (before, after)]
    kind = f"still {kinds[1]}" if kinds[0] == kinds[1] else f"{kinds[0]} before, {kinds[1]} now"
    if length_a is None or length_b is None:
        return kind
    change = length_b - length_a
    lengths = f"{wording.seconds(length_a)} -> {wording.seconds(length_b)} per iteration"
    if abs(change) < floor_s:
        return f"as fast as before: {lengths}; {kind}"
    word = "slower" if change > 0 else "faster"
    return f"{wording.percent(abs(change) / length_a)} {word}: {lengths}; {kind}"


def _findings(before: Diagnosis, after: Diagnosis, floor_s: float) -> list[Difference]:
    left = list(before.findings)
    found = []
    for finding in after.findings:
        old = _match(finding, left)
        if old is None:
            found.append(_finding_difference("came", finding, None, _cost_s(finding)))
            continue
        left.remove(old)
        cost_a, cost_b = _cost_s(old), _cost_s(finding)
        moved = old.ranks != finding.ranks and finding.scope != "rotating"
        if cost_a is not None and cost_b is not None and abs(cost_b - cost_a) >= max(floor_s, 1e-12):
            found.append(_finding_difference("more" if cost_b > cost_a else "less", finding, cost_a, cost_b))
        elif moved:
            text = f"{_named(finding)}: {wording.ranks(old.ranks) or 'nobody'} before"
            found.append(Difference("finding", "other", text, None, old.ranks, finding.ranks))
    found += [_finding_difference("went", finding, _cost_s(finding), None) for finding in left]
    return found


def _match(finding: Finding, among: list[Finding]) -> Finding | None:
    """The finding that this one was: same cause and function, best of the same ranks."""
    same = [old for old in among if old.cause == finding.cause and _place(old) == _place(finding)]
    return next((old for old in same if old.ranks == finding.ranks), same[0] if same else None)


def _place(finding: Finding) -> tuple[str, ...]:
    return (finding.device or "", finding.link or "", *(_key(finding.function) if finding.function else ()))


def _key(name: FunctionName) -> tuple[str, str, str]:
    """A function whatever its line: an edit above it moves it and changes nothing."""
    return name.kind, name.name, (name.location or "").rpartition(":")[0]


def _cost_s(finding: Finding) -> float | None:
    return finding.impact.seconds_per_iteration


def _named(finding: Finding) -> str:
    what = f" ({wording.function(finding.function)})" if finding.function is not None else ""
    return f"{wording.cause_name(finding.cause)}, {wording.who(finding)}{what}"


def _finding_difference(change: str, finding: Finding, before: float | None, after: float | None) -> Difference:
    name = _named(finding)
    if change == "came":
        text, effect = f"{name}: new, {wording.seconds(after)}", after
    elif change == "went":
        text, effect = f"{name}: gone, was {wording.seconds(before)}", None if before is None else -before
    else:
        text, effect = f"{name}: {wording.seconds(before)} -> {wording.seconds(after)}", (after or 0) - (before or 0)
    return Difference("finding", change, text, effect, before, after)


def _times(before: Detail, after: Detail, floor_s: float) -> list[Difference]:
    """Own time, waiting, transfer, idle: means over the ranks."""
    found = []
    for name, values_a, values_b in (
        ("own time", before.own_s, after.own_s),
        ("waiting for others", before.wait_s, after.wait_s),
        ("exposed transfer", before.transfer_s, after.transfer_s),
        ("idle", before.idle_s, after.idle_s),
    ):
        old, new = _mean(values_a), _mean(values_b)
        if old is not None and new is not None and abs(new - old) >= max(floor_s, 1e-12):
            text = f"{name}, mean over ranks: {wording.seconds(old)} -> {wording.seconds(new)}"
            found.append(Difference("time", "more" if new > old else "less", text, new - old, old, new))
    return found


def _mean(values: npt.NDArray[np.float64]) -> float | None:
    measured = values[np.isfinite(values)]
    return float(measured.mean()) if len(measured) else None


def _functions(a: Detail, b: Detail, length_a: float, length_b: float, floor_s: float) -> list[Difference]:
    """Functions whose time on the critical path moved most: means over ranks, or one rank's if it alone moved."""
    times_a, times_b = _by_function(a, length_a), _by_function(b, length_b)
    same_ranks = np.array_equal(a.ranks, b.ranks)
    found = []
    for key in {**times_a, **times_b}:
        name, _ = times_b.get(key) or times_a[key]
        old = times_a[key][1] if key in times_a else np.zeros(len(a.ranks))
        new = times_b[key][1] if key in times_b else np.zeros(len(b.ranks))
        before, after = float(old.mean()), float(new.mean())
        effect, where = after - before, "mean over ranks"
        if same_ranks and len(old) > 2:
            moves = new - old
            most = int(np.argmax(np.abs(moves)))
            # One that moved alone would drown in the mean of a thousand, and all the others wait for it.
            if abs(moves[most]) > 3 * float(np.median(np.abs(moves))) and abs(moves[most]) >= floor_s:
                before, after, effect = float(old[most]), float(new[most]), float(moves[most])
                where = f"on rank {int(b.ranks[most])}"
        if abs(effect) < max(floor_s, 1e-12):
            continue
        text = f"{wording.function(name)}, {where}: {wording.seconds(before)} -> {wording.seconds(after)}"
        change = "more" if effect > 0 else "less"
        change = ("came" if before == 0 else change) if effect > 0 else ("went" if after == 0 else change)
        found.append(Difference("function", change, text, effect, before, after))
    found.sort(key=lambda one: -abs(one.effect_s or 0.0))
    return found[:MOST_FUNCTIONS]


def _by_function(
    detail: Detail, length_s: float
) -> dict[tuple[str, str, str], tuple[FunctionName, npt.NDArray[np.float64]]]:
    """Seconds per iteration of each function on each rank; below a rank's cut-off counts as none."""
    found: dict[tuple[str, str, str], tuple[FunctionName, npt.NDArray[np.float64]]] = {}
    for index, name in enumerate(detail.functions):
        seconds = np.nan_to_num(detail.beta[:, index].astype(np.float64)) * length_s
        known = found.get(_key(name))
        found[_key(name)] = (name, seconds if known is None else known[1] + seconds)
    return found if len(detail.ranks) else {}


def _coverage(before: Diagnosis, after: Diagnosis) -> list[Difference]:
    a, b = before.coverage, after.coverage
    found = []
    for name, old, new in (
        ("ranks expected", a.ranks_expected, b.ranks_expected),
        ("ranks seen", a.ranks_reported, b.ranks_reported),
        ("missing ranks", a.missing_ranks or "none", b.missing_ranks or "none"),
        ("hosts", len(before.hosts), len(after.hosts)),
    ):
        if old != new:
            shown = [wording.fold(clean(str(value), 2_000)) for value in (old, new)]
            found.append(Difference("coverage", "other", f"{name}: {shown[0]} -> {shown[1]}", None, old, new))
    if abs(a.explained_share - b.explained_share) >= 0.1:
        text = f"time explained: {wording.percent(a.explained_share)} -> {wording.percent(b.explained_share)}"
        found.append(Difference("coverage", "other", text, None, a.explained_share, b.explained_share))
    return found


def _environment(before: Mapping[str, object], after: Mapping[str, object]) -> list[Difference]:
    """Settings and versions, by their names; nested ones by their path."""
    old, new = dict(_leaves(before, "")), dict(_leaves(after, ""))
    if not old or not new:
        return []
    found = []
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if a != b:
            change = "came" if a is None else "went" if b is None else "other"
            shown = [clean(value, 80) if value is not None else "not set" for value in (a, b)]
            text = f"{clean(key, 80)}: {shown[0]} -> {shown[1]}"
            found.append(Difference("environment", change, text, None, a, b))
    return found


def _leaves(values: object, path: str) -> list[tuple[str, str]]:
    if isinstance(values, Mapping):
        return [leaf for key, value in values.items() for leaf in _leaves(value, f"{path}.{key}" if path else str(key))]
    return [(path, values if isinstance(values, str) else json.dumps(values, sort_keys=True, default=str))]


def _shown(comparison: Comparison) -> tuple[list[tuple[str, Difference]], int]:
    """(effect, difference) of those that are shown, and how many are not."""
    rows = []
    for one in comparison.differences[:MOST_SHOWN]:
        effect = "" if one.effect_s is None else f"{'+' if one.effect_s > 0 else ''}{wording.seconds(one.effect_s)}"
        rows.append((effect, one))
    return rows, max(0, len(comparison.differences) - MOST_SHOWN)


def render_text(comparison: Comparison) -> str:
    """The summary first, then a line for each difference."""
    rows, num_more = _shown(comparison)
    lines = [
        comparison.summary,
        "",
        f"  before  {clean(comparison.before, 200)}",
        f"  after   {clean(comparison.after, 200)}",
        "",
        *(f"  {effect:>9}  {one.what:<11}  {one.text}" for effect, one in rows),
    ]
    if not rows:
        lines.append("  nothing else differs")
    if num_more:
        lines.append(f"  {num_more} more are in the JSON")
    lines += [f"  {note}" for note in comparison.notes]
    return "\n".join(lines) + "\n"


def render_markdown(comparison: Comparison) -> str:
    """GitHub-flavoured Markdown; strings of jobs mean only themselves."""
    rows, num_more = _shown(comparison)
    lines = [
        f"**{prose(comparison.summary)}**",
        "",
        f"Before: {prose(clean(comparison.before, 200))}. After: {prose(clean(comparison.after, 200))}.",
        "",
    ]
    if rows:
        lines += ["| per iteration | what | |", "| ---: | --- | --- |"]
        lines += [f"| {prose(effect)} | {one.what} | {prose(one.text)} |" for effect, one in rows]
        lines.append("")
    if num_more:
        lines += [f"{num_more} more are in the JSON.", ""]
    lines += [f"- {prose(note)}" for note in comparison.notes]
    return "\n".join(lines).rstrip() + "\n"


def render_json(comparison: Comparison) -> str:
    """All of it; schema `eroica.comparison/1`."""
    return json.dumps({"schema": SCHEMA, **asdict(comparison)}, indent=2) + "\n"
