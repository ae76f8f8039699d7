"""Who may say what on the bus over hosts: passes, and the permissions that a server gives to their holders.

A pass is a file of one user's (mode 0600) with an address, a name and a secret; with it an agent or a coordinator gets
in. The environment may name the file, or hold a URL with the same in it; command lines, which all users of a host can
read, never hold a secret. Used by `broker`, `nats` and the command line.

Each job has a pass of its own, so that its agents can say nothing about other jobs and hear nothing of them; agents of
one job trust each other. The agent that serves all jobs of a host has one for all, and so has the coordinator.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from eroica.errors import UserError
from eroica.untrusted import clean

VARIABLE = "EROICA_COORDINATOR"
"""A pass, or a URL: nats://NAME:SECRET@HOST:PORT, tls:// off this host."""
STORE = "store"
"""Instead of a pass: it is to be found in the job's own store."""
JOB_VARIABLE, CA_VARIABLE = "EROICA_JOB", "EROICA_CA"
VARIABLES = (VARIABLE, JOB_VARIABLE, CA_VARIABLE)
ALL_JOBS = "*"
MOST_BYTES = 1 << 20
"""Of a file with a secret: all certificates that a host trusts, which it may hold, take some 250 kB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What one needs to get in."""

    url: str
    """nats://HOST:PORT or tls://HOST:PORT; several, with commas, for a cluster."""
    user: str = ""
    password: str = field(default="", repr=False)
    job: str = ""
    """Which it is for; ALL_JOBS: any; "": whoever uses it has to say."""
    ca: str = ""
    """Certificates, PEM, that the server's must be signed by; "": those that this host trusts."""

    def __post_init__(self) -> None:
        if len({_split(url).scheme for url in self.urls}) > 1:
            raise UserError(
                f"{self.url}: the servers of one bus are either all encrypted or none; write tls:// for all"
            )
        for url in self.urls:
            parts = _split(url)
            if parts.scheme not in ("nats", "tls") or not parts.hostname:
                raise UserError(f"{url or 'an empty address'} is no address of a bus; write nats://HOST:PORT")
            if parts.scheme == "nats" and not is_loopback(parts.hostname):
                raise UserError(
                    f"{url} is not on this host and not encrypted; write tls://{parts.netloc}, and give the bus a "
                    "certificate"
                )

    @property
    def urls(self) -> list[str]:
        """Addresses without secrets."""
        return self.url.split(",")

    def save(self, path: Path) -> None:
        """Write it so that nobody but this user reads it, at no moment."""
        write_private(path, json.dumps(asdict(self)))


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port  # it is looked at when it is asked for
        return parts
    except ValueError:
        where = clean(url.rpartition("@")[2], 100)
        raise UserError(f"{where} is no address of a bus; write nats://HOST:PORT") from None


def write_private(path: Path, text: str, *, is_new: bool = False) -> None:
    """Write a file so that nobody but this user reads it, and nobody half of it, at no moment. `is_new`: raise
    FileExistsError rather than replace one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(beside)
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    if is_new:
        try:
            os.link(beside, path)
        finally:
            os.unlink(beside)
    else:
        os.replace(beside, path)


def read_private(path: Path, what: str) -> bytes:
    """Read a "pass" or "token", as `what` says. Raises UserError if it cannot be read, or others can read it."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(MOST_BYTES)
    except OSError as error:
        raise UserError(f"{path}: the {what} cannot be read ({error.strerror or error})") from None
    if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
        raise UserError(f"{path}: a {what} must be for its owner alone; chmod 600 it")
    return data


def load_pass(path: Path) -> Pass:
    """Raises UserError for a file that others can read, or that is no pass."""
    return as_pass(read_private(path, "pass"), str(path))


def as_pass(data: str | bytes, where: str) -> Pass:
    """A pass from the JSON of one. Raises UserError, which begins with `where`."""
    try:
        plain = json.loads(data[:MOST_BYTES])
        known = {name: plain[name] for name in ("url", "user", "password", "job", "ca") if name in plain}
        if not all(isinstance(value, str) for value in known.values()):
            raise TypeError
        return Pass(**known)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UserError(f"{where}: this is no pass; eroica serve writes them") from None


def find_pass(environ: Mapping[str, str]) -> Pass | None:
    """The pass that the environment names or holds; None if it does not. Raises UserError."""
    value = environ.get(VARIABLE, "")
    if not value:
        return None
    if "://" not in value:
        return load_pass(Path(value))
    bare, user, password = [], "", ""
    for url in value.split(","):
        parts = _split(url)
        user = unquote(parts.username) if parts.username else user
        password = unquote(parts.password) if parts.password else password
        bare.append(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}")
    ca = ""
    if environ.get(CA_VARIABLE):
        try:
            ca = Path(environ[CA_VARIABLE]).read_text("utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"{CA_VARIABLE}={environ[CA_VARIABLE]} cannot be read ({error})") from None
    return Pass(url=",".join(bare), user=user, password=password, job=environ.get(JOB_VARIABLE, ""), ca=ca)


def is_loopback(host: str) -> bool:
    """Nobody but this host reaches it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def make_private(folder: Path) -> None:
    """Make a folder of this user alone, for secrets. Raises UserError for one that is open to others."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = os.lstat(folder)
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UserError(f"{folder} is open to others; chmod 700 it, or name another folder")


def permissions(job: str) -> dict[str, dict[str, list[str]]]:
    """What the agents of a job may publish and hear, as NATS has it."""
    word = job if job == ALL_JOBS else _word(job)
    return {
        "publish": {"allow": [f"eroica.{word}.up.*"]},
        "subscribe": {"allow": [f"eroica.{word}.down", f"eroica.{word}.to.*"]},
    }


def permissions_of_coordinator() -> dict[str, dict[str, list[str]]]:
    """The same for a coordinator of all jobs."""
    return {
        "publish": {"allow": ["eroica.*.down", "eroica.*.to.*"]},
        "subscribe": {"allow": ["eroica.*.up.*"]},
    }


def _word(job: str) -> str:
    if not job or not all(letter.isascii() and (letter.isalnum() or letter in "_-") for letter in job):
        raise UserError(f"{job!r} is no name of a job on the bus; use letters, digits, - and _")
    return job
