"""The measured processes of `bench.scale`: python -m bench.scale_work WHAT ARGUMENTS. Prints one JSON object.

Times are of the work alone; memory is of the whole process, its input and the making of it included.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from bench.process import peak_bytes, tell

T = TypeVar("T")


def localize(num_ranks: str) -> None:
    """Summaries of a job with a planted fault, stacked, localized and diagnosed in this process."""
    from bench.fleet import PER_HOST, Fleet
    from eroica.diagnosis import diagnose
    from eroica.findings import to_json
    from eroica.localization import localize_stacked, roles_of
    from eroica.offline import keep_freed_memory
    from eroica.pattern import stack

    keep_freed_memory()  # as `eroica diagnose` does
    fleet = Fleet(int(num_ranks))
    summaries = list(fleet.summaries())
    made = peak_bytes()
    parts: dict[str, float] = {}

    def timed(name: str, work: Callable[..., T], *arguments: Any) -> T:
        began = time.perf_counter()
        result = work(*arguments)
        parts[name] = time.perf_counter() - began
        return result

    stacked = timed("stack", stack, summaries)
    stack_peak = peak_bytes()
    answer = timed("localize and diagnose", diagnose, stacked)
    peak = peak_bytes()
    text = timed("to JSON", to_json, answer)
    # Two of its parts once more, for the split.
    timed("localize alone", localize_stacked, stacked, timed("roles alone", roles_of, stacked))
    first = answer.findings[0] if answer.findings else None
    right = (
        first is not None
        and len(answer.findings) == 1
        and (first.scope, first.cause, first.ranks) == ("rank", "input_pipeline", str(fleet.culprit))
        and first.hosts == (f"node{fleet.culprit // PER_HOST:06d}",)
    )
    tell(
        ranks=fleet.num_ranks,
        right=right,
        summary=answer.verdict.summary,
        id=text["id"],
        made=made,
        stack_peak=stack_peak,
        peak=peak,
        parts=parts,
    )


WORK: dict[str, Callable[..., None]] = {"localize": localize}

if __name__ == "__main__":
    WORK[sys.argv[1]](*sys.argv[2:])
