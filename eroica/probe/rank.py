"""Which rank this process is, if any, and who told: its process group, its launcher, Slurm, MPI or `eroica run`.

A process group is always right. Everything else stands in the environment and is inherited by helpers, too: programs
that a rank starts, an evaluation, a second training. So what the environment says counts for the first process that
takes a step with it; whoever finds a living rank of that number and job (or, where `eroica run` made it a rank for want
of any other, any living rank of its folder) is no rank. Two processes of one number that begin within the same
millisecond may both become it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from eroica import ring as flight
from eroica.errors import EroicaError
from eroica.probe.place import option

GROUP, SINGLE = "group", "single"

SOURCES = (
    ("launcher", "RANK", "WORLD_SIZE"),
    ("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("mpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpi", "PMI_RANK", "PMI_SIZE"),
)
"""Name, variable of the rank, variable of the number of ranks; the first that is set counts. Slurm's come without a
step in batch scripts, too, where one process runs whatever the number of tasks; so both of its must be there."""


class Place(NamedTuple):
    """A rank and its job's size."""

    rank: int
    world_size: int
    """0 if unknown."""
    by: str
    """"group", "launcher", "slurm", "mpi", or "single": the only process, under `eroica run`, as it seems."""


def whoami(environ: Mapping[str, str]) -> Place | None:
    """What the process group or the environment says; None if this process has no rank."""
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is not None and distributed.is_initialized():
        return Place(distributed.get_rank(), distributed.get_world_size(), GROUP)
    for by, rank_name, size_name in SOURCES:
        rank = environ.get(rank_name, "")
        if rank.isdecimal():
            size = environ.get(size_name, "")
            if by == "launcher" or size.isdecimal():
                return Place(int(rank), int(size) if size.isdecimal() else 0, by)
    return Place(0, 1, SINGLE) if option("EROICA_SINGLE", environ) == "1" else None


def is_taken(own: Path, place: Place, job: str) -> bool:
    """Whether an older living process is this rank already. `own`: the ring that this process has just made."""
    if place.by == GROUP:
        return False
    mine = flight.peek(own).identity
    for path in own.parent.glob(f"*{flight.SUFFIX}"):
        if path == own:
            continue
        with contextlib.suppress(OSError, EroicaError):
            theirs = flight.peek(path)
            is_rival = place.by == SINGLE or (theirs.words[flight.RANK] == place.rank and theirs.note.get("job") == job)
            is_older = (theirs.identity.monotonic_ns, theirs.identity.pid) < (mine.monotonic_ns, mine.pid)
            is_me = theirs.identity.pid == mine.pid  # before an exec, which keeps the process and its start
            if is_rival and is_older and not is_me and flight.is_alive(theirs.identity):
                return True
    return False
