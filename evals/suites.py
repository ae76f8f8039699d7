"""Runs one case of the catalogue and judges it: a real training under `eroica run`, or a job made up from traces.

    live        torchrun starts the case's script, `eroica run` watches it, its diagnosis files are judged
    netns       the same; the script puts its ranks into network namespaces (needs root)
    synthetic   the case's module makes traces, series or standing ranks and calls the product on them

Nothing is told to eroica that a user would not have told it. Used by `evals.__main__` and by tests.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eroica import processes
from eroica.findings import Diagnosis, from_json
from evals import baselines
from evals.catalogue import Case, CaseError
from evals.made import Draw, Made
from evals.score import Score, score
from evals.truth import Expected, Place, Truth

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run of one case."""

    case: Case
    draw: Draw
    score: Score
    truth: Truth
    diagnoses: tuple[Diagnosis, ...]
    named: Mapping[str, baselines.Naming | None] = field(default_factory=dict)
    """By each baseline; None = it cannot say anything of such a case."""
    seconds: float = 0.0
    to_diagnosis_s: float | None = None
    """From the onset to the first right diagnosis; None = not measured."""
    problem: str = ""
    """Why it is no result: the fault was never there. "" = it is one."""

    @property
    def points(self) -> float:
        """0 to 1."""
        fair = bool(self.case.unknown_is_fair)
        return 0.0 if self.problem else self.score.points(self.case.grade, unknown_is_fair=fair)


def unavailable(suite: str) -> str:
    """Why this machine cannot run a suite, in a sentence; "" if it can."""
    if suite != "netns":
        return ""
    if os.geteuid() != 0:
        return "network namespaces need root"
    tried = subprocess.run(["unshare", "--net", "ip", "link"], capture_output=True, text=True) if _has_tools() else None
    if tried is None:
        return "network namespaces need the programs ip and tc (apt-get install iproute2)"
    if tried.returncode:
        return f"no network namespace can be made here ({tried.stderr.strip()[:100]})"
    return ""


def _has_tools() -> bool:
    return all(shutil.which(name) for name in ("unshare", "ip", "tc"))


def run(case: Case, draw: Draw, *, keep: Path | None = None) -> Result:
    """Run a case once. keep: a folder for what the job and eroica wrote; None = deleted."""
    began = time.perf_counter()
    with _folder(keep) as out:
        try:
            if case.suite == "synthetic":
                made, delay, problem = make(case, draw), None, ""
            else:
                made, delay, problem = _train(case, draw, out)
        except CaseError as error:
            made, delay, problem = Made(truth=Truth(hosts=()), diagnoses=()), None, str(error)
        judged = score(made.diagnoses, made.truth)
        shown = made.windows if case.kind in ("slow", "control") else ()  # windows hold steps, and a hang has none
        named = baselines.all_of(shown, made.truth.world_size)
    return Result(
        case=case,
        draw=draw,
        score=judged,
        truth=made.truth,
        diagnoses=made.diagnoses,
        named=named,
        seconds=time.perf_counter() - began,
        to_diagnosis_s=delay,
        problem=problem,
    )


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        shutil.rmtree(keep, ignore_errors=True)
        keep.mkdir(parents=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="eroica-evals-") as name:
        yield Path(name)


def make(case: Case, draw: Draw) -> Made:
    """Call a synthetic case's module."""
    program = case.folder / case.recipe.program
    spec = importlib.util.spec_from_file_location(program.stem, program)
    if spec is None or spec.loader is None:
        raise CaseError(f"{program.name} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[program.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    made = module.make(case, draw)
    assert isinstance(made, Made)
    return made


def _train(case: Case, draw: Draw, out: Path) -> tuple[Made, float | None, str]:
    """Train under `eroica run` until the right answer has been given for a while, or in vain for `timeout_s`."""
    command = command_of(case, draw, out)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | dict(case.recipe.environment)
    environment = {name: value for name, value in environment.items() if value}
    with (out / "job.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=out, start_new_session=True,
            preexec_fn=_end_with_the_runner,
        )  # fmt: skip
        try:
            delay, status = _watch(case, process, out)
        finally:
            _end(process)
    planted = _read(out / "planted.json")
    tail = _tail(out / "job.log")
    if planted is None:
        return (
            Made(truth=Truth(hosts=()), diagnoses=()),
            None,
            f"the job planted nothing (exit status {status}): {tail}",
        )
    truth, diagnoses = truth_of(case, planted), _diagnoses(out)
    problem = ""
    if case.is_control and status not in (0, None):
        problem = f"the healthy job ended with status {status}: {tail}"
    since_ns = 0 if case.is_control else int((planted.get("onset") or {}).get("wall_ns", 0))
    windows = tuple(baselines.windows_in(out / "eroica", since_ns))[-1:]
    return Made(truth=truth, diagnoses=diagnoses, windows=windows), delay, problem


_PR_SET_PDEATHSIG = 1


def _end_with_the_runner() -> None:
    """In the new process: a job that hangs must not stay when the runner is killed, and spoil whatever runs next."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def command_of(case: Case, draw: Draw, out: Path) -> list[str]:
    """The command line, as a user would type it."""
    words = [sys.executable, "-m", "eroica", "run", "--out", str(out / "eroica"), "--job", case.id]
    words += ["--keep-captures", "--keep-rings", "--", sys.executable]
    if case.recipe.launch == "torchrun":
        words += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.recipe.ranks}"]
    words += [str(case.folder / case.recipe.program), "--out", str(out), "--seed", str(draw.seed)]
    return [*words, "--effect", str(draw.effect), "--shape", draw.shape]


_LOOK_S = 0.25


def _watch(case: Case, process: subprocess.Popen[bytes], out: Path) -> tuple[float | None, int | None]:
    """Seconds from the onset to the right answer, and the exit status; None for what did not come."""
    deadline, right_since, delay = time.monotonic() + case.recipe.timeout_s, None, None
    while time.monotonic() < deadline:
        try:
            return delay, process.wait(_LOOK_S)
        except subprocess.TimeoutExpired:
            pass
        planted = None if case.is_control else _read(out / "planted.json")
        # Of several faults, one is planted after the other.
        if planted is not None and len(planted["faults"]) >= len(case.faults) and right_since is None:
            judged = score(_diagnoses(out), truth_of(case, planted))
            if judged.found and all(judged.found):
                right_since = time.monotonic()
                delay = right_since - planted["onset"]["monotonic_ns"] / 1e9
        if right_since is not None and time.monotonic() > right_since + case.recipe.settle_s:
            break
    return delay, None


_PATIENCE_S = 20.0


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the job as Ctrl-C does, and what is left of it for good: a rank that is stopped does not mind a SIGTERM, and
    has a session of its own."""
    left = [handle for pid in _below(process.pid) if (handle := _handle_of(pid)) is not None]
    for sign in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(sign)
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                continue
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for handle in left:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)


def _below(pid: int) -> list[int]:
    """Its children, and theirs."""
    own = [child.pid for child in processes.children(pid)]
    return own + [below for child in own for below in _below(child)]


def _handle_of(pid: int) -> int | None:
    """It means this process, even when its number is another's."""
    with suppress(ProcessLookupError):
        return os.pidfd_open(pid)
    return None


def _read(file: Path) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    return record


def _tail(file: Path) -> str:
    lines = [line for line in file.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-300:]


def _diagnoses(out: Path) -> tuple[Diagnosis, ...]:
    """All that `eroica run` has said so far, in the order of saying."""
    try:
        lines = (out / "eroica" / "incidents.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return ()
    names = [name for line in lines if line.strip() for name in json.loads(line)["files"] if name.endswith(".json")]
    return tuple(from_json(json.loads((out / "eroica" / name).read_text())) for name in names)


def truth_of(case: Case, planted: Mapping[str, Any]) -> Truth:
    """The case's answers with the ranks and places that its job has planted."""
    hosts = tuple(planted["hosts"])
    faults: Sequence[Mapping[str, Any]] = planted["faults"]
    if len(faults) < len(case.faults):
        raise CaseError(f"{case.id}: {len(faults)} of {len(case.faults)} faults were planted")
    expected = []
    for answer, fault in zip(case.faults, faults, strict=False):
        ranks = frozenset(fault["ranks"])
        named = frozenset(fault.get("hosts") or ()) or frozenset(hosts[rank] for rank in ranks)
        places = tuple(Place(file=p["file"], first=p["first"], last=p["last"]) for p in fault["places"])
        links = frozenset(fault.get("links") or ())
        expected.append(Expected(answer, ranks, named, planted.get("cost_s"), places=places, links=links))
    return Truth(hosts=hosts, faults=tuple(expected), tolerated=case.tolerated)
