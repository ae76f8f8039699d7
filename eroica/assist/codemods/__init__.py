"""Codemods: each proves that a well-known repair fits this code, and makes it, or says why not.

A codemod is a function of the repository's sources and of what the finding tells (`change.Lead`); it reads no file and
runs nothing. `propose` tries those that answer the finding's cause, in the order in which they are listed, and returns
the first change, or all refusals. They are conservative: a wrong patch costs more than none, so whatever is not seen to
hold does not hold. Each makes one change and, applied again, refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from eroica.assist.change import Change, Lead, Refusal
from eroica.assist.codemods import (
    accumulation,
    anomaly,
    collecting,
    divergence,
    loading,
    readback,
    reports,
    saving,
    threads,
    unused,
)
from eroica.assist.reading import Sources
from eroica.assist.rewriting import UnfitError


@dataclass(frozen=True, slots=True)
class Codemod:
    """One repair."""

    name: str
    """What it does, in a word or three."""
    causes: frozenset[str]
    """Of findings that it may answer."""
    propose: Callable[[Sources, Lead], Change | Refusal]
    words: tuple[str, ...] = ()
    """If given, one of these must be in the name of the finding's function or setting: the cause says too little."""
    is_steady: bool = True
    """What it saves is saved in each step. Else it comes now and then, and the median iteration shows nothing of it."""


def _of(*causes: str) -> frozenset[str]:
    return frozenset(causes)


_HOST = (
    "host_python",
    "device_sync",
    "unknown",
    "checkpoint_io",
    "gil_contention",
    "sync_amplification",
    "cpu_contention",
)
"""Causes of host time that is spent in a function of the program. Contention is among them: where cores are shared,
what waits and what computes look much alike, and the code decides."""
CODEMODS = (
    Codemod("anomaly mode", _of("configuration"), anomaly.propose, ("anomaly",)),
    Codemod("no_sync", _of("configuration"), accumulation.propose, ("micro-step",)),
    Codemod("threads", _of("configuration"), threads.propose, ("THREADS", "num_threads")),
    Codemod("unused parameters", _of("configuration"), unused.propose, ("find_unused_parameters",)),
    Codemod("worker processes", _of("input_pipeline", "cpu_contention"), loading.workers),
    Codemod("persistent workers", _of("input_pipeline"), loading.persistent, is_steady=False),
    Codemod("pinned memory", _of("host_device_copy", "device_sync"), loading.pinned),
    Codemod("aligned collection", _of("host_gc"), collecting.propose, is_steady=False),
    Codemod("no wait for the device", _of("device_sync", "host_python", "unknown"), readback.unsynchronized),
    Codemod("read back later", _of("device_sync", "host_python", "unknown", "cpu_contention"), readback.later),
    Codemod("seldom reports", _of(*_HOST), reports.seldom),
    Codemod(
        "saves behind training",
        _of("checkpoint_io", "host_python", "unknown", "cpu_contention"),
        saving.propose,
        is_steady=False,
    ),
    Codemod("collective of all ranks", _of("collective_mismatch", "missing_rank", "deadlock"), divergence.propose),
)
"""In the order in which they are tried."""


def is_steady(name: str) -> bool:
    """Of the codemod of this name; so is what no codemod made."""
    return all(one.is_steady for one in CODEMODS if one.name == name)


def fitting(lead: Lead) -> list[Codemod]:
    """Those that may answer a finding."""
    return [one for one in CODEMODS if lead.cause in one.causes and (
        not one.words or any(word in lead.name for word in one.words))]  # fmt: skip


def propose(sources: Sources, lead: Lead) -> tuple[Codemod, Change] | list[tuple[Codemod, Refusal]]:
    """The first change that fits, or why none does."""
    refusals = []
    for codemod in fitting(lead):
        try:
            seen = codemod.propose(sources, lead)
        except UnfitError as error:
            seen = Refusal(str(error))
        if isinstance(seen, Change):
            return codemod, seen
        refusals.append((codemod, seen))
    return refusals
