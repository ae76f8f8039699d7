"""How the runs of a job on several hosts find their coordinator by the job's own store."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eroica import ring
from eroica.errors import UserError
from eroica.meetup import Meeting, certify, own_address, store_of
from eroica.ring import Ring


def _joined(folder: Path, rank: int, store: str) -> None:
    made = Ring.create(folder / f"rank{rank}-1{ring.SUFFIX}", rank=rank, world_size=4, capacity=16)
    made.note(host="h", job="waves")
    made.note(joins={"host": "h", "store": store})


def test_where_ranks_meet_is_read_from_their_rings(tmp_path: Path) -> None:
    assert store_of(tmp_path) == ("", False)
    (tmp_path / f"torn{ring.SUFFIX}").write_bytes(b"EROICA")
    _joined(tmp_path, 2, "10.0.0.7:29500")
    assert store_of(tmp_path) == ("10.0.0.7:29500", False)
    _joined(tmp_path, 0, "10.0.0.7:29500")
    assert store_of(tmp_path) == ("10.0.0.7:29500", True)


def test_a_job_that_meets_in_a_file_has_no_address(tmp_path: Path) -> None:
    _joined(tmp_path, 0, "file:///tmp/store")
    assert store_of(tmp_path) == ("", False)


def test_whoever_is_reached_by_loopback_listens_there_and_nowhere_else() -> None:
    assert own_address("127.0.0.1:29500") == own_address("localhost:1") == own_address("[::1]:1") == "127.0.0.1"


def test_the_key_of_a_certificate_is_for_its_owner_alone(tmp_path: Path) -> None:
    certify("10.0.0.7", tmp_path / "bus.pem", tmp_path / "bus.key")
    assert stat.S_IMODE((tmp_path / "bus.key").stat().st_mode) == 0o600
    assert (tmp_path / "bus.pem").read_text().startswith("-----BEGIN CERTIFICATE-----")


def _asks(port: int, ours: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "eroica.meetup", "127.0.0.1", str(port)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    process.stdin.write(ours)
    process.stdin.close()
    process.stdin = None
    return process


@pytest.mark.slow
def test_whoever_leaves_a_pass_first_is_the_coordinator_of_all() -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    waits = _asks(store.port)
    first = _asks(store.port, "one")
    assert first.communicate(timeout=60)[0].strip() == "one"
    assert _asks(store.port, "two").communicate(timeout=60)[0].strip() == "one"
    assert waits.communicate(timeout=60)[0].strip() == "one"


@pytest.mark.slow
def test_the_run_that_has_rank_0_brings_the_coordinator_along_though_another_of_its_ranks_was_first(
    tmp_path: Path,
) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    said: list[str] = []
    meeting = Meeting(tmp_path, job="waves", out=tmp_path / "out", environ=os.environ, say=said.append)
    try:
        _joined(tmp_path, 1, f"127.0.0.1:{store.port}")
        assert meeting.look() is None  # asks the store as one that has no pass to leave
        _joined(tmp_path, 0, f"127.0.0.1:{store.port}")
        found, until = None, time.monotonic() + 120
        while found is None and time.monotonic() < until:
            found = meeting.look()
            time.sleep(0.05)
        assert found is not None and found.job == "waves"
        assert ["it brings the coordinator along" in text for text in said] == [True]
    finally:
        meeting.close()


@pytest.mark.full
def test_a_store_that_is_gone_is_said_in_a_sentence(tmp_path: Path) -> None:
    _joined(tmp_path, 2, "127.0.0.1:1")  # nobody listens there
    meeting = Meeting(tmp_path, job="waves", out=tmp_path, environ=os.environ, say=print)
    until = time.monotonic() + 60
    try:
        with pytest.raises(UserError, match=r"store at 127\.0\.0\.1:1 gave no way to a coordinator"):
            while time.monotonic() < until:
                assert meeting.look() is None
                if meeting._asking is not None:
                    meeting._asking.wait(60)
    finally:
        meeting.close()
