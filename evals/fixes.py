"""`python -m evals.fixes`: `eroica fix` on planted repositories, by codemods alone, judged by running them again.

    python -m evals.fixes [NAME...] [--results FILE]     # trains for real: some two minutes for each
    python -m evals.fixes --board FILE                   # the table of what is in the results
    python -m evals.fixes --by-hand                      # no training: does a codemod fit, given the right finding?

For each repository: train it under `eroica run` until there is a diagnosis; give that, and nothing else, to `eroica
fix` with the repository's tests, its training to measure without and with the patch, and a forge that takes drafts.
Solved is what was diagnosed, patched and tested, opened as a draft, and measured as faster, or, for a job that stood
still, as ending well. What eroica says of the patched run is kept beside it. A result is appended as it comes, so that
the campaign can be run in parts; of several results for a repository the newest counts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eroica.assist import describing, forge
from eroica.assist.fixing import Plan, PullRequest, fix
from eroica.assist.measuring import is_faster
from eroica.assist.repository import Repository, end_group, environment_of
from eroica.errors import DataError, EroicaError
from eroica.findings import Diagnosis, from_json
from evals.llm import tables
from evals.llm.forge import listening
from evals.llm.planted import Planted, planted

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "evals" / "llm" / "fixes.jsonl"
TIMES = 4
"""How much longer a training is diagnosed than it is measured: eroica looks at a window after warm-up."""
DIAGNOSE_S, LIMIT_S = 150.0, 90.0
MOST_SHOWN = 400
"""Characters of a cell of the table."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign, or show it."""
    parser = argparse.ArgumentParser(prog="python -m evals.fixes", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--board", type=Path, metavar="FILE")
    parser.add_argument("--by-hand", action="store_true")
    options = parser.parse_args(arguments)
    chosen = [one for one in planted() if not options.names or one.name in options.names]
    if options.board is not None:
        options.board.write_text(board(options.results) + "\n" + board_by_hand())
        return 0
    for one in chosen:
        if options.by_hand:
            row = by_hand(one)
        else:
            with tempfile.TemporaryDirectory(prefix="eroica-planted-") as folder:
                row = live(one, Path(folder))
            options.results.parent.mkdir(exist_ok=True)
            with open(options.results, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        sys.stdout.write(f"{one.name}: {'solved' if row['solved'] else 'not solved'}: {row['said']}\n")
        sys.stdout.flush()
    return 0


def by_hand(one: Planted) -> dict[str, Any]:
    """Whether a codemod fits, and the repository's tests pass, given a finding that names the place."""
    with tempfile.TemporaryDirectory(prefix="eroica-planted-") as folder:
        here = one.checkout(Path(folder))
        try:
            fixed = fix(Plan(diagnosis=one.diagnosis(), repository=Repository(here)), lambda text: None)
        except EroicaError as error:
            return {"name": one.name, "solved": False, "said": str(error)}
        return {"name": one.name, "solved": True, "said": fixed.change.title, "diff": fixed.diff}


def live(one: Planted, folder: Path) -> dict[str, Any]:
    """Diagnose, fix, measure."""
    begun = time.monotonic()
    row: dict[str, Any] = {"name": one.name, "about": one.about, "solved": False, "said": "", "diagnosed": []}
    here = one.checkout(folder)
    diagnoses = _diagnoses(one, here, folder / "out")
    row["diagnosed"] = [f"{told.kind}: {told.verdict.summary}"[:300] for told in diagnoses]
    for diagnosis in diagnoses:
        with listening() as at:
            environ = {"GITHUB_API_URL": at.url, "GH_TOKEN": "of-nobody"}
            repository = Repository(here)
            request = PullRequest(
                forge=forge.find(repository.remote_url("origin"), environ), remote="origin", base="main"
            )
            plan = Plan(
                diagnosis=diagnosis,
                repository=repository,
                test=[sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
                verify=[sys.executable, *one.training()],
                pull_request=request,
                limit_s=LIMIT_S,
            )
            try:
                fixed = fix(plan, lambda text: None)
            except EroicaError as error:
                row["said"] = "; ".join(filter(None, [row["said"], str(error)]))[:1500]
                continue
            told = json.loads(describing.as_json(fixed))
            row |= {key: told[key] for key in ("codemod", "title", "diff", "before", "after")}
            row["said"] = describing.measured(fixed)
            drafts = [body for path, _, body in at.asked if path.endswith("/pulls") and body.get("draft")]
            before, after = fixed.before, fixed.after
            assert before is not None and after is not None
            is_better = not after.is_broken if before.is_broken else is_faster(before, after) is True
            row["drafts"] = len(drafts)
            row["solved"] = bool(is_better and len(drafts) == 1 and not after.is_broken)
            break
    if not diagnoses:
        row["said"] = "eroica said nothing of it"
    row["took_s"] = round(time.monotonic() - begun, 1)
    text = re.sub(
        r"/[^\s\"]*/(?:eroica-(?:fix|planted)-\w+/(?:tree/)?|site-packages/)", "", json.dumps(row)
    )  # of this machine
    shown: dict[str, Any] = json.loads(text)
    return shown


def _diagnoses(one: Planted, here: Path, out: Path) -> list[Diagnosis]:
    """What `eroica run` says of the training, troubles first."""
    words = [sys.executable, "-m", "eroica", "run", "--out", str(out), "--job", one.name, "--"]
    words += [sys.executable, *one.training(TIMES)]
    environment = environment_of(here)
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], str(ROOT)])
    process = subprocess.Popen(
        words, cwd=here, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        until = time.monotonic() + DIAGNOSE_S
        while process.poll() is None and time.monotonic() < until:
            if one.is_hang and any(told.kind == "hang" for told in diagnoses_in(out)):
                break
            time.sleep(0.5)
    finally:
        end_group(process)
    return sorted(diagnoses_in(out), key=lambda told: (told.kind in ("healthy", "no_data", "recovered"), told.created))


def diagnoses_in(out: Path) -> list[Diagnosis]:
    """Those that a run has written so far; what is no diagnosis, or not yet whole, is passed over."""
    found = []
    for file in out.glob("diagnosis-*.json"):
        try:
            found.append(from_json(json.loads(file.read_text())))
        except (OSError, ValueError, DataError):
            continue
    return found


def board(results: Path) -> str:
    """FIXES.md: what was trained, diagnosed, patched and measured."""
    lines_of = results.read_text().splitlines() if results.exists() else []
    newest = {row["name"]: row for row in map(json.loads, lines_of)}
    rows = [newest[name] for name in sorted(newest)]
    lines = [
        "# `eroica fix` on planted repositories, by codemods alone",
        "",
        "Made by `python -m evals.fixes` and `python -m evals.fixes --board evals/llm/FIXES.md`. Each repository in",
        "`evals/llm/repos` is a small training of two ranks with one software fault. It is trained under `eroica run`;",
        "what that says goes to `eroica fix` with the repository's tests, a measured run without and with the patch,",
        "and a forge on this machine that takes drafts. Solved: tests passed, measured as faster beyond the noise (or",
        "ends, where it stood still), and one draft was opened.",
        "",
        "| repository | planted | diagnosed | codemod | measured | then diagnosed | drafts | solved |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = [
            row["name"], row["about"], (row["diagnosed"] or ["nothing"])[0], row.get("codemod", "none"), row["said"],
            ("; ".join(row["after"]["summaries"]) or "nothing") if row.get("after") else "",
            str(row.get("drafts", 0)), "yes" if row["solved"] else "no",
        ]  # fmt: skip
        lines.append(tables.row(cells, MOST_SHOWN))
    lines += ["", f"Solved: {sum(row['solved'] for row in rows)} of {len(planted())}; run: {len(rows)}."]
    return "\n".join(lines) + "\n"


def board_by_hand() -> str:
    """FIXES.md: whether a codemod fits, given a finding that was made by hand, without training."""
    lines = [
        "## Given the finding",
        "",
        "`python -m evals.fixes --by-hand`: no training; the finding was made by hand and names the place. A near miss",
        "must be left alone.",
        "",
        "| repository | what it has | patch, or why not |",
        "| --- | --- | --- |",
    ]
    fits = []
    for kind in ("repos", "near_misses"):
        for one in planted(kind):
            row = by_hand(one)
            fits.append((kind, row["solved"]))
            name = one.name if kind == "repos" else f"{one.name} (near miss)"
            lines.append(tables.row([name, one.about, row["said"]], MOST_SHOWN))
    patched = {kind: sum(is_fit for of, is_fit in fits if of == kind) for kind in ("repos", "near_misses")}
    lines += ["", f"A codemod fits {patched['repos']} of {len(planted())}, and {patched['near_misses']} near misses."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
