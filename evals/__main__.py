"""python -m evals run: the fault catalogue through the product, case by case; the scoreboard.

    python -m evals run                              every case once, at its nominal effect
    python -m evals run --suite synthetic            live, netns (root), synthetic
    python -m evals run --case D01 --repeat 5        a case, or all cases of an entry
    python -m evals run --effects all --shapes all   the sweep
    python -m evals run --results FILE --resume      go on where an earlier run stopped
    python -m evals board FILE... --write            evals/SCOREBOARD.md from results

Seeds are drawn anew in each run unless --seed is given. Exit status 1 if a control was blamed or less than 97.5 % of
the points of grades A and B were made.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from evals import board, catalogue, suites
from evals.catalogue import Case, CaseError
from evals.made import Draw

RESULTS = Path(__file__).parent / ".results.jsonl"


def plan(
    cases: Sequence[Case], repeat: int, effects: str, shapes: str, draw: random.Random
) -> Iterator[tuple[Case, Draw, int]]:
    """All runs: (case, what is drawn, number of the repetition)."""
    for case in cases:
        recipe = case.recipe
        sizes = recipe.effects if effects == "all" and not case.is_control else (recipe.nominal,)
        for effect in sizes:
            for turn in range(repeat):
                wanted = recipe.shapes if shapes == "all" else (draw.choice(recipe.shapes),)
                for shape in wanted:
                    yield case, Draw(seed=draw.randrange(1_000_000), effect=effect, shape=shape), turn


def _run(options: argparse.Namespace) -> int:
    wanted = [
        case
        for case in catalogue.load()
        if options.suite in ("all", case.suite)
        and (not options.case or case.id in options.case or case.entry in options.case)
    ]
    if not wanted:
        raise CaseError(f"no case is called {', '.join(options.case or [options.suite])}; see evals/cases")
    draw = random.Random(options.seed)
    todo = list(plan(wanted, options.repeat, options.effects, options.shapes, draw))
    done = board.read(options.results) if options.resume and options.results.exists() else []
    if not options.resume:
        options.results.unlink(missing_ok=True)
    for number, (case, drawn, turn) in enumerate(todo):
        key = board.key(case.id, drawn.effect, turn, drawn.shape if options.shapes == "all" else None)
        if any(row.key == key for row in done):
            continue
        print(f"[{number + 1}/{len(todo)}] {case.id} {case.slug} ... ", end="", file=sys.stderr, flush=True)
        keep = options.keep / f"{case.id}-{number}" if options.keep else None
        row = board.row(suites.run(case, drawn, keep=keep), key)
        board.append(options.results, row)
        done.append(row)
        print(board.one_line(row), file=sys.stderr, flush=True)
    rows = [row for row in done if any(row.case == case.id for case in wanted)]
    print(board.table(rows))
    return 0 if board.passed(rows) else 1


def _board(options: argparse.Namespace) -> int:
    rows = [row for file in options.files or [RESULTS] for row in board.read(file)]
    text = board.markdown(rows, catalogue.load())
    if options.write:
        (Path(__file__).parent / "SCOREBOARD.md").write_text(text)
    else:
        print(text, end="")
    return 0 if board.passed(rows) else 1


def main(given: Sequence[str] | None = None) -> int:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(
        prog="python -m evals", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True)
    run = verbs.add_parser("run", help="run cases")
    run.add_argument("--suite", choices=(*catalogue.SUITES, "all"), default="all")
    run.add_argument("--case", action="append", metavar="ID", help="this case or entry alone; repeatable")
    run.add_argument("--repeat", type=int, default=1, metavar="N", help="each case so often (1)")
    run.add_argument("--effects", choices=("nominal", "all"), default="nominal")
    run.add_argument("--shapes", choices=("drawn", "all"), default="drawn")
    run.add_argument("--seed", type=int, help="for the drawing; by chance if not given")
    run.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="one JSON line per run")
    run.add_argument("--resume", action="store_true", help="leave out what FILE holds already")
    run.add_argument("--keep", type=Path, metavar="DIR", help="keep what jobs and eroica wrote")
    run.set_defaults(do=_run)
    shown = verbs.add_parser("board", help="the scoreboard of results")
    shown.add_argument("files", nargs="*", type=Path, metavar="FILE")
    shown.add_argument("--write", action="store_true", help="to evals/SCOREBOARD.md")
    shown.set_defaults(do=_board)
    options = parser.parse_args(given)
    try:
        return int(options.do(options))
    except CaseError as error:
        print(f"evals: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
