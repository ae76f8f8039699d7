"""Ranks that entered another operation, size or type than the rest of their group in the same call, and why.

The majority is right; a tie is undecided, unless the ranks' own past (`routine`) or an exception that one of them deals
with decides it. What may be behind it is told with it: a call left out or made once more, a loader that gave one rank
more batches than the others, a model of another size. Used by `hang`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from eroica import joining
from eroica.findings import Evidence, FunctionName
from eroica.looking import Look, function_of, line_of, places, skew_evidence, user_frames
from eroica.routine import departures
from eroica.standing import last_calls
from eroica.suspect import Suspect, some
from eroica.waiting import Gathering, mismatches, skews

_ADVICE = (
    "make every rank issue the same calls in the same order: look for a condition on rank or its data around these "
    "lines"
)
_BATCHES_ADVICE = (
    "give all ranks equally many batches (drop_last, a sampler that pads) or wrap the loop in torch's Join; until then "
    "let the ranks agree at each step whether there is a batch on all of them"
)


def different(look: Look) -> list[Suspect]:
    """See the module; of each group the first such call."""
    found = []
    for case in mismatches(look.views):
        ranks = frozenset[int]().union(*(who for _, who in case.variants))
        if not any(look.is_silent(rank) for rank in ranks):
            continue
        said = "; ".join(f"{some(who)} {'call' if len(who) > 1 else 'calls'} {what}" for what, who in case.variants)
        evidence = [Evidence(f"call {case.sequence} of {case.group.name}: {said}", "ring", {"sequence": case.sequence})]
        evidence += places(look, ranks)
        evidence += skew_evidence(look, case.group.key)
        odd, level, advice = case.odd, "established", _ADVICE
        own = departures(look.views)
        left = {rank: own[rank] for rank in sorted(odd or ranks) if rank in own}
        if odd:
            usual = case.variants[0][0]
            other = "; ".join(what for what, who in case.variants[1:])
            text = f"{some(odd)}: {other} where {some(case.variants[0][1])} have {usual}"
            odd_skews = [skew for rank, skew in skews(look.views, case.group.key).items() if rank in odd]
            if odd_skews:
                did = "left a call out" if odd_skews[0].step > odd_skews[0].usual else "made a call more"
                text += f"; it has {did} in step {min(odd_skews[0].step, odd_skews[0].usual)}"
            block = next((f.block for rank in odd for f in user_frames(look, rank) if f.block), "")
            if block:
                text += f"; it stands in {'an' if block == 'except' else 'a'} `{block}` block"
        elif left and len(left) < len(ranks):
            odd, level = frozenset(left), "supported"
            text = f"{some(odd)}: {said}; {next(iter(left.values())).text}"
        else:
            text = (
                f"{case.group.name}, call {case.sequence}: {said}; neither is a majority, so who is right is undecided"
            )
            level = "hypothesis"
        evidence += [Evidence(departure.text, "ring", {"rank": rank}) for rank, departure in list(left.items())[:4]]
        evidence += _models(look, ranks)
        batches = uneven_batches(look, odd, ranks - odd)
        if batches:
            text += f"; {batches}"
            evidence.append(Evidence(batches, "ring", {}))
            advice = _BATCHES_ADVICE
        # Where it left no stack: the line at which others made theirs, which its own should have matched. A rank that
        # was ended by the call may stand in the clean-up of the interpreter.
        functions = [function_of(look, rank) for rank in [*sorted(odd), *sorted(ranks - odd)]]
        known = sorted(filter(None, functions), key=lambda function: function.user_location is None)
        found.append(
            Suspect(
                *("collective_mismatch", "rank" if odd else "group", odd or ranks, level, text, tuple(evidence)),
                function=known[0] if known else None,
                advice=advice,
            )
        )
    return found


SYNCHRONOUS = frozenset(
    "allreduce allreduce_coalesced allgather allgather_base allgather_coalesced reduce_scatter reduce_scatter_base "
    "barrier monitored_barrier".split()
)
"""What no member leaves before all have come."""


def gone_past(look: Look, gathering: Gathering) -> Suspect | None:
    """Ranks that stand in a later call of the group than the others, who are in one that nobody leaves alone.

    Then they have called something else in its place, of which no record is left (in some steps calls are but counted).
    Not on devices, where the host runs ahead, nor where all stand in one line: then calls are made without waiting.
    """
    call = next(iter(gathering.calls.values()))
    if call.is_message or call.op not in SYNCHRONOUS or not gathering.group.key or gathering.group.is_on_device:
        return None
    last = {rank: last_calls(view).get((call.group, "", -1)) for rank, view in look.views.items() if view.is_recording}
    ahead = {rank: own for rank, own in last.items() if own is not None and own.sequence > call.sequence}
    lines = {line_of(look, rank) for rank in gathering.calls}
    if not ahead or len(ahead) >= len(gathering.calls) or "" in lines:
        return None
    if any(line_of(look, rank) in {*lines, ""} or not look.is_silent(rank) for rank in ahead):
        return None
    later = next(iter(ahead.values()))
    text = f"{some(ahead)}: has gone on to {later.op} {later.sequence} of {gathering.group.name} at "
    text += f"{line_of(look, min(ahead))}, while {some(gathering.calls)} stand in {gathering.what} at {min(lines)}, "
    text += "which nobody leaves alone: it left out a call, or called something else in its place"
    evidence = [Evidence(text, "ring", {"sequence": call.sequence, "ahead": later.sequence})]
    evidence += [*places(look, [*gathering.calls, *ahead]), *skew_evidence(look, call.group)]
    return Suspect(
        *("collective_mismatch", "rank", frozenset(ahead), "supported", text, tuple(evidence)),
        function=function_of(look, min(ahead)),
        advice=_ADVICE,
    )


def uneven_batches(look: Look, odd: Iterable[int], rest: Iterable[int]) -> str:
    """Where the loaders of some were through while those of others gave a batch, in words; "" else."""
    odd, rest = (frozenset(look.views.keys() & set(ranks)) for ranks in (odd, rest))
    ours = {look.views[rank].last_batch for rank in odd}
    theirs = {look.views[rank].last_batch for rank in rest}
    if not odd or not rest or len(ours) != 1 or len(theirs) != 1 or ours == theirs or "" in ours | theirs:
        return ""
    more, fewer = (odd, rest) if ours == {"came"} else (rest, odd)
    asked = {who: sorted({look.views[rank].num_nexts for rank in who}) for who in (more, fewer)}
    return (
        f"the loader of {some(more)} gave another batch (call {asked[more][-1]} for one), while that of {some(fewer)} "
        f"was through (at call {asked[fewer][-1]}): they do not have equally many batches"
    )


def by_handled(look: Look, suspect: Suspect) -> Suspect:
    """`suspect`, laid to the exception that its ranks deal with, if they do: what they do since is the clean-up."""
    handling = {rank: look.views[rank] for rank in suspect.ranks if rank in look.views and look.views[rank].handles}
    is_whole = suspect.scope == "rank" and len(handling) == len(suspect.ranks)
    if not handling or not (is_whole or 2 * len(handling) <= len(suspect.ranks)):
        return suspect
    if any(view.handles != view.exception for view in look.views.values() if view.exception):
        return suspect  # somebody has left by an exception, and that comes first
    view = handling[min(handling)]
    said = f"{view.handles}{f' at {view.handles_from or view.handles_at}' if view.handles_at else ''}"
    text = f"{some(handling)}: left its loop by {said}; its clean-up then made a call that the others do not make"
    shown = [f"{some([rank])} deals with {view.handles} at {view.handles_at}" for rank, view in handling.items()]
    evidence = [Evidence(line, "ring", {}) for line in shown[:4]] + [Evidence(suspect.text, "ring", {})]
    function = FunctionName(
        "host", view.handles.partition(":")[0], view.handles_at or None, view.handles_from or view.handles_at or None
    )
    return replace(
        suspect,
        cause="exception",
        scope="rank",
        ranks=frozenset(handling),
        confidence="established" if is_whole else "supported",
        text=text,
        evidence=(*evidence, *suspect.evidence),
        function=function,
        advice="mend what raised this; a clean-up must not wait for ranks that know nothing of it",
    )


def _models(look: Look, ranks: Iterable[int]) -> list[Evidence]:
    _, text = joining.odd_models(look.views, ranks)
    return [Evidence(f"models differ: {text}", "environment", {})] if text else []
