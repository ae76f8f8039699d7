"""docs/assistants.md, step by step: every block that a machine can run, and what a client then gets."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import anyio
import pytest
from mcp import Client, StdioServerParameters

from eroica import cli
from mcp_server.command import _parser as server_parser
from tests.mcp_talk import small_job, text_of

ROOT = Path(__file__).parent.parent
DOCUMENT = (ROOT / "docs" / "assistants.md").read_text(encoding="utf-8")


def _blocks() -> list[list[str]]:
    """The commands in blocks, as words."""
    lines = "\n".join(re.findall(r"^```sh\n(.*?)^```$", DOCUMENT, re.M | re.S)).splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def test_the_steps_lead_from_traces_to_an_answer_in_each_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # as an installed package is found
    monkeypatch.chdir(tmp_path)
    small_job(tmp_path / "traces")
    commands = _blocks()
    assert len(commands) == 5
    monkeypatch.delenv("EROICA_MODEL", raising=False)
    more = {"mcp": ["--yes"], "diagnose": ["--jobs", "1"], "chat": []}
    for program, *arguments in commands:
        assert program == "eroica"
        assert cli.main(arguments + more[arguments[0]]) == 0
    assert "\nwho          rank " in capsys.readouterr().out

    async def answer(entry: dict[str, object]) -> str:
        command, arguments = entry["command"], entry["args"]
        assert isinstance(command, str) and isinstance(arguments, list)
        environment = {"PYTHONPATH": os.environ["PYTHONPATH"]}
        server = StdioServerParameters(command=command, args=arguments, env=environment)
        async with Client(server) as client:
            return text_of(await client.call_tool("get_diagnosis", {}))

    for name, key in ((".cursor/mcp.json", "mcpServers"), (".mcp.json", "mcpServers"), (".vscode/mcp.json", "servers")):
        text = anyio.run(answer, json.loads((tmp_path / name).read_text())[key]["eroica"])
        assert "cause input_pipeline" in text
    for name in (".cursor/rules/eroica.mdc", ".claude/skills/eroica/SKILL.md"):
        head = (tmp_path / name).read_text().split("---\n")[1]
        assert re.search(r"^description: \S", head, re.M)


def test_every_command_that_the_document_shows_exists() -> None:
    shown = re.findall(r"^    (eroica(?:-mcp)? .*)$", DOCUMENT, re.M) + re.findall(r"`(eroica-mcp [^`]+)`", DOCUMENT)
    assert len(shown) >= 4
    for line in shown:
        program, *arguments = shlex.split(line)
        (server_parser() if program == "eroica-mcp" else cli._parser()).parse_args(arguments)


def test_the_document_names_every_tool_and_prompt(tmp_path: Path) -> None:
    from tests.mcp_talk import ask, over

    async def names(client: Client) -> set[str]:
        tools = {tool.name for tool in (await client.list_tools()).tools}
        return tools | {prompt.name for prompt in (await client.list_prompts()).prompts}

    for name in ask(over(tmp_path, allow_act=True), names):
        assert f"`{name}`" in DOCUMENT
    for text in ((ROOT / "prompts" / "SKILL.md").read_text(), (ROOT / "prompts" / "cursor_rule.mdc").read_text()):
        known = ask(over(tmp_path, allow_act=True), names)
        assert set(re.findall(r"`([a-z]+_[a-z_]+)`", text)) <= known
