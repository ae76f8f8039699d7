"""The end point at which Kineto, inside of training processes, asks for something to record: the place of dynolog.

A process that was started with `OnDemand.environment()` runs a thread of Kineto's that asks once a second, over a
datagram socket, whether there is a configuration for it. `request` leaves one; Kineto then records a window by itself
and writes a trace, with no code of ours in the process. Not the capture of the probe (`probe.capture`), which works in
the process and needs no environment; no thread: whoever owns it calls `poll`, at least every `REPLY_S` seconds, since a
client waits no longer for its answer (a later one is taken for the answer to the next question). That may be another
thread than the one that makes requests.

What Kineto's client does with what it dislikes decides the shape of all this (torch 2.13, tried):

- A datagram from a socket outside of KINETO_IPC_SOCKET_DIR, or from one without an address, aborts the training
  process. So the folder is private, and we answer from the very path that the client knows.
- The folder's name goes unchecked into 108 bytes, with 53 more behind it. And where a socket lies that nobody reads
  any more, each question waits 10 s for it, as does the end of the training process. So the folder is not given by its
  name but as `/proc/PID/fd/N` of the agent: short, and gone in the moment when the agent is gone, however it ended.
  The price: an agent that was started anew does not reach the jobs of the one before, nor one in another container.
- An answer with any text in it, a line break too, is a request; no request is an answer without text.
- Once the process has counted no optimizer step yet, a request by steps becomes one by time (or is dropped).
- What cannot be helped from here, and why this is not for every job: a process that comes to its end within a window
  dies of SIGSEGV instead, whatever it had to return; and a child made by os.fork that ends in the ordinary way (not by
  os._exit, as all of multiprocessing does) hangs at its end, window or not.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic_ns

from eroica.errors import UnavailableError, UserError
from eroica.ring import start_ticks

REPLY_S = 0.05
"""Kineto looks five times, 10 ms apart, for an answer, and goes on without."""
POLL_S = 1
"""How often a process asks. A request has reached it after at most two of these: it may just have missed an answer."""
MOST_STEPS = 1023
LONGEST_S = 60.0
"""Of a window by time. Kineto keeps all of it in memory, at some 1.5 kB per event."""

_HEADER = struct.Struct("<Q32s")  # size of the text, type of the message
_CONTEXT = struct.Struct("<iiq")  # device, pid, job: a process that uses the device says so
_REQUEST = struct.Struct("<iiq")  # kinds of configuration that are welcome, number of pids behind, job
_ACTIVITIES = 2
_MOST_BYTES = 1 << 14
_MOST_PROCESSES = 4096
_MOST_AT_ONCE = 256
"""Datagrams read in one poll, so that a flood cannot hold the loop."""
_CREDENTIALS = struct.Struct("3i")
_CLIENT = "dynoconfigclient"
_NAME = "dynolog"
_SETTINGS = "kineto.conf"


@dataclass(frozen=True, slots=True, kw_only=True)
class BySteps:
    """A window in optimizer steps as Kineto counts them: every call of a step hook of torch, nested ones too, and none
    of a step that a gradient scaler skips. The process must have made one before the request arrives."""

    start: int
    """Recording begins when this many are done. If they are when the request arrives, at one past the next multiple of
    `round_up`."""
    num_steps: int
    round_up: int = 1
    """Ranks that hear of it a second apart agree on a multiple that is some seconds of steps away."""

    def __post_init__(self) -> None:
        if not (0 < self.start < 1 << 31 and 0 < self.num_steps <= MOST_STEPS and 0 < self.round_up < 1 << 31):
            raise UserError(f"{self}: a window has 1 to {MOST_STEPS} steps, and starts at a count of 1 or more")

    def lines(self) -> tuple[str, ...]:
        """As Kineto reads it, which takes one step to get ready, and would record half a second of a process without
        steps but for the zero duration."""
        return (
            f"PROFILE_START_ITERATION={self.start - 1}",
            f"PROFILE_START_ITERATION_ROUNDUP={self.round_up}",
            f"ACTIVITIES_ITERATIONS={self.num_steps}",
            "ACTIVITIES_WARMUP_ITERATIONS=0",
            "ACTIVITIES_DURATION_MSECS=0",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ByTime:
    """A window by the wall clock."""

    duration_s: float
    start_ms: int = 0
    """Milliseconds since 1970, so that all ranks start alike; 0 = as soon as the process hears of it, and 1 s more."""

    def __post_init__(self) -> None:
        if not (0 < self.duration_s <= LONGEST_S and self.start_ms >= 0):
            raise UserError(f"{self}: a window lasts up to {LONGEST_S:g} s, and starts at a time since 1970 or at 0")

    def lines(self) -> tuple[str, ...]:
        """As Kineto reads it."""
        return (
            f"PROFILE_START_TIME={self.start_ms}",
            f"ACTIVITIES_DURATION_MSECS={max(1, round(self.duration_s * 1e3))}",
            "ACTIVITIES_WARMUP_PERIOD_SECS=0",
        )


@dataclass(frozen=True, slots=True)
class Process:
    """Somebody who asks: a rank, its launcher or one of its loader workers. All of them import torch."""

    pid: int
    """As the kernel says, in our namespace."""
    own_pid: int
    """As it says itself, in its own: it names its traces by this."""
    job: int
    """SLURM_JOB_ID; 0 if none."""
    device: int | None
    """Index of the device it has registered for; None on a job without."""
    heard_ns: int
    """CLOCK_MONOTONIC of its last question."""
    is_free: bool
    """It would take a request: no window is under way, and no profiler of its user's."""
    start_ticks: int


class OnDemand:
    """See the module. One per job; `close` it when the job has ended."""

    def __init__(self, folder: Path) -> None:
        """Open the end point in `folder`, which is made if need be. Raises UserError if others may enter the folder or
        an agent is there, OSError."""
        self.folder = folder
        self._has_made = _make_private(folder)
        self._directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        self.address = f"/proc/{os.getpid()}/fd/{self._directory}"
        """The folder, as processes of the job and we must spell it."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._processes: dict[int, Process] = {}
        self._waiting: dict[int, bytes] = {}
        self._lock = threading.RLock()
        self.num_strange = 0
        """Datagrams that were no questions of Kineto's; they got no answer."""
        try:
            self._bind()
            (folder / _SETTINGS).write_text(f"ON_DEMAND_CONFIG_UPDATE_INTERVAL_SECS={POLL_S}\n")
        except BaseException:
            self._socket.close()
            os.close(self._directory)
            raise

    def _bind(self) -> None:
        path = f"{self.address}/{_NAME}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
            try:
                probe.connect(path)
            except FileNotFoundError:
                pass
            except ConnectionRefusedError:  # left by an agent that was killed
                os.unlink(path)
            else:
                raise UserError(f"{self.folder} is the end point of another agent; give each job a folder of its own")
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(path)

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """What a job must be started with on top of `environ`. The user's own settings of Kineto stay as they are; with
        a daemon of their own (KINETO_USE_DAEMON), UserError: a process has one end point."""
        if environ.get("KINETO_USE_DAEMON"):
            raise UserError(
                "KINETO_USE_DAEMON is set: this job answers to another daemon; unset it, or capture in process"
            )
        added = {"KINETO_USE_DAEMON": "1", "KINETO_IPC_SOCKET_DIR": self.address}
        # Kineto would say on stderr, every second, that nobody answers, once the agent is gone.
        defaults = {"KINETO_CONFIG": f"{self.address}/{_SETTINGS}", "KINETO_LOG_LEVEL": "5"}
        return added | {name: value for name, value in defaults.items() if name not in environ}

    def fileno(self) -> int:
        """For select: readable when somebody asks."""
        return self._socket.fileno()

    def poll(self, timeout_s: float = 0.0) -> int:
        """Answer whoever asks, waiting up to `timeout_s` for the first; returns how many asked."""
        if timeout_s > 0 and not select.select([self._socket], [], [], timeout_s)[0]:
            return 0
        with self._lock:
            return self._poll()

    def _poll(self) -> int:
        num_asked = 0
        for _ in range(_MOST_AT_ONCE):
            try:
                text, extra, _, sender = self._socket.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                break
            answer = self._answer(text, extra, sender)
            if answer is None:
                self.num_strange += 1
                continue
            num_asked += 1
            with contextlib.suppress(OSError):  # it has ended, or its queue is full: it will ask again
                self._socket.sendto(answer, sender)
        return num_asked

    def known(self) -> dict[int, Process]:
        """Who has asked and still runs, by pid."""
        with self._lock:
            for pid, process in list(self._processes.items()):
                if start_ticks(pid) != process.start_ticks:
                    del self._processes[pid]
                    self._waiting.pop(pid, None)
            return dict(self._processes)

    def request(self, pid: int, trace_path: Path, window: BySteps | ByTime, *, stacks: bool = True) -> Path:
        """Have process `pid` record `window`; returns where its trace appears, complete, once it is written.

        Takes the place of a request that the process has not fetched yet. The process names the file by its pid: what
        follows the last "." of `trace_path` must be "json". Raises UnavailableError if no such process asks for
        requests, UserError if the path cannot be said to Kineto.
        """
        process = self.known().get(pid)
        if process is None:
            raise UnavailableError(
                f"process {pid} asks for no requests; was it started with the end point's environment?"
            )
        path = os.path.abspath(trace_path)
        if not path.endswith(".json") or not path.isprintable() or path != path.strip() or "#" in path:
            raise UserError(f"{path!r}: a trace of Kineto's ends in .json, and its path holds no line break and no '#'")
        lines = [f"ACTIVITIES_LOG_FILE={path}", *window.lines(), "PROFILE_REPORT_INPUT_SHAPES=false"]
        lines += [f"PROFILE_WITH_STACK={'true' if stacks else 'false'}", ""]
        with self._lock:
            self._waiting[pid] = "\n".join(lines).encode()
        return Path(f"{path.removesuffix('.json')}_{process.own_pid}.json")

    def waiting(self) -> set[int]:
        """Processes that have not fetched their request yet."""
        with self._lock:
            return set(self._waiting)

    def cancel(self, pid: int) -> bool:
        """Take a request back; False if it has been fetched already (Kineto knows no way back then)."""
        with self._lock:
            return self._waiting.pop(pid, None) is not None

    def close(self) -> None:
        """Remove what this made: the socket, the settings, the sockets that clients leave behind, the folder.

        A job that still runs is not harmed; its questions fail at once. Twice is once."""
        if self._socket.fileno() < 0:
            return
        self._socket.close()
        with contextlib.suppress(OSError):
            for name in os.listdir(self._directory):
                if name in (_NAME, _SETTINGS) or name.startswith(_CLIENT):
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=self._directory)
            if self._has_made:
                self.folder.rmdir()
        os.close(self._directory)

    def _answer(self, text: bytes, extra: list[tuple[int, int, bytes]], sender: object) -> bytes | None:
        """To the process that sent `text`; None: to nobody."""
        pid = _sender(extra)
        if pid is None or not isinstance(sender, str) or not self._is_client(sender) or len(text) < _HEADER.size:
            return None
        size, name = _HEADER.unpack_from(text)
        body = text[_HEADER.size :]
        kind = name.split(b"\0", 1)[0]
        if size != len(body) or len(body) < _CONTEXT.size:
            return None
        known = self._processes.get(pid)
        ticks = start_ticks(pid)
        if known is not None and known.start_ticks != ticks:
            known = None
            self._waiting.pop(pid, None)
        if known is None:
            if len(self._processes) >= _MOST_PROCESSES:
                self.known()
            if len(self._processes) >= _MOST_PROCESSES:
                return None
            known = Process(pid, pid, 0, None, 0, False, ticks)
        now = monotonic_ns()
        if kind == b"ctxt" and len(body) == _CONTEXT.size:
            device, own_pid, job = _CONTEXT.unpack(body)
            self._processes[pid] = replace(known, own_pid=own_pid, job=job, device=device, heard_ns=now)
            count = sum(other.device == device for other in self._processes.values())
            return _HEADER.pack(4, b"ctxt") + struct.pack("<i", count)
        if kind == b"req":
            welcome, num_pids, job = _REQUEST.unpack_from(body)
            if num_pids < 1 or len(body) != _REQUEST.size + 4 * num_pids:
                return None
            (own_pid,) = struct.unpack_from("<i", body, _REQUEST.size)
            is_free = bool(welcome & _ACTIVITIES)
            self._processes[pid] = replace(known, own_pid=own_pid, job=job, heard_ns=now, is_free=is_free)
            request = self._waiting.pop(pid, b"") if is_free else b""
            return _HEADER.pack(len(request), b"req") + request
        return None

    def _is_client(self, sender: str) -> bool:
        folder, _, name = sender.rpartition("/")
        return folder == self.address and name.startswith(_CLIENT)


def _sender(extra: list[tuple[int, int, bytes]]) -> int | None:
    """Pid of the sender, vouched for by the kernel; None if it is of another user."""
    for level, kind, data in extra:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(data) >= _CREDENTIALS.size:
            pid, uid, _ = _CREDENTIALS.unpack_from(data)
            return pid if pid > 0 and uid in (0, os.getuid()) else None
    return None


def _make_private(folder: Path) -> bool:
    """Make the folder, or see that it is this user's alone; True if it was made."""
    try:
        os.mkdir(folder, 0o700)
        return True
    except FileExistsError:
        pass
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UserError(
            f"{folder} is open to others (mode {stat.S_IMODE(status.st_mode):03o}, owner {status.st_uid}), and a "
            "stranger's datagram there ends the training; give a folder of mode 700, or one that does not exist"
        )
    return False
