"""How tools come to their diagnoses: what the server was started with, and the threads in which its source is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import anyio
import anyio.to_thread
from mcp.server.auth.provider import TokenVerifier
from mcp.server.auth.settings import AuthSettings
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

from eroica.client import Client
from eroica.errors import EroicaError
from eroica.findings import Diagnosis
from eroica.untrusted import clean
from mcp_server import reading
from mcp_server.coordinator import Windows
from mcp_server.sources import Diagnosed, Source
from mcp_server.work import Works

MOST_READING = 8
"""Calls that read at once; the others wait for their turn."""

Returned = TypeVar("Returned")

Id = Annotated[
    str, Field(max_length=64, description='id of a diagnosis, or its first characters; "latest" for the newest')
]
Cursor = Annotated[str, Field(max_length=64, description="the cursor of the answer to go on from; empty for the first")]
Name = Annotated[str, Field(max_length=200)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the server is started with."""

    source: Source
    works: Works[Diagnosed] = field(default_factory=Works)
    """Long work, shared with the source."""
    sources: tuple[Path, ...] = ()
    """Folders whose source code may be shown."""
    traces: tuple[Path, ...] = ()
    """Folders below which traces may be diagnosed."""
    windows: Windows | None = None
    """Of a running coordinator; None: there is none."""
    client: Client | None = None
    """The same, for what is asked of it directly."""
    allow_act: bool = False
    num_processes: int = 0
    """For reading traces; 0: one per core."""
    auth: AuthSettings | None = None
    verifier: TokenVerifier | None = None
    """Over HTTP: who may come."""


class Reader:
    """Asks the source in threads, a few at a time."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._limiter: anyio.CapacityLimiter | None = None

    async def run(self, function: Callable[..., Returned], *arguments: object) -> Returned:
        """`function(*arguments)` in a thread; what may go wrong there becomes a tool's error."""
        if self._limiter is None:  # needs a running loop
            self._limiter = anyio.CapacityLimiter(MOST_READING)
        try:
            # Given up, not waited for: a thread cannot be stopped, and a cancelled call must end.
            return await anyio.to_thread.run_sync(
                partial(function, *arguments), abandon_on_cancel=True, limiter=self._limiter
            )
        except EroicaError as error:
            raise ToolError(clean(error, 600)) from None
        except OSError as error:  # a folder that went away meanwhile
            raise ToolError(f"{clean(error.filename or 'a file', 300)}: {error.strerror or error}") from None

    async def one(self, id: str) -> Diagnosis:
        """The diagnosis that is meant."""
        return await self.run(reading.chosen, self.source, id)
