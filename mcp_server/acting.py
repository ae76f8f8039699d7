"""Tools that act: they start work, or hand out what changes code. Not there at all unless the user allowed them.

Each asks the user first where the client can put a question (elicitation); where it cannot, the client's own question
before a tool call has to do, and the server was started with --allow-act. Over HTTP a token needs the scope `act`.
Long work is started, asked about and given up by the same tool; asked for twice, it is done once.

What needs a running coordinator says so in a sentence where there is none.
"""

# Annotations are looked up when tools are registered, and those here name functions that are local: no `annotations`.

import os
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.mcpserver import Context, Elicit, MCPServer, Resolve
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, ToolAnnotations
from pydantic import BaseModel, Field

from eroica.answers import Window
from eroica.assist import asking
from eroica.errors import EroicaError
from eroica.findings import Finding
from eroica.untrusted import clean
from mcp_server import code, reading
from mcp_server.answers import DEFAULT_TOKENS, MOST_TOKENS, Answer, Tokens, fitted
from mcp_server.reader import Id, Name, Reader, Setup
from mcp_server.sources import WAIT_S, Diagnosed, Made, diagnosed, identity, stamp_of, standing
from mcp_server.work import State, Work

SCOPE = "act"
FixTokens = Annotated[int, Field(ge=1_500, le=MOST_TOKENS, description="length of the answer at most, in tokens")]
"""How to go about a fix is not cut."""
AROUND = 6
"""Lines on each side; get_source shows more."""
Action = Literal["start", "poll", "cancel"]
Style = Literal["claude", "cursor", "chat"]

_STARTS = ToolAnnotations(read_only_hint=False, destructive_hint=False, idempotent_hint=True, open_world_hint=False)
_SUGGESTS = ToolAnnotations(read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False)


class Confirmation(BaseModel):
    """What the user answers."""

    go_ahead: bool = Field(description="do it")


class TaskAnswer(Answer):
    """Answer of a tool that starts long work."""

    task: str
    state: str
    far: str
    diagnosis: str


class WindowAnswer(Answer):
    """Answer of trigger_profile."""

    job: str
    window: str
    state: str
    why: str
    diagnosis: str


class FixAnswer(Answer):
    """Answer of suggest_fix."""

    cut_order = ("code", "evidence")
    own_words = ("how",)
    id: str
    finding: str
    cause: str
    who: str
    what: str
    confidence: str
    advice: str
    place: str
    code: list[reading.CodeLine]
    evidence: list[reading.EvidenceRow]
    how: list[str]


def may_act() -> None:
    """Raises ToolError if this caller's token does not allow it. Without HTTP there are no tokens."""
    token = get_access_token()
    if token is not None and SCOPE not in token.scopes:
        raise ToolError("this token may only read; use the one with the scope act")


def confirmed(ctx: Context, question: str) -> Confirmation | Elicit[Confirmation]:
    """The user's word, where the client can ask for it."""
    capabilities = ctx.client_capabilities
    if capabilities is None or capabilities.elicitation is None:
        return Confirmation(go_ahead=True)
    return Elicit(question, Confirmation)


def add(server: MCPServer, reader: Reader, made: Made, setup: Setup) -> None:
    """Register them."""
    _add_profiling(server, reader, setup)
    _add_diagnosing(server, reader, made, setup)
    _add_fixing(server, reader, setup)


NO_COORDINATOR = (
    "there is no running coordinator to ask; start eroica-mcp with the URL of one (eroica serve), or with its "
    "token file"
)


def _add_profiling(server: MCPServer, reader: Reader, setup: Setup) -> None:
    windows = setup.windows

    async def ask(job: str, action: Action, ctx: Context) -> Confirmation | Elicit[Confirmation]:
        may_act()
        if windows is None:
            raise ToolError(NO_COORDINATOR)
        if action != "start" or await reader.run(windows.is_under_way, job):
            return Confirmation(go_ahead=True)
        return confirmed(ctx, f"Capture all ranks of {clean(job, 80)} now? It costs the job a few per cent meanwhile.")

    @server.tool(annotations=_STARTS)
    async def trigger_profile(
        job: Annotated[str, Field(max_length=200, description="a running job, as list_jobs shows it")],
        confirmation: Annotated[Confirmation, Resolve(ask)],
        action: Action = "start",
        tokens: Tokens = DEFAULT_TOKENS,
    ) -> Annotated[CallToolResult, WindowAnswer]:
        """Has all ranks of a running job captured for some iterations and diagnosed. Start it, then poll.

        action: start (again: the same window while it is under way), poll, or cancel.
        """
        may_act()
        if windows is None:
            raise ToolError(NO_COORDINATOR)
        if not confirmation.go_ahead:
            raise ToolError("the user did not agree; nothing was started")
        if action == "start":
            window: Window | None = await reader.run(windows.start, job)
        else:
            window = await reader.run(windows.look if action == "poll" else windows.cancel, job)
        if window is None:
            raise ToolError(f"no window was asked for of {clean(job, 80)!r}; action='start' asks for one")
        id = clean(window.incident or "", 40)
        following = [f"get_diagnosis(id='{id}')"] if id else []
        if not window.is_over:
            following = [f"trigger_profile(job='{clean(job, 80)}', action='poll') in some seconds"]
        answer = WindowAnswer(
            job=clean(job, 80),
            window=clean(window.id, 40),
            state=clean(window.state, 20),
            why=clean(window.why, 400),
            diagnosis=id,
            next=following,
        )
        return fitted(answer, tokens)


class _Runs:
    """Which work was started for which folder: a folder that has changed since is another work."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._keys: dict[Path, str] = {}

    def known(self, path: str) -> Work[Diagnosed] | None:
        """The work that was started last for this path."""
        key = self._keys.get(self.allowed(path))
        return self._setup.works.get(key) if key is not None else None

    def is_current(self, path: str) -> bool:
        """It was started, and the traces are still the same."""
        folder = self.allowed(path)
        return self.known(path) is not None and self._keys[folder] == _key(folder)

    def start(self, path: str) -> Work[Diagnosed]:
        """The work of this path as it is now, new unless it was started before."""
        folder = self.allowed(path)
        key = _key(folder)
        work = self._setup.works.start(
            key, f"the traces in {folder}", lambda progress: diagnosed(folder, progress, self._setup.num_processes)
        )
        self._keys[folder] = key
        return work

    def allowed(self, path: str) -> Path:
        """The path without links, if it lies below an allowed folder. Raises ToolError."""
        roots = self._setup.traces
        if not roots:
            raise ToolError("no folder of traces is allowed; start eroica-mcp with --traces DIR")
        if "\0" in path:
            raise ToolError("the path holds a null byte; no file can have that")
        for root in roots:
            real = os.path.realpath(root)
            found = os.path.realpath(os.path.join(real, path))
            if os.path.commonpath([real, found]) == real and os.path.exists(found):
                return Path(found)
        allowed = ", ".join(clean(root, 120) for root in roots[:4])
        raise ToolError(f"{clean(path, 200)} is not there below the allowed folders of traces ({allowed})")


def _key(folder: Path) -> str:
    return f"{folder} {stamp_of(folder)}"


def _add_diagnosing(server: MCPServer, reader: Reader, made: Made, setup: Setup) -> None:
    runs = _Runs(setup)

    async def ask(path: str, action: Action, ctx: Context) -> Confirmation | Elicit[Confirmation]:
        may_act()
        if action != "start" or await reader.run(runs.is_current, path):
            return Confirmation(go_ahead=True)  # it costs nothing, or was allowed before
        return confirmed(ctx, f"Read and diagnose the traces in {clean(path, 200)}? It may take all cores for a while.")

    @server.tool(annotations=_STARTS)
    async def diagnose_traces(
        path: Annotated[str, Field(max_length=1_000, description="folder or file, below an allowed folder of traces")],
        confirmation: Annotated[Confirmation, Resolve(ask)],
        action: Action = "start",
        tokens: Tokens = DEFAULT_TOKENS,
    ) -> Annotated[CallToolResult, TaskAnswer]:
        """Diagnoses profiler traces, one per rank: starts it, or tells how far it is. Call it again until it is done.

        action: start (again: the same work), poll, or cancel.
        """
        may_act()
        if not confirmation.go_ahead:
            raise ToolError("the user did not agree; nothing was started")
        work = await reader.run(runs.start if action == "start" else runs.known, path)
        if work is None:
            raise ToolError(f"nothing was started for {clean(path, 200)}; action='start' starts it")
        if action == "cancel":
            work.give_up()
        # A poll that waits a little spares the model a turn.
        state = await reader.run(work.wait, WAIT_S if action == "start" else WAIT_S / 4)
        if state is State.DONE and work.result is not None:
            made.add(work.result)
        return fitted(_task(path, work), tokens)


def _task(path: str, work: Work[Diagnosed]) -> TaskAnswer:
    id = clean(identity(work.result[0]), 40) if work.state is State.DONE and work.result is not None else ""
    following = {
        State.DONE: [f"get_diagnosis(id='{id}')"],
        State.RUNNING: [f"diagnose_traces(path='{clean(path, 200)}', action='poll')"],
    }
    return TaskAnswer(
        task=clean(work.what, 300),
        state=work.state,
        far="" if work.state is State.DONE else clean(standing(work), 600),
        diagnosis=id,
        next=following.get(work.state, []),
    )


def _add_fixing(server: MCPServer, reader: Reader, setup: Setup) -> None:
    @server.tool(annotations=_SUGGESTS)
    async def suggest_fix(
        id: Id = "latest",
        finding: Name = "F1",
        style: Annotated[Style, Field(description="for whom the request is")] = "claude",
        tokens: FixTokens = DEFAULT_TOKENS,
    ) -> Annotated[CallToolResult, FixAnswer]:
        """Gives what is needed to change the code behind a finding: advice, evidence, the lines, and how to do it.

        It changes nothing itself. finding: its id, such as F1.
        """
        may_act()
        one = await reader.one(id)
        found = reading.find(one, finding)
        excerpt, note = await reader.run(_lines_of, found, setup)
        told = reading.explanation(one, found, None)
        how = await reader.run(partial(asking.how_to_fix, style, has_code=excerpt is not None))
        answer = FixAnswer(
            note=note,
            id=told.id,
            finding=told.finding,
            cause=told.cause,
            who=told.who,
            what=told.what,
            confidence=told.confidence,
            advice=told.advice,
            place=f"{excerpt.file}:{excerpt.line}" if excerpt is not None else "",
            code=reading.code_lines(excerpt) if excerpt is not None else [],
            evidence=told.evidence,
            how=how.splitlines(),
            next=[f"get_source(id='{told.id}', finding='{told.finding}', around=40)"] if excerpt is not None else [],
        )
        return fitted(answer, tokens)


def _lines_of(found: Finding, setup: Setup) -> tuple[code.Excerpt | None, str]:
    """The lines behind a finding; if they cannot be shown, why."""
    place = reading.place_of(found)
    if not place:
        return None, "The finding names no line of the user's code."
    try:
        excerpt = code.excerpt(place, setup.sources, AROUND)
    except EroicaError as error:
        return None, f"The lines are not here: {error}."
    return excerpt, excerpt.note
