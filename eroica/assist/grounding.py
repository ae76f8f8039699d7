"""Whether a text says no more than what its writer was shown: each claim cites evidence, and its numbers are there.

Pure: a text and what was shown in, claims with their problems out. A model that explains a diagnosis invents plausible
ranks, hosts and milliseconds; this takes them out again before anybody acts on them. It checks what can be checked
without understanding: that each sentence cites evidence ids, that those were shown, that numbers with units lie within
1 % of one in the cited evidence, that ranks and names with digits in them are among those shown. It cannot tell whether
a sentence follows from its evidence: a right number beside a wrong verb passes. So it marks or drops, and never
approves.

A sentence that calls itself a guess needs no evidence, but its numbers and ranks must be there all the same. Headings,
questions and blocks of code are no claims. Used by `conversing`, and by whoever else takes a text from a model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from eroica import wording
from eroica.findings import Diagnosis, Evidence

TOLERANCE = 0.01
"""Of the shown number. Reports print three digits, so rounding stays below 0.5 %; what is further off was not read."""
MOST_CHARS = 100_000
"""Of a text; beyond it nothing is a claim, and dropping drops it."""

_UNITS = {
    "us": ("s", 1e-6), "µs": ("s", 1e-6), "ms": ("s", 1e-3), "s": ("s", 1.0), "sec": ("s", 1.0), "second": ("s", 1.0),
    "seconds": ("s", 1.0), "min": ("s", 60.0), "minutes": ("s", 60.0), "h": ("s", 3600.0), "hours": ("s", 3600.0),
    "ns": ("s", 1e-9), "milliseconds": ("s", 1e-3), "microseconds": ("s", 1e-6),
    "%": ("share", 0.01), "percent": ("share", 0.01),
    "KB": ("B", 1e3), "MB": ("B", 1e6), "GB": ("B", 1e9), "KiB": ("B", 2**10), "MiB": ("B", 2**20), "GiB": ("B", 2**30),
    "MHz": ("Hz", 1e6), "GHz": ("Hz", 1e9), "x": ("", 1.0), "times": ("", 1.0), "": ("", 1.0),
}  # fmt: skip
"""Unit -> (dimension, factor)."""
_SUFFIXES = {"_s": ("s", 1.0), "_ms": ("s", 1e-3), "_us": ("s", 1e-6), "_ns": ("s", 1e-9), "_bytes": ("B", 1.0)}
"""Of names of values, by the project's own custom."""

_UNIT = "|".join(sorted((re.escape(unit) for unit in _UNITS if unit), key=len, reverse=True))
_NUMBER = re.compile(
    r"(?<![\w.])(?P<number>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3})?)"
    rf"(?:\s?(?P<unit>{_UNIT}))?(?![\w%])"
)
_RANKS = re.compile(
    r"\b[Rr]anks?\s+(?P<ranks>\d{1,9}(?:\s?[-–]\s?\d{1,9})?(?:\s?(?:,|and|&)\s?\d{1,9}(?:\s?[-–]\s?\d{1,9})?)*)"
)
_CITED = re.compile(r"\bE\d{1,4}\b")
_FINDING = re.compile(r"\bF\d{1,4}\b")
_NAME = re.compile(r"[\w./:+-]*\d[\w./:+-]*")
_ROLES = {
    "waiting": re.compile(r"\bwait|\bvictim|\bconsequence", re.I),
    "missing": re.compile(r"\bmissing|\breport|\bno data|\bwithout data|\bin part\b|\bpartial|\bnot seen", re.I),
    "peer": re.compile(r"\bpeer|\bcompar|\bother|\bwait|\bhealthy|\bnormal", re.I),
}
_GUESS = re.compile(r"\b(?:guess|guessing|speculat\w+)\b", re.I)
_SENTENCE = re.compile(
    r"(?<=[.!?])(?<!\be\.g\.)(?<!\bi\.e\.)(?<!\bcf\.)(?<!\bvs\.)[\"')\]]*\s+(?=[\"'(\[]?[A-Z0-9*_`])"
)
_LEADING_CITATION = re.compile(r"\s*[(\[]\s*E\d{1,4}(?:[\s,;&]+(?:and\s+)?E\d{1,4})*\s*[)\]][.\s]*")


class Status(StrEnum):
    """What a piece of a text is worth."""

    GROUNDED = "grounded"
    """Cites shown evidence, and its numbers and names are there."""
    GUESS = "guess"
    """Says that it is one."""
    OPEN = "open"
    """No claim: a heading, a question, code."""
    UNCITED = "uncited"
    """Claims something and cites nothing."""
    UNGROUNDED = "ungrounded"
    """Cites what was not shown, or has numbers, ranks or names that are not there."""


KEPT = frozenset((Status.GROUNDED, Status.GUESS, Status.OPEN))


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with its dimension: seconds, shares of 1, bytes, Hertz, or none."""

    value: float
    dimension: str
    text: str = ""
    """As it was written; "" if it comes from a value."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What the writer of a text had before him."""

    evidence: Mapping[str, Evidence]
    """By id: what may be cited."""
    facts: Sequence[str] = ()
    """Sentences shown beside it, such as the verdict and the coverage; their numbers and names may be used by whoever
    cites anything."""
    only_as: Sequence[tuple[str, str]] = ()
    """(role, sentence): ranks that may be named in a sentence that gives them this role, a key of _ROLES. Whoever only
    waits was shown, too, and must not be blamed for it."""
    names: Sequence[str] = ()
    """Hosts and the like that may be named."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A sentence, or what stands between two of them; the pieces of a text make the text again."""

    text: str
    status: Status
    problems: tuple[str, ...] = ()
    """Each in a few words."""
    cited: tuple[str, ...] = ()


def shown(diagnosis: Diagnosis, only: Sequence[str] | None = None) -> Shown:
    """What a diagnosis shows; `only`: the ids that were shown, if not all were."""
    evidence = {key: item for key, item in diagnosis.evidence.items() if only is None or key in only}
    facts = [wording.summary(diagnosis, 10_000), wording.iteration(diagnosis), *wording.coverage(diagnosis, 100)]
    facts += [f"diagnosis {diagnosis.id} of {diagnosis.job}, {diagnosis.created}"]
    for finding in diagnosis.findings:
        facts += [f"{finding.id} {name} {value}" for name, value in wording.facts(finding, diagnosis)]
        facts += [f"ranks {finding.ranks}", wording.pattern(finding), *finding.ruled_out, finding.advice]
    only_as = [("waiting", f"ranks {one.ranks} {one.function} {one.text}") for one in diagnosis.consequences]
    coverage = diagnosis.coverage
    only_as += [("missing", f"ranks {ranks}") for ranks in (coverage.missing_ranks, coverage.partial_ranks) if ranks]
    return Shown(evidence, tuple(facts), tuple(only_as), tuple(diagnosis.hosts))


def check(text: str, was_shown: Shown) -> list[Piece]:
    """The pieces of `text`, each with what it is worth; together they are the text."""
    sources = _Sources(was_shown)
    pieces = [_judged(piece, is_code, sources) for piece, is_code in _pieces(text[:MOST_CHARS])]
    if len(text) > MOST_CHARS:
        rest = text[MOST_CHARS:]
        pieces.append(Piece(rest, Status.UNCITED, (f"beyond the {MOST_CHARS:,} characters that are looked at",)))
    return pieces


def marked(pieces: Sequence[Piece]) -> str:
    """The whole text, with a mark after each sentence that is not grounded."""
    out = []
    for piece in pieces:
        if piece.status in KEPT:
            out.append(piece.text)
        else:
            body = piece.text.rstrip()
            out.append(f"{body} [{'; '.join(piece.problems[:3])}]{piece.text[len(body) :]}")
    return "".join(out)


def dropped(pieces: Sequence[Piece]) -> str:
    """The text without the sentences that are not grounded; their white space stays, so that lists remain lists."""
    kept = "".join(piece.text if piece.status in KEPT else piece.text[len(piece.text.rstrip()) :] for piece in pieces)
    # A bullet whose sentence is gone, and the blank lines that it leaves.
    kept = re.sub(r"(?m)^[ \t]*(?:[-*+]|\d{1,3}[.)])[ \t]*\n", "", kept)
    return re.sub(r"\n{3,}", "\n\n", kept)


def is_grounded(pieces: Sequence[Piece]) -> bool:
    """Nothing in it would be marked."""
    return all(piece.status in KEPT for piece in pieces)


# ---- pieces of a text


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """Sentences with the white space that follows them, and blocks of code whole."""
    for index, part in enumerate(re.split(r"(^[ \t]*```.*?(?:^[ \t]*```[ \t]*(?:\n|\Z)|\Z))", text, flags=re.M | re.S)):
        if index % 2:
            yield part, True
            continue
        held = ""
        for line in part.splitlines(keepends=True):
            for sentence in _sentences(line):
                cited = _LEADING_CITATION.match(sentence) if held else None
                if cited is not None:  # "Rank 3 is slow. (E1) Its disk ..."
                    held += cited[0]
                    sentence = sentence[cited.end() :]
                    if not sentence:
                        continue
                if held:
                    yield held, False
                held = sentence
        if held:
            yield held, False


def _sentences(line: str) -> Iterator[str]:
    start = 0
    for match in _SENTENCE.finditer(line):
        yield line[start : match.end()]
        start = match.end()
    if start < len(line):
        yield line[start:]


def _is_claim(body: str) -> bool:
    if not re.search(r"\w{2}", body):
        return False
    is_title = body.startswith("#") or (body.endswith(":") and len(body) < 80) or re.fullmatch(r"\*\*[^*]+\*\*:?", body)
    return bool(re.search(r"\d", body)) or not (is_title or body.endswith("?"))


# ---- what may be said


class _Sources:
    """What was shown, taken apart once."""

    def __init__(self, was_shown: Shown) -> None:
        self.evidence = {key: _Said.of_evidence(item) for key, item in was_shown.evidence.items()}
        self.facts = _Said.of_texts(was_shown.facts)
        self.only_as = [(role, _Said.of_texts([text])) for role, text in was_shown.only_as]
        texts = [*was_shown.facts, *(text for _, text in was_shown.only_as), *was_shown.names]
        self.names = {*_names(" ".join(texts)), *was_shown.names}
        for item in was_shown.evidence.values():
            self.names |= set(_names(f"{item.text} {item.source} {_flat_text(item.values)}"))


@dataclass(frozen=True, slots=True)
class _Said:
    """The numbers and ranks of something that was shown."""

    quantities: tuple[Quantity, ...]
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def of_texts(cls, texts: Sequence[str]) -> _Said:
        quantities: list[Quantity] = []
        spans: list[tuple[int, int]] = []
        for text in texts:
            quantities += _quantities(text)
            spans += _spans(text)
        return cls(tuple(quantities), tuple(spans))

    @classmethod
    def of_evidence(cls, item: Evidence) -> _Said:
        said = cls.of_texts([item.text])
        more = list(_value_quantities(item.values))
        # A merged stack begins with the ranks that stand there.
        head = re.match(r"([\d,-]+): ", item.text)
        ranks = item.values.get("ranks", item.values.get("rank"))
        named = [f"ranks {text}" for text in (head[1] if head else "", ranks if ranks is not None else "") if str(text)]
        return cls((*said.quantities, *more), (*said.spans, *(span for text in named for span in _spans(text))))


def _quantities(text: str) -> list[Quantity]:
    found = []
    for match in _NUMBER.finditer(_RANKS.sub(" ", text)):
        value = float(match["number"].replace(",", ""))
        if math.isfinite(value):
            dimension, factor = _UNITS[match["unit"] or ""]
            found.append(Quantity(value * factor, dimension, match[0]))
    return found


def _value_quantities(values: object, name: str = "") -> Iterator[Quantity]:
    if isinstance(values, Mapping):
        for key, item in values.items():
            yield from _value_quantities(item, str(key))
    elif isinstance(values, (list, tuple)):
        for item in values:
            yield from _value_quantities(item, name)
    elif isinstance(values, (int, float)) and not isinstance(values, bool) and math.isfinite(values):
        dimension, factor = next((unit for suffix, unit in _SUFFIXES.items() if name.endswith(suffix)), ("", 1.0))
        yield Quantity(abs(values) * factor, dimension)
    elif isinstance(values, str):
        yield from _quantities(values)


def _flat_text(values: object) -> str:
    if isinstance(values, Mapping):
        return " ".join(f"{key} {_flat_text(item)}" for key, item in values.items())
    if isinstance(values, (list, tuple)):
        return " ".join(_flat_text(item) for item in values)
    return str(values)


def _spans(text: str) -> list[tuple[int, int]]:
    found = []
    for match in _RANKS.finditer(text):
        found += wording.spans(re.sub(r"\s?(?:and|&)\s?", ",", match["ranks"].replace("–", "-")).replace(" ", ""))
    return found


def _names(text: str) -> Iterator[str]:
    """Words in which digits and letters meet, such as hosts, devices, files with lines and versions; and dates."""
    for match in _NAME.finditer(text):
        word = match[0].strip(".,:;/+-")
        if _CITED.fullmatch(word) or _NUMBER.fullmatch(word) or not re.search(r"\d", word):
            continue
        if re.search(r"[A-Za-z_]", word) or word.count(".") > 1 or re.fullmatch(r"\d{4}-\d\d-\d\d", word):
            yield word


# ---- the judgement


def _judged(text: str, is_code: bool, sources: _Sources) -> Piece:
    body = re.sub(r"^\s*(?:[-*+>|]|\d{1,3}[.)])\s+", "", text).strip()
    if is_code or not _is_claim(body):
        return Piece(text, Status.OPEN)
    cited = tuple(dict.fromkeys(_CITED.findall(body)))
    is_guess = bool(_GUESS.search(body))
    problems = [f"{key} was not shown" for key in cited if key not in sources.evidence]
    known = [sources.evidence[key] for key in cited if key in sources.evidence]
    # A guess may use any number that was shown: it does not say where from.
    said = [*(known if cited else sources.evidence.values() if is_guess else ()), sources.facts]
    said += [one for role, one in sources.only_as if _ROLES[role].search(body)]
    problems += _wrong(body, said, sources)
    if problems:
        return Piece(text, Status.UNGROUNDED, tuple(problems), cited)
    if is_guess:
        return Piece(text, Status.GUESS, (), cited)
    if not cited:
        return Piece(text, Status.UNCITED, ("cites no evidence",))
    return Piece(text, Status.GROUNDED, (), cited)


def _wrong(body: str, said: Sequence[_Said], sources: _Sources) -> list[str]:
    """Numbers, ranks and names in it that are in nothing of what was said."""
    problems = []
    spans = [span for one in said for span in one.spans]
    for first, last in _spans(body):
        if not _covers(spans, first, last):
            problems.append(f"rank {first}{f'-{last}' if last != first else ''} is not in the evidence cited")
    plain = _CITED.sub(" ", _FINDING.sub(" ", body))
    names = [name for name in _names(_RANKS.sub(" ", plain))]
    for name in names:
        if name not in sources.names:
            problems.append(f"{name[:60]} was not shown")
    quantities = [quantity for one in said for quantity in one.quantities]
    for quantity in _quantities(plain):
        if not any(_is_near(quantity, other) for other in quantities):
            problems.append(f"{quantity.text} is not in the evidence cited")
    return problems


def _covers(spans: Sequence[tuple[int, int]], first: int, last: int) -> bool:
    """Each of first..last lies in one of the spans; without listing them, since they may be millions."""
    reached = first
    for begin, end in sorted(spans):
        if begin <= reached <= end:
            reached = end + 1
    return reached > last


def _is_near(claimed: Quantity, other: Quantity) -> bool:
    if claimed.dimension == other.dimension:
        return _within(claimed.value, other.value)
    # "31 %" of a value that is kept as 0.31, and a number whose unit the writer left out.
    if claimed.dimension == "share" and other.dimension == "":
        return _within(claimed.value, other.value)
    if claimed.dimension == "" and other.dimension in ("s", "share", "B", "Hz"):
        return any(
            _within(claimed.value * factor, other.value) for unit, factor in _UNITS.values() if unit == other.dimension
        )
    return False


def _within(claimed: float, value: float) -> bool:
    return abs(claimed - value) <= TOLERANCE * abs(value) + 1e-15
