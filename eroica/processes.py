"""What /proc tells of a process: its state, who traces it, its children, how it ended. Reads, never signals.

Of processes of this host and pid namespace only. Exit statuses are known while the dead process still has an entry,
that is until its parent asks for it, and to its owner alone. Used by `stacks` and `views`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from eroica.standing import Child


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
