"""Whether a rank has left the routine of its own calls: it made one where another had come each time before.

Pure. A training makes the same calls in the same order over and over, so what comes next is known from what came last.
Where calls are recorded in some steps only, what is known of the others is how many there were: as many in each step.
Each rank is compared with its own past, never with other ranks, so roles that differ (pipeline stages) do no harm; and
what most ranks do alike (an evaluation, the end of an epoch) is no departure. A rank that only waits has not departed:
its calls end where the routine would go on. Used by `hang` and `differing`, to tell who of a circle is at its root.

Wrong where one rank rightly does something rare that the others do later; so nobody is blamed for a departure alone.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eroica.standing import RankView
from eroica.waiting import groups_of, signature

TIMES = 3
"""How often the same calls must have come before, each time with the same one after them: twice is chance."""
CONTEXTS = (32, 8, 2, 1)
"""How many calls before it tell what comes next: the longest that is known counts, for a layer's calls repeat."""

_Symbol = tuple[str, str]
"""Key of the group, what is called."""


@dataclass(frozen=True, slots=True)
class Departure:
    """A rank's last call that is not the one which had always come there, or calls fewer or more than always before."""

    rank: int
    kind: str
    """What ranks that depart alike have in common."""
    text: str
    """In words."""


def departures(views: Mapping[int, RankView]) -> dict[int, Departure]:
    """By rank; empty unless those who left their routine are fewer than half of all who have one."""
    groups = groups_of(views)
    names = {key: group.name for key, group in groups.items()}
    found: dict[int, Departure] = {}
    alike: dict[str, set[int]] = defaultdict(set)
    for rank, view in views.items():
        departure = _departure(view, names) or _miscount(view, names)
        if departure is not None:
            found[rank] = departure
            alike[departure.kind].add(rank)
    common = {rank for ranks in alike.values() if len(ranks) * 2 >= len(views) for rank in ranks}
    odd = {rank: departure for rank, departure in found.items() if rank not in common}
    return odd if len(odd) * 2 < len(views) else {}


def _departure(view: RankView, names: Mapping[str, str]) -> Departure | None:
    calls = [call for call in view.calls if not call.is_message] if view.is_recording else []
    if len({call.dtype != "" for call in calls}) > 1:
        # In steps that are not recorded there is but the last call of each group.
        calls = [call for call in calls if call.dtype or call.op == "barrier"]
    stream: list[_Symbol] = [(call.group, signature(call)) for call in calls]
    at = _strange(stream)
    if at is None:
        return None
    index, (group, usual) = at
    call = calls[index]
    made = f"{signature(call)} on {names.get(call.group, call.group[:8])}"
    when = f" in step {call.step}" if call.step > 0 else ""
    # Of calls that come in turn, one left out and one made twice look the same.
    text = f"left out a call or made one more{when}: it made {made} where each time before "
    text += f"{usual} on {names.get(group, group[:8])} had come"
    return Departure(view.rank, f"{made} for {usual} of {group}", f"rank {view.rank} {text}")


def _miscount(view: RankView, names: Mapping[str, str]) -> Departure | None:
    """Calls on a group that are fewer, or more, than as many in each step as in the recorded ones would be."""
    if not view.is_recording:
        return None
    last: dict[str, int] = {}
    first: dict[str, dict[int, int]] = defaultdict(dict)
    for call in view.calls:
        if not call.is_message:
            last[call.group] = max(call.sequence, last.get(call.group, 0))
            if call.step >= 0:
                first[call.group].setdefault(call.step, call.sequence)
    begun = min((step for steps in first.values() for step in steps), default=0)
    for group, steps in first.items():
        steps.pop(begun, None)  # of which the ring may have forgotten the first calls
        points = list(steps.items())[-TIMES - 1 :]
        rates = {(later - calls) / (to - step) for (step, calls), (to, later) in itertools.pairwise(points)}
        if len(points) <= TIMES or len(rates) != 1:
            continue
        rate, (step, calls) = rates.pop(), points[-1]
        # Made by a rank that begins its step; within the step up to `rate` more come.
        due = calls - 1 + rate * (view.num_steps - step)
        if not rate.is_integer() or due <= last[group] <= due + rate:
            continue
        odd = round(due - last[group] if last[group] < due else last[group] - due - rate)
        calls_odd = f"{'a call' if odd == 1 else f'{odd} calls'} on {names.get(group, group[:8])}"
        what = f"left out {calls_odd}" if last[group] < due else f"made {calls_odd} too many"
        text = f"rank {view.rank} {what} since step {step}: it had made {rate:.0f} in each step before"
        return Departure(view.rank, what, text)
    return None


def _strange(stream: Sequence[_Symbol]) -> tuple[int, _Symbol] | None:
    """The place of the last symbol that is not what had always come there, and what had."""
    numbers: dict[_Symbol, int] = {}
    symbols = [numbers.setdefault(symbol, len(numbers)) for symbol in stream]
    known: dict[tuple[int, ...], tuple[int, int]] = {}
    """Calls one after the other -> how often they came, and the one after them (-1: not always the same)."""
    found = None
    for at, symbol in enumerate(symbols):
        contexts = [tuple(symbols[at - length : at]) for length in CONTEXTS if length <= at]
        for context in contexts:
            times, usual = known.get(context, (0, -1))
            if times >= TIMES:
                if usual not in (-1, symbol):
                    found = at, stream[symbols.index(usual)]
                break
        for context in contexts:
            times, usual = known.get(context, (0, symbol))
            known[context] = times + 1, usual if usual == symbol else -1
    return found
