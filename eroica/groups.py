"""The process groups that one rank's trace names: by the file's head, and by what only events tell.

Not who is comparable with whom (that is `job`), nor what communicates (`communication`, which uses this): a table, and
the index of an event's group in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from eroica.job import ProcessGroup
from eroica.records import integer

MOST_RANKS = 1 << 22
"""Of a group that is told by start and stride: what claims more is damaged, and is not to take the memory for it."""
_MOST_DIGITS = 18


@lru_cache(maxsize=4096)
def _numbers(text: str) -> tuple[tuple[int, ...], bool]:
    parts = re.findall(r"-?\d+", text)
    if any(len(part) > _MOST_DIGITS for part in parts):
        return (), False
    return tuple(int(part) for part in parts), "..." not in text


def rank_list(value: Any) -> tuple[tuple[int, ...], bool]:
    """(ranks or sizes, True if the list is whole) from a list or its text, which torch cuts with "..."."""
    if isinstance(value, str):
        return _numbers(value)
    if isinstance(value, (list, tuple)) and all(type(item) is int for item in value):
        return tuple(value), True
    return (), False


class Groups:
    """The group table: what the file's head configures, then what only events name."""

    def __init__(self, config: Any) -> None:
        self.table: list[ProcessGroup] = []
        self._by_name: dict[str, int] = {}
        self._by_ranks: dict[tuple[int, ...], int] = {}
        for item in config if isinstance(config, list) else []:
            if isinstance(item, dict):
                ranks, whole = rank_list(item.get("ranks"))
                size = max(integer(item.get("pg_size"), 0, 32), len(ranks) if whole else 0)
                self._append(str(item.get("pg_name", "")), str(item.get("pg_desc", "")), ranks if whole else (), size)

    def _append(self, name: str, description: str, ranks: Sequence[int], size: int) -> int:
        index = len(self.table)
        description = "" if description == "undefined" else description
        members = tuple(sorted(set(ranks))) if not size or len(set(ranks)) == size else ()
        self.table.append(ProcessGroup(name, description, members, size or len(members)))
        self._by_name.setdefault(name, index)
        if members:
            self._by_ranks.setdefault(members, index)
        return index

    def index(self, args: Mapping[str, Any]) -> int:
        """Group of an event by its args; -1 if they name none."""
        name = args.get("Process Group Name", args.get("Process Group ID"))
        ranks, whole = rank_list(args.get("Process Group Ranks"))
        size = integer(args.get("Group size"), 0, 32)
        if not whole:
            ranks = self._strided(args, ranks, size)
        if name is not None and str(name) in self._by_name:
            return self._by_name[str(name)]
        members = tuple(sorted(set(ranks)))
        if name is None:
            if members in self._by_ranks:
                return self._by_ranks[members]
            if not members:
                return -1
        return self._append(
            "" if name is None else str(name), str(args.get("Process Group Description", "")), members, size
        )

    @staticmethod
    def _strided(args: Mapping[str, Any], seen: tuple[int, ...], size: int) -> tuple[int, ...]:
        """A cut list, completed from start and stride only where these agree with all that is listed."""
        start, stride = integer(args.get("Global rank start"), -1, 32), integer(args.get("Global rank stride"), -1, 32)
        if start < 0 or stride < 1 or not 2 < len(seen) < size <= MOST_RANKS:
            return ()
        full = tuple(range(start, start + stride * size, stride))
        return full if full[: len(seen) - 1] == seen[:-1] and seen[-1] in full else ()
