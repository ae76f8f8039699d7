"""Strings that come from jobs: kernel names, paths, hosts, exception text, environment values. Data, never our text.

`clean` makes such a string safe to print (bounded, no control or invisible characters), `redact` takes secrets out,
`fence` encloses lines in a block that they cannot close. Escaping for one syntax (HTML, Markdown) is the business of
the renderer. Used by every report, and by all that talks to a model (assist, MCP).

It is not a filter for meaning: a kernel may be called "ignore previous instructions". What it may not do is look like
anything but a quoted name. Redaction knows common shapes of secrets and names that announce one; it cannot know a
bare password in the middle of a sentence, which is why environments are also collected by allow-list.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

REDACTED = "[redacted]"

_SCAN_CHARS = 8_000
"""No string is looked at beyond this; the longest real kernel names (templates) have some 4,000 characters."""

_INVISIBLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202f\u2060-\u206f\ufe00-\ufe0f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\ue000-\uf8ff\U000e0000-\U000e0fff\U000f0000-\U0010ffff]"
)
"""Controls, terminal escapes, bidirectional overrides, zero-width and "tag" characters (hidden text), surrogates."""

_SECRET_NAME = (
    r"(?:pass(?:wd|word|phrase)|pwd|secret|token|credentials?|auth(?:orization)?|cookie|"
    r"(?:api|access|secret|private|account|signing|encryption|ssh)[_\-. ]?key)"
)
_SECRET_KEY = re.compile(rf"(?i)(?:^|[_\-.\s]){_SECRET_NAME}(?:$|[_\-.\s](?:id|value|b64|base64)?$)")
_SECRETS = [
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S),
    re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?"),  # JSON web tokens
    re.compile(r"\b(?:sk|pk|rk)[-_][A-Za-z0-9_-]{16,}"),  # OpenAI, Anthropic, Stripe
    re.compile(r"\b(?:gh[opsur]_|github_pat_|glpat-|hf_|npm_|pypi-|dop_v1_|xox[abeprs]-|nvapi-)[\w-]{10,}"),
    re.compile(r"\b(?:AKIA|ASIA|ABIA)[A-Z0-9]{16}\b"),  # AWS key ids
    re.compile(r"\bAIza[\w-]{30,}"),  # Google
    re.compile(r"\bS[UOACNX][A-Z2-7]{56}\b"),  # NATS seeds
]
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}")
_USERINFO = re.compile(r"(\b[a-zA-Z][\w+.-]{0,20}://)[^\s/@:]{0,200}:[^\s/@]{1,500}@")
_ASSIGNED = re.compile(
    rf"(?i)((?:(?<![a-z0-9])|(?<=_)){_SECRET_NAME}[\"']?\s*(?:=|:(?!\d+\b)|\s(?=[\"']))\s*)(\"[^\"]*\"|'[^']*'|[^\s,;&)}}\]\"']+)"
)
_LITERAL = re.compile(
    rf"(?i)((?:(?<![a-z0-9])|(?<=_)){_SECRET_NAME}[\"']?\]?(?:\s*:\s*[a-z_][\w.|\[\], ]{{0,80}})?\s*[=:]\s*)"
    r"[frbu]{0,2}(?:\"[^\"]+\"|'[^']+')"
)
_KEY_BEGINS = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?!.*-----END)")
_KEY_GOES_ON = re.compile(r"[A-Za-z0-9+/=]*|(?:Proc-Type|DEK-Info):.{0,80}")
MOST_KEY_LINES = 120
"""Of a private key; one of 8,192 bits has some hundred."""
_COUNT = re.compile(r"[\"']?\d{1,7}[\"']?$")


def redact(text: str) -> str:
    """`text` without secrets: tokens and keys of known shapes, and values that a name announces (`password=...`)."""
    for pattern in _SECRETS:
        text = pattern.sub(REDACTED, text)
    text = _USERINFO.sub(rf"\1{REDACTED}@", text)
    text = _BEARER.sub(rf"\1 {REDACTED}", text)

    def value(match: re.Match[str]) -> str:
        # "eos_token=50256" and "token: 12" are numbers of a model, not secrets; a short PIN after "password" still is.
        is_count = "token" in match[1].lower() and _COUNT.match(match[2])
        return match[0] if is_count or REDACTED in match[0] else match[1] + REDACTED

    return _ASSIGNED.sub(value, text)


def is_secret_name(name: str) -> bool:
    """True if a variable of this name holds a secret by custom: WANDB_API_KEY, db.password, HF_TOKEN."""
    return bool(_SECRET_KEY.search(name))


def clean(value: object, limit: int = 200) -> str:
    """A string fit to show on one line: secrets out, control and invisible characters escaped, at most `limit` long.

    Long strings lose their middle, since both ends of a path or a kernel name tell most.
    """
    text = value if isinstance(value, str) else str(value)
    # Cut at the end, before redaction: a cut in the middle could leave the unrecognisable tail of a secret.
    return _clean(text[:_SCAN_CHARS] + ("..." if len(text) > _SCAN_CHARS else ""), limit)


def escape(text: str, limit: int = 2000) -> str:
    """A string fit for a terminal: control and invisible characters escaped, at most `limit` long, nothing taken out.

    For what the user typed or owns, such as a path in a message: without it the message is of no use.
    """
    return _shortened(_INVISIBLE.sub(_escaped, text[:_SCAN_CHARS]), limit)


@lru_cache(1024)  # a report shows the name of a function dozens of times
def _clean(text: str, limit: int) -> str:
    return _shortened(_INVISIBLE.sub(_escaped, redact(text)), limit)


def _shortened(text: str, limit: int) -> str:
    if len(text) > limit:
        head = max(1, (limit - 3) * 2 // 3)
        text = text[:head] + "..." + text[len(text) - max(0, limit - 3 - head) :]
    return text


def clean_code(line: str, limit: int = 240) -> str:
    """A line of source fit to show: as `clean`, but what a name like "token" is set to is taken out only where it is a
    quoted text, since `token = batch[0]` is what the reader came for; in a comment it is taken out as anywhere else.
    Tabs become blanks."""
    text = line[:_SCAN_CHARS].expandtabs(4)
    for pattern in _SECRETS:
        text = pattern.sub(REDACTED, text)
    text = _USERINFO.sub(rf"\1{REDACTED}@", text)
    text = _BEARER.sub(rf"\1 {REDACTED}", text)
    text = _LITERAL.sub(rf"\1{REDACTED}", text)
    code, mark, comment = text.partition("#")  # one in a text between quotes costs no more than a redaction too many
    text = code + mark + redact(comment)
    return _shortened(_INVISIBLE.sub(_escaped, text), limit)


def clean_source(lines: Sequence[str], first: int, last: int, limit: int = 240) -> list[str]:
    """Lines `first` to `last`, from 1, of a file, each as `clean_code`. Of a private key that begins in or above them
    no line is shown."""
    shown: list[str] = []
    left = 0
    for line in lines[max(0, first - 1 - MOST_KEY_LINES) : last]:
        bare = line[:_SCAN_CHARS].strip(" \t\"'+,()#").removesuffix("\\n")
        is_end = "-----END" in bare
        is_key = left > 0 and (is_end or _KEY_GOES_ON.fullmatch(bare) is not None)
        left = left - 1 if is_key and not is_end else 0
        if not is_key and _KEY_BEGINS.search(line[:_SCAN_CHARS]):
            left = MOST_KEY_LINES
        shown.append(REDACTED if is_key else clean_code(line, limit))
    return shown[max(0, len(shown) - max(0, last - first + 1)) :]


def clean_values(values: Mapping[str, object], limit: int = 200, most: int = 60) -> dict[str, str]:
    """A flat copy of a mapping for display: nested keys joined by dots, at most `most` entries, secrets out."""
    flat: dict[str, str] = {}

    def visit(prefix: str, item: object) -> None:
        if isinstance(item, Mapping) and item and prefix.count(".") < 4:
            for key, inner in item.items():
                visit(f"{prefix}.{key}", inner)
        elif len(flat) <= most:
            secret = is_secret_name(prefix) and not isinstance(item, (bool, int, float))
            flat[clean(prefix, 80)] = REDACTED if secret else clean(_value_text(item), limit)

    for key, item in values.items():
        visit(str(key), item)
    if len(flat) > most:
        flat.popitem()
        flat["..."] = "more entries are in the JSON"
    return flat


def fence(lines: Sequence[str], label: str) -> str:
    """`lines` between two marker lines that no line can imitate: the marker holds a digest that does not occur in them.

    Every line is also quoted with "| ", and line breaks within are escaped, so that data cannot begin a line.
    """
    body = "\n".join("| " + _INVISIBLE.sub(_escaped, line) for line in lines or [""])
    salt = 0
    while True:  # ends: a body of n characters holds fewer than n of the 2^48 digests
        mark = hashlib.sha256(f"{salt}{body}".encode("utf-8", "replace")).hexdigest()[:12]
        if mark not in body:
            return f"-----BEGIN {label} {mark}-----\n{body}\n-----END {label} {mark}-----"
        salt += 1


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    short = {9: "\\t", 10: "\\n", 13: "\\r"}.get(code)
    return short or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}")


def _value_text(item: object) -> str:
    if isinstance(item, float):
        return f"{item:.6g}"
    if isinstance(item, (list, tuple)):
        return ", ".join(_value_text(part) for part in item[:32]) + (", ..." if len(item) > 32 else "")
    return "not measured" if item is None else str(item)
