"""A small cluster on one machine, each program of it a process of its own: coordinator, two hosts, a job over both.

`eroica serve` with TLS, tokens and the bus that it brings along runs in a room of its own; `eroica agent` runs on each
of two hosts, which are network namespaces (`namespaces`); four gloo ranks train over both, and rank 2, on the second,
reads slowly from some step on (`cluster_job`). Each host has two cards, so that its way to the coordinator can be cut
without the job's. All programs carry a mark in their environment, by which what they leave behind is found. Used by
`campaign`, which does harm to the parts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import eroica
from eroica.client import Client, find_client
from eroica.errors import EroicaError
from eroica.meetup import certify
from evals import namespaces

HOSTS = ("a", "b")
RANKS_PER_HOST = 2
JOB = "waves"
STEPS, ONSET, CULPRIT = 480, 120, 2
"""Some 3 s of healthy steps, then some 24 s of slow ones: the window, another one where the first was lost, and what a
part that is lost needs to come back and to be told of it, must find room in these."""
MARK = "EVALS_CLUSTER"
ROOT = Path(__file__).parent.parent
PATIENCE_S = 60.0
TRAINING_S = 150.0
"""It takes 30 s, and as long again to begin, on a quiet machine."""


class StuckError(Exception):
    """What was waited for did not come."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What a run came to."""

    status: int
    """Exit status of the job."""
    weights: str
    """Digest of the final weights, the same on all ranks; "" if they differ or there are none."""
    seconds: float
    """All steps, of the slowest rank; 0 if a rank has not come to the end."""
    incidents: tuple[dict[str, Any], ...]
    """Of the store, oldest first: whole diagnoses."""
    lines: tuple[dict[str, Any], ...]
    """Of incidents.jsonl."""
    left: tuple[str, ...]
    """Processes and files that should not be there any more."""


@dataclass
class Cluster:
    """One run. `start` begins it, `end` waits for the job and ends the rest, `close` clears up in any case."""

    site: namespaces.Site
    folder: Path
    """Empty."""
    address: str
    """Where the coordinator is to be reached."""
    store: str = ""
    """URL of a database; "": a file."""
    is_watched: bool = True
    """False: the job alone, as if there were no eroica."""
    preload: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """More environment, by host; "" is the coordinator's."""

    def __post_init__(self) -> None:
        self.mark = secrets.token_hex(8)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: list[IO[bytes]] = []
        for name in ("state", "out", "job", "tmp", *(f"run-{host}" for host in HOSTS)):
            (self.folder / name).mkdir(exist_ok=True)
        (self.folder / "state").chmod(0o700)

    def start(self) -> None:
        """Until the job runs."""
        if self.is_watched:
            certify(self.address, self.folder / "bus.pem", self.folder / "bus.key")
            self.serve()
            for host in HOSTS:
                self.watch(host)
        hosts = [
            {
                "holder": self.site.holder(host),
                "address": self.site.address(host),
                "ranks": RANKS_PER_HOST,
                "environment": {
                    "XDG_RUNTIME_DIR": str(self.folder / f"run-{host}"),
                    "EROICA_HOST": host,
                    "GLOO_SOCKET_IFNAME": "eth0",
                    "MASTER_PORT": "29500",
                    **self.preload.get(host, {}),
                },
            }
            for host in HOSTS
        ]
        words = [json.dumps(hosts), str(self.folder / "job"), *(str(number) for number in (STEPS, ONSET, CULPRIT))]
        path = [str(Path(eroica.__file__).parent / "arming"), str(ROOT)] if self.is_watched else [str(ROOT)]
        script = str(Path(__file__).with_name("cluster_job.py"))
        environment = {"PYTHONPATH": os.pathsep.join(path), **self.preload.get(HOSTS[0], {})}
        self._run("job", [sys.executable, script, *words], environment)

    def serve(self) -> None:
        """The coordinator, also once more; returns when it answers."""
        where = f"{self.address}:8443"
        words = ["serve", "--job", JOB, "--out", "out", "--state", "state", "--http", where]
        words += ["--listen", f"{self.address}:4443", "--tls-cert", "bus.pem", "--tls-key", "bus.key"]
        if self.store:
            words += ["--store", self.store]
        (self.folder / "serve.log").unlink(missing_ok=True)
        self._run("serve", [sys.executable, "-m", "eroica", *words], self.preload.get("", {}))
        self.wait(lambda: "the HTTP API is at" in self.log("serve"), "coordinator")
        self.client: Client = find_client({}, str(self.folder / "state" / "act.token"))

    def watch(self, host: str) -> None:
        """The agent of a host, also once more."""
        environment = {
            "XDG_RUNTIME_DIR": str(self.folder / f"run-{host}"),
            "EROICA_HOST": host,
            "EROICA_COORDINATOR": str(self.folder / "state" / f"{JOB}.pass"),
            **self.preload.get(host, {}),
        }
        self._run(host, [sys.executable, "-m", "eroica", "agent"], environment, host)

    def _run(self, name: str, command: list[str], environment: Mapping[str, str], host: str = "") -> None:
        log = (self.folder / f"{name}.log").open("ab")
        self._logs.append(log)
        common = {MARK: self.mark, "TMPDIR": str(self.folder / "tmp"), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.processes[name] = subprocess.Popen(
            command,
            env=os.environ | common | dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=self.folder,
            preexec_fn=(lambda: namespaces.enter(self.site.holder(host))) if host else None,
        )

    def log(self, name: str) -> str:
        """What a program has said."""
        path = self.folder / f"{name}.log"
        return path.read_text("utf-8", "replace") if path.exists() else ""

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = PATIENCE_S) -> None:
        """Raises StuckError if it does not come about in time."""
        until = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > until:
                raise StuckError(f"no {what} within {seconds:.0f} s")
            time.sleep(0.02)

    @property
    def is_training(self) -> bool:
        """The job has not ended."""
        return self.processes["job"].poll() is None

    def window(self) -> str:
        """What the coordinator captures, in its own words; "" for nothing, also while it cannot be asked."""
        try:
            return self.client.job(JOB).window
        except EroicaError:
            return ""

    def kill(self, name: str) -> None:
        """Without a word to it."""
        self.processes[name].kill()
        self.processes[name].wait()

    def ranks(self) -> dict[int, int]:
        """Process of each rank."""
        return {int(rank): pid for rank, pid in json.loads((self.folder / "job" / "ranks.json").read_text()).items()}

    def bus(self) -> int:
        """The process of the NATS server."""
        pid = self.processes["serve"].pid
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(child)

    def end(self) -> Ended:
        """Wait for the job's end, for what is still to be told, and for the end of all others."""
        try:
            status = self.processes["job"].wait(TRAINING_S)
        except subprocess.TimeoutExpired:
            raise StuckError(f"the job has not ended within {TRAINING_S:.0f} s") from None
        incidents: list[dict[str, Any]] = []
        if self.is_watched:
            self.wait(lambda: self.client.job(JOB).num_alive == 0 and not self.window(), "end of the last window")
            for name in HOSTS:
                self._leave(name)
            incidents = [self.client.incident(one.id) for one in self.client.incidents(job=JOB).incidents]
            self._leave("serve")
        path = self.folder / "out" / JOB / "incidents.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        told = [json.loads(file.read_text()) for file in sorted((self.folder / "job").glob("rank-*.json"))]
        weights = {one["weights"] for one in told}
        is_whole = len(told) == len(self.ranks())
        return Ended(
            status=status,
            weights=weights.pop() if is_whole and len(weights) == 1 else "",
            seconds=max(one["seconds"] for one in told) if is_whole else 0.0,
            incidents=tuple(reversed(incidents)),
            lines=tuple(json.loads(line) for line in lines),
            left=tuple(self._left()),
        )

    def _leave(self, name: str) -> None:
        process = self.processes[name]
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(30)
        except subprocess.TimeoutExpired:
            raise StuckError(f"{name} does not end on SIGTERM") from None
        if status:
            raise StuckError(f"{name} ends with status {status}: {self.log(name)[-400:]}")

    def _left(self) -> Iterator[str]:
        for pid in self._marked():
            with contextlib.suppress(OSError):
                yield f"process {Path(f'/proc/{pid}/cmdline').read_bytes().decode().replace(chr(0), ' ')[:80]}"
        for file in sorted((self.folder / "tmp").rglob("*")):
            if not file.name.startswith("torchinductor_"):  # torch's own
                yield f"file {file.relative_to(self.folder)}"
        for file in sorted(self.folder.glob("run-*/**/*")):
            # Rings of ranks that armed themselves stay for `eroica show`, so many and no more (`place.prune`).
            if file.is_file() and not re.fullmatch(r".*\.(ring|stacks)", file.name):
                yield f"file {file.relative_to(self.folder)}"
        for file in sorted(Path("/dev/shm").glob("*eroica*")):
            yield f"file {file}"

    def _marked(self) -> list[int]:
        """Processes of this run that live."""
        wanted, found = f"{MARK}={self.mark}".encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if wanted in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def close(self) -> None:
        """End whatever still runs."""
        for process in self.processes.values():
            process.kill()
            process.wait()
        for pid in self._marked():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for log in self._logs:
            log.close()
