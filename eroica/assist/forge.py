"""A draft pull request on GitHub, or on what speaks its API: by `gh` where it is installed, else over HTTP.

The branch is there already. A token comes from the environment (GH_TOKEN, GITHUB_TOKEN), is sent to the one address
that the user named and nowhere else (redirects are not followed, and a forge of this machine is asked through no
proxy), and only over TLS or to this machine. What is on another host than GitHub's is never looked for there. What the
forge answers is data: bounded, and cleaned before it is shown. Used by `fixing`.
"""

from __future__ import annotations

import http.client
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eroica.errors import UnavailableError, UserError
from eroica.untrusted import clean, escape

GITHUB = "https://api.github.com"
URL_VARIABLE = "GITHUB_API_URL"
TOKEN_VARIABLES = ("GH_TOKEN", "GITHUB_TOKEN")
MOST_BODY = 60_000
"""Characters; GitHub takes 65,536."""
_MOST_ANSWER = 1 << 20
_TIMEOUT_S = 30.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_HOST = re.compile(r"^(?:[a-z+]+://)?(?:[^@/]+@)?((?:[\w-]+\.)+[\w-]+)[:/]")
"""Of a remote. A path has none, nor has an alias of ssh that shows no domain."""
_SLUG = re.compile(r"[:/]([\w.-]{1,100})/([\w.-]{1,100}?)(?:\.git)?/?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Forge:
    """Where pull requests go."""

    api: str
    """Base URL of the API."""
    token: str
    """"" = none: then `gh` must be there."""
    owner: str
    name: str
    gh: str = ""
    """Path of `gh`; "" = use the API."""
    host: str = ""
    """Of the repository, for `gh`; "" = GitHub's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A pull request to be."""

    title: str
    body: str
    head: str
    """The branch with the change."""
    base: str
    """The branch that it is for."""


def find(remote_url: str, environ: Mapping[str, str], api: str = "") -> Forge:
    """The forge of a remote. Raises UserError if its name or a token is missing, or the address would carry the token
    in the clear."""
    match = _SLUG.search(remote_url)
    if match is None:
        raise UserError(
            f"{clean(remote_url, 120)} does not end in OWNER/NAME, so that no pull request can be opened there"
        )
    chosen = api or environ.get(URL_VARIABLE, "")
    token = next((environ[name] for name in TOKEN_VARIABLES if environ.get(name)), "")
    gh = shutil.which("gh", path=environ.get("PATH")) if not chosen else None
    url = (chosen or GITHUB).rstrip("/")
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:  # half of an IPv6 address
        parts = urllib.parse.urlsplit("")
    if parts.scheme not in ("https", "http") or not parts.hostname or parts.username is not None:
        raise UserError(f"{escape(url, 200)} is no address of an API; write https://HOST/PATH without a secret in it")
    if parts.scheme == "http" and parts.hostname not in _LOOPBACK:
        raise UserError(f"{escape(url, 200)} would carry the token in the clear; use https")
    found = _HOST.match(remote_url)
    host = found[1] if found is not None and not re.search(r"(^|\.)github\.com$", found[1]) else ""
    if host and not gh and not chosen:
        raise UserError(f"the remote is on {clean(host, 120)} and not on GitHub; name the address of its API by --api")
    if not gh and not token:
        raise UserError(
            f"a pull request needs a token in {' or '.join(TOKEN_VARIABLES)}, or gh installed and logged in"
        )
    return Forge(api=url, token=token, owner=match[1], name=match[2], gh=gh or "", host=host)


def open_draft(forge: Forge, request: Request, folder: Path) -> str:
    """Open it as a draft; returns its address. `folder`: a checkout. Raises UnavailableError if the forge refuses."""
    return _by_gh(forge, request, folder) if forge.gh else _by_api(forge, request)


def _by_gh(forge: Forge, request: Request, folder: Path) -> str:
    words = [
        "pr",
        "create",
        "--draft",
        "--title",
        request.title,
        "--body-file",
        "-",
        "--head",
        request.head,
        "--base",
        request.base,
    ]
    try:
        ended = subprocess.run(
            [forge.gh, *words, "--repo", "/".join(filter(None, (forge.host, forge.owner, forge.name)))],
            cwd=folder,
            input=request.body,
            capture_output=True,
            text=True,
            check=False,
            timeout=4 * _TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"gh could not open the pull request: {clean(error)}") from None
    if ended.returncode:
        raise UnavailableError(
            f"gh could not open the pull request: {clean(ended.stderr.strip() or ended.stdout.strip(), 300)}"
        )
    return clean((ended.stdout.strip().splitlines() or [""])[-1], 300)


def _by_api(forge: Forge, request: Request) -> str:
    body = {
        "title": request.title,
        "body": request.body[:MOST_BODY],
        "head": request.head,
        "base": request.base,
        "draft": True,
    }
    asked = urllib.request.Request(
        f"{forge.api}/repos/{forge.owner}/{forge.name}/pulls",
        data=json.dumps(body).encode(),
        method="POST",
        headers={
            "Accept": "application/vnd.github+json",
            "Authorization": f"Bearer {forge.token}",
            "Content-Type": "application/json",
            "User-Agent": "eroica",
            "X-GitHub-Api-Version": "2022-11-28",
        },
    )
    handlers: list[urllib.request.BaseHandler] = [_StayHere()]
    if urllib.parse.urlsplit(forge.api).hostname in _LOOPBACK:
        handlers.append(urllib.request.ProxyHandler({}))
    try:
        with urllib.request.build_opener(*handlers).open(asked, timeout=_TIMEOUT_S) as answer:
            told = _read(answer)
    except urllib.error.HTTPError as error:
        words = _read(error)
        errors = words.get("errors")
        every = [words, *(one for one in (errors if isinstance(errors, list) else []) if isinstance(one, dict))]
        reasons = [str(one.get("message") or "") for one in every]
        why = "; ".join(filter(None, reasons)) or error.reason
        raise UnavailableError(f"{forge.api} refused the pull request: {error.code} {clean(why, 300)}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UnavailableError(f"{forge.api} does not answer: {clean(getattr(error, 'reason', error), 200)}") from None
    url = told.get("html_url")
    if not isinstance(url, str):
        raise UnavailableError(f"{forge.api} answered without the address of a pull request")
    return clean(url, 300)


def _read(answer: Any) -> dict[str, Any]:
    try:
        told = json.loads(answer.read(_MOST_ANSWER))
    except (OSError, ValueError, RecursionError, http.client.HTTPException):
        return {}
    return told if isinstance(told, dict) else {}


class _StayHere(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the token is for one address."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """None: the answer counts as an error."""
        return
