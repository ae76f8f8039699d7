"""How tests talk to the MCP server: the SDK's own client in this process, and what an answer must be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from functools import lru_cache
from pathlib import Path
from typing import Any

from mcp import Client
from mcp.types import CallToolResult, TextContent, TextResourceContents

from eroica.findings import Diagnosis, to_json
from evals.kineto_file import write_json
from evals.synth import Cluster, cluster
from mcp_server.answers import BYTES_PER_TOKEN, size_of
from mcp_server.reader import Setup
from mcp_server.server import build
from mcp_server.sources import DiagnosisFolder


def over(root: Path, **more: Any) -> Setup:
    """A server over the diagnoses in a folder."""
    return Setup(source=DiagnosisFolder(root), **more)


def ask(setup: Setup, question: Callable[[Client], Coroutine[Any, Any, Any]], **client: Any) -> Any:
    """What `question` finds out with a client of a new server."""

    async def talk() -> Any:
        async with Client(build(setup), **client) as connected:
            return await question(connected)

    return asyncio.run(talk())


def call(setup: Setup, tool: str, **arguments: Any) -> tuple[str, dict[str, Any]]:
    """Text and record of a tool's answer, which is no error."""
    result = ask(setup, lambda client: client.call_tool(tool, arguments))
    text = text_of(result)
    assert not result.is_error, text
    assert isinstance(result.structured_content, dict)
    return text, result.structured_content


def refused(setup: Setup, tool: str, **arguments: Any) -> str:
    """Text of a tool's answer, which is an error."""
    result = ask(setup, lambda client: client.call_tool(tool, arguments))
    assert result.is_error, text_of(result)
    return text_of(result)


def text_of(result: CallToolResult) -> str:
    (item,) = result.content
    assert isinstance(item, TextContent)
    return item.text


async def prompt_text(client: Client, name: str, **arguments: str) -> str:
    (message,) = (await client.get_prompt(name, arguments)).messages
    assert isinstance(message.content, TextContent)
    return message.content.text


async def resource_text(client: Client, uri: str) -> str:
    (content,) = (await client.read_resource(uri)).contents
    assert isinstance(content, TextResourceContents)
    return content.text


def tokens_of(result: CallToolResult) -> float:
    """Of all that goes over the wire."""
    return size_of(result) / BYTES_PER_TOKEN


@lru_cache(1)
def _job() -> Cluster:
    return cluster("slow_input", world_size=4, effect=0.2, seed=1, num_iterations=5, max_events=400)


def small_job(folder: Path) -> None:
    """Traces of four ranks, one of which is slow at its input."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(4):
        write_json(_job().written(rank), folder / f"rank{rank}.json.gz")


def save(root: Path, diagnosis: Diagnosis, name: str = "diagnosis.json") -> str:
    """Keep a diagnosis in a folder; returns its id."""
    data = to_json(diagnosis)
    root.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(json.dumps(data))
    return str(data["id"])
