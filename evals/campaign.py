"""python -m evals faults: harm done to each part of eroica in the middle of a window, and what comes of it.

A training over two hosts has a slow rank (`cluster`). While the window that is taken because of it is open, a part is
killed, its disk filled, its clock set or its network cut, at a moment that is drawn anew in each run. Then the training
must have ended as it does undisturbed: by the same status, with the same weights bit for bit, and as fast; and the
incident must have been told once, neither lost nor doubled, with nothing left behind. Killing a rank is the one harm
that ends the training: there the death must be told, once. Used by the command line alone; its figures are FAULTS.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from bench import machine
from eroica.errors import EroicaError
from evals import namespaces
from evals.cluster import CULPRIT, HOSTS, RANKS_PER_HOST, TRAINING_S, Cluster, Ended, StuckError

REPORT = Path(__file__).with_name("FAULTS.md")
SLOWER = 1.25
"""Times as long as undisturbed runs take, which differ by some per cent; a training that waits for a part of eroica
for a second is beyond it."""
SOON_S = 1.0
"""After which a part that was killed is started again, as a service manager would."""
AWAY_S = 4.0
"""For so long a disk stays full, a database locked, a host cut off."""
MOST_DELAY_S = 1.5
"""From the moment that a window is seen to the harm."""
DISK_MB = 256
HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class Row:
    """One run."""

    fault: str
    note: str
    """What was drawn for it."""
    at: str
    """What the coordinator was doing when it was struck; "" if no window was open any more."""
    status: int
    is_equal: bool
    """The weights are those of the undisturbed run."""
    seconds: float
    told: tuple[str, ...]
    """Incidents of the store."""
    problems: tuple[str, ...]
    """Why it does not count as passed."""


@dataclass
class Stage:
    """What a fault may reach."""

    cluster: Cluster
    draw: random.Random
    database: Database | None
    """The server that the store is on; None: a file."""

    def kill_coordinator(self) -> str:
        """Its bus dies with it."""
        self.cluster.kill("serve")
        time.sleep(SOON_S)
        self.cluster.serve()
        return ""

    def kill_agent(self) -> str:
        """Of either host."""
        host = self.draw.choice(HOSTS)
        self.cluster.kill(host)
        time.sleep(SOON_S)
        self.cluster.watch(host)
        return f"host {host}"

    def kill_bus(self) -> str:
        """The coordinator starts it again."""
        os.kill(self.cluster.bus(), signal.SIGKILL)
        return ""

    def kill_rank(self) -> str:
        """Any but the slow one."""
        rank = self.draw.choice([rank for rank in range(len(HOSTS) * RANKS_PER_HOST) if rank != CULPRIT])
        os.kill(self.cluster.ranks()[rank], signal.SIGKILL)
        return f"rank {rank}"

    def kill_database(self) -> str:
        """PostgreSQL, with all of its processes."""
        assert self.database is not None
        self.database.kill_and_start()
        return ""

    def lock_database(self) -> str:
        """Another program holds the file."""
        with contextlib.closing(sqlite3.connect(self.cluster.folder / "state" / "eroica.db", timeout=5)) as other:
            other.execute("BEGIN EXCLUSIVE")
            time.sleep(AWAY_S)
            other.rollback()
        return ""

    def fill_disk(self) -> str:
        """Store, diagnoses, rings and captures lie on it."""
        folder = self.cluster.folder
        filler = folder / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            for size in (1 << 20, 1 << 12):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))
        left = shutil.disk_usage(folder).free
        time.sleep(AWAY_S)
        filler.unlink()
        return f"{left} bytes free"

    def set_clock(self) -> str:
        """By an hour, on one host, on the coordinator's, or on all."""
        where = self.draw.choice(("", *HOSTS, "all"))
        seconds = self.draw.choice((HOUR_S, -HOUR_S))
        for name in ("", *HOSTS) if where == "all" else (where,):
            _skew_file(self.cluster.folder, name).write_bytes(struct.pack("q", seconds))
        return f"{seconds:+d} s on {where or 'the coordinator'}"

    def cut_host(self) -> str:
        """From the coordinator; the job has a card of its own."""
        host = self.draw.choice(HOSTS)
        self.cluster.site.plug(host, "eth1", is_in=False)
        time.sleep(AWAY_S * 3)
        self.cluster.site.plug(host, "eth1", is_in=True)
        return f"host {host}"


FAULTS: dict[str, tuple[str, Callable[[Stage], str] | None]] = {
    "none": ("undisturbed", None),
    "coordinator": ("kill -9 of `eroica serve`, started again", Stage.kill_coordinator),
    "agent": ("kill -9 of `eroica agent`, started again", Stage.kill_agent),
    "bus": ("kill -9 of the NATS server", Stage.kill_bus),
    "rank": ("kill -9 of a rank", Stage.kill_rank),
    "database": ("kill -9 of PostgreSQL, started again", Stage.kill_database),
    "lock": (f"the SQLite file locked for {AWAY_S:.0f} s", Stage.lock_database),
    "disk": (f"the disk full for {AWAY_S:.0f} s", Stage.fill_disk),
    "clock": ("the wall clock set by an hour", Stage.set_clock),
    "partition": (f"a host cut off for {3 * AWAY_S:.0f} s", Stage.cut_host),
}
ENDS_TRAINING = "rank"


def _skew_file(folder: Path, host: str) -> Path:
    return folder / f"skew-{host or 'coordinator'}"


class Campaign:
    """Runs, one after the other, with what they share: hosts, a shim for clocks, a database server."""

    def __init__(self, opened: ExitStack) -> None:
        """`opened`: is closed after the last run. Raises StuckError where namespaces cannot be made."""
        reason = namespaces.why_not()
        if reason:
            raise StuckError(f"the hosts of this campaign are namespaces, which cannot be made here: {reason}")
        self._opened = opened
        self._folder = Path(tempfile.mkdtemp(prefix="evals-faults-"))
        opened.callback(shutil.rmtree, self._folder, ignore_errors=True)
        self._folder.chmod(0o755)
        # All runs are on one disk, small, so that it is soon full; hosts see what was mounted before they were made.
        self._disk = self._folder / "disk"
        self._disk.mkdir()
        namespaces.own_mounts()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "disk", str(self._disk)], check=True)
        opened.callback(subprocess.run, ["umount", "-l", str(self._disk)], check=True)
        self._site = namespaces.Site([list(HOSTS)], ("eth0", "eth1"))
        self._address = self._site.settle(card=1)
        self._shim: Path | None = None
        self._database: Database | None = None
        self._num = 0

    def run(self, fault: str, seed: int, keep: Path | None) -> tuple[Row, Ended | None]:
        """One run; whatever happens, it is a row."""
        self._num += 1
        folder = self._disk / f"run{self._num}"
        folder.mkdir()
        database = self._started() if fault == "database" else None
        cluster = Cluster(
            self._site,
            folder,
            self._address,
            store=database.create(f"run{self._num}") if database is not None else "",
            is_watched=fault != "alone",
            preload=self._skewed(folder) if fault == "clock" else {},
        )
        stage = Stage(cluster, random.Random(seed), database)
        try:
            return self._one(stage, fault)
        finally:
            cluster.close()
            if keep is not None:
                shutil.copytree(folder, keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.ring"))
            shutil.rmtree(folder)

    def _one(self, stage: Stage, fault: str) -> tuple[Row, Ended | None]:
        cluster, at, note = stage.cluster, "", ""
        strike = FAULTS[fault][1] if fault in FAULTS else None
        try:
            cluster.start()
            if strike is not None:
                at = _in_a_window(cluster, stage.draw)
                if at:
                    note = strike(stage)
            ended = cluster.end()
        except (StuckError, EroicaError, OSError, ValueError, sqlite3.Error, subprocess.SubprocessError) as error:
            told = "; ".join(f"{name}: {cluster.log(name)[-200:].strip()}" for name in cluster.processes)
            return Row(fault, note, at, -1, False, 0.0, (), (f"{error} ({told})",)), None
        row = Row(fault, note, at, ended.status, False, ended.seconds, tuple(map(_short, ended.incidents)), ())
        return row, ended

    def _skewed(self, folder: Path) -> dict[str, dict[str, str]]:
        """Environment with a clock that can be set."""
        compiler = shutil.which("cc")
        if compiler is None:
            raise StuckError("setting clocks needs a C compiler: apt-get install gcc")
        if self._shim is None:
            self._shim = self._folder / "skew.so"
            source = str(Path(__file__).with_name("skew.c"))
            subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(self._shim), source, "-ldl"], check=True)
        found = {}
        for host in ("", *HOSTS):
            file = _skew_file(folder, host)
            file.write_bytes(struct.pack("q", 0))
            found[host] = {"LD_PRELOAD": str(self._shim), "EVALS_SKEW": str(file)}
        return found

    def _started(self) -> Database:
        if self._database is None:
            self._database = Database(self._folder / "postgres")
            self._opened.callback(self._database.stop)
        return self._database


class Database:
    """A PostgreSQL server of the campaign's own, behind a socket, as a user without rights."""

    def __init__(self, folder: Path) -> None:
        programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
        if not programs:
            raise StuckError("this fault needs PostgreSQL: apt-get install postgresql")
        self._bin = programs[-1]
        self._folder = folder
        folder.mkdir()
        shutil.chown(folder, "nobody")
        data = str(folder / "data")
        self._call("initdb", "-D", data, "-A", "trust", "-U", "eroica", "-E", "UTF8", "--no-sync")
        self._start()

    def _call(self, program: str, *words: str) -> None:
        subprocess.run([self._bin / program, *words], check=True, user="nobody", capture_output=True, cwd=self._folder)

    def _start(self) -> None:
        # Synchronous, as an operator has it: what was acknowledged outlives a kill.
        options = f"-c listen_addresses= -k {self._folder}"
        self._call("pg_ctl", "-D", str(self._folder / "data"), "-w", "-l", "log", "-o", options, "start")

    def create(self, name: str) -> str:
        """An empty database; its URL."""
        self._call("createdb", "-h", str(self._folder), "-U", "eroica", name)
        return f"postgresql://eroica@/{name}?host={self._folder}"

    def kill_and_start(self) -> None:
        """Kill the server and all that serve connections."""
        pid = int((self._folder / "data" / "postmaster.pid").read_text().split()[0])
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for one in (pid, *map(int, children)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        for _ in range(20):  # as a service manager: the processes that were killed take a moment to be gone
            time.sleep(SOON_S)
            with contextlib.suppress(subprocess.CalledProcessError):
                self._start()
                return
        raise StuckError(f"PostgreSQL does not start again: {(self._folder / 'log').read_text()[-300:]}")

    def stop(self) -> None:
        """At once."""
        with contextlib.suppress(subprocess.CalledProcessError):
            self._call("pg_ctl", "-D", str(self._folder / "data"), "-m", "immediate", "stop")


def _in_a_window(cluster: Cluster, draw: random.Random) -> str:
    """Wait until the window because of the slow rank is open, and for a moment that is drawn; what it is doing then."""
    cluster.wait(lambda: cluster.window().startswith("slowdown") or not cluster.is_training, "window", TRAINING_S)
    time.sleep(draw.uniform(0, MOST_DELAY_S))
    return cluster.window()


def _short(diagnosis: dict[str, Any]) -> str:
    verdict = diagnosis["verdict"]
    return f"{diagnosis['kind']}: {verdict['cause']}, rank {verdict['ranks']} on {','.join(verdict['hosts'])}"


SLOW = f"slow: input_pipeline, rank {CULPRIT} on {HOSTS[CULPRIT // RANKS_PER_HOST]}"


def judged(row: Row, ended: Ended, weights: str, seconds: float) -> Row:
    """With all that is wrong. `weights`, `seconds`: of undisturbed runs."""
    problems = []
    lines = tuple(sorted(str(line["id"]) for line in ended.lines))
    kept = tuple(sorted(str(one["id"]) for one in ended.incidents))
    if row.fault != ENDS_TRAINING:
        if ended.status:
            problems.append(f"the training ended with status {ended.status}")
        if ended.weights != weights:
            problems.append("the weights are others" if ended.weights else "the ranks have no equal weights")
        if seconds and ended.seconds > SLOWER * seconds:
            problems.append(f"the training took {ended.seconds:.1f} s, undisturbed {seconds:.1f} s")
        if row.told.count(SLOW) != 1:
            problems.append("the incident is lost" if SLOW not in row.told else "the incident is doubled")
        problems += [f"also told: {one}" for one in row.told if one != SLOW]
    else:
        crash = [one for one in row.told if one.startswith("crash")]
        rank = int(row.note.split()[-1]) if row.note else -1
        wanted = f"rank {rank} on {HOSTS[rank // RANKS_PER_HOST]}"
        if not ended.status:
            problems.append("the training ended with status 0")
        if len(crash) != 1 or wanted not in crash[0]:
            problems.append(f"told of the death of {wanted}: {', '.join(crash) or 'nothing'}")
        problems += [f"also told: {one}" for one in row.told if one != SLOW and one not in crash]
        if row.told.count(SLOW) > 1:
            problems.append("the incident is doubled")
    if lines != kept:
        problems.append(f"incidents.jsonl has {', '.join(lines) or 'none'}, the store {', '.join(kept) or 'none'}")
    problems += [f"left behind: {one}" for one in ended.left]
    if row.fault not in ("none", "alone") and not row.at:
        problems.append("no window was open when it was to be struck")
    return replace(row, is_equal=ended.weights == weights, problems=tuple(problems))


def run(
    faults: Sequence[str], times: int, seed: int, keep: Path | None, tell: Callable[[Row | str], None]
) -> list[Row]:
    """The campaign: first the training alone and undisturbed, then each fault so often."""
    draw, rows = random.Random(seed), list[Row]()
    with ExitStack() as opened:
        campaign = Campaign(opened)
        first, alone = campaign.run("alone", 0, None)
        if alone is None or alone.status or not alone.weights:
            raise StuckError(f"the training does not run here, even without eroica: {'; '.join(first.problems)}")
        tell(f"alone: {alone.seconds:.1f} s")
        undisturbed: list[float] = []
        for fault in dict.fromkeys(("none", *faults)):
            for turn in range(times if fault in faults else 1):
                folder = keep / f"{fault}-{turn + 1}" if keep is not None else None
                row, ended = campaign.run(fault, draw.randrange(1_000_000), folder)
                if ended is not None:
                    row = judged(row, ended, alone.weights, median(undisturbed) if undisturbed else 0.0)
                    if fault == "none":
                        undisturbed.append(ended.seconds)
                rows.append(row)
                tell(row)
    return rows


def line(row: Row) -> str:
    """One run in a line."""
    what = " ".join(word for word in (row.fault, row.note, f"({row.at})" if row.at else "") if word)
    return (
        f"{what}: {row.seconds:.1f} s; {'; '.join(row.told) or 'nothing told'}; {'; '.join(row.problems) or 'passed'}"
    )


def table(rows: Sequence[Row]) -> Iterator[str]:
    """For each fault how its runs ended."""
    yield "| harm | runs | passed | exit status | weights equal | steps, s (median, most) | incident told once |"
    yield "| --- | ---: | ---: | --- | ---: | --- | ---: |"
    for fault, (what, _) in FAULTS.items():
        of = [row for row in rows if row.fault == fault]
        if not of:
            continue
        seconds = [row.seconds for row in of if row.seconds]
        took = f"{median(seconds):.1f}, {max(seconds):.1f}" if seconds else "does not come to its end"
        once = sum(
            sum(one.startswith("crash") for one in row.told) == 1 if fault == ENDS_TRAINING else row.told == (SLOW,)
            for row in of
        )
        statuses = ", ".join(str(status) for status in sorted({row.status for row in of}))
        equal = "-" if fault == ENDS_TRAINING else str(sum(row.is_equal for row in of))
        passed = sum(not row.problems for row in of)
        yield f"| {what} | {len(of)} | {passed} | {statuses} | {equal} | {took} | {once} |"


def report(rows: Sequence[Row], command: str, machine: str, when: str) -> str:
    """FAULTS.md."""
    failed = [row for row in rows if row.problems]
    text = [
        "# Harm done to each part in the middle of a window",
        "",
        f"Made by `{command}` on {when}: {machine}.",
        "",
        "Four gloo ranks on two hosts, which are network namespaces; `eroica serve` with TLS, tokens and the bus that",
        "it brings along in a third, `eroica agent` on each host.",
        f"Rank {CULPRIT} reads slowly from some step on. Each harm comes while the window is open that is taken",
        f"because of it, up to {MOST_DELAY_S} s after it was proposed, at a moment drawn anew. Passed: the training",
        "ends with status 0, weights equal bit for bit to those of the training without eroica, within",
        f"{SLOWER} times the time of undisturbed runs; its incident is told once, with rank, host and cause right, in",
        "the store and in incidents.jsonl; nothing else is told; no process and no file is left. A rank that is killed",
        "ends the training: there its death must be told, once.",
        "",
        *table(rows),
        "",
    ]
    if failed:
        text += ["## Not passed", "", *(f"- {line(row)}" for row in failed), ""]
    return "\n".join(text)


def command(options: argparse.Namespace) -> int:
    """Run it, as the command line asks; returns the exit status."""
    for name in options.fault or ():
        if name not in FAULTS:
            raise StuckError(f"no harm is called {name}; there are {', '.join(FAULTS)}")
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    # Whoever ends us finds nothing left: no database, no disk, no folder.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    began = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    given = shlex.join(["python", "-m", "evals", *sys.argv[1:]])
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1_000_000)
    chosen = options.fault or list(FAULTS)

    def tell(told: Row | str) -> None:
        print(line(told) if isinstance(told, Row) else told, file=sys.stderr, flush=True)
        if isinstance(told, Row) and options.results is not None:
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(told)) + "\n")

    rows = run(chosen, options.times, seed, options.keep, tell)
    if options.results is not None:
        kept = options.results.read_text("utf-8").splitlines()
        rows = [msgspec.json.decode(text, type=Row) for text in kept]
    print("\n".join(table(rows)))
    if options.write:
        REPORT.write_text(report(rows, f"{given} --seed {seed}", _machine(), began))
        print(f"written: evals/{REPORT.name}", file=sys.stderr)
    return 1 if any(row.problems for row in rows) else 0


def _machine() -> str:
    facts = machine.facts({})
    return ", ".join(str(facts[name]) for name in ("processor", "cores", "memory", "system"))
