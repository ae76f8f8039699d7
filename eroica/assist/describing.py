"""A patch in words: the summary for a terminal, the message of its commit and the body of its pull request.

Strings of the job go through `untrusted.clean` and, in Markdown, through `report.prose`; the patch itself is the user's
own code, fenced. Nothing is judged here. Used by `fixing` and `command`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from eroica import wording
from eroica.assist.change import Change
from eroica.assist.measuring import Measured, is_faster
from eroica.findings import Diagnosis, Finding, to_json
from eroica.report import prose
from eroica.templates import render
from eroica.untrusted import clean

MOST_PATCH = 20_000
"""Characters of the patch in a pull request's body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """A patch and what is known of it."""

    diagnosis: Diagnosis
    finding: Finding | None
    """None: a setting that is worth a look, and no finding."""
    codemod: str
    """Which repair it is."""
    change: Change
    branch: str
    diff: str
    test: tuple[str, ...] = ()
    """The user's command that passed; () = none was given."""
    verify: tuple[str, ...] = ()
    before: Measured | None = None
    after: Measured | None = None
    """None: not measured."""
    more: tuple[Change, ...] = ()
    """Of further files, if the patch touches several."""
    is_stable: bool = True
    """The iteration that was measured is the median one, else the mean."""
    url: str = ""
    """Of the pull request."""

    @property
    def changes(self) -> tuple[Change, ...]:
        """All of it."""
        return (self.change, *self.more)


def commit_message(fixed: Fixed) -> str:
    """Subject, and why."""
    number = to_json(fixed.diagnosis)["id"]
    lines = [fixed.change.title, "", f"{_sentence(clean(fixed.diagnosis.verdict.summary, 400))} (diagnosis {number})"]
    return "\n".join([*lines, "", *(f"- {line}" for line in (*fixed.change.because, *fixed.change.caution))]) + "\n"


def predicted(fixed: Fixed) -> str:
    """What the diagnosis promises."""
    impact = fixed.finding.impact if fixed.finding is not None else None
    if impact is None or impact.seconds_per_iteration is None:
        return "not known from the window that was diagnosed"
    share = f" ({wording.percent(impact.share)} of the iteration)" if impact.share is not None else ""
    return f"up to {wording.seconds(impact.seconds_per_iteration)} per iteration{share}"


def measured(fixed: Fixed) -> str:
    """What the two runs showed, in a sentence."""
    before, after = fixed.before, fixed.after
    if before is None or after is None:
        return "not measured; --verify COMMAND does"
    if before.is_broken or after.is_broken:
        return f"before the job {_end(before)}, now it {_end(after)}"
    if before.iteration_s is None or after.iteration_s is None:
        return "the runs were too short to tell: some 40 iterations are needed"
    word = "median" if fixed.is_stable else "mean"
    lengths = (
        f"{wording.seconds(before.iteration_s)} -> {wording.seconds(after.iteration_s)} per iteration ({word} of "
        f"{before.num_iterations} and {after.num_iterations} iterations on {after.num_ranks} ranks)"
    )
    faster = is_faster(before, after)
    if faster is None:
        return f"no difference that goes beyond the noise: {lengths}"
    change = abs(before.iteration_s - after.iteration_s) / before.iteration_s
    return f"{wording.percent(change)} {'faster' if faster else 'slower'}: {lengths}"


def pull_request_body(fixed: Fixed) -> str:
    """Evidence, patch, what was promised and what was measured, how to measure again."""
    finding, diagnosis = fixed.finding, fixed.diagnosis
    evidence = []
    for name in finding.evidence if finding is not None else ():
        item = diagnosis.evidence.get(name)
        if item is not None:
            evidence.append(f"**{prose(clean(name, 8))}** {prose(wording.evidence_line(item))}")
    facts = wording.facts(finding, diagnosis) if finding is not None else []
    patch = fixed.diff[:MOST_PATCH] + ("\n[... the rest is in the commit]\n" if len(fixed.diff) > MOST_PATCH else "")
    return render(
        "pull_request.md.j2",
        summary=prose(wording.summary(diagnosis)),
        identity=to_json(diagnosis)["id"],
        facts=[(name, prose(value)) for name, value in facts],
        evidence=evidence[:12],
        ruled_out=[prose(clean(one, 300)) for one in (finding.ruled_out[:8] if finding is not None else ())],
        title=prose(fixed.change.title),
        because=[prose(one) for one in fixed.change.because],
        caution=[prose(one) for one in fixed.change.caution],
        fence=_fence(patch),
        patch=patch,
        predicted=prose(predicted(fixed)),
        measured=prose(measured(fixed)),
        afterwards=[prose(clean(one, 300)) for one in (fixed.after.summaries[-3:] if fixed.after is not None else ())],
        was_measured=fixed.after is not None,
        test=_shown(fixed.test),
        verify=_shown(fixed.verify),
    )


def summary(fixed: Fixed) -> str:
    """For a terminal, above the patch."""
    told = [("patch", f"{fixed.change.title} ({', '.join(one.path for one in fixed.changes)}, by {fixed.codemod})")]
    told += [("because", one) for one in fixed.change.because]
    told += [("note", one) for one in fixed.change.caution]
    told += [("tests", f"passed: {_shown(fixed.test)}" if fixed.test else "none were run; --test COMMAND does")]
    told += [("predicted", predicted(fixed)), ("measured", measured(fixed))]
    told += [("branch", fixed.branch)]
    told += [("draft", fixed.url)] if fixed.url else []
    return "".join(f"{name:<11}{text}\n" for name, text in told)


def as_json(fixed: Fixed) -> str:
    """The same for scripts. Schema `eroica.fix/1`; fields are only ever added."""
    body = {
        "schema": "eroica.fix/1",
        "diagnosis": to_json(fixed.diagnosis)["id"],
        "finding": fixed.finding.id if fixed.finding is not None else None,
        "codemod": fixed.codemod,
        "title": fixed.change.title,
        "path": fixed.change.path,
        "paths": [one.path for one in fixed.changes],
        "because": list(fixed.change.because),
        "caution": list(fixed.change.caution),
        "branch": fixed.branch,
        "diff": fixed.diff,
        "test": list(fixed.test),
        "verify": list(fixed.verify),
        "before": _run(fixed.before),
        "after": _run(fixed.after),
        "measured": measured(fixed),
        "pull_request": fixed.url or None,
    }
    return json.dumps(body, indent=2) + "\n"


def _run(one: Measured | None) -> dict[str, object] | None:
    if one is None:
        return None
    return {
        "status": one.status,
        "kinds": list(one.kinds),
        "summaries": list(one.summaries),
        "ranks": one.num_ranks,
        "iterations": one.num_iterations,
        "iteration_s": one.iteration_s,
        "error_s": one.error_s,
    }


def _end(one: Measured) -> str:
    if "hang" in one.kinds:
        return "stood still"
    if one.is_broken:
        return f"broke off (status {one.status})"
    return "was still running when its time was up" if one.status == 124 else "runs to its end"


def _shown(words: Sequence[str]) -> str:
    return clean(shlex.join(words), 400)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _fence(text: str) -> str:
    """Longer than any run of backticks in the text."""
    return "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
