"""Notices of what is new: whoever listens learns that a list or a diagnosis has changed, and reads it again.

`watch` looks at the source's version now and then, but only while somebody listens: a folder on a network drive should
not be walked for nobody. Notices reach clients of protocol 2026-07-28 that listen; older ones ask again.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.to_thread
from mcp.server.subscriptions import InMemorySubscriptionBus
from mcp.shared.subscriptions import ResourcesListChanged, ResourceUpdated, ServerEvent

from eroica.errors import EroicaError
from mcp_server.sources import Source

DIAGNOSES = "eroica://diagnoses"
INCIDENTS = "eroica://incidents"
LOOK_S = 1.0
"""Between two looks: a person waits no shorter than that."""


class Bus(InMemorySubscriptionBus):
    """The SDK's own bus, which also tells whether anybody listens."""

    def __init__(self) -> None:
        super().__init__()
        self._num_listeners = 0
        self._has_listeners = anyio.Event()

    def subscribe(self, listener: Callable[[ServerEvent], None]) -> Callable[[], None]:
        """See `SubscriptionBus`."""
        unsubscribe = super().subscribe(listener)
        self._num_listeners += 1
        self._has_listeners.set()
        is_subscribed = [True]

        def end() -> None:
            unsubscribe()
            if is_subscribed.pop() if is_subscribed else False:
                self._num_listeners -= 1
                if self._num_listeners == 0:
                    self._has_listeners = anyio.Event()

        return end

    async def wait_for_listener(self) -> None:
        """Wait until somebody listens."""
        if not self._num_listeners:
            await self._has_listeners.wait()


async def watch(source: Source, bus: Bus, known: str | None) -> None:
    """Tell who listens what has changed since the version `known`, until cancelled. What changed while nobody listened
    is told to the next who does: one notice too many is read again, one too few is never seen."""
    while True:
        await bus.wait_for_listener()
        version = await version_of(source)
        if version is not None and version != known:
            known = version
            for event in (ResourceUpdated(uri=DIAGNOSES), ResourceUpdated(uri=INCIDENTS), ResourcesListChanged()):
                await bus.publish(event)
        await anyio.sleep(LOOK_S)


async def version_of(source: Source) -> str | None:
    """None if the source cannot be reached; it may be back at the next look."""
    try:
        return await anyio.to_thread.run_sync(source.version, abandon_on_cancel=True)
    except (EroicaError, OSError):
        return None
