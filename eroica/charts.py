"""Pictures of a diagnosis' numbers as SVG that needs no script: heat maps, scatter, stacked bars, skyline.

Arrays in, `Markup` out. Colours are CSS classes of `prompts/report.css.j2`, so that light, dark and print are decided
there; heat maps are indexed PNGs of one pixel per cell (one palette for light, one for dark), which keeps a map of
thousands of cells at a few kilobytes and lets a browser without JavaScript show it. What hovering shows is returned
beside the picture.

Every picture is bounded: beyond `most` rows, ranks are folded by host (or into runs of hosts), never those that a
finding names, and a folded cell shows its member farthest from the role's median, so that folding hides no outlier.
What was not measured is drawn as a gap, never as 0. Nothing is judged here; what is outlined is what findings name.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from eroica.findings import Detail
from eroica.untrusted import clean
from eroica.wording import RankRow, fold, format_spans, percent, role_median, seconds

Ramp = tuple[tuple[int, int, int], ...]

# Lightness rises or falls steadily along each ramp and blue against orange survives every kind of colour blindness.
_SHARE_LIGHT: Ramp = ((238, 242, 248), (146, 188, 224), (44, 111, 178), (8, 40, 92))
_SHARE_DARK: Ramp = ((30, 37, 51), (41, 86, 138), (86, 156, 220), (219, 238, 255))
_DIFF_LIGHT: Ramp = ((22, 82, 150), (120, 170, 216), (243, 244, 247), (244, 156, 92), (190, 62, 4))
_DIFF_DARK: Ramp = ((150, 205, 255), (64, 128, 196), (30, 37, 51), (205, 104, 40), (255, 176, 110))


_HATCH = Markup(
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="hatch0" width="6" height="6"/><rect class="hatch1" width="2" height="6"/></pattern></defs>'
)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a picture: a rank, or ranks folded together."""

    label: str
    members: npt.NDArray[np.intp]
    """Positions in the Detail."""
    marked: bool


@dataclass(frozen=True, slots=True)
class Picture:
    """An SVG and, for heat maps, the numbers that hovering shows (JSON types)."""

    svg: Markup
    data: dict[str, Any] | None = None


def pick_rows(detail: Detail, marked: npt.NDArray[np.bool_], most: int) -> list[Row]:
    """At most about `most` rows: up to 40 ranks in order; else marked ones first, the others folded if need be."""
    num = len(detail.ranks)
    order = np.argsort(detail.ranks, kind="stable")
    if num <= 40:
        return [_single(detail, i, marked) for i in order]
    chosen = order[marked[order]][: max(1, most // 8)]
    rest = order[~np.isin(order, chosen)]
    rows = [_single(detail, i, marked) for i in chosen]
    if num <= most:
        return rows + [_single(detail, i, marked) for i in rest]
    slots = most - len(rows)
    codes: dict[str, int] = {}
    host = np.array([codes.setdefault(detail.hosts[i], len(codes)) for i in rest])
    if len(codes) >= 2:
        group = host if len(codes) <= slots else host * slots // len(codes)
    else:
        group = np.arange(len(rest)) * slots // len(rest)
    for members in _groups(rest, group):
        rows.append(Row(_fold_label(detail, members, len(codes) >= 2), members, bool(marked[members].any())))
    return rows


def pick_functions(detail: Detail, named: Sequence[int], most: int) -> npt.NDArray[np.intp]:
    """Columns to show: those that findings name and the largest ones, in the Detail's order."""
    if not detail.beta.size:
        return np.zeros(0, dtype=np.intp)
    top = np.where(np.isnan(detail.beta).all(axis=0), 0.0, np.nanmax(np.nan_to_num(detail.beta), axis=0))
    order = [*named, *(int(i) for i in np.argsort(-top, kind="stable") if top[i] > 0)]
    return np.sort(np.array(list(dict.fromkeys(order))[:most], dtype=np.intp))


def function_map(
    detail: Detail,
    rows: list[Row],
    columns: npt.NDArray[np.intp],
    cells: set[tuple[int, int]],
    *,
    difference: bool,
) -> Picture:
    """Ranks by functions: beta, or beta less the median of the rank's role.

    `cells` are outlined: (position of the rank, column of the Detail).
    """
    values = detail.beta[:, columns].astype(np.float64)
    # Below the cut-off is near 0; leaving those ranks out would make the one above it its own peer.
    usual = role_median(np.nan_to_num(values), detail.roles)
    shown, sources = _fold(rows, values, usual)
    reference = usual[sources, np.arange(len(columns))]
    outlined = {
        (r, c)
        for r, row in enumerate(rows)
        for c, column in enumerate(columns.tolist())
        if row.marked and any((int(i), column) in cells for i in row.members)
    }
    labels = _function_labels(detail, columns)
    delta = shown - reference
    if difference:
        limit = max(0.05, float(np.nanmax(np.abs(delta), initial=0.0)))
        level = np.sign(delta) * (np.abs(delta) / limit) ** 0.7 / 2 + 0.5
        ramps = (_DIFF_LIGHT, _DIFF_DARK)
        ends = (f"{percent(limit)} less than peers", f"{percent(limit)} more")
    else:
        limit = max(0.02, float(np.nanmax(shown, initial=0.0)))
        level = np.sqrt(np.clip(shown, 0, None) / limit)
        ramps = (_SHARE_LIGHT, _SHARE_DARK)
        ends = ("0 %", f"{percent(limit)} of its time")
    inside = [[_cell(value, difference) for value in line] for line in (delta if difference else shown).tolist()]
    what = "difference to peers" if difference else "share of time"
    title = f"Heat map, {len(rows)} rows of ranks by {len(columns)} functions: {what}"
    svg, data = _heat(title, rows, labels, level, ramps, inside, outlined, ends, slanted=True)
    mu = detail.mu[:, columns][sources, np.arange(len(columns))]
    places = [clean(detail.functions[i].location or "", 80) for i in columns]
    data |= {"kind": "share", "values": _milli(shown), "peers": _milli(reference), "mu": _milli(mu), "places": places}
    return Picture(svg, data)


def step_map(detail: Detail, rows: list[Row], most: int = 160) -> Picture:
    """Ranks by steps: own time. Beyond `most` steps, neighbours are folded into the largest of them."""
    values = detail.own_by_step_s.astype(np.float64)
    num = values.shape[1]
    first = detail.first_step or 0
    if num > most:
        edges = np.arange(most) * num // most
        values = np.fmax.reduceat(values, edges, axis=1)
        labels = [str(first + int(edge)) for edge in edges]
    else:
        labels = [str(first + i) for i in range(num)]
    usual = role_median(values, detail.roles)
    shown, sources = _fold(rows, values, usual)
    reference = usual[sources, np.arange(len(labels))]
    low = float(np.nanmin(shown, initial=np.inf))
    middle = float(np.nanmedian(shown)) if np.isfinite(shown).any() else 0.0
    low = low if math.isfinite(low) else 0.0
    # Noise of a few percent shall look like noise: the scale spans at least a quarter of the usual own time.
    high = max(float(np.nanmax(shown, initial=0.0)), low + 0.25 * middle, low + 1e-9)
    svg, data = _heat(
        f"Heat map, {len(rows)} rows of ranks by {len(labels)} steps: own time",
        rows, labels, (shown - low) / (high - low), (_SHARE_LIGHT, _SHARE_DARK), None, set(),
        (seconds(low), f"{seconds(high)} own time"), slanted=False,
    )  # fmt: skip
    data |= {"kind": "step", "values": _milli(shown * 1e3), "peers": _milli(reference * 1e3)}
    return Picture(svg, data)


def scatter(detail: Detail, column: int, marked: npt.NDArray[np.bool_]) -> Picture:
    """One function, a dot per rank: beta against mu; where no rank measured mu, beta over the ranks, and it says so."""
    beta = detail.beta[:, column].astype(np.float64)
    mu = detail.mu[:, column].astype(np.float64)
    both = ~np.isnan(beta) & ~np.isnan(mu)
    with_mu = bool(both.any())
    used = both if with_mu else ~np.isnan(beta)
    width, height, x0, y0, x1, y1 = 540, 330, 70, 18, 520, 276
    parts = []
    if with_mu:
        x_high, y_high = _nice(float(beta[used].max())), 1.0
        if float(mu[used].max()) > 1:
            y_high = _nice(float(mu[used].max()))
        xs, ys = beta / x_high, mu / y_high
        x_name, y_name = "beta, share of the critical path", "mu, utilisation"
        x_ticks = [(t, percent(t * x_high)) for t in (0, 0.25, 0.5, 0.75, 1)]
    else:
        x_high, y_high = 1.0, _nice(float(beta[used].max())) if used.any() else 1.0
        order = np.argsort(np.argsort(detail.ranks, kind="stable"), kind="stable")
        xs, ys = (order + 0.5) / max(1, len(order)), beta / y_high
        x_name, y_name = "ranks in order (mu: not measured)", "beta, share of the critical path"
        x_ticks = []
    for t, text in x_ticks:
        x = x0 + t * (x1 - x0)
        parts.append(_line("grid", x, y0, x, y1))
        parts.append(_text("tick", x, y1 + 16, text, "middle"))
    for t in (0, 0.25, 0.5, 0.75, 1):
        y = y1 - t * (y1 - y0)
        parts.append(_line("grid", x0, y, x1, y))
        parts.append(_text("tick", x0 - 8, y + 4, percent(t * y_high), "end"))
    if not with_mu and (used & ~marked).any():
        y = y1 - float(np.median(beta[used & ~marked])) / y_high * (y1 - y0)
        parts.append(_line("peers", x0, y, x1, y))
        parts.append(_text("tick", x1, y - 5, "median of the others", "end"))
    peers = used & ~marked
    # One dot per occupied place of a 120 x 60 grid: 100,000 ranks draw as fast as 100.
    cell = np.round(xs[peers] * 120) * 1000 + np.round(ys[peers] * 60)
    _, first, counts = np.unique(cell, return_index=True, return_counts=True)
    index = np.flatnonzero(peers)
    for i, count in zip(first, counts, strict=True):
        k = index[int(i)]
        radius = 4 + min(5.0, math.log10(int(count)) * 2)
        name = f"rank {int(detail.ranks[k])}" if count == 1 else f"{int(count)} ranks"
        parts.append(
            Markup('<circle class="dot" cx="{:.1f}" cy="{:.1f}" r="{:.1f}"><title>{}</title></circle>').format(
                x0 + float(xs[k]) * (x1 - x0),
                y1 - float(ys[k]) * (y1 - y0),
                radius,
                f"{name}: {_numbers(beta[k], mu[k])}",
            )
        )
    odd = np.flatnonzero(used & marked)
    for n, k in enumerate(odd[:200]):
        x, y = x0 + float(xs[k]) * (x1 - x0), y1 - float(ys[k]) * (y1 - y0)
        name = f"rank {int(detail.ranks[k])}"
        parts.append(
            Markup('<path class="odd" d="M{:.1f} {:.1f}l8 8l-8 8l-8 -8z"><title>{}</title></path>').format(
                x, y - 8, f"{name}: {_numbers(beta[k], mu[k])}"
            )
        )
        if n < 3:
            left = x > x1 - 90
            parts.append(_text("oddname", x - 13 if left else x + 13, y + 4, name, "end" if left else "start"))
    parts.append(_text("axis", (x0 + x1) / 2, y1 + 38, x_name, "middle"))
    upright = Markup('<text class="axis" transform="translate(14 {:.0f}) rotate(-90)" text-anchor="middle">{}</text>')
    parts.append(upright.format((y0 + y1) / 2, y_name))
    missing = int((~used).sum())
    if missing and with_mu:
        note = f"{missing:,} of {len(beta):,} ranks not drawn: beta or mu not measured"
        parts.append(_text("tick", x0, height - 2, note, "start"))
    elif missing:
        # On the axis, but hollow: less than what the rank reports, and how much less is not known.
        for x in np.unique(np.round(xs[~used], 2)):
            parts.append(Markup('<circle class="hollow" cx="{:.1f}" cy="{}" r="4"/>').format(x0 + x * (x1 - x0), y1))
        note = f"hollow: {missing:,} of {len(beta):,} ranks are below their cut-off"
        parts.append(_text("tick", x0, height - 2, note, "start"))
    title = f"Scatter of {clean(detail.functions[column].name, 60)}: {y_name} against {x_name}; {len(odd)} ranks marked"
    return Picture(_svg(width, height, title, parts, "fit"))


def time_bars(rows: list[RankRow], usual_own_s: Sequence[float]) -> Picture:
    """Where each row's iteration goes; in rows that findings name, own time above the role's median is set apart."""
    width, x0, x1, step = 1080, 210, 1000, 26
    longest = max((_total(row) for row in rows), default=0.0) or 1.0
    parts = []
    for n, row in enumerate(rows):
        y = 6 + n * step
        label = ("ranks " if row.num_ranks > 1 else "rank ") + row.label
        host = f" · {row.hosts}" if row.hosts and row.num_ranks == 1 else ""
        name = fold(label, 26) + clean(host, 20)
        parts.append(_text("rowname marked" if row.marked else "rowname", x0 - 10, y + 14, name, "end"))
        usual = usual_own_s[n]
        excess = max(0.0, row.own_s - usual) if row.marked and math.isfinite(usual - row.own_s) else 0.0
        x = float(x0)
        for css, part, value in (
            ("own", "own", row.own_s - excess),
            ("excess", "own, above the median of its role", excess),
            ("transfer", "transfer", row.transfer_s),
            ("wait", "waiting", row.wait_s),
            ("idle", "idle", row.idle_s),
        ):
            if math.isfinite(value) and value > 0:
                size = value / longest * (x1 - x0)
                parts.append(_rect(css, x, y, max(0.5, size), 18, f"{label}: {part} {seconds(value)}"))
                x += size
        parts.append(_text("tick", x + 8, y + 14, seconds(_total(row)), "start"))
    title = f"Stacked bars of own, transfer, waiting and idle time of {len(rows)} rows of ranks"
    return Picture(_svg(width, 12 + len(rows) * step, title, parts, "fit wide"))


def skyline(detail: Detail, marked: npt.NDArray[np.bool_], most: int = 520) -> Picture:
    """Own, transfer and waiting time of every rank in order, as stacked areas: how large jobs look at a glance.

    Beyond `most` ranks, each step of the outline shows the rank of its run with the largest own time.
    """
    width, height, x0, x1, y0, y1 = 1080, 190, 58, 1060, 12, 156
    order = np.argsort(detail.ranks, kind="stable")
    num = len(order)
    bins = min(num, most)
    own = np.nan_to_num(detail.own_s)
    runs = np.split(order, np.arange(1, bins) * num // bins)
    chosen = np.array([run[np.lexsort((-own[run], ~marked[run]))[0]] for run in runs])
    others = (("transfer", detail.transfer_s), ("wait", detail.wait_s), ("idle", detail.idle_s))
    layers = [("own", own), *((css, np.nan_to_num(values)) for css, values in others)]
    high = _nice(float(np.sum([values[chosen] for _, values in layers], axis=0).max()))
    edges = x0 + np.arange(bins + 1) * (x1 - x0) / bins
    base = np.zeros(bins)
    parts = []
    for t in (0, 0.5, 1):
        y = y1 - t * (y1 - y0)
        parts.append(_line("grid", x0, y, x1, y))
        parts.append(_text("tick", x0 - 8, y + 4, seconds(t * high) if t else "0", "end"))
    for css, values in layers:
        top = base + values[chosen]
        outline = _area(edges, y1 - top / high * (y1 - y0), y1 - base / high * (y1 - y0))
        parts.append(Markup('<path class="{}" d="{}"/>').format(css, outline))
        base = top
    for n in np.flatnonzero(marked[chosen])[:200]:
        x, size = edges[n], max(2.0, edges[n + 1] - edges[n])
        tall = own[chosen[n]] / high * (y1 - y0)
        rank = int(detail.ranks[chosen[n]])
        parts.append(_rect("excess", x, y1 - tall, size, tall, f"rank {rank}: own {seconds(float(own[chosen[n]]))}"))
        parts.append(Markup('<path class="excess" d="M{:.1f} {:.0f}l5 9h-10z"/>').format(x + size / 2, y1 + 3))
    for t in (0, 0.25, 0.5, 0.75, 1):
        k = min(num - 1, int(t * num))
        anchor = "start" if t == 0 else "end" if t == 1 else "middle"
        parts.append(_text("tick", x0 + t * (x1 - x0), y1 + 27, f"rank {int(detail.ranks[order[k]]):,}", anchor))
    title = f"Own, transfer and waiting time of {num} ranks in order"
    title += ", the largest own time of each run of ranks" if bins < num else ""
    return Picture(_svg(width, height, title, parts, "fit wide"))


# ---- parts


def _single(detail: Detail, index: int, marked: npt.NDArray[np.bool_]) -> Row:
    host = clean(detail.hosts[index], 40)
    label = f"rank {int(detail.ranks[index])}" + (f" · {host}" if host else "")
    return Row(label, np.array([index]), bool(marked[index]))


def _function_labels(detail: Detail, columns: npt.NDArray[np.intp]) -> list[str]:
    """Names of functions, with their lines where several have one name."""
    names = [detail.functions[i].name for i in columns]
    labels = []
    for i, name in zip(columns, names, strict=True):
        place = detail.functions[i].location or detail.functions[i].user_location
        shown = f"{clean(name, 14)} {clean(place, 30)}" if place and names.count(name) > 1 else clean(name, 60)
        labels.append(shown)
    return labels


def _groups(items: npt.NDArray[np.intp], group: npt.NDArray[np.intp]) -> list[npt.NDArray[np.intp]]:
    order = np.argsort(group, kind="stable")
    return np.split(items[order], np.flatnonzero(np.diff(group[order])) + 1)


def _fold_label(detail: Detail, members: npt.NDArray[np.intp], by_host: bool) -> str:
    if not by_host:
        return "ranks " + fold(format_spans(detail.ranks[members]), 30)
    first, last = clean(detail.hosts[members[0]], 30), clean(detail.hosts[members[-1]], 30)
    return (first if first == last else f"{first} … {last}") + f", {len(members):,} ranks"


def _fold(
    rows: list[Row], values: npt.NDArray[np.float64], usual: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.intp]]:
    """(R, C) values of the member farthest from its role's median, and which member that is."""
    sources = np.zeros((len(rows), values.shape[1]), dtype=np.intp)
    for r, row in enumerate(rows):
        if len(row.members) == 1:
            sources[r] = row.members[0]
        elif values.shape[1]:
            away = np.nan_to_num(np.abs(values[row.members] - usual[row.members]), nan=-1.0)
            sources[r] = row.members[away.argmax(axis=0)]
    return values[sources, np.arange(values.shape[1])], sources


def _heat(
    title: str,
    rows: list[Row],
    columns: list[str],
    level: npt.NDArray[np.float64],
    ramps: tuple[Ramp, Ramp],
    inside: list[list[str]] | None,
    outlined: set[tuple[int, int]],
    ends: tuple[str, str],
    *,
    slanted: bool,
) -> tuple[Markup, dict[str, Any]]:
    """`level` (R, C): 0..1 along the ramps, NaN is a gap. Returns the SVG and the geometry for hovering."""
    num_rows, num_columns = level.shape
    x0, y0 = 178, 150 if slanted else 30
    cell = min(58.0 if slanted else 40.0, 820 / max(1, num_columns))
    thin = 22.0 if num_rows <= 24 else 16.0 if num_rows <= 40 else max(2.5, 460 / num_rows)
    heights = [max(16.0, thin) if row.marked else thin for row in rows]
    tops = y0 + np.concatenate([[0.0], np.cumsum(heights)])
    # An image stretches all of its rows alike, so that each run of rows of one height is an image.
    breaks = [r for r in range(1, num_rows) if heights[r] != heights[r - 1]]
    blocks = list(zip([0, *breaks], [*breaks, num_rows], strict=True))
    width = x0 + cell * num_columns + (128 if slanted else 24)
    height = float(tops[-1]) + 40
    index = np.where(np.isnan(level), 0, 1 + np.clip(np.nan_to_num(level), 0, 1) * 254).astype(np.uint8)
    parts = [_HATCH, _rect("gap", x0, y0, cell * num_columns, float(tops[-1]) - y0)]
    for first, last in blocks:
        top, bottom = float(tops[first]), float(tops[last])
        parts.append(_images(index[first:last], ramps, x0, top, cell * num_columns, bottom - top))
    labelled = -100.0
    for r, row in enumerate(rows):
        middle = (float(tops[r]) + float(tops[r + 1])) / 2
        if row.marked or middle - labelled >= 14:
            parts.append(
                _text("rowname marked" if row.marked else "rowname", x0 - 8, middle + 4, clean(row.label, 27), "end")
            )
            labelled = middle
    every = max(1, math.ceil(34 / cell)) if not slanted else 1
    for c, column in enumerate(columns):
        x = x0 + cell * (c + 0.5)
        if slanted:
            named = any((r, c) in outlined for r in range(num_rows))
            parts.append(
                Markup(
                    '<text class="{}" transform="translate({:.1f} {}) rotate(-40)">{}<title>{}</title></text>'
                ).format("colname marked" if named else "colname", x, y0 - 8, clean(column, 26), column)
            )
        elif c % every == 0:
            parts.append(_text("tick", x, y0 - 8, column, "middle"))
    if inside is not None and cell >= 34 and num_rows <= 40:
        middle = len(ramps[0]) % 2 == 1
        for (r, c), value in np.ndenumerate(level):
            # Where the ramp is near its far end, ink would not stand out: 0.52 of the one, 0.72 of a half of the other.
            far = abs(value - 0.5) > 0.36 if middle else value > 0.52
            y = (float(tops[r]) + float(tops[r + 1])) / 2 + 4
            parts.append(_text("cell strong" if far else "cell", x0 + cell * (c + 0.5), y, inside[r][c], "middle"))
    for r, c in sorted(outlined):
        parts.append(_rect("outline", x0 + cell * c, float(tops[r]), cell, heights[r]))
    key = np.linspace(1, 255, 128).astype(np.uint8)[None, :]
    parts.append(_images(key, ramps, x0, height - 26, 160, 10))
    parts.append(_text("tick", x0 - 8, height - 17, ends[0], "end"))
    parts.append(_text("tick", x0 + 168, height - 17, ends[1], "start"))
    data = {"x0": x0, "cell": round(cell, 3), "tops": tops.round(1).tolist()}
    data |= {"rows": [row.label for row in rows], "columns": columns}
    return _svg(math.ceil(width), math.ceil(height), title, parts, "heat"), data


def _images(
    index: npt.NDArray[np.uint8], ramps: tuple[Ramp, Ramp], x: float, y: float, width: float, height: float
) -> Markup:
    """The same cells in both palettes; the style sheet shows one."""
    image = Markup(
        '<image class="cells {}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" '
        'preserveAspectRatio="none" href="{}"/>'
    )
    sides = zip(("light", "dark"), ramps, strict=True)
    return Markup("").join(image.format(css, x, y, width, height, _png(index, ramp)) for css, ramp in sides)


def _png(index: npt.NDArray[np.uint8], ramp: Ramp) -> str:
    """An indexed image as a data URI: 0 is transparent, 1 to 255 run along the ramp."""
    stops = np.linspace(1, 255, len(ramp))
    channels = [np.interp(np.arange(256), stops, [stop[c] for stop in ramp]) for c in range(3)]
    palette = np.stack(channels, axis=1).round().astype(np.uint8).tobytes()
    lines = np.concatenate([np.zeros((index.shape[0], 1), np.uint8), index], axis=1)  # filter type 0 before each line

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", index.shape[1], index.shape[0], 8, 3, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"PLTE", palette) + chunk(b"tRNS", b"\0")
    png += chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _svg(width: float, height: float, title: str, parts: Sequence[Markup], css: str) -> Markup:
    return Markup(
        '<svg class="{}" role="img" width="{}" height="{}" viewBox="0 0 {} {}"><title>{}</title>{}</svg>'
    ).format(css, width, height, width, height, title, Markup("").join(parts))


def _text(css: str, x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(css, x, y, anchor, text)


def _line(css: str, x1: float, y1: float, x2: float, y2: float) -> Markup:
    return Markup('<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(css, x1, y1, x2, y2)


def _rect(css: str, x: float, y: float, width: float, height: float, title: str = "") -> Markup:
    inner = Markup("<title>{}</title>").format(title) if title else ""
    return Markup('<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}">{}</rect>').format(
        css, x, y, width, height, inner
    )


def _numbers(beta: float, mu: float) -> str:
    return f"beta {percent(float(beta))}, mu {percent(float(mu))}"


def _cell(value: float, signed: bool) -> str:
    """Percent as it stands in a cell; nothing where nothing was measured, or where a difference rounds to 0."""
    if math.isnan(value) or (signed and abs(value) < 0.0005):
        return ""
    return f"{value * 100:+.1f}" if signed else f"{value * 100:.1f}"


def _area(edges: npt.NDArray[np.float64], top: npt.NDArray[np.float64], bottom: npt.NDArray[np.float64]) -> str:
    """A path with steps: forward along `top`, back along `bottom`."""
    forth = [f"{edges[i]:.1f} {top[i]:.1f}L{edges[i + 1]:.1f} {top[i]:.1f}" for i in range(len(top))]
    back = [f"{edges[i + 1]:.1f} {bottom[i]:.1f}L{edges[i]:.1f} {bottom[i]:.1f}" for i in reversed(range(len(bottom)))]
    return "M" + "L".join(forth + back) + "Z"


def _total(row: RankRow) -> float:
    return sum(value for value in (row.own_s, row.wait_s, row.transfer_s, row.idle_s) if math.isfinite(value))


def _milli(values: npt.NDArray[Any]) -> list[list[int | None]]:
    """Thousandths as integers, None for NaN: a third of the bytes of floats."""
    return [[None if math.isnan(v) else round(v * 1000) for v in line] for line in values.tolist()]


def _nice(value: float) -> float:
    """The next round number above: the end of an axis."""
    if value <= 0 or not math.isfinite(value):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next((factor * power for factor in (1, 2, 4, 6, 8) if factor * power >= value * 1.02), 10 * power)
