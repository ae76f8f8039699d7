"""Bytes of the compact forms: durations, integers, lists of ranks, texts by digest, and a reader that believes nothing.

What `codec` writes summaries with; it knows nothing of summaries itself. Little-endian columns of fixed width, so
that numpy reads them in one go. Every reader here raises DataError, with one sentence, on whatever its writer would
not have written.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from eroica.errors import DataError

MAX_NAME_BYTES = 1 << 16
"""A longer text is cut and ends in its digest, alike on every rank."""
MAX_MEMBERS = 1 << 20
"""Ranks that one list may hold."""
NONE = 255
"""Number of no text."""

_LOWEST_S, _HIGHEST_S = 1e-9, 1e5
_LEVELS = 65533
_NAN_CODE = 65535
_HEADER = struct.Struct("<4sHH")
_INTS = struct.Struct("<qB")
_NUMBER = re.compile(r"[0-9]{1,9}")


def digest(text: bytes) -> bytes:
    """The 8 bytes by which a text is known."""
    return blake2b(text, digest_size=8).digest()


MOST_KEPT = 512
"""Bytes of a text whose digest is worth keeping: names, places and groups of a job, which all of its ranks send."""


def known_digest(text: bytes) -> bytes:
    """`digest`, for a reader that meets the same texts from every rank."""
    return _kept_digest(text) if len(text) <= MOST_KEPT else digest(text)


_kept_digest = lru_cache(maxsize=65536)(digest)


def pack_durations(seconds: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """Seconds as 16 bits on a logarithmic scale.

    0 stays 0 (and what is negative becomes it), NaN stays NaN; what lies outside of 1 ns .. 27 h becomes its end.
    """
    values = np.asarray(seconds, np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        level = np.log(np.clip(values, _LOWEST_S, _HIGHEST_S) / _LOWEST_S) * (_LEVELS / np.log(_HIGHEST_S / _LOWEST_S))
    code = np.where(values > 0, 1 + np.rint(np.nan_to_num(level)), 0)
    return np.where(np.isnan(values), _NAN_CODE, code).astype("<u2")


def _seconds() -> npt.NDArray[np.float32]:
    """What each 16-bit code stands for."""
    level = (np.arange(_NAN_CODE + 1) - 1) / _LEVELS
    table: npt.NDArray[np.float32] = (_LOWEST_S * np.exp(level * np.log(_HIGHEST_S / _LOWEST_S))).astype(np.float32)
    table[0], table[_NAN_CODE] = 0.0, np.nan
    return table


_SECONDS = _seconds()


def unpack_durations(codes: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Inverse of `pack_durations`, seconds."""
    seconds: npt.NDArray[np.float32] = _SECONDS[codes]
    return seconds


def members_text(ranks: Sequence[int]) -> str:
    """Ascending ranks as runs: (0, 1, 2, 8, 16, 24) -> "0-2,8-24:8"."""
    parts = []
    k = 0
    while k < len(ranks):
        stride = ranks[k + 1] - ranks[k] if k + 1 < len(ranks) else 0
        last = k + 1
        while last + 1 < len(ranks) and ranks[last + 1] - ranks[last] == stride:
            last += 1
        if last < len(ranks) and stride > 0 and (last - k >= 2 or stride == 1):
            parts.append(f"{ranks[k]}-{ranks[last]}" + (f":{stride}" if stride != 1 else ""))
            k = last + 1
        else:
            parts.append(str(ranks[k]))
            k += 1
    return ",".join(parts)


@lru_cache(maxsize=256)
def members(text: str) -> tuple[int, ...]:
    """Inverse of `members_text`; cached, since all members of a group send the same text. Raises DataError."""
    ranks: list[int] = []
    for part in filter(None, text.split(",")):
        span, _, stride = part.partition(":")
        first, _, last = span.partition("-")
        pieces = (first, last or first, stride or "1")
        if not all(_NUMBER.fullmatch(piece) for piece in pieces) or int(pieces[2]) < 1:
            raise DataError(f"{part[:40]!r} is no run of ranks; was it written by another program?")
        run = range(int(first), int(pieces[1]) + 1, int(pieces[2]))
        if len(ranks) + len(run) > MAX_MEMBERS:
            raise DataError(f"a group lists more than {MAX_MEMBERS} ranks; was it written by another program?")
        ranks.extend(run)
    return tuple(ranks)


class Texts:
    """Table of the texts that one part refers to by a byte; at most 254 of them."""

    def __init__(self) -> None:
        self.names: dict[bytes, bytes] = {}
        """Digest -> text, in the order of first use."""
        self._numbers: dict[bytes, int] = {}

    def __call__(self, text: str | None) -> int:
        """Number of a text; NONE for None."""
        if text is None:
            return NONE
        raw = text.encode("utf-8", "backslashreplace")
        if len(raw) > MAX_NAME_BYTES:
            tail = f"...{digest(raw).hex()}".encode()
            raw = raw[: MAX_NAME_BYTES - len(tail)].decode("utf-8", "ignore").encode() + tail
        key = digest(raw)
        self.names[key] = raw
        return self._numbers.setdefault(key, len(self._numbers))

    def table(self) -> bytes:
        """What `Reader.texts` reads."""
        return bytes([len(self._numbers)]) + b"".join(self._numbers)


def pack_ints(values: npt.NDArray[Any]) -> bytes:
    """Integers as a base and offsets of 1, 2, 4 or 8 bytes; what `Reader.ints` reads."""
    wide = np.asarray(values).astype(np.int64)
    base = int(wide.min()) if len(wide) else 0
    offset = wide.astype(np.uint64) - np.array(base, np.int64).astype(np.uint64)
    width = next(w for w in (1, 2, 4, 8) if not len(offset) or int(offset.max()) < 1 << 8 * w)
    return _INTS.pack(base, width) + offset.astype(f"<u{width}").tobytes()


def framed(magic: bytes, version: int, body: bytes) -> bytes:
    """A part with its header: magic (4 bytes), version, length of the whole."""
    return _HEADER.pack(magic, version, _HEADER.size + len(body)) + body


class Reader:
    """A cursor over one framed part that refuses to read beyond its end. Each method raises DataError."""

    def __init__(self, data: bytes, magic: bytes, version: int, what: str) -> None:
        self._what = what
        if len(data) < _HEADER.size or data[:4] != magic:
            raise self.bad("has no header")
        _, seen, length = _HEADER.unpack_from(data)
        if seen != version:
            raise DataError(
                f"{what} has version {seen}, this eroica reads version {version}; use one release on both sides"
            )
        if length != len(data):
            raise self.bad(f"holds {len(data)} bytes and says {length}")
        self._data, self._at = data, _HEADER.size
        self._texts: list[str] = []

    def bad(self, why: str) -> DataError:
        """The error of a part that no writer makes."""
        return DataError(f"{self._what} {why}; it was damaged on its way, send it again")

    def check(self, good: Any, why: str) -> None:
        """Refuse the part unless all of `good` is true."""
        if not (good.all() if isinstance(good, np.ndarray) else good):
            raise self.bad(why)

    def raw(self, size: int) -> bytes:
        """The next bytes."""
        if self._at + size > len(self._data):
            raise self.bad("ends too early")
        self._at += size
        return self._data[self._at - size : self._at]

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        """The next fields."""
        return layout.unpack(self.raw(layout.size))

    def array(self, dtype: Any, count: int) -> npt.NDArray[Any]:
        """The next column; read-only."""
        kind = np.dtype(dtype)
        return np.frombuffer(self.raw(kind.itemsize * count), kind)

    def ints(self, count: int) -> npt.NDArray[np.int64]:
        """Inverse of `pack_ints`."""
        base, width = self.unpack(_INTS)
        if width not in (1, 2, 4, 8):
            raise self.bad("has integers of an odd width")
        offset = self.array(f"<u{width}", count).astype(np.uint64)
        return (offset + np.array(base, np.int64).astype(np.uint64)).astype(np.int64)

    def durations(self, count: int) -> npt.NDArray[np.float32]:
        """Inverse of `pack_durations`."""
        return unpack_durations(self.array("<u2", count))

    def texts(self, names: Mapping[bytes, bytes]) -> None:
        """Read the table of texts; `text` then gives them by number."""
        (count,) = self.raw(1)
        keys = self.raw(8 * count)
        for at in range(0, 8 * count, 8):
            raw = names.get(keys[at : at + 8])
            if raw is None:
                key = keys[at : at + 8].hex()
                raise DataError(f"{self._what} needs the unknown text {key}; send the texts of this job again")
            self._texts.append(_text(raw))

    def by_number(self) -> list[str | None]:
        """All texts by their numbers, None for NONE and for what is not listed; `count_texts` tells them apart."""
        return [*self._texts, *[None] * (NONE + 1 - len(self._texts))]

    @property
    def count_texts(self) -> int:
        """How many are listed."""
        return len(self._texts)

    def text(self, number: int) -> str:
        """Text of this number."""
        if number >= len(self._texts):
            raise self.bad("refers to a text that it does not list")
        return self._texts[number]

    def text_or_none(self, number: int) -> str | None:
        """The same where there may be none."""
        return None if number == NONE else self.text(number)


@lru_cache(maxsize=8192)
def _text(raw: bytes) -> str:
    if len(raw) > MAX_NAME_BYTES:
        raise DataError(f"a text of {len(raw)} bytes exceeds {MAX_NAME_BYTES}; was it written by another program?")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise DataError(
            f"the text {raw[:20]!r} is no UTF-8; it was damaged, send the texts of this job again"
        ) from None
