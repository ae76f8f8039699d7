"""The scoreboard: results of the catalogue (`evals.rows`) as a table for a terminal, and as SCOREBOARD.md.

A score is by entry of the list of reports: the mean over the entry's cases, each at its nominal effect and first turn.
Later turns say how stable that is, sweeps where detection begins; both are shown and neither is counted. Misses are
listed with the reasons that `misses.toml` gives, or as not explained. Used by `evals.__main__`.
"""

from __future__ import annotations

import statistics
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path

from evals import rows as files
from evals.catalogue import Case, CaseError
from evals.rows import Peer, Row, Said, Session

WANTED = 0.975
"""Share of the points of grades A and B: the hard cases that the paper's system got right."""
MISSES = Path(__file__).parent / "misses.toml"
SIZES = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Upper ends of the classes of effects, as a share of the step."""
WORDS = ("established", "supported", "hypothesis", "unknown")
LONG = 110
"""Longest text in a cell of the table of cases."""


# What counts.


def by_case(rows: Iterable[Row]) -> dict[str, Row]:
    """The run of each case that counts: the first turn at the nominal effect, else the first one that there is."""
    order = {part: number for number, part in enumerate(files.PARTS)}
    ran = [row for row in rows if not row.not_run]
    ran.sort(key=lambda row: (not row.is_nominal, order[row.part]))
    counted: dict[str, Row] = {}
    for row in ran:
        counted.setdefault(row.case, row)
    return dict(sorted(counted.items()))


def by_entry(rows: Iterable[Row], grades: str) -> dict[str, float]:
    """Points of each entry of these grades: the mean over its cases."""
    points: dict[str, list[float]] = {}
    for row in by_case(rows).values():
        if row.grade in grades:
            points.setdefault(row.entry, []).append(row.points)
    return {entry: statistics.fmean(of) for entry, of in sorted(points.items())}


def passed(rows: Sequence[Row]) -> bool:
    """No control blamed, and enough points on grades A and B."""
    graded = by_entry(rows, "AB")
    return not any(row.is_blamed_control for row in rows) and (
        not graded or statistics.fmean(graded.values()) >= WANTED
    )


# For a terminal.


def table(rows: Sequence[Row]) -> str:
    """One line per run, and the sum."""
    lines = [f"{row.case:>5} {row.grade} {row.suite:<9} {row.effect:>5.0%} {files.one_line(row)}" for row in rows]
    return "\n".join([*lines, _sum(rows)])


def _sum(rows: Sequence[Row]) -> str:
    graded, doubtful = by_entry(rows, "AB"), by_entry(rows, "C")
    controls = {row.case for row in rows if row.is_control and not row.not_run}
    blamed = sorted({row.case for row in rows if row.is_blamed_control})
    total = sum(graded.values())
    share = f" ({total / len(graded):.1%})" if graded else ""
    said = [f"{_number(total)} of {len(graded)} entries of grades A and B{share}"]
    if doubtful:
        said.append(f"{_number(sum(doubtful.values()))} of {len(doubtful)} of grade C")
    said.append(f"{len(blamed)} of {len(controls)} controls blamed{': ' + ', '.join(blamed) if blamed else ''}")
    return "; ".join(said)


def _number(points: float) -> str:
    return f"{points:.2f}".rstrip("0").rstrip(".")


# SCOREBOARD.md.


def of_files(paths: Sequence[Path], cases: Sequence[Case], misses: Path) -> str:
    """SCOREBOARD.md from files of results. What an earlier file holds of a case counts before a later one's. `misses`:
    why some of these cases are missed, if there is such a file."""
    held = [files.read(path) for path in paths]
    sessions = [session for one in held for session in one.sessions]
    peers = [peer for one in held for peer in one.peers]
    num_rows = [number for one in held for number in one.num_rows]
    found = [row for one in held for row in one.rows]
    return markdown(found, cases, sessions, read_misses(misses, cases), peers, num_rows)


def read_misses(file: Path, cases: Sequence[Case]) -> dict[str, str]:
    """Case -> why it is missed. Raises CaseError if the file does not say so."""
    if not file.exists():
        return {}
    try:
        listed = tomllib.loads(file.read_text(encoding="utf-8")).get("miss", [])
        told = {str(item["case"]): str(item["why"]) for item in listed}
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise CaseError(f"{file.name}: {type(error).__name__}: {error}; each [[miss]] has a case and a why") from None
    strange = sorted(told.keys() - {case.id for case in cases})
    if strange:
        raise CaseError(f"{file.name}: no case is called {', '.join(strange)}")
    return told


def markdown(
    rows: Sequence[Row],
    cases: Sequence[Case],
    sessions: Sequence[Session] = (),
    misses: Mapping[str, str] | None = None,
    peers: Sequence[Peer] = (),
    num_rows: Sequence[int] = (),
) -> str:
    """The whole document. `num_rows`: how many results each session has made, where that is known."""
    counted = by_case(rows)
    growing = {case.id for case in cases if case.recipe.is_growth}
    parts = (
        _head(rows, cases, counted),
        _how(sessions, num_rows, counted),
        _cases(counted, growing),
        _misses(rows, counted, misses or {}),
        _baselines(list(counted.values())),
        _peers(peers, counted),
        _sizes([row for row in rows if row.case not in growing]),
        _stability(rows),
        _confusion(list(counted.values())),
        _calibration(rows),
        _changed(cases),
    )
    return "# Scoreboard\n\n" + "\n".join("\n".join(part) + "\n" for part in parts if part)


_RULES = (
    "An entry's points are the mean over its cases, each at its nominal effect with a culprit drawn by chance; a case "
    "counts only if ranks, function and cause are right and nobody else was blamed. The bar is 97.5 % of the points of "
    'grades A and B and no control blamed. Grade C (nobody knows the true cause) is counted apart. An "unknown" that '
    "answers all else that is asked is half a point in grades B and C and nothing in grade A; one with what was ruled "
    "out is half a point in grade C."
)
_BY_RANKS = (
    "with a window of steps, judged by ranks alone: whoever names only culprits is right, and where no rank is to "
    "blame, whoever names nobody. eroica stands here by the same lenient rule. The rules get the window that eroica "
    "chose; hangs have no window, and these rules have no answer to them. Clocks of made-up hosts are up to seconds "
    "apart, more than a time server allows: that is hard on whoever compares time stamps of hosts."
)


def _cell(text: str) -> str:
    shown = " ".join(text.split()).replace("|", "\\|")
    return shown if len(shown) <= LONG else shown[: LONG - 1] + "…"


def _head(rows: Sequence[Row], cases: Sequence[Case], counted: Mapping[str, Row]) -> list[str]:
    lines = [f"**{_sum(list(counted.values()))}.**", ""]
    lines.append(
        f"{len({row.entry for row in counted.values()})} of the catalogue's {len({case.entry for case in cases})} "
        f"entries ({len(counted)} of {len(cases)} cases) stand behind this. {_RULES}"
    )
    lines += _asked_less(cases, counted)
    not_run: dict[str, list[str]] = {}
    for row in rows:
        if row.not_run and row.case not in counted and row.case not in not_run.get(row.not_run, []):
            not_run.setdefault(row.not_run, []).append(row.case)
    for why, of in not_run.items():
        lines.append(f"\n**Not run** and not counted, since {why}: {', '.join(sorted(of))}.")
    tried = counted.keys() | {case for of in not_run.values() for case in of}
    missing = [case.id for case in cases if case.id not in tried]
    if missing:
        lines.append(f"\n**No result yet**, not counted: {', '.join(missing)}.")
    broken = [row.case for row in counted.values() if row.problem]
    if broken:
        lines.append(f"\n**Without a valid run**, counted as missed: {', '.join(broken)}.")
    return lines


def _asked_less(cases: Sequence[Case], counted: Mapping[str, Row]) -> list[str]:
    """Where the answers are not as strict as the rules. A host or a link is as good as a function."""
    vague = [
        case.id
        for case in cases
        if any(
            answer.function is None and answer.said is None and not answer.place and answer.who not in ("hosts", "link")
            for answer in case.faults
        )
    ]
    open_ = [case for case in cases if any("unknown" in answer.causes for answer in case.faults)]
    so = [
        case.id
        for case in open_
        if case.id in counted and any(said.right and said.cause == "unknown" for said in counted[case.id].said)
    ]
    lines = [f"\nNeither a function nor words are asked for in {', '.join(vague)}."] if vague else []
    if open_:
        told = f"; it was said in {', '.join(so)}" if so else ""
        lines.append(f'\n"Unknown" is among the right causes in {", ".join(case.id for case in open_)}{told}.')
    fair = [f"{case.id} ({case.unknown_is_fair})" for case in cases if case.unknown_is_fair]
    if fair:
        lines.append(f"\nIt is worth a whole point in {', '.join(fair)}.")
    return lines


UNEVEN = 1.25
"""Cores that take so many times as long for the same work now and then have others working on them."""


def _how(sessions: Sequence[Session], num_rows: Sequence[int], counted: Mapping[str, Row]) -> list[str]:
    if not sessions:
        return []
    lines = ["## How it was run", ""]
    made = [*num_rows, *[None] * (len(sessions) - len(num_rows))]
    commits = {one.commit for one, number in zip(sessions, made, strict=True) if number != 0}
    if len(commits) > 1:
        lines += [
            "Not all of it is of one commit. *runs*: results below that the command made. A case that was run again, "
            "after its mend or for another reason, stands here with the later run alone, and what was right before "
            "was not tried again with the mends.",
            "",
        ]
    lines += ["| command | when | commit | runs | machine |", "|---|---|---|---:|---|"]
    for one, number in zip(sessions, made, strict=True):
        told = "; ".join(f"{name} {value}" for name, value in one.machine.items())
        runs = "-" if number is None else number
        lines.append(f"| `{one.command}` | {one.started} | {one.commit} | {runs} | {told.replace('|', '/')} |")
    spreads = [row.cores for row in counted.values() if row.cores is not None]
    if spreads:
        uneven = sum(spread >= UNEVEN for spread in spreads)
        lines += [
            "",
            "How even the machine was: fixed work took, in the slowest tenth of the moments of a run, "
            f"{statistics.median(spreads):.2f} times what it took in the quickest (median of {len(spreads)} runs; "
            f"at most {max(spreads):.2f}; {UNEVEN:g} and more in {uneven}).",
        ]
    return lines


def _result(row: Row) -> str:
    if row.problem:
        return "no result"
    if row.points == 1:
        return "silent" if row.is_control else "right"
    return "blamed" if row.false_blames else files.part_of(row) if row.points else "missed"


def _findings(row: Row) -> str:
    if row.problem:
        return row.problem
    told = [f"{said.cause} of {said.scope} {said.ranks}".strip() + (f", {said.function}" if said.function else "")
            for said in row.said]  # fmt: skip
    return "; ".join(dict.fromkeys(told)) or row.verdict or "nothing"


def _cases(counted: Mapping[str, Row], growing: Set[str]) -> list[str]:
    seconds = sum(row.seconds for row in counted.values())
    delays = [row.to_diagnosis_s for row in counted.values() if row.to_diagnosis_s is not None]
    lines = ["## Cases", ""]
    when = f"; from onset to the right answer {statistics.median(delays):.0f} s in the median" if delays else ""
    lines += [f"{len(counted)} runs in {seconds / 60:.0f} minutes{when}. *effect*: cost of the fault as a share of the "
              "step. *s*: seconds of the run. *told*: seconds from the onset to the right answer.", ""]  # fmt: skip
    lines += [
        "| case | what | grade | suite | effect | result | said | s | told |",
        "|---|---|---|---|---:|---|---|---:|---:|",
    ]
    for row in counted.values():
        effect = f"{row.effect:.0%}" if row.kind == "slow" else "-"
        if row.case in growing:
            effect = f"+{row.effect:.1%} a step"
        told = "-" if row.to_diagnosis_s is None else f"{row.to_diagnosis_s:.0f}"
        lines.append(
            f"| {row.case} | {_cell(row.title)} | {row.grade} | {row.suite} | {effect} | {_result(row)} "
            f"| {_cell(_findings(row))} | {row.seconds:.0f} | {told} |"
        )
    return lines


def _misses(rows: Sequence[Row], counted: Mapping[str, Row], misses: Mapping[str, str]) -> list[str]:
    missed: dict[str, list[Row]] = {}
    for row in rows:
        if row.points < 1 and not row.not_run and (row.is_nominal or row is counted.get(row.case)):
            missed.setdefault(row.case, []).append(row)
    lines = ["## Misses", ""]
    if not missed:
        return [*lines, "None at nominal effect."]
    lines += ["At nominal effect, repetitions included.", ""]
    for case, of in sorted(missed.items()):
        every = sum(row.case == case and row.is_nominal and not row.not_run for row in rows) or len(of)
        wrong = "; ".join(dict.fromkeys(_cell(files.one_line(row).partition(": ")[2] or _result(row)) for row in of))
        why = misses.get(case, "**not explained yet**")
        lines.append(f"- **{case}** {of[0].title} ({len(of)} of {every} runs): {wrong}. *Why*: {why}")
    return lines


def _baselines(counted: Sequence[Row]) -> list[str]:
    """By ranks alone, so that rules that tell no causes can be compared."""
    names = list(dict.fromkeys(name for row in counted for name in row.baselines))
    asked = [row for row in counted if any(said != "-" for said in row.baselines.values())]
    if not asked:
        return []
    lines = [
        "## The same windows by simpler rules",
        "",
        f"{len(asked)} cases {_BY_RANKS}",
        "",
        "| rule | somebody to blame: right | wrong | nobody named | nobody to blame: silent | wrong |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    said: dict[str, dict[str, str]] = {"**eroica**": {row.case: row.by_ranks for row in asked}}
    said |= {name: {row.case: row.baselines.get(name, "-") for row in asked} for name in names}
    somebody = {row.case for row in asked if row.anybody}
    for name, by in said.items():
        counts = Counter((case in somebody, word.partition(":")[0]) for case, word in by.items())
        named, others = (counts[True, word] for word in ("wrong", "nobody")), len(by) - len(somebody)
        cells = [f"{counts[True, 'right']} of {len(somebody)}", *map(str, named)]
        cells += [f"{counts[False, 'right']} of {others}", str(counts[False, "wrong"])]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    short = {name: name.partition(" (")[0] for name in names}
    lines += [
        "",
        "| case | eroica | " + " | ".join(short[name] for name in names) + " |",
        "|---|" + "---|" * (len(names) + 1),
    ]
    for row in asked:
        cells = [row.by_ranks, *(row.baselines.get(name, "-") for name in names)]
        lines.append(f"| {row.case} | " + " | ".join(_cell(cell) for cell in cells) + " |")
    return lines


def _peers(peers: Sequence[Peer], counted: Mapping[str, Row]) -> list[str]:
    """Other tools, run themselves."""
    if not peers:
        return []
    lines = ["## The peers themselves", "", "Installed as they are published and run on the same cases, other draws, "
             "by ranks alone: HTA on the traces of synthetic cases, asked for one potential straggler; TraceML on live "
             "ones, in the place of eroica.", ""]  # fmt: skip
    lines += [
        "| tool | cases | somebody to blame: right | wrong | nobody named | nobody to blame: silent | wrong | failed |"
    ]
    lines += ["|---|---:|---:|---:|---:|---:|---:|---:|"]
    for tool in dict.fromkeys(f"{one.peer} {one.version}".strip() for one in peers):
        of = [one for one in peers if f"{one.peer} {one.version}".strip() == tool]
        counts = Counter((one.anybody, one.word.partition(":")[0]) for one in of if not one.problem)
        cells = [counts[True, "right"], counts[True, "wrong"], counts[True, "nobody"], counts[False, "right"]]
        cells += [counts[False, "wrong"], sum(bool(one.problem) for one in of)]
        lines.append(f"| {tool} | {len(of)} | " + " | ".join(map(str, cells)) + " |")
    lines += ["", "| case | tool | by ranks | it said | eroica |", "|---|---|---|---|---|"]
    for one in sorted(peers, key=lambda one: (one.peer, one.case)):
        ours = counted[one.case].by_ranks if one.case in counted else "-"
        lines.append(
            f"| {one.case} | {one.peer} | {one.word} | {_cell(one.problem or one.said or 'nobody')} | {ours} |"
        )
    return lines


def _sizes(rows: Sequence[Row]) -> list[str]:
    """Where detection begins."""
    swept = [row for row in rows if row.kind == "slow" and not row.not_run and not row.problem]
    if len({row.effect for row in swept}) < 2:
        return []
    lines = ["## Against the size of the fault", ""]
    lines += ["All runs of a fault that slows, sweeps and repetitions too, but for what grows with each step.", ""]
    lines += ["| effect | runs | points | blamed innocents | missed |", "|---|---:|---:|---:|---|"]
    low = 0.0
    for high in (*SIZES, float("inf")):
        of = [row for row in swept if low < row.effect <= high]
        if of:
            name = f"to {high:.0%}" if high < float("inf") else f"over {low:.0%}"
            points = sum(row.points for row in of)
            blamed = sum(bool(row.false_blames) for row in of)
            missed = Counter(row.case for row in of if row.points < 1)
            told = ", ".join(case if n == 1 else f"{case} ({n})" for case, n in sorted(missed.items())) or "-"
            lines.append(f"| {name} | {len(of)} | {_number(points)} ({points / len(of):.0%}) | {blamed} | {told} |")
        low = high
    return lines


def _stability(rows: Sequence[Row]) -> list[str]:
    """How often a case comes out the same."""
    runs: dict[str, list[Row]] = {}
    for row in rows:
        if row.is_nominal and not row.not_run:
            runs.setdefault(row.case, []).append(row)
    often = {case: of for case, of in sorted(runs.items()) if len(of) > 1}
    if not often:
        return []
    always = sum(all(row.points == 1 for row in of) for of in often.values())
    never = sum(all(row.points < 1 for row in of) for of in often.values())
    lines = ["## Stability", "", f"Of {len(often)} cases that ran more than once at nominal effect, {always} were "
             f"right each time, {never} never. Seeds and culprits differ from run to run.", ""]  # fmt: skip
    lines += ["| case | suite | right | to the answer (s) |", "|---|---|---:|---|"]
    for case, of in often.items():
        delays = [row.to_diagnosis_s for row in of if row.to_diagnosis_s is not None]
        told = f"{min(delays):.0f} to {max(delays):.0f}" if delays else "-"
        lines.append(f"| {case} | {of[0].suite} | {sum(row.points == 1 for row in of)} of {len(of)} | {told} |")
    return lines


def _confusion(counted: Sequence[Row]) -> list[str]:
    """What was said for each cause."""
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    instead: dict[str, Counter[str]] = {}
    for row in counted:
        wrong = [said.cause for said in row.said if not said.right] or ["nothing"]
        if row.is_control:
            total["(nothing)"] += 1
            right["(nothing)"] += row.points == 1
            if row.points < 1:
                instead.setdefault("(nothing)", Counter()).update(set(wrong))
        found = row.found or (False,) * len(row.causes)
        for causes, hit in zip(row.causes, found, strict=False):
            total[causes] += 1
            right[causes] += hit
            if not hit:
                instead.setdefault(causes, Counter()).update(set(wrong))
    lines = ["## By cause", "", "*Instead*: what was said where the fault was not found.", ""]
    lines += ["| true cause | faults | found | instead |", "|---|---:|---:|---|"]
    for cause in sorted(total):
        said = ", ".join(f"{name} ({n})" for name, n in instead.get(cause, Counter()).most_common()) or "-"
        lines.append(f"| {cause.replace('/', ' or ')} | {total[cause]} | {right[cause]} | {said} |")
    return lines


def _calibration(rows: Sequence[Row]) -> list[str]:
    """Whether the words for confidence mean what they say."""
    told = [(said, _is_wrong(said, row)) for row in rows if not row.problem for said in row.said]
    if not told:
        return []
    lines = [
        "## How sure it said it was",
        "",
        "Findings of all runs. *wrong*: false blame, or what was said instead of a fault that was missed. *neither*: "
        "advice, or a second word on a culprit.",
        "",
    ]
    lines += [
        "| confidence | findings | right | neither | wrong | right of those that count |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for word in (*WORDS, *sorted({said.confidence for said, _ in told} - set(WORDS))):
        of = [(said, is_wrong) for said, is_wrong in told if said.confidence == word]
        if of:
            right, wrong = sum(said.right for said, _ in of), sum(is_wrong for _, is_wrong in of)
            share = f"{right / (right + wrong):.0%}" if right + wrong else "-"
            lines.append(f"| {word} | {len(of)} | {right} | {len(of) - right - wrong} | {wrong} | {share} |")
    return lines


def _is_wrong(said: Said, row: Row) -> bool:
    """It blames the innocent, or stands where a fault was missed: then it is no second word."""
    return said.blames or (not said.right and not all(row.found))


def _changed(cases: Sequence[Case]) -> list[str]:
    grown = [(case.id, why) for case in cases for why in case.changed]
    lines = ["## What was changed of answers and programs after a miss", ""]
    if not grown:
        return [*lines, "None: every answer stands as it was before the rules that must give it."]
    return lines + [f"- **{case}**: {why}" for case, why in grown]
