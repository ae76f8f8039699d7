"""python -m bench: every figure of the design's section 10 that this machine can give, peers beside it, in one run.

    python -m bench                 200 MB x 3 rounds, 1 GB x 1 round, localize up to 1,000,000 workers
    python -m bench --quick         without HTA on 1 GB, which takes minutes
    python -m bench --write         the same, and bench/RESULTS.md
    python -m bench --only localize --json out.json

Exit status 1 if an answer is wrong or a measurement fails; a missed target is printed, not an error.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from bench import machine, parts, tables
from bench.measure import ROOT, Failure, progress
from bench.peers import Environment, environment
from bench.tables import Table
from bench.traces import Grown, Layout, grow

DATA = ROOT / "bench" / ".data"
SEEDS: tuple[tuple[str, str, Layout], ...] = (
    ("H100, Python stacks, torch 2.13 layout", "evals/data/h100_bert_small.json.gz", "torch 2.13"),
    ("MI300X, Python stacks, classic layout", "evals/data/mi300_qwen1.5.json.gz", "classic"),
)
LARGE = 1
"""Which of them is read by everybody at --large-mb too; HTA takes minutes for each."""
WORKERS = ((1_000, 1), (100_000, 1), (1_000_000, 1), (1_000_000, 8))
PARTS = ("read", "summarize", "localize", "bytes", "import")


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS, action="append", help="this part alone; may be repeated")
    parser.add_argument("--quick", action="store_true", help="no HTA on the large trace")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="on the small traces (3)")
    parser.add_argument(
        "--large-rounds", type=int, default=1, metavar="N", help="on the large trace; 0 leaves it out (1)"
    )
    parser.add_argument("--small-mb", type=float, default=200, metavar="MB", help="size of the small traces (200)")
    parser.add_argument("--large-mb", type=float, default=1000, metavar="MB", help="size of the large trace (1000)")
    parser.add_argument(
        "--workers", type=int, default=1_000_000, metavar="N", help="most workers to localize (1000000)"
    )
    parser.add_argument(
        "--seed", type=Path, action="append", default=[], metavar="TRACE", help="grow this trace too (Kineto JSON)"
    )
    parser.add_argument("--no-peers", action="store_true", help="install and measure no peers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--write", action="store_true", help="write bench/RESULTS.md")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Run, print, write."""
    arguments = _arguments(given)
    wanted = set(arguments.only or PARTS)
    absent = Environment("none", Path(), {}, "not asked for (--no-peers)")
    peers = not arguments.no_peers and "read" in wanted
    hta, json_tools = (environment(name) if peers else absent for name in ("hta", "json"))
    facts = machine.facts(hta.versions | json_tools.versions)
    tables.show_facts(facts)
    done: list[Table] = []
    try:
        for table in _tables(arguments, wanted, hta, json_tools):
            # At once, since the next part may take minutes.
            tables.show(table)
            done.append(table)
    except Failure as failure:
        progress("")
        print(f"bench: {failure}", file=sys.stderr)
        return 1
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": facts, "tables": [asdict(table) for table in done]}, indent=1))
    if arguments.write:
        (ROOT / "bench" / "RESULTS.md").write_text(_results(facts, done, given))
    return 0


def _tables(
    arguments: argparse.Namespace, wanted: set[str], hta: Environment, json_tools: Environment
) -> Iterator[Table]:
    """Each part when it is done."""
    small: list[parts.Input] = []
    large: list[parts.Input] = []
    if wanted & {"read", "summarize"}:
        own: list[tuple[str, str, Layout]] = [(path.name, str(path.resolve()), "classic") for path in arguments.seed]
        small = [_input(*seed, arguments.small_mb) for seed in (*SEEDS, *own)]
        if arguments.large_rounds:
            large = [_input(*seed, arguments.large_mb) for seed in SEEDS]
    if "read" in wanted:
        for trace in small:
            yield parts.reading(trace, arguments.rounds, hta, json_tools, slow=True)
        for trace in large[LARGE : LARGE + 1]:
            yield parts.reading(trace, arguments.large_rounds, hta, json_tools, slow=not arguments.quick)
    if "summarize" in wanted:
        yield parts.summarizing(small + large, arguments.rounds)
    if "localize" in wanted:
        yield parts.localizing([size for size in WORKERS if size[0] <= arguments.workers], arguments.rounds)
    if "bytes" in wanted:
        yield parts.sizes([*(ROOT / seed for _, seed, _ in SEEDS), *(trace.grown.path for trace in small)])
    if "import" in wanted:
        yield parts.importing(max(arguments.rounds, 5))


def _input(label: str, seed: str, layout: Layout, megabytes: float) -> parts.Input:
    """Grow it, or take what an earlier run left. Read once, so that every reader finds it in the page cache."""
    source = ROOT / seed
    DATA.mkdir(parents=True, exist_ok=True)
    stem = source.name.removesuffix(".gz").removesuffix(".json")
    name = f"{stem}-{layout.replace(' ', '-')}-{megabytes:g}MB"
    out, told = DATA / f"{name}.json", DATA / f"{name}.told"
    progress(f"growing {out.name}")
    try:
        known = json.loads(told.read_text())
        made = Grown(out, known["num_bytes"], known["num_events"], known["repeats"], known["num_steps"])
        if out.stat().st_size != made.num_bytes or known["seed_bytes"] != source.stat().st_size:
            raise ValueError("another file")
    except (OSError, ValueError, KeyError):
        made = grow(source, out, megabytes, layout)
        told.write_text(json.dumps({**asdict(made), "path": "", "seed_bytes": source.stat().st_size}))
    with out.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass
    progress("")
    return parts.Input(f"{label}, {made.num_bytes / 1e6:,.0f} MB", made)


def _results(facts: dict[str, str], done: Sequence[Table], given: Sequence[str] | None) -> str:
    command = " ".join(["python -m bench", *(sys.argv[1:] if given is None else given)])
    head = [
        "# Results",
        "",
        f"Made by `{command}` in one run; `make bench` prints the same. Medians, with minimum and maximum in",
        "brackets; ratios are taken within each round. Every measurement is a fresh process; readers take turns on one",
        "core and find the file in the page cache; times leave out starting Python and imports, memory is the peak of",
        "the whole process. MB = 1e6 bytes.",
        "",
        *(f"- {name}: {value}" for name, value in facts.items()),
        "",
    ]
    return "\n".join(head) + "\n" + "\n".join(tables.markdown(table) for table in done)


if __name__ == "__main__":
    sys.exit(main())
