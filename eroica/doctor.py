"""What this machine can and cannot observe, and how to mend it: `eroica doctor`.

It runs a small training under the probe, in the Python that trains, then every check of `checks`. "unknown" is an
answer: a check that fails says so and no more. It diagnoses no job: that a setting hurts is a hint here, not a finding.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from eroica import launch, ring
from eroica.checks import CHECKS, Answer, Machine, Trial, short
from eroica.untrusted import clean

SCHEMA = "eroica.doctor/1"
TRIAL_LIMIT_S = 120.0
"""For importing torch and three steps; some 3 s on a disk that is awake."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line."""

    group: str
    name: str
    answer: Answer
    text: str
    """What was seen."""
    mend: str = ""
    """What would make it better; "" if nothing is to do."""


def examine(machine: Machine) -> list[Check]:
    """All checks, in the order of a reader's questions. Raises nothing."""
    try:
        trial = try_training(machine)
    except Exception as error:
        trial = Trial({}, short(error), -1, 0)
    found: list[Check] = []
    for group, checks in CHECKS.items():
        for name, check in checks.items():
            try:
                answer, text, mend = check(machine, trial)
            except Exception as error:
                answer, text, mend = "unknown", f"cannot be told: {short(error)}", ""
            found.append(Check(group, name, answer, clean(text), mend))
    return found


def render_text(checks: list[Check]) -> str:
    """One line each, under the names of their groups."""
    width = max((len(check.name) for check in checks), default=0)
    lines: list[str] = []
    group = ""
    for check in checks:
        if check.group != group:
            lines += ([""] if lines else []) + [check.group]
            group = check.group
        mend = f" -> {check.mend}" if check.mend else ""
        lines.append(f"  {check.answer:<8} {check.name:<{width}}  {check.text}{mend}")
    return "\n".join(lines) + "\n"


def render_json(checks: list[Check]) -> str:
    """The same, for programs; schema `eroica.doctor/1`."""
    return json.dumps({"schema": SCHEMA, "checks": [asdict(check) for check in checks]}, indent=1) + "\n"


def try_training(machine: Machine) -> Trial:
    """Run `eroica/demos/trial.py` armed, in the Python that trains, and look what the probe saw."""
    script = Path(__file__).parent / "demos" / "trial.py"
    # A launcher's variables would make the trial one of eight ranks.
    ours = {name: value for name, value in machine.environ.items() if name not in ("RANK", "WORLD_SIZE", "EROICA")}
    ours = {name: value for name, value in ours.items() if not name.startswith(("SLURM_", "OMPI_", "PMI_"))}
    with launch.Workspace.create(machine.environ) as workspace:
        environment = launch.environment_for(workspace.path, {}, base=ours)
        try:
            done = subprocess.run(
                [machine.python, str(script)],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=TRIAL_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return Trial({}, f"{machine.python} took more than {TRIAL_LIMIT_S:.0f} s for three steps", -1, 0)
        except OSError as error:
            return Trial({}, f"{machine.python} cannot be started ({error.strerror})", -1, 0)
        lines = done.stdout.decode(errors="replace").splitlines()
        try:
            said = json.loads(lines[-1])
        except (ValueError, IndexError):
            last = (done.stderr.decode(errors="replace").splitlines() or ["it said nothing"])[-1]
            return Trial({}, f"{machine.python} ended with status {done.returncode}: {last[:200]}", -1, 0)
        flights = [ring.read_flight(path) for path in workspace.path.glob(f"*{ring.SUFFIX}")]
    if not flights:
        return Trial(said, "", -1, 0)
    records = flights[0].records
    return Trial(said, "", flights[0].words[ring.NUM_STEPS], sum(r.kind == ring.COLLECTIVE for r in records))
