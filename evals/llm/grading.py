"""Whether an answer in words is right: whom it blames, for what, on which evidence, and whether it says "not known".

Pure, and no model judges: words of the answer against what is true of the job. Clauses that only look back on somebody
(who waits, is compared, is ruled out) blame nobody, nor does a line that quotes evidence or a note. Heuristic, English
only: it is wrong where an answer blames by a pronoun, or clears somebody in words that are not listed here; so whole
answers are kept beside their grades.

Used by `triage`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from eroica import wording
from eroica.assist.grounding import Piece, Status
from eroica.job import format_ranks
from evals.llm.questions import Job, Question
from evals.truth import Expected, Truth

_QUOTE = re.compile(r"^\W*(?:E\d{1,4}|note): .*$", re.M)
_CLAUSE = re.compile(
    r"(?<=[.!?])\s+|\n+|;\s|,?\s(?=(?:while|whereas|where|but|although)\b)|,\s(?=(?:not|and (?:not|so|the)|so)\b)"
)
_CONTRAST = re.compile(r"(?:while|whereas|where)\b", re.I)
_RANKS = re.compile(
    r"\branks?[\s#-]*(?P<ranks>\d{1,6}(?:\s?(?:[-–]|to)\s?\d{1,6})?(?:(?:\s?,\s?(?:and\s|&\s)?|\s(?:and|&)\s)\d{1,6}"
    r"(?:\s?(?:[-–]|to)\s?\d{1,6})?)*)",
    re.I,
)
_ALL = re.compile(
    r"\ball (?:of )?(?:the )?(?:\d+ )?(?:ranks|members|of them)|\b(?:every|each) rank|\bwhole job"
    r"|\bno (?:single|particular) rank",
    re.I,
)
_BEHIND = re.compile(
    r"\b(?:wait\w*|stuck|blocked|held up|delayed|slowed(?: down)?|victims?) (?:for|on|behind|by|of)\b[^,]*$", re.I
)
_AGAINST = re.compile(
    r"\b(?:not|than|unlike|instead of|peers?|others?|victims?|wait\w*|compared (?:with|to)|innocent|healthy)\b[^,]*$",
    re.I,
)
_CLEARED = re.compile(
    r"\b(?:wait\w*|victims?|innocent|consequences?|(?:is|are|was|were) (?:not|no|healthy|normal|fine|only)|compared"
    r"|nothing (?:is |was )?(?:wrong|differs|found)|not (?:to blame|at fault))\b",
    re.I,
)  # fmt: skip
_NEXT = re.compile(r",(?! an? )|\b(?:than|others?|which|that|ranks?)\b", re.I)
"""From here on a clause is about somebody else than whom it has named."""
_MAKES = re.compile(r"\b(?:mak|let|leav|keep|hold|caus|forc|block)\w*", re.I)
_DOUBT = re.compile(
    r"\b(?:ruled out|not|no|nor|neither|without|guess\w*|may|might|could|rather than|instead of)\b", re.I
)
_NOBODY = re.compile(
    r"\bno (?:cause|rank|culprit|fault|problem|one|host)\b|\bnobody\b|\bhealthy\b"
    r"|\bnothing (?:is |was )?(?:wrong|found|differs|stands)",
    re.I,
)
_NOT_KNOWN = re.compile(
    r"\b(?:unknown|not (?:known|told|shown|recorded|available|given|contained|in (?:the|what|this)|part of)"
    r"|(?:can ?not|can't|could not) (?:be )?(?:t[eo]ll?d?|say|said|know|determin\w+|see|find|found)"
    r"|(?:does|do|did) not (?:say|tell|show|record|contain|include|know|have)|no (?:information|data|cause|record)"
    r"|nothing (?:\w+ ){0,3}(?:about|on|of))\b",
    re.I,
)
_OF_ITSELF = re.compile(
    r"(?:it|who|this|that|which|i|we|sorry|no|there|nothing|the (?:data|evidence|diagnos[ei]s|tools?|answer))\b",
    re.I,
)
"""How a clause begins that may say "not known" of what was asked, without its word."""
_ALSO = {
    "exception": r"\w+(?:Error|Exception)\b",
    "collective_mismatch": r"\bmismatch\w*",
    "memory_allocator": r"\ballocator",
}
"""Other plain words for a cause, as regular expressions."""


@dataclass(frozen=True, slots=True)
class Named:
    """Whom an answer blames."""

    ranks: frozenset[int] = frozenset()
    hosts: frozenset[str] = frozenset()
    is_all: bool = False
    """It says so of all ranks."""

    @property
    def text(self) -> str:
        """For people, and to compare."""
        ranks = wording.ranks(format_ranks(self.ranks)) or ("all ranks" if self.is_all else "")
        return " on ".join(filter(None, [ranks, ", ".join(sorted(self.hosts))])) or "nobody"


def grade(
    question: Question, job: Job, text: str, pieces: Sequence[Piece], shown: Sequence[str]
) -> dict[str, bool | None]:
    """Each of `GRADES`: right, wrong, or None = not asked. `pieces`: of the text; `shown`: evidence ids."""
    who = named(text, job.truth)
    judged = {
        "culprit": _is_culprit(text, who, job),
        "cause": _is_cause(text, job),
        "evidence": _is_borne_out(pieces, shown, job),
        "abstention": _abstains(question, job, text, who),
    }
    return {name: right if name in question.asks else None for name, right in judged.items()}


def named(text: str, truth: Truth) -> Named:
    """Whom the text blames."""
    ranks: set[int] = set()
    hosts: set[str] = set()
    is_all = False
    found_hosts = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, sorted(set(truth.hosts)))) or '(?!)'})(?!\w)")
    blamed = False
    for clause in _clauses(text):
        is_contrast = bool(_CONTRAST.match(clause)) and blamed
        for match in () if is_contrast else _RANKS.finditer(clause):
            if not _is_cleared(clause[: match.start()], clause[match.end() :]):
                ranks |= _ranks(match["ranks"], truth.world_size)
                blamed = True
        for match in () if is_contrast else found_hosts.finditer(clause):
            if not _is_cleared(clause[: match.start()], clause[match.end() :]):
                hosts.add(match[0])
                blamed = True
        is_all = is_all or bool(_ALL.search(clause))
    return Named(frozenset(ranks), frozenset(hosts), is_all)


def _clauses(text: str) -> Iterator[str]:
    for part in _CLAUSE.split(_QUOTE.sub("", text)):
        if part and part.strip():
            yield part.strip()


def _is_cleared(before: str, after: str) -> bool:
    """A mention between these two blames nobody: it waits, or somebody else is set against it."""
    if _BEHIND.search(before):  # "the others wait for rank 2"
        return False
    if _AGAINST.search(before):
        return True
    own = _NEXT.split(after, maxsplit=1)[0]
    cleared, makes = _CLEARED.search(own), _MAKES.search(own)
    return cleared is not None and (makes is None or makes.start() > cleared.start())


def _ranks(text: str, world_size: int) -> set[int]:
    plain = re.sub(r"\s?(?:–|\bto\b)\s?", "-", text)
    plain = re.sub(r"\s?(?:,|\band\b|&)\s?", ",", plain).replace(" ", "")
    found: set[int] = set()
    for first, last in wording.spans(re.sub(r",+", ",", plain)):
        found |= set(range(first, min(last, first + world_size) + 1))
    return found


# ---- the grades


def _is_culprit(text: str, who: Named, job: Job) -> bool:
    expected, truth = job.expected, job.truth
    if expected is None or job.finding is None:
        return who == Named() or who == Named(is_all=who.is_all)
    kind = expected.answer.who
    if kind == "ranks":
        return who.ranks == expected.ranks and who.hosts <= expected.hosts
    if kind == "among":
        return expected.ranks <= who.ranks
    if kind in ("hosts", "link") and not (who.ranks <= expected.ranks and who.hosts <= expected.hosts):
        return False
    if kind == "hosts":
        return who.hosts == expected.hosts or who.ranks == frozenset(
            rank for rank, host in enumerate(truth.hosts) if host in expected.hosts
        )
    if kind == "link":
        ends = re.findall(r"\w+", job.finding.link or "")
        return who.ranks == expected.ranks or (bool(ends) and all(re.search(rf"\b{end}\b", text) for end in ends))
    if kind == "members":
        everybody = frozenset(range(truth.world_size))
        is_on_all = who.hosts in (frozenset(), frozenset(truth.hosts))
        named_all = who.ranks in (everybody, *truth.members) or (who.is_all and not who.ranks)
        return named_all and is_on_all
    return not who.ranks and not who.hosts


def _is_cause(text: str, job: Job) -> bool:
    expected = job.expected
    return (
        expected is not None and any(_says(text, name) for name in _accepted(expected)) and not _others(text, expected)
    )


def _accepted(expected: Expected) -> frozenset[str]:
    return expected.answer.causes - {"unknown", "none"}


def _says(text: str, name: str) -> bool:
    """The text has the cause's name, or what `wording` calls it."""
    patterns = [_pattern(name), *(_literal(part) for part in wording.cause(name).split(": "))]
    return any(re.search(pattern, text, re.I) for pattern in [*patterns, *filter(None, [_ALSO.get(name)])])


def _pattern(name: str) -> str:
    """ "gpu_throttle" is also found in "GPU throttling"."""
    stems = [re.sub(r"(?:ation|e)$", "", word) if len(word) > 5 else word for word in name.split("_")]
    return r"\b" + r"[\s_-]+".join(rf"{re.escape(stem)}\w*" for stem in stems)


def _literal(text: str) -> str:
    return r"\b" + r"\s+".join(map(re.escape, text.split())) + r"\b"


def _others(text: str, expected: Expected | None) -> list[str]:
    """Causes that the text claims, too. Those of a single word are ordinary words, so they are no claims."""
    known = expected.answer.causes if expected is not None else frozenset()
    names = [name for name in wording.CAUSE_WORDS if "_" in name and name not in known]
    clauses = [clause for clause in _clauses(text) if not _DOUBT.search(clause)]
    return [name for name in names if any(re.search(_pattern(name), clause, re.I) for clause in clauses)]


def _is_borne_out(pieces: Sequence[Piece], shown: Sequence[str], job: Job) -> bool:
    """A sentence that stands the check cites evidence of the right finding, and none cites what was never shown."""
    if any(key not in shown for piece in pieces for key in piece.cited):
        return False
    wanted = set(job.finding.evidence) if job.finding is not None else set()
    return any(piece.status is Status.GROUNDED and wanted & set(piece.cited) for piece in pieces)


def _abstains(question: Question, job: Job, text: str, who: Named) -> bool:
    """It says that it does not know, blames nobody who is innocent, and makes nothing up."""
    expected = job.expected
    clauses = list(_clauses(text))
    if question.subject:
        told = [clause for clause in clauses if re.search(question.subject, clause, re.I)]
        may_say = [*told, *(clause for clause in clauses if _OF_ITSELF.match(clause))]
        made_up = any(re.search(r"\d", re.sub(r"\b[EF]\d+\b|\([^)]*\)", "", clause)) for clause in told)
        innocent = who.ranks - job.truth.culprits if expected is not None and expected.ranks else who.ranks
        return any(_NOT_KNOWN.search(clause) for clause in may_say) and not made_up and not innocent
    if expected is None:
        says = _NOBODY.search(text) or any(_NOT_KNOWN.search(one) for one in clauses if _OF_ITSELF.match(one))
        return bool(says) and not who.ranks and not who.hosts
    return bool(_NOT_KNOWN.search(text)) and not _others(text, None)


def right(grades: Mapping[str, bool | None]) -> bool:
    """All that was asked is right."""
    return all(value is not False for value in grades.values())
