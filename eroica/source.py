"""What the source of a stack's lines tells: the line itself, locks that are waited for and held, handlers around it.

Text in, names out. Python's locks keep no owner that can be seen from outside, but the lines of a stack do: a thread
inside of `with a:` or behind `a.acquire()` holds `a`, and one that stands on such a line waits for it. Used by
`stacks`, which reads the files.

Wrong where a lock is taken in a helper that has returned (nothing is found), or under another name in another place.
"""

from __future__ import annotations

import ast
import re
import threading
from dataclasses import dataclass

_LOCK = re.compile(r"(?i)lock|mutex|sem(aphore)?\b|cond(ition)?\b|guard|cv\b")
"""What a `with` must look like to be taken for one of a lock, unless the code assigns one to the name."""
_MADE = re.compile(r"\b(Lock|RLock|Semaphore|BoundedSemaphore|Condition|allocate_lock)\(")
_MOST_CHARS = 2_000_000
_PARSING = threading.Lock()


@dataclass(frozen=True, slots=True)
class Line:
    """What is known of one line of a file, as a stack stands on it."""

    text: str = ""
    block: str = ""
    """except, finally or ""."""
    waits_for: str = ""
    """The lock that is taken on this line."""
    holds: tuple[tuple[str, int], ...] = ()
    """Locks taken further up in this function and not yet given back: name, line."""


def lines_of(text: str) -> list[str]:
    """The lines of a program as Python numbers them: a form feed or a strange separator ends none, as it does for
    `splitlines`."""
    lines = re.split(r"\r\n|\r|\n", text)
    return lines if lines[-1] else lines[:-1]


def parsed(text: str) -> ast.Module:
    """The program; raises what `ast.parse` does. One at a time: early releases of 3.11 count the depth of all threads
    together, and raise SystemError where two of them parse by turns."""
    with _PARSING:
        return ast.parse(text)


class Source:
    """One file, parsed once."""

    def __init__(self, text: str) -> None:
        self._lines = lines_of(text)
        self._tree: ast.Module | None = None
        if len(text) <= _MOST_CHARS:
            try:
                self._tree = parsed(text)
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                self._tree = None
        self._locks = self._assigned() if self._tree is not None else frozenset[str]()

    def line(self, number: int) -> Line:
        """What line `number`, from 1, tells; empty if there is no such line."""
        if not 0 < number <= len(self._lines):
            return Line()
        text = self._lines[number - 1].strip()[:160]
        if self._tree is None:
            return Line(text)
        block = ""
        held: dict[str, int] = {}
        waits_for = ""
        body: list[ast.stmt] = self._tree.body
        while body:
            inner: list[ast.stmt] = []
            for statement in body:
                first, last = statement.lineno, statement.end_lineno or statement.lineno
                if last < number:
                    self._passed(statement, held)
                    continue
                if first > number:
                    break
                if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    held, block = {}, ""
                elif isinstance(statement, (ast.With, ast.AsyncWith)):
                    for item in statement.items:
                        name = self._lock_of(item.context_expr)
                        header = item.context_expr.end_lineno or item.context_expr.lineno
                        if name and item.context_expr.lineno <= number <= header:
                            waits_for = name
                            break
                        if name and header < number:
                            held[name] = item.context_expr.lineno
                elif isinstance(statement, ast.Try):
                    if any(_covers(handler.body, number) for handler in statement.handlers):
                        block = "except"
                        self._walk_passed(statement.body, held)
                    elif _covers(statement.finalbody, number):
                        block = "finally"
                        self._walk_passed([*statement.body, *statement.orelse], held)
                inner = _body_at(statement, number)
                if not inner:
                    waits_for = waits_for or self._acquired(statement, number)
                break
            body = inner
        if waits_for:
            # `for x in y: lock.acquire()` comes back to its own line; only what was taken elsewhere is held.
            held = {name: at for name, at in held.items() if at != number}
        return Line(text, block, waits_for, tuple(held.items()))

    def _assigned(self) -> frozenset[str]:
        """Names that are given a lock somewhere in this file."""
        found = set()
        for line in self._lines:
            if _MADE.search(line) and "=" in line:
                found |= set(re.findall(r"[A-Za-z_][\w.]*", line.partition("=")[0]))
        return frozenset(found)

    def _lock_of(self, expression: ast.expr) -> str:
        """Name of the lock that `with` takes; "" if it is none."""
        name = ast.unparse(expression)
        return name if name in self._locks or (_is_name(expression) and _LOCK.search(name)) else ""

    def _acquired(self, statement: ast.stmt, number: int) -> str:
        for node in ast.walk(statement):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "acquire"
                and node.lineno <= number <= (node.end_lineno or node.lineno)
            ):
                return ast.unparse(node.func.value)
        return ""

    def _passed(self, statement: ast.stmt, held: dict[str, int]) -> None:
        """Note what a statement that lies behind has taken for good, or given back: plain calls, not nested blocks."""
        if isinstance(statement, (ast.Expr, ast.Assign, ast.AnnAssign)):
            for node in ast.walk(statement):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    name = ast.unparse(node.func.value)
                    if node.func.attr == "acquire":
                        held[name] = node.lineno
                    elif node.func.attr == "release":
                        held.pop(name, None)
        elif isinstance(statement, ast.Try):
            self._walk_passed([*statement.body, *statement.orelse, *statement.finalbody], held)

    def _walk_passed(self, body: list[ast.stmt], held: dict[str, int]) -> None:
        for statement in body:
            self._passed(statement, held)


def _is_name(expression: ast.expr) -> bool:
    return isinstance(expression, (ast.Name, ast.Attribute, ast.Subscript))


def _covers(body: list[ast.stmt], number: int) -> bool:
    return bool(body) and body[0].lineno <= number <= (body[-1].end_lineno or body[-1].lineno)


def _body_at(statement: ast.stmt, number: int) -> list[ast.stmt]:
    """The list of statements inside of `statement` that line `number` lies in; empty if it is on its own line."""
    bodies: list[list[ast.stmt]] = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
    bodies += [handler.body for handler in getattr(statement, "handlers", [])]
    bodies += [case.body for case in getattr(statement, "cases", [])]
    return next((body for body in bodies if _covers(body, number)), [])
