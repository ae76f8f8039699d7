"""Jobs that stand still or broke off, made up: what their ranks would show, as the look from outside brings it.

For synthetic cases whose fault no machine without GPUs can have. A rank's calls come by the way that they would come
in a real job: the JSON of torch's flight recorder with the states that NCCL tells, or a flight ring, which on NCCL sees
calls begin and not end. Used by cases; it knows nothing of what `eroica.hang` makes of a view.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from eroica.hang import explain
from eroica.standing import Call, Frame, Group, RankView, Thread
from eroica.torchflight import parse_flight_recorder
from evals.catalogue import Case
from evals.made import Made
from evals.truth import Expected, Place, Truth

TORCH = "/opt/venv/lib/python3.11/site-packages/torch"
C10D = f"{TORCH}/distributed/distributed_c10d.py"
SYNCHRONIZE = Frame("synchronize", f"{TORCH}/cuda/__init__.py", 1083)
COMPLETED, STARTED, SCHEDULED = "completed", "started", "scheduled"
"""What NCCL's recorder says of a call: its kernel is over, runs, or waits in its stream."""


@dataclass(frozen=True, slots=True)
class Entered:
    """One call that a rank has made on a group."""

    group: str
    sequence: int
    op: str
    state: str = COMPLETED
    elements: int = 1 << 20
    step: int = 0


def thread(*frames: Frame) -> Thread:
    """The driving thread, innermost frame first."""
    return Thread("MainThread", frames, is_main=True)


def view(
    rank: int,
    host: str,
    groups: Mapping[str, Sequence[int]],
    calls: Sequence[Entered],
    main: Thread | None,
    *,
    by: str = "recorder",
    silent_s: float = 120.0,
    num_steps: int = 0,
) -> RankView:
    """One rank on NCCL. `groups`: those that it is a member of. `by`: recorder, or ring."""
    seen = RankView(
        rank=rank,
        host=host,
        pid=4000 + rank,
        state="running",
        is_recording=True,
        knows_all_groups=by == "ring",
        num_steps=num_steps,
        silent_s=silent_s,
        threads=(main,) if main is not None else (),
        no_stack="" if main is not None else "no stacks: py-spy is not installed",
        stack_source="py-spy" if main is not None else "",
    )
    if by == "recorder":
        known, made = parse_flight_recorder(_dump(groups, calls))
        return replace(seen, groups=known, calls=made)
    return replace(
        seen,
        groups=tuple(Group(_key(name, members), name, tuple(members), "cuda:nccl") for name, members in groups.items()),
        calls=tuple(
            Call(
                _key(call.group, groups[call.group]),
                call.sequence,
                call.op,
                "unseen",
                4 * call.elements,
                "float32",
                silent_s + len(calls) - at,
                call.step,
            )
            for at, call in enumerate(calls)
        ),
    )


def _key(name: str, members: Sequence[int]) -> str:
    return hashlib.blake2b(f"{name} {list(members)}".encode(), digest_size=8).hexdigest()


def _dump(groups: Mapping[str, Sequence[int]], calls: Sequence[Entered]) -> dict[str, object]:
    """As `_dump_fr_trace_json` has it, where NCCL is the backend."""
    names = {name: str(number) for number, name in enumerate(groups)}
    return {
        "version": "2.10",
        "pg_config": {
            names[name]: {"name": names[name], "desc": name, "ranks": str(list(members))}
            for name, members in groups.items()
        },
        "entries": [
            {
                "record_id": number,
                "process_group": [names[call.group], call.group],
                "collective_seq_id": call.sequence,
                "p2p_seq_id": 0,
                "is_p2p": False,
                "profiling_name": f"nccl:{call.op}",
                "input_sizes": [[call.elements]],
                "input_dtypes": ["Float"],
                "output_sizes": [[call.elements]],
                "output_dtypes": ["Float"],
                "state": call.state,
                "retired": call.state == COMPLETED,
                "time_created_ns": 1_700_000_000_000_000_000 + number * 1_000_000,
            }
            for number, call in enumerate(calls)
        ],
    }


def judged(case: Case, views: Sequence[RankView], culprits: Sequence[int] = (), places: Sequence[Place] = ()) -> Made:
    """Ask the product, and say what is true: the case's one answer, for these ranks."""
    hosts = tuple(view.host for view in sorted(views, key=lambda view: view.rank))
    diagnosis = explain(views, world_size=len(views), job=case.id)
    ranks = frozenset(culprits)
    fault = Expected(case.faults[0], ranks, frozenset(hosts[rank] for rank in ranks), places=tuple(places))
    return Made(truth=Truth(hosts=hosts, faults=(fault,)), diagnoses=(diagnosis,) if diagnosis is not None else ())
