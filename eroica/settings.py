"""Settings that some ranks have and their peers do not, where these are just the ranks that are slow.

A variable that is left over in one shell, another card for the communication: such a rank is slow from its first step,
and no past shows it. A setting explains only what it can act on (a variable of a maths library no slow link, the choice
of a card no operator), and only if the ranks that have it are the slow ones, all of them and nobody else. Pure; reads
what `background` made of the ranks' snapshots. Used by `draft`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from eroica.job import parse_ranks
from eroica.untrusted import clean

OF_THE_NETWORK = re.compile(
    r"env\.((NCCL|RCCL|GLOO|UCX|TP)_(\w*IFNAME|\w*HCA|NET\w*|SOCKET\w*|IB_\w+|P2P_\w+|SHM_\w+|ALGO|PROTO|\w*CHANNELS"
    r"|BUFFSIZE|TLS|CROSS_NIC))"
)
"""Settings that choose a card, a transport or an algorithm of the communication library."""
OF_THE_CPU = re.compile(
    r"env\.((OMP|GOMP|KMP|MKL|OPENBLAS|NUMEXPR|DNNL|ONEDNN|ATEN|MALLOC)_\w+|LD_PRELOAD|PYTHON(MALLOC|OPTIMIZE))"
    r"|torch\.(threads|interop_threads|anomaly_mode|deterministic|matmul_precision)"
)
"""Settings under which the same operators run another code or with another number of threads."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting that only these ranks have."""

    name: str
    text: str
    """One sentence."""


def _odd(environment: Mapping[str, Any]) -> Iterator[tuple[str, str, str, frozenset[int]]]:
    """(name, usual value, odd value, ranks) of each setting that most ranks share."""
    for difference in environment.get("differences", ()):
        if difference["usual"] is None:
            continue
        for odd in difference["odd"]:
            yield difference["name"], difference["usual"], odd["value"], frozenset(parse_ranks(odd["ranks"]))


def _said(value: str) -> str:
    return "absent" if value == "null" else clean(value, 80)


def explaining(environment: Mapping[str, Any], kind: re.Pattern[str], ranks: Collection[int]) -> list[Setting]:
    """Settings of this kind that these ranks have, all of them, and nobody else."""
    return [
        Setting(
            name,
            f"{clean(name.removeprefix('env.'), 80)} is {_said(value)} on rank{'s' if len(odd) > 1 else ''} "
            f"{', '.join(map(str, sorted(odd)))}, and {_said(usual)} on the others",
        )
        for name, usual, value, odd in _odd(environment)
        if odd == frozenset(ranks) and kind.fullmatch(name)
    ]


def ranks_apart(environment: Mapping[str, Any], kind: re.Pattern[str]) -> set[frozenset[int]]:
    """Sets of ranks that share an odd value of a setting of this kind."""
    return {odd for name, _, _, odd in _odd(environment) if kind.fullmatch(name)}
