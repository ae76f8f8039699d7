"""The private folder of one `eroica run` on this host, and who clears it away.

Its name tells who watches: process, start of that process, host and pid namespace. Nobody has to be asked, so three can
clear it: the watcher when it ends; the last rank to end, if the watcher was killed; the next `eroica run` of this user.
A folder with a living rank stays: training may outlive its watcher and is not to notice.

Used by `eroica.launch` and, at the end of a rank, by the recorder. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import time
from pathlib import Path

from eroica import ring as flight
from eroica.errors import EroicaError
from eroica.ring import start_ticks

_NAME = re.compile(r"run-(\d+)-([0-9a-f]+)-([0-9a-f]{3})([0-9a-f]{3})")
FORGOTTEN_S = 7 * 86_400
"""A folder of another boot or host (a folder for temporary files may be shared) is cleared when nothing in it has
changed for this long: no training writes nothing for a week."""


def create(user: Path) -> Path:
    """A new folder under `user` for this process, mode 0700. Raises OSError, also if `user` is open to others."""
    pid = os.getpid()
    folder = user / f"run-{pid}-{start_ticks(pid):x}-{_host()}{_namespace()}"
    for _ in range(10):  # a run that ends at this moment clears the user's folder away with its own
        with contextlib.suppress(FileExistsError):
            os.mkdir(user, 0o700)
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            os.mkdir(folder, 0o700)
        if folder.is_dir():
            break
    for path in (user, folder):
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise PermissionError(f"{path} is not a private folder of this user")
    return folder


def is_abandoned(folder: Path) -> bool:
    """Whether `folder` is of a watcher that is dead, as far as can be told from here, and holds no living rank."""
    found = _NAME.fullmatch(folder.name)
    if found is None:
        return False
    pid, ticks, host, namespace = int(found[1]), int(found[2], 16), found[3], found[4]
    if host != _host() or namespace != _namespace():
        return _age_s(folder) > FORGOTTEN_S
    return start_ticks(pid) != ticks and not has_living(folder)


def has_living(folder: Path) -> bool:
    """Whether a rank with a ring in `folder` still runs, or may: one in another container is not seen from here."""
    for path in folder.glob(f"*{flight.SUFFIX}"):
        with contextlib.suppress(OSError, EroicaError):
            seen = flight.peek(path)
            if seen.words[flight.STATE] != flight.ENDED and flight.is_alive(seen.identity) is not False:
                return True
    return False


def leave(folder: Path) -> None:
    """For a rank that ends, after it has said so in its ring: clear the folder if nobody else will. Never raises."""
    with contextlib.suppress(Exception):
        found = _NAME.fullmatch(folder.name)
        if found is None:
            return
        # Where no watcher of this host stands behind it (ranks that srun started elsewhere), nobody will come.
        is_elsewhere = found[3] != _host()
        if (is_elsewhere and not has_living(folder)) or is_abandoned(folder):
            remove(folder)


def sweep(user: Path) -> None:
    """Clear what watchers that were killed have left under `user`. Never raises."""
    with contextlib.suppress(OSError):
        for folder in sorted(user.glob("run-*")):
            with contextlib.suppress(OSError):
                if is_abandoned(folder):
                    remove(folder)


def remove(folder: Path) -> None:
    """Delete the folder and all in it, and the user's folder if that was the last. Mappings of it stay usable."""
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def _age_s(folder: Path) -> float:
    newest = folder.stat().st_mtime
    for path in folder.iterdir():
        newest = max(newest, path.stat().st_mtime)
    return time.time() - newest


def _host() -> str:
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        text = b""
    return hashlib.sha256(text).hexdigest()[:3]


def _namespace() -> str:
    return hashlib.sha256(str(flight.pid_namespace()).encode()).hexdigest()[:3]
