"""The bus on a real NATS server: who gets in, who may say what, and what happens when the server dies."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest

from eroica import bus
from eroica.access import Pass, load_pass
from eroica.broker import Broker, Listening, find_server
from eroica.bus import Answered
from eroica.commands import State
from eroica.errors import UnavailableError
from eroica.meetup import certify
from eroica.nats import NatsCarrier
from tests.buses import TIMEOUT_S, over_nats


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Party:
    """Somebody with a connection, and all that reaches them."""

    def __init__(self, opened: ExitStack, ticket: Pass, *subjects: str) -> None:
        self.said: list[str] = []
        self.came: list[tuple[str, bytes]] = []
        self.carrier = opened.enter_context(closing(NatsCarrier(ticket, name="a test", say=self.said.append)))
        for subject in subjects:
            self.carrier.subscribe(subject, lambda at, data: self.came.append((at, data)))


def rounds(until: Callable[[], bool], *parties: Party) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not until():
        assert time.monotonic() < deadline, [(party.said, party.came) for party in parties]
        select.select([party.carrier.handle for party in parties], [], [], 0.1)
        for party in parties:
            party.carrier.deliver()


def test_nobody_gets_in_with_a_wrong_secret_or_none_and_it_is_said(tmp_path: Path, opened: ExitStack) -> None:
    broker = opened.enter_context(closing(Broker(tmp_path / "bus", Listening(), jobs=("waves",))))
    ticket = load_pass(broker.passes["waves"])
    for wrong in (replace(ticket, password="guess"), Pass(url=ticket.url), replace(ticket, user="coordinator")):
        party = Party(opened, wrong, "eroica.waves.down")
        rounds(lambda party=party: bool(party.said), party)  # type: ignore[misc]
        assert "authorization" in party.said[0].lower() and not party.carrier.is_connected
        assert "guess" not in " ".join(party.said)


def test_the_agents_of_one_job_can_neither_speak_nor_listen_for_another(tmp_path: Path, opened: ExitStack) -> None:
    broker = opened.enter_context(closing(Broker(tmp_path / "bus", Listening(), jobs=("waves", "tides"))))
    coordinator = Party(opened, broker.own, "eroica.*.up.*")
    waves = Party(opened, load_pass(broker.passes["waves"]), "eroica.waves.down", "eroica.tides.down", "eroica.>")
    everybody = (coordinator, waves)
    rounds(lambda: coordinator.carrier.is_connected and waves.carrier.is_connected, *everybody)
    waves.carrier.send("eroica.tides.up.x", b"forged")
    waves.carrier.send("eroica.waves.down", b"forged")
    waves.carrier.send("eroica.waves.up.x", b"own")
    coordinator.carrier.send("eroica.tides.down", b"for others")
    coordinator.carrier.send("eroica.waves.down", b"for us")
    rounds(lambda: bool(coordinator.came) and bool(waves.came), *everybody)
    assert coordinator.came == [("eroica.waves.up.x", b"own")] and waves.came == [("eroica.waves.down", b"for us")]
    refused = ("tides.up.x", "waves.down", "tides.down", "eroica.>")
    rounds(lambda: all(any("ermissions" in t and s in t for t in waves.said) for s in refused), *everybody)


def test_a_job_that_is_admitted_while_the_server_runs_gets_in_and_nobody_is_cut_off(
    tmp_path: Path, opened: ExitStack
) -> None:
    broker = opened.enter_context(closing(Broker(tmp_path / "bus", Listening(), jobs=("waves",))))
    waves = Party(opened, load_pass(broker.passes["waves"]), "eroica.waves.down")
    rounds(lambda: waves.carrier.is_connected, waves)
    tides = Party(opened, load_pass(broker.admit("tides")), "eroica.tides.down")
    rounds(lambda: tides.carrier.is_connected, waves, tides)
    assert waves.carrier.num_connects == 1


def test_no_secret_stands_on_the_command_line_or_in_a_file_for_others(tmp_path: Path, opened: ExitStack) -> None:
    broker = opened.enter_context(closing(Broker(tmp_path / "bus", Listening(), jobs=("waves",))))
    line = Path(f"/proc/{broker.pid}/cmdline").read_bytes()
    secrets = [broker.own.password, load_pass(broker.passes["waves"]).password]
    assert not any(secret.encode() in line for secret in secrets)
    assert all(secret in (tmp_path / "bus" / "nats-server.conf").read_text() for secret in secrets)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "bus").iterdir()} == {0o600}
    assert stat.S_IMODE((tmp_path / "bus").stat().st_mode) == 0o700


def test_whoever_knocks_without_a_secret_fills_no_disk(
    tmp_path: Path, opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 64 << 10
    monkeypatch.setattr("eroica.broker.MOST_LOG_BYTES", most)
    broker = opened.enter_context(closing(Broker(tmp_path / "bus", Listening(), jobs=("waves",))))
    address = "127.0.0.1", int(broker.url.rpartition(":")[2])
    for _ in range(100):
        with socket.create_connection(address, TIMEOUT_S) as stranger:
            stranger.recv(4096)
            stranger.sendall(b'CONNECT {"user": "%s", "pass": "guess"}\r\nPING\r\n' % (b"u" * 3000))
            assert b"Authorization" in stranger.recv(4096)
    logs = list((tmp_path / "bus").glob("nats-server.log*"))
    assert most / 2 < sum(path.stat().st_size for path in logs) < 3 * most
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "bus").iterdir()} == {0o600}


def test_passes_stay_good_when_the_coordinator_starts_anew(tmp_path: Path, opened: ExitStack) -> None:
    with closing(Broker(tmp_path / "bus", Listening(), jobs=("waves",))) as first:
        before = load_pass(first.passes["waves"])
    with closing(Broker(tmp_path / "bus", Listening(), jobs=("waves",))) as second:
        assert load_pass(second.passes["waves"]).password == before.password


def test_messages_survive_the_death_of_the_server(tmp_path: Path) -> None:
    with over_nats(tmp_path) as ends:
        came: list[bus.Message] = []
        ends.coordinator.subscribe((Answered,), came.append)
        sent = [Answered(window=number, rank=0, state=State.DONE) for number in range(1, 41)]
        for number, message in enumerate(sent):
            ends.agents[0].publish(message)
            if number % 10 == 5:
                ends.rounds(lambda number=number: len(came) >= number - 3)  # type: ignore[misc]
                os.kill(ends.broker.pid, signal.SIGKILL)
                assert ends.broker.has_ended()
                ends.broker.revive()
        ends.rounds(lambda: len(came) >= len(sent))
        assert came == sent and any("is back" in text for text in ends.said)


def test_a_server_that_cannot_listen_is_told_in_its_own_words(tmp_path: Path, opened: ExitStack) -> None:
    first = opened.enter_context(closing(Broker(tmp_path / "bus", Listening())))
    port = int(first.url.rpartition(":")[2])
    with pytest.raises(UnavailableError, match="in use"):
        Broker(tmp_path / "other", Listening(port=port))


def test_a_server_whose_program_is_away_for_a_while_is_started_when_it_is_back(
    tmp_path: Path, opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nats-server"
    program.symlink_to(find_server(os.environ))
    monkeypatch.setenv("EROICA_NATS_SERVER", str(program))
    broker = opened.enter_context(closing(Broker(tmp_path / "bus", Listening())))
    os.kill(broker.pid, signal.SIGKILL)
    assert broker.has_ended()
    program.rename(tmp_path / "away")
    for _ in range(2):
        with pytest.raises(UnavailableError, match="cannot be started"):
            broker.revive()
    (tmp_path / "away").rename(program)
    assert broker.revive() and not broker.revive()


def certificate(folder: Path, name: str) -> Listening:
    """A certificate that signs itself, for loopback."""
    listening = Listening(certificate=folder / f"{name}.pem", key=folder / f"{name}.key")
    assert listening.certificate is not None and listening.key is not None
    certify("127.0.0.1", listening.certificate, listening.key)
    return listening


def test_a_server_with_a_certificate_is_believed_by_who_holds_it_and_by_nobody_else(
    tmp_path: Path, opened: ExitStack
) -> None:
    listening, other = certificate(tmp_path, "bus"), certificate(tmp_path, "other")
    broker = opened.enter_context(closing(Broker(tmp_path / "bus-folder", listening, jobs=("waves",))))
    ticket = load_pass(broker.passes["waves"])
    assert ticket.url.startswith("tls://127.0.0.1:")
    good = Party(opened, ticket, "eroica.waves.down")
    rounds(lambda: good.carrier.is_connected, good)
    assert other.certificate is not None
    for wrong in (replace(ticket, ca=""), replace(ticket, ca=other.certificate.read_text())):
        party = Party(opened, wrong)
        rounds(lambda party=party: bool(party.said), party)  # type: ignore[misc]
        assert "certificate" in party.said[0].lower() and not party.carrier.is_connected


def test_the_configuration_is_read_by_the_server_as_it_is_meant(tmp_path: Path, opened: ExitStack) -> None:
    opened.enter_context(closing(Broker(tmp_path / "bus", Listening(), jobs=("waves",))))
    settings = json.loads((tmp_path / "bus" / "nats-server.conf").read_text())
    assert settings["host"] == "127.0.0.1"
    assert [user["user"] for user in settings["authorization"]["users"]] == ["coordinator", "job-waves"]
