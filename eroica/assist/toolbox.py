"""The MCP server's tools as a program uses them: one connection, what was asked, and what that has shown.

    async with opened(server_of(["eroica-out"]), ask) as box:
        told = await box.call("get_diagnosis", {"id": "latest"})

The server is the same that Cursor and Claude talk to, started as a program, so that whoever asks through here sees what
they see: bounded, cleaned, fenced. The gate in front of tools that act is the server's own: it asks before it starts
something, and `ask` is where a person answers; nobody there is a no. Whoever runs a tool may rely on that and on
nothing else, since a model obeys what it reads.

It keeps what every answer has shown, as `grounding.Shown`, to check a text against. Used by `conversing` and
`cli_chat`; needs the extra `mcp`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eroica.assist.clients import program
from eroica.assist.grounding import Shown
from eroica.errors import UnavailableError
from eroica.findings import Evidence

if TYPE_CHECKING:
    from mcp import Client, StdioServerParameters
    from mcp.client import ClientRequestContext
    from mcp.types import ElicitRequestParams, ElicitResult, Tool

Ask = Callable[[str], bool]
MISSING = "the MCP SDK is not installed, by which diagnoses are asked about; try: pip install 'eroica[chat]'"
MOST_FINDINGS = 3
"""Whose evidence is fetched unasked."""
CALL_S = 120.0
"""Longest that a tool may take: its own limits are below that, so this is for a server that is gone."""
_PASSED = re.compile(r"EROICA_\w+|PYTHONPATH|PYTHONHOME|VIRTUAL_ENV|SSL_CERT_\w+")
"""Variables that the server gets besides PATH, HOME and the like. Keys of models are none of its business."""
_VALUE = re.compile(r"(?:^|, )([\w.\- /]{1,80})=([^,]*)")


@dataclass(frozen=True, slots=True)
class Told:
    """A tool's answer."""

    tool: str
    text: str
    """For a model or a person; an error's sentence if it is one."""
    record: Mapping[str, Any]
    """Empty for an error."""
    is_error: bool = False


@dataclass(slots=True)
class Toolbox:
    """A connection and what it was used for."""

    client: Client
    tools: Sequence[Tool]
    told: list[Told] = field(default_factory=list)
    """All answers, oldest first."""

    async def call(self, tool: str, arguments: Mapping[str, object]) -> Told:
        """Ask; what the tool refuses is an answer, too. Raises UnavailableError if the server is gone."""
        from mcp.shared.exceptions import MCPError
        from mcp.types import TextContent

        try:
            result = await asyncio.wait_for(self.client.call_tool(tool, dict(arguments)), CALL_S)
        except MCPError as error:  # such as arguments of another type than the schema's
            told = Told(tool, f"refused: {error}", {}, True)
        except (TimeoutError, OSError, RuntimeError) as error:
            raise UnavailableError(
                f"the MCP server does not answer {tool} ({str(error) or 'it took too long'})"
            ) from None
        else:
            text = "\n".join(part.text for part in result.content if isinstance(part, TextContent))
            record = result.structured_content if isinstance(result.structured_content, dict) else {}
            told = Told(tool, text, {} if result.is_error else record, bool(result.is_error))
        self.told.append(told)
        return told

    async def know(self, diagnosis: str = "latest") -> list[Told]:
        """The diagnosis and the evidence of its first findings: what there is before anybody thinks about it."""
        told = [await self.call("get_diagnosis", {"id": diagnosis})]
        for row in told[0].record.get("findings", [])[:MOST_FINDINGS]:
            told.append(await self.call("explain_finding", {"id": told[0].record["id"], "finding": row["id"]}))
        return told

    def shown(self) -> Shown:
        """What all answers so far have shown."""
        return shown(self.told)


def server_of(arguments: Sequence[str]) -> StdioServerParameters:
    """How `eroica-mcp ARGUMENTS` is started. Raises UnavailableError where the extra is missing."""
    try:
        from mcp import StdioServerParameters
    except ModuleNotFoundError:
        raise UnavailableError(MISSING) from None
    words = [*program(), *arguments]
    environment = {name: value for name, value in os.environ.items() if _PASSED.fullmatch(name)}
    return StdioServerParameters(command=words[0], args=words[1:], env=environment)


@asynccontextmanager
async def opened(server: Any, ask: Ask) -> AsyncIterator[Toolbox]:
    """Connect to `server`, whatever the SDK's client takes. `ask`: a person's yes to one question."""
    from mcp import Client
    from mcp.shared.exceptions import MCPError
    from mcp.types import ElicitRequestFormParams, ElicitResult

    async def elicited(context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
        if not isinstance(params, ElicitRequestFormParams):  # an address to open: never by us
            return ElicitResult(action="decline")
        fields = params.requested_schema.get("properties", {})
        if any(one.get("type") != "boolean" for one in fields.values()):
            return ElicitResult(action="decline")
        is_yes = await asyncio.to_thread(ask, params.message)
        return ElicitResult(action="accept", content=dict.fromkeys(fields, is_yes))

    # Entered and left by hand: an error of the caller that passes through the client would come out in a group.
    client = Client(server, elicitation_callback=elicited)
    try:
        await client.__aenter__()
        listed = (await client.list_tools()).tools
    except (MCPError, OSError, ExceptionGroup) as error:
        inner: BaseException = error
        while isinstance(inner, ExceptionGroup):
            inner = inner.exceptions[0]
        raise UnavailableError(f"the MCP server does not start ({inner}); eroica-mcp says why") from None
    try:
        yield Toolbox(client, listed)
    finally:
        await client.__aexit__(None, None, None)


def shown(told: Sequence[Told]) -> Shown:
    """What answers of tools have shown, for `grounding.check`.

    Evidence ids belong to one diagnosis; where two were looked at, an id stands for what either says under it.
    """
    evidence: dict[str, Evidence] = {}
    facts: list[str] = []
    only_as: list[tuple[str, str]] = []
    for one in told:
        for key, value in one.record.items():
            if key == "evidence" and isinstance(value, list):
                for row in value:
                    if isinstance(row, dict) and isinstance(row.get("id"), str):
                        evidence[row["id"]] = _both(evidence.get(row["id"]), row)
            elif key == "consequences" and isinstance(value, list):
                only_as += [("waiting", str(row)) for row in value]
            elif key == "workers" and isinstance(value, list):
                for row in value:
                    if isinstance(row, dict):
                        text = " ".join(_facts(row))
                        if row.get("in_a_finding"):
                            facts.append(text)
                        else:
                            only_as.append(("peer", text))
            elif key not in ("next", "cursor"):
                facts += _facts({key: value})
    for line in facts:
        missing = re.search(r"\bmissing: ([\d,-]+)", line)
        partial = re.search(r"\bin part only: ([\d,-]+)", line)
        only_as += [("missing", f"ranks {match[1]}") for match in (missing, partial) if match is not None]
    return Shown(evidence, tuple(facts), tuple(only_as))


def _both(known: Evidence | None, row: Mapping[str, Any]) -> Evidence:
    values: dict[str, Any] = dict(known.values) if known is not None else {}
    for name, text in _VALUE.findall(str(row.get("values", ""))):
        values[name if name not in values else f"other.{name}"] = _number(text)
    text = str(row.get("text", ""))
    if known is not None and known.text != text:
        text = f"{known.text}; {text}"
    return Evidence(text, str(row.get("source", "")), values)


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _facts(value: Any, name: str = "") -> Iterator[str]:
    """Sentences with units, from a record with its units in its names."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _facts(item, str(key))
    elif isinstance(value, list):
        for item in value:
            yield from _facts(item, name)
    elif isinstance(value, str):
        yield f"ranks {value}" if name in ("ranks", "most_on_rank") and value[:1].isdigit() else value
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        unit = "ms" if name.endswith("_ms") else "s" if name.startswith("seconds") else ""
        yield f"{json.dumps(value)} {unit}".strip()
