"""Kineto and Chrome trace JSON as flat columns in file order: the text layer behind `trace.read_trace`.

Not an analysis and not the job's view: ranks, groups and collectives are made of this by `trace`. Used by `trace` and,
for a look at the head of a file, by `tracefiles`. Two engines give the same columns: the C scanner (`scanner`), which
relies on Kineto's fixed key order and refuses whatever it does not know, and the tolerant reader below, for where
nothing was compiled: whole chunks by msgspec (`chunks`), and record by record what that refuses. A record that the
scanner refuses is decoded by `records`, as single ones are here, so they cannot differ.
"""

from __future__ import annotations

import json
import os
import re
import stat
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from eroica import chunks, scanner
from eroica.errors import DataError, UserError
from eroica.records import (
    ARRAY_END,
    BLANK,
    COLUMNS,
    DECODER,
    MAX_BROKEN,
    RECORD_START,
    Losses,
    Records,
    Rows,
    TooBroken,
    members,
    take_broken,
)

CHUNK_BYTES = 1 << 20
"""Of text per scan: fits the second-level cache, and a record cut at its end is scanned twice at most."""
MAX_RECORD_BYTES = 1 << 28
"""A record longer than this is damage; also the most of a file that is held in memory."""
MAX_HEAD_BYTES = 1 << 26
"""File-level keys before or after the events; long lists of ranks are a few megabytes."""
MAX_RATIO = 200
"""Text per byte of a gzip file; real traces have 10 to 30, and a file made to fill the memory up to 1,032."""
MAX_DENSE_BYTES = 1 << 28
"""As much text is taken of any gzip file, however dense: a short trace of equal events is one."""
_LOOK_AHEAD = 1 << 16
_PAD = 64
"""Readable bytes that the scanner may touch behind the text."""
_SEPARATORS = re.compile(r"[ \t\r\n,]*")


class Engine(Protocol):
    """Reads events out of a piece of text; called again with what it left."""

    @property
    def rows(self) -> Rows:
        """Events that Python decoded, and all damage."""

    def scan(self, buffer: bytearray, start: int, end: int, final: bool, base: int) -> tuple[int, bool]:
        """Take whole records from buffer[start:end]; `base` = offset in the file of buffer[0].

        Returns (first byte not taken, True at the end of the array).
        """

    def finish(self) -> Records:
        """What was read, without file-level keys."""


class Tolerant:
    """The engine that needs no compiler. Takes valid JSON in any key order, and anything at all that stands between.

    Chunks of sound records go through msgspec at once; what `chunks` refuses is read record by record. Without
    `by_chunks` everything is, which tests compare with.
    """

    def __init__(self, by_chunks: bool = True) -> None:
        self.rows = Rows()
        self._chunks = chunks.Chunks(self.rows) if by_chunks else None

    def scan(self, buffer: bytearray, start: int, end: int, final: bool, base: int) -> tuple[int, bool]:
        """See `Engine`."""
        text, origin = "", -1
        while True:
            until = end
            if self._chunks:
                start, until = self._chunks.take(buffer, start, end)
            if origin < 0:
                # Once for all refused chunks of a buffer, however many they are.
                text, origin = str(memoryview(buffer)[start:end], "latin-1"), start
            start, ended = self._one_by_one(buffer, text, origin, start, until, final, base)
            if ended is not None:
                return start, ended

    def _one_by_one(
        self, buffer: bytearray, text: str, origin: int, start: int, until: int, final: bool, base: int
    ) -> tuple[int, bool | None]:
        """Records of `text`, which is the buffer from `origin` on, up to the byte `until`.

        Returns (first byte not taken, True at the end of the array, False if more text is needed, None otherwise).
        """
        size = len(text)
        plain = text.isascii()
        position = start - origin
        add, decode = self.rows.add, DECODER.raw_decode
        while True:
            match = _SEPARATORS.match(text, position)
            assert match is not None
            position = match.end()
            if position == size:
                return origin + position, False
            if origin + position >= until:
                return origin + position, None
            first = text[position]
            if first == "{":
                try:
                    event, after = decode(text, position)
                except (ValueError, ArithmeticError, RecursionError):
                    event, after = None, -1
                if after >= 0:
                    if plain or text[position:after].isascii():
                        add(event, base + origin + position)
                    else:
                        record = bytes(buffer[origin + position : origin + after])
                        self.rows.add_text(record, base + origin + position)
                    position = after
                    continue
            elif first == "]":
                if not final and size - position < _LOOK_AHEAD:
                    return origin + position, False
                if ARRAY_END.match(text, position):
                    return origin + position + 1, True
            if not final and size - position < _LOOK_AHEAD:
                return origin + position, False
            following = RECORD_START.search(text, position + 1)
            if following is None and not final:
                return origin + position, False
            after = following.start(following.lastindex or 0) if following else size
            record = bytes(buffer[origin + position : origin + after])
            position += take_broken(self.rows, record, base + origin + position, following is None)

    def finish(self) -> Records:
        """See `Engine`."""
        rows = self.rows
        columns = {name: np.frombuffer(rows.values[name], kind) for name, kind in COLUMNS.items()}
        return Records(
            columns, list(rows.strings), list(rows.tracks), rows.track_names, rows.communication, {}, rows.losses
        )


class Inflater:
    """Reads a gzip file of any number of members; a cut or broken stream ends it, what came before stays."""

    def __init__(self, raw: Any) -> None:
        self._errors: list[type[Exception]] = [zlib.error]
        try:
            from isal import igzip_lib, isal_zlib

            self._new: Callable[[], Any] = lambda: isal_zlib.decompressobj(31)
            self._errors.append(igzip_lib.IsalError)  # type: ignore[arg-type]  # its stub calls the class an instance
        except ImportError:
            self._new = lambda: zlib.decompressobj(31)
        self._raw = raw
        self._member: Any = None
        self._pending = b""
        self._taken = 0
        self._given = 0
        self.problem = ""

    def readinto(self, view: memoryview) -> int:
        """Fill the front of `view`; 0 at the end."""
        while not self.problem:
            if not self._pending:
                self._pending = self._raw.read(1 << 18)
                self._taken += len(self._pending)
            if self._member is None:
                # Zeros between and after members are padding, as gzip itself takes them.
                self._pending = self._pending.lstrip(b"\0")
                if not self._pending:
                    more = self._raw.read(1 << 18)
                    if not more:
                        return 0
                    self._pending = more
                    self._taken += len(more)
                    continue
                self._member = self._new()
            try:
                data = self._member.decompress(self._pending, min(len(view), 1 << 18))
            except tuple(self._errors) as error:
                self.problem = f"the gzip stream is broken ({error})"
                return 0
            at_end = not self._pending and not data
            if self._member.eof:
                self._pending = self._member.unused_data
                self._member = None
            else:
                self._pending = self._member.unconsumed_tail
                if at_end:
                    self.problem = "the gzip stream is cut"
            if data:
                self._given += len(data)
                if self._given > max(MAX_DENSE_BYTES, MAX_RATIO * self._taken):
                    self.problem = f"the gzip stream grows more than {MAX_RATIO}-fold, as no trace does"
                    return 0
                view[: len(data)] = data
                return len(data)
        return 0


class Text:
    """The text of a file in one reused buffer: [start, end) is what was read and not yet taken."""

    def __init__(self, source: Any, chunk_bytes: int) -> None:
        self._source = source
        self.buffer = bytearray(chunk_bytes + _PAD)
        self.start = 0
        self.end = 0
        self.base = 0
        """Offset in the file of buffer[0]."""
        self.final = False
        """Nothing more will come."""

    def more(self) -> None:
        """Read on: make room first, by moving what is left to the front or, if it fills the buffer, by doubling it."""
        held = self.end - self.start
        if self.start:
            self.buffer[:held] = self.buffer[self.start : self.end]
            self.base += self.start
            self.start, self.end = 0, held
        capacity = len(self.buffer) - _PAD
        if held > capacity // 2 and capacity < MAX_RECORD_BYTES:
            self.buffer.extend(bytes(capacity))
            capacity *= 2
        with memoryview(self.buffer) as view:
            while self.end < capacity:
                count = self._source.readinto(view[self.end : capacity])
                if not count:
                    self.final = True
                    break
                self.end += count
        self.buffer[self.end] = 0

    @property
    def full(self) -> bool:
        """The buffer is as big as it may get, and nothing of it could be taken."""
        return self.end - self.start >= MAX_RECORD_BYTES


_EVENTS_KEY = re.compile(rf'"traceEvents"{BLANK}:{BLANK}\['.encode())
_WANTED_KEYS = ["distributedInfo", "deviceProperties", "host_name", "hostname", "baseTimeNanoseconds", "rank"]


def metadata(keys: bytes, losses: Losses, offset: int) -> dict[str, Any]:
    """File-level keys from the text between the outer braces; those that can be read if the whole cannot."""
    keys = keys.strip(b" \t\r\n,")
    found = members(keys)
    if found is not None:
        return found
    losses.at(offset)
    losses.notes.append("the file-level keys are not valid JSON; only those that could be told apart were read")
    text = keys.decode("utf-8", "replace")
    result = {}
    for key in _WANTED_KEYS:
        match = re.search(rf'"{key}"\s*:\s*', text)
        if match:
            try:
                result[key], _ = json.JSONDecoder(strict=False).raw_decode(text, match.end())
            except (ValueError, RecursionError):
                continue
    return result


def open_text(path: str | Path) -> tuple[Any, Inflater | None]:
    """(file to close, its inflater if it is gzip). Raises UserError if it cannot be opened or read."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode) and not os.path.isdir(path):
            # To open a pipe may wait forever, and a device may never end.
            raise UserError(f"{path}: a pipe or a device, not a file; save the trace to a file first")
        raw = open(path, "rb", buffering=0)  # noqa: SIM115 (closed by the caller)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give a trace file or a directory of them") from None
    except IsADirectoryError:
        raise UserError(f"{path}: a directory, not a trace file; use find_traces for directories") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be opened ({error.strerror})") from None
    try:
        gzipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
    except OSError as error:
        raw.close()
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    return raw, Inflater(raw) if gzipped else None


def find_events(text: Text) -> tuple[int, int] | None:
    """Where in the buffer the key `traceEvents` and the text of its array start; reads on until it is found."""
    searched = text.start
    while True:
        match = _EVENTS_KEY.search(text.buffer, searched, text.end)
        if match:
            return match.span()
        if text.final or text.end - text.start > MAX_HEAD_BYTES:
            return None
        searched = max(text.end - 4096 - text.start, 0)
        text.more()


def load(path: str | Path, engine: str = "auto", chunk_bytes: int = CHUNK_BYTES) -> Records:
    """All complete events of one Kineto or Chrome JSON file, plain or gzip.

    `engine`: "fast" (the C scanner), "tolerant" (msgspec, then plain Python), "records" (plain Python alone, for
    tests) or "auto" (fast if it is there, else tolerant). All give equal columns, whatever `chunk_bytes` is. Raises
    UserError if the file cannot be opened, DataError if it holds no trace.
    """
    raw, inflater = open_text(path)
    with raw:
        try:
            return _load(str(path), Text(inflater or raw, chunk_bytes), inflater, _engine(engine))
        except OSError as error:
            raise UserError(f"{path}: cannot be read to its end ({error.strerror})") from None


def _engine(name: str) -> Engine:
    if name not in ("tolerant", "records"):
        if scanner.available():
            return scanner.Fast()
        if name == "fast":
            raise UserError("the C scanner is not built; build eroica/_scan.c or read with engine='tolerant'")
    return Tolerant(by_chunks=name == "tolerant")


def _load(path: str, text: Text, inflater: Inflater | None, engine: Engine) -> Records:
    rows = engine.rows
    losses = rows.losses
    text.more()
    if text.buffer[:3] == b"\xef\xbb\xbf":
        text.start = 3
    stripped = bytes(text.buffer[text.start : min(text.end, text.start + 4096)]).strip()
    if not stripped:
        problem = inflater.problem if inflater else ""
        raise DataError(f"{path}: holds no text{': ' + problem if problem else ''}; capture this rank again")
    found: dict[str, Any] = {}
    if stripped.startswith(b"["):
        text.start = text.buffer.index(b"[", text.start) + 1
    else:
        events = find_events(text)
        if events is None:
            raise DataError(
                f"{path}: has no traceEvents, so it is no profiler trace (or is cut before the first event)"
            )
        head = bytes(text.buffer[text.start : events[0]]).strip()
        found = metadata(head[1:] if head.startswith(b"{") else head, losses, 0)
        text.start = events[1]
    while True:
        try:
            text.start, ended = engine.scan(text.buffer, text.start, text.end, text.final or text.full, text.base)
        except TooBroken:
            losses.truncated = True
            losses.notes.append(f"more than {MAX_BROKEN:,} records are broken, so reading ended there")
            break
        if ended:
            tail, again = _tail(text)
            if not again:
                offset = text.base + text.start
                keys = tail.strip()
                if keys.endswith(b"}"):
                    keys = keys[:-1]
                elif stripped.startswith(b"{"):
                    losses.truncated = True
                    losses.at(offset)
                found.update(metadata(keys, losses, offset))
                break
        elif text.final and text.start >= text.end:
            losses.truncated = True
            losses.at(text.base + text.end)
            break
        elif not text.final:
            text.more()
    if inflater and inflater.problem:
        losses.truncated = True
        losses.notes.append(inflater.problem)
    records = engine.finish()
    records.metadata = found
    return records


def _tail(text: Text) -> tuple[bytes, bool]:
    """What follows the array of events, or (b"", True) if there are more events: the bracket was a part of damage."""
    while not text.final and text.end - text.start < MAX_HEAD_BYTES:
        text.more()
    tail = bytes(text.buffer[text.start : text.end])
    match = _FURTHER_EVENT.search(tail)
    if match is None:
        return tail, False
    text.start += match.start()
    return b"", True


_FURTHER_EVENT = re.compile(rf'\{{{BLANK}"ph"{BLANK}:'.encode())
