"""Small Kineto traces as text in each layout that real files have, for tests of the reader."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TRACES = Path(__file__).parent / "data" / "traces"

LAYOUTS = ("classic", "classic 2022", "one line", "indented", "torch 2.13")
"""Table A of the five layouts: who wrote them differs only in white space."""


def event(name: Any = "aten::mm", ts: Any = 1000, dur: Any = 10, cat: Any = "cpu_op", **args: Any) -> dict[str, Any]:
    """A complete event in Kineto's key order. Keys of `args` that are no identifiers go in with **{...}."""
    return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": 7, "ts": ts, "dur": dur, "args": args}


def kernel(name: Any = "gemm", ts: Any = 1000, dur: Any = 10, **args: Any) -> dict[str, Any]:
    """A kernel on stream 7 of device 0."""
    item = event(name, ts, dur, "kernel", **{"stream": 7, "device": 0, "correlation": 5, "grid": [2, 3, 1], **args})
    return {**item, "pid": 0}


def _number(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def record(item: Mapping[str, Any], layout: str = "classic") -> str:
    """One event's text. Times given as str are written as they are."""
    keys = list(item)
    values = {
        key: _number(item[key]) if key in ("ts", "dur") else json.dumps(item[key]) for key in keys if key != "args"
    }
    args = item.get("args")
    if layout == "one line":
        parts = [f'"{key}": {values[key]}' for key in values]
        return "{" + ", ".join([*parts, f'"args": {json.dumps(args)}'] if args is not None else parts) + "}"
    if layout == "indented":
        parts = [f'        "{key}": {values[key]}' for key in values]
        if args is not None:
            parts.append('        "args": ' + json.dumps(args, indent=4).replace("\n", "\n        "))
        return "{\n" + ",\n".join(parts) + "\n    }"
    if layout == "torch 2.13":
        text = "{\n" + ",\n".join(f'    "{key}": {values[key]}' for key in values)
        if args is not None:
            text += '\n    ,\n    "args": {\n      ' + json.dumps(args)[1:-1] + "\n    }"
        return text + "\n  }"
    head = [f'"{key}": {values[key]}' for key in values if key not in ("ts", "dur")]
    times = [f'"{key}": {values[key]}' for key in values if key in ("ts", "dur")]
    split = ", \n    " if layout == "classic 2022" else ", "
    text = "{\n    " + ", ".join(head[:2]) + split + ", ".join(head[2:])
    if times:
        text += ",\n    " + ", ".join(times)
    if args is not None:
        text += ',\n    "args": {\n      ' + json.dumps(args)[1:-1] + "\n    }"
    return text + "\n  }"


def document(items: Sequence[Mapping[str, Any]], layout: str = "classic", head: Any = None, **tail: Any) -> str:
    """A whole file: `head` before and `tail` after the events."""
    before = "".join(
        f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in (head or {"schemaVersion": 1}).items()
    )
    after = "".join(f",\n  {json.dumps(key)}: {json.dumps(value)}" for key, value in tail.items())
    body = ",\n  ".join(record(item, layout) for item in items)
    return f'\n{{\n{before}  "traceEvents": [\n  {body}\n  ]{after}\n}}\n'


def write(path: Path, text: str | bytes) -> Path:
    """Write a trace, gzipped if its name ends so. Returns `path`."""
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path
