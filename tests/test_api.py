"""The HTTP API: what it answers, what it has done, and what it refuses, over real sockets."""

from __future__ import annotations

import http.client
import json
import os
import select
import shutil
import stat
import subprocess
import sysconfig
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from eroica import __version__, bus
from eroica.answers import Incident, Window
from eroica.client import Client, find_client
from eroica.desk import Desk
from eroica.errors import DataError, UnavailableError, UserError
from eroica.findings import from_json, to_json
from eroica.guard import Limits, Meter, Rate, TokenFile, Web, is_host, load_token
from eroica.meetup import certify
from tests.site import JOB, TIMEOUT_S, Site

FAST = Limits(reads=Rate(1e6, 1e6), acts=Rate(1e6, 1e6), strangers=Rate(1e6, 1e6))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """For tests that change nothing."""
    site = Site(tmp_path_factory.mktemp("site"), web=Web(limits=FAST)).start()
    profiled(site)
    yield site
    site.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path, web=Web(limits=FAST)).start()
    yield made
    made.close()


def profiled(site: Site, key: str = "") -> Window:
    """A window that a person asks for, to its end."""
    client = site.client()
    asked = client.start_window(JOB, key)
    site.wait(lambda: client.window(JOB, asked.id).is_over, "a window to its end")
    site.kept()
    return client.window(JOB, asked.id)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def why(self) -> str:
        said = json.loads(self.body)
        assert list(said) == ["error"] and isinstance(said["error"], str) and "\n" not in said["error"]
        return str(said["error"])


def raw(
    site: Site, method: str, path: str, *, token: str | None = "act", body: bytes | None = None, **headers: str
) -> Answer:
    """A request as anybody may send it. `token`: name of one of ours, or the words themselves; None: none."""
    file = site.server.files.get(token or "")
    connection = http.client.HTTPConnection("127.0.0.1", int(site.server.url.rpartition(":")[2]), timeout=TIMEOUT_S)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if token is not None:
        sent.setdefault("Authorization", f"Bearer {file.token if file is not None else token}")
    try:
        connection.putrequest(method, path, skip_host="Host" in sent)
        for name, value in sent.items():
            connection.putheader(name, value)
        if body is not None and "Content-Length" not in sent and "Transfer-Encoding" not in sent:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        given = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, given, answer.read())
    finally:
        connection.close()


def test_a_window_that_a_person_asks_for_ends_in_a_diagnosis_that_is_found_again(site: Site) -> None:
    client = site.client()
    window = profiled(site)
    assert (window.state, window.asked_by, window.why) == ("done", "act", "") and window.incident is not None
    (told,) = site.incidents
    assert client.incident(window.incident) == json.loads(json.dumps(to_json(told.diagnosis)))
    found = from_json(client.incident(window.incident))
    assert (found.verdict.ranks, found.verdict.cause, found.window.trigger) == ("5", "input_pipeline", "manual")
    assert client.detail(window.incident)["ranks"] == list(range(8))
    (row,) = client.incidents(job=JOB).incidents
    assert (row.id, row.ranks, row.hosts, row.has_detail) == (window.incident, "5", ["b"], True)
    assert not client.incidents(job="tides").incidents and not client.incidents(since="2999-01-01").incidents
    (kept,) = site.keeper.store.windows(JOB)
    assert (kept.num_ranks, kept.num_reported, kept.incident) == (8, 8, window.incident)
    assert sorted(site.keeper.store.patterns(JOB, kept.session, kept.number)) == list(range(8))


def test_jobs_and_ranks_are_shown_as_the_coordinator_has_them(shared: Site) -> None:
    client = shared.client("read")
    (job,) = client.jobs()
    assert job == client.job(JOB) and job.is_live and job.hosts == {"a": True, "b": True}
    assert (job.world_size, job.num_alive, job.num_iterations, job.iteration_s) == (8, 8, 117, 1.0)
    assert job.num_incidents == 1 and job.first_seen is not None and job.window == ""
    ranks = client.ranks(JOB)
    assert [rank.rank for rank in ranks] == list(range(8)) and {rank.host for rank in ranks[4:]} == {"b"}
    assert [rank.rank for rank in client.ranks(JOB, first=6, limit=1)] == [6] and ranks[0].unit == "steps"
    (pace,) = client.pace(JOB)
    assert (pace.iteration_s, pace.num_alive) == (1.0, 8)


def test_what_a_person_confirms_is_told_at_the_next_incident_of_that_kind(site: Site) -> None:
    client = site.client()
    first = profiled(site).incident
    assert first is not None and client.seen_before(first).num == 0
    made = client.confirm(first, "checkpoint_io", "the NFS server was full")
    assert (made.cause, made.who) == ("checkpoint_io", "act")
    second = profiled(site).incident
    assert second is not None and second != first
    seen = client.seen_before(second)
    assert (seen.num, seen.causes, [like.id for like in seen.incidents]) == (1, {"checkpoint_io": 1}, [first])
    assert seen.incidents[0].confirmed == made == client.seen_before(first).confirmed
    with pytest.raises(UserError, match="confirm an incident by one of"):
        client.confirm(first, "gremlins")
    with pytest.raises(UserError, match="there is no incident 0000"):
        client.confirm("0" * 12, "host_gc")


def test_asking_twice_with_one_key_is_asking_once(site: Site) -> None:
    client = site.client()
    first = client.start_window(JOB, "key-1")
    assert client.start_window(JOB, "key-1").id == first.id
    site.wait(lambda: client.window(JOB, first.id).is_over, "a window")
    assert client.start_window(JOB, "key-1") == client.window(JOB, first.id)
    assert raw(site, "POST", f"/v1/jobs/{JOB}/windows", Idempotency_Key="key-1").status == 200
    assert len(site.incidents) == 1
    assert profiled(site, "key-2").id != first.id and len(site.incidents) == 2


def test_a_key_means_the_same_window_to_a_coordinator_that_has_taken_over(site: Site, tmp_path: Path) -> None:
    first = profiled(site, "key-1")
    site.agents[0].is_quiet = True
    lost = site.client().start_window(JOB, "key-2")
    site.kept()
    site.close()
    later = Site(tmp_path).start()
    try:
        client = later.client()
        assert client.start_window(JOB, "key-1") == first and first.state == "done"
        again = client.start_window(JOB, "key-2")
        assert (again.id, again.state) == (lost.id, "failed") and "coordinator ended" in again.why
        assert client.window(JOB, lost.id) == again and not later.incidents
        with pytest.raises(UserError, match=r"is over \(failed\)"):
            client.cancel_window(JOB, lost.id)
        assert client.start_window(JOB, "key-3").id not in (first.id, lost.id)
    finally:
        later.close()


def test_summaries_that_nobody_has_asked_for_are_not_kept(site: Site) -> None:
    profiled(site)
    (kept,) = site.keeper.store.windows(JOB)
    link = site._links[0]
    told = [bus.Summarized(window=number, rank=rank, summary=bytes(1000)) for number in (1, 2) for rank in (0, 5000)]
    for message in told:
        site.in_loop(lambda message=message: link.publish(message))  # type: ignore[misc]
    site.wait(lambda: link.is_told, "an answer")
    site.agents[0].is_quiet = True
    client = site.client()
    asked = client.start_window(JOB)
    window = site.coordinators.jobs[JOB].coordinator.window
    assert window is not None and asked.state == "preparing"
    site.in_loop(lambda: link.publish(bus.Summarized(window=window.number, rank=5000, summary=bytes(1000))))
    site.wait(lambda: link.is_told, "an answer")
    site.in_loop(lambda: None)
    site.kept()
    numbers = (1, 2, window.number)
    assert [site.keeper.store.patterns(JOB, kept.session, number).get(5000) for number in numbers] == [None] * 3
    assert [site.keeper.store.patterns(JOB, kept.session, number).get(0) for number in (1, 2)] == [None] * 2


def test_a_window_that_cannot_be_is_refused_with_the_reason_and_changes_nothing(site: Site) -> None:
    client = site.client()
    with pytest.raises(UserError, match="no job tides is running here"):
        client.start_window("tides")
    site.agents[0].is_quiet = True
    asked = client.start_window(JOB)
    assert asked.state == "preparing" and client.job(JOB).window == "manual, preparing"
    with pytest.raises(UserError, match=r"another window \(manual\) is under way"):
        client.start_window(JOB)
    cancelled = client.cancel_window(JOB, asked.id)
    assert (cancelled.state, cancelled.why) == ("cancelled", "act cancelled it")
    with pytest.raises(UserError, match=r"is over \(cancelled\)"):
        client.cancel_window(JOB, asked.id)
    site.wait(lambda: any(isinstance(message, bus.Abort) for message in site.agents[0].missed), "an abort")
    for agent in site.agents:
        site.in_loop(agent.end)
    site.wait(lambda: client.job(JOB).num_alive == 0, "an end of all ranks")
    with pytest.raises(UserError, match="no rank of it is alive"):
        client.start_window(JOB)
    assert not site.incidents and client.job(JOB).window == ""
    with pytest.raises(UserError, match="no window w-000000000000 of job waves was asked for"):
        client.window(JOB, "w-000000000000")


def test_a_window_whose_ranks_end_is_failed_and_says_so(site: Site) -> None:
    client = site.client()
    site.agents[0].is_quiet = site.agents[1].is_quiet = True
    asked = client.start_window(JOB)
    for agent in site.agents:
        site.in_loop(agent.end)
    site.wait(lambda: client.window(JOB, asked.id).is_over or client.job(JOB).num_alive == 0, "an end")
    site.in_loop(lambda: site.coordinators.jobs[JOB].tick(2**62))
    site.wait(lambda: client.window(JOB, asked.id).is_over, "the deadline")
    window = client.window(JOB, asked.id)
    assert window.state == "failed" and "gave nothing" in window.why and window.incident is None
    site.kept()
    assert site.keeper.store.asked(JOB, asked.id) == window


def test_events_are_told_as_they_happen_and_again_to_who_was_cut_off(site: Site) -> None:
    client, heard = site.client("read"), list[Any]()
    has_begun = threading.Event()

    def listen() -> None:
        has_begun.set()
        for event in client.events():
            heard.append(event)
            if event.kind == "incident":
                return

    listener = threading.Thread(target=listen)
    listener.start()
    has_begun.wait(TIMEOUT_S)
    site.wait(lambda: len(site.chronicle.events._wakers) == 1, "a listener")
    window = profiled(site)
    listener.join(TIMEOUT_S)
    kinds = [event.kind for event in heard]
    assert kinds[-1] == "incident" and "said" in kinds and "window" in kinds
    assert heard[-1].data["id"] == window.incident and heard[-1].data["job"] == JOB
    again = next(client.events(after=heard[-2].id))
    assert again == heard[-1]
    first = next(client.events(after="00000000-7"))
    assert first.data["text"] == "job waves has an agent", "of another coordinator: all that is here"
    site.wait(lambda: not site.chronicle.events._wakers, "listeners to be gone")


def test_more_listeners_than_are_allowed_are_refused(tmp_path: Path) -> None:
    site = Site(tmp_path, web=Web(limits=replace(FAST, most_listeners=1))).start()
    stream = site.client().events(after="x")
    next(stream)
    with pytest.raises(UnavailableError, match="1 others listen already"):
        next(site.client().events(after="x"))
    stream.close()  # type: ignore[attr-defined]
    site.close()


OUTSIDE = [
    ("GET", "/v1/jobs"),
    ("GET", "/v1/incidents"),
    ("GET", "/v1/events"),
    ("GET", "/v1/audit"),
    ("GET", "/v1/openapi.json"),
    ("GET", "/nowhere"),
    ("POST", "/v1/jobs/waves/windows"),
    ("DELETE", "/v1/jobs/waves/windows/w-000000000000"),
    ("POST", "/v1/incidents/000000000000/confirm"),
    ("PUT", "/v1/jobs/waves/pacing"),
]


@pytest.mark.parametrize(("method", "path"), OUTSIDE)
@pytest.mark.parametrize("token", [None, "", "eroica-wrong", "read ", "\u00e9" * 40])
def test_who_has_no_token_that_is_known_learns_and_changes_nothing(
    shared: Site, method: str, path: str, token: str | None
) -> None:
    answer = raw(shared, method, path, token=token)
    assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert answer.why == "no token that is known; take one from a token file of eroica serve"


def test_a_scope_that_is_too_small_is_refused(shared: Site) -> None:
    incident = shared.client("read").incidents().incidents[0].id
    for method, path in (
        ("POST", f"/v1/jobs/{JOB}/windows"),
        ("DELETE", f"/v1/jobs/{JOB}/windows/w-000000000000"),
        ("POST", f"/v1/incidents/{incident}/confirm"),
        ("PUT", "/v1/jobs"),
        ("PUT", f"/v1/jobs/{JOB}/pacing"),
    ):
        answer = raw(shared, method, path, token="read", body=b"{}", Content_Type="application/json")
        assert answer.status == 403 and answer.why == "this needs a token of scope act"
    for token in ("read", "act"):
        answer = raw(shared, "GET", "/v1/audit", token=token)
        assert answer.status == 403 and answer.why == "this needs a token of scope admin"
    assert len(shared.incidents) == 1 and shared.client().seen_before(incident).confirmed is None


TRICKS = [
    "/v1/jobs/../../etc/passwd",
    "/v1/jobs/..%2f..%2fetc%2fpasswd",
    "/v1/jobs/%2e%2e",
    "/v1/jobs/a%00b",
    "/v1/jobs/" + "a" * 101,
    "/v1/jobs/waves/",
    "/v1//jobs",
    "//v1/jobs",
    "/v1/incidents/../eroica.db",
    "/v1/incidents/%2e%2e%2feroica.db",
    "/v1/incidents/0123456789AB",
    "/v1/incidents/'%20OR%201=1--",
    "/v1/jobs/waves/windows/w-0'",
    "/v1/%61udit/../jobs",
    "/state/act.token",
    "/v1/jobs/%F0%9F%92%A9",
    "/v1/jobs/%ff",
]


@pytest.mark.parametrize("path", TRICKS)
def test_paths_that_are_tricks_name_nothing(shared: Site, path: str) -> None:
    answer = raw(shared, "GET", path, token="admin")
    assert answer.status in (404, 422) and len(answer.why) < 300 and "passwd" not in answer.why


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=1000000",
        "limit=x",
        "cursor=-1",
        "cursor=99999999999999999999",
        "since=yesterday",
        "since=" + "1" * 50,
        "kind=" + "x" * 30,
        "job=" + "x" * 200,
        "since=2026-05-01T00:00:00%2B99:00",
        "since=9999-12-31T23:59:59-23:59",
    ],
)
def test_malformed_questions_are_refused_in_a_sentence(shared: Site, query: str) -> None:
    answer = raw(shared, "GET", f"/v1/incidents?{query}")
    assert answer.status in (200, 422)
    if answer.status == 422:
        assert answer.why
    else:  # as good a time as any
        assert json.loads(answer.body)["incidents"] == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"cause": 1}',
        b'{"cause": "gremlins"}',
        b'{"cause": "host_gc", "note": ["x"]}',
        b'{"cause": "host_gc", "note": "' + b"x" * 3000 + b'"}',
        b"\xff\xfe",
        b"[" * 10_000,
        b'{"cause": "host_gc", "cause": null}',
    ],
)
def test_malformed_bodies_are_refused_in_a_sentence(shared: Site, body: bytes) -> None:
    incident = shared.client().incidents().incidents[0].id
    answer = raw(shared, "POST", f"/v1/incidents/{incident}/confirm", body=body, Content_Type="application/json")
    assert answer.status in (400, 422) and len(answer.why) < 800
    assert shared.client().seen_before(incident).confirmed is None


def test_a_body_that_is_too_large_is_refused_whatever_it_says_of_its_size(shared: Site) -> None:
    incident = shared.client().incidents().incidents[0].id
    path, large = f"/v1/incidents/{incident}/confirm", b" " * (17 << 10)
    assert raw(shared, "POST", path, body=large).status == 413
    assert raw(shared, "POST", path, body=b"{}", Content_Length="999999999999999999999").status in (400, 413)
    chunk = b"%x\r\n%s\r\n" % (len(large), large) + b"0\r\n\r\n"
    assert raw(shared, "POST", path, body=chunk, Transfer_Encoding="chunked").status == 413
    assert raw(shared, "GET", "/v1/jobs?" + "x" * 5000).status == 414
    assert raw(shared, "GET", "/v1/jobs", X_Long="x" * 50_000).status == 431
    assert raw(shared, "GET", "/v1/jobs").status == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1:1", "127.0.0.1.evil.example", ""])
def test_a_host_header_that_names_somebody_else_is_refused(shared: Site, host: str) -> None:
    answer = raw(shared, "GET", "/v1/jobs", Host=host)
    assert answer.status == 421 and "Host header" in answer.why
    assert raw(shared, "GET", "/healthz", token=None, Host=host).status == 421


def test_names_of_this_host_are_taken_with_the_port_or_without(shared: Site) -> None:
    port = shared.server.url.rpartition(":")[2]
    for host in ("127.0.0.1", f"127.0.0.1:{port}", f"localhost:{port}", "LOCALHOST"):
        assert raw(shared, "GET", "/v1/jobs", Host=host).status == 200
    assert is_host("[::1]:80", frozenset({"::1"}), 80) and not is_host("[::1]:81", frozenset({"::1"}), 80)


def test_too_many_requests_are_refused_by_holder_and_by_address(tmp_path: Path) -> None:
    limits = Limits(reads=Rate(3, 1e-9), acts=Rate(1, 1e-9), strangers=Rate(2, 1e-9))
    site = Site(tmp_path, web=Web(limits=limits)).start(with_job=False)
    statuses = [raw(site, "GET", "/v1/jobs", token="read").status for _ in range(5)]
    assert statuses == [200, 200, 200, 429, 429]
    assert [raw(site, "GET", "/v1/jobs", token="bad").status for _ in range(4)] == [401, 401, 429, 429]
    answer = raw(site, "GET", "/v1/jobs", token="bad")
    assert answer.why.startswith("too many requests without a token") and answer.headers["retry-after"]
    assert [raw(site, "POST", "/v1/jobs/waves/windows").status for _ in range(2)] == [404, 429]
    assert raw(site, "GET", "/v1/jobs", token="admin").status == 200, "others are not held up"
    site.close()


def test_a_meter_refills_and_forgets_who_was_not_seen_for_longest() -> None:
    meter = Meter(Rate(2, 1))
    assert [meter.allows("a", now_s) for now_s in (0, 0, 0, 0.5, 1.5, 1.6, 100, 100, 100)] == [
        True, True, False, False, True, False, True, True, False,
    ]  # fmt: skip
    for number in range(5000):
        meter.allows(str(number), 100)
    assert meter.allows("a", 100) and len(meter._left) <= 4096


def test_acts_and_refusals_are_in_the_audit_log_each_with_who_and_whence_and_no_secret(site: Site) -> None:
    incident = profiled(site).incident
    assert incident is not None
    site.client().confirm(incident, "host_gc")
    for _ in range(20):
        raw(site, "GET", "/v1/jobs", token="eroica-wrong")
    raw(site, "POST", f"/v1/jobs/{JOB}/windows", token="read")
    raw(site, "POST", "/v1/jobs/tides/windows")
    site.kept()
    log = site.client("admin").audit()
    made = [(entry.who, entry.act, entry.target, entry.outcome.partition(" ")[0]) for entry in reversed(log)]
    assert made == [
        ("act", "start_window", f"/v1/jobs/{JOB}/windows", "201"),
        ("act", "confirm", f"/v1/incidents/{incident}/confirm", "201"),
        ("", "GET", "/v1/jobs", "401"),
        ("read", "POST", f"/v1/jobs/{JOB}/windows", "403"),
        ("act", "start_window", "/v1/jobs/tides/windows", "404"),
    ]
    assert {entry.address for entry in log} == {"127.0.0.1"}
    site.wait(lambda: any("refused over HTTP, from 127.0.0.1: 401" in text for text in site.said), "a sentence")
    assert sum("401" in text for text in site.said) == 1, "twenty times the same is said once"
    shown = json.dumps([str(log), site.said, [str(event) for _, event in site.chronicle.events.after(0)]])
    assert not any(file.token in shown for file in site.server.files.values()) and "eroica-wrong" not in shown
    page = site.client("admin").audit(cursor=log[1].number, limit=2)
    assert page == log[2:4]


def test_tokens_are_their_owners_alone_and_outlive_the_coordinator(tmp_path: Path) -> None:
    first = Site(tmp_path, web=Web(tokens={"alice": "act"})).start(with_job=False)
    files = sorted(first.state.glob("*.token"))
    assert [file.name for file in files] == ["act.token", "admin.token", "alice.token", "read.token"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert len({load_token(file).token for file in files}) == 4
    first.close()
    second = Site(tmp_path, web=Web(tokens={"alice": "act"})).start(with_job=False)
    assert {name: file.token for name, file in second.server.files.items()} == {
        name: file.token for name, file in first.server.files.items()
    }
    assert second.client("alice").jobs() == [] and "token" not in repr(second.server.files["alice"]).split("=")
    second.close()
    for name, scope in (("alice", "root"), ("../alice", "act"), ("read", "admin")):
        with pytest.raises(UserError, match="names no token"):
            Site(tmp_path, web=Web(tokens={name: scope})).start(with_job=False)


def test_without_a_store_the_running_jobs_are_shown_and_the_rest_is_refused_for_now(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    site = Site(tmp_path, web=Web(limits=FAST), store=str(tmp_path / "store")).start()
    client = site.client()
    assert [job.name for job in client.jobs()] == [JOB] and client.job(JOB).num_alive == 8
    asked = client.start_window(JOB)
    site.wait(lambda: client.window(JOB, asked.id).is_over, "a window")
    assert client.window(JOB, asked.id).state == "done" and len(site.incidents) == 1
    with pytest.raises(UnavailableError, match=r"the store .* cannot be written"):
        client.incidents()
    site.close()
    assert sum("the coordinator goes on" in text for text in site.said) == 1


def test_a_coordinator_that_makes_no_rounds_is_said_to_be_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eroica.desk.PATIENCE_S", 0.05)
    site = Site(tmp_path).start(with_job=False)
    assert raw(site, "GET", "/healthz", token=None).status == 200
    site.attends = False
    site.wait(lambda: raw(site, "GET", "/v1/jobs").status == 503, "a refusal")
    assert "busy" in raw(site, "GET", "/v1/jobs").why
    monkeypatch.setattr("eroica.api.STALE_S", -1.0)
    assert raw(site, "GET", "/healthz", token=None).status == 503
    site.attends = True
    site.wait(lambda: raw(site, "GET", "/v1/jobs").status == 200, "an answer")
    site.close()


def test_the_schema_names_every_question_and_no_answer_may_be_kept_or_framed(shared: Site) -> None:
    answer = raw(shared, "GET", "/v1/openapi.json", token="read")
    schema = json.loads(answer.body)
    assert schema["info"] == {"title": "eroica", "summary": schema["info"]["summary"], "version": __version__}
    assert {path for path in schema["paths"]} >= {
        "/v1/jobs/{job}/ranks", "/v1/incidents/{id}/seen-before", "/v1/events", "/v1/jobs/{job}/windows/{id}",
        "/v1/jobs/{job}/pacing",
    }  # fmt: skip
    assert answer.headers["cache-control"] == "no-store" and answer.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in answer.headers["content-security-policy"] and "server" not in answer.headers
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert raw(shared, "GET", path).status == 404


def test_off_loopback_it_does_not_start_without_a_certificate(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tokens would cross the network in the clear"):
        Web(host="0.0.0.0")
    with pytest.raises(UserError, match="belong together"):
        Web(certificate=tmp_path / "x")
    (tmp_path / "x").write_text("no certificate")
    with pytest.raises(UserError, match="cannot start"):
        Site(tmp_path, web=Web(certificate=tmp_path / "x", key=tmp_path / "x")).start(with_job=False)


def test_with_a_certificate_it_is_believed_by_who_holds_it_and_speaks_to_nobody_in_the_clear(tmp_path: Path) -> None:
    for name in ("api", "other"):
        certify("127.0.0.1", tmp_path / f"{name}.pem", tmp_path / f"{name}.key")
    web = Web(certificate=tmp_path / "api.pem", key=tmp_path / "api.key", limits=FAST)
    site = Site(tmp_path, web=web).start(with_job=False)
    file = site.server.files["read"]
    assert file.url.startswith("https://127.0.0.1:") and site.client("read").jobs() == []
    for ca in ("", (tmp_path / "other.pem").read_text()):
        with pytest.raises(UnavailableError, match="certificate"):
            Client(file.url, file.token, ca).jobs()
    with pytest.raises(UnavailableError, match="nobody answers"):
        Client(file.url.replace("https", "http"), file.token).jobs()
    with pytest.raises(UserError, match=r"certificates .* cannot be used"):
        Client(file.url, file.token, "no certificate")
    site.close()


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    site = Site(tmp_path).start(with_job=False)
    port = int(site.server.url.rpartition(":")[2])
    with pytest.raises(UserError, match=f"cannot listen at 127.0.0.1:{port}"):
        Site(tmp_path, web=Web(port=port)).start(with_job=False)
    site.close()


def test_a_client_finds_its_coordinator_by_file_url_or_home(tmp_path: Path) -> None:
    site = Site(tmp_path).start(with_job=False)
    act = site.state / "act.token"
    token = load_token(act).token
    ways: list[tuple[dict[str, str], str]] = [
        ({}, str(act)),
        ({"EROICA_API": str(act)}, ""),
        ({"EROICA_API": site.server.url, "EROICA_TOKEN": token}, ""),
        ({"EROICA_TOKEN": str(act), "EROICA_API": "http://127.0.0.1:1"}, site.server.url),
    ]
    home = tmp_path / "home" / ".eroica"
    home.mkdir(parents=True)
    os.symlink(site.state, home / "serve")
    for environ, api in [*ways, ({"HOME": str(tmp_path / "home")}, "")]:
        assert find_client(environ, api).jobs() == []
    site.close()
    with pytest.raises(UnavailableError, match=r"nobody answers at http://127.0.0.1:\d+ .*is eroica serve running"):
        find_client({}, str(act)).jobs()


def test_a_client_says_what_is_wrong_with_its_address_or_token(tmp_path: Path) -> None:
    bad = tmp_path / "bad.token"
    TokenFile(url="http://127.0.0.1:1", name="x", scope="read", token="t").save(bad)
    bad.chmod(0o644)
    (tmp_path / "other.token").write_text("{}")
    (tmp_path / "other.token").chmod(0o600)
    cases = [
        ({"HOME": str(tmp_path)}, "", "no coordinator is known here"),
        ({}, str(bad), "chmod 600"),
        ({}, str(tmp_path / "other.token"), "this is no token"),
        ({}, str(tmp_path / "none.token"), "cannot be read"),
        ({}, "http://127.0.0.1:1", "needs a token"),
        ({"EROICA_TOKEN": "t"}, "http://10.0.0.7:1", "not encrypted; write https://"),
        ({"EROICA_TOKEN": "t"}, "ftp://10.0.0.7", "is no address"),
        ({"EROICA_TOKEN": "t"}, "http://127.0.0.1:x", "is no address"),
    ]
    for environ, api, why in cases:
        with pytest.raises(UserError, match=why):
            find_client(environ, api)


def test_a_token_that_is_not_known_and_a_server_that_is_none_of_ours_are_told_apart(tmp_path: Path) -> None:
    site = Site(tmp_path).start(with_job=False)
    with pytest.raises(UserError, match="does not know this token"):
        Client(site.server.url, "eroica-wrong").jobs()
    with pytest.raises(UnavailableError, match="nobody answers"):
        Client(site.server.url, "a\r\nX-Evil: 1").jobs()
    site.close()
    import socketserver

    class Other(socketserver.StreamRequestHandler):
        said = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"

        def handle(self) -> None:
            self.rfile.readline()
            self.wfile.write(self.said)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        client = Client(f"http://127.0.0.1:{server.server_address[1]}", "t")
        with pytest.raises(DataError, match="answers as no coordinator does"):
            client.jobs()
        Other.said = b"HTTP/1.1 302 Found\r\nLocation: http://evil.example/\r\nContent-Length: 0\r\n\r\n"
        with pytest.raises(DataError, match=r"answers as no coordinator does \(status 302\)"):
            client.jobs()
        Other.said = b"SSH-2.0-OpenSSH_9\r\n"
        with pytest.raises(UnavailableError, match="nobody answers"):
            client.jobs()
        server.shutdown()


@pytest.mark.full
def test_requests_made_up_from_the_schema_find_no_fault(shared: Site) -> None:
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    program = shutil.which("schemathesis", path=path)
    assert program is not None, "pip install '.[full]'"
    options = [
        "--header",
        f"Authorization: Bearer {shared.server.files['admin'].token}",
        "--exclude-path",
        "/v1/events",
    ]
    options += ["--max-examples", "40", "--seed", "1", "--generation-database", "none", "--no-color"]
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    checks += ",response_headers_conformance,ignored_auth"
    url = f"{shared.server.url}/v1/openapi.json"
    done = subprocess.run(
        [program, "run", url, "--checks", checks, *options],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=shared.folder,  # it leaves a cache
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    paths = json.loads(raw(shared, "GET", "/v1/openapi.json").body)["paths"]
    assert f"Tested: {sum(map(len, paths.values())) - 1}" in done.stdout, done.stdout[-2000:]
    assert not any("a fault in the HTTP API" in text for text in shared.said), shared.said


def test_an_answer_of_a_newer_coordinator_is_read_without_what_is_new() -> None:
    import msgspec

    row = msgspec.convert(
        {"id": "x", "number": 1, "job": "j", "created": "", "kind": "slow", "trigger": "", "scope": "rank"}
        | {"cause": "host_gc", "ranks": "1", "hosts": [], "confidence": "", "summary": "", "colour": "red"},
        Incident,
    )
    assert row.cause == "host_gc" and row.confirmed is None


def test_what_ends_the_loop_ends_it_and_not_only_the_call_in_which_it_came() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    desk = Desk()
    with ThreadPoolExecutor() as others:
        asked = others.submit(desk.call, interrupted)
        with pytest.raises(KeyboardInterrupt):
            while not asked.done():
                select.select([desk.handle], [], [], TIMEOUT_S)
                desk.attend()
        assert isinstance(asked.exception(TIMEOUT_S), KeyboardInterrupt)
    desk.close()


def test_whoever_waits_for_a_call_that_lasts_is_told_so_and_not_of_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eroica.desk.PATIENCE_S", 0.2)
    desk, may_end = Desk(), threading.Event()

    def ask() -> None:
        with pytest.raises(UnavailableError, match="is busy"):
            desk.call(lambda: may_end.wait(TIMEOUT_S))

    with ThreadPoolExecutor() as threads:
        asked = threads.submit(ask)
        select.select([desk.handle], [], [], TIMEOUT_S)
        attended = threads.submit(desk.attend)
        try:
            asked.result(TIMEOUT_S)
        finally:
            may_end.set()
        attended.result(TIMEOUT_S)
    desk.close()
