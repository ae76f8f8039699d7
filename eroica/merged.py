"""Stacks of many ranks, folded: a prefix tree whose nodes carry the ranks that pass through them.

    0,2-3: all_reduce (distributed_c10d.py:3252) <- step (train.py:40) <- main (train.py:71)
    1: decode (data.py:12) <- step (train.py:38) <- main (train.py:71)

Pure. A hundred thousand ranks that wait in one line are one line here. Used by `hang` for its evidence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from eroica.job import format_ranks
from eroica.standing import Frame, Thread

MOST_FRAMES = 4
"""Frames of a line; the user's own come before those of libraries."""


@dataclass(slots=True)
class Node:
    """A frame, reached by the same frames from the outermost on."""

    frame: Frame | None
    """None at the root."""
    ranks: set[int] = field(default_factory=set)
    here: set[int] = field(default_factory=set)
    """Ranks whose stack ends here: it is their innermost frame."""
    children: dict[tuple[str, str, int], Node] = field(default_factory=dict)


def merge(stacks: Mapping[int, Thread]) -> Node:
    """The tree of one thread per rank, outermost frame first."""
    root = Node(None)
    for rank, thread in stacks.items():
        node = root
        node.ranks.add(rank)
        for frame in reversed(thread.frames):
            key = frame.function, frame.file, frame.line
            node = node.children.setdefault(key, Node(frame))
            node.ranks.add(rank)
        node.here.add(rank)
    return root


def lines(tree: Node, most: int = 16) -> list[str]:
    """One line per place where ranks stand, rarest first, since who is alone tells most; at most `most`."""
    ends = sorted(_ends(tree), key=lambda end: (len(end[0]), min(end[0])))
    texts = [f"{format_ranks(ranks)}: {_line(path)}" for ranks, path in ends[:most]]
    return texts + ([f"... and {len(ends) - most} more places"] if len(ends) > most else [])


def chain(thread: Thread) -> str:
    """One stack as such a line, without ranks."""
    return _line(list(thread.frames))


def place(frame: Frame) -> str:
    """ "decode (data.py:12)": a file's last part is enough beside its function."""
    return f"{frame.function} ({frame.file.rpartition('/')[2]}:{frame.line})"


def _ends(tree: Node) -> Iterator[tuple[set[int], list[Frame]]]:
    """Ranks that stand in one place, and its frames, innermost first. No recursion: stacks may be deep."""
    todo: list[tuple[Node, tuple[Frame, ...]]] = [(tree, ())]
    while todo:
        node, path = todo.pop()
        if node.frame is not None:
            path = (node.frame, *path)
        if node.here and path:
            yield node.here, list(path)
        todo.extend((child, path) for child in node.children.values())


def _line(frames: list[Frame]) -> str:
    inner = frames[:1]
    users = [frame for frame in frames[1:] if frame.is_users]
    kept = (inner + users if users else frames)[:MOST_FRAMES]
    return " <- ".join(place(frame) for frame in kept)
