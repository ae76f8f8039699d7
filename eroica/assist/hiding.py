"""Names of hosts and users out of a diagnosis, for who may show measurements to a model but not whose they are.

Pure but for the memory of who was called what: the same host is "host-2" in every answer, so that one can still be
told from another. Hosts are those that the diagnosis itself lists as such, with their short forms; users are what
stands after /home/ and /Users/; addresses are IPv4. It is a courtesy, no proof: a host whose name is an ordinary word
("train") is replaced only where it stands as a host, and names that the job wrote into its own functions stay.

Used by the MCP server with --hide-names.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eroica.findings import Detail, Diagnosis, FunctionName, from_json, to_json

_USER = re.compile(r"(/(?:home|Users)/)([^/\s:]+)")
_ADDRESS = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])")
_WORD = re.compile(r"[A-Za-z]+")
"""A host called so cannot be told from a word of a sentence."""
MOST = 100_000
"""Names that are remembered; those after them share one."""


class Names:
    """Who is called what. Of several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hosts: dict[str, str] = {}
        self._short: dict[str, str] = {}
        """Short forms of names with a domain: of the first host that has it. They are no hosts of their own."""
        self._addresses: dict[str, str] = {}
        self._pattern: re.Pattern[str] | None = None

    def host(self, name: str) -> str:
        """What a host is called instead; two hosts never share a name."""
        if not name:
            return ""
        with self._lock:
            known = self._hosts.get(name)
            if known is None:
                known = self._hosts[name] = f"host-{min(len(self._hosts) + 1, MOST)}"
                self._short.setdefault(name.partition(".")[0], known)
                self._pattern = None
            return known

    def text(self, text: str) -> str:
        """A text without the names of hosts that are known by now, of users, and without addresses."""
        text = _USER.sub(r"\1user", text)
        with self._lock:
            known = self._short | self._hosts
            if self._pattern is None:
                # The longest first: "node-1.rack-2" before its short form.
                told = sorted((name for name in known if name and not _WORD.fullmatch(name)), key=len, reverse=True)
                words = "|".join(map(re.escape, told))
                self._pattern = re.compile(rf"(?<![\w.-])(?:{words})(?![\w-])" if words else r"(?!)")
            text = self._pattern.sub(lambda match: known[match[0]], text)
            return _ADDRESS.sub(lambda match: self._address(match[0]), text)

    def _address(self, address: str) -> str:
        return self._addresses.setdefault(address, f"address-{min(len(self._addresses) + 1, MOST)}")


def hide(diagnosis: Diagnosis, names: Names) -> Diagnosis:
    """The diagnosis with other names for hosts and users. It keeps its id, since that is how it is asked for."""
    listed = [*diagnosis.hosts, *diagnosis.verdict.hosts]
    for finding in diagnosis.findings:
        listed += finding.hosts
    for host in listed:  # before any text is looked at
        names.host(host)
    plain = to_json(diagnosis)
    kept = plain["id"], plain["created"]
    hosts = {names.host(host): ranks for host, ranks in diagnosis.hosts.items()}
    hidden = from_json({**_hidden(plain, names), "id": kept[0], "created": kept[1], "placement": {"hosts": hosts}})
    return replace(
        hidden,
        id=diagnosis.id or kept[0],
        verdict=replace(hidden.verdict, hosts=tuple(map(names.host, diagnosis.verdict.hosts))),
        findings=tuple(
            replace(after, hosts=tuple(map(names.host, before.hosts)))
            for before, after in zip(diagnosis.findings, hidden.findings, strict=True)
        ),
    )


def hide_detail(detail: Detail, names: Names) -> Detail:
    """The same of the numbers of a page."""
    return replace(
        detail,
        hosts=tuple(map(names.host, detail.hosts)),
        functions=tuple(_function(one, names) for one in detail.functions),
        groups=tuple(map(names.text, detail.groups)),
    )


def _function(one: FunctionName, names: Names) -> FunctionName:
    def text(value: str | None) -> str | None:
        return names.text(value) if value is not None else None

    return FunctionName(
        one.kind, names.text(one.name), text(one.location), text(one.user_location), text(one.user_function)
    )


def _hidden(value: Any, names: Names) -> Any:
    if isinstance(value, str):
        return names.text(value)
    if isinstance(value, Mapping):
        return {names.text(str(key)): _hidden(item, names) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_hidden(item, names) for item in value]
    return value
