"""`eroica mcp install`: what is written into a project, shown before, and what of it a client then starts."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from mcp import Client, StdioServerParameters

from eroica.assist import clients
from eroica.cli import main
from tests import samples
from tests.mcp_talk import save, text_of

CONFIGS = {"cursor": ".cursor/mcp.json", "claude": ".mcp.json", "vscode": ".vscode/mcp.json"}


@pytest.mark.parametrize("client", CONFIGS)
def test_what_install_writes_starts_a_server_that_knows_the_diagnosis(
    client: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))  # as an installed package is found
    id = save(tmp_path / "eroica-out", samples.slow_input()[0])
    status = main(["mcp", "install", client, str(tmp_path / "eroica-out"), "--project", str(tmp_path), "--yes"])
    assert status == 0
    assert capsys.readouterr().out.startswith("--- /dev/null\n+++ ")
    servers = json.loads((tmp_path / CONFIGS[client]).read_text())
    entry = servers.get("mcpServers", servers.get("servers"))["eroica"]
    assert entry["args"][-1] == str(tmp_path / "eroica-out")

    async def talk() -> str:
        environment = {"PYTHONPATH": os.environ["PYTHONPATH"]}
        parameters = StdioServerParameters(command=entry["command"], args=entry["args"], env=environment)
        async with Client(parameters) as connected:
            return text_of(await connected.call_tool("list_jobs", {}))

    assert id in anyio.run(talk)
    assert main(["mcp", "install", client, str(tmp_path / "eroica-out"), "--project", str(tmp_path)]) == 0
    assert "nothing is to be changed" in capsys.readouterr().err


def test_nothing_is_written_without_a_yes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "eroica", "mcp", "install", "claude", "--project", str(tmp_path)]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 1
    assert '+      "type": "stdio"' in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_what_a_configuration_holds_besides_stays(tmp_path: Path) -> None:
    config = tmp_path / ".cursor" / "mcp.json"
    config.parent.mkdir()
    other = {"command": "other", "args": ["é"]}
    config.write_text(
        json.dumps(
            {"inputs": [], "mcpServers": {"other": other, "eroica": {"env": {"A": "b"}, "command": "old"}}}, indent=4
        )
    )
    config.chmod(0o600)
    clients.write(clients.plan("cursor", tmp_path, ["out"], ["eroica-mcp"]))
    after = json.loads(config.read_text())
    assert list(after) == ["inputs", "mcpServers"]
    assert after["mcpServers"]["other"] == other
    assert after["mcpServers"]["eroica"] == {"env": {"A": "b"}, "command": "eroica-mcp", "args": ["out"]}
    assert re.search(r'^    "inputs"', config.read_text(), re.M)
    assert stat.S_IMODE(config.stat().st_mode) == 0o600


def test_a_configuration_that_is_no_plain_json_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / ".vscode" / "mcp.json"
    config.parent.mkdir()
    for text, reason in [
        ("{ // mine\n}", "is not plain JSON"),
        ('{"servers": []}', "has no list of servers"),
        ("[]", "has no list of servers"),
        ("[" * 50_000, "is not plain JSON"),
    ]:
        config.write_text(text)
        assert main(["mcp", "install", "vscode", "--project", str(tmp_path), "--yes"]) == 1
        said = capsys.readouterr().err
        assert reason in said
        assert "add this by hand" in said
        assert config.read_text() == text


def test_a_file_that_changed_after_it_was_shown_is_not_overwritten(tmp_path: Path) -> None:
    changes = clients.plan("claude", tmp_path, ["out"], ["eroica-mcp"])
    (tmp_path / ".mcp.json").write_text("{}")
    with pytest.raises(Exception, match="has changed meanwhile"):
        clients.write(changes)
    assert (tmp_path / ".mcp.json").read_text() == "{}"
    assert not (tmp_path / ".claude").exists()


def test_paths_with_quotes_and_letters_of_all_scripts_stay_json(tmp_path: Path) -> None:
    odd = 'a "folder" \\ <é\u202e>'
    (change, _) = clients.plan("claude", tmp_path, [odd], ["eroica-mcp"])
    assert json.loads(change.after)["mcpServers"]["eroica"]["args"] == [odd]


def test_eroica_mcp_is_the_server_itself(tmp_path: Path) -> None:
    id = save(tmp_path, samples.slow_input()[0])
    root = str(Path(__file__).parent.parent)
    parameters = StdioServerParameters(
        command=sys.executable,
        args=["-m", "eroica", "mcp", "--allow-act", str(tmp_path)],
        cwd=root,
        env={"PYTHONPATH": root},
    )

    async def talk() -> tuple[str, set[str]]:
        async with Client(parameters) as connected:
            tools = {tool.name for tool in (await connected.list_tools()).tools}
            return text_of(await connected.call_tool("list_jobs", {})), tools

    text, tools = anyio.run(talk)
    assert id in text
    assert "suggest_fix" in tools
