"""What a coordinator keeps: jobs, incidents, windows, patterns, the course of the pace, and who did what.

SQLite by default, in one file beside the coordinator's passes; PostgreSQL by URL, for more than one machine's worth.
The same statements for both, without an object mapper. A diagnosis is kept whole, as its JSON; columns beside it are
there to find it by. What is kept is bounded by age and number (`Retention`).

Methods raise UnavailableError, in one sentence, when the database cannot be reached, written or read; nothing here
waits for it to come back. Writing goes by batches of records, each batch as a whole or not at all, and a record that
comes twice is kept once. Used by `keeping`, which writes, and by `desk` and `api`, which read.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.exc import DataError as BadValue

from eroica import tables as t
from eroica.answers import Audited, Confirmation, Incident, Incidents, Job, Pace, SeenBefore, Window
from eroica.errors import DataError, UnavailableError, UserError
from eroica.findings import CAUSES, Detail, Diagnosis, detail_to_json, to_json
from eroica.fingerprint import fingerprint
from eroica.untrusted import clean

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Row

DAY_S = 86_400.0
BUSY_S = 5.0
"""For another writer, or for the server to answer."""
_POSTGRES: Mapping[str, str | int] = {
    **{"connect_timeout": int(BUSY_S), "tcp_user_timeout": int(4 * BUSY_S * 1e3), "keepalives_idle": int(4 * BUSY_S)},
    "options": "-c statement_timeout=120s -c lock_timeout=30s",
}
"""How long a server may take: nothing waits without end for one that hangs or is cut off, if no packet of its host
comes. What the address of the store says goes before."""
MOST_DETAIL_BYTES = 16 << 20
"""Packed; the numbers of a page of some 100,000 ranks. What is larger is left out."""
MOST_PAGE = 200
MOST_LIKE = 20
"""Earlier incidents that are shown as like another one; all are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How much is kept. The oldest goes first."""

    days: float = 180.0
    """For all: a problem that comes back does so within a season."""
    most_incidents: int = 20_000
    most_windows: int = 20_000
    most_paces: int = 8_640
    """Of one job; a day at one in 10 s."""
    most_pattern_windows: int = 20
    """Of one job, with the patterns of their ranks."""
    most_pattern_bytes: int = 1 << 30
    """Of all jobs: 100,000 ranks have some 700 MB in one window."""
    most_audits: int = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSeen:
    """A job is there."""

    job: str
    at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentTold:
    """A diagnosis was told."""

    id: str
    """By which it is known: its own identity, with a number where the same content was told before."""
    job: str
    diagnosis: Diagnosis
    detail: Detail | None
    at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowClosed:
    """A window is over."""

    job: str
    session: str
    """Of the coordinator, since numbers begin anew with each."""
    number: int
    trigger: str
    at: str
    first_step: int
    num_steps: int
    num_ranks: int
    num_reported: int
    missing: str
    """Who gave nothing, and why."""
    incident: str
    """Identity of the diagnosis that was told; "": none was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternTaken:
    """The summary of one rank in a window, as it came (`codec.write_summary`)."""

    job: str
    session: str
    number: int
    rank: int
    summary: bytes
    at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceSeen:
    """How fast a job was at one moment."""

    job: str
    pace: Pace


Kept: TypeAlias = JobSeen | IncidentTold | WindowClosed | PatternTaken | PaceSeen | Audited | Window


def seconds(at: str) -> float:
    """ISO 8601 to seconds since 1970; times without a zone are UTC. Raises DataError."""
    try:
        then = datetime.fromisoformat(at)
        return (then if then.tzinfo is not None else then.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise DataError(f"{clean(at, 60)!r} is no time; write one as 2026-05-31T12:00:00Z") from None


def address_of(where: str) -> sa.URL:
    """A file of SQLite, or the URL of a database. Raises UserError for one that we do not know."""
    if "://" not in where:
        return sa.URL.create("sqlite", database=os.path.abspath(where))
    try:
        url = sa.make_url(where)
    except (ArgumentError, ValueError):
        raise UserError(
            "the address of the store cannot be read; write a file, or postgresql://HOST/DATABASE"
        ) from None
    if url.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        return url.set(drivername="postgresql+psycopg")
    if url.drivername == "sqlite" and url.database and url.database != ":memory:":
        return url
    raise UserError(f"{url.drivername} is no database for the store; write a file, or postgresql://HOST/DATABASE")


class Store:
    """See the module. Opens, or makes, the tables; safe in many threads."""

    def __init__(self, where: str) -> None:
        """`where`: see `address_of`. Raises UserError and UnavailableError; a newer schema is a DataError."""
        url = address_of(where)
        self._is_sqlite = url.drivername == "sqlite"
        self.name = (url.database or "") if self._is_sqlite else url.render_as_string(hide_password=True)
        self._writing = threading.Lock()
        if self._is_sqlite:
            _make_private(Path(self.name))
            self._engine = sa.create_engine(url, connect_args={"timeout": BUSY_S}, hide_parameters=True)
            sa.event.listen(self._engine, "connect", _prepare_sqlite)
        else:
            try:
                limits = {name: value for name, value in _POSTGRES.items() if name not in url.query}
                self._engine = sa.create_engine(url, connect_args=limits, pool_pre_ping=True, hide_parameters=True)
            except ImportError:
                raise UserError("PostgreSQL needs psycopg; pip install 'eroica[postgres]'") from None
        self._insert: Callable[[sa.Table], Any] = sqlite.insert if self._is_sqlite else postgresql.insert
        try:
            with self._begin() as connection:
                t.metadata.create_all(connection)
                self._put(connection, t.meta, {"name": "schema", "value": str(t.SCHEMA)})
                found = connection.scalar(sa.select(t.meta.c.value).where(t.meta.c.name == "schema")) or ""
            if not found.isdecimal() or int(found) > t.SCHEMA:
                raise DataError(
                    f"the store {self.name} has schema {clean(found, 20)}, and this eroica knows {t.SCHEMA}; use a "
                    "newer eroica, or another --store"
                )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of all connections."""
        self._engine.dispose()

    def write(self, records: Sequence[Kept]) -> None:
        """Keep all of them, or none. Raises UnavailableError; DataError or ValueError for one that the database cannot
        hold."""
        with self._begin() as connection:
            self._lock_others_out(connection)
            taken = [_pattern_row(record) for record in records if isinstance(record, PatternTaken)]
            if taken:  # very many come at once, and one statement for all is some ten times as fast
                connection.execute(self._insert(t.patterns).on_conflict_do_nothing(), taken)
            for record in records:
                self._write(connection, record)

    def _write(self, connection: Connection, record: Kept) -> None:
        match record:
            case JobSeen():
                at_s = seconds(record.at)
                row = {"name": record.job, "first_seen": record.at, "last_seen": record.at, "last_s": at_s}
                made = self._insert(t.jobs).values(row)
                newer = {"last_seen": record.at, "last_s": at_s}
                connection.execute(made.on_conflict_do_update(index_elements=["name"], set_=newer))
            case IncidentTold():
                self._write_incident(connection, record)
            case WindowClosed():
                row = {name: getattr(record, name) for name in _names(t.windows, "at_s")}
                row["missing"] = clean(record.missing, 2000)
                self._put(connection, t.windows, row | {"at_s": seconds(record.at)})
            case PaceSeen():
                pace = record.pace
                row = {name: getattr(pace, name) for name in _names(t.paces, "job", "at_s")}
                self._put(connection, t.paces, row | {"job": record.job, "at_s": seconds(pace.at)})
            case Audited():
                connection.execute(sa.insert(t.audits).values(_audit_row(record)))
            case Window():
                row = {name: getattr(record, name) for name in _names(t.asked, "asked_s")}
                made = self._insert(t.asked).values(row | {"asked_s": seconds(record.asked_at)})
                newer = {"state": record.state, "why": record.why, "incident": record.incident}
                connection.execute(made.on_conflict_do_update(index_elements=["id"], set_=newer))

    def _write_incident(self, connection: Connection, told: IncidentTold) -> None:
        plain = to_json(told.diagnosis)
        content, verdict = str(plain["id"]), told.diagnosis.verdict
        created = told.diagnosis.created or told.at
        same = connection.execute(sa.select(t.incidents.c.id, t.incidents.c.created).where(
            t.incidents.c.content == content)).all()  # fmt: skip
        if any(row.created == created for row in same):
            return
        # The same content at another time (a crash has no figures in it) is another incident, and may have been told by
        # an earlier coordinator.
        taken = {row.id for row in same}
        names = (told.id, *(f"{content}-{number}" for number in range(2, len(same) + 3)))
        packed = None
        if told.detail is not None:
            packed = zlib.compress(msgspec.json.encode(detail_to_json(told.detail)), 5)
        row = {
            "id": next(name for name in names if name not in taken),
            "content": content,
            "created": created,
            "created_s": _seconds_or(created, told.at),
            "job": told.job,
            "kind": told.diagnosis.kind,
            "trigger": told.diagnosis.window.trigger,
            "scope": verdict.scope,
            "cause": verdict.cause,
            "ranks": clean(verdict.ranks, 2000),
            "hosts": json.dumps([clean(host, 100) for host in verdict.hosts[:64]]),
            "confidence": verdict.confidence,
            "summary": clean(verdict.summary, 1000),
            "fingerprint": fingerprint(told.diagnosis),
            "diagnosis": json.dumps(plain),
            "detail": packed if packed is not None and len(packed) <= MOST_DETAIL_BYTES else None,
        }
        connection.execute(sa.insert(t.incidents).values(row))

    def _lock_others_out(self, connection: Connection) -> None:
        """Until the end of the transaction, whoever else writes waits: what we look up before we write stays true."""
        mine = sa.update(t.meta).where(t.meta.c.name == "schema").values(value=t.meta.c.value)
        connection.execute(mine)

    def _put(self, connection: Connection, table: sa.Table, row: dict[str, Any]) -> None:
        """Unless it is there."""
        connection.execute(self._insert(table).values(row).on_conflict_do_nothing())

    def jobs(self) -> list[Job]:
        """All that were seen, the last ones first, without what only a running coordinator knows."""
        num = sa.select(sa.func.count()).where(t.incidents.c.job == t.jobs.c.name).scalar_subquery()
        asked = sa.select(t.jobs, num.label("num")).order_by(t.jobs.c.last_s.desc()).limit(1000)
        with self._connect() as connection:
            return [
                Job(name=row.name, first_seen=row.first_seen, last_seen=row.last_seen, num_incidents=row.num)
                for row in connection.execute(asked)
            ]

    def incidents(
        self, *, job: str = "", kind: str = "", since: str = "", cursor: int | None = None, limit: int = 50
    ) -> Incidents:
        """Newest first. `cursor`: of the page before, whose incidents are left out. Raises DataError for `since`."""
        limit = min(max(limit, 1), MOST_PAGE)
        asked = sa.select(*_shown()).order_by(t.incidents.c.number.desc()).limit(limit + 1)
        if job:
            asked = asked.where(t.incidents.c.job == job)
        if kind:
            asked = asked.where(t.incidents.c.kind == kind)
        if since:
            asked = asked.where(t.incidents.c.created_s >= seconds(since))
        if cursor is not None:
            asked = asked.where(t.incidents.c.number < cursor)
        with self._connect() as connection:
            found = _incidents_of(connection, connection.execute(asked).all())
        return Incidents(incidents=found[:limit], next=found[limit - 1].number if len(found) > limit else None)

    def incident(self, id: str) -> Incident | None:
        """One of them; None if there is none of that identity."""
        with self._connect() as connection:
            rows = connection.execute(sa.select(*_shown()).where(t.incidents.c.id == id)).all()
            return next(iter(_incidents_of(connection, rows)), None)

    def diagnosis(self, id: str) -> str | None:
        """Its diagnosis.json."""
        with self._connect() as connection:
            found = connection.scalar(sa.select(t.incidents.c.diagnosis).where(t.incidents.c.id == id))
            return None if found is None else str(found)

    def detail(self, id: str) -> bytes | None:
        """The numbers of its page, as JSON."""
        with self._connect() as connection:
            packed = connection.scalar(sa.select(t.incidents.c.detail).where(t.incidents.c.id == id))
        return None if packed is None else zlib.decompress(packed)

    def seen_before(self, id: str) -> SeenBefore | None:
        """Earlier incidents like it; None if there is none of that identity."""
        with self._connect() as connection:
            rows = connection.execute(sa.select(*_shown()).where(t.incidents.c.id == id)).all()
            if not rows:
                return None
            (this,) = _incidents_of(connection, rows)
            if not this.fingerprint:
                return SeenBefore(num=0, causes={}, incidents=[], confirmed=this.confirmed)
            is_like = sa.and_(t.incidents.c.fingerprint == this.fingerprint, t.incidents.c.number < this.number)
            num = connection.scalar(sa.select(sa.func.count()).select_from(t.incidents).where(is_like)) or 0
            like = sa.select(*_shown()).where(is_like).order_by(t.incidents.c.number.desc()).limit(MOST_LIKE)
            last = sa.select(sa.func.max(t.confirmations.c.number)).group_by(t.confirmations.c.incident)
            causes = connection.execute(
                sa.select(t.confirmations.c.cause, sa.func.count())
                .join(t.incidents, t.incidents.c.id == t.confirmations.c.incident)
                .where(is_like, t.confirmations.c.number.in_(last))
                .group_by(t.confirmations.c.cause)
                .order_by(sa.func.count().desc(), t.confirmations.c.cause)
            ).all()
            found = _incidents_of(connection, connection.execute(like).all())
            counted = {row[0]: row[1] for row in causes}
            return SeenBefore(num=num, causes=counted, incidents=found, confirmed=this.confirmed)

    def confirm(self, id: str, given: Confirmation) -> bool:
        """Keep what a person found; False if there is no such incident."""
        if given.cause not in CAUSES:
            raise DataError(f"{clean(given.cause, 40)!r} is no cause; choose one of {', '.join(CAUSES)}")
        with self._begin() as connection:
            self._lock_others_out(connection)
            if connection.scalar(sa.select(t.incidents.c.number).where(t.incidents.c.id == id)) is None:
                return False
            row = {"incident": id, "cause": given.cause, "note": clean(given.note, 2000), "who": given.who}
            connection.execute(sa.insert(t.confirmations).values(row | {"at": given.at}))
            return True

    def paces(self, job: str, *, since: str = "", limit: int = 1000) -> list[Pace]:
        """The last ones, oldest first."""
        asked = sa.select(t.paces).where(t.paces.c.job == job).order_by(t.paces.c.at_s.desc()).limit(limit)
        if since:
            asked = asked.where(t.paces.c.at_s >= seconds(since))
        with self._connect() as connection:
            names = _names(t.paces, "job", "at_s")
            rows = connection.execute(asked).all()
            return [Pace(**{name: getattr(row, name) for name in names}) for row in reversed(rows)]

    def windows(self, job: str, *, limit: int = 100) -> list[WindowClosed]:
        """The last ones, newest first."""
        asked = sa.select(t.windows).where(t.windows.c.job == job).order_by(t.windows.c.at_s.desc()).limit(limit)
        with self._connect() as connection:
            names = _names(t.windows, "at_s")
            return [WindowClosed(**{name: getattr(row, name) for name in names}) for row in connection.execute(asked)]

    def patterns(self, job: str, session: str, number: int) -> dict[int, bytes]:
        """Rank to its summary in that window."""
        mine = sa.and_(t.patterns.c.job == job, t.patterns.c.session == session, t.patterns.c.number == number)
        with self._connect() as connection:
            return {row.rank: bytes(row.summary) for row in connection.execute(sa.select(t.patterns).where(mine))}

    def asked(self, job: str, id: str) -> Window | None:
        """A window that a person asked for."""
        with self._connect() as connection:
            row = connection.execute(sa.select(t.asked).where(t.asked.c.id == id, t.asked.c.job == job)).one_or_none()
        if row is None:
            return None
        return Window(**{name: getattr(row, name) for name in _names(t.asked, "asked_s")})

    def audits(self, *, cursor: int | None = None, limit: int = 100) -> list[Audited]:
        """The last ones, newest first. `cursor`: only those with a smaller number."""
        asked = sa.select(t.audits).order_by(t.audits.c.number.desc()).limit(min(max(limit, 1), MOST_PAGE))
        if cursor is not None:
            asked = asked.where(t.audits.c.number < cursor)
        with self._connect() as connection:
            names = _names(t.audits, "at_s")
            return [Audited(**{name: getattr(row, name) for name in names}) for row in connection.execute(asked)]

    def prune(self, retention: Retention, now_s: float) -> None:
        """Let go of what is too old or too much."""
        before_s = now_s - retention.days * DAY_S
        with self._begin() as connection:
            ages = ((t.incidents, "created_s"), (t.windows, "at_s"), (t.patterns, "at_s"), (t.paces, "at_s"))
            for table, column in (*ages, (t.asked, "asked_s"), (t.audits, "at_s"), (t.jobs, "last_s")):
                connection.execute(sa.delete(table).where(table.c[column] < before_s))
            _cut(connection, t.incidents, "number", retention.most_incidents)
            _cut(connection, t.windows, "at_s", retention.most_windows)
            _cut(connection, t.asked, "asked_s", retention.most_windows)
            _cut(connection, t.audits, "number", retention.most_audits)
            known = sa.select(t.incidents.c.id)
            connection.execute(sa.delete(t.confirmations).where(t.confirmations.c.incident.not_in(known)))
            last = sa.select(sa.func.max(t.confirmations.c.number)).group_by(t.confirmations.c.incident)
            connection.execute(sa.delete(t.confirmations).where(t.confirmations.c.number.not_in(last)))
            for (job,) in connection.execute(sa.select(t.paces.c.job).distinct()).all():
                _cut(connection, t.paces, "at_s", retention.most_paces, t.paces.c.job == job)
            self._prune_patterns(connection, retention)

    def _prune_patterns(self, connection: Connection, retention: Retention) -> None:
        table = t.patterns
        keys = (table.c.job, table.c.session, table.c.number)
        asked = sa.select(*keys, sa.func.sum(sa.func.length(table.c.summary)).label("size"))
        newest = asked.group_by(*keys).order_by(sa.func.max(table.c.at_s).desc())
        size, of_job = 0, dict[str, int]()
        for row in connection.execute(newest).all():
            of_job[row.job] = of_job.get(row.job, 0) + 1
            is_of_many = of_job[row.job] > retention.most_pattern_windows
            size += 0 if is_of_many else row.size
            if is_of_many or size > retention.most_pattern_bytes:
                mine = (key == value for key, value in zip(keys, row[:3], strict=True))
                connection.execute(sa.delete(table).where(*mine))

    @contextmanager
    def _begin(self) -> Iterator[Connection]:
        """Writing, by one thread at a time."""
        with self._writing, self._errors("written"), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def _connect(self) -> Iterator[Connection]:
        with self._errors("read"), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except (BadValue, IntegrityError) as error:
            raise DataError(f"the store {self.name} cannot hold that ({clean(error.orig, 200)})") from None
        except SQLAlchemyError as error:
            reason = str(error.orig if isinstance(error, DBAPIError) else error).strip().partition("\n")[0]
            raise UnavailableError(f"the store {self.name} cannot be {what} ({clean(reason, 200)})") from None
        except zlib.error as error:
            raise UnavailableError(f"the store {self.name} cannot be {what} ({error})") from None


def _make_private(path: Path) -> None:
    """The file is this user's alone, at no moment anybody else's."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise UnavailableError(f"the store {path} cannot be written ({error.strerror or error})") from None


def _prepare_sqlite(connection: Any, record: object) -> None:
    # Readers do not wait for the writer. NORMAL loses the last moments with the machine's power, not with our process.
    for setting in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {setting}")


def _cut(
    connection: Connection, table: sa.Table, column: str, most: int, where: sa.ColumnElement[bool] | None = None
) -> None:
    """Leave the `most` with the largest values of the column."""
    chosen = table.c[column]
    last = sa.select(chosen).order_by(chosen.desc()).offset(most).limit(1)
    if where is not None:
        last = last.where(where)
    first_out = connection.scalar(last)
    if first_out is not None:
        out = sa.delete(table).where(chosen <= first_out)
        connection.execute(out if where is None else out.where(where))


def _names(table: sa.Table, *without: str) -> list[str]:
    return [column.name for column in table.c if column.name not in without]


def _shown() -> list[sa.ColumnElement[Any]]:
    """Columns of incidents that make a line."""
    bulky = ("diagnosis", "detail", "content", "created_s")
    return [
        *(column for column in t.incidents.c if column.name not in bulky),
        t.incidents.c.detail.is_not(None).label("has_detail"),
    ]


def _incidents_of(connection: Connection, rows: Sequence[Row[Any]]) -> list[Incident]:
    ids = [row.id for row in rows]
    said: dict[str, Confirmation] = {}
    if ids:
        asked = sa.select(t.confirmations).where(t.confirmations.c.incident.in_(ids)).order_by(t.confirmations.c.number)
        for row in connection.execute(asked):
            said[row.incident] = Confirmation(cause=row.cause, note=row.note, who=row.who, at=row.at)
    return [
        Incident(
            **{name: value for name, value in row._mapping.items() if name not in ("hosts", "has_detail")},
            hosts=json.loads(row.hosts),
            has_detail=bool(row.has_detail),
            confirmed=said.get(row.id),
        )
        for row in rows
    ]


def _pattern_row(record: PatternTaken) -> dict[str, Any]:
    row = {name: getattr(record, name) for name in ("job", "session", "number", "rank", "summary")}
    return row | {"at_s": seconds(record.at)}


def _audit_row(record: Audited) -> dict[str, Any]:
    texts = {name: clean(getattr(record, name), 300) for name in ("at", "who", "address", "act", "target", "outcome")}
    return texts | {"at_s": seconds(record.at)}


def _seconds_or(at: str, otherwise: str) -> float:
    try:
        return seconds(at)
    except DataError:
        return seconds(otherwise)
