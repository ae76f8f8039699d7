"""What ranks were told differently, when they join and find no way: addresses, interfaces, models.

Pure. At the start of a job there is no past and often no call to compare; what is left is what each rank was told, as
the probe noted before it tried. The one that differs from most is named. That alone is no fault (rank 0 may well call
itself "localhost"), so it counts only where the start has failed or stands still. Used by `gone` and `hang`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from eroica.findings import Evidence
from eroica.standing import RankView
from eroica.suspect import Suspect, some

_CONNECTING = re.compile(r"(?i)connect|rendezvous|\baddress|resolv|\bbind\b|getaddrinfo|unreachable|no route|interface")
LOOPBACK = ("127.", "::1", "localhost")
_ADVICE = (
    "give all ranks the same rendezvous address, and an interface that the other hosts reach "
    "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME; a host name must not resolve to 127.x in /etc/hosts)"
)


def odd_ones(said: Mapping[int, str]) -> tuple[frozenset[int], str]:
    """The ranks that say another thing than more than half of all, and what these say; nobody without a majority."""
    counts = Counter(said.values())
    usual, num = counts.most_common(1)[0] if counts else ("", 0)
    if num * 2 <= len(said) or len(counts) < 2:
        return frozenset(), usual
    return frozenset(rank for rank, text in said.items() if text != usual), usual


def is_starting(view: RankView) -> bool:
    """It has not got through anything yet: no step, no call."""
    return not view.num_steps and not any(call.status == "done" for call in view.calls)


def is_about_start(view: RankView) -> bool:
    """It left by an error that names the address or interface that it was told to start with."""
    named = (view.rendezvous.get("interface", ""), view.rendezvous.get("store", "").rpartition(":")[0])
    words = [re.compile(rf"(?<![\w.]){re.escape(name)}(?![\w.])") for name in named if name]
    return is_starting(view) and any(word.search(view.exception) for word in words)


def is_about_connecting(view: RankView) -> bool:
    """It left by an error of finding or reaching the others, before it got through anything."""
    return is_starting(view) and _CONNECTING.search(view.exception) is not None


def misdirected(views: Mapping[int, RankView]) -> list[Suspect]:
    """Who was sent elsewhere, or sends the others elsewhere; empty if all were told alike, or too little is known."""
    stores = {rank: view.rendezvous["store"] for rank, view in views.items() if view.rendezvous.get("store")}
    odd, usual = odd_ones(stores)
    # Whoever keeps the store may call it by a name of its own.
    odd = odd - {rank for rank in odd if rank == 0 and _port(stores[rank]) == _port(usual)}
    if odd:
        own = ", ".join(sorted({stores[rank] for rank in odd})[:3])
        text = f"{some(odd)}: told to meet the others at {own}, while {some(stores.keys() - odd)} meet at {usual}"
        return [_suspect(views, odd, text)]
    sizes = {rank: view.rendezvous["size"] for rank, view in views.items() if view.rendezvous.get("size")}
    odd, usual = odd_ones(sizes)
    if odd:
        own = ", ".join(sorted({sizes[rank] for rank in odd})[:3])
        text = f"{some(odd)}: told of a job of {own} ranks, while {some(sizes.keys() - odd)} expect {usual}"
        return [
            replace(_suspect(views, odd, text), cause="configuration", advice="start all ranks with one world size")
        ]
    given = {rank: view.rendezvous["address"] for rank, view in views.items() if view.rendezvous.get("address")}
    inner = frozenset(rank for rank, address in given.items() if address.startswith(LOOPBACK))
    hosts = {view.host for view in views.values()} - {""}
    if inner and inner != given.keys():
        outer = given.keys() - inner
        shown = ", ".join(sorted({given[rank] for rank in outer})[:3])
        text = (
            f"{some(inner)}: tells the others to connect to {_given(views, inner)}, an address of its own host alone; "
        )
        text += f"{some(outer)} give {shown}"
        return [_suspect(views, inner, text)]
    if inner and len(hosts) > 1:
        text = (
            f"{some(inner)} tell the others to connect to {_given(views, inner)}, though they are on {len(hosts)} hosts"
        )
        return [_suspect(views, inner, text, scope="all" if inner == views.keys() else "group")]
    odd, usual = odd_ones({rank: _network(address) for rank, address in given.items()})
    if odd:
        text = f"{some(odd)}: tells the others to connect to {_given(views, odd)}, while most are in {usual}"
        return [_suspect(views, odd, text)]
    return []


def nobody_through(views: Mapping[int, RankView], ranks: Iterable[int]) -> Suspect:
    """All have come to the rendezvous, all were told alike, and it does not come about."""
    ranks = frozenset(ranks)
    stores = sorted({views[rank].rendezvous.get("store", "") for rank in ranks} - {""})
    text = f"all {len(ranks)} ranks have come to the rendezvous{' at ' + stores[0] if len(stores) == 1 else ''}, "
    text += "and nobody gets through"
    evidence = (Evidence(text, "ring", {"ranks": len(ranks)}), *_told(views, ranks))
    ruled_out = ("a missing rank: all have come", "different addresses: all were told the same")
    return Suspect(
        *("startup_network", "group", ranks, "hypothesis", text, evidence), advice=_ADVICE, ruled_out=ruled_out
    )


def odd_models(views: Mapping[int, RankView], ranks: Iterable[int]) -> tuple[frozenset[int], str]:
    """Those of `ranks` whose model differs from that of most, and how, in words."""
    models = {rank: views[rank].model for rank in ranks if rank in views and views[rank].model}
    odd, usual = odd_ones(models)
    own = ", ".join(sorted({models[rank] for rank in odd})[:3])
    return odd, f"{some(odd)}: {own}; {some(models.keys() - odd)}: {usual}" if odd else ""


def _suspect(views: Mapping[int, RankView], ranks: frozenset[int], text: str, scope: str = "rank") -> Suspect:
    left = [rank for rank, view in sorted(views.items()) if view.exception]
    evidence = [Evidence(text, "environment", {}), *_told(views, views)]
    shown = dict.fromkeys(f"{views[rank].exception} at {views[rank].exception_at}" for rank in left)
    evidence += [Evidence(line, "ring", {}) for line in list(shown)[:3]]
    kind = "crash" if left else "hang"
    return Suspect("startup_network", scope, ranks, "supported", text, tuple(evidence), kind=kind, advice=_ADVICE)


def _told(views: Mapping[int, RankView], ranks: Iterable[int]) -> list[Evidence]:
    by_text: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(ranks):
        told = views[rank].rendezvous
        parts = [f"rendezvous {told['store']}"] if told.get("store") else []
        parts += [f"interface {told['interface']} ({told.get('by', '')})"] if told.get("interface") else []
        parts += [f"own address {told['address']}"] if told.get("address") else []
        if parts:
            by_text[", ".join(parts)].append(rank)
    return [Evidence(f"{some(who)}: {text}", "environment", {}) for text, who in list(by_text.items())[:8]]


def _given(views: Mapping[int, RankView], ranks: frozenset[int]) -> str:
    told = views[min(ranks)].rendezvous
    by = f" ({told['by']}={told['interface']})" if told.get("interface") else " (by /etc/hosts)"
    return told["address"] + by


def _port(store: str) -> str:
    return store.rpartition(":")[2]


def _network(address: str) -> str:
    """The first half of an IPv4 address: two interfaces of one cluster network share at least that."""
    return ".".join(address.split(".")[:2]) + ".x.x" if address.count(".") == 3 else address
