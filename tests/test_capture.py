"""Captures in real processes: what is in the file, who is told what, and that training comes first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eroica import ring as flight
from eroica.commands import Frames, State, parse_answer
from eroica.critical_path import iterations_of
from eroica.offline import diagnose_paths
from eroica.pattern import summarize
from eroica.ring import Flight, read_flight
from eroica.trace import read_trace
from tests.test_probe import ROOT, _environ

JOB = ROOT / "tests" / "capture_job.py"
CASES = ROOT / "tests" / "capture_cases.py"
SECONDS = 600


def _train(folder: Path, *arguments: str, num_ranks: int = 1, **more: str) -> list[tuple[int, str, str]]:
    """Exit status, stdout and stderr of each rank."""
    more = {"EROICA_RING_DIR": str(folder / "rings"), "WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": "1", **more}
    meeting = ["--rendezvous", str(folder / "rendezvous")] if num_ranks > 1 else []
    ranks = [
        subprocess.Popen(
            [sys.executable, str(JOB), *meeting, *arguments],
            env=_environ(RANK=str(rank), **more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    said = [rank.communicate(timeout=SECONDS) for rank in ranks]
    return [(rank.returncode, *texts) for rank, texts in zip(ranks, said, strict=True)]


def _flight(folder: Path) -> Flight:
    (path,) = (folder / "rings").glob("*.ring")
    return read_flight(path)
