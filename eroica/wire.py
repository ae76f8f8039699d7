"""Messages and frames as bytes: what travels between an agent and a coordinator on other hosts.

MessagePack, typed on reading, no pickle. Nothing that comes is believed: other types, numbers out of range, unknown
kinds and what is too long give DataError, and a frame bounds the memory that reading it takes. Used by `relay`; the
messages themselves are `bus`'s.

**Versions.** A frame says its version. Readers take one version more and one less than their own: fields and kinds of
messages that they do not know they leave out, and fields that they miss have defaults. Fields are only ever added,
those of a frame, of laps and of spans at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec

from eroica import bus
from eroica.background import History, Lap, Span
from eroica.bus import Message
from eroica.codec import MAX_LEDGER_BYTES, MAX_PATTERN_BYTES
from eroica.commands import MOST_START, MOST_STEPS
from eroica.degradation import Trigger
from eroica.errors import DataError
from eroica.holds import MOST_DELAY_NS, MOST_GROUPS, MOST_TTL_NS
from eroica.samplers.evidence import parse_counted

VERSION = 1
MOST_FRAME_BYTES = 900_000
"""NATS servers take 1 MiB unless told otherwise."""
MOST_MESSAGE_BYTES = 700_000
MOST_SUMMARY_BYTES = MAX_PATTERN_BYTES + MAX_LEDGER_BYTES + (256 << 10)
"""Both parts and the names that they refer to."""
MOST_MESSAGES = 4_096
"""In one frame."""
MOST_NAME = 255
"""Characters of the name of a host."""
MOST_WINDOW = (1 << 16) - 1
MOST_RANK = (1 << 24) - 1
MOST_TEXT = 4_096
"""Characters of a sentence."""
MOST_RECORDS = 4_096
"""Laps, spans, views or notes in one message: an agent sends some hundreds."""
MOST_DEPTH = 16
"""Of settings within settings: ranks tell of two or three. Some hundreds cannot be written as JSON."""
MOST_COUNT = 1 << 62


class Frame(msgspec.Struct, array_like=True, frozen=True):
    """What one end sends at once."""

    version: int
    host: str
    """Of the agent; "" from a coordinator."""
    session: str
    """Of the sender: another one each time that it starts."""
    base: int
    """Numbers up to this are not to be waited for: before the receiver's time, or given up."""
    heard_session: str
    """Of the other end, as far as known; "" before anything was heard of it."""
    heard: int
    """All up to this number were taken from that session."""
    first: int
    """Number of the first of `messages`."""
    messages: list[tuple[str, msgspec.Raw]]
    """Kind and content; each has a number and is sent until it was heard."""
    loose: list[tuple[str, msgspec.Raw]]
    """The same without numbers: the newest of its kind is all that matters."""


class _Summarized(msgspec.Struct, array_like=True):
    """`bus.Summarized`, with rows."""

    window: int
    rank: int
    summary: bytes | None
    problem: str
    laps: tuple[Lap, ...] | None
    spans: tuple[Span, ...]
    environment: dict[str, Any]
    changes: list[Trigger] = []


_OWN = (bus.Silent, bus.Joined)
"""What no agent may say."""
_KINDS: dict[str, type] = {kind.__name__: kind for kind in (*bus.TO_COORDINATOR, *bus.TO_AGENTS) if kind not in _OWN}
_read_frame = msgspec.msgpack.Decoder(Frame)
_readers: dict[str, msgspec.msgpack.Decoder[Any]] = {
    name: msgspec.msgpack.Decoder(_Summarized if kind is bus.Summarized else kind) for name, kind in _KINDS.items()
}
_encode = msgspec.msgpack.Encoder().encode


def write_frame(frame: Frame) -> bytes:
    """Inverse of `read_frame`."""
    return _encode(frame)


def read_frame(data: bytes) -> Frame:
    """Raises DataError for whatever is no frame of a version near ours."""
    if len(data) > MOST_FRAME_BYTES:
        raise DataError(f"a frame of {len(data):,} bytes came; the most is {MOST_FRAME_BYTES:,}")
    try:
        frame = _read_frame.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DataError(f"what came is no frame of eroica ({error})") from None
    if abs(frame.version - VERSION) > 1:
        raise DataError(
            f"a frame has version {frame.version}, this eroica reads version {VERSION}; install one release"
        )
    names_fit = max(len(frame.host), len(frame.session), len(frame.heard_session)) <= MOST_NAME
    counts_fit = all(0 <= count <= MOST_COUNT for count in (frame.base, frame.heard, frame.first))
    if not names_fit or not counts_fit or len(frame.messages) + len(frame.loose) > MOST_MESSAGES:
        raise DataError("a frame holds names or counts beyond all bounds")
    return frame


def write_message(message: Message) -> tuple[str, bytes]:
    """Kind and content. Raises DataError if it is too large to send."""
    plain: object = message
    if isinstance(message, bus.Summarized):
        told = message.history
        plain = _Summarized(
            window=message.window,
            rank=message.rank,
            summary=message.summary,
            problem=message.problem,
            laps=told.laps if told else None,
            spans=told.spans if told else (),
            environment=dict(told.environment) if told else {},
            changes=list(told.changes) if told else [],
        )
    try:
        data = _encode(plain)
    except (TypeError, ValueError, OverflowError):
        # Paths and texts of jobs may hold halves of characters, and an environment any number.
        data = _encode(_told(plain))
    if len(data) > MOST_MESSAGE_BYTES:
        raise DataError(f"{type(message).__name__} takes {len(data):,} bytes; the most is {MOST_MESSAGE_BYTES:,}")
    return type(message).__name__, data


def _told(value: object) -> object:
    """`value` as MessagePack can hold it."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, bool | float | bytes) or value is None:
        return value
    if isinstance(value, int):
        return int(value) if -(1 << 63) <= value < 1 << 63 else str(value)
    if isinstance(value, dict):
        return {_told(key): _told(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_told(one) for one in value]
    if isinstance(value, msgspec.Struct):
        return [_told(getattr(value, name)) for name in value.__struct_fields__]
    if is_dataclass(value):
        return {field.name: _told(getattr(value, field.name)) for field in fields(value)}
    return msgspec.to_builtins(value, enc_hook=str)


def read_message(kind: str, data: bytes | msgspec.Raw, allowed: tuple[type, ...]) -> Message:
    """Inverse of `write_message`, for messages of the kinds that the sender may send; DataError for anything else."""
    expected = _KINDS.get(kind)
    if expected is None or expected not in allowed:
        raise DataError(f"a message of kind {kind[:40]!r} came, which is not for this end")
    try:
        message = _readers[kind].decode(data)
        if isinstance(message, _Summarized):
            message = _summarized(message)
        sound = _is_sound(message)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise DataError(f"a message of kind {kind} does not fit ({error})") from None
    if not sound:
        raise DataError(f"a message of kind {kind} holds values beyond all bounds")
    if isinstance(message, bus.CountersRead):
        counted = tuple(parse_counted(list(message.counters)))
        message = bus.CountersRead(window=message.window, host=message.host, counters=counted)
    assert isinstance(message, Message)
    return message


def _summarized(plain: _Summarized) -> bus.Summarized:
    history = None
    if plain.laps is not None:
        history = History(
            laps=plain.laps,
            spans=plain.spans,
            environment=plain.environment,
            changes=tuple(plain.changes),
        )
    return bus.Summarized(
        window=plain.window, rank=plain.rank, summary=plain.summary, problem=plain.problem, history=history
    )


def _is_sound(message: Any) -> bool:
    """Its numbers are such as an agent or a coordinator could mean."""
    return all(check(message) for name, check in _CHECKS.items() if hasattr(message, name))


def _within(name: str, least: int, most: int) -> Callable[[Any], bool]:
    return lambda message: least <= getattr(message, name) <= most


def _short(name: str) -> Callable[[Any], bool]:
    return lambda message: len(getattr(message, name)) <= MOST_RECORDS


def _pace_fits(message: bus.Standing) -> bool:
    pace = message.iteration_s
    # Of none so short that the iterations in a second are no number any more; 0: there is none yet.
    return pace is None or pace == 0 or 1e-9 <= pace < 1e7


def _history_fits(message: bus.Summarized) -> bool:
    history = message.history
    return history is None or (
        all(len(part) <= MOST_RECORDS for part in (history.laps, history.spans, history.environment, history.changes))
        and _is_shallow(history.environment, MOST_DEPTH)
    )


def _is_shallow(value: object, most: int) -> bool:
    """Nothing within it lies deeper than `most`."""
    if isinstance(value, dict | list):
        inside = value.values() if isinstance(value, dict) else value
        return most > 0 and all(_is_shallow(one, most - 1) for one in inside)
    return True


def _trigger_fits(message: bus.Noticed) -> bool:
    trigger = message.trigger
    every = trigger.every is None or 0 < trigger.every <= MOST_START
    return every and 0 <= trigger.step <= MOST_COUNT and math.isfinite(trigger.cost) and trigger.baseline_ns >= 0


def _arrivals_fit(message: bus.Arrived) -> bool:
    return len(message.arrivals) <= MOST_RECORDS and all(
        0 <= one.step <= MOST_COUNT
        and 0 < one.length_ns <= MOST_COUNT
        and 0 <= one.held_ns <= MOST_COUNT
        and len(one.firsts) <= MOST_RECORDS
        and all(-1 <= duration <= MOST_COUNT for _, _, duration in one.firsts)
        and len(one.entered_ns) in (0, len(one.firsts))
        and all(-1 <= since <= MOST_COUNT for since in one.entered_ns)
        for one in message.arrivals
    )


def _delays_fit(message: bus.Hold) -> bool:
    return len(message.delays) <= MOST_GROUPS and all(
        0 <= group < 1 << 64 and all(0 <= rank <= MOST_RANK and 0 <= ns <= MOST_DELAY_NS for rank, ns in ranks)
        for group, ranks in message.delays
    )


def _moments_fit(message: bus.Hold) -> bool:
    return len(message.moments) <= MOST_GROUPS and all(
        0 <= group < 1 << 64 and 0 < moment <= MOST_COUNT for group, moment in message.moments
    )


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "rank": _within("rank", 0, MOST_RANK),
    "window": _within("window", 1, MOST_WINDOW),
    "look": _within("look", 1, MOST_WINDOW),
    "host": lambda message: 0 < len(message.host) <= MOST_NAME,
    "world_size": _within("world_size", 0, MOST_RANK + 1),
    "generation": _within("generation", 0, MOST_COUNT),
    "training": lambda message: len(message.training) <= MOST_NAME,
    "count": _within("count", 0, MOST_COUNT),
    "aligned": _within("aligned", 0, MOST_COUNT),
    "per_iteration": _within("per_iteration", 0, MOST_START),
    "num_iterations": _within("num_iterations", 0, MOST_COUNT),
    "iteration_s": _pace_fits,
    "trigger": _trigger_fits,
    "start": _within("start", 0, MOST_START),
    "num_steps": _within("num_steps", 0, MOST_STEPS),
    "expected_s": lambda message: math.isfinite(message.expected_s) and message.expected_s >= 0,
    "limit_s": lambda message: math.isfinite(message.limit_s),
    "summary": lambda message: message.summary is None or len(message.summary) <= MOST_SUMMARY_BYTES,
    "history": _history_fits,
    "views": lambda message: _short("views")(message) and all(0 <= v.rank <= MOST_RANK for v in message.views),
    "ttl_s": lambda message: 0 < message.ttl_s <= MOST_TTL_NS / 1e9,
    "groups": lambda message: (
        _short("groups")(message)
        and all(0 < met.group < 1 << 64 and 1 < met.size <= MOST_RANK for met in message.groups)
    ),
    "arrivals": _arrivals_fit,
    "delays": _delays_fit,
    "moments": _moments_fit,
    "text": lambda message: len(message.text) <= MOST_TEXT,
    "notes": _short("notes"),
    "counters": _short("counters"),
}
