"""What an agent may ask of a rank, as the one word that fits the mailbox of its flight ring, and what the rank answers.

A window is agreed on in two phases, by raw counts and never "on receipt": PREPARE names a start that no rank has
reached; each rank answers PREPARED, or why it cannot; COMMIT (or ABORT) follows, and a rank that has not seen the
commit when its count reaches the start leaves the window out. Words and answers are values: the probe and the agent
share no lock and no file format beyond them. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Verb(IntEnum):
    """What is asked."""

    PREPARE = 1
    COMMIT = 2
    ABORT = 3
    OUTSIDE = 4
    """Nothing is asked: Kineto records these steps on demand (none: by the clock), and a process that comes to its end
    meanwhile has to end the window first. ABORT: it is over."""


class Unit(IntEnum):
    """What the start and the length count."""

    STEPS = 0
    """Outermost optimizer steps completed."""
    NEXTS = 1
    """Dataloader nexts, in jobs without an optimizer that we can see."""


class Frames(IntEnum):
    """How Python frames come into the capture."""

    NONE = 0
    SAMPLED = 1
    """A thread that looks at the stacks some hundred times a second, during the window only."""
    TRACED = 2
    """The profiler's own (with_stack): every call, dearer."""
    SIZED = 3
    """As SAMPLED, and with the sizes of what operators are given: three times as long to stop."""


class State(IntEnum):
    """How far a rank is with a window."""

    PREPARED = 1
    COMMITTED = 2
    RUNNING = 3
    WRITING = 4
    DONE = 5
    LATE = 6
    """The start had passed when the rank saw the command."""
    BUSY = 7
    """Another profiler is active."""
    DISCARDED = 8
    """An exception, the end of the process or the time limit came first."""
    FAILED = 9
    ABORTED = 10
    UNABLE = 11
    """The rank cannot capture at all: a CUDA graph is being captured, the disk is full, torch is too old."""


MOST_STEPS = 1023
MOST_START = (1 << 29) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One word."""

    window: int
    """Number of the window, 1 to 65535; tells commands apart."""
    verb: Verb
    start: int = 0
    """The capture begins when this many units are completed, 0 to MOST_START."""
    num_steps: int = 0
    """And ends so many units later, 0 to MOST_STEPS."""
    unit: Unit = Unit.STEPS
    frames: Frames = Frames.SAMPLED

    def word(self) -> int:
        """As the mailbox holds it, 1 to 2^64-1. Raises ValueError if a value does not fit."""
        if not (0 < self.window < 1 << 16 and 0 <= self.start <= MOST_START and 0 <= self.num_steps <= MOST_STEPS):
            raise ValueError(f"{self} does not fit the mailbox")
        return (
            self.window
            | self.verb << 16
            | self.unit << 20
            | self.frames << 22
            | self.num_steps << 24
            | self.start << 34
        )


def parse(word: int) -> Command | None:
    """Inverse of `Command.word`; None if it is none of ours, or of a newer eroica."""
    try:
        return Command(
            window=word & 0xFFFF,
            verb=Verb(word >> 16 & 15),
            unit=Unit(word >> 20 & 3),
            frames=Frames(word >> 22 & 3),
            num_steps=word >> 24 & 1023,
            start=word >> 34 & MOST_START,
        )
    except ValueError:
        return None


def answer(window: int, state: State) -> int:
    """As the ring's counter ANSWER holds it."""
    return window << 8 | state


def parse_answer(value: int) -> tuple[int, State] | None:
    """Window and state; None if there is none yet, or one that this version does not know."""
    try:
        return value >> 8, State(value & 255)
    except ValueError:
        return None
