"""All processes of a host, a slice at a time: who burns CPU, whose child it is, and on which cores.

Looking at every process at each read would cost milliseconds on a busy host, so a read looks at `SLICE` of them and a
process's CPU is that between two looks at it. Used by `host`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from eroica.samplers.proc import parse_stat, read_text, words_of

SLICE = 40
"""Processes looked at per read: about a millisecond. In a window, 500 processes take 1.3 s."""
HOG_CORES = 0.1
"""A process that uses less is no hog: a tenth of a core cannot cost a rank on the same core more than a few percent."""
MOST_HOGS = 8
MOST_GENERATIONS = 64


@dataclass(frozen=True, slots=True)
class Hog:
    """A process that uses CPU and is not of the job."""

    pid: int
    name: str
    """Its command, of an interpreter with the script, without arguments: these may hold secrets."""
    cores: float
    processor: int
    """The core on which it was last."""
    cpus: str
    """Cores on which it may run, "0-3,8"; "" = unknown."""


@dataclass(frozen=True, slots=True)
class Children:
    """What the processes that a rank has started use together."""

    cores: float
    text: str
    """The busiest one: name, pid, cores; "" if all are idle."""


NO_CHILDREN = Children(0.0, "")


@dataclass(slots=True)
class _Process:
    name: str
    parent: int
    start_ticks: int
    ticks: int
    seen_ns: int
    processor: int
    cores: float = 0.0


class Processes:
    """Remembers each process from look to look."""

    def __init__(self, proc: Path, tick_ns: int) -> None:
        self._proc, self._tick_ns = proc, tick_ns
        self._known: dict[int, _Process] = {}
        self._waiting: list[int] = []
        self._hogs: list[Hog] = []
        self._children: dict[int, Children] = {}
        self._is_complete = False
        self._ranks: frozenset[int] = frozenset()

    def look(self, now_ns: int, ranks: Collection[int]) -> None:
        """Look at the next slice. `ranks`: pids of the training processes."""
        self._ranks = frozenset(ranks)
        if not self._waiting:
            try:
                listed = [int(name) for name in os.listdir(self._proc) if name.isdigit()]
            except OSError:
                return
            alive = set(listed)
            self._known = {pid: process for pid, process in self._known.items() if pid in alive}
            self._waiting = listed
        now, self._waiting = self._waiting[:SLICE], self._waiting[SLICE:]
        for pid in now:
            stat = parse_stat(read_text(f"{self._proc}/{pid}/stat"))
            if stat is None:
                self._known.pop(pid, None)
                continue
            before = self._known.get(pid)
            if before is None or before.start_ticks != stat.start_ticks:
                self._known[pid] = _Process(
                    stat.name, stat.parent, stat.start_ticks, stat.cpu_ticks, now_ns, stat.processor
                )
            elif now_ns - before.seen_ns >= 50 * self._tick_ns:
                # Over less than 50 ticks a single tick would be more than 2 % of a core.
                before.cores = (stat.cpu_ticks - before.ticks) * self._tick_ns / (now_ns - before.seen_ns)
                before.ticks, before.seen_ns = stat.cpu_ticks, now_ns
                before.name, before.parent, before.processor = stat.name, stat.parent, stat.processor
        if not self._waiting:
            self._sum_up()

    def _sum_up(self) -> None:
        """Who belongs to whom, once all processes were looked at again."""
        self._is_complete = True
        owners: dict[int, int | None] = {pid: pid for pid in self._ranks}
        mine: dict[int, list[tuple[float, int]]] = {}
        busy: list[tuple[float, int]] = []
        for pid, process in self._known.items():
            owner = self._owner(pid, owners)
            if owner is None and process.cores >= HOG_CORES:
                busy.append((process.cores, -pid))
            elif owner is not None and owner != pid:
                mine.setdefault(owner, []).append((process.cores, -pid))
        self._hogs = []
        for cores, minus in sorted(busy, reverse=True)[:MOST_HOGS]:
            process = self._known[-minus]
            cpus = words_of(read_text(f"{self._proc}/{-minus}/status"), "Cpus_allowed_list")
            name, where = self._name(-minus, process.name), "".join(cpus.get("Cpus_allowed_list", []))
            self._hogs.append(Hog(-minus, name, cores, process.processor, where))
        self._children = {}
        for rank, those in mine.items():
            cores, minus = max(those)
            name = self._name(-minus, self._known[-minus].name) if cores >= HOG_CORES else ""
            text = f"{name} (pid {-minus}) {cores:.1f} cores" if name else ""
            self._children[rank] = Children(sum(cores for cores, _ in those), text)

    def _owner(self, pid: int, owners: dict[int, int | None]) -> int | None:
        """The rank that has started this process, itself or through others. `owners`: what is known already."""
        line: list[int] = []
        while pid not in owners and len(line) < MOST_GENERATIONS:
            line.append(pid)
            process = self._known.get(pid)
            pid = process.parent if process is not None else 0
            owners.setdefault(0, None)
        owner = owners.get(pid)
        owners |= dict.fromkeys(line, owner)
        return owner

    def hogs(self) -> Sequence[Hog]:
        """The busiest processes that no rank has started."""
        return self._hogs

    def children(self, rank: int) -> Children | None:
        """What the descendants of a rank use; None while not all processes were looked at."""
        return self._children.get(rank, NO_CHILDREN) if self._is_complete else None

    def _name(self, pid: int, name: str) -> str:
        if not name.startswith(("python", "pt_main_thread", "node", "java", "perl", "ruby")):
            return name
        words = read_text(self._proc / str(pid) / "cmdline").split("\0")[1:]
        script = next((word for word in words if word and not word.startswith("-")), "")
        # After -c and -m comes code or a module: the first is too long, and a path's folders say little.
        return f"{name} {os.path.basename(script)[:40]}" if script and "-c" not in words else name
