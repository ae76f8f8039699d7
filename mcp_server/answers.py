"""What tools answer: records with a schema, the same as text for people and models, and the cut to a budget of tokens.

An answer is a small record whose lists are ordered by what matters. `fitted` turns it into a tool's result: the record
as structured content and all of it again as text, since some clients show a model the one and some the other. Both
copies count, as they lie on the wire: clients refuse what is too long, and a hard refusal leaves a model blind. What
does not fit is cut from the ends of the lists, and the answer says what is missing and how to get it.

It knows no diagnosis (`reading` fills the records) and no transport. Every string that comes from a job was cleaned
before it got here; in the text it also stands behind "| " between two marker lines that it cannot imitate.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, TextContent
from pydantic import BaseModel, ConfigDict, Field

from eroica.untrusted import clean, fence

BYTES_PER_TOKEN = 3.5
"""An estimate on the safe side: English prose has some 4.5 bytes per token, paths and JSON some 3. Tokenizers differ,
and load from the network, so none is used."""
DEFAULT_TOKENS = 2_000
LEAST_TOKENS, MOST_TOKENS = 600, 20_000
"""Below the least an answer says nothing; clients refuse results above 25,000, by counts of their own."""
_ENVELOPE_BYTES = 200
"""What the protocol puts around a result, such as who we are."""
_SHORT = 40
"""Characters that any string may keep."""
_PLAIN_CALL = re.compile(r"\w+\((?:\w+=(?:'[\w.,:/@+-]{0,200}'|\d+)(?:, )?)*\)(?: in some seconds)?")
"""What a suggested call may look like: it stands outside of the fence, and ids and names in it come from a job."""
_SPARE_BYTES = 160
"""For what is said about the cut, which is known only afterwards."""

Tokens = Annotated[
    int,
    Field(
        ge=LEAST_TOKENS,
        le=MOST_TOKENS,
        description=f"length of the answer at most, in tokens (about {BYTES_PER_TOKEN:g} bytes each)",
    ),
]


def tokens_of(text: str) -> int:
    """How many tokens a text is taken for."""
    return int(len(text.encode("utf-8", "replace")) / BYTES_PER_TOKEN) + 1


class Row(BaseModel):
    """One entry of a list. Its first field names it."""

    model_config = ConfigDict(extra="forbid")

    def line(self) -> str:
        """All of it on one line: its name, then what else it has."""
        first, *others = type(self).model_fields
        parts = [_number(getattr(self, first))]
        for name in others:
            value, title = getattr(self, name), name.replace("_", " ")
            if value is None:
                parts.append(f"{title} not measured")
            elif value is True:
                parts.append(title)
            elif isinstance(value, list):
                parts += [f"{title} {', '.join(map(str, value))}"] if value else []
            elif value != "" and value is not False:
                parts.append(f"{title} {_number(value)}")
        return "; ".join(parts)


class Answer(BaseModel):
    """What every tool's answer has, beside what it is about."""

    model_config = ConfigDict(extra="forbid")

    cut_order: ClassVar[tuple[str, ...]] = ()
    """Names of its lists, first cut first. The last is the one that a cursor goes through."""

    own_words: ClassVar[tuple[str, ...]] = ()
    """Names of its fields that no job could have written; in the text they stand outside of the fence."""

    note: str = ""
    """What a reader must know before the rest; "" if nothing."""
    left_out: str = ""
    """What was cut, and how to get it; "" if nothing was."""
    cursor: str = ""
    """Give it back to go on where this answer ends; "" at the end."""
    next: list[str] = Field(default_factory=list)
    """Calls that may help next."""


@dataclass(frozen=True, slots=True)
class Page:
    """Where in a list an answer begins, and of which list: a cursor is good for the same question alone."""

    question: str
    """What was asked, as text: the tool and its arguments."""
    total: int
    first: int = 0

    @classmethod
    def open(cls, question: str, total: int, cursor: str) -> Page:
        """The page that `cursor` names, "" for the first. Raises ToolError if it belongs to another question."""
        if not cursor:
            return cls(question, total)
        number, _, mark = cursor.partition(".")
        if not number.isdecimal() or len(number) > 9 or mark != _mark(question):
            raise ToolError(f"cursor {clean(cursor, 40)!r} is not from this question; ask again without one")
        return cls(question, total, int(number))

    def after(self, count: int) -> str:
        """Cursor of the entry after the first `count` of this page; "" if that was the last one."""
        end = self.first + count
        return f"{end}.{_mark(self.question)}" if end < self.total else ""


def _mark(question: str) -> str:
    return hashlib.sha256(question.encode("utf-8", "replace")).hexdigest()[:8]


def fitted(answer: Answer, tokens: int = DEFAULT_TOKENS, page: Page | None = None) -> CallToolResult:
    """The answer as a tool's result, cut to `tokens`."""
    most = int(tokens * BYTES_PER_TOKEN) - _ENVELOPE_BYTES
    kept = answer.model_copy(update={"next": [call for call in answer.next if _PLAIN_CALL.fullmatch(call)][:4]})
    counts = {name: len(getattr(answer, name)) for name in answer.cut_order}
    for name in answer.cut_order:  # so that cutting does not reach the answer that was given
        setattr(kept, name, list(getattr(answer, name)))
    while True:
        _tell_cut(kept, counts, page)
        result = CallToolResult(
            content=[TextContent(type="text", text=as_text(kept))], structured_content=kept.model_dump(mode="json")
        )
        excess = size_of(result) - most
        if excess <= 0 or not (_cut(kept, excess) or _shorten(kept)):
            return result


def size_of(result: CallToolResult) -> int:
    """Bytes of a result on the wire."""
    return len(result.model_dump_json(by_alias=True, exclude_none=True).encode("utf-8", "replace"))


def _cut(answer: Answer, excess: int) -> bool:
    """Drop entries that make up at least `excess` bytes, as far as there are any; at least one. False: none is left."""
    has_cut = False
    wanted = excess + (_SPARE_BYTES if not answer.left_out else 0)
    for name in answer.cut_order:
        entries = getattr(answer, name)
        is_last = name == answer.cut_order[-1]
        while wanted > 0 and len(entries) > (1 if is_last else 0):
            entry = entries.pop()
            has_cut = True
            # Once in the record and once in the text, with little around it.
            wanted -= len(_json(entry)) + len(json.dumps(_line(entry))) + 2
    return has_cut


def _shorten(answer: Answer) -> bool:
    """Halve the longest of its strings, or of the lists of strings within its entries: names in scripts of three bytes
    a letter can fill a budget by themselves. False: all are short."""
    own = {*Answer.model_fields, *answer.own_words}
    holders: list[BaseModel] = [answer]
    for name in answer.cut_order:
        entries = getattr(answer, name)
        entries[:] = [entry.model_copy() if isinstance(entry, Row) else entry for entry in entries]
        holders += [entry for entry in entries if isinstance(entry, Row)]
    found = [
        (len(str(value)), index, name)
        for index, holder in enumerate(holders)
        for name, value in holder
        if _has_strings(value) and (holder is not answer or name not in own)
    ]
    length, index, name = max(found, default=(0, 0, ""))
    if length <= _SHORT:
        return False
    setattr(holders[index], name, _half(getattr(holders[index], name)))
    return True


def _has_strings(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))


def _half(value: str | list[str]) -> str | list[str]:
    if isinstance(value, str):
        return clean(value, len(value) // 2)
    return value[: len(value) // 2] if len(value) > 1 else [clean(item, len(item) // 2) for item in value]


def _tell_cut(answer: Answer, counts: dict[str, int], page: Page | None) -> None:
    gone = {name: counts[name] - len(getattr(answer, name)) for name in counts}
    told = [f"{number} {name.replace('_', ' ')}" for name, number in gone.items() if number]
    how = f"a larger tokens argument shows more, up to {MOST_TOKENS:,}"
    if page is not None:
        listed = len(getattr(answer, answer.cut_order[-1]))
        answer.cursor = page.after(listed)
        if answer.cursor:
            how = f"pass the cursor, or {how}"
            told = [text for text in told if not text.endswith(answer.cut_order[-1].replace("_", " "))]
            told.append(f"{page.total - page.first - listed} of {page.total} {answer.cut_order[-1].replace('_', ' ')}")
    answer.left_out = f"{', '.join(told)}; {how}" if told else ""


def _json(entry: object) -> str:
    return entry.model_dump_json() if isinstance(entry, Row) else json.dumps(entry)


def as_text(answer: Answer) -> str:
    """All of an answer as text: its data inside of a fence, our own words after it."""
    lines = [answer.note] if answer.note else []
    lines.append(fence(list(_data_lines(answer)), "DATA"))
    for name in answer.own_words:
        lines += getattr(answer, name)
    if answer.left_out:
        lines.append(f"left out: {answer.left_out}")
    if answer.cursor:
        lines.append(f"cursor: {answer.cursor}")
    if answer.next:
        lines.append("next: " + "; ".join(answer.next))
    return "\n".join(lines)


def _data_lines(answer: Answer) -> Iterator[str]:
    own = {*Answer.model_fields, *answer.own_words}
    for name in type(answer).model_fields:
        if name in own:
            continue
        value = getattr(answer, name)
        title = name.replace("_", " ")
        if isinstance(value, list):
            if value:
                yield f"{title}:"
            yield from (f"  {_line(entry)}" for entry in value)
        elif value not in ("", None):
            yield f"{title}: {_number(value)}"
        elif value is None:
            yield f"{title}: not measured"


def _line(entry: object) -> str:
    return entry.line() if isinstance(entry, Row) else str(entry)


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
