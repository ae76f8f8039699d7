"""Where the rings of a job lie: one folder per job on each host, private to the user, of bounded size.

EROICA_RING_DIR names the folder itself. Otherwise it is `eroica/JOB` under XDG_RUNTIME_DIR, or `eroica-UID/JOB` under
the folder for temporary files; JOB is derived from what all ranks of a job on this host share: the launcher's run id,
the Slurm job, or the rendezvous address together with the parent process. Used by the recorder to write and by `eroica
show` to look.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from eroica.ring import SUFFIX, start_ticks

MOST_RINGS = 256
"""Rings kept under one user's folder, newest first: 272 MB at most. A host has some 8 to 16 ranks."""


_started_with: dict[str, str] = {}


def started_with(options: Mapping[str, str]) -> None:
    """Keep the variables EROICA_... that this process was started with; a script may clear its environment later."""
    _started_with.update(options)


def option(name: str, environ: Mapping[str, str]) -> str:
    """The variable `name` as it is now, else as it was when the process started; "" if it was not set."""
    return environ.get(name) or _started_with.get(name, "")


def job_name(environ: Mapping[str, str]) -> str:
    """Name of the job that this process belongs to, fit for a file name; equal on all of its ranks."""
    launcher, value = _launcher(environ)
    digest = hashlib.sha256(f"{launcher} {value}".encode("utf-8", "surrogateescape")).hexdigest()[:10]
    word = re.sub(r"[^A-Za-z0-9.-]+", "-", value if launcher else "")[:40].strip(".-")
    return f"{word or 'job'}-{digest}"


def folder_name(environ: Mapping[str, str], parent: int) -> str:
    """Name of the folder of that job on this host; `parent` is the process that started this one."""
    # Without a launcher's id there is the address, and port 29500 serves many jobs, one after the other. The ranks of
    # one job on a host have one parent, as a rule; where they have not, EROICA_RING_DIR brings them together.
    alone = "" if _launcher(environ)[0] else f"-{parent}-{start_ticks(parent)}"
    return job_name(environ) + alone


def _launcher(environ: Mapping[str, str]) -> tuple[str, str]:
    run, slurm = environ.get("TORCHELASTIC_RUN_ID", ""), environ.get("SLURM_JOB_ID", "")
    if run and run != "none":  # torchrun says "none" unless asked
        return "run", run
    if slurm:
        return "slurm", slurm
    return "", f"{environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}"


def user_folder(environ: Mapping[str, str]) -> Path:
    """The folder that holds the folders of this user's jobs."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.path.isabs(runtime) and os.access(runtime, os.W_OK | os.X_OK):
        return Path(runtime) / "eroica"
    return Path(tempfile.gettempdir()) / f"eroica-{os.getuid()}"


def ring_folder(environ: Mapping[str, str], parent: int) -> Path:
    """The folder for this process's ring; made if need be. Raises OSError, also if it is open to other users."""
    named = option("EROICA_RING_DIR", environ)
    if named:
        os.makedirs(named, mode=0o700, exist_ok=True)
        return Path(named)
    user = user_folder(environ)
    folder = user / folder_name(environ, parent)
    for path in (user, folder):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise PermissionError(f"{path} is not a private folder of this user")
    prune(user, MOST_RINGS)
    return folder


def prune(user: Path, most: int) -> None:
    """Delete the oldest rings under `user` beyond `most`, and job folders that are empty then. Never raises."""
    rings = []
    with contextlib.suppress(OSError):
        for path in user.glob(f"*/*{SUFFIX}"):
            with contextlib.suppress(OSError):
                rings.append((path.stat().st_mtime_ns, path))
    # The mapping of a process that still runs survives the deletion of its file, so this cannot hurt it.
    for _, path in sorted(rings, reverse=True)[most:]:
        with contextlib.suppress(OSError):
            path.unlink()
            path.with_suffix(".stacks").unlink(missing_ok=True)
            path.parent.rmdir()
