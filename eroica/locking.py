"""Threads of one rank that keep locks from one another, by what `stacks` read of their source.

Pure. A lock is known by how the source spells it, so two objects under one name look like one lock, and one lock under
two names like two: hence never more than `supported`. Used by `doing`'s answer "lock" in `hang`.
"""

from __future__ import annotations

from dataclasses import dataclass

from eroica.merged import chain
from eroica.standing import Frame, RankView, Thread, user_frame


@dataclass(frozen=True, slots=True)
class Entanglement:
    """Why the driving thread does not get its lock."""

    is_circle: bool
    text: str
    lines: tuple[str, ...]
    """One per thread that takes part."""
    confidence: str


def holder(view: RankView, name: str, but: Thread) -> Thread | None:
    """The thread that holds the lock `name`, another one than `but` if there is one; None if none is seen to."""
    holding = [thread for thread in view.threads if any(held.name == name for held in thread.holds)]
    others = [thread for thread in holding if thread is not but]
    return others[0] if others else holding[0] if holding else None


def entanglement(view: RankView) -> Entanglement | None:
    """Follow the driving thread's lock to its holder, and on, to a circle or to who holds it and does what."""
    main = view.main
    if main is None or not main.waits_for:
        return None
    path = [main]
    while True:
        thread = path[-1]
        owner = holder(view, thread.waits_for, thread) if thread.waits_for else None
        if owner is None or owner in path:
            break
        path.append(owner)
    told = tuple(f"thread {thread.name}{_wants(thread)}: {chain(thread)}" for thread in path)
    if owner is not None:
        circle = path[path.index(owner) :]
        parts = [
            f"thread {t.name} waits for {t.waits_for} at {_at(t)}, holding {_held(view, t, circle)}" for t in circle
        ]
        if len(circle) == 1:
            thread = circle[0]
            text = f"thread {thread.name} waits at {_at(thread)} for {thread.waits_for}, which it holds itself"
            return Entanglement(True, text, told, "hypothesis")
        return Entanglement(True, "; ".join(parts), told, "supported")
    last = path[-1]
    if last is main:
        text = f"waits for the lock {main.waits_for} at {_at(main)}; no thread is seen to hold it"
        return Entanglement(False, text, told, "hypothesis")
    text = f"waits for the lock {main.waits_for} at {_at(main)}, which thread {last.name} holds, in {chain(last)}"
    return Entanglement(False, text, told, "supported")


def _wants(thread: Thread) -> str:
    return f" (waits for {thread.waits_for})" if thread.waits_for else ""


def _held(view: RankView, thread: Thread, circle: list[Thread]) -> str:
    """The lock that the next one in the circle wants of it."""
    wanted = {other.waits_for for other in circle}
    return ", ".join(sorted({held.name for held in thread.holds} & wanted))


def _at(thread: Thread) -> str:
    frame: Frame | None = user_frame(thread) or (thread.frames[0] if thread.frames else None)
    return f"{frame.function} ({frame.at})" if frame is not None else "an unknown line"
