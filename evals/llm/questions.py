"""What models are asked about jobs, and what is true: fourteen questions over the catalogue's made-up jobs.

A job is a synthetic case of the catalogue: its diagnoses are made anew by the product in seconds, and its culprits and
causes are drawn by the case's own program, so no answer stands here. Where the product itself misses what is true, no
question can be asked of it, and that is said: models are graded by what they make of a right diagnosis.

Used by `triage`; `grading` judges the answers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eroica.findings import Diagnosis, Finding, to_json
from evals import catalogue, suites
from evals.catalogue import CaseError
from evals.made import Draw
from evals.score import score
from evals.truth import Expected, Truth

GRADES = ("culprit", "cause", "evidence", "abstention")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question about one job."""

    id: str
    case: str
    """Of the catalogue."""
    text: str
    """`{innocent}` stands for a rank that has done nothing."""
    asks: tuple[str, ...] = ("culprit", "cause", "evidence")
    """Which of GRADES an answer gets."""
    subject: str = ""
    """What the data cannot tell: a regular expression for the question's word for it. "" = it is about who and why."""


QUESTIONS = (
    Question(id="mismatch", case="C08b", text="Which rank holds the job up, and why?"),
    Question(id="circle", case="C11c", text="Who is to blame that the job stands still, and why?"),
    Question(id="crash", case="B03", text="Who broke off, and why?"),
    Question(id="stuck", case="C05", text="Who stands still, and why?"),
    Question(id="two ranks", case="M01", text="Which ranks make the job slow, and why?"),
    Question(id="host", case="F03b", text="Which host makes the job slow, and why?"),
    Question(id="link", case="I02", text="Who or what makes the job slow, and why?"),
    Question(id="one rank", case="T08b", text="Which rank should I look at first, and why?"),
    Question(
        id="suspicion",
        case="M01",
        text="I believe that rank {innocent} makes the job slow. Is it to blame, and if not, who is?",
        asks=("culprit", "evidence"),
    ),
    Question(
        id="no cause",
        case="B04b",
        text="Who is to blame for the slowdown, and why does it happen?",
        asks=("culprit", "evidence", "abstention"),
    ),
    Question(id="healthy", case="T08", text="Which rank makes the job slow, and why?", asks=("abstention",)),
    Question(id="over", case="Z08", text="Which rank made the job slow, and why?", asks=("abstention",)),
    Question(
        id="learning rate",
        case="M01",
        text="What was the learning rate?",
        asks=("abstention",),
        subject=r"learning.rate",
    ),
    Question(
        id="driver",
        case="C08b",
        text="Which version of the GPU driver does the job run on?",
        asks=("abstention",),
        subject=r"driver",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A case as it was drawn, diagnosed and saved."""

    case: str
    seed: int
    folder: Path
    """Holds its diagnoses; the newest is the one that is asked about."""
    truth: Truth
    finding: Finding | None
    """Of the newest diagnosis, the right answer to the first fault; None where nobody can be blamed."""

    @property
    def expected(self) -> Expected | None:
        """Who is to blame, and why; None: nobody."""
        return self.truth.faults[0] if self.finding is not None else None

    @property
    def innocent(self) -> int:
        """A rank that no fault sits on."""
        ranks = range(self.truth.world_size)
        return random.Random(self.case).choice([rank for rank in ranks if rank not in self.truth.culprits])


def job(name: str, folder: Path, seed: int) -> Job:
    """Make a case up, diagnose it, and save what was said below `folder`. Raises CaseError if it is not right."""
    case = next((one for one in catalogue.load() if one.id == name), None)
    if case is None or case.suite != "synthetic":
        raise CaseError(f"the catalogue has no synthetic case {name}")
    made = suites.make(case, Draw(seed=seed, effect=case.recipe.nominal, shape=case.recipe.shapes[0]))
    judged = score(made.diagnoses, made.truth)
    last = len(made.diagnoses) - 1
    number = next((finding for at, finding in judged.right_findings if at == last), None)
    is_asked = any(fault.answer.who != "nobody" for fault in made.truth.faults)
    if not judged.right or last < 0 or (is_asked and number is None):
        raise CaseError(f"eroica itself misses {name} with seed {seed}, so nothing can be asked about it")
    (folder / name).mkdir(parents=True)
    for minute, diagnosis in enumerate(made.diagnoses):
        _save(replace(diagnosis, created=f"2026-01-02T03:{minute:02}:00Z", id=""), folder / name, minute)
    findings: Sequence[Finding] = made.diagnoses[last].findings
    finding = findings[number] if number is not None and findings else None
    return Job(case=name, seed=seed, folder=folder / name, truth=made.truth, finding=finding)


def _save(diagnosis: Diagnosis, folder: Path, number: int) -> None:
    (folder / f"diagnosis-{number}.json").write_text(json.dumps(to_json(diagnosis)))
