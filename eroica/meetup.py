"""How the runs of a job on several hosts find their coordinator without being told where: in the job's own store.

For `eroica run --bus store`. Ranks meet at a store (torch's TCPStore), and each ring tells its address. The run that
has rank 0 starts a coordinator, with a certificate made for this job alone, and leaves the pass in that store; the runs
on the other hosts look there until it comes. A process of ours asks the store, with a connection of its own: the ranks
do nothing for it, and lose nothing if it fails. Used by `live`.

The pass is then as safe as the store, which has neither secrets nor encryption: whoever reaches it could join, or
break, the job itself just as well. Where that is too little, there are `eroica serve` and a pass that is brought along.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eroica import ring
from eroica.access import Pass, as_pass, is_loopback, load_pass
from eroica.errors import EroicaError, UserError

KEY = "eroica/pass"
AGAIN_S = 0.5
"""Between two looks into the store for a pass that is not there yet."""
ASK_S = 20.0
"""For the store to answer at all."""
_ELSEWHERE = "198.18.0.1"
"""An address of no host (RFC 2544): which of our own would be used to reach others? Nothing is sent."""


class Meeting:
    """One run's search; `look` at it now and then, until it gives the pass."""

    def __init__(
        self, folder: Path, *, job: str, out: Path, environ: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        """`folder`: of the rings, private to this user; `out`: for diagnoses, if the coordinator is ours."""
        self._folder = folder
        self._job = job
        self._out = out
        self._environ = environ
        self._say = say
        self._coordinator: subprocess.Popen[bytes] | None = None
        self._asking: subprocess.Popen[str] | None = None
        self._has_first = False
        """Rank 0 is one of ours, as far as was known when the store was asked."""
        self._store = ""

    @property
    def state(self) -> Path:
        """Folder of our coordinator."""
        return self._folder / "serve"

    def look(self) -> Pass | None:
        """The pass, once it is known. Raises EroicaError where there will be none."""
        if self._asking is None:
            self._store, self._has_first = store_of(self._folder)
            if self._store and (not self._has_first or self._has_pass()):
                self._ask(self._has_first)
            return None
        if self._asking.poll() is None:
            if not self._has_first and store_of(self._folder)[1]:
                # Rank 0 came to the store after others of this host: nobody else will leave what we wait for.
                self._end(self._asking, 0.0)
                self._asking = None
            return None
        said, problem = self._asking.communicate()
        if self._asking.returncode:
            lines = problem.strip().splitlines()
            raise UserError(f"the job's store at {self._store} gave no way to a coordinator ({_last(lines)})")
        found = as_pass(said, f"what lies under {KEY} in the store at {self._store}")
        if self._coordinator is not None and found != load_pass(self._path):
            self._coordinator.terminate()  # another run was first
        return found

    def close(self, wait_s: float = 0.0) -> None:
        """End our processes; the coordinator has `wait_s` to end by itself, when the runs of all hosts have left."""
        for process, grace_s in ((self._asking, 0.0), (self._coordinator, wait_s)):
            if process is not None:
                self._end(process, grace_s)

    @staticmethod
    def _end(process: subprocess.Popen[Any], grace_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        if process.poll() is None:
            process.terminate()
            process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()

    def _has_pass(self) -> bool:
        """Whether our coordinator, which is started if need be, can be reached."""
        if self._coordinator is None:
            self._coordinator = self._serve(self._store)
        if self._coordinator.poll() is not None:
            raise UserError("the coordinator did not come up; its reason stands above")
        with contextlib.suppress(EroicaError):
            return bool(load_pass(self._path))
        return False

    @property
    def _path(self) -> Path:
        return self.state / f"{self._job}.pass"

    def _serve(self, store: str) -> subprocess.Popen[bytes]:
        address = own_address(store)
        command = [sys.executable, "-m", "eroica", "serve", "--job", self._job, "--out", str(self._out)]
        command += ["--state", str(self.state), "--until-over", "--http", "off", "--listen", address]
        self.state.mkdir(mode=0o700)
        if not is_loopback(address):
            certificate, key = self.state / "bus.pem", self.state / "bus.key"
            certify(address, certificate, key)
            command += ["--tls-cert", str(certificate), "--tls-key", str(key)]
        self._say(f"this run has rank 0: it brings the coordinator along, on {address}")
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=dict(self._environ), start_new_session=True)

    def _ask(self, is_ours: bool) -> None:
        host, _, port = self._store.rpartition(":")
        self._asking = subprocess.Popen(
            [sys.executable, "-m", "eroica.meetup", host.strip("[]"), port],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(self._environ),
            start_new_session=True,
        )
        assert self._asking.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it says why it ended
            self._asking.stdin.write(json.dumps(asdict(load_pass(self._path))) if is_ours else "")
            self._asking.stdin.close()
        self._asking.stdin = None


def store_of(folder: Path) -> tuple[str, bool]:
    """ "HOST:PORT" where the ranks with rings in `folder` meet, and whether one of them is the first of all; "" if no
    rank has said it, or they meet elsewhere than at an address."""
    store, has_first = "", False
    for path in folder.glob(f"*{ring.SUFFIX}"):
        with contextlib.suppress(OSError, EroicaError):
            flight = ring.read_flight(path)
            for note in flight.notes:
                joins = note.get("joins")
                told = str(joins.get("store", "")) if isinstance(joins, dict) else ""
                if told.rpartition(":")[2].isdecimal():
                    store, has_first = told, has_first or flight.words[ring.RANK] == 0
    return store, has_first


def own_address(store: str) -> str:
    """By which this host is to be reached from where the store "HOST:PORT" is."""
    host, _, port = store.rpartition(":")
    host = host.strip("[]")
    if is_loopback(host):
        return "127.0.0.1"
    found = _towards(host, int(port))
    # Many hosts take their own name for 127.0.1.1, which is true here alone.
    return found if found and not is_loopback(found) else _towards(_ELSEWHERE, 9) or "127.0.0.1"


def _towards(host: str, port: int) -> str:
    try:
        (family, kind, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        with socket.socket(family, kind) as asked:
            asked.connect(address)
            return str(asked.getsockname()[0])
    except OSError:
        return ""


def certify(address: str, certificate: Path, key: Path) -> None:
    """Write a certificate for a host, PEM, that signs itself, and its key. Raises UserError without `cryptography`."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise UserError("a certificate is made with cryptography; pip install 'eroica[cluster]'") from None
    secret = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"eroica on {address}"[:64])])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(secret.public_key())
        .serial_number(x509.random_serial_number())
        # Clocks of hosts differ, and jobs last for months.
        .not_valid_before(now - datetime.timedelta(days=2))
        .not_valid_after(now + datetime.timedelta(days=365))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(secret, hashes.SHA256())
    )
    key.touch(mode=0o600)
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    key.write_bytes(secret.private_bytes(serialization.Encoding.PEM, form, plain))
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))


def _last(lines: list[str]) -> str:
    return lines[-1][:300] if lines else "it says nothing"


def _exchange(host: str, port: int, ours: str) -> str:
    """Leave our pass in the store unless there is one, or wait for one if we have none; what lies there then."""
    import time
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=ASK_S), wait_for_workers=False)
    if ours:
        return bytes(store.compare_set(KEY, "", ours)).decode("utf-8", "replace")
    while not store.check([KEY]):
        time.sleep(AGAIN_S)
    return bytes(store.get(KEY)).decode("utf-8", "replace")


if __name__ == "__main__":
    sys.stdout.write(_exchange(sys.argv[1], int(sys.argv[2]), sys.stdin.read()))
