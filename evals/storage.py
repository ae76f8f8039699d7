"""Storage that several ranks share and that gives so many bytes per second to all of them together.

For the training scripts of the catalogue; nothing of eroica. A token bucket in a file, locked while it is read: whoever
writes or reads through it waits until its bytes have had their turn, as at a file server with too many clients.
"""

from __future__ import annotations

import fcntl
import io
import os
import struct
import time
from pathlib import Path
from typing import Any

_STATE = struct.Struct("<d")
CHUNK_BYTES = 1 << 17
"""Bytes that have their turn at once."""


class Bucket:
    """A rate that processes share."""

    def __init__(self, path: Path) -> None:
        """`path`: the file that all of them know."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def take(self, num_bytes: int, bytes_per_s: float) -> None:
        """Wait for the turn of so many bytes, and as long as they take."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            state = os.pread(self._file, _STATE.size, 0)
            free_at = _STATE.unpack(state)[0] if len(state) == _STATE.size else 0.0
            done_at = max(time.monotonic(), free_at) + num_bytes / bytes_per_s
            os.pwrite(self._file, _STATE.pack(done_at), 0)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        time.sleep(max(done_at - time.monotonic(), 0.0))


class SharedFile(io.BytesIO):
    """A new file behind a bucket. A BytesIO by its type alone, which is what savers ask for."""

    def __init__(self, path: Path, bucket: Bucket, bytes_per_s: float) -> None:
        super().__init__()
        self._inner = path.open("wb", buffering=0)
        self._bucket = bucket
        self._bytes_per_s = bytes_per_s

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, data: Any) -> int:
        """All of `data`, a chunk at a time."""
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), CHUNK_BYTES):
            part = view[begin : begin + CHUNK_BYTES]
            self._bucket.take(len(part), self._bytes_per_s)
            self._inner.write(part)
        return len(view)

    def close(self) -> None:
        """Close both."""
        self._inner.close()
        super().close()
