"""Hosts whose cores were slower themselves: what all of their ranks take longer for is then nothing that these do.

Cores slow down by heat, by power, and where the other thread of a core belongs to another virtual machine; no counter
of the kernel says so. A fixed piece of work does (`samplers.work`), read by the agent all the time: where it takes
longer, and the host is no busier than it was, a job on it is slower by as much. Wrong where the job itself heats
the cores by what it has begun to do, without using more of them. Used by `diagnosis` and, for what is over before
anybody tells it, by `investigation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from eroica.blame import is_host_only
from eroica.causes import ON_THE_CPU, STARVATION_EXPLAINS, Cause
from eroica.context import Context
from eroica.critical_path import Activity
from eroica.draft import Draft
from eroica.findings import Evidence, Finding
from eroica.job import format_ranks
from eroica.pattern import Stacked

IN_WINDOW, LATELY = "slow_cores", "lately_slow_cores"
"""Counters, as `standout` tells them."""
ADVICE = (
    "Look at the clocks, the temperature and the power limits of this host's processors (turbostat, sensors, BIOS "
    "settings), and, on a virtual machine, at who shares its cores; the job itself need not change."
)
_OF_ITS_OWN = frozenset({"configuration", "profiler_overhead", "checkpoint_io", "load_imbalance"})
"""Causes that are known by more than how long something takes."""


def by_slow_cores(stacked: Stacked, drafts: Sequence[Draft], context: Context, iteration_s: float) -> list[Draft]:
    """The drafts, those that slower cores explain as one for each group of hosts, priced together."""
    factors = {seen.host: seen.value for seen in context.counters if seen.name == IN_WINDOW}
    kept: list[Draft] = []
    explained: dict[tuple[str, ...], list[Draft]] = {}
    for draft in drafts:
        hosts = _hosts(stacked, draft) if factors else ()
        if hosts and factors.keys() >= set(hosts):
            factor = min(factors[host] for host in hosts)
            if _explains(stacked, draft, factor, iteration_s):
                explained.setdefault(hosts, []).append(draft)
                continue
        kept.append(draft)
    return kept + [_of_hosts(stacked, mine, hosts, factors) for hosts, mine in explained.items()]


def _hosts(stacked: Stacked, draft: Draft) -> tuple[str, ...]:
    """Those on which all ranks have what the draft tells; () if it is of some of a host's ranks, or of no host."""
    if draft.scope not in ("all", "host", "rank") or draft.steps != "stable" or draft.network is not None:
        return ()
    if draft.named is not None or draft.cause.settings or draft.cause.cause in _OF_ITS_OWN or not len(draft.ranks):
        return ()
    hosts = {stacked.hosts[row] for row in draft.ranks}
    whole = {row for row, host in enumerate(stacked.hosts) if host in hosts}
    return tuple(sorted(hosts)) if "" not in hosts and whole == set(draft.ranks.tolist()) else ()


def _explains(stacked: Stacked, draft: Draft, factor: float, iteration_s: float) -> bool:
    """Work that takes `factor` times as long, for as much as the draft is longer by."""
    activity = stacked.functions[draft.function].activity if draft.function is not None else None
    if activity is not None and activity not in ON_THE_CPU:
        return False
    if activity is None and not is_host_only(stacked):
        return False
    share = 1.0 if activity is None else float(np.median(stacked.activity_beta[draft.ranks, Activity(activity)]))
    seconds = draft.impact.seconds_per_iteration or 0.0
    return share * iteration_s * (1 - 1 / factor) >= STARVATION_EXPLAINS * seconds > 0


def _of_hosts(stacked: Stacked, drafts: Sequence[Draft], hosts: tuple[str, ...], factors: dict[str, float]) -> Draft:
    dearest = max(drafts, key=lambda draft: draft.impact.seconds_per_iteration or 0.0)
    others = [draft for draft in drafts if draft is not dearest]
    seconds = sum(draft.impact.seconds_per_iteration or 0.0 for draft in drafts)
    share = sum(draft.impact.share or 0.0 for draft in drafts)
    told = ", ".join(f"{factors[host]:.2f} times on {host}" for host in hosts[:3]) + (", ..." if hosts[3:] else "")
    because = (
        f"a fixed piece of work took longer by the same measure, {told}, and these hosts were no busier than before: "
        "their cores are slower, not what the job does on them"
    )
    cause = Cause("cpu_contention", True, because, (f"{dearest.cause.cause}: the cores explain it",))
    return replace(
        dearest,
        cause=cause,
        scope="host",
        hosts=hosts,
        function=None if others else dearest.function,
        impact=replace(dearest.impact, seconds_per_iteration=seconds, share=share),
        evidence=(Evidence(because, "counters", {"ranks": format_ranks(stacked.ranks[dearest.ranks].tolist())}),
                  *dearest.evidence, *(draft.evidence[0] for draft in others)),
        advice=ADVICE,
    )  # fmt: skip


def is_of_slow_cores(finding: Finding) -> bool:
    """Whether nothing but slower cores was found."""
    return finding.cause == "cpu_contention" and finding.advice == ADVICE


def were_slow(context: Context) -> bool:
    """Cores have lately been as slow as the job was noticed to be, on all hosts that tell."""
    noticed = context.noticed
    factors = [seen.value for seen in context.counters if seen.name in (IN_WINDOW, LATELY)]
    if noticed is None or not factors or noticed.usual_s <= 0:
        return False
    return max(factors) - 1 >= STARVATION_EXPLAINS * (noticed.observed_s / noticed.usual_s - 1)
