"""Clients that speak MCP, and what each needs to know of eroica: its entry in mcp.json, a rule or a skill.

    changes = plan("cursor", Path("."), ["eroica-out"])
    print(shown(changes))      # as a diff; nothing is written yet
    write(changes)

Everything goes into the project's folder, where the client looks for it and where it can be kept under version control;
nothing is written into anybody's home. What a file holds besides stays: other servers, and the order of keys. A file
that is not plain JSON (VS Code allows comments) is left alone, and the error holds what to add by hand.

Prints nothing and asks nothing: `command` does. The texts are in `prompts/`.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eroica.errors import UserError
from eroica.templates import load, render
from eroica.untrusted import clean

SERVER = "eroica"
MAX_FILE_BYTES = 1 << 20
"""Of a client's configuration; what is bigger is something else."""


@dataclass(frozen=True, slots=True)
class Client:
    """Where a client looks, relative to the project."""

    name: str
    config: str
    """Its list of servers."""
    key: str
    """Under which that list stands."""
    snippet: str
    """Template of our entry."""
    guide: str = ""
    """Where its rule or skill belongs; "" if it takes none."""
    guide_text: str = ""
    then: str = ""
    """What is left to do by hand."""


CLIENTS = {
    client.name: client
    for client in (
        Client(
            "cursor", ".cursor/mcp.json", "mcpServers", "mcp_cursor.json.j2", ".cursor/rules/eroica.mdc",
            "cursor_rule.mdc",
            "open the folder in Cursor, switch eroica on under Settings, MCP, and ask: why is my training slow?",
        ),
        Client(
            "claude", ".mcp.json", "mcpServers", "mcp_claude.json.j2", ".claude/skills/eroica/SKILL.md", "SKILL.md",
            "start claude in the folder, allow the server eroica, and ask: why is my training slow?",
        ),
        Client(
            "vscode", ".vscode/mcp.json", "servers", "mcp_vscode.json.j2",
            then="open the folder in VS Code, start eroica in .vscode/mcp.json, and ask: why is my training slow?",
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Change:
    """A file as it is and as it would be."""

    path: Path
    before: str | None
    """None: it does not exist."""
    after: str


def program() -> list[str]:
    """How a client starts the server. By its full path: a client that was started from a desktop has another PATH."""
    script = Path(sys.executable).parent / "eroica-mcp"
    if os.access(script, os.X_OK):
        return [str(script)]
    return [sys.executable, "-P", "-m", "mcp_server"]  # -P: the project's own files are no modules of ours


def plan(name: str, project: Path, arguments: Sequence[str], command: Sequence[str] = ()) -> list[Change]:
    """What connecting that client would change. `arguments`: of the server; `command`: starts it. Raises UserError."""
    client = CLIENTS[name]
    if not project.is_dir():
        raise UserError(f"{project} is no folder; name the project that the client opens")
    words = [*(command or program()), *arguments]
    entry = json.loads(render(client.snippet, command=words[0], arguments=words[1:]))[client.key][SERVER]
    config = project / client.config
    before = _read(config)
    changes = [Change(config, before, _with_server(config, before, client, entry))]
    if client.guide:
        guide = project / client.guide
        changes.append(Change(guide, _read(guide), load(client.guide_text)))
    return [change for change in changes if change.before != change.after]


def shown(changes: Sequence[Change]) -> str:
    """The changes as a unified diff."""
    lines: list[str] = []
    for change in changes:
        name = clean(change.path, 300)
        lines += difflib.unified_diff(
            (change.before or "").splitlines(keepends=True),
            change.after.splitlines(keepends=True),
            "/dev/null" if change.before is None else name,
            name,
        )
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)


def write(changes: Sequence[Change]) -> None:
    """Make them. Raises UserError if a file has changed since it was looked at, or cannot be written."""
    for change in changes:
        if _read(change.path) != change.before:
            raise UserError(f"{change.path} has changed meanwhile; try again")
    for change in changes:
        try:
            _replace(Path(os.path.realpath(change.path)), change.after)
        except OSError as error:
            raise UserError(f"{change.path} cannot be written ({error.strerror or error})") from None


def _with_server(path: Path, before: str | None, client: Client, entry: object) -> str:
    """The configuration with our entry in it."""
    own = {client.key: {SERVER: entry}}
    by_hand = f"add this by hand: {json.dumps(own)}"
    try:
        plain = json.loads(before) if before is not None and before.strip() else {}
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not plain JSON; {by_hand}") from None
    servers = plain.get(client.key, {}) if isinstance(plain, dict) else None
    if not isinstance(servers, dict):
        raise UserError(f"{path} has no list of servers where one belongs ({client.key}); {by_hand}")
    old = servers.get(SERVER)
    kept = old if isinstance(old, dict) else {}  # such as env, which is the user's
    plain[client.key] = {**servers, SERVER: {**kept, **(entry if isinstance(entry, dict) else {})}}
    return json.dumps(plain, indent=_indent(before or ""), ensure_ascii=False) + "\n"


def _indent(text: str) -> int | str:
    """As the file has it."""
    match = re.search(r"\n([ \t]+)\S", text)
    return match[1] if match else 2


def _read(path: Path) -> str | None:
    """None if there is no such file. Raises UserError if it cannot be changed by us."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise UserError(f"{path} has more than {MAX_FILE_BYTES >> 20} MB; that is no configuration")
        return data.decode("utf-8")
    except FileNotFoundError:
        return None
    except ValueError:
        raise UserError(f"{path} is not UTF-8; look what it is before it is changed") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error})") from None


def _replace(path: Path, text: str) -> None:
    """As a whole: a client that reads meanwhile never sees half of it. What it allows to whom stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
