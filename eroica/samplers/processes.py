"""All processes of a host, a slice at a time: who burns CPU, whose child it is, and on which cores.

Looking at every process at each read would cost milliseconds on a busy host, so a read looks at `SLICE` of them and a
process's CPU is that between two looks at it. Used by `host`.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from eroica.samplers.proc import parse_stat, parse_words, read_text

SLICE = 100
"""Processes looked at per read: about a millisecond."""
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
            stat = parse_stat(read_text(self._proc / str(pid) / "stat"))
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

    def _owner(self, pid: int) -> int | None:
        """The rank that has started this process, itself or through others."""
        for _ in range(MOST_GENERATIONS):
            if pid in self._ranks:
                return pid
            process = self._known.get(pid)
            if process is None or process.parent <= 1:
                return None
            pid = process.parent
        return None

    def hogs(self) -> list[Hog]:
        """The busiest processes that no rank has started."""
        busy = [(pid, p) for pid, p in self._known.items() if p.cores >= HOG_CORES and self._owner(pid) is None]
        busy.sort(key=lambda item: (-item[1].cores, item[0]))
        return [Hog(pid, self._name(pid, p.name), p.cores, p.processor, self._cpus(pid)) for pid, p in busy[:MOST_HOGS]]

    def children(self, rank: int) -> Children | None:
        """What the descendants of a rank use; None if it has none."""
        mine = [
            (pid, process)
            for pid, process in self._known.items()
            if pid not in self._ranks and self._owner(process.parent) == rank
        ]
        if not mine:
            return None
        pid, top = max(mine, key=lambda item: (item[1].cores, -item[0]))
        text = f"{self._name(pid, top.name)} (pid {pid}) {top.cores:.1f} cores" if top.cores >= HOG_CORES else ""
        return Children(sum(process.cores for _, process in mine), text)

    def _name(self, pid: int, name: str) -> str:
        if not name.startswith(("python", "pt_main_thread", "node", "java", "perl", "ruby")):
            return name
        words = read_text(self._proc / str(pid) / "cmdline").split("\0")[1:]
        script = next((word for word in words if word and not word.startswith("-")), "")
        # After -c and -m comes code or a module: the first is too long, and a path's folders say little.
        return f"{name} {os.path.basename(script)[:40]}" if script and "-c" not in words else name

    def _cpus(self, pid: int) -> str:
        return parse_words(read_text(self._proc / str(pid) / "status")).get("Cpus_allowed_list", "")
