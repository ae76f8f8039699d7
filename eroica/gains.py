"""What pacing gains on the model: the same simulated job three times, and tables and pictures of it.

`compare` trains a job with the same dice left alone, with early ranks held at all times, and under the policy with its
trials; a row for each size, and for each failure mode alone where they are asked for. The published figures of arXiv
2603.04424 stand beside it, and nothing is claimed of real clusters: the parameters are `docs/fabric-model.md`'s. Used
by `eroica simulate` and the benches.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from markupsafe import Markup

from eroica.efficiency import svg
from eroica.fabric.pacing import Limits, Pacer, Phase
from eroica.fabric.parameters import Setting
from eroica.fabric.simulator import Run, simulate
from eroica.simulation import at_all_times, by_policy, sharing
from eroica.templates import load, render
from eroica.wording import seconds

EVERYTHING = "all"
"""The mode of a job in which none is switched off."""
ENOUGH = 0.005
"""Of throughput, that counts as gain or cost; what a trial asks for, too."""
CALMER = 0.1
"""Fall of the CV that counts, relative."""


@dataclass(frozen=True, slots=True)
class Mean:
    """Over seeds, with a 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Row:
    """One size. Gains are of throughput, seed by seed against the same job left alone."""

    hosts: int
    ranks: int
    mode: str
    """The failure mode that is on alone, or EVERYTHING."""
    iteration_s: Mean
    cv: Mean
    held_s: Mean
    """Iteration with early ranks held at all times."""
    held_cv: Mean
    held_gain: Mean
    policy_s: Mean
    policy_cv: Mean
    policy_gain: Mean
    kept_on: int
    """Seeds in which the policy was on at the end."""
    trials: int
    """Over all seeds."""
    seeds: int

    @property
    def verdict(self) -> str:
        """What pacing does here, in a few words."""
        if self.held_gain.low >= ENOUGH:
            return "helps"
        if self.held_gain.high <= -ENOUGH:
            return "costs" if self.kept_on else "costs, and the trials leave it off"
        if self.held_cv.value <= (1 - CALMER) * self.cv.value and self.held_gain.low > -ENOUGH:
            return "steadier, not faster"
        if not self.held_gain.high < ENOUGH:  # nor where a single seed leaves no interval
            return "not sure: more seeds would tell"
        if not self.trials:
            return "nothing to gain; never tried, ranks come together"
        return "nothing to gain" + ("" if self.kept_on else ", and the trials leave it off")


PUBLISHED: Mapping[int, tuple[float, float]] = {4: (-0.006, 0.008), 8: (-0.006, 0.008), 64: (0.11, 0.11)}
"""Hosts -> gain of throughput, from and to (arXiv 2603.04424)."""
PUBLISHED_CV: Mapping[int, tuple[float, float]] = {64: (0.22, 0.09)}
"""Hosts -> CV without and with pacing."""
_T95 = (math.inf, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Student's t, 97.5 %, by degrees of freedom; of more of them by its expansion around the normal one."""


def mean_of(values: Sequence[float]) -> Mean:
    """With Student's interval; none of a single value."""
    column = np.array(values)
    if len(column) < 2:
        return Mean(float(column.mean()), math.nan, math.nan)
    free = len(column) - 1
    t = _T95[free] if free < len(_T95) else 1.96 + 2.372 / free + 2.822 / free**2
    half = t * float(column.std(ddof=1)) / math.sqrt(len(column))
    return Mean(float(column.mean()), float(column.mean()) - half, float(column.mean()) + half)


def compare(
    setting: Setting,
    seeds: Sequence[int],
    iterations: int,
    limits: Limits,
    mode: str = EVERYTHING,
) -> Row:
    """The same job, left alone, held at all times, and under the policy."""
    free, held, policy, pacers = [], [], [], []
    for seed in seeds:
        free.append(simulate(setting, iterations, seed, detail=0))
        held.append(simulate(setting, iterations, seed, detail=0, steer=at_all_times(setting, limits)))
        pacer = Pacer(limits, sharing=sharing(setting))
        policy.append(simulate(setting, iterations, seed, detail=0, steer=by_policy(setting, pacer)))
        pacers.append(pacer)

    def lengths(runs: Sequence[Run]) -> Mean:
        return mean_of([float(r.length_s.mean()) for r in runs])

    def gains(runs: Sequence[Run]) -> Mean:
        pairs = zip(free, runs, strict=True)
        return mean_of([float(a.length_s.mean() / b.length_s.mean()) - 1 for a, b in pairs])

    return Row(
        hosts=setting.hosts,
        ranks=setting.ranks,
        mode=mode,
        iteration_s=lengths(free),
        cv=mean_of([r.variation for r in free]),
        held_s=lengths(held),
        held_cv=mean_of([r.variation for r in held]),
        held_gain=gains(held),
        policy_s=lengths(policy),
        policy_cv=mean_of([r.variation for r in policy]),
        policy_gain=gains(policy),
        kept_on=sum(p.phase is Phase.ON for p in pacers),
        trials=sum(sum(c.phase is Phase.TRIAL for c in p.changes) for p in pacers),
        seeds=len(seeds),
    )


# ---- text and JSON


def headline(rows: Sequence[Row]) -> str:
    """One sentence."""
    whole = [row for row in rows if row.mode == EVERYTHING] or list(rows)
    last = max(whole, key=lambda row: row.hosts)
    published = ""
    if last.hosts in PUBLISHED and last.mode == EVERYTHING:
        published = f"; published: {_published(last)}"
    modes = "" if last.mode == EVERYTHING else f", {last.mode} alone"
    return (
        f"{last.hosts} hosts{modes}: throughput {_gain(last.held_gain)} with early ranks held at all times, "
        f"CV {last.cv.value:.3f} -> {last.held_cv.value:.3f}{published}"
    )


def _published(row: Row) -> str:
    told = []
    if row.mode == EVERYTHING and row.hosts in PUBLISHED:
        low, high = PUBLISHED[row.hosts]
        told.append(f"{low:+.1%}" if low == high else f"{low:+.1%}..{high:+.1%}")
    if row.mode == EVERYTHING and row.hosts in PUBLISHED_CV:
        told.append("CV {:.2f} -> {:.2f}".format(*PUBLISHED_CV[row.hosts]))
    return ", ".join(told)


_KEY = (
    "held: early ranks held at all times until the last one usually comes, groups that share links in turns",
    "policy: the same in trials, and on where a trial shows a gain; on: seeds in which it was on at the end",
    "throughput: against the same job left alone, with the same dice; +- is 95 % over seeds",
    "a model, no measurement: docs/fabric-model.md; published: arXiv 2603.04424",
)


def render_text(rows: Sequence[Row]) -> str:
    """A table for a terminal, the published figures beside it."""
    has_modes = any(row.mode != EVERYTHING for row in rows)
    width = max(len(row.mode) for row in rows) + 2 if has_modes else 0
    pad = " " * width
    lines = [
        headline(rows),
        "",
        f"               {pad}     left alone               held                   policy",
        f"  hosts  ranks {pad}iteration     CV      CV  throughput          CV  throughput         on   published",
    ]
    for row in rows:
        mode = f"{row.mode:<{width}}" if has_modes else ""
        lines.append(
            f"  {row.hosts:>5}  {row.ranks:>5} {mode}{row.iteration_s.value * 1e3:>6.1f} ms  {row.cv.value:>5.3f}   "
            f"{row.held_cv.value:>5.3f}  {_gain(row.held_gain):<17} {row.policy_cv.value:>5.3f}  "
            f"{_gain(row.policy_gain):<17} {row.kept_on}/{row.seeds}  {_published(row)}".rstrip()
        )
    lines += ["", "  where pacing helps, and where it cannot"]
    for row in rows:
        mode = f"{row.mode:<{width}}" if has_modes else ""
        lines.append(f"  {row.hosts:>5} hosts  {mode}{row.verdict}")
    lines += ["", *(f"  {line}" for line in _KEY)]
    return "\n".join(lines) + "\n"


def _gain(mean: Mean) -> str:
    half = mean.high - mean.value
    return f"{mean.value:+.2%}" + (f" +- {half:.2%}" if math.isfinite(half) else "")


def render_json(rows: Sequence[Row]) -> str:
    """The same as JSON, schema `eroica.simulation/1`, NaN as null."""

    def clear(value: object) -> object:
        if isinstance(value, dict):
            return {key: clear(item) for key, item in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    told = {
        "schema": "eroica.simulation/1",
        "summary": headline(rows),
        "rows": [clear(asdict(row) | {"verdict": row.verdict, "published": _published(row) or None}) for row in rows],
    }
    return json.dumps(told, indent=2) + "\n"


# ---- HTML


def render_html(rows: Sequence[Row]) -> str:
    """One page without script or network."""
    style = load("report.css.j2")
    digest = "sha256-" + base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    whole = [row for row in rows if row.mode == EVERYTHING]
    return render(
        "simulation.html.j2",
        policy=f"default-src 'none'; style-src '{digest}'; base-uri 'none'; form-action 'none'",
        style=Markup(style),
        summary=headline(rows),
        pictures=_pictures(whole) if len(whole) > 1 else [],
        has_modes=any(row.mode != EVERYTHING for row in rows),
        rows=[
            {
                "hosts": f"{row.hosts:,}",
                "ranks": f"{row.ranks:,}",
                "mode": row.mode,
                "iteration": seconds(row.iteration_s.value),
                "cv": f"{row.cv.value:.3f}",
                "held_cv": f"{row.held_cv.value:.3f}",
                "held_gain": _gain(row.held_gain),
                "policy_cv": f"{row.policy_cv.value:.3f}",
                "policy_gain": _gain(row.policy_gain),
                "kept_on": f"{row.kept_on} of {row.seeds}",
                "published": _published(row) or "-",
                "verdict": row.verdict,
            }
            for row in rows
        ],
        key=_KEY,
        lines=LINES,
        claimed=CLAIMED,
    )


Points = Sequence[tuple[int, Mean]]


def _pictures(rows: Sequence[Row]) -> list[tuple[str, str, Markup]]:
    """Heading, what it shows, picture."""

    def exactly(value: float) -> Mean:
        return Mean(value, value, value)

    def of(name: str) -> list[tuple[int, Mean]]:
        return [(row.hosts, getattr(row, name)) for row in rows]

    def milliseconds(name: str) -> list[tuple[int, Mean]]:
        return [(hosts, Mean(m.value * 1e3, m.low * 1e3, m.high * 1e3)) for hosts, m in of(name)]

    def percents(name: str) -> list[tuple[int, Mean]]:
        return [(hosts, Mean(m.value * 100, m.low * 100, m.high * 100)) for hosts, m in of(name)]

    here = {row.hosts for row in rows}
    claimed = [(h, Mean(50 * (a + b), 100 * a, 100 * b)) for h, (a, b) in PUBLISHED.items() if h in here]
    claimed_cv = [(h, exactly(value)) for h, pair in PUBLISHED_CV.items() if h in here for value in pair]
    return [
        (
            "Iteration time",
            "milliseconds",
            _chart("Iteration time by hosts", [milliseconds(n) for n in ("iteration_s", "held_s", "policy_s")], []),
        ),
        (
            "Coefficient of variation of the iteration time",
            "over the iterations of a job; published: 0.22 without pacing and 0.09 with it",
            _chart("CV by hosts", [of(n) for n in ("cv", "held_cv", "policy_cv")], claimed_cv),
        ),
        (
            "Throughput gained",
            "percent, against the job left alone",
            _chart("Gain by hosts", [[], percents("held_gain"), percents("policy_gain")], claimed, 1.0),
        ),
    ]


LINES = (("own", "left alone"), ("excess", "early ranks held at all times"), ("transfer", "under the policy"))
"""Fill of each way, and its name."""
CLAIMED = ("idle", "published")


def _chart(title: str, lines: Sequence[Points], claimed: Points, least: float = 0.0) -> Markup:
    """Values over the number of hosts, logarithmic, with intervals; what was published as boxes from its low to its
    high end. The axis goes to `least` at the least, so that noise about 0 does not look like something."""
    width, height, x0, x1, y0, y1 = 640, 280, 64, 616, 16, 230
    hosts = sorted({h for points in (*lines, claimed) for h, _ in points})
    # Intervals may leave the picture: that of two seeds would leave no room for anything else.
    ends = [m.value for points in lines for _, m in points] + [end for _, m in claimed for end in (m.low, m.high)]
    ticks = _ticks(min(0.0, *ends), max(least, *ends))
    first, last = math.log2(hosts[0]), math.log2(hosts[-1])
    bottom, top = ticks[0], ticks[-1]

    def x(h: int, shift: float) -> float:
        return x0 + 24 + (math.log2(h) - first) / max(last - first, 1e-9) * (x1 - x0 - 48) + shift

    def y(value: float) -> float:
        return y1 - (min(max(value, bottom), top) - bottom) / (top - bottom) * (y1 - y0)

    items = []
    for tick in ticks:
        items.append(
            Markup('<line class="{}" x1="{}" y1="{:.1f}" x2="{}" y2="{:.1f}"/>').format(
                "peers" if tick == 0 and bottom < 0 else "grid", x0, y(tick), x1, y(tick)
            )
        )
        items.append(
            Markup('<text class="tick" x="{}" y="{:.1f}" text-anchor="end">{:g}</text>').format(
                x0 - 8, y(tick) + 4, tick
            )
        )
    for h in hosts:
        items.append(
            Markup('<text class="tick" x="{:.1f}" y="{}" text-anchor="middle">{:,}</text>').format(x(h, 0), y1 + 18, h)
        )
    items.append(
        Markup('<text class="axis" x="{}" y="{}" text-anchor="middle">hosts</text>').format((x0 + x1) / 2, y1 + 40)
    )
    for h, mean in claimed:
        box = Markup(
            '<rect class="{}" x="{:.1f}" y="{:.1f}" width="10" height="{:.1f}"><title>{}: {:.3g}</title></rect>'
        )
        high, low = y(mean.high) - 4, y(mean.low) + 4
        items.append(box.format(CLAIMED[0], x(h, 14) - 5, high, low - high, CLAIMED[1], mean.value))
    for n, ((css, name), points) in enumerate(zip(LINES, lines, strict=True)):
        # Side by side, since the ways lie upon each other where pacing changes nothing.
        shift = (n - 1) * 7.0
        for h, mean in points:
            if math.isfinite(mean.low):
                items.append(
                    Markup('<line class="peers" x1="{0:.1f}" y1="{1:.1f}" x2="{0:.1f}" y2="{2:.1f}"/>').format(
                        x(h, shift), y(mean.low), y(mean.high)
                    )
                )
            items.append(
                Markup(
                    '<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="4"><title>{}, {} hosts: {:.4g}</title></circle>'
                ).format(css, x(h, shift), y(mean.value), name, h, mean.value)
            )
    return svg("fit", width, height, title, items)


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers that enclose both; two at the least, also of 0 alone."""
    span = max(high - low, 1e-9)
    step = 10 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if span / (step * factor) <= 5)
    first = math.floor(low / step)
    return [step * n for n in range(first, max(math.ceil(high / step), first + 1) + 1)]
