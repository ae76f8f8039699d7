"""Bytes of the compact forms: durations, integers, lists of ranks, texts by digest, and a reader that believes nothing.

What `codec` writes summaries with; it knows nothing of summaries itself. Little-endian columns of fixed width, so
that numpy reads them in one go. Every reader here raises DataError, with one sentence, on whatever its writer would
not have written.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Hashable, Mapping, Sequence
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
MOST_KEPT_MEMBERS = 4 * MAX_MEMBERS
"""Ranks of all lists that are kept once they were read, 160 MB at most: that of all ranks, and those of a host's."""
MOST_KEPT_LISTS = 256
NONE = 255
"""Number of no text."""

_LOWEST_S, _HIGHEST_S = 1e-9, 1e5
_LEVELS = 65533
_NAN_CODE = 65535
_HEADER = struct.Struct("<4sHH")
_HEADER_ROW = np.dtype([("magic", "S4"), ("version", "<u2"), ("length", "<u2")])
_INTS = struct.Struct("<qB")
_INTS_ROW = np.dtype([("base", "<i8"), ("width", "u1")])
_NUMBER = re.compile(r"[0-9]{1,9}")


def digest(text: bytes) -> bytes:
    """The 8 bytes by which a text is known."""
    return blake2b(text, digest_size=8).digest()


MOST_KEPT = 512
"""Bytes of a text that is worth keeping, and its digest: names, places and groups of a job, which all ranks send."""


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


_kept_members: dict[str, tuple[int, ...]] = {}


def members(text: str) -> tuple[int, ...]:
    """Inverse of `members_text`; kept, since all members of a group send the same text. Raises DataError."""
    known = _kept_members.get(text)
    if known is None:
        known = _members(text)
        kept = list(_kept_members.values())
        if len(kept) >= MOST_KEPT_LISTS or sum(map(len, kept)) + len(known) > MOST_KEPT_MEMBERS:
            _kept_members.clear()
        _kept_members[text] = known
    return known


def _members(text: str) -> tuple[int, ...]:
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


class Unlike(Exception):
    """Parts that were to be read at once are not laid out alike: `layouts` has something for each, equal where they
    are."""

    def __init__(self, layouts: Sequence[Hashable]) -> None:
        self.layouts = layouts


class Reader:
    """A cursor over framed parts of one length, read at once: a row for each. It refuses to read beyond their end, and
    refuses all if one is bad; whoever wants the others reads them without it. Each method raises DataError, or Unlike
    where the parts differ in what lies where."""

    def __init__(self, parts: Sequence[bytes], magic: bytes, version: int, what: str) -> None:
        self._what = what
        size = len(parts[0])
        if size < _HEADER.size:
            raise self.bad("has no header")
        self._data = np.frombuffer(b"".join(parts), np.uint8).reshape(len(parts), size)
        self._at = 0
        header = self.array(_HEADER_ROW, 1)[:, 0]
        if (header["magic"] != magic).any():
            raise self.bad("has no header")
        other = header["version"][header["version"] != version]
        if len(other):
            raise DataError(
                f"{what} has version {other[0]}, this eroica reads version {version}; use one release on both sides"
            )
        wrong = header["length"][header["length"] != size]
        if len(wrong):
            raise self.bad(f"holds {size} bytes and says {wrong[0]}")
        self.tables: list[tuple[str, ...]] = []
        """Of each row its texts, by their numbers; one object where they are the same."""
        self.count_texts = 0
        """How many each lists."""

    def bad(self, why: str) -> DataError:
        """The error of a part that no writer makes."""
        return DataError(f"{self._what} {why}; it was damaged on its way, send it again")

    def check(self, good: Any, why: str) -> None:
        """Refuse the parts unless all of `good` is true."""
        if not (good.all() if isinstance(good, np.ndarray) else good):
            raise self.bad(why)

    def array(self, dtype: Any, count: int) -> npt.NDArray[Any]:
        """The next column: (rows, count)."""
        kind = np.dtype(dtype)
        end = self._at + kind.itemsize * count
        if end > self._data.shape[1]:
            raise self.bad("ends too early")
        block = np.ascontiguousarray(self._data[:, self._at : end])
        self._at = end
        return block.view(kind) if count else np.empty((len(block), 0), kind)

    def alike(self, column: npt.NDArray[Any]) -> Any:
        """What all rows have in it, as (rows,); raises Unlike if they differ."""
        layouts = column.tolist()
        if len(layouts) > 1 and (column != column[0]).any():
            raise Unlike(layouts)
        return layouts[0]

    def ints(self, count: int) -> npt.NDArray[np.int64]:
        """Inverse of `pack_ints`."""
        head = self.array(_INTS_ROW, 1)[:, 0]
        width = self.alike(head["width"])
        if width not in (1, 2, 4, 8):
            raise self.bad("has integers of an odd width")
        offset = self.array(f"<u{width}", count).astype(np.uint64)
        return (offset + head["base"].astype(np.uint64)[:, None]).astype(np.int64)

    def durations(self, count: int) -> npt.NDArray[np.float32]:
        """Inverse of `pack_durations`."""
        return unpack_durations(self.array("<u2", count))

    def texts(self, names: Sequence[Mapping[bytes, bytes]]) -> None:
        """Read the tables of texts, whose texts `names` holds for each row."""
        self.count_texts = self.alike(self.array("u1", 1)[:, 0])
        known: dict[tuple[int, bytes], tuple[str, ...]] = {}
        for row, told in zip(self.array("u1", 8 * self.count_texts), names, strict=True):
            keys = row.tobytes()
            table = known.get((id(told), keys))
            if table is None:
                table = known[id(told), keys] = self._table(keys, told)
            self.tables.append(table)

    def _table(self, keys: bytes, names: Mapping[bytes, bytes]) -> tuple[str, ...]:
        texts = []
        for at in range(0, len(keys), 8):
            raw = names.get(keys[at : at + 8])
            if raw is None:
                key = keys[at : at + 8].hex()
                raise DataError(f"{self._what} needs the unknown text {key}; send the texts of this job again")
            texts.append(_kept_text(raw) if len(raw) <= MOST_KEPT else _text(raw))
        return tuple(texts)

    def listed(self, *numbers: npt.NDArray[Any], or_none: bool = False) -> None:
        """Refuse the parts unless all of these are numbers of texts, or of none where that may be."""
        for column in numbers:
            good = column < self.count_texts
            self.check(good | (column == NONE) if or_none else good, "refers to a text that it does not list")


def _text(raw: bytes) -> str:
    if len(raw) > MAX_NAME_BYTES:
        raise DataError(f"a text of {len(raw)} bytes exceeds {MAX_NAME_BYTES}; was it written by another program?")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise DataError(
            f"the text {raw[:20]!r} is no UTF-8; it was damaged, send the texts of this job again"
        ) from None


_kept_text = lru_cache(maxsize=8192)(_text)
