"""Whole chunks of sound records to columns by msgspec: the fast half of the reader that needs no compiler.

Not tolerant: a chunk that holds anything unexpected is refused untouched, and `kineto.Tolerant` reads its records one
by one. Used by `kineto`. What msgspec accepts and `records.DECODER` does not is refused beforehand: in values that it
skips, bytes that are not UTF-8 and endless numbers; nesting of a hundred levels. What the two read unlike (numbers with
a fraction) is taken as text. So a chunk gives the rows that its records give one by one, bit for bit, at several times
the speed: no dict of an event is made, and each distinct text of a shape or grid is decoded once.
"""

from __future__ import annotations

import operator
import re
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import compress
from types import GenericAlias
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from eroica.records import (
    CATEGORY_OF,
    COLUMNS,
    DECODER,
    DROPPED,
    IGNORED_PHASES,
    MEASURES,
    ON_DEVICE,
    UNREAD_PHASES,
    Category,
    Rows,
    integer,
    measures,
    nanoseconds,
)

CHUNK_BYTES = 1 << 18
"""Of text per call of msgspec: its objects stay in the caches; with megabytes it is slower by a third."""
_SEPARATORS = re.compile(rb"[ \t\r\n,]*")
_BOUNDARY = re.compile(rb'\}([ \t\r\n]*,[ \t\r\n]*)(?=\{[ \t\r\n]*("ph"[ \t\r\n]*:)?)')
"""Between two records, or two objects inside of one: then the chunk is no array of whole records, and is refused."""
_TAIL_BYTES = 1 << 11
"""Where a boundary is looked for first, then four times as far back, and so on: searching all of a chunk takes long."""
_MAX_NESTING = 100
"""Far below the depth at which either decoder gives up; those depths depend on who calls."""
_LONG_DIGITS = 2150
_LONG_NUMBER = re.compile(b"[0-9]{%d}" % _LONG_DIGITS)
"""Python converts integers of up to 4300 digits; a longer one holds such a run at a multiple of the run's length."""
_LONG_EXPONENT = re.compile(rb"[eE][-+]?[0-9]{18}")
"""May be more than Decimal takes."""
_BEFORE_EXPONENT = np.isin(np.arange(256), list(b"eE+-"))
_MAX_PLAIN_TIME = 20
"""Length of a time with its point and the comma after it: 18 digits of nanoseconds at most, which fit in 64 bits."""
_DEFAULTS = {"work": -1, "stream": -1, "device": -1, "bandwidth_gbs": np.nan, "occupancy": np.nan}
_Columns: TypeAlias = dict[str, npt.NDArray[Any]]
_Communication: TypeAlias = list[tuple[int, Mapping[str, Any]]]
_ABSENT = msgspec.Raw(b"")
_MAX_KNOWN = 1 << 14
_MAX_KNOWN_BYTES = 1 << 9
"""Of one key: so the table stays below some ten megabytes, whatever the file holds."""


class _Arguments(
    msgspec.Struct,
    gc=False,
    rename={
        "external": "External id",
        "collective": "Collective name",
        "dims": "Input Dims",
        "occupancy": "est. achieved occupancy %",
        "bandwidth": "memory bandwidth (GB/s)",
        "num_bytes": "bytes",
    },
):
    """What columns need of the arguments. No number with a fraction fits an int here: such a chunk is refused."""

    correlation: int | str | None = 0
    external: int | str | None = 0
    stream: int | str | None = -1
    device: int | str | None = -1
    collective: msgspec.Raw = _ABSENT
    dims: msgspec.Raw = _ABSENT
    grid: msgspec.Raw = _ABSENT
    occupancy: msgspec.Raw = _ABSENT
    num_bytes: msgspec.Raw = _ABSENT
    bandwidth: msgspec.Raw = _ABSENT


class _Complete(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    """A complete event. Times as text, since a double cannot hold them."""

    cat: str = ""
    name: str = ""
    pid: int | str = ""
    tid: int | str = ""
    ts: msgspec.Raw = _ABSENT
    dur: msgspec.Raw = _ABSENT
    args: _Arguments | None = None


class _Whole(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    """A complete event again, for those whose arguments are kept whole."""

    cat: str = ""
    args: msgspec.Raw = _ABSENT


class _Meta(msgspec.Struct, gc=False, tag_field="ph", tag="M"):
    """Names a track."""

    name: str = ""
    pid: int | str = ""
    tid: int | str = ""
    args: msgspec.Raw = _ABSENT


def _without_fields(phase: str) -> Any:
    return msgspec.defstruct(f"Phase_{phase}", [], tag_field="ph", tag=phase, gc=False)


_UNREAD = frozenset(_without_fields(phase) for phase in UNREAD_PHASES)
_OTHERS = [*_UNREAD, *(_without_fields(phase) for phase in IGNORED_PHASES)]


def _decoder(*kinds: Any) -> Any:
    return msgspec.json.Decoder(GenericAlias(list, (reduce(operator.or_, (*kinds, *_OTHERS)),)))


_EVENTS = _decoder(_Complete, _Meta)
_WHOLE_ARGUMENTS = _decoder(_Whole, _without_fields("M"))
_NO_ARGUMENTS = _Arguments()


_ATTRIBUTE = dict(zip(_Arguments.__struct_encode_fields__, _Arguments.__struct_fields__, strict=True))
_TEXTS = {
    int(category): [operator.attrgetter(_ATTRIBUTE[name]) for name in names] for category, names in MEASURES.items()
}
"""For each category: the texts that `measures` needs."""


def _value(text: msgspec.Raw) -> Any:
    return DECODER.decode(str(text, "utf-8"))


class Chunks:
    """Puts chunks into the columns of one file."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._tracks: dict[tuple[int | str, int | str], int] = {}
        self._known: dict[int, dict[bytes, tuple[int, float, float]]] = {code: {} for code in MEASURES}
        """For each category: texts of its arguments -> `measures` of them; some hundreds of shapes make up a trace."""

    def take(self, buffer: bytearray, start: int, end: int) -> tuple[int, int]:
        """Take chunk after chunk from buffer[start:end].

        Returns (first byte not taken, end of the chunk that was refused, which is `end` if there is no further chunk).
        """
        while True:
            match = _SEPARATORS.match(buffer, start, end)
            assert match is not None
            start = match.end()
            cut = _cut(buffer, start, min(start + CHUNK_BYTES, end))
            if cut is None:
                return start, end
            with memoryview(buffer) as view:
                text = b"".join((b"[", view[start : cut[0]], b"]"))
            if not self.add(text):
                return start, cut[1]
            start = cut[1]

    def add(self, text: bytes) -> bool:
        """Take the records of a JSON array, or none of them: False if anything in it is out of the ordinary."""
        try:
            if not text.isascii():
                text.decode()
            if _extreme(text):
                return False
            decoded = _EVENTS.decode(text)
            kinds = Counter(map(type, decoded))
            named = [_naming(event) for event in decoded if type(event) is _Meta] if kinds[_Meta] else []
            events, columns, communication = self._columns(
                [event for event in decoded if type(event) is _Complete], text
            )
        except (msgspec.MsgspecError, ValueError, ArithmeticError, RecursionError):
            return False
        rows = self._rows
        before = len(rows)
        rows.communication += [(before + index, args) for index, args in communication]
        names = [event.name for event in events]
        for name in dict.fromkeys(names):
            if name not in rows.strings:
                rows.name_id(name)
        tracks = [(event.pid, event.tid) for event in events]
        for track in dict.fromkeys(tracks):
            if track not in self._tracks:
                self._tracks[track] = rows.track_id(*track)
        columns["name"] = np.fromiter(map(rows.strings.__getitem__, names), np.int32, len(names))
        columns["track"] = np.fromiter(map(self._tracks.__getitem__, tracks), np.int32, len(tracks))
        for name, column in columns.items():
            rows.values[name].frombytes(column.tobytes())
        for event in named:
            rows.add(event, 0)
        rows.losses.unread += sum(kinds[kind] for kind in _UNREAD)
        return True

    def _columns(self, events: list[_Complete], text: bytes) -> tuple[list[_Complete], _Columns, _Communication]:
        """(events that are kept, their columns but name and track, (event, arguments) of collectives).

        Changes nothing. Raises ValueError or ArithmeticError if an event has no usable time or anything odd.
        """
        labels = [event.cat for event in events]
        code_of = {label: int(CATEGORY_OF.get(label, Category.OTHER)) for label in set(labels)}
        codes = np.fromiter(map(code_of.__getitem__, labels), np.uint8, len(labels))
        kept = codes != DROPPED
        if not kept.all():
            events, codes = list(compress(events, kept.tolist())), codes[kept]
        args = [event.args or _NO_ARGUMENTS for event in events]
        columns: _Columns = {name: np.full(len(events), value, COLUMNS[name]) for name, value in _DEFAULTS.items()}
        columns["category"] = codes
        columns["ts_ns"] = _times([event.ts for event in events])
        columns["dur_ns"] = _times([event.dur for event in events])
        if columns["dur_ns"].min(initial=0) < 0:
            raise ValueError("an event without an end")
        columns["correlation"] = _integers([item.correlation for item in args], 0)
        columns["external"] = _integers([item.external for item in args], 0)
        for code in np.flatnonzero(np.bincount(codes)).tolist():
            rows = np.flatnonzero(codes == code)
            if code in MEASURES:
                self._put_measures(columns, code, rows, [args[row] for row in rows.tolist()])
            if code in ON_DEVICE:
                columns["stream"][rows] = _integers([args[row].stream for row in rows.tolist()], -1, 32)
                columns["device"][rows] = _integers([args[row].device for row in rows.tolist()], -1, 32)
        collectives = [row for row, item in enumerate(args) if item.collective is not _ABSENT]
        communication = []
        if collectives:
            whole = [event.args for event in _WHOLE_ARGUMENTS.decode(text) if type(event) is _Whole]
            whole = list(compress(whole, kept.tolist()))
            communication = [(row, _value(whole[row])) for row in collectives]
        return events, columns, communication

    def _put_measures(
        self, columns: _Columns, category: int, rows: npt.NDArray[np.intp], args: list[_Arguments]
    ) -> None:
        """`records.measures` of the rows of a category, once for each distinct text of their arguments."""
        texts = list(zip(*(map(text, args) for text in _TEXTS[category]), strict=True))
        keys = list(map(b"\0".join, texts))
        distinct = dict(zip(keys, texts, strict=True))
        known = self._known[category]
        found = []
        for key, some in distinct.items():
            if key not in known:
                told = zip(MEASURES[category], some, strict=True)
                known[key] = measures(category, {name: _value(text) for name, text in told if text is not _ABSENT})
            found.append(known[key])
            if len(known) > _MAX_KNOWN or len(key) > _MAX_KNOWN_BYTES:
                known.clear()
        place = {key: index for index, key in enumerate(distinct)}
        which = np.fromiter(map(place.__getitem__, keys), np.intp, len(keys))
        for name, values in zip(("work", "bandwidth_gbs", "occupancy"), zip(*found, strict=True), strict=True):
            # By `array`, as `Rows` does: numpy warns where a number is too big for float32.
            columns[name][rows] = np.frombuffer(array("q" if name == "work" else "f", values), COLUMNS[name])[which]


def _naming(event: _Meta) -> dict[str, Any]:
    """What `Rows.add` takes for an event that names a track."""
    args = None if event.args is _ABSENT else _value(event.args)
    return {"ph": "M", "name": event.name, "pid": event.pid, "tid": event.tid, "args": args}


def _cut(buffer: bytearray, start: int, end: int) -> tuple[int, int] | None:
    """(end of the last record, start of the one after it) in buffer[start:end]; None if there are not two."""
    reach = _TAIL_BYTES
    while True:
        found = list(_BOUNDARY.finditer(buffer, max(end - reach, start), end))
        if found:
            # Most writers put the phase first, and objects inside of arguments have none.
            best = next((match for match in reversed(found) if match.group(2)), found[-1])
            return best.start(1), best.end(1)
        if end - reach <= start:
            return None
        reach *= 4


def _extreme(text: bytes) -> bool:
    """Whether there may be numbers or nesting that only one of the decoders takes. It looks at strings too, so it is
    True for some chunks without."""
    codes = np.frombuffer(text, np.uint8)
    shape = codes[: len(codes) // 32 * 32] | 32
    if (_per_32(shape == ord("{")) - _per_32(shape == ord("}"))).cumsum().max(initial=0) > _MAX_NESTING:
        return True
    long = np.flatnonzero(_is_digit(codes[::_LONG_DIGITS])) * _LONG_DIGITS
    if any(_LONG_NUMBER.match(text, at) for at in long.tolist()):
        return True
    # 18 digits cover three neighbours of every sixth byte. Walk to where they start: an exponent has sign or `e` there.
    sampled = _is_digit(codes[::6])
    at = np.flatnonzero(sampled[2:] & sampled[1:-1] & sampled[:-2]) * 6
    for _ in range(5):
        at -= _is_digit(codes[at - 1])
    at = at[_BEFORE_EXPONENT[codes[at - 1]]]
    return any(_LONG_EXPONENT.search(text, start - 2, start + 18) for start in at.tolist())


def _per_32(flags: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """How many of each 32 are set. Eight bytes are added at once, and a product has their sum in its highest byte."""
    lanes = flags.view(np.uint64)
    lanes = lanes[::4] + lanes[1::4] + lanes[2::4] + lanes[3::4]
    return (lanes * np.uint64(0x0101010101010101) >> np.uint64(56)).view(np.int64)


def _is_digit(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    return codes - ord("0") < 10


def _times(texts: Sequence[msgspec.Raw]) -> npt.NDArray[np.int64]:
    """Texts of microseconds as exact nanoseconds. Raises ValueError or OverflowError where there is no such time."""
    joined = b",".join(texts)
    codes = np.frombuffer(joined, np.uint8)
    dots = np.flatnonzero(codes == ord("."))
    ends = np.append(np.flatnonzero(codes == ord(",")), len(codes))
    if (
        len(dots) == len(ends) == len(texts)
        and (ends - dots == 4).all()
        and ends[0] < _MAX_PLAIN_TIME
        and (ends[1:] - ends[:-1] <= _MAX_PLAIN_TIME).all()
        and not joined.translate(None, b"0123456789.,")
    ):
        # As Kineto writes them: three decimals each.
        return np.fromstring(joined.replace(b".", b"").decode(), np.int64, sep=",")
    return np.asarray([_time(bytes(text)) for text in texts], np.int64)


def _time(text: bytes) -> int:
    whole, _, decimals = text.partition(b".")
    if len(decimals) <= 3 and whole.isdigit() and (decimals.isdigit() or not decimals):
        return int(whole + decimals.ljust(3, b"0"))
    result = nanoseconds(DECODER.decode(text.decode()))
    if result is None:
        raise ValueError(f"no time: {text[:40]!r}")
    return result


def _integers(values: list[Any], default: int, bits: int = 64) -> npt.NDArray[Any]:
    """`records.integer` of each; at once if they are what they should be."""
    code = "q" if bits == 64 else "i"
    try:
        numbers = array(code, values)
    except (TypeError, OverflowError):
        numbers = array(code, [integer(value, default, bits) for value in values])
    return np.frombuffer(numbers, code)
