"""Where a rank meets the others at its start, and which address it gives them: for a note, before it tries.

A start that hangs has no step, and often no call, to be told by: what ranks were told differently is all there is. It
asks nobody: no name is resolved (that may take seconds, and whoever joins does it right afterwards), so the address is
that of the interface which the environment names, else what /etc/hosts says of this host, else left out.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Mapping
from typing import Any

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Variables that name the interface to bind to; the first that is set counts."""
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_MOST_HOSTS = 1 << 18


def told(args: tuple[Any, ...], options: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """By the arguments of `init_process_group` and the environment. Unknown things are left out."""
    method = options.get("init_method") or (args[1] if len(args) > 1 else None)
    found = {"host": socket.gethostname()}
    if isinstance(method, str) and "://" in method and not method.startswith("env://"):
        scheme, _, rest = method.partition("://")
        found["store"] = rest.split("?")[0].rstrip("/") if scheme == "tcp" else method
    elif environ.get("MASTER_ADDR"):
        found["store"] = f"{environ['MASTER_ADDR']}:{environ.get('MASTER_PORT', '')}"
    size = options.get("world_size", args[3] if len(args) > 3 else -1)
    size = str(size) if isinstance(size, int) and size > 0 else environ.get("WORLD_SIZE", "")
    if size:
        found["size"] = size
    variable = next((name for name in INTERFACES if environ.get(name)), "")
    if variable:
        found["interface"], found["by"] = environ[variable], variable
        address = address_of(environ[variable].split(",")[0].lstrip("="))
    else:
        address = address_in(_hosts(), found["host"])
    if address:
        found["address"] = address
    return found


def address_of(interface: str) -> str:
    """The IPv4 address of an interface; "" if it has none, or there is no such interface."""
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked.fileno(), _GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""


def address_in(hosts: str, name: str) -> str:
    """What a file like /etc/hosts says of a host; "" if nothing."""
    for line in hosts.splitlines():
        words = line.partition("#")[0].split()
        if name in words[1:] and ":" not in words[0]:
            return words[0]
    return ""


def _hosts() -> str:
    try:
        with open("/etc/hosts", "rb") as file:
            return file.read(_MOST_HOSTS).decode("utf-8", "replace")
    except OSError:
        return ""
