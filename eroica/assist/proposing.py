"""A patch that a model proposes, where no codemod applies: a request, its edits, and what is refused of them.

The model gets the finding with its evidence and the files that the evidence names, fenced, bounded and without secrets,
and answers with search and replace in JSON. It decides nothing: an edit must fit exactly, in one of those files, stay
small, compile, and reach for nothing that the program did not reach for before (processes, sockets, code made of text);
else its writer is told in a sentence and may try again, a few times. What remains goes through the same trial as a
codemod's patch, by the user's own commands.

The list of what a patch may not reach for is a net, no proof: who runs --test or --verify runs what the model wrote, as
is said beside the patch. Needs the extra `chat`. Used by `fixing`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from eroica.assist import asking, grounding
from eroica.assist.change import Change, Lead
from eroica.assist.edits import MOST_LINES, apply, edits_of
from eroica.assist.endpoints import Endpoint, reached
from eroica.assist.reading import is_test
from eroica.errors import DataError, UserError
from eroica.findings import Diagnosis, Finding
from eroica.source import lines_of, parsed
from eroica.templates import render
from eroica.untrusted import clean, clean_source, fence
from eroica.wording import cause_name

MOST_ROUNDS = 3
"""A model that quotes wrongly mends it when told; one that fails three times goes round in circles."""
MOST_FILES = 4
"""That are shown, those that the finding itself names first."""
MOST_FILE_LINES = 400
"""Of one file: a training script. Of a longer one, the lines around what the evidence names."""
MOST_REASONS = 6
MOST_ANSWER = 200_000
"""Characters of an answer that are looked at."""
_REACHING = re.compile(
    r"(?:subprocess|socket|urllib|requests|httpx2?|aiohttp|ftplib|smtplib|telnetlib|ctypes|cffi|pickle|marshal|shelve|"
    r"importlib|runpy|code|codeop|pty|webbrowser|multiprocessing|shutil|"
    r"os\.(?:system|popen|exec\w*|spawn\w*|fork\w*|kill\w*|remove|unlink|rmdir|removedirs|rename|replace|chmod|chown|"
    r"environ|getenv|putenv)|"
    r"torch\.(?:hub|load|jit\.load|ops\.load_library|utils\.cpp_extension)|"
    r"exec|eval|compile|__import__|open|input|breakpoint|globals|builtins|getattr)(?:\.|$)"
)
"""Names that a patch may not bring into a file that did not use them."""
_LAST = re.compile(r".*\.(?:system|popen|Popen|spawn\w*|fork\w*|exec\w+|unlink|rmtree|check_output|urlopen|__\w+__)")
"""The same by the end of a name, whatever stands in front."""
_KNOWN = frozenset({"torch", "contextlib", "functools", "itertools", "gc", "math", "threading", "queue", "collections"})
"""Modules that a repair may import."""


@dataclass(frozen=True, slots=True)
class Proposed:
    """Edits that can be made."""

    changes: Sequence[Change]
    rounds: int


def propose(
    endpoint: Endpoint,
    diagnosis: Diagnosis,
    finding: Finding,
    lead: Lead,
    texts: Mapping[str, str],
    say: Callable[[str], None] = lambda text: None,
) -> Proposed:
    """Have a model propose edits. Raises UserError if none can be made, UnavailableError if it does not answer.

    `texts`: files of the repository; those that `lead` names may be changed, tests never.
    """
    named = [place.path for place in lead.places if place.path in texts and not is_test(place.path)]
    allowed = list(dict.fromkeys(path for path in named if path.endswith(".py")))[:MOST_FILES]
    if not allowed:
        raise UserError("the evidence names no Python file of this repository, so a model has nothing to change")
    from langchain_core.messages import AIMessage, HumanMessage

    model = endpoint.connect()
    messages: list[AIMessage | HumanMessage] = [HumanMessage(request(diagnosis, finding, lead, texts, allowed))]
    reasons: list[str] = []
    for number in range(1, MOST_ROUNDS + 1):
        say(f"asking {endpoint.what} for a change of {', '.join(allowed)}")
        with reached(endpoint):
            # Streamed, since the limit of time is for an answer to go on, and a local model may write for minutes.
            answer = ""
            for part in model.stream(messages):
                answer += str(part.text)
                if len(answer) >= MOST_ANSWER:
                    break
            answer = answer[:MOST_ANSWER]
        try:
            return Proposed(_changes(answer, diagnosis, finding, texts, allowed, endpoint), number)
        except DataError as error:
            reasons.append(str(error))
            say(f"its answer cannot be used: {error}")
        messages += [AIMessage(answer), HumanMessage(f"That cannot be used: {reasons[-1]}. Answer anew, in full.")]
    raise UserError(f"{endpoint.what} proposed no change that can be made: {'; '.join(reasons)}")


def request(
    diagnosis: Diagnosis, finding: Finding, lead: Lead, texts: Mapping[str, str], allowed: Sequence[str]
) -> str:
    """What the model is asked. Lines of source stand in a fence; what looks like a secret is taken out of them."""
    code = [_shown(path, texts[path], lead) for path in allowed]
    how = render("edits.md.j2", files=[clean(path, 300) for path in allowed], most_lines=MOST_LINES)
    return "\n\n".join([asking.fix(diagnosis, finding, style="edits", has_code=True), *code, how])


def _shown(path: str, text: str, lead: Lead) -> str:
    lines = lines_of(text)
    first = 0
    if len(lines) > MOST_FILE_LINES:
        at = next(place.line for place in lead.places if place.path == path)
        first = max(0, min(at - MOST_FILE_LINES // 2, len(lines) - MOST_FILE_LINES))
    shown = clean_source(lines, first + 1, min(first + MOST_FILE_LINES, len(lines)), 400)
    note = f", lines {first + 1} to {first + len(shown)} of {len(lines)}" if len(shown) < len(lines) else ""
    return fence([f"file: {clean(path, 300)}{note}", *shown], "CODE")


def _changes(
    answer: str,
    diagnosis: Diagnosis,
    finding: Finding,
    texts: Mapping[str, str],
    allowed: Sequence[str],
    endpoint: Endpoint,
) -> list[Change]:
    """Raises DataError, in a sentence for the model, if it cannot be used; UserError if the model sees no change."""
    data = _json(answer)
    told = data.get("because")
    reasons = [clean(one, 300) for one in told if isinstance(one, str)] if isinstance(told, list) else []
    if data.get("edits") == []:
        raise UserError(f"{endpoint.what} sees no change to make: {'; '.join(reasons[:3]) or 'it does not say why'}")
    shown = grounding.shown(diagnosis, finding.evidence)
    kept = [one for one in reasons if grounding.is_grounded(grounding.check(one, shown))]
    dropped = len(reasons) - len(kept)
    title = f"Change {allowed[0].rpartition('/')[2]} against {cause_name(finding.cause)}, as a model proposed"
    changes = apply(edits_of(data.get("edits")), texts, allowed, title, kept[:MOST_REASONS])
    for change in changes:
        _refuse_reaching(change, texts[change.path])
    cautions = [
        f"{clean(endpoint.model, 80)} wrote this patch, and nothing proves that it fits: read it before it is run"
    ]
    if dropped:
        cautions.append(f"{dropped} of its reasons cite no evidence that was shown, and are left out")
    return [Change(one.path, one.after, one.title, one.because, tuple(cautions)) for one in changes]


def _json(answer: str) -> Mapping[str, object]:
    """The one object in an answer, which some models put into a block of code."""
    block = re.search(r"```(?:json)?\s*\n(.*?)\n\s*```", answer, re.S)
    text = (block[1] if block is not None else answer).strip()
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise DataError("the answer is not one JSON object") from None
    if not isinstance(data, dict) or not {"edits"} <= set(data) <= {"because", "edits"}:
        raise DataError("the answer is not an object of because and edits")
    return data


def _refuse_reaching(change: Change, before: str) -> None:
    """Raises DataError if the file does not compile, or uses what it did not use and a repair does not need."""
    try:
        new, old = _names(change.after), _names(before)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise DataError(f"{clean(change.path)} does not compile with these edits ({clean(error, 120)})") from None
    brought = sorted(name for name in new - old if _REACHING.match(name) or _LAST.fullmatch(name))
    if brought:
        raise DataError(f"the edits bring in {', '.join(brought[:4])}, which no repair of this needs")
    imported = {name for name in _imports(change.after) - _imports(before) if name not in _KNOWN}
    if imported:
        raise DataError(f"the edits import {', '.join(sorted(imported)[:4])}; only torch and what is imported already")


def _imports(text: str) -> set[str]:
    """Top names of imported modules."""
    found: set[str] = set()
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Import):
            found |= {one.name.partition(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


def _names(text: str) -> set[str]:
    """Dotted names as they are written, and the modules that are imported."""
    found: set[str] = set()
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module or ''}.{one.name}" for one in node.names}
        elif isinstance(node, (ast.Attribute, ast.Name)):
            found.add(ast.unparse(node))
    return found
