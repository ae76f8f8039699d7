"""The tables of the store, one each for what a coordinator keeps; see `store`, which alone reads and writes them.

Columns are there to find rows by; what belongs together stays together, as text or bytes. All names begin with
`eroica_`, since a database may hold other things beside. Times stand twice: as text, as they are shown, and in seconds,
to compare.
"""

from __future__ import annotations

import sqlalchemy as sa

SCHEMA = 1
"""Raised when a newer version writes what an older one would misread. Tables and columns are only ever added within."""

metadata = sa.MetaData()
NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")
"""SQLite counts up by itself in columns of exactly that type."""
meta = sa.Table("eroica_meta", metadata, sa.Column("name", sa.Text, primary_key=True), sa.Column("value", sa.Text))
jobs = sa.Table(
    "eroica_jobs",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("first_seen", sa.Text, nullable=False),
    sa.Column("last_seen", sa.Text, nullable=False),
    sa.Column("last_s", sa.Double, nullable=False),
)
incidents = sa.Table(
    "eroica_incidents",
    metadata,
    sa.Column("number", NUMBER, primary_key=True),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    sa.Column("content", sa.Text, nullable=False),
    sa.Column("created", sa.Text, nullable=False),
    sa.Column("created_s", sa.Double, nullable=False, index=True),
    *(sa.Column(name, sa.Text, nullable=False) for name in ("job", "kind", "trigger", "scope", "cause", "ranks")),
    *(sa.Column(name, sa.Text, nullable=False) for name in ("hosts", "confidence", "summary")),
    sa.Column("fingerprint", sa.Text, nullable=False, index=True),
    sa.Column("diagnosis", sa.Text, nullable=False),
    sa.Column("detail", sa.LargeBinary),
    sa.UniqueConstraint("content", "created"),
    sa.Index("eroica_incidents_of_job", "job", "number"),
    sqlite_autoincrement=True,
)
confirmations = sa.Table(
    "eroica_confirmations",
    metadata,
    sa.Column("number", NUMBER, primary_key=True),
    sa.Column("incident", sa.Text, nullable=False, index=True),
    *(sa.Column(name, sa.Text, nullable=False) for name in ("cause", "note", "who", "at")),
)
windows = sa.Table(
    "eroica_windows",
    metadata,
    *(sa.Column(name, sa.Text, primary_key=True) for name in ("job", "session")),
    sa.Column("number", sa.Integer, primary_key=True),
    *(sa.Column(name, sa.Text, nullable=False) for name in ("trigger", "at", "missing", "incident")),
    sa.Column("at_s", sa.Double, nullable=False, index=True),
    *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("first_step", "num_steps", "num_ranks")),
    sa.Column("num_reported", sa.BigInteger, nullable=False),
)
patterns = sa.Table(
    "eroica_patterns",
    metadata,
    *(sa.Column(name, sa.Text, primary_key=True) for name in ("job", "session")),
    *(sa.Column(name, sa.Integer, primary_key=True) for name in ("number", "rank")),
    sa.Column("at_s", sa.Double, nullable=False),
    sa.Column("summary", sa.LargeBinary, nullable=False),
)
paces = sa.Table(
    "eroica_paces",
    metadata,
    sa.Column("job", sa.Text, primary_key=True),
    sa.Column("at_s", sa.Double, primary_key=True),
    sa.Column("at", sa.Text, nullable=False),
    sa.Column("num_iterations", sa.BigInteger, nullable=False),
    sa.Column("iteration_s", sa.Double),
    sa.Column("slowest_s", sa.Double),
    sa.Column("slowest_rank", sa.Integer),
    sa.Column("num_alive", sa.Integer, nullable=False),
)
asked = sa.Table(
    "eroica_asked",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    *(sa.Column(name, sa.Text, nullable=False) for name in ("job", "state", "asked_at", "asked_by", "why")),
    sa.Column("asked_s", sa.Double, nullable=False),
    sa.Column("incident", sa.Text),
)
audits = sa.Table(
    "eroica_audits",
    metadata,
    sa.Column("number", NUMBER, primary_key=True),
    sa.Column("at_s", sa.Double, nullable=False, index=True),
    *(sa.Column(name, sa.Text, nullable=False) for name in ("at", "who", "address", "act", "target", "outcome")),
    sqlite_autoincrement=True,
)
