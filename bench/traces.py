"""Big Kineto traces for measuring, grown from a small real one by repeating it in time.

Not a simulator: every repetition holds the same events with the same durations, shifted, so the number of events and
all sums are known. Ids (correlation, External id, Python id, flows, step numbers) are shifted too, since readers and
analyses join by them and a repeated id would make either of them cheaper or wrong. Written in the layouts of Kineto's
own writers, byte for byte as far as whitespace goes, because fast readers are sensitive to it. Used by `bench` and its
tests; HolisticTraceAnalysis, orjson and msgspec read the same files.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

Layout: TypeAlias = Literal["classic", "torch 2.13"]
Event: TypeAlias = dict[str, Any]

_SHIFTED = {
    "External id": "external",
    "correlation": "correlation",
    "Ev Idx": "index",
    "Python id": "python",
    "Python parent id": "python",
    "Record function id": "record",
    "Sequence number": "sequence",
    "Seq": "collective",
}
"""Arguments that name an event -> the counter that they are drawn from. Module ids and streams live on."""
_GAP_NS = 100_000
"""Between two repetitions."""
_TAIL_KEYS = {
    "classic": ("INFO", "WARNING", "ERROR", "STAGE", "traceName", "displayTimeUnit", "baseTimeNanoseconds"),
    "torch 2.13": ("INFO", "WARNING", "ERROR", "STAGE", "traceName"),
}
"""File-level keys that Kineto writes after the events."""
_NOT_KINETO = ("traceEvents", "metadata")
_STEP = "ProfilerStep#"
MAX_STEPS = 20
"""Steps in a grown trace whose seed marks them: profiler windows hold a few. Repetitions share a step where there are
more, since hundreds of short steps would be unfair to HTA, which looks each event up in a list of all steps."""


@dataclass(frozen=True, slots=True)
class Grown:
    """What was written."""

    path: Path
    num_bytes: int
    num_events: int
    """Complete events (ph X) of a category that readers keep, so without the span of the whole trace."""
    repeats: int
    num_steps: int
    """Distinct ProfilerStep numbers."""


class _Template:
    """One repetition as a bytes format with numbered holes: base value and counter of each, filled by one `%`."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.bases: list[int] = []
        self.counters: list[str] = []

    def put(self, text: str) -> None:
        self.text.append(text.replace("%", "%%"))

    def hole(self, counter: str, base: int, form: str = "%d") -> None:
        self.text.append(form)
        self.bases.append(base)
        self.counters.append(counter)

    @property
    def num_bytes(self) -> int:
        return len(self.fill(dict.fromkeys(self.counters, 0)))

    def fill(self, offsets: dict[str, int]) -> bytes:
        """With so much added to each counter."""
        counters = np.array(self.counters)
        values = np.array(self.bases, np.int64)
        for counter, offset in offsets.items():
            values[counters == counter] += offset
        values[counters == "us"] //= 1000
        values[counters == "ns"] %= 1000
        return "".join(self.text).encode() % tuple(values.tolist())


@dataclass(frozen=True, slots=True)
class _Clock:
    """How the seed writes times: whole microseconds, or with three decimals."""

    decimals: bool

    def ns(self, value: Any) -> int:
        return int(Decimal(value) * 1000)

    def text(self, ns: int) -> str:
        return "{}.{:03}".format(*divmod(ns, 1000)) if self.decimals else str(ns // 1000)

    def hole(self, template: _Template, ns: int) -> None:
        """The times of a repetition are ns, but two holes are cheaper to fill than one formatted text."""
        if self.decimals:
            template.hole("us", ns, "%d.")
            template.hole("ns", ns, "%03d")
        else:
            template.hole("us", ns)


def grow(seed: Path, out: Path, megabytes: float, layout: Layout) -> Grown:
    """Repeat the events of `seed` (JSON, plain or gzip) until `out` holds at least `megabytes` x 1e6 bytes.

    At least one repetition is written. Raises ValueError if the seed holds no complete event.
    """
    raw = seed.read_bytes()
    document = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw, parse_float=Decimal)
    events: list[Event] = document["traceEvents"]
    body = [event for event in events if _repeats(event)]
    spans = [event for event in body if event["ph"] == "X"]
    if not spans:
        raise ValueError(f"{seed}: holds no complete event to repeat")
    clock = _Clock(any(isinstance(event["ts"], Decimal) for event in spans))
    start = min(clock.ns(event["ts"]) for event in spans)
    period = max(clock.ns(event["ts"]) + clock.ns(event["dur"]) for event in spans) - start + _GAP_NS
    period += -period % 1000
    once = [event for event in events if not _repeats(event)]
    plain, unmarked = _body(body, layout, clock), [event for event in body if not _is_step(event)]
    strides = _strides(body)
    shared = max(1, math.ceil(megabytes * 1e6 / plain.num_bytes * max(strides["step"], 1) / MAX_STEPS))
    leading = _body([_lengthened(event, clock, (shared - 1) * period) for event in body], layout, clock)
    following = _body(unmarked, layout, clock)
    tail = _TAIL_KEYS[layout]
    with out.open("wb", buffering=1 << 22) as file:
        keys = {key: value for key, value in document.items() if key not in (*_NOT_KINETO, *tail)}
        file.write(_head(keys).encode())
        size = 0
        for event in once:
            size += file.write((",\n" if size else "").encode() + _once(event, layout, clock))
        if not once:
            # The body's events each start with the comma that follows the event before.
            file.write(b'  {\n    "ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {}\n  }')
        repeats = num_events = 0
        while size < megabytes * 1e6 or not repeats:
            step, place = divmod(repeats, shared)
            offsets = {counter: repeats * stride for counter, stride in strides.items()}
            offsets |= {"us": repeats * period, "ns": repeats * period, "step": step * strides["step"]}
            size += file.write((following if place else leading).fill(offsets))
            num_events += sum(event["ph"] == "X" for event in (unmarked if place else body))
            repeats += 1
        rest = "".join(f",\n  {_json(key)}: {_json(document[key])}" for key in tail if key in document)
        file.write(f"\n  ]{rest}\n}}\n".encode())
    num_steps = math.ceil(repeats / shared) * strides["step"]
    return Grown(out, os.path.getsize(out), num_events, repeats, num_steps)


def _body(events: list[Event], layout: Layout, clock: _Clock) -> _Template:
    template = _Template()
    for event in events:
        template.put(",\n")
        _write(template, event, layout, clock)
    return template


def _lengthened(event: Event, clock: _Clock, by_ns: int) -> Event:
    """A step marker that covers the repetitions behind it too; other events as they are."""
    if not _is_step(event) or event["ph"] != "X":
        return event
    return {**event, "dur": Decimal(clock.ns(event["dur"]) + by_ns) / 1000}


def _strides(body: list[Event]) -> dict[str, int]:
    """How far each counter moves from one repetition to the next."""
    highest = dict.fromkeys([*_SHIFTED.values(), "flow"], 0)
    steps = [int(event["name"][len(_STEP) :]) for event in body if _is_step(event)]
    for event in body:
        for key, counter in _SHIFTED.items():
            value = event.get("args", {}).get(key)
            if isinstance(value, int):
                highest[counter] = max(highest[counter], value)
        if event["ph"] in "sf":
            highest["flow"] = max(highest["flow"], int(event["id"]))
    # Flows between host and device carry correlation ids: one counter for both.
    highest["flow"] = highest["correlation"] = max(highest["flow"], highest["correlation"])
    return {counter: value + 1 for counter, value in highest.items()} | {
        "step": max(steps) - min(steps) + 1 if steps else 0
    }


def _repeats(event: Event) -> bool:
    """Not so metadata, and the marks and the span of the whole window, which have no numeric process."""
    return event["ph"] in ("X", "s", "f", "i") and event.get("cat") != "Trace" and isinstance(event.get("pid"), int)


def _is_step(event: Event) -> bool:
    name = event.get("name")
    return isinstance(name, str) and name.startswith(_STEP) and name[len(_STEP) :].isdigit()


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=float)


def _head(keys: dict[str, Any]) -> str:
    return (
        "\n{\n" + "".join(f"  {_json(key)}: {_json(value)},\n" for key, value in keys.items()) + '  "traceEvents": [\n'
    )


def _once(event: Event, layout: Layout, clock: _Clock) -> bytes:
    """An event that is not repeated."""
    template = _Template()
    _write(template, event, layout, clock)
    return template.fill({})


def _write(template: _Template, event: Event, layout: Layout, clock: _Clock) -> None:
    """One event as Kineto writes it: classic has several keys on a line, torch 2.13 one, and lone commas."""
    between = ",\n    " if layout == "torch 2.13" else ", "
    separator = "  {\n    "
    for key, value in event.items():
        if key == "args":
            template.put('\n    ,\n    "args": {\n      ' if layout == "torch 2.13" else ',\n    "args": {\n      ')
            _arguments(template, value)
            template.put("\n    }")
            continue
        template.put(f"{',' + chr(10) + '    ' if key == 'ts' else separator}{_json(key)}: ")
        separator = between
        if key == "ts":
            clock.hole(template, clock.ns(value))
        elif key == "dur":
            template.put(clock.text(clock.ns(value)))
        elif key == "id" and event["ph"] in "sf":
            template.hole("flow", int(value))
        elif key == "name" and _is_step(event):
            template.put(f'"{_STEP}')
            template.hole("step", int(value[len(_STEP) :]))
            template.put('"')
        else:
            template.put(_json(value))
    template.put("\n  }")


def _arguments(template: _Template, arguments: dict[str, Any]) -> None:
    for number, (key, value) in enumerate(arguments.items()):
        template.put(f"{', ' if number else ''}{_json(key)}: ")
        if key in _SHIFTED and isinstance(value, int) and value > 0:
            template.hole(_SHIFTED[key], value)
        else:
            template.put(_json(value))
