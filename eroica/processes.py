"""What /proc tells of a process: its state, who traces it, its children, how it ended. Reads, never signals.

Of processes of this host and pid namespace only. Exit statuses are known while the dead process still has an entry,
that is until its parent asks for it, and to its owner alone. Used by `stacks` and `views`.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from eroica.standing import Child

_MOST_LEVELS = 3
"""A launcher, a shell around each rank, the rank."""
_MOST_BESIDE = 256


@dataclass(frozen=True, slots=True)
class Process:
    """One process, as far as /proc tells."""

    pid: int
    name: str
    parent: int
    letter: str
    """R, S, D, T (stopped), t (traced), Z (dead, not yet asked for), ..."""
    start_ticks: int
    exit_status: int | None
    """Of a dead one: its status, or minus the signal; None if it lives or that is not for us to know."""


def process(pid: int) -> Process | None:
    """None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes().decode("utf-8", "replace")
        name = text[text.index("(") + 1 : text.rindex(")")]
        fields = text.rpartition(")")[2].split()
        letter, code = fields[0], int(fields[49])
        status = None
        if letter in "ZX" and _is_ours(pid):
            status = -(code & 0x7F) if code & 0x7F else code >> 8
        return Process(pid, name, int(fields[1]), letter, int(fields[19]), status)
    except (OSError, ValueError, IndexError):
        return None


def _is_ours(pid: int) -> bool:
    """For a process of somebody else the kernel writes 0 where the exit code stands."""
    try:
        return os.geteuid() == 0 or os.stat(f"/proc/{pid}").st_uid == os.geteuid()
    except OSError:
        return False


def tracer(pid: int) -> int:
    """The process that traces `pid`; 0 if none does."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text("utf-8", "replace").splitlines():
            if line.startswith("TracerPid:"):
                return int(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return 0


def num_switches(pid: int) -> int | None:
    """How often the driving thread was taken from a core or left it: it cannot have run where that did not change."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/task/{pid}/status").read_text("utf-8", "replace").splitlines():
            if line.startswith(("voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:")):
                total += int(line.split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return total


def ranks_beside(pid: int, wanted: Collection[int]) -> dict[int, int]:
    """Rank -> process, of those of `wanted` that the launcher of the rank `pid` has started, too.

    Told by RANK in their environment, which the programs that a rank starts inherit: the one that stands highest
    counts, and a Python before a shell around it.
    """
    own = process(pid)
    found: dict[int, tuple[bool, int]] = {}
    level = [own.parent] if own is not None and own.parent > 1 else []
    for _ in range(_MOST_LEVELS):
        level = [child.pid for parent in level for child in children(parent) if child.state == "alive"][:_MOST_BESIDE]
        for other in level:
            seen, rank = process(other), environment(other).get("RANK", "")
            if seen is None or not rank.isdecimal() or int(rank) not in wanted:
                continue
            is_python = seen.name.startswith("python")
            if int(rank) not in found or (is_python and not found[int(rank)][0]):
                found[int(rank)] = is_python, other
    return {rank: other for rank, (_, other) in found.items()}


def environment(pid: int) -> dict[str, str]:
    """What a process was started with; empty if that may not be seen."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace")
    except OSError:
        return {}
    return {name: value for name, _, value in (entry.partition("=") for entry in text.split("\0")) if name}


def children(pid: int) -> tuple[Child, ...]:
    """Processes that `pid` started, the dead ones that it has not asked for included."""
    found = []
    for entry in _children(pid):
        seen = process(entry)
        if seen is not None and seen.parent == pid:
            is_dead = seen.letter in "ZX"
            found.append(Child(entry, seen.name, "dead" if is_dead else "alive", seen.exit_status))
    return tuple(found)


def _children(pid: int) -> list[int]:
    found: set[int] = set()
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found |= {int(word) for word in Path(f"/proc/{pid}/task/{task}/children").read_text().split()}
    except (OSError, ValueError):
        # Kernels without CONFIG_PROC_CHILDREN: look at everybody's parent.
        for name in os.listdir("/proc"):
            if name.isdecimal():
                seen = process(int(name))
                if seen is not None and seen.parent == pid:
                    found.add(int(name))
    return sorted(found)
