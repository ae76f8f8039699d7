"""python -m evals run: the fault catalogue through the product, case by case; the scoreboard.

    python -m evals run                              every case once, at its nominal effect
    python -m evals run --suite synthetic            live, netns (root), synthetic
    python -m evals run --case D01 --repeat 5        a case, or all cases of an entry
    python -m evals run --effects all --shapes all   the sweep
    python -m evals run --results FILE --resume      go on where an earlier run stopped
    python -m evals board FILE... --write            evals/SCOREBOARD.md from results
    python -m evals faults --times 20 --write        harm to each part in the middle of a window: evals/FAULTS.md
    python -m evals peers                            HTA and TraceML themselves, on the cases that they can look at

Seeds are drawn anew in each run unless --seed is given. Exit status 1 if a control was blamed or less than 97.5 % of
the points of grades A and B were made.
"""

from __future__ import annotations

import argparse
import platform
import random
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from bench import machine
from bench.peers import environment
from evals import board, campaign, catalogue, peers, rows, suites
from evals.campaign import FAULTS
from evals.catalogue import Case, CaseError
from evals.cluster import StuckError
from evals.cores import Cores
from evals.made import Draw
from evals.rows import Row, Session

HERE = Path(__file__).parent
RESULTS = HERE / ".results.jsonl"
COMMITTED = HERE / "results"
"""What the board is made of; `make evals` and `make evals-full` write here."""
STOPPED = 130
"""Exit status after Ctrl-C, as a shell gives it."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One run to be made."""

    case: Case
    draw: Draw
    turn: int
    key: str
    part: str


def plan(cases: Sequence[Case], repeat: int, effects: str, shapes: str, draw: random.Random) -> Iterator[Planned]:
    """All runs, each with what is drawn for it; turn by turn, so that what is stopped leaves whole turns behind."""
    for turn in range(repeat):
        for case in cases:
            recipe = case.recipe
            sizes = recipe.effects if effects == "all" and not case.is_control else (recipe.nominal,)
            for effect in sizes:
                wanted = recipe.shapes if shapes == "all" else (draw.choice(recipe.shapes),)
                for shape in wanted:
                    key = rows.key(case.id, effect, turn, shape if shapes == "all" else None)
                    part = "sweep" if "all" in (effects, shapes) else "repeat" if turn else "nominal"
                    yield Planned(
                        case, Draw(seed=draw.randrange(1_000_000), effect=effect, shape=shape), turn, key, part
                    )


def _chosen(options: argparse.Namespace) -> list[Case]:
    """The cases that were asked for, or CaseError."""
    known, asked = catalogue.load(options.cases), options.case or []
    names = {name for case in known for name in (case.id, case.entry)}
    strange = [name for name in asked if name not in names]
    if strange:
        raise CaseError(f"no case or entry is called {', '.join(strange)}; `ls {options.cases}` shows all")
    suites_asked = options.suite or catalogue.SUITES
    chosen = [
        case for case in known if case.suite in suites_asked and (not asked or case.id in asked or case.entry in asked)
    ]
    of_chosen = {name for case in chosen for name in (case.id, case.entry)}
    left = [name for name in asked if name not in of_chosen] or ([] if chosen else ["the catalogue"])
    if left:
        raise CaseError(f"no case of {', '.join(left)} is of suite {', '.join(suites_asked)}; leave --suite out")
    if options.repeat < 1:
        raise CaseError(f"--repeat is {options.repeat}; give 1 or more")
    return chosen


def session() -> Session:
    """What this run is made with."""
    facts = machine.facts({})
    wanted = ("processor", "cores", "memory", "system", "Python")
    return Session(
        command=shlex.join(["python", "-m", "evals", *sys.argv[1:]]),
        started=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        commit=_commit(),
        machine={name: facts[name] for name in wanted}
        | {"torch": metadata.version("torch"), "node": platform.machine()},
    )


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", "../eroica", ":!results", ":!*.md")
        return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


GUESS_S = {"live": 40.0, "netns": 40.0, "synthetic": 4.0}
"""How long a case takes, before anything of its suite has run."""


class Pace:
    """Guesses how long the rest will take, from what each case, or else its suite, took before."""

    def __init__(self, earlier: Sequence[Row]) -> None:
        self.seen: dict[str, list[float]] = {}
        for row in earlier:
            self.add(row)

    def add(self, row: Row) -> None:
        """A run has ended."""
        if not row.not_run:
            for name in (row.case, row.suite):
                self.seen.setdefault(name, []).append(row.seconds)

    def left_s(self, todo: Sequence[Planned]) -> float:
        """For all of these."""
        return sum(self._of(planned.case) for planned in todo)

    def _of(self, case: Case) -> float:
        for name in (case.id, case.suite):
            if name in self.seen:
                return sum(self.seen[name]) / len(self.seen[name])
        return GUESS_S[case.suite]


def _earlier() -> list[Row]:
    """Of the committed results, to guess times by."""
    try:
        return [row for file in sorted(COMMITTED.glob("*.jsonl")) for row in rows.read(file).rows]
    except CaseError:
        return []


def _one(planned: Planned, keep: Path | None) -> Row:
    """Run one; whatever happens, it is a row."""
    began = time.perf_counter()
    try:
        with Cores() as cores:
            result = suites.run(planned.case, planned.draw, keep=keep)
        return replace(rows.row(result, planned.key, planned.part), cores=cores.spread())
    except Exception as error:  # a fault of one case, or of the product in it, must not cost the others
        told = traceback.format_exc()
        if keep is not None and keep.is_dir():
            (keep / "traceback.txt").write_text(told)
        print(f"\n{told}", file=sys.stderr)
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        seconds = time.perf_counter() - began
        return rows.failed(planned.case, planned.draw, planned.key, planned.part, why, seconds)


def _run(options: argparse.Namespace) -> int:
    chosen = _chosen(options)
    planned = list(plan(chosen, options.repeat, options.effects, options.shapes, random.Random(options.seed)))
    pace = Pace(_earlier())
    lacking = {suite: why for suite in {case.suite for case in chosen} if (why := suites.unavailable(suite))}
    for suite, why in lacking.items():
        print(f"evals: the {suite} cases are not run: {why}", file=sys.stderr)
    held = {row.key: row for row in rows.start(options.results, session(), resume=options.resume)}
    done = {one.key: held[one.key] for one in planned if one.key in held and not held[one.key].not_run}
    todo = [one for one in planned if one.key not in done]
    for number, one in enumerate(todo):
        shown = f"[{len(planned) - len(todo) + number + 1}/{len(planned)}, {_minutes(pace.left_s(todo[number:]))} left]"
        print(f"{shown} {one.case.id} {one.case.slug} ... ", end="", file=sys.stderr, flush=True)
        if one.case.suite in lacking:
            row = rows.left_out(one.case, one.draw, one.key, one.part, lacking[one.case.suite])
        else:
            row = _one(one, options.keep / one.key.replace("/", "-") if options.keep else None)
        rows.append(options.results, row)
        pace.add(row)
        done[one.key] = row
        print(rows.one_line(row), file=sys.stderr, flush=True)
    made = [done[one.key] for one in planned]
    print(board.table(made))
    if options.board:
        _write(board.of_files(sorted(COMMITTED.glob("*.jsonl")), catalogue.load(options.cases), _misses(options)))
    return 0 if board.passed(made) else 1


def _peers(options: argparse.Namespace) -> int:
    """Show cases to other tools."""
    options.suite, options.repeat = None, 1
    draw = random.Random(options.seed)
    resumes = options.resume and options.results.exists()
    held = {told.case for told in rows.read(options.results).peers} if resumes else set()
    shown = [(case, peer) for case in _chosen(options) if case.id not in held and (peer := peers.peer_of(case))]
    known = {name: environment(name) for name in {peer for _, peer in shown}}
    for name, place in known.items():
        if place.problem:
            print(f"evals: {name} is left out: {place.problem}", file=sys.stderr)
    shown = [(case, peer) for case, peer in shown if not known[peer].problem]
    rows.start(options.results, session(), resume=options.resume)
    for number, (case, peer) in enumerate(shown):
        print(f"[{number + 1}/{len(shown)}] {case.id} {case.slug}, {peer} ... ", end="", file=sys.stderr, flush=True)
        drawn = Draw(seed=draw.randrange(1_000_000), effect=case.recipe.nominal, shape=draw.choice(case.recipe.shapes))
        told = peers.ask(case, drawn, known[peer])
        if told is None:
            print("nothing to show", file=sys.stderr)
            continue
        rows.append(options.results, told)
        print(f"{told.problem or told.word} ({told.seconds:.0f} s) {told.said}", file=sys.stderr, flush=True)
    return 0


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"


def _write(text: str) -> None:
    (HERE / "SCOREBOARD.md").write_text(text, encoding="utf-8")
    print(f"written: {HERE.name}/SCOREBOARD.md", file=sys.stderr)


def _misses(options: argparse.Namespace) -> Path:
    """They lie beside the cases."""
    return Path(options.cases).parent / board.MISSES.name


def _board(options: argparse.Namespace) -> int:
    files = options.files or sorted(COMMITTED.glob("*.jsonl"))
    if not files:
        raise CaseError("there are no results in evals/results yet; make some with `make evals`, or name files")
    text = board.of_files(files, catalogue.load(options.cases), _misses(options))
    if options.write:
        _write(text)
    else:
        print(text, end="")
    return 0 if board.passed([row for file in files for row in rows.read(file).rows]) else 1


def main(given: Sequence[str] | None = None) -> int:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(
        prog="python -m evals", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True)
    run = verbs.add_parser("run", help="run cases")
    run.add_argument("--suite", action="append", choices=catalogue.SUITES, help="this suite alone; repeatable")
    run.add_argument("--case", action="append", metavar="ID", help="this case or entry alone; repeatable")
    run.add_argument("--repeat", type=int, default=1, metavar="N", help="each case so often (1)")
    run.add_argument("--effects", choices=("nominal", "all"), default="nominal")
    run.add_argument("--shapes", choices=("drawn", "all"), default="drawn")
    run.add_argument("--seed", type=int, help="for the drawing; by chance if not given")
    run.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="one JSON line per run")
    run.add_argument("--resume", action="store_true", help="leave out what FILE holds already")
    run.add_argument("--keep", type=Path, metavar="DIR", help="keep what jobs and eroica wrote")
    run.add_argument("--board", action="store_true", help="then write evals/SCOREBOARD.md from evals/results/*.jsonl")
    run.set_defaults(do=_run)
    others = verbs.add_parser(
        "peers", help="show cases to HTA and TraceML, which are installed for it under bench/.peers"
    )
    others.add_argument("--case", action="append", metavar="ID", help="this case or entry alone; repeatable")
    others.add_argument("--seed", type=int, help="for the drawing; by chance if not given")
    others.add_argument("--results", type=Path, default=COMMITTED / "peers.jsonl", metavar="FILE")
    others.add_argument("--resume", action="store_true", help="leave out what FILE holds already")
    others.set_defaults(do=_peers)
    shown = verbs.add_parser("board", help="the scoreboard of results")
    shown.add_argument("files", nargs="*", type=Path, metavar="FILE", help="evals/results/*.jsonl if none is given")
    shown.add_argument("--write", action="store_true", help="to evals/SCOREBOARD.md")
    shown.set_defaults(do=_board)
    harm = verbs.add_parser("faults", help="do harm to each part in the middle of a window")
    harm.add_argument("--fault", action="append", metavar="NAME", help=f"this alone; repeatable: {', '.join(FAULTS)}")
    harm.add_argument("--times", type=int, default=20, metavar="N", help="each so often (20)")
    harm.add_argument("--seed", type=int, help="for the moments; by chance if not given")
    harm.add_argument("--keep", type=Path, metavar="DIR", help="keep what all programs wrote")
    harm.add_argument("--results", type=Path, metavar="FILE", help="add one JSON line per run; tell of all in it")
    harm.add_argument("--write", action="store_true", help="write evals/FAULTS.md")
    harm.set_defaults(do=campaign.command)
    for verb in (run, others, shown):
        verb.add_argument("--cases", type=Path, default=catalogue.CASES, metavar="DIR", help="another catalogue")
    options = parser.parse_args(given)
    try:
        return int(options.do(options))
    except (CaseError, StuckError) as error:
        print(f"evals: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nevals: stopped; go on with --resume", file=sys.stderr)
        return STOPPED


if __name__ == "__main__":
    raise SystemExit(main())
