"""Starts a job so that its ranks arm themselves, passes signals on, and keeps the private folder of their rings.

    workspace = Workspace.create(os.environ)
    job = start(command, environment=environment_for(workspace.path, {}, base=os.environ))
    while (status := job.wait(0.2)) is None:
        ...
    workspace.close()

A wrapper that nobody notices: the job has our standard streams, open files, working directory, session and process
group, so Ctrl-C, Ctrl-Z, `fg`, pipes to a pager and whatever a scheduler does to the group work as without us. It is
not killed when we are. It is no watcher: that is `eroica.live`.

**Signals.** What was sent to the whole group (Ctrl-C, `kill %1`, `timeout`, a scheduler that signals each process) has
reached the job already, and a second copy can hurt: torchrun ends its workers at the first and loses them at the
second. What was sent to us alone (`kill PID`, `docker stop`) must be passed on. Python cannot see the difference, so a
witness tells: an idle `cat` in our group that blocks all of these signals. If the signal is pending there, everybody
got it. The witness ends with us, since it reads a pipe of which we hold the other end. Without `cat` there is no
witness, and then the signals that a terminal sends are not passed on while we stand in its foreground.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from eroica.errors import UserError
from eroica.probe import place, workspace

FORWARDED = tuple(
    getattr(signal, name)
    for name in ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGTSTP", "SIGCONT", "SIGWINCH")
)
_OF_TERMINALS = frozenset((signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGWINCH, signal.SIGHUP))
_ENDING = frozenset((signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM))
_TO_ARRIVE_S = 0.02
"""Between the signal's arrival here and at the other members of the group: `timeout` sends two, microseconds apart, and
a scheduler that goes through the processes needs a few milliseconds on a busy machine."""

LEAST_ROOM_BYTES = 256 << 20
"""A ring takes 1 MB; ranks do not capture with less than 200 MB free."""
ARMING = Path(os.path.realpath(__file__)).parent / "arming"


class NotStartedError(UserError):
    """The command cannot be run."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
        """Exit status, as shells have it: 127 not found, 126 found and not to be run."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """The folder of this run's rings; private to this user. See `eroica.probe.workspace` for who clears it."""

    path: Path

    @classmethod
    def create(cls, environ: Mapping[str, str]) -> Self:
        """A new folder; clears what runs that were killed have left. UserError: no place for it can be written."""
        name = f"eroica-{os.getuid()}"
        places = [place.user_folder(environ), Path("/dev/shm") / name, Path(tempfile.gettempdir()) / name]
        failures = []
        # A folder that is full is of no use to the ranks, though a folder can still be made in it.
        for user in sorted(places, key=lambda place: not _has_room(place)):
            workspace.sweep(user)
            try:
                return cls(Path(os.path.realpath(workspace.create(user))))
            except OSError as error:
                failures.append(f"{user}: {error.strerror or error}")
        raise UserError(
            f"no folder for flight rings can be made ({'; '.join(failures)}); set XDG_RUNTIME_DIR or TMPDIR"
        )

    def close(self) -> None:
        """Delete it, unless a rank lives on; then that rank will, when it ends."""
        if not workspace.has_living(self.path):
            workspace.remove(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _has_room(folder: Path) -> bool:
    """For the rings of a host and a capture of each rank."""
    try:
        room = os.statvfs(folder.parent)
    except OSError:
        return False
    return room.f_bavail * room.f_frsize >= LEAST_ROOM_BYTES


def environment_for(ring_folder: Path, extra: Mapping[str, str], *, base: Mapping[str, str]) -> dict[str, str]:
    """The variables of the job: `base`, then what arms its ranks, then `extra`."""
    given = [entry for entry in base.get("PYTHONPATH", "").split(os.pathsep) if entry != str(ARMING)]
    path = os.pathsep.join([str(ARMING), *(given if base.get("PYTHONPATH") else [])])
    return {
        **base,
        "PYTHONPATH": path,
        "EROICA_RING_DIR": os.path.realpath(ring_folder),
        # A program without ranks, a process group or a launcher is a job of one rank.
        "EROICA_SINGLE": "1",
        # Kineto writes two lines to stderr for each window of each rank; errors come back as exceptions all the same.
        "KINETO_LOG_LEVEL": base.get("KINETO_LOG_LEVEL", "6"),
        **extra,
    }


def start(command: Sequence[str], *, environment: Mapping[str, str]) -> Job:
    """Start `command`, and take the signals that are to be passed on to it. Call in the main thread, once at a time.

    Raises NotStartedError.
    """
    if not command or not command[0]:
        raise NotStartedError("no command was given; write it after --, as in: eroica run -- torchrun train.py", 127)
    return Job(list(command), environment)


def _spawned(command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    name = command[0]
    found = shutil.which(name, path=environment.get("PATH"))
    try:
        # Descriptors that we were given (process substitution, make's job server) go on to the job; ours do not.
        return subprocess.Popen(command, env=dict(environment), close_fds=False)
    except FileNotFoundError:
        if found is not None or os.path.exists(name):
            raise NotStartedError(f"{name}: the interpreter that its first line names does not exist", 127) from None
        raise NotStartedError(f"{name}: command not found; check its name and PATH", 127) from None
    except PermissionError:
        if os.path.isdir(name):
            raise NotStartedError(f"{name} is a folder; name a program", 126) from None
        raise NotStartedError(f"{name} is not executable; chmod +x it, or name its interpreter", 126) from None
    except OSError as error:
        if error.errno == errno.ENOEXEC and found is not None:
            # A script without a first line that names its interpreter: what shells do, and execvp.
            return subprocess.Popen(["/bin/sh", found, *command[1:]], env=dict(environment), close_fds=False)
        raise NotStartedError(f"{name} cannot be started ({error.strerror}); try it without eroica", 126) from None
    except ValueError:
        raise NotStartedError("the command holds a null byte; no program can get that", 126) from None


class Job:
    """A command that runs. Made by `start`; signals go to it until `close`, which `wait` calls once it has ended."""

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self._arrived: list[int] = []
        self._is_told_to_end = False
        self._witness: _Witness | None = _Witness.call()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._handlers: dict[int, object] = {}
        for number in FORWARDED:
            # What we were told to ignore (nohup, a shell's &) the job ignores, too: it has inherited that.
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._handlers[number] = signal.signal(number, self._arrive)
        try:
            self._process = _spawned(command, environment)
        except BaseException:
            self.close()
            raise

    @property
    def is_told_to_end(self) -> bool:
        """It was asked to end: by a signal that we saw, or by `end`. Deaths of ranks from then on are no crash."""
        return self._is_told_to_end

    @property
    def pid(self) -> int:
        """Of the command itself."""
        return self._process.pid

    def poll(self) -> int | None:
        """Exit status (128 + N if it died by signal N), or None while it runs. Passes on what has arrived."""
        return self.wait(0)

    def wait(self, timeout_s: float, events: Collection[int] = ()) -> int | None:
        """Like `poll`, after the end of the command or `timeout_s` at the latest; signals are passed on meanwhile.

        `events`: handles that end the wait, too, when they can be read.
        """
        until = time.monotonic() + timeout_s
        handle = None
        has_event = False
        try:
            with contextlib.suppress(OSError, AttributeError):
                handle = os.pidfd_open(self._process.pid)
            while True:
                self.forward()
                code = self._process.poll()
                if code is not None:
                    self.close()
                    return code if code >= 0 else 128 - code
                left_s = until - time.monotonic()
                if left_s <= 0 or has_event:
                    return None
                # Without the handle (an old kernel) we look every so often.
                watched = [self._wake_read, *events] + ([handle] if handle is not None else [])
                ready = _ready(watched, left_s if handle is not None else min(left_s, 0.1))
                has_event = not ready.isdisjoint(events)
                if self._wake_read in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
        finally:
            if handle is not None:
                os.close(handle)

    def forward(self) -> None:
        """Pass on the signals that have arrived for us alone, and stop with the job if it was told to stop."""
        if not self._arrived:
            return
        time.sleep(_TO_ARRIVE_S)
        arrived, seen = self._take()
        has_all = seen if seen is not None else _seen_by_foreground()
        for number in dict.fromkeys(arrived):
            if number not in has_all:
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(number)
            if number == signal.SIGTSTP:
                # By default action, not by SIGSTOP: nobody could continue us where no shell minds the group.
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
                signal.signal(number, self._arrive)

    def _take(self) -> tuple[list[int], frozenset[int] | None]:
        """The signals that have arrived, and those of them that the witness has seen; None without one.

        A new witness stands there before the old one is asked, and has seen nothing when we are done: whatever comes
        meanwhile has a witness, and none keeps a signal for which it would be asked again.
        """
        arrived: list[int] = []
        seen: frozenset[int] = frozenset()
        while True:
            before, self._witness = self._witness, _Witness.call()
            taken, self._arrived = self._arrived, []
            arrived += taken
            if before is None:
                return arrived, None
            seen |= before.seen()
            before.dismiss()
            if self._witness is None or not self._witness.seen():
                return arrived, seen

    def end(self) -> None:
        """Ask the command to end, as `kill` does; for whoever started it only to look at it."""
        if self._process.poll() is None:
            self._is_told_to_end = True
            self._process.terminate()

    def close(self) -> None:
        """Give the signals back to who had them. The command is left alone."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._handlers = {}
        if self._witness is not None:
            self._witness.dismiss()
            self._witness = None
        for handle in (self._wake_read, self._wake_write):
            if handle >= 0:
                os.close(handle)
        self._wake_read = self._wake_write = -1

    def _arrive(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append(number)
        self._is_told_to_end = self._is_told_to_end or number in _ENDING
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"\0")


def _ready(handles: Collection[int], timeout_s: float) -> set[int]:
    """Those that can be read, once there is one."""
    poll = select.poll()  # no select: it knows no handle beyond 1023
    for handle in handles:
        poll.register(handle, select.POLLIN)
    return {handle for handle, _ in poll.poll(math.ceil(timeout_s * 1e3))}


class _Witness:
    """A process in our group that blocks `FORWARDED` and does nothing else. See the module."""

    def __init__(self, pid: int, pipe: int) -> None:
        self._pid = pid
        self._pipe = pipe

    @classmethod
    def call(cls) -> _Witness | None:
        """A new one; None where that is not possible."""
        program = shutil.which("cat")
        if program is None:
            return None
        read, write = os.pipe()
        try:
            pid = os.posix_spawn(
                program,
                ["cat"],
                {},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, read, 0),
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                ],
                setsigmask=FORWARDED,
            )
        except OSError:
            os.close(write)
            return None
        finally:
            os.close(read)
        return cls(pid, write)

    def seen(self) -> frozenset[int]:
        """Which of the signals it was sent, too."""
        bits = 0
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{self._pid}/status", "rb") as file:
            for line in file:
                if line.startswith((b"SigPnd:", b"ShdPnd:")):
                    bits |= int(line.split()[1], 16)
        return frozenset(number for number in FORWARDED if bits >> (number - 1) & 1)

    def dismiss(self) -> None:
        """End it."""
        os.close(self._pipe)
        with contextlib.suppress(OSError):
            os.kill(self._pid, signal.SIGKILL)  # it may have been stopped
            os.waitpid(self._pid, 0)


def _seen_by_foreground() -> frozenset[int]:
    for stream in (0, 1, 2):
        with contextlib.suppress(OSError):
            if os.tcgetpgrp(stream) == os.getpgrp():
                return _OF_TERMINALS
    return frozenset()
