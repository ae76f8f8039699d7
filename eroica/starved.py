"""Loaders whose own workers fill the cores: batches are late on whichever rank they happen to be late on.

Then no rank is at fault, and nothing that moves over the ranks either: the hosts cannot make batches faster. A window
alone does not tell that from delays that come to changing ranks for a reason of their own; the counters of the hosts
do, which name who uses the cores. Wrong where workers use the cores for something else than batches. Used by
`diagnosis`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eroica.causes import Cause
from eroica.context import Context
from eroica.critical_path import Activity
from eroica.draft import Draft, readable_s
from eroica.findings import Evidence, Impact
from eroica.pattern import Stacked
from eroica.samplers.standout import WORKERS_FILL

STARVED = 0.05
"""Share of the critical path that ranks spend waiting for batches, in the middle of them, from which on they want for
batches. Loaders that keep up own less than a hundredth (`localization.EXPECTED_BETA`)."""


def by_workers(stacked: Stacked, drafts: Sequence[Draft], context: Context, iteration_s: float) -> list[Draft]:
    """The drafts; those of batches that are late on changing ranks as one of all ranks, where workers fill the cores
    of all hosts. Late batches of the same few ranks are these ranks'."""
    seen = {observation.host: observation for observation in context.counters if observation.name == WORKERS_FILL}
    if not len(stacked) or not seen or set(stacked.hosts) - seen.keys():
        return list(drafts)
    input_ = [draft for draft in drafts if _activity(stacked, draft) == Activity.INPUT]
    moving = [draft for draft in input_ if draft.scope == "rotating"]
    share = float(np.median(stacked.activity_beta[:, Activity.INPUT]))
    if len(input_) > len(moving) or (share < STARVED and not moving):
        return list(drafts)
    columns = [k for k, f in enumerate(stacked.functions) if f.activity == Activity.INPUT]
    last_s = _last_s(stacked, columns)
    seconds = max([share * iteration_s, last_s, *(draft.impact.seconds_per_iteration or 0.0 for draft in moving)])
    if seconds < STARVED * iteration_s:
        return list(drafts)
    most = moving[0].function if moving else max(columns, key=lambda k: float(np.median(stacked.beta[:, k])))
    text = (
        f"{share:.0%} of the critical path of a rank are waits for batches, and others wait for the batch that comes "
        f"last in a step, {readable_s(seconds)} per iteration"
    )
    host, first = next(iter(sorted(seen.items())))
    where = f" (on {host} and {len(seen) - 1} more)" if len(seen) > 1 else ""
    because = f"{first.text}{where}: no core is left to make batches sooner, and which rank waits is chance"
    ruled_out = ("a single rank: batches are late on all of them by turns",)
    cause = Cause("input_pipeline", True, because, ruled_out)
    made = Draft(
        *(cause, "all", np.arange(len(stacked), dtype=np.intp), (), "stable", most),
        *(Impact(seconds, seconds / iteration_s, "ledger"), 1.0),
        (Evidence(text, "ledger", {"share": share}), Evidence(because, "counters", {})),
        advice=ADVICE,
    )
    return [draft for draft in drafts if not any(draft is one for one in moving)] + [made]


ADVICE = (
    "Make batches cheaper (decode less, decode once and keep the result, smaller pictures, a faster library), or give "
    "the job more CPU cores per rank; more workers make no batch sooner where the cores are full."
)


def _activity(stacked: Stacked, draft: Draft) -> Activity | None:
    return stacked.functions[draft.function].activity if draft.function is not None else None


def _last_s(stacked: Stacked, columns: Sequence[int]) -> float:
    """What the longest wait for a batch in each step takes beyond the usual, in the mean over the steps."""
    is_input = np.isin(stacked.top_function, columns)
    waits = np.where(is_input, np.nan_to_num(stacked.top_excess_s), 0.0)
    return float(waits.max(axis=0).mean()) if waits.size else 0.0
