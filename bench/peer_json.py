"""orjson and msgspec reading one trace into columns: python bench/peer_json.py orjson|msgspec PATH, in their
environment.

The way a careful user would write it, and the strongest that we know: the collector is off, and msgspec decodes 256 KiB
at a time into structs that hold only what the columns need (larger pieces are slower: 250 MB/s against 160). Both make
the same eleven columns, since without them the reader has nothing but objects.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.process import pin, tell, timed

ARGUMENTS = ("External id", "correlation", "stream", "Python id", "Python parent id")
CHUNK_BYTES = 256 * 1024
Columns = dict[str, list[npt.NDArray[Any]]]


def _whole(values: list[Any]) -> npt.NDArray[np.int64]:
    """Anything but a whole number is -1, as pid and stream may be text."""
    try:
        return np.fromiter(values, np.int64, len(values))
    except (TypeError, ValueError, OverflowError):
        return np.array([value if type(value) is int else -1 for value in values], np.int64)


def _add(columns: Columns, table: dict[str, int], fields: dict[str, list[Any]]) -> None:
    """Columns of one piece; `table` numbers names and categories."""
    for key in ("ts", "dur"):
        columns[key].append(np.rint(np.array(fields[key], np.float64) * 1000).astype(np.int64))
    for key in ("name", "cat"):
        for text in set(fields[key]):
            table.setdefault(text, len(table))
        columns[key].append(np.fromiter(map(table.__getitem__, fields[key]), np.int32, len(fields[key])))
    for key in ("pid", "tid", *ARGUMENTS):
        columns[key].append(_whole(fields[key]))


def with_orjson(path: Path) -> int:
    """Whole file, then columns."""
    loads: Callable[[bytes], Any] = importlib.import_module("orjson").loads
    events = [event for event in loads(path.read_bytes())["traceEvents"] if event["ph"] == "X"]
    nothing: dict[str, Any] = {}
    arguments = [event.get("args", nothing) for event in events]
    fields = {key: [event[key] for event in events] for key in ("ts", "dur", "name", "cat", "pid", "tid")}
    fields |= {key: [told.get(key, -1) for told in arguments] for key in ARGUMENTS}
    columns: Columns = {key: [] for key in fields}
    _add(columns, {}, fields)
    return len(events)


def with_msgspec(path: Path) -> int:
    """Piece by piece, cut before an event."""
    msgspec = importlib.import_module("msgspec")
    attributes = ("external", "correlation", "stream", "python", "parent")
    told = msgspec.defstruct(
        "Told",
        [(attribute, Any, -1) for attribute in attributes],
        rename=dict(zip(attributes, ARGUMENTS, strict=True)),
        gc=False,
    )
    plain = {
        "name": (str, ""),
        "cat": (str, ""),
        "ts": (float, 0.0),
        "dur": (float, 0.0),
        "pid": (Any, -1),
        "tid": (Any, -1),
    }
    fields_of = [(name, kind, usual) for name, (kind, usual) in plain.items()]
    event = msgspec.defstruct("Event", [*fields_of, ("args", told | None, None)], tag_field="ph", tag="X", gc=False)
    union: Any = event
    for mark in "sftMiIBEbenC":
        union |= msgspec.defstruct(f"Other{mark}", [], tag_field="ph", tag=mark, gc=False)
    decode = msgspec.json.Decoder(list[union]).decode
    columns: Columns = {key: [] for key in (*plain, *ARGUMENTS)}
    table: dict[str, int] = {}
    nothing = told()
    count = 0
    for text in pieces(path):
        events = [item for item in decode(text) if type(item) is event]
        if not events:
            continue
        arguments = [item.args or nothing for item in events]
        fields = {key: list(map(attrgetter(key), events)) for key in plain}
        for key, attribute in zip(ARGUMENTS, attributes, strict=True):
            fields[key] = list(map(attrgetter(attribute), arguments))
        _add(columns, table, fields)
        count += len(events)
    for key in columns:
        columns[key] = [np.concatenate(columns[key])]
    return count


def pieces(path: Path) -> Iterator[bytes]:
    """The array of events as smaller arrays."""
    with path.open("rb", buffering=0) as file:
        text = file.read(CHUNK_BYTES)
        while b'"traceEvents"' not in text or b"[" not in text.partition(b'"traceEvents"')[2]:
            text += file.read(CHUNK_BYTES)
        text = text.partition(b'"traceEvents"')[2].partition(b"[")[2]
        while True:
            more = file.read(CHUNK_BYTES)
            cut = text.rfind(b"{", 0, max(text.rfind(b'"ph"'), 0)) if more else text.rfind(b"]")
            if not more and text.rfind(b"]", 0, cut) > text.rfind(b"}", 0, cut):
                cut = text.rfind(b"]", 0, cut)
            if cut > 0:
                yield b"[" + text[:cut].rstrip().rstrip(b",") + b"]"
                text = text[cut:]
            if not more:
                return
            text += more


def main(method: str, path: str) -> None:
    """Time one reading."""
    importlib.import_module(method)
    gc.disable()
    with timed() as clock:
        count = {"orjson": with_orjson, "msgspec": with_msgspec}[method](Path(path))
    tell(**clock.told(), events=count)


if __name__ == "__main__":
    pin()
    main(*sys.argv[1:])
