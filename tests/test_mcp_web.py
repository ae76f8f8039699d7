"""MCP over HTTP: who is let in, what a token allows, and that nothing hangs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import anyio
import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from eroica.errors import UserError
from mcp_server.web import load_tokens
from tests import samples
from tests.mcp_talk import save, small_job, text_of


@dataclass(frozen=True, slots=True)
class Site:
    url: str
    read: str
    act: str
    out: IO[str]
    process: subprocess.Popen[str]

    @asynccontextmanager
    async def client(self, token: str, mode: str = "auto") -> AsyncIterator[Client]:
        headers = {"Authorization": f"Bearer {token}"}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=60) as http,
            Client(streamable_http_client(self.url, http_client=http), mode=mode) as client,
        ):
            yield client


@contextmanager
def running(root: Path, *options: str, over: Path | None = None) -> Iterator[Site]:
    """A server of its own process, over the folder `out` in `root`, or what `over` names."""
    tokens = root / "tokens"
    where = str(over or root / "out")
    command = [sys.executable, "-m", "mcp_server", where, "--http", "0", "--tokens", str(tokens), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None and process.stdout is not None
            line = process.stderr.readline()
            match = re.search(r"http://127\.0\.0\.1:\d+/mcp", line)
            assert match is not None, line + process.stderr.read()
            read, act = (one.secret for one in load_tokens(tokens))
            assert read not in line and act not in line
            yield Site(match[0], read, act, process.stdout, process)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


def test_a_token_is_needed_and_its_scope_decides(tmp_path: Path) -> None:
    id = save(tmp_path / "out", samples.slow_input()[0])
    small_job(tmp_path / "out" / "run7")
    body = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    plain = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}

    async def talk(site: Site) -> None:
        async with httpx2.AsyncClient(timeout=60) as http:

            async def status(**headers: str) -> int:
                named = {name.replace("_", "-"): value for name, value in headers.items()}
                return (await http.post(site.url, json=body, headers=plain | named)).status_code

            assert await status() == 401
            assert await status(Authorization="Bearer wrong") == 401
            assert await status(Authorization=f"Basic {site.read}") == 401
            good = f"Bearer {site.read}"
            assert await status(Authorization=good, Origin="http://evil.example") == 403
            assert await status(Authorization=good, Host="evil.example") == 421
            assert await status(Authorization=good, Host="localhost:1") == 421
            answer = await http.post(site.url, json=body, headers=plain)
            assert "resource_metadata" in answer.headers["www-authenticate"]
        for mode in ("auto", "legacy"):
            async with site.client(site.read, mode) as client:
                result = await client.call_tool("get_diagnosis", {"id": id})
                assert result.structured_content is not None
                assert result.structured_content["id"] == id
                for tool, arguments in (("suggest_fix", {}), ("diagnose_traces", {"path": "run7"})):
                    refusal = await client.call_tool(tool, arguments)
                    assert refusal.is_error
                    assert "may only read" in text_of(refusal)
            async with site.client(site.act, mode) as client:
                assert not (await client.call_tool("suggest_fix", {})).is_error
                result = await client.call_tool("diagnose_traces", {"path": "run7"})
                assert not result.is_error, text_of(result)

    with running(tmp_path, "--allow-act", "--jobs", "1") as site:
        anyio.run(talk, site)
        site.process.send_signal(signal.SIGINT)
        assert site.out.read() == ""


def test_fifty_calls_at_once_and_one_that_is_given_up_hang_nothing(tmp_path: Path) -> None:
    save(tmp_path / "out", samples.throttled_gpu(1024)[0])

    async def talk(site: Site) -> None:
        async with site.client(site.read) as client:

            async def one() -> None:
                assert not (await client.call_tool("get_diagnosis", {})).is_error

            with anyio.fail_after(60):
                async with anyio.create_task_group() as group:
                    for _ in range(50):
                        group.start_soon(one)
                with anyio.move_on_after(0.001):
                    await client.call_tool("list_incidents", {})
                await one()

    with running(tmp_path) as site:
        anyio.run(talk, site)


def test_tokens_are_made_for_their_owner_alone_and_files_that_others_read_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "tokens"
    read, act = load_tokens(file)
    assert (set(read.scopes), set(act.scopes)) == ({"read"}, {"read", "act"})
    assert file.stat().st_mode & 0o777 == 0o600
    assert load_tokens(file) == (read, act)
    file.chmod(0o640)
    with pytest.raises(UserError, match="chmod 600"):
        load_tokens(file)
    for text, reason in [
        ("read short\n", "at least 16"),
        ("act " + "x" * 20, "SCOPES TOKEN"),
        ("read,all " + "x" * 20, "SCOPES TOKEN"),
        ("read\n", "SCOPES TOKEN"),
        ("# nothing\n", "0 tokens"),
    ]:
        file.write_text(text)
        file.chmod(0o600)
        with pytest.raises(UserError, match=re.escape(reason)):
            load_tokens(file)
    os.unlink(file)
    os.mkfifo(file, 0o600)
    with pytest.raises(UserError, match="chmod 600"):
        load_tokens(file)
