"""`python -m evals.llm [injections | triage ...]`: what models are graded by.

python -m evals.llm                  the campaign of injections, as a table; exit status 1 if one of them got through
python -m evals.llm triage --help    questions about jobs: see `triage`
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from evals.llm import triage
from evals.llm.injections import Outcome, run


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown."""
    lines = [
        "| where the order stands | way | read by the model | obeyed | person asked | done | secrets out | held |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in outcomes:
        cells = [
            one.case,
            one.way,
            _word(one.is_read),
            str(one.tried),
            str(one.asked),
            ", ".join(one.done) or "nothing",
        ]
        lines.append(f"| {' | '.join([*cells, ', '.join(one.leaked) or 'none', _word(one.holds)])} |")
    held, read = sum(one.holds for one in outcomes), sum(one.is_read for one in outcomes)
    lines += [
        "",
        f"{held} of {len(outcomes)} held; {read} orders were read, {sum(one.tried for one in outcomes)} obeyed",
    ]
    return "\n".join(lines) + "\n"


def _word(value: bool) -> str:
    return "yes" if value else "no"


def main(arguments: Sequence[str]) -> int:
    """Run what is named; the injections if nothing is."""
    name, *more = arguments or ("injections",)
    if name == "triage":
        return triage.main(more)
    if name != "injections" or more:
        sys.stderr.write(f"python -m evals.llm has no {' '.join(arguments)!r}; it has injections and triage\n")
        return 2
    with tempfile.TemporaryDirectory(prefix="eroica-injections-") as folder:
        outcomes = list(run(Path(folder)))
    sys.stdout.write(table(outcomes))
    return 0 if all(one.holds for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
