"""What makes two incidents the same problem: their kind, cause, scope and place in the code, without who and how much.

Ranks, hosts, devices and figures change from one time to the next and from job to job; the function and line that a
finding names do not, nor does the variable of a setting. Where neither is known, cause and scope alone would call
unlike things alike if the cause is `unknown`: such an incident is like no other. Heuristic: it is wrong where unlike
problems come to light in the same line, and where the same problem moves with an edit of the file. That is why what was
seen before is shown beside a diagnosis and changes nothing in it. Pure. Used by `store`.
"""

from __future__ import annotations

import hashlib
import json
import re

from eroica.findings import Diagnosis, Finding, FunctionName

_NUMBER = re.compile(r"\d+")
_UNLIKE = ("healthy", "no_data", "recovered")
"""Kinds in which nothing is wrong that could come again."""


def fingerprint(diagnosis: Diagnosis) -> str:
    """Equal for incidents of the same problem; "" for one that is like no other."""
    verdict = diagnosis.verdict
    first = diagnosis.findings[0] if diagnosis.findings else None
    place = _place(first.function) if first is not None and first.function is not None else []
    named = _named(first, diagnosis) if first is not None and not place else []
    if diagnosis.kind in _UNLIKE or (verdict.cause == "unknown" and not place):
        return ""
    parts = [diagnosis.kind, verdict.cause, verdict.scope, place, named]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _place(function: FunctionName) -> list[str]:
    """The function, and the file and line of the user's own code, wherever that is checked out."""
    where = function.user_location or function.location or ""
    return [function.kind, _NUMBER.sub("#", function.name), where.rpartition("/")[2]]


def _named(finding: Finding, diagnosis: Diagnosis) -> list[str]:
    """Settings, counters and exceptions that the finding rests on, by name."""
    names = set()
    for number in finding.evidence:
        values = diagnosis.evidence[number].values if number in diagnosis.evidence else {}
        for key in ("name", "exception"):
            if isinstance(values.get(key), str):
                names.add(_NUMBER.sub("#", values[key].partition(":")[0])[:200])
    return sorted(names)
