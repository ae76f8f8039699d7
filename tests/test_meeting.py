"""What a rank notes before it joins the others, and how a view reads the notes on exceptions, batches and models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eroica import ring
from eroica.probe import meeting
from eroica.probe.recorder import Recorder, _place
from eroica.ring import COLLECTIVE, NEXT, STEP, Ring, what
from eroica.standing import RankView
from eroica.views import Process, view_of

GROUP = 0xABCDEF0123456789


def test_the_place_of_the_rendezvous_is_that_of_the_call_else_of_the_environment() -> None:
    environ = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    assert meeting.told((), {}, environ)["store"] == "node0:29500"
    assert meeting.told(("gloo", "tcp://10.0.0.1:7/?rank=0"), {}, environ)["store"] == "10.0.0.1:7"
    assert meeting.told((), {"init_method": "file:///x/y"}, environ)["store"] == "file:///x/y"
    assert meeting.told((), {"init_method": "env://"}, environ)["store"] == "node0:29500"
    assert "store" not in meeting.told((), {}, {})
    assert meeting.told((), {"world_size": 3}, {"WORLD_SIZE": "4"})["size"] == "3"
    assert meeting.told((), {"world_size": -1}, {"WORLD_SIZE": "4"})["size"] == "4"
    assert meeting.told(("gloo", "tcp://10.0.0.1:7", None, 3, 0), {}, {"WORLD_SIZE": "4"})["size"] == "3"


def test_the_own_address_is_that_of_the_interface_or_of_the_file_of_hosts_and_else_unknown() -> None:
    told = meeting.told((), {}, {"NCCL_SOCKET_IFNAME": "eth9", "GLOO_SOCKET_IFNAME": "lo"})
    assert (told["interface"], told["by"], told["address"]) == ("lo", "GLOO_SOCKET_IFNAME", "127.0.0.1")
    odd = meeting.told((), {}, {"GLOO_SOCKET_IFNAME": "^lo"})
    assert odd["interface"] == "^lo" and "address" not in odd
    hosts = "127.0.0.1 localhost\n::1 ip6-localhost box\n127.0.1.1 box.example box # x\n"
    assert meeting.address_in(hosts, "box") == "127.0.1.1" and meeting.address_in(hosts, "other") == ""


def _view(folder: Path, *notes: dict[str, Any], events: tuple[tuple[int, int], ...] = ()) -> RankView:
    """Of a ring with notes, and events of a kind that begin at a time."""
    made = Ring.create(folder / "rank0.ring", rank=0, world_size=2)
    made.note(group=f"{GROUP:016x}", name="0", description="default_pg", ranks="0-1", size=2, backend="cuda:nccl")
    for note in notes:
        made.note(**note)
    for kind, begin_ns in events:
        made.end(made.begin(what(kind, 1 if kind == COLLECTIVE else 0), begin_ns, -1, GROUP, 1, 8, 0), 5, kind == NEXT)
    made.close()
    return view_of(ring.read_flight(folder / "rank0.ring"), Process(is_here=True, lives=True), 10**9)


def test_an_exception_is_shown_with_the_users_line_behind_the_librarys(tmp_path: Path) -> None:
    note = {
        "exception": "ValueError: x at y",
        "at": "/v/site-packages/a.py:3",
        "trail": ["/home/u/t.py:7", "/u/m.py:1"],
    }
    view = _view(tmp_path, note)
    assert (view.exception, view.exception_at, view.exception_from) == (
        "ValueError: x at y", "/v/site-packages/a.py:3", "/home/u/t.py:7",
    )  # fmt: skip
    bare = _view(tmp_path, {"exception": "ValueError: x", "at": "/home/u/t.py:9"})
    assert bare.exception_from == "/home/u/t.py:9"


def test_an_exception_that_is_dealt_with_counts_until_training_goes_on(tmp_path: Path) -> None:
    note = {"handles": "KeyError: 3", "at": "/home/u/t.py:7", "trail": ["/home/u/t.py:7"], "clock_ns": 1000}
    held = _view(tmp_path, note, events=((STEP, 500), (COLLECTIVE, 1001), (COLLECTIVE, 2000)))
    assert (held.handles, held.handles_from) == ("KeyError: 3", "/home/u/t.py:7")
    assert _view(tmp_path, note, events=((COLLECTIVE, 1001), (STEP, 3000))).handles == ""


def test_the_last_batch_the_model_the_rendezvous_and_what_carries_a_group_are_read(tmp_path: Path) -> None:
    notes: list[dict[str, Any]] = [{"joins": {"store": "a:1"}}, {"model": "DDP of 2 parameters"}]
    view = _view(tmp_path, *notes, events=((NEXT, 10),))
    assert (view.last_batch, view.model, view.rendezvous) == ("none", "DDP of 2 parameters", {"store": "a:1"})
    assert view.groups[0].is_on_device and not _view(tmp_path, {"joins": 3}).rendezvous


def test_an_exception_in_a_clean_up_is_noted_once_with_its_lines(tmp_path: Path) -> None:
    made, recorder = Ring.create(tmp_path / "rank0.ring", rank=0, world_size=1), Recorder()
    try:
        int("x")
    except ValueError as error:
        recorder.handles(made, error)
        recorder.handles(made, error)
        place = _place(error.__traceback__)
    recorder.handles(made, StopIteration())
    made.close()
    notes = [note for note in ring.read_flight(tmp_path / "rank0.ring").notes if "handles" in note]
    assert [(note["handles"], note["at"]) for note in notes] == [
        ("ValueError: invalid literal for int() with base 10: 'x'", place["at"])
    ]
    assert place["trail"] == [place["at"]] and _place(None) == {"at": ""}
