"""The questions that people ask of a diagnosis, answered without a model: who, what, why, cost, what to do, and so on.

Pure: a question and what the tools have told in, lines out. It looks for words of the question and knows what each asks
for; what it does not recognise gets the whole verdict, and what nothing in the diagnosis speaks of is said to be not
known. It says nothing else of its own, so all of it is in the diagnosis, evidence ids included. English only.
Heuristic: it is wrong where a question uses these words in another sense, and then answers more, or something else,
than was asked, but nothing that is not so.

Used by `cli_chat` where no model is configured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eroica.assist.toolbox import Told

TOPICS = {
    "who": re.compile(r"\b(?:who|whom|whose|which (?:ranks?|hosts?|nodes?|gpus?|workers?)|culprits?|blame)\b", re.I),
    "what": re.compile(
        r"\b(?:where|functions?|lines?|code|file|what (?:is|was|happen\w*|function|line|makes))\b", re.I
    ),
    "why": re.compile(r"\b(?:why|causes?d?|reasons?|because)\b", re.I),
    "cost": re.compile(r"\b(?:cost|costs|expensive|how much|lose|losing|lost|gain|waste\w*|slower|slowdown)\b", re.I),
    "confidence": re.compile(
        r"\b(?:sure|certain|confiden\w+|evidence|prove|proof|know|trust|believe|reliable|ruled)\b", re.I
    ),
    "waiting": re.compile(r"\b(?:wait\w*|victims?|innocent|affected|consequences?)\b", re.I),
    "before": re.compile(r"\b(?:before|history|earlier|already|again|ever|recur\w*|incidents?|last time)\b", re.I),
    "what to do": re.compile(
        r"\bwhat\s+(?:should|shall|to|can|could|must|do)\b|\b(?:fix|mend|solve|repair|help|next|advice|remedy|improve)\b",
        re.I,
    ),
}
"""What a question asks for, in the order in which it is answered if it asks for several."""
_ORDINARY = frozenset(
    "about again all and any are been before can cause causes could did does doing done first for from get gets "
    "got had has have how into its job jobs long look main make makes making many more most much need now one "
    "only other our out over run running runs should show since slow slower slowest some stand stands still stop "
    "stopped stops such take takes tell than that the their them then there these they thing things think this "
    "those time train training was well were what when where which while who whole whom whose why will with work "
    "would you your".split()
)
"""Words that ask for nothing in particular."""
_ALL = ("who", "what", "why", "cost", "confidence", "what to do")
_ALL_TOPICS = re.compile("|".join(words.pattern for words in TOPICS.values()), re.I)
_WORD = re.compile(r"[^\W\d_]{3,}")
_WIDTH = 13


def topics(question: str) -> tuple[str, ...]:
    """What the question asks for; the whole verdict if that is not plain."""
    asked = [name for name, words in TOPICS.items() if words.search(question)]
    if asked == ["why"] or not asked:
        return _ALL
    return tuple(asked)


def answer(question: str, told: Sequence[Told]) -> str:
    """Lines for a person. `told`: get_diagnosis, explain_finding for its findings, and list_incidents."""
    diagnosis = next((one for one in told if one.tool == "get_diagnosis"), None)
    if diagnosis is None or diagnosis.is_error:
        return (diagnosis.text if diagnosis is not None else "nothing is known") + "\n"
    verdict = diagnosis.record
    wanted = topics(question)
    lines = []
    strange = _strange(question, told)
    if strange:
        lines += [
            f"not known: nothing that was told of this job speaks of {', '.join(strange)}; what was told is this",
            "",
        ]
    lines += [f"{str(verdict['kind']).upper().replace('_', ' ')}: {verdict['verdict']}", ""]
    if verdict["note"]:
        lines += [str(verdict["note"]), ""]
    findings = [one.record for one in told if one.tool == "explain_finding" and not one.is_error]
    for finding in findings:
        if len(findings) > 1:
            lines.append(f"{finding['finding']}:")
        for name in wanted:
            lines += _lines(name, list(_of_finding(name, finding)))
    for name in wanted:
        if name == "waiting":
            lines += _lines(name, list(verdict["consequences"]) or ["nobody, as far as was seen"])
        elif name == "confidence":
            lines += _lines("coverage", list(verdict["coverage"]))
        elif name == "before":
            lines += _lines("seen before", list(_before(verdict, told)))
        elif name == "cost" and verdict["iteration"]:
            lines += _lines("iteration", [str(verdict["iteration"])])
        elif not findings and name == "why":
            lines += _lines(name, ["no cause was found in what was seen"])
    lines += _lines("diagnosis", [f"{verdict['id']} of {verdict['job']}, {verdict['created']}"])
    return "\n".join(lines).rstrip() + "\n"


def _strange(question: str, told: Sequence[Told]) -> list[str]:
    """What the question is about, if no word of it stands in what was told, or asks for one of the topics."""
    asked = _ALL_TOPICS.sub(" ", question)
    words = dict.fromkeys(word.lower() for word in _WORD.findall(asked))
    about = [word for word in words if word not in _ORDINARY]
    known = {word.lower().rstrip("s") for one in told for word in _WORD.findall(json.dumps(one.record))}
    return [] if any(word.rstrip("s") in known for word in about) else about


def _of_finding(name: str, finding: Mapping[str, Any]) -> Iterator[str]:
    ids = ", ".join(str(row["id"]) for row in finding["evidence"])
    cited = f" ({ids})" if ids else ""
    if name == "who":
        yield f"{finding['who']}{cited}"
    elif name == "what":
        yield f"{finding['what']}{cited}"
    elif name == "why":
        yield f"{finding['cause_in_words']}"
        yield from (f"{row['id']}: {row['text']} [{row['source']}]" for row in finding["evidence"])
    elif name == "cost":
        yield f"{finding['cost']}{cited}"
    elif name == "confidence":
        yield str(finding["confidence"])
        yield from (f"ruled out: {text}" for text in finding["ruled_out"])
    elif name == "what to do":
        yield str(finding["advice"])


def _before(verdict: Mapping[str, Any], told: Sequence[Told]) -> Iterator[str]:
    rows = [row for one in told if one.tool == "list_incidents" for row in one.record.get("incidents", [])]
    own = next((row for row in rows if row["id"] == verdict["id"]), None)
    if own is None:
        yield "not known: the history has no such incident"
        return
    times = int(own["seen_before"])
    yield f"{times} time{'s' if times != 1 else ''}, last {own['last_seen']}" if times else "never, as far as is kept"
    if own["confirmed"]:
        yield f"people found: {own['confirmed']}"
    if times:
        alike = [row for row in rows if row["job"] == own["job"] and row["cause"] == own["cause"]]
        alike = [row for row in alike if row["created"] < own["created"]]
        yield from (f"{row['id']}  {row['created']}  {row['verdict']}" for row in alike[:5])


def _lines(name: str, texts: Sequence[str]) -> list[str]:
    """A heading column and its texts."""
    return [f"{(name if index == 0 else ''):<{_WIDTH}}{text}" for index, text in enumerate(texts)]
