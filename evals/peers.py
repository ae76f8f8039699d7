"""The peers themselves on the catalogue's cases, in their own environments (`bench.peers`); `python -m evals peers`.

HTA reads the traces of synthetic cases from files and names its potential straggler. TraceML watches live cases that
slow down, and their controls, instead of eroica, and says in its summary whether a rank is a straggler. Both are judged
by ranks alone, as the rules of `evals.baselines` are. Not here: hangs, of which neither says anything.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.peers import Environment
from eroica.job import format_ranks
from evals import baselines, suites
from evals.baselines import Naming, Window
from evals.catalogue import Case, CaseError
from evals.emit import Written
from evals.kineto_file import write_json
from evals.made import Draw
from evals.rows import Peer
from evals.truth import Truth

HERE = Path(__file__).parent
STEPS = 450
"""Of a live case under TraceML, which says something only at the end: a third healthy, the rest with the fault."""
LIMIT_S = 240.0
"""After which a peer has said nothing."""
_SHOWN = {"hta": ("HTA", "HolisticTraceAnalysis"), "traceml": ("TraceML", "traceml-ai")}
"""Name, and that of the package."""
STRAGGLERS = frozenset({"STRAGGLER", "INPUT_STRAGGLER", "COMPUTE_STRAGGLER", "H2D_STRAGGLER"})
"""TraceML's kinds that blame a rank (reporting/SCHEMA.md)."""


def peer_of(case: Case) -> str:
    """Whom a case can be shown to; "" = nobody."""
    if case.kind not in ("slow", "control"):
        return ""
    if case.suite == "synthetic":
        return "hta"
    return "traceml" if case.suite == "live" and case.recipe.launch == "torchrun" and case.recipe.ranks > 1 else ""


def ask(case: Case, draw: Draw, peer: Environment) -> Peer | None:
    """What a peer says of a case; None if the case holds nothing that it could look at."""
    began = time.perf_counter()
    if peer.problem:
        raise CaseError(f"{peer.name} {peer.problem}")
    with tempfile.TemporaryDirectory(prefix="eroica-peers-") as name:
        folder, said, problem, truth, naming = Path(name), "", "", Truth(hosts=()), None
        try:
            if peer.name == "hta":
                made = suites.make(case, draw)
                truth = made.truth
                if not made.windows or not any(len(trace.collectives) for trace in made.windows[-1].traces):
                    return None
                naming = _hta(made.windows[-1], peer, folder)
            else:
                naming, said, truth = _traceml(case, draw, peer, folder)
        except (CaseError, subprocess.TimeoutExpired) as error:
            problem = str(error)
    return Peer(
        case=case.id,
        peer=_SHOWN[peer.name][0],
        version=peer.versions.get(_SHOWN[peer.name][1], ""),
        word="-" if problem else baselines.judge(naming, truth),
        anybody=bool(baselines.to_blame(truth)),
        said=said or (f"ranks {format_ranks(sorted(naming.ranks))}" if naming is not None else ""),
        problem=problem,
        seconds=round(time.perf_counter() - began, 1),
    )


def _run(command: Sequence[str], folder: Path, more: Mapping[str, str]) -> str:
    """more: of the case's recipe, in which the fault may lie."""
    environment = os.environ | {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"} | dict(more)
    environment = {name: value for name, value in environment.items() if value}
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace", timeout=LIMIT_S
    )
    if ended.returncode:
        last = [line for line in ended.stderr.splitlines() if line.strip()][-1:] or ["nothing on stderr"]
        raise CaseError(f"exit status {ended.returncode}: {last[0].strip()[:200]}")
    return ended.stdout


def _hta(window: Window, peer: Environment, folder: Path) -> Naming:
    """The rank that HTA names first. Kernels of NCCL go by the names that it knows, those before NCCL 2.19."""
    for trace in window.traces:
        strings = tuple(text.replace("ncclDevKernel", "ncclKernel") for text in trace.strings)
        write_json(Written(replace(trace, strings=strings), {}, ()), folder / f"rank{trace.rank}.json.gz")
    told = _run([str(peer.python), str(HERE / "peer_hta.py"), str(folder), str(len(window.traces))], folder, {})
    return Naming(frozenset(json.loads(told.splitlines()[-1])))


def _traceml(case: Case, draw: Draw, peer: Environment, folder: Path) -> tuple[Naming, str, Truth]:
    """The ranks that TraceML's summary calls stragglers, its words, and what was planted."""
    program = [str(case.folder / case.recipe.program), "--out", str(folder), "--seed", str(draw.seed)]
    program += ["--effect", str(draw.effect), "--shape", draw.shape, "--steps", str(STEPS)]
    launcher = [str(peer.python), "-m", "traceml_ai.launcher.cli", "run", str(HERE / "peer_traceml.py")]
    launcher += ["--mode", "summary", "--run-name", case.id, "--nproc-per-node", str(case.recipe.ranks)]
    launcher += ["--master-port", _free_port(), "--aggregator-port", _free_port()]
    _run([*launcher, "--logs-dir", str(folder / "logs"), "--args", *program], folder, case.recipe.environment)
    if not (folder / "planted.json").exists():
        raise CaseError("the job planted nothing")
    planted = json.loads((folder / "planted.json").read_text())
    summaries = list((folder / "logs").rglob("final_summary.json"))
    if not summaries:
        raise CaseError("it left no summary")
    told: dict[str, Any] = json.loads(summaries[0].read_text())
    section = _section(told)
    named = [
        int(rank) for issue in section.get("issues", []) if issue.get("kind") in STRAGGLERS for rank in issue["ranks"]
    ]
    return (
        Naming(frozenset(named)),
        str(section.get("diagnosis", {}).get("kind", "nothing")),
        suites.truth_of(case, planted),
    )


def _section(told: dict[str, Any]) -> dict[str, Any]:
    """The part on step times, wherever a version of the schema has it."""
    for place in (told, told.get("sections", {}), told.get("payload", {})):
        if isinstance(place, dict) and isinstance(place.get("step_time"), dict):
            section: dict[str, Any] = place["step_time"]
            return section
    raise CaseError("its summary has no part on step times")


def _free_port() -> str:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return str(bound.getsockname()[1])
