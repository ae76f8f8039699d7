"""Tools for the pacing of a running job: how it stands, and, where acting is allowed, switching it.

There only where a running coordinator is. Switching asks the user first, as all acts do; pacing is enabled only for a
job of which a dry run has shown what it would do, and within the bounds that eroica has anyway. See docs/pacing.md.
"""

# Annotations are looked up when tools are registered, and those here name functions that are local: no `annotations`.

from typing import Annotated, Literal

from mcp.server.mcpserver import Context, Elicit, MCPServer, Resolve
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, ToolAnnotations
from pydantic import Field

from eroica.answers import Pacing
from eroica.client import Client
from eroica.fabric.pacing import HARD_CAP_S, LONGEST_TTL_S
from eroica.untrusted import clean
from mcp_server.acting import Confirmation, confirmed, may_act
from mcp_server.answers import DEFAULT_TOKENS, Answer, Row, Tokens, fitted
from mcp_server.reader import Reader

_READS = ToolAnnotations(read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False)
_SWITCHES = ToolAnnotations(read_only_hint=False, destructive_hint=False, idempotent_hint=True, open_world_hint=False)
Mode = Literal["off", "dry-run", "enable"]
JobName = Annotated[str, Field(max_length=200, description="a running job, as list_jobs shows it")]


class GroupRow(Row):
    """A process group."""

    name: str
    ranks: int
    wait_ms: float | None
    longest_hold_ms: float


class ChangeRow(Row):
    """Something that was decided."""

    at: str
    step: int
    phase: str
    why: str


class PacingAnswer(Answer):
    """Answer of get_pacing and set_pacing."""

    cut_order = ("groups", "changes")
    job: str
    mode: str
    phase: str
    is_held: bool
    has_rehearsed: bool
    iterations: int
    waiting_share: float | None
    gain_of_throughput: float | None
    gain_error: float | None
    fall_of_variation: float | None
    max_hold_ms: float
    ttl_s: float
    why_not: str
    groups: list[GroupRow]
    changes: list[ChangeRow]


def add_reading(server: MCPServer, reader: Reader, client: Client) -> None:
    """Register what only looks."""

    @server.tool(annotations=_READS)
    async def get_pacing(job: JobName, tokens: Tokens = DEFAULT_TOKENS) -> Annotated[CallToolResult, PacingAnswer]:
        """Tells how the pacing of a running job stands: whether ranks are held back, and what trials have shown."""
        return fitted(_answer(await reader.run(client.pacing, job)), tokens)


def add_acting(server: MCPServer, reader: Reader, client: Client) -> None:
    """Register what switches."""

    async def ask(job: str, mode: Mode, ctx: Context) -> Confirmation | Elicit[Confirmation]:
        may_act()
        if mode == "off":
            return Confirmation(go_ahead=True)
        if mode == "enable":
            await _rehearsed(reader, client, job)
        what = "see what pacing would do for" if mode == "dry-run" else "let pacing hold ranks back in"
        return confirmed(ctx, f"Shall eroica {what} {clean(job, 80)}?")

    @server.tool(annotations=_SWITCHES)
    async def set_pacing(
        job: JobName,
        mode: Mode,
        confirmation: Annotated[Confirmation, Resolve(ask)],
        threshold: Annotated[float, Field(gt=0, le=1, description="share of waiting above which it is tried")] = 0.05,
        max_hold_ms: Annotated[float, Field(gt=0, le=HARD_CAP_S * 1e3)] = 50,
        ttl_s: Annotated[float, Field(ge=0.1, le=LONGEST_TTL_S)] = 10,
        tokens: Tokens = DEFAULT_TOKENS,
    ) -> Annotated[CallToolResult, PacingAnswer]:
        """Switches the pacing of a running job: dry-run first; enable is refused until a dry run has seen the job.

        It keeps ranks held only while its own trials show a gain.
        """
        may_act()
        if not confirmation.go_ahead:
            raise ToolError("the user did not agree; nothing was switched")
        if mode == "enable":
            await _rehearsed(reader, client, job)

        def switch() -> Pacing:
            return client.set_pacing(job, mode, threshold=threshold, max_delay_s=max_hold_ms / 1e3, ttl_s=ttl_s)

        return fitted(_answer(await reader.run(switch)), tokens)


async def _rehearsed(reader: Reader, client: Client, job: str) -> None:
    if not (await reader.run(client.pacing, job)).has_rehearsed:
        raise ToolError(
            f"no dry run has seen enough of {clean(job, 80)!r} yet; set_pacing(mode='dry-run') first, then get_pacing"
        )


def _answer(found: Pacing) -> PacingAnswer:
    job = clean(found.job, 80)
    return PacingAnswer(
        job=job,
        mode=clean(found.mode, 20),
        phase=clean(found.phase, 20),
        is_held=found.is_held,
        has_rehearsed=found.has_rehearsed,
        iterations=found.num_iterations,
        waiting_share=found.dispersion,
        gain_of_throughput=found.gain,
        gain_error=found.gain_error,
        fall_of_variation=found.steadier,
        max_hold_ms=found.max_delay_s * 1e3,
        ttl_s=found.ttl_s,
        why_not=clean(found.why_not, 300),
        groups=[
            GroupRow(
                name=clean(group.name, 60),
                ranks=group.num_ranks,
                wait_ms=group.wait_s * 1e3 if group.wait_s is not None else None,
                longest_hold_ms=group.longest_delay_s * 1e3,
            )
            for group in found.groups
        ],
        changes=[
            ChangeRow(
                at=clean(change.at, 40), step=change.step, phase=clean(change.phase, 20), why=clean(change.why, 300)
            )
            for change in reversed(found.changes)
        ],
        next=[f"get_pacing(job='{job}') in some seconds"] if found.mode != "off" else [],
    )
