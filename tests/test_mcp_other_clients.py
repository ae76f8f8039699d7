"""The MCP server asked by clients of other people's making: fastmcp's, and those that speak the protocols of before.

Both are given all tools there are: the server stands over a running coordinator, with traces to be diagnosed and the
code behind the finding. The old client is written out here, on the standard library alone: an SDK of today would bring
what it knows of the new protocol along. Part of `make test-full`, which installs fastmcp. The Inspector is in
`test_mcp_inspector`.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import anyio
import httpx2
import pytest
from mcp import Client, MCPError, StdioServerParameters
from mcp.types import TextContent

from eroica.guard import Limits, Rate, Web
from tests.mcp_talk import small_job, text_of
from tests.site import JOB, Site
from tests.test_mcp_web import running

ROOT = Path(__file__).parent.parent
LONGEST_S = 120.0
"""A server that does not answer ends the test, not the run."""
ACTS = ("set_pacing", "diagnose_traces", "trigger_profile")
CHANGES = ("get_pacing", "list_jobs", "job_status", "list_incidents")
"""Tools that tell of the acts of whoever came before."""
OLD = ("2024-11-05", "2025-03-26", "2025-06-18")
"""Versions of the protocol that begin with a handshake; the server's own client speaks a newer one, without."""

pytestmark = pytest.mark.full


@dataclass(frozen=True, slots=True)
class Answer:
    """Of a tool."""

    text: str
    record: dict[str, Any]
    is_refused: bool


Call = Callable[[str, dict[str, Any]], Awaitable[Answer]]
Message = dict[str, Any] | list[dict[str, Any]]
"""Or a batch of them."""


@dataclass(frozen=True, slots=True)
class Place:
    """What the server is started over."""

    root: Path
    file: Path
    """Of the coordinator's token."""
    id: str
    """Of the diagnosis that is there."""

    @property
    def options(self) -> list[str]:
        return ["--allow-act", "--jobs", "1", "--traces", str(self.root / "out"), "--source", str(self.root / "code")]

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "mcp_server", str(self.file), *self.options]

    def calls(self) -> dict[str, dict[str, Any]]:
        """Every tool, those that read first."""
        one = {"id": self.id}
        return {
            "list_jobs": {},
            "job_status": {"job": JOB},
            "get_diagnosis": one,
            "explain_finding": one,
            "compare_workers": one,
            "get_collectives": one,
            "get_stacks": one,
            "get_source": one,
            "list_incidents": {},
            "get_pacing": {"job": JOB},
            "suggest_fix": one,
            "set_pacing": {"job": JOB, "mode": "dry-run"},
            "diagnose_traces": {"path": "run7"},
            "trigger_profile": {"job": JOB},
        }


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A running job that was captured once, its code, and traces of another one."""
    small_job(tmp_path / "out" / "run7")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "data.py").write_text("raw = 1\n" * 60)
    fast = Rate(1e6, 1e6)
    site = Site(tmp_path, web=Web(limits=Limits(reads=fast, acts=fast)))
    with closing(site):
        site.start()
        client = site.client()
        window = client.start_window(JOB)
        site.wait(lambda: client.window(JOB, window.id).is_over, "a window")
        site.kept()
        yield Place(tmp_path, site.state / "act.token", client.window(JOB, window.id).incident or "")


async def _every_tool(place: Place, call: Call) -> dict[str, Answer]:
    """Each of them once; the long work until it is done. Pacing is left as it was."""
    answers = {tool: await call(tool, arguments) for tool, arguments in place.calls().items()}
    with anyio.fail_after(LONGEST_S):
        while answers["diagnose_traces"].record.get("state") == "running":
            answers["diagnose_traces"] = await call("diagnose_traces", {"path": "run7", "action": "poll"})
    await call("set_pacing", {"job": JOB, "mode": "off"})
    return answers


def _check(place: Place, answers: dict[str, Answer], names: list[str]) -> None:
    """All tools that the client was shown have answered with what they should."""
    assert sorted(names) == sorted(answers)
    for tool, answer in answers.items():
        assert not answer.is_refused, (tool, answer.text)
        assert answer.record and answer.text, tool
        about = JOB if tool in ("get_pacing", "set_pacing", "trigger_profile") else place.id
        assert tool == "diagnose_traces" or about in answer.text, tool
    assert answers["get_diagnosis"].record["findings"][0]["cause"] == "input_pipeline"
    assert answers["get_pacing"].record["mode"] == "off"
    assert answers["set_pacing"].record["mode"] == "dry-run"
    assert answers["diagnose_traces"].record["state"] == "done"
    assert answers["trigger_profile"].record["window"]
    for tool in ("get_source", "suggest_fix"):
        assert "raw = 1" in answers[tool].text


def _check_same(answers: dict[str, Answer], new: dict[str, Answer]) -> None:
    """What only reads is the same to a client of today; what acts has done so twice, and is of the same form."""
    for tool, answer in answers.items():
        if tool not in ACTS + CHANGES:
            assert answer == new[tool], tool
        assert answer.record.keys() == new[tool].record.keys(), tool


def _asked_today(place: Place) -> dict[str, Answer]:
    """By the SDK's own client, in the protocol of today."""
    command, *arguments = place.command

    async def talk() -> dict[str, Answer]:
        async with Client(StdioServerParameters(command=command, args=arguments, cwd=ROOT)) as client:

            async def call(tool: str, given: dict[str, Any]) -> Answer:
                result = await client.call_tool(tool, given)
                return Answer(text_of(result), dict(result.structured_content or {}), bool(result.is_error))

            assert client.protocol_version not in OLD
            return await _every_tool(place, call)

    return anyio.run(talk)


# -- A client of before


class Wire(Protocol):
    """How it gets its messages to the server."""

    def request(self, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Send what is to be answered; yields whatever comes."""

    def tell(self, message: Message) -> None:
        """Send what is not answered."""


@dataclass(slots=True)
class Lines:
    """Standard input and output: one message a line."""

    process: subprocess.Popen[str]

    def request(self, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.tell(message)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield _message(line)

    def tell(self, message: Message) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()


@dataclass(slots=True)
class Posts:
    """Streamable HTTP: one message a request, its answer as JSON or as a stream of events."""

    url: str
    token: str
    version: str
    session: str = ""

    def request(self, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with closing(self.send("POST", message)) as answer:
            assert answer.status == 200, (answer.status, answer.read())
            self.session = answer.headers.get("Mcp-Session-Id", self.session)
            kind = answer.headers["Content-Type"].partition(";")[0]
            if kind == "application/json":
                yield _message(answer.read().decode())
                return
            assert kind == "text/event-stream"
            for line in answer:
                name, _, value = line.decode().rstrip("\r\n").partition(":")
                if name == "data" and value.strip():
                    yield _message(value)

    def tell(self, message: Message) -> None:
        with closing(self.send("POST", message)) as answer:
            assert (answer.status, answer.read()) == (202, b"")

    def send(self, method: str, message: Message | None = None) -> http.client.HTTPResponse:
        headers = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        if self.session:
            headers["Mcp-Session-Id"] = self.session
            if self.version >= "2025-06-18":  # those before did not have it
                headers["MCP-Protocol-Version"] = self.version
        where = urlsplit(self.url)
        connection = http.client.HTTPConnection(where.netloc, timeout=LONGEST_S)
        body = None if message is None else json.dumps(message)
        connection.request(method, where.path, body, {**headers, "Connection": "close"})
        return connection.getresponse()


def _message(text: str) -> dict[str, Any]:
    """One message; whatever else comes is not the protocol."""
    plain = json.loads(text)
    assert isinstance(plain, dict) and plain["jsonrpc"] == "2.0", text
    return plain


@dataclass(slots=True)
class Old:
    """A client of one version, over either wire. It agrees to whatever it is asked, if it says that it can be asked."""

    wire: Wire
    version: str
    can_be_asked: bool = False
    questions: list[str] = field(default_factory=list)
    _ids: Iterator[int] = field(default_factory=lambda: count(1))

    def shake_hands(self) -> dict[str, Any]:
        able: dict[str, Any] = {"elicitation": {}} if self.can_be_asked else {}
        me = {"name": "old", "version": "1"}
        told = self.ask("initialize", protocolVersion=self.version, capabilities=able, clientInfo=me)
        self.wire.tell({"jsonrpc": "2.0", "method": "notifications/initialized"})
        return told

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        answer = self.answer(method, **params)
        assert "result" in answer, answer
        result = answer["result"]
        assert isinstance(result, dict)
        return result

    def answer(self, method: str, **params: Any) -> dict[str, Any]:
        id = next(self._ids)
        message: dict[str, Any] = {"jsonrpc": "2.0", "id": id, "method": method}
        for got in self.wire.request(message | ({"params": params} if params else {})):
            if "method" not in got:
                assert got["id"] == id, got
                return got
            if "id" in got:
                assert self.can_be_asked and got["method"] == "elicitation/create", got
                self.questions.append(got["params"]["message"])
                word = {"action": "accept", "content": {"go_ahead": True}}
                self.wire.tell({"jsonrpc": "2.0", "id": got["id"], "result": word})
        raise AssertionError(f"the server went without an answer to {method}")

    async def call(self, tool: str, arguments: dict[str, Any]) -> Answer:
        result = self.ask("tools/call", name=tool, arguments=arguments)
        (item,) = result["content"]
        assert item["type"] == "text"
        return Answer(item["text"], result.get("structuredContent", {}), result.get("isError", False))

    def every_tool(self, place: Place) -> dict[str, Answer]:
        return anyio.run(_every_tool, place, self.call)

    def names(self) -> list[str]:
        tools = self.ask("tools/list")["tools"]
        assert all(tool["description"] and tool["inputSchema"]["type"] == "object" for tool in tools)
        return [tool["name"] for tool in tools]


@contextmanager
def _over_lines(place: Place) -> Iterator[Lines]:
    """A server that we start, which says nothing but protocol until it ends by itself when we go."""
    pipe = subprocess.PIPE
    with subprocess.Popen(place.command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=ROOT) as process:
        end = threading.Timer(2 * LONGEST_S, process.kill)
        end.start()
        try:
            yield Lines(process)
            out, said = process.communicate()
            assert (out, said, process.returncode) == ("", "", 0)
        finally:
            end.cancel()
            process.kill()


def _check_all_of_it(place: Place, client: Old) -> dict[str, Answer]:
    """A conversation of a client with a server, from the handshake on; returns what the tools have answered."""
    told = client.shake_hands()
    assert told["protocolVersion"] == client.version
    assert told["serverInfo"]["name"] == "eroica"
    assert {"tools", "prompts", "resources"} <= told["capabilities"].keys()
    assert client.ask("ping") == {}
    answers = client.every_tool(place)
    _check(place, answers, client.names())
    assert [one["name"] for one in client.ask("prompts/list")["prompts"]] == ["triage", "fix", "postmortem"]
    for prompt, words in (("triage", JOB), ("fix", "raw = 1"), ("postmortem", place.id)):
        (message,) = client.ask("prompts/get", name=prompt, arguments={} if prompt == "triage" else {"id": place.id})[
            "messages"
        ]
        assert words in message["content"]["text"], prompt
    listed = [one["uri"] for one in client.ask("resources/list")["resources"]]
    assert listed == ["eroica://diagnoses", "eroica://incidents"]
    for uri in (*listed, f"eroica://diagnoses/{place.id}"):
        (content,) = client.ask("resources/read", uri=uri)["contents"]
        assert place.id in content["text"]
    unknown = client.ask("tools/call", name="get_diagnosis", arguments={"id": "none"})
    assert unknown["isError"] and "none" in unknown["content"][0]["text"]
    assert client.answer("no/such")["error"]["code"] == -32601
    return answers


@pytest.mark.parametrize("version", OLD)
def test_a_client_of_an_old_protocol_gets_what_new_ones_get_over_standard_input_and_output(
    place: Place, version: str
) -> None:
    new = _asked_today(place)
    _check(place, new, list(place.calls()))
    with _over_lines(place) as wire:
        answers = _check_all_of_it(place, Old(wire, version))
    _check_same(answers, new)


# Before 2025-03-26 there was no streamable HTTP; a client that has it may still name the version.
@pytest.mark.parametrize("version", OLD)
def test_a_client_of_an_old_protocol_gets_what_new_ones_get_over_http_with_a_token(place: Place, version: str) -> None:
    new = _asked_today(place)
    with running(place.root, *place.options, over=place.file) as site:
        wire = Posts(site.url, site.act, version)
        answers = _check_all_of_it(place, Old(wire, version))
        _check_same(answers, new)
        assert wire.session, "those protocols have sessions"
        with closing(wire.send("DELETE")) as left:
            assert left.status in (200, 204)
        with closing(wire.send("POST", {"jsonrpc": "2.0", "id": 1, "method": "ping"})) as answer:
            assert answer.status == 404, "which is how a client learns that it must begin anew"
        for token in ("", "wrong"):
            stranger = Posts(site.url, token, version)
            with closing(stranger.send("POST", {"jsonrpc": "2.0", "id": 1, "method": "ping"})) as answer:
                assert answer.status == 401 and "resource_metadata" in answer.headers["WWW-Authenticate"]
        client = Old(Posts(site.url, site.read, version), version)
        client.shake_hands()
        anyio.run(_check_refused, place, client.call)
        site.process.terminate()
        assert site.out.read() == ""


def test_an_old_client_that_can_be_asked_is_asked_before_each_act(place: Place) -> None:
    with _over_lines(place) as wire:
        client = Old(wire, "2025-06-18", can_be_asked=True)
        client.shake_hands()
        _check(place, client.every_tool(place), client.names())
        _check_questions(client.questions)
    with running(place.root, *place.options, over=place.file) as site:
        client = Old(Posts(site.url, site.act, "2025-06-18"), "2025-06-18", can_be_asked=True)
        client.shake_hands()
        _check(place, client.every_tool(place), client.names())
        _check_questions(client.questions)


def _check_questions(questions: list[str]) -> None:
    pacing, traces, window = questions
    assert JOB in pacing and "pacing" in pacing
    assert "run7" in traces
    assert window.startswith(f"Capture all ranks of {JOB}")


async def _check_refused(place: Place, call: Call) -> None:
    """What a token that may only read, and wrong arguments, are told."""
    calls = place.calls()
    for tool in (*ACTS, "suggest_fix"):
        answer = await call(tool, calls[tool])
        assert answer.is_refused and "may only read" in answer.text, (tool, answer.text)
    for tool in calls.keys() - {*ACTS, "suggest_fix"}:
        assert not (await call(tool, calls[tool])).is_refused, tool
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("get_diagnosis", {"id": "none"}, "none"),
        ("job_status", {"job": "tides"}, "tides"),
        ("explain_finding", {"id": place.id, "finding": "F9"}, "F9"),
        ("get_pacing", {"job": "tides"}, "no job tides is running here"),
        ("get_source", {"id": place.id, "around": -1}, "greater than or equal to 0"),
    ]
    for tool, arguments, words in wrong:
        answer = await call(tool, arguments)
        assert answer.is_refused and words in answer.text, (tool, answer.text)


def test_what_old_protocols_had_and_the_sdk_has_not_leaves_nobody_waiting_over_http(place: Place) -> None:
    """Batches, which 2025-03-26 alone had, and the streams of events without a session, which 2024-11-05 had."""
    batch = [{"jsonrpc": "2.0", "id": id, "method": "ping"} for id in (7, 8)]
    with running(place.root, *place.options, over=place.file) as site:
        wire = Posts(site.url, site.read, "2025-03-26")
        client = Old(wire, "2025-03-26")
        client.shake_hands()
        with closing(wire.send("POST", batch)) as answer:
            assert answer.status == 400
            assert json.loads(answer.read())["error"]["code"] == -32602
        assert client.ask("ping") == {}
        with closing(Posts(site.url, site.read, "2024-11-05").send("GET")) as answer:
            assert answer.status == 400
            assert "Missing session ID" in json.loads(answer.read())["error"]["message"]


def test_a_batch_over_standard_input_goes_unanswered_by_the_sdk_and_the_next_request_does_not(place: Place) -> None:
    """2025-03-26 alone asks for batches. What the SDK cannot read as one message it passes over, without a word."""
    batch = [{"jsonrpc": "2.0", "id": id, "method": "ping"} for id in (7, 8)]
    with _over_lines(place) as wire:
        client = Old(wire, "2025-03-26")
        client.shake_hands()
        wire.tell(batch)
        assert client.ask("ping") == {}, "and nothing came in between"


def test_a_version_that_nobody_knows_is_answered_with_one_that_the_server_speaks(place: Place) -> None:
    with _over_lines(place) as wire:
        client = Old(wire, "1999-01-01")
        assert client.shake_hands()["protocolVersion"] == "2025-11-25"
        assert client.names()


# -- fastmcp's client


async def _check_with_fastmcp(place: Place, transport: Any, mode: str) -> None:
    """All of it through one connection of a client that asks a person."""
    import fastmcp
    from fastmcp.client.elicitation import ElicitResult

    questions: list[str] = []

    async def agree(message: str, kind: Any, params: Any, context: Any) -> Any:
        questions.append(message)
        return ElicitResult(action="accept", content={"go_ahead": True})

    async with fastmcp.Client(transport, mode=mode, elicitation_handler=agree, timeout=LONGEST_S) as client:
        names = [tool.name for tool in await client.list_tools()]
        _check(place, await _every_tool(place, _by(client)), names)
        _check_questions(questions)
        found = (await client.call_tool("get_diagnosis", {"id": place.id})).data
        assert found.findings[0].cause == "input_pipeline", "its own reading of the schema"
        assert [one.name for one in await client.list_prompts()] == ["triage", "fix", "postmortem"]
        (message,) = (await client.get_prompt("fix", {"id": place.id})).messages
        assert isinstance(message.content, TextContent) and "raw = 1" in message.content.text
        uris = [str(one.uri) for one in await client.list_resources()]
        assert uris == ["eroica://diagnoses", "eroica://incidents"]
        (content,) = await client.read_resource(f"eroica://diagnoses/{place.id}")
        assert place.id in content.text
        with pytest.raises(fastmcp.exceptions.ToolError, match="F9"):
            await client.call_tool("explain_finding", {"id": place.id, "finding": "F9"})


def _by(client: Any) -> Call:
    """A connected client of fastmcp."""

    async def call(tool: str, arguments: dict[str, Any]) -> Answer:
        result = await client.call_tool(tool, arguments, raise_on_error=False)
        (item,) = result.content
        assert isinstance(item, TextContent)
        return Answer(item.text, result.structured_content or {}, result.is_error)

    return call


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_fastmcps_client_calls_every_tool_over_standard_input_and_output(place: Place, mode: str) -> None:
    from fastmcp.client.transports import StdioTransport

    command, *arguments = place.command
    transport = StdioTransport(command, arguments, cwd=str(ROOT), keep_alive=False)
    anyio.run(_check_with_fastmcp, place, transport, mode)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_fastmcps_client_calls_every_tool_over_http_with_a_token_and_is_refused_without(
    place: Place, mode: str
) -> None:
    import fastmcp
    from fastmcp.client.transports import StreamableHttpTransport

    async def talk(url: str, read: str, act: str) -> None:
        await _check_with_fastmcp(place, StreamableHttpTransport(url, auth=act), mode)
        async with fastmcp.Client(StreamableHttpTransport(url, auth=read), mode=mode) as client:
            await _check_refused(place, _by(client))
        # What it raises does not tell why, so that what it was answered is looked at.
        answered: list[int] = []

        async def note(response: httpx2.Response) -> None:
            answered.append(response.status_code)

        def noting(**options: Any) -> httpx2.AsyncClient:
            return httpx2.AsyncClient(**options, event_hooks={"response": [note]})

        for token in (None, "wrong"):
            refused = StreamableHttpTransport(url, auth=token, httpx_client_factory=noting)
            with pytest.raises(MCPError, match="Server returned an error response"):
                async with fastmcp.Client(refused, mode=mode):
                    raise AssertionError("it was let in")
        assert set(answered) == {401}

    with running(place.root, *place.options, over=place.file) as site:
        anyio.run(talk, site.url, site.read, site.act)
