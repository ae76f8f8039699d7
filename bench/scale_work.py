"""The measured processes of `bench.scale`: python -m bench.scale_work WHAT ARGUMENTS. Prints one JSON object.

Times are of the work alone; memory is of the whole process, its input and the making of it included.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bench.process import peak_bytes, tell

T = TypeVar("T")


def localize(num_ranks: str) -> None:
    """Summaries of a job with a planted fault, stacked, localized and diagnosed in this process."""
    from bench.fleet import PER_HOST, Fleet
    from eroica.diagnosis import diagnose
    from eroica.findings import to_json
    from eroica.localization import localize_stacked, roles_of
    from eroica.offline import keep_freed_memory
    from eroica.pattern import stack

    keep_freed_memory()  # as `eroica diagnose` does
    fleet = Fleet(int(num_ranks))
    summaries = list(fleet.summaries())
    made = peak_bytes()
    parts: dict[str, float] = {}

    def timed(name: str, work: Callable[..., T], *arguments: Any) -> T:
        began = time.perf_counter()
        result = work(*arguments)
        parts[name] = time.perf_counter() - began
        return result

    stacked = timed("stack", stack, summaries)
    stack_peak = peak_bytes()
    answer = timed("localize and diagnose", diagnose, stacked)
    peak = peak_bytes()
    text = timed("to JSON", to_json, answer)
    # Two of its parts once more, for the split.
    timed("localize alone", localize_stacked, stacked, timed("roles alone", roles_of, stacked))
    first = answer.findings[0] if answer.findings else None
    right = (
        first is not None
        and len(answer.findings) == 1
        and (first.scope, first.cause, first.ranks) == ("rank", "input_pipeline", str(fleet.culprit))
        and first.hosts == (f"node{fleet.culprit // PER_HOST:06d}",)
    )
    tell(
        ranks=fleet.num_ranks,
        right=right,
        summary=answer.verdict.summary,
        id=text["id"],
        made=made,
        stack_peak=stack_peak,
        peak=peak,
        parts=parts,
    )


def encode(folder: str, num_ranks: str, first: str, num_hosts: str) -> None:
    """The summaries of some hosts into a file, for `bus`."""
    from bench import scale_agents

    path = Path(folder) / f"fleet-{num_ranks}-{first}.summaries"
    each_s = scale_agents.encode(path, int(first), int(num_hosts), int(num_ranks))
    tell(seconds_each=each_s, num_bytes=path.stat().st_size)


def bus(folder: str, num_ranks: str, processes: str, per_connection: str) -> None:
    """Agents of as many ranks over a real bus into the coordinator of `eroica serve`, which is this process."""
    from bench.fleet import PER_HOST, Fleet
    from bench.scale_agents import JOB
    from eroica.broker import Broker, Listening
    from eroica.chronicle import Chronicle
    from eroica.coordinators import Coordinators
    from eroica.investigation import Incident
    from eroica.keeping import Keeper
    from eroica.nats import NatsCarrier
    from eroica.serve import ROUND_S
    from eroica.windows import Policy

    fleet, told, said = Fleet(int(num_ranks)), list[Incident](), list[str]()
    hosts = -(-fleet.num_ranks // PER_HOST)
    share = -(-hosts // int(processes))
    with tempfile.TemporaryDirectory() as state:
        broker = Broker(Path(state) / "bus", Listening(), jobs=(JOB,))
        agents = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "bench.scale_agents", str(broker.passes[JOB])),
                    *(str(Path(folder) / f"fleet-{num_ranks}-{first}.summaries"), str(first)),
                    *(str(min(share, hosts - first)), per_connection, num_ranks),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for first in range(0, hosts, share)
        ]
        try:
            for agent in agents:
                assert agent.stdout is not None
                if agent.stdout.readline().strip() != "ready":
                    raise SystemExit("the simulated agents failed")
            carrier = NatsCarrier(broker.own, name="coordinator", say=said.append)
            keeper = Keeper(str(Path(state) / "eroica.db"), said.append)
            coordinators = Coordinators(
                carrier,
                Policy(baseline=False),
                lambda job, incident: told.append(incident),
                said.append,
                Chronicle(keeper),
            )
            marks = {"begin": time.monotonic()}
            cpu = {"begin": time.process_time()}
            wanted = ["joined", "noticed", "proposed", "committed", "told"]

            def mark(name: str) -> None:
                if wanted and wanted[0] == name:
                    wanted.pop(0)
                    marks[name], cpu[name] = time.monotonic(), time.process_time()

            _tell_all(agents, "go")
            until = time.monotonic() + PATIENCE_S
            while not told and time.monotonic() < until:
                select.select([carrier.handle], [], [], 0 if coordinators.are_behind else ROUND_S)
                coordinators.look()
                keeper.look()
                if JOB not in coordinators.jobs:
                    continue
                job = coordinators.jobs[JOB].coordinator
                if len(job.standings) == fleet.num_ranks and wanted[0] == "joined":
                    mark("joined")
                    _tell_all(agents, "notice")
                    mark("noticed")
                window = job.window
                if window is not None:
                    mark("proposed")
                    if window.committed:
                        mark("committed")
            mark("told")
            dropped = carrier.num_dropped_in
            carrier.close()
            keeper.close()
            server_s = _cpu_s(broker.pid)
        finally:
            for agent in agents:
                agent.communicate(timeout=60)
            broker.close()
    diagnosis = told[0].diagnosis if told else None
    tell(
        ranks=fleet.num_ranks,
        hosts=hosts,
        connections=sum(-(-min(share, hosts - first) // int(per_connection)) for first in range(0, hosts, share)),
        right=diagnosis is not None
        and (diagnosis.verdict.cause, diagnosis.verdict.ranks) == ("input_pipeline", str(fleet.culprit)),
        reported=diagnosis.coverage.ranks_reported if diagnosis else 0,
        summary=diagnosis.verdict.summary if diagnosis else "nothing was told",
        marks={name: at - marks["begin"] for name, at in marks.items()},
        cpu={name: at - cpu["begin"] for name, at in cpu.items()},
        agents_cpu_s=sum(os.times()[2:4]),
        server_cpu_s=server_s,
        dropped=dropped,
        said=[text for text in said if "has an agent" not in text][:10],
        peak=peak_bytes(),
    )


PATIENCE_S = 240.0
"""For the diagnosis, from the first word on."""


def _tell_all(agents: Sequence[subprocess.Popen[str]], word: str) -> None:
    for agent in agents:
        assert agent.stdin is not None
        agent.stdin.write(word + "\n")
        agent.stdin.flush()


def _cpu_s(pid: int) -> float:
    """CPU time of a process that lives."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


WORK: dict[str, Callable[..., None]] = {"localize": localize, "encode": encode, "bus": bus}

if __name__ == "__main__":
    WORK[sys.argv[1]](*sys.argv[2:])
