"""What the environment of a job's ranks says: who has a setting, and what is not as it was in the healthy past.

Reads the form that `background` gives it: "common" is what all ranks have, "differences" who differs in what, values
there as JSON. Strings from jobs: whoever shows them cleans them. Pure. Used by `draft` and `levels`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eroica.job import parse_ranks
from eroica.untrusted import clean

VERSIONS = ("torch", "torch.cuda", "torch.hip", "nccl", "python", "commit")
"""Settings that say which code runs. The kernel and the driver are the host's, and change with it."""
_OFF = ("", "0", "false", "no", "off", "none", "null")
MOST_CHANGES = 6
"""Changes that one sentence names."""


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that all ranks have now, and had in the healthy past, with another value; "" = not set."""

    name: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.name} {self.before or 'not set'} -> {self.after or 'not set'}"


def holders(environment: Mapping[str, Any], name: str) -> Iterator[tuple[str, frozenset[int] | None]]:
    """Each value of a setting and the ranks that have it; None = all, or all that no other value is told of."""
    common = environment.get("common")
    if isinstance(common, Mapping) and name in common:
        yield _text(common[name]), None
    for difference in _sequence(environment.get("differences")):
        if difference.get("name") != name:
            continue
        if difference.get("usual") is not None:
            yield _plain(difference["usual"]), None
        for odd in _sequence(difference.get("odd")):
            try:
                yield _plain(odd.get("value")), frozenset(parse_ranks(str(odd.get("ranks", ""))))
            except ValueError:
                continue


def is_on(value: str) -> bool:
    """A value that switches something on."""
    return value.strip().lower() not in _OFF


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Change, ...]:
    """Settings that all ranks share in both, with another value. () where one of them is not known.

    What is of one side only counts as a change where it is an environment variable: other settings are absent where
    they could not be read.
    """
    then, now = (of.get("common") for of in (before, after))
    if not isinstance(then, Mapping) or not isinstance(now, Mapping):
        return ()
    found = []
    for name in sorted(then.keys() | now.keys()):
        if (name not in then or name not in now) and not name.startswith("env."):
            continue
        a, b = _text(then.get(name, "")), _text(now.get(name, ""))
        if a != b:
            found.append(Change(clean(name, 80), a, b))
    return tuple(found)


def of_versions(found: Sequence[Change]) -> tuple[Change, ...]:
    """Those that say that other code runs."""
    return tuple(change for change in found if change.name in VERSIONS)


def sentence(found: Sequence[Change]) -> str:
    """ "torch 2.6.0 -> 2.7.1, nccl ..."."""
    more = f" and {len(found) - MOST_CHANGES} more" if len(found) > MOST_CHANGES else ""
    return ", ".join(map(str, found[:MOST_CHANGES])) + more


def _sequence(value: object) -> Iterator[Mapping[str, Any]]:
    for item in value if isinstance(value, Sequence) and not isinstance(value, str) else ():
        if isinstance(item, Mapping):
            yield item


def _plain(value: object) -> str:
    """A value that is told as JSON."""
    try:
        return _text(json.loads(value)) if isinstance(value, str) else _text(value)
    except ValueError:
        return _text(value)


def _text(value: object) -> str:
    return clean("" if value is None else str(value).lower() if isinstance(value, bool) else str(value), 80)
