"""Where one rank stands when a job stops: the records that a look from outside fills and that `hang` reasons over.

Records only, small enough to travel: what the ring said (calls, open spans, notes), what the stacks said, what /proc
said of the process and its children. Filled by `views` (from rings and `stacks`), used by `hang` and its parts.
Whatever could not be seen has a value that says so (None, "", an empty tuple with a reason), never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

CUT = "<cut>"
"""File of the frame that stands for those that were left out of a stack."""
_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|/lib/python3|/lib64/python3|^<frozen |^<cut>|/eroica/probe/|/eroica/arming/"
)
"""Files of the standard library, of installed packages and of our own hooks."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack."""

    function: str
    file: str
    line: int
    source: str = ""
    """The line itself; "" if it cannot be read here."""
    block: str = ""
    """"except" or "finally" if the line stands in such a block; "" otherwise, or unknown."""

    @property
    def at(self) -> str:
        """ "path:line"."""
        return f"{self.file}:{self.line}"

    @property
    def is_users(self) -> bool:
        """False in the standard library, in installed packages and in the hooks of eroica itself."""
        return is_users(self.file)


def is_users(file: str) -> bool:
    """Whether a file is the user's own."""
    return not _LIBRARY.search(file)


@dataclass(frozen=True, slots=True)
class Held:
    """A lock that a thread holds, as its source says."""

    name: str
    """As the source spells it: "self._lock", "A"."""
    at: Frame
    """The line that took it."""


@dataclass(frozen=True, slots=True)
class Thread:
    """One Python thread."""

    name: str
    frames: tuple[Frame, ...]
    """Innermost first."""
    is_main: bool = False
    has_gil: bool = False
    """It held the GIL each time it was looked at."""
    waits_for: str = ""
    """The lock whose acquisition it stands in; "" if it stands in none, or that cannot be told."""
    holds: tuple[Held, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """A process group."""

    key: str
    """Hash of its name, equal on all members."""
    name: str
    """What people call it."""
    members: tuple[int, ...]
    """Global ranks in the group's order; () if unknown."""
    backend: str = ""
    """What carries it, as torch says: "gloo", "cpu:gloo,cuda:nccl"; "" if unknown."""

    @property
    def is_on_device(self) -> bool:
        """Its calls are kernels on a stream: they begin and end without the host, and several may be under way."""
        return any(name in self.backend for name in ("nccl", "rccl", "xccl", "hccl"))


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a rank on a group."""

    group: str
    """Key of the group."""
    sequence: int
    """From 1, over all collectives of the group; of messages over those of this direction and peer."""
    op: str
    status: str
    """in (entered, not over), done, failed, unseen (its end cannot be seen)."""
    num_bytes: int = 0
    dtype: str = ""
    for_s: float = 0.0
    """Since it began, until the rank was looked at or last wrote."""
    step: int = 0
    """Optimizer steps that the rank had done before it; -1 if unknown."""
    peer: int = -1
    """Other rank of a message, in the group's numbering; -1 for a collective or unknown."""

    @property
    def is_message(self) -> bool:
        """A send or a receive: no other rank takes part."""
        return self.op in MESSAGES


MESSAGES = ("send", "recv", "recv_any_source")


@dataclass(frozen=True, slots=True)
class Open:
    """A span that began and has not ended."""

    what: str
    """"dataloader next 7", "optimizer step 7", "garbage collection", ..."""
    kind: str
    """next, step, gc, phase, capture."""
    for_s: float


@dataclass(frozen=True, slots=True)
class Child:
    """A process that a rank started."""

    pid: int
    name: str
    """As the kernel has it: "pt_data_worker" for a worker of torch's loader."""
    state: str
    """alive or dead."""
    exit_status: int | None = None
    """Of a dead one: its status, or minus the signal that killed it; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """All that is known of one rank."""

    rank: int
    host: str = ""
    pid: int = 0
    generation: int = 0
    state: str = "unknown"
    """running, stopped (by a signal), traced (by a debugger or sampler), ended (came to its end), died (did not),
    unknown (its process cannot be seen from here)."""
    exit_status: int | None = None
    """Of a process that is gone: as `Child.exit_status`."""
    tracer: int = 0
    """Process that traces it."""
    groups: tuple[Group, ...] = ()
    calls: tuple[Call, ...] = ()
    """The latest calls in the order in which they began; of each group at least the last one, unless forgotten."""
    is_recording: bool = True
    """False if the probe gave up or there is no ring: `calls` then say nothing about now."""
    knows_all_groups: bool = False
    """A group without a call here has seen none by this rank: its ring still holds its first record."""
    open: tuple[Open, ...] = ()
    phase: str = ""
    """Under way, as recorded: save, load, evaluation, compile, rendezvous; "" if none."""
    phase_s: float = 0.0
    num_steps: int = 0
    silent_s: float | None = None
    """Since the last beginning or end of anything that is progress; None if unknown."""
    no_batch: str = ""
    """The error by which its last call for a batch ended, if no batch has come since."""
    threads: tuple[Thread, ...] = ()
    no_stack: str = ""
    """Why there are no threads, and the way out."""
    stack_source: str = ""
    """py-spy, faulthandler."""
    last_batch: str = ""
    """How its last call for a batch ended: "came", or "none" where the loader was through; "" if unknown."""
    num_nexts: int = 0
    """Batches that it has asked for, the ends of epochs included."""
    exception: str = ""
    """What left the training loop, or ended the process."""
    exception_at: str = ""
    """The innermost line that it passed."""
    exception_from: str = ""
    """The innermost line of the user's own code that it passed; "" if unknown."""
    handles: str = ""
    """The exception that it was dealing with, in an `except` or a `finally`, when it made its last call or save."""
    handles_at: str = ""
    handles_from: str = ""
    rendezvous: Mapping[str, str] = field(default_factory=dict)
    """What it was told when it joined the others: "store" (address and port of the rendezvous), "size" (of the job),
    "interface" (that it binds to), "address" (that it tells the others to connect to); the unknown is left out."""
    model: str = ""
    """What it made ready to train with others last: "DistributedDataParallel of 6 parameters, 24,960 elements"."""
    is_still: bool = False
    """Its driving thread did not run at all while it was watched for some seconds. Looked for before the first step."""
    is_leaving: bool = False
    """destroy_process_group or the end of the interpreter is under way."""
    children: tuple[Child, ...] = ()

    @property
    def main(self) -> Thread | None:
        """The driving thread."""
        return next((thread for thread in self.threads if thread.is_main), self.threads[0] if self.threads else None)


def user_frame(thread: Thread | None) -> Frame | None:
    """The innermost frame of the user's own code."""
    return next((frame for frame in thread.frames if frame.is_users), None) if thread is not None else None


def call_site(thread: Thread | None) -> str:
    """The user's innermost line and the one that called it, since the innermost may be a helper that all pass through:
    "reduce (/home/u/train.py:5) from step (train.py:41)"; "" if there is none."""
    users = [frame for frame in thread.frames if frame.is_users][:2] if thread is not None else []
    if not users:
        return ""
    callers = [f" from {frame.function} ({frame.at.rpartition('/')[2]})" for frame in users[1:]]
    return f"{users[0].function} ({users[0].at})" + "".join(callers)


def last_calls(view: RankView) -> dict[tuple[str, str, int], Call]:
    """The latest call per group; messages per direction and peer: (group, "" or op, -1 or peer) -> call."""
    last: dict[tuple[str, str, int], Call] = {}
    for call in view.calls:
        key = (call.group, call.op, call.peer) if call.is_message else (call.group, "", -1)
        if key not in last or call.sequence >= last[key].sequence:
            last[key] = call
    return last
