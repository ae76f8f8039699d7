"""What torch's own flight recorder tells: the JSON form of `torch._C._distributed_c10d._dump_fr_trace_json()`.

A second source of positions, for ranks without a ring of ours: gloo and NCCL keep it, without a hook, unless
TORCH_FR_BUFFER_SIZE=0. Its pickle is never read: a pickle is code. Used by `views`.

On gloo an entry's state stays "scheduled" for ever; what is over is `retired`. On NCCL the state tells more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeGuard

from eroica.job import format_ranks
from eroica.standing import MESSAGES, Call, Group

_MOST_BYTES = 64 << 20
_MOST_COUNT = 1 << 62
"""Of numbers: what a coordinator takes in a message. One beyond would cost all that the host has to tell."""
_WIDTHS = {"Float": 4, "Half": 2, "BFloat16": 2, "Double": 8, "Long": 8, "Int": 4, "Byte": 1, "Char": 1, "Bool": 1}
_NAMES = {
    "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Double": "float64", "Long": "int64",
    "Int": "int32", "Byte": "uint8", "Char": "int8", "Bool": "bool",
}  # fmt: skip


def read_flight_recorder(path: Path) -> tuple[tuple[Group, ...], tuple[Call, ...]]:
    """Groups and calls of one rank; both empty if the file cannot be read or is none. Raises nothing."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return (), ()
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return (), ()
    return parse_flight_recorder(data)


def parse_flight_recorder(data: object) -> tuple[tuple[Group, ...], tuple[Call, ...]]:
    """The same, of parsed JSON. Entries that do not make sense are left out."""
    if not isinstance(data, Mapping):
        return (), ()
    groups = _groups(data.get("pg_config"))
    entries = data.get("entries")
    calls = [call for entry in (entries if isinstance(entries, list) else []) if (call := _call(entry, groups))]
    return tuple(groups.values()), tuple(calls)


def _groups(config: object) -> dict[str, Group]:
    found = {}
    for entry in config.values() if isinstance(config, Mapping) else ():
        if isinstance(entry, Mapping):
            name = str(entry.get("name", ""))
            description = str(entry.get("desc") or "undefined")
            ranks = entry.get("ranks")
            if isinstance(ranks, str):
                try:
                    ranks = json.loads(ranks)
                except (ValueError, RecursionError):
                    ranks = []
            members = tuple(rank for rank in ranks if _is_count(rank)) if isinstance(ranks, list) else ()
            called = description if description != "undefined" else f"group {name}"
            # Ranks that form several groups in one call give all of them one name: members tell them apart.
            found[name] = Group(f"recorder {name} {description} {format_ranks(members)}", called, members)
    return found


def _call(entry: object, groups: dict[str, Group]) -> Call | None:
    if not isinstance(entry, Mapping):
        return None
    named = entry.get("process_group")
    name = str(named[0]) if isinstance(named, list) and named else str(entry.get("pg_id", ""))
    if name not in groups:
        # gloo's configuration lacks its groups; the entries still name them.
        description = str(named[1]) if isinstance(named, list) and len(named) > 1 else ""
        groups[name] = Group(f"recorder {name} {description}", description or f"group {name}", ())
    group = groups[name]
    op = str(entry.get("profiling_name", "")).rpartition(":")[2].partition(" ")[0].strip("_")
    is_message = op in MESSAGES or entry.get("is_p2p") is True
    sequence = entry.get("p2p_seq_id" if is_message else "collective_seq_id")
    if not op or not _is_count(sequence) or is_message:
        return None  # its numbers of messages are not by peer, so they cannot be matched
    state = entry.get("state")
    backend = str(entry.get("profiling_name", "")).partition(":")[0]
    if backend and not group.backend:
        groups[name] = group = replace(group, backend=backend)
    status = "done" if entry.get("retired") is True or state == "completed" else "in"
    dtype = _first(entry.get("input_dtypes"))
    return Call(
        group=group.key,
        sequence=sequence,
        op=op.replace("_", "") if op.replace("_", "") in ("allreduce", "allgather", "alltoall") else op,
        status=status,
        num_bytes=min(_num_elements(entry.get("input_sizes")), _MOST_COUNT >> 4) * _WIDTHS.get(dtype, 0),
        dtype=_NAMES.get(dtype, ""),
    )


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_COUNT


def _first(value: object) -> str:
    return str(value[0]) if isinstance(value, list) and value else ""


def _num_elements(sizes: object) -> int:
    total = 0
    for shape in sizes if isinstance(sizes, list) else []:
        count = 1
        for size in shape if isinstance(shape, list) else [0]:
            count = min(count * size, _MOST_COUNT) if _is_count(size) else 0
        total += count
    return total
