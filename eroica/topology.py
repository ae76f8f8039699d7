"""Where hosts stand in the network, as a file tells it, and what a finding's ranks have in common there.

A roll-up is said only where it is all but certain: all of the ranks behind a unit (a host, a leaf, a rail, a spine) are
in the finding, or nearly all, and nearly none elsewhere. Two kinds of units that hold the same ranks are both named,
since nothing tells them apart, and so is a role that holds them: then it may be their work. Silence says nothing. Pure
but for `read_topology`. Used by `offline` and `investigation` on a diagnosis that is made already, slow or hung, so
that no cause is found, lost or changed here.

The file, TOML or JSON; a list gives one name for each rank of the host, in order, as where each card has its own rail:

    [hosts.node-0]
    leaf = "leaf0"
    spine = "spine0"
    rail = ["rail0", "rail1", "rail2", "rail3"]
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eroica.errors import UserError
from eroica.findings import Diagnosis, Evidence, Finding
from eroica.job import parse_ranks

LEVELS = ("leaf", "rail", "spine")
"""From near to far; a leaf and a rail are as near."""
MOST_BYTES = 64 << 20
MOST_NAME = 100
"""Characters of a name."""
MOST_RANKS = 1 << 22
"""Of a finding or a host; more are not looked at."""
NEARLY_ALL = 0.9
"""Share of the ranks behind a unit that must be in the finding: one in ten may be too little slow to be told, or have
sent nothing."""
NEARLY_NONE = 0.1
"""Share of the finding's ranks that may lie elsewhere, and of the ranks behind any other unit that may be in it."""
MOST_UNITS = 4
"""More units together are no place any more."""
FEW_OTHERS = 2
"""Ranks that must be elsewhere and well: without them there is nothing to set the unit apart from."""
_PLACED = frozenset({"rank", "host", "group", "link"})
"""Scopes of findings whose ranks stand somewhere."""
_OF_WORK = frozenset({"load_imbalance"})
"""Causes that follow how a job is split: its ranks stand together because they were put there."""
_NAMES = {"host": "of host", "leaf": "behind leaf", "rail": "on rail", "spine": "behind spine"}


@dataclass(frozen=True, slots=True)
class Topology:
    """Host -> level -> names: one for all of its ranks, or one for each."""

    hosts: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RollUp:
    """What the ranks of a finding have in common."""

    level: str
    units: tuple[str, ...]
    num_behind: int
    """Ranks behind these units."""
    num_of_them: int
    """Those of the finding."""
    num_elsewhere: int
    """Ranks of the finding that lie elsewhere."""
    rivals: tuple[str, ...] = ()
    """Other descriptions of the same ranks."""

    def __str__(self) -> str:
        plural = "s" if len(self.units) > 1 and self.level != "leaf" else ""
        named = "leaves" if len(self.units) > 1 and self.level == "leaf" else self.level + plural
        where = f"{_NAMES[self.level].rpartition(' ')[0]} {named} {', '.join(self.units)}"
        who = f"all {self.num_behind}" if self.num_of_them == self.num_behind else (
            f"{self.num_of_them} of the {self.num_behind}"
        )  # fmt: skip
        return f"{who} ranks {where}"


def read_topology(path: Path) -> Topology:
    """Raises UserError, in one sentence, for what is no such file."""
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: the topology cannot be read ({error.strerror or error})") from None
    if len(data) > MOST_BYTES:
        raise UserError(f"{path} has more than {MOST_BYTES >> 20} MB; a topology names hosts and their switches")
    try:
        text = data.decode()
        told = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is neither TOML nor JSON ({error}); write [hosts.NAME] and leaf = ...") from None
    hosts = told.get("hosts") if isinstance(told, dict) else None
    if not isinstance(hosts, dict) or not hosts:
        raise UserError(f"{path} names no host; write [hosts.NAME] and, below it, leaf, rail or spine = ...")
    return Topology({host: _levels(path, host, own) for host, own in hosts.items()})


def _levels(path: Path, host: str, told: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(told, dict) or not told.keys() <= set(LEVELS):
        raise UserError(f"{path}: host {host!r} has {_shown(told)}; it may have {', '.join(LEVELS)} and nothing else")
    found = {}
    for level, names in told.items():
        listed = [names] if isinstance(names, str) else names
        if not isinstance(listed, list) or not all(isinstance(n, str) and 0 < len(n) <= MOST_NAME for n in listed):
            raise UserError(f"{path}: {level} of host {host!r} is {_shown(names)}; write a name, or a list of names")
        found[level] = tuple(listed)
    return found


def _shown(value: Any) -> str:
    text = repr(sorted(map(str, value)) if isinstance(value, dict) else value)
    return text if len(text) <= 80 else text[:77] + "..."


def with_roll_ups(diagnosis: Diagnosis, topology: Topology | None) -> Diagnosis:
    """The diagnosis, its findings with what their ranks have in common as evidence, its verdict with that of the
    first. Unchanged without a file, and where nothing can be said."""
    if topology is None or not diagnosis.findings:
        return diagnosis
    levels = dict(_units(diagnosis, topology))
    roles = {role.id: set(_ranks(role.ranks)) for role in diagnosis.roles} if len(diagnosis.roles) > 1 else {}
    evidence, findings = dict(diagnosis.evidence), []
    verdict = diagnosis.verdict
    for finding in diagnosis.findings:
        found = roll_up(finding, levels, roles)
        if found is not None:
            key = f"E{len(evidence) + 1}"
            evidence[key] = _evidence(found)
            finding = replace(finding, evidence=(*finding.evidence, key))
            if finding.id == diagnosis.findings[0].id and found.num_of_them > 1:
                who, _, what = verdict.summary.partition(": ")
                if what:
                    verdict = replace(verdict, summary=f"{who} ({found}): {what}")
        findings.append(finding)
    missing = sorted(host for host in diagnosis.hosts if host not in topology.hosts)
    coverage = diagnosis.coverage
    if missing:
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        note = f"the topology does not name {len(missing)} of {len(diagnosis.hosts)} hosts: {shown}"
        coverage = replace(coverage, notes=(*coverage.notes, note))
    return replace(diagnosis, findings=tuple(findings), evidence=evidence, verdict=verdict, coverage=coverage)


def _evidence(found: RollUp) -> Evidence:
    text = f"{found} are in it" + (
        f", and {found.num_elsewhere} elsewhere" if found.num_elsewhere else ", and no other rank is"
    )
    if found.rivals:
        text += f"; the same ranks are all {', and all '.join(found.rivals)}: the two cannot be told apart by place"
    values = {"level": found.level, "units": list(found.units), "ranks": found.num_of_them, "behind": found.num_behind}
    return Evidence(text, "topology", values)


def roll_up(
    finding: Finding, levels: Mapping[str, Mapping[str, set[int]]], roles: Mapping[str, set[int]]
) -> RollUp | None:
    """What the ranks of a finding have in common; None = nothing that could be said. `levels`: level -> unit -> ranks,
    hosts among them."""
    if finding.scope not in _PLACED or finding.cause in _OF_WORK:
        return None
    mine = set(_ranks(finding.ranks))
    everyone = set().union(*levels.get("host", {}).values())
    if len(mine) < 2 or not mine <= everyone or len(everyone) - len(mine) < FEW_OTHERS:
        return None
    fits = [fit for level, units in levels.items() if (fit := _fit(level, units, mine)) is not None]
    if not fits:
        return None
    # The fewest units say most; of as many, the nearest level claims least.
    best = min(fits, key=lambda fit: (len(fit.units), _distance(fit.level)))
    held = _behind(best, levels)
    rivals = [
        f"{_NAMES[fit.level]} {', '.join(fit.units)}"
        for fit in fits
        if fit is not best and _distance(fit.level) == _distance(best.level) and _behind(fit, levels) == held
    ]
    rivals += [f"of role {role}" for role, ranks in roles.items() if ranks == held]
    return replace(best, rivals=tuple(rivals))


def _fit(level: str, units: Mapping[str, set[int]], mine: set[int]) -> RollUp | None:
    whole, behind = [], set[int]()
    for unit, ranks in units.items():
        share = len(mine & ranks) / len(ranks)
        if share >= NEARLY_ALL:
            whole.append(unit)
            behind |= ranks
        elif share > NEARLY_NONE:
            return None
    of_them = len(mine & behind)
    if not 0 < len(whole) <= MOST_UNITS or len(whole) == len(units):
        return None
    if len(mine) - of_them > NEARLY_NONE * len(mine):
        return None
    return RollUp(level, tuple(sorted(whole)), len(behind), of_them, len(mine) - of_them)


def _behind(fit: RollUp, levels: Mapping[str, Mapping[str, set[int]]]) -> set[int]:
    return set().union(*(levels[fit.level][unit] for unit in fit.units))


def _distance(level: str) -> int:
    return {"host": 0, "leaf": 1, "rail": 1, "spine": 2}[level]


def _units(diagnosis: Diagnosis, topology: Topology) -> Iterator[tuple[str, dict[str, set[int]]]]:
    """Level -> unit -> ranks that reported. Ranks of hosts that the file does not name are behind no unit, so that they
    count as elsewhere."""
    placed = {host: sorted(_ranks(ranks)) for host, ranks in diagnosis.hosts.items()}
    yield "host", {host: set(ranks) for host, ranks in placed.items() if ranks}
    for level in LEVELS:
        units: dict[str, set[int]] = {}
        for host, ranks in placed.items():
            names = topology.hosts.get(host, {}).get(level, ())
            if len(names) == 1:
                units.setdefault(names[0], set()).update(ranks)
            elif len(names) == len(ranks):
                # Else ranks are missing, and which has which name is not known.
                for rank, name in zip(ranks, names, strict=True):
                    units.setdefault(name, set()).add(rank)
        if units:
            yield level, units


def _ranks(text: str) -> Sequence[int]:
    """Of a RANKS text; none where it is none, or claims more than any job has."""
    try:
        bounds = [part.partition("-")[::2] for part in text.split(",") if part]
        if sum(int(last or first) - int(first) + 1 for first, last in bounds) > MOST_RANKS:
            return ()
        return parse_ranks(text)
    except ValueError:
        return ()
