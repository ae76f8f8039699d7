"""The answer as records, and its JSON form: schema `eroica.diagnosis/1`, the contract that other people's scripts
rely on.

Records only: `diagnosis` fills them, `report` shows them, `store`, `query` and the MCP server pass them on. Readers
ignore fields that they do not know and read an unknown cause as `unknown`, so that a newer writer does not break them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from eroica.errors import DataError

SCHEMA = "eroica.diagnosis/1"

CAUSES = (
    "input_pipeline host_python host_gc gil_contention cpu_contention host_memory memory_allocator "
    "gpu_throttle gpu_compute recompilation device_sync host_device_copy intra_node_link nic_or_host_network "
    "fabric_contention sync_amplification locality load_imbalance checkpoint_io collective_mismatch "
    "missing_rank exception deadlock dead_worker startup_network configuration version_change "
    "profiler_overhead unknown none"
).split()
SCOPES = "rank host group link all rotating none".split()
CONFIDENCES = "established supported hypothesis unknown".split()
"""From surest to least sure."""
KINDS = "slow hang paused recovered crash healthy no_data".split()


@dataclass(frozen=True, slots=True)
class FunctionName:
    """A function as people read it."""

    kind: str
    name: str
    location: str | None = None
    """"path:line" of the innermost frame."""
    user_location: str | None = None
    """"path:line" of the innermost frame of the user's own code."""
    user_function: str | None = None
    """Name of the function there."""


@dataclass(frozen=True, slots=True)
class PatternValues:
    """beta (share of the critical path), mu and sigma (utilisation and its spread); None = not measured."""

    beta: float | None = None
    mu: float | None = None
    sigma: float | None = None
    mu_source: str | None = None


@dataclass(frozen=True, slots=True)
class Impact:
    """What comes back if the finding's ranks were like their peers."""

    seconds_per_iteration: float | None = None
    share: float | None = None
    """Of the observed iteration."""
    method: str | None = None
    """replay, ledger or pattern."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One observation that a finding rests on."""

    text: str
    source: str
    """Where it was read: "ledger", "pattern", "trace", "counters", "environment", ..."""
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault: who, what, why, cost, how sure, what to do."""

    id: str
    cause: str
    scope: str
    ranks: str
    """Ranges, "0-3,17"; "" = none."""
    hosts: tuple[str, ...]
    steps: str
    """stable, rotating, "every N" or once."""
    function: FunctionName | None
    pattern: PatternValues
    peers: PatternValues
    expected: PatternValues
    distance: float | None
    delta: float | None
    impact: Impact
    confidence: str
    evidence: tuple[str, ...]
    ruled_out: tuple[str, ...]
    advice: str
    device: str | None = None
    link: str | None = None


@dataclass(frozen=True, slots=True)
class Consequence:
    """What victims show: never a blame."""

    ranks: str
    function: str
    text: str


@dataclass(frozen=True, slots=True)
class Window:
    """The steps that were looked at."""

    trigger: str = "offline"
    started: str | None = None
    ended: str | None = None
    first_step: int | None = None
    """Number that the job gave it: the raw count of steps where a watcher captured it."""
    num_steps: int | None = None
    """Iterations."""
    duration_s: float | None = None
    last_step: int | None = None
    """Further ahead than `num_steps` says where an iteration is several raw steps (two optimizers)."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of the job was seen."""

    ranks_expected: int
    ranks_reported: int
    missing_ranks: str
    partial_ranks: str
    explained_share: float
    """Of the window's rank-time."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Iteration:
    """Seconds per iteration, now and when healthy."""

    observed_s: float | None = None
    baseline_s: float | None = None
    slowdown: float | None = None
    """observed / baseline: 1.05 is 5 % slower."""


@dataclass(frozen=True, slots=True)
class Role:
    """Ranks that may be compared with each other."""

    id: str
    ranks: str
    by: str
    """"groups" or "functions"."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The first finding in one line."""

    scope: str
    cause: str
    ranks: str
    hosts: tuple[str, ...]
    confidence: str
    summary: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What `diagnose` returns. `to_json` gives the contract."""

    job: str
    created: str
    kind: str
    window: Window
    coverage: Coverage
    iteration: Iteration
    roles: tuple[Role, ...]
    hosts: Mapping[str, str]
    """Host -> ranks."""
    verdict: Verdict
    findings: tuple[Finding, ...]
    consequences: tuple[Consequence, ...]
    evidence: Mapping[str, Evidence]
    environment: Mapping[str, Any] = field(default_factory=dict)
    producer: Mapping[str, str] = field(default_factory=dict)
    id: str = ""


@dataclass(frozen=True, slots=True)
class Detail:
    """The numbers behind a diagnosis that a page draws and JSON leaves out. W ranks, F functions, I iterations, C
    groups.

    Seconds are per iteration; NaN = not measured (beta: below that rank's cut-off).
    """

    ranks: npt.NDArray[np.int32]
    """(W,)"""
    hosts: tuple[str, ...]
    """(W,)"""
    roles: tuple[str, ...]
    """(W,) Role id of each rank."""
    functions: tuple[FunctionName, ...]
    """(F,) By falling largest beta."""
    beta: npt.NDArray[np.float32]
    """(W, F)"""
    mu: npt.NDArray[np.float32]
    """(W, F)"""
    own_s: npt.NDArray[np.float64]
    """(W,) Median own time."""
    wait_s: npt.NDArray[np.float64]
    """(W,) Waiting for other ranks."""
    transfer_s: npt.NDArray[np.float64]
    """(W,) Exposed transfer: communication that no work hides, less the waiting in it."""
    idle_s: npt.NDArray[np.float64]
    """(W,)"""
    own_by_step_s: npt.NDArray[np.float32]
    """(W, I)"""
    first_step: int | None
    """Number of the first of the I iterations."""
    groups: tuple[str, ...]
    """(C,) "all_reduce in 0-3 (default_pg)"."""
    group_transfer_s: npt.NDArray[np.float64]
    """(C,) Sum over the iteration's collectives of the fastest rank's duration."""
    group_wait_s: npt.NDArray[np.float64]
    """(C,) Mean over the members of what they wait for each other."""
    group_ranks: tuple[str, ...]
    """(C,) Members, ranges."""


def _plain(value: Any) -> Any:
    """Records, arrays and numpy scalars as JSON types: NaN is null, floats carry 6 significant digits."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _numbers(value) if value.dtype.kind == "f" else _plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


_EXACT = 22
"""Powers of ten up to this one are floats without error."""


def _numbers(values: npt.NDArray[np.floating[Any]]) -> list[Any]:
    """The same as `_plain` makes of each, for all at once: a large job has ten million of them."""
    wide = values.astype(np.float64)
    is_finite = np.isfinite(wide)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        digits = 5 - np.floor(np.log10(np.abs(wide)))
        up, down = (10.0 ** np.clip(power, 0, _EXACT) for power in (digits, -digits))
        rounded = np.where(digits >= 0, np.rint(wide * up) / up, np.rint(wide / down) * down)
    rounded = np.where(np.abs(digits) > _EXACT, wide, rounded)
    if is_finite.all():
        return list(rounded.tolist())
    boxed = rounded.astype(object)
    boxed[~is_finite] = None
    return list(boxed.tolist())


def to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The contract's form. `id` is a hash of all but `created`, so that the same input gives the same bytes."""
    plain = _plain(diagnosis)
    body = {"schema": SCHEMA, "producer": plain["producer"], "id": "", "job": plain["job"], "created": plain["created"]}
    for key in ("kind", "window", "coverage", "iteration", "environment", "roles"):
        body[key] = plain[key]
    body["placement"] = {"hosts": plain["hosts"]}
    for key in ("verdict", "findings", "consequences", "evidence"):
        body[key] = plain[key]
    hashed = {key: item for key, item in body.items() if key not in ("id", "created")}
    body["id"] = hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()[:12]
    return body


def detail_to_json(detail: Detail) -> dict[str, Any]:
    """The numbers of a page as JSON types: NaN is null."""
    plain = _plain(detail)
    assert isinstance(plain, dict)
    return plain


def _typed(kind: Any, data: Any, where: str) -> Any:
    """`data` as `kind`, a record or a collection, unknown fields left out. Raises DataError if a required field is
    missing or a value is of another type: a file may be anybody's, and what reads it trusts these types."""
    import msgspec

    try:
        return msgspec.convert(data, kind)
    except (ValueError, RecursionError) as error:  # a lone surrogate fails as a UnicodeError
        raise DataError(
            f"not a diagnosis of schema {SCHEMA}: {where}: {error}; write it again with this version of eroica"
        ) from None


def from_json(data: Any) -> Diagnosis:
    """Inverse of `to_json`. Raises DataError if `data` is no diagnosis or of a schema that this version cannot read."""
    if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
        seen = data.get("schema") if isinstance(data, Mapping) else type(data).__name__
        raise DataError(f"not a diagnosis: schema is {seen!r}, expected {SCHEMA!r}; a newer file needs a newer eroica")

    def part(kind: Any, key: str, default: Any = None) -> Any:
        return _typed(kind, data.get(key, default), key)

    optional: dict[str, Any] = {"pattern": {}, "peers": {}, "expected": {}, "impact": {}}
    findings = _typed(
        list[Finding], [optional | item for item in part(list[dict[str, Any]], "findings", [])], "findings"
    )
    verdict = part(Verdict, "verdict")
    return Diagnosis(
        job=part(str, "job", ""),
        created=part(str, "created", ""),
        kind=part(str, "kind", "no_data"),
        window=part(Window, "window", {}),
        coverage=part(Coverage, "coverage"),
        iteration=part(Iteration, "iteration", {}),
        roles=part(tuple[Role, ...], "roles", []),
        hosts=_typed(dict[str, str], part(dict[str, Any], "placement", {}).get("hosts", {}), "placement.hosts"),
        verdict=replace(verdict, cause=verdict.cause if verdict.cause in CAUSES else "unknown"),
        findings=tuple(replace(f, cause=f.cause if f.cause in CAUSES else "unknown") for f in findings),
        consequences=part(tuple[Consequence, ...], "consequences", []),
        evidence=part(dict[str, Evidence], "evidence", {}),
        environment=part(dict[str, Any], "environment", {}),
        producer=part(dict[str, str], "producer", {}),
        id=part(str, "id", ""),
    )
