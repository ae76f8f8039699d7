"""The store: what is kept, found again, seen before, let go, refused; on SQLite, and in the full run on PostgreSQL."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eroica.answers import Audited, Confirmation, Pace, Window
from eroica.codec import read_summary, write_summary
from eroica.errors import DataError, UnavailableError, UserError
from eroica.findings import Diagnosis, Evidence, from_json, to_json
from eroica.fingerprint import fingerprint
from eroica.keeping import Keeper
from eroica.store import (
    IncidentTold,
    JobSeen,
    Kept,
    PaceSeen,
    PatternTaken,
    Retention,
    Store,
    WindowClosed,
    address_of,
)
from eroica.tables import confirmations
from tests import handmade, samples

DAY = timedelta(days=1)
START = datetime(2026, 5, 1, tzinfo=UTC)
WAIT_S = 20.0
FOR_EVER = Retention(days=1e5)
"""A keeper prunes by the real time, to which these tests' times are old."""


def at(days: float) -> str:
    return (START + days * DAY).isoformat()


def told(diagnosis: Diagnosis, days: float, job: str = "waves") -> IncidentTold:
    made = replace(diagnosis, created=at(days))
    return IncidentTold(id=str(to_json(made)["id"]), job=job, diagnosis=made, detail=None, at=at(days))


def act(days: float = 0.0) -> Audited:
    return Audited(at=at(days), who="act", address="127.0.0.1", act="confirm", target="x", outcome="done")


@contextmanager
def postgres() -> Iterator[str]:
    """A server of the test's own, behind a socket in a folder of its own, as a user without rights."""
    folder = Path(tempfile.mkdtemp(prefix="eroica-postgres-"))
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    bin_ = programs[-1] if programs else Path(shutil.which("initdb") or "/usr/bin/initdb").parent
    user = "nobody" if os.getuid() == 0 else None
    if user is not None:
        shutil.chown(folder, user)

    def call(*command: str) -> None:
        subprocess.run(command, check=True, user=user, capture_output=True, cwd=folder)

    data = folder / "data"
    call(str(bin_ / "initdb"), "-D", str(data), "-A", "trust", "-U", "eroica", "-E", "UTF8", "--no-sync")
    control = [str(bin_ / "pg_ctl"), "-D", str(data), "-w"]
    call(*control, "-l", str(folder / "log"), "-o", f"-c listen_addresses= -k {folder} -F", "start")
    try:
        yield f"postgresql://eroica@/postgres?host={folder}"
    finally:
        call(*control, "-m", "immediate", "stop")
        shutil.rmtree(folder)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.full)], scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "sqlite":
        yield ""
    else:
        with postgres() as url:
            yield url


@pytest.mark.full
def test_no_statement_waits_without_end_unless_the_address_says_so() -> None:
    import sqlalchemy as sa

    with postgres() as url:
        for more, told in (("", "2min"), ("&options=-c%20statement_timeout%3D0", "0")):
            with closing(Store(url + more)) as store, store._engine.connect() as connection:
                assert connection.scalar(sa.text("SHOW statement_timeout")) == told


@pytest.fixture
def where(server: str, tmp_path: Path) -> str:
    """Of an empty store."""
    if not server:
        return str(tmp_path / "eroica.db")
    import sqlalchemy as sa

    from eroica.tables import metadata

    engine = sa.create_engine(address_of(server))
    metadata.drop_all(engine)
    engine.dispose()
    return server


@pytest.fixture
def store(where: str) -> Iterator[Store]:
    opened = Store(where)
    yield opened
    opened.close()


SLOW, _ = samples.slow_input()
GC, _ = samples.rotating_gc()


def test_an_incident_is_found_again_whole_with_its_numbers(store: Store) -> None:
    diagnosis, detail = samples.slow_input()
    diagnosis = replace(diagnosis, created=at(0))
    store.write([JobSeen(job="waves", at=at(0)), replace(told(diagnosis, 0), detail=detail)])
    (incident,) = store.incidents().incidents
    plain = to_json(diagnosis)
    assert (incident.id, incident.cause, incident.ranks, incident.job) == (plain["id"], "input_pipeline", "3", "waves")
    kept = store.diagnosis(incident.id)
    assert kept is not None and json.loads(kept) == plain and to_json(from_json(json.loads(kept))) == plain
    numbers = store.detail(incident.id)
    assert numbers is not None and json.loads(numbers)["ranks"] == list(range(8)) and incident.has_detail
    assert [(job.name, job.num_incidents, job.is_live) for job in store.jobs()] == [("waves", 1, False)]


def test_what_comes_twice_is_kept_once_and_the_same_at_another_time_is_another(store: Store) -> None:
    store.write([told(SLOW, 0), told(SLOW, 0)])
    store.write([told(SLOW, 0)])
    store.write([told(SLOW, 1)])
    first = str(to_json(SLOW)["id"])
    store.write([replace(told(SLOW, 2), id=f"{first}-2"), replace(told(SLOW, 3), id=f"{first}-7")])
    ids = [incident.id for incident in store.incidents().incidents]
    assert ids == [f"{first}-7", f"{first}-3", f"{first}-2", first]


def test_incidents_come_in_pages_and_by_job_kind_and_time(store: Store) -> None:
    store.write([told(SLOW, day, "waves" if day % 2 else "tides") for day in range(7)])
    store.write([told(samples.no_data(), 7)])
    seen: list[str] = []
    cursor, pages = None, 0
    while pages == 0 or cursor is not None:
        page = store.incidents(cursor=cursor, limit=3)
        seen += [incident.created for incident in page.incidents]
        cursor, pages = page.next, pages + 1
    assert seen == [at(day) for day in range(7, -1, -1)] and pages == 3
    assert {incident.job for incident in store.incidents(job="tides").incidents} == {"tides"}
    assert len(store.incidents(kind="no_data").incidents) == 1
    assert [incident.created for incident in store.incidents(since=at(5.5)).incidents] == [at(7), at(6)]
    assert not store.incidents(job="' OR 1=1 --").incidents
    with pytest.raises(DataError, match="is no time"):
        store.incidents(since="yesterday")


def test_an_incident_like_earlier_ones_tells_them_and_what_people_found(store: Store) -> None:
    store.write([told(SLOW, 0, "tides"), told(GC, 1), told(SLOW, 2), told(SLOW, 3)])
    newest, second, other, first = store.incidents().incidents
    assert store.confirm(first.id, Confirmation(cause="host_memory", note="wrong", who="act", at=at(4)))
    assert store.confirm(first.id, Confirmation(cause="checkpoint_io", note="NFS", who="act", at=at(5)))
    seen = store.seen_before(newest.id)
    assert seen is not None and seen.num == 2 and [like.id for like in seen.incidents] == [second.id, first.id]
    assert seen.causes == {"checkpoint_io": 1}, "the last word counts"
    assert seen.incidents[1].confirmed == Confirmation(cause="checkpoint_io", note="NFS", who="act", at=at(5))
    before = store.seen_before(other.id)
    assert before is not None and before.num == 0
    assert store.seen_before("0" * 12) is None


def test_a_confirmation_of_nothing_or_by_no_cause_changes_nothing(store: Store) -> None:
    store.write([told(SLOW, 0)])
    (incident,) = store.incidents().incidents
    assert not store.confirm("0" * 12, Confirmation(cause="host_gc", note="", who="act", at=at(1)))
    with pytest.raises(DataError, match="is no cause"):
        store.confirm(incident.id, Confirmation(cause="gremlins", note="", who="act", at=at(1)))
    assert store.incidents().incidents == [incident]


def test_windows_patterns_and_the_course_of_the_pace_come_back_as_they_were(store: Store) -> None:
    data = write_summary(handmade.summary(3, handmade.Rank()))
    window = WindowClosed(
        job="waves",
        session="s",
        number=7,
        trigger="slowdown",
        at=at(0),
        first_step=126,
        num_steps=20,
        num_ranks=4,
        num_reported=1,
        missing="rank 2 has ended",
        incident="",
    )
    pattern = PatternTaken(job="waves", session="s", number=7, rank=3, summary=data, at=at(0))
    paces = [
        Pace(at=at(day), num_iterations=day, iteration_s=0.1, slowest_s=None, slowest_rank=None, num_alive=4)
        for day in range(3)
    ]
    store.write([window, pattern, pattern, *(PaceSeen(job="waves", pace=pace) for pace in paces)])
    assert store.windows("waves") == [window] and store.paces("waves") == paces
    assert store.paces("waves", since=at(2)) == paces[2:] and store.paces("waves", limit=1) == paces[2:]
    kept = store.patterns("waves", "s", 7)
    assert kept == {3: data} and read_summary(kept[3]).rank == 3


def test_a_window_that_was_asked_for_is_kept_as_it_stood_last(store: Store) -> None:
    asked = Window(id="w-1", job="waves", state="waiting", asked_at=at(0), asked_by="act")
    done = replace(asked, state="done", incident="0123456789ab")
    store.write([asked, done])
    assert store.asked("waves", "w-1") == done and store.asked("tides", "w-1") is None


def test_what_is_too_old_or_too_much_is_let_go_and_the_newest_stays(store: Store) -> None:
    store.write([told(SLOW, day) for day in range(10)])
    for incident in store.incidents().incidents:
        store.confirm(incident.id, Confirmation(cause="host_gc", note="", who="act", at=at(9)))
    store.write([act(day) for day in range(10)])
    pace = Pace(at="", num_iterations=1, iteration_s=None, slowest_s=None, slowest_rank=None, num_alive=1)
    store.write([PaceSeen(job="waves", pace=replace(pace, at=at(day))) for day in range(10)])
    store.write(
        [
            PatternTaken(job="waves", session="s", number=number, rank=rank, summary=bytes(100), at=at(number))
            for number in range(4, 10)
            for rank in range(2)
        ]
    )
    now_s = (START + 10 * DAY).timestamp()
    some = Retention(days=7, most_incidents=5, most_paces=4, most_pattern_windows=3, most_pattern_bytes=10_000)
    store.prune(some, now_s)
    assert [incident.created for incident in store.incidents().incidents] == [at(day) for day in range(9, 4, -1)]
    assert [pace.at for pace in store.paces("waves")] == [at(day) for day in range(6, 10)]
    assert [number for number in range(10) if store.patterns("waves", "s", number)] == [7, 8, 9]
    store.prune(replace(some, most_pattern_bytes=450, most_audits=2), now_s)
    assert [number for number in range(10) if store.patterns("waves", "s", number)] == [8, 9]
    assert [audit.at for audit in store.audits()] == [at(9), at(8)]
    assert [audit.at for audit in store.audits(cursor=store.audits()[0].number)] == [at(8)]
    store.prune(replace(some, days=0.5), now_s)
    assert not store.incidents().incidents and not store.audits()


def test_windows_of_a_busy_job_that_are_let_go_leave_those_of_the_others_their_room(store: Store) -> None:
    store.write(
        [PatternTaken(job="busy", session="s", number=n, rank=0, summary=bytes(100), at=at(n)) for n in range(1, 10)]
    )
    store.write([PatternTaken(job="calm", session="s", number=1, rank=0, summary=bytes(100), at=at(0))])
    some = Retention(days=1e5, most_pattern_windows=3, most_pattern_bytes=400)
    store.prune(some, (START + 10 * DAY).timestamp())
    assert [n for n in range(1, 10) if store.patterns("busy", "s", n)] == [7, 8, 9]
    assert store.patterns("calm", "s", 1) == {0: bytes(100)}


def test_of_what_people_said_of_an_incident_the_last_word_stays(store: Store, where: str) -> None:
    import sqlalchemy as sa

    store.write([told(SLOW, 0), told(GC, 1)])
    for incident in store.incidents().incidents:
        for cause in ("host_gc", "unknown", "checkpoint_io"):
            store.confirm(incident.id, Confirmation(cause=cause, note="", who="act", at=at(2)))
    store.prune(FOR_EVER, (START + 3 * DAY).timestamp())
    said = [incident.confirmed for incident in store.incidents().incidents]
    assert [one.cause for one in said if one is not None] == ["checkpoint_io"] * 2
    engine = sa.create_engine(address_of(where))
    with engine.connect() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(confirmations)) == 2
    engine.dispose()


def test_a_name_that_the_database_cannot_hold_is_refused_or_finds_nothing(store: Store) -> None:
    """SQLite compares it; PostgreSQL has no text with a zero byte."""
    with contextlib.suppress(DataError):
        assert not store.incidents(job="\x00").incidents


def test_text_that_a_database_dislikes_is_kept_as_the_job_wrote_it(store: Store) -> None:
    nasty = "\x00'; DROP TABLE eroica_incidents; --\ud800\x1b[31m\u202e"
    diagnosis, _ = samples.hostile(nasty)
    store.write([told(replace(diagnosis, verdict=replace(diagnosis.verdict, summary=nasty, hosts=(nasty,))), 0)])
    (incident,) = store.incidents().incidents
    assert "\x00" not in incident.summary and "\x1b" not in incident.summary
    kept = store.diagnosis(incident.id)
    assert kept is not None and json.loads(kept)["verdict"]["summary"] == nasty


def test_a_store_of_a_newer_version_is_refused_in_one_sentence(where: str) -> None:
    import sqlalchemy as sa

    Store(where).close()
    engine = sa.create_engine(address_of(where))
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE eroica_meta SET value = '2' WHERE name = 'schema'"))
    engine.dispose()
    with pytest.raises(DataError, match=r"has schema 2, and this eroica knows 1; use a newer eroica") as error:
        Store(where)
    assert "\n" not in str(error.value)


def test_two_that_write_at_once_lose_nothing(where: str) -> None:
    import threading

    stores = [Store(where), Store(where)]

    def write(store: Store, job: str) -> None:
        for day in range(20):
            store.write([told(SLOW, day + (0.5 if job == "tides" else 0), job), JobSeen(job=job, at=at(day))])

    threads = [threading.Thread(target=write, args=pair) for pair in zip(stores, ("waves", "tides"), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = stores[0].incidents(limit=200).incidents
    for store in stores:
        store.close()
    assert len(found) == 40 and len({incident.id for incident in found}) == 40


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "new" / "eroica.db"))
    store.write([told(SLOW, 0)])
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").iterdir()]
    store.close()
    assert modes and set(modes) == {0o600} and stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("mysql://me@there/db", "is no database for the store"),
        ("postgresql://there:port/db", "cannot be read"),
        ("sqlite://", "is no database for the store"),
    ],
)
def test_an_address_of_no_store_is_refused(where: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        Store(where)


def test_a_server_that_does_not_answer_is_named_without_its_secret(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="cannot be written") as error:
        Store(f"postgresql://me:hunter2@/db?host={tmp_path}")
    assert "hunter2" not in str(error.value) and "\n" not in str(error.value)


def damaged(path: Path) -> None:
    path.write_bytes(b"this is no database, and was none before" * 200)


def unwritable(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("spoil", [damaged, unwritable])
def test_a_store_that_cannot_be_used_is_said_once_and_what_waits_is_kept_when_it_can(
    spoil: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eroica.keeping.RETRY_S", 0.01)
    path, said = tmp_path / "eroica.db", list[str]()
    spoil(path)
    keeper = Keeper(str(path), said.append, FOR_EVER)
    for day in range(50):
        keeper.put(told(SLOW, day))
    with pytest.raises(UnavailableError, match=r"cannot be|is not open"):
        _ = keeper.store
    assert not keeper.flush(0.2)
    keeper.look()
    assert len(said) == 1 and "the coordinator goes on" in said[0] and str(path) in said[0] and "\n" not in said[0]
    path.rmdir() if path.is_dir() else path.unlink()
    assert keeper.flush(WAIT_S)
    assert len(keeper.store.incidents(limit=100).incidents) == 50
    keeper.close()
    assert len(said) == 2 and said[1] == "the store is back"


def test_a_full_disk_is_said_once_and_nothing_is_lost_of_what_had_been_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eroica.keeping.RETRY_S", 0.01)
    path, said = str(tmp_path / "eroica.db"), list[str]()
    keeper = Keeper(path, said.append, FOR_EVER)
    assert keeper.flush(WAIT_S)
    engine = keeper.store._engine
    import sqlalchemy as sa

    def full(connection: sqlite3.Connection, record: object) -> None:
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count={pages}")

    def is_full() -> None:
        # As much room as there is data, for each connection from now on: what SQLite says of a full disk, it says here.
        original = sa.create_engine

        def limited(*args: object, **kwargs: object) -> object:
            made = original(*args, **kwargs)  # type: ignore[call-overload]
            sa.event.listen(made, "connect", full)
            return made

        monkeypatch.setattr("eroica.store.sa.create_engine", limited)

    is_full()
    sa.event.listen(engine, "connect", full)
    engine.dispose()
    for day in range(50):
        keeper.put(told(SLOW, day))
    assert not keeper.flush(0.3)
    keeper.look()
    assert len(said) == 1 and "full" in said[0], said
    monkeypatch.undo()
    monkeypatch.setattr("eroica.keeping.RETRY_S", 0.01)
    assert keeper.flush(WAIT_S) and len(keeper.store.incidents(limit=100).incidents) == 50
    keeper.close()


def test_too_much_that_waits_costs_patterns_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eroica.keeping.RETRY_S", 0.01)
    monkeypatch.setattr("eroica.keeping.MOST_WAITING", 10)
    path, said = tmp_path / "eroica.db", list[str]()
    path.mkdir()
    keeper = Keeper(str(path), said.append, FOR_EVER)
    for rank in range(8):
        keeper.put(PatternTaken(job="waves", session="s", number=1, rank=rank, summary=b"x", at=at(0)))
    for day in range(9):
        keeper.put(told(SLOW, day))
    path.rmdir()
    assert keeper.flush(WAIT_S)
    keeper.look()
    assert len(keeper.store.incidents().incidents) == 9 and len(keeper.store.patterns("waves", "s", 1)) == 1, said
    keeper.close()
    assert any("7 records, patterns first, were too much to wait" in text for text in said), said


def test_one_record_that_the_database_cannot_hold_does_not_keep_the_others_out(tmp_path: Path) -> None:
    said = list[str]()
    keeper = Keeper(str(tmp_path / "eroica.db"), said.append, FOR_EVER)
    keeper.put(JobSeen(job="waves", at="never"))
    keeper.put(told(SLOW, 0))
    assert keeper.flush(WAIT_S) and len(keeper.store.incidents().incidents) == 1
    keeper.close()
    assert len(said) == 1 and "JobSeen" in said[0]


def test_a_store_that_is_lost_between_records_that_are_written_one_by_one_keeps_none_of_them_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eroica.keeping.RETRY_S", 0.01)
    path, said, write, calls = tmp_path / "eroica.db", list[str](), Store.write, list[int]()

    def lost_once(store: Store, records: Sequence[Kept]) -> None:
        calls.append(len(records))
        if calls == [3, 1, 1, 1]:
            raise UnavailableError("the store is away")
        write(store, records)

    monkeypatch.setattr(Store, "write", lost_once)
    path.mkdir()  # until all three wait
    keeper = Keeper(str(path), said.append, FOR_EVER)
    for record in (act(0), JobSeen(job="waves", at="never"), act(1)):
        keeper.put(record)
    path.rmdir()
    assert keeper.flush(WAIT_S)
    assert [audit.at for audit in keeper.store.audits()] == [at(1), at(0)]
    keeper.close()
    assert sum("JobSeen" in text for text in said) == 1


@given(victim=st.integers(0, 1023))
def test_the_same_problem_on_another_rank_has_the_same_fingerprint(victim: int) -> None:
    usual, _ = samples.throttled_gpu(8, victim=5)
    diagnosis, _ = samples.throttled_gpu(8, victim=victim % 8)
    assert fingerprint(diagnosis) == fingerprint(usual) != ""


@given(observed=st.floats(0.01, 10), job=st.text(max_size=20), host=st.text(max_size=20))
def test_a_fingerprint_holds_neither_figures_nor_names_of_jobs_and_hosts(observed: float, job: str, host: str) -> None:
    changed = replace(
        SLOW,
        job=job,
        iteration=replace(SLOW.iteration, observed_s=observed),
        hosts={host: "0-7"},
        verdict=replace(SLOW.verdict, hosts=(host,), summary=f"{observed}"),
        findings=tuple(replace(finding, hosts=(host,)) for finding in SLOW.findings),
    )
    assert fingerprint(changed) == fingerprint(SLOW)


def test_another_line_cause_scope_or_setting_is_another_problem_and_an_unknown_one_like_none() -> None:
    (finding,) = SLOW.findings[:1]
    assert finding.function is not None

    def at_line(place: str) -> Diagnosis:
        assert finding.function is not None
        function = replace(finding.function, user_location=place)
        return replace(SLOW, findings=(replace(finding, function=function),))

    def setting(name: str) -> Diagnosis:
        evidence = {"E1": Evidence("", "environment", {"name": name, "value": "1"})}
        bare = replace(finding, function=None, evidence=("E1",))
        return replace(SLOW, findings=(bare,), evidence=evidence)

    made = [
        at_line("/a/data.py:41"),
        at_line("/a/data.py:42"),
        setting("env.OMP_NUM_THREADS"),
        setting("env.NCCL_ALGO"),
        replace(SLOW, verdict=replace(SLOW.verdict, cause="host_python")),
        replace(SLOW, verdict=replace(SLOW.verdict, scope="group")),
        replace(SLOW, kind="hang"),
    ]
    assert len({fingerprint(one) for one in made}) == len(made)
    assert fingerprint(at_line("/a/data.py:41")) == fingerprint(at_line("/b/data.py:41"))
    assert fingerprint(samples.no_data()) == fingerprint(samples.healthy()[0]) == ""
    unknown = replace(SLOW, findings=(), verdict=replace(SLOW.verdict, cause="unknown"))
    assert fingerprint(unknown) == ""
