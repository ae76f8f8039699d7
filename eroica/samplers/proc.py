"""What files of /proc say, as numbers: text in, values out, and the few ways to read such a file.

Parsers take the text, so that they are tested on recorded files; a field that is missing or malformed is left out. The
formats are those of the kernel's documentation (Documentation/filesystems/proc.rst, accounting/psi.rst,
admin-guide/iostats.rst, scheduler/sched-stats.rst). Used by `host`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOST_BYTES = 1 << 20
"""Longest file that is read: /proc/diskstats of a host with thousands of volumes stays below."""


SURELY_ALL = 2048
"""The kernel gives a page or more at once while there is more: a shorter part is the last, and asking again costs."""


def read_text(path: Path | str) -> str:
    """Contents; "" if it cannot be read. A process may end at any time, a file may be forbidden: both are normal."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        found = b""
        while len(found) < MOST_BYTES:
            part = os.read(handle, 1 << 16)
            if not part:
                break
            found += part
            if len(part) < SURELY_ALL:
                break
        return found.decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(handle)


def read_number(path: Path | str) -> float | None:
    """A file that holds one number, or None."""
    return number(read_text(path).strip())


def number(text: str) -> float | None:
    """A decimal number, or None."""
    try:
        return float(text)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Stat:
    """/proc/PID/stat or that of a task."""

    name: str
    state: str
    parent: int
    minor_faults: int
    major_faults: int
    cpu_ticks: int
    """User and system time."""
    start_ticks: int
    processor: int
    """The core it ran on last."""


def parse_stat(text: str) -> Stat | None:
    """None if this is not such a file. The name may hold spaces and parentheses, so it ends at the last one."""
    opened, closed = text.find("("), text.rfind(")")
    fields = text[closed + 1 :].split()
    if opened < 0 or closed < opened or len(fields) < 37:
        return None
    try:
        return Stat(
            text[opened + 1 : closed],
            fields[0],
            int(fields[1]),
            int(fields[7]),
            int(fields[9]),
            int(fields[11]) + int(fields[12]),
            int(fields[19]),
            int(fields[36]),
        )
    except ValueError:
        return None


def parse_schedstat(text: str) -> tuple[int, int] | None:
    """(nanoseconds on a core, nanoseconds runnable and waiting for one), or None."""
    fields = text.split()
    if len(fields) < 3 or not all(field.isdigit() for field in fields[:2]):
        return None
    return int(fields[0]), int(fields[1])


def words_of(text: str, *keys: str) -> dict[str, list[str]]:
    """The words after each of these keys, of a file of lines "key value" or "key: value".

    Such files have a hundred lines of which a handful is wanted, so lines are looked for and not split one by one.
    """
    found: dict[str, list[str]] = {}
    text = "\n" + text
    for key in keys:
        at = text.find("\n" + key)
        # A longer key may begin with this one.
        while at >= 0 and text[at + len(key) + 1 : at + len(key) + 2] not in (" ", ":", "\t"):
            at = text.find("\n" + key, at + 1)
        if at >= 0:
            end = text.find("\n", at + 1)
            found[key] = text[at + len(key) + 2 : end if end >= 0 else len(text)].split()
    return found


def numbers_of(text: str, *keys: str) -> dict[str, float]:
    """The numbers after these keys; with "kB" behind them in bytes."""
    found: dict[str, float] = {}
    for key, words in words_of(text, *keys).items():
        value = number(words[0]) if words else None
        if value is not None:
            found[key] = value * 1024 if words[1:2] == ["kB"] else value
    return found


def parse_pressure(text: str) -> dict[str, float]:
    """Microseconds in which "some" and "full" were stalled, of /proc/pressure/*."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        fields = line.split()
        for field in fields[1:]:
            key, _, value = field.partition("=")
            total = number(value) if key == "total" else None
            if total is not None:
                found[fields[0]] = total
    return found


def parse_cpu(text: str) -> dict[str, float]:
    """Ticks of all cores together by state, and `procs_running`, of /proc/stat."""
    states = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    found: dict[str, float] = {}
    for line in text.splitlines():
        fields = line.split()
        if not fields:
            continue
        if fields[0] == "cpu":
            values = [number(field) for field in fields[1:9]]
            found |= {state: value for state, value in zip(states, values, strict=False) if value is not None}
        elif fields[0] == "procs_running" and len(fields) > 1:
            value = number(fields[1])
            if value is not None:
                found["procs_running"] = value
    return found


def parse_interfaces(text: str) -> Iterator[tuple[str, dict[str, float]]]:
    """Each interface of /proc/net/dev and its counts."""
    places = {"rx_bytes": 0, "rx_errors": 2, "rx_drops": 3, "tx_bytes": 8, "tx_errors": 10, "tx_drops": 11}
    for line in text.splitlines()[2:]:
        name, colon, rest = line.partition(":")
        values = [number(field) for field in rest.split()]
        if colon and len(values) >= 16:
            yield name.strip(), {key: v for key, at in places.items() if (v := values[at]) is not None}


def parse_snmp(text: str, section: str) -> dict[str, float]:
    """One section of /proc/net/snmp: a line of names, a line of values."""
    lines = [line.split()[1:] for line in text.splitlines() if line.startswith(section + ":")]
    if len(lines) < 2:
        return {}
    return {key: value for key, text in zip(lines[0], lines[1], strict=False) if (value := number(text)) is not None}


def parse_disks(text: str) -> Iterator[tuple[str, dict[str, float]]]:
    """Each block device of /proc/diskstats that was ever used."""
    for line in text.splitlines():
        fields = line.split()
        values = [number(field) for field in fields[3:14]]
        if len(values) < 11 or any(value is None for value in values) or not any(values):
            continue
        sound = [value for value in values if value is not None]
        yield (
            fields[2],
            {
                "read_bytes": sound[2] * 512,
                "write_bytes": sound[6] * 512,
                "busy_ms": sound[9],
                "queue_ms": sound[10],
            },
        )


def parse_cores(text: str) -> frozenset[int]:
    """Cores of a list like "0-3,8"; what cannot be read is left out."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):
            cores.update(range(int(first), min(int(last or first), int(first) + 8192) + 1))
    return frozenset(cores)
