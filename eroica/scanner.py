"""Runs the C scanner (`_scan.c`) and turns what it found into `Records`.

Not needed: without a compiler at build time `available()` is False and `kineto` reads with its tolerant engine. Used by
`kineto` alone. ctypes, not an extension module, so that one build serves every Python and the interpreter lock is free
while text is scanned.
"""

from __future__ import annotations

import ctypes
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eroica import salvage
from eroica.errors import DataError
from eroica.records import CATEGORY_OF, COLUMNS, DECODER, Records, Rows, take_broken

_END, _BROKEN, _NO_MEMORY, _TOO_MANY = 1, 2, -1, -2
_RECORDS, _ARGUMENTS = 0, 1
_STRINGS, _TRACKS = 0, 1
_VERSION = 1
"""Of the interface of `_scan.c`."""
_ENTRY = np.dtype([("hash", np.uint64), ("offset", np.int64), ("length", np.int32), ("escaped", np.int32)])
_PIECE = np.dtype([("row", np.int64), ("offset", np.int64), ("length", np.int64), ("where", np.int64)])


@cache
def _library() -> ctypes.CDLL | None:
    """The shared library beside this file, whatever suffix the build gave it."""
    for path in sorted(Path(__file__).parent.glob("_scan*.so")) + sorted(Path(__file__).parent.glob("_scan*.dylib")):
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        pointer, number, out = ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64)
        signatures: dict[str, tuple[Any, list[Any]]] = {
            "new": (pointer, [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint64]),
            "free": (None, [pointer]),
            "feed": (ctypes.c_int, [pointer, pointer, number, number, ctypes.c_int, number, out, out]),
            "version": (ctypes.c_int, []),
            "rows": (number, [pointer]),
            "column": (pointer, [pointer, ctypes.c_int]),
            "release": (None, [pointer, ctypes.c_int]),
            "texts": (number, [pointer, ctypes.c_int, ctypes.POINTER(pointer), ctypes.POINTER(pointer)]),
            "pieces": (number, [pointer, ctypes.c_int, ctypes.POINTER(pointer), ctypes.POINTER(pointer)]),
            "clear": (None, [pointer, ctypes.c_int]),
        }
        try:
            for name, (result, arguments) in signatures.items():
                function = getattr(library, f"eroica_scan_{name}")
                function.restype, function.argtypes = result, arguments
        except AttributeError:
            continue
        if library.eroica_scan_version() == _VERSION:
            return library
    return None


def available() -> bool:
    """Whether the scanner was built and can be loaded."""
    return _library() is not None


class _Column:
    """Memory of one column, given back to C when numpy is done with it."""

    def __init__(self, owner: Fast, index: int, kind: np.dtype[Any], rows: int) -> None:
        self._owner, self._index = owner, index
        address = owner.library.eroica_scan_column(owner.handle, index)
        self.__array_interface__ = {"version": 3, "shape": (rows,), "typestr": kind.str, "data": (address, False)}

    def __del__(self) -> None:
        self._owner.library.eroica_scan_release(self._owner.handle, self._index)


class Fast:
    """The C scanner as an engine of `kineto`."""

    def __init__(self) -> None:
        library = _library()
        assert library is not None
        self.library = library
        self.rows = Rows()
        self._before: list[int] = []
        """For each row that Python decoded: the number of the scanner's rows before it."""
        labels = b"".join(label.encode() + b"\0" for label in CATEGORY_OF)
        self.handle = library.eroica_scan_new(
            labels, bytes(CATEGORY_OF.values()), len(CATEGORY_OF), int.from_bytes(os.urandom(8), "little")
        )
        if not self.handle:
            raise MemoryError

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.library.eroica_scan_free(self.handle)

    def scan(self, buffer: bytearray, start: int, end: int, final: bool, base: int) -> tuple[int, bool]:
        """See `kineto.Engine`."""
        taken, broken_end = ctypes.c_int64(), ctypes.c_int64()
        whole = (ctypes.c_char * len(buffer)).from_buffer(buffer)
        try:
            while True:
                state = self.library.eroica_scan_feed(
                    self.handle,
                    ctypes.addressof(whole),
                    start,
                    end,
                    final,
                    base,
                    ctypes.byref(taken),
                    ctypes.byref(broken_end),
                )
                if state == _NO_MEMORY:
                    raise MemoryError
                if state == _TOO_MANY:
                    raise DataError("more than 2147483646 events in one file; capture a shorter window")
                self._decode_pieces()
                start = taken.value
                if state != _BROKEN:
                    return start, state == _END
                last = broken_end.value < 0
                record = bytes(memoryview(buffer)[start : end if last else broken_end.value])
                count = len(self.rows)
                start += take_broken(self.rows, record, base + start, last)
                self._note_rows(count, self.library.eroica_scan_rows(self.handle))
        finally:
            del whole

    def _note_rows(self, count: int, before: int) -> None:
        self._before += [before] * (len(self.rows) - count)

    def _pieces(self, which: int) -> tuple[bytes, npt.NDArray[Any]]:
        text, items = ctypes.c_void_p(), ctypes.c_void_p()
        count = self.library.eroica_scan_pieces(self.handle, which, ctypes.byref(text), ctypes.byref(items))
        if not count:
            return b"", np.empty(0, _PIECE)
        table = np.frombuffer(ctypes.string_at(items.value or 0, count * _PIECE.itemsize), _PIECE)
        return ctypes.string_at(text.value or 0, int(table["offset"][-1] + table["length"][-1])), table

    def _decode_pieces(self) -> None:
        text, table = self._pieces(_RECORDS)
        if not len(table):
            return
        for row, offset, length, where in table.tolist():
            count = len(self.rows)
            self.rows.add_text(text[offset : offset + length], where)
            self._note_rows(count, row)
        self.library.eroica_scan_clear(self.handle, _RECORDS)

    def _texts(self, which: int) -> tuple[list[str], list[int]]:
        """(texts, those of them that hold escapes)."""
        text, entries = ctypes.c_void_p(), ctypes.c_void_p()
        count = self.library.eroica_scan_texts(self.handle, which, ctypes.byref(text), ctypes.byref(entries))
        if not count:
            return [], []
        table = np.frombuffer(ctypes.string_at(entries.value or 0, count * _ENTRY.itemsize), _ENTRY)
        ends = (table["offset"] + table["length"]).tolist()
        raw = ctypes.string_at(text.value or 0, ends[-1])
        starts = table["offset"].tolist()
        return [raw[a:b].decode() for a, b in zip(starts, ends, strict=True)], np.flatnonzero(table["escaped"]).tolist()

    def finish(self) -> Records:
        """See `kineto.Engine`."""
        num_rows = self.library.eroica_scan_rows(self.handle)
        columns: dict[str, npt.NDArray[Any]] = {}
        for index, (name, kind) in enumerate(COLUMNS.items()):
            empty = np.empty(0, kind)
            columns[name] = np.asarray(_Column(self, index, np.dtype(kind), num_rows)) if num_rows else empty
        strings, escaped = self._texts(_STRINGS)
        for index in escaped:
            strings[index] = salvage.clean(json.loads(f'"{strings[index]}"'))
        tracks = []
        for joined in self._texts(_TRACKS)[0]:
            pid, _, tid = joined.partition("\0")
            tracks.append((pid, tid))
        if escaped:
            # Two spellings of one name have two ids so far.
            strings, columns["name"] = _merged(strings, columns["name"])
        text, table = self._pieces(_ARGUMENTS)
        communication = [
            (row, DECODER.decode(text[offset : offset + length].decode())) for row, offset, length, _ in table.tolist()
        ]
        rows = self.rows
        if len(rows):
            before = np.asarray(self._before)
            ids = _joined(strings, rows.strings), _joined(tracks, rows.tracks)
            for name, kind in COLUMNS.items():
                own = np.frombuffer(rows.values[name], kind)
                if name in ("name", "track"):
                    own = ids[name == "track"][own]
                columns[name] = np.insert(columns[name], before, own)
            shifted = [row + int(np.searchsorted(before, row, "right")) for row, _ in communication]
            communication = [(row, args) for row, (_, args) in zip(shifted, communication, strict=True)]
            communication += [(int(before[row]) + row, args) for row, args in rows.communication]
            communication.sort(key=lambda item: item[0])
        return Records(columns, strings, tracks, rows.track_names, communication, {}, rows.losses)


def _joined(known: list[Any], more: dict[Any, int]) -> npt.NDArray[np.int32]:
    """Ids in `known`, which grows, of the keys of `more`."""
    ids = {item: index for index, item in enumerate(known)}
    for item in more:
        if item not in ids:
            ids[item] = len(known)
            known.append(item)
    return np.asarray([ids[item] for item in more], np.int32)


def _merged(strings: list[str], name: npt.NDArray[np.int32]) -> tuple[list[str], npt.NDArray[np.int32]]:
    ids: dict[str, int] = {}
    new_id = np.asarray([ids.setdefault(text, len(ids)) for text in strings], np.int32)
    return list(ids), new_id[name]
