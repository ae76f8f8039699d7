"""Writes events of our own into a trace that Kineto has just exported: one file holds all, and any viewer opens it.

Works on the text: the events go behind the last one, before the bracket that closes them, so that a file of any size
costs one short write. Not a reader of traces (that is `eroica.kineto`), and it knows one layout only, what torch's own
export ends with; a file that ends otherwise is incomplete, which is how a full disk shows. Used by `capture`.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from types import CodeType

from eroica.probe.fitting import HostEvent, Span

_TAIL_BYTES = 1 << 16
_HEAD_BYTES = 1 << 24
"""File-level keys stand before the events; lists of process groups are a few megabytes in the largest jobs."""
MOST_BYTES_TO_FIT = 64 << 20
"""A trace up to this length is looked through for its operators: 0.1 s for each 12 MB, beside training."""
_HOST_EVENT = re.compile(
    rb'"ph":\s*"X",\s*"cat":\s*"(cpu_op|user_annotation)",\s*"name":\s*"((?:[^"\\]|\\.)*)",\s*"pid":\s*\d+,\s*'
    rb'"tid":\s*(\d+),\s*"ts":\s*(\d+)(?:\.(\d{3}))?,\s*"dur":\s*(\d+)(?:\.(\d{3}))?'
)
NAME_LAST = rb'"traceName"\s*:\s*"(?:[^"\\]|\\.)*"[^\]]*\}\s*$'
"""The end of torch's own export: the name may hold brackets (pytorch/kineto#888)."""
_CLOSING = re.compile(
    # What `amend` has put before the name stands on one line.
    rb'\s*\]\s*,\s*(?:"distributedInfo": \{[^\n]*\}, )?' + NAME_LAST + rb"|\s*\]\s*\}\s*$"
)
_BASE = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d+)')


class Incomplete(Exception):
    """The export does not end as a trace does."""


def weave(path: str, events: Iterable[str]) -> None:
    """Append `events`, each the text of a JSON object whose times count from `base_ns(path)`, to the trace at `path`.

    Raises Incomplete if the file is cut, OSError if it cannot be written.
    """
    with open(path, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        start = file.seek(max(0, size - _TAIL_BYTES))
        closing = _CLOSING.search(tail := file.read())
        if closing is None:
            raise Incomplete(f"the export of {size} bytes is cut")
        text = "".join(f",\n  {event}" for event in events)
        file.seek(start + closing.start())
        file.write(text.encode() + tail[closing.start() :])


def base_ns(path: str) -> int:
    """What the times in the trace count from, nanoseconds since 1970; 0 if they are absolute."""
    head = b""
    with open(path, "rb") as file:
        while len(head) < _HEAD_BYTES and b'"traceEvents"' not in head[-(1 << 17) :]:
            part = file.read(1 << 16)
            if not part:
                break
            head += part
    found = _BASE.search(head)
    return int(found[1]) if found else 0


def host_events(path: str) -> dict[int, list[HostEvent]]:
    """Operators and annotations of the host by thread, as they stand in the file. Empty if it is too long for that."""
    found: dict[int, list[HostEvent]] = {}
    if os.path.getsize(path) > MOST_BYTES_TO_FIT:
        return found
    with open(path, "rb") as file:
        text = file.read()
    base = base_ns(path)
    for match in _HOST_EVENT.finditer(text):
        category, name, tid, ts, ts_part, dur, dur_part = match.groups()
        # Microseconds with three decimals, or with none.
        begin = base + int(ts + (ts_part or b"000"))
        end = begin + int(dur + (dur_part or b"000"))
        found.setdefault(int(tid), []).append((begin, end, category == b"cpu_op", name))
    return found


def frames(spans: list[Span], pid: int, base: int, first_id: int) -> Iterator[str]:
    """Spans as the events that torch writes for the frames that it traces."""
    # The place in `spans` makes the id; torch's own ids are far below `first_id`.
    for place, span in enumerate(spans):
        parent = str(first_id + span.parent) if span.parent >= 0 else "null"
        args = f'"Python parent id": {parent}, "Python id": {first_id + place}'
        yield event("python_function", name_of(span.code), pid, span.tid, span.begin_ns, span.end_ns, base, args)


def event(category: str, name: str, pid: int, tid: int, begin_ns: int, end_ns: int, base: int, args: str = "") -> str:
    """One complete event, with its keys in the order of Kineto's. Times in nanoseconds since 1970."""
    return (
        f'{{\n    "ph": "X", "cat": "{category}", "name": {json.dumps(name)}, "pid": {pid}, "tid": {tid},\n'
        f'    "ts": {_microseconds(begin_ns - base)}, "dur": {_microseconds(end_ns - begin_ns)},\n'
        f'    "args": {{\n      {args}\n    }}\n  }}'
    )


def _microseconds(nanoseconds: int) -> str:
    # Not by division: a double cannot hold microseconds since 1970 with three decimals.
    sign, rest = ("-", -nanoseconds) if nanoseconds < 0 else ("", nanoseconds)
    return f"{sign}{rest // 1000}.{rest % 1000:03d}"


@functools.lru_cache(maxsize=4096)
def name_of(code: CodeType) -> str:
    """A function as torch's own tracer names it: "path(line): function", with the line of its `def`."""
    path = code.co_filename
    for prefix in _prefixes():
        if path.startswith(prefix):
            path = path[len(prefix) :]
            break
    return f"{path}({code.co_firstlineno}): {code.co_name}"


@functools.cache
def _prefixes() -> list[str]:
    """What torch cuts off paths: the folders on the module path, longest first as far as it matters."""
    tracer = sys.modules.get("torch.profiler.python_tracer")
    torch_s = getattr(tracer, "_prefix_regex", None)
    if torch_s is not None:
        return [str(prefix) for prefix in torch_s()]
    return [path + os.sep for path in sorted({os.path.abspath(path) for path in sys.path}, reverse=True)]
