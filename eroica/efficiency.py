"""What scaling costs: runs of one job at several sizes side by side, each with the account of its lost time.

`study` orders the accounts by size and adds what a single run cannot show: transfers that are longer than at the
smallest size in all steps alike (contention that never lets up), as far as bytes and the larger ring do not explain
them. The ideal is each run's own usual rank, so weak and strong scaling read the same. Then text, JSON and one HTML
page with the curve. Used by `eroica scaling`; judges no rank.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from eroica.job import format_ranks
from eroica.scaling import MODE_FLOOR, OF_SCALE, Account, Part, Share
from eroica.templates import load, render
from eroica.untrusted import clean
from eroica.wording import percent, seconds

SCHEMA = "eroica.scaling/1"
SAME_WORK = 0.15
"""Own work of the usual rank may differ by so much between runs of one job that scales weakly; else it is told."""
WORDS = {
    Part.SYNCHRONISATION: "synchronisation: small delays, now here, now there, for which all wait",
    Part.CONTENTION: "contention: transfers that others' traffic, or our own, makes longer",
    Part.LOCALITY: "locality: ranks at a worse place in their host, always",
    Part.IMBALANCE: "imbalance: more work for some ranks",
    Part.STRAGGLER: "straggler: ranks that are always slow",
    Part.COMMUNICATION: "communication that nothing hides, in the best steps",
    Part.PIPELINE: "sends, receives and what cannot be joined",
    Part.ALIKE: "own work that all ranks have more of in some steps",
    Part.IDLE: "no event covers it",
    Part.UNEXPLAINED: "waiting that differences of work do not explain",
}


@dataclass(frozen=True, slots=True)
class Size:
    """A run with its name."""

    name: str
    account: Account
    relative: Share | None
    """Efficiency over that of the smallest run; None for that one itself."""


@dataclass(frozen=True, slots=True)
class Study:
    """Runs by rising number of ranks."""

    sizes: tuple[Size, ...]
    notes: tuple[str, ...]


def study(runs: Sequence[tuple[str, Account]]) -> Study:
    """Order runs by size, and compare each with the smallest."""
    ordered = sorted(runs, key=lambda run: (run[1].num_ranks, run[0]))
    notes = []
    first = ordered[0][1]
    if len({told.num_ranks for _, told in ordered}) == 1 and len(ordered) > 1:
        notes.append("all runs have the same number of ranks: they show scatter, not scaling")
    works = [told.ideal_s for _, told in ordered]
    if max(works) > (1 + SAME_WORK) * min(works):
        notes.append(
            f"a rank's own work is {seconds(min(works))} to {seconds(max(works))} per iteration: the runs divide the "
            "work otherwise (strong scaling), and efficiency is the share of the iteration that is work"
        )
    if len(ordered) > 1 and first.num_hosts < 2:
        notes.append(
            "the traces of the smallest run name no second host: steady contention between hosts cannot be told by it"
        )
    sizes = []
    for n, (name, told) in enumerate(ordered):
        whole = _with_steady(told, first) if n and first.num_hosts > 1 else told
        relative = None
        if n and first.efficiency > 0:
            ratio, here, there = whole.efficiency / first.efficiency, whole.iteration_s, first.iteration_s
            # The runs are independent of each other: what is not known of both adds up by its squares.
            lower = math.hypot(math.log(here.high / here.seconds), math.log(there.seconds / there.low))
            upper = math.hypot(math.log(here.seconds / here.low), math.log(there.high / there.seconds))
            relative = Share(ratio, ratio * math.exp(-lower), ratio * math.exp(upper))
        sizes.append(Size(name, whole, relative))
        notes += [f"{clean(name, 80)}: {note}" for note in told.notes]
    return Study(tuple(sizes), tuple(dict.fromkeys(notes)))


def _with_steady(told: Account, first: Account) -> Account:
    """Lay to contention what transfers in the best steps take beyond those of the smallest run, for their bytes."""
    sizes = (told.group_size, first.group_size)
    if min(sizes) < 2 or not all(math.isfinite(v) and v > 0 for v in (told.transfer_s, first.transfer_s)):
        return told
    grown = told.num_bytes / first.num_bytes if math.isfinite(told.num_bytes) and first.num_bytes > 0 else 1.0
    grown *= (1 - 1 / sizes[0]) / (1 - 1 / sizes[1])
    open_s = told.parts[Part.COMMUNICATION].seconds
    steady = min(max(told.transfer_s - first.transfer_s * grown, 0.0), max(open_s, 0.0))
    parts = dict(told.parts)
    parts[Part.CONTENTION] = _moved(parts[Part.CONTENTION], steady)
    parts[Part.COMMUNICATION] = _moved(parts[Part.COMMUNICATION], -steady)
    modes = told.modes
    if Part.CONTENTION not in modes and parts[Part.CONTENTION].seconds >= MODE_FLOOR * told.iteration_s.seconds:
        modes = (*modes, Part.CONTENTION)
    return replace(told, parts=parts, modes=tuple(sorted(modes, key=lambda p: -parts[p].seconds)))


def _moved(share: Share, by: float) -> Share:
    return Share(share.seconds + by, share.low + by, share.high + by)


def _verdict(told: Account) -> str:
    named = [m.value + (f" (rank {format_ranks(told.stragglers)})" if m is Part.STRAGGLER else "") for m in told.modes]
    return ", ".join(named) or "none of the modes"


def headline(told: Study) -> str:
    """One sentence."""
    last = told.sizes[-1]
    account = last.account
    ranks = f"{account.num_ranks} ranks"
    lost = 1 - account.efficiency
    text = f"{ranks} lose {percent(lost)} of the iteration"
    if last.relative is not None:
        text += f", {percent(last.relative.seconds)} of the efficiency of {told.sizes[0].account.num_ranks} is left"
    scale = [m for m in account.modes if m in OF_SCALE]
    if scale:
        return f"{text}; what grows with size: {', '.join(m.value for m in scale)}"
    if account.modes:
        return f"{text}; no mode of scaling, but {_verdict(account)}"
    return f"{text}; no mode stands out"


def render_text(told: Study) -> str:
    """A row for each size, then where the time of the largest goes."""
    lines = [headline(told), ""]
    lines.append(f"  {'ranks':>6} {'hosts':>6} {'iteration':>22} {'efficiency':>11}  lost to")
    for size in told.sizes:
        account = size.account
        it = account.iteration_s
        spread = f"{seconds(it.seconds)} ({_ms(it.low)}-{_ms(it.high)})"
        lines.append(
            f"  {account.num_ranks:>6} {account.num_hosts:>6} {spread:>22} {percent(account.efficiency):>11}  "
            f"{_verdict(account)}"
        )
    for size in told.sizes[-1:]:
        account = size.account
        lines += ["", f"  {clean(size.name, 100)}: one iteration, {seconds(account.iteration_s.seconds)}"]
        lines.append(f"  {seconds(account.ideal_s):>10} {'':>20}  the usual rank's own work")
        for part, share in account.parts.items():
            if abs(share.seconds) >= 0.0005 * account.iteration_s.seconds:
                interval = f"{_ms(share.low)} to {_ms(share.high)} ms"
                lines.append(f"  {seconds(share.seconds):>10} {interval:>20}  {WORDS[part]}")
    if told.notes:
        lines += ["", *(f"  {note}" for note in told.notes)]
    lines += ["", "  intervals: 95 %, by drawing blocks of steps again"]
    return "\n".join(lines) + "\n"


def _ms(value: float) -> str:
    return f"{value * 1e3:.3g}"


def to_json(told: Study) -> dict[str, object]:
    """The contract `eroica.scaling/1`: fields are only added."""

    def share(value: Share) -> dict[str, float | None]:
        return {
            "seconds": _number(value.seconds),
            "low": _number(value.low),
            "high": _number(value.high),
        }

    return {
        "schema": SCHEMA,
        "summary": headline(told),
        "runs": [
            {
                "name": size.name,
                "ranks": size.account.num_ranks,
                "hosts": size.account.num_hosts,
                "steps": size.account.num_steps,
                "iteration": share(size.account.iteration_s),
                "ideal_s": _number(size.account.ideal_s),
                "efficiency": _number(size.account.efficiency),
                "relative_efficiency": None
                if size.relative is None
                else {"value": _number(size.relative.seconds)}
                | {"low": _number(size.relative.low), "high": _number(size.relative.high)},
                "modes": [mode.value for mode in size.account.modes],
                "stragglers": format_ranks(size.account.stragglers),
                "parts": {part.value: share(value) for part, value in size.account.parts.items()},
            }
            for size in told.sizes
        ],
        "notes": list(told.notes),
    }


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def render_json(told: Study) -> str:
    """With a final line break."""
    return json.dumps(to_json(told), indent=2, ensure_ascii=True) + "\n"


# ---- HTML

_CLASSES = {
    "ideal": "own", Part.SYNCHRONISATION: "wait", Part.CONTENTION: "excess", Part.LOCALITY: "dot",
    Part.IMBALANCE: "idle", Part.STRAGGLER: "odd", Part.COMMUNICATION: "transfer",
}  # fmt: skip
"""Fill of each part in the bars; the rest shares one."""


def render_html(told: Study) -> str:
    """One page without script or network."""
    style = load("report.css.j2")
    digest = "sha256-" + base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    rows = [
        {
            "name": clean(size.name, 100),
            "ranks": f"{size.account.num_ranks:,}",
            "iteration": seconds(size.account.iteration_s.seconds),
            "interval": f"{_ms(size.account.iteration_s.low)} to {_ms(size.account.iteration_s.high)} ms",
            "efficiency": percent(size.account.efficiency),
            "verdict": _verdict(size.account),
        }
        for size in told.sizes
    ]
    last = told.sizes[-1].account
    parts = [
        (WORDS[part], seconds(share.seconds), f"{_ms(share.low)} to {_ms(share.high)} ms")
        for part, share in last.parts.items()
        if abs(share.seconds) >= 0.0005 * last.iteration_s.seconds
    ]
    return render(
        "scaling.html.j2",
        policy=f"default-src 'none'; style-src '{digest}'; base-uri 'none'; form-action 'none'",
        style=Markup(style),
        summary=headline(told),
        rows=rows,
        parts=[("the usual rank's own work", seconds(last.ideal_s), ""), *parts],
        ranks=f"{last.num_ranks:,}",
        curve=curve([(s.account.num_ranks, s.account.efficiency, _band(s.account)) for s in told.sizes]),
        bars=_bars(told),
        keys=[(css, str(part)) for part, css in _CLASSES.items()],
        notes=list(told.notes),
    )


def _band(account: Account) -> tuple[float, float]:
    return account.ideal_s / account.iteration_s.high, account.ideal_s / account.iteration_s.low


def curve(points: Sequence[tuple[int, float, tuple[float, float]]]) -> Markup:
    """Efficiency over the number of ranks, logarithmic, with intervals and the ideal as a dashed line."""
    width, height, x0, x1, y0, y1 = 640, 300, 56, 616, 16, 250
    low, high = math.log2(points[0][0]), math.log2(points[-1][0])
    span = max(high - low, 1e-9)

    def x(ranks: int) -> float:
        return (x0 + x1) / 2 if high == low else x0 + 24 + (math.log2(ranks) - low) / span * (x1 - x0 - 48)

    def y(value: float) -> float:
        return y1 - min(max(value, 0.0), 1.0) * (y1 - y0)

    items = []
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        css = "peers" if tick == 1.0 else "grid"
        items.append(
            Markup('<line class="{}" x1="{}" y1="{:.1f}" x2="{}" y2="{:.1f}"/>').format(css, x0, y(tick), x1, y(tick))
        )
        items.append(
            Markup('<text class="tick" x="{}" y="{:.1f}" text-anchor="end">{}</text>').format(
                x0 - 8, y(tick) + 4, percent(tick)
            )
        )
    path = "L".join(f"{x(ranks):.1f} {y(value):.1f}" for ranks, value, _ in points)
    items.append(Markup('<path class="peers" fill="none" d="M{}"/>').format(path))
    for ranks, value, (bottom, top) in points:
        items.append(
            Markup('<line class="peers" x1="{0:.1f}" y1="{1:.1f}" x2="{0:.1f}" y2="{2:.1f}"/>').format(
                x(ranks), y(bottom), y(top)
            )
        )
        items.append(
            Markup('<circle class="odd" cx="{:.1f}" cy="{:.1f}" r="5"><title>{} ranks: {}</title></circle>').format(
                x(ranks), y(value), ranks, percent(value)
            )
        )
        items.append(
            Markup('<text class="tick" x="{:.1f}" y="{}" text-anchor="middle">{:,}</text>').format(
                x(ranks), y1 + 18, ranks
            )
        )
    items.append(
        Markup('<text class="axis" x="{}" y="{}" text-anchor="middle">ranks</text>').format((x0 + x1) / 2, y1 + 40)
    )
    return svg("fit", width, height, "Efficiency over the number of ranks", items)


def _bars(told: Study) -> Markup:
    """Where an iteration goes at each size, relative to the longest."""
    width, x0, x1, step = 1080, 130, 980, 28
    longest = max(size.account.iteration_s.seconds for size in told.sizes)
    items = []
    for n, size in enumerate(told.sizes):
        account, at, top = size.account, float(x0), 6 + n * step
        items.append(
            Markup('<text class="rowname" x="{}" y="{}" text-anchor="end">{:,} ranks</text>').format(
                x0 - 10, top + 15, account.num_ranks
            )
        )
        shares: list[tuple[str, str, float]] = [("own", "own work of the usual rank", account.ideal_s)]
        shares += [(_CLASSES.get(p, "track"), p.value, v.seconds) for p, v in account.parts.items()]
        for css, name, value in shares:
            if value > 0:
                size_px = value / longest * (x1 - x0)
                items.append(
                    Markup(
                        '<rect class="{}" x="{:.1f}" y="{}" width="{:.1f}" height="20"><title>{} {}</title></rect>'
                    ).format(css, at, top, max(0.5, size_px), name, seconds(value))
                )
                at += size_px
        items.append(
            Markup('<text class="tick" x="{:.1f}" y="{}" text-anchor="start">{}</text>').format(
                at + 8, top + 15, seconds(account.iteration_s.seconds)
            )
        )
    height = 12 + len(told.sizes) * step
    return svg("fit wide", width, height, "Parts of an iteration by size", items)


def svg(css: str, width: int, height: int, title: str, items: Sequence[Markup]) -> Markup:
    """A picture with its title."""
    return Markup('<svg class="{0}" role="img" width="{1}" height="{2}" viewBox="0 0 {1} {2}">{3}{4}</svg>').format(
        css, width, height, Markup("<title>{}</title>").format(title), Markup("").join(items)
    )
