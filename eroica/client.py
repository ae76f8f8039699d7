"""Asks a coordinator over HTTP, and gives its answers as records (`answers`) or, for a diagnosis, as its JSON.

Of the standard library alone, so that whoever merely looks needs no more installed. It follows no redirects and uses no
proxy: a token goes to the address that was named and nowhere else, and off this host only encrypted. Used by `remote`,
for the command line, and by the MCP server.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from eroica.access import CA_VARIABLE, is_loopback
from eroica.answers import Audited, Confirmation, Event, Incidents, Job, Pace, Pacing, Rank, SeenBefore, Window
from eroica.errors import DataError, UnavailableError, UserError
from eroica.guard import load_token
from eroica.untrusted import clean

VARIABLE, TOKEN_VARIABLE = "EROICA_API", "EROICA_TOKEN"
DEFAULT = Path(".eroica") / "serve" / "act.token"
"""Below the home of who runs `eroica serve` on this host."""
TIMEOUT_S = 15.0
STILL_S = 60.0
"""A stream of events says something four times in that time."""
MOST_BYTES = 256 << 20
"""The diagnosis of a million ranks has some megabytes, the numbers of its page some more."""
MOST_LINE = 1 << 20
T = TypeVar("T")


class Client:
    """One coordinator. Methods raise UnavailableError if nobody answers, or not now; UserError, with the coordinator's
    own sentence, for what it refuses; DataError for an answer that makes no sense."""

    def __init__(self, url: str, token: str, ca: str = "", timeout_s: float = TIMEOUT_S) -> None:
        """`ca`: certificates, PEM, that the coordinator's must be signed by; "": those that this host trusts."""
        wrong = UserError(f"{clean(url, 100)} is no address of a coordinator; write https://HOST:PORT")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise wrong from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise wrong
        if parts.scheme == "http" and not is_loopback(parts.hostname):
            raise UserError(f"{clean(url, 100)} is not on this host and not encrypted; write https://")
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._host, self._port = parts.hostname, port
        self._token = token
        self._timeout_s = timeout_s
        self._context: ssl.SSLContext | None = None
        if parts.scheme == "https":
            try:
                self._context = ssl.create_default_context(cadata=ca or None)
            except (ssl.SSLError, ValueError) as error:
                raise UserError(f"the certificates for {self.url} cannot be used ({error})") from None

    def jobs(self) -> list[Job]:
        """All jobs, the running ones first."""
        return self._get("/v1/jobs", list[Job])

    def job(self, name: str) -> Job:
        """One of them."""
        return self._get(f"/v1/jobs/{_job(name)}", Job)

    def ranks(self, job: str, *, first: int = 0, limit: int = 1000) -> list[Rank]:
        """Where the ranks of a running job stand."""
        return self._get(f"/v1/jobs/{_job(job)}/ranks", list[Rank], first=first, limit=limit)

    def pace(self, job: str, *, since: str = "", limit: int = 1000) -> list[Pace]:
        """The course of its pace, oldest first."""
        return self._get(f"/v1/jobs/{_job(job)}/pace", list[Pace], since=since, limit=limit)

    def incidents(
        self, *, job: str = "", kind: str = "", since: str = "", cursor: int | None = None, limit: int = 50
    ) -> Incidents:
        """Newest first; `cursor` is `next` of the page before."""
        return self._get("/v1/incidents", Incidents, job=job, kind=kind, since=since, cursor=cursor, limit=limit)

    def incident(self, id: str) -> dict[str, Any]:
        """Its diagnosis, of schema eroica.diagnosis/1."""
        return self._get(f"/v1/incidents/{_word(id)}", dict[str, Any])

    def detail(self, id: str) -> dict[str, Any]:
        """The numbers behind its page."""
        return self._get(f"/v1/incidents/{_word(id)}/detail", dict[str, Any])

    def seen_before(self, id: str) -> SeenBefore:
        """Earlier incidents of the same problem, and what people found."""
        return self._get(f"/v1/incidents/{_word(id)}/seen-before", SeenBefore)

    def confirm(self, id: str, cause: str, note: str = "") -> Confirmation:
        """Say what the cause was found to be. Needs scope act."""
        return self._ask("POST", f"/v1/incidents/{_word(id)}/confirm", Confirmation, {"cause": cause, "note": note})

    def start_window(self, job: str, key: str = "") -> Window:
        """Have all ranks captured now. Asking again with the same `key` asks for the same window. Needs scope act."""
        headers = {"Idempotency-Key": key} if key else {}
        return self._ask("POST", f"/v1/jobs/{_job(job)}/windows", Window, headers=headers)

    def window(self, job: str, id: str) -> Window:
        """What has become of it."""
        return self._get(f"/v1/jobs/{_job(job)}/windows/{_word(id)}", Window)

    def cancel_window(self, job: str, id: str) -> Window:
        """Leave it. Needs scope act."""
        return self._ask("DELETE", f"/v1/jobs/{_job(job)}/windows/{_word(id)}", Window)

    def pacing(self, job: str) -> Pacing:
        """How the pacing of a running job stands."""
        return self._get(f"/v1/jobs/{_job(job)}/pacing", Pacing)

    def set_pacing(
        self,
        job: str,
        mode: str,
        *,
        threshold: float | None = None,
        max_delay_s: float | None = None,
        ttl_s: float | None = None,
        group_caps_s: Mapping[str, float] | None = None,
    ) -> Pacing:
        """Switch it: off, dry-run or enable. Needs scope act."""
        given = {
            **{"mode": mode, "threshold": threshold, "max_delay_s": max_delay_s, "ttl_s": ttl_s},
            "group_caps_s": dict(group_caps_s) if group_caps_s else None,
        }
        body = {name: value for name, value in given.items() if value is not None}
        return self._ask("PUT", f"/v1/jobs/{_job(job)}/pacing", Pacing, body)

    def audit(self, *, cursor: int | None = None, limit: int = 100) -> list[Audited]:
        """Who did what, newest first. Needs scope admin."""
        return self._get("/v1/audit", list[Audited], cursor=cursor, limit=limit)

    def events(self, after: str = "") -> Iterator[Event]:
        """What happens, as it happens, until the connection ends; `after`: the id of the last one that was seen."""
        headers = {"Last-Event-ID": after} if after else {}
        connection, answer = self._open("GET", "/v1/events", None, headers, STILL_S)
        try:
            told: dict[str, str] = {}
            while line := self._line(answer):
                name, _, value = line.rstrip("\r\n").partition(":")
                if name:
                    told[name] = value.removeprefix(" ")
                elif "data" in told and not value:
                    data = _read(told.pop("data").encode(), dict[str, Any], self.url)
                    yield Event(id=told.get("id", ""), kind=told.pop("event", ""), data=data)
        finally:
            connection.close()

    def _line(self, answer: http.client.HTTPResponse) -> str:
        try:
            return answer.readline(MOST_LINE).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise self._unanswered(error) from None

    def _get(self, path: str, kind: type[T], /, **query: str | int | None) -> T:
        given = {name: value for name, value in query.items() if value not in ("", None)}
        return self._ask("GET", f"{path}?{urlencode(given)}" if given else path, kind)

    def _ask(
        self,
        method: str,
        path: str,
        kind: type[T],
        body: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> T:
        connection, answer = self._open(method, path, body, headers or {}, self._timeout_s)
        try:
            data = answer.read(MOST_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            raise self._unanswered(error) from None
        finally:
            connection.close()
        if len(data) > MOST_BYTES:
            raise DataError(f"{self.url} answers with more than {MOST_BYTES >> 20} MB")
        return _read(data, kind, self.url)

    def _open(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None,
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """An answer that is none of a refusal, to be read."""
        sent = {"Authorization": f"Bearer {self._token}", "Accept": "*/*", **headers}
        data = None
        if body is not None:
            data, sent["Content-Type"] = json.dumps(body).encode(), "application/json"
        connection = (
            http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
            if self._context is None
            else http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=self._context)
        )
        try:
            connection.request(method, path, data, sent)
            answer = connection.getresponse()
            if answer.status < 300:
                return connection, answer
            said = answer.read(64 << 10)
        except (OSError, http.client.HTTPException, ValueError) as error:  # a token with a line break is a ValueError
            connection.close()
            raise self._unanswered(error) from None
        connection.close()
        try:
            sentence = clean(msgspec.convert(json.loads(said), dict[str, str])["error"], 400)
        except (ValueError, KeyError):
            raise DataError(f"{self.url} answers as no coordinator does (status {answer.status})") from None
        if answer.status == 401:
            raise UserError(f"{self.url} does not know this token: {sentence}")
        raise (UnavailableError if answer.status in (408, 429) or answer.status >= 500 else UserError)(sentence)

    def _unanswered(self, error: Exception) -> UnavailableError:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return UnavailableError(f"nobody answers at {self.url} ({clean(reason, 200)}); is eroica serve running there?")


def _job(name: str) -> str:
    """Names of jobs are words, on the bus and here."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", name):
        raise UserError(f"{clean(name, 100)!r} is no name of a job on a coordinator; eroica status lists them")
    return name


def _word(text: str) -> str:
    return quote(text, safe="")


def _read(data: bytes, kind: type[T], url: str) -> T:
    try:
        return msgspec.convert(json.loads(data), kind)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{url} answers as no coordinator does ({clean(error, 200)})") from None


def find_client(environ: Mapping[str, str], api: str = "") -> Client:
    """The coordinator that `api` names, else the environment, else the one of this user on this host. Raises UserError.

    A name is the file of a token, or a URL, with the token, or the file of one, in EROICA_TOKEN.
    """
    named = api or environ.get(VARIABLE, "")
    token = environ.get(TOKEN_VARIABLE, "")
    if "://" not in named:
        path = Path(named) if named else Path(environ.get("HOME", "")) / DEFAULT
        if not named and not path.exists():
            raise UserError(f"no coordinator is known here; name its token file or its URL by --api or {VARIABLE}")
        file = load_token(path)
        return Client(file.url, file.token, file.ca)
    ca = ""
    if os.sep in token:
        file = load_token(Path(token))
        token, ca = file.token, file.ca
    if not token:
        raise UserError(f"{clean(named, 100)} needs a token; put it, or the file that holds it, into {TOKEN_VARIABLE}")
    if environ.get(CA_VARIABLE):
        try:
            ca = Path(environ[CA_VARIABLE]).read_text("utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"{CA_VARIABLE}={environ[CA_VARIABLE]} cannot be read ({error})") from None
    return Client(named, token, ca)
