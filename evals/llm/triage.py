"""`python -m evals.llm triage`: questions about jobs, as `eroica chat` asks them, graded on what is true.

    python -m evals.llm triage                               # without a model: the diagnosis' own words, the baseline
    python -m evals.llm triage --model qwen3-32b --repeat 3  # and a model: options and variables as for `eroica chat`
    python -m evals.llm triage --results FILE --board FILE   # a line for each answer; the tables

Each question is a conversation of its own with the MCP server's tools over a folder of diagnoses. An answer in which a
limit left no words is wrong in all that was asked; an endpoint that fails ends the run with what it said. Tokens are as
the endpoint counts them, else estimated. Grades measure, so they leave the exit status alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from eroica.assist import endpoints, grounding
from eroica.assist.answering import answer
from eroica.assist.conversing import Conversation
from eroica.assist.endpoints import Endpoint
from eroica.assist.toolbox import opened
from eroica.errors import EroicaError, UserError
from eroica.given import amount, count
from eroica.untrusted import clean
from evals.catalogue import CaseError
from evals.llm import grading, tables
from evals.llm.questions import GRADES, QUESTIONS, Job, Question, job
from mcp_server.reader import Setup
from mcp_server.server import build
from mcp_server.sources import DiagnosisFolder

NO_MODEL = "no model"
SEED = 7
MOST_PRICE = 1e5
MOST_SHOWN = 120
"""Characters of a cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Of a million tokens."""

    per_million_in: float
    per_million_out: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One answer and its grades."""

    model: str
    question: str
    case: str
    turn: int
    """Which repeat, from 0."""
    seed: int
    grades: Mapping[str, bool | None]
    """By name, of `GRADES`; None = not asked."""
    named: str
    """Whom the answer blames."""
    num_unsupported: int
    """Sentences that `eroica chat` would mark."""
    tools: Sequence[str]
    tokens_in: int | None
    """None: no model was asked, or it gave no answer."""
    tokens_out: int | None
    cost: float | None
    """In the money of the prices; None: not told."""
    seconds: float
    asked: str
    answer: str
    problem: str = ""
    """Why there is no answer."""

    @property
    def key(self) -> tuple[object, ...]:
        """What must be the same each time for a question to be stable."""
        return (tuple(self.grades.items()), self.named)


def ask(question: Question, about: Job, endpoint: Endpoint | None, price: Price | None, turn: int) -> Row:
    """Ask one question and grade the answer. Raises UnavailableError if the endpoint fails."""
    text = question.text.format(innocent=about.innocent) if "{" in question.text else question.text
    begun = time.monotonic()
    tools: Sequence[str] = ()
    tokens_in = tokens_out = None
    problem = ""

    async def talk() -> tuple[Sequence[grounding.Piece], Sequence[str]]:
        nonlocal tools, tokens_in, tokens_out, problem
        async with opened(build(Setup(source=DiagnosisFolder(about.folder))), lambda question: False) as box:
            if endpoint is None:
                told = [*await box.know(), await box.call("list_incidents", {"with_healthy": True})]
                pieces: Sequence[grounding.Piece] = grounding.check(answer(text, told), box.shown())
            else:
                try:
                    reply = await Conversation(endpoint, box).ask(text)
                except UserError as error:
                    problem = str(error)
                    return (), ()
                pieces, tools = reply.pieces, reply.tools
                tokens_in, tokens_out = reply.tokens - reply.tokens_out, reply.tokens_out
            return pieces, tuple(box.shown().evidence)

    pieces, shown = asyncio.run(talk())
    said = "".join(piece.text for piece in pieces)
    grades = grading.grade(question, about, said, pieces, shown)
    if problem:  # silence is no abstention
        grades = {name: None if right is None else False for name, right in grades.items()}
    cost = None
    if price is not None and tokens_in is not None and tokens_out is not None:
        cost = (tokens_in * price.per_million_in + tokens_out * price.per_million_out) / 1e6
    return Row(
        model=clean(endpoint.model, 80) if endpoint is not None else NO_MODEL,
        question=question.id,
        case=about.case,
        turn=turn,
        seed=about.seed,
        grades=grades,
        named=grading.named(said, about.truth).text,
        num_unsupported=sum(piece.status not in grounding.KEPT for piece in pieces),
        tools=tools,
        tokens_in=tokens_in,
        tokens_out=tokens_out,
        cost=cost,
        seconds=round(time.monotonic() - begun, 3),
        asked=text,
        answer=said,
        problem=problem,
    )


def made(questions: Sequence[Question], folder: Path, seed: int = SEED) -> dict[str, Job]:
    """The jobs that are asked about, below `folder`. Raises CaseError if one is not as its questions take it to be."""
    jobs = {name: job(name, folder, seed) for name in dict.fromkeys(one.case for one in questions)}
    for one in questions:
        finding = jobs[one.case].finding
        if "abstention" in one.asks and not one.subject and finding is not None and finding.cause != "unknown":
            raise CaseError(f"eroica knows the cause of {one.case} with seed {seed}, so {one.id!r} cannot be asked")
    return jobs


def run(
    questions: Sequence[Question],
    jobs: Mapping[str, Job],
    endpoint: Endpoint | None,
    *,
    price: Price | None = None,
    repeat: int = 1,
) -> Iterator[Row]:
    """All answers, as they come: of the model, or without one if `endpoint` is None."""
    for turn in range(repeat):
        for one in questions:
            yield ask(one, jobs[one.case], endpoint, price, turn)


def stability(rows: Sequence[Row]) -> float | None:
    """Share of questions whose grades and blamed are the same in all repeats; None = asked once."""
    by_question: dict[str, list[Row]] = {}
    for row in rows:
        by_question.setdefault(row.question, []).append(row)
    if not rows or any(len(same) < 2 for same in by_question.values()):
        return None
    return sum(len({row.key for row in same}) == 1 for same in by_question.values()) / len(by_question)


# ---- tables


def table(rows: Sequence[Row]) -> str:
    """Markdown: each who was asked on a line; then each question, with its share of right answers if asked often."""
    models = list(dict.fromkeys(row.model for row in rows))
    lines = _lines(
        ["answered by", *GRADES, "all right", "tokens in", "tokens out", "cost", "seconds", "stable"],
        [_sums(model, [row for row in rows if row.model == model]) for model in models],
    )
    for model in models:
        own = [row for row in rows if row.model == model]
        cells = []
        for name in dict.fromkeys(row.question for row in own):
            same = [row for row in own if row.question == name]
            cells.append([name, same[0].case, *(_share(same, grade) for grade in GRADES), *_spent(same), same[0].named])
        heading = ["question", "case", *GRADES, "tokens in", "tokens out", "cost", "seconds", "blamed"]
        lines += ["", f"Answered by {model}:", "", *_lines(heading, cells)]
    return "\n".join(lines) + "\n"


def _sums(model: str, rows: Sequence[Row]) -> list[str]:
    num = sum(grading.right(row.grades) for row in rows)
    stable = stability(rows)
    shares = [_share(rows, grade, is_count=True) for grade in GRADES]
    return [
        model, *shares, f"{num} of {len(rows)}", *_spent(rows), "asked once" if stable is None else f"{stable:.0%}"
    ]  # fmt: skip


def _share(rows: Sequence[Row], grade: str, *, is_count: bool = False) -> str:
    asked = [row.grades[grade] for row in rows if row.grades[grade] is not None]
    if not asked:
        return "not asked"
    num = sum(map(bool, asked))
    if not is_count and num in (0, len(asked)):
        return "right" if num else "wrong"
    return f"{num} of {len(asked)}"


def _spent(rows: Sequence[Row]) -> list[str]:
    """Tokens, cost and seconds of all together; a sum of which a part is not known is not known."""
    seconds = f"{sum(row.seconds for row in rows):.1f}"
    if all(row.model == NO_MODEL for row in rows):
        return ["none", "none", "none", seconds]
    sums = []
    for values in ([row.tokens_in for row in rows], [row.tokens_out for row in rows]):
        known = [value for value in values if value is not None]
        sums.append(f"{sum(known):,}" if len(known) == len(values) else "not told")
    costs = [row.cost for row in rows if row.cost is not None]
    cost = f"{sum(costs):.3g}" if costs and len(costs) == len(rows) else "not told"
    return [*sums, cost, seconds]


def _lines(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [tables.row(cells, MOST_SHOWN) for cells in (heading, ["---"] * len(heading), *rows)]


# ---- the command


def _progress(row: Row, num: int, rows: Sequence[Row]) -> str:
    """One answer in a line, as it comes: a model may take minutes for each."""
    nth = sum(other.model == row.model for other in rows)
    wrong = [grade for grade, is_right in row.grades.items() if is_right is False]
    what = f"wrong in {', '.join(wrong)}" if wrong else "right"
    return f"[{nth}/{num}] {row.model}: {row.question} ... {what} ({row.seconds:.1f} s)"


def main(arguments: Sequence[str]) -> int:
    """Ask, show, and keep what was answered."""
    parser = argparse.ArgumentParser(
        prog="python -m evals.llm triage", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", metavar="NAME", help="who is asked (default: EROICA_MODEL, else nobody)")
    parser.add_argument(
        "--question", action="append", choices=[one.id for one in QUESTIONS], help="only this one; may be repeated"
    )
    parser.add_argument("--repeat", type=count, default=1, metavar="N", help="how often each is asked (1)")
    parser.add_argument("--seed", type=count, default=SEED, metavar="N", help=f"draws the culprits ({SEED})")
    of_price = amount(MOST_PRICE, "price of a million tokens")
    parser.add_argument("--price-in", type=of_price, metavar="X", help="of a million tokens that are read")
    parser.add_argument("--price-out", type=of_price, metavar="X", help="of a million tokens that are written")
    parser.add_argument("--results", type=Path, metavar="FILE", help="a line for each answer is added here")
    parser.add_argument("--board", type=Path, metavar="FILE", help="the tables are written here, too")
    options = parser.parse_args(arguments)
    if (options.price_in is None) != (options.price_out is None):
        parser.error("--price-in and --price-out belong together")
    price = None
    if options.price_in is not None:
        price = Price(per_million_in=options.price_in, per_million_out=options.price_out)
    chosen = [one for one in QUESTIONS if not options.question or one.id in options.question]
    rows: list[Row] = []
    try:
        endpoint = endpoints.find(options.model, os.environ)
        with tempfile.TemporaryDirectory(prefix="eroica-triage-") as folder:
            jobs = made(chosen, Path(folder), options.seed)
            for whom in (None, endpoint) if endpoint is not None else (None,):  # the baseline first
                for row in run(chosen, jobs, whom, price=price, repeat=options.repeat):
                    rows.append(row)
                    sys.stderr.write(f"{_progress(row, len(chosen) * options.repeat, rows)}\n")
                    if options.results is not None:
                        with open(options.results, "a", encoding="utf-8") as file:
                            file.write(json.dumps(asdict(row)) + "\n")
    except (EroicaError, CaseError) as error:
        sys.stderr.write(f"triage: {error} ({len(rows)} questions were answered before)\n")
        return 1
    shown = table(rows)
    sys.stdout.write(shown)
    if options.board is not None:
        options.board.write_text(f"{ABOUT}\n{shown}", encoding="utf-8")
    return 0


ABOUT = """# Questions about jobs, answered and graded

Made by `python -m evals.llm triage --board FILE`. Each question is about a made-up job of the catalogue and is asked as
`eroica chat` asks it, without a model and, where one was named, of it. Culprit: exactly those who are to blame, and
nobody else. Cause: in its words, and no other one. Evidence: cites some that bears the finding out, and none that was
not shown. Abstention: says that it is not known, or that nothing is wrong, and makes nothing up. Words are compared; no
model judges.
"""
