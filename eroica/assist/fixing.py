"""`eroica fix`: from a diagnosis to a patch on a branch, tried by the user's own commands, and a draft pull request.

    find a change (codemods; else a model, if one was named) -> worktree -> write, compile, commit -> the user's tests
    -> measure both ways -> push

Everything happens in a worktree; whatever fails leaves neither a folder nor a branch behind. Only what the user named
is run: the test command and the command to measure. A change that makes iterations longer, or a job that breaks off, is
no fix. Used by `command`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eroica.assist import codemods, forge, proposing
from eroica.assist.change import Change, Lead
from eroica.assist.describing import Fixed, commit_message, measured, pull_request_body
from eroica.assist.edits import refuse_big
from eroica.assist.endpoints import Endpoint
from eroica.assist.leads import common, lead_of, notes_of
from eroica.assist.measuring import Measured, is_faster, measure, refuse_fixed_paths
from eroica.assist.reading import Sources
from eroica.assist.repository import Repository, Worktree, last_words
from eroica.errors import UserError
from eroica.findings import Diagnosis, Finding, to_json
from eroica.untrusted import clean, escape

LIMIT_S = 1800.0
"""For each of the user's commands."""
BY_MODEL = "a model"
"""Stands where else the name of a codemod does."""
PROMISED = 0.05
"""Share of the iteration from which on a promised gain must show: it makes a level slow (`pace.EFFECT`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRequest:
    """Where to open a draft."""

    forge: forge.Forge
    remote: str
    base: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to fix and how to try it."""

    diagnosis: Diagnosis
    repository: Repository
    finding: str = ""
    """"" = the first that can be fixed."""
    test: Sequence[str] = ()
    verify: Sequence[str] = ()
    pull_request: PullRequest | None = None
    limit_s: float = LIMIT_S
    endpoint: Endpoint | None = None
    """Asked where no codemod fits; None: nobody is."""


def fix(plan: Plan, say: Callable[[str], None]) -> Fixed:
    """Make the patch; returns what is known of it. Raises an EroicaError, with nothing left behind, if there is none or
    it does not stand the trial. `say` gets a sentence now and then."""
    repository = plan.repository
    repository.refuse_dirt()
    for words in (plan.test, plan.verify):
        refuse_fixed_paths(words, repository.root)
    texts = repository.texts()
    finding, codemod, (change, *more) = _find(plan, texts, say)
    if change.after == texts[change.path]:
        raise UserError(f"the patch of {clean(change.path)} changes nothing")
    refuse_big([change, *more], texts)
    commit = common(plan.diagnosis).get("commit")
    if isinstance(commit, str) and repository.has_changed(change.path, commit):
        caution = f"{clean(change.path)} has changed since the commit that the job ran ({clean(commit, 12)})"
        change = replace(change, caution=(*change.caution, caution))
    if finding is not None and finding.confidence in ("hypothesis", "unknown"):
        change = replace(
            change, caution=(*change.caution, "the cause is no more than a hypothesis: measure what the patch gains")
        )
    number = to_json(plan.diagnosis)["id"]
    fixed = Fixed(
        diagnosis=plan.diagnosis, finding=finding, codemod=codemod, change=change, more=tuple(more), branch="", diff="",
        is_stable=(finding is None or finding.steps == "stable") and codemods.is_steady(codemod),
    )  # fmt: skip
    with repository.worktree(f"eroica/{number}-{codemod.replace(' ', '-')}") as tree:
        tree.write(fixed.changes)
        tree.compile(fixed.changes)
        tree.commit(fixed.changes, commit_message(fixed))
        fixed = replace(fixed, branch=tree.branch, diff=tree.diff())
        say(f"{change.title}: {', '.join(one.path for one in fixed.changes)}")
        if plan.test:
            _test(plan, tree, say)
            fixed = replace(fixed, test=tuple(plan.test))
        if plan.verify:
            before, after = _measure(plan, tree, fixed.is_stable, say)
            fixed = replace(fixed, verify=tuple(plan.verify), before=before, after=after)
            _judge(fixed)
        if plan.pull_request is not None:
            fixed = replace(fixed, url=_open(plan, plan.pull_request, fixed))
        tree.is_kept = True
    return fixed


def _find(
    plan: Plan, texts: Mapping[str, str], say: Callable[[str], None]
) -> tuple[Finding | None, str, Sequence[Change]]:
    """The first finding that a codemod answers, else the first for which a model proposes a change, if one is asked."""
    diagnosis, root, sources = plan.diagnosis, str(plan.repository.root), Sources(texts)
    findings = [one for one in diagnosis.findings if plan.finding in ("", one.id)]
    if plan.finding and not findings:
        known = ", ".join(clean(one.id, 20) for one in diagnosis.findings[:20]) or "none"
        raise UserError(f"the diagnosis has no finding {escape(plan.finding, 40)!r}; it has {known}")
    leads: list[tuple[Finding | None, Lead]] = [(one, lead_of(one, diagnosis, sources, root)) for one in findings]
    if not plan.finding:
        leads += [(None, lead) for lead in notes_of(diagnosis)]
    if not leads:
        raise UserError("the diagnosis has no finding, so there is nothing to fix")
    tried = []
    for finding, lead in leads:
        seen = codemods.propose(sources, lead)
        if isinstance(seen, tuple):
            return finding, seen[0].name, [seen[1]]
        about = f"{_who(finding)} ({lead.cause.replace('_', ' ')})"
        if not seen:
            tried.append(f"{about}: no codemod is for this cause")
        else:
            reasons = "; ".join(f"{codemod.name}: {clean(refusal.reason, 220)}" for codemod, refusal in seen)
            tried.append(f"{about}: {reasons}")
    refused = f"no codemod fits: {'. '.join(tried[:6])}"
    if plan.endpoint is None:
        raise UserError(refused)
    say(refused)
    tried = []
    for finding, lead in leads:
        if finding is not None:
            try:
                changes = proposing.propose(plan.endpoint, diagnosis, finding, lead, texts, say).changes
                return finding, BY_MODEL, changes
            except UserError as error:
                tried.append(f"{_who(finding)}: {error}")
    raise UserError(f"no codemod fits, and {'. '.join(tried[:3]) or 'no finding is there that a model could be shown'}")


def _who(finding: Finding | None) -> str:
    return clean(finding.id, 20) if finding is not None else "a setting"


def _test(plan: Plan, tree: Worktree, say: Callable[[str], None]) -> None:
    say("running the tests on the patch")
    ended = tree.run(plan.test, plan.limit_s)
    if not ended.status:
        return
    tree.as_before()
    say("the tests fail; running them without the patch")
    without = tree.run(plan.test, plan.limit_s)
    also = "; they fail without it, too" if without.status else ""
    raise UserError(f"the tests fail with the patch (status {ended.status}){also}: {last_words(ended.tail)}")


def _measure(plan: Plan, tree: Worktree, is_stable: bool, say: Callable[[str], None]) -> tuple[Measured, Measured]:
    runs = []
    with tempfile.TemporaryDirectory(prefix="eroica-verify-") as folder:
        for name, prepare in (("without", tree.as_before), ("with", tree.as_patched)):
            prepare()
            say(f"measuring {name} the patch")
            out = Path(folder) / name
            one = measure(plan.verify, tree.folder, out, limit_s=plan.limit_s, is_stable=is_stable)
            stands = "hang" in one.kinds or (name == "without" and plan.diagnosis.kind in ("hang", "crash", "paused"))
            if one.is_broken and one.num_iterations and not stands:
                # Some programs break off at their very end now and then; one such run says nothing about the patch.
                say(f"the run {name} the patch broke off (status {one.status}); once more")
                prepare()
                out = Path(folder) / f"{name}-again"
                one = measure(plan.verify, tree.folder, out, limit_s=plan.limit_s, is_stable=is_stable)
            if name == "without" and one.is_broken and not stands:
                said = (out / "output.txt").read_text(encoding="utf-8", errors="replace")
                raise UserError(
                    f"the command to measure fails in a clean checkout (status {one.status}): {last_words(said)}"
                )
            runs.append(one)
        tree.as_patched()
    return runs[0], runs[1]


def _judge(fixed: Fixed) -> None:
    """Raises UserError if what was measured speaks against the patch."""
    before, after = fixed.before, fixed.after
    assert before is not None and after is not None
    if after.is_broken:
        told = f" ({clean(after.summaries[-1], 200)})" if after.summaries else ""
        raise UserError(f"the patch is no fix: {measured(fixed)}{told}")
    if before.is_broken:
        return
    faster = is_faster(before, after)
    if faster is False:
        raise UserError(f"the patch is no fix: {measured(fixed)}")
    promised = fixed.finding.impact.share if fixed.finding is not None else None
    if not faster and promised is not None and promised >= PROMISED:
        raise UserError(f"the patch does not show the gain that the diagnosis promises: {measured(fixed)}")


def _open(plan: Plan, wanted: PullRequest, fixed: Fixed) -> str:
    plan.repository.push(wanted.remote, fixed.branch)
    request = forge.Request(
        title=fixed.change.title, body=pull_request_body(fixed)[: forge.MOST_BODY], head=fixed.branch, base=wanted.base
    )
    try:
        return forge.open_draft(wanted.forge, request, plan.repository.root)
    except BaseException:
        plan.repository.unpush(wanted.remote, fixed.branch)
        raise
