"""MCP over HTTP, for clients that cannot start us: on this host alone, and nobody without a token.

It listens on loopback. Other hosts come through a tunnel that the user makes (`ssh -L`), so that no certificate of ours
and no open port is needed. Loopback alone keeps nobody out: any page in a browser may send requests there, and may
have its name resolve to it. So the Host and Origin of each request must be this host's, and each needs a bearer token.

Tokens lie in a file that only its owner can read, one a line, with what each may do:

    read 6tXk...
    read,act 9mQz...

The scopes are checked per call (`acting`); a token that may only read finds the acting tools, and is refused by them.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import uvicorn
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from mcp.server.mcpserver import MCPServer
from mcp.server.transport_security import TransportSecuritySettings
from pydantic import AnyHttpUrl

from eroica.access import write_private
from eroica.errors import UserError
from mcp_server.reader import Setup
from mcp_server.server import build

LOOPBACK = "127.0.0.1"
SCOPES = frozenset(("read", "act"))
LEAST_CHARS = 16
"""Of a token: shorter ones can be guessed over loopback in a night."""
MOST_TOKENS = 100
MAX_FILE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Token:
    """A secret and what it allows."""

    secret: str
    scopes: frozenset[str]
    name: str
    """Who bears it, as sessions are told apart: never the secret."""


class Verifier:
    """Knows the tokens of a file."""

    def __init__(self, tokens: tuple[Token, ...]) -> None:
        self._tokens = tokens

    async def verify_token(self, token: str) -> AccessToken | None:
        """See the SDK's TokenVerifier. Every known token is compared, in constant time."""
        given = token.encode("utf-8", "replace")
        found = [known for known in self._tokens if hmac.compare_digest(known.secret.encode(), given)]
        if not found:
            return None
        return AccessToken(token=token, client_id=found[0].name, scopes=sorted(found[0].scopes))


def default_tokens() -> Path:
    """Where tokens are looked for."""
    return Path.home() / ".eroica" / "mcp-tokens"


def load_tokens(file: Path) -> tuple[Token, ...]:
    """The tokens in `file`; two new ones, for reading and for both, if it does not exist. Raises UserError."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        _make(file)
        handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror})") from None
    with open(handle, "rb") as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077 or status.st_uid != os.getuid():
            raise UserError(f"{file} holds secrets and must be its owner's alone; chmod 600 it")
        text = opened.read(MAX_FILE_BYTES).decode("utf-8", "replace")
    tokens = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        scopes = frozenset(words[0].split(","))
        if len(words) != 2 or not scopes <= SCOPES or "read" not in scopes:
            raise UserError(f"{file}, line {number}: a line is SCOPES TOKEN, the scopes read or read,act")
        if len(words[1]) < LEAST_CHARS or not words[1].isascii():
            raise UserError(f"{file}, line {number}: a token has at least {LEAST_CHARS} ASCII characters")
        tokens.append(Token(words[1], scopes, f"line {number}"))
    if not tokens or len(tokens) > MOST_TOKENS:
        raise UserError(f"{file} holds {len(tokens)} tokens; from 1 to {MOST_TOKENS} are of use")
    return tuple(tokens)


def _make(file: Path) -> None:
    text = f"read {secrets.token_urlsafe(32)}\nread,act {secrets.token_urlsafe(32)}\n"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(file, text, is_new=True)
    except OSError as error:
        raise UserError(f"{file} cannot be made ({error.strerror}); name another --tokens") from None


def server_for(setup: Setup, port: int, tokens: tuple[Token, ...]) -> MCPServer:
    """The server of `setup`, for who has a token."""
    url = AnyHttpUrl(f"http://{LOOPBACK}:{port}/mcp")
    auth = AuthSettings(
        issuer_url=AnyHttpUrl(f"http://{LOOPBACK}:{port}"),
        resource_server_url=url,
        required_scopes=["read"],
        validate_token_resource=False,  # tokens are made for this server alone
    )
    return build(replace(setup, auth=auth, verifier=Verifier(tokens)))


def serve(setup: Setup, port: int, file: Path, say: Callable[[str], None]) -> None:
    """Serve on `port` of this host until a signal ends us. Raises UserError."""
    tokens = load_tokens(file)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
        except OSError as error:
            raise UserError(f"port {port} cannot be had ({error.strerror}); choose another, or 0 for any") from None
        listener.listen(128)  # who reads the line below may come at once
        port = listener.getsockname()[1]
        # Host and Origin are checked against this very port; another server of this host is another origin.
        hosts = [f"{LOOPBACK}:{port}", f"localhost:{port}"]
        app = server_for(setup, port, tokens).streamable_http_app(
            transport_security=TransportSecuritySettings(
                allowed_hosts=hosts, allowed_origins=[f"http://{host}" for host in hosts]
            ),
            host=LOOPBACK,
        )
        # Its own log would go to standard output.
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=2)
        say(f"serving {setup.source.what} at http://{LOOPBACK}:{port}/mcp; the tokens are in {file}")
        anyio.run(lambda: uvicorn.Server(config).serve(sockets=[listener]))
    finally:
        listener.close()
