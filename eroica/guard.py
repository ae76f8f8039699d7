"""Who may ask a coordinator for what over HTTP: tokens and their scopes, how often, and under which name.

A token is a file of one user's (mode 0600), with the address and a secret, as a pass is for the bus; whoever can read
it is its holder. The coordinator knows tokens by their SHA-256 alone and compares all of them in constant time, so that
neither its memory nor its answers' times show one. Rates are limited by holder, and by address for who has no token.

It knows no HTTP and has no clock: times are arguments. Used by `api`, which applies it, and `client`, which reads the
files.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import re
import secrets
from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from pathlib import Path

from eroica.access import is_loopback, read_private, write_private
from eroica.answers import SCOPES
from eroica.errors import UserError

MOST_BUCKETS = 4096
"""Of holders and addresses; the one unused for longest is forgotten."""
SUFFIX = ".token"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """What one needs to ask."""

    url: str
    name: str
    """Under which its holder stands in the audit log."""
    scope: str
    token: str = field(repr=False)
    ca: str = ""
    """Certificates, PEM, that the coordinator's must be signed by; "": those that this host trusts."""

    def save(self, path: Path) -> None:
        """Write it so that nobody but this user reads it, at no moment."""
        write_private(path, json.dumps(asdict(self)))


def load_token(path: Path) -> TokenFile:
    """Raises UserError for a file that others can read, or that holds no token."""
    data = read_private(path, "token")
    try:
        plain = json.loads(data)
        known = {name: plain.get(name, "") for name in ("url", "name", "scope", "token", "ca")}
        if not all(isinstance(value, str) for value in known.values()) or not known["token"] or not known["url"]:
            raise TypeError
        return TokenFile(**known)
    except (ValueError, TypeError, AttributeError):
        raise UserError(f"{path}: this is no token; eroica serve writes them") from None


@dataclass(frozen=True, slots=True)
class Holder:
    """Somebody with a token."""

    name: str
    scope: str

    def may(self, scope: str) -> bool:
        """Each scope holds those before it."""
        return SCOPES.index(self.scope) >= SCOPES.index(scope)


class Tokens:
    """Those that a coordinator knows."""

    def __init__(self, files: dict[str, TokenFile]) -> None:
        """`files`: by name."""
        self._known = [(_digest(file.token), Holder(name, file.scope)) for name, file in files.items()]

    def holder(self, token: str) -> Holder | None:
        """Whose it is. Takes as long for each, known or not."""
        digest, found = _digest(token), None
        for known, holder in self._known:
            if hmac.compare_digest(known, digest):
                found = holder
        return found


def write_tokens(folder: Path, url: str, ca: str, named: dict[str, str]) -> dict[str, TokenFile]:
    """Make, or keep, the token files in the folder, which is this user's alone: one for each scope, and `named`, name
    to scope. Secrets outlive the coordinator; to change one, delete its file and start anew."""
    made: dict[str, TokenFile] = {}
    for name, scope in ({scope: scope for scope in SCOPES} | named).items():
        if scope not in SCOPES or not _NAME.fullmatch(name) or (name in SCOPES and name != scope):
            raise UserError(f"{name}:{scope} names no token; write NAME:SCOPE, with a scope of {', '.join(SCOPES)}")
        path = folder / f"{name}{SUFFIX}"
        token = f"eroica-{secrets.token_urlsafe(32)}"
        with contextlib.suppress(UserError):
            token = load_token(path).token
        made[name] = TokenFile(url=url, name=name, scope=scope, token=token, ca=ca)
        made[name].save(path)
    return made


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


@dataclass(frozen=True, slots=True)
class Rate:
    """So many at once, and so many per second in the long run."""

    burst: float
    per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one holder, or one address, may ask for."""

    reads: Rate = Rate(100, 20)
    """Of a holder: a page that shows everything asks some ten times, a program that polls once a second."""
    acts: Rate = Rate(10, 0.2)
    """Of a holder. A window costs the job a few per cent while it lasts."""
    strangers: Rate = Rate(20, 0.5)
    """Requests without a token that is known, of one address: a mistake in a script, not a search for secrets."""
    most_body_bytes: int = 16 << 10
    most_url_bytes: int = 4 << 10
    most_header_bytes: int = 16 << 10
    most_listeners: int = 32
    """Of events, all holders together: each holds a connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Web:
    """Where the API is to be reached, and as what."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: any that is free."""
    certificate: Path | None = None
    """PEM; needed off loopback, and so is its key."""
    key: Path | None = None
    ca: Path | None = None
    """Which clients are to trust; None: the certificate itself."""
    names: tuple[str, ...] = ()
    """Further names of this host, by which it may be called."""
    tokens: dict[str, str] = field(default_factory=dict)
    """Further tokens: name to scope."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise UserError("a certificate and its key belong together; give both")
        if self.certificate is None and not is_loopback(self.host):
            raise UserError(f"{self.host} is not loopback: tokens would cross the network in the clear; give a "
                            "certificate and its key")  # fmt: skip


class Meter:
    """Says whether one more is within a rate."""

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Who -> how many are left, and when that was so."""

    def allows(self, who: str, now_s: float) -> bool:
        """One more of theirs; counted if so."""
        left, then_s = self._left.pop(who, (self._rate.burst, now_s))
        left = min(left + (now_s - then_s) * self._rate.per_s, self._rate.burst)
        is_allowed = left >= 1
        self._left[who] = (left - 1 if is_allowed else left, now_s)
        while len(self._left) > MOST_BUCKETS:
            self._left.popitem(last=False)
        return is_allowed


def is_host(given: str, names: frozenset[str], port: int) -> bool:
    """A Host header that names us: else a page in somebody's browser has been led here under its own name."""
    host, _, given_port = given.rpartition(":") if re.search(r":\d{1,5}$", given) else (given, "", "")
    return host.strip("[]").lower() in names and given_port in ("", str(port))
