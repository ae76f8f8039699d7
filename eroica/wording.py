"""How a diagnosis is put into words and numbers that people read: the parts that all reports share.

Plain strings and small rows, not yet escaped for any syntax; strings from the job are already `clean`. The renderers
(`report` for text, Markdown and prompt; `page` for HTML) only arrange these. Nothing is judged here: who is to blame
was decided in `diagnosis`. It insists on one thing alone: a diagnosis without data is never called healthy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eroica.findings import Detail, Diagnosis, Evidence, Finding, FunctionName, PatternValues
from eroica.untrusted import clean

NOT_MEASURED = "not measured"

KIND_WORDS = {
    "slow": "SLOW", "hang": "HANG", "paused": "PAUSED", "recovered": "RECOVERED",
    "crash": "CRASH", "healthy": "HEALTHY", "no_data": "NO DATA",
}  # fmt: skip

CAUSE_WORDS = {
    "input_pipeline": "input pipeline: batches come too late",
    "host_python": "Python code on the host",
    "host_gc": "garbage collection of Python",
    "gil_contention": "threads that compete for the GIL",
    "cpu_contention": "other work takes the CPU cores",
    "host_memory": "host memory under pressure",
    "memory_allocator": "allocator of device memory",
    "gpu_throttle": "GPU clock held down by heat or power",
    "gpu_compute": "compute on the GPU",
    "recompilation": "recompilation",
    "device_sync": "host waits for the device",
    "host_device_copy": "copies between host and device",
    "intra_node_link": "link inside a host",
    "nic_or_host_network": "network card or network of a host",
    "fabric_contention": "congestion between hosts",
    "sync_amplification": "small delays, amplified by synchronisation",
    "locality": "placement: peers are far apart",
    "load_imbalance": "uneven work",
    "checkpoint_io": "writing or reading checkpoints",
    "collective_mismatch": "ranks entered different collectives",
    "missing_rank": "a rank never arrived",
    "exception": "an exception",
    "deadlock": "ranks wait for each other in a circle",
    "dead_worker": "a process died",
    "startup_network": "network at start-up",
    "configuration": "configuration",
    "version_change": "change of version",
    "profiler_overhead": "cost of profiling itself",
    "unknown": "unknown",
    "none": "nothing wrong",
}
CONFIDENCE_WORDS = {
    "established": "the cause covers at least 80 % of the excess, by a signal that could have been absent",
    "supported": "the evidence points there, but does not cover it all",
    "hypothesis": "fits what was seen, not yet supported",
    "unknown": "nothing seen so far tells the cause",
}
METHOD_WORDS = {"replay": "replay", "ledger": "ledger", "pattern": "share of time"}


def seconds(value: float | None) -> str:
    """A duration in the unit people would choose: 0.121 -> "121 ms". None and NaN -> "not measured"."""
    if value is None or not math.isfinite(value):
        return NOT_MEASURED
    size = abs(value)
    for limit, factor, unit in ((0.9995e-3, 1e6, "us"), (0.9995, 1e3, "ms"), (99.5, 1.0, "s"), (5400.0, 1 / 60, "min")):
        if size < limit:
            return f"{_digits(value * factor)} {unit}"
    return f"{_digits(value / 3600)} h"


def percent(value: float | None) -> str:
    """A share: 0.43 -> "43 %". None and NaN -> "not measured"."""
    if value is None or not math.isfinite(value):
        return NOT_MEASURED
    return f"{_digits(value * 100)} %"


def ranks(text: str, limit: int = 60) -> str:
    """ "rank 3", "ranks 0,2-3", or "" for no rank; a list of ranges beyond `limit` characters is cut after a comma."""
    text = clean(text, 10_000).strip()
    if not text:
        return ""
    word = "rank" if re.fullmatch(r"\d+", text) else "ranks"
    return f"{word} {fold(text, limit)}"


def fold(text: str, limit: int = 60) -> str:
    """Ranges cut to `limit` characters after a comma, with the number of ranks that they stand for."""
    if len(text) <= limit:
        return text
    kept = text[: limit - 20].rpartition(",")[0] or text[: limit - 20]
    return f"{kept},... ({count_ranks(text):,} ranks)"


def spans(text: str) -> list[tuple[int, int]]:
    """RANKS as inclusive spans. What is no range is left out: a report shows a diagnosis, it does not check it."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,10})(?:-(\d{1,10}))?\s*", part)
        if match and int(match[2] or match[1]) >= int(match[1]):
            found.append((int(match[1]), int(match[2] or match[1])))
    return found


def count_ranks(text: str) -> int:
    """How many ranks RANKS names, without listing them."""
    return sum(last - first + 1 for first, last in spans(text))


def rank_mask(text: str, of: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Which of the ranks `of` (W,) are named in RANKS."""
    mask = np.zeros(len(of), dtype=bool)
    for first, last in spans(text):
        mask |= (of >= first) & (of <= last)
    return mask


def kind(diagnosis: Diagnosis) -> str:
    """The diagnosis' kind; "healthy" without a single rank is "no_data", whoever wrote it."""
    nothing_seen = diagnosis.coverage.ranks_reported <= 0
    return "no_data" if diagnosis.kind == "healthy" and nothing_seen else clean(diagnosis.kind, 20)


def kind_word(diagnosis: Diagnosis) -> str:
    """ "SLOW", "HEALTHY", "NO DATA", ..."""
    return KIND_WORDS.get(kind(diagnosis), kind(diagnosis).upper())


def summary(diagnosis: Diagnosis, limit: int = 240) -> str:
    """The verdict as one sentence."""
    what = kind(diagnosis)
    if what == "no_data" and diagnosis.kind == "healthy":
        return "nothing could be analysed: no rank reported"
    text = clean(diagnosis.verdict.summary.strip(), limit)
    if text:
        return text
    coverage = diagnosis.coverage
    if what == "healthy":
        return f"nothing wrong in what {coverage.ranks_reported} of {coverage.ranks_expected} ranks reported"
    if what == "no_data":
        return "nothing could be analysed"
    who = ranks(diagnosis.verdict.ranks) or clean(diagnosis.verdict.scope)
    return f"{who}: {cause(diagnosis.verdict.cause)}"


def headline(diagnosis: Diagnosis) -> str:
    """The verdict in one line: "SLOW: rank 3 ..."."""
    word, text = kind_word(diagnosis), summary(diagnosis)
    return text if text.upper().startswith(word) else f"{word}: {text}"


def cause(name: str) -> str:
    """A cause in words."""
    return CAUSE_WORDS.get(name, clean(name, 40).replace("_", " "))


def cause_name(name: str) -> str:
    """A cause's own name, readable: "gpu_throttle" -> "GPU throttle"."""
    acronyms = {"gpu", "cpu", "gc", "gil", "nic", "io"}
    return " ".join(word.upper() if word in acronyms else word for word in clean(name, 40).split("_"))


def function(name: FunctionName | None, limit: int = 120) -> str:
    """ "decode (host), data.py:41"; a frame of the user's own code is added where it differs."""
    if name is None:
        return "no single function"
    text = f"{clean(name.name, limit)} ({clean(name.kind, 20)})"
    if name.location:
        text += f", {clean(name.location, limit)}"
    caller = called_from(name, limit)
    return text + (f", from {caller}" if caller else "")


def called_from(name: FunctionName, limit: int = 120) -> str:
    """The frame of the user's own code that a function was called from; "" where it is that frame itself."""
    function = name.user_function if name.user_function != name.name else None
    place = name.user_location if name.user_location != name.location else None
    return " ".join(clean(part, limit) for part in (function, place) if part)


def who(finding: Finding) -> str:
    """Whom a finding is about."""
    named = ranks(finding.ranks)
    on = f" on {hosts(finding.hosts)}" if finding.hosts else ""
    text = {
        "host": f"host {hosts(finding.hosts)}" + (f" ({named})" if named else "") if finding.hosts else named,
        "all": "all ranks alike",
        "rotating": "no rank in particular: it moves" + (f" over {named}" if named else ""),
        "link": f"link {clean(finding.link)}" if finding.link else f"a link between {named}" if named else "a link",
        "group": f"{named} as a group" if named else "a group of ranks",
    }.get(finding.scope) or (named + on if named else "nobody in particular")
    return text + (f", device {clean(finding.device, 80)}" if finding.device else "")


def hosts(names: Sequence[str], most: int = 4) -> str:
    """Host names, the first `most` of them."""
    shown = ", ".join(clean(name, 64) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def cost(finding: Finding, diagnosis: Diagnosis) -> str:
    """What a finding costs: "121 ms of 283 ms per iteration (43 %), by ledger"."""
    impact = finding.impact
    if impact.seconds_per_iteration is None:
        return NOT_MEASURED if impact.share is None else f"{percent(impact.share)} of an iteration"
    of = f" of {seconds(diagnosis.iteration.observed_s)}" if diagnosis.iteration.observed_s else ""
    text = f"{seconds(impact.seconds_per_iteration)}{of} per iteration"
    text += f" ({percent(impact.share)})" if impact.share is not None else ""
    return text + (f", by {METHOD_WORDS.get(impact.method, clean(impact.method, 20))}" if impact.method else "")


def facts(finding: Finding, diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """who, what, why, cost, confidence, what to do."""
    steps = "" if finding.steps in ("stable", "rotating", "") else f" ({clean(finding.steps, 40)})"
    rows = [
        ("who", who(finding)),
        ("what", function(finding.function) + steps),
        ("why", cause(finding.cause)),
        ("cost", cost(finding, diagnosis)),
        ("confidence", confidence(finding.confidence)),
        ("what to do", clean(finding.advice.strip(), 600) or "nothing known yet"),
    ]
    return rows


def confidence(level: str) -> str:
    """A confidence with what it means."""
    return f"{clean(level, 20)}: {CONFIDENCE_WORDS[level]}" if level in CONFIDENCE_WORDS else clean(level, 20)


def pattern(finding: Finding) -> str:
    """The finding's numbers beside its peers' and the expected ones, on one line; "" if there are none."""
    parts = []
    for name in ("beta", "mu", "sigma"):
        own, peer, box = (getattr(values, name) for values in (finding.pattern, finding.peers, finding.expected))
        if own is None and peer is None:
            continue
        against = [f"peers {share(peer)}"] + ([f"expected {share(box)}"] if box is not None else [])
        parts.append(f"{name} {share(own)} ({', '.join(against)})")
    if parts and finding.pattern.mu_source:
        parts.append(f"mu from {clean(finding.pattern.mu_source, 40)}")
    parts += [f"{name} {value:.3g}" for name, value in (("D", finding.distance), ("Delta", finding.delta)) if value]
    return "; ".join(parts)


def share(value: float | None) -> str:
    """beta, mu or sigma as a number from 0 to 1."""
    return NOT_MEASURED if value is None or not math.isfinite(value) else f"{value:.3f}".rstrip("0").rstrip(".")


def pattern_rows(finding: Finding) -> list[tuple[str, str, str, str]]:
    """(quantity, own, peers, expected), only what at least one of them measured."""
    rows = []
    for name, meaning in (("beta", "share of the critical path"), ("mu", "utilisation"), ("sigma", "its spread")):
        values: list[PatternValues] = [finding.pattern, finding.peers, finding.expected]
        numbers = [getattr(item, name) for item in values]
        if any(number is not None for number in numbers):
            own, peers, box = numbers
            rows.append((f"{name}, {meaning}", share(own), share(peers), "-" if box is None else share(box)))
    return rows


def evidence_line(item: Evidence, limit: int = 400) -> str:
    """An observation and where it was read."""
    return f"{clean(item.text.strip(), limit)} [{clean(item.source, 40)}]"


def window(diagnosis: Diagnosis) -> str:
    """The steps that were looked at."""
    w = diagnosis.window
    parts = []
    if w.num_steps is not None:
        last = ""
        if w.first_step is not None:
            last = f" {w.first_step}-{w.last_step if w.last_step is not None else w.first_step + w.num_steps - 1}"
        parts.append(f"{w.num_steps} iterations" + (f" (steps{last})" if last else ""))
    if w.duration_s is not None:
        parts.append(seconds(w.duration_s))
    if w.started:
        parts.append(f"from {clean(w.started, 40)}")
    return ", ".join([*parts, f"trigger: {clean(w.trigger, 20)}"])


def iteration(diagnosis: Diagnosis) -> str:
    """Seconds per iteration now and when healthy."""
    i = diagnosis.iteration
    if i.observed_s is None:
        return "no iterations were recognised" if kind(diagnosis) != "no_data" else ""
    if i.baseline_s is None:
        return f"{seconds(i.observed_s)} per iteration; no healthy baseline to compare with"
    text = f"{seconds(i.observed_s)} per iteration; {seconds(i.baseline_s)} when healthy"
    return text + (f" ({i.slowdown:.2f} x)" if i.slowdown is not None else "")


def coverage(diagnosis: Diagnosis, most_notes: int = 20) -> list[str]:
    """How much of the job was seen: never empty."""
    c = diagnosis.coverage
    line = f"{c.ranks_reported:,} of {c.ranks_expected:,} ranks reported"
    if c.missing_ranks:
        line += f"; missing: {fold(clean(c.missing_ranks, 10_000))}"
    if c.partial_ranks:
        line += f"; in part only: {fold(clean(c.partial_ranks, 10_000))}"
    lines = [line, f"{percent(c.explained_share)} of their time is explained", f"window: {window(diagnosis)}"]
    lines += [f"note: {clean(note, 300)}" for note in c.notes[:most_notes]]
    if len(c.notes) > most_notes:
        lines.append(f"{len(c.notes) - most_notes} more notes are in the JSON")
    return lines


def not_seen(diagnosis: Diagnosis, detail: Detail | None) -> list[str]:
    """What a verdict of healthy does not cover."""
    c = diagnosis.coverage
    gaps = []
    if c.missing_ranks or c.ranks_reported < c.ranks_expected:
        gaps.append(f"{max(1, c.ranks_expected - c.ranks_reported):,} ranks that sent nothing")
    if c.partial_ranks:
        gaps.append(f"the rest of {ranks(c.partial_ranks)}")
    if diagnosis.iteration.baseline_s is None:
        gaps.append("whether the job was faster before (no baseline)")
    if c.explained_share < 0.8:
        gaps.append(f"{percent(1 - c.explained_share)} of the time that no function explains")
    if detail is not None and detail.mu.size and bool(np.isnan(detail.mu).all()):
        gaps.append("utilisation (mu was not measured)")
    return gaps


@dataclass(frozen=True, slots=True)
class RankRow:
    """Where the time of one rank, or of folded ranks, goes: seconds per iteration, medians over the members."""

    label: str
    hosts: str
    num_ranks: int
    marked: bool
    own_s: float
    wait_s: float
    transfer_s: float
    idle_s: float


def marked_ranks(diagnosis: Diagnosis, detail: Detail) -> npt.NDArray[np.bool_]:
    """(W,) Ranks that findings name as odd ones out; none where they name more than half of the job."""
    mask = np.zeros(len(detail.ranks), dtype=bool)
    for finding in diagnosis.findings:
        if finding.scope in ("rank", "host", "group", "link"):
            found = rank_mask(finding.ranks, detail.ranks)
            if found.sum() * 2 <= len(found):
                mask |= found
    return mask


def role_median(values: npt.NDArray[np.floating], roles: Sequence[str]) -> npt.NDArray[np.float64]:
    """Median of each rank's role, per column: (W, ...) -> (W, ...). NaN is left out; NaN where a role has no value.

    In a role of two, each rank is measured by the other: their median would halve what sets them apart.
    """
    codes, names = role_codes(roles)
    result = np.full(values.shape, np.nan, dtype=np.float64)
    for code in range(len(names)):
        members = np.flatnonzero(codes == code)
        result[members] = values[members[::-1]] if len(members) == 2 else _nanmedian(values[members])
    return result


def role_codes(roles: Sequence[str]) -> tuple[npt.NDArray[np.intp], list[str]]:
    """A number for each rank's role, and the roles in the order of their first rank."""
    numbers: dict[str, int] = {}
    codes = [numbers.setdefault(role, len(numbers)) for role in roles]
    return np.array(codes, dtype=np.intp), list(numbers)


def rank_rows(diagnosis: Diagnosis, detail: Detail, most: int = 16) -> list[RankRow]:
    """Ranks that findings name first, then the largest own times; beyond `most` ranks, the others folded by role."""
    num = len(detail.ranks)
    marked = marked_ranks(diagnosis, detail)
    excess = np.nan_to_num(detail.own_s - role_median(detail.own_s, detail.roles))
    order = np.lexsort((detail.ranks, -excess if num > most else np.zeros(num), ~marked))
    if num <= most:
        return [_row(detail, order[i : i + 1], bool(marked[order[i]])) for i in range(num)]
    usual = np.nan_to_num(role_median(detail.own_s, detail.roles))
    single = [int(i) for i in order[: most // 2] if marked[i] or excess[i] > 0.05 * usual[i]]
    rows = [_row(detail, np.array([i]), bool(marked[i])) for i in single]
    rest = np.setdiff1d(np.arange(num), single)
    codes = role_codes(detail.roles)[0][rest]
    found = list(dict.fromkeys(codes.tolist()))
    rows += [_row(detail, rest[codes == code], False) for code in found[: most // 2]]
    if len(found) > most // 2:
        rows.append(_row(detail, rest[~np.isin(codes, found[: most // 2])], False))
    return rows


def _row(detail: Detail, members: npt.NDArray[np.intp], marked: bool) -> RankRow:
    own, wait, transfer, idle = (
        float(_nanmedian(values[members])) for values in (detail.own_s, detail.wait_s, detail.transfer_s, detail.idle_s)
    )
    names = list(dict.fromkeys(clean(detail.hosts[i], 64) for i in members[:4096]))
    label = fold(format_spans(detail.ranks[members]), 28)
    return RankRow(label, hosts(names, 1), len(members), marked, own, wait, transfer, idle)


def format_spans(values: Iterable[int] | npt.NDArray[np.int32]) -> str:
    """Ranks as ranges, "0-2,17", in time proportional to their number."""
    found = np.unique(np.asarray(values, dtype=np.int64))
    if not len(found):
        return ""
    parts = np.split(found, np.flatnonzero(np.diff(found) != 1) + 1)
    return ",".join(f"{p[0]}" if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def _nanmedian(values: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Median over the first axis without NaN, NaN (and no warning) where nothing is left."""
    empty = np.isnan(values).all(axis=0)
    filled = np.where(empty, 0.0, values)
    return np.where(empty, np.nan, np.nanmedian(filled, axis=0))


def _digits(value: float) -> str:
    """Three significant digits without exponent: 0.123, 1.23, 12.3, 123, 1,234."""
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value else "0"
