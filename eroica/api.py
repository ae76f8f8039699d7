"""The HTTP API of a coordinator: what it knows, what happens, and the few things that people may have it do.

A thread of its own runs it (uvicorn). What a running job is at is asked of the coordinator's loop by the `desk`; what
was found out before comes from the store. Every request but /healthz passes the `Gate`: a known Host, a token, a scope,
a rate, a size; what it refuses is counted, said and kept in the audit log, as are all acts. Callers name jobs and
incidents, never files. On loopback unless told otherwise; off loopback it does not start without a certificate, since
whoever can hear the network would hold a token. Used by `serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import uvicorn
from fastapi import Body, Depends, FastAPI, Header, Query, Request, Response
from fastapi import Path as InPath
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.security import HTTPBearer
from pydantic import Field
from starlette.exceptions import HTTPException

from eroica import __version__
from eroica.access import is_loopback
from eroica.answers import Audited, Confirmation, Incidents, Job, Pace, Pacing, Rank, SeenBefore, Window
from eroica.chronicle import Chronicle, now
from eroica.conductor import Mode
from eroica.coordinators import LOST, Coordinators, RefusedError, UnknownError, job_of, ranks_of, request_id
from eroica.desk import Desk
from eroica.errors import DataError, EroicaError, UnavailableError, UserError
from eroica.fabric.pacing import MOST_CAPS, limits_of
from eroica.findings import CAUSES, KINDS
from eroica.guard import Holder, Limits, Meter, Rate, Tokens, Web, is_host, write_tokens
from eroica.store import MOST_PAGE, Store
from eroica.untrusted import clean

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Answer = TypeVar("Answer")
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

BODY_S = 10.0
"""For a body of some kilobytes to come."""
STILL_S = 15.0
"""A listener hears something at least so often, so that both ends know of a connection that is dead."""
AGAIN_S = 60.0
"""The same refusal of the same address is said and kept once in that time, with how many there were."""
STALE_S = 60.0
"""A coordinator's loop that makes no round for so long is not well."""
MOST_REFUSALS = 1000
"""Reasons and addresses that are told apart."""
REFUSALS = Rate(100, 1)
"""That are said and kept, of all addresses together: who has a network of them could fill the log otherwise."""
MOST_CONNECTIONS = 256
LEAVE_S = 2

JobName: TypeAlias = Annotated[str, InPath(pattern=r"^[A-Za-z0-9_-]{1,100}$", description="name of a job")]
IncidentId: TypeAlias = Annotated[str, InPath(pattern=r"^[0-9a-f]{12}(-[0-9]{1,6})?$", description="of a diagnosis")]
WindowId: TypeAlias = Annotated[str, InPath(pattern=r"^w-[0-9a-f]{12}$", description="as the request was answered")]
Cursor: TypeAlias = Annotated[int | None, Query(ge=0, lt=1 << 53, description="`next` of the page before")]
Limit: TypeAlias = Annotated[int, Query(ge=1, le=MOST_PAGE)]
Since: TypeAlias = Annotated[str, Query(max_length=40, description="ISO 8601")]
Key: TypeAlias = Annotated[
    str | None, Header(pattern=r"^[\x21-\x7e]{1,100}$", description="asking again with the same key asks nothing new")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """How to confirm a cause."""

    cause: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PacingGiven:
    """What pacing may do from now on; numbers that are left out are the defaults of `docs/pacing.md`."""

    mode: Mode
    threshold: float | None = None
    """Waiting over the iteration, above which pacing is tried."""
    max_delay_s: float | None = None
    """Of one rank before one collective."""
    ttl_s: float | None = None
    """An order that is not renewed ends by itself."""
    group_caps_s: Annotated[dict[Annotated[str, Field(max_length=128)], float], Field(max_length=MOST_CAPS)] = field(
        default_factory=dict
    )
    """Smaller caps of a hold, for single process groups, by name."""


def build(coordinators: Coordinators, desk: Desk, chronicle: Chronicle, is_well: Callable[[], bool]) -> FastAPI:
    """The application behind the `Gate`. `coordinators` is touched within calls at the desk only."""
    app = FastAPI(
        title="eroica",
        version=__version__,
        summary="What a coordinator knows of its jobs: who is slow or stuck, and why",
        docs_url=None,  # such a page would load scripts from elsewhere
        redoc_url=None,
        openapi_url="/v1/openapi.json",
        redirect_slashes=False,
        dependencies=[Depends(HTTPBearer(auto_error=False))],  # said in the schema; the gate asks for it
        responses={status: {"description": text} for status, text in _REFUSALS.items()},
    )
    _refuse_in_sentences(app)

    def store() -> Store:
        if chronicle.keeper is None:
            raise UnavailableError("this coordinator keeps no store")
        return chronicle.keeper.store

    def known() -> dict[str, Job]:
        """Jobs of the store; none while it is away, since the running ones are to be seen all the same."""
        with contextlib.suppress(UnavailableError):
            return {job.name: job for job in store().jobs()}
        return {}

    @app.get("/healthz", include_in_schema=False)
    def health(response: Response) -> dict[str, str]:
        response.status_code = 200 if is_well() else 503
        return {"status": "ok" if response.status_code == 200 else "the coordinator makes no rounds"}

    @app.get("/v1/jobs")
    def jobs() -> list[Job]:
        """Lists all jobs, the running ones first."""
        kept, live = known(), desk.call(coordinators.snapshots)
        running = [job_of(snapshot, kept.pop(snapshot.name, None)) for snapshot in live]
        return sorted(running, key=lambda job: job.name) + list(kept.values())

    @app.get("/v1/jobs/{job}")
    def job(job: JobName) -> Job:
        """Gives one job, running or over."""
        kept = known().get(job)
        try:
            return job_of(desk.call(lambda: coordinators.snapshot(job)), kept)
        except UnknownError:
            if kept is None:
                raise
            return kept

    @app.get("/v1/jobs/{job}/ranks")
    def ranks(
        job: JobName,
        first: Annotated[int, Query(ge=0, lt=1 << 31)] = 0,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    ) -> list[Rank]:
        """Says where the ranks of a running job stand, from rank `first` on."""
        return ranks_of(desk.call(lambda: coordinators.snapshot(job)), first, limit)

    @app.get("/v1/jobs/{job}/pace")
    def pace(job: JobName, since: Since = "", limit: Annotated[int, Query(ge=1, le=10_000)] = 1000) -> list[Pace]:
        """Gives the course of the pace of a job, oldest first."""
        return store().paces(job, since=since, limit=limit)

    @app.get("/v1/incidents")
    def incidents(
        job: Annotated[str, Query(max_length=100)] = "",
        kind: Annotated[str, Query(max_length=20, description=f"one of {', '.join(KINDS)}")] = "",
        since: Since = "",
        cursor: Cursor = None,
        limit: Limit = 50,
    ) -> Incidents:
        """Lists incidents, newest first."""
        return store().incidents(job=job, kind=kind, since=since, cursor=cursor, limit=limit)

    @app.get("/v1/incidents/{id}", response_class=JSONResponse)
    def incident(id: IncidentId) -> Response:
        """Gives an incident whole: a diagnosis of schema eroica.diagnosis/1."""
        return _raw(_found(store().diagnosis(id), id))

    @app.get("/v1/incidents/{id}/detail", response_class=JSONResponse)
    def detail(id: IncidentId) -> Response:
        """Gives the numbers behind an incident's page; 404 where there are none, as for a hang."""
        return _raw(_found(store().detail(id), id, "numbers of an incident"))

    @app.get("/v1/incidents/{id}/seen-before")
    def seen_before(id: IncidentId) -> SeenBefore:
        """Tells earlier incidents of the same problem, in this and other jobs, and what people found."""
        return _found(store().seen_before(id), id)

    @app.post("/v1/incidents/{id}/confirm", status_code=201, dependencies=[Depends(_needs("act"))])
    def confirm(id: IncidentId, given: Annotated[Given, Body()], request: Request) -> Confirmation:
        """Keeps what a person found to be the cause of an incident; the last word counts."""
        if given.cause not in CAUSES or len(given.note) > 2000:
            raise DataError(f"confirm an incident by one of {', '.join(CAUSES)}, and a note of at most 2,000 letters")
        made = Confirmation(cause=given.cause, note=clean(given.note, 2000), who=_holder(request).name, at=now())
        if not store().confirm(id, made):
            raise UnknownError(f"there is no incident {id}")
        return made

    asked_before: dict[int | str, dict[str, Any]] = {
        200: {"model": Window, "description": "asked for before, by that key"}
    }

    @app.post("/v1/jobs/{job}/windows", status_code=201, dependencies=[Depends(_needs("act"))], responses=asked_before)
    def start_window(job: JobName, request: Request, response: Response, idempotency_key: Key = None) -> Window:
        """Asks for a window of all ranks of a job now; 409, with the reason, if that cannot be."""
        who, key = _holder(request).name, idempotency_key or ""
        if key:
            with contextlib.suppress(UnknownError, UnavailableError):  # without a store, of this coordinator's alone
                response.status_code = 200
                return window(job, request_id(job, who, key))
        asked, is_new = desk.call(lambda: coordinators.ask(job, who, key))
        response.status_code = 201 if is_new else 200
        return asked

    @app.get("/v1/jobs/{job}/windows/{id}")
    def window(job: JobName, id: WindowId) -> Window:
        """Says what has become of a window that was asked for."""
        try:
            return desk.call(lambda: coordinators.asked(job, id))
        except UnknownError:
            kept = store().asked(job, id)
            if kept is None:
                raise
            return kept if kept.is_over else replace(kept, state="failed", why=LOST)

    @app.delete("/v1/jobs/{job}/windows/{id}", dependencies=[Depends(_needs("act"))])
    def cancel_window(job: JobName, id: WindowId, request: Request) -> Window:
        """Leaves a window that was asked for; 409 if it is over."""
        who = _holder(request).name
        try:
            return desk.call(lambda: coordinators.cancel(job, id, who))
        except UnknownError:
            state = window(job, id).state
            raise RefusedError(f"the window {id} of job {job} is over ({state})") from None

    @app.get("/v1/jobs/{job}/pacing")
    def get_pacing(job: JobName) -> Pacing:
        """Says how the pacing of a running job stands: what it may do, what it has found, whom it holds back."""
        return desk.call(lambda: coordinators.pacing(job))

    @app.put("/v1/jobs/{job}/pacing", dependencies=[Depends(_needs("act"))])
    def set_pacing(job: JobName, given: Annotated[PacingGiven, Body()], request: Request) -> Pacing:
        """Switches the pacing of a running job on, off, or to a dry run; what it decides by itself is in the audit
        log as well."""
        who = _holder(request).name
        limits = limits_of(given.threshold, given.max_delay_s, given.ttl_s, given.group_caps_s)
        return desk.call(lambda: coordinators.pace(job, given.mode, limits, who))

    @app.get("/v1/audit", dependencies=[Depends(_needs("admin"))])
    def audit(cursor: Cursor = None, limit: Limit = 100) -> list[Audited]:
        """Lists who did what, and what was refused, newest first; for admin alone."""
        return store().audits(cursor=cursor, limit=limit)

    return app


def add_events(app: FastAPI, chronicle: Chronicle, most: int, is_closing: Callable[[], bool]) -> None:
    """The stream of what happens."""
    listeners: set[object] = set()

    async def stream(after: int) -> AsyncIterator[str]:
        loop, wake, me = asyncio.get_running_loop(), asyncio.Event(), object()

        def stir() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(wake.set)

        leave = chronicle.events.listen(stir)
        listeners.add(me)
        try:
            yield "retry: 3000\n\n"
            while not is_closing():
                wake.clear()
                for number, event in chronicle.events.after(after):
                    after = number
                    yield f"id: {event.id}\nevent: {event.kind}\ndata: {json.dumps(event.data)}\n\n"
                try:
                    await asyncio.wait_for(wake.wait(), STILL_S)
                except TimeoutError:
                    yield ": still here\n\n"
        finally:
            listeners.discard(me)
            leave()

    @app.get("/v1/events", response_class=StreamingResponse)
    async def events(last_event_id: Annotated[str | None, Header(max_length=60)] = None) -> StreamingResponse:
        """Tells what happens as it happens (server-sent events): incident, window, pacing, said."""
        if len(listeners) >= most:
            raise UnavailableError(f"{most} others listen already; try again later")
        after = chronicle.events.last if last_event_id is None else chronicle.events.number_of(last_event_id)
        return StreamingResponse(stream(after), media_type="text/event-stream")


_REFUSALS = {
    400: "it makes no sense",
    401: "no token that is known",
    403: "the token's scope is too small",
    404: "there is nothing of that name",
    408: "the body did not come in time",
    409: "it cannot be now",
    413: "the body is too large",
    421: "the Host header names somebody else",
    422: "not of the form that is asked for",
    429: "too many requests",
    503: "the store or the coordinator is busy or away",
}


def _refuse_in_sentences(app: FastAPI) -> None:
    """Every error is {"error": one sentence}, without what the caller sent."""

    @app.exception_handler(EroicaError)
    async def refused(request: Request, error: EroicaError) -> JSONResponse:
        kinds = ((UnknownError, 404), (RefusedError, 409), (DataError, 422), (UnavailableError, 503))
        status = next((status for kind, status in kinds if isinstance(error, kind)), 400)
        return _sentence(request.scope, status, str(error))

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(clean(part, 40) for part in first["loc"][:4])
        return _sentence(request.scope, 422, f"{place}: {clean(first['msg'], 200)}")

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        text = {404: "there is nothing here", 405: "that cannot be done with it"}.get(error.status_code, error.detail)
        return _sentence(request.scope, error.status_code, text)


def _sentence(scope: Scope, status: int, text: str) -> JSONResponse:
    scope["eroica.why"] = text
    headers = {"Retry-After": "5"} if status in (429, 503) else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"error": text}, status, headers)


def _needs(scope: str) -> Callable[[Request], None]:
    def check(request: Request) -> None:
        if not _holder(request).may(scope):
            raise HTTPException(403, f"this needs a token of scope {scope}")

    return check


def _holder(request: Request) -> Holder:
    holder = request.scope["eroica.holder"]
    assert isinstance(holder, Holder)
    return holder


def _found(answer: Answer | None, id: str, what: str = "incident") -> Answer:
    if answer is None:
        raise UnknownError(f"there is no {what} {id}")
    return answer


def _raw(text: str | bytes) -> Response:
    return Response(text, media_type="application/json")


class Gate:
    """What each request passes before the application sees it."""

    def __init__(
        self,
        app: App,
        tokens: Tokens,
        limits: Limits,
        names: frozenset[str],
        port: int,
        chronicle: Chronicle,
        tell: Callable[[str], None],
    ) -> None:
        """`tell` gets a sentence about what was refused, in the thread of the API."""
        self._app = app
        self._tokens = tokens
        self._limits = limits
        self._names = names
        self._port = port
        self._chronicle = chronicle
        self._tell = tell
        self._reads, self._acts, self._strangers = Meter(limits.reads), Meter(limits.acts), Meter(limits.strangers)
        self._refusals = Meter(REFUSALS)
        self._refused: OrderedDict[tuple[int, str], tuple[float, int]] = OrderedDict()
        """Status and address -> when that was kept, and how many came since."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        status = 0

        async def sending(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        why = await self._why_not(scope)
        body = b""
        if why is None and scope["path"] != "/healthz":
            why, body = await self._read_body(scope, receive)
        if why is not None:
            await _sentence(scope, *why)(scope, receive, sending)
        else:
            try:
                await self._app(scope, _replaying(body, receive), sending)
            except Exception as error:  # a fault of ours must not end the server, nor show its inside
                self._tell(f"a fault in the HTTP API: {type(error).__name__}: {error}")
                if not status:
                    await _sentence(scope, 500, "this is a fault of eroica's own")(scope, receive, sending)
        self._record(scope, status)

    async def _why_not(self, scope: Scope) -> tuple[int, str] | None:
        """Status and sentence of a refusal that needs no look at the body."""
        headers = _headers(scope)
        address = _address(scope)
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > self._limits.most_url_bytes:
            return 414, f"the address has more than {self._limits.most_url_bytes} bytes"
        if sum(len(name) + len(value) for name, value in scope["headers"]) > self._limits.most_header_bytes:
            return 431, f"the headers have more than {self._limits.most_header_bytes} bytes"
        if not is_host(headers.get("host", ""), self._names, self._port):
            return 421, "the Host header names somebody else; call the coordinator as its token file does"
        if scope["path"] == "/healthz":
            return None
        given = headers.get("authorization", "")
        holder = self._tokens.holder(given[7:].strip()) if given[:7].lower() == "bearer " else None
        now_s = time.monotonic()
        if holder is None:
            if not self._strangers.allows(address, now_s):
                return 429, "too many requests without a token that is known; wait a while"
            return 401, "no token that is known; take one from a token file of eroica serve"
        scope["eroica.holder"] = holder
        is_act = scope["method"] not in ("GET", "HEAD", "OPTIONS")
        if is_act and not holder.may("act"):
            return 403, "this needs a token of scope act"
        if not (self._acts if is_act else self._reads).allows(holder.name, now_s):
            return 429, "too many requests with this token; wait a while"
        return None

    async def _read_body(self, scope: Scope, receive: Receive) -> tuple[tuple[int, str] | None, bytes]:
        most = self._limits.most_body_bytes
        too_large = 413, f"the body has more than {most} bytes"
        length = _headers(scope).get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > most:
            return too_large, b""
        body = b""
        try:
            async with asyncio.timeout(BODY_S):
                while True:
                    message = await receive()
                    body += message.get("body", b"")
                    if len(body) > most:
                        return too_large, b""
                    if not message.get("more_body", False):
                        return None, body
        except TimeoutError:
            return (408, "the body did not come in time"), b""

    def _record(self, scope: Scope, status: int) -> None:
        """Keep an act, and a refusal."""
        holder, address = scope.get("eroica.holder"), _address(scope)
        who = holder.name if holder is not None else ""
        is_act = scope["method"] not in ("GET", "HEAD", "OPTIONS")
        is_refused = status in (400, 401, 403, 405, 408, 413, 414, 421, 422, 429, 431) or status >= 500
        why = clean(scope.get("eroica.why", ""), 200)
        route = scope.get("route")
        act = str(getattr(route, "name", "") or scope["method"]) if is_act else clean(scope["method"], 10)
        outcome = f"{status} {why}".strip()
        if is_refused:
            now_s, key = time.monotonic(), (status, address)
            kept_s, num = self._refused.pop(key, (-AGAIN_S, 0))
            is_new = now_s - kept_s >= AGAIN_S and self._refusals.allows("", now_s)
            self._refused[key] = (now_s, 0) if is_new else (kept_s, num + 1)
            while len(self._refused) > MOST_REFUSALS:
                self._refused.popitem(last=False)
            if not is_new:
                return
            outcome += f" (and {num} more before it)" if num else ""
            self._tell(f"refused over HTTP, from {address}{f' ({who})' if who else ''}: {outcome}")
        elif not is_act:
            return
        path = clean(scope["path"], 200)
        self._chronicle.act(Audited(at=now(), who=who, address=address, act=act, target=path, outcome=outcome))


_HEADERS = [
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
]
"""On each answer: nothing of it is kept, guessed at, run or shown within another page."""


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


def _address(scope: Scope) -> str:
    return str(scope["client"][0]) if scope.get("client") else ""


def _replaying(body: bytes, receive: Receive) -> Receive:
    """The body that has come already, and then whatever comes."""
    is_told = False

    async def replayed() -> MutableMapping[str, Any]:
        nonlocal is_told
        if is_told:
            return await receive()
        is_told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


class Server:
    """The API in its thread, from the constructor until `close`."""

    def __init__(self, web: Web, state: Path, coordinators: Coordinators, desk: Desk, chronicle: Chronicle) -> None:
        """`state`: folder of this user alone, for the token files. Raises UserError."""
        self._news: deque[str] = deque(maxlen=100)
        self._desk = desk
        self._coordinators = coordinators
        self._round_s = time.monotonic()
        self._is_closing = False
        family = socket.AF_INET6 if ":" in web.host else socket.AF_INET
        try:
            self._socket = socket.create_server((web.host, web.port), family=family, backlog=128)
        except OSError as error:
            where = f"{web.host}:{web.port}"
            raise UserError(f"the HTTP API cannot listen at {where} ({error.strerror or error})") from None
        port = int(self._socket.getsockname()[1])
        # Who listens everywhere is reached by a name.
        named = socket.gethostname() if web.host in ("0.0.0.0", "::") else web.host
        shown = f"[{named}]" if ":" in named else named
        self.url = f"{'https' if web.certificate is not None else 'http'}://{shown}:{port}"
        try:
            trusted = web.ca or web.certificate
            ca = trusted.read_text("utf-8") if trusted is not None else ""
            self.files = write_tokens(state, self.url, ca, web.tokens)
            names = {web.host, *web.names, *(("localhost",) if is_loopback(web.host) else (socket.gethostname(),))}
            app = build(coordinators, desk, chronicle, lambda: time.monotonic() - self._round_s < STALE_S)
            add_events(app, chronicle, web.limits.most_listeners, lambda: self._is_closing)
            known = frozenset(name.lower() for name in names)
            gate = Gate(app, Tokens(self.files), web.limits, known, port, chronicle, self._news.append)
            self._config = uvicorn.Config(
                gate,
                interface="asgi3",
                ssl_certfile=web.certificate,
                ssl_keyfile=web.key,
                loop="asyncio",
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                limit_concurrency=MOST_CONNECTIONS,
                timeout_keep_alive=20,
                timeout_graceful_shutdown=LEAVE_S,
                h11_max_incomplete_event_size=32 << 10,
            )
            self._config.load()
        except (OSError, ValueError) as error:
            self._socket.close()
            raise UserError(f"the HTTP API cannot start ({error}); see its certificate and {state}") from None
        except BaseException:
            self._socket.close()
            raise
        self._server = uvicorn.Server(self._config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="eroica-http", daemon=True
        )
        self._thread.start()

    def look(self) -> None:
        """Attend to who asks, and say what there is to say; to be called each round."""
        self._round_s = time.monotonic()
        self._desk.attend()
        while self._news:
            self._coordinators.say(self._news.popleft())

    def close(self) -> None:
        """Answer nobody any more."""
        self._is_closing = True
        self._server.should_exit = True
        self._thread.join(2 * LEAVE_S + 1)
        self._socket.close()
