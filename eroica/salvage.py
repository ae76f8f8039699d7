"""Mends the text of one broken trace record, or says that it cannot be mended.

Not a JSON parser: sound records never come here. Used by `records` for the few that strict JSON refuses: bytes that are
not UTF-8, control characters and raw backslashes in names, bare quotes, values without quotes. What is mended keeps the
event's times; what stays ambiguous is dropped, since an invented event is worse than a lost one.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

MAX_MENDED_BYTES = 1 << 24
"""Mending copies the text several times; a damaged record beyond this is given up."""
_LENIENT = json.JSONDecoder(parse_float=Decimal, strict=False)
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_GOOD_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_RAW_BACKSLASH = re.compile(r'\\(?!")')
_QUOTE_AFTER_BACKSLASH = re.compile(r'\\"(?=\s*(?:,\s*"[^"\\]{1,40}"\s*:|[}\]]\s*[,}\]]))')
_TEXT_OR_INT = r'("[^"\\]*"|-?\d+)'
_NUMBER = r"(-?\d+(?:\.\d+)?)"
# The sound head of a record in Kineto's fixed key order; the name may hold bare quotes (pytorch#146900), but not the
# keys of an event: where the start of the next record is damaged too, a name would run on into it.
_NAME = r'((?:(?!"(?:ph|cat|name|pid|tid|ts|dur|args)"\s*[:{]).){0,20000}?)'
_HEAD = re.compile(
    r'\{\s*"ph"\s*:\s*"X"\s*,\s*"cat"\s*:\s*"([^"\\]*)"\s*,\s*"name"\s*:\s*"'
    rf'{_NAME}"\s*,\s*"pid"\s*:\s*{_TEXT_OR_INT}\s*,\s*"tid"\s*:\s*{_TEXT_OR_INT}'
    rf'\s*,\s*"ts"\s*:\s*{_NUMBER}\s*,\s*"dur"\s*:\s*{_NUMBER}'
    r'\s*(?:\}|,\s*"args"\s*:\s*(\{.*\})\s*\})\s*$',
    re.DOTALL,
)
_SURROGATE = re.compile("[\ud800-\udfff]")


def clean(text: str) -> str:
    """Text that can be written anywhere: bytes that were not UTF-8 become `\\xNN`.

    So two names that differ only in such bytes stay two.
    """
    if text.isascii():
        return text
    return _SURROGATE.sub(lambda m: _spelled(ord(m.group())), text)


def _spelled(code: int) -> str:
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"


def _literal_backslashes(text: str) -> str:
    """A string with one invalid escape was never escaped at all: each of its backslashes stands for itself."""

    def mend(match: re.Match[str]) -> str:
        content = match.group(1)
        return '"' + _RAW_BACKSLASH.sub(r"\\\\", content) + '"' if _has_bad_escape(content) else match.group()

    return _STRING.sub(mend, text)


def _with_ends(text: str) -> str:
    """As above, where a backslash before the closing quote hid it; a zero byte keeps the place of that backslash."""
    return _literal_backslashes(_QUOTE_AFTER_BACKSLASH.sub('\0"', text)).replace('\0"', '\\\\"')


def _has_bad_escape(content: str) -> bool:
    return "\\" in _GOOD_ESCAPE.sub("", content)


def _decode(text: str) -> tuple[dict[str, Any], int] | None:
    try:
        event, end = _LENIENT.raw_decode(text)
    except (ValueError, ArithmeticError, RecursionError):
        return None
    return (event, end) if isinstance(event, dict) else None


def ends_record(rest: str) -> bool:
    """Whether what stands behind an event is the end of its slice, or of the array."""
    rest = rest.lstrip(" \t\r\n,")
    return not rest or rest.startswith("]")


def mend(record: bytes) -> tuple[dict[str, Any] | None, bool, int]:
    """The event in a slice that starts with `{` and runs up to the next record or the end of the file.

    Returns (event or None, True if its arguments were lost, length of the text that belongs to it). Numbers with a
    fraction are Decimal. Strings may hold lone surrogates for broken bytes: pass them through `clean`.
    """
    if len(record) > MAX_MENDED_BYTES:
        return None, False, len(record)
    text = record.decode("utf-8", "surrogateescape")
    for repair in (str, _literal_backslashes, _with_ends):
        candidate = repair(text)
        found = _decode(candidate)
        if found:
            event, end = found
            rest = candidate[end:]
            if ends_record(rest):
                return event, False, len(record) - len(rest.encode("utf-8", "surrogateescape"))
    head = _HEAD.match(text.rstrip(" \t\r\n,"))
    if head is None:
        return None, False, len(record)
    category, name, pid, tid, ts, dur, args = head.groups()
    found = _decode(_literal_backslashes(args)) if args else ({}, 0)
    event = {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": pid.strip('"'),
        "tid": tid.strip('"'),
        "ts": Decimal(ts),
        "dur": Decimal(dur),
        "args": found[0] if found else {},
    }
    return event, found is None or found[1] < len(args or ""), len(record)
