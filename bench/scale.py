"""python -m bench.scale: how eroica grows with the job, up to 1,000,000 workers, and whether the answer stays right.

    python -m bench.scale                     localize and diagnose 1k, 10k, 100k, 1M workers; 100,000 over the bus
    python -m bench.scale --part localize     that alone, one process for each size
    python -m bench.scale --part encode       the summaries that agents of the next part send: bench/.data
    python -m bench.scale --part bus --ranks 20000
    python -m bench.scale --json out.json

Summaries are made (`fleet`), not measured: one of the workers has a fault, and any other answer is an error (exit
status 1). All else is the product's own code: what `eroica diagnose` runs, and agents' and coordinator's ends of the
bus with a real NATS server between them. Agents and coordinator share this machine's cores, so wall time is an upper
bound of what a coordinator with a machine of its own needs; its CPU time stands beside it, and is what carries over.
The last table adds the parts up to the whole pipeline for a million workers. Not a test: it takes minutes and
gigabytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import machine, tables
from bench.fleet import PER_HOST
from bench.measure import ROOT, Contender, Failure, run
from bench.tables import Table, Target, number

DATA = ROOT / "bench" / ".data"
SIZES = (1_000, 10_000, 100_000, 1_000_000)
MOST_S = 20.0
"""To localize and diagnose a million, on two cores."""
MOST_BUS_S = 60.0
"""For 100,000 workers' patterns through the bus and into a diagnosis."""
PUBLISHED_S = 7 * 60.0
"""For the whole pipeline at a simulated million (arXiv 2506.08528)."""
PROCESSES = 2
"""That hold the simulated agents."""
PER_CONNECTION = 100
"""Agents to a connection, since a server here may have 20,000 files open."""
TRACE_MB, TRACE_MBS = 200.0, 300.0
"""A rank's trace of a window, and how fast one core of its own host summarizes it (RESULTS.md)."""


def localizing(sizes: Sequence[int]) -> Table:
    """One process for each size, alone."""
    rows, targets, told = [], [], []
    for size in sizes:
        one = _measure("localize", str(size))
        told.append(one)
        parts = one["parts"]
        rows.append(
            (
                f"{size:,}",
                *(number(parts[name]) for name in ("stack", "roles alone", "localize alone", "localize and diagnose")),
                *(f"{one[name] / 1e6:,.0f}" for name in ("made", "peak")),
                "right" if one["right"] else "WRONG",
            )
        )
        if size == 1_000_000:
            took = parts["localize and diagnose"]
            targets.append(Target(f"1,000,000 workers: at most {MOST_S:.0f} s (here {took:.3g} s)", took <= MOST_S))
    return Table(
        "Localize and diagnose, 40 functions, 10 steps, one planted fault",
        ("workers", "stack, s", "roles, s", "localize, s", "diagnose in all, s", "MB before", "peak MB", "answer"),
        tuple(rows),
        tuple(targets),
        (
            "stack: lining up and joining decoded summaries. roles, localize: two parts of what follows, timed alone.",
            "MB before: the summaries, as a coordinator would hold them.",
            "Up to 200,000 communications a finding is priced by replay, which at 10,000 workers is most of the time.",
        ),
        told,
    )


def encoding(num_ranks: int) -> float:
    """The summaries of the bus's agents, by as many processes; seconds of CPU for each."""
    DATA.mkdir(parents=True, exist_ok=True)
    hosts = -(-num_ranks // PER_HOST)
    share = -(-hosts // PROCESSES)
    firsts = range(0, hosts, share)
    with ThreadPoolExecutor(PROCESSES) as pool:
        told = list(
            pool.map(
                lambda first: _measure("encode", str(DATA), str(num_ranks), str(first), str(min(share, hosts - first))),
                firsts,
            )
        )
    return max(float(one["seconds_each"]) for one in told)


def reporting(num_ranks: int) -> Table:
    """Agents over the bus into a diagnosis."""
    one = _measure("bus", str(DATA), str(num_ranks), str(PROCESSES), str(PER_CONNECTION))
    marks, cpu = one["marks"], one["cpu"]
    rows = []
    stages = (
        ("all agents heard, all ranks known", "begin", "joined"),
        ("a slowdown noticed, a window proposed", "noticed", "proposed"),
        ("all ranks prepared, window committed", "proposed", "committed"),
        ("all summaries in, stacked, diagnosed", "committed", "told"),
    )
    for what, begin, end in stages:
        if end in marks:
            rows.append((what, number(marks[end] - marks[begin]), number(cpu[end] - cpu[begin])))
    took = marks["told"] - marks["noticed"] if "noticed" in marks else float("inf")
    cpu_s = cpu["told"] - cpu["noticed"] if "noticed" in cpu else float("inf")
    rows.append(("from noticed to told", number(took), number(cpu_s)))
    right = "right" if one["right"] else "WRONG"
    target = Target(f"{num_ranks:,} workers: at most {MOST_BUS_S:.0f} s (here {took:.3g} s)", took <= MOST_BUS_S)
    return Table(
        f"{num_ranks:,} workers over NATS, {one['hosts']:,} agents, {one['connections']} connections: {right}",
        ("stage", "s", "CPU of the coordinator, s"),
        tuple(rows),
        (target,) if num_ranks == 100_000 else (),
        (
            f"{one['reported']:,} ranks reported; {one['dropped']} frames dropped; the coordinator's peak "
            f"{one['peak'] / 1e6:,.0f} MB; CPU of NATS {one['server_cpu_s']:.1f} s, of all agents "
            f"{one['agents_cpu_s']:.1f} s.",
        ),
        one,
    )


def modelled(localized: Mapping[str, Any], bus: Mapping[str, Any]) -> Table:
    """The whole pipeline for a million workers, from the parts."""
    each_s = (bus["cpu"]["told"] - bus["cpu"]["noticed"]) / bus["ranks"]
    diagnosed = localized["parts"]
    core_s = diagnosed["stack"] + diagnosed["localize and diagnose"]
    # What the coordinator does for each rank, less what it does once for all, which is measured at its size.
    each_s = max(each_s - core_s / localized["ranks"], 0.0)
    rows = [
        ("window", 20.0, "the published one; ours lasts 2 s where iterations are short"),
        ("read and summarize, on each host", PER_HOST * TRACE_MB / TRACE_MBS / 2, "8 ranks of 200 MB, two at a time"),
        ("take and decode all summaries", each_s * 1e6, "one process, one core; the measured CPU of each rank"),
        ("stack, localize, diagnose", core_s, "measured at 1,000,000"),
    ]
    total = sum(row[1] for row in rows)
    return Table(
        "The whole pipeline for 1,000,000 workers, modelled",
        ("part", "s", "from"),
        (*((what, number(seconds), source) for what, seconds, source in rows), ("sum", number(total), "")),
        (Target(f"below the published {PUBLISHED_S:.0f} s (here {total:.3g} s)", total < PUBLISHED_S),),
    )


def _measure(*words: str) -> Mapping[str, Any]:
    command = (sys.executable, "-m", "bench.scale_work", *words)
    told = run(Contender(" ".join(words[:2]), command, one_core=False))
    if told.get("right") is False:
        raise Failure(f"{' '.join(words)}: the answer is wrong: {told['summary']}")
    return told


def main(given: Sequence[str] | None = None) -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.scale", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--part", choices=("localize", "encode", "bus"), action="append", help="this alone; again: more"
    )
    parser.add_argument(
        "--workers", type=int, default=SIZES[-1], metavar="N", help="most workers to localize (1000000)"
    )
    parser.add_argument("--ranks", type=int, default=100_000, metavar="N", help="workers over the bus (100000)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options = parser.parse_args(given)
    parts = set(options.part or ("localize", "encode", "bus"))
    facts, done = machine.facts({}), list[Table]()
    tables.show_facts(facts)
    try:
        if "localize" in parts:
            done.append(localizing([size for size in SIZES if size <= options.workers]))
            tables.show(done[-1])
        if "encode" in parts:
            print(f"summaries made: {encoding(options.ranks) * 1e6:.0f} us of CPU each\n", flush=True)
        if "bus" in parts:
            done.append(reporting(options.ranks))
            tables.show(done[-1])
        if {"localize", "bus"} <= parts and options.workers >= SIZES[-1]:
            tables.show(modelled(done[0].data[-1], done[1].data))
    except Failure as failure:
        print(f"bench.scale: {failure}", file=sys.stderr)
        return 1
    if options.json:
        options.json.write_text(json.dumps({"machine": facts, "tables": [asdict(table) for table in done]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
