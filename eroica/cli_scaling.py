"""`eroica scaling` and `eroica simulate`: their arguments and bodies, apart from the other commands.

Prints nothing itself: `cli` brings the means to show a text and to write a file, and turns errors into exit statuses.
What a command computes with is imported when it runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from eroica.errors import DataError, UserError
from eroica.given import count


class Adder(Protocol):
    """How `cli` adds a command: its name, its body, what it is for and an example."""

    def __call__(
        self, name: str, run: Callable[[argparse.Namespace], int], purpose: str, example: str
    ) -> argparse.ArgumentParser:
        """The parser of the new command."""
        ...


def add(command: Adder, show: Callable[[str], None], write: Callable[[Path, str], None]) -> None:
    """Add both commands. `show` puts a text on stdout, `write` replaces a file."""
    parser = command(
        "scaling",
        lambda options: _scaling(options, show, write),
        "tell what runs of a job at several sizes lose to their size, and to what",
        "eroica scaling run-8/ run-64/ run-512/ --out scaling/",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="profiler traces of one run, one per rank")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write DIR/scaling.json and DIR/scaling.html")
    parser.add_argument(
        "--format", choices=("text", "json", "html"), default="text", help="what stdout gets (default: text)"
    )
    parser.add_argument("--jobs", type=count, default=None, metavar="N", help="processes (default: one per core)")

    parser = command(
        "simulate",
        lambda options: _simulate(options, show, write),
        "train on a modelled fabric, with and without pacing: what it gains at which size, and what it cannot",
        "eroica simulate --hosts 4,64 --seeds 5 --only contention",
    )
    parser.add_argument("--hosts", type=_sizes, default=(4, 8, 16, 32, 64), metavar="N,N,...", help="default: 4 to 64")
    parser.add_argument("--seeds", type=count, default=5, metavar="N", help="jobs at each size (default: 5)")
    parser.add_argument(
        "--iterations", type=count, default=1000, metavar="N", help="of each job (default: 1000; 30 at least)"
    )
    parser.add_argument(
        "--layout", choices=("data", "tensor"), default="data", help="one group of all ranks, or one for each card"
    )
    parser.add_argument(
        "--only", choices=(*ONLY, "each"), help="switch every other failure mode off; each: a row for each mode alone"
    )
    parser.add_argument(
        "--threshold", type=_share, default=None, metavar="SHARE", help="waiting over iteration to try pacing at (0.05)"
    )
    parser.add_argument("--max-delay-ms", type=_share, default=None, metavar="MS", help="cap of one delay (50)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write DIR/simulation.json and DIR/simulation.html")
    parser.add_argument(
        "--format", choices=("text", "json", "html"), default="text", help="what stdout gets (default: text)"
    )


ONLY = ("synchronisation", "contention", "locality", "imbalance", "straggler", "nothing")


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(count(part.strip()) for part in text.split(","))
    return tuple(sorted(set(sizes)))


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _simulate(options: argparse.Namespace, show: Callable[[str], None], write: Callable[[Path, str], None]) -> int:
    from dataclasses import replace

    from eroica import gains
    from eroica.fabric.pacing import Limits
    from eroica.fabric.parameters import Setting, Workload
    from eroica.simulation import REFRESH, alone

    limits = Limits()
    least = limits.memory + REFRESH
    if options.iterations < least:
        raise UserError(
            f"{options.iterations} iterations are too few: ranks are held only after {limits.memory} were seen; give "
            f"--iterations {least} or more"
        )
    if options.threshold is not None:
        limits = replace(limits, threshold=options.threshold)
    if options.max_delay_ms is not None:
        limits = replace(limits, max_delay_s=options.max_delay_ms / 1e3)
    modes = (gains.EVERYTHING, *ONLY) if options.only == "each" else (options.only or gains.EVERYTHING,)
    rows = []
    for mode in modes:
        for hosts in options.hosts:
            setting = Setting(hosts=hosts, workload=Workload(layout=options.layout))
            if mode != gains.EVERYTHING:
                setting = alone(setting, mode)
            rows.append(gains.compare(setting, range(options.seeds), options.iterations, limits, mode))
    texts = {"text": gains.render_text, "json": gains.render_json, "html": gains.render_html}
    if options.out is not None:
        _write_both(options.out, "simulation", gains.render_json(rows), gains.render_html(rows), write)
    show(texts[options.format](rows))
    return 0


def _scaling(options: argparse.Namespace, show: Callable[[str], None], write: Callable[[Path, str], None]) -> int:
    import os

    from eroica import efficiency
    from eroica.offline import stack_paths
    from eroica.scaling import FEW_STEPS, account

    runs = []
    for folder in options.folders:
        stacked, notes = stack_paths([folder], jobs=options.jobs or os.cpu_count() or 1)
        told = account(stacked)
        if told is None:
            raise DataError(
                f"{folder} holds {len(stacked)} ranks and {stacked.own_s.shape[1]} iterations; lost time can be told "
                f"from 2 ranks and {FEW_STEPS} iterations that all of them have"
            )
        runs.append((str(folder), told.noting(notes)))
    found = efficiency.study(runs)
    texts = {"text": efficiency.render_text, "json": efficiency.render_json, "html": efficiency.render_html}
    if options.out is not None:
        _write_both(options.out, "scaling", efficiency.render_json(found), efficiency.render_html(found), write)
    show(texts[options.format](found))
    return 0


def _write_both(folder: Path, name: str, data: str, page: str, write: Callable[[Path, str], None]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / f"{name}.json", data)
        write(folder / f"{name}.html", page)
    except OSError as error:
        raise UserError(
            f"{folder}: the results cannot be written there ({error.strerror or error}); choose another --out"
        ) from None
